"""Raw columns of numbers as the workflow read them at its fit: whole ones as such, or as floats.

pandas makes whole numbers floats beside a missing one or a fraction, in a file that it writes as in
a batch. Of 7.0 an operator may make another id than of 7, and from 2^53 on floats are rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import pandas as pd
import pyarrow as pa

from merlin_cowclip.workflows.data.encoded_rows import Place
from merlin_cowclip.workflows.data.id_origins import operators_that_keep_values
from merlin_cowclip.workflows.data.parquet_logs import is_number
from merlin_cowclip.workflows.data.workflow_graph import followed
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.quiet import quiet_imports

if TYPE_CHECKING:
    import nvtabular as nvt
    from merlin.dag import Node


@dataclass(frozen=True)
class NotWhole:
    """A number that is no id of a column of whole numbers."""

    column: str
    row: int  # from 0
    value: float

    def refuse(self, place: Place) -> NoReturn:
        """Raise UserError."""
        rule = "an id must be a whole number below 2^53, as those that the workflow was fitted on"
        place.refuse(rule, self.value, self.row, self.column, "Give whole numbers")


@dataclass(frozen=True)
class Misread:
    """A column of whole numbers that pandas holds as floats, and the workflow reads otherwise."""

    column: str
    among: str  # what they are floats by

    def refuse(self, rows: str) -> NoReturn:
        """Raise UserError for rows, which are where."""
        raise UserError(
            f"whole numbers of column {self.column!r} must have no {self.among} among them, for "
            f"the workflow was fitted on none. Received: {rows}, which makes them floats to "
            "pandas; of 7.0 the workflow makes another input than of 7. Fill it in, or give the "
            "rows without one apart"
        )


class WholeNumbers:
    """How a fitted workflow reads its raw columns of whole numbers.

    Args:
      workflow: fitted.
      ids: columns of ids that it makes.
    """

    def __init__(self, workflow: nvt.Workflow, ids: Collection[str]) -> None:
        self._ids = set(ids)
        columns = workflow.input_schema.column_schemas
        kinds = {name: c.dtype.to_numpy for name, c in columns.items() if not c.is_list}
        self._floats = {name for name, kind in kinds.items() if kind == np.float64}
        self._whole = {n: np.dtype(k) for n, k in kinds.items() if k and np.dtype(k).kind in "iu"}
        encoded, otherwise = _uses(workflow)
        self._encoded = encoded & self._whole.keys()
        self._encoded_alone = self._encoded - otherwise

    def as_fitted(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Raw rows with floats where the workflow was fitted on float64, and integers likewise.

        Floats stay such where one is missing, is a fraction or from 2^53 on (see `misread`). What
        is encoded is a batch or a request, and has no missing one, maybe, where the fit had one.
        """
        kinds: dict[Any, Any] = {}
        for name in self._floats | self._whole.keys():
            column = _numbers(frame[name], name in self._floats) if name in frame else None
            if column is not None:
                frame = frame.assign(**{name: column})
        for name in frame:
            kind = frame[name].dtype.kind
            if name in self._floats and kind in "iu":
                kinds[name] = np.float64
            elif name in self._whole and kind == "f":
                values = _floats(frame[name])
                if _is_whole(values, frame[name]).all():
                    limits = np.iinfo(self._whole[name])
                    fits = values.min() >= limits.min and values.max() <= limits.max
                    kinds[name] = self._whole[name] if fits else np.int64
        return frame.astype(kinds)

    def not_whole(self, frame: pd.DataFrame, exact: Collection[str] = ()) -> NotWhole | None:
        """The first fraction, or rounded number, of a column that is encoded as it is.

        Stock `Categorify` takes 3.7 for 3 where it has learned whole numbers.

        Args:
          frame: of `as_fitted`.
          exact: columns that were integers, with nulls.
        """
        for name in frame:
            if name in exact:
                continue
            if name in self._encoded and frame[name].dtype.kind == "f":
                values = _floats(frame[name])
                bad = ~np.isnan(values) & ~_is_whole(values, frame[name])
                if bad.any():
                    row = int(bad.argmax())
                    return NotWhole(str(name), row, float(values[row]))
        return None

    def misread(
        self,
        frame: pd.DataFrame,
        encoded: pa.RecordBatch,
        encode: Callable[[pd.DataFrame], pa.RecordBatch],
        exact: Mapping[str, pa.Array] | None = None,
    ) -> Misread | None:
        """A column of whole numbers, floats here, of which the workflow makes other inputs by that.

        Args:
          frame: of `as_fitted`.
          encoded: what the workflow made of it, row for row.
          encode: what makes it.
          exact: columns that were integers, with nulls.
        """
        for name in frame:
            if name not in self._whole or frame[name].dtype.kind != "f":
                continue
            integers = (exact or {}).get(str(name))
            if integers is not None:
                rows = np.flatnonzero(integers.is_valid().to_numpy(zero_copy_only=False))
                numbers = integers.drop_null().to_numpy()
            else:
                values = _floats(frame[name])
                with np.errstate(invalid="ignore"):
                    rows = np.flatnonzero((values == np.trunc(values)) & (np.abs(values) < 2**63))
                numbers = values[rows].astype(np.int64)
            if not len(rows):
                continue  # no number that is misread
            if name in self._encoded_alone and np.abs(numbers).max() < 2**53:
                continue  # a vocabulary has one id for 7 and 7.0; most columns are such
            floats = frame.iloc[rows].reset_index(drop=True)
            apart = encode(floats.assign(**{str(name): numbers}))
            if not (other := self._other(apart, encoded.take(pa.array(rows)))):
                continue
            # Or do they depend on the rows beside them, which are fewer?
            if self._other(apart, encode(floats)) & other:
                return Misread(str(name), _among(frame[name]))
        return None

    def _other(self, left: pa.RecordBatch, right: pa.RecordBatch) -> set[str]:
        """Columns that differ: of ids at all, of numbers by more than the precision of floats."""
        names = set(left.schema.names)
        return {n for n in names if not _same(left[n], right[n], 0 if n in self._ids else 1e-5)}


def _floats(column: pd.Series) -> np.ndarray:
    return np.asarray(column.to_numpy(np.float64, na_value=np.nan))


def _numbers(column: pd.Series, is_float: bool) -> pd.Series | None:
    """Floats of decimals, of objects and of pandas' own floats, where a column is no such yet."""
    kind = column.dtype
    if isinstance(kind, pd.CategoricalDtype) and kind.categories.dtype.kind == "f":
        return column.astype(np.float64)
    if pd.api.types.is_object_dtype(kind):
        kinds = ["decimal", "floating", "mixed-integer-float", *(["integer"] if is_float else [])]
        if pd.api.types.infer_dtype(column, skipna=True) not in kinds:
            return None
    elif not isinstance(kind, pd.Float32Dtype | pd.Float64Dtype):
        return None
    return pd.Series(_floats(column), column.index)


def _is_whole(values: np.ndarray, column: pd.Series) -> np.ndarray:
    """Which are whole numbers that the column's type tells from their neighbours."""
    dtype: Any = column.dtype  # or pandas' own of floats that may be missing
    kind = np.dtype(getattr(dtype, "numpy_dtype", dtype))
    with np.errstate(invalid="ignore"):
        return (np.abs(values) < 2.0 ** (np.finfo(kind).nmant + 1)) & (values == np.trunc(values))


def _among(column: pd.Series) -> str:
    values = _floats(column)
    if np.isnan(values).any():
        return "missing one"
    return "fraction" if (values != np.trunc(values)).any() else "one of 2^53 or more"


def _same(left: pa.Array, right: pa.Array, tolerance: float) -> bool:
    if left.equals(right):
        return True
    if not (is_number(left.type) and is_number(right.type)):
        return False
    one, other = (c.to_numpy(zero_copy_only=False).astype(np.float64) for c in (left, right))
    return bool(np.isclose(one, other, rtol=tolerance, atol=0, equal_nan=True).all())


def _uses(workflow: nvt.Workflow) -> tuple[set[str], set[str]]:
    """Raw columns that Categorify reads as they are, or filled; and those that are read otherwise.

    The others are read by other operators, hashed, or read together with more.
    """
    with quiet_imports():
        from nvtabular import ops

    keep = (*operators_that_keep_values(), ops.FillMissing, ops.FillMedian)
    encoded: set[str] = set()
    otherwise: set[str] = set()
    nothing: frozenset[str] = frozenset()

    def made_by(node: Node, given: dict[str, frozenset[str]]) -> dict[str, frozenset[str]]:
        """Of what a node makes, of which raw columns it is, if none was changed."""
        used = nothing.union(*given.values())
        if isinstance(node.op, ops.Categorify):
            encoded.update(used)
            if node.op.num_buckets or node.op.encode_type == "combo":
                otherwise.update(used)
        elif isinstance(node.op, keep):
            return {
                name: nothing.union(*(given.get(one, nothing) for one in sources))
                for name, sources in node.column_mapping.items()
            }
        else:
            otherwise.update(used)
        return {}

    followed(workflow.output_node, lambda name: frozenset({name}), made_by, nothing)
    return encoded, otherwise
