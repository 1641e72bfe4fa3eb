# SPDX-License-Identifier: Apache-2.0
"""From the files, globs and folders that a user names to the list of input files."""

from __future__ import annotations

import glob
import itertools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from dask.utils import natural_sort_key

from merlin_cowclip.workflows.errors import UserError

HIDDEN = ("_", ".")  # how names begin that Spark and Hive skip


def expand_paths(inputs: str | Path | Sequence[str | Path]) -> dict[Path, Path]:
    """List the files of all inputs: in the order given, those of a glob or folder naturally.

    Returns the files with their root: the folder given, the fixed start of the glob, or the file's
    own folder. Hive's columns come from folder names below the root.

    A folder means all files below it. In folders and globs, empty files and names that begin with
    ``_`` or ``.`` are skipped, as in Spark and Hive. Raises UserError if an input has no file, or a
    file is given twice.
    """
    files: list[tuple[Path, Path]] = []
    for given in [inputs] if isinstance(inputs, (str, Path)) else inputs:
        path = Path(given)
        is_file = os.path.exists(path) and not os.path.isdir(path)
        found = [(path, path.parent)] if is_file else _found(path)
        if not found:
            raise UserError(f"no input file found for {given}. Check the path")
        files += found
    if not files:
        raise UserError("no input file given. Name at least one")
    for path, _ in files:
        if not path.is_file() or path.stat().st_size == 0:
            found_instead = "is empty" if path.is_file() else "is not a regular file"
            raise UserError(f"input file {path} {found_instead}. Leave it out, or write it again")
        if not os.access(path, os.R_OK):
            raise UserError(f"cannot read input file {path}: Permission denied")
    refuse_twice([path for path, _ in files])
    return dict(files)


def _found(given: Path) -> list[tuple[Path, Path]]:
    """Files with bytes of a folder or glob, but hidden ones, in natural order; and their root."""
    base, matches = given, [given]
    if not os.path.isdir(given):
        base = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), given.parts))
        matches = [Path(match) for match in glob.glob(str(given), recursive=True)]
    files = {file for match in matches for file in (match, *match.rglob("*")) if file.is_file()}
    visible = [
        file
        for file in files
        # "_day=1" is a partition of a column
        if not any(p.startswith(HIDDEN) and "=" not in p for p in file.relative_to(base).parts)
        and file.stat().st_size
    ]
    visible.sort(key=lambda file: (natural_sort_key(str(file)), file))
    return [(file, base) for file in visible]


def refuse_twice(files: Iterable[Path]) -> None:
    """Raise UserError if a file is given twice, by whatever name and link."""
    seen: dict[tuple[int, int], Path] = {}
    for path in files:
        first = seen.setdefault((path.stat().st_dev, path.stat().st_ino), path)
        if first is not path:
            raise UserError(f"input file {path} is given twice (first as {first}). Leave one out")
