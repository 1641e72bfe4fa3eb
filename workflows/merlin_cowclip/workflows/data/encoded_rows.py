"""Rows that an NVTabular workflow has encoded: read batch by batch, and checked.

Whatever is not what the workflow's schema promises is refused with its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from merlin_cowclip.workflows.data.existing_parquet import ParquetFile, bad_parquet, is_list
from merlin_cowclip.workflows.errors import UserError

FLOAT32_MAX = float(np.finfo(np.float32).max)

T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """Where a batch of rows lies."""

    path: Path
    group: int
    first: int  # rows of the file before it

    def refuse(self, rule: str, value: Any, row: int, name: str, remedy: str) -> NoReturn:
        """Raise UserError for a value in the batch's row ``row``."""
        raise UserError(
            f"{rule}. Received: {value} in {self.path}, row group {self.group}, row "
            f"{self.first + row + 1} of the file, column {name!r}. {remedy}"
        )

    def column(self, name: str) -> str:
        """Where a column of the batch lies, in a message."""
        return f"column {name!r} of {self.path}, row group {self.group}"

    def rows(self, count: int) -> str:
        """Where so many rows lie, in a message."""
        return f"{self.path}, row group {self.group}, {count:,} rows from row {self.first + 1} on"


def batches(
    files: Sequence[ParquetFile], columns: Sequence[str], rows: int
) -> Iterator[tuple[Place, pa.RecordBatch]]:
    """Some columns of all files, ``rows`` rows at a time at most, in order; no batch is empty.

    Raises:
        UserError: a file cannot be read.
    """
    for file in files:
        group = row = 0
        try:
            with pq.ParquetFile(file.path) as parquet:
                for group in range(parquet.num_row_groups):
                    for batch in parquet.iter_batches(rows, [group], list(columns)):
                        if batch.num_rows:
                            yield Place(file.path, group, row), batch
                        row += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            bad_parquet(file.path, error, f", row group {group}")


def ahead(items: Iterator[T]) -> Iterator[T]:
    """The same; the next one is made while one is used."""
    with ThreadPoolExecutor(1, "merlin-cowclip-ahead") as reader:
        coming = reader.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = reader.submit(next, items, None)
            yield item


def checked_labels(batch: pa.RecordBatch, name: str, place: Place) -> np.ndarray:
    """The labels of a batch, n float64, of 0 and 1.

    Raises:
        UserError: another one.
    """
    column = batch.column(name)
    # NaN where null. A whole number beyond 2^53 is rounded, and none becomes 0 or 1 by that.
    values = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    good = (values == 0) | (values == 1)
    if not good.all():
        row = int(np.argmin(good))
        value = column[row].as_py()
        remedy = "Remove the row, or correct its label"
        shown = "null" if value is None else repr(value)
        place.refuse("label must be 0 or 1", shown, row, name, remedy)
    return values


def checked_ids(batch: pa.RecordBatch, name: str, limit: int, place: Place) -> np.ndarray:
    """The ids of a batch, of a list column one after the other.

    Args:
        batch: some rows.
        name: the column.
        limit: the field's cardinality.
        place: where the rows lie.

    Raises:
        UserError: a null, or an id that is not from 0 to ``limit`` - 1.
    """
    column, offsets = batch.column(name), None
    _check_nulls(column, name, place)
    if is_list(column.type):
        offsets = column.offsets.to_numpy() - column.offsets[0].as_py()
        column = column.flatten()
        if column.null_count:
            at = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
            row = int(np.searchsorted(offsets, at, side="right")) - 1
            place.refuse(_NO_NULLS, "null in a list", row, name, _FILL)
    ids = column.to_numpy(zero_copy_only=False)
    if len(ids) and (ids.min() < 0 or ids.max() >= limit):
        at = int(np.argmax((ids < 0) | (ids >= limit)))
        row = at if offsets is None else int(np.searchsorted(offsets, at, side="right")) - 1
        place.refuse(
            f"an id must be from 0 to its field's cardinality - 1, here {limit - 1}",
            ids[at],
            row,
            name,
            "Give the parquet that this workflow wrote, or the workflow that wrote it; numbers "
            "that an operator makes of ids (counts) are to be made before Categorify",
        )
    return ids


def check_numbers(batch: pa.RecordBatch, name: str, place: Place) -> None:
    """Refuse a column of numbers with one that is none, or none as a float32.

    Raises:
        UserError: a null, NaN, inf, or a number beyond float32.
    """
    column = batch.column(name)
    _check_nulls(column, name, place)
    values = column.to_numpy(zero_copy_only=False)
    # NaN makes both comparisons false.
    if not (values.min() >= -FLOAT32_MAX and values.max() <= FLOAT32_MAX):
        row = int(np.argmin(np.abs(values) <= FLOAT32_MAX))
        rule = "a number must be finite, as a float32 too: another turns every weight into NaN"
        remedy = "Fill or clip it in the workflow (FillMissing, Clip)"
        place.refuse(rule, values[row], row, name, remedy)


_NO_NULLS = "parquet must hold no nulls"
_FILL = "Fill it in the workflow: Categorify does for ids, FillMissing for numbers"


def _check_nulls(column: pa.Array, name: str, place: Place) -> None:
    if column.null_count:
        row = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
        place.refuse(_NO_NULLS, "null", row, name, _FILL)
