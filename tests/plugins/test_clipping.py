"""CowClip as a pure function: golden values, a NumPy oracle of Algorithm 1, properties."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from merlin_cowclip.plugins import clip_by_adaptive_column_norm


def oracle(g, w, cnt, r, zeta):
    """Algorithm 1, lines 6 to 9, id by id in float64."""
    clipped = np.zeros(g.shape, np.float64)
    for k in range(len(g)):
        n_g = np.linalg.norm(g[k].astype(np.float64))
        clip_t = cnt[k] * max(r * np.linalg.norm(w[k].astype(np.float64)), zeta)
        clipped[k] = g[k] * (min(1.0, clip_t / n_g) if n_g else 1.0)
    return clipped


def clip(g, w, cnt, r=1.0, zeta=3.162e-5):
    return clip_by_adaptive_column_norm(
        tf.constant(g), tf.constant(w), tf.constant(cnt), ratio=r, floor=zeta
    ).numpy()


@pytest.mark.parametrize("k", range(24))
def test_published_code(golden, k):
    case = {name: golden[f"case{k}_{name}"] for name in ("w", "g", "ids", "cnts", "clipped")}
    ratio, floor = float(golden[f"case{k}_ratio"]), float(golden[f"case{k}_floor"])
    counts = np.ones(len(case["w"]), np.float32)
    counts[case["ids"]] = case["cnts"]
    ours = clip(case["g"], case["w"], counts, ratio, ratio * floor)
    np.testing.assert_allclose(ours, case["clipped"], rtol=1e-6, atol=0)


def test_all_golden_cases_are_covered(golden):
    assert int(golden["n_cases"]) == 24


# Entries from the smallest normal float32 up: squares of most of them leave float32's range.
entries = st.one_of(
    st.just(0.0),
    st.floats(2.0**-120, 2.0**110, width=32),
    st.floats(-(2.0**110), -(2.0**-120), width=32),
)
shapes = hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=6)


@st.composite
def tables(draw):
    shape = draw(shapes)
    g = draw(hnp.arrays(np.float32, shape, elements=entries))
    w = draw(hnp.arrays(np.float32, shape, elements=entries))
    cnt = draw(hnp.arrays(np.float32, shape[0], elements=st.integers(1, 200_000).map(float)))
    return g, w, cnt


@settings(deadline=None, max_examples=200)
@given(tables(), st.sampled_from([0.1, 1.0, 10.0]), st.sampled_from([0.0, 3.162e-5, 1e-3]))
def test_oracle_over_all_magnitudes(table, r, zeta):
    g, w, cnt = table
    expected = oracle(g, w, cnt, r, zeta)
    # Below the smallest normal float32 digits get lost, in any formula.
    np.testing.assert_allclose(clip(g, w, cnt, r, zeta), expected, rtol=2e-6, atol=2e-38)


@settings(deadline=None, max_examples=100)
@given(tables())
def test_never_lengthens_keeps_direction_and_is_idempotent(table):
    g, w, cnt = table
    once = clip(g, w, cnt)
    norm = np.linalg.norm(g.astype(np.float64), axis=1)
    assert (np.linalg.norm(once.astype(np.float64), axis=1) <= norm * (1 + 1e-6) + 1e-37).all()
    assert (np.sign(once) * np.sign(g) >= 0).all()
    np.testing.assert_allclose(clip(once, w, cnt), once, rtol=1e-6, atol=2e-38)


def test_zero_gradient_and_zero_row_stay_finite():
    g = np.array([[0, 0], [3, 4]], np.float32)
    w = np.zeros((2, 2), np.float32)
    ours = clip(g, w, np.ones(2, np.float32), 1.0, 0.0)
    np.testing.assert_array_equal(ours, np.zeros((2, 2)))  # ζ = 0: a zero row cannot move
    ours = clip(g, w, np.array([1, 2], np.float32), 1.0, 0.5)
    np.testing.assert_allclose(ours, [[0, 0], [0.6, 0.8]], rtol=1e-6)  # 2 · ζ = 1


def test_short_gradients_pass_unchanged():
    rng = np.random.default_rng(0)
    g, w = rng.normal(size=(2, 50, 10)).astype(np.float32)
    np.testing.assert_array_equal(clip(g, w, np.ones(50, np.float32), 1e9), g)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
def test_half_precision_is_clipped_in_float32(dtype):
    rng = np.random.default_rng(0)
    g = tf.cast(rng.normal(size=(20, 4)) * 300, dtype)  # squares overflow float16
    w = tf.cast(rng.normal(size=(20, 4)), tf.float32)
    ours = clip_by_adaptive_column_norm(g, w, tf.ones(20), ratio=1.0, floor=0.0)
    assert ours.dtype == dtype
    wide = oracle(tf.cast(g, tf.float32).numpy(), w.numpy(), np.ones(20), 1.0, 0.0)
    np.testing.assert_allclose(tf.cast(ours, tf.float32), wide, rtol=2.0**-7, atol=1e-3)
