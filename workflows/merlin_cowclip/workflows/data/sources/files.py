"""From the files, globs and folders that a user names to the list of input files."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from merlin_cowclip.workflows.errors import UserError, shown

HIDDEN = ("_", ".")  # how names begin that Spark and Hive pass over


def natural_order(path: Path) -> tuple[Any, ...]:
    """A key that sorts day_9/part_2 before day_9/part_10, and that before day_10."""
    pieces = [re.split(r"(\d+)", part) for part in path.parts]
    return ([[int(p) if p.isdecimal() else p for p in part] for part in pieces], str(path))


def expand_paths(inputs: str | Path | Sequence[str | Path]) -> list[Path]:
    """List the files of all inputs: in the order given, those of a glob or folder naturally.

    A folder means all files below it. In folders and globs, empty files and names that begin with
    ``_`` or ``.`` are skipped, as in Spark and Hive.

    Raises:
        UserError: an input has no file, or a file is given twice.
    """
    files: list[Path] = []
    for given in [inputs] if isinstance(inputs, (str, Path)) else inputs:
        path = Path(given)
        try:
            if path.is_dir():
                found = _visible(path.rglob("*"), len(path.parts))
            elif path.exists():
                found = [path]
            else:
                found = _matches(str(given))
        except (OSError, ValueError) as error:  # too long a name, or one with a zero byte
            refuse_unreadable(path, error)
        if not found:
            raise UserError(f"no input file found for {shown(given)}. Check the path")
        files += found
    if not files:
        raise UserError("no input file given. Name at least one")
    for path in files:
        if not path.is_file() or path.stat().st_size == 0:
            found_instead = "is empty" if path.is_file() else "is not a regular file"
            raise UserError(f"input file {path} {found_instead}. Leave it out, or write it again")
    refuse_twice(files)
    return files


def _matches(pattern: str) -> list[Path]:
    """The files that a glob finds, also within the folders that it finds."""
    parts = Path(pattern).parts
    fixed = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    if any(part.startswith(HIDDEN) for part in parts[fixed:]):  # hidden ones are meant
        fixed = len(parts)
    found = map(Path, glob.glob(pattern, recursive=True) if glob.has_magic(pattern) else [])
    below = [file for path in found for file in (path.rglob("*") if path.is_dir() else [path])]
    return _visible(set(below), fixed)


def _visible(paths: Iterable[Path], fixed: int) -> list[Path]:
    """Files with bytes, of which no part of the path behind the first ``fixed`` is hidden."""

    def is_visible(part: str) -> bool:
        return not part.startswith(HIDDEN) or "=" in part  # a partition of a column `_…`

    return sorted(
        (
            path
            for path in paths
            if all(map(is_visible, path.parts[fixed:])) and path.is_file() and path.stat().st_size
        ),
        key=natural_order,
    )


def refuse_twice(files: Sequence[Path]) -> None:
    """Check that no file is given twice: its rows would count twice.

    Raises:
        UserError: names both paths.
    """
    seen: dict[tuple[int, int], Path] = {}
    for path in files:
        try:
            status = path.stat()
        except OSError as error:  # a link to nothing
            refuse_unreadable(path, error)
        known = (status.st_dev, status.st_ino)  # by whatever name and link
        if known in seen:
            raise UserError(
                f"input file {path} is given twice (first as {seen[known]}). Leave one out"
            )
        seen[known] = path


def refuse_unreadable(path: Path, error: Exception) -> NoReturn:
    """Raise UserError for a file that cannot be read."""
    reason = getattr(error, "strerror", None) or error
    raise UserError(f"cannot read input file {shown(path)}: {reason}") from None
