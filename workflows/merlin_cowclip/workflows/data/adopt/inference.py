"""Encode raw rows with a saved workflow, each row by itself and without its label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as kinds

from merlin_cowclip.workflows.data.adopt.graph import Column, nodes, operator_name, trace
from merlin_cowclip.workflows.errors import UserError, clipped, quoted
from merlin_cowclip.workflows.quiet import quiet_imports, quiet_operators

if TYPE_CHECKING:
    import nvtabular as nvt


class InferenceWorkflow:
    """A saved workflow for rows that it was not fitted on.

    `TargetEncoding` uses the statistics of all rows of the fit, not those of folds. Nulls get id 1
    also where stock `Categorify` fails on them. Raw columns that no model input depends on, such as
    the label, may be missing; they are filled.

    Args:
        workflow: fitted; changed in place.
        fields: the model's inputs.
        label: its label.
        lists: those of the inputs that are lists.

    Attributes:
        types: raw column → Arrow type at the fit; None if the workflow does not know it.
        required: raw columns that a model input depends on.
        of_label: raw columns that the label is computed from; None if the workflow has no label.

    Raises:
        UserError: the workflow cannot encode rows one by one.
    """

    def __init__(
        self, workflow: nvt.Workflow, fields: Sequence[str], label: str, lists: Sequence[str] = ()
    ) -> None:
        with quiet_imports():
            from nvtabular.ops import Categorify, TargetEncoding

            from merlin_cowclip.workflows.data.adopt.null_safe import NullSafeCategorify

        traced = trace(workflow)
        columns = {name: traced.outputs.get(name, Column()) for name in fields}
        if reason := why_not_raw(workflow, columns):
            raise UserError(f"raw rows cannot be encoded: {reason}")
        encoders = (columns[name].encoder for name in lists)
        of_lists = {(id(one[0]), one[1]) for one in encoders if one is not None}
        for node in nodes(workflow.output_node):
            if isinstance(node.op, TargetEncoding):
                node.op.kfold = 1
            elif type(node.op) is Categorify:
                known = {name for key, name in of_lists if key == id(node)}
                known |= {column.name for column in node.input_schema if column.is_list}
                node.op = NullSafeCategorify(node.op, known)
        self.workflow = workflow
        self.columns = list(workflow.input_schema.column_names)
        self.types = _types(workflow, traced.lookups)
        self.required = frozenset().union(*(column.raw for column in columns.values()))
        self.of_label = traced.outputs[label].raw if label in traced.outputs else None

    def missing(self, given: Sequence[str]) -> list[str]:
        """Required columns that are not there."""
        return [name for name in self.columns if name in self.required and name not in given]

    def has_label(self, given: Sequence[str]) -> bool:
        """Whether the label is computed from columns that are there."""
        return self.of_label is not None and self.of_label <= set(given)

    def transform(self, columns: Mapping[str, Any], where: object) -> pd.DataFrame:
        """Encode raw rows.

        Args:
            columns: by name Arrow arrays, or columns of a frame.
            where: of the rows, for messages.

        Returns:
            A row for each, in order.

        Raises:
            UserError: a column is missing or of another type than at the fit, the workflow fails,
                or it returns another number of rows.
        """
        out = self.encode(columns, where)
        rows = len(next(iter(columns.values())))
        if len(out) != rows:
            ops = {operator_name(node.op) for node in nodes(self.workflow.output_node)}
            droppers = ", ".join(sorted(ops & {"Filter", "Dropna", "JoinExternal"}))
            raise UserError(
                f"the workflow returned {len(out):,} rows for {rows:,}"
                f"{f' ({droppers})' * bool(droppers)}, so scores cannot be matched to rows: {where}"
                ". Filter the rows first, or score the parquet that the workflow wrote"
            )
        return out

    def encode(self, columns: Mapping[str, Any], where: object) -> pd.DataFrame:
        """The same, of as many rows as the workflow keeps."""
        if missing := self.missing(list(columns)):
            raise UserError(f"{where} lacks columns of the workflow: {quoted(missing, brief=True)}")
        rows, filled = len(next(iter(columns.values()))), []
        frame = {}
        for name in self.columns:
            kind = self.types[name]
            if name in columns:
                frame[name] = _cast(columns[name], kind, f"column {name!r} of {where}").to_pandas()
            else:
                frame[name] = _zeros(rows, kind).to_pandas()
                filled.append(name)
        try:
            with quiet_operators():
                return self.workflow.transform(pd.DataFrame(frame))
        except UserError:
            raise
        except Exception as error:  # whatever the user's own operators raise
            cause = error.__cause__ or error
            hint = f" ({quoted(filled, brief=True)}, missing, was filled)" if filled else ""
            raise UserError(
                f"the workflow fails on {where}{hint}: {type(cause).__name__}: "
                f"{clipped(str(cause))}. Give rows as it was fitted on"
            ) from error


def why_not_raw(workflow: nvt.Workflow, fields: Mapping[str, Column]) -> str | None:
    """Why raw rows cannot be encoded one by one by a workflow, as a sentence; None if they can."""
    with quiet_imports():
        from nvtabular import ops

    hashed = [name for name, column in fields.items() if column.is_hashed]
    if hashed:
        return (
            f"NVTabular hashed ids of {quoted(hashed, brief=True)}, and its hash on a CPU depends "
            "on the row number. Fit without HashBucket, HashedCross and num_buckets"
        )
    for node in nodes(workflow.output_node):
        joins = isinstance(node.op, ops.JoinExternal) and node.op.how != "left"
        if joins or isinstance(node.op, ops.Groupby | ops.DifferenceLag):
            return (
                f"{operator_name(node.op)}{'(how=' + repr(node.op.how) + ')' if joins else ''} "
                "computes a row from others, or drops rows. Encode the rows with the workflow "
                "yourself, and give `predict` the parquet that it wrote"
            )
    return None


# Types -------------------------------------------------------------------------------------------


def _types(
    workflow: nvt.Workflow, lookups: Mapping[str, list[tuple[str, str]]]
) -> dict[str, pa.DataType | None]:
    """Types of raw columns at the fit: of the schema, or where it has none, of a vocabulary."""
    found: dict[str, pa.DataType | None] = {}
    for column in workflow.input_schema:
        known = None if column.dtype.name == "unknown" else column.dtype.to_numpy
        kind = np.dtype(known or object)
        held: pa.DataType | None
        if kind.kind in "iufb":
            held = pa.from_numpy_dtype(kind)
        else:
            held = _looked_up(lookups.get(column.name, ()))
            if held is None and kind.kind == "M":
                held = pa.timestamp("ns")
        found[column.name] = pa.list_(held) if column.is_list and held is not None else held
    return found


def _looked_up(lookups: Sequence[tuple[str, str]]) -> pa.DataType | None:
    """The type of values that are looked up, if all files agree on it."""
    held = set()
    for path, name in dict.fromkeys(lookups):
        files = sorted(Path(path).glob("*.parquet")) if Path(path).is_dir() else [Path(path)]
        schema = pq.read_schema(files[0]) if files else pa.schema([])
        if name in schema.names:
            held.add(_plain(schema.field(name).type))
    held.discard(pa.null())
    kind = held.pop() if len(held) == 1 else None
    if kind is not None and kinds.is_timestamp(kind):
        return pa.timestamp("ns", kind.tz)  # pandas' unit
    return kind


def element_type(kind: pa.DataType | None) -> pa.DataType | None:
    """Type of the values, in lists too."""
    return kind.value_type if kind is not None and _is_list(kind) else kind


def _plain(kind: pa.DataType) -> pa.DataType:
    return _plain(kind.value_type) if kinds.is_dictionary(kind) else kind


def _cast(column: Any, kind: pa.DataType | None, where: str) -> pa.Array:
    """A column as the fit had it, by Arrow's checked cast.

    Raises:
        UserError: another kind of type, or a value that the fit's type does not have.
    """
    try:
        if isinstance(column, pd.Series):
            column = _from_pandas(column)
        if kinds.is_dictionary(column.type):
            column = column.dictionary_decode()
        if kind is None and (kinds.is_integer(column.type) or kinds.is_floating(column.type)):
            raise UserError(
                f"{where} is {column.type}, but was no number when the workflow was fitted. Cast it"
            )
        if kind is None or column.type == kind:
            return column
        if not _fits(column.type, kind) and column.null_count < len(column):
            raise UserError(
                f"{where} is {column.type}, but was {kind} when the workflow was fitted. Cast it"
            )
        return (
            pa.nulls(len(column), kind) if column.null_count == len(column) else column.cast(kind)
        )
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        fitted = f", which was {kind} when the workflow was fitted" if kind is not None else ""
        raise UserError(f"{where}{fitted}: {clipped(str(error))}. Correct it") from None


def _from_pandas(column: pd.Series) -> pa.Array:
    found = pa.array(column, from_pandas=True)
    return found.combine_chunks() if isinstance(found, pa.ChunkedArray) else found


def _fits(given: pa.DataType, kind: pa.DataType) -> bool:
    """Whether a type may be cast: numbers to numbers, text to text, and any other to itself."""
    if kinds.is_null(given):
        return True
    if _is_list(kind) or _is_list(given):
        both = _is_list(kind) and _is_list(given)
        return both and _fits(_plain(given.value_type), kind.value_type)
    if kinds.is_timestamp(kind):
        return kinds.is_timestamp(given) and given.tz == kind.tz
    groups = (
        (kinds.is_integer, kinds.is_floating),
        (kinds.is_string, kinds.is_large_string, kinds.is_binary, kinds.is_large_binary),
        (kinds.is_decimal,),
        (kinds.is_date,),
        (kinds.is_duration,),
    )
    return given == kind or any(
        any(one(given) for one in group) and any(one(kind) for one in group) for group in groups
    )


def _is_list(kind: pa.DataType) -> bool:
    return bool(kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind))


def _zeros(rows: int, kind: pa.DataType | None) -> pa.Array:
    """A column in the place of one that is missing, with a value that operators can work on."""
    if kind is not None and _is_list(kind):
        return pa.array([[]] * rows, kind)
    try:
        return pa.array([0] * rows).cast(pa.string() if kind is None else kind)
    except pa.ArrowException:  # dates, bytes
        return pa.nulls(rows, kind)
