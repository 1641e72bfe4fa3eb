"""Rows written into a buffer in place: the one op for it that stays on a GPU whatever its mode."""

from __future__ import annotations

from merlin_cowclip.plugins._stack import tf


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
