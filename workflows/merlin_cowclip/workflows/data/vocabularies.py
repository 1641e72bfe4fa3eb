"""The files of a vocabulary: Categorify's own, and the counts of ids for those who ask."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from merlin_cowclip.workflows.data.encoding import MISSING, PADDING, UNKNOWN, IdStatistics


def vocabulary_path(folder: Path, name: str) -> Path:
    """Where a field's vocabulary lies in ``categories/``."""
    return folder / f"unique.{name}.parquet"


def write_vocabulary(folder: Path, name: str, statistics: IdStatistics) -> None:
    """``unique.*`` and ``meta.*``, as Categorify writes them."""
    first, buckets = statistics.first_id, len(statistics.unknown)
    pd.DataFrame(
        {name: statistics.vocabulary.to_pandas().to_numpy(), f"{name}_size": statistics.counts},
        index=pd.RangeIndex(first, statistics.cardinality),
    ).to_parquet(vocabulary_path(folder, name), compression=None)
    observed = [0, statistics.missing, int(statistics.unknown.sum()), int(statistics.counts.sum())]
    pd.DataFrame(
        {
            "kind": ["pad", "null", "oov", "unique"],
            "offset": [PADDING, MISSING, UNKNOWN, first],
            "num_indices": [1, 1, buckets, len(statistics.vocabulary)],
            "num_observed": observed,
        }
    ).to_parquet(folder / f"meta.{name}.parquet")


def write_counts(folder: Path, name: str, statistics: IdStatistics) -> None:
    """``counts/<field>.parquet``: ``id``, ``raw``, ``count``; row i is id i."""
    nothing = pa.nulls(statistics.first_id, pa.string())
    counts = np.concatenate([[0, statistics.missing], statistics.unknown, statistics.counts])
    table = pa.table(
        {
            "id": np.arange(statistics.cardinality, dtype=np.int64),
            "raw": pa.concat_arrays([nothing, statistics.vocabulary]),
            "count": counts.astype(np.int64),
        }
    )
    pq.write_table(table, folder / f"{name}.parquet")
