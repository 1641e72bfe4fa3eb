"""Catching up: against float64 step by step, and against the exact mode's own step."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from merlin_cowclip.plugins.optimizers import catch_up as module
from merlin_cowclip.plugins.optimizers.catch_up import AdamConstants, Rates
from merlin_cowclip.plugins.optimizers.deferred import check_deferrable

from .reference import Settings
from .reference import adam as reference_step

catch_up = tf.function(module.catch_up, autograph=False, reduce_retracing=True)

EPSILON, D = 1e-7, 4
GAPS = (0, 1, 60, 129, 130, 140, 200, 258, 300, 500, 900, 2_000, 4_000)


def some_rows(first, gaps, each, width=D, swing=0.5):
    """Rows and moments of many sizes, and their gaps; those of step 0 have no moments yet."""
    random = np.random.default_rng(1)
    shape = (each * len(gaps), width)
    w = random.normal(size=shape) * 10.0 ** random.uniform(-4, -1, shape)
    root = np.where(random.random(shape) < 0.3, 0.0, 10.0 ** random.uniform(-8, -1, shape))
    root *= first > 0
    m = swing * root * random.normal(size=shape)
    return tuple(np.float32(x) for x in (w, m, root**2)), np.repeat(gaps, each)


def corrected(rates):
    """Rates of the steps 1, 2, … with Adam's bias correction."""
    t = np.arange(1, len(rates) + 1, dtype=np.float64)
    return rates * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)


def oracle(state, last, step, rates, l2):
    """Float64, a step at a time; `rates[t - 1]` is that of the step t."""
    w, m, v = (np.array(x, np.float64) for x in state)
    for t in range(last.min() + 1, step + 1):
        on = last < t
        g = 2 * l2 * w[on]
        m[on] = 0.9 * m[on] + 0.1 * g
        v[on] = 0.999 * v[on] + 0.001 * g**2
        w[on] -= rates[t - 1] * m[on] / (np.sqrt(v[on]) + EPSILON)
    return w, m, v


def adam(l2):
    return AdamConstants(0.9, 0.999, EPSILON, l2)


def adam_as_stored(l2):
    """As optimizers hold them, in float32: β₁ is a little less than 0.9."""
    return AdamConstants(float(np.float32(0.9)), float(np.float32(0.999)), EPSILON, l2)


def caught_up(state, last, step, rates, l2, function=catch_up, of=adam):
    total = Rates.of(tf.constant(np.concatenate([[0.0], np.cumsum(rates)])))
    given = (*map(tf.constant, state), tf.constant(np.int32(last)), tf.constant(step), total)
    return [x.numpy() for x in function(*given, of(l2))]


def errors(state, found, expected, became=False):
    """Of w, by what it was or 1e-3, whichever is more; or by what it became, if that is more."""
    assert np.isfinite(found).all()
    size = np.maximum(np.abs(state[0]), 1e-3)
    size = np.maximum(size, np.abs(expected[0])) if became else size
    return np.abs(found[0] - expected[0]) / size


@pytest.mark.parametrize(
    ("l2", "rate", "first"),
    [
        (0.0, 1e-3, 100),
        (1e-6, 1e-4, 0),
        (1e-5, 1e-4, 100),
        (1e-5, 1e-3, 0),
        (1e-3, 1e-3, 100),
        *(
            pytest.param(*case, marks=pytest.mark.extended)
            for case in (
                (1e-8, 1e-4, 30_000),
                (1e-8, 1e-2, 100),
                (1e-6, 1e-2, 30_000),
                (1e-3, 1e-4, 30_000),
                (1e-2, 1e-4, 0),
            )
        ),
    ],
)
def test_against_float64(l2, rate, first):
    state, gap = some_rows(first, GAPS, each=12)
    step = first + max(GAPS)
    rates = corrected(np.full(step, rate))
    expected = oracle(state, step - gap, step, rates, l2)
    found = caught_up(state, step - gap, step, rates, l2)
    error = errors(state, found, expected)
    assert error[gap <= 129].max() < 1e-4  # step by step: rounding
    assert error.max() < 5e-4
    assert np.quantile(error, 0.99) < 1e-4
    # What m still moves w by, and v where w has not run to zero.
    reach = 10 * rate / (np.sqrt(expected[2]) + EPSILON)
    moved = reach * np.abs(found[1] - expected[1]) / np.maximum(np.abs(state[0]), 1e-3)
    left = np.abs(expected[0]) > np.maximum(np.abs(state[0]), 1e-3) / 10
    assert moved.max() < 2e-3
    assert (np.abs(found[2] - expected[2]) <= 0.02 * expected[2] + 1e-30)[left].all()


@pytest.mark.extended
@pytest.mark.parametrize(
    ("l2", "rate", "first", "swing", "in_most"),
    [
        (1e-6, 1e-2, 30_000, 3.16, 1e-4),
        (1e-4, 1e-2, 100, 3.16, 1e-4),
        (1e-5, 1e-4, 5, 0.0, 3e-4),  # without moments so far
    ],
)
def test_rows_that_carry_momentum(l2, rate, first, swing, in_most):
    """|m| of up to 3.16 √v, as one gradient after a long pause leaves it, takes w far."""
    (w, _, v), gap = some_rows(first if swing else 0, GAPS, each=12)
    m = np.random.default_rng(2).uniform(-swing, swing, w.shape) * np.sqrt(v)
    state, step = (w, np.float32(m), v), first + max(GAPS)
    rates = corrected(np.full(step, rate))
    expected = oracle(state, step - gap, step, rates, l2)
    found = caught_up(state, step - gap, step, rates, l2)
    error = errors(state, found, expected, became=True)
    assert error.max() < 5e-4
    assert np.quantile(error, 0.99) < in_most


@pytest.mark.parametrize(
    ("l2", "rate", "last", "missed", "of"),
    [
        (1e-5, 1e-4, 300, 1_000, adam),
        pytest.param(1e-5, 1e-4, 500, 900, adam_as_stored, marks=pytest.mark.extended),
        pytest.param(1e-4, 1e-3, 300, 1_100, adam_as_stored, marks=pytest.mark.extended),
    ],
)
def test_rows_of_a_young_table_that_all_miss_as_many(l2, rate, last, missed, of):
    """As some hundred steps of training leave rare ones: |m| near √v, and weights near zero."""
    random = np.random.default_rng(3)
    shape = (1_000, D)
    w = random.normal(size=shape) * 10.0 ** random.uniform(-4, -2, shape)
    m, v = np.zeros(shape), np.zeros(shape)
    held = last - random.integers(0, 12, (shape[0], 1))  # by one batch, just before
    size = 10.0 ** random.uniform(-4, -1, (shape[0], 1))
    rates = corrected(np.full(last + missed, rate))
    for t in range(last):
        g = 2 * l2 * w + (held == t) * size * random.normal(size=shape)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        w = w - rates[t] * m / (np.sqrt(v) + EPSILON)
    state = np.float32(w), np.float32(m), np.float32(v)
    at = np.full(shape[0], last)
    expected = oracle(state, at, last + missed, rates, l2)
    found = caught_up(state, at, last + missed, rates, l2, of=of)
    error = errors(state, found, expected, became=True)
    assert error.max() < 5e-4
    assert np.quantile(error, 0.99) < 1e-4


@pytest.mark.extended
def test_a_gap_of_100_000_steps():
    gaps = (20_000, 100_000)
    state, gap = some_rows(100, gaps, each=2)
    step = 100 + max(gaps)
    rates = corrected(np.full(step, 1e-4))
    expected = oracle(state, step - gap, step, rates, 1e-8)  # more runs to zero
    error = errors(state, caught_up(state, step - gap, step, rates, 1e-8), expected)
    assert error.max() < 5e-4


@pytest.mark.parametrize("kind", ["cosine", "staircase"])
def test_learning_rates_that_change(kind):
    gaps = (3, 100, 200, 600, 1_500, 4_000)
    state, gap = some_rows(100, gaps, each=12)
    step = 100 + max(gaps)
    t = np.arange(1, step + 1)
    plain = 5e-4 * (1 + np.cos(np.pi * t / step)) if kind == "cosine" else 1e-3 * 0.5 ** (t // 700)
    rates = corrected(plain)
    expected = oracle(state, step - gap, step, rates, 1e-5)
    error = errors(state, caught_up(state, step - gap, step, rates, 1e-5), expected)
    assert error.max() < (5e-4 if kind == "cosine" else 4e-3)
    assert np.quantile(error, 0.99) < (1e-4 if kind == "cosine" else 1e-3)


def test_short_gaps_are_those_of_the_exact_mode():
    """Row by row, one step as often as its gap says; rows without a gap keep every bit."""
    gaps = (0, 1, 2, 9)
    state, gap = some_rows(50, gaps, each=3)
    step = 50 + max(gaps)
    expected = [x.astype(np.float64) for x in state]
    settings = Settings(1e-3)
    for t in range(step - max(gaps) + 1, step + 1):
        on = step - gap < t
        w, m, v = (x[on] for x in expected)
        moved = reference_step(w, m, v, 2e-4 * w, t, settings)
        for x, new in zip(expected, moved, strict=True):
            x[on] = new
    found = caught_up(state, step - gap, step, corrected(np.full(step, 1e-3)), 1e-4)
    for x, y, before in zip(found, expected, state, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-6 * np.abs(y).max())
        assert (x[gap == 0] == before[gap == 0]).all()


def test_in_two_goes_as_in_one():
    state, gap = some_rows(100, (400, 3_000), each=12)
    step = 100 + 3_000
    rates = corrected(np.full(step, 1e-4))
    at_once = caught_up(state, step - gap, step, rates, 1e-5)
    half = caught_up(state, step - gap, step - 150, rates, 1e-5)
    again = caught_up(half, np.full(len(gap), step - 150), step, rates, 1e-5)
    assert errors(state, again, at_once).max() < 5e-4


@pytest.mark.extended
def test_compiled_it_is_the_same():
    state, gap = some_rows(100, (0, 5, 200, 1_000), each=4)
    step = 1_100
    rates = corrected(np.full(step, 1e-3))
    compiled = tf.function(catch_up.python_function, autograph=False, jit_compile=True)
    plain = caught_up(state, step - gap, step, rates, 1e-5)
    assert errors(state, caught_up(state, step - gap, step, rates, 1e-5, compiled), plain).max() < (
        1e-4
    )


def test_what_never_settles_is_refused():
    given = {"l2": 1e-3, "clip": None, "clip_ratio": 1.0}
    check_deferrable(1e-3, **given)
    with pytest.raises(ValueError, match=r"learning_rate \* l2 <= .* Received: 0.01 \* 0.0"):
        check_deferrable(1e-2, **given)
    # Beyond, a row near zero does not come to rest: 40,000 steps later it still swings.
    w, m, v, most = 1e-2, 0.0, 0.0, 0.0
    for t in range(1, 40_001):
        g = 2 * 1e-3 * w
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        w -= 1e-2 * m / (v**0.5 + EPSILON)
        most = max(most, abs(w)) if t > 30_000 else 0.0
    assert most > 1e-4


@pytest.mark.extended
@pytest.mark.parametrize("missed", [5_000, 17_000])
def test_large_rows_with_a_small_v(missed):
    """Which w halves more than once while √v decays to ε: further off than others."""
    random = np.random.default_rng(1)
    w = random.normal(size=(2_048, 4)) * 10.0 ** random.uniform(-4, 0, (2_048, 1))
    root = 10.0 ** random.uniform(-9, -1, (2_048, 1))
    v = root**2 * random.uniform(0.5, 2, w.shape)
    state = [np.float32(x) for x in (w, 0.1 * root * random.normal(size=w.shape), v)]
    last, step = np.full(len(w), 3_000, np.int32), 3_000 + missed
    rates = corrected(np.full(step, 1e-4))
    found = caught_up(state, last, step, rates, 1e-5)
    error = errors(state, found, oracle(state, last, step, rates, 1e-5))
    large = np.abs(state[0]) > 0.1
    assert error[~large].max() < 5e-4
    assert error[large].max() < 1e-3
    assert np.quantile(error, 0.99) < 5e-4


@pytest.mark.extended
@pytest.mark.parametrize(
    ("l2", "first"), [(1e-5, 30_000), (1e-5, 500), (1e-4, 500), (3e-6, 5_000), (1e-6, 30_000)]
)
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
    rates = corrected(np.full(step, 1e-4))
    found = caught_up(state, step - gap, step, rates, l2)
    error = errors(state, found, oracle(state, step - gap, step, rates, l2))
    large = top[:, 0] > 0.1
    assert error[~large].max() < 3e-4
    assert np.quantile(error[~large], 0.99) < 2e-4
    assert error[large].max() < 6e-4
