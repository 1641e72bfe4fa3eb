"""The three parts of a `CowClipOptimizer`: their learning rates, their variables, the summary."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from merlin_cowclip.plugins._checks import RefusesOptions
from merlin_cowclip.plugins._tensorflow import Tags, tf
from merlin_cowclip.plugins._text import format_table
from merlin_cowclip.plugins.embeddings.discovery import find_tables
from merlin_cowclip.plugins.embeddings.tables import TableSpec, distinct_names
from merlin_cowclip.plugins.optimizers.adam import CowClipAdam

_NO_RATE = dict.fromkeys(
    ("learning_rate", "lr"),
    "Set optimizer.learning_rate, which scales those of all parts, or give for_model a schedule.",
)


class LearningRates(NamedTuple):
    """η of the two kinds of weights."""

    dense: float
    embedding: float


class TablePart(CowClipAdam):
    """`CowClipAdam` as a part of a `CowClipOptimizer`."""

    not_offered: ClassVar[Mapping[str, str]] = {**CowClipAdam.not_offered, **_NO_RATE}


class DensePart(RefusesOptions, tf.keras.optimizers.legacy.Adam):
    """Keras's Adam as a part of a `CowClipOptimizer`."""

    not_offered: ClassVar[Mapping[str, str]] = _NO_RATE


_COLUMNS = 100  # of a summary
_HEADER = ("variable", "rows", "width", "rule", "learning rate", "L2")


class Owned(NamedTuple):
    """One line of `CowClipOptimizer.summary`."""

    variable: tf.Variable
    optimizer: Any
    rule: str
    l2: float


def normalize_clip_tables(clip_tables: Any, clip: str | None) -> tuple[Any, ...] | None:
    """Names and tags of `clip_tables`; `None` for all tables. Text may be `tag:…`."""
    if clip_tables is None:
        return None
    is_list = isinstance(clip_tables, Iterable) and not isinstance(clip_tables, str | bytes)
    wanted = tuple(clip_tables) if is_list else ()
    if not wanted or clip is None:
        raise ValueError(
            "clip_tables must be a list that names something, with a clip rule. Received: "
            f"clip_tables={clip_tables!r} with clip={clip!r}. Leave it out to clip all tables; to "
            "clip none, use clip=None without it."
        )
    return tuple(map(_name_or_tag, wanted))


def _name_or_tag(item: Any) -> Any:
    if isinstance(item, Tags):
        return item
    if not isinstance(item, str):  # a layer
        return getattr(item, "table_name", None) or item.name
    return Tags(item.removeprefix("tag:")) if item.startswith("tag:") else item


def tables_of(model: tf.keras.Model, clip_tables: Sequence[Any] | None) -> list[TableSpec]:
    """The tables of a model; it must have some, `clip_tables` among them."""
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


def check_access(specs: Iterable[TableSpec]) -> None:
    """Refuse tables whose rows cannot be caught up before a lookup."""
    others = [spec.name for spec in specs if not spec.access.is_used]
    if others:
        raise ValueError(
            "update='deferred' needs tables whose rows can catch up before they are read: those of "
            f"FusedEmbeddings. Received: {', '.join(others)}, which Merlin or Keras looks up. Use "
            "update='exact' or 'lazy', or put FusedEmbeddings in their place"
        )


def check_known(
    pairs: Sequence[tuple[Any, tf.Variable]], tables: Iterable[Any], model: Any
) -> None:
    """Refuse a sparse gradient of what is no table of the model: its ids are not counted."""
    layers = [] if model is None else list(model._flatten_layers())
    # A Dense layer on sparse input has a sparse gradient: the wide part of a stock W&D.
    dense = (one for one in layers if isinstance(one, tf.keras.layers.Dense) and one.built)
    known = {*tables, *(layer.kernel.ref() for layer in dense)}
    for gradient, variable in pairs:
        if isinstance(gradient, tf.IndexedSlices) and variable.ref() not in known:
            raise ValueError(
                "Each sparse gradient must belong to an embedding table that was found in the "
                f"optimizer's model. Received: one of {variable.name!r}, which belongs to none. "
                "Make the optimizer for the model that it is compiled into, once all its layers "
                "are made, or call optimizer.bind(model). A custom layer looks rows up by a Keras "
                "Embedding or a Merlin table, or has a table_specs() method."
            )


def owned_as_text(owned: Sequence[Owned], tables: Sequence[TableSpec], factor: float) -> str:
    """A table of variables, 100 columns wide; learning rates are multiplied by `factor`."""
    specs = {
        s.variable.ref(): (name, s) for s, name in distinct_names(tables).items() if s.layer.built
    }
    rows = []
    for variable, optimizer, rule, l2 in owned:
        shape = tuple(variable.shape) or (1,)
        name, spec = specs.get(variable.ref(), (variable.name, None))
        number = shape[0] if spec is None else spec.num_rows
        rate = _show_rate(optimizer.learning_rate.rate, factor)
        width = f"{math.prod(shape[1:]):,}"
        rows.append((name, f"{number:,}", width, rule, rate, f"{l2:.6g}" if l2 else "-"))
    others = sum(2 + max(map(len, column)) for column in list(zip(_HEADER, *rows, strict=True))[1:])
    room = max(_COLUMNS - others, len(_HEADER[0]))
    short = [(name if len(name) <= room else f"…{name[1 - room :]}", *rest) for name, *rest in rows]
    return format_table(_HEADER, short)


def _show_rate(rate: Any, factor: float) -> str:
    if not callable(rate):
        return f"{float(rate) * factor:.6g}"
    height = getattr(rate, "learning_rate", None)  # of a LinearWarmup
    if height is not None and not callable(height):
        return f"{float(height) * factor:.6g}, warm-up"
    return type(rate).__name__ + ("" if factor == 1 else f" x {factor:.6g}")
