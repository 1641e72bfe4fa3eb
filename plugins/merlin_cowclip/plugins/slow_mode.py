"""The slower of the two modes of an absent row's (w, m), followed in panels of many steps.

With `M = m / 2λ`, an element of a table obeys `M' = β₁M + (1 - β₁)w`, `w' = w - s·M'`: linear, and
slow in all but `s = 2λη/(√v + ε)`, which follows v. Of its two modes the faster one is forgotten as
m is; the slower one is followed, with v, by Gauss's rule.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from merlin_cowclip.plugins._stack import tf

# Gauss's three nodes and weights on [0, 1].
_NODES = (0.5 - math.sqrt(0.15), 0.5, 0.5 + math.sqrt(0.15))
_WEIGHTS = (5 / 18, 8 / 18, 5 / 18)
# The rate at which w shrinks up to a node, as v knows it: its loss at the panel's start and this
# share of the rise from there to the node before; up to the panel's end, of the rise to the mean.
# Where it rises evenly v knows some 0.35 of the rise: 0.35 * 0.5 / 0.1127, 0.36 * 0.887 / 0.5,
# and 0.36 / 0.5 at the end; there 0.65 comes nearest to float64, for it rises ever less evenly.
_SHARES, _SHARE = (0.0, 1.55, 0.64), 0.65
_GROWTH = 0.6  # of a panel, by the age where it begins
_LONGEST = 2.5  # of a panel, by the time in which v decays to 1/e


class Adam(NamedTuple):
    """What Adam does to an absent row, whose gradient is 2λw."""

    beta_1: float
    beta_2: float
    epsilon: float | tf.Tensor
    l2: float | tf.Tensor

    @property
    def decay(self) -> float:
        """Of ln v, a step."""
        return -math.log(self.beta_2)


class Rates(NamedTuple):
    """Learning rates of the steps, bias correction included; beyond their end that of the last."""

    sums: tf.Tensor  # float64
    each: tf.Tensor  # of the rows' dtype: the mean of a step's and the next one's

    @classmethod
    def of(cls, sums: tf.Tensor, dtype: tf.DType = tf.float32) -> Rates:
        """Of `sums[t]`, the sum of `η·√(1 - β₂ᵗ)/(1 - β₁ᵗ)` over the steps 1 to t, float64."""
        further = tf.concat([sums[1:], 2 * sums[-1:] - sums[-2:-1]], axis=0)
        before = tf.concat([sums[:1], sums[:-1]], axis=0)
        each = (further - before) / 2.0
        return cls(sums, tf.cast(tf.concat([2.0 * each[:1], each[1:]], axis=0), dtype))

    def up_to(self, step: tf.Tensor) -> tf.Tensor:
        """The sum of the rates of all steps up to some."""
        end = tf.size(self.sums) - 1
        beyond = tf.cast(tf.maximum(step - end, 0), self.sums.dtype)
        return tf.gather(self.sums, tf.minimum(step, end)) + beyond * (
            self.sums[-1] - self.sums[-2]
        )

    def at(self, step: tf.Tensor) -> tf.Tensor:
        """The rate where a step ends and the next one begins."""
        return tf.gather(self.each, tf.minimum(step, tf.size(self.each) - 1))


def follow(
    slow: tf.Tensor,
    v: tf.Tensor,
    age: tf.Tensor,
    older: tf.Tensor | int,
    last: tf.Tensor,
    gap: tf.Tensor,
    rates: Rates,
    adam: Adam,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """What a slow mode and v are at the end of each row's gap; panels grow as if it were older."""
    strength = strength_of(v, rates.at(last + age), adam)
    slow *= tf.exp(-_lag(_loss(strength, adam), adam))

    def body(
        age: tf.Tensor, so_far: tf.Tensor, w: tf.Tensor, v: tf.Tensor
    ) -> tuple[tf.Tensor, ...]:
        length = tf.minimum(gap - age, _longest(w, v, age + older, adam))
        now = rates.up_to(last + age + length)
        w, v = _panel(w, v, last + age, length, rates, tf.cast(now - so_far, w.dtype), adam)
        return age + length, now, w, v

    begin = (age, rates.up_to(last + age), slow, v)
    *_, slow, v = tf.while_loop(lambda age, *_: tf.reduce_any(age < gap), body, begin)
    strength = strength_of(v, rates.at(last + gap), adam)
    loss = _loss(strength, adam)
    slow *= tf.exp(_lag(loss, adam))
    swings = loss >= _fastest(adam)
    m_slow = tf.where(swings, tf.zeros_like(slow), 2.0 * adam.l2 * slow * _behind(loss, adam))
    return slow, m_slow, v


def _longest(w: tf.Tensor, v: tf.Tensor, age: tf.Tensor, adam: Adam) -> tf.Tensor:
    """How many steps a panel of each row may have, n int32: until s may have changed by much.

    Not at all where √v has decayed far below ε, and it is no matter where w has run to zero.
    """
    root = tf.sqrt(v)
    steps = _LONGEST / adam.decay * (root + adam.epsilon) / tf.maximum(root, 1e-30)
    steps = tf.where(tf.abs(w) < 1e-20, tf.constant(1e9, w.dtype), steps)
    steps = tf.minimum(tf.reduce_min(steps, axis=0), 1e9)
    grown = tf.cast(_GROWTH * tf.cast(age, tf.float32), tf.int32)
    return tf.maximum(tf.minimum(tf.cast(steps, tf.int32), tf.maximum(grown, 1)), 1)


def _panel(
    w: tf.Tensor,
    v: tf.Tensor,
    start: tf.Tensor,
    length: tf.Tensor,
    rates: Rates,
    together: tf.Tensor,
    adam: Adam,
) -> tuple[tf.Tensor, tf.Tensor]:
    """`length` steps at once after the step `start`, n each, whose rates are `together`: w and v.

    v is solved as if w shrank at one rate, w as if v did not know of it; Gauss's rule between. That
    rate is another one up to each node, for in a long panel w's loss rises as v decays.
    """
    whole = tf.cast(length, w.dtype)
    first = _loss(strength_of(v, rates.at(start), adam), adam)
    at = [rates.at(start + tf.cast(node * whole, tf.int32)) for node in _NODES]
    # Together as much as all steps' rates, also where these jump.
    guess = sum(weight * rate for weight, rate in zip(_WEIGHTS, at, strict=True))
    ratio = tf.math.divide_no_nan(together, guess * whole)
    total, loss = tf.zeros_like(w), first
    for node, weight, rate, share in zip(_NODES, _WEIGHTS, at, _SHARES, strict=True):
        there = later(w, v, first + share * (loss - first), node * whole, adam)
        loss = _loss(strength_of(there, rate * ratio, adam), adam)
        total += weight * loss
    there = later(w, v, first + _SHARE * (total - first), whole, adam)
    return w * tf.exp(-total * whole), there


def later(w: tf.Tensor, v: tf.Tensor, loss: tf.Tensor, time: tf.Tensor, adam: Adam) -> tf.Tensor:
    """Second moments after a time in which w shrinks by `loss` a step."""
    decay = adam.decay
    kept, apart = tf.exp(-decay * time), decay - 2.0 * loss
    x = apart * time
    close = tf.abs(x) < 0.02
    far = (tf.exp(-2.0 * loss * time) - kept) / tf.where(close, tf.ones_like(x), apart)
    near = kept * time * (1.0 + x * (0.5 + x / 6.0))
    return kept * v + decay * tf.square(2.0 * adam.l2 * w) * tf.where(close, near, far)


def strength_of(v: tf.Tensor, rate: tf.Tensor, adam: Adam) -> tf.Tensor:
    """s: what a step takes off w by the share of M in it."""
    return 2.0 * adam.l2 * step_of_m(v, rate, adam)


def step_of_m(v: tf.Tensor, rate: tf.Tensor, adam: Adam) -> tf.Tensor:
    """What a step takes off w by the share of m in it. Adam's v is the one after the step."""
    half = math.sqrt(math.sqrt(adam.beta_2))  # of a step more, of √v
    return rate / (tf.sqrt(v) * half + adam.epsilon)


def _fastest(adam: Adam) -> float:
    """What ln |w| loses a step where it swings about zero."""
    return -0.5 * math.log(adam.beta_1)


def _loss(s: tf.Tensor, adam: Adam) -> tf.Tensor:
    """What ln |w| loses a step: by the larger root x of `x² - x(1 + β₁ - s(1 - β₁)) + β₁`."""
    a = 1.0 + s
    under = tf.square(a) - 4.0 * s / (1.0 - adam.beta_1)
    swings = tf.logical_or(under <= 0.0, s >= 1.0)
    y = 2.0 * s / (a + tf.sqrt(tf.maximum(under, 0.0)))  # 1 - x, without a difference
    loss = y * (1.0 + y * (0.5 + y * (1 / 3 + y * (0.25 + y * 0.2))))  # -ln(1 - y)
    return tf.where(swings, tf.constant(_fastest(adam), s.dtype), loss)


def _lag(loss: tf.Tensor, adam: Adam) -> tf.Tensor:
    """What ln |w| has gained as m follows w late while the loss grew to this from zero."""
    fastest = _fastest(adam)
    loss = tf.minimum(loss, 0.57 * fastest)
    beta = adam.beta_1
    return 0.25 * beta * (1 + beta) / (1 - beta) ** 2 * tf.square(loss) / (1.0 - loss / fastest)


def _behind(loss: tf.Tensor, adam: Adam) -> tf.Tensor:
    """M over w of the slower mode."""
    return (1.0 - adam.beta_1) / (tf.exp(-loss) - adam.beta_1)


class Modes(NamedTuple):
    """What w is made of: a part that m follows, and one that is gone when m has forgotten."""

    slow: tf.Tensor
    fast_m: tf.Tensor  # what is gone of m
    per_m: tf.Tensor  # of w that goes with it
    root: tf.Tensor  # by which both are multiplied at a step


def modes_of(w: tf.Tensor, m: tf.Tensor, v: tf.Tensor, rate: tf.Tensor, adam: Adam) -> Modes:
    """The modes of w and m, if s stays what it is with this v and rate."""
    s = strength_of(v, rate, adam)
    step = step_of_m(v, rate, adam)
    loss = _loss(s, adam)
    root = adam.beta_1 * tf.exp(loss)
    per_m = root * step / (1.0 - root)
    follows = 2.0 * adam.l2 * _behind(loss, adam)
    apart = 1.0 - follows * per_m
    is_apart = apart > 0.02
    fast_m = tf.where(is_apart, (m - follows * w) / tf.where(is_apart, apart, 1.0), 0.0)
    return Modes(w - per_m * fast_m, fast_m, per_m, root)
