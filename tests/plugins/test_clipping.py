"""The five clip rules: golden values of the published code, and the NumPy reference."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from merlin_cowclip.plugins import CLIP_RULES, clip_by_adaptive_column_norm

from .reference import Settings, clip

FIELDS = 3


def run(name, g, w, cnt, fields, *, r=1.0, zeta=0.0, c=1.0):
    given_ = {"ratio": r, "floor": zeta} if CLIP_RULES[name].adaptive else {"threshold": c}
    if name.endswith("field"):
        given_ |= {"fields": tf.constant(fields, tf.int32), "num_fields": FIELDS}
    return CLIP_RULES[name](tf.constant(g), tf.constant(w), tf.constant(cnt), **given_).numpy()


def test_published_code(golden):
    for k in range(int(golden["n_cases"])):
        case = {name: golden[f"case{k}_{name}"] for name in ("w", "g", "ids", "cnts", "clipped")}
        ratio, floor = float(golden[f"case{k}_ratio"]), float(golden[f"case{k}_floor"])
        counts = np.ones(len(case["w"]), np.float32)
        counts[case["ids"]] = case["cnts"]
        given_ = {"ratio": ratio, "floor": ratio * floor}
        clipped = clip_by_adaptive_column_norm(case["g"], case["w"], counts, **given_)
        np.testing.assert_allclose(clipped, case["clipped"], rtol=1e-6, atol=0, err_msg=str(k))


# Squares of most of these leave float32's range; their products with counts, r and ζ do not.
entries = st.one_of(
    st.just(0.0),
    st.floats(2.0**-80, 2.0**80, width=32),
    st.floats(-(2.0**80), -(2.0**-80), width=32),
)


@st.composite
def tables(draw):
    shape = draw(hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=6))
    g = draw(hnp.arrays(np.float32, shape, elements=entries))
    w = draw(hnp.arrays(np.float32, shape, elements=entries))
    cnt = draw(hnp.arrays(np.float32, shape[0], elements=st.integers(1, 200_000).map(float)))
    fields = draw(hnp.arrays(np.int32, shape[0], elements=st.integers(0, FIELDS - 1)))
    return g, w, cnt, fields


TINY = 1e-35  # digits below the smallest normal float32 get lost, in any formula


def close(ours, expected):
    """To 3e-6, but for entries that are 1e-9 of their row or less, and for subnormal numbers."""
    of_row = 1e-9 * np.linalg.norm(expected.astype(np.float64), axis=1, keepdims=True)
    error = np.abs(ours.astype(np.float64) - expected)
    return (error <= 3e-6 * np.abs(expected) + of_row + TINY).all()


@pytest.mark.parametrize("name", CLIP_RULES)
@settings(deadline=None, max_examples=60)
@example(  # a row whose quotient by its field is subnormal
    (
        np.float32([[8.271806e-25], [7.036875e13]]),
        np.float32([[1], [0]]),
        np.float32([1, 85]),
        np.int32([0, 0]),
    ),
    10.0,
    0.0,
    1e-5,
)
@given(
    tables(),
    st.sampled_from([0.125, 1.0, 10.0]),
    st.sampled_from([0.0, 3.162e-5, 1e-3]),
    st.sampled_from([1e-5, 1.0, 25.0]),
)
def test_oracle_over_all_magnitudes(name, table, r, zeta, c):
    ours = run(name, *table, r=r, zeta=zeta, c=c)
    values = Settings(1.0, clip=name, clip_ratio=r, clip_floor=zeta, clip_threshold=c)
    expected = clip(*table, values)
    assert close(ours, expected), (ours, expected)


@pytest.mark.parametrize("name", CLIP_RULES)
def test_loose_bounds_change_nothing(name):
    rng = np.random.default_rng(0)
    g, w = rng.normal(size=(2, 50, 10)).astype(np.float32)
    counts, fields = np.ones(50, np.float32), rng.integers(0, FIELDS, 50).astype(np.int32)
    np.testing.assert_array_equal(run(name, g, w, counts, fields, r=1e9, c=1e9), g)
    assert run(name, g[:0], w[:0], counts[:0], fields[:0]).shape == (0, 10)


def test_by_hand():
    g = np.array([[0, 0], [3, 4]], np.float32)
    w = np.zeros((2, 2), np.float32)
    ones, fields = np.ones(2, np.float32), np.zeros(2, np.int32)
    ours = run("adaptive_column", g, w, ones * 2, fields, zeta=0.5)
    np.testing.assert_allclose(ours, [[0, 0], [0.6, 0.8]], rtol=1e-6)  # 2 · ζ = 1
    ours = run("adaptive_field", g, w, ones * 2, fields, zeta=0.5)
    np.testing.assert_allclose(ours, [[0, 0], [1.2, 1.6]], rtol=1e-6)  # (2 + 2) · ζ = 2
    ours = run("global", g, w, ones, fields, c=2.5)
    np.testing.assert_allclose(ours, [[0, 0], [1.5, 2.0]], rtol=1e-6)


@pytest.mark.parametrize("name", CLIP_RULES)
@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
def test_half_precision_is_clipped_in_float32(name, dtype):
    rng = np.random.default_rng(0)
    g = tf.cast(rng.normal(size=(20, 4)) * 300, dtype)  # squares overflow float16
    w = tf.cast(rng.normal(size=(20, 4)), tf.float32)
    given_ = {"ratio": 1.0, "floor": 0.0} if CLIP_RULES[name].adaptive else {"threshold": 1.0}
    ours = CLIP_RULES[name](g, w, tf.ones(20), **given_)
    assert ours.dtype == dtype
    wide = tf.cast(g, tf.float32).numpy()
    values = Settings(1.0, clip=name, clip_threshold=1.0)
    expected = clip(wide, w.numpy(), np.ones(20), np.zeros(20), values)
    np.testing.assert_allclose(tf.cast(ours, tf.float32), expected, rtol=2.0**-7, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "others", "bound"), [("adaptive_field", 0.0, 2**0.5), ("adaptive_column", 2.0, 1.0)]
)
def test_what_no_sample_holds_is_clipped_as_of_one(name, others, bound):
    """A field of a tied output, or padding: a bound of 0 would freeze it."""
    g, w = tf.constant([[3.0, 4.0], [0.0, 12.0]]), tf.constant([[1.0, 0.0], [0.0, 1.0]])
    clipped = CLIP_RULES[name](g, w, tf.constant([0.0, others]), ratio=0.5, floor=1e-3)
    unit = clipped if name.endswith("field") else clipped[0]
    assert np.linalg.norm(unit) == pytest.approx(0.5 * bound, rel=1e-6)
