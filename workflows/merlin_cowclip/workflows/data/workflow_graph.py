"""The graph of a workflow's operators, those within Merlin's `Subgraph` among them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from merlin_cowclip.workflows.quiet import quiet_imports

if TYPE_CHECKING:
    from merlin.dag import Node


def every_node(output_node: Node) -> Iterator[Node]:
    """All nodes, each after those that it reads; those of a `Subgraph` before it, at any depth.

    Merlin's own iterators go one level deep.
    """
    with quiet_imports():
        from merlin.dag import postorder_iter_nodes

    for node in postorder_iter_nodes(output_node):
        if (inner := subgraph(node)) is not None:
            yield from every_node(inner)
        yield node


def nodes_of(output_node: Node, kinds: type | tuple[type, ...]) -> list[Node]:
    """Those whose operator is of a kind."""
    return [node for node in every_node(output_node) if isinstance(node.op, kinds)]


def subgraph(node: Node) -> Any:
    """The output node of the graph that a node stands for, which reads what the node reads."""
    with quiet_imports():
        from merlin.dag.ops.subgraph import Subgraph

    return node.op.graph.output_node if isinstance(node.op, Subgraph) else None
