"""The prototypes of decoupled decay equal AdamW in NumPy, on all rows and on the batch's rows."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from benchmarks.decay_modes import Decoupled, OnTouch

from tests.plugins import reference

RATE, STRENGTH = 0.05, 2.0


class Schedule(tf.keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return RATE * (1 - tf.cast(step, tf.float32) / 10)


@pytest.mark.parametrize("kind", [Decoupled, OnTouch])
@pytest.mark.parametrize("traced", [False, True])
def test_prototypes_equal_numpy(kind, traced):
    random = np.random.default_rng(0)
    table, fields = random.normal(0, 0.1, (7, 3)), np.zeros(7, int)
    update = "exact" if kind is Decoupled else "lazy"
    part = type("Part", (kind,), {"strength": STRENGTH})(Schedule(), l2=0.0, update=update)
    variable = tf.Variable(table, dtype=tf.float64)
    w, m, v = table.copy(), np.zeros_like(table), np.zeros_like(table)
    last = np.zeros(7, int)
    part._create_all_weights([variable])

    def apply(values, ids):
        part.apply_gradients([(tf.IndexedSlices(values, ids, [7, 3]), variable)])

    apply = tf.function(apply) if traced else apply
    for step in range(8):
        ids = random.integers(0, 6, 5)  # row 6 is never in a batch
        gradients = random.normal(0, 1, (5, 3)) * 10.0 ** random.integers(-6, 1)
        apply(tf.constant(gradients), tf.constant(ids))

        rows, counts = np.unique(ids, return_counts=True)
        g = np.zeros_like(w)
        np.add.at(g, ids, gradients)
        rate = RATE * (1 - step / 10)
        settings = reference.Settings(rate, clip_floor=3.162e-5)
        g[rows] = reference.clip(g[rows], w[rows], counts, fields[rows], settings)
        mine = np.arange(7) if kind is Decoupled else rows
        decayed = w[mine] * (1 - rate * STRENGTH)
        if kind is OnTouch:
            missed = [range(begin, step + 1) for begin in last[rows]]
            kept = [np.prod([1 - RATE * (1 - t / 10) * STRENGTH for t in ts]) for ts in missed]
            decayed = w[rows] * np.array(kept)[:, None]
            last[rows] = step + 1
        w[mine], m[mine], v[mine] = reference.adam(
            decayed, m[mine], v[mine], g[mine], step + 1, settings
        )
        np.testing.assert_allclose(variable.numpy(), w, rtol=0, atol=1e-6)
    assert np.abs(w - table)[:6].max() > 0.1
    assert (np.abs(w[6] - table[6]).max() > 0.01) == (kind is Decoupled)
