"""Columns of raw rows as NumPy holds them, whatever type of pandas' they are given as."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa


def plain_frame(frame: pd.DataFrame) -> pd.DataFrame:
    """A frame without sparse columns, Arrow's, pandas' own text, categories of text, and tuples.

    An operator may refuse them, or make another id of them than of the same values. A missing text
    is None, as in text that is read from parquet; that of a column of objects stays as it is.
    """
    return pd.DataFrame({name: _plain(frame[name]) for name in frame}, index=frame.index)


def _plain(column: pd.Series) -> pd.Series:
    kind: Any = column.dtype
    if isinstance(kind, pd.SparseDtype):
        return _plain(pd.Series(np.asarray(column), column.index))
    if isinstance(kind, pd.CategoricalDtype):
        is_text = pd.api.types.is_string_dtype(kind.categories) or not len(kind.categories)
        return _text(column) if is_text else column  # numbers are `number_types`'
    if isinstance(kind, pd.ArrowDtype):
        held = pa.array(column)
        return pd.Series(held.to_pandas(integer_object_nulls=True).to_numpy(), column.index)
    if isinstance(kind, pd.StringDtype):
        return _text(column)
    is_object = pd.api.types.is_object_dtype(kind)
    if is_object and any(value is pd.NA or isinstance(value, tuple) for value in column):
        return pd.Series([*map(_plain_value, column)], column.index, object)
    return column


def _plain_value(value: Any) -> Any:
    if value is pd.NA:
        return None
    return list(value) if isinstance(value, tuple) else value


def _text(column: pd.Series) -> pd.Series:
    found = column.astype(object)
    return found.where(found.notna(), None)
