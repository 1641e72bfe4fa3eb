# SPDX-License-Identifier: Apache-2.0
"""Kernels on embedding rows: unique rows, counts, segment sums and in-place writes.

On a GPU, one op each. On a CPU other ops give the same digits several times as fast; they refuse to
run on a GPU where ops are deterministic.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from merlin_cowclip.plugins._tensorflow import kept_on, tf

_Made = TypeVar("_Made")
_MADE = "_merlin_cowclip_made"
_SAME_VALUES = {"Cast", "ExpandDims", "Identity", "Reshape", "Squeeze"}


class Rows(NamedTuple):
    """The distinct ones of n row numbers."""

    rows: tf.Tensor  # U, each once, int64
    position: tf.Tensor  # n, where each row number stands in `rows`, int64
    counts: tf.Tensor  # U, how often each occurs, float32


@contextlib.contextmanager
def colocated_with(variable: tf.Variable) -> Iterator[bool]:
    """Place ops on the variable's device if that is a CPU; gives whether it is."""
    on_cpu = "CPU" in (variable.device or "")
    with tf.device(variable.device) if on_cpu else contextlib.nullcontext():
        yield on_cpu


def unique(values: tf.Tensor) -> Rows:
    """Each value once, in the order of first occurrence."""
    # int64: on GPUs, int32 tensors live in host memory for many ops.
    rows, position, counts = tf.unique_with_counts(values, out_idx=tf.int64)
    return Rows(rows, position, tf.cast(counts, tf.float32))


def unique_rows(indices: tf.Tensor, num_rows: int, on_cpu: bool) -> Rows:
    """Each of n row numbers (0 to V - 1) once, in any order; in a graph, found once per tensor."""
    indices = tf.cast(indices, tf.int64)

    def find() -> Rows:
        if not on_cpu:
            return unique(indices)
        # Marking takes 15 ns a row of the table and 7 a value; hashing 17 to 60 a value.
        few = tf.size(indices, tf.int64) < num_rows
        found: Rows = tf.cond(few, lambda: unique(indices), lambda: _marked(indices, num_rows))
        return found

    return once_per_graph(("unique", on_cpu and num_rows), [source_of(indices)], find)


def _marked(indices: tf.Tensor, num_rows: int) -> Rows:
    """As `unique`, in ascending order, by a mark on each of the table's rows."""
    counts = tally(indices, num_rows, on_cpu=True)
    held = counts > 0
    rows = tf.where(held)[:, 0]
    place = tf.cumsum(tf.cast(held, tf.int64), exclusive=True)
    return Rows(rows, tf.gather(place, indices), tf.gather(counts, rows))


def tally(position: tf.Tensor, size: Any, on_cpu: bool) -> tf.Tensor:
    """How often each number from 0 to `size` - 1 occurs in `position`, float32."""
    if not on_cpu:
        ones = tf.ones(tf.shape(position), tf.float32)
        return tf.math.unsorted_segment_sum(ones, position, size)
    unweighted = tf.zeros([0], tf.float32)
    return tf.raw_ops.DenseBincount(
        input=position, size=tf.cast(size, tf.int64), weights=unweighted
    )


def sum_per_row(
    values: tf.Tensor,
    position: tf.Tensor,
    size: tf.Tensor,
    on_cpu: bool,
    *,
    transposed: bool = False,
) -> tf.Tensor:
    """The values, n×d or `transposed`, added up by `position`, n: `size`×d; on a CPU, in order."""
    if not on_cpu:
        values = tf.transpose(values) if transposed else values
        return tf.math.unsorted_segment_sum(values, position, size)
    number = tf.size(position, tf.int64)
    places = once_per_graph(
        ("places",), [position], lambda: tf.stack([position, tf.range(number)], axis=1)
    )
    shape = tf.stack([tf.cast(size, tf.int64), number])
    # A 1 for each value in the row of its position.
    ones = tf.SparseTensor(places, tf.ones(tf.shape(position), values.dtype), shape)
    return tf.sparse.sparse_dense_matmul(ones, values, adjoint_b=transposed)


def sum_columns(
    columns: Sequence[tf.Tensor], position: tf.Tensor, size: tf.Tensor, on_cpu: bool
) -> tf.Tensor:
    """As `sum_per_row`, of values given as d columns, n each."""
    # On a CPU, to stack on axis 1 takes 5 ns a value, on axis 0 none.
    return sum_per_row(tf.stack(columns), position, size, on_cpu, transposed=True)


@tf.autograph.experimental.do_not_convert
def source_of(ids: tf.Tensor) -> tf.Tensor:
    """The tensor that these integers were cast, copied or reshaped from; eagerly themselves."""
    while (op := getattr(ids, "op", None)) is not None and op.type in _SAME_VALUES:
        ids = op.inputs[0]
    return ids


def once_per_graph(
    key: tuple[Hashable, ...], ids: Sequence[tf.Tensor], make: Callable[[], _Made]
) -> _Made:
    """What `make` makes of ids; in a graph, made once for the same key and tensors."""
    if tf.executing_eagerly():
        return make()
    made: dict[Any, _Made] = kept_on(tf.compat.v1.get_default_graph(), _MADE, {})
    key = (*key, *(one.ref() for one in ids))
    if key not in made:
        made[key] = make()
    return made[key]


def with_rows(
    buffer: tf.Tensor, indices: tf.Tensor, values: tf.Tensor, *, in_range: bool = True
) -> tf.Tensor:
    """A buffer (V×d, which nothing else may read) with the values (U×d) in U rows, in place.

    Unless `in_range`, indices outside 0 to V - 1 are left out: GPU lookups do not check them, and
    the write takes them modulo V.

    Raises:
      ValueError: V of 2**31 or more, which TensorFlow's op cannot number.
    """
    if (buffer.shape[0] or 0) >= 2**31:
        raise ValueError(
            f"A table may have 2,147,483,647 rows at most. Received: {buffer.shape[0]:,}. Shard it "
            "over several ranks, or divide it into several tables."
        )
    if not in_range:  # row 0 is written instead, as it will be: a mask would make the host wait
        inside = tf.logical_and(indices >= 0, indices < tf.cast(tf.shape(buffer)[0], indices.dtype))
        inside, is_first = inside[:, tf.newaxis], tf.equal(indices, 0)[:, tf.newaxis]
        given = tf.reduce_sum(tf.where(is_first, values, 0), axis=0)
        first = tf.where(tf.reduce_any(is_first), given, buffer[0])
        values = tf.where(inside, values, first)
        indices = tf.where(inside[:, 0], indices, tf.zeros([], indices.dtype))
    return tf.raw_ops.InplaceUpdate(x=buffer, i=tf.cast(indices, tf.int32), v=values)
