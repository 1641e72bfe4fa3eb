"""Frames of raw rows for an adopted workflow, held to the types that a server holds requests to.

A server refuses a tensor of another type; a workflow would take the rows, and make another id of
"3" than of 3, or the same of 3.7, without a word.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from decimal import Decimal
from numbers import Integral, Real
from typing import Any

import numpy as np
import pandas as pd

from merlin_cowclip.workflows.data.encoded_rows import Place
from merlin_cowclip.workflows.data.raw_types import RawType
from merlin_cowclip.workflows.errors import clipped, excerpt


def as_served(frame: pd.DataFrame, types: Mapping[str, RawType], place: Place) -> pd.DataFrame:
    """A frame of the types of the workflow's raw columns; text that is given as bytes is str.

    Missing values are any column's. Whole numbers may be floats, as pandas has them beside a
    missing one, and what is fitted on floats or booleans may be given as integers.

    Args:
      frame: raw rows.
      types: of the raw columns.
      place: where the rows lie.

    Raises:
      UserError: a value of another type, by row and column.
    """
    changed = {}
    for name in map(str, frame):
        kind = types[name].kind if name in types else ""
        if kind not in _RULES:
            continue
        given = frame[name]
        if given.dtype == object and any(map(pd.api.types.is_list_like, given)):
            rows = [row if pd.api.types.is_list_like(row) else [] for row in given]
            lengths = list(map(len, rows))
            flat = pd.Series(list(itertools.chain(*rows)), dtype=object)
            found = _values(flat, np.repeat(np.arange(len(rows)), lengths), kind, name, place)
            if found is not None:
                ends = np.cumsum(lengths)[:-1]
                parts = np.empty(len(rows), object)
                parts[:] = np.split(found, ends)
                is_list = np.fromiter(map(pd.api.types.is_list_like, given), bool, len(given))
                changed[name] = pd.Series(parts, frame.index).where(is_list, given)
        else:
            found = _values(given, np.arange(len(given)), kind, name, place)
            if found is not None:
                changed[name] = pd.Series(found, frame.index)
    return frame.assign(**changed) if changed else frame


_RULES = {
    "text": ("text must be text", "Give text"),
    "whole": ("a whole number must be one", "Give whole numbers"),
    "number": ("a number must be one", "Give numbers"),
    "truth": ("a boolean must be one", "Give booleans"),
    "decimal": ("a decimal must be one, or a whole number", "Give decimals"),
    "bytes": ("bytes must be such", "Give bytes"),
    "hashed": ("what is hashed, and was no number, must be none", "Give it as at the fit"),
}


def _values(
    given: pd.Series, rows: np.ndarray, kind: str, name: str, place: Place
) -> np.ndarray | None:
    """The values where they have to be others: text in place of bytes.

    Raises:
      UserError: one of another type.
    """
    if not len(given) or given.isna().all():
        return None
    if kind in ("whole", "number", "truth") and pd.api.types.is_numeric_dtype(given.dtype):
        if kind == "number" or given.dtype.kind in "b" + "iu" * (kind == "whole"):
            return None
    elif kind in ("text", "hashed") and pd.api.types.infer_dtype(given, skipna=True) == "string":
        return None
    values = given.to_numpy(dtype=object)
    found = values.copy()
    for i, value in enumerate(values):
        if pd.api.types.is_scalar(value) and pd.isna(value):
            continue
        if kind == "text" and isinstance(value, bytes):
            try:
                found[i] = value.decode("utf-8")
            except UnicodeDecodeError:
                place.refuse("text must be UTF-8", excerpt(value), int(rows[i]), name, "Give text")
        elif not _is(kind, value):
            rule, remedy = _RULES[kind]
            shown = excerpt(value) if isinstance(value, str | bytes) else clipped(repr(value))
            place.refuse(rule, shown, int(rows[i]), name, remedy)
    return found if kind == "text" else None


def _is(kind: str, value: Any) -> bool:
    """Whether a value that is not missing is of a kind."""
    if kind == "text":
        return isinstance(value, str)
    if kind == "bytes":
        return isinstance(value, bytes)
    if kind == "hashed":
        return not isinstance(value, Real) or isinstance(value, bool | np.bool_)
    if kind == "decimal":
        return isinstance(value, Decimal | Integral | np.bool_)
    if not isinstance(value, Real | Decimal | np.bool_):
        return False
    if kind == "whole":
        return isinstance(value, Integral | np.bool_) or value == value // 1
    return kind == "number" or value in (0, 1)
