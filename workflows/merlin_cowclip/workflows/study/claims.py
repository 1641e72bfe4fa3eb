"""What a process has taken on, so that no other does it as well; dead, it has let it go.

A claim is a lock on a file: the system lets go of it when the process ends, however it ends. No
clock has to run out before a killed process's work is found.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from merlin_cowclip.workflows.errors import UserError

_ALL = "all"


class Claims:
    """The locks of one folder.

    Args:
        folder: where they lie; is made.

    Raises:
        UserError: it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise _refusal(folder, error) from None

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Within it no other process is; it waits until that is so."""
        number = self._open(_ALL)
        try:
            fcntl.flock(number, fcntl.LOCK_EX)
            yield
        finally:
            os.close(number)

    def take(self, what: str) -> Claim | None:
        """Claim something; `None` if another process, or this one, has it."""
        number = self._open(what)
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(number)
            return None
        return Claim(number)

    def _open(self, name: str) -> int:
        try:
            return os.open(self._folder / name, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise _refusal(self._folder, error) from None


class Claim:
    """One thing that this process has taken on."""

    def __init__(self, number: int) -> None:
        self._number: int | None = number

    def let_go(self) -> None:
        """It is done, or given up; once is enough."""
        number, self._number = self._number, None
        if number is not None:
            os.close(number)


def _refusal(folder: Path, error: OSError) -> UserError:
    return UserError(
        f"a tune or a sweep must be a folder that can be written. Received: {folder.parent}: "
        f"{error.strerror}. Let it be written, or copy it"
    )


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Within it no other process is in `folder`, which need not be writable, or in a folder of it.

    That is of the innermost one that is there, where `folder` itself is not.
    """
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
