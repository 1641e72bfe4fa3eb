"""Frames of raw rows, whatever types pandas has them in, against the rows of the fit."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from merlin_cowclip.workflows.data.encoded_rows import Place
from merlin_cowclip.workflows.data.raw_columns import name_types
from merlin_cowclip.workflows.data.raw_frames import arrow_column, fitted_columns
from merlin_cowclip.workflows.data.raw_rows import RawRows
from merlin_cowclip.workflows.data.raw_types import RawType
from merlin_cowclip.workflows.errors import Notice, UserError
from merlin_cowclip.workflows.quiet import quiet_imports

with quiet_imports():
    import nvtabular as nvt
    from nvtabular import ops

    from merlin_cowclip.workflows.data.row_for_row import transformed

ARROW, PLACE = pd.ArrowDtype, Place(Path("raw"), 0, 0)


@pytest.mark.parametrize(
    ("given", "kind", "dtype", "values"),
    [
        (pd.Series([2**60 + 1, 1], dtype=ARROW(pa.int64())), pa.int64(), "int64", None),
        (pd.Series([2**60 + 1, 1], dtype=object), pa.int64(), "int64", None),
        (pd.Series([5, None], dtype=ARROW(pa.int64())), pa.int64(), "float64", [5, np.nan]),
        (pd.array([5, None], "Int8"), pa.int64(), "float64", [5, np.nan]),
        (pd.Series([5, 6]).astype("category"), pa.int64(), "int64", None),
        (pd.array([1.5, None], "Float64"), pa.float64(), "float64", [1.5, np.nan]),
        (pd.Series([True, np.nan], dtype=object), pa.bool_(), "object", [True, np.nan]),
        (pd.array([True, False], "boolean"), pa.bool_(), "bool", None),
        (pd.Series(["x", None], dtype=ARROW(pa.string())), pa.string(), "object", ["x", None]),
        (pd.Series(["x", None], dtype="string"), pa.string(), "object", ["x", None]),
        (pd.Series(["x", None], dtype="category"), pa.string(), "object", ["x", None]),
        (pd.Series(["x", np.nan], dtype=object), pa.string(), "object", ["x", np.nan]),
        (pd.Series(["x", pd.NA], dtype=object), pa.string(), "object", ["x", None]),
        (pd.Series([b"x", "y"], dtype=object), pa.string(), "object", ["x", "y"]),
        (pd.Series([np.nan, np.nan]), pa.string(), "object", [np.nan, np.nan]),
    ],
)
def test_columns_of_pandas_own_types(given, kind, dtype, values):
    column = pd.Series(given, name="x")
    expected = list(column) if values is None else values
    column.index = [7, 3]
    types = {"x": RawType(kind, is_list=False)}
    found, fitted = fitted_columns(column.to_frame(), types, PLACE)
    assert found["x"].dtype == dtype
    assert found.index.tolist() == [0, 1]
    assert fitted["x"].type == kind
    for value, wanted in zip(list(found["x"]), expected, strict=True):
        assert value == wanted or ((value is None) is (wanted is None) and pd.isna(value))


@pytest.mark.parametrize(
    "values", [[1, "a"], [1.5, 2**60 + 1], [[1], 2], [1, 2j], [2**70]], ids=str
)
def test_columns_of_several_types_are_refused(values):
    column = pd.Series(values, name="x", dtype=object)
    with pytest.raises(UserError, match="of one type. Received: column 'x' of raw, row group 0:"):
        arrow_column(column, PLACE)


# Every form of a column, through every operator: as the rows of the fit, or refused

N = 24
RANDOM = np.random.default_rng(0)
DAYS = pd.date_range("2024-01-01", periods=7)
LOG = pa.table(
    {
        "whole": pa.array(RANDOM.integers(0, 7, N)),
        "large": pa.array(2**60 + RANDOM.integers(0, 7, N)),
        "small": pa.array(RANDOM.integers(0, 7, N), pa.int8()),
        "price": pa.array(RANDOM.integers(1, 7, N) / 10),
        "ratio": pa.array(RANDOM.integers(1, 7, N) / 10, pa.float32()),
        "some": pa.array(RANDOM.integers(0, 7, N), mask=np.arange(N) == 3),
        "text": pa.array([f"{i}" for i in RANDOM.integers(0, 7, N)]),
        "truth": pa.array(RANDOM.integers(0, 2, N).astype(bool)),
        "maybe": pa.array(RANDOM.integers(0, 2, N).astype(bool), mask=np.arange(N) == 3),
        "day": pa.array(DAYS[RANDOM.integers(0, 7, N)]),
        "wholes": pa.array([[int(i), 3] for i in RANDOM.integers(0, 7, N)]),
        "texts": pa.array([[f"{i}", "3"] for i in RANDOM.integers(0, 7, N)]),
    }
)
NUMBERS = ["whole", "large", "small", "price", "ratio", "some"]


def as_text(nodes):
    return nodes >> ops.LambdaOp(lambda column: column.astype(str), dtype="str")


def ids(nodes, out):
    return nodes >> ops.Categorify(out_path=str(out))


OPERATORS = {
    "ids": ids,
    "text": lambda nodes, out: ids(as_text(nodes), out),
    "means": lambda nodes, out: nodes >> ops.TargetEncoding("y", out_path=str(out), kfold=1),
    "scaled": lambda nodes, _: nodes >> ops.FillMissing() >> ops.Normalize(),
    "reduced": lambda nodes, out: ids(nodes >> ops.FillMissing() >> ops.ReduceDtypeSize(), out),
}
CASES = [
    *itertools.product(NUMBERS, OPERATORS),
    *itertools.product(["text", "truth", "maybe", "day"], ["ids", "text"]),
    *itertools.product(["wholes", "texts"], ["ids"]),
]
CASES.remove(("large", "reduced"))
FORMS = [
    *("int8", "int32", "int64", "uint64", "float16", "float32", "float64", "bool", "object", "str"),
    *("category", "Int64", "Float32", "boolean", "string", "datetime64[ns]", "datetime64[ns, UTC]"),
    *(ARROW(kind) for kind in (pa.int64(), pa.float32(), pa.bool_(), pa.string(), pa.date32())),
]


def forms(column: pa.Array):
    """The same values in other types, as far as pandas makes them."""
    first = column.to_pandas()
    made = [lambda kind=kind: first.astype(kind) for kind in FORMS]
    for of in (str.encode, Decimal, float, pd.Timestamp, lambda value: [value]):
        made.append(lambda of=of: first.map(of))
    for make in made:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = make()
        except Exception:  # no such form
            continue
        if is_alike(found, first):
            yield found


def is_alike(one: pd.Series, other: pd.Series) -> bool:
    """Whether numbers are the same but for the precision of their types."""
    try:
        return bool(np.allclose(one.astype(float), other.astype(float), rtol=1e-3, equal_nan=True))
    except Exception:  # no numbers
        return True


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore:(Initializ|Chang)ing an NVTabular Dataset")
@pytest.mark.parametrize(("name", "operator"), CASES)
def test_every_form_is_encoded_as_at_the_fit_or_refused(tmp_path, name, operator):
    table = pa.table({name: LOG[name], "y": pa.array(np.arange(N) % 5 / 1.0)})
    pq.write_table(table, tmp_path / "log.parquet")
    made = OPERATORS[operator]([name], tmp_path / "fit") + ["y"]  # noqa: RUF005  (a graph)
    workflow = name_types(
        nvt.Workflow(made).fit(nvt.Dataset(str(tmp_path / "log.parquet"), engine="parquet"))
    )
    (field,) = (one for one in workflow.output_schema.column_names if one != "y")
    is_id = operator not in ("means", "scaled")

    def encode(frame: pd.DataFrame) -> pa.RecordBatch:
        return pa.RecordBatch.from_pandas(transformed(workflow, frame)[[field]])

    first = pq.read_table(tmp_path / "log.parquet").to_pandas()
    expected = encode(first).column(0).to_pylist()
    taken = 0
    for values in forms(LOG[name].combine_chunks()):
        for missing in ([], [5]):
            given = values
            if len(missing):
                try:
                    given = given.mask(np.isin(np.arange(N), missing))
                except Exception:  # no missing one of that type
                    continue
            rows = [i for i in range(N) if i not in missing and first[name].notna()[i]]
            frame = pd.DataFrame({name: given, "y": first["y"]})
            held = lambda: RawRows(workflow, [field] if is_id else [], encode)  # noqa: E731
            kind = held().types[name].kind
            if kind is None and str in set(map(type, given)) and name != "text":
                continue  # it is taken for text, and the documentation says so
            for found in answers(held, frame):
                taken += bool(len(rows))
                same = [found[i] == expected[i] for i in rows]
                if not is_id:
                    same = [np.isclose(found[i], expected[i], rtol=1e-5) for i in rows]
                assert all(same), (list(missing), given)
    assert taken or (kind is None and name != "text")


def answers(held: Callable[[], RawRows], frame: pd.DataFrame):
    """What is made of a frame, unless it is refused or told of."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", Notice)
        warnings.filterwarnings("ignore", "the workflow makes one input of column", Notice)
        with contextlib.suppress(UserError, Notice):
            yield held().of_frame(frame, PLACE).column(0).to_pylist()
