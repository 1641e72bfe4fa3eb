"""A saved NVTabular workflow on raw rows: each makes one row, which stands where the raw one stood.

An operator may drop rows, double them or move them, and its result have as many as before: each
would get the score of another. So every operator of the graph is watched, and not the end alone.
Importing this module imports NVTabular: import it where used.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pandas as pd

from merlin_cowclip.workflows.data.workflow_graph import nodes_of, operator_name
from merlin_cowclip.workflows.quiet import quiet_imports

with quiet_imports():
    import nvtabular as nvt
    from merlin.core.dispatch import is_dataframe_object
    from merlin.dag import Node
    from merlin.dag.executors import LocalExecutor
    from merlin.dag.ops.subgraph import Subgraph
    from nvtabular.ops import Filter, Groupby, JoinExternal, ReduceDtypeSize

_PLACE = "__merlin_cowclip_place__"  # a row's, through a join


class OtherRowsError(Exception):
    """An operator makes other rows than it is given; what it makes of how many, and its name."""

    def __init__(self, operator: str, made: int, given: int) -> None:
        moved = ", some of them moved or doubled" if made == given else ""
        super().__init__(f"{made:,} of {given:,} from {operator}{moved}")


class OtherNumberError(Exception):
    """A number of which `ReduceDtypeSize` would make another one: of 261 in an int8 5."""

    def __init__(self, column: str, row: int, value: Any, kind: np.dtype) -> None:
        super().__init__(f"{value} in row {row} of {column!r} is no {kind}")
        self.column, self.row, self.value, self.kind = column, row, value, kind


def transformed(
    workflow: nvt.Workflow, frame: pd.DataFrame, *, past_filters: bool = False
) -> pd.DataFrame:
    """What the workflow makes of raw rows, the n-th of the n-th.

    Seen are the operators of NVTabular, and one of the user's own where it drops rows, adds some,
    or leaves the index of those that it moves. `DifferenceLag` keeps rows in place.

    Args:
      workflow: fitted.
      frame: raw rows, of index 0, 1, 2, …
      past_filters: whether rows that a `Filter` drops go on: rows of one's own making, which are to
        tell what the other operators make.

    Raises:
      OtherRowsError: an operator drops rows, repeats or moves them.
      OtherNumberError: `ReduceDtypeSize` is given a number beyond the integers of its fit.
    """
    executor = _RowForRow(len(frame), past_filters=past_filters)
    return executor.transform(frame, workflow.output_node, workflow.output_dtypes)


def moving(workflow: nvt.Workflow) -> list[str]:
    """Operators that move rows, or drop some and repeat others, by name."""
    joins = {f"JoinExternal(how={how!r})" for how in _joins(workflow) - {"left"}}
    return sorted({"Groupby" for _ in nodes_of(workflow.output_node, Groupby)} | joins)


def _joins(workflow: nvt.Workflow) -> set[str]:
    return {node.op.how for node in nodes_of(workflow.output_node, JoinExternal)}


class _RowForRow(LocalExecutor):
    """Merlin's executor of a graph, which looks at what each operator makes.

    Args:
      rows: that every operator is to make.
      past_filters: whether what a `Filter` drops goes on.
    """

    def __init__(self, rows: int, *, past_filters: bool) -> None:
        super().__init__()
        self._rows = rows
        self._past_filters = past_filters

    def _run_node_transform(
        self, node: Node, input_data: Any, capture_dtypes: bool = False, strict: bool = False
    ) -> Any:
        op = node.op
        if op is None or not is_dataframe_object(input_data):
            return super()._run_node_transform(node, input_data, capture_dtypes, strict)
        if isinstance(op, Subgraph):  # which has an executor of its own
            made = self.transform(input_data, op.graph)
            while op.loop_until and not op.loop_until(made):
                made = self.transform(made, op.graph)
            return made
        if isinstance(op, ReduceDtypeSize):
            _check_reduced(op, input_data)
        index, is_inner = input_data.index, isinstance(op, JoinExternal) and op.how != "left"
        seen = _SeenFilter(op) if isinstance(op, Filter) else None
        if seen is not None:
            node = copy.copy(node)
            node.op = seen
        given = input_data.assign(**{_PLACE: np.arange(len(index))}) if is_inner else input_data
        made = super()._run_node_transform(node, given, capture_dtypes, strict)
        if not is_dataframe_object(made):
            return made
        if seen is not None and self._past_filters and len(made) != self._rows:
            return input_data
        if len(made) != self._rows or not (
            self._in_order(made[_PLACE].to_numpy())
            if is_inner
            else self._kept(op, index, given, (made if seen is None else seen).index)
        ):
            raise OtherRowsError(operator_name(op), len(made), self._rows)
        return made.drop(columns=[_PLACE]) if is_inner else made

    def _kept(self, op: Any, index: pd.Index, given: Any, made: pd.Index) -> bool:
        """Whether as many rows stand where they stood, by their index before and after."""
        if isinstance(op, Groupby):  # by its keys, of which each is there once
            if not isinstance(given, pd.DataFrame):
                return len(given) == 1  # cuDF does not sort them
            return self._in_order(given.groupby(op.groupby_cols).ngroup().to_numpy())
        if not self._in_order(index) or not _numbers_rows(made, self._rows):
            return True
        return self._in_order(made)

    def _in_order(self, places: Any) -> bool:
        places = np.asarray(places.to_pandas() if hasattr(places, "to_pandas") else places)
        return bool(np.array_equal(places, np.arange(self._rows)))


def _check_reduced(op: ReduceDtypeSize, given: Any) -> None:
    for name, dtype in op.dtypes.items():
        kind = np.dtype(dtype.to_numpy)
        column = given[name].to_pandas() if hasattr(given[name], "to_pandas") else given[name]
        if kind.kind not in "iu" or column.dtype.kind not in "iuf":
            continue
        with np.errstate(invalid="ignore"):
            bad = (column.to_numpy().astype(kind) != column.to_numpy()) & column.notna().to_numpy()
        if bad.any():
            row = int(bad.argmax())
            raise OtherNumberError(name, row, column.iloc[row].item(), kind)


class _SeenFilter(Filter):
    """A Filter as it is, which numbers its rows anew; and the index that they had before.

    Its function is called once: one that changes the frame it is given would do so twice.
    """

    def __init__(self, op: Filter) -> None:
        super().__init__(self._seen)
        self._function = op.f
        self.index: Any = None

    def _seen(self, frame: Any) -> Any:
        made = self._function(frame)
        self.index = made.index
        return made


def _numbers_rows(index: Any, rows: int) -> bool:
    """Whether an index may be that of rows that were moved, and not of a column of the user's."""
    if index.name is not None or index.nlevels > 1 or index.dtype.kind not in "iu":
        return False
    return bool(index.min() >= 0 and index.max() < rows)
