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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from merlin_cowclip.plugins.checks import check_path
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


@dataclass(eq=False)
class _Output:
    """What a command writes, in a folder that is known again by its number on the disk."""

    out: Path
    unfinished: Path | None  # the folder while it is not whole; afterwards there is none there
    number: tuple[int, int] | None
    file: tuple[int, int] | None = None  # of a file that is the output, and lies in the folder

    @classmethod
    def begun(cls, out: Path, folder: Path) -> _Output:
        """``folder`` was made, to become ``out``."""
        output = cls(out, folder, _number(folder))
        _outputs.append(output)
        return output

    def remove(self) -> None:
        """Remove what is not whole; not what somebody else has put in its place."""
        if self.unfinished is not None and _number(self.unfinished) == self.number:
            remove(self.unfinished)

    @property
    def is_whole(self) -> bool:
        """Whether what was written has its name."""
        number = self.file or self.number
        return number is not None and _number(self.out) == number

    def ended(self) -> None:
        """Nothing unfinished is there any more."""
        self.unfinished = None
        if not self.is_whole:  # which may be another folder's number from now on
            self.number = self.file = None


_outputs: list[_Output] = []  # of the command that runs


def forget_outputs() -> None:
    """A command begins: what earlier ones wrote in this process is no matter of its ending."""
    _outputs.clear()


def finished_output() -> Path | None:
    """The last output that is whole, once what is not is removed; for a command's ending.

    It is removed as the work ends, unless an interrupt comes between two steps of just that.
    """
    for output in _outputs:
        output.remove()
    finished = (o.out for o in reversed(_outputs) if o.is_whole)
    return next(finished, None)


def _number(path: Path) -> tuple[int, int] | None:
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def remove(*paths: Path) -> None:
    """Remove files or folders, as far as we may.

    Raises:
        KeyboardInterrupt: one came meanwhile; nothing is left all the same.
    """

    def work() -> None:
        for path in paths:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    path.unlink()

    _to_the_end(work)


def _to_the_end(work: Callable[[], None]) -> None:
    """Do what can be begun again, until it is done; an interrupt has to wait for that."""
    interrupt = None
    while True:
        try:
            work()
            break
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt


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
    output = None
    try:
        try:
            folder.mkdir()
        except OSError as error:
            _refuse_place(out, error.strerror, what)
        output = _Output.begun(out, folder)
        whole, beside = folder, f"{out.name[:50]}-{token}"
        if what == "file":
            whole, beside = folder / out.name, f"{out.stem[:50]}-{token}{out.suffix[:50]}"
        yield whole
        if what == "file":
            output.file = _number(whole)
        _put_in_place(output, whole, folder.with_name(beside) if is_work else None, what)
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
        if output is not None:
            output.ended()


def _put_in_place(output: _Output, whole: Path, beside: Path | None, what: str) -> None:
    """Rename what is whole to its output or, where that cannot be, to a name beside it.

    Raises:
        UserError: it lies beside, or where it lay.
    """
    out = output.out
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
        output.out = beside
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
        output = _Output.begun(out, out)
        try:
            yield
            output.unfinished = None
        finally:
            output.remove()
            output.ended()


@contextlib.contextmanager
def _parents(out: Path) -> Iterator[None]:
    """Make the folders around ``out``; a failure removes those that it made and that are empty.

    Raises:
        UserError: they cannot be made.
    """
    missing = [parent for parent in out.parents if not os.path.lexists(parent)]

    def remove_empty() -> None:
        for parent in missing:  # the innermost first
            with contextlib.suppress(OSError):
                parent.rmdir()

    try:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            _refuse_place(out, error.strerror)
        yield
    except BaseException:
        _to_the_end(remove_empty)
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
