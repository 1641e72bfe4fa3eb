"""Rows that were absent for many steps, brought to where the exact mode would have them, at once.

Without a clip that reaches them, elements of absent rows do not know of each other. The first steps
are made one by one, the rest in panels of up to thousands (`slow_mode.py`); calm rows, as most are
once trained, go in panels from the first step on.
"""

from __future__ import annotations

import math

from merlin_cowclip.plugins._stack import tf
from merlin_cowclip.plugins.absent import Moved
from merlin_cowclip.plugins.slow_mode import (
    Adam,
    Rates,
    follow,
    later,
    modes_of,
    step_of_m,
    strength_of,
)

_FORGOTTEN = 1e-3  # of a swing about zero when panels begin
_SWINGS = 0.3  # of the s from which on w swings
# Of a calm row: by how much its panels are older, how old it is, what ln |w| loses a step at most,
# how many times 2λw its √v is, and by how many times w what is left in m may move it.
_CALM, _CALM_AGE, _CALM_LOSS, _CALM_OWN, _CALM_MOVED = 2000, 300, 1e-3, 4.0, 8.0
_MATTERS, _SMALL = 1e-4, 1e-3  # a part of what w was, or of this


@tf.function(autograph=False, reduce_retracing=True)
def catch_up(
    rows: tf.Tensor,
    m: tf.Tensor,
    v: tf.Tensor,
    last: tf.Tensor,
    step: tf.Tensor,
    rates: Rates,
    adam: Adam,
) -> Moved:
    """Rows and moments as `absent_step`, made `step - last` times, would leave them.

    Args:
      rows: n×d, after the step `last`.
      m: n×d, first moments.
      v: n×d, second moments.
      last: n, int32: the steps after which the rows are current, from 0 to `step`.
      step: int32 scalar, the step after which they shall be current.
      rates: those of all steps.
      adam: β₁, β₂, ε and λ. Rows must not be clipped: r is at least 2λ (see `absent_rows`), or
        there is no clip.

    Returns:
      Rows and moments after `step`, n×d.
    """
    # d×n: what is of a row goes beside its elements in their order.
    w, m, v = (tf.transpose(x) for x in (rows, m, v))
    last = tf.cast(last, tf.int32)
    gap = tf.cast(step, tf.int32) - last
    zero, few = tf.constant(0), tf.constant(_singles(adam))
    state = _one_by_one((w, m, v), (zero, few), last, gap, rates, adam)
    # Twice as many where a swing about zero still matters.
    most = tf.where(_swing(state, w, last, gap, rates, adam), 2 * few, few)
    state = _one_by_one(state, (few, most), last, gap, rates, adam)
    state = tf.cond(
        tf.reduce_any(gap > most),
        lambda: _in_panels(state, most, last, gap, rates, adam),
        lambda: state,
    )
    return Moved(*(tf.transpose(x) for x in state))


@tf.function(autograph=False, reduce_retracing=True)
def catch_up_calm(
    rows: tf.Tensor,
    m: tf.Tensor,
    v: tf.Tensor,
    last: tf.Tensor,
    step: tf.Tensor,
    rates: Rates,
    adam: Adam,
) -> Moved:
    """As `catch_up`, for rows that are calm (`are_calm`): in panels from the first step on.

    What w and m hold of the faster mode goes by a closed form, as if s stayed what it is at the
    mean of the steps in which it goes.
    """
    w, m, v = (tf.transpose(x) for x in (rows, m, v))
    last = tf.cast(last, tf.int32)
    gap = tf.cast(step, tf.int32) - last
    number = tf.cast(gap, w.dtype)
    modes = modes_of(w, m, *_as_it_goes(w, v, 0.0, last, rates, adam), adam)
    older = tf.minimum(last, _CALM)
    slow, m_slow, new_v = follow(modes.slow, v, tf.zeros_like(gap), older, last, gap, rates, adam)
    # What is not gone yet goes later, when s is another.
    left = modes.fast_m * tf.exp(tf.math.log(modes.root) * number)
    v, rate = _as_it_goes(w, v, number, last, rates, adam)
    w = slow + left * modes.root / (1.0 - modes.root) * step_of_m(v, rate, adam)
    return Moved(*(tf.transpose(x) for x in (w, m_slow + left, new_v)))


def _as_it_goes(
    w: tf.Tensor,
    v: tf.Tensor,
    age: tf.Tensor | float,
    last: tf.Tensor,
    rates: Rates,
    adam: Adam,
) -> tuple[tf.Tensor, tf.Tensor]:
    """The v and rate at the mean of the steps in which the faster mode goes, after some age."""
    age = tf.cast(age, w.dtype) + 1.0 / (1.0 - adam.beta_1)
    step = last + tf.cast(tf.round(age), tf.int32)  # β₁ in float32 is a little less than 0.9
    rate = tf.cast(rates.up_to(step) - rates.up_to(step - 1), w.dtype)
    # Half a step before: `step_of_m` adds it.
    return later(w, v, tf.zeros_like(w), age - 0.5, adam), rate


def are_calm(
    rows: tf.Tensor,
    m: tf.Tensor,
    v: tf.Tensor,
    last: tf.Tensor,
    rate: tf.Tensor,
    adam: Adam,
) -> tf.Tensor:
    """Which rows change so slowly from the first missed step on that `catch_up_calm` serves them.

    Their v does not begin to follow 2λw soon, which would change √v by much in a few steps; w loses
    little a step; and what is left in m does not move it by much.

    Args:
      rows: n×d, after the step `last`.
      m: n×d, first moments.
      v: n×d, second moments.
      last: n: the steps after which the rows are current.
      rate: η, the most that it was in the steps they missed.
      adam: β₁, β₂, ε and λ.

    Returns:
      n, bool.
    """
    moved = rate / (1.0 - adam.beta_1)
    own = (2.0 * _CALM_OWN * adam.l2) ** 2 * tf.square(tf.abs(rows) + 3.0 * moved)
    slow = tf.square(tf.maximum(2.0 * adam.l2 * rate / _CALM_LOSS - adam.epsilon, 0.0))
    calm = v >= tf.maximum(own, slow)
    size = tf.maximum(tf.square(rows), _SMALL**2)
    calm = tf.logical_and(calm, tf.square(moved * m) <= _CALM_MOVED**2 * v * size)
    return tf.logical_and(tf.reduce_all(calm, axis=1), last >= _CALM_AGE)


def _singles(adam: Adam) -> int:
    """Steps that are made one by one where rows are not calm."""
    return math.ceil(math.log(_FORGOTTEN) / (0.5 * math.log(adam.beta_1)))


_State = tuple[tf.Tensor, tf.Tensor, tf.Tensor]


def _one_by_one(
    state: _State,
    steps: tuple[tf.Tensor, tf.Tensor],
    last: tf.Tensor,
    gap: tf.Tensor,
    rates: Rates,
    adam: Adam,
) -> _State:
    """Some of the first steps of each row's gap, from one number to another, as `absent_step`."""
    begin, end = steps
    dtype = state[0].dtype
    most = tf.minimum(tf.reduce_max(gap), end)

    def body(
        done: tf.Tensor, so_far: tf.Tensor, w: tf.Tensor, m: tf.Tensor, v: tf.Tensor
    ) -> tuple[tf.Tensor, ...]:
        on = done < gap
        now = rates.up_to(last + tf.minimum(done + 1, gap))
        rate = tf.cast(now - so_far, dtype)
        g = 2.0 * adam.l2 * w
        m_new = m + (g - m) * (1.0 - adam.beta_1)
        v_new = v + (tf.square(g) - v) * (1.0 - adam.beta_2)
        w_new = w - m_new * rate / (tf.sqrt(v_new) + adam.epsilon)
        return (
            done + 1,
            now,
            tf.where(on, w_new, w),
            tf.where(on, m_new, m),
            tf.where(on, v_new, v),
        )

    so_far = rates.up_to(last + tf.minimum(begin, gap))
    found = tf.while_loop(lambda done, *_: done < most, body, (begin, so_far, *state))
    return found[2], found[3], found[4]


def _swing(
    state: _State,
    first: tf.Tensor,
    last: tf.Tensor,
    gap: tf.Tensor,
    rates: Rates,
    adam: Adam,
) -> tf.Tensor:
    """Whether an element that has more steps to come swings about zero, or nearly, and matters."""
    w, _, v = state
    rate = rates.at(last + tf.minimum(gap, _singles(adam)))
    swings = strength_of(v, rate, adam) > _SWINGS * (1 - math.sqrt(adam.beta_1)) ** 2 / (
        1 - adam.beta_1
    )
    matters = tf.abs(w) > _MATTERS * tf.maximum(tf.abs(first), _SMALL)
    return tf.reduce_any(tf.logical_and(tf.logical_and(swings, matters), gap > _singles(adam)))


def _in_panels(
    state: _State,
    singles: tf.Tensor,
    last: tf.Tensor,
    gap: tf.Tensor,
    rates: Rates,
    adam: Adam,
) -> _State:
    """The rest of each row's gap, after its first steps."""
    w, m, v = state
    old = gap > singles
    age = tf.minimum(gap, singles)
    modes = modes_of(w, m, v, rates.at(last + age), adam)
    slow, m_slow, v = follow(tf.where(old, modes.slow, w), v, age, 0, last, gap, rates, adam)
    return tf.where(old, slow, w), tf.where(old, m_slow, m), v
