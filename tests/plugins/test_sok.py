"""SOK's tables, by the stand-in, on one rank: against an oracle, and what is an error."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import tensorflow as tf

from merlin_cowclip.plugins import CowClipSokOptimizer

from . import sok_stand_in
from .reference import Lazy, Settings
from .sok_cases import BOTH, HASHED, HP, check_alike, rows_of, trained

PLAIN = HP.replace(warmup_epochs=0.0)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.setitem(sys.modules, "sparse_operation_kit", sok_stand_in)


def table(width=3, **named):
    return sok_stand_in.DynamicVariable(width, initializer="0.5", var_type="hbm", **named)


def step(optimizer, variable, ids, lookups=None, upstream=1.0):
    """Looks ids up in one table, and gives the optimizer these or other lookups."""
    with tf.GradientTape() as tape:
        if isinstance(ids, tf.Tensor):  # as `all2all_dense_embedding`, whose gradients repeat keys
            rows = variable.sparse_read(ids)
        else:
            (rows,) = sok_stand_in.lookup_sparse([variable], [ids], combiners=["sum"])
        loss = tf.reduce_sum(rows * upstream)
    gradient = tape.gradient(loss, variable)
    optimizer.apply_gradients(
        [(gradient, variable)], [(variable, ids if lookups is None else lookups)]
    )


def lists(*rows):
    return tf.ragged.constant(rows, dtype=tf.int64, ragged_rank=1)


@pytest.mark.extended
def test_all_kinds_of_tables_train_alike():
    check_alike([trained(sok_stand_in, BOTH)], trained(sok_stand_in, HASHED))


@pytest.mark.parametrize("kind", ["ragged", "sparse", "dense"])
def test_algorithm_1_from_the_paper(kind):
    """On the rows of lists, in which a sample may hold an id twice, or of one id a sample."""
    random, V, d, b = np.random.default_rng(5), 9, 3, 20
    variable = table(d)
    hp = PLAIN.replace(embedding_lr=0.02, l2=1e-2, clip_ratio=0.5, clip_floor=1e-3)
    optimizer = CowClipSokOptimizer(hp)
    settings = Settings(0.02, l2=1e-2, clip_ratio=0.5, clip_floor=1e-3)
    expected = Lazy(np.full((V, d), 0.5), settings, np.zeros(V, int))
    for _ in range(6):
        lengths = [1] * b if kind == "dense" else random.integers(1, 5, b)
        of_samples = [random.integers(0, V - 1, n) for n in lengths]
        upstream = random.normal(size=(b, d)) * 10.0 ** random.integers(-3, 2, (b, 1))
        ids = tf.ragged.constant(of_samples, dtype=tf.int64)
        lookups = {"ragged": ids, "sparse": ids.to_sparse(), "dense": ids.flat_values}[kind]
        looked_up = ids.flat_values if kind == "dense" else ids
        step(optimizer, variable, looked_up, lookups, tf.constant(upstream, tf.float32))
        g, cnt = np.zeros((V, d)), np.zeros(V)
        for sample, one in enumerate(of_samples):
            np.add.at(g, one, upstream[sample])
            cnt[np.unique(one)] += 1
        touched = np.flatnonzero(cnt)
        expected.step(touched, g[touched], cnt[touched])
        rows = rows_of(sok_stand_in, variable)[touched]
        np.testing.assert_allclose(rows, expected.w[touched], rtol=1e-4, atol=2e-6)
    assert sorted(sok_stand_in.export(variable)[0].numpy()) == list(range(V - 1))


def test_moments_are_of_the_tables_kind():
    variable = sok_stand_in.DynamicVariable(
        2, name="t", var_type="hybrid", mode="localized:0", init_capacity=64
    )
    optimizer = CowClipSokOptimizer(PLAIN)
    m, v = moments = optimizer.moments([variable])
    assert [m.name, v.name] == ["t_m:0", "t_v:0"]
    assert (m.backend_type, m.config_dict, m.mode) == (
        "hybrid",
        {"init_capacity": 64},
        "localized:0",
    )
    step(optimizer, variable, lists([7]))
    assert optimizer.moments([variable])[0] is m
    other = CowClipSokOptimizer(PLAIN)
    step(other, variable, lists([7]))
    assert [one.name for one in other.moments([variable])] == [m.name, v.name], "as sok.load asks"
    assert not any(one.trainable for one in moments)
    assert np.abs(sok_stand_in.export(m)[1].numpy()).min() > 0


def test_the_dense_part_has_a_warm_up_and_is_in_checkpoints(tmp_path):
    parts = []
    for _ in range(2):
        dense = tf.Variable([1.0, 2.0])
        optimizer = CowClipSokOptimizer(HP, steps_per_epoch=3)
        parts.append((dense, optimizer, tf.train.Checkpoint(dense=dense, optimizer=optimizer)))
    (dense, optimizer, checkpoint), (other_dense, other, other_checkpoint) = parts
    rates = [float(optimizer.dense.learning_rate(step)) for step in (3.0, 6.0)]
    assert rates == pytest.approx([HP.dense_lr / 2, HP.dense_lr], rel=1e-3)
    pairs = [(tf.constant([0.1, 0.2]), dense)]
    for _ in range(5):
        optimizer.apply_gradients(pairs)
    other_checkpoint.restore(checkpoint.save(tmp_path / "saved"))
    optimizer.apply_gradients(pairs)
    other.apply_gradients([(pairs[0][0], other_dense)])
    np.testing.assert_array_equal(dense, other_dense)
    assert int(other.dense.iterations) == 6


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("lookups", [lists([1], [2]), lists([1, 2, 3], [2, 4])], ids=str)
def test_other_ids_than_those_looked_up_are_an_error(traced, lookups):
    variable, optimizer, looked_up = table(), CowClipSokOptimizer(PLAIN), lists([1, 2, 3], [2])
    run = tf.function(step, autograph=False) if traced else step
    with pytest.raises(tf.errors.InvalidArgumentError, match="no others"):
        run(optimizer, variable, looked_up, lookups)
    assert (sok_stand_in.export(variable)[1].numpy() == 0.5).all()


def test_without_sok_its_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sparse_operation_kit", None)
    with pytest.raises(ImportError, match="pip install 'merlin-sok>=2,<3'"):
        CowClipSokOptimizer(PLAIN)
