"""The command line: one pass through its commands, and its own errors."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from sklearn.metrics import roc_auc_score

from merlin_cowclip.workflows.commands.main import main
from merlin_cowclip.workflows.commands.options import print_json
from merlin_cowclip.workflows.data.spec import CRITEO
from merlin_cowclip.workflows.data.synthetic import write_synthetic
from tests.refused import Done, command

CHATTER = ("oneDNN", "torch", "triton", "WARNING", "Warning", "absl", "TensorRT", "INFO", "DEBUG")
# Criteo's format with fewer fields.
FEW = f"""
name = "few"
label = "label"
categorical = ["C1", "C2", "C3"]
continuous = ["I1", "I2"]
header = false
separator = "\\t"
columns = {json.dumps(CRITEO.columns)}
"""
TRAIN = ["--batch-size", "512", "--base-batch-size", "128", "--epochs", "2", "--mlp", "16"]
TRAIN += ["--rule", "cowclip", "--embedding-dim", "40"]  # √(40/10) = 2 times the paper's


def call(*arguments: str) -> Done:
    """Run a command in this process and in the current folder."""
    return command(arguments)


def installed(*arguments: str) -> Done:
    """Run the installed command in the current folder."""
    program = Path(sys.executable).with_name("merlin-cowclip")
    ended = subprocess.run([program, *arguments], capture_output=True, text=True)
    return Done(ended.returncode, ended.stdout, ended.stderr)


def session(home: Path, run, *options: str) -> dict:
    """The main commands on synthetic data."""
    (home / "few.toml").write_text(FEW)
    write_synthetic("criteo", home / "train.txt.gz", rows=3_000, seed=1, cardinality=200)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        return {
            "prepare": run("prepare", "few.toml", "train.txt.gz", "--out", "data"),
            "train": run("train", "data", "--out", "run", *TRAIN, *options),
            "evaluate": run("evaluate", "run"),
            "predict": run("predict", "run", "train.txt.gz", "--out", "scores.parquet"),
            "evaluate raw": run("evaluate", "run", "train.txt.gz", "--quiet"),
            "report": run("report", "run", "--out", "page.html"),
        }


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    home = tmp_path_factory.mktemp("session")
    return home, session(home, call, "--no-saved-model")


def noise(done) -> list[str]:
    """What libraries say; the warning of few steps is ours."""
    said = (done.out + done.err).replace("Warning: at batch size", "")
    return [word for word in CHATTER if word in said]


def figures(line: str) -> tuple[str, str]:
    auc, loss = re.search(r"^(?:test )?AUC (0\.\d{6}), log loss (\d\.\d{6})", line).groups()
    return auc, loss


def test_the_commands_succeed(here):
    home, done = here
    for name, one in done.items():
        assert one.code == 0, (name, one.err)
        assert not noise(one)
    assert done["evaluate"].err == ""
    written = {"data", "page.html", "run", "scores.parquet"}
    assert written <= {path.name for path in home.iterdir()}
    assert (home / done["report"].out.splitlines()[-1]).is_file()


def test_the_printed_numbers(here):
    home, done = here
    assert done["prepare"].out.startswith("2,430 training rows (")
    assert done["prepare"].out.endswith(
        "embedding rows\nNext: merlin-cowclip train data --out run\n"
    )
    out = done["train"].out
    lines = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line}
    assert out.startswith("deepfm, rule cowclip, exact updates; hyperparameters of the rule; ")
    assert "Warning: at batch size 512 an epoch has only 5 steps. With fewer than 30 a" in out
    assert re.search(r"2,430 rows, 5 steps per epoch, [\d,]+ parameters in embedding", out)
    number = r"\d\.\d{4}"
    assert re.search(rf"\[2/2\] loss {number} \| valid AUC {number}, log loss {number} \| ", out)
    assert lines["batch_size"] == ["128", "512", "x", "4"]
    assert lines["dense_lr"] == ["0.0008", "0.0016", "x", "2"]
    assert lines["l2"] == ["1e-05", "4e-05", "x", "4"]
    result = json.loads((home / "run" / "result.json").read_text())
    expected = f"{result['auc']:.6f}", f"{result['log_loss']:.6f}"
    assert figures(out.splitlines()[-1]) == expected
    assert out.splitlines()[-1].endswith(": run")
    (line,) = done["evaluate"].out.splitlines()
    assert line.endswith(", by the last checkpoint, epoch 2 of 2")
    assert figures(line) == expected
    assert "on 300 rows of " in line


def test_the_auc_is_scikit_learns(here):
    home, done = here
    scores = pd.read_parquet(home / "scores.parquet")
    assert len(scores) == 3_000
    auc = roc_auc_score(scores.label, scores.probability)
    assert figures(done["evaluate raw"].out)[0] == f"{auc:.6f}"


def test_json(here, tmp_path, capfd):
    """One document on stdout, and nothing else there, also of libraries."""
    (home, _), run = here, tmp_path / "run"

    def printed(*arguments) -> dict:
        capfd.readouterr()
        assert main([*map(str, arguments), "--json"]) == 0
        return json.loads(capfd.readouterr().out)

    small = ("--model", "lr", "--batch-size", 512, "--epochs", 1, "--no-saved-model")
    trained = printed("train", home / "data", "--out", run, *small)
    assert trained["run"] == str(run)
    result = json.loads((run / "result.json").read_text())
    quality = {name: result[name] for name in ("auc", "log_loss", "calibration")}
    assert trained.items() >= quality.items()
    where = {"run": str(run), "data": str(home / "data"), "rows": 300}
    assert printed("evaluate", run) == where | quality | {"checkpoint": "last", "step": 5}


def test_json_has_null_for_what_is_no_number(capsys):
    print_json({"a": [math.nan, -math.inf, None, 1.5]})
    assert capsys.readouterr().out == json.dumps({"a": [None] * 3 + [1.5]}, indent=2) + "\n"


@pytest.mark.extended
def test_the_installed_command_does_the_same(here, tmp_path):
    done = session(tmp_path, installed)
    for name, one in done.items():
        assert one.code == 0, (name, one.err)
        assert not noise(one)
    for name in ("prepare", "evaluate", "predict"):
        assert done[name].out.replace(str(tmp_path), str(here[0])) == here[1][name].out


@pytest.mark.extended
@pytest.mark.parametrize(
    ("dataset", "file", "least"),
    [("criteo", "criteo_train.txt.gz", 0.60), ("avazu", "avazu_train.csv.gz", 0.50)],
)
def test_real_rows(real_data, tmp_path, capsys, dataset, file, least):
    data, run = tmp_path / "data", tmp_path / "run"
    assert main(["prepare", dataset, str(real_data / file), "--out", str(data)]) == 0
    assert (
        main(["train", str(data), "--out", str(run), "--batch-size", "256", "--epochs", "3"]) == 0
    )
    result = json.loads((run / "result.json").read_text())
    assert result["auc"] > least
    if dataset == "criteo":
        assert result["parameters"]["network"] == 430_814
    assert figures(capsys.readouterr().out.splitlines()[-1])[0] == f"{result['auc']:.6f}"
