"""Rows that no batch ever held: against float64 step by step, and in a whole table."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from merlin_cowclip.plugins import deferring
from merlin_cowclip.plugins.slow_mode import Adam
from tests.plugins.test_catching_up import EPSILON, corrected, oracle

WIDTH = 4


def table_of(w, m, v, last, step):
    variables = (tf.Variable(tf.constant(x, tf.float32)) for x in (w, m, v, last[:, np.newaxis]))
    return deferring.Table(*variables, tf.constant(step))


def brought_up(state, last, step, rate, l2):
    table = table_of(*state, last, step)
    adam = Adam(0.9, 0.999, EPSILON, l2)
    deferring.bring_all_up(
        table,
        tf.constant(rate, tf.float32),
        adam,
        lambda variable, at, x: variable.scatter_update(tf.IndexedSlices(x, at)),
    )
    assert (table.last.numpy() == step).all()
    return [variable.numpy() for variable in table[:3]]


@pytest.fixture
def large(monkeypatch):
    """All tables are large ones."""
    monkeypatch.setattr(deferring, "_LARGE", 1)


@pytest.mark.parametrize(
    ("l2", "rate", "step"),
    [
        pytest.param(1e-8, 1e-4, 4_000, marks=pytest.mark.extended),
        (1e-6, 1e-2, 60),
        (1e-5, 1e-4, 1),
        (1e-5, 1e-4, 1_000),
        (1e-2, 1e-4, 200),
    ],
)
def test_against_float64(large, l2, rate, step):
    """Nearer than other rows: their first steps are one by one, at the nodes alone."""
    random = np.random.default_rng(0)
    w = random.normal(size=(500, WIDTH)) * 10.0 ** random.uniform(-9, 1, (500, WIDTH))
    w[0] = 0.0
    state, last = [np.float32(w), 0 * w, 0 * w], np.zeros(500, np.int64)
    expected = oracle(state, last, step, corrected(np.full(step, rate)), l2)
    found = brought_up(state, last, step, rate, l2)
    assert np.isfinite(found).all()
    assert not found[0][0].any()
    size = np.maximum(np.abs(state[0]), 1e-3)
    assert (np.abs(found[0] - expected[0]) / size).max() < 1e-4
    reach = 10 * rate / (np.sqrt(expected[2]) + EPSILON)
    assert (reach * np.abs(found[1] - expected[1]) / size).max() < 2e-3
    left = np.abs(expected[0]) > size / 10
    assert (np.abs(found[2] - expected[2]) <= 0.02 * expected[2] + 1e-30)[left].all()
