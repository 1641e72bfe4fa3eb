"""Encode raw rows with a saved workflow, each row by itself and without its label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as kinds

from merlin_cowclip.workflows.data.adopt.graph import Column, Lookups, nodes, operator_name, trace
from merlin_cowclip.workflows.errors import UserError, clipped, quoted
from merlin_cowclip.workflows.quiet import quiet_imports, quiet_operators

with quiet_imports():
    import nvtabular as nvt
    from nvtabular import ops
    from nvtabular.ops.categorify import NULL_OFFSET


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
        outputs, lookups = trace(workflow)
        columns = {name: outputs[name] for name in fields}
        if reason := why_not_raw(workflow, columns):
            raise UserError(f"raw rows cannot be encoded: {reason}")
        encoders = [columns[name].encoder for name in lists]
        for node in nodes(workflow.output_node):
            if isinstance(node.op, ops.TargetEncoding):
                node.op.kfold = 1
            elif type(node.op) is ops.Categorify:
                known = {one[1] for one in encoders if one is not None and one[0] is node}
                known |= {column.name for column in node.input_schema if column.is_list}
                node.op = NullSafeCategorify(node.op, frozenset(known))
        self.workflow = workflow
        self.types = _types(workflow, lookups)
        self.columns = list(self.types)
        self.required = frozenset().union(*(column.raw for column in columns.values()))
        self.of_label = outputs[label].raw if label in outputs else None

    def missing(self, given: Sequence[str]) -> list[str]:
        """Required columns that are not there."""
        return [name for name in self.columns if name in self.required and name not in given]

    def has_label(self, given: Sequence[str]) -> bool:
        """Whether the label is computed from columns that are there."""
        return self.of_label is not None and self.of_label <= set(given)

    def transform(self, columns: Mapping[str, Any], where: object) -> pd.DataFrame:
        """Encode raw rows, one for each, in order.

        Args:
            columns: by name Arrow arrays, or columns of a frame.
            where: of the rows, for messages.

        Raises:
            UserError: a column is missing or of another type than at the fit, the workflow fails,
                or it returns another number of rows.
        """
        out = self.encode(columns, where)
        rows = len(next(iter(columns.values())))
        if len(out) != rows:
            names = {operator_name(node.op) for node in nodes(self.workflow.output_node)}
            droppers = ", ".join(sorted(names & {"Filter", "Dropna", "JoinExternal"}))
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
        rows = len(next(iter(columns.values())))
        frame = {}
        for name, kind in self.types.items():
            if name in columns:
                frame[name] = _cast(columns[name], kind, f"column {name!r} of {where}").to_pandas()
            else:
                frame[name] = _zeros(rows, kind).to_pandas()
        try:
            with quiet_operators():
                return self.workflow.transform(pd.DataFrame(frame))
        except UserError:
            raise
        except Exception as error:  # whatever the user's own operators raise
            cause = error.__cause__ or error
            filled = quoted((name for name in frame if name not in columns), brief=True)
            hint = f" ({filled}, missing, was filled)" if filled else ""
            raise UserError(
                f"the workflow fails on {where}{hint}: {type(cause).__name__}: "
                f"{clipped(str(cause))}. Give rows as it was fitted on"
            ) from error


def why_not_raw(workflow: nvt.Workflow, fields: Mapping[str, Column]) -> str | None:
    """Why raw rows cannot be encoded one by one by a workflow, as a sentence; None if they can."""
    if hashed := [name for name, column in fields.items() if column.is_hashed]:
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


class NullSafeCategorify(ops.Categorify):
    """A fitted `Categorify` that gives a null id 1, and an empty list for a null list.

    Stock fails on a batch of nulls only, and on a null among integers if the fit had none.

    Args:
        fitted: of which it is a copy.
        lists: columns of lists, which a batch of nulls does not show.
    """

    def __init__(self, fitted: ops.Categorify, lists: frozenset[str]) -> None:
        self.__dict__.update(fitted.__dict__)
        self.lists = lists

    def transform(self, col_selector: Any, df: Any) -> Any:
        """Encode a batch."""
        nulls = {n: df[n].isna().to_numpy() for n in col_selector.names if n in df}
        nulls = {name: null for name, null in nulls.items() if null.any()}
        if self.encode_type == "combo" or not nulls:
            return super().transform(col_selector, df)
        out, empty = df.reset_index(drop=True), []
        for name, null in nulls.items():
            if name in self.lists:
                rows = [[] if gone else row for gone, row in zip(null, df[name], strict=True)]
                out[name] = pd.Series(rows, dtype=object)
            elif null.all():
                empty.append(name)
            else:
                out[name] = out[name].mask(null, out[name][int(np.argmin(null))])
        rest = [name for name in col_selector.names if name not in empty]
        encoded = super().transform(type(col_selector)(rest), out) if rest else out
        for name, null in nulls.items():
            if name in empty:
                encoded[name] = np.full(len(df), NULL_OFFSET, np.int64)
            elif name not in self.lists:
                encoded[name] = np.where(null, NULL_OFFSET, encoded[name].to_numpy())
        encoded.index = df.index
        return encoded


# Types -------------------------------------------------------------------------------------------


def _types(workflow: nvt.Workflow, lookups: Lookups) -> dict[str, pa.DataType | None]:
    """Types of raw columns at the fit: of the schema, or where it has none, of a vocabulary."""
    found: dict[str, pa.DataType | None] = {}
    for column in workflow.input_schema:
        known = None if column.dtype.name == "unknown" else column.dtype.to_numpy
        kind = np.dtype(known or object)
        plain = pa.from_numpy_dtype(kind) if kind.kind in "iufb" else None
        held = plain or _looked_up(lookups.get(column.name, ()))
        if held is None and kind.kind == "M":
            held = pa.timestamp("ns")
        found[column.name] = pa.list_(held) if column.is_list and held is not None else held
    return found


def _looked_up(lookups: Sequence[tuple[str, str]]) -> pa.DataType | None:
    """The type of values that are looked up, if all files agree on it."""
    held = set()
    for path, name in dict.fromkeys(lookups):
        schema = pq.read_schema(next(Path(path).glob("*.parquet"), path))  # of a folder, or a file
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
    return kind.value_type if kinds.is_dictionary(kind) else kind


def _cast(column: Any, kind: pa.DataType | None, where: str) -> pa.Array:
    """A column as the fit had it, by Arrow's checked cast."""
    try:
        if isinstance(column, pd.Series):
            column = pa.array(column, from_pandas=True)
        if isinstance(column, pa.ChunkedArray):
            column = column.combine_chunks()
        if kinds.is_dictionary(column.type):
            column = column.dictionary_decode()
        given = column.type
        if kind is None:
            if not (kinds.is_integer(given) or kinds.is_floating(given)):
                return column
        elif column.null_count == len(column):
            return pa.nulls(len(column), kind)
        elif _fits(given, kind):
            return column.cast(kind)
        raise UserError(
            f"{where} is {given}, but was {kind or 'no number'} when the workflow was fitted. "
            "Cast it"
        )
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        fitted = f", which was {kind} when the workflow was fitted" if kind is not None else ""
        raise UserError(f"{where}{fitted}: {clipped(str(error))}. Correct it") from None


def _fits(given: pa.DataType, kind: pa.DataType) -> bool:
    """Whether a type may be cast: numbers to numbers, text to text, and any other to itself."""
    if _is_list(kind) and _is_list(given):
        return kinds.is_null(given.value_type) or _fits(_plain(given.value_type), kind.value_type)
    if kinds.is_timestamp(kind) and kinds.is_timestamp(given):
        return given.tz == kind.tz
    numbers = (kinds.is_integer, kinds.is_floating)
    texts = (kinds.is_string, kinds.is_large_string, kinds.is_binary, kinds.is_large_binary)
    return given == kind or any(
        any(one(given) for one in group) and any(one(kind) for one in group)
        for group in (numbers, texts)
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
