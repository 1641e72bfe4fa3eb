"""Kernels on embedding rows: unique rows, counts, segment sums and in-place writes.

On a GPU, one op each. On a CPU these ops take 30 to 50 ns a value, however little there is to add,
and others give the same digits in a fraction of that. Those are not for GPUs: there, bincounts and
products with sparse matrices refuse to run where ops are deterministic.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

from merlin_cowclip.plugins._tensorflow import tf

_FOUND = "_merlin_cowclip_row_sums"
_SAME_VALUES = {"Cast", "ExpandDims", "Identity", "Reshape", "Squeeze"}


class Rows(NamedTuple):
    """Row numbers with repeats, n, taken apart."""

    rows: tf.Tensor  # U, each once, int64
    position: tf.Tensor  # n, where each stands in `rows`, int64
    repeats: tf.Tensor  # U, how often each occurs, an integer


@contextlib.contextmanager
def beside(variable: tf.Variable) -> Iterator[bool]:
    """Within it, ops are placed where a variable on a CPU lies; gives whether it does.

    Else TensorFlow might place them on a GPU beside it.
    """
    place = variable.device or ""
    if "CPU" not in place:
        yield False
        return
    with tf.device(place):
        yield True


def unique(values: tf.Tensor) -> Rows:
    """Each value once, in the order of first occurrence.

    Positions are int64: on GPUs, int32 tensors live in host memory for many ops.
    """
    return Rows(*tf.unique_with_counts(values, out_idx=tf.int64))


def unique_rows(indices: tf.Tensor, num_rows: int, on_cpu: bool) -> Rows:
    """Each row number once, in any order; worked out once for the tables that read the same rows.

    Args:
      indices: row numbers with repeats, n.
      num_rows: V; the row numbers are from 0 to V - 1.
      on_cpu: whether the ops are placed on a CPU.
    """
    indices = tf.cast(indices, tf.int64)
    if not on_cpu:
        return once_per_graph(("unique",), [source_of(indices)], lambda: unique(indices))

    def find() -> Rows:
        # Marking takes 15 ns a row of the table and 7 a value; hashing 17 to 60 a value, for
        # thousands to millions of them.
        few = tf.size(indices, tf.int64) < num_rows
        return tf.cond(few, lambda: unique(indices), lambda: _marked(indices, num_rows))

    return once_per_graph(("unique on CPU", num_rows), [source_of(indices)], find)


def _marked(indices: tf.Tensor, num_rows: int) -> Rows:
    """Each row number once, in ascending order, by a mark on each of the table's rows."""
    repeats = _bincount(indices, tf.constant(num_rows, tf.int64))
    held = repeats > 0
    rows = tf.where(held)[:, 0]
    place = tf.cumsum(tf.cast(held, tf.int64), exclusive=True)
    return Rows(rows, tf.gather(place, indices), tf.cast(tf.gather(repeats, rows), tf.int64))


def tally(position: tf.Tensor, size: tf.Tensor, on_cpu: bool) -> tf.Tensor:
    """How often each number from 0 to `size` - 1 occurs in `position`, float32."""
    if on_cpu:
        return tf.cast(_bincount(position, tf.cast(size, tf.int64)), tf.float32)
    ones = tf.ones(tf.shape(position), tf.float32)
    return tf.math.unsorted_segment_sum(ones, position, size)


def _bincount(position: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
    unweighted = tf.zeros([0], tf.int32)
    return tf.raw_ops.DenseBincount(input=position, size=size, weights=unweighted)


def sum_per_row(values: tf.Tensor, position: tf.Tensor, size: tf.Tensor, on_cpu: bool) -> tf.Tensor:
    """The values, n×d, added up by `position`, n: `size`×d; on a CPU, in their order."""
    if not on_cpu:
        return tf.math.unsorted_segment_sum(values, position, size)
    return _product(position, size, values)


def sum_columns(
    columns: Sequence[tf.Tensor], position: tf.Tensor, size: tf.Tensor, on_cpu: bool
) -> tf.Tensor:
    """As `sum_per_row`, of values given as d columns, n each."""
    if not on_cpu:
        return tf.math.unsorted_segment_sum(tf.stack(columns, axis=1), position, size)
    # Columns are put side by side at 5 ns a value, one after the other at none.
    return _product(position, size, tf.stack(columns, axis=0), adjoint_b=True)


def _product(
    position: tf.Tensor, size: tf.Tensor, values: tf.Tensor, adjoint_b: bool = False
) -> tf.Tensor:
    """The values times a matrix that has a 1 for each, in the row of its position."""
    number = tf.size(position, tf.int64)
    at = once_per_graph(
        ("matrix",), [position], lambda: tf.stack([position, tf.range(number)], axis=1)
    )
    return tf.raw_ops.SparseTensorDenseMatMul(
        a_indices=at,
        a_values=tf.ones(tf.shape(position), values.dtype),
        a_shape=tf.stack([tf.cast(size, tf.int64), number]),
        b=values,
        adjoint_b=adjoint_b,
    )


def source_of(ids: tf.Tensor) -> tf.Tensor:
    """The tensor that these integers were cast, copied or reshaped from."""
    op = getattr(ids, "op", None)  # an eager tensor has none
    while op is not None and op.type in _SAME_VALUES:
        ids = op.inputs[0]
        op = getattr(ids, "op", None)
    return ids


def once_per_graph(
    key: tuple[Hashable, ...], ids: Sequence[tf.Tensor], make: Callable[[], Any]
) -> Any:
    """What `make` makes of ids: in a graph, once for the same key and the same tensors.

    TensorFlow itself joins equal ops only where they wait for the same ones.
    """
    if tf.executing_eagerly():
        return make()
    found = tf.compat.v1.get_default_graph().__dict__.setdefault(_FOUND, {})
    key = (*key, *(one.ref() for one in ids))
    if key not in found:
        found[key] = make()
    return found[key]


def with_rows(
    buffer: tf.Tensor, indices: tf.Tensor, values: tf.Tensor, *, in_range: bool = True
) -> tf.Tensor:
    """A buffer, which nothing else may read, with some of its rows replaced in place.

    Args:
      buffer: V×d.
      indices: U unique row numbers.
      values: U×d.
      in_range: whether indices are known to be from 0 to V - 1. On a GPU a lookup does not check
        them, and the write takes them modulo V, into another row. If not, such rows are left out.
    """
    if not in_range:
        indices, values = _in_range(buffer, indices, values)
    return tf.raw_ops.InplaceUpdate(x=buffer, i=tf.cast(indices, tf.int32), v=values)


def _in_range(
    buffer: tf.Tensor, indices: tf.Tensor, values: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """The same, and in the place of a row out of range row 0 once more, as it will be."""
    # Not left out by a mask: the host would have to wait for how many there are.
    inside = tf.logical_and(indices >= 0, indices < tf.cast(tf.shape(buffer)[0], indices.dtype))
    is_first = tf.equal(indices, 0)
    given = tf.reduce_sum(tf.where(is_first[:, tf.newaxis], values, 0), axis=0)
    first = tf.where(tf.reduce_any(is_first), given, buffer[0])
    zero = tf.zeros([], indices.dtype)
    return tf.where(inside, indices, zero), tf.where(inside[:, tf.newaxis], values, first)
