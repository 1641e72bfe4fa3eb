"""Raw columns of numbers as the workflow read them at its fit: whole ones as such, or as floats.

pandas makes whole numbers floats beside a missing one or a fraction, in a file that it writes as in
a batch. Of 7.0 an operator may make another id than of 7, and from 2^53 on floats are rounded. In
narrower integers than the fit's an operator may overflow, and 0.1 is another number as a float32.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import pandas as pd
import pyarrow as pa

from merlin_cowclip.workflows.data.encoded_rows import Place
from merlin_cowclip.workflows.data.id_origins import operators_that_keep_values
from merlin_cowclip.workflows.data.parquet_logs import is_number
from merlin_cowclip.workflows.data.raw_columns import RawColumns, learned_keys
from merlin_cowclip.workflows.data.workflow_graph import followed
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.quiet import quiet_imports

if TYPE_CHECKING:
    import nvtabular as nvt
    from merlin.dag import Node
    from merlin.schema import ColumnSchema


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
class Narrowed:
    """A float32 that is another number than the float64 of the same digits, which was an id."""

    column: str
    row: int  # from 0
    value: float

    def refuse(self, place: Place) -> NoReturn:
        """Raise UserError."""
        rule = "an id must be a float64, as those that the workflow was fitted on"
        value = f"{np.float32(self.value)!s} as a float32, which is {self.value!r},"
        place.refuse(rule, value, self.row, self.column, "Give the column as float64")


@dataclass(frozen=True)
class Beyond:
    """An integer that does not fit into the type that `ReduceDtypeSize` chose at the fit."""

    column: str
    row: int  # from 0
    value: float
    kind: np.dtype

    def refuse(self, place: Place) -> NoReturn:
        """Raise UserError."""
        limits = np.iinfo(self.kind)
        rule = (
            f"a number must be from {limits.min} to {limits.max}, for ReduceDtypeSize made its "
            f"column {self.kind}, where another becomes one of these"
        )
        place.refuse(rule, self.value, self.row, self.column, "Leave it out, or fit without it")


@dataclass(frozen=True)
class Misread:
    """A column of whole numbers of another type than at the fit, which the workflow reads so."""

    column: str
    among: str  # what they are of that type by
    made: str  # what that makes them

    @classmethod
    def of(cls, column: pd.Series, fitted: np.dtype) -> Misread:
        """Of a column as it is."""
        name, kind = str(column.name), column.dtype
        if kind.kind != "f":
            made = f"them wider; of {fitted} the workflow makes other inputs"
            return cls(name, f"one that is no {fitted}", made)
        made = "them floats to pandas; of 7.0 the workflow makes another input than of 7"
        return cls(name, _among(column), made)

    def refuse(self, rows: str) -> NoReturn:
        """Raise UserError for rows, which are where."""
        raise UserError(
            f"whole numbers of column {self.column!r} must have no {self.among} among them, for "
            f"the workflow was fitted on none. Received: {rows}, which makes {self.made}. Fill it "
            "in, or give the rows without one apart"
        )


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
        kinds = {n: _numpy_type(c) for n, c in columns.items()}
        self._fitted = {name: kind for name, kind in kinds.items() if kind.kind in "iuf"}
        self._lists = {name for name in self._fitted if columns[name].is_list}
        whole = {name for name, kind in self._fitted.items() if kind.kind in "iu"}
        self._whole = whole - self._lists
        encoded, otherwise, reduced = _uses(workflow)
        raw = RawColumns(workflow, fields)
        self._reduced = {name: k for name, k in reduced.items() if not raw.may_lack([name])}
        looked_up = encoded | learned_keys(workflow).keys()
        self._encoded = encoded & whole
        self._encoded_alone = self._encoded - otherwise
        self._floats = looked_up & (self._fitted.keys() - whole)

    def as_fitted(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Raw rows of the types of numbers that the workflow was fitted on, lists of them as well.

        Left as they are: floats where the fit was on integers, and one is missing, is a fraction or
        from 2^53 on (see `misread`); integers beyond the type of the fit; and ids that `no_id`
        finds. What is encoded is a batch or a request, and has no missing one, maybe, where the fit
        had one.
        """
        changed = {}
        for name, fitted in self._fitted.items():
            if name not in frame:
                continue
            is_id, column = name in self._floats, frame[name]
            if name not in self._lists:
                changed[name] = _as_fitted(column, fitted, is_id)
            elif (lists := _Lists.of(column, fitted)) is not None:
                changed[name] = lists.of_values(_as_fitted(lists.values, fitted, is_id))
        return frame.assign(**changed)

    def no_id(
        self, frame: pd.DataFrame, exact: Collection[str] = ()
    ) -> NotWhole | Narrowed | Beyond | None:
        """The first number, of a column that is looked up as it is, that is no id of the fit.

        Where `Categorify` has learned whole numbers, a fraction or a rounded one: stock takes 3.7
        for 3. Where it, or an operator of groups, has learned float64, a float32 that is another
        number: stock knows none of them. And any integer of which `ReduceDtypeSize` would make
        another one, id or not: it takes 261 for 5.

        Args:
          frame: of `as_fitted`.
          exact: columns that were integers, with nulls.
        """
        for name in map(str, frame):
            if (beyond := self._beyond(frame[name])) is not None:
                return beyond
            if name in exact or name not in self._encoded | self._floats:
                continue
            values, rows = frame[name], None
            if name in self._lists:
                lists = _Lists.of(values, self._fitted[name])
                if lists is None:
                    continue
                values, rows = lists.values, lists.rows()
                if pd.api.types.is_object_dtype(values.dtype):  # integers among them are exact
                    is_float = ~values.map(_is_integer).to_numpy(bool)
                    values, rows = _numbers(values[is_float], is_float=True), rows[is_float]
            kind: Any = values.dtype
            is_narrow = name in self._floats
            if kind.kind != "f" or (is_narrow and kind.itemsize >= self._fitted[name].itemsize):
                continue
            held = _floats(values)
            bad = _is_another(values) if is_narrow else ~np.isnan(held) & ~_is_whole(values)
            if bad.any():
                at = int(bad.argmax())
                found = Narrowed if is_narrow else NotWhole
                return found(name, at if rows is None else int(rows[at]), float(held[at]))
        return None

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
    ) -> Misread | None:
        """A column of whole numbers, floats here, of which the workflow makes other inputs by that.

        Or integers wider than the fit's, as one of them is beyond its type: in a batch without it
        an operator may overflow, as at the fit. All such columns at once are made whole, and
        compared with the same numbers as they are: two that are read together may be read as at
        the fit only where both are whole. Whatever number of them takes one or two encodings more,
        where none is misread.

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
                is_good, numbers = _whole_numbers(column, (exact or {}).get(name))
            else:
                is_good, numbers = _within(column, np.iinfo(fitted))
            if not is_good.any():
                continue  # no number that is misread
            if name in self._encoded_alone and _largest(numbers) < 2**53:
                continue  # a vocabulary has one id for 7 and 7.0; most columns are such
            good.append(is_good)
            filled = pd.Series(numbers, frame.index)
            given[name] = filled.astype(kind)
            whole[name] = _as_fitted(filled, fitted, is_id=False)
        if not whole:
            return None
        try:
            return self._among_others(frame, encoded, encode, whole, given, good)
        except Exception:  # of a number that stands where none was, maybe: no row of the user's
            return self._in_their_rows(frame, encode, whole, good)

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
        """Columns that differ: of ids at all, of numbers by more than the precision of floats."""
        names = set(left.schema.names)
        return {n for n in names if not _same(left[n], right[n], 0 if n in self._ids else 1e-5)}


@dataclass(frozen=True)
class _Lists:
    """The numbers of a column of lists, one list after the other."""

    column: pd.Series
    values: pd.Series
    lengths: np.ndarray  # 0 of a missing list, too

    @classmethod
    def of(cls, column: pd.Series, fitted: np.dtype) -> _Lists | None:
        """None where all are of a type already."""
        kinds = {getattr(row, "dtype", None) for row in column if pd.api.types.is_list_like(row)}
        if kinds <= {fitted}:
            return None
        rows = [row if pd.api.types.is_list_like(row) else () for row in column]
        kept = [kind for kind in kinds if kind is not None and kind.kind in "iuf"]
        values: Any = list(itertools.chain.from_iterable(rows))
        kind = kept[0] if kinds == set(kept) and len(kept) == 1 else object
        return cls(column, pd.Series(values, dtype=kind), np.fromiter(map(len, rows), np.int64))

    def rows(self) -> np.ndarray:
        """The row of each number."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    def of_values(self, values: pd.Series) -> pd.Series:
        """The lists, of other values; a missing one stays so."""
        if values is self.values:
            return self.column
        parts = np.empty(len(self.lengths), object)
        parts[:] = np.split(values.to_numpy(), np.cumsum(self.lengths)[:-1])
        is_list = self.column.map(pd.api.types.is_list_like).astype(bool)
        return pd.Series(parts, self.column.index).where(is_list, self.column)


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral)


def _numpy_type(column: ColumnSchema) -> np.dtype:
    """Of a column's values, or of those of its lists; object where NumPy has none."""
    kind = None if column.dtype.name == "unknown" else column.dtype.to_numpy
    return np.dtype(kind or object)


def _as_fitted(column: pd.Series, fitted: np.dtype, is_id: bool) -> pd.Series:
    """Numbers of a type, or as they are where that would make others of them.

    Args:
      column: numbers, or others.
      fitted: the type.
      is_id: whether a float is looked up as it is.
    """
    column = _integers(_numbers(column, fitted.kind == "f"))
    if column.dtype == bool:  # 1 and 0 at the fit, which an operator as of text tells from True
        column = column.astype(np.int8)
    given: Any = column.dtype
    if given == fitted or given.kind not in "iuf":
        return column
    if fitted.kind == "f":
        is_narrow = given.kind == "f" and given.itemsize < fitted.itemsize
        if is_id and is_narrow and _is_another(column).any():
            return column
        with np.errstate(over="ignore"):  # beyond a float32 it was infinite at the fit, too
            return pd.Series(_floats(column).astype(fitted), column.index)
    if column.isna().all() or (given.kind == "f" and not _is_whole(column).all()):
        is_exact = given.kind == "f" and (_is_whole(column) | column.isna()).all()
        return column.astype(np.float64) if is_exact else column  # as pandas makes them
    limits = np.iinfo(fitted)
    if int(column.min()) < limits.min or int(column.max()) > limits.max:
        return column.astype(np.int64) if given.kind == "f" else column
    if column.isna().any():  # pandas' own integers, which may be missing
        kind: Any = fitted.name.replace("uint", "UInt").replace("int", "Int")
    else:
        kind = fitted
    return column.astype(kind)


def _whole_numbers(column: pd.Series, exact: pa.Array | None) -> tuple[np.ndarray, np.ndarray]:
    """In which rows floats are whole numbers, and these, int64; another of them elsewhere.

    Args:
      column: floats.
      exact: the integers that they were, if it is known.
    """
    if exact is not None:
        is_good = exact.is_valid().to_numpy(zero_copy_only=False)
        known = exact.drop_null().to_numpy()
    else:
        values = _floats(column)
        with np.errstate(invalid="ignore"):
            is_good = (values == np.trunc(values)) & (np.abs(values) < 2**63)
        known = values[is_good].astype(np.int64)
    numbers = np.full(len(column), known[0] if len(known) else 0, known.dtype)
    numbers[is_good] = known
    return is_good, numbers


def _within(column: pd.Series, limits: np.iinfo) -> tuple[np.ndarray, np.ndarray]:
    """As `_whole_numbers`, of integers: those within the limits of the fit's type."""
    is_good = ((column >= limits.min) & (column <= limits.max)).fillna(False).to_numpy(bool)
    known = column[is_good].to_numpy(np.int64 if limits.min < 0 else np.uint64)
    numbers = np.full(len(column), known[0] if len(known) else 0, known.dtype)
    numbers[is_good] = known
    return is_good, numbers


def _largest(numbers: np.ndarray) -> int:
    return max(abs(int(numbers.min())), abs(int(numbers.max())))


def _floats(column: pd.Series) -> np.ndarray:
    return np.asarray(column.to_numpy(np.float64, na_value=np.nan))


def _numbers(column: pd.Series, is_float: bool) -> pd.Series:
    """Floats of decimals, of objects and of pandas' own floats, where a column is no such yet."""
    kind: Any = column.dtype
    if isinstance(kind, pd.CategoricalDtype) and kind.categories.dtype.kind == "f":
        return column.astype(np.float64)
    if pd.api.types.is_object_dtype(kind):
        kinds = ["decimal", "floating", "mixed-integer-float", *(["integer"] if is_float else [])]
        if pd.api.types.infer_dtype(column, skipna=True) not in kinds:
            return column
        if any(_is_integer(value) and abs(value) >= 2**53 for value in column):
            return column  # floats would round it
    elif not isinstance(kind, pd.Float32Dtype | pd.Float64Dtype):
        return column
    return pd.Series(_floats(column).astype(getattr(kind, "numpy_dtype", float)), column.index)


def _integers(column: pd.Series) -> pd.Series:
    """Integers of objects, as those of one row of a frame are, and of categories, none missing."""
    kind: Any = column.dtype
    if isinstance(kind, pd.CategoricalDtype):
        is_integer = kind.categories.dtype.kind in "iu"
    else:
        is_object = pd.api.types.is_object_dtype(kind)
        is_integer = is_object and pd.api.types.infer_dtype(column, skipna=False) == "integer"
    if not is_integer or column.isna().any():
        return column
    try:
        return column.astype(np.int64)
    except (OverflowError, TypeError, ValueError):  # of 2^63 and more
        return column


def _is_whole(column: pd.Series) -> np.ndarray:
    """Which floats are whole numbers that their type tells from their neighbours."""
    values, digits = _floats(column), np.finfo(column.to_numpy().dtype).nmant + 1
    with np.errstate(invalid="ignore"):
        return (np.abs(values) < 2.0**digits) & (values == np.trunc(values))


def _is_another(column: pd.Series) -> np.ndarray:
    """Which floats are other numbers than the float64 of the same digits, or may be: 0.1, not 0.5.

    NumPy's text of a float has the fewest digits that tell it from its neighbours.
    """
    held, places = np.unique(column.to_numpy(), return_inverse=True)
    with np.errstate(invalid="ignore"):
        is_large = np.abs(held) >= 2.0 ** (np.finfo(held.dtype).nmant + 1)
    others = (held.astype(str).astype(np.float64) != held.astype(np.float64)) | is_large
    return np.asarray((others & np.isfinite(held))[places])


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


def _uses(workflow: nvt.Workflow) -> tuple[set[str], set[str], dict[str, np.dtype]]:
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
