"""One field after staging: its statistics, its encoded values, and what is reported of it.

A task: a function of what can be sent to another process. It writes files under names of its own,
and the same ones if it is done again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from merlin_cowclip.workflows.data import clusters
from merlin_cowclip.workflows.data.prepare.statistics import (
    MISSING,
    UNKNOWN,
    count_ids,
    encode_ids,
    scaled,
    unit_range,
    widened,
)
from merlin_cowclip.workflows.data.saved_workflow import write_ids
from merlin_cowclip.workflows.data.staging import IN_TRAIN, LENGTHS, Staging
from merlin_cowclip.workflows.errors import UserError


@dataclass(frozen=True)
class FieldJob:
    """One column's statistics and encoded values, of what is staged.

    Attributes:
        name: the field.
        staging: where its staged values are, and its encoded ones will be.
        folder: the prepared folder, which gets its vocabulary and counts.
        device: "cpu" or "gpu".
    """

    name: str
    staging: Staging
    folder: Path
    device: str


@dataclass(frozen=True)
class Fitted:
    """What is known of a field, but for what lies in files."""

    cardinality: int = 0
    low: float = 0.0
    high: float = 0.0
    report: dict[str, Any] | None = None


def fit(job: FieldJob) -> Fitted:
    """Find a field's statistics in the training part, and encode all of its values by them.

    Raises:
        UserError: the training part has no value, or every id is rarer than the threshold.
    """
    spec = job.staging.spec
    return (_fit_numbers if job.name in spec.continuous else _fit_ids)(job)


def _fit_ids(job: FieldJob) -> Fitted:
    name, staging, spec = job.name, job.staging, job.staging.spec
    in_train = np.asarray(staging.load(IN_TRAIN))
    if name in spec.lists:
        lengths = staging.numbers(name + LENGTHS, np.int32)
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        staging.store(name + LENGTHS, offsets)
        in_train = np.repeat(in_train, lengths)
    codes, texts = staging.codes(name)
    threshold = spec.threshold_of(name)
    clusters.stop_if_unwanted()
    statistics = count_ids(
        codes,
        texts,
        in_train,
        threshold=threshold,
        buckets=spec.buckets_of(name),
        device=job.device,
    )
    if not statistics.distinct:
        raise _all_missing(name, "lists of ids" if name in spec.lists else "ids", in_train)
    if not len(statistics.vocabulary):
        raise UserError(
            f"freq_threshold must leave ids of their own. Received: {threshold} for {name!r}, "
            "whose most frequent id occurs less often. Lower it, or take the column out"
        )
    clusters.stop_if_unwanted()
    ids = encode_ids(codes, statistics.encode, job.device)
    staging.store(name, ids)
    clusters.stop_if_unwanted()
    write_ids(job.folder, name, statistics)
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
    return Fitted(cardinality=statistics.cardinality, report=report)


def _fit_numbers(job: FieldJob) -> Fitted:
    name, staging = job.name, job.staging
    numbers = staging.numbers(name, np.float64)  # NaN where missing
    clusters.stop_if_unwanted()
    in_train = np.asarray(staging.load(IN_TRAIN))
    train = numbers[in_train]
    held = train[~np.isnan(train)]
    if not len(held):
        raise _all_missing(name, "numbers", in_train)
    missing = len(train) - len(held)
    low, high = float(held.min()), float(held.max())
    if missing:  # counts as 0
        low, high = min(low, 0.0), max(high, 0.0)
    if not np.isfinite(np.subtract(high, low)):
        raise UserError(f"the range of column {name!r} is too large: {low} to {high}. Scale it")
    staging.store(name, unit_range(numbers, *widened(low, high), job.device))
    test = numbers[~in_train]
    with np.errstate(invalid="ignore"):
        beyond = int(np.count_nonzero((test < low) | (test > high)))
    report: dict[str, Any] = {
        "occurrences": len(train),
        "missing": missing,
        "min": float(held.min()),
        "max": float(held.max()),
        "mean": float(held.mean()),
        "test_occurrences": len(test),
        "test_missing": int(np.count_nonzero(np.isnan(test))),
        "test_out_of_range": beyond,
    }
    least, most = (float(scaled(end, *widened(low, high))) for end in (held.min(), held.max()))
    if held.min() < held.max() and most - least < 0.5:
        report["note"] = (
            "missing numbers count as 0, so that the others, scaled to [0, 1] with it, fill "
            f"{most - least:.2g} of it, from {least:.3g} to {most:.3g}. Where that is too close, "
            "fill in a number like theirs"
        )
    return Fitted(low=low, high=high, report=report)


def _all_missing(name: str, what: str, in_train: np.ndarray) -> UserError:
    return UserError(
        f"a column of {what} must hold some in the training part. Received: none in column "
        f"{name!r}, in {int(in_train.sum())} rows. Take the column out of the data set's "
        "description"
    )
