"""How a worker ends, whatever it trains: told by what stands in for training."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from types import ModuleType, SimpleNamespace

import pytest

from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.study import workers
from merlin_cowclip.workflows.training.configuration import TrainConfig


class NotFiniteError(UserError):
    """The watch's."""


@pytest.fixture
def task(tmp_path):
    (tmp_path / "data").mkdir()
    run, claims, data = (tmp_path / name for name in ("run", "claims", "data"))
    return workers.Task(run, claims, data, "sha", TrainConfig().to_dict())


@pytest.fixture
def training(monkeypatch):
    """What `_trained` imports; a test gives it `train` and `resume`."""
    monkeypatch.setattr(workers, "identity_of", lambda data: "sha")
    found = SimpleNamespace(train=None, resume=None)
    contents = {
        "data.prepared": {"PreparedData": SimpleNamespace(open=lambda path: path)},
        "training.watch": {"NotFiniteError": NotFiniteError},
        "training.train": {
            "train": lambda *args, **more: found.train(*args, **more),
            "resume": lambda *args, **more: found.resume(*args, **more),
        },
    }
    for name, content in contents.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, f"merlin_cowclip.workflows.{name}", module)
    return found


def finished(run):
    run.mkdir(exist_ok=True)
    (run / "result.json").touch()


def raising(error):
    def raise_it(*args, **more):
        raise error

    return raise_it


def test_a_run_goes_on_with_the_data_where_they_are_now(task, training):
    task.run.mkdir()
    (task.run / "config.json").touch()
    seen = []

    def resume(run, *, data, jobs, progress):
        seen.append((run, data, jobs))
        finished(run)

    training.resume = resume
    assert workers._trained(dataclasses.replace(task, jobs=3)).how == "done"
    assert seen == [(task.run, task.data, 3)]
    assert task.is_done


def test_what_a_process_left_that_was_killed_after_its_result(task, training):
    """Checkpoints, as large as two models with their moments, which nobody would look for."""
    (task.run / "checkpoints").mkdir(parents=True)
    finished(task.run)
    assert not task.is_done
    training.train = training.resume = raising(AssertionError)
    assert workers._trained(task).how == "done"
    assert not (task.run / "checkpoints").exists()
    assert task.is_done


def test_a_folder_without_a_run_is_made_anew(task, training):
    """Killed between two steps of writing down that a run diverged."""
    task.run.mkdir()
    training.train = lambda data, config, out, **more: finished(out)
    assert workers._trained(task).how == "done"


def test_what_a_killed_process_left_of_a_run_is_removed(task, training):
    """Of this run alone: another's may be under way."""
    left, another = (task.run.with_name(f".{name}.partial-1-ab") for name in ("run", "run2"))
    for folder in (left, another):
        (folder / "workflow").mkdir(parents=True)
    training.train = lambda data, config, out, **more: finished(out)
    assert workers._trained(task).how == "done"
    assert not left.exists()
    assert another.exists()


@pytest.mark.parametrize(
    "error",
    [
        NotFiniteError("The run diverged, with dense_lr=1"),
        UserError("predictions must be numbers. Received: NaN for 3 of 5 rows"),
    ],
)
def test_what_diverges(task, training, error):
    training.train = raising(error)
    assert workers._trained(task).how == "done"
    assert task.is_done
    assert json.loads((task.run / "diverged.json").read_text())["message"] == str(error)


def test_data_at_fault_are_no_divergence(task, training):
    training.train = raising(NotFiniteError("The data is at fault: 'a' is NaN. Prepare it again"))
    with pytest.raises(NotFiniteError, match="The data is at fault"):
        workers._trained(task)
    assert not task.is_done


def test_data_that_were_prepared_anew_meanwhile(task, training, monkeypatch):
    monkeypatch.setattr(workers, "identity_of", lambda data: "another")
    training.train = raising(AssertionError)
    with pytest.raises(UserError, match="the data of a sweep must stay what they are. Received: "):
        workers._trained(task)
    assert not task.is_done


def test_a_process_that_dies_before_its_task_is_told(task):
    """As one does whose main module cannot be imported."""
    worker = workers._Worker()
    os.kill(worker._process.pid, signal.SIGSTOP)
    worker.begin(task)
    os.kill(worker._process.pid, signal.SIGKILL)
    with pytest.raises(UserError, match="must live until it is done. Received: exit code -9"):
        worker.ended()
    worker.begin(task)
    with pytest.raises(UserError, match="must live until it is done"):
        worker.ended()
    worker.stop(at_work=True)
    worker.join()


def test_a_bug_is_told_as_one_with_its_traceback(task):
    """It is no want of memory, which kills by a signal."""
    broken = dataclasses.replace(task, claims=None)
    with pytest.raises(
        workers.FailedError, match=f"AttributeError: .*, while {task.run} was"
    ) as failed:
        list(workers.work_off([broken], 1))
    told = "".join(traceback.format_exception(failed.value))
    assert "in _trained" in told
    assert "memory" not in told


def test_a_process_that_ends_by_itself_is_given_no_advice_on_memory(task):
    worker = workers._Worker()
    worker._task = task
    worker.pipe.close()
    ours, theirs = multiprocessing.Pipe()
    theirs.close()
    worker.pipe = ours
    with pytest.raises(UserError, match="exit code 0 .* on the terminal") as refused:
        worker.ended()
    assert "memory" not in str(refused.value)


def test_want_of_memory_that_python_tells(task, training):
    """Which kills nothing."""
    training.train = raising(MemoryError)
    ours, theirs = multiprocessing.Pipe()
    ours.send(task)
    worker = threading.Thread(target=workers._work, args=(theirs,))
    worker.start()
    ended = ours.recv()
    ours.close()
    worker.join()
    assert (ended.how, "Give it more memory" in ended.message) == ("refused", True)


def test_a_process_whose_last_word_nobody_heard_ends(monkeypatch):
    monkeypatch.setattr(os, "setpgrp", lambda: None)
    ours, theirs = multiprocessing.Pipe()
    theirs.send("done")
    ours.close()
    workers._work(theirs)
