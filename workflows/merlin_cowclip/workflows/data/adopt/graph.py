"""Load a saved NVTabular workflow, and find out from its graph where its columns come from."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from merlin_cowclip.workflows.quiet import quiet_imports

if TYPE_CHECKING:
    import nvtabular as nvt
    from merlin.dag import Node

SAVED_FILES = "categories"  # the subfolder of a saved workflow with vocabularies and statistics


# Loading -----------------------------------------------------------------------------------------


def load_saved(folder: str | Path) -> nvt.Workflow:
    """Load a saved workflow, which runs code from its folder; its files are those in the folder.

    NVTabular derives a file's path by text replacement, and caches its content by path in the
    process. Both go wrong for folders that were moved, so the paths are set and the cache cleared.
    """
    with quiet_imports():
        import nvtabular as nvt
        from merlin.io.worker import clean_worker_cache

        clean_worker_cache()
        folder = Path(folder).absolute()  # where NVTabular saves again, it replaces this text
        workflow = nvt.Workflow.load(str(folder))
    for node in nodes(workflow.output_node):
        files = files_of(node.op)
        for storage in files:
            path = folder / SAVED_FILES / file_name(node.op, storage)
            if path.exists():
                files[storage] = str(path)
    return workflow


def files_of(op: Any) -> dict[str, str]:
    """Files that an operator wrote at its fit, by storage name; its own dictionary."""
    with quiet_imports():
        from nvtabular import ops

    if isinstance(op, ops.Categorify | ops.JoinGroupby):
        files: dict[str, str] = op.categories
        return files
    return op.stats if isinstance(op, ops.TargetEncoding) else {}


def file_name(op: Any, storage: str) -> str:
    """Name of such a file in ``categories/``."""
    with quiet_imports():
        from nvtabular.ops import Categorify

    return f"{'unique' if isinstance(op, Categorify) else 'cat_stats'}.{storage}.parquet"


def nodes(output_node: Node) -> Iterator[Node]:
    """All nodes of a graph, each after its inputs, with those of each `Subgraph` before it."""
    with quiet_imports():
        from merlin.dag import postorder_iter_nodes

    for node in postorder_iter_nodes(output_node):
        if (inner := _subgraph(node)) is not None:
            yield from nodes(inner)
        yield node


def operator_name(op: Any) -> str:
    """Name of an operator as users write it."""
    name = type(op).__name__
    return "LambdaOp" if name == "UDF" else name


def _subgraph(node: Node) -> Node | None:
    with quiet_imports():
        from merlin.dag.ops.subgraph import Subgraph

    return node.op.graph.output_node if isinstance(node.op, Subgraph) else None


# Columns -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """Where a column of a workflow comes from.

    Attributes:
        raw: raw columns that its values depend on.
        same_as: the raw column of which it has the values; nulls may be filled.
        encoder: node and output column of the `Categorify` whose ids it holds, unchanged.
        changed_by: operators that computed its values, in order.
        row_ops: operators on the way that may drop, repeat or reorder rows: (`id` of node, name).
        is_hashed: whether NVTabular hashed it, or a column that it is computed from.
        is_statistic: whether it is computed from a `TargetEncoding` or a `JoinGroupby`.
    """

    raw: frozenset[str] = frozenset()
    same_as: str | None = None
    encoder: tuple[Node, str] | None = None
    changed_by: tuple[str, ...] = ()
    row_ops: frozenset[tuple[int, str]] = frozenset()
    is_hashed: bool = False
    is_statistic: bool = False


@dataclass(frozen=True)
class Trace:
    """What a fitted workflow's graph says.

    Attributes:
        outputs: its columns.
        lookups: raw column → parquet file and its column in which an operator looks it up.
    """

    outputs: dict[str, Column]
    lookups: dict[str, list[tuple[str, str]]]


def trace(workflow: nvt.Workflow) -> Trace:
    """Follow the columns of a fitted workflow through its operators."""
    lookups: dict[str, list[tuple[str, str]]] = {}
    return Trace(_outputs(workflow.output_node, _raw_column, lookups), lookups)


def _raw_column(name: str) -> Column:
    return Column(raw=frozenset({name}), same_as=name)


def _outputs(
    output_node: Node, source: Callable[[str], Column], lookups: dict[str, list[tuple[str, str]]]
) -> dict[str, Column]:
    with quiet_imports():
        from merlin.dag import postorder_iter_nodes

    found: dict[int, dict[str, Column]] = {}
    for node in postorder_iter_nodes(output_node):
        above = node.parents_with_dependencies
        given = {name: source(name) for name in node.input_schema.column_names}
        for one in above:  # the last of two columns with one name is taken, as in NVTabular
            given |= found[id(one)]
        inner = _subgraph(node)
        if inner is not None:
            found[id(node)] = _outputs(inner, functools.partial(_given, given), lookups)
            continue
        for name, column in given.items():
            if column.same_as is not None:
                lookups.setdefault(column.same_as, []).extend(_looked_up(node, name))
        found[id(node)] = {
            name: _computed(node, name, given) for name in node.output_schema.column_names
        }
    return found[id(output_node)]


def _given(columns: Mapping[str, Column], name: str) -> Column:
    return columns.get(name) or _raw_column(name)


def _computed(node: Node, name: str, given: Mapping[str, Column]) -> Column:
    """A column that a node computes."""
    with quiet_imports():
        from nvtabular import ops

    op, kinds = node.op, _kinds()
    mapped = node.column_mapping.get(name, [])
    inputs = [given[one] for one in _inputs(node, name, mapped, given) if one in given]
    source = given.get(mapped[0], Column()) if len(mapped) == 1 else Column()
    joins = isinstance(op, ops.JoinExternal)
    keeps = isinstance(op, kinds.keep_values) or (joins and name in given)
    fills = isinstance(op, ops.FillMissing | ops.FillMedian) and mapped == [name]
    encoder = source.encoder if keeps or _keeps_ids(op, name, mapped) else None
    by = () if keeps else (operator_name(op),)
    changes_rows = isinstance(op, kinds.row_ops) or (joins and op.how != "left")
    hashes = isinstance(op, ops.HashBucket | ops.HashedCross) or (
        type(op) is ops.Categorify and bool(op.num_buckets)  # ours hashes the text only
    )
    statistic = isinstance(op, ops.TargetEncoding | ops.JoinGroupby)
    return Column(
        raw=frozenset().union(*(one.raw for one in inputs)),
        same_as=source.same_as if keeps or fills else None,
        encoder=(node, name) if isinstance(op, ops.Categorify) else encoder,
        changed_by=(*dict.fromkeys(by for one in inputs for by in one.changed_by), *by),
        row_ops=frozenset({(id(node), operator_name(op))} if changes_rows else ()).union(
            *(one.row_ops for one in inputs)
        ),
        is_hashed=hashes or any(one.is_hashed for one in inputs),
        is_statistic=statistic or any(one.is_statistic for one in inputs),
    )


def _inputs(node: Node, name: str, mapped: list[str], given: Mapping[str, Column]) -> list[str]:
    """Columns that an output of a node is computed from; all of them if that is not known."""
    with quiet_imports():
        from nvtabular import ops

    op = node.op
    if isinstance(op, ops.TargetEncoding | ops.JoinGroupby):  # not the target or the numbers
        return [one for one in mapped if one in node.selector.names]
    if isinstance(op, ops.JoinExternal):
        keys = [op.on] if isinstance(op.on, str) else list(op.on)
        return [name, *keys] if name in given else keys
    is_one = type(op) is ops.LambdaOp and op._param_count == 1
    return mapped if is_one or isinstance(op, _kinds().by_column) else list(given)


@dataclass(frozen=True)
class _Kinds:
    keep_values: tuple[type, ...]
    by_column: tuple[type, ...]
    row_ops: tuple[type, ...]


@functools.cache
def _kinds() -> _Kinds:
    """Operators that keep values, that compute each output of its own inputs, that change rows."""
    with quiet_imports():
        from merlin.dag import ops as dag
        from nvtabular import ops

    plain = (
        *(dag.SelectionOp, dag.SubsetColumns, dag.SubtractionOp, dag.ConcatColumns),
        *(dag.AddMetadata, ops.AddMetadata, dag.Rename, ops.Rename, ops.ListSlice),
        *(ops.ReduceDtypeSize, ops.ValueCount, ops.DataStats, ops.DropLowCardinality),
    )
    numeric = (ops.FillMissing, ops.FillMedian, ops.Normalize, ops.NormalizeMinMax, ops.LogOp)
    return _Kinds(
        keep_values=(*plain, ops.Filter, ops.Dropna),
        by_column=(
            *(*plain, *numeric, ops.Clip, ops.Bucketize),
            *(ops.Categorify, ops.HashBucket, ops.HashedCross),
        ),
        row_ops=(ops.Filter, ops.Dropna, ops.Groupby),
    )


def _keeps_ids(op: Any, name: str, mapped: list[str]) -> bool:
    """Whether a column is one of `Groupby` that holds ids of its input, and not a count, say."""
    with quiet_imports():
        from nvtabular.ops import Groupby

    if not isinstance(op, Groupby) or not mapped:
        return False
    return name.removeprefix(mapped[0]).removeprefix(op.name_sep) in ("list", "first", "last")


def _looked_up(node: Node, name: str) -> Iterator[tuple[str, str]]:
    """Parquet files of a node, with their column, in which it looks up an input."""
    storage_name = getattr(node.op, "storage_name", {}).get(name, name)
    for storage, path in files_of(node.op).items():
        if storage == storage_name or name in storage:
            yield path, storage_name
            yield path, name
