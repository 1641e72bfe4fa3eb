"""One field: its statistics, its encoded values, and what is reported of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from merlin_cowclip.workflows.data.prepare.column_store import IN_TRAIN, OFFSETS, ColumnStore
from merlin_cowclip.workflows.data.prepare.nvt_workflow import write_ids
from merlin_cowclip.workflows.data.prepare.statistics import (
    MISSING,
    UNKNOWN,
    count_ids,
    encode_ids,
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


def fit(name: str, store: ColumnStore, folder: Path, device: str) -> Fitted:
    """Compute a field's statistics of the training part, and encode all of its values.

    It writes the encoded column, and in the prepared folder vocabulary and counts; the same files
    if it is done again.

    Raises:
        UserError: the training part has no value, or every id is rarer than the threshold.
    """
    if name in store.spec.continuous:
        return _fit_continuous(name, store, device)
    return _fit_categorical(name, store, folder, device)


def _fit_categorical(name: str, store: ColumnStore, folder: Path, device: str) -> Fitted:
    spec, in_train = store.spec, np.asarray(store.load(IN_TRAIN))
    codes, texts = store.codes(name)
    if name in spec.lists:
        in_train = np.repeat(in_train, np.diff(store.load(name + OFFSETS)))
    threshold = spec.threshold_of(name)
    statistics = count_ids(
        codes,
        texts,
        in_train,
        threshold=threshold,
        buckets=spec.buckets_of(name),
        device=device,
    )
    if not statistics.distinct:
        raise _all_missing(name, in_train)
    if not len(statistics.vocabulary):
        raise UserError(
            f"no id of {name!r} occurs {threshold:,} times in the training rows (freq_threshold). "
            "Lower it, or take the column out"
        )
    ids = encode_ids(codes, statistics.encode, device)
    store.store(name, ids)
    write_ids(folder, name, statistics)
    test = ids[~in_train]
    report: dict[str, Any] = {
        "occurrences": int(in_train.sum()),
        "distinct": statistics.distinct,
        "missing": statistics.missing,
        "below_threshold": int(statistics.unknown.sum()),
        "test_occurrences": len(test),
        "test_missing": int(np.count_nonzero(test == MISSING)),
        "test_unknown": int(np.count_nonzero((test >= UNKNOWN) & (test < statistics.first_id))),
    }
    if statistics.distinct == 1 and not statistics.missing:
        report["note"] = "all training rows have the same id: leave the column out"
    return Fitted(report, cardinality=statistics.cardinality)


def _fit_continuous(name: str, store: ColumnStore, device: str) -> Fitted:
    numbers = store.numbers(name, np.float64)  # NaN where missing
    in_train = np.asarray(store.load(IN_TRAIN))
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
    store.store(name, unit_range(numbers, *widened(low, high), device))
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
