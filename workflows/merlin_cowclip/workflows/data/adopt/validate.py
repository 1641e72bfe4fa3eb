# SPDX-License-Identifier: Apache-2.0
"""Parquet that an NVTabular workflow wrote or reads: open it, and check the rows that it wrote.

Their ids must be in range, their numbers finite and their labels 0 or 1. The first bad value raises
a UserError with its file, row and column.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from merlin_cowclip.workflows.data.sources.files import Input, expand_paths, refuse_twice
from merlin_cowclip.workflows.data.sources.parquet import is_parquet, open_parquet
from merlin_cowclip.workflows.data.spec import DatasetSpec
from merlin_cowclip.workflows.errors import UserError, quoted

FLOAT32_MAX = float(np.finfo(np.float32).max)
LABEL_REMEDY = "Remove the row, or correct its label"
_LIST = "_file_list.txt"  # of the parts that Merlin's ``to_parquet`` wrote last

T = TypeVar("T")


@dataclass(frozen=True)
class ParquetFile:
    """A parquet file to read; its footer was read."""

    path: Input  # absolute
    schema: pa.Schema
    rows: int


def open_files(given: str | Path | Sequence[str | Path]) -> list[ParquetFile]:
    """Open parquet files, given as paths, globs and folders; see `expand_paths`.

    In folders and globs, files that are not parquet are skipped, and parts that NVTabular's list
    beside them does not name: it leaves those of an earlier, larger writing. Raises UserError if
    there is no row, or a file is damaged or given twice.
    """
    paths: list[Input] = []
    for one in [given] if isinstance(given, str | Path) else given:
        roots = expand_paths(one)
        found = [path if isinstance(path, str) else path.absolute() for path in roots]
        paths += found if None in roots.values() else _parts(found, one)
    refuse_twice(paths)
    files = []
    for path in paths:
        with open_parquet(path) as parquet:
            rows, schema = parquet.metadata.num_rows, parquet.schema_arrow.remove_metadata()
            files.append(ParquetFile(path, schema, rows))
    if not sum(file.rows for file in files):
        raise UserError(f"{paths[0]} has no rows. Give parquet with rows")
    return files


def _parts(found: list[Input], given: str | Path) -> list[Input]:
    """The parquet files among those of a folder or glob that NVTabular wrote last."""
    parts = [path for path in found if str(path).endswith(".parquet") or is_parquet(path)]
    for listing in {path.parent / _LIST for path in parts if isinstance(path, Path)}:
        if listing.exists():
            last = {Path(line).name for line in listing.read_text(encoding="utf-8").splitlines()}
            parts = [p for p in parts if Path(p).parent != listing.parent or Path(p).name in last]
    if not parts:
        raise UserError(f"No parquet file in {str(given)!r}. Check the path")
    return parts


def check_columns(spec: DatasetSpec, files: Sequence[ParquetFile], *, labelled: bool) -> None:
    """Refuse files without a column of the spec, or with one whose type does not fit its role."""
    roles = dict.fromkeys(spec.categorical, "integer ids")
    roles |= dict.fromkeys(spec.lists, "lists of integer ids")
    roles |= dict.fromkeys(spec.continuous, "numbers")
    if labelled:
        roles[spec.label] = "0 or 1"
    for file in files:
        if missing := [name for name in roles if name not in file.schema.names]:
            raise UserError(
                f"{file.path} has no column {quoted(missing)} (it has "
                f"{quoted(file.schema.names)}). Give the parquet that the workflow wrote"
            )
        for name, role in roles.items():
            kind, first = file.schema.field(name).type, files[0].schema.field(name).type
            if kind != first:
                raise UserError(
                    f"column {name!r} is {kind} in {file.path} and {first} in {files[0].path}. "
                    "Write all files with one workflow"
                )
            held = element_type(kind)
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


def prefetch(items: Iterator[T]) -> Iterator[T]:
    """The same items; the next one is made in a thread while one is used."""
    with ThreadPoolExecutor(1, "merlin-cowclip-prefetch") as reader:
        coming = reader.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = reader.submit(next, items, None)
            yield item


def batches(
    files: Sequence[ParquetFile], columns: Sequence[str], rows: int
) -> Iterator[tuple[BatchLocation, pa.RecordBatch]]:
    """Some columns of all files, at most ``rows`` rows at a time, in order; no batch is empty."""
    for file in files:
        row = 0
        with open_parquet(file.path) as parquet:
            for batch in parquet.iter_batches(rows, columns=list(columns)):
                if batch.num_rows:
                    yield BatchLocation(file.path, row), batch
                row += batch.num_rows


def checked_labels(
    batch: pa.RecordBatch, name: str, where: BatchLocation, remedy: str = LABEL_REMEDY
) -> np.ndarray:
    """The labels of a batch as float64, all 0 or 1; ``remedy`` is for the error of another."""
    column = batch.column(name)
    # NaN where null. A whole number beyond 2^53 is rounded, but not to 0 or 1.
    values = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    good = (values == 0) | (values == 1)
    if not good.all():
        at = int(np.argmin(good))
        value = column[at].as_py()
        found = f"label {'null' if value is None else repr(value)}, which is not 0 or 1,"
        _refuse(column, name, at, found, where, remedy)
    return values


def checked_ids(batch: pa.RecordBatch, name: str, limit: int, where: BatchLocation) -> np.ndarray:
    """The ids of a batch, all from 0 to ``limit`` - 1; those of lists one after the other."""
    ids = _values(batch.column(name), name, where)
    if len(ids) and (ids.min() < 0 or ids.max() >= limit):
        at = int(np.argmax((ids < 0) | (ids >= limit)))
        found = f"id {ids[at]}, beyond the schema's 0 to {limit - 1},"
        remedy = (
            "Give the parquet that this workflow wrote. NVTabular exceeds its own range with "
            "Categorify(single_table=True) and Categorify(vocabs=…, num_buckets=…): leave "
            "single_table or num_buckets out. encode_type='combo' must come first (combo + others)"
        )
        _refuse(batch.column(name), name, at, found, where, remedy)
    return ids


def checked_numbers(
    batch: pa.RecordBatch, name: str, where: BatchLocation, before: str = "the model"
) -> np.ndarray:
    """The numbers of a batch, all finite in float32; ``before`` names operators in the remedy."""
    column = batch.column(name)
    if pa.types.is_floating(column.type):
        column = column.fill_null(np.nan)  # pandas writes NaN as null
    values = _values(column, name, where)
    # NaN makes both comparisons false.
    if not (values.min() >= -FLOAT32_MAX and values.max() <= FLOAT32_MAX):
        at = int(np.argmin(np.abs(values) <= FLOAT32_MAX))
        value = "null or NaN" if np.isnan(values[at]) else values[at]
        found = f"{value}, which is not a finite float32,"
        remedy = f"Fill missing numbers or clip them (FillMissing, Clip) before {before}"
        _refuse(column, name, at, found, where, remedy)
    return values


def _values(column: pa.Array, name: str, where: BatchLocation) -> np.ndarray:
    """The values of a column or of its lists; raises UserError for a null."""
    holds_lists = is_list(column.type)
    flat = column.flatten() if holds_lists else column
    if column.null_count or flat.null_count:
        cells = enumerate(column.to_pylist())
        row = next(i for i, cell in cells if cell is None or (holds_lists and None in cell))
        raise UserError(
            f"column {name!r} has a null in {where.row(row)}. Fill it in the workflow (Categorify "
            "does for ids, FillMissing for numbers)"
        )
    values: np.ndarray = flat.to_numpy(zero_copy_only=False)
    return values


def _refuse(
    column: pa.Array, name: str, at: int, found: str, where: BatchLocation, remedy: str
) -> NoReturn:
    """Raise UserError for the value of a column or of its lists at a place."""
    row = pc.list_parent_indices(column)[at].as_py() if is_list(column.type) else at
    raise UserError(f"column {name!r} has {found} in {where.row(row)}. {remedy}")
