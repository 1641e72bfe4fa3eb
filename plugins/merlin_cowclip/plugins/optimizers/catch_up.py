# SPDX-License-Identifier: Apache-2.0
r"""Missed steps of embedding rows, applied at once. Pure functions; `deferred.py` calls them.

A step of the exact mode changes a row that is absent from the batch by its L2 gradient only. With
`M = m / 2λ` and the learning rate η (bias correction included), each element does

    M' = β₁·M + (1 - β₁)·w
    v' = β₂·v + (1 - β₂)·(2λw)²
    w' = w - s·M'        with  s = 2λη / (√v' + ε)

independently of all other elements. `catch_up` applies n such steps in less than n operations:

1. The first 132 steps are applied one by one (`absent_step`).
2. The rest follows the slow eigenmode. For a constant s, (w, M) → (w', M') is linear. Its two
   eigenvalues solve `x² - x·(1 + β₁ - s·(1 - β₁)) + β₁ = 0`. Their product is β₁: for a small s one
   is near β₁ and the other, x, near 1. After 132 steps the faster mode has decayed by about β₁¹³²
   = 1e-6 (or, where w oscillates, by √β₁¹³² = 1e-3). What is left is the slow mode: w decays
   by the factor x per step, and M is w times `momentum_ratio`. `decay_rate` is -ln x.
3. s is not constant: it changes with v and η, over some 1 / (1 - β₂) steps. So the decay rate is
   integrated in panels of up to 2,500 steps, each with Gauss's rule of three nodes (`_panel`). v at
   a node has a closed form, with w decaying at one rate up to there (`second_moment_after`).
4. With a changing s, m lags behind its equilibrium. `momentum_lag` is the first-order correction of
   ln |w|, taken off at the start of the panels and added at their end.

The error against step-by-step float64 is below 5e-4 of a weight of up to 0.1
(`tests/plugins/test_catching_up.py`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from merlin_cowclip.plugins._tensorflow import tf

EXACT_STEPS = 132  # before panels begin
# From which share of the smallest oscillating s, and of the weight's size, one counts as such.
OSCILLATES, MATTERS, SMALL_WEIGHT = 0.3, 1e-4, 1e-3
# Length of a panel: by the number of steps before it, and by the time in which v decays to 1/e.
GROWTH, LONGEST = 0.6, 2.5
# Gauss's nodes and weights on [0, 1].
NODES = (0.5 - math.sqrt(0.15), 0.5, 0.5 + math.sqrt(0.15))
WEIGHTS = (5 / 18, 8 / 18, 5 / 18)
# v at a node takes w to decay at one rate: that at the panel's start, plus this share of its rise
# up to the node before. Where the rate rises evenly, v feels 0.35 of the rise: 0.35 * 0.5 / 0.1127
# = 1.55 and 0.36 * 0.887 / 0.5 = 0.64. At the panel's end, of the rise up to the mean; 0.65 fits
# float64 best, because the rise slows down.
NODE_SHARES, END_SHARE = (0.0, 1.55, 0.64), 0.65

State = tuple[tf.Tensor, tf.Tensor, tf.Tensor]
"""w, m and v, d×n: row numbers are on the last axis, as in `last` and `gap`."""


class AdamConstants(NamedTuple):
    """Constants of Adam on rows whose gradient is 2λw."""

    beta_1: float
    beta_2: float
    epsilon: float | tf.Tensor
    l2: float | tf.Tensor


class Rates(NamedTuple):
    """Learning rates by step, with bias correction; after the last, the last one."""

    sums: tf.Tensor  # float64: of all steps up to each
    each: tf.Tensor  # at the end of each step: the mean of its rate and the next one's

    @classmethod
    def of(cls, sums: tf.Tensor, dtype: tf.DType = tf.float32) -> Rates:
        """From `sums[t]`, the sum of `η·√(1 - β₂ᵗ)/(1 - β₁ᵗ)` over the steps 1 to t, float64."""
        further = tf.concat([sums[1:], 2 * sums[-1:] - sums[-2:-1]], axis=0)
        before = tf.concat([sums[:1], sums[:-1]], axis=0)
        each = (further - before) / 2.0
        return cls(sums, tf.cast(tf.concat([2.0 * each[:1], each[1:]], axis=0), dtype))

    @classmethod
    def constant(cls, rate: tf.Tensor, adam: AdamConstants, dtype: tf.DType) -> Rates:
        """Of a constant learning rate."""
        corrections = _summed_corrections(adam.beta_1, adam.beta_2)
        return cls.of(corrections * tf.cast(rate, tf.float64), dtype)


@functools.lru_cache(maxsize=8)
def _summed_corrections(beta_1: float, beta_2: float) -> tf.Tensor:
    """Sums of `√(1 - β₂ᵗ)/(1 - β₁ᵗ)` from step 1 on, until it is 1; float64."""
    t = np.arange(1, 2 + int(40 / (1 - beta_2)), dtype=np.float64)
    corrections = np.sqrt(1 - beta_2**t) / (1 - beta_1**t)
    with tf.init_scope():  # one tensor, which all graphs refer to
        return tf.constant(np.concatenate([[0.0], np.cumsum(corrections)]))


def absent_step(state: Sequence[tf.Tensor], rate: tf.Tensor, adam: AdamConstants) -> State:
    """One step of the exact mode on rows that are absent from the batch and not clipped."""
    w, m, v = state
    g = 2.0 * adam.l2 * w
    # As Keras's kernel adds: βm + (1 - β)g rounds otherwise.
    m += (g - m) * (1.0 - adam.beta_1)
    v += (tf.square(g) - v) * (1.0 - adam.beta_2)
    return w - m * rate / (tf.sqrt(v) + adam.epsilon), m, v


class _Missed(NamedTuple):
    """The steps that n rows have missed."""

    last: tf.Tensor  # n, int32: the step up to which each row is up to date
    gap: tf.Tensor  # n, int32: how many it has missed
    rates: Rates
    adam: AdamConstants

    def rate_after(self, steps: tf.Tensor) -> tf.Tensor:
        """The learning rate after `steps` of the gap, n."""
        step, each = self.last + tf.minimum(steps, self.gap), self.rates.each
        return tf.gather(each, tf.minimum(step, tf.size(each) - 1))

    def sum_of_rates(self, steps: tf.Tensor) -> tf.Tensor:
        """The sum of learning rates until then."""
        step, sums = self.last + tf.minimum(steps, self.gap), self.rates.sums
        end = tf.size(sums) - 1
        beyond = tf.cast(tf.maximum(step - end, 0), sums.dtype)
        return tf.gather(sums, tf.minimum(step, end)) + beyond * (sums[-1] - sums[-2])


def catch_up(
    rows: tf.Tensor,
    m: tf.Tensor,
    v: tf.Tensor,
    last: tf.Tensor,
    step: tf.Tensor,
    rates: Rates,
    adam: AdamConstants,
) -> State:
    """Rows and moments, n×d each, after `absent_step` was applied `step - last` times (n)."""
    w, m, v = (tf.transpose(x) for x in (rows, m, v))
    last = tf.cast(last, tf.int32)
    missed = _Missed(last, tf.cast(step, tf.int32) - last, rates, adam)
    state = _step_by_step((w, m, v), 0, EXACT_STEPS, missed)
    # Twice as many where an oscillation still matters.
    most = tf.where(_oscillates(state, w, missed), 2 * EXACT_STEPS, EXACT_STEPS)
    state = _step_by_step(state, EXACT_STEPS, most, missed)
    w, m, v = tf.cond(
        tf.reduce_any(missed.gap > most), lambda: _in_panels(state, most, missed), lambda: state
    )
    return tf.transpose(w), tf.transpose(m), tf.transpose(v)


def _step_by_step(state: State, begin: int, end: tf.Tensor | int, missed: _Missed) -> State:
    """Apply the steps of each row's gap from number `begin` to `end`, one by one."""
    most = tf.minimum(tf.reduce_max(missed.gap), end)

    def body(done: tf.Tensor, so_far: tf.Tensor, *state: tf.Tensor) -> tuple[tf.Tensor, ...]:
        now = missed.sum_of_rates(done + 1)
        new = absent_step(state, tf.cast(now - so_far, state[0].dtype), missed.adam)
        kept = (tf.where(done < missed.gap, *both) for both in zip(new, state, strict=True))
        return done + 1, now, *kept

    given = (tf.constant(begin), missed.sum_of_rates(begin), *state)
    _, _, w, m, v = tf.while_loop(lambda done, *_: done < most, body, given)
    return w, m, v


def _oscillates(state: State, first: tf.Tensor, missed: _Missed) -> tf.Tensor:
    """Whether any element with further steps (almost) oscillates about zero, and matters."""
    w, _, v = state
    beta_1 = missed.adam.beta_1
    smallest = (1 - math.sqrt(beta_1)) ** 2 / (1 - beta_1)  # s with complex eigenvalues
    s = _shrinkage(v, missed.rate_after(EXACT_STEPS), missed.adam)
    matters = tf.abs(w) > MATTERS * tf.maximum(tf.abs(first), SMALL_WEIGHT)
    return tf.reduce_any((s > OSCILLATES * smallest) & matters & (missed.gap > EXACT_STEPS))


def _in_panels(state: State, done: tf.Tensor, missed: _Missed) -> State:
    """The rest of each row's gap after `done` steps, along the slow mode."""
    (w, m, v), (_, gap, _, adam) = state, missed
    has_more, begin = gap > done, tf.minimum(gap, done)
    rate = missed.rate_after(begin)
    decay = decay_rate(v, rate, adam)
    slow = _slow_part(state, rate, decay, adam) * tf.exp(-momentum_lag(decay, adam))
    slow = tf.where(has_more, slow, w)

    def body(
        age: tf.Tensor, so_far: tf.Tensor, w: tf.Tensor, v: tf.Tensor
    ) -> tuple[tf.Tensor, ...]:
        length = tf.minimum(gap - age, _longest(w, v, age, adam))
        now = missed.sum_of_rates(age + length)
        w, v = _panel(w, v, age, length, tf.cast(now - so_far, w.dtype), missed)
        return age + length, now, w, v

    given = (begin, missed.sum_of_rates(begin), slow, v)
    *_, slow, v = tf.while_loop(lambda age, *_: tf.reduce_any(age < gap), body, given)
    decay = decay_rate(v, missed.rate_after(gap), adam)
    slow *= tf.exp(momentum_lag(decay, adam))
    follows = 2.0 * adam.l2 * slow * momentum_ratio(decay, adam)
    new_m = tf.where(decay >= _fastest(adam), tf.zeros_like(slow), follows)
    return tf.where(has_more, slow, w), tf.where(has_more, new_m, m), v


def _slow_part(state: State, rate: tf.Tensor, decay: tf.Tensor, adam: AdamConstants) -> tf.Tensor:
    """The w without its part in the fast mode, whose eigenvalue is β₁ / x."""
    w, m, v = state
    root = adam.beta_1 * tf.exp(decay)
    fast_ratio = root * _momentum_step(v, rate, adam) / (1.0 - root)  # w over m of the fast mode
    slow_ratio = 2.0 * adam.l2 * momentum_ratio(decay, adam)  # m over w of the slow mode
    apart = 1.0 - slow_ratio * fast_ratio  # 0 where both eigenvalues are equal
    is_apart = apart > 0.02
    fast_m = tf.where(is_apart, (m - slow_ratio * w) / tf.where(is_apart, apart, 1.0), 0.0)
    return w - fast_ratio * fast_m


def _longest(w: tf.Tensor, v: tf.Tensor, age: tf.Tensor, adam: AdamConstants) -> tf.Tensor:
    """The most steps of each row's next panel, n int32, in which s changes by little.

    Unlimited where √v is far below ε, and where w is practically zero.
    """
    root = tf.sqrt(v)
    steps = LONGEST / -math.log(adam.beta_2) * (root + adam.epsilon) / tf.maximum(root, 1e-30)
    steps = tf.where(tf.abs(w) < 1e-20, tf.constant(1e9, w.dtype), steps)
    steps = tf.minimum(tf.reduce_min(steps, axis=0), 1e9)
    grown = tf.cast(GROWTH * tf.cast(age, tf.float32), tf.int32)
    return tf.maximum(tf.minimum(tf.cast(steps, tf.int32), tf.maximum(grown, 1)), 1)


def _panel(
    w: tf.Tensor, v: tf.Tensor, age: tf.Tensor, length: tf.Tensor, total: tf.Tensor, missed: _Missed
) -> tuple[tf.Tensor, tf.Tensor]:
    """The w and v after `length` steps more than `age`, n each, whose rates add up to `total`."""
    adam, steps = missed.adam, tf.cast(length, w.dtype)
    first = decay_rate(v, missed.rate_after(age), adam)
    at_nodes = [missed.rate_after(age + tf.cast(node * steps, tf.int32)) for node in NODES]
    # Scaled to the sum of all steps' rates, also where the learning rate jumps.
    estimate = sum(weight * rate for weight, rate in zip(WEIGHTS, at_nodes, strict=True))
    ratio = tf.math.divide_no_nan(total, estimate * steps)
    mean, decay = tf.zeros_like(w), first
    for node, weight, rate, share in zip(NODES, WEIGHTS, at_nodes, NODE_SHARES, strict=True):
        there = second_moment_after(w, v, first + share * (decay - first), node * steps, adam)
        decay = decay_rate(there, rate * ratio, adam)
        mean += weight * decay
    new_v = second_moment_after(w, v, first + END_SHARE * (mean - first), steps, adam)
    return w * tf.exp(-mean * steps), new_v


def second_moment_after(
    w: tf.Tensor, v: tf.Tensor, decay: tf.Tensor, steps: tf.Tensor, adam: AdamConstants
) -> tf.Tensor:
    """The v after `steps` in which w decays at the rate `decay`, integrated in closed form."""
    forget = -math.log(adam.beta_2)
    kept, apart = tf.exp(-forget * steps), forget - 2.0 * decay
    x = apart * steps
    is_close = tf.abs(x) < 0.02
    far = (tf.exp(-2.0 * decay * steps) - kept) / tf.where(is_close, tf.ones_like(x), apart)
    near = kept * steps * (1.0 + x * (0.5 + x / 6.0))
    return kept * v + forget * tf.square(2.0 * adam.l2 * w) * tf.where(is_close, near, far)


def _momentum_step(v: tf.Tensor, rate: tf.Tensor, adam: AdamConstants) -> tf.Tensor:
    """A step of w over m: Adam divides by √v after the step, half a step later than v's mean."""
    return rate / (tf.sqrt(v) * math.sqrt(math.sqrt(adam.beta_2)) + adam.epsilon)


def _shrinkage(v: tf.Tensor, rate: tf.Tensor, adam: AdamConstants) -> tf.Tensor:
    return 2.0 * adam.l2 * _momentum_step(v, rate, adam)  # the s of the module's description


def _fastest(adam: AdamConstants) -> float:
    """The decay rate where eigenvalues are complex and w oscillates: both have the size √β₁."""
    return -0.5 * math.log(adam.beta_1)


def decay_rate(v: tf.Tensor, rate: tf.Tensor, adam: AdamConstants) -> tf.Tensor:
    """The decrease of ln |w| per step in the slow mode: -ln of the larger eigenvalue."""
    s = _shrinkage(v, rate, adam)
    a = 1.0 + s
    under = tf.square(a) - 4.0 * s / (1.0 - adam.beta_1)
    oscillates = tf.logical_or(under <= 0.0, s >= 1.0)
    y = 2.0 * s / (a + tf.sqrt(tf.maximum(under, 0.0)))  # 1 - x, without a difference
    rate_of_decay = y * (1.0 + y * (0.5 + y * (1 / 3 + y * (0.25 + y * 0.2))))  # -ln(1 - y)
    return tf.where(oscillates, tf.constant(_fastest(adam), s.dtype), rate_of_decay)


def momentum_lag(decay: tf.Tensor, adam: AdamConstants) -> tf.Tensor:
    """What ln |w| has gained because m lags, while the decay rate rose from zero to `decay`."""
    fastest, beta = _fastest(adam), adam.beta_1
    decay = tf.minimum(decay, 0.57 * fastest)
    return 0.25 * beta * (1 + beta) / (1 - beta) ** 2 * tf.square(decay) / (1.0 - decay / fastest)


def momentum_ratio(decay: tf.Tensor, adam: AdamConstants) -> tf.Tensor:
    """M over w in the slow mode."""
    return (1.0 - adam.beta_1) / (tf.exp(-decay) - adam.beta_1)
