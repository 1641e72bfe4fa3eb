"""What the commands refuse: a sentence, exit code 2, nothing left (`refused`).

A case for each rule. The values of a configuration are tested one by one in test_configuration, and
raw logs and prepared folders in test_bad_logs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from merlin_cowclip.workflows.commands.main import main
from merlin_cowclip.workflows.data.prepare.pipeline import prepare
from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.data.spec import DatasetSpec
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.study.tuned import FORMAT_VERSION
from merlin_cowclip.workflows.training.configuration import TrainConfig
from merlin_cowclip.workflows.training.runs import columns_of, identity_of
from tests.refused import TOY, command, refused, toy_log


@pytest.fixture(scope="module")
def toy_data(tmp_path_factory) -> Path:
    """140 training and 60 test rows."""
    home = tmp_path_factory.mktemp("toy")
    return prepare(TOY, [toy_log(home / "log.csv")], home / "data", progress=False).path


@pytest.fixture(scope="module")
def toy_run(toy_data) -> Path:
    """A run on it; logistic regression, which is saved fastest."""
    out = toy_data.parent / "run"
    options = ["--model", "lr", "--epochs", 1, "--batch-size", 64]
    done = command(["train", toy_data, "--out", out, "--saved-model", *options])
    assert done.code == 0, done.err
    return out


TRAIN = "train DATA --out OUT --quiet --batch-size 64"
TUNE = "tune DATA --out OUT --quiet"
SWEEP = "sweep DATA GRID --out OUT"
SIZES = "batch-size DATA --out OUT --batch-sizes 32,"
GRID = "[fixed]\nmodel = 'lr'\n[grid]\nbatch_size = [32, 64]\n"
REFUSED = {
    # Arguments that do not parse
    "": "Missing command. See … merlin-cowclip --help",
    "train DATA": "train needs --out",
    f"{TRAIN} more": "more is not a folder that prepare or adopt wrote",
    f"{TRAIN} --epochs ten": "'--epochs': 'ten' is not a valid integer",
    f"{TRAIN} --mlp 400;400": "'--mlp': must be whole numbers … '400;400'",
    "evaluate": "Missing argument 'RUN'",
    "prepare criteo --out OUT": "prepare needs LOG, files or folders",
    "prepare criteo LOG": "Missing option '--out'",
    "prepare LOG --grow --out OUT": "--grow needs a vocabulary … --vocabulary-from",
    "adopt LOG --out OUT --workflow EMPTY": "Missing option '--label'",
    "tune DATA": "Missing option '--out'",
    "sweep DATA GRID": "Missing option '--out'",
    "predict RUN LOG": "Missing option '--out'",
    # frequencies
    "frequencies DATA --batch-sizes 9007199254740993": "from 1 to 9007199254740992",
    "frequencies DATA --out EMPTY": "must not exist … EMPTY",
    # train: the network, the batches, the end
    f"{TRAIN} --model ffm": "model must be one of lr, fm … 'ffm'",
    f"{TRAIN} --combiner genres=sum,genres=mean": "with each field once … 'genres=sum,genres=mean'",
    f"{TRAIN} --combiner tags=sum": "combiner must name each list column: genres … tags",
    f"{TRAIN} --batch-size 141": "must not exceed the training rows … 141, 140 rows … smaller",
    f"{TRAIN} --tables sharded": "needs several ranks … one process … horovodrun",
    f"{TRAIN} --batch-size 1KB": "or one of 1,024s as in 128K … '1KB'",
    f"{TRAIN} --checkpoint-every 10x": "or of minutes as in 10m … '10x'",
    f"{TRAIN} --max-minutes nan": "max_minutes must be positive … nan",
    # train: learning rates and clips
    f"{TRAIN} --dense-lr 1e400": "dense_lr must be a positive number … inf",
    f"{TRAIN} --dense-schedule cosine:to=low": "must be a name and numbers … to=low",
    f"{TRAIN} --clip-tables price": "clip_tables must name tables, fields … 'price'",
    # train: places, and runs to go on with
    "train DATA --out EMPTY": "output folder must not exist … EMPTY … Name another",
    "train DATA --out FILE/run": "output folder must be in a folder that can be written",
    "train DATA --quiet --out run[1]": "without [ and  … TensorFlow … run[1] … Choose another",
    "train NOWHERE --out OUT": "NOWHERE is not a folder that prepare or adopt wrote",
    "train RUN --out OUT": "not a folder that prepare or adopt wrote: cannot read prepare.json",
    f"{TRAIN} --config NOWHERE": "--config must be a JSON file or a run folder",
    f"{TRAIN} --config EMPTY": "a run to resume must have its configuration",
    f"{TRAIN} --tuned NOWHERE": "NOWHERE is not a folder that tune wrote: cannot read tune.json",
    "train --resume NOWHERE": "must have its configuration … NOWHERE",
    "train --resume EMPTY": "a run to resume must have its configuration … config.json",
    "train --resume RUN --mlp 8": "goes with DATA, --epochs, --max-minutes, --log-to",
    # tune
    "tune DATA --out OUT": "tune needs --batch-size … Name it",
    f"{TUNE} --batch-size 64 --trials 0": "trials must be … 0",
    f"{TUNE} --batch-size 64 --budget nan": "budget must be positive minutes … nan",
    f"{TUNE} --batch-size 64": "has no validation part. Prepare it again with --valid 0.1",
    f"{TUNE} --batch-size 64 --base NOWHERE": "NOWHERE is not a folder that tune wrote",
    f"{TUNE} --batch-size 64 --base NOWHERE --l2 1": "--base excludes the other … Leave one out",
    "tune DATA --batch-size 64 --quiet --out RUN": "not a folder that tune wrote",
    # sweep, batch-size, report
    "sweep DATA LOG --out OUT": "cannot read the grid LOG",
    "sweep DATA GRID --out EMPTY": "must be new … EMPTY is neither … Name another folder",
    f"{SIZES}64 --tuned NOWHERE": "NOWHERE is not a folder that tune wrote",
    f"{SIZES}64": "Missing option '--tuned'",
    "report NOWHERE": "no folder 'NOWHERE' … Name a sweep",
    "report RUN --out FILE": "output file must not exist … FILE … Name another",
    "report EMPTY": "EMPTY is not a folder that train wrote",
    # evaluate, predict, export
    "evaluate EMPTY": "EMPTY is not a folder that train wrote",
    "evaluate DATA RUN": "is not a folder that train wrote",
    "evaluate RUN NOWHERE": "no input file found … NOWHERE",
    "evaluate RUN DATA --raw": "--raw needs raw logs, and this is prepared data",
    "evaluate RUN LOG --batch-size 0": "batch size must be … 0",
    "predict RUN LOG --out LOG": "the output file must end in .parquet",
    "export RUN --out EMPTY": "output folder must not exist … EMPTY … Name another",
    "export RUN": "Missing option '--out'",
    **dict.fromkeys(  # no command writes to a URL
        (
            "prepare criteo LOG --out s3://b/out",
            "adopt LOG --workflow EMPTY --label y --out s3://b/out",
            "demo --out s3://b/out",
            "frequencies DATA --out s3://b/out",
            "train DATA --batch-size 64 --out s3://b/out",
            "tune DATA --quiet --batch-size 64 --out s3://b/out",
            "sweep DATA GRID --out s3://b/out",
            "report RUN --out s3://b/out",
            "predict RUN LOG --out s3://b/out.parquet",
            "export RUN --out s3://b/out",
        ),
        "must be a local path … s3:/b/out … Name a local one",
    ),
}


LATE = [f"{TRAIN} --{one}" for one in ("combiner tags=sum", "clip-tables price", "max-minutes nan")]
"""Refused after the hyperparameters are printed."""


def check(argv: list[Any], words: str, folder: Path, **options: Any) -> str:
    return refused(argv, words.split(" … "), folder=folder, **options)


@pytest.mark.parametrize("argv", REFUSED)
def test_refused(toy_data, toy_run, tmp_path, monkeypatch, argv):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "FILE").touch()
    (tmp_path / "GRID").write_text(GRID)
    toy_log(tmp_path / "LOG", rows=20)
    places = {"DATA": toy_data, "RUN": toy_run}
    found = [places.get(word, word) for word in argv.split()]
    check(found, REFUSED[argv], tmp_path, quiet=argv not in LATE)


def test_tensorflow_is_not_imported_to_refuse(toy_data, tmp_path):
    program = (
        "import json, sys\n"
        "from merlin_cowclip.workflows.commands.main import main\n"
        "for argv in json.loads(sys.argv[1]):\n"
        "    assert main(argv) == 2, argv\n"
        "    slow = {'tensorflow', 'merlin', 'nvtabular', 'sklearn'} & set(sys.modules)\n"
        "    assert not slow, (argv, slow)\n"
        "    assert 'GONE' not in argv or 'pandas' not in sys.modules, argv\n"
    )
    commands = [
        "train GONE --out OUT",
        "train --resume GONE",
        "tune GONE --out OUT --batch-size 64",
        "sweep GONE GRID --out OUT",
        "report GONE",
        "evaluate GONE",
        "predict GONE LOG --out OUT",
        "export GONE --out OUT",
        "prepare criteo nowhere --out OUT",
        "train DATA --out OUT --epochs 0",
        "train DATA --out DATA",
        "tune DATA --out OUT",
        "sweep DATA nowhere --out OUT",
        "report DATA",
        "evaluate DATA",
    ]
    places = {"DATA": str(toy_data), "OUT": str(tmp_path / "out")}
    commands = [[places.get(word, word) for word in argv.split()] for argv in commands]
    argv = [sys.executable, "-c", program, json.dumps(commands)]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == len(commands)
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
    assert last.startswith(
        r"merlin-cowclip train: internal error (please report it): RuntimeError: \x1b[31mredx"
    )
    assert len(last) < 1100
    assert not list(tmp_path.iterdir())


# train


CONFIGS = {
    '{"mlp": 400': "--config must be a JSON file or a run folder … c.json",
    "[]": "--config must be a JSON file or a run folder … c.json: … not a mapping",
    '{"modle": "lr"}': "a configuration has the keys model … 'modle' … Correct it",
}


@pytest.mark.parametrize("text", CONFIGS)
def test_configurations(toy_data, tmp_path, text):
    (tmp_path / "c.json").write_text(text)
    argv = ["train", toy_data, "--out", tmp_path / "run", "--config", tmp_path / "c.json"]
    check(argv, CONFIGS[text], tmp_path)


FULL = "/run/model/variables/variables.data; No space left on device"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (lambda _: OSError(28, "No space left on device"), "no disk space left for"),
        (lambda tf: tf.UnknownError(None, None, FULL), "no disk space left for"),
        (
            lambda tf: tf.ResourceExhaustedError(None, None, "OOM when allocating\nshape[9]"),
            "out of memory: OOM when allocating … smaller batch size",
        ),
        (lambda _: UserError("the loss must be finite"), "the loss must be finite"),
    ],
    ids=["disk", "TensorFlow's disk", "memory", "a rule"],
)
def test_what_ends_a_training(toy_data, tmp_path, monkeypatch, error, words):
    from merlin_cowclip.workflows.training import train as training
    from merlin_cowclip.workflows.training.evaluation import tf

    def end(config, loader, run, *more):
        (run / "half").write_text("a model")
        raise error(tf.errors)

    monkeypatch.setattr(training, "_train", end)
    argv = ["train", toy_data, "--out", tmp_path / "run", "--batch-size", 64]
    check(argv, words, tmp_path, quiet=False)


# Runs: damaged, and data that is not theirs


@pytest.fixture
def run(toy_run, tmp_path) -> Path:
    return Path(shutil.copytree(toy_run, tmp_path / "run"))


def result(change: Callable[[dict], Any]) -> Callable[[Path], None]:
    """The run's result changed."""

    def damage(run: Path) -> None:
        values = json.loads((run / "result.json").read_text())
        change(values)
        (run / "result.json").write_text(json.dumps(values))

    return damage


def changed(name: str) -> Callable[[Path], None]:
    """A bit of a file changed, in its middle."""

    def damage(run: Path) -> None:
        content = bytearray((run / name).read_bytes())
        content[len(content) // 2] ^= 1
        (run / name).write_bytes(content)

    return damage


KEPT, GRAPH = "a run must keep every file as it was written", "model/saved_model.pb"
ITEMS = "workflow/categories/unique.item.parquet"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "unfinished": (lambda r: (r / "result.json").unlink(), "did not finish … --resume"),
    "no JSON": (
        lambda r: (r / "result.json").write_text("{"),
        "cannot read result.json … or write it again",
    ),
    "to come": (result(lambda r: r.update(format=99)), "format 99 instead of 3. Write it again"),
    "no graph": (lambda r: (r / GRAPH).unlink(), f"{KEPT} … {GRAPH} cannot be read … Train again"),
    "half its weights": (
        lambda r: os.truncate(next(r.glob("checkpoints/step-*/state.data-*")), 100),
        "checkpoints/step-0000000003/state is damaged",
    ),
    "a failed run": (
        lambda r: (r / "result.json").rename(r / "failed.json").write_text('{"error": "no disk"}'),
        "run did not finish: no disk. Resume it: merlin-cowclip train --resume",
    ),
    "a bit": (changed(ITEMS), f"{KEPT} … {ITEMS} has changed"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_run(run, tmp_path, damage):
    hurt, words = DAMAGES[damage]
    hurt(run)
    check(["evaluate", run], words, tmp_path)


def test_data_that_moved_needs_naming_only(run, toy_data, tmp_path):
    data = shutil.copytree(toy_data, tmp_path / "data")
    result(lambda r: r["config"].update(data="/moved"))(run)
    words = f"the data of a run must be where it was … merlin-cowclip evaluate {run} DATA"
    check(["evaluate", run], words, tmp_path)
    done = command(["evaluate", run, "--quiet", data])
    assert done.code == 0, done.err
    assert done.out.startswith(
        f"test AUC {json.loads((run / 'result.json').read_text())['auc']:.6f}"
    )


@pytest.mark.extended
def test_its_own_data_split_anew(tmp_path):
    """What is a test row now was trained on; every id means the same."""
    log = tmp_path / "log.csv"
    log.write_text("y,user\n" + "0,0\n1,0\n" * 30 + "0,1\n1,1\n" * 20)
    spec = DatasetSpec(name="toy", label="y", categorical=("user",))
    first, anew = (
        prepare(spec, [log], tmp_path / str(seed), seed=seed, progress=False).path
        for seed in (0, 1)
    )
    run = tmp_path / "run"
    argv = ["train", first, "--out", run, "--model", "lr", "--epochs", 1, "--batch-size", 32]
    assert command([*argv, "--no-saved-model"]).code == 0
    shutil.rmtree(first)
    anew.rename(first)
    words = f"must be what it was when it began … it may have been trained … {run} {first}"
    check(["evaluate", run], words, tmp_path)


@pytest.mark.parametrize(
    ("change", "spec", "words"),
    [
        (lambda log: log.assign(user=range(200)), {}, "cardinalities of 'user': … instead of"),
        (
            lambda log: log.replace({"user": {1: 11}}),
            {},
            "unique. … mean something else",
        ),
        (lambda log: log, {"continuous": ()}, "continuous: [] instead of ['price'"),
        (
            lambda log: log.assign(price=log["price"] * 9),
            {},
            "ranges of 'price': [ … ] instead of [",
        ),
        (lambda log: log.rename(columns={"y": "b"}), {"label": "b"}, "label: 'b' instead of 'y'"),
    ],
    ids=["more ids", "other ids", "no numbers", "other numbers", "another label"],
)
def test_data_that_means_something_else(toy_run, tmp_path, change, spec, words):
    change(pd.read_csv(toy_log(tmp_path / "l.csv"))).to_csv(tmp_path / "l.csv", index=False)
    data = prepare(replace(TOY, **spec), [tmp_path / "l.csv"], tmp_path / "d", progress=False)
    words = f"the data must have the … ids of the run … {words} … --vocabulary-from"
    check(["evaluate", toy_run, data.path], words, tmp_path)


# Raw rows to score


def cell(row: int, column: str, value: Any) -> Callable[[pd.DataFrame], pd.DataFrame]:
    def change(log: pd.DataFrame) -> pd.DataFrame:
        log = log.astype({column: object})
        log.loc[row, column] = value
        return log

    return change


@pytest.mark.parametrize(
    ("how", "change", "words"),
    [
        ("predict", lambda log: log.drop(columns="user"), "log.csv has no column 'user'"),
        ("predict", cell(7, "price", "cheap"), "log.csv, line 9, column 'price': … 'cheap'"),
        ("evaluate", cell(0, "y", 2), "log.csv, line 2, column 'y': the label is '2'"),
        ("evaluate", lambda log: log[:0], "labels of 0 and of 1 … only 0, in 0 rows"),
        ("evaluate", lambda log: log.assign(y=1), "labels of 0 and of 1 … only 1, in 60 rows"),
        ("evaluate", lambda log: log.drop(columns="y"), "without label 'y' … predict"),
    ],
    ids=["no column", "no number", "label 2", "no row", "one label", "no label"],
)
def test_rows_to_score(toy_run, tmp_path, how, change, words):
    log = toy_log(tmp_path / "log.csv", rows=60)
    change(pd.read_csv(log)).to_csv(log, index=False)
    out = ["--out", tmp_path / "scores.parquet"] if how == "predict" else []
    check([how, toy_run, log, *out], words, tmp_path)


def test_an_error_at_the_end_leaves_nothing(toy_run, tmp_path, monkeypatch):
    """What was written before is gone, the file's folders too."""
    from merlin_cowclip.workflows.training import prediction

    monkeypatch.setattr(prediction, "GROUP_ROWS", 10)
    log = toy_log(tmp_path / "log.csv", rows=30_000)
    with log.open("a") as file:
        file.write("1,u,i,expensive,g1\n")
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
    changed("workflow/workflow.pkl")(run)
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
    both = [*argv, "--config", tuned / "tuned.json"]
    check(both, "--tuned excludes --config … Leave one out", tmp_path)
    words = "--tuned are for batch size 64 … --batch-size 128 without --rule … --rule sqrt"
    check([*argv, "--batch-size", 128], words, tmp_path)
    for change, words in (
        (
            {"columns": {**record["columns"], "label": "z"}},
            "has label 'y', and … was tuned with 'z'",
        ),
        ({"format": 99}, "tune.json has format 99"),
    ):
        (tuned / "tune.json").write_text(json.dumps({**record, **change}))
        check(argv, words, tmp_path)
    (tuned / "tune.json").write_text(json.dumps(record))
    check([*argv, "--preset", "avazu"], "--tuned excludes --preset", tmp_path)
    (tuned / "result.json").unlink()
    check(argv, "tune did not end. Resume it: merlin-cowclip tune DATA", tmp_path)
