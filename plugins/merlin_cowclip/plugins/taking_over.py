"""Which of several optimizers trains a table: that which was made for it, or began a fit, last.

A table's lookups know one of them: by it they read the table whole or row by row, and its rows that
wait catch up before they are read. Another one's step would take rows for current that are not.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Iterable
from typing import Any

from merlin_cowclip.plugins._stack import tf
from merlin_cowclip.plugins.tables import TableSpec

TAKEN = (
    "update='deferred' trains tables that are looked up for it, and no other optimizer meanwhile. "
    "Received: a step on tables that another optimizer was made for since, or has begun to train. "
    "Call optimizer.bind(model) before the step, and trace what reads the tables anew."
)
_KEPT = "_merlin_cowclip_optimizer"
_READING = ("test_function", "predict_function")  # that Keras keeps, as they were traced


def take_over(mine: Any, specs: Iterable[TableSpec]) -> None:
    """Let lookups of these tables know this optimizer, once the rows of the one before are current.

    Args:
      mine: a `CowClipOptimizer`, bound to a model.
      specs: its tables.
    """
    is_deferred = mine.update_mode == "deferred"
    for spec in specs:
        access = spec.access
        before = access.owner()
        if before is mine:
            continue
        waited = access.bring_up is not None
        catch_up_by_others(mine, [spec])
        if spec.layer.built:
            keep(mine if is_deferred else None, [spec.variable])
        # By weak references: a layer's copy takes no copy of the optimizer along.
        access.owner = weakref.ref(mine)
        access.whole = mine.update_mode == "exact"
        access.bring_up = functools.partial(_bring_up, access.owner) if is_deferred else None
        if waited or is_deferred:
            _trace_anew(before)
            _trace_anew(mine)
        access.owners.add(mine)
        if waited or is_deferred:
            for other in access.owners:
                other.has_tables(not is_taken(other, other.table_specs))
    mine.has_tables(True)


def catch_up_by_others(mine: Any, specs: Iterable[TableSpec]) -> None:
    """Let rows of these tables catch up that wait by another optimizer, of another model say."""
    for spec in specs:
        access = spec.access
        if access.bring_up is not None and access.owner() is not mine and spec.layer.built:
            access.bring_up(spec.variable, None)


def keep(optimizer: Any, variables: Iterable[tf.Variable]) -> None:
    """Let an optimizer live as long as tables whose rows wait by it, or no longer: `None`.

    A loop of one's own may drop it. Copies of a variable have no attributes.
    """
    for variable in variables:
        setattr(variable, _KEPT, optimizer)


def _trace_anew(optimizer: Any) -> None:
    """What Keras has traced to evaluate and predict reads tables as they were known then."""
    reference = getattr(optimizer, "_model", None)
    model = None if reference is None else reference()
    for name in _READING if model is not None else ():
        if getattr(model, name, None) is not None:  # which may be at work, and called again
            model.__dict__[name] = types.MethodType(functools.partial(_anew, name), model)


def _anew(name: str, model: Any, iterator: Any) -> Any:
    """What Keras calls in the place of its function, until it is made again."""
    return getattr(model, f"make_{name}")(force=True)(iterator)


def is_taken(mine: Any, specs: Iterable[TableSpec]) -> bool:
    """Whether tables wait for another optimizer, or should for this one and do not."""
    is_deferred = mine.update_mode == "deferred"
    return any(
        spec.access.owner() is not mine and (is_deferred or spec.access.bring_up is not None)
        for spec in specs
    )


@tf.autograph.experimental.do_not_convert
def _bring_up(optimizer: weakref.ref[Any], variable: tf.Variable, rows: tf.Tensor | None) -> None:
    """Before a table is read: its rows, or all of it. The table of a copied model is nobody's."""
    mine = optimizer()
    part = None if mine is None else mine._own().get(variable.ref())
    if part is not None and rows is not None:
        part.deferred.catch_up_rows(variable, rows)
    elif part is not None:
        part.catch_up()
