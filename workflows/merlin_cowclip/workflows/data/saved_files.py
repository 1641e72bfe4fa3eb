"""Files in which operators of a saved workflow look values up: each is of one operator alone.

`Workflow.save` copies them into one folder, under names of the columns that were read
(`unique.ad.parquet`, `cat_stats.ad.parquet`), whatever `out_path` they were fitted with: of two of
one name one is lost, and raw rows would be encoded by the other.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from merlin_cowclip.workflows.data.id_origins import operators_that_keep_values
from merlin_cowclip.workflows.data.workflow_graph import (
    file_name,
    files_of,
    followed,
    nodes_of,
    operator_name,
)
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.quiet import quiet_imports

if TYPE_CHECKING:
    from pathlib import Path

    import nvtabular as nvt
    from merlin.dag import Node

_Made = tuple[Any, str]  # by which node, or by none, and its name there

# Of how an operator is computed, not of what.
_NO_MATTER = (
    "out_path",
    "cat_cache",
    "on_host",
    "tree_width",
    "split_every",
    "target",
    "cont_cols",
)


@dataclass(frozen=True)
class _Writer:
    """An operator that has written a file, and of what."""

    op: Any
    storage: str  # its name of what was read
    read: Mapping[str, _Made | None]

    def writes_as(self, other: _Writer) -> bool:
        """Whether the file of the other is the same: by the same options, of the same columns."""
        return self.storage == other.storage and (
            self.op is other.op
            or (
                type(self.op) is type(other.op)
                and _options(self.op) == _options(other.op)
                and self.read == other.read
            )
        )


def refuse_shared_files(workflow: nvt.Workflow, folder: Path) -> None:
    """Refuse a workflow of which a file was written by two operators, unless of the same columns.

    Args:
      workflow: fitted, saved and loaded.
      folder: where it was saved.

    Raises:
      UserError: there is one.
    """
    with quiet_imports():
        from nvtabular import ops

    # Of rows that were left out, too, another file is written.
    leave_out = (ops.Filter, ops.Dropna, ops.DropLowCardinality, ops.ListSlice)
    keep = tuple(kind for kind in operators_that_keep_values() if kind not in leave_out)
    writers: dict[str, _Writer] = {}

    def made_by(node: Node, given: dict[str, _Made]) -> dict[str, _Made]:
        for storage, path in files_of(node.op).items():
            read: Mapping[str, _Made | None] = given  # statistics: of the targets as well
            if isinstance(node.op, ops.Categorify):
                groups = node.op.storage_name.items()
                joint = [name for name, group in groups if group == storage]
                read = {name: given.get(name) for name in joint or [storage]}
            one = _Writer(node.op, storage, read)
            other = writers.setdefault(os.path.basename(path), one)
            if not one.writes_as(other):
                _refuse(path, one, other, folder)
        if isinstance(node.op, keep):
            mapped = node.column_mapping.items()
            return {
                name: given[sources[0]]
                for name, sources in mapped
                if len(sources) == 1 and sources[0] in given
            }
        return {name: (id(node), name) for name in node.output_schema.column_names}

    followed(workflow.output_node, lambda name: (None, name), made_by, (None, ""))


def statistics_of_no_rows(workflow: nvt.Workflow, folder: Path) -> list[str]:
    """Keys whose missing values NVTabular counted as none, on a CPU, beside sums that have them.

    Means of theirs are none: a sum over 0 rows, smoothed or infinite.

    Args:
      workflow: fitted, saved and loaded.
      folder: where it was saved.

    Raises:
      UserError: a file of statistics is not there.
    """
    with quiet_imports():
        from nvtabular.ops import JoinGroupby, TargetEncoding

    found = set[str]()
    for node in nodes_of(workflow.output_node, (JoinGroupby, TargetEncoding)):
        for name, path in files_of(node.op).items():
            if not os.path.exists(path):
                raise UserError(
                    f"a workflow's statistics must lie in its folder. Received: {folder}, without "
                    f"{file_name(node.op, name)}. Copy the whole folder, or save the workflow again"
                )
            table = pd.read_parquet(path)
            keys = [c for c in map(str, table) if c in node.input_schema.column_names]
            counts = table.get(f"{name}{node.op.name_sep}count")
            if counts is None:
                # Where nobody asked for the counts a mean or a deviation tells: it is none. It is
                # the first key of a group that is counted.
                means = table.drop(columns=keys).select_dtypes("number")
                none = table[keys[0]].isna() & ~np.isfinite(means).all(axis=1)
            else:
                none = counts == 0
            found |= {key for key in keys if table[key][none].isna().any()}
    return sorted(found)


def _options(op: Any) -> dict[str, Any]:
    names = [name for name in inspect.signature(type(op).__init__).parameters if name != "self"]
    return {n: repr(getattr(op, n, None)) for n in names if n not in _NO_MATTER}


def _refuse(path: str, one: _Writer, other: _Writer, folder: Path) -> None:
    names = sorted({operator_name(one.op), operator_name(other.op)})
    who = f"two {names[0]}" if len(names) == 1 else f"{names[0]} and {names[1]}"
    raise UserError(
        "operators of a workflow must look values up in files of their own: NVTabular saves them "
        "under the name of the column that is read, whatever out_path is, and of two of one name "
        f"one is lost. Received: {who} with {os.path.basename(path)!r} in {folder}. Rename the "
        "column before one of them (Rename), or use one for both; fit, write the parquet and save "
        "again"
    )
