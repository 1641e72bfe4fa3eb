# SPDX-License-Identifier: Apache-2.0
"""One field: its statistics, its encoded values, and its report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from merlin_cowclip.workflows.data.counts import write_counts
from merlin_cowclip.workflows.data.prepare.column_store import PART_OF, ColumnStore, codes_of
from merlin_cowclip.workflows.data.prepare.statistics import (
    MISSING,
    UNKNOWN,
    IdStatistics,
    count_codes,
    rank_ids,
    unit_range,
)
from merlin_cowclip.workflows.data.prepared_data import HELD_OUT, PARTS
from merlin_cowclip.workflows.data.spec import DatasetSpec
from merlin_cowclip.workflows.errors import UserError

CATEGORIES = "workflow/categories"  # in a prepared folder


class Fitted(NamedTuple):
    """What is known of a field, but for what lies in files."""

    report: dict[str, Any]
    cardinality: int = 0
    range: tuple[float, float] = (0.0, 0.0)


class Encoding(NamedTuple):
    """How an earlier `prepare` encoded its fields."""

    spec: DatasetSpec
    ranges: Mapping[str, tuple[float, float]]  # lowest and highest number, by continuous field
    folder: Path  # the prepared folder or run, with the vocabularies

    def vocabulary(self, name: str) -> pa.Array:
        """The texts of a field, in the order of their ids."""
        path = self.folder / CATEGORIES / f"unique.{name}.parquet"
        return pq.read_table(path, columns=[name])[name].combine_chunks().cast(pa.string())


def fit(name: str, store: ColumnStore, folder: Path | None, like: Encoding | None = None) -> Fitted:
    """Compute a field's statistics of the training split, and store its column for the parts.

    With a prepared folder, the column is stored encoded, and the folder gets vocabulary and counts;
    the same files if it is done again. Without one it is stored raw. With ``like``, ids and ranges
    are those of an earlier `prepare`. Raises UserError if the training split has no value, or every
    id is rarer than the threshold.
    """
    column, part_of = store.column(name), store.load(PART_OF).to_numpy()
    if name in store.spec.continuous:
        numbers = column.to_numpy(zero_copy_only=False)
        fitted = _describe_numbers(name, numbers, part_of, like.ranges[name] if like else None)
        store.store(name, pa.array(unit_range(numbers, *fitted.range)) if folder else column)
        return fitted
    spec, ids, is_list = store.spec, column, name in store.spec.lists
    if is_list:
        ids, part_of = column.values, np.repeat(part_of, pc.list_value_length(column))
    codes, texts = codes_of(ids)
    counts = count_codes(codes, part_of == 0, len(texts))
    threshold = spec.threshold_of(name)
    if like is None and not counts[1:].any():
        raise _all_missing(name, int(counts[0]))
    if like is None and counts[1:].max() < threshold:
        raise UserError(
            f"no id of {name!r} occurs {threshold:,} times in the training rows (freq_threshold). "
            "Lower it, or take the column out"
        )
    options = {"threshold": threshold, "buckets": spec.buckets_of(name)}
    statistics = rank_ids(counts, texts, vocabulary=like and like.vocabulary(name), **options)
    encoded = statistics.encode[codes]
    missing = int(counts[0])
    report: dict[str, Any] = {
        "occurrences": int(counts.sum()),
        "distinct": int(np.count_nonzero(counts[1:])),
        "missing": missing,
        "below_threshold": int(statistics.by_id[UNKNOWN : statistics.first_id].sum()),
    }
    for part in HELD_OUT:
        held_out = encoded[part_of == PARTS.index(part)]
        unknown = (held_out >= UNKNOWN) & (held_out < statistics.first_id)
        report[f"{part}_occurrences"] = len(held_out)
        report[f"{part}_missing"] = int(np.count_nonzero(held_out == MISSING))
        report[f"{part}_unknown"] = int(np.count_nonzero(unknown))
    if report["distinct"] == 1 and not missing:
        report["note"] = "all training rows have the same id: leave the column out"
    if folder:
        write_ids(folder, name, statistics)
        ids = pa.array(encoded)
        column = pa.LargeListArray.from_arrays(column.offsets, ids) if is_list else ids
    store.store(name, column)
    return Fitted(report, cardinality=len(statistics.by_id))


def write_ids(folder: Path, field: str, statistics: IdStatistics) -> None:
    """Write a field's counts, and its vocabulary as Categorify does."""
    home, counts = folder / CATEGORIES, folder / "counts"
    for made in (home, counts):
        made.mkdir(parents=True, exist_ok=True)
    first, by_id = statistics.first_id, statistics.by_id
    pd.DataFrame(
        {field: statistics.vocabulary.to_pandas().to_numpy(), f"{field}_size": by_id[first:]},
        index=pd.RangeIndex(first, len(by_id)),
    ).to_parquet(home / f"unique.{field}.parquet", compression=None)
    write_counts(counts, field, by_id, statistics.vocabulary)


def _describe_numbers(
    name: str, numbers: np.ndarray, part_of: np.ndarray, fixed: tuple[float, float] | None
) -> Fitted:
    """The report of a continuous field, and its range: ``fixed``, or of the training split."""
    train = numbers[part_of == 0]
    held = train[~np.isnan(train)]
    missing = len(train) - len(held)
    if not len(held):
        if fixed is None:
            raise _all_missing(name, missing)
        held = np.zeros(1)
    ends = [float(held.min()), float(held.max())]
    filled = [*ends, 0.0] if missing else ends  # a missing number counts as 0
    low, high = fixed or (min(filled), max(filled))
    if not np.isfinite(np.subtract(high, low)):
        raise UserError(f"the range of column {name!r} is too large: {low} to {high}. Scale it")
    report: dict[str, Any] = {
        "occurrences": len(train),
        "missing": missing,
        "min": ends[0],
        "max": ends[1],
        "mean": float(held.mean()),
    }
    for part in HELD_OUT:
        held_out = numbers[part_of == PARTS.index(part)]
        report[f"{part}_occurrences"] = len(held_out)
        report[f"{part}_missing"] = int(np.count_nonzero(np.isnan(held_out)))
        with np.errstate(invalid="ignore"):
            beyond = (held_out < low) | (held_out > high)
        report[f"{part}_out_of_range"] = int(np.count_nonzero(beyond))
    return Fitted(report, range=(low, high))


def _all_missing(name: str, missing: int) -> UserError:
    return UserError(
        f"column {name!r} has no value in the {missing:,} training rows. Take it out of the "
        "specification"
    )
