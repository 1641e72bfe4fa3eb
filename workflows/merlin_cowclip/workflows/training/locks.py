# SPDX-License-Identifier: Apache-2.0
"""One process at a time: in a run that is trained, or a folder that several share."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from merlin_cowclip.workflows.errors import UserError

LOCK = ".lock"  # within the run


def run_lock(run: Path) -> IO[str]:
    """Lock a run until the file that is returned is closed, or the process ends, however it ends.

    Raises:
      UserError: another process trains the run, or its folder cannot be written.
    """
    try:
        file = (run / LOCK).open("a")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise UserError(
            f"a run must be trained by one process at a time. Received: {run}, which another one "
            "trains. Wait for its end, or stop it"
        ) from None
    except OSError as error:
        raise UserError(
            f"a run that is trained must be a folder that can be written. Received: {run}: "
            f"{error.strerror}. Name another, or copy it"
        ) from None
    return file


@contextlib.contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Wait until no other process is in `folder` or, where that is missing, in its parent."""
    home = next(one for one in (folder, *folder.absolute().parents) if os.path.isdir(one))
    number = os.open(home, os.O_RDONLY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)
