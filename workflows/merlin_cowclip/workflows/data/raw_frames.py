"""Raw rows of Arrow's types as pandas has them, and frames of whatever types as Arrow has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from merlin_cowclip.workflows.data.encoded_rows import Place
from merlin_cowclip.workflows.data.raw_types import RawType
from merlin_cowclip.workflows.errors import UserError, clipped


def arrow_column(column: pd.Series, place: Place) -> pa.Array:
    """The values of a frame's column; NaN, NaT and None are missing ones.

    Args:
      column: of whatever type; its index is no matter.
      place: where its rows lie.

    Raises:
      UserError: they are of several types, or of one that Arrow has not.
    """
    kind: Any = column.dtype
    values: Any = column
    if isinstance(kind, pd.SparseDtype):
        values = np.asarray(column)
    elif pd.api.types.is_object_dtype(kind):
        # Of arrays each has a type of its own, an empty one that of floats, say.
        is_one_type = len({v.dtype for v in column if isinstance(v, np.ndarray) and len(v)}) < 2
        values = [
            v.tolist() if isinstance(v, np.ndarray) and not (is_one_type and len(v)) else v
            for v in column
        ]
    try:
        found = pa.array(values, from_pandas=True)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise UserError(
            "the values of a column must be of one type. Received: "
            f"{place.column(str(column.name))}: {clipped(str(error))}. Give them as at the fit"
        ) from None
    return found.combine_chunks() if isinstance(found, pa.ChunkedArray) else found


def pandas_frame(columns: Mapping[str, pa.Array]) -> pd.DataFrame:
    """Columns as pandas reads them from parquet, of rows that are numbered from 0 on.

    Whole numbers with a missing one are floats, and a missing text, date or boolean is None.
    """
    return pd.DataFrame({name: column.to_pandas() for name, column in columns.items()})


def fitted_columns(
    frame: pd.DataFrame, types: Mapping[str, RawType], place: Place
) -> tuple[pd.DataFrame, dict[str, pa.Array]]:
    """A frame's columns of the types of the fit: as pandas has them, and as Arrow has.

    A missing one that is NaN among objects stays NaN, as `pandas.read_csv` has missing text.

    Args:
      frame: raw rows.
      types: by column.
      place: where the rows lie.

    Raises:
      UserError: a column is of another type, or a value has no equal of it.
    """
    fitted = {name: types[name].of(arrow_column(frame[name], place), name, place) for name in types}
    found = pandas_frame(fitted)
    for name in found:
        given = frame[name]
        may_be_nan = pd.api.types.is_object_dtype(given) or pd.api.types.is_float_dtype(given)
        if may_be_nan and pd.api.types.is_object_dtype(found[name]):
            is_nan = [isinstance(value, float) and np.isnan(value) for value in given]
            found[name] = found[name].mask(np.array(is_nan, bool), np.nan)
    return found, fitted
