"""Numbers of one type as the same numbers of another, where none becomes another number."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass
from decimal import Decimal
from numbers import Integral
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

# What pandas infers columns of objects to be that hold numbers alone.
NUMBERS = ("integer", "floating", "mixed-integer-float", "decimal")


@dataclass(frozen=True)
class Lists:
    """The numbers of a column of lists, one list after the other."""

    column: pd.Series
    values: pd.Series
    lengths: np.ndarray  # 0 of a missing list, too

    @classmethod
    def of(cls, column: pd.Series, fitted: np.dtype) -> Lists | None:
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
        if pd.api.types.is_extension_array_dtype(values.dtype):  # of which one may be missing
            values = values.astype(object).where(values.notna(), None)
        parts = np.empty(len(self.lengths), object)
        parts[:] = np.split(values.to_numpy(), np.cumsum(self.lengths)[:-1])
        is_list = self.column.map(pd.api.types.is_list_like).astype(bool)
        return pd.Series(parts, self.column.index).where(is_list, self.column)


def is_integer(value: Any) -> bool:
    """Whether it is a whole number of Python's or NumPy's, and no float."""
    return isinstance(value, Integral)


def of_type(column: pd.Series, fitted: np.dtype, is_id: bool) -> pd.Series:
    """Numbers of a type, or as they are where that would make others of them.

    Args:
      column: numbers, or others.
      fitted: the type.
      is_id: whether a float is looked up as it is.
    """
    if column.isna().all():  # of whatever type: a file's is that of nothing, as pyarrow writes it
        return pd.Series(np.nan, column.index, fitted if fitted.kind == "f" else np.float64)
    column = _integers(numbers_of(column, fitted.kind == "f"))
    given: Any = column.dtype
    if given == fitted or given.kind not in "iuf":
        return column
    if fitted.kind == "f":
        is_narrow = given.kind == "f" and given.itemsize < fitted.itemsize
        if is_id and is_narrow and is_another(column).any():
            return column
        with np.errstate(over="ignore"):  # beyond a float32 it was infinite at the fit, too
            return pd.Series(floats_of(column).astype(fitted), column.index)
    if given.kind == "f" and not is_whole(column).all():
        is_exact = given.kind == "f" and (is_whole(column) | column.isna()).all()
        return column.astype(np.float64) if is_exact else column  # as pandas makes them
    limits = np.iinfo(fitted)
    if int(column.min()) < limits.min or int(column.max()) > limits.max:
        return column.astype(np.int64) if given.kind == "f" else column
    if column.isna().any():  # pandas' own integers, which may be missing
        kind: Any = fitted.name.replace("uint", "UInt").replace("int", "Int")
    else:
        kind = fitted
    return column.astype(kind)


def booleans_of(column: pd.Series) -> pd.Series:
    """Booleans of numbers that are 0 or 1; a column in which another one is, numbers as they are.

    A missing one among numbers is None, as among booleans that pandas reads from parquet; among
    objects that are booleans it is what it was.
    """
    if pd.api.types.is_bool_dtype(column.dtype) and not column.isna().any():
        return column.astype(bool)
    missing = column.isna().to_numpy()
    is_object = pd.api.types.is_object_dtype(column.dtype)
    if is_object and pd.api.types.infer_dtype(column, skipna=True) in ("boolean", "empty"):
        return column
    numbers = _integers(numbers_of(column, is_float=True))
    if numbers.dtype.kind not in "iuf":
        return column
    if not numbers[~missing].isin((0, 1)).all():
        return numbers
    held = np.array([False, True, None], object)
    found = held[np.where(missing, 2, floats_of(numbers)).astype(np.int64)]
    return pd.Series(found if missing.any() else found.astype(bool), column.index)


def whole_in(column: pd.Series, exact: pa.Array | None) -> tuple[np.ndarray, np.ndarray]:
    """In which rows floats are whole numbers, and these, int64; another of them elsewhere.

    Args:
      column: floats.
      exact: the integers that they were, if it is known.
    """
    if exact is not None:
        is_good = exact.is_valid().to_numpy(zero_copy_only=False)
        known = exact.drop_null().to_numpy()
    else:
        values = floats_of(column)
        with np.errstate(invalid="ignore"):
            is_good = (values == np.trunc(values)) & (np.abs(values) < 2**63)
        known = values[is_good].astype(np.int64)
    numbers = np.full(len(column), known[0] if len(known) else 0, known.dtype)
    numbers[is_good] = known
    return is_good, numbers


def of_digits(column: pd.Series, fitted: np.dtype) -> pd.Series:
    """The wider floats of the same digits as narrow ones; see `is_another`."""
    return pd.Series(column.to_numpy().astype(str).astype(fitted), column.index)


def within(column: pd.Series, limits: np.iinfo) -> tuple[np.ndarray, np.ndarray]:
    """As `whole_in`, of integers: those within the limits of the fit's type."""
    is_good = ((column >= limits.min) & (column <= limits.max)).fillna(False).to_numpy(bool)
    known = column[is_good].to_numpy(np.int64 if limits.min < 0 else np.uint64)
    numbers = np.full(len(column), known[0] if len(known) else 0, known.dtype)
    numbers[is_good] = known
    return is_good, numbers


def largest(numbers: np.ndarray) -> int:
    """The largest absolute value of integers, n ≥ 1; exact."""
    return max(abs(int(numbers.min())), abs(int(numbers.max())))


def floats_of(column: pd.Series) -> np.ndarray:
    """float64, NaN where one is missing."""
    return np.asarray(column.to_numpy(np.float64, na_value=np.nan))


def numbers_of(column: pd.Series, is_float: bool) -> pd.Series:
    """Floats of decimals, of objects and of pandas' own floats, where a column is no such yet."""
    kind: Any = column.dtype
    if isinstance(kind, pd.CategoricalDtype):
        is_empty = is_float and not len(kind.categories)
        if is_empty or kind.categories.dtype.kind == "f":
            return column.astype(np.float64)
    if pd.api.types.is_object_dtype(kind):
        kinds = ["decimal", "floating", "mixed-integer-float"]
        kinds += ["integer", "empty"] if is_float else []
        if pd.api.types.infer_dtype(column, skipna=True) not in kinds:
            return column
        if any(isinstance(v, Integral | Decimal) and abs(int(v)) >= 2**53 for v in column.dropna()):
            whole = _whole_objects(column)  # floats would round them
            return column if whole is None else whole
    elif not isinstance(kind, pd.Float32Dtype | pd.Float64Dtype):
        return column
    return pd.Series(floats_of(column).astype(getattr(kind, "numpy_dtype", float)), column.index)


def _whole_objects(column: pd.Series) -> pd.Series | None:
    """Integers of objects that are whole numbers; None if one is not, or is rounded already."""
    whole: list[Any] = []
    for value in column:
        is_float = isinstance(value, float) and abs(value) >= 2**53  # nan is not
        if is_float or not (pd.isna(value) or value == value // 1):
            return None
        whole.append(None if pd.isna(value) else int(value))
    return pd.Series(whole, column.index, object)


def _integers(column: pd.Series) -> pd.Series:
    """Integers of booleans, of objects, as those of one row of a frame are, and of categories.

    Where one is missing floats, as pandas makes them, or its own integers if floats would be
    others. True was 1 at the fit, from which an operator may tell it.
    """
    given: Any = column
    if isinstance(given.dtype, pd.CategoricalDtype) and given.dtype.categories.dtype.kind in "iubO":
        held = np.array([*given.dtype.categories, None], object)  # astype(object) makes floats
        given = pd.Series(held[given.cat.codes], column.index)
    kind = given.dtype
    if pd.api.types.is_object_dtype(kind):
        inferred = pd.api.types.infer_dtype(given, skipna=True)
        for own in {"boolean": ["boolean"], "integer": ["Int64", "UInt64"]}.get(inferred, []):
            with contextlib.suppress(OverflowError, TypeError, ValueError):  # beyond its type
                given = given.astype(own)
                break
        else:
            return column
    if pd.api.types.is_bool_dtype(given.dtype):
        given = given.astype("Int8")
    elif kind == given.dtype:
        return column
    if not given.isna().any():
        return given.astype(given.dtype.numpy_dtype)
    known = given.dropna()
    is_exact = not len(known) or largest(known.to_numpy(known.dtype.numpy_dtype)) < 2**53
    return pd.Series(floats_of(given), column.index) if is_exact else given


def is_whole(column: pd.Series) -> np.ndarray:
    """Which floats are whole numbers that their type tells from their neighbours."""
    values, digits = floats_of(column), np.finfo(column.to_numpy().dtype).nmant + 1
    with np.errstate(invalid="ignore"):
        return (np.abs(values) < 2.0**digits) & (values == np.trunc(values))


def is_rounded(column: pd.Series) -> np.ndarray:
    """Which floats may be several integers: from 2^53 on, as a float32 from 2^24."""
    values = floats_of(column)
    with np.errstate(invalid="ignore"):
        return np.isfinite(values) & (
            np.abs(values) >= 2.0 ** (np.finfo(column.to_numpy().dtype).nmant + 1)
        )


def is_another(column: pd.Series) -> np.ndarray:
    """Which floats are other numbers than the float64 of the same digits, or may be: 0.1, not 0.5.

    NumPy's text of a float has the fewest digits that tell it from its neighbours.
    """
    held, places = np.unique(column.to_numpy(), return_inverse=True)
    with np.errstate(invalid="ignore"):
        is_large = np.abs(held) >= 2.0 ** (np.finfo(held.dtype).nmant + 1)
    others = (held.astype(str).astype(np.float64) != held.astype(np.float64)) | is_large
    return np.asarray((others & np.isfinite(held))[places])
