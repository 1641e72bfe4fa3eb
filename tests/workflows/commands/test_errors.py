"""Bad input of the commands: a sentence, exit code 2, nothing left (`refused`).

A case for each rule of the command line. Values of a configuration are tested in
test_configuration, raw logs and prepared folders in test_bad_logs.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from merlin_cowclip.workflows.commands.main import main
from merlin_cowclip.workflows.data.prepare.pipeline import prepare
from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.study.tuned import FORMAT_VERSION
from merlin_cowclip.workflows.training.configuration import TrainConfig
from merlin_cowclip.workflows.training.runs import columns_of, identity_of
from tests.logs import CLICKS, write_log
from tests.refused import command, refused


@pytest.fixture(scope="module")
def toy_data(tmp_path_factory) -> Path:
    """140 training and 60 test rows."""
    home = tmp_path_factory.mktemp("toy")
    return prepare(CLICKS, [write_log(home / "log.csv")], home / "data", progress=False).path


@pytest.fixture(scope="module")
def toy_run(toy_data) -> Path:
    """A run on it; logistic regression, which is saved fastest."""
    out = toy_data.parent / "run"
    options = ["--model", "lr", "--epochs", 1, "--batch-size", 64]
    done = command(["train", toy_data, "--out", out, "--saved-model", *options])
    assert done.code == 0, done.err
    return out


TRAIN = "train DATA --out OUT --quiet --batch-size 64"
TUNE = "tune DATA --out OUT --quiet --batch-size 64"
GRID = "[fixed]\nmodel = 'lr'\n[grid]\nbatch_size = [32, 64]\n"
REFUSED = {
    # Arguments that do not parse
    "": "Missing command. See … merlin-cowclip --help",
    "train DATA": "train needs --out",
    f"{TRAIN} --epochs ten": "'--epochs': 'ten' is not a valid integer",
    f"{TRAIN} --mlp 400;400": "'--mlp': must be whole numbers … '400;400'",
    f"{TRAIN} --combiner genres=sum,genres=mean": "with each field once … 'genres=sum,genres=mean'",
    "evaluate": "Missing argument 'RUN'",
    # prepare, frequencies
    "prepare criteo --out OUT": "prepare needs LOG, files or folders",
    "prepare LOG --grow --out OUT": "--grow needs a vocabulary … --vocabulary-from",
    "frequencies DATA --out EMPTY": "EMPTY",
    # train
    f"{TRAIN} --combiner tags=sum": "combiner must name each list column: genres … tags",
    f"{TRAIN} --batch-size 141": "must not exceed the training rows … 141, 140 rows … smaller",
    f"{TRAIN} --tables sharded": "needs several ranks … one process … horovodrun",
    "train DATA --out EMPTY": "output folder must not exist … EMPTY … Name another",
    "train DATA --out FILE/run": "output folder must be in a folder that can be written",
    "train NOWHERE --out OUT": "NOWHERE",
    f"{TRAIN} --config NOWHERE": "--config must be a JSON file or a run folder",
    f"{TRAIN} --config CONFIG": "'modle'",
    f"{TRAIN} --tuned NOWHERE": "NOWHERE … tune.json",
    "train --resume EMPTY": "EMPTY … config.json",
    "train --resume RUN --mlp 8": "goes with DATA, --epochs, --max-minutes, --log-to",
    # tune, sweep, report
    "tune DATA --out OUT": "tune needs --batch-size … Name it",
    f"{TUNE}": "has no validation part. Prepare it again with --valid 0.1",
    f"{TUNE} --budget nan": "budget must be positive minutes … nan",
    f"{TUNE} --base NOWHERE --l2 1": "--base excludes the other … Leave one out",
    "tune DATA --batch-size 64 --quiet --out RUN": "tune.json",
    "sweep DATA GRID --out EMPTY": "must be new … EMPTY is neither … Name another folder",
    "report NOWHERE": "NOWHERE",
    "report RUN --out FILE": "output file must not exist … FILE … Name another",
    # evaluate, predict, export
    "evaluate EMPTY": "a folder that train wrote",
    "evaluate RUN DATA --raw": "--raw needs raw logs, and this is prepared data",
    "predict RUN LOG --out LOG": "the output file must end in .parquet",
    "export RUN --out EMPTY": "output folder must not exist … EMPTY … Name another",
    "export RUN": "Missing option '--out'",
    **dict.fromkeys(  # no command writes to a URL
        (
            "prepare criteo LOG --out s3://b/out",
            "train DATA --batch-size 64 --out s3://b/out",
            "tune DATA --quiet --batch-size 64 --out s3://b/out",
            "predict RUN LOG --out s3://b/out.parquet",
            "export RUN --out s3://b/out",
        ),
        "must be a local path … s3:/b/out … Name a local one",
    ),
}


LATE = f"{TRAIN} --combiner tags=sum"
"""Refused after the hyperparameters are printed."""


def check(argv: list[Any], words: str, folder: Path, **options: Any) -> str:
    return refused(argv, words.split(" … "), folder=folder, **options)


@pytest.mark.parametrize("argv", REFUSED)
def test_refused(toy_data, toy_run, tmp_path, monkeypatch, argv):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "FILE").touch()
    (tmp_path / "GRID").write_text(GRID)
    (tmp_path / "CONFIG").write_text('{"modle": "lr"}')
    write_log(tmp_path / "LOG", rows=20)
    places = {"DATA": toy_data, "RUN": toy_run}
    words = [places.get(word, word) for word in argv.split()]
    check(words, REFUSED[argv], tmp_path, quiet=argv != LATE)


def test_tensorflow_is_not_imported_for_help_and_to_refuse(tmp_path):
    program = (
        "import sys\n"
        "from merlin_cowclip.workflows.commands.main import main\n"
        "for argv in sys.argv[1:]:\n"
        "    main(argv.split())\n"
        "    slow = {'tensorflow', 'merlin', 'nvtabular', 'sklearn'} & set(sys.modules)\n"
        "    assert not slow, (argv, slow)\n"
    )
    commands = ("train --help", "report GONE", "evaluate GONE", "prepare criteo GONE --out OUT")
    commands += ("train GONE --out OUT", "tune GONE --out OUT --batch-size 64")
    argv = [sys.executable, "-c", program, *commands]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())


# Internal errors


def test_an_internal_error_has_its_traceback(tmp_path, monkeypatch, capsys):
    def fail(path):
        raise RuntimeError("\x1b[31mred" + "x" * 9999) from KeyError("inner")

    monkeypatch.setattr(PreparedData, "open", fail)
    assert main(["train", "data", "--out", str(tmp_path / "run")]) == 1
    said = capsys.readouterr().err
    assert "Traceback (most recent call last)" in said
    assert "KeyError: 'inner'" in said
    last = said.splitlines()[-1]
    assert r"internal error (please report it): RuntimeError: \x1b[31mredx" in last
    assert len(last) < 1100
    assert not list(tmp_path.iterdir())


def test_what_ends_a_training(toy_data, tmp_path, monkeypatch):
    from merlin_cowclip.workflows.training import train as training
    from merlin_cowclip.workflows.training.evaluation import tf

    def end(config, loader, run, *more):
        (run / "half").write_text("a model")
        raise error

    monkeypatch.setattr(training, "_train", end)
    argv = ["train", toy_data, "--out", tmp_path / "run", "--batch-size", 64]
    error = tf.errors.UnknownError(None, None, "/run/variables.data; No space left on device")
    check(argv, "no disk space left for", tmp_path, quiet=False)
    error = tf.errors.ResourceExhaustedError(None, None, "OOM when allocating\nshape[9]")
    check(argv, "out of memory: OOM … smaller batch size", tmp_path, quiet=False)


# Runs: damaged, and data that is not theirs


@pytest.fixture
def run(toy_run, tmp_path) -> Path:
    return Path(shutil.copytree(toy_run, tmp_path / "run"))


def change_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


ITEMS = "workflow/categories/unique.item.parquet"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "unfinished": (lambda r: (r / "result.json").unlink(), "did not finish … --resume"),
    "no JSON": (lambda r: (r / "result.json").write_text("{"), "result.json"),
    "a bit": (lambda r: change_a_bit(r / ITEMS), f"every file as it was written … {ITEMS}"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_run(run, tmp_path, damage):
    hurt, words = DAMAGES[damage]
    hurt(run)
    check(["evaluate", run], words, tmp_path)


def test_data_that_moved_needs_naming_only(run, toy_data, tmp_path):
    data = shutil.copytree(toy_data, tmp_path / "data")
    result = json.loads((run / "result.json").read_text())
    result["config"]["data"] = "/moved"
    (run / "result.json").write_text(json.dumps(result))
    words = f"the data of a run must be where it was … merlin-cowclip evaluate {run} DATA"
    check(["evaluate", run], words, tmp_path)
    done = command(["evaluate", run, "--quiet", data])
    assert done.out.startswith(f"test AUC {result['auc']:.6f}"), done.err


def test_data_that_means_something_else(toy_run, tmp_path):
    log = pd.read_csv(write_log(tmp_path / "l.csv")).replace({"user": {"u1": "u111"}})
    log.to_csv(tmp_path / "l.csv", index=False)
    data = prepare(CLICKS, [tmp_path / "l.csv"], tmp_path / "d", progress=False)
    words = "mean something else … --vocabulary-from"
    check(["evaluate", toy_run, data.path], words, tmp_path)


def test_an_error_at_the_end_leaves_nothing(toy_run, tmp_path, monkeypatch):
    """What was written before is gone, the file's folders too."""
    from merlin_cowclip.workflows.training import prediction

    monkeypatch.setattr(prediction, "GROUP_ROWS", 10)
    log = write_log(tmp_path / "log.csv", rows=30_000)
    with log.open("a") as file:
        file.write("1,u,i,expensive,g1,0,0\n")
    argv = ["predict", toy_run, log, "--out", tmp_path / "new" / "scores.parquet"]
    check([*argv, "--batch-size", 64], "'expensive' … line 30002", tmp_path)


# export


def test_a_command_without_its_extra(toy_run, tmp_path, monkeypatch):
    for name in [*sys.modules]:
        if name.startswith(("merlin_cowclip.workflows.study.", "jinja2")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    argv = ["report", toy_run, "--out", tmp_path / "page.html"]
    check(argv, "jinja2 … pip install 'merlin-cowclip[workflows]'", tmp_path)


def test_export_of_a_changed_file(run, tmp_path):
    change_a_bit(run / "workflow/workflow.pkl")
    argv = ["export", run, "--out", tmp_path / "repository"]
    check(argv, "workflow.pkl has changed … Train again", tmp_path)


# The result of a tuning study


@pytest.fixture
def tuned(toy_data, tmp_path) -> Path:
    """A tuning study of that data at batch size 64, as far as it is read."""
    data, folder = PreparedData.open(toy_data), tmp_path / "tune"
    folder.mkdir()
    on = {"data": str(toy_data), "data_sha256": identity_of(data), "columns": columns_of(data)}
    for name, content in (
        ("tune.json", {"format": FORMAT_VERSION, "config": {}, **on}),
        ("tuned.json", TrainConfig(batch_size=64, rule="none", base_batch_size=64).to_dict()),
        ("result.json", {}),
    ):
        (folder / name).write_text(json.dumps(content))
    return folder


def test_what_was_tuned(toy_data, tuned, tmp_path):
    record = json.loads((tuned / "tune.json").read_text())
    argv = ["train", toy_data, "--out", tmp_path / "run", "--tuned", tuned]
    check([*argv, "--preset", "avazu"], "--tuned excludes --preset", tmp_path)
    words = "--tuned are for batch size 64 … --batch-size 128 without --rule … --rule sqrt"
    check([*argv, "--batch-size", 128], words, tmp_path)
    columns = {**record["columns"], "label": "z"}
    (tuned / "tune.json").write_text(json.dumps({**record, "columns": columns}))
    check(argv, "has label 'y', and … was tuned with 'z'", tmp_path)
    (tuned / "tune.json").write_text(json.dumps(record))
    (tuned / "result.json").unlink()
    check(argv, "tune did not end. Resume it: merlin-cowclip tune DATA", tmp_path)
