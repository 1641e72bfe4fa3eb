# SPDX-License-Identifier: Apache-2.0
"""Statistics of a column and its encoded values; temporary arrays have `SLICE_ROWS` at most."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

SLICE_ROWS = 1 << 24
PADDING, MISSING, UNKNOWN = 0, 1, 2  # Categorify's ids; `UNKNOWN` is the first hash bucket


class IdStatistics(NamedTuple):
    """The IDs of a field in the training split."""

    vocabulary: pa.Array  # texts by descending count, then by text; the first one is `first_id`
    by_id: np.ndarray  # counts, int64: of padding 0, missing IDs, hash buckets, the vocabulary
    encode: np.ndarray  # codes + 1, int32: code → ID; the last one is for missing IDs

    @property
    def first_id(self) -> int:
        """The first ID of the vocabulary."""
        return len(self.by_id) - len(self.vocabulary)


def count_codes(codes: np.ndarray, in_train: np.ndarray, distinct: int) -> np.ndarray:
    """Occurrences in the training split of each code from -1 (missing) on, 1 + ``distinct``."""
    counts = np.zeros(distinct + 1, np.int64)
    for start in range(0, len(codes), SLICE_ROWS):
        part = slice(start, start + SLICE_ROWS)
        counts += np.bincount(codes[part][in_train[part]] + 1, minlength=len(counts))
    return counts


def rank_ids(
    counts: np.ndarray,
    texts: pa.Array,
    *,
    threshold: int = 0,
    buckets: int = 1,
    vocabulary: pa.Array | None = None,
) -> IdStatistics:
    """Rank IDs by descending count; those that occur less often than ``threshold`` are unknown.

    ``counts`` are of missing IDs, then of each text. Unknown IDs share ``buckets``. With an earlier
    ``vocabulary``, IDs are ranked as in it, and all others are unknown.
    """
    if vocabulary is None:
        held = counts[1:]
        by_text = pc.sort_indices(texts).to_numpy()
        order = by_text[np.argsort(-held[by_text], kind="stable")]  # ties: by text
        kept = order[: int(np.count_nonzero(held >= max(threshold, 1)))]
        vocabulary, places = texts.take(pa.array(kept)), np.full(len(texts), -1, np.int32)
        places[kept] = np.arange(len(kept), dtype=np.int32)
    else:
        places = pc.index_in(texts, vocabulary).fill_null(-1).to_numpy(zero_copy_only=False)
    first = UNKNOWN + buckets
    encode = np.append(np.where(places < 0, UNKNOWN, places + first), MISSING).astype(np.int32)
    if buckets > 1:
        unknown = np.flatnonzero(places < 0)
        encode[unknown] += hash_bucket(texts.take(pa.array(unknown)), buckets).astype(np.int32)
    by_id = np.bincount(encode, weights=np.roll(counts, -1), minlength=first + len(vocabulary))
    return IdStatistics(vocabulary, by_id.astype(np.int64), encode)


def hash_bucket(texts: Any, buckets: int) -> np.ndarray:
    """The bucket of each text, n, by pandas's hash: the same on CPUs and GPUs.

    (Stock Categorify's depends on the device and, on a CPU, on the index of the frame.)
    """
    values = np.asarray(texts, dtype=object)
    return (pd.util.hash_array(values, categorize=False) % np.uint64(buckets)).astype(np.int64)


def scaled(numbers: Any, low: float, high: float) -> Any:
    """(numbers - low) / (high - low), in float64, of an array or a column of any library.

    A range of length 0 is made longer, so that its one value becomes 0.
    """
    high = high if high > low else low + max(1.0, abs(low))
    return (numbers - low) / (high - low)


def unit_range(numbers: np.ndarray, low: float, high: float) -> np.ndarray:
    """Numbers scaled to [0, 1] by a range and clipped, n, float32; NaN counts as 0 before.

    As FillMissing, UnitRange and Clip do it in the saved workflow, to the bit.
    """
    units = np.empty(len(numbers), np.float32)
    for start in range(0, len(numbers), SLICE_ROWS):
        part = slice(start, start + SLICE_ROWS)
        with np.errstate(over="ignore"):  # beyond the range: clipped
            unit = scaled(np.where(np.isnan(numbers[part]), 0.0, numbers[part]), low, high)
            units[part] = np.clip(unit.astype(np.float32), 0.0, 1.0)
    return units
