"""How a process of a sweep ends, told by substitutes of `train` and `resume`."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import traceback
from types import ModuleType, SimpleNamespace

import pytest

from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.study import workers
from merlin_cowclip.workflows.study.claims import Claims
from merlin_cowclip.workflows.training.configuration import TrainConfig


class NotFiniteError(UserError):
    """Substitute of the error of the NaN detection."""


@pytest.fixture
def task(tmp_path):
    (tmp_path / "data").mkdir()
    run, claims, data = (tmp_path / name for name in ("run", "claims", "data"))
    return workers.Task(run, claims, data, "sha", TrainConfig().to_dict())


@pytest.fixture
def training(monkeypatch):
    """What `_trained` imports; a test sets `train` and `resume`."""
    monkeypatch.setattr(workers, "identity_of", lambda data: "sha")
    found = SimpleNamespace(train=None, resume=None)
    contents = {
        "data.prepared_data": {"PreparedData": SimpleNamespace(open=lambda path: path)},
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


def test_an_interrupted_run_is_resumed_with_the_data_where_they_are_now(task, training):
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


def test_checkpoints_left_by_a_killed_process_are_removed(task, training):
    (task.run / "checkpoints").mkdir(parents=True)
    finished(task.run)
    assert not task.is_done
    training.train = training.resume = raising(AssertionError)
    assert workers._trained(task).how == "done"
    assert not (task.run / "checkpoints").exists()
    assert task.is_done


def test_a_run_of_another_process_is_left_to_it(task, training):
    claim = Claims(task.claims).take("run")
    assert workers._trained(task).how == "busy"
    claim.let_go()
    training.train = lambda data, config, out, **more: finished(out)
    assert workers._trained(task).how == "done"


@pytest.mark.parametrize(
    "error",
    [
        NotFiniteError("The run diverged, with dense_lr=1"),
        UserError("predictions must be numbers. Received: NaN for 3 of 5 rows"),
    ],
)
def test_a_diverged_run_is_done(task, training, error):
    training.train = raising(error)
    assert workers._trained(task).how == "done"
    assert task.is_done
    assert json.loads((task.run / "diverged.json").read_text())["message"] == str(error)


def test_data_that_were_prepared_again_meanwhile_are_refused(task, training, monkeypatch):
    monkeypatch.setattr(workers, "identity_of", lambda data: "another")
    training.train = raising(AssertionError)
    with pytest.raises(UserError, match="the data of a sweep must stay what they are. Received: "):
        workers._trained(task)
    assert not task.is_done


@pytest.mark.extended
def test_an_internal_error_has_its_traceback(task):
    broken = dataclasses.replace(task, claims=None)
    with pytest.raises(
        workers.FailedError, match=f"AttributeError: .*, while {task.run} was"
    ) as failed:
        list(workers.work_off([broken], 1))
    assert "in _trained" in "".join(traceback.format_exception(failed.value))


def test_processes_share_the_cores(monkeypatch):
    inter, intra = "TF_NUM_INTEROP_THREADS", "TF_NUM_INTRAOP_THREADS"
    monkeypatch.delenv(inter, raising=False)
    monkeypatch.setenv(intra, "3")
    monkeypatch.setattr(os, "cpu_count", lambda: 9)
    with workers._share_of_the_cores(1):
        assert inter not in os.environ
    with workers._share_of_the_cores(4):
        assert (os.environ[inter], os.environ[intra]) == ("2", "3")
    assert inter not in os.environ
