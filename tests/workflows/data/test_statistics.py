"""Columns to ids and to [0, 1], as the saved workflow does it."""

import math
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from merlin_cowclip.workflows.data.prepare.numbers import unit_range
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.quiet import quiet_imports

with quiet_imports():
    from nvtabular import ColumnSelector, ops

    from merlin_cowclip.workflows.data.prepare.operators import EncodeIds, ParseNumbers, UnitRange

SELECTED = ColumnSelector(["n"])

# Numbers to [0, 1]


def by_workflow(numbers: np.ndarray, low: float, high: float) -> np.ndarray:
    """As `build_workflow` chains the operators."""
    unit = UnitRange(out_dtype="float32")
    unit.fit_finalize({"mins": pd.Series({"n": low}), "maxs": pd.Series({"n": high})})
    frame = ops.FillMissing(0).transform(SELECTED, pd.DataFrame({"n": numbers}))
    frame = unit.transform(SELECTED, frame)
    return ops.Clip(min_value=0.0, max_value=1.0).transform(SELECTED, frame)["n"].to_numpy()


numbers = st.lists(st.floats(-1e300, 1e300) | st.just(math.nan), min_size=1, max_size=8)


@settings(deadline=None, max_examples=50)
@given(numbers, numbers)
def test_any_finite_numbers_lie_between_0_and_1(train, test):
    held = [0.0 if math.isnan(x) else x for x in train]
    low, high = min(held), max(held)
    both = np.array([*train, *test])
    found = unit_range(both, low, high)
    assert found.dtype == np.float32
    assert ((found >= 0) & (found <= 1)).all()
    np.testing.assert_array_equal(by_workflow(both, low, high), found)
    # The numbers themselves, exactly; 2^-23 is float32's precision.
    span = Fraction(high) - Fraction(low) or Fraction(low + max(1.0, abs(low))) - Fraction(low)
    for x, y in zip(both, found, strict=True):
        exact = (Fraction(0.0 if math.isnan(x) else x) - Fraction(low)) / span
        assert abs(float(y) - float(min(max(exact, 0), 1))) <= 2**-23


@pytest.mark.parametrize("dtype", ["float32", "int64", "Int64"])
def test_the_workflow_scales_columns_of_any_type_as_prepare_does(dtype):
    """In float32, as stock NormalizeMinMax, 0.1 steps differ from float64's in the last bit."""
    column = pd.Series(np.arange(1, 100) * (0.1 if dtype == "float32" else 3)).astype(dtype)
    values = column.to_numpy(dtype=np.float64)
    expected = unit_range(values, 0.3, 90.0)
    unit = UnitRange(out_dtype="float32")
    unit.fit_finalize({"mins": pd.Series({"n": 0.3}), "maxs": pd.Series({"n": 90.0})})
    found = unit.transform(SELECTED, pd.DataFrame({"n": column}))["n"].to_numpy()
    inside = (values > 0.3) & (values < 90)
    np.testing.assert_array_equal(found[inside], expected[inside])
    assert found.dtype == np.float32


def test_a_number_that_is_not_finite_is_served_as_the_end_of_its_range():
    given_numbers = np.array([math.inf, -math.inf])
    for low, high in ((0.0, 1.0), (-1e300, 1e300), (7.0, 7.0)):
        np.testing.assert_array_equal(by_workflow(given_numbers, low, high), [1.0, 0.0])


# Raw cells


def encoded(tmp_path, values: list, **options) -> list[int]:
    """By a vocabulary of "1382", "true" and "x": ids 3, 4 and 5."""
    pd.DataFrame({"n": ["1382", "true", "x"]}).to_parquet(tmp_path / "unique.n.parquet")
    encode = EncodeIds(tmp_path, **options)
    encode.fit_finalize({"n": str(tmp_path / "unique.n.parquet")})
    column = pd.Series(values, dtype=object)
    return [
        list(cell) if options else cell
        for cell in encode.transform(SELECTED, column.to_frame("n"))["n"]
    ]


def test_one_id_has_many_forms(tmp_path):
    assert encoded(tmp_path, ["1382", None, math.nan, "", "true"]) == [3, 1, 1, 1, 4]
    assert encoded(tmp_path, [1382, None, 7]) == [3, 1, 2]
    assert encoded(tmp_path, [1382.0, math.nan]) == [3, 1]
    assert encoded(tmp_path, [True, None]) == [4, 1]
    assert encoded(tmp_path, [b"x", None]) == [5, 1]
    assert encoded(tmp_path, [["x", "-"], None, []], lists=["n"], null_values=["-"]) == [
        [5, 1],
        [],
        [],
    ]
    for cells, says in (([1.5], "1.5"), (["1382", 1382], "'int' object"), ([7, "x"], "'x'")):
        with pytest.raises(UserError, match=f"cannot read column 'n'.*{says}.* Read it as text"):
            encoded(tmp_path, cells)


def test_numbers_and_their_texts():
    cells = pd.Series(["1.5", 2, "", None, "-", pd.NA], dtype=object, index=range(7, 13))
    found = ParseNumbers(["-"]).transform(SELECTED, cells.to_frame("n"))["n"]
    pd.testing.assert_series_equal(found, pd.Series([1.5, 2] + [np.nan] * 4, cells.index, name="n"))
