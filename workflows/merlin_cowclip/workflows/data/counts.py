"""``counts/<field>.parquet``: row i has the raw value and the training count of id i."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from merlin_cowclip.workflows.data.prepare.statistics import PADDING
from merlin_cowclip.workflows.data.prepared_data import PreparedData
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
        UserError: they are not those of the training rows.
    """
    path = data.path / "counts" / f"{field}.parquet"
    table = pq.read_table(path, columns=["id", "raw", "count"])
    occurrences, rows = pc.sum(table["count"]).as_py() or 0, data.rows["train"]
    one_hot = field in data.spec.categorical
    if len(table) != data.cardinalities[field] or (one_hot and occurrences != rows):
        source = data.record.get("derived_from", {})
        remedy = "Prepare the data again"
        if "held_out" in source:  # rows of another folder, whose counts it has
            remedy = f"Name the data that it was held out of, {source['path']}"
        raise UserError(
            f"{path} is not of these rows ({len(table):,} ids, {occurrences:,} occurrences in "
            f"{rows:,} rows). {remedy}"
        )
    return table


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
