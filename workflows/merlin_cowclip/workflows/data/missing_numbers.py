"""What a missing number or boolean makes of the others of its column, and operators of that.

pandas makes whole numbers floats beside a missing one, and booleans objects, in a file that it
writes as in a batch. Of 7.0 an operator may make another id than of 7, and from 2^53 on floats are
rounded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import pandas as pd
import pyarrow as pa

from merlin_cowclip.workflows.data.id_origins import operators_that_keep_values
from merlin_cowclip.workflows.data.id_text import is_number
from merlin_cowclip.workflows.data.raw_types import RawType, flat_values, list_lengths
from merlin_cowclip.workflows.data.workflow_graph import followed
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.quiet import quiet_imports, quiet_operators

if TYPE_CHECKING:
    import nvtabular as nvt
    from merlin.dag import Node

_LOOKED_AT = 1000  # rows of a column that is encoded both ways, to be told of

Encode = Callable[[pd.DataFrame], pa.RecordBatch]


@dataclass(frozen=True)
class Misread:
    """A column that a missing one makes another of, of which the workflow makes other inputs."""

    column: str
    kind: pa.DataType

    def refuse(self, rows: str) -> NoReturn:
        """Raise UserError for some rows, which are where."""
        made, example = "floats", "7.0 the workflow makes another input than of 7"
        if pa.types.is_boolean(self.kind):
            made, example = "objects", "these the workflow makes other inputs than of booleans"
        raise UserError(
            f"column {self.column!r}, {self.kind}, must have no missing one, as at the first "
            f"rows of the workflow's fit. Received: one in {rows}, which makes the others {made} "
            f"to pandas; of {example}. Fill it in, or give the rows without one apart"
        )


class MissingNumbers:
    """Where a fitted workflow tells whole numbers, or booleans, from such beside a missing one.

    Args:
      types: of its raw columns.
      otherwise: `columns_told_apart` of it.
      ids: columns of ids that it makes.
    """

    def __init__(
        self, types: Mapping[str, RawType], otherwise: Collection[str], ids: Collection[str]
    ) -> None:
        self._ids = set(ids)
        self._kinds = {
            name: one.kind
            for name, one in types.items()
            if one.kind is not None
            and (pa.types.is_integer(one.kind) or pa.types.is_boolean(one.kind))
        }
        self._otherwise = otherwise
        self._may_tell = {  # and of how many rows more it is looked at
            name: _LOOKED_AT
            for name, one in types.items()
            if name in otherwise and one.kind is not None
            if name in self._kinds or pa.types.is_float64(one.kind)
        }

    def told_otherwise(
        self, frame: pd.DataFrame, fitted: Mapping[str, pa.Array], encode: Encode
    ) -> list[str]:
        """What is to be said of numbers that other rows of the fit may have had otherwise, once.

        Of whole ones of which the workflow makes other inputs than of the same as floats. Each
        part of the fit's rows had them as its own missing ones made them, and the workflow has the
        type of the first. The first thousand rows of each column are looked at.

        Args:
          frame: the rows, as pandas has them.
          fitted: the same, of the types of the fit.
          encode: what makes them inputs, row for row.
        """
        said = []
        for name, left in sorted(self._may_tell.items()):
            some = frame.head(left)
            both = _both(fitted[name].slice(0, len(some)), self._kinds.get(name))
            if both is None:
                continue
            self._may_tell[name] -= len(some)
            try:
                with quiet_operators():
                    one, other = (encode(some.assign(**{name: column})) for column in both)
                is_told = bool(self._differ(one, other))
            except Exception:  # of an operator that takes one of them alone, at the fit as well
                self._may_tell[name], is_told = 0, False
            if is_told:
                self._may_tell[name] = 0
                here, there = map(_held, both)
                said.append(
                    f"the workflow makes one input of column {name!r} as {here}, and another of "
                    f"the same values as {there}, by whether one is missing among them. They are "
                    f"read as {here}, as at the first rows of its fit: if others of its files or "
                    "partitions had, or had not, a missing one, the ids of their rows were others"
                )
            if not self._may_tell[name]:
                del self._may_tell[name]
        return said

    def misread(
        self,
        frame: pd.DataFrame,
        fitted: Mapping[str, pa.Array],
        encoded: pa.RecordBatch,
        encode: Encode,
    ) -> Misread | None:
        """A column in which one is missing, and of whose others the workflow makes other inputs.

        All such columns at once are made whole, and compared with the same values as they are: two
        that are read together may be read as at the fit only where both are whole. Whatever number
        of them takes one or two encodings more, where none is misread.

        Args:
          frame: the rows, as pandas has them.
          fitted: the same, of the types of the fit.
          encoded: what the workflow made of them, row for row.
          encode: what makes it.
        """
        whole: dict[str, pd.Series] = {}  # a column's values, in all rows, as at the fit
        given: dict[str, pd.Series] = {}  # the same, of the type that they have here
        good: list[np.ndarray] = []  # in which rows a column's are its own
        for name, kind in self._kinds.items():
            column = fitted[name]
            if pa.types.is_list(column.type):
                values = flat_values(column)
                if values.null_count and not self._is_read_alike(name, values):
                    return Misread(name, kind)
                continue
            is_good = column.is_valid().to_numpy(zero_copy_only=False)
            if is_good.all() or not is_good.any():
                continue
            if self._is_read_alike(name, column):
                continue
            good.append(is_good)
            filled = column.fill_null(column.drop_null()[0])
            whole[name] = filled.to_pandas()
            kind_here: Any = frame[name].dtype
            given[name] = whole[name].astype(kind_here)
        if (nothing := self._misread_nothing(frame, encoded, encode)) is not None:
            return nothing
        if not whole:
            return None
        try:
            return self._among_others(frame, encoded, encode, whole, given, good)
        except Exception:  # of a number that stands where none was, maybe: no row of the user's
            return self._in_their_rows(frame, encode, whole, good)

    def _is_read_alike(self, name: str, values: pa.Array) -> bool:
        """Whether it is known beforehand, as of most columns: a vocabulary has one id for 7.0."""
        if name in self._otherwise:
            return False
        if pa.types.is_boolean(values.type):
            return True
        known = values.drop_null().to_numpy()
        return not len(known) or max(abs(int(known.min())), abs(int(known.max()))) < 2**53

    def _misread_nothing(
        self, frame: pd.DataFrame, encoded: pa.RecordBatch, encode: Encode
    ) -> Misread | None:
        """`misread` of columns of which every number is missing, and may be filled in."""
        nothing = pd.Series(pd.NA, frame.index, "Int64")
        for name, kind in self._kinds.items():
            may_tell = pa.types.is_integer(kind) and name in self._otherwise
            if may_tell and frame[name].dtype.kind == "f" and frame[name].isna().all():
                with contextlib.suppress(Exception):  # of an operator that takes no such integers
                    if self._differ(encode(frame.assign(**{name: nothing})), encoded):
                        return Misread(name, kind)
        return None

    def _among_others(
        self,
        frame: pd.DataFrame,
        encoded: pa.RecordBatch,
        encode: Encode,
        whole: Mapping[str, pd.Series],
        given: Mapping[str, pd.Series],
        good: Sequence[np.ndarray],
    ) -> Misread | None:
        """`misread` of all rows: where a column has no number of its own, another row's."""
        as_whole = encode(frame.assign(**whole))
        if all((one == good[0]).all() for one in good):
            rows = pa.array(np.flatnonzero(good[0]))
            if not self._differ(as_whole.take(rows), encoded.take(rows)):
                return None
        # Or do they depend on the rows beside them, which have other numbers?
        if not self._differ(as_whole, encode(frame.assign(**given))):
            return None
        for name in whole if len(whole) > 1 else ():  # one, among others that are whole
            if self._differ(as_whole, encode(frame.assign(**{**whole, name: given[name]}))):
                return Misread(name, self._kinds[name])
        name = next(iter(whole))
        return Misread(name, self._kinds[name])

    def _in_their_rows(
        self,
        frame: pd.DataFrame,
        encode: Encode,
        whole: Mapping[str, pd.Series],
        good: Sequence[np.ndarray],
    ) -> Misread | None:
        """`misread` of rows as they are: of those that have all numbers, then column by column."""
        tries = [(list(whole), np.logical_and.reduce(good))]
        tries += [([name], is_good) for name, is_good in zip(whole, good, strict=True)]
        for names, is_good in tries:
            places = np.flatnonzero(is_good)
            if not len(places):
                continue
            own = frame.iloc[places].reset_index(drop=True)
            numbers = {name: whole[name].iloc[places].reset_index(drop=True) for name in names}
            if self._differ(encode(own.assign(**numbers)), encode(own)):
                return Misread(names[0], self._kinds[names[0]])
        return None

    def _differ(self, left: pa.RecordBatch, right: pa.RecordBatch) -> set[str]:
        return different_columns(left, right, self._ids)


def _both(column: pa.Array, kind: pa.DataType | None) -> tuple[pd.Series, pd.Series] | None:
    """Numbers, or lists of them, as pandas has them in a batch, and as it would in another one.

    In place of missing floats there is another of them. `None` where nothing is to be compared:
    floats that are no whole numbers, or whole ones of which one is missing.

    Args:
      column: of the fit's type.
      kind: of whole numbers and booleans, that of the values; `None` of floats.
    """
    is_list = pa.types.is_list(column.type)
    values = flat_values(column) if is_list else column
    known = values.drop_null()
    if not len(known) or (kind is not None and values.null_count):
        return None
    if kind is not None and pa.types.is_boolean(kind):
        return None if is_list else (column.to_pandas(), column.to_pandas().astype(object))
    numbers = known.to_numpy(zero_copy_only=False)
    if kind is None and not ((numbers == np.trunc(numbers)) & (np.abs(numbers) < 2.0**53)).all():
        return None
    filled = values.fill_null(known[0])
    other = filled.cast(pa.int64() if kind is None else pa.float64(), safe=False)
    if not is_list:
        return filled.to_pandas(), other.to_pandas()
    ends = np.concatenate([[0], np.cumsum(list_lengths(column))]).astype(np.int32)
    return tuple(pa.ListArray.from_arrays(ends, one).to_pandas() for one in (filled, other))


def _held(column: pd.Series) -> str:
    """What a column holds, for a message."""
    first = column.iloc[0]
    return f"lists of {first.dtype}" if isinstance(first, np.ndarray) else f"{column.dtype}"


def different_columns(
    left: pa.RecordBatch, right: pa.RecordBatch, ids: Collection[str]
) -> set[str]:
    """Columns that differ: of ids at all, of numbers by more than the precision of floats."""
    names = left.schema.names
    return {n for n in names if not _same(left[n], right[n], 0 if n in ids else 1e-5)}


def _same(left: pa.Array, right: pa.Array, tolerance: float) -> bool:
    if left.equals(right):
        return True
    if not (is_number(left.type) and is_number(right.type)):
        return False
    one, other = (c.to_numpy(zero_copy_only=False).astype(np.float64) for c in (left, right))
    return bool(np.isclose(one, other, rtol=tolerance, atol=0, equal_nan=True).all())


def columns_told_apart(workflow: nvt.Workflow) -> set[str]:
    """Raw columns of whose 7 and 7.0 other inputs may be made.

    They are hashed, or read by operators that may tell one from the other. Categorify does not, of
    columns as they are or filled, nor does arithmetic of floats.
    """
    with quiet_imports():
        from nvtabular import ops

    keep = (*operators_that_keep_values(), ops.FillMissing, ops.FillMedian, ops.Clip)
    # Of which each makes the same of 7 and of 7.0, and floats or places of either.
    alike = (ops.LogOp, ops.Normalize, ops.Bucketize)  # NormalizeMinMax subtracts in an int8
    otherwise: set[str] = set()
    nothing: frozenset[str] = frozenset()

    def made_by(node: Node, given: dict[str, frozenset[str]]) -> dict[str, frozenset[str]]:
        """Of what a node makes, of which raw columns it is, if none was changed."""
        used = nothing.union(*given.values())
        if isinstance(node.op, ops.Categorify):
            if node.op.num_buckets or node.op.encode_type == "combo":
                otherwise.update(used)
        elif isinstance(node.op, keep):
            fills = isinstance(node.op, (ops.FillMissing, ops.FillMedian))  # and may add flags
            return {
                name: nothing.union(*(given.get(one, nothing) for one in sources))
                for name, sources in node.column_mapping.items()
                if not fills or name in sources
            }
        elif not isinstance(node.op, alike):
            otherwise.update(used)
        return {}

    followed(workflow.output_node, lambda name: frozenset({name}), made_by, nothing)
    return otherwise
