"""Raw rows of a request to the inputs of the network, by the run's own NVTabular workflow.

The first operator of the ensemble, and what a server runs in Python. Merlin Systems' own sends the
rows on to a second Python model, and on that way text is lost: Triton gives it as bytes, of which
NumPy makes an array of str, which a Python model cannot send; with letters beyond ASCII not even
that. Here the workflow runs where the request arrives, and refuses what `predict` refuses.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from decimal import Decimal
from numbers import Real
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pandas as pd
import pyarrow as pa

from merlin_cowclip.plugins._checks import argument_name
from merlin_cowclip.workflows.data.datasets import DatasetSpec
from merlin_cowclip.workflows.data.encoded_rows import Place, check_numbers, checked_ids
from merlin_cowclip.workflows.data.parquet_logs import is_number, plain_type
from merlin_cowclip.workflows.data.raw_columns import Keys, learned_keys
from merlin_cowclip.workflows.data.raw_rows import RawRows, refusing_others
from merlin_cowclip.workflows.data.row_for_row import transformed
from merlin_cowclip.workflows.data.workflow_graph import load_saved
from merlin_cowclip.workflows.errors import UserError, clipped, excerpt, quoted
from merlin_cowclip.workflows.quiet import quiet_imports
from merlin_cowclip.workflows.serving.empty_texts import columns_that_hold_empty
from merlin_cowclip.workflows.serving.merlin_systems import TransformWorkflow

with quiet_imports():
    import nvtabular as nvt
    from merlin.core.protocols import Transformable
    from merlin.dag import ColumnSelector, DataFormats
    from merlin.schema import Schema
    from merlin.table import TensorTable

FOLDER = "workflow"
_MADE = "_rows"  # of a workflow, at its first request


class ServedWorkflow(TransformWorkflow):
    """A run's workflow from raw rows without the label to the network's inputs.

    Args:
      workflow: the run's, without the raw columns that the network does without.
      spec: of the run's rows.
      cardinalities: by field of ids.
      output_schema: the network's inputs.
      renumbered: by field of which rare ids were dropped, which id of the network each id is.
      is_adopted: whether the workflow is another pipeline's, which takes its rows as they are.
    """

    # Raw columns of an adopted workflow.
    binary: frozenset[str] = frozenset()  # of bytes that are no text
    with_empty: frozenset[str] = frozenset()  # in which an empty text is no missing one

    def __init__(
        self,
        workflow: nvt.Workflow,
        spec: DatasetSpec,
        cardinalities: Mapping[str, int],
        output_schema: Schema,
        *,
        is_adopted: bool,
        renumbered: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        super().__init__(workflow)
        self.spec = spec.to_dict()
        self.cardinalities = dict(cardinalities)
        self.output_schema = output_schema
        self.is_adopted = is_adopted
        self.renumbered = dict(renumbered or {})
        if is_adopted:
            keys = learned_keys(workflow)
            self.binary = _columns_with(keys, lambda key: pa.types.is_binary(key.kind))
            self.with_empty = columns_that_hold_empty(workflow, spec.fields)

    def __getstate__(self) -> dict[str, Any]:
        # Beside it, as NVTabular saved it: in here its vocabularies would be where they were.
        state = {**self.__dict__, "workflow": None}
        state.pop(_MADE, None)
        return state

    def save_artifacts(self, artifact_path: Any = None) -> None:
        """Save the workflow beside the ensemble: without what makes the label, and its modules."""
        assert artifact_path is not None
        self.workflow.save(str(Path(artifact_path) / FOLDER))

    def load_artifacts(self, artifact_path: Any = None) -> None:
        """Load the workflow that lies beside the ensemble."""
        if not artifact_path:  # Merlin calls this, too, as it makes a graph
            return
        self.workflow = load_saved(Path(artifact_path) / FOLDER)
        self.__dict__.pop(_MADE, None)

    def compute_output_schema(
        self,
        input_schema: Schema,
        col_selector: ColumnSelector,
        prev_output_schema: Schema | None = None,
    ) -> Schema:
        """The network's inputs: of a list Merlin's own may say that it has a fixed length."""
        return self.output_schema

    @property
    def supported_formats(self) -> DataFormats:
        """Rows as they come, from a server or a caller: a GPU holds no text."""
        return DataFormats.PANDAS_DATAFRAME | DataFormats.NUMPY_TENSOR_TABLE

    def transform(self, col_selector: ColumnSelector, transformable: Transformable) -> TensorTable:
        """Encode some rows.

        Raises:
          UserError: they are not what `predict` takes, or of unequal numbers.
        """
        spec = DatasetSpec.from_dict(self.spec)
        names = self.input_schema.column_names
        nullable = set(names) - self.with_empty if self.is_adopted else set()
        if isinstance(transformable, TensorTable):
            frame = pd.DataFrame(_columns(transformable, names, nullable, self.binary))
        else:
            frame = transformable[names].reset_index(drop=True)
            frame = frame.assign(**{n: _empty_as_missing(frame[n]) for n in names if n in nullable})
        if not len(frame):
            raise UserError("a request must have a row. Received: none")
        if self.is_adopted:
            encoded = self._rows.of_frame(frame, _REQUEST)
        else:
            frame = frame.assign(**{n: _numbers(frame[n], spec) for n in spec.continuous})
            with refusing_others(_REQUEST, len(frame)):
                encoded = self._transformed(frame, spec)
        for name in spec.ids:
            checked_ids(encoded, name, self.cardinalities[name], _REQUEST)
        for name in spec.continuous:
            check_numbers(encoded, name, _REQUEST)
        return TensorTable(_tensors(encoded, spec, self.renumbered))

    @functools.cached_property
    def _rows(self) -> RawRows:
        spec = DatasetSpec.from_dict(self.spec)
        encode = functools.partial(self._transformed, spec=spec)
        return RawRows(self.workflow, spec.ids, encode)

    def _transformed(self, frame: pd.DataFrame, spec: DatasetSpec) -> pa.RecordBatch:
        out = transformed(self.workflow, frame)
        return pa.RecordBatch.from_pydict(
            {
                name: pa.array(out[name], pa.list_(pa.int64()) if name in spec.lists else None)
                for name in spec.fields
            }
        )


@dataclasses.dataclass(frozen=True)
class _Request(Place):
    """Where the rows of a request lie."""

    def refuse(self, rule: str, value: Any, row: int, name: str, remedy: str) -> NoReturn:
        """Raise UserError for a value in a row."""
        raise UserError(f"{rule}. Received: {value} in row {row + 1}, column {name!r}. {remedy}")

    def column(self, name: str) -> str:
        """Where a column lies."""
        return f"column {name!r} of a request"

    def rows(self, count: int) -> str:
        """How many rows a request has."""
        return f"a request of {count:,} rows"


_REQUEST = _Request(Path(), 0, 0)


def _columns(
    table: TensorTable, names: Sequence[str], nullable: Collection[str], binary: Collection[str]
) -> dict[str, Any]:
    """Columns of a request, as pandas has them; text as str.

    Merlin's own `to_df` fills the shorter ones of columns of unequal lengths.

    Args:
      table: the request.
      names: of its columns.
      nullable: those in which an empty text is None.
      binary: those whose bytes are no text.

    Raises:
      UserError: a column is missing, has another number of rows, or text that is none.
    """
    missing = [name for name in names if name not in table]
    if missing:
        raise UserError(
            f"a request must have every column. Missing: {quoted(missing, brief=True)} in "
            f"{quoted(table.columns, brief=True)}"
        )
    columns: dict[str, Any] = {}
    for name in names:
        column = table[name]
        values = np.asarray(column.values)
        if values.dtype.kind in "OSU":
            values = values.astype(object) if name in binary else _text(values, name)
            if name in nullable:  # Triton knows no missing text: it is empty, as in a log of csv
                values[(values == "") | (values == b"")] = None
        if column.offsets is not None:
            values = _lists(values, np.asarray(column.offsets), name)
        elif values.ndim > 1:
            values = _one_object_each(list(values))
        columns[name] = values
    rows = {name: len(values) for name, values in columns.items()}
    if len(set(rows.values())) > 1:
        few, many = min(rows, key=rows.__getitem__), max(rows, key=rows.__getitem__)
        raise UserError(
            f"all columns of a request must have as many rows. Received: {rows[few]:,} of {few!r}, "
            f"{rows[many]:,} of {many!r}"
        )
    return columns


def _empty_as_missing(column: pd.Series) -> pd.Series:
    """The same rows, an empty text as None, as a client's; also in lists."""

    def is_empty(value: Any) -> bool:
        return isinstance(value, str | bytes) and not value

    def cell(value: Any) -> Any:
        if pd.api.types.is_list_like(value):
            return [None if is_empty(one) else one for one in value]
        return None if is_empty(value) else value

    def has_empty(value: Any) -> bool:
        return any(map(is_empty, value)) if pd.api.types.is_list_like(value) else is_empty(value)

    found = [has_empty(value) for value in column] if column.dtype.kind in "OSU" else []
    if not any(found):
        return column  # of the type that it has
    return pd.Series([cell(value) for value in column], index=column.index, dtype=object)


def _columns_with(
    keys: Mapping[str, Sequence[Keys]], has: Callable[[Keys], bool]
) -> frozenset[str]:
    return frozenset(name for name, found in keys.items() if any(map(has, found)))


def _text(values: np.ndarray, name: str) -> np.ndarray:
    """Bytes as str."""
    texts = np.empty(values.shape, object)
    for place, value in np.ndenumerate(values):
        try:
            texts[place] = value.decode("utf-8") if isinstance(value, bytes) else value
        except UnicodeDecodeError:
            raise UserError(
                f"text must be UTF-8. Received: {excerpt(value)} in column {name!r}"
            ) from None
    return texts


def _lists(values: np.ndarray, offsets: np.ndarray, name: str) -> np.ndarray:
    ends = offsets.astype(np.int64)
    right = len(ends) > 0 and ends[0] == 0 and ends[-1] == len(values)
    if not right or (np.diff(ends) < 0).any():
        raise UserError(
            f"offsets of a list must rise from 0 to the number of its values. Received: {name!r} "
            f"with {len(values):,} values, and offsets {clipped(str(ends.tolist()))}"
        )
    return _one_object_each(np.split(values, ends[1:-1]) if len(ends) > 1 else [])


def _one_object_each(rows: Sequence[Any]) -> np.ndarray:
    held = np.empty(len(rows), object)
    held[:] = rows
    return held


def _numbers(column: pd.Series, spec: DatasetSpec) -> pd.Series:
    """Numbers as `prepare` reads them from parquet: float64, NaN where there is none.

    Raises:
      UserError: a column of a type that `predict` refuses, as numbers given as text; one that holds
        something else beside numbers; or an infinite one where the data set's description refuses
        that.
    """
    name = str(column.name)
    try:
        kind = plain_type(pa.array(column, from_pandas=True).type)
    except (pa.ArrowException, OverflowError):  # a column of several types, as no file has
        for row, value in enumerate(column):
            is_missing = pd.api.types.is_scalar(value) and pd.isna(value)
            if not (is_missing or isinstance(value, Real | Decimal | np.bool_)):
                text = excerpt(str(value))
                _REQUEST.refuse("a number must be one", text, row, name, "Give numbers")
    else:
        if not pa.types.is_null(kind) and not is_number(kind):
            raise UserError(
                f"{name!r} must be a column of numbers. Received: {kind} in a request. Give numbers"
            )
    try:
        numbers = pd.to_numeric(column).astype("float64")
    except OverflowError:  # a whole number beyond any float64
        numbers = column.map(_as_float).astype("float64")
    infinite = np.isinf(numbers.to_numpy())
    if spec.non_finite == "refuse" and infinite.any():
        row = int(infinite.argmax())
        remedy = "Leave it out, which is a missing one (NaN)"
        _REQUEST.refuse("a number must be finite", numbers.iloc[row], row, name, remedy)
    return numbers


def _as_float(value: Any) -> float:
    """The number, or an infinite one in place of what no float64 holds."""
    if pd.isna(value):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _tensors(
    batch: pa.RecordBatch, spec: DatasetSpec, renumbered: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """Columns as the network takes them."""

    def ids(name: str, values: np.ndarray) -> np.ndarray:
        values = renumbered[name][values] if name in renumbered else values
        return np.array(values, np.int64)

    tensors: dict[str, Any] = {}
    for name in spec.categorical:
        values = batch.column(name).to_numpy(zero_copy_only=False)
        tensors[argument_name(name)] = ids(name, values)
    for name in spec.continuous:
        values = batch.column(name).to_numpy(zero_copy_only=False)
        tensors[argument_name(name)] = np.array(values, np.float32)
    for name in spec.lists:
        column = batch.column(name)
        offsets = column.offsets.to_numpy()
        values = column.values.to_numpy(zero_copy_only=False)[offsets[0] : offsets[-1]]
        tensors[f"{argument_name(name)}__values"] = ids(name, values)
        tensors[f"{argument_name(name)}__offsets"] = np.array(offsets - offsets[0], np.int32)
    return tensors
