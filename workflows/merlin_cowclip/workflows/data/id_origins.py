"""What made the ids of a saved workflow's columns: only those that Categorify made have raw ids."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from merlin_cowclip.workflows.quiet import quiet_imports

if TYPE_CHECKING:
    import nvtabular as nvt


class Origin(enum.Enum):
    """What made a column's ids; a column that no such operator made has none."""

    VOCABULARY = "Categorify, and nothing changed them since"
    HASH = "HashBucket or HashedCross, somewhere on the way"
    CHANGED = "an operator after Categorify, which may have made others of them"


def id_origins(workflow: nvt.Workflow) -> dict[str, Origin]:
    """What made the ids of a workflow's outputs, by column.

    A schema does not tell: an operator hands the properties of its input on to what it makes of it,
    the vocabulary of Categorify among them.

    Args:
        workflow: fitted.
    """
    with quiet_imports():
        from merlin.dag import ops as dag
        from merlin.dag import postorder_iter_nodes
        from nvtabular import ops

        as_they_are = (
            *(dag.SelectionOp, dag.SubsetColumns, dag.SubtractionOp, dag.ConcatColumns),
            *(dag.AddMetadata, ops.AddMetadata, dag.Rename, ops.Rename),
            *(ops.Filter, ops.Dropna, ops.DropLowCardinality, ops.ListSlice),
            *(ops.ReduceDtypeSize, ops.ValueCount, ops.DataStats),
        )
    made: dict[int, dict[str, Origin]] = {}
    for node in postorder_iter_nodes(workflow.output_node):
        given: dict[str, Origin | None] = {}
        for above in node.parents_with_dependencies:  # of two of one name NVTabular takes the last
            names = above.output_schema.column_names
            given |= {name: made[id(above)].get(name) for name in names}
        mapping, found = node.column_mapping, made.setdefault(id(node), {})
        for name in node.output_schema.column_names:
            origin: Origin | None
            origins = {given.get(one) for one in mapping.get(name, given)}
            kept = isinstance(node.op, as_they_are)
            if isinstance(node.op, ops.Groupby):
                kept = _keeps_ids(node.op, name, mapping)
            if isinstance(node.op, ops.Categorify):
                origin = Origin.VOCABULARY
            elif isinstance(node.op, ops.HashBucket | ops.HashedCross):
                origin = Origin.HASH
            else:
                origin = _of_several(origins, kept)
            if origin:
                found[name] = origin
    return made[id(workflow.output_node)]


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
    if Origin.HASH in known:
        return Origin.HASH
    return Origin.VOCABULARY if kept and known == {Origin.VOCABULARY} else Origin.CHANGED
