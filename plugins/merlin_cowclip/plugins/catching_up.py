"""Rows that were absent for many steps, brought to where the exact mode would have them, at once.

Without a clip that reaches them, elements of absent rows do not know of each other. With
`M = m / 2λ`, an element of a table obeys `M' = β₁M + (1 - β₁)w`, `w' = w - s·M'`: linear, and slow
in all but `s = 2λη/(√v + ε)`, which follows v. The first steps are made one by one, the rest in
panels of up to thousands.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from merlin_cowclip.plugins._stack import tf
from merlin_cowclip.plugins.absent import Moved

# Gauss's three nodes and weights on [0, 1].
_NODES = (0.5 - math.sqrt(0.15), 0.5, 0.5 + math.sqrt(0.15))
_WEIGHTS = (5 / 18, 8 / 18, 5 / 18)
_GROWTH = 0.6  # of a panel, by the age where it begins
_LONGEST = 2.5  # of a panel, by the time in which v decays to 1/e
_FORGOTTEN = 1e-3  # of a swing about zero when panels begin
_SWINGS = 0.3  # of the s from which on w swings
# Of a calm row: by how much its panels are older, how old it is, what ln |w| loses a step at most,
# how many times 2λw its √v is, and by how many times w what is left in m may move it.
_CALM, _CALM_AGE, _CALM_LOSS, _CALM_OWN, _CALM_MOVED = 1000, 300, 1e-3, 2.0, 8.0
_MATTERS, _SMALL = 1e-4, 1e-3  # a part of what w was, or of this


class _Settings(NamedTuple):
    beta_1: float
    beta_2: float
    epsilon: float | tf.Tensor
    l2: float | tf.Tensor

    @property
    def decay(self) -> float:
        """Of ln v, a step."""
        return -math.log(self.beta_2)

    @property
    def singles(self) -> int:
        """Steps that are made one by one."""
        return math.ceil(math.log(_FORGOTTEN) / (0.5 * math.log(self.beta_1)))


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


def check_stable(
    *, learning_rate: float | tf.Tensor, l2: float, beta_1: float, epsilon: float
) -> None:
    """Refuse values with which Adam throws an absent row about for ever.

    Where `2λη > 2ε(1 + β₁)/(1 - β₁)`, a row near zero whose v has decayed overshoots by more at
    every step, until its own gradient has made v grow: no other way than step by step leads to
    where it will be.

    Raises:
      ValueError: such values.
      tf.errors.InvalidArgumentError: such a rate, where it is a tensor.
    """
    most = epsilon * (1 + beta_1) / (1 - beta_1)
    rule = (
        "Rows can catch up with steps that they missed where learning_rate * l2 is at most epsilon "
        f"* (1 + beta_1) / (1 - beta_1), {most:.3g}: beyond, Adam throws them about zero. Received:"
    )
    remedy = "Use update='exact', or a smaller l2"
    if tf.is_tensor(learning_rate):
        data = [rule, learning_rate, f"* {l2:g}. {remedy}, or learning rate"]
        tf.raw_ops.Assert(condition=learning_rate * l2 <= most, data=data)
    elif learning_rate * l2 > most:
        product = f"{learning_rate:g} * {l2:g} = {learning_rate * l2:.3g}"
        raise ValueError(f"{rule} {product}. {remedy}")


@tf.function(autograph=False, reduce_retracing=True)
def catch_up(
    rows: tf.Tensor,
    m: tf.Tensor,
    v: tf.Tensor,
    last: tf.Tensor,
    step: tf.Tensor,
    rates: Rates,
    *,
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float | tf.Tensor = 1e-7,
    l2: float | tf.Tensor,
) -> Moved:
    """Rows and moments as `absent_step`, made `step - last` times, would leave them.

    Args:
      rows: n×d, after the step `last`.
      m: n×d, first moments.
      v: n×d, second moments.
      last: n, int32: the steps after which the rows are current, from 0 to `step`.
      step: int32 scalar, the step after which they shall be current.
      rates: those of all steps.
      beta_1: decay of the first moment.
      beta_2: decay of the second moment.
      epsilon: ε.
      l2: λ. Rows must not be clipped: r is at least 2λ (see `absent_rows`), or there is no clip.

    Returns:
      Rows and moments after `step`, n×d.
    """
    given = _Settings(beta_1, beta_2, epsilon, l2)
    # d×n: what is of a row goes beside its elements in their order.
    w, m, v = (tf.transpose(x) for x in (rows, m, v))
    last = tf.cast(last, tf.int32)
    gap = tf.cast(step, tf.int32) - last
    zero, few = tf.constant(0), tf.constant(given.singles)
    state = _one_by_one((w, m, v), (zero, few), last, gap, rates, given)
    # Twice as many where a swing about zero still matters.
    most = tf.where(_swing(state, w, last, gap, rates, given), 2 * few, few)
    state = _one_by_one(state, (few, most), last, gap, rates, given)
    state = tf.cond(
        tf.reduce_any(gap > most),
        lambda: _in_panels(state, most, last, gap, rates, given),
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
    *,
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float | tf.Tensor = 1e-7,
    l2: float | tf.Tensor,
) -> Moved:
    """As `catch_up`, for rows that are calm (`are_calm`): in panels from the first step on.

    What w and m hold of the faster mode is gone by a closed form: s stays what it will be when half
    of it is gone.
    """
    given = _Settings(beta_1, beta_2, epsilon, l2)
    w, m, v = (tf.transpose(x) for x in (rows, m, v))
    last = tf.cast(last, tf.int32)
    gap = tf.cast(step, tf.int32) - last
    number = tf.cast(gap, w.dtype)
    modes = _modes(w, m, *_when_half_is_gone(w, v, 0.0, last, rates, given), given)
    older = tf.minimum(last, _CALM)
    slow, m_slow, new_v = _slowly(modes.slow, v, tf.zeros_like(gap), older, last, gap, rates, given)
    # What is not gone yet goes later, when s is another.
    left = modes.fast_m * tf.pow(modes.root, number)
    v, rate = _when_half_is_gone(w, v, number, last, rates, given)
    w = slow + left * modes.root / (1.0 - modes.root) * _step_of_m(v, rate, given)
    return Moved(*(tf.transpose(x) for x in (w, m_slow + left, new_v)))


def _when_half_is_gone(
    w: tf.Tensor,
    v: tf.Tensor,
    age: tf.Tensor | float,
    last: tf.Tensor,
    rates: Rates,
    given: _Settings,
) -> tuple[tf.Tensor, tf.Tensor]:
    """The v and rate at the mean of the steps in which the faster mode of that age goes."""
    age += 1.0 / (1.0 - given.beta_1)
    step = last + tf.cast(age, tf.int32)
    rate = tf.cast(rates.up_to(step) - rates.up_to(step - 1), w.dtype)
    # Half a step before: `_step_of_m` adds it.
    return _later(w, v, tf.zeros_like(w), age - 0.5, given), rate


def are_calm(
    rows: tf.Tensor,
    m: tf.Tensor,
    v: tf.Tensor,
    last: tf.Tensor,
    rate: tf.Tensor,
    *,
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float = 1e-7,
    l2: float,
) -> tf.Tensor:
    """Which rows change so slowly from the first missed step on that `catch_up_calm` serves them.

    Their v does not begin to follow 2λw soon, which would change √v by much in a few steps; w loses
    little a step; and what is left in m does not move it by much.

    Args:
      rows: n×d, as all of it as in `catch_up`.
      m: n×d.
      v: n×d.
      last: n.
      rate: η, the most that it was in the steps they missed.
      beta_1: decay of the first moment.
      beta_2: decay of the second moment.
      epsilon: ε.
      l2: λ.

    Returns:
      n, bool.
    """
    memory = 1.0 / (1.0 - beta_1)
    moved = memory * rate
    own = (2.0 * _CALM_OWN * l2) ** 2 * tf.square(tf.abs(rows) + 3.0 * moved)
    slow = tf.square(tf.maximum(2.0 * l2 * rate / _CALM_LOSS - epsilon, 0.0))
    calm = v >= tf.maximum(own, slow)
    size = tf.maximum(tf.square(rows), _SMALL**2)
    calm = tf.logical_and(calm, tf.square(moved * m) <= _CALM_MOVED**2 * v * size)
    return tf.logical_and(tf.reduce_all(calm, axis=1), last >= _CALM_AGE)


_State = tuple[tf.Tensor, tf.Tensor, tf.Tensor]


def _one_by_one(
    state: _State,
    steps: tuple[tf.Tensor, tf.Tensor],
    last: tf.Tensor,
    gap: tf.Tensor,
    rates: Rates,
    given: _Settings,
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
        g = 2.0 * given.l2 * w
        m_new = m + (g - m) * (1.0 - given.beta_1)
        v_new = v + (tf.square(g) - v) * (1.0 - given.beta_2)
        w_new = w - m_new * rate / (tf.sqrt(v_new) + given.epsilon)
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
    given: _Settings,
) -> tf.Tensor:
    """Whether an element that has more steps to come swings about zero, or nearly, and matters."""
    w, _, v = state
    rate = rates.at(last + tf.minimum(gap, given.singles))
    swings = _strength(v, rate, given) > _SWINGS * (1 - math.sqrt(given.beta_1)) ** 2 / (
        1 - given.beta_1
    )
    matters = tf.abs(w) > _MATTERS * tf.maximum(tf.abs(first), _SMALL)
    return tf.reduce_any(tf.logical_and(tf.logical_and(swings, matters), gap > given.singles))


def _in_panels(
    state: _State,
    singles: tf.Tensor,
    last: tf.Tensor,
    gap: tf.Tensor,
    rates: Rates,
    given: _Settings,
) -> _State:
    """The rest of each row's gap, after its first steps."""
    w, m, v = state
    old = gap > singles
    age = tf.minimum(gap, singles)
    modes = _modes(w, m, v, rates.at(last + age), given)
    slow, m_slow, v = _slowly(tf.where(old, modes.slow, w), v, age, 0, last, gap, rates, given)
    return tf.where(old, slow, w), tf.where(old, m_slow, m), v


def _slowly(
    slow: tf.Tensor,
    v: tf.Tensor,
    age: tf.Tensor,
    older: tf.Tensor | int,
    last: tf.Tensor,
    gap: tf.Tensor,
    rates: Rates,
    given: _Settings,
) -> _State:
    """What a slow mode and v are at the end of each row's gap; panels grow as if it were older."""
    strength = _strength(v, rates.at(last + age), given)
    slow *= tf.exp(-_lag(_loss(strength, given), given))

    def body(
        age: tf.Tensor, so_far: tf.Tensor, w: tf.Tensor, v: tf.Tensor
    ) -> tuple[tf.Tensor, ...]:
        length = tf.minimum(gap - age, _longest(w, v, age + older, given))
        now = rates.up_to(last + age + length)
        w, v = _panel(w, v, last + age, length, rates, tf.cast(now - so_far, w.dtype), given)
        return age + length, now, w, v

    begin = (age, rates.up_to(last + age), slow, v)
    *_, slow, v = tf.while_loop(lambda age, *_: tf.reduce_any(age < gap), body, begin)
    strength = _strength(v, rates.at(last + gap), given)
    loss = _loss(strength, given)
    slow *= tf.exp(_lag(loss, given))
    swings = loss >= _fastest(given)
    m_slow = tf.where(swings, tf.zeros_like(slow), 2.0 * given.l2 * slow * _behind(loss, given))
    return slow, m_slow, v


def _longest(w: tf.Tensor, v: tf.Tensor, age: tf.Tensor, given: _Settings) -> tf.Tensor:
    """How many steps a panel of each row may have, n int32: until s may have changed by much.

    Not at all where √v has decayed far below ε, and it is no matter where w has run to zero.
    """
    root = tf.sqrt(v)
    steps = _LONGEST / given.decay * (root + given.epsilon) / tf.maximum(root, 1e-30)
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
    given: _Settings,
) -> tuple[tf.Tensor, tf.Tensor]:
    """`length` steps at once after the step `start`, n each, whose rates are `together`: w and v.

    v is solved as if w shrank at one rate, w as if v did not know of it; Gauss's rule between.
    """
    whole = tf.cast(length, w.dtype)
    loss = _loss(_strength(v, rates.at(start), given), given)
    at = [rates.at(start + tf.cast(node * whole, tf.int32)) for node in _NODES]
    # Together as much as all steps' rates, also where these jump.
    guess = sum(weight * rate for weight, rate in zip(_WEIGHTS, at, strict=True))
    ratio = tf.math.divide_no_nan(together, guess * whole)
    total = tf.zeros_like(w)
    for node, weight, rate in zip(_NODES, _WEIGHTS, at, strict=True):
        later = _later(w, v, loss, node * whole, given)
        total += weight * _loss(_strength(later, rate * ratio, given), given)
    return w * tf.exp(-total * whole), _later(w, v, total, whole, given)


def _later(
    w: tf.Tensor, v: tf.Tensor, loss: tf.Tensor, time: tf.Tensor, given: _Settings
) -> tf.Tensor:
    """Second moments after a time in which w shrinks by `loss` a step."""
    decay = given.decay
    kept, apart = tf.exp(-decay * time), decay - 2.0 * loss
    x = apart * time
    close = tf.abs(x) < 0.02
    far = (tf.exp(-2.0 * loss * time) - kept) / tf.where(close, tf.ones_like(x), apart)
    near = kept * time * (1.0 + x * (0.5 + x / 6.0))
    return kept * v + decay * tf.square(2.0 * given.l2 * w) * tf.where(close, near, far)


def _strength(v: tf.Tensor, rate: tf.Tensor, given: _Settings) -> tf.Tensor:
    """s: what a step takes off w by the share of M in it."""
    return 2.0 * given.l2 * _step_of_m(v, rate, given)


def _step_of_m(v: tf.Tensor, rate: tf.Tensor, given: _Settings) -> tf.Tensor:
    """What a step takes off w by the share of m in it. Adam's v is the one after the step."""
    later = math.sqrt(math.sqrt(given.beta_2))
    return rate / (tf.sqrt(v) * later + given.epsilon)


def _fastest(given: _Settings) -> float:
    """What ln |w| loses a step where it swings about zero."""
    return -0.5 * math.log(given.beta_1)


def _loss(s: tf.Tensor, given: _Settings) -> tf.Tensor:
    """What ln |w| loses a step: by the larger root x of `x² - x(1 + β₁ - s(1 - β₁)) + β₁`."""
    a = 1.0 + s
    under = tf.square(a) - 4.0 * s / (1.0 - given.beta_1)
    swings = tf.logical_or(under <= 0.0, s >= 1.0)
    y = 2.0 * s / (a + tf.sqrt(tf.maximum(under, 0.0)))  # 1 - x, without a difference
    loss = y * (1.0 + y * (0.5 + y * (1 / 3 + y * (0.25 + y * 0.2))))  # -ln(1 - y)
    return tf.where(swings, tf.constant(_fastest(given), s.dtype), loss)


def _lag(loss: tf.Tensor, given: _Settings) -> tf.Tensor:
    """What ln |w| has gained as m follows w late while the loss grew to this from zero."""
    fastest = _fastest(given)
    loss = tf.minimum(loss, 0.57 * fastest)
    beta = given.beta_1
    return 0.25 * beta * (1 + beta) / (1 - beta) ** 2 * tf.square(loss) / (1.0 - loss / fastest)


def _behind(loss: tf.Tensor, given: _Settings) -> tf.Tensor:
    """M over w of the slower mode."""
    return (1.0 - given.beta_1) / (tf.exp(-loss) - given.beta_1)


class _Modes(NamedTuple):
    """What w is made of: a part that m follows, and one that is gone when m has forgotten."""

    slow: tf.Tensor
    fast_m: tf.Tensor  # what is gone of m
    per_m: tf.Tensor  # of w that goes with it
    root: tf.Tensor  # by which both are multiplied at a step


def _modes(w: tf.Tensor, m: tf.Tensor, v: tf.Tensor, rate: tf.Tensor, given: _Settings) -> _Modes:
    """The modes of w and m, if s stays what it is with this v and rate."""
    s = _strength(v, rate, given)
    step = _step_of_m(v, rate, given)
    loss = _loss(s, given)
    root = given.beta_1 * tf.exp(loss)
    per_m = root * step / (1.0 - root)
    follows = 2.0 * given.l2 * _behind(loss, given)
    apart = 1.0 - follows * per_m
    is_apart = apart > 0.02
    fast_m = tf.where(is_apart, (m - follows * w) / tf.where(is_apart, apart, 1.0), 0.0)
    return _Modes(w - per_m * fast_m, fast_m, per_m, root)
