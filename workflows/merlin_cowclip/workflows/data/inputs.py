"""Globs and folders of adopted parquet."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Sequence
from pathlib import Path

from merlin_cowclip.workflows.data.sources.files import natural_order
from merlin_cowclip.workflows.errors import quoted


def as_list(given: str | Path | Sequence[str | Path]) -> Sequence[str | Path]:
    """One argument, or several, as several."""
    return [given] if isinstance(given, (str, Path)) else given


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
