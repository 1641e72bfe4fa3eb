"""Which tables a model has, which part of the optimizer owns which variable, and how that reads.

Nothing here updates anything or has a state; `optimizer.py` puts it to use.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from merlin_cowclip.plugins._stack import RevivedLayer, Tags, tf
from merlin_cowclip.plugins._text import format_table
from merlin_cowclip.plugins.merlin_tables import find_tables
from merlin_cowclip.plugins.tables import TableSpec, distinct_names


class Owned(NamedTuple):
    """One line of `CowClipOptimizer.summary`."""

    variable: tf.Variable
    optimizer: Any
    rule: str
    l2: float


def chosen(clip_tables: Iterable[Any] | None, clip: str | None) -> tuple[Any, ...] | None:
    """`clip_tables` as they were given, an iterator's too; `None` for all tables.

    Raises:
      ValueError: one that is in no list, nothing, or some although no rule clips.
    """
    if clip_tables is None:
        return None
    if isinstance(clip_tables, str | bytes) or not isinstance(clip_tables, Iterable):
        raise ValueError(f"clip_tables must be a list. Received: {clip_tables!r}, not in one")
    wanted = tuple(clip_tables)
    if not wanted:
        raise ValueError(
            "clip_tables must name something. Received: an empty list, by which nothing is "
            "clipped. To clip nothing, use clip=None; to clip all tables, leave it out"
        )
    if clip is None:
        raise ValueError(
            f"clip_tables needs a clip rule. Received: clip_tables={list(wanted)!r} with "
            "clip=None, by which nothing is clipped. Choose a clip, or leave it out"
        )
    return wanted


def tables_of(model: tf.keras.Model, clip_tables: Sequence[Any] | None) -> list[TableSpec]:
    """The tables of a model, which has some, `clip_tables` among them."""
    specs = find_tables(model)
    if not specs:
        raise ValueError(
            "The model must hold embedding tables (layers with table_specs(), Merlin's tables, "
            f"or Keras's Embedding). Received: {model.name!r}, in which none was found. If its "
            "layers are made when it is built, call it on a batch first; a model without "
            "tables needs no CowClipOptimizer."
        )
    for wanted in clip_tables or ():
        if not any(any(spec.selected([wanted])) for spec in specs):
            names = ", ".join(spec.name for spec in specs)
            raise ValueError(
                "clip_tables must name tables, fields, tags or layers of the model. Received: "
                f"{wanted!r}; the model's tables: {names}"
            )
    return specs


def check_trainable(specs: Sequence[TableSpec], clip_tables: Sequence[Any] | None) -> None:
    """Refuse `clip_tables` that name a frozen table."""
    for wanted in clip_tables or ():
        for spec in specs:
            if any(spec.selected([wanted])) and not spec.layer.trainable:
                raise ValueError(
                    f"clip_tables must be trainable. Received: {wanted!r}, whose table "
                    f"{spec.name!r} is frozen"
                )


def clipped_ranges(spec: TableSpec, clip_tables: Sequence[Any] | None) -> tuple[bool, ...]:
    """For each range of rows of a table, whether it is clipped."""
    if clip_tables is None:
        return (spec.width > 1,) * (len(spec.row_offsets) - 1)
    return spec.selected(clip_tables)


def tables_by_part(
    specs: Sequence[TableSpec], clip_tables: Sequence[Any] | None
) -> tuple[dict[TableSpec, tuple[bool, ...]], dict[TableSpec, tuple[bool, ...]]]:
    """The built tables that are clipped, at least in part, and those that are not.

    Returns:
      For each table, whether each of its ranges of rows is clipped.
    """
    owned = set()
    shares: tuple[dict[TableSpec, tuple[bool, ...]], ...] = ({}, {})
    for spec in specs:
        if not spec.layer.built:
            continue
        reference = spec.variable.ref()
        if reference in owned:
            raise ValueError(
                f"Each variable must belong to one table. Received: {spec.variable.name!r} in "
                f"the table {spec.name!r} and in another one."
            )
        owned.add(reference)
        ranges = clipped_ranges(spec, clip_tables)
        shares[0 if any(ranges) else 1][spec] = ranges
    return shares[0], shares[1]


def check_code(model: tf.keras.Model, specs: Iterable[TableSpec], *, rows_wait: bool) -> None:
    """Tell of tables that a layer looks up whose class Keras did not know as it loaded it.

    It has the graph alone that was traced as it was saved, in which no lookup is recorded.

    Args:
      model: whose layers they are.
      specs: its tables whose lookups must be seen; frozen ones need not.
      rows_wait: whether rows must catch up before they are looked up.

    Raises:
      ValueError: there are some, and rows wait.
    """
    traced = [layer for layer in model._flatten_layers() if isinstance(layer, RevivedLayer)]
    within = {id(one): layer for layer in traced for one in layer._flatten_layers()}
    for spec in specs:
        layer = within.get(id(spec.layer)) if spec.layer.trainable else None
        if layer is None:
            continue
        name = type(layer).__name__
        told = (
            f"Keras loaded {layer.name!r} without its class {name!r}, as the graph that was "
            f"saved, which looks up the table {spec.name!r} unseen: it predicts, but cannot be "
            "trained further with a clip or update='deferred'. Load it again where its class is "
            f"known: within tf.keras.utils.custom_object_scope({{{name!r}: {name}}}), or give the "
            "class @tf.keras.utils.register_keras_serializable() before it is saved; it needs "
            "get_config, as Keras says. To predict alone, use tf.keras.models.load_model(path, "
            "compile=False)"
        )
        if rows_wait:
            raise ValueError(told)
        warnings.warn(told, stacklevel=4)
        return


def check_access(specs: Iterable[TableSpec]) -> None:
    """Refuse tables whose rows are read without a word.

    Raises:
      ValueError: there are some.
    """
    others = [spec.name for spec in specs if not spec.access.is_used]
    if others:
        raise ValueError(
            "update='deferred' needs tables whose rows can catch up before they are read: those of "
            f"FusedEmbeddings. Received: {', '.join(others)}, which Merlin or Keras looks up. Use "
            "update='exact' or 'lazy', or put FusedEmbeddings in their place"
        )


def check_belong(
    pairs: Sequence[tuple[Any, tf.Variable]],
    owner: Mapping[Any, Any],
    model: Any,
    *,
    each: bool = False,
) -> None:
    """Refuse gradients of another model's variables, and of tables that were not found.

    Args:
      pairs: gradients and variables.
      owner: by variable, of the model's tables.
      model: that which the optimizer was made for.
      each: whether none may be another model's, or not all. Where rows wait, the model's own
        methods let them catch up: those of one that holds it do not.
    """
    layers = [] if model is None else list(model._flatten_layers())
    # Of the layers, not of the model: it may be used by parts, and never be built as a whole.
    mine = {
        v.ref()
        for layer in layers
        for v in (*layer._trainable_weights, *layer._non_trainable_weights)
    }
    if model is not None:  # a `tf.Module` within is no layer
        modules = (m for m in model._flatten_modules() if not isinstance(m, tf.keras.layers.Layer))
        mine |= {v.ref() for module in modules for v in module.variables}
    others = [v for _, v in pairs if v.ref() not in mine]
    if model is not None and others and (each or len(others) == len(pairs)):
        raise ValueError(
            "The optimizer must be compiled into the model that it was made for, "
            f"{model.name!r}. Received: gradients of other variables, the first of "
            f"{others[0].name!r}. Use CowClipOptimizer.for_model with this model, or "
            "optimizer.bind(model)."
        )
    # The wide part of a stock W&D is one: its input is sparse, but it is a layer, not a table.
    dense = (layer for layer in layers if isinstance(layer, tf.keras.layers.Dense))
    known = {*owner, *(layer.kernel.ref() for layer in dense if layer.built)}
    for gradient, variable in pairs:
        if isinstance(gradient, tf.IndexedSlices) and variable.ref() not in known:
            raise ValueError(
                "Each sparse gradient must belong to an embedding table that was found in the "
                f"model. Received: one of {variable.name!r}, which belongs to none. Look its "
                "rows up by a Keras Embedding or a Merlin table, or give its layer a "
                "table_specs() method; make the optimizer for the model that it is compiled "
                "into, once all its layers are made (or call optimizer.bind(model))."
            )


def owned_variables(
    model: tf.keras.Model,
    tables: Iterable[TableSpec],
    owner: Mapping[Any, Any],
    dense: Any,
    clip_tables: Sequence[Any] | None,
) -> list[Owned]:
    """Every trainable variable of a built model with its one optimizer, in model order."""
    specs = {spec.variable.ref(): spec for spec in tables if spec.layer.built}
    lines = []
    for variable in model.trainable_variables:
        spec = specs.get(variable.ref())
        if spec is None:
            lines.append(Owned(variable, dense, "Adam", 0.0))
            continue
        # What the part does, which may have been set on it, and not what it was made with.
        part = owner[variable.ref()]
        ranges = clipped_ranges(spec, clip_tables)
        rule = f"clip {part.clip}" if part.clip and any(ranges) else "no clip"
        if part.clip and any(ranges) and not all(ranges):
            rule += f" on {sum(ranges)} of {len(ranges)} fields"
        rule = f"{rule}, {part.update} Adam"
        lines.append(Owned(variable, part, rule, part.l2))
    return lines


def owned_as_text(owned: Sequence[Owned], tables: Sequence[TableSpec], factor: float) -> str:
    """A table of variables; their learning rates are multiplied by `factor`."""
    header = ("variable", "rows", "width", "rule", "learning rate", "L2")
    specs = {
        spec.variable.ref(): (name, spec.num_rows)
        for spec, name in distinct_names(tables).items()
        if spec.layer.built
    }
    rows = []
    for variable, optimizer, rule, l2 in owned:
        # Merlin's tables all have a variable called "embeddings".
        shape = tuple(variable.shape)
        table, number = specs.get(variable.ref(), ("", shape[0] if shape else 1))
        named = table in ("", *variable.name.split("/"))
        name = variable.name if named else f"{table}: {variable.name}"
        rate = optimizer.learning_rate
        rows.append(
            (
                name,
                f"{number:,}",
                f"{math.prod(shape[1:]):,}",
                rule,
                _show_rate(rate, factor),
                f"{l2:.6g}" if l2 else "-",
            )
        )
    return format_table(header, rows)


def _show_rate(rate: Any, factor: float) -> str:
    if not callable(rate):
        return f"{float(rate) * factor:.6g}"
    return type(rate).__name__ + ("" if factor == 1 else f" x {factor:.6g}")


def as_text(item: Any) -> str:
    """An item of `clip_tables` as text: a name, `tag:…` for a tag, and a layer by its name."""
    if isinstance(item, Tags):
        return f"tag:{item.value}"
    if isinstance(item, str):
        return item
    table_name = getattr(item, "table_name", None)
    return str(table_name or item.name)


def from_text(item: Any) -> Any:
    """What `as_text` wrote: a name, or a tag; a layer as it is."""
    is_tag = isinstance(item, str) and item.startswith("tag:")
    return Tags(item.removeprefix("tag:")) if is_tag else item
