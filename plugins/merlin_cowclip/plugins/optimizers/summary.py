# SPDX-License-Identifier: Apache-2.0
"""`CowClipOptimizer.summary`: a table of all trainable variables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.plugins._text import format_table
from merlin_cowclip.plugins.embeddings.initializers import initial_values
from merlin_cowclip.plugins.embeddings.tables import TableSpec, distinct_names
from merlin_cowclip.plugins.schedules import LinearWarmup

_COLUMNS = 100  # of the table
_HEADER = ("variable", "rows", "width", "initial σ", "rule", "learning rate", "L2")


class Owned(NamedTuple):
    """One line of `CowClipOptimizer.summary`."""

    variable: tf.Variable
    optimizer: Any
    rule: str
    l2: float


def summary_of(owned: Iterable[Owned], tables: Sequence[TableSpec], factor: float) -> str:
    """Rows, width, σ of tables, rule, learning rate (times `factor`) and L2 of each variable."""
    names = distinct_names(tables)
    specs = {s.variable.ref(): (name, s) for s, name in names.items() if s.layer.built}
    rows = []
    for variable, part, rule, l2 in owned:
        shape = tuple(variable.shape) or (1,)
        name, spec = specs.get(variable.ref(), (variable.name, None))
        number = shape[0] if spec is None else spec.num_rows
        sizes = f"{number:,}", f"{math.prod(shape[1:]):,}"
        values = None if spec is None else initial_values(spec)
        sigma = "-" if values is None else f"{values[1]:.3g}"
        rate = _show_rate(part.learning_rate.rate, factor)
        rows.append((name, *sizes, sigma, rule, rate, f"{l2:.6g}" if l2 else "-"))
    columns = list(zip(_HEADER, *rows, strict=True))[1:]
    room = max(_COLUMNS - sum(2 + max(map(len, one)) for one in columns), len(_HEADER[0]))
    short = [(n if len(n) <= room else f"…{n[1 - room :]}", *rest) for n, *rest in rows]
    return format_table(_HEADER, short)


def _show_rate(rate: Any, factor: float) -> str:
    if isinstance(rate, LinearWarmup):
        return f"{_show_rate(rate.learning_rate, factor)}, warm-up"
    if not callable(rate):
        return f"{float(rate) * factor:.6g}"
    return type(rate).__name__ + ("" if factor == 1 else f" x {factor:.6g}")
