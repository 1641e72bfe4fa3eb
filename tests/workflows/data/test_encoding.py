"""Columns to ids and to [0, 1]: by slices as in one piece, and as the saved workflow does it."""

import math
import sys
from fractions import Fraction

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from merlin_cowclip.workflows.data import encoding
from merlin_cowclip.workflows.data.arrow_ids import mixed_as_text
from merlin_cowclip.workflows.data.encoding import (
    count_ids,
    encode_ids,
    unit_range,
    widened,
)
from merlin_cowclip.workflows.data.id_text import as_text
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.quiet import quiet_imports

with quiet_imports():
    from nvtabular import ColumnSelector, ops

    from merlin_cowclip.workflows.data.operators import IdText, UnitRange

LARGEST = sys.float_info.max
SELECTED = ColumnSelector(["n"])

# Numbers to [0, 1]


def by_workflow(numbers: np.ndarray, low: float, high: float) -> np.ndarray:
    """As `build_workflow` chains the operators."""
    unit = UnitRange(out_dtype="float32")
    unit.fit_finalize({"mins": pd.Series({"n": low}), "maxs": pd.Series({"n": high})})
    frame = ops.FillMissing(0).transform(SELECTED, pd.DataFrame({"n": numbers}))
    frame = unit.transform(SELECTED, frame)
    return ops.Clip(min_value=0.0, max_value=1.0).transform(SELECTED, frame)["n"].to_numpy()


numbers = st.lists(st.floats(allow_infinity=False), min_size=1, max_size=8)


@settings(deadline=None, max_examples=50)
@given(numbers, numbers)
@example([1.7e308, -1.7e308], [0.0, math.nan])
@example([1e308, -1e308, 3.0], [LARGEST, -LARGEST])
@example([LARGEST], [LARGEST, 1.0])
@example([-LARGEST], [LARGEST, -LARGEST])
@example([5e-324, 0.0], [1.0])
def test_any_finite_numbers_lie_between_0_and_1(train, test):
    held = [0.0 if math.isnan(x) else x for x in train]
    low, high = min(held), max(held)
    both = np.array([*train, *test])
    found = unit_range(both, *widened(low, high))
    assert found.dtype == np.float32
    assert ((found >= 0) & (found <= 1)).all()
    np.testing.assert_array_equal(by_workflow(both, low, high), found)
    # The numbers themselves, exactly; 2^-23 is float32's precision.
    span = Fraction(widened(low, high)[1]) - Fraction(low) or 1
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
    for low, high in ((0.0, 1.0), (-1.7e308, 1.7e308), (LARGEST, LARGEST)):
        np.testing.assert_array_equal(by_workflow(given_numbers, low, high), [1.0, 0.0])


# By slices


@pytest.mark.parametrize("rows", [1, 100])
def test_slices_give_the_same_as_the_whole(monkeypatch, rows):
    random = np.random.default_rng(0)
    codes = random.integers(-1, 40, 500).astype(np.int32)
    texts = pa.array([f"id{i:02d}" for i in range(40)])
    in_train = random.random(500) < 0.7
    column = np.where(random.random(500) < 0.1, np.nan, random.normal(size=500))

    def results():
        found = count_ids(codes, texts, in_train, threshold=9, buckets=3)
        ids = encode_ids(codes, found.encode)
        return found, ids, unit_range(column, -1.0, 1.0)

    whole = results()
    counts = pd.Series(codes[in_train]).value_counts()
    assert whole[0].missing == counts[-1]
    assert whole[0].counts.tolist() == sorted(counts[counts >= 9].drop(-1), reverse=True)
    monkeypatch.setattr(encoding, "DEVICE_ROWS", rows)
    parts = results()
    assert whole[0].vocabulary.equals(parts[0].vocabulary)
    for one, other in ((whole[0], parts[0]),):
        for name in ("counts", "unknown", "encode"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    assert whole[1].dtype == parts[1].dtype == np.int32
    np.testing.assert_array_equal(whole[1], parts[1])
    np.testing.assert_array_equal(whole[2], parts[2])


# Ids that are numbers

TEXTS = [
    (1382.0, "1382"),
    (-0.0, "0"),
    (math.nan, None),
    (None, None),
    (0.5, "0.5"),
    (-7.0, "-7"),
    (2.0**53 - 1, "9007199254740991"),
    (2.0**53, "9.007199254740992e+15"),
    (1e20, "1e+20"),
    (1e-7, "1e-7"),
    (0.1234567890123, "0.1234567890123"),
    (1.5e300, "1.5e+300"),
]


HELD = [x for x, _ in TEXTS if x is None or not x >= 2.0**53]  # of ids


def by_pandas(values: pd.Series) -> list:
    texts = IdText().transform(SELECTED, pd.DataFrame({"n": values}))["n"]
    return [None if pd.isna(text) else text for text in texts]


@pytest.mark.parametrize(
    "values",
    [
        pd.Series(HELD * 2, dtype="float64", index=range(50, 50 + 2 * len(HELD))),
        pd.Series([3, None, 2**62 + 1], dtype="Int64"),
        pd.Series([True, False, True]),
        pd.Series([0.5, 16777215.0, 3.0, math.nan], dtype="float32"),
        pd.Series([0, 2**64 - 1], dtype="uint64"),
    ],
)
def test_ids_have_one_text_wherever_they_are(values):
    assert by_pandas(values) == as_text(pa.array(values, from_pandas=True)).to_pylist()


@pytest.mark.parametrize(("value", "text"), TEXTS)
def test_the_text_of_a_number(value, text):
    """Whole floats below 2^53 as the integers they were; the rest in Arrow's shortest notation."""
    assert as_text(pa.array([value], pa.float64())).to_pylist() == [text]
    assert mixed_as_text(["x", value, ""]).to_pylist() == ["x", text, None]


@pytest.mark.parametrize(
    "values",
    [
        pa.array(["xyz", None, "", "w", "bb"]),
        pa.array([["xyz", "v"], None, [""], [], ["bb", None]]),
        pa.array([1.0, None, 0.5, math.nan, 7.0]),
        pa.array(["xyz", None, "", "w", "bb"]).dictionary_encode(),
    ],
    ids=lambda values: str(values.type),
)
def test_a_slice_has_the_texts_of_its_rows(values):
    """Arrow slices a batch of parquet's texts where a column beside them ends sooner."""
    texts = as_text(values).to_pylist()
    for first in range(len(values)):
        for after in range(first + 1, len(values) + 1):
            assert as_text(values[first:after]).to_pylist() == texts[first:after]


@pytest.mark.parametrize(("dtype", "digits"), [("float32", 24), ("float64", 53)])
def test_an_id_that_a_float_may_not_hold_is_refused(dtype, digits):
    """2^60 and 2^60 + 1 beside a missing value, as pandas reads them; 2^24 + 1 as a float32."""
    message = rf"float of 2\^{digits} or more.*Received: 1.15\d+e\+18 in column 'n'. Write ids"
    for values in ([2**60 + 1, None], [-(2**digits)], [2**digits + 1]):
        with pytest.raises(UserError, match=message if None in values else f"2.{digits} or more"):
            by_pandas(pd.Series(values, dtype=dtype))
    assert by_pandas(pd.Series([2**60 + 1, None], dtype="Int64")) == [str(2**60 + 1), None]
    values = [math.inf, 2**digits - 1, None]
    assert by_pandas(pd.Series(values, dtype=dtype)) == ["inf", str(values[1]), None]
    with pytest.raises(UserError, match=message):
        by_pandas(pd.Series([np.array([1.0, 2.0**60], dtype), None], dtype=object))


def test_numbers_beside_texts():
    column = pd.Series(["1382", 1382, 1382.0, None, math.nan, "", True, b"raw", 0.25], dtype=object)
    expected = ["1382", "1382", "1382", None, None, None, "true", "raw", "0.25"]
    assert by_pandas(column) == expected
