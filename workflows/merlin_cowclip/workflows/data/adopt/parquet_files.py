"""Parquet files that a workflow wrote or reads: which they are, and the types of their columns."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq

import merlin_cowclip.workflows.pickled_types  # noqa: F401  (before parquet is read)
from merlin_cowclip.workflows.data.prepared_data import file_state
from merlin_cowclip.workflows.data.sources.files import HIDDEN, natural_order, refuse_twice
from merlin_cowclip.workflows.data.spec import DatasetSpec
from merlin_cowclip.workflows.errors import UserError, quoted

_LIST = "_file_list.txt"  # of the parts that Merlin's ``to_parquet`` wrote last


@dataclass(frozen=True)
class ParquetFile:
    """A parquet file to read; its footer was read."""

    path: Path  # absolute
    schema: pa.Schema
    rows: int
    state: dict[str, Any]  # as `file_state` gave it before anything was read


def open_files(given: str | Path | Sequence[str | Path]) -> list[ParquetFile]:
    """Open parquet files, given as paths, globs and folders, in natural order.

    In a folder, or where a glob matches one, files are found at any depth. Names that begin with
    "_" or "." are skipped, as are files that are not parquet, and parts that NVTabular's list
    beside them does not name: it leaves those of an earlier, larger writing.

    Raises:
        UserError: nothing there, not parquet, damaged, a file twice, or without a row.
    """
    given = [given] if isinstance(given, str | Path) else list(given)
    paths = [path.absolute() for one in given for path in _expand(one)]
    if not paths:
        raise UserError("No parquet file was given. Name files, globs or folders")
    refuse_twice(paths)
    files = []
    for path in paths:
        try:
            state = file_state(path)
            with pq.ParquetFile(path) as parquet:
                rows = parquet.metadata.num_rows
                files.append(ParquetFile(path, parquet.schema_arrow.remove_metadata(), rows, state))
        except (pa.ArrowException, OSError) as error:
            bad_parquet(path, error)
        names = files[-1].schema.names
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise UserError(f"{path} has columns twice: {quoted(twice)}. Write it again")
    if not sum(file.rows for file in files):
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        raise UserError(f"{paths[0]}{more} has no rows. Give parquet with rows")
    return files


def _expand(given: str | Path) -> list[Path]:
    """The parquet files of one argument."""
    if os.path.isfile(given):
        return [Path(given)]
    whole = os.path.isdir(given) and str(given) != ""  # "" would be the current folder
    try:
        matches = [str(given)] if whole else glob.glob(str(given), recursive=True)
    except (ValueError, OSError):
        matches = []
    found: set[Path] = set()
    for match in map(Path, matches):
        if whole or not match.name.startswith(HIDDEN):
            found.update(_within(match) if match.is_dir() else [match])
    parts = {part for part in found if part.suffix == ".parquet" or _is_parquet(part)}
    for folder in {part.parent for part in parts}:
        listed = _listed(folder)
        gone = sorted(listed - {part.name for part in parts if part.parent == folder})
        if whole and gone:
            raise UserError(
                f"{folder / gone[0]} does not exist, but {folder / _LIST} names it. Write the "
                f"folder again, or name the files one by one"
            )
        parts = {p for p in parts if not listed or p.parent != folder or p.name in listed}
    if not parts:
        raise UserError(f"No parquet file in {str(given)!r}. Check the path")
    return sorted(parts, key=natural_order)


def _within(folder: Path) -> Iterator[Path]:
    """Files of a folder and its subfolders, but hidden and temporary ones."""
    for home, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(HIDDEN)]
        yield from (Path(home, name) for name in names if not name.startswith(HIDDEN))


def _is_parquet(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == b"PAR1"
    except OSError:
        return False


def _listed(folder: Path) -> set[str]:
    """Parts that NVTabular wrote last to a folder; none if it left no list."""
    try:
        count, *lines = (folder / _LIST).read_text(encoding="utf-8").splitlines()
        return {Path(line).name for line in lines} if int(count) == len(lines) else set()
    except (OSError, ValueError):
        return set()


def bad_parquet(path: Path, error: Exception, place: str = "") -> NoReturn:
    """Raise UserError for a file that cannot be read."""
    raise UserError(f"{path}{place} cannot be read: {error}. Write it again") from None


def check_columns(columns: Iterable[str], files: Iterable[ParquetFile]) -> None:
    """Refuse files without a column that the workflow writes."""
    for file in files:
        missing = [name for name in columns if name not in file.schema.names]
        if missing:
            raise UserError(
                f"{file.path} lacks columns of the workflow: {quoted(missing, brief=True)} (it has "
                f"{quoted(file.schema.names, brief=True)}). Give the parquet that this workflow "
                "wrote"
            )


def check_types(spec: DatasetSpec, files: list[ParquetFile]) -> None:
    """Refuse a column whose type does not fit its role, or differs between files.

    The label may be in none of them.
    """
    label = [spec.label] if any(spec.label in file.schema.names for file in files) else []
    for file in files:
        for name in (*label, *spec.fields):
            kind, first = file.schema.field(name).type, files[0].schema.field(name).type
            if kind != first:
                raise UserError(
                    f"column {name!r} is {kind} in {file.path} and {first} in {files[0].path}. "
                    "Write all files with one workflow"
                )
            wanted = _wanted(spec, name)
            held = kind.value_type if is_list(kind) else kind
            number = pa.types.is_integer(held) or (
                name not in spec.ids and (pa.types.is_floating(held) or pa.types.is_boolean(held))
            )
            if not number or is_list(kind) != (name in spec.lists):
                remedy = "Change it in the workflow"
                if name in spec.continuous and is_list(kind):
                    remedy = "Make a column of each number, or remove its tag to leave it out"
                raise UserError(
                    f"column {name!r} must be {wanted}, but is {kind} in {file.path}. {remedy}"
                )


def _wanted(spec: DatasetSpec, name: str) -> str:
    if name == spec.label:
        return "0 or 1"
    if name in spec.continuous:
        return "numbers"
    return "lists of integer ids" if name in spec.lists else "integer ids"


def is_list(kind: pa.DataType) -> bool:
    """Whether a column of that type holds lists."""
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)
