"""One field: its statistics, its encoded values, and its report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from merlin_cowclip.workflows.data.prepare.column_store import IN_TRAIN, OFFSETS, ColumnStore
from merlin_cowclip.workflows.data.prepare.nvt_workflow import CATEGORIES, write_ids
from merlin_cowclip.workflows.data.prepare.statistics import (
    count_codes,
    known_ids,
    rank_ids,
    scaled,
    unit_range,
    widened,
)
from merlin_cowclip.workflows.data.spec import DatasetSpec
from merlin_cowclip.workflows.errors import UserError


@dataclass(frozen=True)
class Fitted:
    """What is known of a field, but for what lies in files."""

    report: dict[str, Any]
    cardinality: int = 0
    low: float = 0.0
    high: float = 0.0


@dataclass(frozen=True)
class Encoding:
    """How an earlier `prepare` encoded its fields.

    Attributes:
        spec: of its logs.
        ranges: lowest and highest number, by continuous field.
        folder: the prepared folder or run, with the vocabularies.
    """

    spec: DatasetSpec
    ranges: Mapping[str, tuple[float, float]]
    folder: Path

    def vocabulary(self, name: str) -> pa.Array:
        """The texts of a field, in the order of their ids."""
        path = self.folder / CATEGORIES / f"unique.{name}.parquet"
        return pq.read_table(path, columns=[name])[name].combine_chunks().cast(pa.string())


def fit(name: str, store: ColumnStore, folder: Path, like: Encoding | None = None) -> Fitted:
    """Compute a field's statistics of the training split, and encode all of its values.

    It writes the encoded column, and in the prepared folder vocabulary and counts; the same files
    if it is done again. With ``like``, ids and ranges are those of an earlier `prepare`.

    Raises:
        UserError: as `describe`.
    """
    spec = store.spec
    if name in spec.continuous:
        numbers = store.numbers(name, np.float64)
        fitted = _describe_numbers(name, store, numbers, like.ranges[name] if like else None)
        store.store(name, unit_range(numbers, *widened(fitted.low, fitted.high)))
        return fitted
    codes, texts = store.codes(name)
    counts = count_codes(codes, _in_train(name, store), len(texts))
    buckets = spec.buckets_of(name)
    if like is not None:
        statistics = known_ids(counts, texts, like.vocabulary(name), buckets=buckets)
    else:
        threshold = spec.threshold_of(name)
        statistics = rank_ids(counts, texts, threshold=threshold, buckets=buckets)
    known = statistics.encode[:-1] >= statistics.first_id
    report = _describe_ids(name, store, codes, counts, known, required=like is None)
    store.store(name, statistics.encode[codes])
    write_ids(folder, name, statistics)
    return Fitted(report, cardinality=statistics.cardinality)


def describe(name: str, store: ColumnStore) -> Fitted:
    """Store a field as it is: numbers, NaN where missing; ids as codes and texts. Report on it.

    Raises:
        UserError: the training split has no value, or every id is rarer than the threshold.
    """
    if name in store.spec.continuous:
        numbers = store.numbers(name, np.float64)
        store.store(name, numbers)
        return _describe_numbers(name, store, numbers)
    codes, texts = store.codes(name)
    store.store(name, codes)
    store.store_texts(name, texts)
    counts = count_codes(codes, _in_train(name, store), len(texts))
    known = counts[1:] >= max(store.spec.threshold_of(name), 1)
    return Fitted(_describe_ids(name, store, codes, counts, known))


def _in_train(name: str, store: ColumnStore) -> np.ndarray:
    """Whether each value belongs to the training split."""
    in_train = np.asarray(store.load(IN_TRAIN))
    if name in store.spec.lists:
        return np.repeat(in_train, np.diff(store.load(name + OFFSETS)))
    return in_train


def _describe_ids(
    name: str,
    store: ColumnStore,
    codes: np.ndarray,
    counts: np.ndarray,
    known: np.ndarray,
    required: bool = True,
) -> dict[str, Any]:
    """The report of a field, by the counts of `count_codes` and which texts have their own id."""
    in_train = _in_train(name, store)
    test, missing = codes[~in_train], int(counts[0])
    distinct = int(np.count_nonzero(counts[1:]))
    if required and not distinct:
        raise _all_missing(name, in_train)
    if required and not known.any():
        raise UserError(
            f"no id of {name!r} occurs {store.spec.threshold_of(name):,} times in the training "
            "rows (freq_threshold). Lower it, or take the column out"
        )
    report: dict[str, Any] = {
        "occurrences": int(counts.sum()),
        "distinct": distinct,
        "missing": missing,
        "below_threshold": int(counts[1:][~known].sum()),
        "test_occurrences": len(test),
        "test_missing": int(np.count_nonzero(test < 0)),
        "test_unknown": int(np.count_nonzero(np.append(~known, False)[test])),
    }
    if distinct == 1 and not missing:
        report["note"] = "all training rows have the same id: leave the column out"
    return report


def _describe_numbers(
    name: str,
    store: ColumnStore,
    numbers: np.ndarray,
    fixed: tuple[float, float] | None = None,
) -> Fitted:
    """The report of a continuous field, and its range: ``fixed``, or of the training split."""
    in_train = _in_train(name, store)
    train, test = numbers[in_train], numbers[~in_train]
    held = train[~np.isnan(train)]
    missing = len(train) - len(held)
    if not len(held):
        if fixed is None:
            raise _all_missing(name, in_train)
        held = np.zeros(1)
    least, most = low, high = float(held.min()), float(held.max())
    if missing:  # counts as 0
        low, high = min(low, 0.0), max(high, 0.0)
    low, high = fixed or (low, high)
    if not np.isfinite(np.subtract(high, low)):
        raise UserError(f"the range of column {name!r} is too large: {low} to {high}. Scale it")
    with np.errstate(invalid="ignore"):
        beyond = int(np.count_nonzero((test < low) | (test > high)))
    report: dict[str, Any] = {
        "occurrences": len(train),
        "missing": missing,
        "min": least,
        "max": most,
        "mean": float(held.mean()),
        "test_occurrences": len(test),
        "test_missing": int(np.count_nonzero(np.isnan(test))),
        "test_out_of_range": beyond,
    }
    first, last = (float(scaled(end, *widened(low, high))) for end in (least, most))
    if least < most and last - first < 0.5:
        report["note"] = (
            f"missing numbers count as 0, so that the others are scaled to {first:.3g} to "
            f"{last:.3g} only. If that is too narrow, fill in a number like theirs"
        )
    return Fitted(report, low=low, high=high)


def _all_missing(name: str, in_train: np.ndarray) -> UserError:
    return UserError(
        f"column {name!r} has no value in the {int(in_train.sum()):,} training rows. Take it out "
        "of the specification"
    )
