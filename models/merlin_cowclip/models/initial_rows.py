"""What the rows of a fused table are before training."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np
from merlin.schema import ColumnSchema

from merlin_cowclip.models.row_ranges import RowRanges, cardinality
from merlin_cowclip.models.vocabulary import PADDING_ID, UNKNOWN_ID
from merlin_cowclip.plugins._stack import tf
from merlin_cowclip.plugins.joining import all_gather_object
from merlin_cowclip.plugins.sharding import Shard

_BLOCK = 1 << 16  # rows that are drawn together


def standard_deviation(stddev: Any) -> float:
    """A σ as it is given, as a float.

    Raises:
      ValueError: it is no number, below 0, or not finite.
    """
    value = float(stddev) if isinstance(stddev, numbers.Real) else float("nan")
    if not 0 <= value < float("inf"):
        raise ValueError(f"stddev must be finite and not negative. Received: stddev={stddev!r}")
    return value


@tf.keras.utils.register_keras_serializable(package="merlin_cowclip")
class TableInitializer(tf.keras.initializers.Initializer):
    """N(0, stddev) with some rows at zero.

    Args:
      stddev: standard deviation σ; 0 for a table of zeros.
      zero_rows: row numbers that start at zero.
    """

    def __init__(self, stddev: float, zero_rows: Sequence[int] | np.ndarray = ()) -> None:
        self.stddev = standard_deviation(stddev)
        self.zero_rows = np.asarray(zero_rows, np.int64)

    def __call__(self, shape: Any, dtype: Any = None, **kwargs: Any) -> tf.Tensor:
        """A V×d tensor."""
        if self.stddev == 0:
            return tf.zeros(shape, dtype or tf.float32)
        values = tf.random.normal(shape, stddev=self.stddev, dtype=dtype or tf.float32)
        if not len(self.zero_rows):
            return values
        at = tf.constant(self.zero_rows)[:, tf.newaxis]
        zeros = tf.zeros([len(self.zero_rows), shape[1]], values.dtype)
        return tf.tensor_scatter_nd_update(values, at, zeros)

    def of_shard(self, shard: Shard, shape: Any, dtype: Any = None, **kwargs: Any) -> tf.Tensor:
        """The rows of a V×d table that this rank has; on all ranks at once.

        The table is drawn anew from rank 0's random state, in blocks, and is the same for any
        number of ranks.

        Args:
          shard: which rows it has.
          shape: of these.
          dtype: of the table.
          kwargs: of Keras's, not used.
        """
        dtype = tf.as_dtype(dtype or tf.float32)
        values = np.zeros(shape, dtype.as_numpy_dtype)
        if self.stddev == 0:
            return tf.constant(values)
        seed = int(tf.random.uniform([], maxval=2**31 - 1, dtype=tf.int32))
        seed = all_gather_object(seed)[0]
        done = 0
        for number, start in enumerate(range(0, shard.num_rows, _BLOCK)):
            size = min(_BLOCK, shard.num_rows - start)
            block = tf.random.stateless_normal(
                [size, shape[1]], (seed, number), stddev=self.stddev, dtype=dtype
            )
            mine = block.numpy()[(shard.rank - start) % shard.size :: shard.size]
            values[done : done + len(mine)] = mine
            done += len(mine)
        here = self.zero_rows[self.zero_rows % shard.size == shard.rank]
        values[shard.place(here)] = 0
        return tf.constant(values)

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {"stddev": self.stddev, "zero_rows": self.zero_rows.tolist()}


def untrained_rows(columns: Sequence[ColumnSchema], ranges: RowRanges) -> np.ndarray:
    """Rows that no training row has, whichever field reads them: int64, rising."""
    untrained: dict[int, np.ndarray] = {}
    for column in columns:
        ids = _untrained_ids(column)
        ids, first = ids[ids < cardinality(column)], ranges.first_row(column.name)
        untrained[first] = np.intersect1d(untrained.get(first, ids), ids)
    return np.sort(np.concatenate([first + ids for first, ids in untrained.items()]))


def _untrained_ids(column: ColumnSchema) -> np.ndarray:
    """Ids that no training row has: padding, and of the others those that prepared data counted.

    Of a schema that tells of no counts, the unknown ones unless Categorify may have made some: it
    does below a threshold, beyond a size, and by hashing without a vocabulary. With a whole
    vocabulary, buckets only spread the ids that training has not seen.
    """
    given = column.properties
    counted = given.get("untrained_ids")  # first ones and ends in turn; read back as floats
    if counted is not None:
        ends = [int(end) for end in counted]
        spans = zip(ends[::2], ends[1::2], strict=True)
        return np.concatenate([[PADDING_ID], *(np.arange(*span) for span in spans)])
    truncated = 0 < (given.get("max_size") or 0) <= cardinality(column)
    below = (given.get("freq_threshold") or 0) > 1
    buckets = int(given.get("num_buckets") or 1)
    if truncated or below or (buckets > 1 and not given.get("cat_path")):
        return np.array([PADDING_ID])
    return np.array([PADDING_ID, *range(UNKNOWN_ID, UNKNOWN_ID + buckets)])
