"""Outputs, folders and files: all or nothing, their records, and what they were written with."""

from __future__ import annotations

import contextlib
import errno
import glob
import importlib.metadata
import json
import os
import resource
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
        UserError: it exists, if only as a dangling link; its name is none that a disk and JSON
            take; or the folder that it would be in cannot be written.
    """
    try:
        str(out).encode()
    except UnicodeEncodeError:
        raise UserError(
            f"output {what} must have a name that is text. Received: {str(out)!a}. Name another"
        ) from None
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


def _partial(out: Path) -> str:
    """How the name begins of what is to become ``out``."""
    return f".{out.name[:50]}.partial-"


def begun_before(out: Path) -> list[Path]:
    """The hidden folders that killed processes have left of `all_or_nothing`.

    For one who knows that no other process makes ``out``: of one that lives it may be, too.
    """
    return list(out.parent.glob(f"{glob.escape(_partial(out))}*"))


@contextlib.contextmanager
def all_or_nothing(out: Path, what: str = "folder", *, is_work: bool = True) -> Iterator[Path]:
    """A hidden folder beside ``out``, renamed to it at the end, or removed on any failure.

    Where ``out`` cannot be made at the end, another command having been faster, the folder is whole
    all the same: it gets a name beside, which the error tells, unless it is no work to make it
    again. For a "file" it is a place in that
    folder, where the file is to be written.

    Raises:
        UserError: it cannot be made, ``out`` has appeared meanwhile, the disk is full, or too many
            files are open.
    """
    out = out.absolute()
    # A name that fits, together with the rest of it, wherever the folder's own does.
    token = secrets.token_hex(4)
    folder = _home(out) / f"{_partial(out)}{os.getpid()}-{token}"
    try:
        try:
            folder.mkdir()
        except OSError as error:
            _refuse_place(out, error.strerror, what)
        whole, beside = folder, f"{out.name[:50]}-{token}"
        if what == "file":
            whole, beside = folder / out.name, f"{out.stem[:50]}-{token}{out.suffix[:50]}"
        yield whole
        _put_in_place(out, whole, folder.with_name(beside) if is_work else None, what)
    except OSError as error:
        if error.errno == errno.EMFILE:
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            raise UserError(
                "as many files must be allowed to be open as are needed at once. Received: a limit "
                f"of {most:,}, which was reached. Raise it: ulimit -n 65536"
            ) from None
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise UserError(
            f"output needs disk space. Received: none left for {out} ({os.strerror(error.errno)}). "
            f"Free some, or name a {what} on another disk"
        ) from None
    finally:
        remove(folder)


def _put_in_place(out: Path, whole: Path, beside: Path | None, what: str) -> None:
    """Rename what is whole to its output or, where that cannot be, to a name beside it.

    Raises:
        UserError: it lies beside, or where it lay.
    """
    try:
        refuse_existing(out, what)
        with _parents(out):
            try:
                _rename(whole, out, what)
            except OSError as error:
                refuse_existing(out, what)  # another command was faster
                _refuse_place(out, error.strerror, what)
    except UserError as refusal:
        if beside is None:
            raise
        os.rename(whole, beside)
        raise UserError(f"{refusal}. What was to be there is whole, and lies in {beside}") from None


def _rename(whole: Path, out: Path, what: str) -> None:
    """Rename to what must not be there; of files the system itself would take its place."""
    if what == "file":
        try:
            os.link(whole, out)
            return
        except FileExistsError:
            raise
        except OSError:
            pass  # a disk without links
    os.rename(whole, out)


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[None]:
    """Make ``out``, and remove it on any failure: for what must know its own place meanwhile.

    Raises:
        UserError: it exists, or cannot be made.
    """
    out = out.absolute()
    refuse_existing(out)
    with _parents(out):
        try:
            out.mkdir()
        except OSError as error:
            refuse_existing(out)  # another command was faster
            _refuse_place(out, error.strerror)
        try:
            yield
        except BaseException:
            remove(out)
            raise


@contextlib.contextmanager
def _parents(out: Path) -> Iterator[None]:
    """Make the folders around ``out``; a failure removes those that it made and that are empty.

    Raises:
        UserError: they cannot be made.
    """
    missing = [parent for parent in out.parents if not os.path.lexists(parent)]
    try:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            _refuse_place(out, error.strerror)
        yield
    except BaseException:
        for parent in missing:  # the innermost first
            with contextlib.suppress(OSError):
                parent.rmdir()
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


def package_versions() -> dict[str, str]:
    """What a folder was written with, for its record."""
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in ("merlin-cowclip", "nvtabular", "merlin-core", "pandas", "pyarrow", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions
