"""Locks of folders, which the system releases when a process ends, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from merlin_cowclip.workflows.training.one_at_a_time import LOCK


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Within it no other process is in `folder` or, where that is missing, in its parent."""
    home = next(f for f in (folder, *folder.absolute().parents) if os.path.isdir(f))
    try:
        number = os.open(home, os.O_RDONLY)
    except OSError:  # a folder that may not be read: what comes of it is for others to say
        yield
        return
    try:
        fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)


def is_trained_by_another(run: Path) -> bool:
    """Whether another process holds the lock of a run folder."""
    try:
        number = os.open(run / LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(number)
