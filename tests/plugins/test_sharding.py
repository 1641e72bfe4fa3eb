"""Which rank has which row, and how rows go to their owners and back; that needs no ranks."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

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
