"""Columns of pandas' own types against the values that they hold."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from merlin_cowclip.workflows.data.plain_columns import plain_frame

ARROW = pd.ArrowDtype


@pytest.mark.parametrize(
    ("given", "kind", "values"),
    [
        (pd.Series([0.1, None], dtype=ARROW(pa.float32())), "float32", [np.float32(0.1), np.nan]),
        (pd.Series([2**60 + 1, 1], dtype=ARROW(pa.int64())), "int64", [2**60 + 1, 1]),
        (pd.Series([2**60 + 1, None], dtype=ARROW(pa.int64())), "object", [2**60 + 1, None]),
        (pd.Series([True, None], dtype=ARROW(pa.bool_())), "object", [True, None]),
        (pd.Series(["x", None], dtype=ARROW(pa.string())), "object", ["x", None]),
        (pd.Series(["x", None], dtype="string"), "object", ["x", None]),
        (pd.Series(["x", None], dtype="string[pyarrow]"), "object", ["x", None]),
        (pd.Series(["x", None], dtype="category"), "object", ["x", None]),
        (pd.Series([None, None], dtype="category"), "object", [None, None]),
        (pd.Series([1.5, np.nan], dtype=pd.SparseDtype("float64")), "float64", [1.5, np.nan]),
        (pd.Series([1, 0], dtype=pd.SparseDtype("int64", 0)), "int64", [1, 0]),
        (pd.Series([("a", "b"), None]), "object", [["a", "b"], None]),
        (pd.Series([2**60 + 1, pd.NA], dtype=object), "object", [2**60 + 1, None]),
        (pd.Series(["x", np.nan], dtype=object), "object", ["x", np.nan]),
    ],
)
def test_columns_are_plain(given, kind, values):
    given.index = [7, 3]
    found = plain_frame(pd.DataFrame({"x": given}))["x"]
    assert found.dtype == kind
    assert found.index.tolist() == [7, 3]
    for value, wanted in zip(found.tolist(), values, strict=True):
        assert value == wanted or ((value is None) is (wanted is None) and pd.isna(value))
