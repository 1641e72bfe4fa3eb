# SPDX-License-Identifier: Apache-2.0
"""Runs trained by several processes: begun, or resumed; of several sweeps, each by one."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import signal
import threading
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from merlin_cowclip.workflows.errors import NotFiniteError, Stopped, UserError
from merlin_cowclip.workflows.folders import remove, write_json
from merlin_cowclip.workflows.training.configuration import CheckpointConfig, TrainConfig
from merlin_cowclip.workflows.training.runs import CHECKPOINTS, CONFIG, RESULT

DIVERGED = "diverged.json"  # instead of the result, of a run whose loss or weights were not finite
_LOCK = ".lock"  # in the folder of all runs: a byte for each
_training = threading.Lock()


@dataclass(frozen=True)
class Task:
    """A run to train in `run` on the prepared folder `data`, shown by `name`.

    Its result holds `jobs`, how many are trained at a time, for they lengthen each other's time.
    """

    name: str
    run: Path
    data: Path
    config: dict[str, Any]  # `TrainConfig.to_dict`
    jobs: int = 1


def is_done(run: Path) -> bool:
    """Whether it ended, with a result or without."""
    return any((run / name).exists() for name in (RESULT, DIVERGED))


def run_all(tasks: Sequence[Task], jobs: int) -> Iterator[Task]:
    """Train runs, `jobs` at a time; yields each as it ends. What ends it early saves the others.

    Raises:
      UserError: what a run is refused with, or a process was killed.
      Stopped: a process was told to stop.
    """
    others = multiprocessing.active_children()
    # Spawned: a fork would lose TensorFlow's threads.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, context, _begin, (jobs,))
    try:
        futures = {pool.submit(_train, task): task for task in tasks}
        for future in as_completed(futures):
            if not future.result():
                raise Stopped("a process that trains was told to stop", signal.SIGTERM)
            yield futures[future]
    except BaseException as error:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in multiprocessing.active_children():
            if child not in others:
                child.terminate()  # after the step in hand, with a checkpoint
        if isinstance(error, BrokenProcessPool):
            raise UserError(
                "a process that trains must live until it is done. Received: one that was killed, "
                "probably for memory. Use fewer jobs, or start again to go on"
            ) from None
        raise
    finally:
        pool.shutdown()


def _begin(jobs: int) -> None:
    """What a process begins with: its share of the cores, and its end with the parent."""
    os.setpgrp()  # Ctrl-C is for the one that started it, which tells this one once
    if jobs > 1:
        cores = str(max(1, (os.cpu_count() or 1) // jobs))
        for name in ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
            os.environ.setdefault(name, cores)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)  # ends it or, in a training, saves the run
    with _training:
        os._exit(1)


def _train(task: Task) -> bool:
    """Train a run, or resume it, unless another sweep has; false if it was told to stop."""
    try:
        with _training, alone_with(task.run):
            if not is_done(task.run):
                _train_or_resume(task)
    except KeyboardInterrupt:
        return False
    return True


@contextlib.contextmanager
def alone_with(run: Path) -> Iterator[None]:
    """Wait until no other process has a run; the end of a process releases it."""
    with (run.parent / _LOCK).open("ab") as file:
        fcntl.lockf(file, fcntl.LOCK_EX, 1, zlib.crc32(run.name.encode()))
        yield


def _train_or_resume(task: Task) -> None:
    from merlin_cowclip.workflows.data.prepared_data import PreparedData
    from merlin_cowclip.workflows.training.train import resume, train

    how: dict[str, Any] = {"jobs": task.jobs, "progress": False}
    try:
        if (task.run / CONFIG).exists():
            resume(task.run, data=task.data, **how)
        else:
            config, checkpointing = TrainConfig.from_dict(task.config), CheckpointConfig(keep=1)
            data = PreparedData.open(task.data)
            train(data, config, task.run, checkpointing=checkpointing, **how)
        remove(task.run / CHECKPOINTS)
    except NotFiniteError as error:
        remove(task.run / CHECKPOINTS)
        task.run.mkdir(exist_ok=True)
        write_json(task.run / DIVERGED, {"config": task.config, "message": str(error)})
