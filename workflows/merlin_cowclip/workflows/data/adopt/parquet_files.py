"""Parquet files that a workflow wrote or reads: which they are, and the types of their columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pyarrow as pa
import pyarrow.parquet as pq

from merlin_cowclip.workflows.data.sources.files import expand_paths, refuse_twice
from merlin_cowclip.workflows.data.spec import DatasetSpec
from merlin_cowclip.workflows.errors import UserError, quoted

_LIST = "_file_list.txt"  # of the parts that Merlin's ``to_parquet`` wrote last


@dataclass(frozen=True)
class ParquetFile:
    """A parquet file to read; its footer was read."""

    path: Path  # absolute
    schema: pa.Schema
    rows: int


def open_files(given: str | Path | Sequence[str | Path]) -> list[ParquetFile]:
    """Open parquet files, given as paths, globs and folders; see `expand_paths`.

    In folders and globs, files that are not parquet are skipped, and parts that NVTabular's list
    beside them does not name: it leaves those of an earlier, larger writing.

    Raises:
        UserError: nothing there, not parquet, damaged, a file twice, or without a row.
    """
    paths = []
    for one in [given] if isinstance(given, str | Path) else given:
        found = [path.absolute() for path in expand_paths(one)]
        paths += found if Path(one).is_file() else _parts(found, one)
    refuse_twice(paths)
    files = []
    for path in paths:
        try:
            with pq.ParquetFile(path) as parquet:
                rows = parquet.metadata.num_rows
                files.append(ParquetFile(path, parquet.schema_arrow.remove_metadata(), rows))
        except (pa.ArrowException, OSError) as error:
            bad_parquet(path, error)
    if not sum(file.rows for file in files):
        raise UserError(f"{paths[0]} has no rows. Give parquet with rows")
    return files


def _parts(found: list[Path], given: str | Path) -> list[Path]:
    """The parquet files among those of a folder or glob that NVTabular wrote last."""
    parts = [path for path in found if path.suffix == ".parquet" or _is_parquet(path)]
    for listing in {path.parent / _LIST for path in parts}:
        if listing.exists():
            last = {Path(line).name for line in listing.read_text(encoding="utf-8").splitlines()}
            parts = [p for p in parts if p.parent != listing.parent or p.name in last]
    if not parts:
        raise UserError(f"No parquet file in {str(given)!r}. Check the path")
    return parts


def _is_parquet(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PAR1"


def bad_parquet(path: Path, error: Exception) -> NoReturn:
    """Raise UserError for a file that cannot be read."""
    raise UserError(f"{path} cannot be read: {error}. Write it again") from None


def check_columns(spec: DatasetSpec, files: Sequence[ParquetFile], *, labelled: bool) -> None:
    """Refuse files without a column of the spec, or with one whose type does not fit its role."""
    wanted = dict.fromkeys(spec.categorical, "integer ids")
    wanted |= dict.fromkeys(spec.lists, "lists of integer ids")
    wanted |= dict.fromkeys(spec.continuous, "numbers")
    if labelled:
        wanted[spec.label] = "0 or 1"
    for file in files:
        if missing := [name for name in wanted if name not in file.schema.names]:
            raise UserError(
                f"{file.path} has no column {quoted(missing)} (it has "
                f"{quoted(file.schema.names)}). Give the parquet that the workflow "
                "wrote"
            )
        for name, role in wanted.items():
            kind, first = file.schema.field(name).type, files[0].schema.field(name).type
            if kind != first:
                raise UserError(
                    f"column {name!r} is {kind} in {file.path} and {first} in {files[0].path}. "
                    "Write all files with one workflow"
                )
            held = kind.value_type if is_list(kind) else kind
            number = pa.types.is_floating(held) or pa.types.is_boolean(held)
            fits = pa.types.is_integer(held) or (number and name not in spec.ids)
            if not fits or is_list(kind) != (name in spec.lists):
                raise UserError(
                    f"column {name!r} must be {role}, but is {kind} in {file.path}. Change it in "
                    "the workflow, or remove its tag to leave it out"
                )


def is_list(kind: pa.DataType) -> bool:
    """Whether a column of that type holds lists."""
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)
