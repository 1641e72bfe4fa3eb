"""What the rows of a fused table are before training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from merlin_cowclip.plugins._stack import tf
from merlin_cowclip.plugins.joining import of_all_ranks
from merlin_cowclip.plugins.sharding import Shard

_BLOCK = 1 << 16  # rows that are drawn together


@tf.keras.utils.register_keras_serializable(package="merlin_cowclip")
class TableInitializer(tf.keras.initializers.Initializer):
    """N(0, stddev) with some rows at zero.

    Args:
      stddev: standard deviation σ; 0 for a table of zeros.
      zero_rows: row numbers that start at zero.
    """

    def __init__(self, stddev: float, zero_rows: Sequence[int] = ()) -> None:
        if not stddev >= 0:
            raise ValueError(f"stddev must not be negative. Received: stddev={stddev!r}")
        self.stddev = float(stddev)
        self.zero_rows = [int(row) for row in zero_rows]

    def __call__(self, shape: Any, dtype: Any = None, **kwargs: Any) -> tf.Tensor:
        """A V×d tensor."""
        if self.stddev == 0:
            return tf.zeros(shape, dtype or tf.float32)
        values = tf.random.normal(shape, stddev=self.stddev, dtype=dtype or tf.float32)
        if not self.zero_rows:
            return values
        at = tf.constant(self.zero_rows, tf.int64)[:, tf.newaxis]
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
        seed = of_all_ranks(seed)[0]
        done = 0
        for number, start in enumerate(range(0, shard.num_rows, _BLOCK)):
            size = min(_BLOCK, shard.num_rows - start)
            block = tf.random.stateless_normal(
                [size, shape[1]], (seed, number), stddev=self.stddev, dtype=dtype
            )
            mine = block.numpy()[(shard.rank - start) % shard.size :: shard.size]
            values[done : done + len(mine)] = mine
            done += len(mine)
        here = [row for row in self.zero_rows if row % shard.size == shard.rank]
        values[[shard.place(row) for row in here]] = 0
        return tf.constant(values)

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {"stddev": self.stddev, "zero_rows": self.zero_rows}
