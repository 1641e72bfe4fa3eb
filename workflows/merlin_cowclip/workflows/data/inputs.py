"""Input files: from what the user names to the files that are meant, and refusing what is none.

What is in a log is `raw_logs.py`'s; which parquet is a pipeline's, `existing_parquet.py`'s.
"""

from __future__ import annotations

import contextlib
import glob
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from merlin_cowclip.workflows.errors import UserError, quoted, shown

# A csv file's first bytes, where it is none: what it is, and what to do.
_MAGIC = {
    b"\x1f\x8b": ("a gzipped file must be named .gz", "Rename it"),
    b"PK\x03\x04": ("a file must be csv, or csv gzipped", "It is a zip archive: unpack it"),
    b"BZh": ("a file must be csv, or csv gzipped", "It is compressed by bzip2: unpack it"),
    b"\xfd7zXZ": ("a file must be csv, or csv gzipped", "It is compressed by xz: unpack it"),
    b"(\xb5/\xfd": ("a file must be csv, or csv gzipped", "It is compressed by zstd: unpack it"),
    b"PAR1": ("a file must be csv", "It is parquet: set format = 'parquet' in the description"),
}


def as_list(given: str | Path | Sequence[str | Path]) -> Sequence[str | Path]:
    """One argument, or several, as several."""
    return [given] if isinstance(given, (str, Path)) else given


def natural_order(path: Path) -> tuple[Any, ...]:
    """A key that sorts day_9/part_2 before day_9/part_10, and that before day_10."""
    pieces = [re.split(r"(\d+)", part) for part in path.parts]
    return ([[int(p) if p.isdecimal() else p for p in part] for part in pieces], str(path))


def matches(given: str | Path) -> list[Path] | None:
    """What a glob finds, files and folders, by `natural_order`; None if it is no glob."""
    if not glob.has_magic(str(given)):
        return None
    return sorted(map(Path, glob.glob(str(given), recursive=True)), key=natural_order)


def unfinished(given: str | Path, found: Path) -> Path | None:
    """The folder named `_…` that a glob which names none found a file in; None if there is none.

    As `_temporary`, in which Spark leaves what it has not finished, or has written once more.
    """
    pattern = Path(given).parts
    fixed = next((i for i, part in enumerate(pattern) if glob.has_magic(part)), len(pattern))
    if any(part.startswith("_") for part in pattern[fixed:]):
        return None
    for folder in reversed(found.parents):
        is_column = "=" in folder.name  # a partition, of a column `_…`
        if len(folder.parts) > fixed and folder.name.startswith("_") and not is_column:
            return folder
    return None


def expand_inputs(inputs: Sequence[str | Path]) -> list[Path]:
    """Files and globs to files: arguments in the order given, a glob's by `natural_order`.

    Raises:
        UserError: nothing given, a missing file, a glob without a match or with one in a folder
            named `_…`, a folder, an empty file, a file given twice, a name that cannot be one.
    """
    files: list[Path] = []
    for given in as_list(inputs):
        path = Path(given)
        try:
            there = path.exists()
        except (OSError, ValueError) as error:  # too long, or with a zero byte
            reason = getattr(error, "strerror", None) or error
            raise UserError(
                f"input must be a file name. Received: {shown(given)}: {reason}"
            ) from None
        found = [path] if there else matches(given)
        if found is None:
            raise UserError(f"input file must exist. Received: {path}")
        if not found:
            raise UserError(f"input pattern must match a file. Received: {str(given)!r}")
        for one in found if not there else ():
            if (folder := unfinished(given, one)) is not None:
                raise UserError(
                    f"input pattern must match no file in a folder named _…, as {folder}, where "
                    f"Spark leaves what it has not finished. Received: {str(given)!r}, which "
                    f"matches {one}. Remove the folder, or name it, or the files, one by one"
                )
        files += found
    if not files:
        raise UserError("at least one input file must be given. Received: none")
    for path in files:
        if not path.exists():
            raise UserError(f"input file must exist. Received: {path}, a link to nowhere")
        if path.is_dir():
            raise UserError(
                f"input must be a file. Received the folder: {path}. Name its files: "
                f"'{_files_pattern(path)}'"
            )
        if not path.is_file():
            raise UserError(
                f"input must be a file on a disk. Received the device or pipe: {path}. Write it "
                "to a file first"
            )
        if path.stat().st_size == 0:
            raise UserError(f"input file must not be empty. Received: {path}")
    refuse_twice(files)
    return files


def _files_pattern(folder: Path) -> str:
    """A glob of a folder's files; of those of its folders, where it has nothing but such."""
    pattern, inside = f"{folder}/*", folder
    with contextlib.suppress(OSError):  # of a folder that is not to be read
        while found := [one for one in inside.iterdir() if not one.name.startswith(".")]:
            if not all(one.is_dir() and not one.is_symlink() for one in found):
                break
            pattern, inside = f"{pattern}/*", min(found)
    return pattern


def in_folders(missing: Iterable[str], path: Path) -> str:
    """What to say of columns that a file lacks where the names of its folders tell them.

    As Hive, Spark and Arrow write a partitioned folder, of which all files in ``site=a`` lack
    ``site``.
    """
    wanted = set(missing)
    named = [part for part in path.parent.parts if "=" in part and part.split("=")[0] in wanted]
    if not named:
        return ""
    return (
        f". It stands in the names of folders, {quoted(named)}, which are not read: write it into "
        "the files (pandas.read_parquet reads it from the names)"
    )


def refuse_twice(files: Sequence[Path]) -> None:
    """Refuse a file that is given twice, whose rows would count twice.

    Raises:
        UserError: names both.
    """
    seen: dict[tuple[int, int], Path] = {}
    for path in files:
        status = path.stat()
        known = (status.st_dev, status.st_ino)  # by whatever name and link
        if known in seen:
            raise UserError(
                f"an input file must be given once. Received twice: {path}, first as {seen[known]}"
                ". Leave one out"
            )
        seen[known] = path


def refuse_no_csv(path: Path, head: bytes) -> None:
    """Refuse, by its first bytes, what is another kind of file.

    Raises:
        UserError: it is an archive, compressed, or parquet.
    """
    for magic, (rule, remedy) in _MAGIC.items():
        if head.startswith(magic):
            raise UserError(f"{rule}. Received: {path}. {remedy}")


def refuse_unreadable(path: Path, error: OSError) -> NoReturn:
    """Raise UserError for a file that the system does not give."""
    raise UserError(f"input file must be readable. Received: {path}: {error.strerror}") from None
