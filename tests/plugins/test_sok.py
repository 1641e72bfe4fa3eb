"""SOK's tables, by the stand-in, on one rank: against Keras's, an oracle, and what is refused."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from merlin_cowclip.plugins import CowClipSokOptimizer

from . import sok_stand_in
from .reference import Lazy, Settings
from .sok_cases import CASES, HP, check_alike, rows_of, trained_by_keras, trained_by_sok

pytestmark = pytest.mark.extended
PLAIN = HP.replace(warmup_epochs=0.0)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.setitem(sys.modules, "sparse_operation_kit", sok_stand_in)


def table(width=3, **named):
    return sok_stand_in.DynamicVariable(dimension=width, initializer="0.5", var_type="hbm", **named)


def step(optimizer, variable, ids, told=None, upstream=1.0):
    """Looks ids up in one table, and tells the optimizer of these or others."""
    with tf.GradientTape() as tape:
        (rows,) = sok_stand_in.lookup_sparse([variable], [ids], combiners=["sum"])
        loss = tf.reduce_sum(rows * upstream)
    gradient = tape.gradient(loss, variable)
    optimizer.apply_gradients([(gradient, variable)], [(variable, ids if told is None else told)])


def lists(*rows):
    return tf.ragged.constant(rows, dtype=tf.int64, ragged_rank=1)


@pytest.mark.parametrize("name", CASES)
def test_trains_as_keras_tables(name):
    case = CASES[name]
    check_alike([trained_by_sok(case, sok_stand_in)], trained_by_keras(case.hyperparameters))


@pytest.mark.parametrize("sparse", [False, True])
def test_algorithm_1_from_the_paper(sparse):
    """On the rows of lists, in which a sample may hold an id twice."""
    random, V, d, b = np.random.default_rng(5), 9, 3, 20
    variable = table(d)
    hp = PLAIN.replace(embedding_lr=0.02, l2=1e-2, clip_ratio=0.5, clip_floor=1e-3)
    optimizer = CowClipSokOptimizer(hp)
    settings = Settings(0.02, l2=1e-2, clip_ratio=0.5, clip_floor=1e-3)
    expected = Lazy(np.full((V, d), 0.5), settings, np.zeros(V, int))
    for _ in range(12):
        held = [random.integers(0, V - 1, random.integers(1, 5)) for _ in range(b)]
        upstream = random.normal(size=(b, d)) * 10.0 ** random.integers(-3, 2, (b, 1))
        ids = tf.ragged.constant(held, dtype=tf.int64)
        given = ids.to_sparse() if sparse else ids
        step(optimizer, variable, given, upstream=tf.constant(upstream, tf.float32))
        g, cnt = np.zeros((V, d)), np.zeros(V)
        for sample, one in enumerate(held):
            np.add.at(g, one, upstream[sample])
            cnt[np.unique(one)] += 1
        touched = np.flatnonzero(cnt)
        expected.step(touched, g[touched], cnt[touched])
        np.testing.assert_allclose(
            rows_of(sok_stand_in, variable)[touched], expected.w[touched], rtol=1e-4, atol=2e-6
        )
    assert sorted(sok_stand_in.export(variable)[0].numpy()) == list(range(V - 1))


def test_the_script_of_the_documentation(monkeypatch):
    text = (Path(__file__).parents[2] / "docs/sok.md").read_text(encoding="utf-8")
    (script,) = (part for part in re.findall(r"```python\n(.*?)```", text, re.S) if "sok." in part)
    horovod = SimpleNamespace(local_rank=lambda: 0)
    monkeypatch.setitem(sys.modules, "horovod", SimpleNamespace(tensorflow=horovod))
    monkeypatch.setitem(sys.modules, "horovod.tensorflow", horovod)
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [kind])
    monkeypatch.setattr(tf.config, "set_visible_devices", lambda device, kind: None)
    done: dict[str, Any] = {}
    exec(script.replace("26", "3"), done)  # 30 columns for three fields: fewer to trace
    ids = [lists([5], [3, 3], [], [2**50 + i]) for i in range(3)]
    before = [v.numpy() for v in done["dense"].trainable_variables]
    for _ in range(3):
        done["step"](ids, tf.constant([[1.0], [0.0], [1.0], [1.0]]))
    assert int(done["optimizer"].dense.iterations) == 3
    assert sorted(sok_stand_in.export(done["tables"][1])[0].numpy()) == [3, 5, 2**50 + 1]
    for one, then in zip(before, done["dense"].trainable_variables, strict=True):
        assert np.abs(one - then).max() > 0


def test_moments_are_of_the_tables_kind():
    variable = sok_stand_in.DynamicVariable(
        dimension=2,
        initializer="0",
        name="t",
        var_type="hybrid",
        mode="localized:0",
        init_capacity=64,
    )
    optimizer = CowClipSokOptimizer(PLAIN)
    m, v = optimizer.moments([variable])
    assert [m.name, v.name] == ["t_m:0", "t_v:0"]
    assert m.backend_type == "hybrid"
    assert m.config_dict == {"init_capacity": 64}
    assert m.target_gpu == 0
    step(optimizer, variable, lists([7]))
    assert optimizer.moments([variable])[0] is m
    other = CowClipSokOptimizer(PLAIN)
    step(other, variable, lists([7]))
    assert [one.name for one in other.moments([variable])] == [m.name, v.name], "as sok.load asks"
    assert not any(one.trainable for one in (m, v))
    assert np.abs(sok_stand_in.export(m)[1].numpy()).min() > 0


def test_a_checkpoint_keeps_steps_and_dense_moments(tmp_path):
    def begun():
        dense = tf.Variable([1.0, 2.0])
        return dense, table(), CowClipSokOptimizer(HP, steps_per_epoch=3)

    def train(dense, variable, optimizer, steps):
        for _ in range(steps):
            step(optimizer, variable, lists([1]))
            optimizer.apply_gradients([(tf.constant([0.1, 0.2]), dense)])

    one, other = begun(), begun()
    train(*one, 5)
    saved = tf.train.Checkpoint(dense=one[0], optimizer=one[2]).save(tmp_path / "kept")
    restored = tf.train.Checkpoint(dense=other[0], optimizer=other[2]).restore(saved)
    for mine, its in zip(
        (one[1], *one[2].moments([one[1]])), (other[1], *other[2].moments([other[1]])), strict=True
    ):
        sok_stand_in.assign(its, *sok_stand_in.export(mine))
    train(*one, 2)
    train(*other, 2)
    restored.assert_existing_objects_matched()
    np.testing.assert_array_equal(one[0], other[0])
    np.testing.assert_array_equal(
        rows_of(sok_stand_in, one[1])[1], rows_of(sok_stand_in, other[1])[1]
    )
    assert int(other[2].dense.iterations) == 7


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("told", [lists([1], [2]), lists([1, 2, 3], [2, 4])], ids=str)
def test_other_ids_than_those_looked_up_are_refused(traced, told):
    variable, optimizer, looked_up = table(), CowClipSokOptimizer(PLAIN), lists([1, 2, 3], [2])
    run = tf.function(step, autograph=False) if traced else step
    with pytest.raises(tf.errors.InvalidArgumentError, match="no others"):
        run(optimizer, variable, looked_up, told)
    assert (sok_stand_in.export(variable)[1].numpy() == 0.5).all()


@pytest.mark.parametrize("found", [None, sys], ids=["none", "1.x"])
def test_without_sok_its_package_is_named(monkeypatch, found):
    monkeypatch.setitem(sys.modules, "sparse_operation_kit", found)
    with pytest.raises(ImportError, match="pip install 'merlin-sok>=2,<3'"):
        CowClipSokOptimizer(PLAIN)
