"""What `train` refuses: options, configurations, places, data; before TensorFlow does any work."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import shutil
from types import SimpleNamespace

import pytest

from merlin_cowclip.workflows.commands.main import main
from merlin_cowclip.workflows.data.datasets import DatasetSpec
from merlin_cowclip.workflows.data.etl import prepare
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.training import train as training
from merlin_cowclip.workflows.training.evaluation import tf
from tests.bad_input.conftest import TOY, toy_log
from tests.bad_input.contract import command, refused

HUGE = "9" * 4000
OPTIONS = [
    # The network
    ("--model ffm", ["model must be one of lr, fm", "'ffm'"]),
    ("--model=", ["model must be one of", "''"]),
    ("--model DeepFM", ["model must be one of", "'DeepFM'"]),
    ("--embedding-dim 0", ["embedding_dim must be a positive whole number", "=0"]),
    ("--embedding-dim -3", ["embedding_dim must be a positive whole number", "=-3"]),
    ("--embedding-dim 1000000000", ["must fit into the machine's memory", "GiB for the tables"]),
    (f"--embedding-dim {HUGE}", ["must fit into the machine's memory"]),
    ("--mlp 0", ["mlp must be at least one positive whole number", "(0,)"]),
    ("--mlp 16,0", ["mlp must be at least one positive whole number", "(16, 0)"]),
    ("--mlp=-4", ["mlp must be at least one positive whole number", "(-4,)"]),
    ("--mlp 10000000,10000000", ["must fit into", "for the layers", "Choose smaller layers"]),
    ("--cross-layers 2", ["cross_layers belongs to dcn, dcn_v2", "model='deepfm'"]),
    ("--model dcn --cross-layers 0", ["cross_layers must be a positive whole number"]),
    ("--model dcn --low-rank-dim 2", ["low_rank_dim belongs to dcn_v2", "model='dcn'"]),
    ("--model dcn_v2 --low-rank-dim 0", ["low_rank_dim must be a positive whole number"]),
    ("--model dcn_v2 --low-rank-dim -1", ["low_rank_dim must be a positive whole number"]),
    ("--model dcn_v2 --cross-layers 9999999999", ["must fit into the machine's memory"]),
    ("--model lr --mlp 8", ["--mlp belongs to wide_and_deep, deepfm", "model='lr'"]),
    ("--model lr --embedding-dim 8", ["--embedding-dim belongs to fm, wide", "model='lr'"]),
    ("--model fm --mlp 8", ["--mlp belongs to wide_and_deep", "model='fm'"]),
    ("--bottom-mlp 8", ["bottom_mlp belongs to dlrm", "model='deepfm'"]),
    ("--model dlrm --bottom-mlp 8,0", ["bottom_mlp must be at least one positive"]),
    ("--combiner max", ["combiner must be one of mean, sum, sqrtn", "'max'"]),
    ("--combiner genres=max", ["combiner must be one of", "'max'"]),
    ("--combiner =sum", ["--combiner must be FIELD=VALUE", "'=sum'"]),
    ("--dense-schedule steps:1=0.5,1=0.1", ["EPOCH=VALUE", "with each epoch once", "'1=0.1'"]),
    ("--combiner genres=sum,genres=mean", ["with each field once", "'genres=mean'"]),
    ("--combiner genres=sum,mean", ["--combiner must be FIELD=VALUE", "'mean'"]),
    ("--combiner tags=sum", ["combiner must name each list column: genres", "tags"]),
    # Batches, epochs, seeds
    ("--batch-size 0", ["batch_size must be a positive whole number of samples"]),
    ("--batch-size -64", ["batch_size must be a positive whole number", "=-64"]),
    ("--batch-size 141", ["must not exceed the training rows", "141, 140 rows", "smaller"]),
    (f"--batch-size {HUGE}", ["batch_size must be a positive whole number"]),
    ("--base-batch-size 0", ["batch_size must be a positive number", "=0"]),
    ("--base-batch-size -1", ["batch_size must be a positive number", "=-1"]),
    ("--epochs 0", ["epochs must be a positive whole number", "=0"]),
    ("--epochs -1", ["epochs must be a positive whole number", "=-1"]),
    ("--seed -1", ["seed must be a whole number from 0 to 4294967295", "=-1"]),
    ("--seed 4294967296", ["seed must be a whole number from 0 to 4294967295"]),
    (f"--seed {HUGE}", ["seed must be a whole number from 0 to 4294967295"]),
    # Checkpoints, and the end
    ("--checkpoint-every 0", ["checkpoint_every must be a positive number of updates", "'0'"]),
    ("--checkpoint-every 10x", ["or of minutes as in 10m", "'10x'"]),
    ("--keep 0", ["keep must be a positive whole number", "=0"]),
    ("--patience 0", ["patience must be a positive whole number", "=0"]),
    ("--max-minutes 0", ["max_minutes must be positive", "0.0", "Correct it"]),
    ("--max-minutes nan", ["max_minutes must be positive", "nan"]),
    # The rule and its values
    ("--rule cube", ["rule must be one of none, sqrt", "'cube'"]),
    ("--rule=", ["rule must be one of", "''"]),
    ("--tables halves", ["tables must be one of replicated, sharded", "'halves'"]),
    ("--tables sharded", ["needs several ranks", "one process", "horovodrun"]),
    ("--update eager", ["update must be one of exact, lazy, deferred", "'eager'"]),
    ("--dense-lr 0", ["dense_lr must be a positive number", "=0.0"]),
    ("--dense-lr -1", ["dense_lr must be a positive number", "=-1.0"]),
    ("--dense-lr nan", ["dense_lr must be a positive number", "nan"]),
    ("--dense-lr 1e400", ["dense_lr must be a positive number", "inf"]),
    ("--embedding-lr 0", ["embedding_lr must be a positive number"]),
    ("--embedding-lr inf", ["embedding_lr must be a positive number", "inf"]),
    ("--l2=-1e-5", ["l2 must be a number that is not negative", "-1e-05"]),
    ("--l2 nan", ["l2 must be a number that is not negative", "nan"]),
    ("--l2 1e308 --base-batch-size 1", ["l2 must be a number that is not negative", "inf"]),
    # Clips
    ("--clip best", ["clip must be None or one of global, field", "'best'"]),
    ("--clip global", ["clip='global' needs clip_threshold"]),
    ("--clip field --clip-threshold 0", ["clip_threshold must be a positive number"]),
    ("--clip column --clip-threshold nan", ["clip_threshold must be a positive number", "nan"]),
    ("--clip-threshold 1", ["clip_threshold belongs to global, field, column"]),
    ("--clip-ratio 0", ["clip_ratio must be a positive number"]),
    ("--clip-ratio -1", ["clip_ratio must be a positive number", "-1.0"]),
    ("--clip-floor -1", ["clip_floor must be a number that is not negative"]),
    ("--clip-floor inf", ["clip_floor must be a number that is not negative", "inf"]),
    ("--no-clip --clip column", ["--no-clip excludes --clip", "Leave one out"]),
    ("--no-clip --clip-threshold 25", ["--no-clip excludes --clip-threshold", "Leave one out"]),
    ("--no-clip --clip-ratio 2", ["--clip-ratio belongs to", "clip=None", "Leave it out"]),
    ("--rule linear --clip-floor 2", ["--clip-floor belongs to", "clip=None"]),
    ("--clip column --clip-threshold 1 --clip-ratio 2", ["--clip-ratio", "clip='column'"]),
    ("--clip-tables shop", ["clip_tables must name fields of the data, user", "'shop'"]),
    ("--clip-tables price", ["clip_tables must name fields of the data", "'price'"]),
    ("--clip-tables user,user", ["clip_tables must name something, and each only once"]),
    ("--clip-tables=", ["clip_tables must be a list of names", "['']"]),
    ("--no-clip --clip-tables user", ["clip_tables needs a clip rule"]),
    ("--rule linear --clip-tables user", ["clip_tables needs a clip rule", "'linear'"]),
    # Schedules
    ("--dense-schedule wave", ["dense_schedule must be one of exponential", "'wave'"]),
    ("--dense-schedule exponential", ["dense_schedule 'exponential' needs rate"]),
    ("--dense-schedule exponential:rate=0", ["dense_schedule rate must be a positive number"]),
    ("--dense-schedule cosine:till=0", ["'cosine' has the parameters to, epochs", "'till'"]),
    ("--dense-schedule cosine:to=low", ["--dense-schedule must have numbers", "to=low"]),
    ("--dense-schedule cosine:", ["--dense-schedule must be NAME=VALUE"]),
    ("--embedding-schedule steps", ["'steps' needs at"]),
    ("--embedding-schedule steps:8=0.1,5=1", ["rising, positive epochs"]),
    ("--embedding-schedule linear:to=nan", ["embedding_schedule to must be a number"]),
    ("--embedding-schedule linear:to=1,to=2", ["each name once"]),
]


@pytest.mark.parametrize(("options", "words"), [pytest.param(*c, id=c[0][:60]) for c in OPTIONS])
def test_options(toy_data, tmp_path, options, words):
    default = [] if "batch-size" in options.split("=")[0] else ["--batch-size", "64"]
    argv = ["train", toy_data, "--out", tmp_path / "run", *default, *options.split(" ")]
    refused(argv, words, folder=tmp_path, quiet="combiner tags" not in options)


# Configurations

CONFIGS = [
    ("", ["--config must be JSON in UTF-8", "c.json"]),
    ("{", ["--config must be JSON in UTF-8", "c.json"]),
    ("[]", ["--config must hold values by name", "c.json"]),
    ('{"seed": 1, "seed": 2}', ["--config must be JSON", "'seed' more than once", "Correct it"]),
    ('{"base": {"l2": 1, "l2": 2}}', ["--config must be JSON", "'l2' more than once"]),
    ("null", ["--config must hold values by name"]),
    ('"deepfm"', ["--config must hold values by name"]),
    ("[" * 100_000, ["--config must be JSON in UTF-8"]),
    (b"\xff\xfe", ["--config must be JSON in UTF-8"]),
    ({"modle": "lr"}, ["a configuration has the keys model", "'modle'", "Correct it"]),
    ({"mlp": "400"}, ["mlp must be at least one positive whole number", "'400'"]),
    ({"mlp": None}, ["mlp must have a value"]),
    ({"epochs": 1.5}, ["epochs must be a positive whole number", "1.5"]),
    ({"batch_size": True}, ["batch_size must be a positive whole number", "True"]),
    ({"seed": "1"}, ["seed must be a whole number", "'1'"]),
    ({"base": {"lr": 1}}, ["base has the keys batch_size", "'lr'"]),
    ({"base": []}, ["base must be Hyperparameters"]),
    ({"base": {"l2": "small"}}, ["l2 must be a number", "'small'"]),
    ({"rule": 3}, ["rule must be one of", "3"]),
    ({"model": {}}, ["model must be one of", "{}"]),
    ({"clip_tables": {"user": 1}}, ["clip_tables must be a list of names"]),
    ({"dense_schedule": {"nom": "cosine"}}, ["dense_schedule must be one of"]),
    ({"combiner": 3}, ["combiner must be one of", "3"]),
    ({"deterministic": "no"}, ["deterministic must be true or false", "'no'"]),
]


@pytest.mark.parametrize(("text", "words"), [pytest.param(*c, id=str(c[0])[:40]) for c in CONFIGS])
def test_configurations(toy_data, tmp_path, text, words):
    text = json.dumps(text) if isinstance(text, dict) else text
    path = tmp_path / "c.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    argv = ["train", toy_data, "--out", tmp_path / "run", "--config", path]
    refused(argv, words, folder=tmp_path)


def test_configurations_that_are_not_there(toy_data, tmp_path):
    argv = ["train", toy_data, "--out", tmp_path / "run", "--config"]
    refused([*argv, tmp_path / "no.json"], ["--config must be", "no.json"], folder=tmp_path)
    (tmp_path / "folder").mkdir()
    refused(
        [*argv, tmp_path / "folder"],
        ["a run must be a folder that train", "folder"],
        folder=tmp_path,
    )
    (tmp_path / "c.json").write_text(json.dumps({"base": {"l2": 1e-4}}))
    words = ["--rule excludes a --config with a base", "Leave one out"]
    refused([*argv, tmp_path / "c.json", "--rule", "linear"], words, folder=tmp_path)


# Places


def _exists(out):
    out.mkdir()


def _a_file(out):
    out.touch()


def _dangling(out):
    out.symlink_to("nowhere")


@pytest.mark.parametrize("make", [_exists, _a_file, _dangling])
def test_places_that_are_taken(toy_data, tmp_path, make):
    make(tmp_path / "run")
    words = ["output folder must not exist", tmp_path / "run", "Name another"]
    refused(["train", toy_data, "--out", tmp_path / "run"], words, folder=tmp_path)


@pytest.mark.parametrize(("error", "code"), [(BrokenPipeError(), 141), (OSError(28, "full"), 2)])
def test_lines_that_nobody_reads(toy_data, tmp_path, error, code):
    """An epoch is saved before it is told of, and the sentence says how to go on."""

    class Pipe(io.StringIO):
        def write(self, text: str) -> int:
            if text.startswith("epoch 1"):
                raise error
            return super().write(text)

    argv = ["train", toy_data, "--out", tmp_path / "run", "--model", "lr", "--epochs", 2]
    err = io.StringIO()
    with contextlib.redirect_stdout(Pipe()), contextlib.redirect_stderr(err):
        options = ["--batch-size", 64, "--no-saved-model"]
        assert main([str(argument) for argument in (*argv, *options)]) == code
    words = "what reads the output must" if code == 141 else "what is printed must find room"
    assert words in err.getvalue().splitlines()[-1]
    kept = f"is kept; go on with: merlin-cowclip train --resume {tmp_path / 'run'}"
    assert err.getvalue().rstrip().endswith(kept)
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) == 2
    assert command(["train", "--resume", tmp_path / "run"]).code == 0
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    "place", ["file/run", "x" * 300, "x" * 300 + "/run", "locked/run"], ids=lambda p: p[:12]
)
def test_places_that_cannot_be_written(toy_data, nobody, place):
    folder, become = nobody
    data = shutil.copytree(toy_data, folder / "data")
    (folder / "file").touch()
    (folder / "locked").mkdir(mode=0o555)
    become()
    argv = ["train", data, "--out", folder / place, "--batch-size", "64"]
    words = ["output folder must be in a folder that can be written", "Name another"]
    refused(argv, words, folder=folder)


def test_a_place_whose_name_is_no_text(toy_data, tmp_path):
    argv = ["train", toy_data, "--out", f"{tmp_path}/\udcff", "--batch-size", "64"]
    refused(argv, ["output folder must have a name that is text"], folder=tmp_path)


@pytest.mark.parametrize("name", ["run[lr=1]", "run\\1", "folder[1]/run"])
def test_a_place_that_tensorflow_takes_for_a_pattern(toy_data, toy_run, tmp_path, name):
    """A run trained to its end there, and could be neither saved nor gone on with."""
    out = tmp_path / name
    out.parent.mkdir(exist_ok=True)
    words = ["without [ and ", "TensorFlow", str(out), "Choose another"]
    refused(["train", toy_data, "--out", out, "--batch-size", "64"], words, folder=tmp_path)
    sweep = ["sweep", "clipping", toy_data, "--out", out, "--batch-sizes", "64"]
    refused(sweep, words, folder=tmp_path)
    shutil.copytree(toy_run, out)
    refused(["train", "--resume", out], words, folder=tmp_path)
    refused(["evaluate", out], words, folder=tmp_path)


# Runs to go on with


def test_what_must_be_named(toy_data, tmp_path):
    refused(["train", "--out", tmp_path / "run"], ["train needs the data"], folder=tmp_path)
    refused(["train", toy_data], ["train needs --out", "--resume RUN"], folder=tmp_path)


def test_runs_that_cannot_go_on(toy_run, tmp_path):
    refused(["train", "--resume", tmp_path / "x"], ["a run must be a folder"], folder=tmp_path)
    (tmp_path / "empty").mkdir()
    words = ["a run that goes on must hold its configuration", "config.json"]
    refused(["train", "--resume", tmp_path / "empty"], words, folder=tmp_path)
    (tmp_path / "empty/config.json").write_text('{"data": "here"}')
    words = ["of a version that takes checkpoints", "without 'data_sha256'"]
    refused(["train", "--resume", tmp_path / "empty"], words, folder=tmp_path)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        *[("--batch-size 64", "--batch-size"), ("--seed 1", "--seed"), ("--out x", "--out")],
        *[("--no-saved-model", "--saved-model"), ("--no-determinism", "--determinism")],
        *[("--keep 3", "--keep"), ("--no-clip", "--no-clip"), ("--mlp 8", "--mlp")],
    ],
)
def test_what_is_a_runs_own(toy_run, tmp_path, options, name):
    words = ["--resume goes with DATA, --epochs, --max-minutes and --quiet alone", name]
    refused(["train", "--resume", toy_run, *options.split()], words, folder=tmp_path)


# Data


def test_data_that_is_none(toy_run, tmp_path):
    out = ["--out", tmp_path / "run"]
    words = ["prepared data must be a folder", "nowhere", "merlin-cowclip prepare"]
    refused(["train", tmp_path / "nowhere", *out], words, folder=tmp_path)
    refused(["train", toy_run, *out], ["prepared data must hold prepare.json"], folder=tmp_path)


def test_a_field_is_too_few_for_dlrm(tmp_path):
    log = toy_log(tmp_path / "log.csv")
    spec = DatasetSpec(name="one", label="y", categorical=("user",), split=TOY.split)
    log.write_text("\n".join(",".join(x.split(",")[:2]) for x in log.read_text().split()) + "\n")
    data = prepare(spec, [log], tmp_path / "data", progress=False)
    argv = ["train", data.path, "--out", tmp_path / "run", "--batch-size", "64", "--model", "dlrm"]
    refused(argv, ["two fields at least", "'user'"], folder=tmp_path, quiet=False)


# While it trains: whatever ends it, one sentence and nothing left

FULL = "/run/model/variables/variables.data; No space left on device"
ENDINGS = [
    (tf.errors.ResourceExhaustedError(None, None, FULL), 2, ["output needs disk space"]),
    (tf.errors.UnknownError(None, None, FULL), 2, ["output needs disk space", "Free some"]),
    (OSError(errno.ENOSPC, "No space left on device"), 2, ["output needs disk space"]),
    (shutil.Error([("a", "b", f"[Errno 28] {FULL}")]), 2, ["output needs disk space"]),
    (
        tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor\nwith shape[9]"),
        2,
        ["a step must fit into memory", "OOM when allocating tensor", "smaller batch size"],
    ),
    (MemoryError(), 2, ["the machine's memory must suffice"]),
    (UserError("the training loss must stay finite"), 2, ["the training loss must stay finite"]),
    (tf.errors.InternalError(None, None, "a bug\nof theirs"), 1, ["InternalError: a bug", ".txt"]),
    (KeyError("x"), 1, ["nobody foresaw", "KeyError: 'x'", "merlin-cowclip-", ".txt"]),
]


@pytest.mark.parametrize(
    ("error", "code", "words"), [pytest.param(*e, id=repr(e[0])[:50]) for e in ENDINGS]
)
def test_what_ends_a_training(toy_data, tmp_path, monkeypatch, error, code, words):
    def end(data, config, keeping, loader, run, max_minutes, *, progress):
        (run / "half").write_text("a model")
        raise error

    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(training, "_train", end)
    (tmp_path / "here").mkdir()
    argv = ["train", toy_data, "--out", tmp_path / "here" / "run", "--batch-size", "64"]
    refused(argv, words, folder=tmp_path / "here", code=code, quiet=False)
    assert len(list((tmp_path / "temporary").iterdir())) == (code == 1)


def test_what_a_killed_run_left_is_in_nobodys_way(toy_data, tmp_path, monkeypatch):
    (tmp_path / ".run.partial-17-abc").mkdir()
    done = []
    result = {"auc": 0.5, "log_loss": 1, "samples_per_second": 1, "train_seconds": 1, "clip": ""}
    run = SimpleNamespace(result={**result, "epochs": []})
    monkeypatch.setattr(training, "train", lambda *_, **__: done.append(1) or run)
    command(["train", toy_data, "--out", tmp_path / "run", "--batch-size", "64"])
    assert done
