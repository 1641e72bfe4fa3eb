"""The files of a vocabulary, as Categorify has them."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from merlin_cowclip.workflows.data.prepare.statistics import MISSING, PADDING, UNKNOWN, IdStatistics


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
