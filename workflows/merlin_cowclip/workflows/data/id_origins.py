"""What made the ids of a saved workflow's columns, and of which values.

Only ids that Categorify made have raw ones, and these are the log's if no operator before it
changed them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from merlin_cowclip.workflows.data.workflow_graph import followed, operator_name
from merlin_cowclip.workflows.quiet import quiet_imports

if TYPE_CHECKING:
    import nvtabular as nvt
    from merlin.dag import Node


class Origin(enum.Enum):
    """What made a column's ids; a column that no such operator made has none."""

    VOCABULARY = "Categorify, and nothing changed them since"
    HASH = "HashBucket or HashedCross, somewhere on the way"
    CHANGED = "an operator after Categorify, which may have made others of them"
    NO_IDS = "an operator after Categorify, which made of them what is no id: counts, buckets"


@dataclass(frozen=True)
class RawValues:
    """What became of a log's values until ids were made of them; or to the end, if none were."""

    changed_by: tuple[str, ...] = ()  # what may have made others of them, in order
    filled: bool = False  # missing ones


def id_origins(workflow: nvt.Workflow) -> dict[str, Origin]:
    """What made the ids of a workflow's outputs, by column.

    A schema does not tell: an operator hands the properties of its input on to what it makes of it,
    the vocabulary of Categorify among them.

    Args:
        workflow: fitted.
    """
    return {name: column.origin for name, column in _columns(workflow).items() if column.origin}


def raw_values(workflow: nvt.Workflow) -> dict[str, RawValues]:
    """Whether the ids of a workflow's outputs are of the values that the log has, by column.

    What a join brought in is a value as its table has it.

    Args:
        workflow: fitted.
    """
    return {
        name: column.encoded if column.origin is Origin.VOCABULARY else column.values
        for name, column in _columns(workflow).items()
    }


def encoded_columns(workflow: nvt.Workflow) -> dict[str, frozenset[tuple[int, str]]]:
    """Which columns of which nodes of Categorify, by `id`, a workflow's outputs are, by column.

    One whose ids are others by now is none of them.

    Args:
        workflow: fitted.
    """
    return {name: column.ids_of for name, column in _columns(workflow).items()}


def padded_lists(workflow: nvt.Workflow) -> dict[str, int]:
    """Outputs whose lists `ListSlice(pad=True)` may have padded, and to how many values.

    Not with id 0 behind what made ids, which is no id.

    Args:
        workflow: fitted.
    """
    with quiet_imports():
        from nvtabular import ops

    makes_ids = (ops.Categorify, ops.HashBucket)

    def made_by(node: Node, given: dict[str, tuple[int, bool]]) -> dict[str, tuple[int, bool]]:
        found = {}
        for name in node.output_schema.column_names:
            sources = [given.get(one, (0, False)) for one in node.column_mapping.get(name, [name])]
            to = max((one for one, _ in sources), default=0)
            has_ids = any(ids for _, ids in sources) or isinstance(node.op, makes_ids)
            if isinstance(node.op, ops.ListSlice) and node.op.pad:
                to = 0 if has_ids and node.op.pad_value == 0 else int(node.op.max_elements)
            found[name] = to, has_ids
        return found

    made = followed(workflow.output_node, lambda _: (0, False), made_by, (0, False))
    return {name: to for name, (to, _) in made.items() if to}


@dataclass(frozen=True)
class _Column:
    origin: Origin | None = None
    values: RawValues = RawValues()  # what they have become by now
    encoded: RawValues = RawValues()  # what they were when the last Categorify read them
    # Of which columns of which Categorify, by `id`.
    ids_of: frozenset[tuple[int, str]] = frozenset()


_ENCODED = RawValues(("a workflow before this one",))


def _columns(workflow: nvt.Workflow) -> dict[str, _Column]:
    of_inputs = workflow.input_schema.column_schemas

    def raw(name: str) -> _Column:
        is_encoded = name in of_inputs and of_inputs[name].properties.get("cat_path")
        return _Column(values=_ENCODED) if is_encoded else _Column()

    return followed(workflow.output_node, raw, _made_by, _Column())


def _made_by(node: Node, given: dict[str, _Column]) -> dict[str, _Column]:
    with quiet_imports():
        from nvtabular import ops

    as_they_are = operators_that_keep_values()
    mapping, found = node.column_mapping, {}
    for name, schema in node.output_schema.column_schemas.items():
        sources = [given.get(one, _Column()) for one in mapping.get(name, given)]
        kept = isinstance(node.op, as_they_are)
        ids_of = frozenset().union(*(one.ids_of for one in sources if kept))
        if isinstance(node.op, ops.Groupby):
            kept = _keeps_ids(node.op, name, mapping)
        origin = _of_several((one.origin for one in sources), kept)
        if origin is Origin.CHANGED and isinstance(node.op, _operators_that_make_no_ids()):
            origin = Origin.NO_IDS
        encoded = _together(one.encoded for one in sources)
        values = _together(one.values for one in sources)
        if isinstance(node.op, ops.Categorify):
            origin, encoded = Origin.VOCABULARY, values
            ids_of = frozenset({(id(node), name)})
        elif isinstance(node.op, ops.HashBucket | ops.HashedCross):
            origin = Origin.HASH
        if isinstance(node.op, ops.FillMissing | ops.FillMedian):
            kept = mapping.get(name) == [name]  # not whether it was filled, a column beside it
            values = RawValues(values.changed_by, values.filled or kept)
        elif isinstance(node.op, ops.ReduceDtypeSize):
            kept = schema.dtype.element_type.value != "float"  # 0.1 is another one in float32
        elif isinstance(node.op, ops.JoinExternal):
            kept = True
        if not kept:
            changed_by = (*values.changed_by, operator_name(node.op))
            values = RawValues(changed_by, values.filled)
        found[name] = _Column(origin, values, encoded, ids_of)
    return found


def _together(values: Iterable[RawValues]) -> RawValues:
    """Of what an operator makes of several columns."""
    of = list(values)
    changed_by = dict.fromkeys(name for one in of for name in one.changed_by)
    return RawValues(tuple(changed_by), any(one.filled for one in of))


def operators_that_keep_values() -> tuple[type, ...]:
    """Those of whose outputs each value is one of the column that `column_mapping` names."""
    with quiet_imports():
        from merlin.dag import ops as dag
        from nvtabular import ops

    return (
        *(dag.SelectionOp, dag.SubsetColumns, dag.SubtractionOp, dag.ConcatColumns),
        *(dag.AddMetadata, ops.AddMetadata, dag.Rename, ops.Rename),
        *(ops.Filter, ops.Dropna, ops.DropLowCardinality, ops.ListSlice),
        *(ops.ReduceDtypeSize, ops.ValueCount, ops.DataStats),
    )


def _operators_that_make_no_ids() -> tuple[type, ...]:
    with quiet_imports():
        from nvtabular import ops

    return (
        *(ops.Bucketize, ops.DifferenceLag, ops.Groupby, ops.JoinGroupby, ops.LogOp),
        *(ops.Normalize, ops.NormalizeMinMax, ops.TargetEncoding),
    )


def _keeps_ids(op: Any, name: str, mapping: Mapping[str, Sequence[str]]) -> bool:
    """Whether a column that Groupby makes holds values of the one that it is made of."""
    (source, *_) = mapping[name]
    how = name.removeprefix(source).removeprefix(op.name_sep)
    return how in ("", "list", "first", "last", "min", "max")


def _of_several(origins: Iterable[Origin | None], kept: bool) -> Origin | None:
    """Of what an operator made of columns, whose values it may have kept."""
    known = set(origins) - {None}
    if not known:
        return None
    for one in (Origin.HASH, Origin.NO_IDS):
        if one in known:
            return one
    return Origin.VOCABULARY if kept and known == {Origin.VOCABULARY} else Origin.CHANGED
