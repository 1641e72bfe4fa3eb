"""Gradients and id counts of all ranks: all-reduce of dense ones, all-gather of rows.

Each rank has the gradient of the mean loss of its share, an N-th of the batch. The mean of these
gradients is that of the whole batch's mean loss, and counts add up; L2, the clip and Adam come
after it, on every rank alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.plugins.distributed.horovod import all_gather_each, all_reduce_each, ranks
from merlin_cowclip.plugins.row_ops import beside, sum_per_row, unique_rows


class RowSums(NamedTuple):
    """A table's gradient, summed per row, without L2.

    Attributes:
      indices: U row numbers, each once, int64.
      gradients: U×d, float32 or wider.
      counts: U, samples that hold the row, float32.
      is_whole: whether it is a dense gradient, U = V.
    """

    indices: tf.Tensor
    gradients: tf.Tensor
    counts: tf.Tensor
    is_whole: bool = False


class ReducedRows(tf.IndexedSlices):
    """A table's gradient of the global batch, the same on all ranks.

    It is slices to Keras, whose loss scaling stands between the reduction and the update.
    """

    def __init__(self, sums: RowSums, variable: tf.Variable) -> None:
        known = variable.shape.is_fully_defined()  # not of a hash table
        shape = tf.constant(variable.shape.as_list(), tf.int64) if known else None
        super().__init__(sums.gradients, sums.indices, shape)
        self.sums = sums
        self._variable = variable

    def and_nan(self, rows: tf.Tensor) -> ReducedRows:
        """The same, and so many rows of NaN."""
        indices, gradients, counts, is_whole = self.sums
        nan = tf.fill([rows, self._variable.shape[1]], tf.constant(float("nan"), gradients.dtype))
        more = RowSums(
            tf.concat([indices, tf.fill([rows], tf.constant(0, indices.dtype))], axis=0),
            tf.concat([gradients, nan], axis=0),
            tf.concat([counts, tf.fill([rows], tf.constant(1, counts.dtype))], axis=0),
            is_whole,
        )
        return ReducedRows(more, self._variable)


@tf.autograph.experimental.do_not_convert
def all_reduce_dense(gradients: Sequence[Any]) -> list[Any]:
    """Gradients of dense weights, tensors or slices, as those of the global batch.

    Args:
      gradients: of the mean loss of this rank's share.
    """
    if not gradients:
        return []
    size = ranks().size
    slices = [g for g in gradients if isinstance(g, tf.IndexedSlices)]
    tensors = [g for g in gradients if not isinstance(g, tf.IndexedSlices)]
    summed = iter(all_reduce_each(tensors, "dense"))
    parts = [part for g in slices for part in (g.values, g.indices)]
    gathered = iter(all_gather_each(parts, "dense_slices"))

    def reduced(gradient: Any) -> Any:
        if not isinstance(gradient, tf.IndexedSlices):
            return next(summed) / size
        values, indices = next(gathered), next(gathered)
        return tf.IndexedSlices(values / size, indices, gradient.dense_shape)

    return [reduced(gradient) for gradient in gradients]


@tf.autograph.experimental.do_not_convert
def all_gather_rows(
    shares: Sequence[RowSums], variables: Sequence[tf.Variable]
) -> list[ReducedRows]:
    """Tables' gradients of the ranks' shares as those of the global batch.

    Of sparse ones, all ranks' rows are gathered, with their counts as one more column; dense ones
    are all-reduced.

    Args:
      shares: of each table, this rank's.
      variables: the tables.
    """
    size = ranks().size
    sparse = [share for share in shares if not share.is_whole]
    dense = [share for share in shares if share.is_whole]
    gathered = iter(all_gather_each([p for s in sparse for p in _packed(s)], "rows"))
    summed = iter(all_reduce_each([p for s in dense for p in (s.gradients, s.counts)], "tables"))

    def reduced(share: RowSums, variable: tf.Variable) -> RowSums:
        if share.is_whole:
            gradients, counts = next(summed) / size, next(summed)
            return share._replace(gradients=gradients, counts=counts)
        with beside(variable) as on_cpu:
            indices, packed = next(gathered), next(gathered)
            rows, position, _ = unique_rows(indices, variable.shape[0], on_cpu)
            sums = sum_per_row(packed, position, tf.size(rows), on_cpu)
            counts = tf.cast(sums[:, -1], tf.float32)
            return RowSums(rows, sums[:, :-1] / size, counts)

    pairs = zip(shares, variables, strict=True)
    return [ReducedRows(reduced(share, variable), variable) for share, variable in pairs]


def _packed(share: RowSums) -> tuple[tf.Tensor, tf.Tensor]:
    counts = tf.cast(share.counts, share.gradients.dtype)
    return share.indices, tf.concat([share.gradients, counts[:, tf.newaxis]], axis=1)
