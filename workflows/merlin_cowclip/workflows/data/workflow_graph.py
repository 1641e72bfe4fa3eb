"""A saved workflow, loaded, and its operators' graph, with those within Merlin's `Subgraph`.

Merlin's own iterators go into one `Subgraph`, and not into those within it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from merlin_cowclip.workflows.quiet import quiet_imports

if TYPE_CHECKING:
    import nvtabular as nvt
    from merlin.dag import Node

T = TypeVar("T")


def load_saved(folder: str | Path) -> nvt.Workflow:
    """A workflow that was saved, loaded; it runs code from its folder.

    NVTabular keeps what operators look values up in (vocabularies, statistics) by its path, for the
    process: of a workflow that lay there before, too. It is read anew.
    """
    with quiet_imports():
        import nvtabular as nvt
        from merlin.io.worker import clean_worker_cache
    clean_worker_cache()
    return nvt.Workflow.load(str(folder))


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
