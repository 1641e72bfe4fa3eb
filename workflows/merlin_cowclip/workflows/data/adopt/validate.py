"""Check rows that an NVTabular workflow encoded: ids in range, finite numbers, labels 0 and 1.

The first bad value raises a UserError with its file, row and column.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from merlin_cowclip.workflows.data.adopt.parquet_files import ParquetFile, bad_parquet, is_list
from merlin_cowclip.workflows.errors import UserError

FLOAT32_MAX = float(np.finfo(np.float32).max)
LABEL_REMEDY = "Remove the row, or correct its label"
_FILL = "Fill it in the workflow (Categorify does for ids, FillMissing for numbers)"

T = TypeVar("T")


@dataclass(frozen=True)
class BatchLocation:
    """Where a batch of rows was read, for messages."""

    path: Path
    first: int = 0  # rows of the file before it

    def row(self, row: int) -> str:
        """A row of the batch."""
        return f"row {self.first + row + 1} of {self.path}"

    def __str__(self) -> str:
        return f"{self.path}{f', rows from {self.first + 1} on' * bool(self.first)}"

    def refuse(self, name: str, row: int, found: str, remedy: str) -> NoReturn:
        """Raise UserError for a value of a column."""
        raise UserError(f"column {name!r} has {found} in {self.row(row)}. {remedy}")


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
        try:
            with pq.ParquetFile(file.path) as parquet:
                for batch in parquet.iter_batches(rows, columns=list(columns)):
                    if batch.num_rows:
                        yield BatchLocation(file.path, row), batch
                    row += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            bad_parquet(file.path, error)


def checked_labels(
    batch: pa.RecordBatch, name: str, where: BatchLocation, remedy: str = LABEL_REMEDY
) -> np.ndarray:
    """The labels of a batch as float64, all 0 or 1; ``remedy`` is for the error of another."""
    column = batch.column(name)
    # NaN where null. A whole number beyond 2^53 is rounded, but not to 0 or 1.
    values = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    good = (values == 0) | (values == 1)
    if not good.all():
        row = int(np.argmin(good))
        value = column[row].as_py()
        found = f"label {'null' if value is None else repr(value)}, which is not 0 or 1,"
        where.refuse(name, row, found, remedy)
    return values


def checked_ids(batch: pa.RecordBatch, name: str, limit: int, where: BatchLocation) -> np.ndarray:
    """The ids of a batch, all from 0 to ``limit`` - 1; those of lists one after the other."""
    column = batch.column(name)
    _check_nulls(column, name, where)
    values = column.flatten() if is_list(column.type) else column
    if values.null_count:
        at = int(np.argmax(values.is_null().to_numpy(zero_copy_only=False)))
        where.refuse(name, _row_of(column, at), "a null in a list", _FILL)
    ids: np.ndarray = values.to_numpy(zero_copy_only=False)
    if len(ids) and (ids.min() < 0 or ids.max() >= limit):
        at = int(np.argmax((ids < 0) | (ids >= limit)))
        found = f"id {ids[at]}, beyond the schema's 0 to {limit - 1},"
        remedy = (
            "Give the parquet that this workflow wrote. Categorify(single_table=True) is not "
            "supported, and one with encode_type='combo' must come first (combo + others)"
        )
        where.refuse(name, _row_of(column, at), found, remedy)
    return ids


def _row_of(column: pa.Array, at: int) -> int:
    """The row that holds a value of a column, or of its lists."""
    if not is_list(column.type):
        return at
    offsets = column.offsets.to_numpy()
    return int(np.searchsorted(offsets - offsets[0], at, side="right")) - 1


def checked_numbers(batch: pa.RecordBatch, name: str, where: BatchLocation) -> np.ndarray:
    """The numbers of a batch, all finite in float32."""
    column = batch.column(name)
    _check_nulls(column, name, where)
    values: np.ndarray = column.to_numpy(zero_copy_only=False)
    # NaN makes both comparisons false.
    if not (values.min() >= -FLOAT32_MAX and values.max() <= FLOAT32_MAX):
        row = int(np.argmin(np.abs(values) <= FLOAT32_MAX))
        remedy = "Fill or clip it in the workflow (FillMissing, Clip)"
        where.refuse(name, row, f"{values[row]}, which is not a finite float32,", remedy)
    return values


def _check_nulls(column: pa.Array, name: str, where: BatchLocation) -> None:
    if column.null_count:
        row = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
        where.refuse(name, row, "a null", _FILL)
