"""Missing text and booleans of raw rows: None, NaN or NA, by the reader; operators may tell them.

`str` makes "None", "nan" and "<NA>" of them, which are three ids, or one and unknown ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping

import numpy as np
import pandas as pd
import pyarrow as pa

from merlin_cowclip.workflows.data.missing_numbers import Encode, different_columns
from merlin_cowclip.workflows.data.raw_types import RawType
from merlin_cowclip.workflows.errors import quoted


class MissingText:
    """Where a fitted workflow tells one missing text from another.

    Args:
      types: of its raw columns.
      otherwise: `columns_told_apart` of it.
      ids: columns of ids that it makes.
    """

    def __init__(
        self, types: Mapping[str, RawType], otherwise: Collection[str], ids: Collection[str]
    ) -> None:
        self._ids = ids
        self._names = [n for n, one in types.items() if n in otherwise and not one.is_list]

    def told_apart(
        self,
        frame: pd.DataFrame,
        encoded: pa.RecordBatch,
        encode: Encode,
    ) -> str | None:
        """What is to be said of columns in which it matters whether None or NaN is missing.

        Args:
          frame: the rows.
          encoded: what the workflow made of it, row for row.
          encode: what makes it.
        """
        names = [
            name for name in self._names if frame[name].dtype == object and frame[name].isna().any()
        ]
        told = [name for name in names if self._is_told(frame, name, encoded, encode)]
        if not told:
            return None
        missing = sorted({"None" if _has_none(frame[name]) else "NaN" for name in told})
        return (
            "the workflow makes one input of a missing text or boolean that is None, as parquet "
            "has it, and another of NaN, as pandas.read_csv has it, or of pandas.NA, as its own "
            f"text and booleans are. Received missing ones in {quoted(told)}, taken as "
            f"{' or '.join(missing)}. If the workflow was fitted on another, fill them in"
        )

    def _is_told(
        self,
        frame: pd.DataFrame,
        name: str,
        encoded: pa.RecordBatch,
        encode: Encode,
    ) -> bool:
        column = frame[name]
        for other in (np.nan if _has_none(column) else None, pd.NA):
            with contextlib.suppress(Exception):  # of an operator that takes one of them alone
                again = encode(frame.assign(**{name: column.where(column.notna(), other)}))
                if different_columns(again, encoded, self._ids):
                    return True
        return False


def _has_none(column: pd.Series) -> bool:
    return any(value is None for value in column)
