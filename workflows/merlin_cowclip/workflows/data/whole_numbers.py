"""Raw columns of numbers as the workflow read them at its fit: whole ones as such, or as floats.

pandas makes whole numbers floats beside a missing one or a fraction, in a file that it writes as in
a batch. Of 7.0 an operator may make another id than of 7, and from 2^53 on floats are rounded. In
narrower integers than the fit's an operator may overflow, and 0.1 is another number as a float32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa

from merlin_cowclip.workflows.data.id_origins import operators_that_keep_values
from merlin_cowclip.workflows.data.number_types import (
    NUMBERS,
    Lists,
    booleans_of,
    floats_of,
    is_another,
    is_integer,
    is_rounded,
    is_whole,
    largest,
    numbers_of,
    of_digits,
    of_type,
    whole_in,
    within,
)
from merlin_cowclip.workflows.data.parquet_logs import is_number
from merlin_cowclip.workflows.data.plain_columns import plain_frame
from merlin_cowclip.workflows.data.raw_columns import RawColumns, learned_keys
from merlin_cowclip.workflows.data.refused_numbers import (
    Beyond,
    Misread,
    MisreadDigits,
    Narrowed,
    NotBoolean,
    NotWhole,
    Refused,
    Rounded,
    Uneven,
)
from merlin_cowclip.workflows.data.workflow_graph import followed
from merlin_cowclip.workflows.quiet import quiet_imports

if TYPE_CHECKING:
    import nvtabular as nvt
    from merlin.dag import Node
    from merlin.schema import ColumnSchema


class WholeNumbers:
    """How a fitted workflow reads its raw columns of whole numbers.

    Args:
      workflow: fitted.
      ids: columns of ids that it makes.
      fields: all columns that it makes for the model.
    """

    def __init__(
        self, workflow: nvt.Workflow, ids: Collection[str], fields: Collection[str]
    ) -> None:
        self._ids = set(ids)
        columns = workflow.input_schema.column_schemas
        kinds = {n: numpy_type(c) for n, c in columns.items()}
        self._fitted = {name: kind for name, kind in kinds.items() if kind.kind in "iuf"}
        self._lists = {name for name in self._fitted if columns[name].is_list}
        self._booleans = [n for n, k in kinds.items() if k.kind == "b" and not columns[n].is_list]
        self._objects = {n: columns[n].is_list for n, k in kinds.items() if k.kind in "OSUb"}
        whole = {name for name, kind in self._fitted.items() if kind.kind in "iu"}
        self._whole = whole - self._lists
        encoded, otherwise, reduced = uses(workflow)
        raw = RawColumns(workflow, fields)
        self._reduced = {name: k for name, k in reduced.items() if not raw.may_lack([name])}
        looked_up = encoded | learned_keys(workflow).keys()
        self._encoded = encoded & whole
        self._encoded_alone = self._encoded - otherwise
        self._floats = looked_up & (self._fitted.keys() - whole)
        of_ids = RawColumns(workflow, self._ids)
        others = self._fitted.keys() - whole - looked_up
        others = {name for name in others if not of_ids.may_lack([name])}
        self._floats |= others & self._lists
        self._digits = others - self._lists  # that ids are made of otherwise: hashed, as text, cut
        made = {name for name in whole - self._encoded if not of_ids.may_lack([name])}
        self._exact = (whole & looked_up - self._encoded) | made

    def as_fitted(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Raw rows of the types that the workflow was fitted on, of numbers and of lists of them.

        Left as they are: floats where the fit was on integers, and one is missing, is a fraction or
        from 2^53 on (see `misread`); integers beyond the type of the fit; narrow floats of which
        ids are made; and ids that `no_id` finds. What is encoded is a batch or a request, and has
        no missing one, maybe, where the fit had one.
        """
        frame = plain_frame(frame)
        changed = {}
        for name, fitted in self._fitted.items():
            if name not in frame:
                continue
            is_id, column = name in self._floats | self._digits, frame[name]
            if name not in self._lists:
                changed[name] = of_type(column, fitted, is_id)
            elif (lists := Lists.of(column, fitted)) is not None:
                changed[name] = lists.of_values(of_type(lists.values, fitted, is_id))
        for name in self._objects:
            if name not in frame:
                continue
            if frame[name].dtype != object and frame[name].isna().all():  # as in `of_type`
                is_float = frame[name].dtype.kind == "f" and not self._objects[name]
                missing = np.nan if is_float else None  # what it was; a list is None
                changed[name] = pd.Series([missing] * len(frame), frame.index, object)
            elif name in self._booleans:
                changed[name] = booleans_of(frame[name])
        return frame.assign(**changed)

    def no_id(self, frame: pd.DataFrame, exact: Collection[str] = ()) -> Refused | None:
        """The first number, of a column that is looked up as it is, that is no id of the fit.

        Where `Categorify` has learned whole numbers, a fraction or a rounded one: stock takes 3.7
        for 3. Where it, or an operator of groups, has learned float64, a float32 that is another
        number: stock knows none of them. Where ids are made or looked up otherwise, a float that
        several integers are. And any integer of which `ReduceDtypeSize` would make another one, id
        or not: it takes 261 for 5.

        Args:
          frame: of `as_fitted`.
          exact: columns that were integers, with nulls.
        """
        for name in map(str, frame):
            if (other := self._no_boolean(frame[name]) or self._beyond(frame[name])) is not None:
                return other
            if name in exact or name not in self._encoded | self._floats | self._exact:
                continue
            values, rows = frame[name], None
            if (uneven := self._uneven(values)) is not None:
                return uneven
            if name in self._lists:
                lists = Lists.of(values, self._fitted[name])
                if lists is None:
                    continue
                values, rows = lists.values, lists.rows()
                if pd.api.types.is_object_dtype(values.dtype):  # integers among them are exact
                    is_float = ~values.map(is_integer).to_numpy(bool)
                    values, rows = numbers_of(values[is_float], is_float=True), rows[is_float]
            kind: Any = values.dtype
            is_narrow = name in self._floats
            if kind.kind != "f" or (is_narrow and kind.itemsize >= self._fitted[name].itemsize):
                continue
            held = floats_of(values)
            found: type[Refused] = NotWhole
            if is_narrow:
                found, bad = Narrowed, is_another(values)
            elif name in self._exact:
                found, bad = Rounded, is_rounded(values)
            else:
                bad = ~np.isnan(held) & ~is_whole(values)
            if bad.any():
                at = int(bad.argmax())
                return found(name, at if rows is None else int(rows[at]), float(held[at]))
        return None

    def _no_boolean(self, column: pd.Series) -> NotBoolean | None:
        name, given = str(column.name), column.dtype
        if name not in self._booleans or given.kind not in "iuf":
            return None
        bad = (~column.isin((0, 1)) & column.notna()).to_numpy()
        row = int(bad.argmax())
        return NotBoolean(name, row, column.iloc[row].item()) if bad.any() else None

    def _uneven(self, column: pd.Series) -> Uneven | None:
        name = str(column.name)
        if name in self._lists or not pd.api.types.is_object_dtype(column.dtype):
            return None
        if pd.api.types.infer_dtype(column, skipna=True) not in NUMBERS:
            return None  # text, at which an operator may take offence
        sizes = column.map(lambda value: 0 if pd.isna(value) else abs(value))
        row = int(sizes.to_numpy().argmax())
        return Uneven(name, row, column.iloc[row])

    def _beyond(self, column: pd.Series) -> Beyond | None:
        name, given = str(column.name), column.dtype
        if name not in self._reduced or name in self._lists or given.kind not in "iuf":
            return None
        kind = self._reduced[name]
        limits = np.iinfo(kind)
        bad = ((column < limits.min) | (column > limits.max)).fillna(False).to_numpy(bool)
        if not bad.any():
            return None
        row = int(bad.argmax())
        value = column.iloc[row].item()
        return Beyond(name, row, int(value) if value == value // 1 else value, kind)

    def misread(
        self,
        frame: pd.DataFrame,
        encoded: pa.RecordBatch,
        encode: Callable[[pd.DataFrame], pa.RecordBatch],
        exact: Mapping[str, pa.Array] | None = None,
    ) -> Misread | MisreadDigits | None:
        """A column of whole numbers, floats here, of which the workflow makes other inputs by that.

        Or integers wider than the fit's, as one of them is beyond its type: in a batch without it
        an operator may overflow, as at the fit. Or floats narrower than the fit's, of which the
        workflow makes other ids than of those of the same digits. All columns of whole numbers at
        once are made whole, and compared with the same numbers as they are: two that are read
        together may be read as at the fit only where both are whole. Whatever number of them takes
        one or two encodings more, where none is misread.

        Args:
          frame: of `as_fitted`.
          encoded: what the workflow made of it, row for row.
          encode: what makes it.
          exact: columns that were integers, with nulls.
        """
        whole: dict[str, pd.Series] = {}  # a column's numbers, in all rows, as at the fit
        given: dict[str, pd.Series] = {}  # the same, of the type that they have here
        good: list[np.ndarray] = []  # in which rows a column's are its own
        for name in map(str, frame):
            if name not in self._whole:
                continue
            column, fitted = frame[name], self._fitted[name]
            kind: Any = getattr(column.dtype, "numpy_dtype", column.dtype)
            if kind == fitted or kind.kind not in "iuf":
                continue
            if kind.kind == "f":
                is_good, numbers = whole_in(column, (exact or {}).get(name))
            else:
                is_good, numbers = within(column, np.iinfo(fitted))
            if not is_good.any():
                continue  # no number that is misread
            if name in self._encoded_alone and largest(numbers) < 2**53:
                continue  # a vocabulary has one id for 7 and 7.0; most columns are such
            good.append(is_good)
            filled = pd.Series(numbers, frame.index)
            given[name] = filled.astype(kind)
            whole[name] = of_type(filled, fitted, is_id=False)
        if (narrow := self._misread_digits(frame, encoded, encode, whole)) is not None:
            return narrow
        if (nothing := self._misread_nothing(frame, encoded, encode)) is not None:
            return nothing
        if not whole:
            return None
        try:
            return self._among_others(frame, encoded, encode, whole, given, good)
        except Exception:  # of a number that stands where none was, maybe: no row of the user's
            return self._in_their_rows(frame, encode, whole, good)

    def _misread_digits(
        self,
        frame: pd.DataFrame,
        encoded: pa.RecordBatch,
        encode: Callable[[pd.DataFrame], pa.RecordBatch],
        whole: Mapping[str, pd.Series],
    ) -> MisreadDigits | None:
        """`misread` of floats; a number that is made of one is as exact as that is.

        Among columns that are whole: what is read together with one that is not may be unknown
        whatever its digits are.
        """
        wide = {
            name: of_digits(frame[name], self._fitted[name])
            for name in sorted(self._digits.intersection(map(str, frame)))
            if frame[name].dtype.kind == "f" and frame[name].dtype != self._fitted[name]
        }
        if not wide:
            return None
        if whole:
            with contextlib.suppress(Exception):  # see `misread`: then as they are
                encoded = encode(among := frame.assign(**whole))
                frame = among

        def made_others(*names: str) -> bool:
            alike = encode(frame.assign(**{name: wide[name] for name in names}))
            return bool(self._ids & self._other(alike, encoded))

        if not made_others(*wide):
            return None
        first, *_ = wide  # where several are read together, one alone need not tell
        name = next(filter(made_others, wide), first)
        return MisreadDigits(name, frame[name].dtype, self._fitted[name])

    def _misread_nothing(
        self,
        frame: pd.DataFrame,
        encoded: pa.RecordBatch,
        encode: Callable[[pd.DataFrame], pa.RecordBatch],
    ) -> Misread | None:
        """`misread` of columns of which every number is missing, and may be filled in."""
        names = [str(name) for name in frame if frame[name].isna().all()]
        names = [name for name in names if name in self._whole - self._encoded_alone]
        nothing = pd.Series(pd.NA, frame.index, "Int64")
        for name in names:
            with contextlib.suppress(Exception):  # of an operator that takes no such integers
                if self._other(encode(frame.assign(**{name: nothing})), encoded):
                    return Misread.of(frame[name], self._fitted[name])
        return None

    def _among_others(
        self,
        frame: pd.DataFrame,
        encoded: pa.RecordBatch,
        encode: Callable[[pd.DataFrame], pa.RecordBatch],
        whole: Mapping[str, pd.Series],
        given: Mapping[str, pd.Series],
        good: Sequence[np.ndarray],
    ) -> Misread | None:
        """`misread` of all rows: where a column has no number of its own, another row's."""
        as_whole = encode(frame.assign(**whole))
        if all((one == good[0]).all() for one in good):
            rows = pa.array(np.flatnonzero(good[0]))
            if not self._other(as_whole.take(rows), encoded.take(rows)):
                return None
        # Or do they depend on the rows beside them, which have other numbers?
        if not self._other(as_whole, encode(frame.assign(**given))):
            return None
        for name in whole if len(whole) > 1 else ():  # one, among others that are whole
            if self._other(as_whole, encode(frame.assign(**{**whole, name: given[name]}))):
                return Misread.of(frame[name], self._fitted[name])
        name = next(iter(whole))
        return Misread.of(frame[name], self._fitted[name])

    def _in_their_rows(
        self,
        frame: pd.DataFrame,
        encode: Callable[[pd.DataFrame], pa.RecordBatch],
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
            if self._other(encode(own.assign(**numbers)), encode(own)):
                return Misread.of(frame[names[0]], self._fitted[names[0]])
        return None

    def _other(self, left: pa.RecordBatch, right: pa.RecordBatch) -> set[str]:
        return different_columns(left, right, self._ids)


def different_columns(
    left: pa.RecordBatch, right: pa.RecordBatch, ids: Collection[str]
) -> set[str]:
    """Columns that differ: of ids at all, of numbers by more than the precision of floats."""
    names = left.schema.names
    return {n for n in names if not _same(left[n], right[n], 0 if n in ids else 1e-5)}


def numpy_type(column: ColumnSchema) -> np.dtype:
    """Of a column's values, or of those of its lists; object where NumPy has none."""
    kind = None if column.dtype.name == "unknown" else column.dtype.to_numpy
    return np.dtype(kind or object)


def _same(left: pa.Array, right: pa.Array, tolerance: float) -> bool:
    if left.equals(right):
        return True
    if not (is_number(left.type) and is_number(right.type)):
        return False
    one, other = (c.to_numpy(zero_copy_only=False).astype(np.float64) for c in (left, right))
    return bool(np.isclose(one, other, rtol=tolerance, atol=0, equal_nan=True).all())


def uses(workflow: nvt.Workflow) -> tuple[set[str], set[str], dict[str, np.dtype]]:
    """Raw columns that Categorify reads as they are, or filled; and those that are read otherwise.

    The others are read by other operators, hashed, or read together with more. And the types that
    ReduceDtypeSize gives those that it reads as they are.
    """
    with quiet_imports():
        from nvtabular import ops

    keep = (*operators_that_keep_values(), ops.FillMissing, ops.FillMedian)
    encoded: set[str] = set()
    otherwise: set[str] = set()
    reduced: dict[str, np.dtype] = {}
    nothing: frozenset[str] = frozenset()

    def made_by(node: Node, given: dict[str, frozenset[str]]) -> dict[str, frozenset[str]]:
        """Of what a node makes, of which raw columns it is, if none was changed."""
        used = nothing.union(*given.values())
        if isinstance(node.op, ops.Categorify):
            encoded.update(used)
            if node.op.num_buckets or node.op.encode_type == "combo":
                otherwise.update(used)
        elif isinstance(node.op, keep):
            if isinstance(node.op, ops.ReduceDtypeSize):
                for name, dtype in node.op.dtypes.items():
                    kind = np.dtype(dtype.to_numpy)
                    for raw in given.get(name, nothing) if kind.kind in "iu" else ():
                        reduced[raw] = min(kind, reduced.get(raw, kind), key=lambda k: k.itemsize)
            fills = isinstance(node.op, (ops.FillMissing, ops.FillMedian))  # and may add flags
            return {
                name: nothing.union(*(given.get(one, nothing) for one in sources))
                for name, sources in node.column_mapping.items()
                if not fills or name in sources
            }
        else:
            otherwise.update(used)
        return {}

    followed(workflow.output_node, lambda name: frozenset({name}), made_by, nothing)
    return encoded, otherwise, reduced
