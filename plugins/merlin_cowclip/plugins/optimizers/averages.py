# SPDX-License-Identifier: Apache-2.0
"""Moving averages of the weights, `ema=D`: a ← D·a + (1 - D)·w after each step, from a = 0.

While a row keeps its weights, m steps make a ← w + D^m·(a - w). So an average is stored as of some
step, and the steps since then are added before the weights change, and before it is read: of lazy
tables, a step touches the averages of the batch's rows only. Read, a is divided by 1 - D^t: it is
then the average over all t steps, without the zeros at its beginning.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from merlin_cowclip.plugins._tensorflow import tf

AVERAGE, UP_TO = "average", "average_up_to"  # names of slots


def create_averages(part: Any, variables: Sequence[tf.Variable]) -> None:
    """Zeros, and the step that they are as of: of each row where a step touches some rows only."""
    for variable in variables:
        by_row = getattr(part, "update", None) == "lazy"
        part.add_slot(variable, AVERAGE)
        part.add_slot(variable, UP_TO, shape=[variable.shape[0], 1] if by_row else [])


def add_steps(optimizer: Any, part: Any, variable: tf.Variable, rows: Any = None) -> None:
    """Bring the averages of some rows (with repeats; `None` for all) up to the last step."""
    average, up_to = part.get_slot(variable, AVERAGE), part.get_slot(variable, UP_TO)
    now = tf.cast(optimizer.iterations, variable.dtype)
    if rows is None:
        kept = tf.pow(tf.cast(optimizer.ema, variable.dtype), now - up_to)
        average.assign(variable + kept * (average - variable), read_value=False)
        up_to.assign(tf.fill(tf.shape(up_to), now), read_value=False)
        return
    w, a, last = (tf.gather(one, rows) for one in (variable, average, up_to))
    kept = tf.pow(tf.cast(optimizer.ema, variable.dtype), now - last)
    write, update = part._resource_scatter_operate, tf.raw_ops.ResourceScatterUpdate
    write(average, rows, w + kept * (a - w), update)
    write(up_to, rows, tf.fill(tf.shape(last), now), update)


@contextlib.contextmanager
def averages_in_place(optimizer: Any, owned: Sequence[Any]) -> Iterator[None]:
    """Within it, variables, given with the parts that own them, have their averages."""
    steps, raw = int(optimizer.iterations), []
    for part, variable in owned if steps else ():
        assert optimizer.ema is not None
        add_steps(optimizer, part, variable)
        raw.append(tf.identity(variable))
        share = tf.cast(1.0 - optimizer.ema**steps, variable.dtype)
        variable.assign(part.get_slot(variable, AVERAGE) / share)
    try:
        yield
    finally:
        for (_, variable), before in zip(owned, raw, strict=False):
            variable.assign(before)
