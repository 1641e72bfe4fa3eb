"""Rows that no batch ever held: how they shrink depends on nothing but where they started.

Without moments and from the first step on, an element after t steps is a function of what it was at
first, the same for all: it is found at some thousand nodes, and between them for all rows.
"""

from __future__ import annotations

from typing import NamedTuple

from merlin_cowclip.plugins._stack import tf
from merlin_cowclip.plugins.absent import Moved

# Nodes are |w| = _FROM·(exp(i / _DENSE) - 1): to 9e3, a thousandth apart, of |w| or of _FROM.
_NODES, _DENSE, _FROM = 16_384, 1024.0, 1e-3


class Curve(NamedTuple):
    """What became of the nodes, by what they were: n each."""

    w: tf.Tensor
    m: tf.Tensor
    root: tf.Tensor  # √v


def nodes(width: int, dtype: tf.DType) -> tf.Tensor:
    """The nodes' |w| as rows of a table of this width."""
    many = -(-_NODES // width) * width
    return tf.reshape(
        _FROM * tf.math.expm1(tf.range(1, many + 1, dtype=dtype) / _DENSE), [-1, width]
    )


def curve(first: tf.Tensor, moved: Moved) -> Curve:
    """Of the nodes, and of what all of the steps made of them."""
    found = (moved.rows / first, moved.m / first, tf.sqrt(moved.v) / first)
    return Curve(*(tf.reshape(x, [-1]) for x in found))


def are_untouched(rows: tf.Tensor, m: tf.Tensor, v: tf.Tensor, last: tf.Tensor) -> tf.Tensor:
    """Which rows `along` serves, n bool, of n×d each, and n steps after which they are current."""
    inside = tf.abs(rows) < _FROM * tf.exp((_NODES - 1) / _DENSE)  # no NaN
    still = tf.logical_and(tf.equal(m, 0.0), tf.equal(v, 0.0))
    return tf.logical_and(tf.reduce_all(tf.logical_and(inside, still), axis=1), tf.equal(last, 0))


def along(rows: tf.Tensor, curve: Curve) -> Moved:
    """What untouched rows have become, n×d."""
    at = tf.math.log1p(tf.abs(rows) / _FROM) * _DENSE - 1.0
    at = tf.clip_by_value(at, 0.0, _NODES - 2.0)  # below the first node all is linear
    node = tf.cast(at, tf.int32)
    part = at - tf.cast(node, at.dtype)

    def between(x: tf.Tensor) -> tf.Tensor:
        here = tf.gather(x, node)
        return here + part * (tf.gather(x, node + 1) - here)

    return Moved(
        rows * between(curve.w), rows * between(curve.m), tf.square(rows * between(curve.root))
    )
