"""Lists of runs: trained once each, whatever ends the process, and told in a table."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest

from merlin_cowclip.workflows.commands.main import main
from merlin_cowclip.workflows.data.etl import prepare
from merlin_cowclip.workflows.errors import Notice, Stopped, UserError
from merlin_cowclip.workflows.study import workers
from merlin_cowclip.workflows.study.claims import Claims
from merlin_cowclip.workflows.study.studies import STUDIES, Setting
from merlin_cowclip.workflows.study.sweep import outcomes, run_name, sweep
from merlin_cowclip.workflows.training.keeping import Keeping
from merlin_cowclip.workflows.training.runs import Run, identity_of
from merlin_cowclip.workflows.training.train import train

from .conftest import SPEC

pytestmark = pytest.mark.slow
SMALL = {"epochs": 1, "model": "lr"}
SETTING = Setting((128, 512), {"dense_lr": 1e-2, "embedding_lr": 1e-2}, SMALL, seeds=(1, 2))
OPTIONS = (
    *("--batch-sizes", "128,512", "--dense-lr", "1e-2", "--embedding-lr", "1e-2", "--seeds", "1,2"),
    *("--epochs", "1", "--model", "lr"),
)
CURVES = STUDIES["curves"]


@pytest.fixture(scope="module")
def swept(data, tmp_path_factory):
    """A sweep of four runs by two processes, and what it said."""
    out = tmp_path_factory.mktemp("sweep") / "out"
    return out, sweep(CURVES, data, out, SETTING, jobs=2, progress=False)


def results(out: Path) -> dict[str, float]:
    return {p.parent.name: json.loads(p.read_text())["auc"] for p in out.glob("runs/*/result.json")}


def task_of(data, config, folder: Path) -> workers.Task:
    run, claims = folder / "run", folder / "claims"
    return workers.Task(run, claims, data.path, identity_of(data), config.to_dict())


def test_runs_are_those_of_train(swept, data, tmp_path):
    out, _ = swept
    config = dataclasses.replace(SETTING.run("cowclip", 512), seed=2)
    keeping = Keeping(saved_model=False)
    alone = train(data, config, tmp_path / "alone", keeping=keeping, progress=False)
    run = Run.open(out / "runs" / run_name(config, "full"))
    assert run.result["auc"] == alone.result["auc"]
    assert run.config["identity"] == config.identity
    assert not (run.path / "checkpoints").exists()
    assert run.result["jobs"] == 2  # which makes it slower than it would be alone


def test_the_table_is_of_the_results(swept):
    out, table = swept
    found = outcomes(out, "curves")
    assert [o.cell.column for o in found] == ["128", "512"]
    for outcome in found:
        assert sorted(outcome.results) == [1, 2]
        a, b = (result["auc"] for result in outcome.results.values())
        mean, deviation = outcome.mean("auc")
        assert mean == pytest.approx((a + b) / 2)
        assert deviation == pytest.approx(abs(a - b) / 2**0.5)
        assert f"{100 * mean:.3f} ± {100 * deviation:.3f}" in table


def test_what_is_there_is_not_trained_again(swept, data, monkeypatch):
    """Nor by another study that takes the same run."""
    out, table = swept
    monkeypatch.setattr(workers, "_Worker", None)
    assert sweep(CURVES, data, out, SETTING, progress=False) == table
    shared = Setting((128,), SETTING.values, SMALL, seeds=(1, 2))
    assert "128" in sweep(CURVES, data, out, shared, progress=False)


def test_seeds_that_a_study_leaves_out_are_told(swept, data, tmp_path):
    out = shutil.copytree(swept[0], tmp_path / "out")
    one = dataclasses.replace(SETTING, seeds=(2,))
    words = r"curves.json was of --seeds 1,2, and is of 2 from now on.* all of them --seeds 1,2$"
    with pytest.warns(Notice, match=words):
        sweep(CURVES, data, out, one, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", Notice)
        sweep(CURVES, data, out, SETTING, progress=False)  # more are no others


def test_rows_and_options_that_a_study_leaves_out_are_told(swept, data, tmp_path):
    out = shutil.copytree(swept[0], tmp_path / "out")
    sweep(CURVES, data, out, SETTING, progress=False)  # whatever tests before this one swept
    place = out / "studies" / "curves.json"
    record = json.loads(place.read_text())
    of_a_tune = {**record["cells"][0], "row": "tune"}
    config = record["cells"][0]["config"]
    other = {"epochs": 7, "base": {**config["base"], "l2": 1e-3}}
    was = [{**cell, "config": {**cell["config"], **other}} for cell in record["cells"]]
    sizes = {"batch_sizes": record["batch_sizes"][:1]}  # of which it has more by now
    place.write_text(json.dumps({**record, **sizes, "cells": [*was, of_a_tune]}))
    with pytest.warns(Notice) as found:
        sweep(CURVES, data, out, SETTING, progress=False)
    row, options = [str(one.message) for one in found if one.category is Notice]
    assert row.startswith(f"{place} had a row 'tune', which it has no more from now on")
    assert options.startswith(
        f"{place} was of other epochs, l2, of which it is no more from now on"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", Notice)
        sweep(CURVES, data, out, SETTING, progress=False)


def test_another_base_is_told(swept, data, tmp_path):
    """Also where no batch size is left out: every value is scaled from there."""
    out = shutil.copytree(swept[0], tmp_path / "out")
    sweep(CURVES, data, out, SETTING, progress=False)
    place = out / "studies" / "curves.json"
    record = json.loads(place.read_text())
    place.write_text(json.dumps({**record, "batch_sizes": record["batch_sizes"][1:]}))
    words = "was of the base 512, the first of --batch-sizes, and is of 128 from now on"
    with pytest.warns(Notice, match=words):
        sweep(CURVES, data, out, SETTING, progress=False)


def test_what_trains_nothing_has_no_base(data, tmp_path):
    study, out = STUDIES["frequencies"], tmp_path / "out"
    with warnings.catch_warnings():
        warnings.simplefilter("error", Notice)
        for sizes in ((64, 256), (32, 64, 256)):
            table = sweep(study, data, out, Setting(sizes), progress=False)
    assert all(f"  {size}" in table for size in sizes)


def test_times_of_other_jobs_are_told(swept, data, tmp_path):
    out = shutil.copytree(swept[0], tmp_path / "out")
    study = dataclasses.replace(CURVES, quantity=STUDIES["time"].quantity)
    with pytest.warns(Notice, match="^4 runs were trained before with --jobs 2: .* --jobs 1. For"):
        sweep(study, data, out, SETTING, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", Notice)
        sweep(study, data, out, SETTING, jobs=2, progress=False)


def test_other_data_are_refused(swept, data, tmp_path):
    out, _ = swept
    other = prepare(
        SPEC, [data.path.parent / "log.csv"], tmp_path / "other", seed=7, progress=False
    )
    with pytest.raises(UserError, match="the runs of a folder must be of one data set. Received: "):
        sweep(CURVES, other, out, SETTING, progress=False)
    (tmp_path / "mine").mkdir()
    with pytest.raises(UserError, match="must not exist, or be of a sweep"):
        sweep(CURVES, data, tmp_path / "mine", SETTING, progress=False)
    assert not list((tmp_path / "mine").iterdir())


def test_a_run_that_diverges_is_told_and_no_error(data, tmp_path, monkeypatch):
    def here(tasks, jobs):
        for task in tasks:
            assert workers._trained(task).how == "done"
            yield task

    monkeypatch.setattr("merlin_cowclip.workflows.study.sweep.work_off", here)
    values = {"dense_lr": 1e30, "embedding_lr": 1e30}
    setting = dataclasses.replace(SETTING, values=values, seeds=(1,))
    table = sweep(CURVES, data, tmp_path / "out", setting, progress=False)
    assert table.count("diverged") == 2
    assert "The run diverged" in next((tmp_path / "out").glob("runs/*/diverged.json")).read_text()


def test_killed_and_begun_again(swept, data, tmp_path):
    """Its processes end what they have in hand, and the next sweep waits for them."""
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
    assert results(out) == results(swept[0])


def test_a_run_that_another_process_trains_is_waited_for(data, tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "_PAUSE", 0.01)
    config = dataclasses.replace(SETTING.run("cowclip", 512), seed=1)
    task = task_of(data, config, tmp_path)
    claim = Claims(task.claims).take("run")
    assert workers._trained(task).how == "busy"
    claim.let_go()
    assert not task.is_done


def test_a_stop_is_passed_on_and_saved(data, tmp_path):
    long = dataclasses.replace(SETTING.run("cowclip", 128), epochs=10_000)
    task = task_of(data, long, tmp_path)
    work = workers.work_off([task], 1)

    def stop(number, frame):
        raise KeyboardInterrupt

    def when_it_trains() -> None:
        while not list(tmp_path.glob("run/checkpoints/step-*")):
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
    assert (tmp_path / "run" / "config.json").exists()
    assert list(tmp_path.glob("run/checkpoints/step-*"))


def test_processes_share_the_cores(monkeypatch):
    """With one job, or where the environment says it, nothing is changed."""
    inter, intra = "TF_NUM_INTEROP_THREADS", "TF_NUM_INTRAOP_THREADS"
    monkeypatch.delenv(inter, raising=False)
    monkeypatch.setenv(intra, "3")
    monkeypatch.setattr(os, "cpu_count", lambda: 9)
    with workers._share_of_the_cores(1):
        assert inter not in os.environ
    with workers._share_of_the_cores(4):
        assert (os.environ[inter], os.environ[intra]) == ("2", "3")
    assert inter not in os.environ
