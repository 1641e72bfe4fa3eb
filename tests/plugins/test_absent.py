"""The step of absent rows: against an oracle in NumPy, and against both modes of CowClipAdam."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from merlin_cowclip.plugins import CowClipAdam, IdRecorder, Lookup, TableSpec
from merlin_cowclip.plugins._stack import ColumnSchema
from merlin_cowclip.plugins.absent import absent_step

LR, V, D, SPLIT = 0.02, 24, 4, 12  # rows of two ranges, up to SPLIT and from it on
ZETA = 1e-3
ULPS = (2e-8, 1e-9, 1e-12)  # of rows of 0.1 and their moments, for one step
# λ, r (None: no clip), whether the second range is exempt; r < 2λ clips absent rows.
CASES = [
    (1e-2, 1.0, False),
    (1e-2, 5e-3, False),
    (1e-2, 5e-3, True),
    (1e-2, None, False),
    (0.0, 1.0, False),
    (0.0, None, False),
]


def oracle(w, m, v, t, *, l2, ratio, exempt, lr=LR):
    """Float64, row by row."""
    w, m, v = (np.array(x, np.float64) for x in (w, m, v))
    for k in range(len(w)):
        g = 2 * l2 * w[k]
        if ratio is not None and not exempt[k] and np.linalg.norm(g) > 0:
            g = g * min(1.0, max(ratio * np.linalg.norm(w[k]), ZETA) / np.linalg.norm(g))
        tk, lrk = np.broadcast_to(t, len(w))[k], np.broadcast_to(lr, len(w))[k]
        m[k] = 0.9 * m[k] + 0.1 * g
        v[k] = 0.999 * v[k] + 0.001 * g**2
        w[k] -= lrk * np.sqrt(1 - 0.999**tk) / (1 - 0.9**tk) * m[k] / (np.sqrt(v[k]) + 1e-7)
    return w, m, v


def some_state(n=V):
    rng = np.random.default_rng(n)
    w, m, v = (rng.normal(scale=s, size=(n, D)).astype(np.float32) for s in (0.1, 1e-3, 1e-3))
    w[3] = 0
    return w, m, v**2


def options(l2, ratio, exempt):
    clip = None if ratio is None else (ratio, ZETA)
    return {"learning_rate": LR, "l2": l2, "clip": clip, "exempt": exempt}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("lagging", [False, True])
def test_against_an_oracle(case, lagging):
    l2, ratio, some_exempt = case
    exempt = (np.arange(V) >= SPLIT) & some_exempt
    moved = expected = some_state()
    start, rate = (np.arange(V) % 7 + 1, np.linspace(0.01, 0.03, V)) if lagging else (1, LR)
    for _ in range(5):
        given = options(l2, ratio, tf.constant(exempt) if some_exempt else None)
        given["learning_rate"] = tf.constant(rate, tf.float32)
        moved = absent_step(*map(tf.constant, moved), tf.constant(start), **given)
        expected = oracle(*expected, start, l2=l2, ratio=ratio, exempt=exempt, lr=rate)
        for x, y, atol in zip(moved, expected, (2e-6, 1e-9, 1e-12), strict=True):
            assert x.dtype == tf.float32
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=atol)
        start = start + 1
    assert l2 == 0 or np.abs(moved.rows - some_state()[0]).max() > 1e-3


def both_modes(case, steps):
    """States of the exact and the lazy table: rows of both ranges are looked up twice, then not."""
    l2, ratio, some_exempt = case
    held = [0, 1, 2, 12, 13]
    rng = np.random.default_rng(1)
    first = tf.constant(held * 2, tf.int64)
    batches = [first, first, *[tf.constant(rng.integers(16, V, 8)) for _ in range(steps - 2)]]
    values = [tf.constant(rng.normal(size=(len(ids), D)), tf.float32) for ids in batches]
    states = {}
    for update in ("exact", "lazy"):
        table = tf.Variable(some_state()[0])
        optimizer = CowClipAdam(
            LR,
            l2=l2,
            clip=None if ratio is None else "adaptive_column",
            clip_ratio=ratio or 1.0,
            clip_floor=ZETA,
            update=update,
        )
        optimizer._create_all_weights([table])
        recorder = IdRecorder()
        columns = (ColumnSchema("a"), ColumnSchema("b"))
        layer, offsets = tf.keras.layers.Layer(), (0, SPLIT, V)
        spec = TableSpec("t", layer, lambda table=table: table, offsets, columns, D, recorder)
        optimizer.bind_tables({spec: (True, not some_exempt)})

        @tf.function
        def step(ids, values, optimizer=optimizer, recorder=recorder, table=table):
            recorder.record(Lookup("ids", tf.reshape(ids, [-1, 1])))
            optimizer.apply_gradients([(tf.IndexedSlices(values, ids), table)])

        m, v = optimizer.get_slot(table, "m"), optimizer.get_slot(table, "v")
        states[update] = []
        for ids, given in zip(batches, values, strict=True):
            step(ids, given)
            states[update].append(tuple(x.numpy() for x in (table, m, v)))
    return batches, held, states


@pytest.mark.parametrize("case", CASES)
def test_against_both_modes(case):
    l2, ratio, some_exempt = case
    exempt = (np.arange(V) >= SPLIT) & some_exempt
    batches, held, states = both_modes(case, steps=9)
    for t in range(1, len(batches)):  # each step of the exact mode moves its absent rows so
        absent = np.setdiff1d(np.arange(V), batches[t])
        given = options(l2, ratio, tf.constant(exempt[absent]))
        before = (tf.constant(x[absent]) for x in states["exact"][t - 1])
        moved = absent_step(*before, t + 1, **given)
        for x, y, atol in zip(moved, states["exact"][t], ULPS, strict=True):
            np.testing.assert_allclose(x, y[absent], rtol=1e-6, atol=atol)
        for x, y in zip(*states["lazy"][t - 1 : t + 1], strict=True):
            np.testing.assert_array_equal(x[absent], y[absent])  # the lazy mode leaves them
    lagging = tuple(tf.constant(x[held]) for x in states["lazy"][-1])
    for x, y, atol in zip(lagging, states["exact"][1], ULPS, strict=True):
        np.testing.assert_allclose(x, y[held], rtol=1e-6, atol=2 * atol)
    for t in range(2, len(batches)):
        lagging = absent_step(*lagging, t + 1, **options(l2, ratio, tf.constant(exempt[held])))
    for x, y, atol in zip(lagging, states["exact"][-1], ULPS, strict=True):
        np.testing.assert_allclose(x, y[held], rtol=1e-5, atol=9 * atol)
