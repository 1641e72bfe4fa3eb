"""The step of absent rows: against an oracle in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from merlin_cowclip.plugins.absent import absent_step

LR, V, D, SPLIT = 0.02, 24, 4, 12  # rows of two ranges, up to SPLIT and from it on
ZETA = 1e-3
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


@pytest.mark.parametrize(("case", "lagging"), [(case, i % 2 == 0) for i, case in enumerate(CASES)])
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
