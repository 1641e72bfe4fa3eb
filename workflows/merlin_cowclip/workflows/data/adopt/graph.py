# SPDX-License-Identifier: Apache-2.0
"""Load a saved NVTabular workflow, and find out from its graph where its columns come from.

Imports NVTabular.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from dask.utils import natural_sort_key

from merlin_cowclip.workflows.data.prepare.operators import EncodeIds
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.quiet import quiet_imports

with quiet_imports():
    import nvtabular as nvt
    from merlin import dag
    from merlin.dag.ops.subgraph import Subgraph
    from merlin.io.worker import clean_worker_cache
    from nvtabular import ops

SAVED_FILES = "categories"  # the subfolder of a saved workflow with vocabularies and statistics

# Operators that keep values, and those that may drop, repeat or reorder rows.
_KEEP_VALUES = (
    *(dag.ops.SelectionOp, dag.ops.SubsetColumns, dag.ops.SubtractionOp, dag.ops.ConcatColumns),
    *(dag.ops.AddMetadata, ops.AddMetadata, dag.ops.Rename, ops.Rename, ops.ListSlice),
    *(ops.ReduceDtypeSize, ops.ValueCount, ops.DataStats, ops.DropLowCardinality),
    *(ops.Filter, ops.Dropna),
)
_ROW_OPS = (ops.Filter, ops.Dropna, ops.Groupby)


def load_saved(folder: str | Path) -> nvt.Workflow:
    """Load a saved workflow, which runs code from its folder; UserError if it does not load here.

    NVTabular derives a file's path by text replacement, and caches its content by path in the
    process. Both go wrong for folders that were moved, so the paths are set and the cache cleared.
    """
    folder = Path(folder).absolute()  # where NVTabular saves again, it replaces this text
    try:
        with quiet_imports():
            clean_worker_cache()
            workflow = nvt.Workflow.load(str(folder))
    except Exception as error:  # it runs whatever was pickled
        raise UserError(
            f"{folder} does not load in this environment: {type(error).__name__}: {error}. Install "
            "what it needs, or save it again here"
        ) from error
    for node in nodes(workflow.output_node):
        files = files_of(node.op)
        for storage in files:
            kind = "unique" if isinstance(node.op, ops.Categorify) else "cat_stats"
            path = folder / SAVED_FILES / f"{kind}.{storage}.parquet"
            files[storage] = str(path)
    return workflow


def load_fitted(folder: Path) -> nvt.Workflow:
    """Load a fitted workflow that has all its files; see `load_saved`."""
    workflow = load_saved(folder)
    if not workflow.output_schema:
        raise UserError(f"{folder} is not fitted: it has no schema. Save it after fit")
    writers: dict[str, dag.Operator] = {}
    for node in nodes(workflow.output_node):
        for path in map(Path, files_of(node.op).values()):
            if not path.exists():
                raise UserError(
                    f"{folder} lacks {SAVED_FILES}/{path.name}. Copy the whole folder, or fit with "
                    "an absolute out_path and save again"
                )
            other = writers.setdefault(path.name, node.op)
            if other is not node.op:
                raise UserError(
                    f"{operator_name(other)} and {operator_name(node.op)} both save to {path.name} "
                    f"in {folder}, so that one file is lost. Rename the column before one of them, "
                    "fit, write and save again"
                )
        if _is_stock(node.op) and "order" in node.input_schema.column_names:
            raise UserError(
                f"Categorify in {folder} reads a column called 'order', a name that it uses "
                "itself: rows get ids of others. Rename the column, fit and write again"
            )
    return workflow


def _is_stock(op: Any) -> bool:
    """Whether an operator encodes as NVTabular's Categorify; ours looks ids up by itself."""
    return isinstance(op, ops.Categorify) and not isinstance(op, EncodeIds)


def files_of(op: Any) -> dict[str, str]:
    """Files that an operator wrote at its fit, by storage name; its own dictionary."""
    if isinstance(op, ops.Categorify | ops.JoinGroupby):
        files: dict[str, str] = op.categories
        return files
    return op.stats if isinstance(op, ops.TargetEncoding) else {}


def nodes(output_node: dag.Node) -> Iterator[dag.Node]:
    """All nodes of a graph, each after its inputs, with those of each `Subgraph` before it."""
    for node in dag.postorder_iter_nodes(output_node):
        if isinstance(node.op, Subgraph):
            yield from nodes(node.op.graph.output_node)
        yield node


def operator_name(op: Any) -> str:
    """Name of an operator as users write it."""
    name = type(op).__name__
    return "LambdaOp" if name == "UDF" else name


# Vocabularies ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Vocabulary:
    """The raw ids of one field, or of several that Categorify encodes jointly."""

    column: str  # the Categorify's column of their ids
    storage: str  # its name of the vocabulary: the column's own, or "a_b" for two columns
    path: Path  # a parquet file, or a folder of them
    read: str | None  # the raw column with these values; None if they are computed from others

    @functools.cached_property
    def files(self) -> list[Path]:
        """In the order of their ids."""
        if self.path.is_file():
            return [self.path]
        return sorted(self.path.glob("*.parquet"), key=lambda path: natural_sort_key(path.name))

    @functools.cached_property
    def rows(self) -> int:
        """How many ids it holds; they are the last ones of the field."""
        return sum(pq.read_metadata(file).num_rows for file in self.files)

    @property
    def type(self) -> pa.DataType | None:
        """Type of the values; None if it is not known, or they are combined ones."""
        schema = pq.read_schema(self.files[0])
        kind = schema.field(self.storage).type if self.storage in schema.names else pa.null()
        return None if pa.types.is_null(kind) else getattr(kind, "value_type", kind)

    def raw(self) -> pa.ChunkedArray:
        """Raw ids as text, by id; null for combined ones."""
        if self.storage not in pq.read_schema(self.files[0]).names:
            return pa.chunked_array([pa.nulls(self.rows, pa.string())])
        parts = [pq.read_table(file, columns=[self.storage]) for file in self.files]
        return _text(pa.concat_tables(parts)[self.storage])


def _text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Values as text; integers beside a null are floats in pandas."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    try:
        is_float = pa.types.is_floating(column.type)
        return (column.cast(pa.int64()) if is_float else column).cast(pa.string())
    except pa.ArrowException:  # fractions, bytes that are not UTF-8
        texts = [None if one is None else str(one) for one in column.to_pylist()]
        return pa.chunked_array([texts], pa.string())


# Columns -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """Where a column of a workflow comes from."""

    raw: frozenset[str] = frozenset()  # raw columns that its values depend on
    same_as: str | None = None  # the raw column of which it has the values; nulls may be filled
    vocabulary: Vocabulary | None = None  # of the `Categorify` whose ids it holds, unchanged
    changed_by: tuple[dag.Node, ...] = ()  # nodes that computed its values, in order
    row_ops: frozenset[dag.Node] = frozenset()  # nodes that may drop, repeat or reorder rows

    @property
    def is_hashed(self) -> bool:
        """Whether NVTabular hashed it, or a column that it is computed from."""
        return any(
            isinstance(node.op, ops.HashBucket | ops.HashedCross)
            or (_is_stock(node.op) and bool(node.op.num_buckets))  # ours hashes the text only
            for node in self.changed_by
        )

    @property
    def is_statistic(self) -> bool:
        """Whether it is computed from a `TargetEncoding` or a `JoinGroupby`."""
        return any(isinstance(n.op, ops.TargetEncoding | ops.JoinGroupby) for n in self.changed_by)


def trace(output_node: dag.Node, before: Mapping[str, Column] | None = None) -> dict[str, Column]:
    """Follow columns through a fitted graph, from those ``before`` it (raw ones) to its output."""
    found: dict[dag.Node, dict[str, Column]] = {}
    for node in dag.postorder_iter_nodes(output_node):
        names = node.input_schema.column_names
        given = {name: (before or {}).get(name, Column(frozenset({name}), name)) for name in names}
        for above in node.parents_with_dependencies:
            given |= found[above]  # the last of two columns with one name, as in NVTabular
        if isinstance(node.op, Subgraph):
            found[node] = trace(node.op.graph.output_node, given)
            continue
        # Combined ids come with the raw columns that they are made of.
        found[node] = given if getattr(node.op, "encode_type", None) == "combo" else {}
        found[node] |= {
            name: _computed(node, name, given) for name in node.output_schema.column_names
        }
    return found[output_node]


def _computed(node: dag.Node, name: str, given: Mapping[str, Column]) -> Column:
    """A column that a node computes."""
    op, mapped = node.op, node.column_mapping.get(name, [])
    inputs = [given[one] for one in _inputs(node, name, mapped, given) if one in given]
    source = given.get(mapped[0], Column()) if len(mapped) == 1 else Column()
    joins = isinstance(op, ops.JoinExternal)
    keeps = isinstance(op, _KEEP_VALUES) or (joins and name in given)
    fills = isinstance(op, ops.FillMissing | ops.FillMedian) and mapped == [name]
    changed_by = (*(by for one in inputs for by in one.changed_by), *(() if keeps else (node,)))
    changes_rows = isinstance(op, _ROW_OPS) or (joins and op.how != "left")
    vocabulary = source.vocabulary if keeps else None
    if isinstance(op, ops.Categorify):
        storage = op.storage_name.get(name, name)
        vocabulary = Vocabulary(name, storage, Path(op.categories[storage]), source.same_as)
    return Column(
        raw=frozenset().union(*(one.raw for one in inputs)),
        same_as=source.same_as if keeps or fills else None,
        vocabulary=vocabulary,
        changed_by=tuple(dict.fromkeys(changed_by)),
        row_ops=frozenset({node} if changes_rows else ()).union(*(one.row_ops for one in inputs)),
    )


def _inputs(node: dag.Node, name: str, mapped: list[str], given: Mapping[str, Column]) -> list[str]:
    """Columns that an output of a node is computed from; all of them if that is not known."""
    op = node.op
    if isinstance(op, ops.TargetEncoding | ops.JoinGroupby):  # not the target or the numbers
        return [one for one in mapped if one in node.selector.names]
    if isinstance(op, ops.JoinExternal):
        keys = [op.on] if isinstance(op.on, str) else list(op.on)
        return [name, *keys] if name in given else keys
    is_stock = type(op).__module__.startswith(("nvtabular.", "merlin."))
    mixes = isinstance(op, (*_ROW_OPS, ops.DifferenceLag)) or getattr(op, "_param_count", 1) > 1
    return mapped if is_stock and not mixes else list(given)
