"""Files of raw rows, held to the types of an adopted workflow's fit."""

from __future__ import annotations

import datetime
import re
from decimal import Decimal
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from merlin_cowclip.workflows.data.encoded_rows import Place
from merlin_cowclip.workflows.data.existing_parquet import open_files
from merlin_cowclip.workflows.data.raw_columns import name_types
from merlin_cowclip.workflows.data.raw_types import RawType, check_raw_types, raw_types
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.quiet import quiet_imports

with quiet_imports():
    import nvtabular as nvt
    from nvtabular import ops

pytestmark = pytest.mark.filterwarnings("ignore:(Initializ|Chang)ing an NVTabular Dataset")
PLACE = Place(Path("raw"), 0, 0)
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
        **{"text": (pa.string(), False), "whole": (pa.int64(), False)},
        **dict.fromkeys(["some_whole", "number"], (pa.float64(), False)),
        **dict.fromkeys(["truth", "some_truth"], (pa.bool_(), False)),
        **{"bytes": (pa.binary(), False), "date": (pa.date32(), False)},
        **{"clock": (pa.time64("us"), False), "decimal": (pa.decimal128(1), False)},
        **{"day": (pa.timestamp("ns"), False), "zone": (pa.timestamp("ns", "UTC"), False)},
        **{"texts": (pa.string(), True), "numbers": (pa.int64(), True)},
        **{"late": (pa.string(), True), "raws": (pa.binary(), True)},
        **dict.fromkeys(["hashed", "filled", "maybe"], (None, False)),
    }


INTS, TEXT, TRUTH = pa.array([1, None]), pa.array(["1", None]), pa.array([True, False])
FLOATS, NARROW = pa.array([1.0, None]), pa.array([0.5, 7.0], pa.float32())
DATES, DECIMALS = pa.array(DAYS[:2]), pa.array([Decimal(1), None])
TIMES = pa.array(pd.date_range("2024-01-01", periods=2))
THERE = pa.array(pd.date_range("2024-01-01", periods=2, tz="Asia/Tokyo"))
NO_NUMBERS = [TEXT, DATES, TIMES, TRUTH, DECIMALS, pa.array([[1]])]
REFUSED = {
    "text": [INTS, FLOATS, TRUTH, DATES, TIMES, DECIMALS, pa.array([["a"]])],
    "bytes": [TEXT, INTS, FLOATS, TRUTH, DATES, TIMES, pa.array([[b"a"]])],
    "whole": NO_NUMBERS,
    **{key: [*NO_NUMBERS, NARROW] for key in ["some_whole", "number"]},
    **{
        key: [TEXT, TEXT.dictionary_encode(), DATES, INTS, FLOATS]
        for key in ("truth", "some_truth")
    },
    "decimal": [TEXT, DATES, FLOATS, INTS],
    "date": [TEXT, TIMES, INTS],
    "clock": [TEXT, TIMES, INTS],
    "day": [TEXT, DATES, INTS, THERE],
    "zone": [TEXT, DATES, INTS, THERE, TIMES],
    "texts": [pa.array([[1]]), TEXT],
    "numbers": [pa.array([["1"]]), pa.array([[True]]), INTS],
    "late": [pa.array([[1]])],
    "raws": [pa.array([[1]]), pa.array([["a"]])],
    **{
        key: [INTS, FLOATS, NARROW, INTS.dictionary_encode()]
        for key in ("hashed", "filled", "maybe")
    },
}
OF_ZONE = pa.array(pd.date_range("2024-01-01", periods=2, tz="UTC"))
TAKEN = {
    "text": [
        *(TEXT.dictionary_encode(), TEXT.cast(pa.large_string()), TEXT.cast(pa.binary())),
        TEXT.cast(pa.binary()).dictionary_encode(),
    ],
    "whole": [INTS, FLOATS, NARROW.take(pa.array([1, 1])), INTS.cast(pa.uint8())],
    "some_whole": [INTS, FLOATS, INTS.dictionary_encode()],
    "number": [INTS, FLOATS, INTS.cast(pa.int8())],
    **{key: [TRUTH, TRUTH.dictionary_encode()] for key in ["truth", "some_truth"]},
    "bytes": [TEXT.cast(pa.large_binary()), pa.array([b"ab"], pa.binary(2))],
    "date": [DATES, DATES.cast(pa.date64())],
    "clock": [pa.array([datetime.time(1)], pa.time64("ns"))],
    "decimal": [DECIMALS, pa.array([Decimal("1.00"), None]), pa.array([Decimal(10**30)])],
    "day": [TIMES, TIMES.cast(pa.timestamp("s"))],
    "zone": [OF_ZONE, OF_ZONE.cast(pa.timestamp("s", "UTC"))],
    "texts": [
        pa.array([["a"]], pa.large_list(pa.string())),
        pa.array([["a"]], pa.list_(pa.binary())),
        pa.array([[], None], pa.list_(pa.float64())),
        pa.array([[], None], pa.list_(pa.null())),
    ],
    "numbers": [
        pa.array([[1.0]]),
        pa.array([[1, 2]], pa.list_(pa.int64(), 2)),
        pa.array([None, [3, None], []], pa.list_(pa.int8())),
    ],
    "late": [pa.array([["a"]])],
    "raws": [COLUMNS["raws"]],
    **{key: [TEXT, TEXT.dictionary_encode()] for key in ("hashed", "filled", "maybe")},
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


@pytest.mark.parametrize(("name", "values"), cases(REFUSED), ids=shown)
def test_other_types_are_refused(types, tmp_path, name, values):
    """Before any row is read, and in rows."""
    file = written(tmp_path, name, values)
    given = re.escape(str(file.schema.field(name).type))
    words = rf"Received: {given} in column '{name}' of .*raw.parquet, which was .* Give it as "
    with pytest.raises(UserError, match=words):
        check_raw_types(file, types, [name])
    check_raw_types(file, types, [])
    with pytest.raises(UserError, match=rf"in column '{name}' of raw, row group 0, which was .*"):
        types[name].of(values, name, PLACE)


@pytest.mark.parametrize(("name", "values"), cases(TAKEN), ids=shown)
def test_the_same_in_another_type_is_taken(types, tmp_path, name, values):
    file = written(tmp_path, name, values)
    check_raw_types(file, types, [name])
    known = types[name]
    for given in (
        values,
        file_column(file, name),
        pa.concat_arrays([values, values])[len(values) :],
    ):
        found = known.of(given, name, PLACE)
        if known.kind is not None and not pa.types.is_decimal(known.kind):
            assert found.type == (pa.list_(known.kind) if known.is_list else known.kind)
        assert as_texts(found) == as_texts(values)


def test_missing_lists_of_a_fixed_size(types):
    """They take room in Arrow; parquet that has one, Arrow 12 does not read."""
    given = pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int8(), 2))
    for i in range(4):
        part = given.slice(i)
        assert types["numbers"].of(part, "numbers", PLACE).to_pylist() == part.to_pylist()


def file_column(file, name):
    (batch,) = pq.read_table(file.path).to_batches()
    return batch.column(0)


def as_texts(values):
    """Of which bytes are those of a text."""
    return [
        [plain(one) for one in value] if isinstance(value, list) else plain(value)
        for value in values.to_pylist()
    ]


def plain(value):
    return value.decode() if isinstance(value, bytes) else value


@pytest.mark.parametrize("name", COLUMNS)
def test_nothing_may_be_of_any_type(types, tmp_path, name):
    """As pandas writes a column of a small batch in which every one is missing."""
    lists = [pa.array([[], None], pa.list_(pa.float64()))] * types[name].is_list
    for values in [*NOTHING, *lists]:
        check_raw_types(written(tmp_path, name, values), types, [name])
        found = types[name].of(values, name, PLACE)
        assert found.to_pylist() == ([[], None] if pa.types.is_list(values.type) else [None, None])


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("whole", [1.0, None, 3.7], r"a whole one, .* Received: 3.7 in raw, row group 0, row 3"),
        ("whole", [1.0, 2.0**53], r"below 2\^53.*Received: 9007199254740992.0 in .* row 2"),
        (
            "whole",
            pa.array([2**24], pa.float32()),
            r"below 2\^24.*Received: 16777216.0 in .* row 1",
        ),
        ("whole", [float("inf")], "Received: inf in"),
        (
            "whole",
            pa.array([1, 2**63], pa.uint64()),
            "within int64, .* Received: 92233720368547758",
        ),
        ("numbers", [[1.0], None, [2.0, 1.5]], r"Received: 1.5 in .* row 3 of the file, column 'n"),
        ("text", [b"a", b"\xff"], r"text must be UTF-8. Received: b'\\xff' in .* row 2"),
        ("texts", [[], [b"a", b"\xff"]], r"text must be UTF-8. Received: b'\\xff' in .* row 2"),
        (
            "decimal",
            [Decimal("1.0"), Decimal("2.5")],
            r"a value must be decimal.* Decimal\('2.5'\) in",
        ),
        ("day", pa.array([0, 2**60], pa.timestamp("s")), r"a value must be timestamp\[ns\]"),
    ],
    ids=str,
)
def test_values_that_have_no_equal_are_refused(types, name, values, words):
    given = values if isinstance(values, pa.Array) else pa.array(values)
    with pytest.raises(UserError, match=words):
        types[name].of(given, name, PLACE)


def test_integers_of_a_narrow_float_must_be_such(types):
    """pandas makes float64 of integers beside a missing one, so these were none."""
    narrow = RawType(pa.float32(), is_list=False)
    assert narrow.of(pa.array([2**24, None]), "x", PLACE).to_pylist() == [float(2**24), None]
    with pytest.raises(
        UserError, match="a number must be a float32, .* Received: 16777217 in .* 2"
    ):
        narrow.of(pa.array([2**24, 2**24 + 1]), "x", PLACE)


def test_lists_of_times_have_no_zone_for_pandas():
    times = RawType(pa.timestamp("ns"), is_list=True)
    found = times.of(pa.array([OF_ZONE.to_pylist()], pa.list_(OF_ZONE.type)), "x", PLACE)
    assert found.to_pylist() == [TIMES.to_pylist()]


def test_integers_of_floats_are_rounded_as_at_the_fit(types):
    """Where one was missing there, pandas made floats of all of them."""
    found = types["some_whole"].of(pa.array([2**60 + 1, 5]), "some_whole", PLACE)
    assert found.to_pylist() == [float(2**60), 5.0]


@pytest.mark.parametrize("values", [TRUTH, DATES, DECIMALS, pa.array([["a"]])], ids=shown)
def test_what_nobody_knows_is_told_of_unless_it_is_text(types, values):
    said = types["maybe"].unknown(values.type)
    assert re.match("is .*, and the workflow does not tell what it was at the fit", said)
    assert types["maybe"].unknown(pa.string()) is types["maybe"].unknown(pa.null()) is None
    assert types["text"].unknown(values.type) is None


@pytest.mark.parametrize("values", [[[], []], [[None], [None]]], ids=str)
def test_lists_of_nothing_are_no_single_values(types, tmp_path, values):
    given = pa.array(values, pa.list_(pa.string()))
    with pytest.raises(UserError, match="list<.* in column 'text' .* which was text"):
        check_raw_types(written(tmp_path, "text", given), types, ["text"])
    with pytest.raises(UserError, match="list<.* in column 'text' .* which was text"):
        types["text"].of(given, "text", PLACE)
