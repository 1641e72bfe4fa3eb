"""Sweeps: each run is trained once, resumed after a kill, and shown in a table."""

from __future__ import annotations

import json
import multiprocessing
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.workflows.commands.main import main
from merlin_cowclip.workflows.data.prepare.pipeline import prepare
from merlin_cowclip.workflows.errors import Stopped, UserError
from merlin_cowclip.workflows.folders import locked
from merlin_cowclip.workflows.study import sweep as sweeping
from merlin_cowclip.workflows.study.batch_size import batch_size
from merlin_cowclip.workflows.study.report import report, runs_of
from merlin_cowclip.workflows.study.sweep import sweep
from merlin_cowclip.workflows.training.configuration import CheckpointConfig, TrainConfig
from merlin_cowclip.workflows.training.runs import Run
from merlin_cowclip.workflows.training.train import train
from tests.refused import command

from .conftest import SPEC

pytestmark = pytest.mark.filterwarnings("ignore:Even though the `tf.config.exp")
GRID = """
[fixed]
model = "lr"
epochs = 1
rule = "cowclip"
base_batch_size = 128
dense_lr = 1e-2
embedding_lr = 1e-2
[grid]
batch_size = [128, 512]
seed = [1, 2]
"""


def config_of(batch_size: int, seed: int, **changes) -> TrainConfig:
    values = {"dense_lr": 1e-2, "embedding_lr": 1e-2, "base_batch_size": 128, "rule": "cowclip"}
    values |= {"model": "lr", "epochs": 1, "batch_size": batch_size, "seed": seed}
    return TrainConfig(**{**values, **changes})


CONFIGS = [config_of(size, seed) for size in (128, 512) for seed in (1, 2)]


@pytest.fixture(scope="module", autouse=True)
def eager():
    def train_eagerly(*arguments):
        tf.config.run_functions_eagerly(True)  # which a run resets
        trained(*arguments)

    trained = sweeping._train
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweeping, "_train", train_eagerly)
        yield
        tf.config.run_functions_eagerly(False)


@pytest.fixture(scope="module")
def swept(data, tmp_path_factory, eager) -> tuple[Path, list[str]]:
    """A sweep of four runs, and what the command printed."""
    home = tmp_path_factory.mktemp("sweep")
    (home / "grid.toml").write_text(GRID)
    done = command(["sweep", data.path, home / "grid.toml", "--out", home / "out"])
    assert done.code == 0, done.err
    return home / "out", done.out.splitlines()


def test_each_run_has_a_line(swept):
    few, begun, *lines = swept[1]
    assert begun == "0 of 4 runs have ended. Training."
    assert few.startswith("Warning: at batch size 512 an epoch has only 3 steps.")
    assert re.fullmatch(r"\[1/4\] batch_size 128, seed 1: AUC 0\.\d{4} \(\d+ s\)", lines[0])
    assert lines[4].split()[:5] == ["batch_size", "seeds", "test", "AUC,", "%"]


def test_runs_are_those_of_train(swept, data, tmp_path):
    config = CONFIGS[-1]
    unsaved = CheckpointConfig(saved_model=False)
    trained = train(data, config, tmp_path / "run", checkpointing=unsaved, progress=False)
    tf.config.run_functions_eagerly(True)
    run = Run.open(swept[0] / "runs" / config.identity[:16])
    assert run.result["auc"] == trained.result["auc"]
    assert run.config["identity"] == config.identity
    assert not (run.path / "checkpoints").exists()


def test_finished_runs_are_not_trained_again(swept, data, monkeypatch):
    """Nor by another sweep with the same run."""
    monkeypatch.setattr(sweeping, "_train", None)
    for configs in (CONFIGS[1:], CONFIGS):
        sweep(data, configs, swept[0], progress=False)
        assert len(runs_of(swept[0])[0]) == len(configs)


def test_other_data_are_refused(swept, data, tmp_path):
    log = data.path.parent / "log.csv"
    other = prepare(SPEC, [log], tmp_path / "other", seed=7, progress=False)
    with pytest.raises(UserError, match="must be new, or .* is a sweep of"):
        sweep(other, CONFIGS, swept[0], progress=False)


def test_an_interrupted_sweep_keeps_its_runs(data, tmp_path, monkeypatch):
    def interrupted(run, config, data):
        if list(tmp_path.glob("out/runs/*/diverged.json")):
            raise Stopped("saved", 15)
        run.mkdir()
        (run / "diverged.json").write_text("{}")

    monkeypatch.setattr(sweeping, "_train", interrupted)
    with pytest.raises(Stopped, match="kept in .*in progress is saved.*same command") as stopped:
        sweep(data, CONFIGS, tmp_path / "out", progress=False)
    assert stopped.value.number == 15
    assert len(list(tmp_path.glob("out/runs/*/diverged.json"))) == 1


def test_two_processes_share_a_folder(data, tmp_path, monkeypatch):
    """A run that another process trains is left to it, and waited for."""
    out, trained, forked = tmp_path / "out", [], multiprocessing.get_context("fork")
    is_locked = forked.Event()
    first = out / "runs" / CONFIGS[0].identity[:16]

    def other() -> None:
        with locked(first.with_name(f".{first.name}.lock"), wait=False):
            is_locked.set()
            time.sleep(2)
            finish(first)

    def finish(run, *_) -> None:
        run.mkdir()
        (run / "diverged.json").write_text("{}")
        trained.append(run)

    monkeypatch.setattr(sweeping, "_train", finish)
    monkeypatch.setattr(sweeping, "_write_record", lambda *_: None)
    first.parent.mkdir(parents=True)
    process = forked.Process(target=other)
    process.start()
    is_locked.wait(60)
    sweep(data, CONFIGS, out, progress=False)
    process.join()
    assert trained == [out / "runs" / one.identity[:16] for one in CONFIGS[1:]]


def test_a_diverged_run_is_recorded(data, tmp_path):
    """It keeps its folder and logs."""
    configs = [config_of(128, 1, dense_lr=1e30, embedding_lr=1e30)]
    sweep(data, configs, tmp_path / "out", progress=False)
    (trained,) = runs_of(tmp_path / "out")[0]
    assert trained.result == {}
    assert (trained.path / "config.json").exists()
    with pytest.raises(UserError, match="has no run that ended"):
        report(tmp_path / "out")


def test_batch_sizes_of_tuned_values(data, tmp_path):
    """Scaled by the square root, and trained to the end."""
    tuned = config_of(128, 1, rule="none", epochs=2, patience=1)
    result = batch_size(data, tuned, (512, 256), tmp_path / "out", seeds=2, progress=False)
    runs = [Run.open(path.parent) for path in tmp_path.glob("out/runs/*/result.json")]
    for one in result["sizes"]:
        size = one["batch_size"]
        same = [run for run in runs if run.config["batch_size"] == size]
        assert {run.config["seed"] for run in same} == {1, 2}
        assert one["auc"][0] == pytest.approx(np.mean([run.result["auc"] for run in same]))
        rate = same[0].train_config().hyperparameters.dense_lr
        assert rate == pytest.approx(1e-2 * (size / 128) ** 0.5)
    assert {len(run.result["epochs"]) for run in runs} == {2}
    assert (tmp_path / "out" / "report.html").exists()


@pytest.mark.extended
def test_killed_and_begun_again(swept, data, tmp_path):
    """The run in progress is resumed."""
    out, grid = tmp_path / "out", swept[0].with_name("grid.toml")
    arguments = ["sweep", str(data.path), str(grid), "--quiet", "--out", str(out)]
    begun = subprocess.Popen(
        [sys.executable, "-m", "merlin_cowclip.workflows.commands.main", *arguments]
    )
    deadline = time.monotonic() + 120
    while not list(out.glob("runs/*/config.json")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    begun.kill()
    begun.wait()
    assert main(arguments) == 0
    killed, reference = (
        {p.parent.name: json.loads(p.read_text())["auc"] for p in of.glob("runs/*/result.json")}
        for of in (out, swept[0])
    )
    assert killed == reference
    assert len(killed) == 4
