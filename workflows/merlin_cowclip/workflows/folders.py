"""Output folders: all or nothing, and what they were written with."""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from merlin_cowclip.workflows.errors import UserError, shown


def refuse_existing(out: Path) -> None:
    """Refuse an output folder that is there, or cannot be made, before any work.

    Raises:
        UserError: it exists, if only as a dangling link; its name is none that a disk and JSON
            take; or the folder that it would be in cannot be written.
    """
    try:
        str(out).encode()
    except UnicodeEncodeError:
        raise UserError(
            f"output folder must have a name that is text. Received: {str(out)!a}. Name another"
        ) from None
    try:
        os.lstat(out)
    except FileNotFoundError:
        home = _home(out)
        if not os.path.isdir(home):
            _refuse_place(out, f"{home} is no folder")
        if not os.access(home, os.W_OK | os.X_OK):
            _refuse_place(out, os.strerror(errno.EACCES))
    except OSError as error:
        _refuse_place(out, error.strerror)
    else:
        raise UserError(
            f"output folder must not exist. Received: {shown(out)}. Name another, or remove it "
            "first"
        )


def _home(out: Path) -> Path:
    """The innermost folder around `out` that is there."""
    return next(parent for parent in out.absolute().parents if os.path.lexists(parent))


def _refuse_place(out: Path, found: str | None) -> NoReturn:
    raise UserError(
        f"output folder must be in a folder that can be written. Received: {shown(out)}: {found}. "
        "Name another"
    ) from None


@contextlib.contextmanager
def all_or_nothing(out: Path) -> Iterator[Path]:
    """A hidden folder beside ``out``, renamed to it at the end, or removed on any failure.

    Raises:
        UserError: it cannot be made, ``out`` has appeared meanwhile, or the disk is full.
    """
    out = out.absolute()
    # A name that fits, together with the rest of it, wherever the folder's own does.
    folder = _home(out) / f".{out.name[:50]}.partial-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        folder.mkdir()
    except OSError as error:
        _refuse_place(out, error.strerror)
    try:
        yield folder
        refuse_existing(out)
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            os.rename(folder, out)
        except OSError as error:  # another command was faster
            if error.errno == errno.ENOSPC:
                raise
            _refuse_place(out, error.strerror)
    except OSError as error:
        if error.errno == errno.EMFILE:
            raise UserError(
                "as many files must be allowed to be open as columns are read at a time. Received: "
                "a limit that was reached. Raise it (ulimit -n 65536), or prepare fewer columns"
            ) from None
        if error.errno != errno.ENOSPC:
            raise
        raise UserError(
            f"output needs disk space. Received: none left for {out}. Free some, or name a folder "
            "on another disk"
        ) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def package_versions() -> dict[str, str]:
    """What a folder was written with, for its record."""
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in ("merlin-cowclip", "nvtabular", "merlin-core", "pandas", "pyarrow", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions
