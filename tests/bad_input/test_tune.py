"""What `tune` refuses, and `train --tuned`: before any trial, and nothing left or changed."""

from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pandas as pd
import pytest

from merlin_cowclip.workflows.data.adopt import adopt
from merlin_cowclip.workflows.data.datasets import DatasetSpec
from merlin_cowclip.workflows.data.etl import prepare
from merlin_cowclip.workflows.data.prepared import PreparedData
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.manifest import entry_of
from merlin_cowclip.workflows.quiet import quiet_imports
from merlin_cowclip.workflows.study import tune as tuning
from merlin_cowclip.workflows.study.configuration import TuneConfig
from merlin_cowclip.workflows.study.trials import Epoch
from merlin_cowclip.workflows.study.tune import tune
from merlin_cowclip.workflows.study.tuned import Tuned
from merlin_cowclip.workflows.training.reproducibility import in_precision
from tests.bad_input.conftest import TOY, toy_log
from tests.bad_input.contract import command, refused

with quiet_imports():
    import nvtabular as nvt
    from merlin.io import Dataset
    from nvtabular import ops

    from merlin_cowclip.plugins._stack import tf

OPTIONS = [
    ("--trials 0", ["trials must be a whole number of at least 1", "0"]),
    ("--trials 2", ["trials must be at least 6, what the scaling rules predict", "trials=2"]),
    ("--seeds 0", ["seeds must be a whole number of at least 1", "0"]),
    ("--budget 0", ["budget must be positive minutes", "0.0", "Correct it"]),
    ("--budget nan", ["budget must be positive minutes", "nan"]),
    ("--epochs 0", ["epochs must be a positive whole number", "=0"]),
    ("--seed -1", ["seed must be a whole number from 0 to 4294967295"]),
    ("--held-out 0", ["held_out must be a share between 0 and 1", "=0.0"]),
    ("--held-out 1", ["held_out must be a share between 0 and 1", "=1.0"]),
    ("--held-out nan", ["held_out must be a share between 0 and 1", "nan"]),
    ("--held-out 1e-3", ["held_out must leave rows", "0 of 140 rows", "another share"]),
    ("--held-out 0.008", ["held-out rows must have labels of 0 and of 1", "in 1 of 140"]),
    (
        "--held-out 0.9",
        ["must not exceed the rows that are left", "64, 14 of 140", "hold out less"],
    ),
    ("--batch-size 0", ["batch_size must be a positive whole number of samples"]),
    ("--batch-size 141", ["must not exceed the training rows", "141, 140 rows"]),
    ("--batch-size 127", ["must not exceed the rows that are left", "127, 126 of 140"]),
    ("--model ffm", ["model must be one of lr, fm", "'ffm'"]),
    ("--model fm --mlp 8", ["--mlp belongs to wide_and_deep", "model='fm'"]),
    ("--model fm --mlp 0", ["mlp must be at least one positive whole number"]),
    ("--cross-layers 2", ["cross_layers belongs to dcn, dcn_v2", "model='deepfm'"]),
    ("--combiner tags=sum", ["combiner must name each list column: genres", "tags"]),
    ("--combiner genres=sum,mean", ["--combiner must be FIELD=VALUE"]),
    ("--embedding-dim 1000000000", ["must fit into the machine's memory"]),
    ("--dense-lr 0", ["dense_lr must be a positive number", "=0.0"]),
    ("--l2=-1", ["l2 must be a number that is not negative"]),
    ("--base-batch-size 0", ["batch_size must be a positive number"]),
    ("--base nowhere", ["a tune must be a folder", "nowhere", "merlin-cowclip tune"]),
    ("--base nowhere --l2 1e-5", ["--base excludes --l2", "Leave one out"]),
    ("--rule sqrt", ["unrecognized arguments: --rule sqrt"]),
    ("--trials many", ["--trials: invalid int value: 'many'"]),
]


@pytest.mark.parametrize(("options", "words"), [pytest.param(*c, id=c[0]) for c in OPTIONS])
def test_options(toy_data, tmp_path, options, words):
    default = [] if options.startswith("--batch-size") else ["--batch-size", "64"]
    argv = ["tune", toy_data, "--out", tmp_path / "tune", "--quiet", *default, *options.split(" ")]
    refused(argv, words, folder=tmp_path)


def test_what_must_be_named(toy_data, tmp_path):
    refused(["tune", toy_data], ["required: --out"], folder=tmp_path)
    words = ["tune needs --batch-size", "Name it"]
    refused(["tune", toy_data, "--out", tmp_path / "tune"], words, folder=tmp_path)
    argv = ["tune", tmp_path / "nowhere", "--out", tmp_path / "tune", "--batch-size", "64"]
    refused(argv, ["prepared data must be a folder", "nowhere"], folder=tmp_path)


def test_places(toy_data, toy_run, tmp_path):
    argv = ["tune", toy_data, "--quiet", "--batch-size", "64", "--out"]
    (tmp_path / "empty").mkdir()
    refused([*argv, tmp_path / "empty"], ["output folder must not exist"], folder=tmp_path)
    (tmp_path / "file").touch()
    refused([*argv, tmp_path / "file"], ["a tune must be a folder"], folder=tmp_path)
    refused([*argv, tmp_path / "file/tune"], ["output folder must be in a folder"], folder=tmp_path)
    refused([*argv, tmp_path / ("x" * 300)], ["output folder must be in a"], folder=tmp_path)
    refused([*argv, toy_run], ["a tune must hold tune.json"], folder=toy_run)


@pytest.fixture
def trials(monkeypatch):
    """Without networks."""

    def epochs_of(rows, config, stopping, advance=lambda: None):
        yield Epoch(0.5 + config.hyperparameters.dense_lr, 0.5, 1.0, 0.5, 1.0)

    monkeypatch.setattr(tuning, "epochs_of", epochs_of)
    monkeypatch.setattr("merlin_cowclip.workflows.study.repeats.epochs_of", epochs_of)


@pytest.fixture
def tuned(toy_data, tmp_path, trials):
    """A tune that has ended; its networks were none."""
    out = tmp_path / "tune"
    options = ["--batch-size", "64", "--epochs", "1", "--trials", "6", "--seeds", "1", "--quiet"]
    done = command(["tune", toy_data, "--out", out, *options])
    assert done.code == 0, done.err
    assert "best found" in done.out
    assert done.out.endswith(f"\nmerlin-cowclip train {toy_data} --tuned {out} --out RUN\n")
    return out


def test_a_tune_of_something_else(toy_data, tuned, tmp_path):
    log = toy_log(tmp_path / "log.csv", seed=1)
    other = prepare(TOY, [log], tmp_path / "other", progress=False)
    argv = ["tune", other.path, "--out", tuned, "--quiet"]
    words = ["a tune must go on with its own data", toy_data, "Received", other.path, "other rows"]
    refused(argv, words, folder=tmp_path)
    argv = ["tune", toy_data, "--out", tuned, "--quiet"]
    words = ["a tune must go on with its own options, epochs=1", "epochs=2", "Leave it out"]
    refused([*argv, "--epochs", "2"], words, folder=tmp_path)
    words = ["with its own options, batch_size=64", "batch_size=32"]
    refused([*argv, "--batch-size", "32"], words, folder=tmp_path)
    words = ["with its own options, model='deepfm'", "model='dcn'"]
    refused([*argv, "--model", "dcn"], words, folder=tmp_path)


def test_a_base_of_another_network(toy_data, tuned, tmp_path):
    argv = ["tune", toy_data, "--out", tmp_path / "new", "--batch-size", "64", "--base", tuned]
    words = ["must be of the same network", "model='deepfm', tuned at 64", "model='dcn'"]
    refused([*argv, "--model", "dcn"], words, folder=tmp_path)
    refused([*argv, "--mlp", "8"], ["of the same network", "mlp=[8]"], folder=tmp_path)


@pytest.mark.filterwarnings("ignore:Initializing an NVTabular Dataset in CPU mode")
def test_a_tune_of_another_label_of_the_same_parquet(tmp_path, trials):
    """Adopted twice it is the same rows, whose other clicks were not tuned on."""
    random = np.random.default_rng(0)
    names = ("click", "bought")
    log = pd.DataFrame({name: random.integers(0, 2, 300) for name in names})
    log.assign(user=random.integers(0, 9, 300)).to_parquet(tmp_path / "raw.parquet", index=False)
    users = ["user"] >> ops.Categorify(out_path=str(tmp_path / "fitted"))
    workflow = nvt.Workflow(users + "click" + "bought")
    raw = Dataset(str(tmp_path / "raw.parquet"), engine="parquet")
    workflow.fit_transform(raw).to_parquet(str(tmp_path / "train"))
    workflow.save(str(tmp_path / "workflow"))
    places = [tmp_path / "train"], tmp_path / "workflow"
    click, bought = (adopt(*places, name, tmp_path / name, progress=False) for name in names)
    options = ["--batch-size", "64", "--epochs", "1", "--trials", "6", "--seeds", "1", "--quiet"]
    argv = ["--out", tmp_path / "tune", *options]
    done = command(["tune", click.path, *argv])
    assert done.code == 0, done.err
    words = ["with its own data", click.path, bought.path, "label 'bought' instead of 'click'"]
    refused(["tune", bought.path, *argv], words, folder=tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("tune.json", "{", ["tune.json must be readable JSON", "Tune again"]),
        ("tune.json", "[]", ["tune.json must be readable JSON", "no values by name"]),
        ("tune.json", '{"format": 7}', ["a tune must be of format 2", "7"]),
        ("tune.json", None, ["a tune must hold tune.json", "no tune of ours"]),
        ("study.db", None, ["a tune must hold its trials", "study.db, which is gone"]),
        ("study.db", "x" * 2000, ["a tune must hold its trials", "not a database"]),
        ("rows/prepare.json", None, ["prepared data must hold prepare.json"]),
    ],
)
def test_damaged_tunes(toy_data, tuned, tmp_path, file, content, words):
    if content is None:
        (tuned / file).unlink()
    else:
        (tuned / file).write_text(content)
    refused(["tune", toy_data, "--out", tuned, "--quiet"], words, folder=tmp_path)


def test_an_earlier_versions_tune_is_read_but_does_not_go_on(toy_data, tuned, tmp_path):
    record = json.loads((tuned / "tune.json").read_text())
    (tuned / "tune.json").write_text(json.dumps({**record, "format": 1}))
    words = ["must be of format 2 to go on", "Received: 1", "another folder"]
    refused(["tune", toy_data, "--out", tuned, "--quiet"], words, folder=tmp_path)
    assert Tuned.open(tuned).train_config().batch_size == 64


def test_a_budget_too_small(toy_data, tmp_path, monkeypatch):
    def epochs_of(rows, config, stopping, advance):
        while True:
            advance()
        yield

    monkeypatch.setattr(tuning, "epochs_of", epochs_of)
    argv = ["tune", toy_data, "--out", tmp_path / "tune", "--batch-size", "64", "--quiet"]
    words = ["budget must suffice for an epoch of the first trial", "0.01 minutes", "Give it more"]
    refused([*argv, "--budget", "0.01"], words, folder=tmp_path)


def test_a_base_that_says_less(toy_data, trials, tmp_path):
    """Of a script's: what the first one said is not taken over."""
    data, base = PreparedData.open(toy_data), {"dense_lr": 1e-3, "l2": 1e-4}
    config = TuneConfig(64, base=base, epochs=1)
    tune(data, config, tmp_path / "tune", trials=6, seeds=1, progress=False)
    less = dataclasses.replace(config, base={"dense_lr": 1e-3})
    with pytest.raises(UserError, match=r"its own options, l2=0.0001. Received: l2=None for"):
        tune(data, less, tmp_path / "tune", trials=6, seeds=1, progress=False)


def test_the_precision_of_a_tune_or_a_run_goes_with_its_values(
    toy_data, toy_run, tuned, tmp_path, monkeypatch
):
    seen = []

    def train(*_, **__):
        seen.append(tf.keras.mixed_precision.global_policy().name)
        raise UserError("seen")

    monkeypatch.setattr("merlin_cowclip.workflows.training.train.train", train)
    argv = ["train", toy_data, "--out", tmp_path / "run", "--quiet"]
    for path, option in ((tuned / "tune.json", "--tuned"), (toy_run / "config.json", "--config")):
        like = shutil.copytree(path.parent, tmp_path / option.strip("-"))
        for precision in ("mixed_float16", "float32"):
            record = {**json.loads(path.read_text()), "precision": precision}
            (like / path.name).write_text(json.dumps(record))
            if option == "--config":
                result = json.loads((like / "result.json").read_text())
                result["manifest"][path.name] = entry_of(like / path.name)
                (like / "result.json").write_text(json.dumps(result))
            refused([*argv, option, like], ["seen"], folder=tmp_path)
            assert seen.pop() == precision
    assert tf.keras.mixed_precision.global_policy().name == "float32"


def test_a_tune_in_another_precision(toy_data, tuned, tmp_path):
    """Of a script's: its trials and these would be measured against each other."""
    with in_precision("mixed_float16"):
        words = ["in its own precision, float32", "mixed_float16", "or tune into another folder"]
        refused(["tune", toy_data, "--out", tuned, "--quiet"], words, folder=tmp_path)


# train --tuned


def test_train_tuned(toy_data, tuned, tmp_path):
    argv = ["train", toy_data, "--out", tmp_path / "run", "--tuned"]
    (tmp_path / "c.json").write_text("{}")
    words = ["--tuned excludes --config", "Leave one out"]
    refused([*argv, tuned, "--config", tmp_path / "c.json"], words, folder=tmp_path)
    refused([*argv, tmp_path / "nowhere"], ["a tune must be a folder"], folder=tmp_path)
    as_config = ["train", toy_data, "--out", tmp_path / "run", "--config", tuned]
    refused(as_config, ["what a tune found", "Give it to --tuned"], folder=tmp_path)
    words = ["--config must be a file that can be read"]
    refused([*as_config[:-1], "n" * 300], words, folder=tmp_path)
    words = ["of batch size 64, from which a --rule scales them", "--batch-size 128", "Name it"]
    refused([*argv, tuned, "--batch-size", "128"], words, folder=tmp_path)
    words = ["tuned at batch size 64, which is their base", "--base-batch-size 32", "Leave it out"]
    for more in ([], ["--rule", "cowclip", "--batch-size", "128"]):
        refused([*argv, tuned, "--base-batch-size", "32", *more], words, folder=tmp_path)
    refused([*argv, tuned, "--epochs", "0"], ["epochs must be a positive"], folder=tmp_path)
    words = ["--resume goes with DATA", "--tuned"]
    refused(["train", "--resume", tmp_path, "--tuned", tuned], words, folder=tmp_path)


@pytest.mark.parametrize("option", ["train --tuned", "tune --batch-size 64 --base"])
def test_tuned_on_other_columns(tuned, tmp_path, option):
    log = toy_log(tmp_path / "log.csv")
    spec = DatasetSpec(name="toy", label="y", categorical=("user",), split=TOY.split)
    log.write_text("\n".join(",".join(x.split(",")[:2]) for x in log.read_text().split()) + "\n")
    other = prepare(spec, [log], tmp_path / "other", progress=False)
    name, *options = option.split()
    argv = [name, other.path, "--out", tmp_path / "run", *options, tuned]
    words = ["the data must have the columns that were tuned on", "categorical", "Tune on this"]
    refused(argv, words, folder=tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        (
            "result.json",
            None,
            ["a tune must hold result.json", "did not end", "merlin-cowclip tune"],
        ),
        ("tuned.json", None, ["a tune must hold tuned.json"]),
        ("tuned.json", "{", ["tuned.json must be readable JSON"]),
        ("tuned.json", json.dumps({"modle": 1}), ["a configuration has the keys model", "'modle'"]),
    ],
)
def test_train_damaged_tunes(toy_data, tuned, tmp_path, file, content, words):
    if content is None:
        (tuned / file).unlink()
    else:
        (tuned / file).write_text(content)
    argv = ["train", toy_data, "--out", tmp_path / "run", "--tuned", tuned]
    refused(argv, words, folder=tmp_path)


def test_a_tune_whose_record_has_an_odd_key(toy_data, tuned):
    """As a later version's, or one written by hand."""
    record = json.loads((tuned / "tune.json").read_text())
    record["config"]["seeed"] = 7
    (tuned / "tune.json").write_text(json.dumps(record))
    words = ["what a tune searches has the keys batch_size", "'seeed'", "take it out"]
    refused(["tune", toy_data, "--out", tuned, "--trials", "7"], words, folder=tuned)


def test_a_tune_that_was_moved_goes_on(toy_data, tuned, tmp_path):
    moved = shutil.move(tuned, tmp_path / "a place {with} ?#% signs")
    done = command(["tune", toy_data, "--out", moved, "--trials", "7", "--seeds", "1", "--quiet"])
    assert done.code == 0, done.err
    assert len(json.loads((moved / "result.json").read_text())["trials"]) == 7
