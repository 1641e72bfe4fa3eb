# SPDX-License-Identifier: Apache-2.0
"""Encode raw rows with a saved workflow, each row by itself and without its label."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.types as kinds

from merlin_cowclip.workflows.data.adopt.graph import Column, nodes, operator_name, trace
from merlin_cowclip.workflows.data.adopt.validate import is_list
from merlin_cowclip.workflows.data.sources.base import is_text
from merlin_cowclip.workflows.data.spec import DatasetSpec
from merlin_cowclip.workflows.errors import UserError, clipped, quoted
from merlin_cowclip.workflows.quiet import quiet_imports, quiet_operators

with quiet_imports():
    import nvtabular as nvt
    from nvtabular import ops
    from nvtabular.ops.categorify import NULL_OFFSET


_BY_OTHER_ROWS = (ops.HashBucket, ops.HashedCross, ops.Groupby, ops.DifferenceLag)


class InferenceWorkflow:
    """A saved workflow for rows that it was not fitted on; the workflow is changed in place.

    `TargetEncoding` uses the statistics of all rows of the fit, not those of folds. Raw columns
    that no model input depends on, such as the label, may be missing.

    Attributes:
        types: raw column → Arrow type at the fit; None if the workflow does not know it.
        required: raw columns that a model input depends on.
    """

    def __init__(self, workflow: nvt.Workflow, spec: DatasetSpec) -> None:
        outputs = trace(workflow.output_node)
        columns = {name: outputs[name] for name in spec.fields}
        for op in (op for column in columns.values() for op in column.operators):
            is_hash = isinstance(op, ops.Categorify) and bool(op.num_buckets)
            if is_hash or isinstance(op, _BY_OTHER_ROWS):
                raise UserError(
                    f"raw rows cannot be encoded: {operator_name(op)}{'(num_buckets=…)' * is_hash} "
                    "depends on other rows or, as NVTabular's hash on a CPU, on the row number. "
                    "Give the parquet that the workflow wrote, or fit without it"
                )
        for node in nodes(workflow.output_node):
            if isinstance(node.op, ops.TargetEncoding):
                node.op.kfold = 1
            elif type(node.op) is ops.Categorify:
                lists = {column.name for column in node.input_schema if column.is_list}
                node.op = NullSafeCategorify(node.op, frozenset(lists.union(spec.lists)))
        self.workflow, self.types = workflow, _types(workflow, outputs)
        self.columns = list(self.types)
        self.required = frozenset().union(*(column.raw for column in columns.values()))
        self._of_label = outputs[spec.label].raw if spec.label in outputs else None

    def has_label(self, given: Sequence[str]) -> bool:
        """Whether the label is computed from columns that are there."""
        return self._of_label is not None and self._of_label <= set(given)

    def transform(
        self, columns: Mapping[str, Any], where: object, may_drop: bool = False
    ) -> pd.DataFrame:
        """Encode raw rows, one for each, in order; ``where`` they are from is for messages.

        ``columns`` are Arrow arrays, or columns of a frame. Raises UserError if one is missing or
        of another type than at the fit, if the workflow fails, or if it returns another number of
        rows, unless it ``may_drop`` some.
        """
        absent = [name for name in self.columns if name not in columns]
        if missing := [name for name in absent if name in self.required]:
            raise UserError(f"{where} lacks columns of the workflow: {quoted(missing)}")
        rows = len(next(iter(columns.values())))
        frame = {
            name: _zeros(rows, kind)
            if name in absent
            else as_fitted(columns[name], kind, f"column {name!r} of {where}")
            for name, kind in self.types.items()
        }
        try:
            with quiet_operators():
                out = self.workflow.transform(pa.table(frame).to_pandas())
        except Exception as error:  # whatever the user's own operators raise
            cause = error.__cause__ or error
            raise UserError(
                f"the workflow fails on {where}: {type(cause).__name__}: "
                f"{clipped(str(cause))}. Give rows as it was fitted on"
            ) from error
        if len(out) != rows and not may_drop:
            raise UserError(
                f"the workflow returned {len(out):,} rows for {rows:,}, so scores cannot be "
                f"matched to rows: {where}. Filter the rows first, or score the parquet that the "
                "workflow wrote"
            )
        return out


def halves(rows: int) -> Iterator[slice]:
    """Groups of n rows: the first half, half of the rest, and so on, down to one row."""
    first = 0
    while first < rows:
        yield slice(first, first := first + max(1, (rows - first) // 2))


class NullSafeCategorify(ops.Categorify):
    """A fitted `Categorify` that gives a null id 1, and an empty list for a null list.

    Stock fails on a batch of nulls only, and on a null among integers if the fit had none.
    ``lists`` are the columns of lists, which a batch of nulls does not show.
    """

    def __init__(self, fitted: ops.Categorify, lists: frozenset[str]) -> None:
        self.__dict__.update(fitted.__dict__)
        self.lists = lists

    def transform(self, col_selector: Any, df: Any) -> Any:
        """Encode a batch."""
        if self.encode_type == "combo" or not df[col_selector.names].isna().any(axis=None):
            return super().transform(col_selector, df)
        encoded = {}
        for name in col_selector.names:
            null = df[name].isna().to_numpy()
            known = df.loc[~null, [name]].reset_index(drop=True)
            alone = type(col_selector)([name])
            ids = iter(super().transform(alone, known)[name] if len(known) else [])
            missing: Any = [] if name in self.lists else NULL_OFFSET
            encoded[name] = [missing if gone else next(ids) for gone in null]
        return pd.DataFrame(encoded, index=df.index)


def _types(workflow: nvt.Workflow, outputs: Mapping[str, Column]) -> dict[str, pa.DataType | None]:
    """Types of raw columns at the fit: of the schema, or where it has none, of a vocabulary."""
    vocabularies = [column.vocabulary for column in outputs.values()]
    read = {one.read: one.type for one in vocabularies if one is not None}
    types: dict[str, pa.DataType | None] = {}
    for column in workflow.input_schema:
        known = None if column.dtype.name == "unknown" else column.dtype.to_numpy
        kind = np.dtype(known or object)
        fitted = pa.from_numpy_dtype(kind) if kind.kind in "iufb" else read.get(column.name)
        if kind.kind == "M" or (fitted is not None and kinds.is_timestamp(fitted)):
            fitted = pa.timestamp("ns", getattr(fitted, "tz", None))  # pandas' unit
        elif fitted == pa.float16():
            fitted = pa.float32()
        elif fitted is not None and kinds.is_decimal(fitted):  # as wide as the vocabulary's values
            fitted = pa.decimal128(38, fitted.scale)
        types[column.name] = pa.list_(fitted) if column.is_list and fitted is not None else fitted
    return types


def as_fitted(column: Any, kind: pa.DataType | None, where: str) -> pa.Array:
    """A column as the fit had it, by Arrow's checked cast; UserError for another type."""
    fitted = f"{kind or 'no number'} when the workflow was fitted"
    try:
        if isinstance(column, pd.Series):
            column = pa.array(column, from_pandas=True)
        if isinstance(column, pa.ChunkedArray):
            column = column.combine_chunks()
        # Arrow does not cast these.
        if kinds.is_dictionary(column.type):
            column = column.dictionary_decode()
        elif kinds.is_fixed_size_list(column.type):
            column = pa.array(column.to_pylist(), pa.list_(column.type.value_type))
        elif kinds.is_float16(column.type):
            column = pa.array(column.to_pandas().astype("float32"), from_pandas=True)
        if kind is None and (_family(column.type) != "number" or kinds.is_decimal(column.type)):
            return column
        if kind is not None and column.null_count == len(column):
            return pa.nulls(len(column), kind)
        if kind is not None and _family(column.type) in (_family(kind), "list of null"):
            return column.cast(kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        reason = clipped(str(error))
        raise UserError(f"{where}, which was {fitted}: {reason}. Correct it") from None
    raise UserError(
        f"{where} is {column.type}, but was {fitted}. Cast it; if the workflow wrote these rows, "
        "they are not raw: leave out --raw"
    )


def _family(kind: pa.DataType) -> str:
    """The same for types that may be cast to one another."""
    if is_list(kind):
        return f"list of {_family(kind.value_type)}"
    if kinds.is_integer(kind) or kinds.is_floating(kind) or kinds.is_decimal(kind):
        return "number"
    if is_text(kind) or kinds.is_fixed_size_binary(kind):
        return "text"
    return re.sub(r"\d+|\[\w+", "", str(kind))  # of any unit, but not of any time zone


def _zeros(rows: int, kind: pa.DataType | None) -> pa.Array:
    """A column in the place of one that is missing, with a value that operators can work on."""
    try:
        zero: Any = [] if kind is not None and is_list(kind) else 0
        return pa.array([zero] * rows).cast(pa.string() if kind is None else kind)
    except pa.ArrowException:  # dates, bytes
        return pa.nulls(rows, kind)
