"""Runs that are trained by several processes, each one run after the other.

A run that was begun before is gone on with; one that is finished, here or by another sweep of the
same folder, is left alone. What a signal ends is saved.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from merlin_cowclip.workflows.errors import Stopped, UserError
from merlin_cowclip.workflows.folders import begun_before, remove, write_json
from merlin_cowclip.workflows.study.claims import Claims
from merlin_cowclip.workflows.training.configuration import TrainConfig
from merlin_cowclip.workflows.training.runs import CHECKPOINTS, CONFIG, RESULT, identity_of

DIVERGED = "diverged.json"  # instead of the result, of a run whose loss or weights were not finite
_MORE_MEMORY = "Give it more memory, or use fewer jobs"
_PAUSE = 5.0  # seconds before another look at a run that somebody else trains


@dataclass(frozen=True)
class Task:
    """A run to train.

    Attributes:
      run: the run folder.
      claims: a folder by which processes agree on who trains it.
      data: the prepared folder.
      data_sha256: of its rows, as the sweep found them.
      config: `TrainConfig.to_dict`.
      jobs: how many are trained at a time; its result says so, for they lengthen each other's time.
    """

    run: Path
    claims: Path
    data: Path
    data_sha256: str
    config: dict[str, Any]
    jobs: int = 1

    @property
    def is_done(self) -> bool:
        """Whether it ended, with a result or without, and left no checkpoints behind."""
        return self.has_ended and not (self.run / CHECKPOINTS).exists()

    @property
    def has_ended(self) -> bool:
        """Whether there is nothing more to train."""
        return any((self.run / name).exists() for name in (RESULT, DIVERGED))


@dataclass(frozen=True)
class Ended:
    """How a task ended: "done", "busy", or with a message "stopped", "refused" or "failed".

    What failed is a bug; it has a traceback.
    """

    task: Task
    how: str
    message: str = ""
    traceback: str = ""


class FailedError(Exception):
    """A bug, in a process that trains; the cause has its traceback."""


def work_off(tasks: Sequence[Task], jobs: int) -> Iterator[Task]:
    """Train runs, `jobs` at a time; yields each as it ends.

    Raises:
      UserError: what a run is refused with; those in hand are saved.
      FailedError: a bug; likewise.
      Stopped: a process was told to stop; likewise.
      KeyboardInterrupt: this one was; likewise.
    """
    waiting = deque(tasks)
    with _share_of_the_cores(jobs):  # also where fewer are left: threads change the last bits
        workers = [_Worker() for _ in range(min(jobs, len(waiting)))]
    idle = list(workers)
    try:
        while waiting or len(idle) < len(workers):
            while waiting and idle:
                idle.pop().begin(waiting.popleft())
            at_work = [worker for worker in workers if worker not in idle]
            ready = wait([worker.pipe for worker in at_work])
            for worker in at_work:
                if worker.pipe not in ready:
                    continue
                ended = worker.ended()
                idle.append(worker)
                if ended.how == "busy":
                    waiting.append(ended.task)
                    time.sleep(_PAUSE / max(1, len(waiting)))
                elif ended.how == "done":
                    yield ended.task
                elif ended.how == "stopped":
                    raise Stopped(ended.message, signal.SIGTERM)
                elif ended.how == "refused":
                    raise UserError(ended.message)
                else:
                    raise FailedError(ended.message) from RuntimeError(f"\n{ended.traceback}")
    finally:
        for worker in workers:  # all are told before any is waited for
            worker.stop(at_work=worker not in idle)
        for worker in workers:
            worker.join()


@contextlib.contextmanager
def _share_of_the_cores(jobs: int) -> Iterator[None]:
    """What begins within has its share of the cores, if the environment does not say otherwise.

    Each would take all of them, and wait for the others': with small batches that costs a third of
    the time and more.
    """
    names = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
    unsaid = [name for name in names if jobs > 1 and name not in os.environ]
    os.environ.update(dict.fromkeys(unsaid, str(max(1, (os.cpu_count() or 1) // jobs))))
    try:
        yield
    finally:
        for name in unsaid:
            del os.environ[name]


class _Worker:
    """A process, and the pipe to it."""

    def __init__(self) -> None:
        # Not forked: TensorFlow's threads would be lost.
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self._task: Task | None = None

    def begin(self, task: Task) -> None:
        self._task = task
        with contextlib.suppress(OSError):  # it has died, which `ended` says
            self.pipe.send(task)

    def ended(self) -> Ended:
        assert self._task is not None
        try:
            found: Ended = self.pipe.recv()
        except (EOFError, OSError):  # reset, where it died before it read its task
            self._process.join()
            code = self._process.exitcode
            killed = code is not None and code < 0
            why = _MORE_MEMORY if killed else "What it said is on the terminal"
            raise UserError(
                f"a process that trains must live until it is done. Received: exit code {code} "
                f"while it trained {self._task.run}. {why}; start again to go on"
            ) from None
        return found

    def stop(self, *, at_work: bool) -> None:
        """Tell it to end, after the update in hand, saved."""
        if at_work and self._process.is_alive() and self._process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGTERM)
        self.pipe.close()

    def join(self) -> None:
        self._process.join()


def _work(pipe: Connection) -> None:
    """What a process does until nobody gives it more."""
    os.setpgrp()  # Ctrl-C is for the one that started it, which tells this one once
    while True:
        try:
            task = pipe.recv()
        except (EOFError, OSError):  # nobody is there any more
            return
        try:
            ended = _trained(task)
        except Stopped as error:
            ended = Ended(task, "stopped", str(error))
        except UserError as error:
            ended = Ended(task, "refused", str(error))
        except MemoryError:
            ended = Ended(
                task,
                "refused",
                "the machine's memory must suffice. Received: less than it takes to train "
                f"{task.run}. {_MORE_MEMORY}; start again to go on",
            )
        except Exception as error:
            what = "".join(traceback.format_exception_only(error)).strip()
            message = f"{what}, while {task.run} was trained"
            ended = Ended(task, "failed", message, traceback.format_exc())
        try:
            pipe.send(ended)
        except OSError:  # nobody is there any more; the run is
            return


def _trained(task: Task) -> Ended:
    """Train a run, or go on with it, and let its checkpoints go.

    Raises:
      UserError, Stopped: as `train` does.
    """
    from merlin_cowclip.workflows.data.prepared_data import PreparedData
    from merlin_cowclip.workflows.training.keeping import Keeping
    from merlin_cowclip.workflows.training.train import resume, train
    from merlin_cowclip.workflows.training.watch import NotFiniteError

    claim = Claims(task.claims).take(task.run.name)
    if claim is None:
        return Ended(task, "busy")
    try:
        try:
            if task.has_ended:
                pass  # here, or by another sweep, which may have been killed since
            elif (task.run / CONFIG).exists():
                resume(task.run, data=task.data, jobs=task.jobs, progress=False)
            else:
                # Of one that was killed as it wrote down how it diverged, or as it began.
                remove(task.run, *begun_before(task.run))
                data = PreparedData.open(task.data)
                if identity_of(data) != task.data_sha256:
                    raise UserError(
                        "the data of a sweep must stay what they are. Received: "
                        f"{task.data}, with other rows than when it began. Put the data back, or "
                        "sweep into another folder"
                    )
                config = TrainConfig.from_dict(task.config)
                keeping = Keeping(keep=1, saved_model=False)
                train(data, config, task.run, keeping=keeping, jobs=task.jobs, progress=False)
        except UserError as error:
            numbers = isinstance(error, NotFiniteError) or "predictions must be numbers" in str(
                error
            )
            if not numbers or "The data is at fault" in str(error):
                raise
            remove(task.run)
            task.run.mkdir()
            write_json(task.run / DIVERGED, {"config": task.config, "message": str(error)})
        remove(task.run / CHECKPOINTS)
    finally:
        claim.let_go()
    return Ended(task, "done")
