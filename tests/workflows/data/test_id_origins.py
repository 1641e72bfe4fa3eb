"""Which ids of a pipeline have raw ones: a vocabulary's, as long as nothing changed them since."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from merlin_cowclip.models import FusedEmbeddings, read_vocabulary
from merlin_cowclip.workflows.data.adopt import adopt
from merlin_cowclip.workflows.data.id_origins import Origin, id_origins, raw_values
from merlin_cowclip.workflows.data.prepared import PreparedData
from merlin_cowclip.workflows.quiet import quiet_imports
from merlin_cowclip.workflows.serving.rare_rows import rare_ids

with quiet_imports():
    import nvtabular as nvt
    from merlin.io import Dataset
    from merlin.schema import Schema, Tags
    from nvtabular import ops

pytestmark = pytest.mark.filterwarnings("ignore:Initializing an NVTabular Dataset in CPU mode")
ROWS = 300
RANDOM = np.random.default_rng(0)
LOG = pd.DataFrame(
    {
        "click": np.arange(ROWS) % 2,
        "user": [f"u{i}" for i in RANDOM.zipf(1.4, ROWS) % 40],
        "item": [f"i{i}" for i in RANDOM.integers(0, 9, ROWS)],
        "site": RANDOM.integers(100, 120, ROWS),
        "shop": RANDOM.integers(100, 120, ROWS),
        "genres": [
            [f"g{g}" for g in RANDOM.integers(0, 9, n)] for n in RANDOM.integers(1, 5, ROWS)
        ],
        "price": RANDOM.random(ROWS),
        **{name: RANDOM.zipf(1.4, ROWS) % 40 for name in ("brand", "city", "state")},
    }
)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> PreparedData:
    """Ids in every way that NVTabular makes them."""
    home = tmp_path_factory.mktemp("origins")

    def ids(name: str | list[list[str]], **options):
        number = len(os.listdir(home))
        (home / f"{number}").mkdir()
        names = [name] if isinstance(name, str) else name
        return names >> ops.Categorify(out_path=str(home / f"{number}"), **options)

    own = ops.AddMetadata([Tags.CATEGORICAL], {"domain": {"min": 0, "max": 12}})
    nodes = (
        (ids("user") >> ops.Rename(name="renamed") >> ops.TagAsUserFeatures())
        + (ids("genres") >> ops.ListSlice(0, 2))
        + (ids([["site", "shop"]], encode_type="joint") >> ops.Filter(lambda df: df["site"] >= 0))
        + (ids("brand") >> ops.LambdaOp(halved) >> ops.Rename(postfix="_halved"))
        + (ids("city") >> ops.LambdaOp(halved) >> ops.AddMetadata(tags=["seen"]))
        + (["item"] >> ops.HashBucket(7))
        + ([["user", "item"]] >> ops.HashedCross(13) >> own)
        + (ids("state") >> ops.HashBucket(5) >> ops.Rename(name="of_ids"))
        + (["price"] >> ops.Bucketize({"price": [0.5]}) >> ops.Rename(name="half") >> own)
        + (["price"] >> ops.DifferenceLag("user") >> ops.FillMissing())
        + ["click"]
    )
    raw = Dataset(LOG)
    workflow = nvt.Workflow(nodes)
    workflow.fit(raw)
    workflow.save(str(home / "workflow"))
    workflow.transform(raw).to_parquet(str(home / "train"))
    return adopt(home / "train", home / "workflow", "click", home / "data", progress=False)


def halved(column):
    return column // 2


CHANGED, HASHED = ["brand_halved", "city"], ["item", "user_X_item", "of_ids"]
KNOWN = {"renamed": "user", "genres": "genres", "site": "site", "shop": "shop"}


def test_what_made_the_ids(data):
    origins = id_origins(data.workflow())
    assert {name for name in KNOWN if origins[name] is Origin.VOCABULARY} == KNOWN.keys()
    assert {name for name in origins if origins[name] is Origin.CHANGED} == set(CHANGED)
    assert {name for name in origins if origins[name] is Origin.HASH} == set(HASHED)
    assert set(data.spec.ids) == {*KNOWN, *CHANGED, *HASHED, "half"}


def test_a_vocabulary_is_that_of_the_log(data):
    files = [pd.read_parquet(file) for file in data.train_files]
    encoded = pd.concat(files, ignore_index=True)
    for field, column in KNOWN.items():
        raw = data.counts(field)["raw"].to_numpy()
        found = raw[encoded[field].explode().astype(int)].tolist()
        expected = LOG[column].map(lambda one: one[:2] if isinstance(one, list) else str(one))
        assert found == expected.explode().tolist(), field
        assert "no_raw_ids" not in data.schema[field].properties


def test_ids_that_were_changed_or_hashed_have_no_raw_ones(data):
    table = FusedEmbeddings(data.schema.select_by_name(list(data.spec.ids)), 2)
    table(dict.fromkeys(data.spec.ids, np.zeros((1, 1), np.int64)))
    workflow = data.path / "workflow"
    for field in (*CHANGED, *HASHED):
        assert "cat_path" not in data.schema[field].properties
        assert data.counts(field)["raw"].isna().all()
        assert data.counts(field)["count"].sum() == ROWS
        frame = table.to_df(field, workflow=workflow)
        assert frame["raw"].isna().all()
        given = pd.DataFrame(np.ones((2, 2)), index=[3, 4])
        for read in (
            lambda field: read_vocabulary(data.schema[field], workflow),
            lambda field: table.rows(field, LOG["city"], workflow=workflow),
            lambda field: table.rows(field, [3, 4]),
            lambda field: table.load_rows(field, given, workflow=workflow),  # noqa: B023
        ):
            with pytest.raises(ValueError, match=f"raw ids of field '{field}' must be in a vocab"):
                read(field)
        whole = np.full((len(frame), 2), 7.0)  # by id
        assert table.load_rows(field, whole) == len(frame)
        assert (table.to_df(field)[["0", "1"]] == 7).all(axis=None)


def test_they_are_none_of_which_rare_ones_are_dropped(data):
    rare = rare_ids(data, 60)
    for field, size in data.cardinalities.items():
        stays = len(rare.kept[field]) == size
        assert stays == (field in {*CHANGED, *HASHED, "half"}), field


def test_adopt_says_so(data):
    notes = "\n".join(data.record["notes"])
    assert "raw ids of 'brand_halved', 'city' are not known: an operator after Categorify" in notes
    assert "'price_difference_lag_1' are differences to other rows (DifferenceLag)" in notes


def test_groups_of_ids_are_ids(tmp_path: Path):
    """As pipelines of sessions have them; their numbers are none, and the key is the raw one."""
    ids = ["user", "item", "site"] >> ops.Categorify(out_path=str(tmp_path))
    aggs = {"item": ["list", "count"], "site": ["first", "nunique"]}
    workflow = nvt.Workflow(ids >> ops.Groupby(groupby_cols="user", aggs=aggs))
    workflow.fit(Dataset(LOG))
    origins = id_origins(workflow)
    kept = {name for name, origin in origins.items() if origin is Origin.VOCABULARY}
    assert kept == {"item_list", "site_first"}
    assert {name for name in origins if name not in kept} == {"item_count", "site_nunique"}
    assert workflow.transform(LOG)["user"].isin(LOG["user"]).all()


def test_keys_of_groups_that_no_categorify_made_have_no_vocabulary(tmp_path: Path):
    """Users 1 to N fit the domain that the schema says; `raw` was another user's for every one."""
    log = LOG.assign(user=pd.factorize(LOG["user"])[0] + 1)
    ids = ["user", "item"] >> ops.Categorify(out_path=str(tmp_path / "ids"))
    groups = (ids + "click") >> ops.Groupby(
        groupby_cols="user", aggs={"item": ["list"], "click": ["max"]}
    )
    target = groups["click_max"] >> ops.AddMetadata(tags=[Tags.TARGET])
    workflow = nvt.Workflow(groups["user", "item_list"] + target)
    workflow.fit(Dataset(log))
    workflow.transform(Dataset(log)).to_parquet(str(tmp_path / "train"))
    workflow.save(str(tmp_path / "workflow"))
    data = adopt(
        tmp_path / "train", tmp_path / "workflow", "click_max", tmp_path / "data", progress=False
    )
    counts = data.counts("user")
    assert counts["raw"].isna().all()
    present = sorted(log["user"].unique())
    assert counts["count"].iloc[present].eq(1).all()
    assert counts["count"].sum() == len(present)
    assert data.counts("item_list")["raw"].notna().sum() == log["item"].nunique()
    notes = "\n".join(data.record["notes"])
    assert "raw ids of 'user' are not known: their schema names a vocabulary, but no " in notes
    table = FusedEmbeddings(data.schema.select_by_tag(Tags.CATEGORICAL), 2)
    with pytest.raises(ValueError, match="user"):
        table.rows("user", [3], workflow=data.path / "workflow")


def test_ids_that_another_workflow_encoded_have_no_vocabulary_here(tmp_path: Path):
    """Its parquet's schema hands an absolute path on, where the next fit writes another one."""
    first = nvt.Workflow((["item"] >> ops.Categorify(out_path=str(tmp_path / "ids"))) + ["click"])
    first.fit(Dataset(LOG))
    first.transform(Dataset(LOG)).to_parquet(str(tmp_path / "encoded"))
    encoded = Dataset(str(tmp_path / "encoded"), engine="parquet")
    second = nvt.Workflow(["item"] + (["click"] >> ops.AddMetadata(tags=[Tags.TARGET])))
    second.fit(encoded)
    second.transform(encoded).to_parquet(str(tmp_path / "train"))
    second.save(str(tmp_path / "workflow"))
    data = adopt(tmp_path / "train", tmp_path / "workflow", "click", tmp_path / "d", progress=False)
    assert any("raw ids of 'item' are not known" in note for note in data.record["notes"])
    assert data.counts("item")["raw"].isna().all()
    assert not data.schema["item"].properties.get("cat_path")
    table = FusedEmbeddings(data.schema.select_by_tag(Tags.CATEGORICAL), 2)
    for how in ({"workflow": data.path / "workflow"}, {}):
        with pytest.raises(ValueError, match="item"):
            table.rows("item", ["i1"], **how)


def test_ids_that_two_workflows_encoded_are_those_of_the_second_alone(tmp_path: Path):
    """Its vocabulary holds the first one's ids: of the log's, each was taken for unknown."""
    first = nvt.Workflow((["item"] >> ops.Categorify(out_path=str(tmp_path / "first"))) + ["click"])
    first.fit(Dataset(LOG))
    first.transform(Dataset(LOG)).to_parquet(str(tmp_path / "encoded"))
    encoded = Dataset(str(tmp_path / "encoded"), engine="parquet")
    again = ["item"] >> ops.Categorify(out_path=str(tmp_path / "second"))
    second = nvt.Workflow(again + (["click"] >> ops.AddMetadata(tags=[Tags.TARGET])))
    second.fit(encoded)
    second.transform(encoded).to_parquet(str(tmp_path / "train"))
    second.save(str(tmp_path / "workflow"))
    data = adopt(tmp_path / "train", tmp_path / "workflow", "click", tmp_path / "d", progress=False)
    assert any("'item' (a workflow before this one)" in note for note in data.record["notes"])
    table, how = table_of(data), {"workflow": data.path / "workflow"}
    with pytest.raises(ValueError, match="log, and a workflow before this one may have changed"):
        table.rows("item", ["i1"], **how)
    first_ids = encoded.to_ddf().compute()["item"]
    found = table.rows("item", first_ids, as_read=True, **how)
    rows = Dataset(str(tmp_path / "train"), engine="parquet").to_ddf().compute()
    assert found.tolist() == rows["item"].tolist()


BEFORE = pd.DataFrame(
    {
        "click": np.arange(ROWS) % 2,
        "age": RANDOM.integers(10, 80, ROWS),
        "name": [f"N{i}" if i % 2 else f"n{i}" for i in RANDOM.integers(0, 9, ROWS)],
        "weight": RANDOM.integers(0, 5, ROWS) / 10,
        "shoe": RANDOM.choice([38.0, 41.0, 44.0, np.nan], ROWS),
        "color": RANDOM.choice(np.array(["red", "green", None], object), ROWS),
        "size": RANDOM.integers(0, 5, ROWS),
        "tags": LOG["genres"],
        "shop": LOG["shop"],
        "query": [f"q{i}" for i in RANDOM.integers(0, 99, ROWS)],
    }
)
OPERATORS = {
    "age": "Bucketize",
    "tens": "LambdaOp, Clip",
    "lower": "LambdaOp",
    "weight": "ReduceDtypeSize",
    "hash": "HashBucket",
    "half": "LambdaOp",
    "missing_filled": "FillMissing",
    "steps": "Bucketize",
}
AS_IN_THE_LOG = {
    "shoe": "shoe",
    "renamed": "color",
    "size": "size",
    "tags": "tags",
    "shop_": "shop",
}


def lower(column):
    return column.str.lower()


def tens(column):
    return column // 10


@pytest.fixture(scope="module")
def behind(tmp_path_factory) -> PreparedData:
    """Ids of which Categorify, where there is one, comes last."""
    home = tmp_path_factory.mktemp("behind")

    def ids(**options):
        return ops.Categorify(out_path=str(home / f"fitted{len(os.listdir(home))}"), **options)

    def own(last: int):
        return ops.AddMetadata([Tags.CATEGORICAL], {"domain": {"min": 0, "max": last}})

    (home / "fitted").mkdir()
    shops = pd.DataFrame({"shop": np.arange(100, 120), "seller_of": np.arange(20) % 4})
    filled = ["color"] >> ops.FillMissing(fill_val="none", add_binary_cols=True)
    nodes = (
        (["age"] >> ops.Bucketize([20, 30, 40, 60]) >> ids())
        + (["age"] >> ops.LambdaOp(tens) >> ops.Clip(0, 9) >> ops.Rename(name="tens") >> ids())
        + (["name"] >> ops.LambdaOp(lower) >> ids() >> ops.Rename(name="lower"))
        + (["weight"] >> ops.ReduceDtypeSize() >> ids())
        + (["query"] >> ops.HashBucket(9) >> ids() >> ops.Rename(name="hash"))
        + (["size"] >> ops.LambdaOp(halved) >> ops.Rename(name="half") >> own(9))
        + (["age"] >> ops.Bucketize([20, 50]) >> ops.Rename(name="steps") >> own(2))
        + (["shoe"] >> ops.FillMedian() >> ids())
        + (
            filled["color"]
            >> ops.Filter(lambda df: df["color"] != "")
            >> ids()
            >> ops.Rename(name="renamed")
        )
        + (filled["color_filled"] >> ops.Rename(name="missing_filled") >> ids())
        + (["size"] >> ops.ReduceDtypeSize() >> ids())
        + (["tags"] >> ops.ListSlice(0, 2) >> ids())
        + (["shop"] >> ops.JoinExternal(shops, on="shop") >> ops.Rename(postfix="_") >> ids())
        + ["click"]
    )
    raw = Dataset(BEFORE)
    workflow = nvt.Workflow(nodes)
    workflow.fit(raw)
    workflow.save(str(home / "workflow"))
    workflow.transform(raw).to_parquet(str(home / "train"))
    return adopt(home / "train", home / "workflow", "click", home / "data", progress=False)


def table_of(data: PreparedData) -> FusedEmbeddings:
    table = FusedEmbeddings(data.schema.select_by_name(list(data.spec.ids)), 2)
    table(dict.fromkeys(data.spec.ids, np.zeros((1, 1), np.int64)))
    return table


def encoded(data: PreparedData) -> pd.DataFrame:
    return pd.concat([pd.read_parquet(file) for file in data.train_files], ignore_index=True)


def test_what_operators_made_before_categorify_are_no_raw_ids(behind):
    """The third bucket is no age of 3: its row was given for one."""
    table, workflow = table_of(behind), behind.path / "workflow"
    for field, operators in OPERATORS.items():
        given = pd.DataFrame(np.ones((2, 2)), index=[3, 4])
        for read in (
            lambda field: read_vocabulary(behind.schema[field], workflow),
            lambda field: table.rows(field, [3], workflow=workflow),
            lambda field: table.load_rows(field, given, workflow=workflow),  # noqa: B023
        ):
            with pytest.raises(ValueError, match=f"field '{field}' .* log, and {operators} may"):
                read(field)
        assert table.to_df(field, workflow=workflow)["raw"].isna().all()


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("age", pd.Series(np.digitize(BEFORE["age"], [20, 30, 40, 60]))),
        ("tens", BEFORE["age"] // 10),
        ("lower", BEFORE["name"].str.lower()),
        ("missing_filled", BEFORE["color"].isna()),
        ("size", BEFORE["size"]),  # which none changed
    ],
)
def test_they_are_taken_as_read(behind, field, values):
    table, how = table_of(behind), {"workflow": behind.path / "workflow", "as_read": True}
    ids = table.rows(field, values, **how) - table.rows(field, [None], **how) + 1
    np.testing.assert_array_equal(ids, encoded(behind)[field])
    frame = table.to_df(field, **how)
    assert frame["raw"][ids].tolist() == values.tolist()
    new = frame.dropna(subset="raw").set_index("raw") + 1
    assert table.load_rows(field, new, **how) == values.nunique()
    np.testing.assert_array_equal(table.to_df(field, **how).loc[3:, ["0", "1"]], new)


def test_ids_of_numbers_are_taken_as_read(behind):
    """Of a column with a domain of its own, which Categorify never saw: all, from bucket 0 on."""
    table = table_of(behind)
    first = table.rows("half", [5], as_read=True) - 5
    every = list(range(table.cardinalities["half"]))
    assert (table.rows("half", every, as_read=True) - first).tolist() == every
    assert table.to_df("half", as_read=True)["raw"].tolist() == every
    with pytest.raises(ValueError, match=r"'half', which no Categorify encoded, must be .* nan"):
        table.rows("half", [1, np.nan], as_read=True)


def test_operators_that_keep_values_leave_raw_ids(behind):
    table, ids = table_of(behind), encoded(behind)
    for field, column in AS_IN_THE_LOG.items():
        assert "changed_before" not in behind.schema[field].properties
        raw, how = BEFORE[column], {"workflow": behind.path / "workflow"}
        given = raw.map(lambda one: one[:2] if isinstance(one, list) else one).explode()
        here = given.notna().to_numpy()
        rows = table.rows(field, given[here], **how) - table.rows(field, ["?"], **how) + 2
        np.testing.assert_array_equal(rows, ids[field].explode()[here])
        assert (rows > 2).all()
    for field in ("shoe", "renamed"):  # Categorify saw the median, and "none"
        with pytest.raises(ValueError, match=f"field '{field}' must not be missing.* fills them"):
            table.rows(field, [None], **how)
        assert table.rows(field, [None], as_read=True, **how) + 1 == table.rows(field, ["?"], **how)


def test_adopt_names_the_operators(behind):
    (note,) = (one for one in behind.record["notes"] if "as_read" in one)
    fields = set(re.search("ids of (.*) are of values", note).group(1).split("; "))
    assert fields == {f"'{field}' ({operators})" for field, operators in OPERATORS.items()}


def test_folders_without_a_mark_take_values_as_they_did(behind):
    """As they were adopted before there was one."""
    marks = ("changed_before", "missing_filled")
    before = Schema([c.with_properties(dict.fromkeys(marks)) for c in behind.schema])
    table = FusedEmbeddings(before.select_by_name(["age", "shoe"]), 2)
    how = {"workflow": behind.path / "workflow"}
    age = np.digitize(BEFORE["age"], [20, 30, 40, 60])
    np.testing.assert_array_equal(table.rows("age", age, **how), encoded(behind)["age"])
    assert table.rows("shoe", [None], **how) == table.rows("shoe", ["?"], **how) - 1


@pytest.mark.parametrize("kept", ["list", "first", "max"])
def test_groups_of_raw_ids_are_raw_ids(tmp_path: Path, kept):
    groups = ops.Groupby(groupby_cols="user", aggs={"item": [kept, "count"]})
    ids = ["user", "item"] >> groups >> ops.Categorify(out_path=str(tmp_path))
    workflow = nvt.Workflow(ids)
    workflow.fit(Dataset(LOG))
    assert raw_values(workflow)[f"item_{kept}"].changed_by == ()
    assert raw_values(workflow)["item_count"].changed_by == ("Groupby",)


def test_buckets_without_a_training_row_start_at_zero(tmp_path: Path):
    """Of operators that do not say how many there are, too: they were noise at serving time."""
    bins = [*range(20, 80, 20), 900, 950, 990]
    own = ops.AddMetadata([Tags.CATEGORICAL], {"domain": {"min": 0, "max": 999}})
    nodes = (
        (["query"] >> ops.HashBucket(1000) >> ops.Rename(name="hashed"))
        + ([["query", "name"]] >> ops.HashedCross(1000) >> own >> ops.Rename(name="crossed"))
        + (["age"] >> ops.Bucketize(bins) >> own >> ops.Rename(name="steps"))
        + (["size"] >> own)
        + ["click"]
    )
    raw, workflow = Dataset(BEFORE), nvt.Workflow(nodes)
    workflow.fit(raw)
    workflow.save(str(tmp_path / "workflow"))
    workflow.transform(raw).to_parquet(str(tmp_path / "train"))
    data = adopt(
        tmp_path / "train", tmp_path / "workflow", "click", tmp_path / "data", progress=False
    )
    table = table_of(data)
    for field in data.spec.ids:
        empty = data.counts(field)["count"].to_numpy() == 0
        empty[0] = True  # padding
        if field == "size":  # ids that were never encoded start as any, behind the unknown one
            empty[3:] = False
        values = table.to_df(field)[["0", "1"]].to_numpy()
        np.testing.assert_array_equal((values == 0).all(axis=1), empty, field)
        assert empty.sum() > (field != "size") * 600
