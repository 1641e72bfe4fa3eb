"""Sweeps: each run is trained once, resumed after a kill, and shown in a table."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.workflows.commands.main import main
from merlin_cowclip.workflows.data.prepare.pipeline import prepare
from merlin_cowclip.workflows.errors import Stopped, UserError
from merlin_cowclip.workflows.study import workers
from merlin_cowclip.workflows.study.studies import STUDIES, Setting
from merlin_cowclip.workflows.study.sweep import run_name, sweep
from merlin_cowclip.workflows.training.configuration import CheckpointConfig
from merlin_cowclip.workflows.training.runs import Run
from merlin_cowclip.workflows.training.train import train

from .conftest import SPEC

pytestmark = pytest.mark.filterwarnings("ignore:Even though the `tf.config.exp")
SMALL = {"epochs": 1, "model": "lr"}
SETTING = Setting((128, 512), {"dense_lr": 1e-2, "embedding_lr": 1e-2}, SMALL, seeds=(1, 2))
OPTIONS = (
    *("--batch-sizes", "128,512", "--dense-lr", "1e-2", "--embedding-lr", "1e-2", "--seeds", "1,2"),
    *("--epochs", "1", "--model", "lr"),
)
CURVES = STUDIES["curves"]


def in_this_process(tasks, jobs):
    """Substitute of `run_all`, which starts processes."""
    for task in tasks:
        assert workers._train(task)
        tf.config.run_functions_eagerly(True)  # which a run resets
        yield task


@pytest.fixture(scope="module", autouse=True)
def eager():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("merlin_cowclip.workflows.study.sweep.run_all", in_this_process)
        tf.config.run_functions_eagerly(True)
        yield
        tf.config.run_functions_eagerly(False)


@pytest.fixture(scope="module")
def swept(data, tmp_path_factory, eager):
    """A sweep of four runs, and its table."""
    out = tmp_path_factory.mktemp("sweep") / "out"
    return out, sweep(CURVES, data, out, SETTING, jobs=2, progress=False)


def results(out: Path) -> dict[str, float]:
    return {p.parent.name: json.loads(p.read_text())["auc"] for p in out.glob("runs/*/result.json")}


def test_runs_are_those_of_train(swept, data, tmp_path):
    out, table = swept
    config = dataclasses.replace(SETTING.run("cowclip", 512), seed=2)
    first = out / "runs" / run_name(dataclasses.replace(config, seed=1), "full")
    checkpointing = CheckpointConfig(saved_model=False)
    alone = train(data, config, tmp_path / "alone", checkpointing=checkpointing, progress=False)
    tf.config.run_functions_eagerly(True)
    run = Run.open(out / "runs" / run_name(config, "full"))
    assert run.result["auc"] == alone.result["auc"]
    assert run.config["identity"] == config.identity
    assert not (run.path / "checkpoints").exists()
    assert run.result["jobs"] == 2  # parallel runs take longer
    aucs = [100 * result["auc"] for result in (run.result, Run.open(first).result)]
    assert f"{np.mean(aucs):.3f} ± {np.std(aucs, ddof=1):.3f}" in table


def test_finished_runs_are_not_trained_again(swept, data, monkeypatch):
    """Nor by another study with the same run."""
    out, table = swept
    monkeypatch.setattr(workers, "_train", None)
    assert sweep(CURVES, data, out, SETTING, progress=False) == table


def test_other_data_are_refused(swept, data, tmp_path):
    other = prepare(
        SPEC, [data.path.parent / "log.csv"], tmp_path / "other", seed=7, progress=False
    )
    with pytest.raises(UserError, match="be of a sweep on the same data. Received: .* as it was"):
        sweep(CURVES, other, swept[0], SETTING, progress=False)
    (tmp_path / "mine").mkdir()
    with pytest.raises(UserError, match="must not exist, or be of a sweep .* neither"):
        sweep(CURVES, data, tmp_path / "mine", SETTING, progress=False)
    assert not list((tmp_path / "mine").iterdir())


def test_each_run_has_a_line(data, tmp_path, capsys):
    command = ["sweep", "curves", str(data.path), "--out", str(tmp_path / "out"), *OPTIONS]
    assert main([*command, "--seeds", "1"]) == 0
    base, few, *lines = capsys.readouterr().out.splitlines()
    assert base.endswith("at batch size 128; dense_lr, embedding_lr as given")
    assert few.startswith("Warning: at batch size 512 an epoch has only 3 steps.")
    assert re.fullmatch(r"\[1/2\] cowclip, batch 128, seed 1: AUC 0\.\d{4} \(\d+ s\)", lines[0])
    assert lines[1].startswith("[2/2] cowclip, batch 512, seed 1: AUC ")
    record = json.loads((tmp_path / "out" / "studies" / "curves.json").read_text())
    assert f"Base: {record['base']}" == base
    assert record["values"] == {"dense_lr": 1e-2, "embedding_lr": 1e-2}
    assert record["command"].startswith("merlin-cowclip")


def test_an_interrupted_sweep_keeps_its_runs(data, tmp_path, monkeypatch):
    def interrupted(tasks, jobs):
        tasks[0].run.mkdir()
        (tasks[0].run / "diverged.json").write_text("{}")
        yield tasks[0]
        raise KeyboardInterrupt

    monkeypatch.setattr("merlin_cowclip.workflows.study.sweep.run_all", interrupted)
    with pytest.raises(Stopped, match="after 1 of 4 runs, which are kept in .* same command again"):
        sweep(CURVES, data, tmp_path / "out", SETTING, progress=False)


def test_a_diverged_run_is_in_the_table(data, tmp_path):
    values = {"dense_lr": 1e30, "embedding_lr": 1e30}
    setting = dataclasses.replace(SETTING, values=values, seeds=(1,))
    table = sweep(CURVES, data, tmp_path / "out", setting, progress=False)
    assert table.count("diverged") == 2
    assert "The run diverged" in next((tmp_path / "out").glob("runs/*/diverged.json")).read_text()


@pytest.mark.extended
def test_killed_and_begun_again(data, tmp_path, monkeypatch):
    """The processes of a killed sweep save their runs; the next sweep waits for them."""
    monkeypatch.setattr("merlin_cowclip.workflows.study.sweep.run_all", workers.run_all)
    out = tmp_path / "out"
    program = [sys.executable, "-m", "merlin_cowclip.workflows.commands.main", "sweep", "curves"]
    command = [*map(str, (*program, data.path, "--out", out)), *OPTIONS, "--quiet", "--jobs", "2"]
    begun = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list(out.glob("runs/*/config.json")):
        assert time.monotonic() < deadline
        assert begun.poll() is None
        time.sleep(0.05)
    begun.kill()
    begun.wait()
    assert main(command[3:]) == 0
    whole = tmp_path / "whole"
    assert main([*command[3:6], "--out", str(whole), *OPTIONS, "--quiet", "--jobs", "2"]) == 0
    assert results(out) == results(whole)
    assert len(results(whole)) == 4


@pytest.mark.extended
def test_a_stop_reaches_the_process_that_trains(data, tmp_path):
    long = dataclasses.replace(SETTING.run("cowclip", 128), epochs=10_000)
    run = tmp_path / "run"
    work = workers.run_all([workers.Task("long", run, data.path, long.to_dict())], 1)

    def stop(number, frame):
        raise KeyboardInterrupt

    def when_it_trains() -> None:
        while not list(run.glob("checkpoints/step-*")):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, stop)
    threading.Thread(target=when_it_trains, daemon=True).start()
    try:
        with pytest.raises((KeyboardInterrupt, Stopped)):
            next(work)
    finally:
        work.close()
        signal.signal(signal.SIGUSR1, before)
    assert (run / "config.json").exists()
    assert list(run.glob("checkpoints/step-*"))
