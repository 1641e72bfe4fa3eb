"""Rows written in place, against NumPy: on a GPU a row out of range must not write another one."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from merlin_cowclip.plugins import CowClipAdam
from merlin_cowclip.plugins.optimizers import row_clip
from merlin_cowclip.plugins.row_ops import with_rows

V, D = 5, 3


def buffer():
    return tf.raw_ops.DeepCopy(x=tf.reshape(-tf.range(V * D, dtype=tf.float32), [V, D]))


@pytest.mark.parametrize("indices", [[0, 9, 7, 4], [-1, 2], [8], []])
@pytest.mark.parametrize("in_graph", [True, False])
def test_rows_out_of_range_are_left_out(indices, in_graph):
    values = np.arange(len(indices) * D, dtype=np.float32).reshape(-1, D) + 1
    expected = buffer().numpy()
    for i, value in zip(indices, values, strict=True):
        if 0 <= i < V:
            expected[i] = value

    def write():
        at, rows = tf.constant(indices, tf.int64), tf.constant(values)
        return with_rows(buffer(), at, rows, in_range=False)

    np.testing.assert_array_equal((tf.function(write) if in_graph else write)(), expected)


@pytest.mark.parametrize("l2", [1e-3, 0.0])
def test_on_a_gpu_the_exact_step_leaves_them_out(monkeypatch, l2):
    """There a lookup of row 7 of 5 gives zeros, and its gradient comes all the same."""
    optimizer = CowClipAdam(l2=l2)
    table = tf.Variable(tf.ones([V, D]))
    at, rows = tf.constant([1, 7], tf.int64), tf.ones([2, D])
    without = optimizer._dense_gradient(rows[:1], table, at[:1]).numpy()
    monkeypatch.setattr(row_clip, "_on_gpu", lambda variable: True)
    np.testing.assert_array_equal(optimizer._dense_gradient(rows, table, at), without)


def test_tables_have_no_more_rows_than_the_op_can_number():
    """Their rows wrapped around. Traced, since no machine of ours holds such a table."""
    shapes = [((2**31, 1), tf.float32), ((1,), tf.int64), ((1, 1), tf.float32)]
    signature = [tf.TensorSpec(shape, dtype) for shape, dtype in shapes]
    with pytest.raises(ValueError, match="2,147,483,647 rows at most. Received: 2,147,483,648"):
        tf.function(with_rows).get_concrete_function(*signature)
