"""Files of raw rows, held to the types of an adopted workflow's fit."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from merlin_cowclip.workflows.data.encoded_rows import Place
from merlin_cowclip.workflows.data.existing_parquet import open_files
from merlin_cowclip.workflows.data.raw_columns import name_types
from merlin_cowclip.workflows.data.raw_types import check_raw_types, raw_types
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.quiet import quiet_imports

with quiet_imports():
    import nvtabular as nvt
    from nvtabular import ops

pytestmark = pytest.mark.filterwarnings("ignore:(Initializ|Chang)ing an NVTabular Dataset")
PLACE = Place(Path("raw"), 0, 0)
COLUMNS = {
    "text": pa.array(["a", None, "b"] * 2),
    "whole": pa.array([1, 2, 3] * 2),
    "some_whole": pa.array([1, None, 3] * 2),
    "number": pa.array([0.5, 1.5, 2.5] * 2),
    "truth": pa.array([True, None, False] * 2),
    "day": pa.array(pd.date_range("2024-01-01", periods=6)),
    "texts": pa.array([["a"], [], ["b", "c"]] * 2),
    "numbers": pa.array([[1], [2, 3], []] * 2),
    "late": pa.array([[], ["a"], ["b"]] * 2),
    "hashed": pa.array(["x", "y", "z"] * 2),
}


@pytest.fixture(scope="module")
def types(tmp_path_factory):
    home = tmp_path_factory.mktemp("types")
    pq.write_table(pa.table(COLUMNS), home / "log.parquet")
    known = [name for name in COLUMNS if name != "hashed"]
    nodes = (known >> ops.Categorify(out_path=str(home))) + (["hashed"] >> ops.HashBucket(5))
    workflow = nvt.Workflow(nodes)
    workflow.fit(nvt.Dataset(str(home / "log.parquet"), engine="parquet"))
    return raw_types(name_types(workflow))


def test_what_raw_columns_hold(types):
    found = {name: (one.kind, one.is_list) for name, one in types.items()}
    assert found == {
        **{"text": (pa.string(), False), "whole": (pa.int64(), False)},
        **dict.fromkeys(["some_whole", "number"], (pa.float64(), False)),
        **{"truth": (pa.bool_(), False), "day": (pa.timestamp("ns"), False)},
        **{"texts": (pa.string(), True), "numbers": (pa.int64(), True)},
        **{"late": (pa.string(), True), "hashed": (None, False)},
    }


INTS, FLOATS = pa.array([1, None]), pa.array([1.0, None])
TEXT, TRUTH = pa.array(["1", None]), pa.array([True, False])
NARROW = pa.array([0.5, 7.0], pa.float32())
TIMES = pa.array(pd.date_range("2024-01-01", periods=2))
REFUSED = {
    "text": [INTS, TRUTH, TIMES, pa.array([["a"]])],
    "whole": [TEXT, TIMES, TRUTH, pa.array([[1]])],
    "number": [TEXT, TRUTH, NARROW],
    "truth": [TEXT, INTS, FLOATS],
    "day": [TEXT, INTS, TIMES.cast(pa.timestamp("ns", "UTC"))],
    "texts": [pa.array([[1]]), TEXT],
    "numbers": [pa.array([["1"]]), INTS],
    "hashed": [INTS, FLOATS],
}
TAKEN = {
    "text": [TEXT.dictionary_encode(), TEXT.cast(pa.large_string()), TEXT.cast(pa.binary())],
    "whole": [INTS, FLOATS, INTS.cast(pa.uint8())],
    "some_whole": [INTS, FLOATS, INTS.dictionary_encode()],
    "number": [FLOATS, INTS.cast(pa.int8())],
    "truth": [TRUTH, TRUTH.dictionary_encode()],
    "day": [TIMES, TIMES.cast(pa.timestamp("s"))],
    "texts": [
        pa.array([["a"]], pa.large_list(pa.string())),
        pa.array([[], None], pa.list_(pa.null())),
    ],
    "numbers": [pa.array([[1.0]]), pa.array([None, [3, None], []], pa.list_(pa.int8()))],
    "late": [pa.array([["a"]])],
    "hashed": [TEXT, TEXT.dictionary_encode()],
}


NOTHING = [
    *(pa.nulls(2, kind) for kind in (pa.null(), pa.int8(), pa.string())),
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
        if known.kind is not None:
            assert found.type == (pa.list_(known.kind) if known.is_list else known.kind)
        assert as_texts(found) == as_texts(values)


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
        ("day", pa.array([0, 2**60], pa.timestamp("s")), r"a value must be timestamp\[ns\]"),
    ],
    ids=str,
)
def test_values_that_have_no_equal_are_refused(types, name, values, words):
    given = values if isinstance(values, pa.Array) else pa.array(values)
    with pytest.raises(UserError, match=words):
        types[name].of(given, name, PLACE)


def test_integers_of_floats_are_rounded_as_at_the_fit(types):
    """Where one was missing there, pandas made floats of all of them."""
    found = types["some_whole"].of(pa.array([2**60 + 1, 5]), "some_whole", PLACE)
    assert found.to_pylist() == [float(2**60), 5.0]
