"""Rows of a table by raw id, against the workflow that encodes; rows that are loaded into one."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from merlin_cowclip.models import FusedEmbeddings, read_vocabulary
from merlin_cowclip.models.vocabulary import encode
from merlin_cowclip.workflows.data.prepare.pipeline import prepare
from merlin_cowclip.workflows.data.spec import DatasetSpec
from merlin_cowclip.workflows.quiet import quiet_imports

from .embeddings import DIM, ROWS, SCHEMA, layer_of

with quiet_imports():
    import nvtabular

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
    place, first = {"workflow": prepared.path / "workflow"}, layer.first_row[field]
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
    odd = layer.rows(field, [None, "newcomer", float("nan"), pd.NA, ""], **place) - first
    assert odd.tolist() == [MISSING, UNKNOWN, MISSING, MISSING, MISSING]
    assert layer.rows(field, [], **place).tolist() == []
    if field != "genres":
        log = raw_log().assign(genres=[[]] * 80)
        encoded = prepared.workflow().transform(log)[field]
        np.testing.assert_array_equal(layer.rows(field, log[field], **place) - first, encoded)


@pytest.mark.parametrize(
    "vocabulary",
    [pd.Series([1382, 7], [3, 4]), pd.Series(["1382", "7"], [3, 4])],
    ids=["int", "text"],
)
def test_a_whole_number_is_the_id_of_its_text(vocabulary):
    known = [1382, 1382.0, "1382", np.uint8(7), np.float64(7), "7"]
    given = [*known, "7.0", "007", 8, "", None, pd.NA]
    for kind in (list, pd.Series, lambda ids: np.array(ids, object)):
        ids = encode(vocabulary, kind(given), missing=1, unknown=2)
        assert ids.tolist() == [3, 3, 3, 4, 4, 4, 2, 2, 2, 2, 1, 1]
    ids = encode(vocabulary, ["", "7"], missing=1, unknown=2, empty_is_missing=True)
    assert ids.tolist() == [1, 4]


@pytest.mark.parametrize(
    "given",
    [
        *([1.5], [True], [float("inf")], [2.0**53], [b"7"], [np.float32(7)]),
        pd.to_datetime(["2026-01-02"]),
        np.array(["2026-01-02"], "datetime64[ns]"),
    ],
    ids=repr,
)
def test_other_raw_ids_are_refused(given):
    """2^53 + 1 is 2^53 as a float: the row would be another id's."""
    with pytest.raises(ValueError, match="must be text, as in counts/, or an integer. Received"):
        encode(pd.Series(["7"], [3]), given, missing=1, unknown=2)
    with pytest.raises(ValueError, match=r"must be a list. Received: '7'. Give \['7'\]"):
        encode(pd.Series(["7"], [3]), "7", missing=1, unknown=2)


def test_a_prepared_folders_vocabulary_wants_its_workflow(prepared):
    layer = layer_of(schema=prepared.schema)
    message = (
        "vocabulary of field 'user' is not at .*unique.user.parquet. Pass workflow=, the folder"
    )
    for call in (lambda: layer.rows("user", ["u1"]), lambda: layer.to_df("user")):
        with pytest.raises(ValueError, match=message):
            call()


LARGE = 2**53 + 1  # no float


def stock_log() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "name": ["b", "a", "b", None, "c", "b"],
            "number": [LARGE, LARGE - 1, LARGE, 7, LARGE, LARGE - 1],
            "gaps": [5, 5, None, 9, 5, 9],  # floats, to pandas
            "words": [["x", "y"], ["x"], [], ["z", "x"], ["y"], ["x"]],
            "time": pd.date_range("2026-01-01", periods=6),
            "fraction": [0.5, 1.5, 0.5, 0.5, 2.5, 2.5],
        }
    )


@pytest.fixture(scope="module")
def stock(tmp_path_factory) -> Any:
    """A stock NVTabular workflow, fitted."""
    encode = nvtabular.ops.Categorify(out_path=str(tmp_path_factory.mktemp("stock")))
    workflow = nvtabular.Workflow(list(stock_log()) >> encode)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NVTabular's own, about the CPU
        workflow.fit(nvtabular.Dataset(stock_log()))
    return workflow


@pytest.mark.parametrize(
    ("field", "raw"),
    [("name", ["b", "a", "c"]), ("number", [LARGE, LARGE - 1, 7]), ("gaps", [5, 9])],
)
def test_rows_of_a_stock_workflow(stock, field, raw):
    layer = layer_of(schema=stock.output_schema)
    assert Path(layer.schema[field].properties["cat_path"]).is_absolute()
    ids = stock.transform(stock_log())[field]
    assert layer.rows(field, stock_log()[field]).tolist() == (ids + layer.first_row[field]).tolist()
    found = layer.to_df(field)["raw"].tolist()
    assert found == [None] * 3 + raw  # by falling frequency, then by value
    assert [type(one) for one in found[3:]] == [type(one) for one in raw]
    assert layer.to_df("words")["raw"].tolist() == [None] * 3 + ["x", "y", "z"]


@pytest.mark.parametrize(("field", "kind"), [("time", "datetime64"), ("fraction", "floating")])
def test_a_vocabulary_of_another_type_is_refused(stock, field, kind):
    message = f"raw ids of field '{field}' must be text or integers. Received: {kind} in .*parquet"
    with pytest.raises(ValueError, match=message):
        layer_of(schema=stock.output_schema).rows(field, ["0.5"])


def test_rows_of_a_column_that_was_never_encoded():
    """Without a `cat_path`, ids are raw ids: 0 and 1, too, which had the row of 2."""
    layer = layer_of()
    assert read_vocabulary(layer.schema["item"]).to_dict() == {i: i for i in range(5)}
    assert layer.rows("item", [3, 4, 0, 1, 2, "2"]).tolist() == [7 + i for i in (3, 4, 0, 1, 2, 2)]
    assert layer.rows("item", np.array([4.0, 1.0])).tolist() == [7 + 4, 7 + 1]
    for bad in (5, -1, "1.5", None, "a"):
        words = f"'item' has no row for the raw id {bad!r}: .* whole numbers from 0 to 4. Take"
        with pytest.raises(ValueError, match=words):
            layer.rows("item", [3, bad])
    frame = layer.to_df("item")
    assert frame["raw"].tolist() == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(frame[["0", "1", "2"]], layer.table.numpy()[7:12])
    new = pd.DataFrame(np.arange(12.0).reshape(4, 3), index=[4, 1, 9, 0])
    assert layer.load_rows("item", new) == 3
    np.testing.assert_array_equal(layer.table.numpy()[[7 + 4, 7 + 1, 7]], new.to_numpy()[[0, 1, 3]])


# Rows from outside


def test_load_an_array():
    layer = FusedEmbeddings(SCHEMA, DIM, stddev=0.0)  # not built
    given = np.arange(15.0).reshape(5, DIM) + 1
    assert layer.load_rows("item", given) == 5
    by_hand = np.zeros((ROWS, DIM))
    by_hand[7:12] = given
    np.testing.assert_array_equal(layer.table, by_hand)


@pytest.mark.parametrize("columns", [["x", "y", "z"], ["2", "0", "1"]])
def test_load_a_frame(columns):
    """By raw id and by the names of columns, where these are numbers; unknown ids are left out."""
    layer = layer_of()
    wanted = layer.table.numpy()
    frame = pd.DataFrame(
        np.arange(15.0).reshape(5, DIM), index=[6, 99, 3, None, 2], columns=columns
    )
    assert layer.load_rows("user", frame) == 3
    wanted[[6, 3, 2]] = np.array([[0, 1, 2], [6, 7, 8], [12, 13, 14]])[:, np.argsort(columns)]
    np.testing.assert_array_equal(layer.table, wanted)


def frame_of(values, index) -> pd.DataFrame:
    return pd.DataFrame(np.asarray(values, float), index=index)


BAD_ROWS = {
    "too few rows": (np.ones((6, DIM)), "rows of field 'user' must be 7×3. Received: 6×3"),
    "a narrow frame": (frame_of(np.ones((2, 2)), [3, 4]), "must be 2×3. Received: 2×2"),
    "NaN": (
        np.where(np.arange(21).reshape(7, 3) == 13, np.nan, 1.0),
        "rows of field 'user' must be finite. Received: row 4",
    ),
    "twice": (
        frame_of(np.ones((3, 3)), [3, 5, 3]),
        "raw ids of field 'user' must be unique. Received: 3",
    ),
    "as to_df gives it": (
        frame_of(np.ones((2, 3)), [3, 4]).assign(raw=["a", "b"]),
        "index of a frame of rows of field 'user' must be raw ids",
    ),
    "none known": (
        frame_of(np.ones((2, 3)), [77, None]),
        "raw ids of field 'user' must be in its vocabulary. Received: 2 ids, none .*: .77",
    ),
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
