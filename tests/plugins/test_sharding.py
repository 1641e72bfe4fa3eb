"""Which rank has which row, and how rows go to their owners and back; that needs no ranks."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import tensorflow as tf

from merlin_cowclip.plugins import sharding
from merlin_cowclip.plugins.sharding import Shard, _inverse, _some_rows, by_owner, check_apart

from .gpu_kernels import check_kernels


@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("num_rows", [1, 2, 14, 100])
def test_every_row_has_one_place(size, num_rows):
    numbers = [
        np.asarray(shard.number(np.arange(shard.rows)))
        for shard in (Shard(rank, size, num_rows) for rank in range(size))
    ]
    assert sorted(np.concatenate(numbers)) == list(range(num_rows))
    for rank, mine in enumerate(numbers):
        assert (mine % size == rank).all()
        assert Shard(rank, size, num_rows).place(mine).tolist() == list(range(len(mine)))


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
    def found(rows):
        order, sizes = by_owner(rows, 4)
        return order, sizes, _inverse(order, on_cpu=False)

    check_kernels(found.get_concrete_function(), deterministic=True)


@pytest.mark.parametrize("touched", [8, 100, 1000])
@pytest.mark.parametrize("slot", ["", "m"])
def test_another_ranks_rows_are_found_where_most_are_zeros(monkeypatch, slot, touched):
    """As moments of rows that no batch has held are."""
    random, shard = np.random.default_rng(0), Shard(0, 2, 6000)

    def drawn() -> dict[str, tf.Variable]:
        """A rank's rows and moments."""
        places = random.choice(3000, touched, replace=False)
        values = {name: np.zeros((3000, 2), np.float32) for name in ("", "m")}
        for value in values.values():
            value[places] = random.normal(size=(touched, 2))
        return {name: tf.Variable(value) for name, value in values.items()}

    def check(*ranks: dict[str, tf.Variable]) -> None:
        others = iter([_some_rows(variable, shard) for variable in ranks[1].values()])
        monkeypatch.setattr(sharding, "gathered", lambda mine: np.stack([mine[0], next(others)]))
        check_apart([("ids", ranks[0], shard)])

    first, second = drawn(), drawn()
    check(first, second)
    what = "the moments 'm'" if slot else "those"
    with pytest.raises(ValueError, match=f"{what} of 'ids' on rank 1 that rank 0 has"):
        check(first, {**second, slot: first[slot]})
    if touched == 1000:
        trained = first[slot].numpy()
        trained[::3] *= 0.9  # since then
        with pytest.raises(ValueError, match=f"{what} of 'ids' on rank 1 that rank 0 has"):
            check(first, {**second, slot: tf.Variable(trained)})
    zeros = {name: tf.Variable(tf.zeros([3000, 2])) for name in first}
    check(zeros, zeros)  # as they begin


def test_rows_of_width_1_may_be_alike_by_chance(monkeypatch):
    """As the first step leaves them: of ids that were held as often, with as many clicks."""
    random, shard = np.random.default_rng(0), Shard(0, 2, 600)
    held = np.sort(random.integers(1, 40, 300))[::-1].astype(np.float32)[:, None] * 1e-3
    other = np.where(random.random((300, 1)) < 0.3, held * 0.9, held).astype(np.float32)
    for theirs, refused in ((other, False), (held, True)):
        read = _some_rows(tf.Variable(theirs), shard)
        monkeypatch.setattr(sharding, "gathered", lambda mine, read=read: np.stack([mine[0], read]))
        with pytest.raises(ValueError, match="on rank 1 that") if refused else nullcontext():
            check_apart([("ids", {"": tf.Variable(held)}, shard)])
