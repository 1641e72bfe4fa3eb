"""Rows of a table by raw id, against the workflow that encodes; rows that are loaded into one."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pandas as pd
import pytest

from merlin_cowclip.models import FusedEmbeddings, read_vocabulary
from merlin_cowclip.models.vocabulary import encode
from merlin_cowclip.workflows import PreparedData
from merlin_cowclip.workflows.quiet import quiet_imports

from ..golden.workflow_cases import prepare_shop, shop_rows
from .embeddings import DIM, ROWS, SCHEMA, column, layer_of

with quiet_imports():
    import nvtabular

MISSING, UNKNOWN = 1, 2


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return PreparedData.open(prepare_shop(tmp_path_factory.mktemp("prepared")))


@pytest.mark.parametrize("field", ["user", "city", "genres"])
def test_rows_of_a_prepared_folder(prepared, field):
    layer = layer_of(schema=prepared.schema)
    place, first = {"workflow": prepared.path / "workflow"}, layer.first_row[field]
    counts = prepared.counts(field)
    assert len(counts) == layer.cardinalities[field] > 5

    frame = layer.to_df(field, **place)
    assert frame.index.tolist() == counts["id"].tolist()
    assert frame["raw"].tolist() == counts["raw"].tolist()
    assert frame["raw"].tolist()[:3] == [None, None, None]  # padding, missing, unknown
    np.testing.assert_array_equal(frame[["0", "1", "2"]], layer.table[first:][: len(counts)])

    assert (layer.rows(field, counts["raw"][3:], **place) == first + counts["id"][3:]).all()
    odd = layer.rows(field, [None, "newcomer", float("nan"), pd.NA, ""], **place) - first
    assert odd.tolist() == [MISSING, UNKNOWN, MISSING, MISSING, MISSING]
    assert layer.rows(field, [], **place).tolist() == []
    if field != "genres":
        raw = shop_rows()[[field]].astype(str).replace("", None)
        workflow = prepared.workflow()
        others = [name for name in workflow.input_schema.column_names if name != field]
        encoded = workflow.remove_inputs(others).transform(raw)[field]
        assert {MISSING, UNKNOWN} & set(encoded)
        np.testing.assert_array_equal(layer.rows(field, raw[field], **place) - first, encoded)
    with pytest.raises(ValueError, match=f"not at .*unique.{field}.parquet. Pass workflow="):
        layer.rows(field, ["u1"])


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
    [[1.5], [True], [float("inf")], [2.0**53], [b"7"], pd.to_datetime(["2026-01-02"])],
    ids=repr,
)
def test_other_raw_ids_are_refused(given):
    """2^53 + 1 is 2^53 as a float: the row would be another id's."""
    with pytest.raises(ValueError, match="must be text, as in counts/, or an integer. Received"):
        encode(pd.Series(["7"], [3]), given, missing=1, unknown=2)
    with pytest.raises(ValueError, match=r"must be a list. Received: '7'. Give \['7'\]"):
        encode(pd.Series(["7"], [3]), "7", missing=1, unknown=2)


def test_a_vocabulary_of_the_users_own_and_one_of_another_workflow(tmp_path):
    """The user's is numbered from 0."""
    path = tmp_path / "unique.user.parquet"
    pd.DataFrame({"user": ["a", "b", "c"]}).to_parquet(path)
    vocabulary = read_vocabulary(column("user", 6, cat_path=str(path)))
    assert vocabulary.to_dict() == {3: "a", 4: "b", 5: "c"}
    with pytest.raises(ValueError, match=r"last id of its cardinality, 7. Received: id 5"):
        read_vocabulary(column("user", 8, cat_path=str(path)))


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
    ids = stock.transform(stock_log())[field]
    assert layer.rows(field, stock_log()[field]).tolist() == (ids + layer.first_row[field]).tolist()
    frame = layer.to_df(field)
    assert frame["raw"].tolist() == [None] * 3 + raw  # by descending frequency, then by value
    assert [type(one) for one in frame["raw"][3:]] == [type(one) for one in raw]
    assert layer.to_df("words")["raw"].tolist() == [None] * 3 + ["x", "y", "z"]


@pytest.mark.parametrize(("field", "kind"), [("time", "datetime64"), ("fraction", "floating")])
def test_a_vocabulary_of_another_type_is_refused(stock, field, kind):
    message = f"raw ids of field '{field}' must be text or integers. Received: {kind} in .*parquet"
    with pytest.raises(ValueError, match=message):
        layer_of(schema=stock.output_schema).rows(field, ["0.5"])


def test_rows_of_a_column_that_was_never_encoded():
    """Without a `cat_path`, ids are raw ids: 0 and 1, too."""
    layer = layer_of()
    assert layer.rows("item", [3, 4, 0, 1, 2, "2"]).tolist() == [7 + i for i in (3, 4, 0, 1, 2, 2)]
    assert layer.rows("item", np.array([4.0, 1.0])).tolist() == [7 + 4, 7 + 1]
    for bad in (5, -1, "1.5", None, "a"):
        words = f"'item' has no row for the raw id {bad!r}: .* whole numbers from 0 to 4. Take"
        with pytest.raises(ValueError, match=words):
            layer.rows("item", [3, bad])
    assert layer.to_df("item")["raw"].tolist() == [0, 1, 2, 3, 4]
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
    assert layer.load_rows("friend", frame) == 3  # of the users' domain
    wanted[[6, 3, 2]] = np.array([[0, 1, 2], [6, 7, 8], [12, 13, 14]])[:, np.argsort(columns)]
    np.testing.assert_array_equal(layer.table, wanted)


def frame_of(values, index) -> pd.DataFrame:
    return pd.DataFrame(np.asarray(values, float), index=index)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.ones((6, DIM)), "rows of field 'user' must be 7×3. Received: 6×3"),
        (frame_of(np.ones((2, 2)), [3, 4]), "must be 2×3. Received: 2×2"),
        (np.full((7, 3), np.nan), "rows of field 'user' must be finite. Received: row 0"),
        (frame_of(np.ones((3, 3)), [3, 5, 3]), "must be unique. Received: 3"),
        (frame_of(np.ones((1, 3)), [3]).assign(raw=["a"]), "index of a frame .* must be raw ids"),
        (frame_of(np.ones((2, 3)), [77, None]), "in its vocabulary. Received: 2 ids, none .*77"),
    ],
)
def test_load_rows_refuses_and_changes_nothing(values, message):
    layer = layer_of()
    before = layer.table.numpy()
    with pytest.raises(ValueError, match=message):
        layer.load_rows("user", values)
    np.testing.assert_array_equal(layer.table, before)
