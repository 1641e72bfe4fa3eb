"""Catching up: against float64 step by step, and against the exact mode's own step."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from merlin_cowclip.plugins.optimizers import catch_up as module
from merlin_cowclip.plugins.optimizers.catch_up import AdamConstants, Rates

from .reference import Settings
from .reference import adam as reference_step

catch_up = tf.function(module.catch_up, autograph=False, reduce_retracing=True)

EPSILON, D = 1e-7, 4
GAPS = (0, 1, 60, 129, 130, 140, 200, 258, 300, 500, 900, 2_000, 4_000)


def some_rows(first, gaps, each):
    """Rows and moments of many sizes, and their gaps; those of step 0 have no moments yet."""
    random = np.random.default_rng(1)
    shape = (each * len(gaps), D)
    w = random.normal(size=shape) * 10.0 ** random.uniform(-4, -1, shape)
    root = np.where(random.random(shape) < 0.3, 0.0, 10.0 ** random.uniform(-8, -1, shape))
    root *= first > 0
    m = 0.5 * root * random.normal(size=shape)
    return tuple(np.float32(x) for x in (w, m, root**2)), np.repeat(gaps, each)


def oracle(state, last, step, rate, l2):
    """Float64, a step at a time."""
    w, m, v = (np.array(x, np.float64) for x in state)
    for t in range(last.min() + 1, step + 1):
        on = last < t
        g = 2 * l2 * w[on]
        m[on] = 0.9 * m[on] + 0.1 * g
        v[on] = 0.999 * v[on] + 0.001 * g**2
        corrected = rate * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        w[on] -= corrected * m[on] / (np.sqrt(v[on]) + EPSILON)
    return w, m, v


def caught_up(state, last, step, rate, l2):
    # As optimizers have them, in float32: β₁ is a little less than 0.9.
    beta_1, beta_2 = float(np.float32(0.9)), float(np.float32(0.999))
    adam = AdamConstants(beta_1, beta_2, tf.constant(EPSILON), tf.constant(l2))
    rates = Rates.constant(tf.constant(rate), adam, tf.float32)
    last, step = tf.constant(np.int32(last)), tf.constant(step)
    return [x.numpy() for x in catch_up(*map(tf.constant, state), last, step, rates, adam)]


def errors(state, result, expected, became=False):
    """Of w, by what it was or 1e-3, whichever is more; or by what it became, if that is more."""
    assert np.isfinite(result).all()
    size = np.maximum(np.abs(state[0]), 1e-3)
    size = np.maximum(size, np.abs(expected[0])) if became else size
    return np.abs(result[0] - expected[0]) / size


@pytest.mark.parametrize(
    ("l2", "rate", "first"),
    [
        (0.0, 1e-3, 100),
        (1e-6, 1e-4, 0),
        (1e-5, 1e-4, 45_000),  # after which the bias correction is 1
        (1e-5, 1e-3, 0),
        (1e-3, 1e-3, 100),
        *(
            pytest.param(*case, marks=pytest.mark.extended)
            for case in ((1e-8, 1e-4, 30_000), (1e-6, 1e-2, 30_000), (1e-2, 1e-4, 0))
        ),
    ],
)
def test_against_float64(l2, rate, first):
    state, gap = some_rows(first, GAPS, each=12)
    step = first + max(GAPS)
    expected = oracle(state, step - gap, step, rate, l2)
    result = caught_up(state, step - gap, step, rate, l2)
    error = errors(state, result, expected)
    assert error[gap <= 129].max() < 1e-4  # step by step: rounding
    assert error.max() < 5e-4
    assert np.quantile(error, 0.99) < 1e-4
    # What m still moves w by, and v where w has not run to zero.
    reach = 10 * rate / (np.sqrt(expected[2]) + EPSILON)
    moved = reach * np.abs(result[1] - expected[1]) / np.maximum(np.abs(state[0]), 1e-3)
    left = np.abs(expected[0]) > np.maximum(np.abs(state[0]), 1e-3) / 10
    assert moved.max() < 2e-3
    assert (np.abs(result[2] - expected[2]) <= 0.02 * expected[2] + 1e-30)[left].all()


@pytest.mark.parametrize(
    ("l2", "rate", "last", "missed"),
    [
        (1e-5, 1e-4, 500, 900),
        pytest.param(1e-4, 1e-3, 300, 1_100, marks=pytest.mark.extended),
    ],
)
def test_rows_of_a_young_table_that_all_miss_as_many(l2, rate, last, missed):
    """As some hundred steps of training leave rare ones: |m| near √v, and weights near zero."""
    random = np.random.default_rng(3)
    shape = (1_000, D)
    w = random.normal(size=shape) * 10.0 ** random.uniform(-4, -2, shape)
    m, v = np.zeros(shape), np.zeros(shape)
    last_held = last - random.integers(0, 12, (shape[0], 1))  # by one batch, just before
    size = 10.0 ** random.uniform(-4, -1, (shape[0], 1))
    for t in range(1, last + 1):
        g = 2 * l2 * w + (last_held == t - 1) * size * random.normal(size=shape)
        w, m, v = reference_step(w, m, v, g, t, Settings(rate))
    state = np.float32(w), np.float32(m), np.float32(v)
    at = np.full(shape[0], last)
    expected = oracle(state, at, last + missed, rate, l2)
    error = errors(state, caught_up(state, at, last + missed, rate, l2), expected, became=True)
    assert error.max() < 5e-4
    assert np.quantile(error, 0.99) < 1e-4


def test_short_gaps_are_those_of_the_exact_mode():
    """Row by row, one step as often as its gap says; rows without a gap keep every bit."""
    gaps = (0, 1, 2, 9)
    state, gap = some_rows(50, gaps, each=3)
    step = 50 + max(gaps)
    expected = [x.astype(np.float64) for x in state]
    for t in range(step - max(gaps) + 1, step + 1):
        on = step - gap < t
        w, m, v = (x[on] for x in expected)
        moved = reference_step(w, m, v, 2e-4 * w, t, Settings(1e-3))
        for x, new in zip(expected, moved, strict=True):
            x[on] = new
    result = caught_up(state, step - gap, step, 1e-3, 1e-4)
    for x, y, before in zip(result, expected, state, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-6 * np.abs(y).max())
        assert (x[gap == 0] == before[gap == 0]).all()


def test_in_two_goes_as_in_one():
    state, gap = some_rows(100, (400, 3_000), each=12)
    step = 100 + 3_000
    at_once = caught_up(state, step - gap, step, 1e-4, 1e-5)
    half = caught_up(state, step - gap, step - 150, 1e-4, 1e-5)
    again = caught_up(half, np.full(len(gap), step - 150), step, 1e-4, 1e-5)
    assert errors(state, again, at_once).max() < 5e-4


@pytest.mark.extended
@pytest.mark.parametrize(("l2", "first"), [(1e-5, 30_000), (1e-4, 500), (3e-6, 5_000)])
def test_rows_whose_elements_have_one_size_of_v(l2, first):
    """As trained rows: else one element of a small v keeps the panels of its row short."""
    random, gaps = np.random.default_rng(0), (600, 2_000, 4_000, 5_500, 7_000, 8_500)
    shape = (192 * len(gaps), D)
    top = np.tile([[0.1], [0.3]], (shape[0] // 2, 1))
    w = np.clip(random.normal(size=shape) * 0.8 * top, -top, top)
    root = 10.0 ** random.uniform(-8, -2, (shape[0], 1))
    root = root * np.exp(random.normal(size=shape) * random.choice([0.2, 0.5], (shape[0], 1)))
    state = [np.float32(x) for x in (w, 0.3 * root * random.normal(size=shape), root**2)]
    gap, step = np.repeat(gaps, 192), first + max(gaps)
    result = caught_up(state, step - gap, step, 1e-4, l2)
    error = errors(state, result, oracle(state, step - gap, step, 1e-4, l2))
    large = top[:, 0] > 0.1
    assert error[~large].max() < 3e-4
    assert np.quantile(error[~large], 0.99) < 2e-4
    assert error[large].max() < 6e-4
