"""From the files, globs and folders that a user names to the list of input files."""

from __future__ import annotations

import fnmatch
import glob
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn

from dask.utils import natural_sort_key

from merlin_cowclip.workflows.errors import UserError, shown

HIDDEN = ("_", ".")  # how names begin that Spark and Hive skip


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
            matches = [path]
            if not path.exists():
                matches = [Path(match) for match in glob.glob(str(given), recursive=True)]
            found = [f for m in matches for f in (m.rglob("*") if m.is_dir() else [m])]
            if path.is_dir() or not path.exists():
                found = _visible(found, path)
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


def _visible(paths: Iterable[Path], given: Path) -> list[Path]:
    """Files with bytes that no hidden name leads to, unless it is given, in natural order."""
    meant = [part for part in given.parts if part.startswith(HIDDEN)]

    def is_hidden(part: str) -> bool:  # "_day=1" is a partition of a column
        named = any(fnmatch.fnmatch(part, pattern) for pattern in meant)
        return part.startswith(HIDDEN) and "=" not in part and not named

    files = {path for path in paths if not any(map(is_hidden, path.parts)) and path.is_file()}
    return sorted(
        sorted(path for path in files if path.stat().st_size),
        key=lambda path: natural_sort_key(str(path)),
    )


def refuse_twice(files: Iterable[Path]) -> None:
    """Raise UserError if a file is given twice, by whatever name and link."""
    seen: dict[tuple[int, int], Path] = {}
    for path in files:
        status = path.stat()
        key = status.st_dev, status.st_ino
        if key in seen:
            raise UserError(
                f"input file {path} is given twice (first as {seen[key]}). Leave one out"
            )
        seen[key] = path


def refuse_unreadable(path: Path, error: Exception) -> NoReturn:
    """Raise UserError for a file that cannot be read."""
    reason = getattr(error, "strerror", None) or error
    raise UserError(f"cannot read input file {shown(path)}: {reason}") from None
