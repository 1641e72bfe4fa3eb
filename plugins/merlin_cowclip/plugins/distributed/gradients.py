# SPDX-License-Identifier: Apache-2.0
"""Gradients and id counts of all ranks: all-reduce of dense ones, all-gather of rows.

Each rank has the gradient of the mean loss of its share, an N-th of the batch. The mean of these
is the gradient of the batch's mean loss; counts add up. L2, clip and Adam come after.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.plugins.distributed.horovod import all_gather_each, all_reduce, ranks
from merlin_cowclip.plugins.row_ops import colocated_with, sum_per_row, unique_rows


class RowSums(NamedTuple):
    """A table's gradient, summed per row, without L2."""

    indices: tf.Tensor  # U row numbers, each once, int64
    gradients: tf.Tensor  # U×d, float32 or wider
    counts: tf.Tensor  # U, samples that hold the row, float32
    is_dense: bool = False  # whether it is a dense gradient, U = V


class ReducedRows(tf.IndexedSlices):
    """A table's gradient of the global batch, as slices, which Keras's loss scaling takes."""

    def __init__(self, sums: RowSums, variable: tf.Variable) -> None:
        known = variable.shape.is_fully_defined()  # not of a hash table
        shape = tf.constant(variable.shape.as_list(), tf.int64) if known else None
        super().__init__(sums.gradients, sums.indices, shape)
        self.sums = sums


def all_reduce_dense(gradients: Sequence[Any]) -> list[Any]:
    """Gradients of dense weights, tensors or slices: of all ranks' shares as one batch's."""
    size, found = ranks().size, []
    for one in gradients:
        if isinstance(one, tf.IndexedSlices):
            values, indices = all_gather_each([one.values, one.indices])
            found.append(tf.IndexedSlices(values / size, indices, one.dense_shape))
        else:
            found.append(all_reduce(one, "sum") / size)
    return found


def all_gather_rows(share: RowSums, variable: tf.Variable) -> RowSums:
    """The gradient of a replicated table: of all ranks' shares as one batch's."""
    if not share.is_dense:
        indices, rows = all_gather_each(packed(share))
        return merged(indices, rows, variable)
    mean = all_reduce(share.gradients, "sum") / ranks().size
    return share._replace(gradients=mean, counts=all_reduce(share.counts, "sum"))


def packed(share: RowSums) -> tuple[tf.Tensor, tf.Tensor]:
    """Row numbers, and the gradients with the counts as one more column."""
    counts = tf.cast(share.counts, share.gradients.dtype)
    return share.indices, tf.concat([share.gradients, counts[:, tf.newaxis]], axis=1)


def merged(indices: tf.Tensor, packed: tf.Tensor, variable: tf.Variable) -> RowSums:
    """Several ranks' packed rows of a variable, added up, with the mean of their gradients."""
    with colocated_with(variable) as on_cpu:
        rows, position, _ = unique_rows(indices, variable.shape[0], on_cpu)
        sums = sum_per_row(packed, position, tf.size(rows), on_cpu)
        return RowSums(rows, sums[:, :-1] / ranks().size, tf.cast(sums[:, -1], tf.float32))
