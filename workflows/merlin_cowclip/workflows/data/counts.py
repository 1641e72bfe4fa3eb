"""The counts of a prepared folder, ``counts/<field>.parquet``: ``id``, ``raw``, ``count``.

Row i is id i. They are written and read back here, whoever counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from merlin_cowclip.workflows.data.prepare.statistics import PADDING
from merlin_cowclip.workflows.data.prepared import PreparedData
from merlin_cowclip.workflows.errors import UserError


def write_counts(
    folder: Path, field: str, counts: np.ndarray, raw: pa.Array | pa.ChunkedArray
) -> None:
    """Write the counts of a field's n ids.

    Args:
        folder: ``counts/``.
        field: whose.
        counts: (n,) int64, of each id.
        raw: strings, of the last ids; those before have none.
    """
    without = pa.nulls(len(counts) - len(raw), pa.string())
    if isinstance(raw, pa.ChunkedArray):  # of more text, maybe, than one array holds
        raw = pa.chunked_array([without, *raw.chunks])
    else:
        raw = pa.concat_arrays([without, raw])
    ids = np.arange(len(counts), dtype=np.int64)
    pq.write_table(pa.table({"id": ids, "raw": raw, "count": counts}), folder / f"{field}.parquet")


def read_counts(data: PreparedData, field: str) -> pa.Table:
    """``id``, ``raw``, ``count`` of a field, row i for id i; in Arrow, for ids may be millions.

    Raises:
        UserError: they are not those of the field.
    """
    path = data.path / "counts" / f"{field}.parquet"
    source = data.record.get("derived_from", {})
    remedy = "Prepare the data again"
    if "held_out" in source:  # rows of another folder, whose counts it has
        remedy = f"Name the data that it was held out of, {source['path']}"

    def refuse(found: str) -> NoReturn:
        raise UserError(
            "counts must be of their own field: a row per id, from 0 on, which add up to the "
            f"training rows. Received: {path}, {found}. {remedy}"
        ) from None

    try:
        with pq.ParquetFile(path) as parquet:
            table = parquet.read()
    except (OSError, pa.ArrowException) as error:
        refuse(f"which is no whole parquet file ({error})")
    for name, kind in (("id", pa.int64()), ("raw", pa.string()), ("count", pa.int64())):
        if name not in table.column_names:
            refuse(f"without column {name!r}")
        if table.schema.field(name).type != kind:
            refuse(f"with {table.schema.field(name).type} in column {name!r}")
    cardinality, rows = data.cardinalities[field], data.rows["train"]
    if len(table) != cardinality:
        refuse(f"of {len(table):,} ids, where the field has {cardinality:,}")
    for name in ("id", "count"):
        if table[name].null_count:
            refuse(f"with a null in column {name!r}")
    if not np.array_equal(table["id"].to_numpy(), np.arange(cardinality)):
        refuse("with ids in another order")
    counts = table["count"].to_numpy()
    if counts.min() < 0:
        refuse("with a count below 0")
    occurrences = int(counts.sum())
    if field in data.spec.categorical and occurrences != rows:
        refuse(f"with {occurrences:,} occurrences in {rows:,} rows")
    if field in data.spec.lists and not counts[PADDING + 1 :].any():
        refuse("without an occurrence")
    return table.select(["id", "raw", "count"])


def read_id_counts(data: PreparedData, field: str) -> pa.Table:
    """`read_counts` without the padding of lists, which is no id.

    Raises:
        UserError: they are not those of the field.
    """
    table = read_counts(data, field)
    return table.slice(PADDING + 1) if field in data.spec.lists else table


def counts_of_ids(data: PreparedData, fields: Sequence[str]) -> np.ndarray:
    """By id how often it occurs in fields of one domain; padding of lists does not.

    Raises:
        UserError: they are not those of the fields.
    """
    counts = np.zeros(data.cardinalities[fields[0]], np.int64)
    for field in fields:
        table = read_id_counts(data, field)
        counts[table["id"].to_numpy()] += table["count"].to_numpy()
    return counts


def occurring_ids(data: PreparedData) -> int:
    """How many ids the training rows hold, of all fields together; a missing id is one.

    An id of a vocabulary that fields share is one.

    `cardinalities` are the rows of tables: with padding, and with ids that no row has.

    Raises:
        UserError: counts are not those of their field.
    """
    return sum(int(np.count_nonzero(counts_of_ids(data, fields))) for fields in data.domains)


def by_falling_count(counts: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Places of ids, the most frequent first."""
    return places[np.argsort(-counts[places], kind="stable")]  # ties: the lower id first
