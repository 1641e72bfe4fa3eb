# SPDX-License-Identifier: Apache-2.0
"""Load a saved NVTabular workflow, and find what its columns are computed from.

Imports NVTabular.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as pads

from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.quiet import quiet_imports

with quiet_imports():
    import merlin.dag as dag
    import nvtabular as nvt
    from merlin.dag.ops.subgraph import Subgraph
    from merlin.io.worker import clean_worker_cache
    from nvtabular import ops

SAVED_FILES = "categories"  # the subfolder of a saved workflow with vocabularies and statistics
_FILES = {  # operator → its dictionary of files, and how their names begin
    ops.Categorify: ("categories", "unique"),
    ops.JoinGroupby: ("categories", "cat_stats"),
    ops.TargetEncoding: ("stats", "cat_stats"),
}
_STATISTICS = (ops.TargetEncoding, ops.JoinGroupby)
_KEEP_VALUES = (
    *(dag.ops.SelectionOp, dag.ops.SubsetColumns, dag.ops.SubtractionOp, dag.ops.ConcatColumns),
    *(dag.ops.AddMetadata, ops.AddMetadata, dag.ops.Rename, ops.Rename, ops.ListSlice),
    *(ops.ReduceDtypeSize, ops.ValueCount, ops.DataStats, ops.DropLowCardinality),
    *(ops.Filter, ops.Dropna),
)
_MIX_COLUMNS = (ops.Filter, ops.Dropna, ops.Groupby, ops.DifferenceLag, ops.JoinExternal, Subgraph)


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
        for kind, (attribute, prefix) in _FILES.items():
            files = getattr(node.op, attribute) if isinstance(node.op, kind) else {}
            for storage in files:
                path = folder / SAVED_FILES / f"{prefix}.{storage}.parquet"
                files[storage] = str(path)
                if not path.exists():
                    raise UserError(
                        f"{folder} lacks {SAVED_FILES}/{path.name}. Copy the whole folder, or fit "
                        "with an absolute out_path and save again"
                    )
    return workflow


def nodes(output_node: dag.Node) -> list[dag.Node]:
    """All nodes of a graph, with those of each `Subgraph`."""
    return list(dag.postorder_iter_nodes(output_node, flatten_subgraphs=True))


def operator_name(op: Any) -> str:
    """Name of an operator as users write it."""
    name = type(op).__name__
    return "LambdaOp" if name == "UDF" else name


@dataclass(frozen=True)
class Vocabulary:
    """The raw ids of one field, or of several that Categorify encodes jointly."""

    storage: str  # its name: the column's own, or "a_b" for two columns
    path: Path  # a parquet file, or a folder of them
    read: str | None  # the raw column with these values; None if they are computed from others

    @property
    def type(self) -> pa.DataType | None:
        """Type of the values; None if it is not known, or they are combined ones."""
        schema = pads.dataset(self.path, format="parquet").schema
        kind = schema.field(self.storage).type if self.storage in schema.names else pa.null()
        return None if pa.types.is_null(kind) else getattr(kind, "value_type", kind)


@dataclass(frozen=True)
class Column:
    """What a column of a workflow is computed from."""

    raw: frozenset[str] = frozenset()  # raw columns that its values depend on
    operators: tuple[dag.Operator, ...] = ()  # that computed its values, in order
    vocabulary: Vocabulary | None = None  # of the `Categorify` whose ids it holds, unchanged

    @property
    def is_statistic(self) -> bool:
        """Whether it is computed from a `TargetEncoding` or a `JoinGroupby`."""
        return any(isinstance(op, _STATISTICS) for op in self.operators)


def trace(output_node: dag.Node) -> dict[str, Column]:
    """Follow columns through a fitted graph to its output."""
    found: dict[dag.Node, dict[str, Column]] = {}
    for node in dag.postorder_iter_nodes(output_node):
        given = {name: Column(frozenset({name})) for name in node.input_schema.column_names}
        for above in node.parents_with_dependencies:
            given |= found[above]  # the last of two columns with one name, as in NVTabular
        outputs = node.output_schema.column_names
        found[node] = {name: _computed(node, name, given) for name in outputs}
    return found[output_node]


def _computed(node: dag.Node, name: str, given: Mapping[str, Column]) -> Column:
    """A column that a node computes: from all columns if it is not known from which."""
    op, mapped = node.op, node.column_mapping.get(name, [])
    keeps = isinstance(op, _KEEP_VALUES)
    is_stock = type(op).__module__.startswith(("nvtabular.", "merlin."))
    mixes = isinstance(op, _MIX_COLUMNS) or getattr(op, "_param_count", 1) > 1
    names = mapped if is_stock and not mixes else list(given)
    if isinstance(op, _STATISTICS):  # not of the target or the numbers
        names = [one for one in mapped if one in node.selector.names]
    inputs = [given[one] for one in names if one in given]
    operators = [*(by for one in inputs for by in one.operators), *([] if keeps else [op])]
    source = given.get(mapped[0], Column()) if len(mapped) == 1 else Column()
    vocabulary = source.vocabulary if keeps else None
    if isinstance(op, ops.Categorify):
        read = min(source.raw) if source.raw and not source.operators else None
        storage = op.storage_name.get(name, name)
        vocabulary = Vocabulary(storage, Path(op.categories[storage]), read)
    raw = frozenset().union(*(one.raw for one in inputs))
    return Column(raw, tuple(dict.fromkeys(operators)), vocabulary)
