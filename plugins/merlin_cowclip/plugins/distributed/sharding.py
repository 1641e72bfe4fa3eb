# SPDX-License-Identifier: Apache-2.0
"""Tables in shards: row r lives on rank r mod N alone, with its moments.

A lookup asks the owners for the rows of its ids, each once; a step sends them the summed gradients
and counts of this rank's share of the batch. The owner adds up, then does to its rows what one
process does to all.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.plugins.distributed.gradients import RowSums, merged, packed
from merlin_cowclip.plugins.distributed.horovod import all_to_all
from merlin_cowclip.plugins.row_ops import colocated_with, once_per_graph, source_of, unique_rows


class Shard(NamedTuple):
    """Which rows of a table of `num_rows` a rank has; `place` is where a row is on its rank."""

    rank: int
    size: int
    num_rows: int

    @property
    def rows(self) -> int:
        """How many it has."""
        return len(range(self.rank, self.num_rows, self.size))

    def local_row(self, rows: tf.Tensor) -> tf.Tensor:
        """Of row numbers, wherever they live."""
        return rows // self.size

    def global_row(self, places: tf.Tensor) -> tf.Tensor:
        """Of what is at some places here, the row numbers."""
        return places * self.size + self.rank


@tf.autograph.experimental.do_not_convert
def look_up(
    variable: tf.Variable, rows: tf.Tensor, shard: Shard, *, from_value: bool, trainable: bool
) -> tf.Tensor:
    """Rows of a table in shards, by row numbers of any shape: that shape × d; on all ranks at once.

    Numbers out of range are read as the first or last row; the gradient has slices by row number of
    the whole table. `trainable`: whether an optimizer sends gradients to the owners.
    """
    flat = tf.reshape(rows, [-1])
    shape = tf.concat([tf.shape(rows, tf.int64), [variable.shape[1]]], axis=0)

    def gradient(upstream: tf.Tensor, variables: Sequence[tf.Variable] = ()) -> Any:
        if not trainable:
            raise ValueError(
                f"The sharded table {variable.name!r} must be trained by a CowClipOptimizer. Make "
                "it by CowClipOptimizer.for_model, or leave sharded=True out."
            )
        dense_shape = tf.constant([shard.num_rows, variable.shape[1]], tf.int64)
        return None, [tf.IndexedSlices(upstream, flat, dense_shape)] * len(variables)

    @tf.custom_gradient
    def found(flat: tf.Tensor) -> tuple[tf.Tensor, Any]:
        with colocated_with(variable) as on_cpu:
            find = functools.partial(_requests, flat, shard, on_cpu)
            places, sizes, at = once_per_graph(("requests", shard), [source_of(flat)], find)
            source = tf.convert_to_tensor(variable) if from_value else variable
            answers, _ = all_to_all(tf.gather(source, places), sizes)
            return tf.gather(answers, at), gradient

    return tf.reshape(found(flat), shape)


def _requests(rows: tf.Tensor, shard: Shard, on_cpu: bool) -> tuple[tf.Tensor, ...]:
    """Places here that ranks ask for, how many each (N), and where n rows are in the answers."""
    inside = tf.clip_by_value(rows, 0, shard.num_rows - 1)
    each, position, _ = unique_rows(inside, shard.num_rows, on_cpu)
    order, sizes = by_owner(each, shard.size)
    requested, sizes = all_to_all(tf.gather(each, order), sizes)
    return shard.local_row(requested), sizes, tf.gather(_inverse(order, on_cpu), position)


def by_owner(rows: tf.Tensor, size: int) -> tuple[tf.Tensor, tf.Tensor]:
    """The order that puts U row numbers behind each other by owner; and how many each owns, N."""
    owner = tf.cast(rows % size, tf.int32)
    parts = tf.dynamic_partition(tf.range(tf.size(rows, tf.int64)), owner, size)
    return tf.concat(parts, axis=0), tf.stack([tf.size(part) for part in parts])


def _inverse(order: tf.Tensor, on_cpu: bool) -> tf.Tensor:
    """Where each number from 0 on stands in an order of them, int64."""
    # Its kernel for GPUs works on the host.
    return tf.math.invert_permutation(order) if on_cpu else tf.cast(tf.argsort(order), tf.int64)


def join_shards(share: RowSums, variable: tf.Variable, shard: Shard) -> RowSums:
    """As `all_gather_rows`, of a sharded table: each rank has those of its own rows, by place."""
    with colocated_with(variable):
        find = functools.partial(_owned, share.indices, shard)
        order, sizes, places = once_per_graph(("owned", shard), [share.indices], find)
        rows, _ = all_to_all(tf.gather(packed(share)[1], order), sizes)
    return merged(places, rows, variable)


def _owned(indices: tf.Tensor, shard: Shard) -> tuple[tf.Tensor, ...]:
    """The order and numbers (N) in which rows go to their owners, and the places that come here."""
    order, sizes = by_owner(indices, shard.size)
    received, _ = all_to_all(tf.gather(indices, order), sizes)
    return order, sizes, shard.local_row(received)
