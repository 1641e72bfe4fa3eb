"""Which rank has which row, and how ranks join gradients; that needs no ranks."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from merlin_cowclip.plugins.distributed import gradients
from merlin_cowclip.plugins.distributed.gradients import RowSums, all_gather_rows, all_reduce_dense
from merlin_cowclip.plugins.distributed.horovod import Ranks
from merlin_cowclip.plugins.distributed.sharding import Shard, _inverse, by_owner

from .gpu_kernels import check_kernels


@pytest.mark.parametrize(("size", "num_rows"), [(2, 1), (3, 14), (7, 100)])
def test_every_row_has_one_place(size, num_rows):
    numbers = [
        np.asarray(shard.global_row(np.arange(shard.rows)))
        for shard in (Shard(rank, size, num_rows) for rank in range(size))
    ]
    assert sorted(np.concatenate(numbers)) == list(range(num_rows))
    for rank, rows in enumerate(numbers):
        assert (rows % size == rank).all()
        assert Shard(rank, size, num_rows).local_row(rows).tolist() == list(range(len(rows)))


@pytest.mark.parametrize("on_cpu", [True, False])
def test_rows_go_by_owner_and_come_back(on_cpu):
    rows = np.random.default_rng(0).permutation(1000)[:200].astype(np.int64)
    order, sizes = by_owner(tf.constant(rows), 3)
    sent = rows[order.numpy()]
    assert sizes.numpy().tolist() == [(rows % 3 == rank).sum() for rank in range(3)]
    assert (np.diff(sent % 3) >= 0).all()
    assert (sent[_inverse(order, on_cpu).numpy()] == rows).all()


def test_the_order_is_found_on_gpus():
    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def find(rows):
        order, sizes = by_owner(rows, 4)
        return order, sizes, _inverse(order, on_cpu=False)

    check_kernels(find.get_concrete_function(), deterministic=True)


def test_gradients_of_two_ranks_are_those_of_one_batch(monkeypatch):
    """Means of gradients, sums of counts; the other rank has twice the gradients of this one."""
    double = {tf.float32: 2.0, tf.int64: 1}
    monkeypatch.setattr(gradients, "ranks", lambda: Ranks(0, 2, 0, 2))
    monkeypatch.setattr(gradients, "all_reduce", lambda values, how: 3.0 * values)
    monkeypatch.setattr(
        gradients,
        "all_gather_each",
        lambda tensors: [tf.concat([t, double[t.dtype] * t], axis=0) for t in tensors],
    )
    table, values = tf.Variable(tf.zeros([9, 2])), tf.constant([[1.0, 2.0], [3.0, 4.0]])
    rows = tf.constant([7, 4], tf.int64)
    joined = all_gather_rows(RowSums(rows, values, tf.constant([1.0, 5.0])), table)
    order = np.argsort(joined.indices)
    assert joined.indices.numpy()[order].tolist() == [4, 7]
    np.testing.assert_allclose(joined.gradients.numpy()[order], 1.5 * values.numpy()[::-1])
    assert joined.counts.numpy()[order].tolist() == [15.0, 3.0]
    dense, slices = all_reduce_dense([values, tf.IndexedSlices(values, rows)])
    np.testing.assert_allclose(dense, 1.5 * values)
    np.testing.assert_allclose(slices.values, np.concatenate([values / 2, values]))
    assert slices.indices.numpy().tolist() == [7, 4, 7, 4]
