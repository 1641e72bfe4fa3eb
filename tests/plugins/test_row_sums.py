"""Rows once each, tallies and sums: as on a GPU, bit-identical."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from merlin_cowclip.plugins.row_ops import (
    colocated_with,
    sum_columns,
    sum_per_row,
    tally,
    unique_rows,
)


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize(("n", "num_rows"), [(0, 5), (7, 50), (50, 50), (900, 40), (1, 1)])
def test_a_cpu_finds_what_a_gpu_finds(n, num_rows, in_graph):
    rng = np.random.default_rng(n)
    indices = tf.constant(rng.integers(0, num_rows, n))
    values = tf.constant(rng.normal(size=(n, 3)) * 10.0 ** rng.integers(-6, 6, (n, 1)), tf.float32)

    def summed(on_cpu):
        rows, position, repeats = unique_rows(indices, num_rows, on_cpu)
        sums = sum_per_row(values, position, tf.size(rows), on_cpu)
        columns = sum_columns(tf.unstack(values, axis=1), position, tf.size(rows), on_cpu)
        assert not in_graph or columns.shape[1] == 3
        tf.debugging.assert_equal(columns, sums)
        return rows, position, repeats, sums, tally(position, tf.size(rows), on_cpu)

    run = tf.function(summed) if in_graph else summed
    expected, counts = np.unique(indices.numpy(), return_counts=True)
    by_row = []
    for on_cpu in (True, False):
        rows, position, repeats, sums, tallied = (x.numpy() for x in run(on_cpu))
        np.testing.assert_array_equal(rows[position], indices)
        np.testing.assert_array_equal(tallied, repeats)
        order = np.argsort(rows)
        np.testing.assert_array_equal(rows[order], expected)
        np.testing.assert_array_equal(repeats[order], counts)
        by_row.append(sums[order])
    assert by_row[0].shape == (len(expected), 3)
    np.testing.assert_array_equal(*by_row)  # the same order of addition


@pytest.mark.parametrize("row", [-1, 4])
def test_a_row_that_the_table_does_not_have(row):
    with pytest.raises(tf.errors.InvalidArgumentError):
        unique_rows(tf.constant([0, 1, 2, 3, row], tf.int64), 4, on_cpu=True)


@pytest.mark.parametrize(("device", "expected"), [("CPU:0", True), ("GPU:1", False), (None, False)])
def test_whether_a_variable_lies_on_a_cpu(device, expected):
    place = device and f"/job:localhost/replica:0/task:0/device:{device}"
    with colocated_with(SimpleNamespace(device=place)) as on_cpu:
        assert on_cpu is expected
        assert not expected or tf.ones([]).device == place
