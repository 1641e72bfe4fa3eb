"""Initial rows of a fused table: N(0, σ), untrained rows zero."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np
from merlin.schema import ColumnSchema

from merlin_cowclip.models.row_ranges import RowRanges, cardinality
from merlin_cowclip.models.vocabulary import PADDING_ID, UNKNOWN_ID
from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.plugins.distributed.horovod import all_gather_object
from merlin_cowclip.plugins.distributed.sharding import Shard

_BLOCK = 1 << 16  # rows that are drawn together


def standard_deviation(stddev: Any) -> float:
    """A σ as a float; a ValueError if it is negative or not finite."""
    value = float(stddev) if isinstance(stddev, numbers.Real) else float("nan")
    if not 0 <= value < float("inf"):
        raise ValueError(f"stddev must be finite and not negative. Received: stddev={stddev!r}")
    return value


@tf.keras.utils.register_keras_serializable(package="merlin_cowclip")
class TableInitializer(tf.keras.initializers.Initializer):
    """N(0, stddev) with `zero_rows`, numbers of rows, at zero; stddev 0 for a table of zeros."""

    def __init__(self, stddev: float, zero_rows: Sequence[int] | np.ndarray = ()) -> None:
        self.stddev = standard_deviation(stddev)
        self.zero_rows = np.asarray(zero_rows, np.int64)

    def __call__(self, shape: Any, dtype: Any = None, **kwargs: Any) -> tf.Tensor:
        """A V×d tensor."""
        if self.stddev == 0:
            return tf.zeros(shape, dtype or tf.float32)
        values = tf.random.normal(shape, stddev=self.stddev, dtype=dtype or tf.float32)
        at = tf.constant(self.zero_rows)[:, tf.newaxis]
        zeros = tf.zeros([len(self.zero_rows), shape[1]], values.dtype)
        return tf.tensor_scatter_nd_update(values, at, zeros)

    def of_shard(self, shard: Shard, shape: Any, dtype: Any = None, **kwargs: Any) -> tf.Tensor:
        """This rank's rows of a V×d table; on all ranks at once.

        Drawn in blocks from a seed of rank 0: the same table for any number of ranks, but not that
        of `__call__`.
        """
        dtype = tf.as_dtype(dtype or tf.float32)
        values = np.zeros(shape, dtype.as_numpy_dtype)
        if self.stddev == 0:
            return tf.constant(values)
        seed = int(tf.random.uniform([], maxval=2**31 - 1, dtype=tf.int32))
        seed = all_gather_object(seed)[0]
        done = 0
        for number, start in enumerate(range(0, shard.num_rows, _BLOCK)):
            size = [min(_BLOCK, shard.num_rows - start), shape[1]]
            drawn = tf.random.stateless_normal(
                size, (seed, number), stddev=self.stddev, dtype=dtype
            )
            mine = drawn.numpy()[(shard.rank - start) % shard.size :: shard.size]
            values[done : done + len(mine)] = mine
            done += len(mine)
        here = self.zero_rows[self.zero_rows % shard.size == shard.rank]
        values[shard.place(here)] = 0
        return tf.constant(values)

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {"stddev": self.stddev, "zero_rows": self.zero_rows.tolist()}


def untrained_rows(columns: Sequence[ColumnSchema], ranges: RowRanges) -> np.ndarray:
    """Rows that no training row of any field has: int64, rising."""
    untrained: dict[int, np.ndarray] = {}
    for column in columns:
        ids, first = _untrained_ids(column), ranges.first_row(column.name)
        ids = ids[ids < cardinality(column)]
        untrained[first] = np.intersect1d(untrained.get(first, ids), ids)
    return np.sort(np.concatenate([first + ids for first, ids in untrained.items()]))


def _untrained_ids(column: ColumnSchema) -> np.ndarray:
    """Padding, and the ids that prepared data counted no training row of; else the unknown id."""
    counted = column.properties.get("untrained_ids")  # starts and ends in turn; read as floats
    if counted is None:
        return np.array([PADDING_ID, UNKNOWN_ID])
    ends = [int(end) for end in counted]
    spans = zip(ends[::2], ends[1::2], strict=True)
    return np.concatenate([[PADDING_ID], *(np.arange(*span) for span in spans)])
