"""Rows of a table by raw id, against the workflow that encodes; rows that are loaded into one."""

from __future__ import annotations

import datetime
import decimal
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from merlin_cowclip.models import FusedEmbeddings, read_vocabulary
from merlin_cowclip.models.vocabulary import encode
from merlin_cowclip.workflows.data.datasets import DatasetSpec
from merlin_cowclip.workflows.data.etl import prepare
from merlin_cowclip.workflows.data.top_ids import keep_top_ids
from merlin_cowclip.workflows.quiet import quiet_imports

from .embeddings import DIM, ITEM, ROWS, SCHEMA, inputs, layer_of

with quiet_imports():
    import nvtabular
    from merlin.schema import ColumnSchema, Schema, Tags

RAW_TOML = """
name = "shop"
label = "bought"
categorical = ["user", "item"]
lists = ["genres"]
list_separator = ";"
split = { kind = "sequential", test = 0.25 }
"""
MISSING, UNKNOWN = 1, 2


def raw_log() -> pd.DataFrame:
    """Users by text, items by number, both missing at times; the test part has one new user."""
    random = np.random.default_rng(0)
    log = pd.DataFrame(
        {
            "bought": random.integers(0, 2, 80),
            "user": [f"u{int(u)}" for u in random.geometric(0.3, 80)],
            "item": [str(7 * int(i)) for i in random.geometric(0.4, 80)],
            "genres": [";".join(f"g{g}" for g in row) for row in random.integers(0, 5, (80, 2))],
        }
    )
    log.loc[[3, 5, 70], ["user", "item"]] = None
    log.loc[75:77, "user"] = "newcomer"
    return log


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    home = tmp_path_factory.mktemp("prepared")
    (home / "shop.toml").write_text(RAW_TOML)
    raw_log().to_csv(home / "log.csv", index=False)
    spec = DatasetSpec.from_toml(home / "shop.toml")
    return prepare(spec, [home / "log.csv"], home / "data", progress=False)


@pytest.mark.parametrize("field", ["user", "item", "genres"])
def test_rows_of_a_prepared_folder(prepared, field):
    layer = layer_of(schema=prepared.schema)
    place, first = {"workflow": prepared.path / "workflow"}, layer._first_row[field]
    counts = prepared.counts(field)
    assert len(counts) == layer.cardinalities[field] > 5

    frame = layer.to_df(field, **place)
    assert list(frame.columns) == ["raw", "0", "1", "2"]
    assert frame.index.name == "id"
    assert frame.index.tolist() == counts["id"].tolist()
    assert frame["raw"].tolist() == counts["raw"].tolist()
    assert frame["raw"].tolist()[:3] == [None, None, None]  # padding, missing, unknown
    held = layer.table.numpy()[first : first + len(counts)]
    np.testing.assert_array_equal(frame[["0", "1", "2"]].to_numpy(), held)

    real = counts[3:]
    found = layer.rows(field, real["raw"], **place)
    assert found.dtype == np.int64
    assert found.tolist() == [first + i for i in real["id"]]
    given = [None, "newcomer", float("nan"), real["raw"].iloc[0], pd.NA, ""]
    odd = [first + i for i in (MISSING, UNKNOWN, MISSING, 3, MISSING, MISSING)]
    assert layer.rows(field, given, **place).tolist() == odd
    assert layer.rows(field, [], **place).tolist() == []


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    """A log whose `item` is made of numbers and `user` of text, prepared; `item` has gaps."""
    home = tmp_path_factory.mktemp("numbered")
    (home / "shop.toml").write_text(RAW_TOML)
    log = raw_log()
    log["item"] = [1382.0, 7.0, 2**40, 1.5, -3.0] * 16
    log["user"] = ["1382", "007", "7.0", "1.5", "a"] * 16
    log.loc[[3, 5], ["user", "item"]] = None
    log.to_csv(home / "log.csv", index=False, float_format="%.10g")
    spec = DatasetSpec.from_toml(home / "shop.toml")
    return prepare(spec, [home / "log.csv"], home / "data", progress=False)


SPELLINGS = [
    *[1382, 1382.0, "1382", np.int32(1382), np.float32(1382), np.uint8(7), -3, -3.0, 2**40],
    *[1.5, np.float64(1.5), "1.5", "7.0", "007", "a", 5, float(2**53 - 1), float("nan"), None],
]


@pytest.mark.parametrize("given", SPELLINGS, ids=lambda given: f"{type(given).__name__} {given}")
def test_an_id_in_any_type_has_the_row_that_the_workflow_gives_it(numbered, given):
    """The workflow encodes a column of that type."""
    layer = layer_of(schema=numbered.schema)
    log = pd.DataFrame({"bought": [1], "user": [given], "item": [given], "genres": [["g1"]]})
    encoded = numbered.workflow().transform(log)
    for field in ("user", "item"):
        found = layer.rows(field, [given], workflow=numbered.path / "workflow")
        assert found.tolist() == [layer._first_row[field] + encoded[field][0]], field


def test_an_id_of_the_logs_type_is_known(numbered):
    layer = layer_of(schema=numbered.schema)
    place, first = {"workflow": numbered.path / "workflow"}, layer._first_row["item"]
    rows = [layer.rows("item", [given], **place)[0] for given in (1382, 1382.0, "1382")]
    assert len(set(rows)) == 1
    assert rows[0] > first + UNKNOWN
    frame = pd.DataFrame(np.arange(6.0).reshape(2, DIM), index=[1382, -3])
    assert layer.load_rows("item", frame, **place) == 2
    np.testing.assert_array_equal(layer.table.numpy()[rows[0]], [0, 1, 2])
    twice = frame_of(np.ones((2, DIM)), np.array([1382, "1382"], object))
    with pytest.raises(ValueError, match="raw ids of field 'item' must be unique. Received: '1382"):
        layer.load_rows("item", twice, **place)
    message = "a raw id must be text or a number. Received: b'1382', bytes"
    with pytest.raises(ValueError, match=message):
        layer.rows("item", [b"1382"], **place)
    for alone in (1382, "1382"):
        with pytest.raises(ValueError, match=f"raw ids must be a list. Received: {alone!r}"):
            layer.rows("item", alone, **place)


@pytest.mark.parametrize("kind", [np.array, pd.Series, pd.Index, pd.array])
def test_a_narrow_float_that_may_have_been_another_id_is_refused(kind):
    """2^24 + 1 is 2^24 as a float32: the row would be another id's."""
    known = pd.Series([str(2**24), "7"], index=[3, 4])
    given = kind([2**24 + 1, 7, np.nan], dtype="Float32" if kind is pd.array else "float32")
    if kind is not pd.Index:  # pandas 1.5 makes it one of float64
        with pytest.raises(ValueError, match=r"32-bit float of 2\^24 or.*Received: 16777216.0"):
            encode(known, given)
    with pytest.raises(ValueError, match=r"32-bit float of 2\^24 or.*Received: 16777216.0"):
        encode(known, list(np.array([2**24 + 1, 7], np.float32)))
    assert encode(known, given[1:]).tolist() == [4, 1]
    assert encode(known, np.array([2**24], np.float64)).tolist() == [3]


@pytest.mark.parametrize("known", [[2**53, 10**17], ["9007199254740992", "100000000000000000"]])
@pytest.mark.parametrize("kind", [np.array, list, pd.Series, pd.array, pd.Categorical, "objects"])
def test_a_float_that_may_have_been_another_id_is_refused(known, kind):
    """2^53 + 1 and 10^17 + 3 are these as floats: the rows would be other ids'."""
    vocabulary = pd.Series([*known, 7], index=[3, 4, 5]).astype(type(known[0]))
    for given in ([2**53 + 1, float("nan")], [7, 10**17 + 3]):
        floats = [float(one) for one in given]
        held = pd.Series(floats, dtype=object) if kind == "objects" else kind(floats)
        with pytest.raises(
            ValueError, match=r"float of 2\^53 or more.*Received: [19][0-9.e+]*\. G"
        ):
            encode(vocabulary, held)
        assert encode(vocabulary, [one for one in given if isinstance(one, int)])[-1] == 2
    assert encode(vocabulary, [7.0, None, 2.0**53 - 1]).tolist() == [5, 1, 2]
    assert encode(vocabulary, [10**17, 2**53, float("inf")]).tolist() == [4, 3, 2]
    assert encode(pd.Series([1e17], index=[3]), [1e17, 1e18]).tolist() == [3, 2]  # is of floats


def test_text_of_floats_as_python_writes_them():
    """As in a CSV log that pandas wrote of integers beside a missing one."""
    known = pd.Series([104.0, 0.5, 2.0**60], index=[3, 4, 5])
    given = ["104.0", "104", "0.5", "-0.0", "0104", "1.0"]
    assert encode(known, given).tolist() == [3, 3, 4, 2, 2, 2]
    assert encode(known.astype("int64"), ["104.0", "104"]).tolist() == [2, 3]


@pytest.mark.parametrize("kind", ["Float64", pd.ArrowDtype(pa.float64()), "float64", object])
def test_floats_with_a_missing_one_in_any_type(kind):
    known = pd.Series([0.5, 7.0], index=[3, 4])
    assert encode(known, pd.Series([7.0, None, 1.0], dtype=kind)).tolist() == [4, 1, 2]


@pytest.mark.parametrize("unit", ["D", "s", "ns"])
def test_times_are_no_raw_ids_of_text(numbered, unit):
    """In nanoseconds NumPy makes integers of them, of which each is unknown."""
    layer = layer_of(schema=numbered.schema)
    times = np.array(["2014-10-21", "NaT"], f"datetime64[{unit}]")
    for given in (times, list(times), times - times):
        with pytest.raises(ValueError, match="must be text.* a number.* Received: .*Give it"):
            layer.rows("item", given, workflow=numbered.path / "workflow")


def test_times_and_decimals_of_prepared_parquet_are_known(tmp_path):
    """As pandas reads the same file; what it makes of another type is refused."""
    moments = pd.date_range("2024-03-30 22:30", periods=60, freq="37min")
    zone = datetime.timezone(datetime.timedelta(hours=5, minutes=30))
    price = pa.array([decimal.Decimal(i) / 4 for i in range(-30, 30)], pa.decimal128(9, 2))
    columns = {
        "hour": pa.array(moments, pa.timestamp("us")),
        "exact": pa.array(moments + pd.Timedelta(1_500_000), pa.timestamp("ns")),
        "berlin": pa.array(moments.tz_localize("UTC"), pa.timestamp("ms", "Europe/Berlin")),
        "india": pa.array(moments.tz_localize(zone), pa.timestamp("s", "+05:30")),
        "day": pa.array(moments, pa.timestamp("us")).cast(pa.date32(), safe=False),
        "clock": pa.array([moment.time() for moment in moments], pa.time64("us")),
        "price": price,
        "text": pa.array([f"t{i}" for i in range(60)]),
    }
    try:
        price.cast(pa.string())
    except pa.ArrowNotImplementedError:  # Arrow before 13: ``prepare`` refuses the column
        del columns["price"]
    table = pa.table({"label": np.arange(60) % 2, **columns})
    pq.write_table(table, tmp_path / "log.parquet")
    spec = DatasetSpec("times", "label", tuple(columns), format="parquet")
    data = prepare(spec, [tmp_path / "log.parquet"], tmp_path / "data", progress=False)
    layer = layer_of(schema=data.schema)
    place, frame = {"workflow": data.path / "workflow"}, table.to_pandas()
    encoded = data.workflow().transform(frame.copy())
    for field in columns:
        for given in (frame[field], list(frame[field]), frame[field][:1]):
            found = layer.rows(field, given, **place) - layer._first_row[field]
            known = encoded[field][: len(found)] > UNKNOWN
            assert known.any() or len(found) == 1
            np.testing.assert_array_equal(found, encoded[field][: len(found)])
    known = data.counts("hour")["raw"][3:].tolist()
    rows = pd.DataFrame(np.ones((len(known), DIM)), index=pd.to_datetime(known))
    assert layer.load_rows("hour", rows, **place) == len(known)
    later = frame["hour"] + pd.Timedelta("99d")  # none of which is known
    assert set(layer.rows("hour", later, **place)) == {layer._first_row["hour"] + UNKNOWN}
    for field, other in [
        ("day", "hour"),
        ("hour", "day"),
        ("hour", "berlin"),
        ("berlin", "hour"),
        ("text", "price"),
        ("price", "day"),
        ("text", "clock"),
    ]:
        if not {field, other} <= {*columns}:
            continue
        with pytest.raises(ValueError, match="a time or decimal as .* Received: .* counts/ has it"):
            layer.rows(field, frame[other], **place)


def test_times_of_a_vocabulary_of_times_are_known():
    vocabulary = pd.Series(pd.to_datetime(["2014-10-21", "2014-10-22"]), index=[3, 4])
    times = np.array(["2014-10-22", "NaT", "2015-01-01"], "datetime64[ns]")
    for given in (times, pd.Series(times), pd.DatetimeIndex(times)):
        assert encode(vocabulary, given).tolist() == [4, 1, 2]


def test_rows_without_a_time_have_none_for_it(tmp_path):
    """pandas took a column of times with None for one of times with NaT."""
    days = pd.DataFrame({"day": pd.to_datetime(["2014-10-21", "2014-10-22"])})
    workflow = nvtabular.Workflow(["day"] >> nvtabular.ops.Categorify(out_path=str(tmp_path)))
    workflow.fit(nvtabular.Dataset(days))
    layer = FusedEmbeddings(workflow.output_schema, dim=DIM)
    layer.load_rows("day", np.ones((5, DIM)))
    assert layer.to_df("day")["raw"].tolist() == [None, None, None, *days["day"]]


DAY = datetime.date(2014, 10, 21)


@pytest.mark.parametrize(
    ("known", "found", "others"),
    [
        (pd.Timestamp(DAY), [DAY, np.datetime64(DAY)], ["2014-10-21", 16364, True]),
        (pd.Timestamp(DAY, tz="UTC"), [], [pd.Timestamp(DAY), "2014-10-21 00:00:00+00:00"]),
        (DAY, [pd.Timestamp(DAY)], ["2014-10-21", 16364]),
        (True, [np.True_], ["true", 1]),
        (b"a", [], ["a"]),
        (decimal.Decimal("1.5"), [1.5], ["1.5"]),
    ],
)
@pytest.mark.filterwarnings("ignore:Comparison of Timestamp:FutureWarning")
def test_what_a_vocabulary_of_times_and_the_like_cannot_hold_is_refused(known, found, others):
    """Text of a time was unknown, and so read the row of unknown ids, without a word."""
    vocabulary = pd.Series([known], index=[3])
    for given in (known, *found):
        assert encode(vocabulary, [given, None]).tolist() == [3, 1], given
    for given in others:
        with pytest.raises(ValueError, match="must be of the vocabulary's type, such as .*Receiv"):
            encode(vocabulary, [given])


def test_an_empty_vocabulary_knows_no_id():
    for dtype in (object, "datetime64[ns]", "category", bool):
        empty = pd.Series([], dtype=dtype)
        assert encode(empty, [pd.Timestamp(DAY), None]).tolist() == [2, 1], dtype


def test_a_vocabulary_of_categories_is_one_of_what_they_are():
    vocabulary = pd.Series(pd.Categorical(["1382", "7"]), index=[3, 4])
    assert encode(vocabulary, ["7", 7, 1382.0, "x"]).tolist() == [4, 4, 3, 2]


def test_a_missing_id_that_top_k_data_made_unknown(prepared, tmp_path):
    data = keep_top_ids(prepared, 1, tmp_path / "top", progress=False)
    layer = layer_of(schema=data.schema)
    log = raw_log()[3:5]
    log["genres"] = log["genres"].str.split(";")
    encoded = data.workflow().transform(log)
    for field in ("user", "item"):
        rows = layer.rows(field, log[field], workflow=data.path / "workflow")
        assert rows.tolist() == (encoded[field] + layer._first_row[field]).tolist()
        assert log[field].isna().tolist() == [True, False]
        assert rows[0] == layer._first_row[field] + UNKNOWN


def test_rows_are_those_that_the_workflow_looks_up(prepared):
    layer = layer_of(schema=prepared.schema)
    raw = raw_log()
    raw["genres"] = raw["genres"].str.split(";")
    encoded = prepared.workflow().transform(raw)
    for field in ("user", "item"):
        rows = layer.rows(field, raw[field], workflow=prepared.path / "workflow")
        np.testing.assert_array_equal(rows, encoded[field] + layer._first_row[field])
        missing = layer._first_row[field] + MISSING
        assert (rows == missing).sum() == 3
    newcomers = layer.rows("user", raw["user"][75:78], workflow=prepared.path / "workflow")
    assert set(newcomers) == {layer._first_row["user"] + UNKNOWN}


def test_a_prepared_folders_vocabulary_wants_its_workflow(prepared):
    layer = layer_of(schema=prepared.schema)
    message = r"vocabulary of field 'user' must be a file.* Received: .*unique.user.parquet.*not "
    for call in (lambda: layer.rows("user", ["u1"]), lambda: layer.to_df("user")):
        with pytest.raises(ValueError, match=message + r"there. Pass workflow=, the folder"):
            call()


LARGE = 2**53  # beyond it, not every integer is a float


def stock_log(shift=0) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "name": ["b", "a", "b", None, "c", "b"],
            "number": [LARGE + 1, LARGE, LARGE + 1, 7 + shift, LARGE + 1, LARGE],
            "words": [["x", "y"], ["x"], [], ["z", "x"], ["y"], ["x"]],
        }
    )


def fitted(log: pd.DataFrame, folder: Path) -> Any:
    """A stock NVTabular workflow; Categorify writes to `folder`."""
    encode = nvtabular.ops.Categorify(out_path=str(folder))
    workflow = nvtabular.Workflow(["name", "number", "words"] >> encode)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NVTabular's own, about the CPU
        workflow.fit(nvtabular.Dataset(log))
    return workflow


def encoded_rows(workflow, log, layer, field) -> list[int]:
    return (workflow.transform(log)[field] + layer._first_row[field]).tolist()


@pytest.mark.parametrize("field", ["name", "number"])
def test_rows_of_a_stock_workflow(tmp_path, field):
    log = stock_log()
    workflow = fitted(log, tmp_path)
    layer = layer_of(schema=workflow.output_schema)
    assert Path(layer.schema[field].properties["cat_path"]).is_absolute()
    assert layer.rows(field, log[field]).tolist() == encoded_rows(workflow, log, layer, field)
    raw = layer.to_df(field)["raw"].tolist()
    # By falling frequency, then by value.
    assert raw == [None] * 3 + {"name": ["b", "a", "c"], "number": [LARGE + 1, LARGE, 7]}[field]
    assert [type(r) for r in raw[3:]] == [{"name": str, "number": int}[field]] * 3
    assert layer.to_df("words")["raw"].tolist() == [None] * 3 + ["x", "y", "z"]


def test_numbers_of_a_stock_workflow_in_any_type(tmp_path):
    layer = layer_of(schema=fitted(stock_log(), tmp_path).output_schema)
    first = layer._first_row["number"]
    given = [7, 7.0, "7", np.int8(7), str(LARGE), LARGE, "7.0", "x", True]
    rows = [first + i for i in (5, 5, 5, 5, 4, 4, UNKNOWN, UNKNOWN, UNKNOWN)]
    assert layer.rows("number", given).tolist() == rows


def test_large_numbers_keep_their_rows_beside_a_missing_one(tmp_path):
    layer = layer_of(schema=fitted(stock_log(), tmp_path).output_schema)
    first = layer._first_row["number"]
    rows = layer.rows("number", [LARGE, None, LARGE + 1, LARGE + 2])
    assert rows.tolist() == [first + i for i in (4, MISSING, 3, UNKNOWN)]
    assert layer.rows("number", pd.Series([7, None])).tolist() == [first + 5, first + MISSING]


def test_a_saved_stock_workflow_that_was_moved(tmp_path):
    log = stock_log()
    workflow = fitted(log, tmp_path / "fit")
    workflow.save(str(tmp_path / "saved"))
    shutil.rmtree(tmp_path / "fit")
    (tmp_path / "saved").rename(tmp_path / "moved")
    moved = nvtabular.Workflow.load(str(tmp_path / "moved"))
    layer = layer_of(schema=moved.output_schema)
    with pytest.raises(ValueError, match=r"Received: .*fit.*which is not there. Pass workflow="):
        layer.rows("name", log["name"])
    with pytest.raises(ValueError, match=r"Received: .*other.*which is not there."):
        layer.rows("name", log["name"], workflow=tmp_path / "other")
    for field in ("name", "number"):
        found = layer.rows(field, log[field], workflow=tmp_path / "moved")
        assert found.tolist() == encoded_rows(moved, log, layer, field)


@pytest.mark.parametrize("options", [{"split_out": 3}, {"vocabs": True}], ids=str)
def test_rows_by_a_vocabulary_in_parts_or_of_ones_own(tmp_path, options):
    """In parts each file has its ids for an index; one's own may have none: it has ids by place."""
    log = pd.DataFrame({"name": [f"n{i}" for i in range(23) for _ in range(23 - i)]})
    if "vocabs" in options:
        path = tmp_path / "unique.name.parquet"
        log.drop_duplicates().reset_index(drop=True).to_parquet(path)
        options = {"vocabs": {"name": str(path)}}
    encode = nvtabular.ops.Categorify(out_path=str(tmp_path), **options)
    workflow = nvtabular.Workflow(["name"] >> encode)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NVTabular's own, about the CPU
        workflow.fit(nvtabular.Dataset(log))
    layer = layer_of(schema=workflow.output_schema)
    assert layer.rows("name", log["name"]).tolist() == encoded_rows(workflow, log, layer, "name")
    raw = layer.to_df("name")["raw"].iloc[3:]
    assert sorted(raw) == sorted(log["name"].unique())


def test_a_later_fit_into_the_same_folder(tmp_path):
    """The saved workflow's own copy counts; without it, more or fewer ids are noticed."""
    first = fitted(stock_log(), tmp_path / "fit")
    first.save(str(tmp_path / "saved"))
    layer = layer_of(schema=first.output_schema)
    expected = layer.rows("number", [LARGE, LARGE + 1, 7]).tolist()
    for logs, last in (((0, 1, 2), 7), ((), 4)):
        fitted(pd.concat([stock_log()[1:3], *map(stock_log, logs)]), tmp_path / "fit")
        found = layer.rows("number", [LARGE, LARGE + 1, 7], workflow=tmp_path / "saved")
        assert found.tolist() == expected
        message = rf"'number' must end with the last id .*, 5. Received: id {last}. .*another"
        with pytest.raises(ValueError, match=message):
            layer.rows("number", [LARGE])


def test_rows_of_a_column_that_was_never_encoded():
    """Without a `cat_path`, ids are raw ids: 0 and 1, too, which had the row of 2."""
    layer = layer_of()
    assert read_vocabulary(layer.schema["item"]).to_dict() == {i: i for i in range(5)}
    assert layer.rows("item", [3, 4, 0, 1, 2, "2"]).tolist() == [7 + i for i in (3, 4, 0, 1, 2, 2)]
    assert layer.rows("item", np.array([4.0, 1.0])).tolist() == [7 + 4, 7 + 1]
    for bad in (5, -1, 1.5, None, np.nan, "a"):
        words = f"'item', which no Categorify .* whole numbers from 0 to 4. Received: {bad!r}. Lea"
        with pytest.raises(ValueError, match=words):
            layer.rows("item", [3, bad])
    frame = layer.to_df("item")
    assert frame["raw"].tolist() == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(frame[["0", "1", "2"]], layer.table.numpy()[7:12])
    new = pd.DataFrame(np.arange(12.0).reshape(4, 3), index=[4, 1, 9, 0])
    assert layer.load_rows("item", new) == 3
    np.testing.assert_array_equal(layer.table.numpy()[[7 + 4, 7 + 1, 7]], new.to_numpy()[[0, 1, 3]])


def test_a_whole_frame_by_ids_is_none_by_raw_ids(tmp_path):
    """As `to_df` gives it, where some ids are others' raw ones."""
    layer = layer_of(schema=fitted(stock_log(), tmp_path / "fit").output_schema)
    frame = layer.to_df("number")
    by_id = frame.drop(columns="raw")
    before = layer.table.numpy()
    for given in (
        frame,
        by_id,
        by_id.iloc[3:],
        by_id.sample(frac=1),
        frame.set_index("raw").reset_index(),
    ):
        words = r"raw ids for its index. Received: one w.*dropna\(subset='raw'\).set_index"
        with pytest.raises(ValueError, match=words):
            layer.load_rows("number", given)
    np.testing.assert_array_equal(layer.table, before)
    assert layer.load_rows("number", frame.dropna(subset="raw").set_index("raw")) == 3


def test_rows_are_refused():
    layer = FusedEmbeddings(SCHEMA, DIM, name="mine")
    with pytest.raises(ValueError, match="The layer 'mine' must be built before its rows are read"):
        layer.to_df("user")
    for call in (layer.rows, layer.load_rows):
        with pytest.raises(ValueError, match="field must be one of 'user', .* Received: 'friend'"):
            call("friend", [3])
    with pytest.raises(ValueError, match="field must be one of 'user', .* Received: 'friend'"):
        layer.to_df("friend")
    assert not layer.built


# Rows from outside


def test_load_an_array():
    layer = FusedEmbeddings(SCHEMA, DIM, stddev=0.0)  # not built
    given = np.arange(15.0).reshape(5, DIM) + 1
    assert layer.load_rows("item", given) == 5
    by_hand = np.zeros((ROWS, DIM))
    by_hand[7:12] = given
    np.testing.assert_array_equal(layer.table, by_hand)
    found = layer(inputs()).numpy()
    np.testing.assert_array_equal(found[:, 1], given[np.ravel(ITEM)])


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_rows_that_are_loaded_keep_the_digits_of_the_table(dtype):
    layer = FusedEmbeddings(SCHEMA, DIM, dtype=dtype)
    given = np.full((5, DIM), 1 / 3)
    layer.load_rows("item", given)
    np.testing.assert_array_equal(layer.table[7:12], given.astype(dtype))


def test_load_a_frame():
    """By raw id, in any order; what the field does not know, and what is no id, is left out."""
    layer = layer_of()
    before = layer.table.numpy()
    frame = pd.DataFrame(
        np.arange(15.0).reshape(5, DIM), index=[6, 99, 3, None, 2], columns=["x", "y", "z"]
    )
    assert layer.load_rows("user", frame) == 3
    after = layer.table.numpy()
    np.testing.assert_array_equal(after[[6, 3, 2]], [[0, 1, 2], [6, 7, 8], [12, 13, 14]])
    others = [row for row in range(ROWS) if row not in (2, 3, 6)]
    np.testing.assert_array_equal(after[others], before[others])


@pytest.mark.parametrize("names", [["1", "0", "2"], [1, 0, 2]], ids=str)
def test_columns_of_a_frame_go_by_number(names):
    """`to_df`'s, sorted as text where d is above 10."""
    layer = layer_of()
    assert layer.load_rows("user", pd.DataFrame([[7, 8, 9]], index=[6], columns=names)) == 1
    np.testing.assert_array_equal(layer.table[6], [8, 7, 9])


@pytest.mark.parametrize("field", ["user", "item", "genres"])
def test_rows_of_one_layer_go_into_another(prepared, field):
    place = {"workflow": prepared.path / "workflow"}
    one, other = layer_of(schema=prepared.schema), layer_of(schema=prepared.schema)
    before = other.table.numpy()
    frame = one.to_df(field, **place).dropna(subset="raw").set_index("raw").sample(frac=1.0)
    assert other.load_rows(field, frame, **place) == one.cardinalities[field] - 3
    first, size = one._first_row[field], one.cardinalities[field]
    by_hand = before.copy()
    by_hand[first + 3 : first + size] = one.table.numpy()[first + 3 : first + size]
    np.testing.assert_array_equal(other.table, by_hand)
    assert (by_hand != before).any(axis=1).sum() == size - 3


def test_large_numbers_round_trip(tmp_path):
    layer = layer_of(schema=fitted(stock_log(), tmp_path).output_schema)
    frame = layer.to_df("number").dropna(subset="raw").set_index("raw")
    one, other = frame.loc[LARGE].to_numpy(), frame.loc[LARGE + 1].to_numpy()
    assert (one != other).all()
    assert layer.load_rows("number", frame.iloc[::-1]) == 3
    again = layer.to_df("number").dropna(subset="raw").set_index("raw")
    np.testing.assert_array_equal(again.loc[LARGE], one)
    np.testing.assert_array_equal(again.loc[LARGE + 1], other)


def frame_of(values, index) -> pd.DataFrame:
    return pd.DataFrame(np.asarray(values, float), index=index)


BAD_ROWS = {
    "too few rows": (np.ones((6, DIM)), "rows of field 'user' must be 7×3. Received: 6×3"),
    "too wide": (np.ones((7, 4)), "rows of field 'user' must be 7×3. Received: 7×4"),
    "one row": (np.ones(DIM), "rows of field 'user' must be 7×3. Received: 3$"),
    "three axes": (np.ones((7, DIM, 1)), "must be 7×3. Received: 7×3×1"),
    "a narrow frame": (frame_of(np.ones((2, 2)), [3, 4]), "must be 2×3. Received: 2×2"),
    "NaN": (
        np.where(np.arange(21).reshape(7, 3) == 13, np.nan, 1.0),
        "rows of field 'user' must be finite. Received: row 4",
    ),
    "inf": (frame_of([[1, 2, 3], [1, np.inf, 3]], [3, 4]), "must be finite. Received: row 1"),
    "twice": (
        frame_of(np.ones((3, 3)), [3, 5, 3]),
        "raw ids of field 'user' must be unique. Received: 3",
    ),
    "none known": (
        frame_of(np.ones((2, 3)), [77, None]),
        "raw ids of field 'user' must be in its vocabulary. Received: 2 ids, none .*: .77",
    ),
    "an empty frame": (frame_of(np.ones((0, 3)), []), "must be in its vocabulary. Received: 0 ids"),
    "text": (pd.DataFrame([["a", "b", "c"]], index=[3]), "could not convert string to float"),
}


@pytest.mark.parametrize("kind", BAD_ROWS)
def test_load_rows_refuses_and_changes_nothing(kind):
    given, message = BAD_ROWS[kind]
    layer, unbuilt = layer_of(), FusedEmbeddings(SCHEMA, DIM)
    before = layer.table.numpy()
    for refusing in (layer, unbuilt):
        with pytest.raises(ValueError, match=message):
            refusing.load_rows("user", given)
    np.testing.assert_array_equal(layer.table, before)
    assert not unbuilt.built


def test_a_vocabulary_of_combined_columns_has_no_single_raw_ids(tmp_path):
    (tmp_path / "categories").mkdir()
    path = tmp_path / "categories" / "unique.user_item.parquet"
    pd.DataFrame({"user": ["a"], "item": ["b"], "user_item_size": [3]}).to_parquet(path)
    properties = {"domain": {"min": 0, "max": 6, "name": "user_item"}, "cat_path": str(path)}
    combined = ColumnSchema(
        "user_item", tags=[Tags.CATEGORICAL], dtype="int64", properties=properties
    )
    layer = layer_of(schema=Schema([combined]))
    with pytest.raises(ValueError, match="must have a column 'user_item'.*combined columns"):
        layer.rows("user_item", ["a_b"])
