"""A saved NVTabular workflow for rows that it was not fitted on: their statistics are all rows'.

Stock `TargetEncoding` draws folds for whatever it is given, by a row's place in it, and encodes a
row by the other folds, so that no training row sees its own target. A new row has no fold: its
score would depend on how its file is cut into row groups, or on its place in a request.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from merlin_cowclip.workflows.data.id_origins import encoded_columns
from merlin_cowclip.workflows.data.workflow_graph import every_node
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.quiet import quiet_imports, quiet_operators

if TYPE_CHECKING:
    import nvtabular as nvt


def for_new_rows(
    workflow: nvt.Workflow, lists: Mapping[str, bool] = MappingProxyType({})
) -> nvt.Workflow:
    """Make a fitted workflow one that encodes a row the same wherever it stands.

    Stock `Categorify` encodes, too, rows whose ids are all missing (`MissingIds`).

    `TargetEncoding` of one fold takes the statistics of all rows of the fit, which it has
    beside those of the folds, whatever the folds were. What hashes on a CPU (`num_buckets`) or
    compares neighbours (`DifferenceLag`) stays as it is, of which `adopt` tells.

    Args:
      workflow: fitted; changed in place.
      lists: by column that it makes whether it is of lists, as far as that is known.

    Raises:
      UserError: it makes a column of the folds.
    """
    with quiet_imports():
        from nvtabular.ops import Categorify, TargetEncoding

        from merlin_cowclip.workflows.data.operators import MissingIds
        from merlin_cowclip.workflows.data.raw_columns import a_row
        from merlin_cowclip.workflows.data.row_for_row import transformed

    encoded = encoded_columns(workflow)
    known = {one: are for name, are in lists.items() for one in encoded.get(name, ())}
    for node in every_node(workflow.output_node):
        if type(node.op) is Categorify:  # and none that is made of it, as our own
            of_lists = {column.name: column.is_list for column in node.input_schema}
            here = {name: are for (of, name), are in known.items() if of == id(node)}
            told = [name for name, are in {**of_lists, **here}.items() if are]
            node.op = MissingIds(node.op, told, list(here))
        if not isinstance(node.op, TargetEncoding):
            continue
        if node.op.kfold > 1 and not node.op.drop_folds:
            raise UserError(
                "raw rows need a workflow that makes no column of folds, which only the rows of "
                "its fit have. Received: TargetEncoding(drop_folds=False). Give the parquet that "
                "it wrote, or fit one without, and train again"
            )
        node.op.kfold = 1
    # What an operator makes of lists, or lists of, no schema tells: what is made of it in the end
    # does, or a row of our making, and where it is none of the workflow's, the rows that come.
    with contextlib.suppress(Exception), quiet_operators():
        transformed(workflow, a_row(workflow.input_schema), past_filters=True)
    return workflow
