"""Deferred updates: rows that a batch does not hold wait for its step until somebody reads them.

What a step does to an absent row depends on that row alone, so a row may keep the number of the
step after which it was last as the exact mode would have it, and make up for what it missed before
it is looked up, saved or shown (`catching_up.py`).
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

from merlin_cowclip.plugins._stack import tf
from merlin_cowclip.plugins.absent import Moved
from merlin_cowclip.plugins.catching_up import are_calm, catch_up, catch_up_calm
from merlin_cowclip.plugins.slow_mode import Adam, Rates
from merlin_cowclip.plugins.untouched import Curve, along, are_untouched, curve, nodes

_TILE, _TILE_ON_GPU = 512, 65_536  # rows that catch up together: as long as the latest of them
_LARGE_TILE = 16_384  # elements, of a large table
_LONG = 32  # so many steps one by one are as much work as those of a calm row at once
_LARGE = 2**21  # elements, of a table with some `Curve` of its own
_AT_ONCE = 2**21  # elements, of a whole table
_GO, _GOES = 128, 16  # steps of a curve that are made one by one, and how often


Write = Callable[[tf.Variable, tf.Tensor, tf.Tensor], Any]
"""Of a variable, row numbers n, and their new values."""

Bar = Callable[[int], AbstractContextManager[Any]]
"""Of a number of rows: what is told by `update(n)` of n more of them, as `tqdm`."""

_bar: contextvars.ContextVar[Bar | None] = contextvars.ContextVar("bar", default=None)


@contextlib.contextmanager
def shown_by(bar: Bar) -> Iterator[None]:
    """Within it, a bar of each table shows how many of its rows have caught up, if all have to.

    Of those that do so eagerly, and not within a step that is a graph.
    """
    token = _bar.set(bar)
    try:
        yield
    finally:
        _bar.reset(token)


class Table(NamedTuple):
    """A table's variable and slots, and the step after which its rows shall be current."""

    rows: tf.Variable  # V×d
    m: tf.Variable
    v: tf.Variable
    last: tf.Variable  # V×1 float32: the step after which each row was current, below 2²⁴
    step: tf.Tensor  # int32


def corrected_rates(rate: tf.Tensor, adam: Adam, dtype: tf.DType) -> Rates:
    """Rates of `catch_up` for a learning rate that stays as it is."""
    return Rates.of(_corrections(adam.beta_1, adam.beta_2) * tf.cast(rate, tf.float64), dtype)


@functools.lru_cache(maxsize=8)
def _corrections(beta_1: float, beta_2: float) -> tf.Tensor:
    """Sums of `√(1 - β₂ᵗ)/(1 - β₁ᵗ)` from step 1 on, until that is 1; float64."""
    slowest = min(max(beta_1, beta_2), 0.99999)
    t = np.arange(1, 2 + int(40 / (1 - slowest)), dtype=np.float64)
    found = np.sqrt(1 - beta_2**t) / (1 - beta_1**t)
    with tf.init_scope():  # graphs refer to it, and have no copies
        return tf.constant(np.concatenate([[0.0], np.cumsum(found)]))


@tf.autograph.experimental.do_not_convert
def bring_rows_up(
    table: Table, wanted: tf.Tensor, rate: tf.Tensor, adam: Adam, write: Write
) -> None:
    """Make some rows of a table current.

    Args:
      table: all of it.
      wanted: n unique row numbers, int64.
      rate: η of all the steps that they may have missed.
      adam: its constants.
      write: sets rows of a variable.
    """
    put = functools.partial(_put, table, write)
    _bring(table, wanted, _constants(table, rate, adam), _Kind.of(table.rows, adam), put)


def _bring(
    table: Table, wanted: tf.Tensor, constants: Sequence[tf.Tensor], kind: _Kind, put: Any
) -> None:
    """`bring_rows_up`; with a curve among the constants where the kind has one."""
    state = [tf.gather(variable, wanted) for variable in (*table[:3], table.last)]
    late, *new = _late_rows(kind)(*state, *constants)
    at = tf.gather(wanted, late)
    now = tf.fill([tf.size(at), 1], tf.cast(table.step, tf.float32))
    put(at, now, *new)


def _put(table: Table, write: Write, at: tf.Tensor, now: tf.Tensor, *new: tf.Tensor) -> None:
    """Write rows and their moments, and then that they are current.

    All of it or, where something else ends the step, nothing: once all is known.
    """
    with tf.control_dependencies([at, now, *new]):
        written = [write(variable, at, x) for variable, x in zip(table[:3], new, strict=True)]
    with tf.control_dependencies([] if tf.executing_eagerly() else written):
        write(table.last, at, now)


@tf.autograph.experimental.do_not_convert
def bring_all_up(table: Table, rate: tf.Tensor, adam: Adam, write: Write) -> None:
    """Make all rows of a table current, some at a time; as `bring_rows_up`."""
    number, width = table.rows.shape
    is_large = number * width >= _LARGE and table.rows.dtype in (tf.float32, tf.float64)
    kind = _Kind.of(table.rows, adam, is_large=is_large)
    constants = _constants(table, rate, adam)
    if kind.is_large:
        constants += _curve(constants, kind)
    many = max(_AT_ONCE // width // kind.tile, 1) * kind.tile
    put = functools.partial(_put, table, write)
    if tf.executing_eagerly():  # one call, which Ctrl-C cannot come between
        put = tf.function(put, autograph=False, reduce_retracing=True)

    bar = _bar.get() if tf.executing_eagerly() else None
    with contextlib.nullcontext() if bar is None else bar(number) as shown:

        def body(begin: tf.Tensor) -> tuple[tf.Tensor]:
            end = tf.minimum(begin + many, number)
            _bring(table, tf.range(begin, end), constants, kind, put)
            if shown is not None:
                shown.update(int(end - begin))
            return (end,)

        tf.while_loop(lambda begin: begin < number, body, (tf.constant(0, tf.int64),))


def _constants(table: Table, rate: tf.Tensor, adam: Adam) -> tuple[tf.Tensor, ...]:
    """What `_late_rows` takes of all rows: the step; η, ε and λ."""
    values = (tf.constant(x, table.rows.dtype) for x in (adam.epsilon, adam.l2))
    return table.step, rate, *values


def _curve(constants: Sequence[tf.Tensor], kind: _Kind) -> Curve:
    """What untouched rows become; their first steps one by one, in several goes."""
    end, *others = constants
    first = nodes(kind.width, kind.dtype)
    one_go = _late_rows(kind._replace(is_large=False))

    def go(step: tf.Tensor, *state: tf.Tensor) -> tuple[tf.Tensor, ...]:
        after = tf.where(step + _GO < _GOES * _GO, tf.minimum(step + _GO, end), end)
        last = tf.fill([tf.shape(first)[0], 1], tf.cast(step, tf.float32))
        late, *new = one_go(*state, last, after, *others)
        place = tf.argsort(tf.cast(late, tf.float32))  # all are late
        return after, *(tf.reshape(tf.gather(x, place), first.shape) for x in new)

    begin = (tf.zeros_like(end), first, tf.zeros_like(first), tf.zeros_like(first))
    _, *moved = tf.while_loop(lambda step, *_: step < end, go, begin)
    return curve(first, Moved(*moved))


class _Kind(NamedTuple):
    """Of tables: what one graph serves."""

    width: int
    dtype: tf.DType
    device: str
    beta_1: float
    beta_2: float
    is_large: bool  # with a `Curve`

    @classmethod
    def of(cls, rows: tf.Variable, adam: Adam, *, is_large: bool = False) -> _Kind:
        device = rows.device or ""
        return cls(rows.shape[1], rows.dtype, device, adam.beta_1, adam.beta_2, is_large)

    @property
    def tile(self) -> int:
        if "GPU" in self.device:
            return _TILE_ON_GPU
        return max(_TILE, _LARGE_TILE // self.width) if self.is_large else _TILE

    @property
    def signature(self) -> list[tf.TensorSpec]:
        """Of rows and moments, n×d; `last`, n×1; the step; η, ε and λ; a curve."""
        state = [tf.TensorSpec([None, self.width], self.dtype)] * 3
        constants = [tf.TensorSpec([], dtype) for dtype in (tf.float32, self.dtype, self.dtype)]
        last, step = tf.TensorSpec([None, 1], tf.float32), tf.TensorSpec([], tf.int32)
        curve = [tf.TensorSpec([None], self.dtype)] * (3 if self.is_large else 0)
        return [*state, last, step, *constants, *curve]


@functools.lru_cache(maxsize=64)
def _late_rows(kind: _Kind) -> Callable[..., Any]:
    """A function that all graphs share, since to trace it takes seconds.

    Of some rows, it finds the places of those that are late, and what rows and moments shall be.
    """

    def work(
        rows: tf.Tensor,
        m: tf.Tensor,
        v: tf.Tensor,
        last: tf.Tensor,
        step: tf.Tensor,
        rate: tf.Tensor,
        epsilon: tf.Tensor,
        l2: tf.Tensor,
        *curve: tf.Tensor,
    ) -> tuple[tf.Tensor, ...]:
        adam = Adam(kind.beta_1, kind.beta_2, epsilon, l2)
        with tf.device(kind.device):
            groups = _alike((rows, m, v, last), step, rate, adam, kind.is_large)
            tiles = _Tiles.of(groups, kind.tile)
            cut = [tf.gather(x, tiles.places) for x in (rows, m, v, last[:, 0])]
            # What fills a group up missed nothing.
            cut[3] = tf.where(tiles.filled, tf.cast(step, tf.float32), cut[3])
            rates = corrected_rates(rate, adam, kind.dtype)
            ways = [_compiled(way, kind.beta_1, kind.beta_2) for way in (catch_up_calm, catch_up)]

            def bring(tile: Sequence[tf.Tensor]) -> tuple[tf.Tensor, ...]:
                *state, group = tile
                given = (*state, step, rates, epsilon, l2)
                branches: list[Callable[[], Any]] = [functools.partial(way, *given) for way in ways]
                if kind.is_large:
                    branches.append(lambda: _along(state[0], Curve(*curve)))
                return tf.switch_case(group, branches)

            kinds = Moved(*(kind.dtype,) * 3)
            jobs = os.cpu_count() or 1
            # The longest first, so that no core waits for it at the end.
            given = tuple(tf.reverse(x, [0]) for x in (*cut, tiles.group))
            found = tf.map_fn(bring, given, fn_output_signature=kinds, parallel_iterations=jobs)
            new = (tf.reshape(tf.reverse(x, [0]), [-1, kind.width]) for x in found)
            return tf.concat(groups, axis=0), *(tf.gather(x, tiles.kept) for x in new)

    return tf.function(work, input_signature=kind.signature, autograph=False)


def _alike(
    state: Sequence[tf.Tensor], step: tf.Tensor, rate: tf.Tensor, adam: Adam, is_large: bool
) -> list[tf.Tensor]:
    """Places of late rows, each group from the least late to the latest.

    Those that are calm, those that are not, and of a large table those that are untouched.
    """
    rows, m, v, last = state
    late = (tf.cast(step, tf.float32) - last)[:, 0]  # floats: integers of 32 bits are the host's
    calm = are_calm(rows, m, v, last[:, 0], tf.cast(rate, rows.dtype), adam)
    calm = tf.logical_and(calm, late > _LONG)
    kind = tf.where(calm, 1.0, 2.0)
    if is_large:
        kind = tf.where(are_untouched(rows, m, v, last[:, 0]), 3.0, kind)
    kind = tf.cast(tf.where(late > 0, kind, 0.0), tf.int32)
    places = tf.range(tf.size(late, tf.int64))
    groups = tf.dynamic_partition(places, kind, 4 if is_large else 3)[1:]
    in_order = [tf.gather(group, tf.argsort(tf.gather(late, group))) for group in groups[:2]]
    return in_order + groups[2:]


class _Tiles(NamedTuple):
    """Groups of rows, each cut into tiles and filled up."""

    places: tf.Tensor  # tiles×size, of rows
    filled: tf.Tensor  # tiles×size: whether it is no row of a group
    group: tf.Tensor  # tiles, int32: the group's number
    kept: tf.Tensor  # where the groups' rows are, one after another, among all tiles' rows

    @classmethod
    def of(cls, groups: Sequence[tf.Tensor], size: int) -> _Tiles:
        numbers = [tf.size(group, tf.int64) for group in groups]
        tiles = [-(-number // size) for number in numbers]
        padded, kept, begin = [], [], tf.constant(0, tf.int64)
        for group, number, many in zip(groups, numbers, tiles, strict=True):
            padded += [group, tf.fill([many * size - number], tf.constant(-1, tf.int64))]
            kept.append(begin + tf.range(number))
            begin += many * size
        places = tf.reshape(tf.concat(padded, axis=0), [-1, size])
        group = tf.repeat(tf.range(len(groups)), tf.stack(tiles))
        return cls(tf.maximum(places, 0), places < 0, group, tf.concat(kept, axis=0))


@functools.lru_cache(maxsize=64)
def _compiled(way: Any, beta_1: float, beta_2: float) -> Callable[..., Any]:
    """`catch_up` or `catch_up_calm` of a tile, as a few kernels: op by op it takes five times."""

    def work(*given: tf.Tensor) -> Moved:
        *tile, epsilon, l2 = given
        return way.python_function(*tile, Adam(beta_1, beta_2, epsilon, l2))

    return tf.function(work, autograph=False, jit_compile=True)


# As a few kernels, too.
_along = tf.function(along, autograph=False, jit_compile=True, reduce_retracing=True)
