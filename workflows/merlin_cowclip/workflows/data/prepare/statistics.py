"""Statistics of a column and its encoded values, on a CPU (NumPy) or a GPU (CuPy, cuDF).

The same few array operations on both, so that both give the same ids to the last one. A column is
in the host's memory; on a GPU are a slice of `DEVICE_ROWS` of it at a time and a few numbers per
distinct id.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

DEVICE_ROWS = 1 << 24  # of a column on a device at a time: 0.6 GiB at most
DEVICE_TEXT = 1 << 30  # bytes of distinct ids that are sorted on a device; cuDF holds 2 GiB at most
PADDING, MISSING, UNKNOWN = 0, 1, 2  # Categorify's ids; `UNKNOWN` is the first hash bucket


@dataclass(frozen=True)
class IdStatistics:
    """What the training part says of one id field.

    Attributes:
        vocabulary: texts, by falling count, then by text: vocabulary[i] has id i + 2 + buckets.
        counts: of each.
        missing: rows (of lists: places) without an id.
        unknown: of each hash bucket: the rows of ids below the threshold.
        distinct: ids that occur, rare ones included.
        encode: codes + 1, int32: staged code → id; the last one is for missing.
    """

    vocabulary: pa.Array
    counts: np.ndarray
    missing: int
    unknown: np.ndarray
    distinct: int
    encode: np.ndarray

    @property
    def first_id(self) -> int:
        """Of the vocabulary."""
        return UNKNOWN + len(self.unknown)

    @property
    def cardinality(self) -> int:
        """Ids, special ones included."""
        return self.first_id + len(self.vocabulary)

    @property
    def by_id(self) -> np.ndarray:
        """Counts of all ids, (cardinality,) int64; padding, which is none, has 0."""
        counts = np.concatenate([[0, self.missing], self.unknown, self.counts])
        return counts.astype(np.int64)


def arrays(device: str) -> Any:
    """NumPy, or CuPy for "gpu"."""
    if device == "gpu":
        import cupy  # type: ignore[import-not-found]

        return cupy
    return np


def count_ids(
    codes: np.ndarray,
    texts: pa.Array,
    in_train: np.ndarray,
    *,
    threshold: int = 0,
    buckets: int = 1,
    device: str = "cpu",
) -> IdStatistics:
    """Count the training part's ids, and rank them by falling count.

    Args:
        codes: n, places in `texts`; -1 for a missing id.
        texts: the distinct ids.
        in_train: n, whether an occurrence belongs to the training part.
        threshold: ids that occur less often are unknown.
        buckets: rows that unknown ids share by `hash_bucket`.
        device: "cpu" or "gpu".
    """
    xp = arrays(device)
    totals = xp.zeros(len(texts) + 1, dtype=xp.int64)
    for part in _slices(len(codes)):
        held = xp.asarray(codes[part])[xp.asarray(in_train[part])]
        totals += xp.bincount(held + 1, minlength=len(totals))
    counts = _on_host(totals)
    missing, counts = int(counts[0]), counts[1:]
    by_text = _order(texts, device)
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
        distinct=distinct,
        encode=encode,
    )


def encode_ids(codes: np.ndarray, encode: np.ndarray, device: str = "cpu") -> np.ndarray:
    """Ids of staged codes, n, int32."""
    xp = arrays(device)
    table, ids = xp.asarray(encode), np.empty(len(codes), encode.dtype)
    for part in _slices(len(codes)):
        ids[part] = _on_host(table[xp.asarray(codes[part])])
    return ids


def hash_bucket(texts: Any, buckets: int) -> np.ndarray:
    """The bucket of each text, n: pandas's hash, on whatever device, so that it is always the same.

    (Stock Categorify hashes with the data frame's library, and so differently on a GPU.)
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


def unit_range(numbers: np.ndarray, low: float, high: float, device: str = "cpu") -> np.ndarray:
    """Numbers scaled to [0, 1] by a range and clipped, n, float32; NaN counts as 0 before.

    As FillMissing, UnitRange and Clip do it in the saved workflow, to the bit.
    """
    xp = arrays(device)
    units = np.empty(len(numbers), np.float32)
    for part in _slices(len(numbers)):
        given = xp.asarray(numbers[part])
        with np.errstate(over="ignore"):  # beyond the range: clipped
            unit = scaled(xp.where(xp.isnan(given), 0.0, given), low, high).astype(np.float32)
        units[part] = _on_host(xp.clip(unit, 0.0, 1.0))
    return units


def _slices(rows: int) -> Iterator[slice]:
    return (slice(start, start + DEVICE_ROWS) for start in range(0, rows, DEVICE_ROWS))


def _order(texts: pa.Array, device: str) -> np.ndarray:
    """Places that sort texts by their bytes."""
    if device == "gpu" and texts.nbytes <= DEVICE_TEXT:
        import cudf  # type: ignore[import-not-found]

        return _on_host(cudf.Series.from_arrow(texts).argsort().values)
    return pc.sort_indices(texts).to_numpy()


def _on_host(values: Any) -> np.ndarray:
    return values.get() if hasattr(values, "get") else values
