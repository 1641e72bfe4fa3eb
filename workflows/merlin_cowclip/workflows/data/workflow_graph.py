"""A saved workflow, loaded, and its operators' graph, with those within Merlin's `Subgraph`.

Merlin's own iterators go into one `Subgraph`, and not into those within it.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from merlin_cowclip.workflows.quiet import quiet_imports

if TYPE_CHECKING:
    import nvtabular as nvt
    from merlin.dag import Node

T = TypeVar("T")

SAVED_FILES = "categories"  # in a saved workflow's folder, what its operators look values up in


def load_saved(folder: str | Path, *, find_again: bool = True) -> nvt.Workflow:
    """A workflow that was saved, loaded; it runs code from its folder.

    NVTabular keeps what operators look values up in (vocabularies, statistics) by its path, for the
    process: of a workflow that lay there before, too. It is read anew. And where a part of such a
    file's name is that of the folder, NVTabular has replaced that as well: the file is found again.

    Args:
      folder: where it was saved.
      find_again: whether to see to that; else it is as NVTabular loads it.
    """
    with quiet_imports():
        import nvtabular as nvt
        from merlin.io.worker import clean_worker_cache
    clean_worker_cache()
    workflow = nvt.Workflow.load(str(folder))
    if find_again:
        _find_again(workflow, Path(folder).absolute())
    return workflow


def _find_again(workflow: nvt.Workflow, folder: Path) -> None:
    """Correct paths of files that are not there: of those in the pickle the beginning alone."""
    nodes = list(every_node(workflow.output_node))
    if all(os.path.exists(path) for node in nodes for path in files_of(node.op).values()):
        return
    saved = pickle.loads((folder / "workflow.pkl").read_bytes())
    for node, as_saved in zip(nodes, every_node(saved.output_node), strict=True):
        files = files_of(node.op)
        for storage, path in files_of(as_saved.op).items():
            within = os.path.relpath(path, as_saved.op.out_path)
            if not os.path.exists(files[storage]) and (folder / within).exists():
                files[storage] = str(folder / within)


def files_of(op: Any) -> dict[str, str]:
    """By name, of the columns that were read, the files that an operator has written: its own."""
    with quiet_imports():
        from nvtabular import ops

    files: dict[str, str] = {}
    if isinstance(op, ops.Categorify | ops.JoinGroupby):
        files = op.categories
    elif isinstance(op, ops.TargetEncoding):
        files = op.stats
    return files


def file_name(op: Any, storage: str) -> str:
    """Of such a file, as NVTabular writes it."""
    with quiet_imports():
        from nvtabular.ops import Categorify

    kind = "unique" if isinstance(op, Categorify) else "cat_stats"
    return f"{kind}.{storage}.parquet"


def every_node(output_node: Node) -> Iterator[Node]:
    """All nodes, each after those that it reads; those of a `Subgraph` before it, at any depth."""
    with quiet_imports():
        from merlin.dag import postorder_iter_nodes

    for node in postorder_iter_nodes(output_node):
        if (inner := subgraph_of(node)) is not None:
            yield from every_node(inner)
        yield node


def nodes_of(output_node: Node, kinds: type | tuple[type, ...]) -> list[Node]:
    """Those whose operator is of a kind."""
    return [node for node in every_node(output_node) if isinstance(node.op, kinds)]


def followed(
    output_node: Node,
    raw: Callable[[str], T],
    made_by: Callable[[Node, dict[str, T]], Mapping[str, T]],
    unknown: T,
) -> dict[str, T]:
    """What is known of the columns that a graph makes, followed from those that it reads.

    Args:
      output_node: of the graph.
      raw: what is known of a column that it reads, by name.
      made_by: what is known of the columns that a node makes, by name, from what is known of those
        that it is given.
      unknown: what is known of those that `made_by` leaves out.
    """
    with quiet_imports():
        from merlin.dag import postorder_iter_nodes

    found: dict[int, dict[str, T]] = {}
    for node in postorder_iter_nodes(output_node):
        above = node.parents_with_dependencies
        given = {} if above else {name: raw(name) for name in node.input_schema.column_names}
        for one in above:  # of two of one name NVTabular takes the last
            given |= found[id(one)]
        inner = subgraph_of(node)
        if inner is not None:
            found[id(node)] = followed(inner, _among(given, unknown), made_by, unknown)
        else:
            made = made_by(node, given)
            names = node.output_schema.column_names
            found[id(node)] = {name: made.get(name, unknown) for name in names}
    return found[id(output_node)]


def made_so(output_node: Node, holds: Callable[[Any, bool], bool]) -> set[str]:
    """Columns that a graph makes of which something holds, and of none that it reads.

    Args:
      output_node: of the graph, fitted.
      holds: whether it does of what an operator makes, by whether it does of one of the columns
        that this is made of or found by.
    """

    def made_by(node: Node, given: dict[str, bool]) -> dict[str, bool]:
        made: dict[str, bool] = {}
        for name in node.output_schema.column_names:
            sources = (*_found_by(node), *node.column_mapping.get(name, [name]))
            made[name] = holds(node.op, any(given.get(one, False) for one in sources))
        return made

    found = followed(output_node, lambda name: False, made_by, False)
    return {name for name, is_so in found.items() if is_so}


def _found_by(node: Node) -> Sequence[str]:
    """Columns that decide on all that a node makes, and that its `column_mapping` leaves out."""
    with quiet_imports():
        from nvtabular import ops

    if isinstance(node.op, ops.LambdaOp):
        return list(node.dependency_columns.names)
    keys: str | Sequence[str] = ()
    if isinstance(node.op, ops.JoinExternal):
        keys = node.op.on
    elif isinstance(node.op, ops.Groupby):
        keys = node.op.groupby_cols
    return [keys] if isinstance(keys, str) else keys


def operator_name(op: Any) -> str:
    """As users write it."""
    name = type(op).__name__
    return "LambdaOp" if name == "UDF" else name


def _among(given: Mapping[str, T], unknown: T) -> Callable[[str], T]:
    return lambda name: given.get(name, unknown)


def subgraph_of(node: Node) -> Any:
    """The output node of the graph that a node stands for, which reads what the node reads."""
    with quiet_imports():
        from merlin.dag.ops.subgraph import Subgraph

    return node.op.graph.output_node if isinstance(node.op, Subgraph) else None
