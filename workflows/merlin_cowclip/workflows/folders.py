"""Outputs, folders and files: all or nothing, their records, and what they were written with."""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import json
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from merlin_cowclip.plugins._checks import check_path
from merlin_cowclip.workflows.errors import UserError, shown


def refuse_existing(out: Path, what: str = "folder") -> None:
    """Refuse an output that is there, or cannot be made, before any work.

    Args:
        out: the place.
        what: a "folder", or "file".

    Raises:
        UserError: it exists, if only as a dangling link, or the folder around it cannot be written.
    """
    try:
        os.lstat(out)
    except FileNotFoundError:
        home = _home(out)
        if not os.path.isdir(home):
            _refuse_place(out, f"{home} is no folder", what)
        if not os.access(home, os.W_OK | os.X_OK):
            _refuse_place(out, os.strerror(errno.EACCES), what)
    except OSError as error:
        _refuse_place(out, error.strerror, what)
    else:
        raise UserError(
            f"output {what} must not exist. Received: {shown(out)}. Name another, or remove it "
            "first"
        )


def refuse_pattern(path: Path, what: str) -> None:
    """Refuse a path that TensorFlow takes for a pattern, as `check_path` does.

    Args:
        path: of what holds models or checkpoints.
        what: it is: "run", "study".

    Raises:
        UserError: it is such a path.
    """
    try:
        check_path(f"the path of a {what}", path)
    except ValueError as error:
        raise UserError(str(error)) from None


def _home(out: Path) -> Path:
    """The innermost folder around `out` that is there."""
    return next(parent for parent in out.absolute().parents if os.path.lexists(parent))


def _refuse_place(out: Path, found: str | None, what: str = "folder") -> NoReturn:
    raise UserError(
        f"output {what} must be in a folder that can be written. Received: {shown(out)}: {found}. "
        "Name another"
    ) from None


def remove(*paths: Path) -> None:
    """Remove files or folders, as far as we may."""
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()


@contextlib.contextmanager
def all_or_nothing(out: Path, what: str = "folder") -> Iterator[Path]:
    """A hidden folder, renamed to ``out`` at the end, or removed on any failure.

    For a "file" it is a place in that folder, where the file is to be written.

    Raises:
        UserError: it cannot be made, ``out`` has appeared meanwhile, or the disk is full.
    """
    out = out.absolute()
    folder = _home(out) / f".{out.name[:50]}.partial-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        try:
            folder.mkdir()
        except OSError as error:
            _refuse_place(out, error.strerror, what)
        whole = folder / out.name if what == "file" else folder
        yield whole
        refuse_existing(out, what)
        out.parent.mkdir(parents=True, exist_ok=True)
        os.rename(whole, out)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise UserError(
                f"output needs disk space. Received: none left for {out} "
                f"({os.strerror(error.errno)}). Free some, or name a {what} on another disk"
            ) from None
        raise
    finally:
        remove(folder)


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[None]:
    """Make ``out``, and remove it on any failure: for work that must know its own place.

    Raises:
        UserError: it exists, or cannot be made.
    """
    refuse_existing(out)
    try:
        out.mkdir(parents=True)
    except OSError as error:
        _refuse_place(out, error.strerror)
    try:
        yield
    except BaseException:
        remove(out)
        raise


def write_json(path: Path, content: Any) -> None:
    """Write JSON so that a reader sees either nothing or all of it."""
    partial = path.with_name(f".{path.name}.partial")
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    # A file's name need not be UTF-8: its odd bytes are written as JSON's escapes.
    try:
        partial.write_bytes(text.encode("utf-8", "backslashreplace"))
        os.replace(partial, path)
    except BaseException:
        remove(partial)
        raise


def package_versions(*others: str) -> dict[str, str]:
    """What a folder was written with, for its record."""
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    packages = ("merlin-cowclip", "nvtabular", "merlin-core", "pandas", "pyarrow", "numpy")
    for package in (*packages, *others):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions
