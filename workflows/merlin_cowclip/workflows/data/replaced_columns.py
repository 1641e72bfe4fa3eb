"""Columns of a saved NVTabular workflow that are not what its schema says.

An operator may hand on columns that it read, past its own schema: `Categorify(encode_type="combo")`
does so with those of its groups. Where several operators' columns are put together, NVTabular takes
the last of a name, so that raw values may stand in the place of ids.
Importing this module imports NVTabular: import it where used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from merlin_cowclip.workflows.data.id_origins import operators_that_keep_values
from merlin_cowclip.workflows.data.raw_columns import a_row
from merlin_cowclip.workflows.data.workflow_graph import nodes_of, operator_name
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.quiet import quiet_imports, quiet_operators

with quiet_imports():
    import nvtabular as nvt
    from merlin.dag import Node
    from merlin.dag.executors import LocalExecutor
    from merlin.dag.ops.subgraph import Subgraph
    from nvtabular.ops import Categorify


def check_columns_are_their_own(workflow: nvt.Workflow, folder: Path) -> None:
    """Refuse a workflow whose columns are others than its schema says.

    Of an operator that does not take a row of our making it is only known what its schema says.

    Args:
      workflow: fitted.
      folder: of it, for what is said.

    Raises:
      UserError: an operator's column stands in the place of another's of the name; or one
        Categorify encodes a column alone and in a group, of which its schema gives the column the
        group's vocabulary.
    """
    for node in nodes_of(workflow.output_node, Categorify):
        groups = node.selector.grouped_names if node.selector else []
        grouped = {name for group in groups if not isinstance(group, str) for name in group}
        twice = sorted(grouped & {group for group in groups if isinstance(group, str)})
        if node.op.encode_type == "combo" and twice:
            raise UserError(
                "one Categorify must not encode a column alone and in a group: NVTabular's schema "
                f"gives it the group's ids. Received: {twice[0]!r} in {folder}. Give each a "
                "Categorify of its own, the group's first (groups + columns), fit again, write the "
                "parquet again, and adopt that"
            )
    with quiet_operators():
        try:
            _Watching(folder).transform(a_row(workflow.input_schema), workflow.output_node)
        except UserError:
            raise
        except Exception:  # whatever the user's own operators raise
            return


class _Watching(LocalExecutor):
    """Merlin's executor of a graph, which looks at whose columns an operator is given."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def _run_upstream_transforms(
        self, node: Node, transformable: Any, capture_dtypes: bool = False, strict: bool = False
    ) -> list[Any]:
        outputs: list[Any] = []
        last: dict[str, Node] = {}
        for above in node.parents_with_dependencies:
            made = self._execute_node(above, transformable, capture_dtypes, strict)
            if made is not None and len(made):
                outputs.append(made)
                last |= dict.fromkeys(made.keys(), above)
        for name in node.input_schema.column_names:
            makers = [a for a in node.parents_with_dependencies if _makes(a, name)]
            given = last.get(name)
            if given is None or not makers or given in makers:
                continue
            handing = _handing_on(given, name)
            if _source(handing, name) is not _source(makers[-1], name):
                by = operator_name(handing.op)
                raise UserError(
                    "a column must be what the workflow's schema says. Received: "
                    f"{name!r} in {self._folder}, in whose place is what {by} read, and handed on "
                    "beside what it makes: NVTabular takes the last of a name. Let that "
                    f"{by} be first in the sum (it + the others), fit again, write the parquet "
                    "again, and adopt that"
                )
        return outputs

    def _run_node_transform(
        self, node: Node, input_data: Any, capture_dtypes: bool = False, strict: bool = False
    ) -> Any:
        if isinstance(node.op, Subgraph):  # which has an executor of its own
            return self.transform(input_data, node.op.graph)
        try:
            made = super()._run_node_transform(node, input_data, capture_dtypes, strict)
        except Exception:  # whatever the user's own operators raise of a row of ours
            return a_row(node.output_schema)
        # A row that was dropped would take its columns along.
        return made if len(made) else a_row(node.output_schema).reindex(columns=list(made.keys()))


def _makes(node: Node, name: str) -> bool:
    return name in node.output_schema.column_names


def _handing_on(node: Node, name: str) -> Node:
    """The operator that handed a column on past its schema, before others did."""
    while above := [a for a in node.parents_with_dependencies if not _makes(a, name)]:
        if len(above) < len(node.parents_with_dependencies):
            break
        node = above[-1]
    return node


def _source(node: Node, name: str) -> Node | None:
    """The node that made a column which others have kept or handed on; None of a raw one."""
    while not _makes(node, name) or isinstance(node.op, operators_that_keep_values()):
        above = [a for a in node.parents_with_dependencies if _makes(a, name)]
        if not above:  # Rename may have given it its name
            return node if node.parents_with_dependencies else None
        node = above[-1]
    return node
