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

_HEADER = ("variable", "rows", "width", "initial σ", "rule", "learning rate", "L2")


class Owned(NamedTuple):
    """One line of `CowClipOptimizer.summary`."""

    variable: tf.Variable
    optimizer: Any
    rule: str
    l2: float


def owned_by(optimizer: Any, model: Any) -> list[Owned]:
    """Every trainable variable of a built model with its one optimizer, in model order."""
    if model is None or not model.built:
        raise ValueError(
            "The model must be built before its variables can be listed. Call it on a batch."
        )
    lines, owner = [], optimizer.owner()
    for variable in model.trainable_variables:
        part, rule, l2 = owner.get(variable.ref()), "Adam", 0.0
        if part is not None:
            clipped, l2 = part.clipped_ranges_of(variable), part.l2
            rule = f"clip {part.clip}" if any(clipped) else "no clip"
            if any(clipped) and not all(clipped):
                rule += f" ({sum(clipped)} of {len(clipped)} fields)"
            rule += f", {part.update}" + ("" if optimizer.base == "adam" else f", {optimizer.base}")
        lines.append(Owned(variable, part or optimizer.default_optimizer, rule, l2))
    return lines


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
    return format_table(_HEADER, rows)


def _show_rate(rate: Any, factor: float) -> str:
    if isinstance(rate, LinearWarmup):
        return f"{_show_rate(rate.learning_rate, factor)}, warm-up"
    if not callable(rate):
        return f"{float(rate) * factor:.6g}"
    return type(rate).__name__ + ("" if factor == 1 else f" x {factor:.6g}")
