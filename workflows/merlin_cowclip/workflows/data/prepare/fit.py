"""One field: its statistics, its encoded values, and its report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from merlin_cowclip.workflows.data.prepare.column_store import IN_TRAIN, OFFSETS, ColumnStore
from merlin_cowclip.workflows.data.prepare.nvt_workflow import write_ids
from merlin_cowclip.workflows.data.prepare.statistics import (
    count_codes,
    rank_ids,
    scaled,
    unit_range,
    widened,
)
from merlin_cowclip.workflows.errors import UserError


@dataclass(frozen=True)
class Fitted:
    """What is known of a field, but for what lies in files."""

    report: dict[str, Any]
    cardinality: int = 0
    low: float = 0.0
    high: float = 0.0


def fit(name: str, store: ColumnStore, folder: Path) -> Fitted:
    """Compute a field's statistics of the training split, and encode all of its values.

    It writes the encoded column, and in the prepared folder vocabulary and counts; the same files
    if it is done again.

    Raises:
        UserError: as `describe`.
    """
    spec = store.spec
    if name in spec.continuous:
        numbers = store.numbers(name, np.float64)
        fitted = _describe_numbers(name, store, numbers)
        store.store(name, unit_range(numbers, *widened(fitted.low, fitted.high)))
        return fitted
    codes, texts = store.codes(name)
    report, counts = _describe_ids(name, store, codes, len(texts))
    statistics = rank_ids(
        counts, texts, threshold=spec.threshold_of(name), buckets=spec.buckets_of(name)
    )
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
    return Fitted(_describe_ids(name, store, codes, len(texts))[0])


def _in_train(name: str, store: ColumnStore) -> np.ndarray:
    """Whether each value belongs to the training split."""
    in_train = np.asarray(store.load(IN_TRAIN))
    if name in store.spec.lists:
        return np.repeat(in_train, np.diff(store.load(name + OFFSETS)))
    return in_train


def _describe_ids(
    name: str, store: ColumnStore, codes: np.ndarray, texts: int
) -> tuple[dict[str, Any], np.ndarray]:
    """A report, and the counts by `count_codes`."""
    in_train = _in_train(name, store)
    counts, test = count_codes(codes, in_train, texts), codes[~in_train]
    missing, threshold = int(counts[0]), store.spec.threshold_of(name)
    rare = counts[1:] < max(threshold, 1)
    distinct = int(np.count_nonzero(counts[1:]))
    if not distinct:
        raise _all_missing(name, in_train)
    if rare.all():
        raise UserError(
            f"no id of {name!r} occurs {threshold:,} times in the training rows (freq_threshold). "
            "Lower it, or take the column out"
        )
    report: dict[str, Any] = {
        "occurrences": int(counts.sum()),
        "distinct": distinct,
        "missing": missing,
        "below_threshold": int(counts[1:][rare].sum()),
        "test_occurrences": len(test),
        "test_missing": int(np.count_nonzero(test < 0)),
        "test_unknown": int(np.count_nonzero(np.append(rare, False)[test])),
    }
    if distinct == 1 and not missing:
        report["note"] = "all training rows have the same id: leave the column out"
    return report, counts


def _describe_numbers(name: str, store: ColumnStore, numbers: np.ndarray) -> Fitted:
    in_train = _in_train(name, store)
    train, test = numbers[in_train], numbers[~in_train]
    held = train[~np.isnan(train)]
    if not len(held):
        raise _all_missing(name, in_train)
    missing = len(train) - len(held)
    least, most = low, high = float(held.min()), float(held.max())
    if missing:  # counts as 0
        low, high = min(low, 0.0), max(high, 0.0)
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
