# SPDX-License-Identifier: Apache-2.0
"""``counts/<field>.parquet``: row i has the raw value and the training count of id i."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.data.vocabulary import PADDING
from merlin_cowclip.workflows.errors import UserError


def write_counts(folder: Path, field: str, counts: np.ndarray, raw: pa.Array) -> None:
    """Write the counts of a field's n ids, (n,) int64, with their texts, n."""
    table = pa.table({"id": np.arange(len(counts), dtype=np.int64), "raw": raw, "count": counts})
    pq.write_table(table, folder / f"{field}.parquet")


def read_counts(data: PreparedData, field: str) -> pa.Table:
    """``id``, ``raw``, ``count`` of a field, row i for id i; Categorify's padding has count 0.

    Raises UserError if they do not belong to the training rows.
    """
    path = data.path / "counts" / f"{field}.parquet"
    table = pq.read_table(path, columns=["id", "raw", "count"])
    counts, rows = table["count"].to_numpy().copy(), data.rows["train"]
    one_hot = field in data.spec.categorical
    if len(table) != data.cardinalities[field] or (one_hot and counts.sum() != rows):
        raise UserError(
            f"{path} is not of these rows ({len(table):,} ids, {counts.sum():,} occurrences in "
            f"{rows:,} rows). Prepare the data again, or name the data it was held out of"
        )
    if not one_hot and data.schema[field].properties.get("cat_path"):  # by Categorify
        counts[PADDING] = 0
    return table.set_column(2, "count", pa.array(counts))


def counts_of_ids(data: PreparedData, fields: Sequence[str]) -> np.ndarray:
    """Counts by id of fields of one domain."""
    return np.sum([read_counts(data, field)["count"].to_numpy() for field in fields], axis=0)


def occurring_ids(data: PreparedData) -> int:
    """Number of distinct ids in the training rows, missing ids included."""
    return sum(int(np.count_nonzero(counts_of_ids(data, fields))) for fields in data.domains)
