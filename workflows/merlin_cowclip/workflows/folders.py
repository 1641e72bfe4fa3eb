# SPDX-License-Identifier: Apache-2.0
"""Outputs, folders and files: all or nothing, their records, and what they were written with."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib.metadata
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from merlin_cowclip.plugins._checks import check_path
from merlin_cowclip.workflows.errors import BusyError, UserError, clipped

LOCK = ".lock"  # in a folder that processes share, or that one trains


def refuse_existing(out: Path, what: str = "folder") -> None:
    """Raise UserError for a local output that exists or cannot be made, or for a URL.

    ``what`` it is, a "folder" or "file", is for the message.
    """
    if re.match(r"[A-Za-z][\w+.-]*:/", str(out)):  # pathlib makes s3:/a of s3://a
        raise UserError(
            f"output {what} must be a local path. Received: {out}. Name a local one, and copy it"
        )
    if os.path.lexists(out):  # also as a dangling link
        raise UserError(
            f"output {what} must not exist. Received: {out}. Name another, or remove it first"
        )
    if not os.access(_home(out), os.W_OK | os.X_OK):
        raise UserError(
            f"output {what} must be in a folder that can be written. Received: {out}. Name another"
        )


def refuse_pattern(path: Path, what: str) -> None:
    """Raise UserError for a path that TensorFlow interprets as a pattern; see `check_path`."""
    try:
        check_path(f"the path of a {what}", path)
    except ValueError as error:
        raise UserError(str(error)) from None


def _home(out: Path) -> Path:
    """The innermost folder around `out` that is there."""
    return next(parent for parent in out.absolute().parents if os.path.lexists(parent))


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
    """A hidden folder, or for a "file" a path in it, renamed to ``out`` at the end.

    It is removed on any failure. Raises UserError as `refuse_existing`, before and after the work.
    """
    refuse_existing(out, what)
    out = out.absolute()
    folder = _home(out) / f".{out.name[:50]}.partial-{os.getpid()}-{secrets.token_hex(4)}"
    folder.mkdir()
    try:
        content = folder / out.name if what == "file" else folder
        yield content
        refuse_existing(out, what)
        out.parent.mkdir(parents=True, exist_ok=True)
        os.rename(content, out)
    finally:
        remove(folder)


def make_once(out: Path, record: str, content: Any, folders: Iterable[str] = ()) -> None:
    """Make a folder with a JSON record and empty folders, unless it or another process has."""
    if os.path.lexists(out):
        return
    try:
        with all_or_nothing(out) as folder:
            for name in folders:
                (folder / name).mkdir()
            write_json(folder / record, content)
    except (OSError, UserError):
        if not (out / record).exists():
            raise


@contextlib.contextmanager
def locked(file: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock on a file, which is made; it ends with the process, however that ends.

    Raises:
        BusyError: another process holds it, unless `wait`.
        UserError: the file cannot be written.
    """
    try:
        handle = file.open("a")
    except OSError as error:
        raise UserError(f"cannot write in {file.parent}: {error.strerror}") from None
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            what = f"another process uses {file.parent}"
            raise BusyError(f"{what}. Wait for its end, or stop it") from None
        yield


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A place to write a file, so that a reader sees either what was there or all of it."""
    partial = path.with_name(f".{path.name}.partial")
    yield partial
    os.replace(partial, path)


def read_json(path: Path) -> dict[str, Any]:
    """Read what `write_json` wrote; an OSError or ValueError if it is not there or no JSON."""
    return dict(json.loads(path.read_text(encoding="utf-8")))


def read_record(folder: Path, name: str, version: int, what: str) -> dict[str, Any]:
    """Read the JSON record of a folder; raises UserError unless it is ``what``, of this version."""
    try:
        record = read_json(folder / name)
    except (OSError, ValueError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else clipped(str(error))
        raise UserError(
            f"{folder} is not {what}: cannot read {name}: {reason}. Name another, or write it again"
        ) from None
    if record.get("format") != version:
        raise UserError(
            f"{folder / name} has format {record.get('format')!r} instead of {version}. Write it "
            "again with this version"
        )
    return record


def write_json(path: Path, content: Any) -> None:
    """Write JSON so that a reader sees either what was there or all of it."""
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    with replacing(path) as partial:
        # A file's name need not be UTF-8: its odd bytes are written as JSON's escapes.
        partial.write_bytes(text.encode("utf-8", "backslashreplace"))


def package_versions(*others: str) -> dict[str, str]:
    """What a folder was written with, for its record."""
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    packages = ("merlin-cowclip", "nvtabular", "merlin-core", "pandas", "pyarrow", "numpy")
    for package in (*packages, *others):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    root = Path(__file__).parents[3]
    if "merlin-cowclip" in versions and (root / ".git").exists():
        versions["merlin-cowclip"] = _with_commit(versions["merlin-cowclip"], root)
    return versions


@functools.cache
def _with_commit(version: str, checkout: Path) -> str:
    """Replace the commit of the (editable) installation by the one that is checked out now."""
    describe = ["describe", "--always", "--exclude=*", "--dirty=.dirty", "--abbrev=9"]
    call = ["git", "--no-optional-locks", "-C", str(checkout), *describe]
    version = version.partition("+")[0]
    try:
        done = subprocess.run(call, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return version
    return f"{version}+g{done.stdout.strip()}"
