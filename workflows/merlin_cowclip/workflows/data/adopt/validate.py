# SPDX-License-Identifier: Apache-2.0
"""Parquet that an NVTabular workflow wrote or reads: open it, and check the rows that it wrote.

Their ids must be in range, their numbers finite and their labels 0 or 1. The first bad value raises
a UserError with its file, row and column.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds

from merlin_cowclip.workflows.data.sources.files import Input, expand_paths, refuse_twice
from merlin_cowclip.workflows.data.sources.parquet import is_parquet, open_parquet
from merlin_cowclip.workflows.data.spec import DatasetSpec
from merlin_cowclip.workflows.errors import UserError, quoted

FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class InputFile:
    """A parquet file to read; its footer was read."""

    path: Input  # absolute
    schema: pa.Schema
    rows: int


def open_files(given: str | Path | Sequence[str | Path]) -> list[InputFile]:
    """Open parquet files, given as paths, globs and folders; see `expand_paths`.

    In folders and globs, files that are not parquet are skipped. Raises UserError if there is no
    row, or a file is damaged or given twice.
    """
    files = []
    for one in [given] if isinstance(given, str | Path) else given:
        roots = expand_paths(one)
        paths = [path if isinstance(path, str) else path.absolute() for path in roots]
        if None not in roots.values():  # of a folder or glob
            paths = [p for p in paths if str(p).endswith(".parquet") or is_parquet(p)]
        if not paths:
            raise UserError(f"No parquet file in {str(one)!r}. Check the path")
        for path in paths:
            with open_parquet(path) as parquet:
                rows, schema = parquet.metadata.num_rows, parquet.schema_arrow.remove_metadata()
                files.append(InputFile(path, schema, rows))
    refuse_twice([file.path for file in files])
    if not sum(file.rows for file in files):
        raise UserError(f"{files[0].path} has no rows. Give parquet with rows")
    return files


def check_columns(spec: DatasetSpec, files: Sequence[InputFile], *, labelled: bool) -> None:
    """Refuse files without a column of the spec, or with one whose type does not fit its role."""
    roles = dict.fromkeys(spec.categorical, "integer ids")
    roles |= dict.fromkeys(spec.lists, "lists of integer ids")
    roles |= dict.fromkeys(spec.continuous, "numbers")
    roles |= {spec.label: "0 or 1"} if labelled else {}
    for file in files:
        if missing := [name for name in roles if name not in file.schema.names]:
            raise UserError(
                f"{file.path} has no column {quoted(missing)} (it has "
                f"{quoted(file.schema.names)}). Give the parquet that the workflow wrote"
            )
        for name, role in roles.items():
            kind = file.schema.field(name).type
            element = element_type(kind)
            number = kinds.is_floating(element) or kinds.is_boolean(element)
            fits = kinds.is_integer(element) or (number and name not in spec.ids)
            if not fits or is_list(kind) != (name in spec.lists):
                raise UserError(
                    f"column {name!r} must be {role}, but is {kind} in {file.path}. Change it in "
                    "the workflow, or remove its tag to leave it out"
                )


def is_list(kind: pa.DataType) -> bool:
    """Whether a column of that type holds lists."""
    return kinds.is_list(kind) or kinds.is_large_list(kind)


def element_type(kind: Any) -> Any:
    """Type of the values, in lists too; None for None, which is not known."""
    return kind.value_type if kind is not None and is_list(kind) else kind


@dataclass(frozen=True)
class BatchLocation:
    """Where a batch of rows was read, for messages."""

    path: Input
    first: int = 0  # rows of the file before it

    def row(self, row: int) -> str:
        """A row of the batch."""
        return f"row {self.first + row + 1} of {self.path}"

    def __str__(self) -> str:
        return f"{self.path}{f', rows from {self.first + 1} on' * bool(self.first)}"


def batches(
    files: Sequence[InputFile], columns: Sequence[str], rows: int
) -> Iterator[tuple[BatchLocation, pa.RecordBatch]]:
    """Some columns of all files, at most ``rows`` rows at a time, in order; no batch is empty."""
    for file in files:
        row = 0
        with open_parquet(file.path) as parquet:
            for batch in parquet.iter_batches(rows, columns=list(columns)):
                if batch.num_rows:
                    yield BatchLocation(file.path, row), batch
                row += batch.num_rows


def checked_labels(batch: pa.RecordBatch, name: str, where: BatchLocation) -> np.ndarray:
    """The labels of a batch as float64, all 0 or 1."""
    # NaN where null. A whole number beyond 2^53 is rounded, but not to 0 or 1.
    column = batch.column(name)
    values = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    bad = (values != 0) & (values != 1)
    if bad.any():
        value = column[int(bad.argmax())].as_py()
        what = f"label {'null' if value is None else repr(value)}, which is not 0 or 1,"
        remedy = "Correct it, or remove the row. The workflow must pass the label unchanged"
        _refuse(column, name, bad, what, where, remedy)
    return values


def checked_ids(batch: pa.RecordBatch, name: str, limit: int, where: BatchLocation) -> np.ndarray:
    """The ids of a batch, all from 0 to ``limit`` - 1; those of lists one after the other."""
    column = batch.column(name)
    ids = _values(column, name, where)
    bad = (ids < 0) | (ids >= limit)
    if bad.any():
        what = f"id {ids[bad][0]}, beyond the schema's 0 to {limit - 1},"
        remedy = (
            "Give the parquet that this workflow wrote. Some options of Categorify exceed its own "
            "schema: single_table, vocabs with num_buckets, and encode_type='combo' after others"
        )
        _refuse(column, name, bad, what, where, remedy)
    return ids


def checked_numbers(
    batch: pa.RecordBatch, name: str, where: BatchLocation, before: str = "the model"
) -> np.ndarray:
    """The numbers of a batch, all finite in float32; ``before`` names operators in the remedy."""
    column = batch.column(name)
    if kinds.is_floating(column.type):
        column = column.fill_null(np.nan)  # pandas writes NaN as null
    values = _values(column, name, where)
    bad = ~(np.abs(values) <= FLOAT32_MAX)
    if bad.any():
        value = "null or NaN" if np.isnan(values[bad][0]) else values[bad][0]
        remedy = f"Fill missing numbers or clip them (FillMissing, Clip) before {before}"
        _refuse(column, name, bad, f"{value}, which is not a finite float32,", where, remedy)
    return values


def _values(column: pa.Array, name: str, where: BatchLocation) -> np.ndarray:
    """The values of a column or of its lists; raises UserError for a null."""
    flat = column.flatten() if is_list(column.type) else column
    remedy = "Fill it in the workflow (Categorify does for ids, FillMissing for numbers)"
    if column.null_count:  # of lists, too: their rows
        _refuse(None, name, column.is_null().to_numpy(False), "a null", where, remedy)
    if flat.null_count:
        _refuse(column, name, flat.is_null().to_numpy(False), "a null", where, remedy)
    values: np.ndarray = flat.to_numpy(zero_copy_only=False)
    return values


def _refuse(
    lists: pa.Array | None, name: str, bad: np.ndarray, what: str, where: BatchLocation, remedy: str
) -> NoReturn:
    """Raise UserError for the first bad row, or the first bad value of a column of lists."""
    row = int(bad.argmax())
    if lists is not None and is_list(lists.type):
        row = pc.list_parent_indices(lists)[row].as_py()
    raise UserError(f"column {name!r} has {what} in {where.row(row)}. {remedy}")
