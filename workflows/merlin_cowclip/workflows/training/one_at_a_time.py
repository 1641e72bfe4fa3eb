"""One process at a time: in a run that is trained, or a folder that several share."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from merlin_cowclip.workflows.errors import UserError

LOCK = ".lock"  # within the run


@contextlib.contextmanager
def locked(run: Path) -> Iterator[None]:
    """Hold the run's lock, which the system lets go when the process ends, however it ends."""
    try:
        number = os.open(run / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise UserError(
            f"a run that is trained must be a folder that can be written. Received: {run}: "
            f"{error.strerror}. Name another, or copy it"
        ) from None
    with os.fdopen(number, "w"):
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(
                f"a run must be trained by one process at a time. Received: {run}, which another "
                "one trains. Wait for its end, or stop it"
            ) from None
        yield


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Wait until no other process is in `folder` or, where that is missing, in its parent."""
    home = next(one for one in (folder, *folder.absolute().parents) if os.path.isdir(one))
    number = os.open(home, os.O_RDONLY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)
