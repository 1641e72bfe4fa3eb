"""How a run of a sweep ends, told by substitutes of `train` and `resume`."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace

import pytest

from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.errors import NotFiniteError, Stopped, UserError
from merlin_cowclip.workflows.study import workers
from merlin_cowclip.workflows.training import train as training
from merlin_cowclip.workflows.training.configuration import TrainConfig

SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def task(tmp_path):
    return workers.Task("a run", tmp_path / "run", tmp_path / "data", TrainConfig().to_dict())


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """By name what `train` and `resume` do; each makes a result unless a test says otherwise."""

    def finish(run):
        run.mkdir(exist_ok=True)
        (run / "result.json").touch()

    found = {"train": finish, "resume": finish}
    monkeypatch.setattr(PreparedData, "open", lambda path: path)
    monkeypatch.setattr(training, "train", lambda data, config, run, **_: found["train"](run))
    monkeypatch.setattr(training, "resume", lambda run, **_: found["resume"](run))
    return found


def raising(error):
    def raise_it(run):
        raise error

    return raise_it


def test_an_interrupted_run_is_resumed(task, calls):
    task.run.mkdir()
    (task.run / "config.json").touch()
    calls["train"] = raising(AssertionError)
    assert workers._train(task)
    assert workers.is_done(task.run)


def test_a_run_of_another_process_is_waited_for(task):
    with workers.alone_with(task.run), ProcessPoolExecutor(1, SPAWN) as pool:
        waiting = pool.submit(workers._train, task)
        time.sleep(3)
        assert not waiting.done()
        task.run.mkdir()
        (task.run / "result.json").touch()
        fcntl.lockf((task.run.parent / ".lock").open("ab"), fcntl.LOCK_UN)  # of this process
        assert waiting.result()


def test_a_diverged_run_is_done(task, calls):
    error = NotFiniteError("The run diverged, with dense_lr=1")
    calls["train"] = raising(error)
    assert workers._train(task)
    assert workers.is_done(task.run)
    assert json.loads((task.run / "diverged.json").read_text())["message"] == str(error)


def test_a_stopped_run_says_so(task, calls):
    calls["train"] = raising(Stopped("saved", 15))
    assert not workers._train(task)
    assert not workers.is_done(task.run)


@pytest.mark.extended
def test_an_internal_error_has_its_traceback(task):
    refused = dataclasses.replace(task, config={"batch_size": 0})
    with pytest.raises(UserError, match="batch_size must be"):
        list(workers.run_all([refused], 1))
    broken = dataclasses.replace(task, run=None)
    with pytest.raises(AttributeError) as failed:
        list(workers.run_all([broken], 1))
    assert "in _train" in str(failed.value.__cause__)


def test_processes_share_the_cores(monkeypatch):
    inter, intra = "TF_NUM_INTEROP_THREADS", "TF_NUM_INTRAOP_THREADS"
    monkeypatch.delenv(inter, raising=False)
    monkeypatch.setenv(intra, "3")
    monkeypatch.setattr(os, "cpu_count", lambda: 9)
    monkeypatch.setattr(os, "setpgrp", lambda: None)
    monkeypatch.setattr(workers.threading, "Thread", lambda **_: SimpleNamespace(start=int))
    workers._begin(1)
    assert inter not in os.environ
    workers._begin(4)
    assert (os.environ[inter], os.environ[intra]) == ("2", "3")
    monkeypatch.delenv(inter)
