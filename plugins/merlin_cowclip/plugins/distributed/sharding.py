"""Tables in shards: row r lives on rank r mod N alone, with its moments.

A lookup asks the owners for the rows of its ids, each once, and gets them back; a step sends them
the summed gradients and counts of this rank's share of the batch. The owner adds up, and from there
on does to its rows what one process does to all: L2, the clip and Adam are a row's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.plugins.distributed.gradients import ReducedRows, RowSums
from merlin_cowclip.plugins.distributed.horovod import all_reduce, all_to_all
from merlin_cowclip.plugins.row_ops import (
    beside,
    once_per_graph,
    source_of,
    sum_per_row,
    unique_rows,
)


class Shard(NamedTuple):
    """Which rows of a table of `num_rows` a rank has; `place` is where a row is on its rank."""

    rank: int
    size: int
    num_rows: int

    @property
    def rows(self) -> int:
        """How many it has."""
        return len(range(self.rank, self.num_rows, self.size))

    def place(self, rows: tf.Tensor) -> tf.Tensor:
        """Of row numbers, wherever they live."""
        return rows // self.size

    def number(self, places: tf.Tensor) -> tf.Tensor:
        """Of what is at some places here, the row numbers."""
        return places * self.size + self.rank


class _Asked(NamedTuple):
    places: tf.Tensor  # of rows here that the ranks ask for, in the ranks' order
    sizes: tf.Tensor  # N, how many each of them asks for
    answers: tf.Tensor  # n, where the rows that this one asks for will be among what comes back


@tf.autograph.experimental.do_not_convert
def look_up(
    variable: tf.Variable, rows: tf.Tensor, shard: Shard, *, whole: bool, trainable: bool
) -> tf.Tensor:
    """Rows of a table in shards, by row numbers of any shape: that shape × d.

    Called on all ranks at once, each with row numbers of its own. The gradient is one of the whole
    table, slices by row number: `CowClipOptimizer` sends them to the owners.

    Args:
      variable: this rank's rows.
      rows: int64; one that is none of the table's is read as the first or the last.
      shard: which they are.
      whole: as in `TableAccess`.
      trainable: whether an optimizer knows of the shards.
    """
    flat = tf.reshape(rows, [-1])
    shape = tf.concat([tf.shape(rows, tf.int64), [variable.shape[1]]], axis=0)

    @tf.custom_gradient
    def found(flat: tf.Tensor) -> tuple[tf.Tensor, object]:
        with beside(variable) as on_cpu:
            inside = tf.clip_by_value(flat, 0, shard.num_rows - 1)
            asked = once_per_graph(
                ("asked", shard), [source_of(flat)], lambda: _ask(inside, shard, on_cpu)
            )
            source = tf.convert_to_tensor(variable) if whole else variable
            answers, _ = all_to_all(tf.gather(source, asked.places), asked.sizes)
            values = tf.gather(answers, asked.answers)

        def gradient(
            upstream: tf.Tensor, variables: Sequence[tf.Variable] = ()
        ) -> tuple[None, list[tf.IndexedSlices]]:
            if not trainable:
                raise ValueError(
                    "A table in shards must be trained by a CowClipOptimizer, which knows where "
                    f"its rows are. Received: a gradient of {variable.name!r} without one. Make "
                    "it by CowClipOptimizer.for_model, or leave sharded=True out."
                )
            dense_shape = tf.constant([shard.num_rows, variable.shape[1]], tf.int64)
            return None, [tf.IndexedSlices(upstream, flat, dense_shape)] * len(variables)

        return values, gradient

    return tf.reshape(found(flat), shape)


def _ask(rows: tf.Tensor, shard: Shard, on_cpu: bool) -> _Asked:
    each, position, _ = unique_rows(rows, shard.num_rows, on_cpu)
    order, sizes = by_owner(each, shard.size)
    wanted, asked_for = all_to_all(tf.gather(each, order), sizes)
    answers = tf.gather(_inverse(order, on_cpu), position)
    return _Asked(shard.place(wanted), asked_for, answers)


def by_owner(rows: tf.Tensor, size: int) -> tuple[tf.Tensor, tf.Tensor]:
    """The order that puts U row numbers behind each other by owner; and how many each owns, N."""
    owner = tf.cast(rows % size, tf.int32)
    parts = tf.dynamic_partition(tf.range(tf.size(rows, tf.int64)), owner, size)
    return tf.concat(parts, axis=0), tf.stack([tf.size(part) for part in parts])


def _inverse(order: tf.Tensor, on_cpu: bool) -> tf.Tensor:
    """Where each number from 0 on stands in an order of them, int64."""
    # Its kernel for GPUs works on the host.
    return tf.math.invert_permutation(order) if on_cpu else tf.cast(tf.argsort(order), tf.int64)


@tf.autograph.experimental.do_not_convert
def join_shards(
    shares: Sequence[RowSums], variables: Sequence[tf.Variable], shards: Sequence[Shard]
) -> list[ReducedRows]:
    """Tables' gradients of the ranks' shares of a batch as those of the global batch, by owner.

    As `gradients.all_gather_rows`, but each rank has those of its own rows only, by their places.

    Args:
      shares: of each table, this rank's, by row number; a row that no sample of the share holds
        counts as 0.
      variables: the tables.
      shards: of each, what this rank has of it.
    """
    joined = []
    for share, variable, shard in zip(shares, variables, shards, strict=True):
        with beside(variable) as on_cpu:
            joined.append(ReducedRows(_joined(share, variable, shard, on_cpu), variable))
    return joined


def _joined(share: RowSums, variable: tf.Variable, shard: Shard, on_cpu: bool) -> RowSums:
    def owned() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        order, sizes = by_owner(share.indices, shard.size)
        wanted, _ = all_to_all(tf.gather(share.indices, order), sizes)
        return order, sizes, shard.place(wanted)

    order, sizes, places = once_per_graph(("owned", shard), [share.indices], owned)
    counts = tf.cast(share.counts, share.gradients.dtype)[:, tf.newaxis]
    sent = tf.gather(tf.concat([share.gradients, counts], axis=1), order)
    packed, _ = all_to_all(sent, sizes)
    rows, position, _ = unique_rows(places, variable.shape[0], on_cpu)
    sums = sum_per_row(packed, position, tf.size(rows), on_cpu)
    counts = tf.cast(sums[:, -1], tf.float32)
    return RowSums(rows, sums[:, :-1] / shard.size, counts)


def finite_together(joined: Sequence[ReducedRows]) -> list[ReducedRows]:
    """The same, but with NaN on all ranks where one has what is not finite.

    Loss scaling makes a step or none by what it sees; all ranks must see the same.

    Args:
      joined: of all tables in shards.
    """
    if not joined:
        return []
    mine = tf.stack([tf.reduce_all(tf.math.is_finite(one.values)) for one in joined])
    finite = all_reduce(tf.cast(tf.reduce_all(mine), tf.float32), "min") > 0
    first, *others = joined
    return [first.and_nan(tf.where(finite, 0, 1)), *others]  # this rank may have no rows to be so
