"""Files of raw rows, held to the types of an adopted workflow's fit."""

from __future__ import annotations

import datetime
import re
from decimal import Decimal

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from merlin_cowclip.workflows.data.existing_parquet import open_files
from merlin_cowclip.workflows.data.raw_columns import name_types
from merlin_cowclip.workflows.data.raw_types import check_raw_types, raw_types
from merlin_cowclip.workflows.errors import Notice, UserError
from merlin_cowclip.workflows.quiet import quiet_imports

with quiet_imports():
    import nvtabular as nvt
    from nvtabular import ops

pytestmark = pytest.mark.filterwarnings("ignore:(Initializ|Chang)ing an NVTabular Dataset")
DAYS = [datetime.date(2024, 1, 1 + i) for i in range(6)]
COLUMNS = {
    "text": pa.array(["a", None, "b"] * 2),
    "whole": pa.array([1, 2, 3] * 2),
    "some_whole": pa.array([1, None, 3] * 2),
    "number": pa.array([0.5, 1.5, 2.5] * 2),
    "truth": pa.array([True, False, True] * 2),
    "some_truth": pa.array([True, None, False] * 2),
    "bytes": pa.array([b"a", b"b", b"c"] * 2),
    "date": pa.array(DAYS),
    "clock": pa.array([datetime.time(i) for i in range(6)]),
    "decimal": pa.array([Decimal(i) for i in range(6)]),
    "day": pa.array(pd.date_range("2024-01-01", periods=6)),
    "zone": pa.array(pd.date_range("2024-01-01", periods=6, tz="UTC")),
    "texts": pa.array([["a"], [], ["b", "c"]] * 2),
    "numbers": pa.array([[1], [2, 3], []] * 2),
    "late": pa.array([[], ["a"], ["b"]] * 2),
    "raws": pa.array([[b"a"], [b"b"], []] * 2),
    "hashed": pa.array(["x", "y", "z"] * 2),
    "filled": pa.array(["x", None, "z"] * 2),
    "maybe": pa.array([True, None, False] * 2),
}


@pytest.fixture(scope="module")
def types(tmp_path_factory):
    home = tmp_path_factory.mktemp("types")
    pq.write_table(pa.table(COLUMNS), home / "log.parquet")
    known = [name for name in COLUMNS if name not in ("hashed", "filled", "maybe")]
    nodes = (known >> ops.Categorify(out_path=str(home))) + (["hashed"] >> ops.HashBucket(5))
    filled = ["maybe"] >> ops.LambdaOp(lambda column: column.fillna(False).astype("int8"))
    nodes += ["filled"] >> ops.FillMissing(fill_val="") >> ops.HashBucket(5)
    workflow = nvt.Workflow(nodes + filled)
    workflow.fit(nvt.Dataset(str(home / "log.parquet"), engine="parquet"))
    return raw_types(name_types(workflow))


def test_what_raw_columns_hold(types):
    found = {name: (one.kind, one.is_list) for name, one in types.items()}
    assert found == {
        **{"text": ("text", False), "whole": ("whole", False)},
        **dict.fromkeys(["some_whole", "number"], ("number", False)),
        **dict.fromkeys(["truth", "some_truth"], ("truth", False)),
        **{"bytes": ("bytes", False), "date": ("date", False), "clock": ("time", False)},
        "decimal": ("decimal", False),
        **{
            "texts": ("text", True),
            "numbers": ("whole", True),
            "late": ("text", True),
            "raws": ("bytes", True),
        },
        **dict.fromkeys(["hashed", "filled"], ("hashed", False)),
        "maybe": ("unknown", False),
    }


INTS, TEXT, TRUTH = pa.array([1, None]), pa.array(["1", None]), pa.array([True, False])
FLOATS, DATES = pa.array([1.0, None]), pa.array(DAYS[:2])
TIMES = pa.array(pd.date_range("2024-01-01", periods=2))
GIVEN = {
    **{key: [INTS, FLOATS, TRUTH, DATES, TIMES, pa.array([["a"]])] for key in ["text", "bytes"]},
    **{key: [TEXT, DATES, TIMES] for key in ["whole", "some_whole", "number"]},
    "decimal": [TEXT, DATES, FLOATS],
    **{key: [TEXT, TEXT.dictionary_encode(), DATES] for key in ["truth", "some_truth"]},
    "date": [TEXT, TIMES, INTS],
    "clock": [TEXT, TIMES, INTS],
    "texts": [pa.array([[1]]), TEXT],
    "numbers": [pa.array([["1"]]), INTS],
    "late": [pa.array([[1]])],
    "raws": [pa.array([[1]]), pa.array([["a"]])],
    **{key: [INTS, FLOATS] for key in ["hashed", "filled"]},
}
TAKEN = {
    "text": [TEXT.dictionary_encode(), TEXT.cast(pa.large_string()), TEXT.cast(pa.binary())],
    "filled": [TEXT, TRUTH],
    "whole": [FLOATS, TRUTH, INTS.cast(pa.uint8()), INTS.cast(pa.decimal128(20, 1))],
    "some_whole": [INTS, FLOATS],
    "number": [INTS, FLOATS.cast(pa.float32())],
    **{key: [INTS, FLOATS, TRUTH, INTS.dictionary_encode()] for key in ["truth", "some_truth"]},
    "bytes": [TEXT.cast(pa.large_binary()), pa.array([b"ab"], pa.binary(2))],
    "date": [DATES.cast(pa.date64())],
    "decimal": [INTS, INTS.cast(pa.decimal128(25, 3))],
    **{key: [TEXT, TIMES, DATES, INTS] for key in ["day", "zone"]},
    "texts": [
        pa.array([["a"]], pa.large_list(pa.string())),
        pa.array([[], None], pa.list_(pa.float64())),
        pa.array([[], None], pa.list_(pa.null())),
    ],
    "numbers": [pa.array([[1.0]]), pa.array([[1, 2]], pa.list_(pa.int64(), 2))],
    "late": [pa.array([["a"]])],
    "raws": [COLUMNS["raws"]],
    "hashed": [TEXT, TEXT.dictionary_encode(), DATES],
    "maybe": [TRUTH, TEXT, DATES],
}
NOTHING = [
    *(pa.nulls(2, kind) for kind in (pa.null(), pa.int8(), pa.string(), pa.float64())),
    pa.array([float("nan"), None]),
]


def cases(of):
    return [(name, one) for name, given in of.items() for one in given]


def shown(of):
    return str(getattr(of, "type", of))


def written(folder, name, values):
    pq.write_table(pa.table({name: values}), folder / "raw.parquet")
    (file,) = open_files(folder / "raw.parquet")
    return file


@pytest.mark.parametrize(
    ("name", "values"), cases(GIVEN), ids=lambda of: str(getattr(of, "type", of))
)
def test_other_types_are_refused(types, tmp_path, name, values):
    file = written(tmp_path, name, values)
    words = (
        rf"Received: {re.escape(str(file.schema.field(name).type))} in column '{name}' of "
        ".*raw.parquet, which was .* Write it as "
    )
    with pytest.raises(UserError, match=words):
        check_raw_types(file, types, [name])
    check_raw_types(file, types, [])


@pytest.mark.parametrize(
    ("name", "values"), cases(TAKEN), ids=lambda of: str(getattr(of, "type", of))
)
def test_the_same_in_another_type_is_taken(types, tmp_path, name, values):
    check_raw_types(written(tmp_path, name, values), types, [name])


@pytest.mark.parametrize("name", COLUMNS)
def test_nothing_may_be_of_any_type(types, tmp_path, name):
    """As pandas writes a column of a small batch in which every one is missing."""
    lists = (
        [pa.array([[], None], pa.list_(pa.float64()))] * types[name].is_list
        if name in types
        else []
    )
    for values in [*NOTHING, *lists]:
        check_raw_types(written(tmp_path, name, values), types, [name])


@pytest.mark.parametrize("values", [INTS, FLOATS], ids=shown)
def test_numbers_where_nobody_knows_what_was_are_told_of(types, tmp_path, values):
    with pytest.warns(
        Notice, match="column 'maybe' of .*raw.parquet is .* was none that pandas holds"
    ):
        check_raw_types(written(tmp_path, "maybe", values), types, ["maybe"])


@pytest.mark.parametrize("values", [[[], []], [[None], [None]]], ids=str)
def test_lists_of_nothing_are_no_single_values(types, tmp_path, values):
    file = written(tmp_path, "text", pa.array(values, pa.list_(pa.string())))
    with pytest.raises(UserError, match="list<.* in column 'text' .* which was text"):
        check_raw_types(file, types, ["text"])
