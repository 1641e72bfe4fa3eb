"""Statistics of a column and its encoded values; temporary arrays have `SLICE_ROWS` at most."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

SLICE_ROWS = 1 << 24
PADDING, MISSING, UNKNOWN = 0, 1, 2  # Categorify's ids; `UNKNOWN` is the first hash bucket


@dataclass(frozen=True)
class IdStatistics:
    """The IDs of a field in the training split.

    Attributes:
        vocabulary: texts, by descending count, then by text: vocabulary[i] is ID i + 2 + buckets.
        counts: of the vocabulary.
        missing: count of missing IDs.
        unknown: count of each hash bucket, from IDs below the threshold.
        encode: codes + 1, int32: code → ID; the last entry is for missing IDs.
    """

    vocabulary: pa.Array
    counts: np.ndarray
    missing: int
    unknown: np.ndarray
    encode: np.ndarray

    @property
    def first_id(self) -> int:
        """The first ID of the vocabulary."""
        return UNKNOWN + len(self.unknown)

    @property
    def cardinality(self) -> int:
        """Number of IDs, including special ones."""
        return self.first_id + len(self.vocabulary)

    @property
    def by_id(self) -> np.ndarray:
        """Counts of all IDs, (cardinality,) int64; 0 for padding."""
        counts = np.concatenate([[0, self.missing], self.unknown, self.counts])
        return counts.astype(np.int64)


def count_codes(codes: np.ndarray, in_train: np.ndarray, distinct: int) -> np.ndarray:
    """Occurrences in the training split of each code from -1 (missing) on, 1 + ``distinct``."""
    counts = np.zeros(distinct + 1, np.int64)
    for part in _slices(len(codes)):
        counts += np.bincount(codes[part][in_train[part]] + 1, minlength=len(counts))
    return counts


def rank_ids(
    counts: np.ndarray, texts: pa.Array, *, threshold: int = 0, buckets: int = 1
) -> IdStatistics:
    """Rank IDs by descending count.

    Args:
        counts: of missing IDs, then of each text.
        texts: the distinct IDs.
        threshold: IDs that occur less often are unknown.
        buckets: rows that unknown IDs share by `hash_bucket`.
    """
    missing, counts = int(counts[0]), counts[1:]
    by_text = pc.sort_indices(texts).to_numpy()
    order = by_text[np.argsort(-counts[by_text], kind="stable")]  # ties: by text
    distinct = int(np.count_nonzero(counts))  # the rest occurs in the test part only
    kept = order[: int(np.count_nonzero(counts >= max(threshold, 1)))]
    encode = np.full(len(texts) + 1, UNKNOWN, dtype=np.int32)
    if buckets > 1:
        encode[:-1] += hash_bucket(texts, buckets).astype(np.int32)
    rare = order[len(kept) : distinct]
    unknown = np.bincount(encode[rare] - UNKNOWN, weights=counts[rare], minlength=buckets)
    first = UNKNOWN + buckets
    encode[kept] = np.arange(first, first + len(kept), dtype=np.int32)
    encode[-1] = MISSING
    return IdStatistics(
        vocabulary=texts.take(pa.array(kept)),
        counts=counts[kept],
        missing=missing,
        unknown=unknown.astype(np.int64),
        encode=encode,
    )


def known_ids(
    counts: np.ndarray, texts: pa.Array, vocabulary: pa.Array, *, buckets: int = 1
) -> IdStatistics:
    """The IDs of an earlier vocabulary; others are unknown. See `rank_ids`."""
    places = pc.index_in(texts, vocabulary).fill_null(-1).to_numpy(zero_copy_only=False)
    first = UNKNOWN + buckets
    encode = np.append(np.where(places < 0, UNKNOWN, places + first), MISSING).astype(np.int32)
    if buckets > 1:
        unknown = np.flatnonzero(places < 0)
        encode[unknown] += hash_bucket(texts.take(pa.array(unknown)), buckets).astype(np.int32)
    by_id = np.bincount(encode[:-1], weights=counts[1:], minlength=first + len(vocabulary))
    return IdStatistics(
        vocabulary=vocabulary,
        counts=by_id[first:].astype(np.int64),
        missing=int(counts[0]),
        unknown=by_id[UNKNOWN:first].astype(np.int64),
        encode=encode,
    )


def hash_bucket(texts: Any, buckets: int) -> np.ndarray:
    """The bucket of each text, n, by pandas's hash: the same on CPUs and GPUs.

    (Stock Categorify's depends on the device and, on a CPU, on the index of the frame.)
    """
    values = texts.to_numpy(zero_copy_only=False) if isinstance(texts, pa.Array) else texts
    values = np.asarray(values, dtype=object)
    return (pd.util.hash_array(values, categorize=False) % np.uint64(buckets)).astype(np.int64)


def widened(low: float, high: float) -> tuple[float, float]:
    """A range to scale by: one of length 0 is made longer, so that its one value becomes 0."""
    return low, high if high > low else low + max(1.0, abs(low))


def scaled(numbers: Any, low: float, high: float) -> Any:
    """(numbers - low) / (high - low), in float64, of an array or a column of any library."""
    return (numbers - low) / (high - low)


def unit_range(numbers: np.ndarray, low: float, high: float) -> np.ndarray:
    """Numbers scaled to [0, 1] by a range and clipped, n, float32; NaN counts as 0 before.

    As FillMissing, UnitRange and Clip do it in the saved workflow, to the bit.
    """
    units = np.empty(len(numbers), np.float32)
    for part in _slices(len(numbers)):
        with np.errstate(over="ignore"):  # beyond the range: clipped
            unit = scaled(np.where(np.isnan(numbers[part]), 0.0, numbers[part]), low, high)
            units[part] = np.clip(unit.astype(np.float32), 0.0, 1.0)
    return units


def _slices(rows: int) -> Iterator[slice]:
    return (slice(start, start + SLICE_ROWS) for start in range(0, rows, SLICE_ROWS))
