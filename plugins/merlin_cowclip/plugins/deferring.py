"""Deferred updates: rows that a batch does not hold wait for its step until somebody reads them.

What a step does to an absent row depends on that row alone, so a row may keep the number of the
step after which it was last as the exact mode would have it, and make up for what it missed before
it is looked up, saved or shown (`catching_up.py`).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from merlin_cowclip.plugins._stack import tf
from merlin_cowclip.plugins.catching_up import catch_up

_TILE, _TILE_ON_GPU = 4096, 65_536  # rows that catch up together: as long as the latest of them
_LATE = (0, 8, 32, 128)  # rows are sorted by how many steps they missed: more than so many
_AT_ONCE = 64  # tiles, of a whole table


Write = Callable[[tf.Variable, tf.Tensor, tf.Tensor], Any]
"""Of a variable, row numbers n, and their new values."""


class Table(NamedTuple):
    """A table's variable and slots, and the step after which its rows shall be current."""

    rows: tf.Variable  # V×d
    m: tf.Variable
    v: tf.Variable
    last: tf.Variable  # V×1 float32: the step after which each row was current, below 2²⁴
    step: tf.Tensor  # int32


class Adam(NamedTuple):
    """What Adam does to an absent row."""

    beta_1: float
    beta_2: float
    epsilon: float
    l2: float


def corrected_rates(rate: tf.Tensor, adam: Adam) -> tf.Tensor:
    """The table `rates` of `catch_up` for a learning rate that stays as it is, float64."""
    return _corrections(adam.beta_1, adam.beta_2) * tf.cast(rate, tf.float64)


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
      wanted: n unique row numbers.
      rate: η of all the steps that they may have missed.
      adam: its constants.
      write: sets rows of a variable.
    """
    # In floats: integers of 32 bits would be the host's.
    late = tf.cast(table.step, tf.float32) - tf.gather(table.last, wanted)
    more = tf.cast(late > tf.constant(_LATE, tf.float32), tf.float32)
    kind = tf.cast(tf.reduce_sum(more, axis=1), tf.int32)
    groups = tf.dynamic_partition(wanted, kind, len(_LATE) + 1)[1:]
    rates = corrected_rates(rate, adam)
    moved = [_moved(table, group, rates, adam) for group in groups]
    at = tf.concat(groups, axis=0)
    for variable, new in zip(table[:3], zip(*moved, strict=True), strict=True):
        write(variable, at, tf.concat(new, axis=0))
    now = tf.cast(table.step, tf.float32)
    write(table.last, at, tf.fill([tf.size(at), 1], now))


@tf.autograph.experimental.do_not_convert
def bring_all_up(table: Table, rate: tf.Tensor, adam: Adam, write: Write) -> None:
    """Make all rows of a table current, some at a time; as `bring_rows_up`."""
    number = table.rows.shape[0]
    many = _AT_ONCE * _tile(table.rows)
    rates = corrected_rates(rate, adam)

    def body(begin: tf.Tensor) -> tuple[tf.Tensor]:
        at = tf.range(begin, tf.minimum(begin + many, number))
        for variable, new in zip(table[:3], _moved(table, at, rates, adam), strict=True):
            write(variable, at, new)
        now = tf.cast(table.step, tf.float32)
        write(table.last, at, tf.fill([tf.size(at), 1], now))
        return (begin + many,)

    tf.while_loop(lambda begin: begin < number, body, (tf.constant(0, tf.int64),))


def _moved(table: Table, at: tf.Tensor, rates: tf.Tensor, adam: Adam) -> tuple[tf.Tensor, ...]:
    """Rows and moments as they shall be, n×d each."""
    size, width = _tile(table.rows), table.rows.shape[1]
    state = [tf.gather(variable, at) for variable in (*table[:3], table.last)]
    number = tf.size(at)
    tiles = -(-number // size)
    more = tiles * size - number  # rows of no table, that missed nothing
    *padded, last = (tf.pad(x, [[0, more], [0, 0]]) for x in state)
    none = tf.pad(tf.zeros([number, 1], tf.bool), [[0, more], [0, 0]], constant_values=True)
    last = tf.where(none, tf.cast(table.step, last.dtype), last)
    cut = (
        *(tf.reshape(x, [tiles, size, width]) for x in padded),
        tf.reshape(last, [tiles, size]),
    )

    def bring(tile: Sequence[tf.Tensor]) -> tuple[tf.Tensor, ...]:
        return tuple(_compiled(adam)(*tile, table.step, rates))

    if tf.executing_eagerly():
        each = [bring([x[i] for x in cut]) for i in range(int(tiles))]
        found = [tf.concat(x, axis=0) for x in zip(*each, strict=True)] or state[:3]
    else:
        kinds = (table.rows.dtype,) * 3
        jobs = os.cpu_count() or 1
        found = tf.map_fn(bring, cut, fn_output_signature=kinds, parallel_iterations=jobs)
    return tuple(tf.reshape(x, [-1, width])[:number] for x in found)


def _tile(variable: tf.Variable) -> int:
    return _TILE_ON_GPU if "GPU" in (variable.device or "") else _TILE


@functools.lru_cache(maxsize=64)
def _compiled(adam: Adam) -> Callable[..., Any]:
    """`catch_up` of a tile, as a few kernels: op by op it takes five times as long."""
    work = functools.partial(catch_up.python_function, **adam._asdict())
    return tf.function(work, autograph=False, jit_compile=True)
