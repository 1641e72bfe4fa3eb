"""Which ids of a pipeline have raw ones: a vocabulary's, as long as nothing changed them since."""

from __future__ import annotations

import os

import numpy as np
import pandas as pd
import pytest

from merlin_cowclip.models import FusedEmbeddings, read_vocabulary
from merlin_cowclip.workflows.data.adopt import adopt
from merlin_cowclip.workflows.data.id_origins import Origin, id_origins
from merlin_cowclip.workflows.data.prepared import PreparedData
from merlin_cowclip.workflows.quiet import quiet_imports
from merlin_cowclip.workflows.serving.rare_ids import rare_ids

with quiet_imports():
    import nvtabular as nvt
    from merlin.io import Dataset
    from merlin.schema import Tags
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
            with pytest.raises(ValueError, match=f"Field '{field}' has no raw ids"):
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


def lower(column):
    return column.str.lower()


BEFORE = pd.DataFrame(
    {
        "click": np.arange(ROWS) % 2,
        "age": RANDOM.integers(10, 80, ROWS),
        "name": [f"N{i}" if i % 2 else f"n{i}" for i in RANDOM.integers(0, 9, ROWS)],
        "shoe": RANDOM.choice([38.0, 41.0, 44.0, np.nan], ROWS),
        "tags": LOG["genres"],
        "shop": LOG["shop"],
    }
)
MADE = ("age", "lower", "steps")
AS_IN_THE_LOG = {"shoe": "shoe", "tags": "tags", "shop_": "shop"}


@pytest.fixture(scope="module")
def behind(tmp_path_factory) -> PreparedData:
    """Ids of which Categorify, where there is one, comes last."""
    home = tmp_path_factory.mktemp("behind")

    def ids():
        return ops.Categorify(out_path=str(home / f"fitted{len(os.listdir(home))}"))

    (home / "fitted").mkdir()
    steps = ops.AddMetadata([Tags.CATEGORICAL], {"domain": {"min": 0, "max": 2}})
    shops = pd.DataFrame({"shop": np.arange(100, 120), "seller_of": np.arange(20) % 4})
    nodes = (
        (["age"] >> ops.Bucketize([20, 30, 40, 60]) >> ids())
        + (["name"] >> ops.LambdaOp(lower) >> ids() >> ops.Rename(name="lower"))
        + (["age"] >> ops.Bucketize([20, 50]) >> ops.Rename(name="steps") >> steps)
        + (["shoe"] >> ops.FillMedian() >> ids())
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
    for field in MADE:
        given = pd.DataFrame(np.ones((2, 2)), index=[3, 4])
        for read in (
            lambda field: read_vocabulary(behind.schema[field], workflow),
            lambda field: table.rows(field, [3], workflow=workflow),
            lambda field: table.load_rows(field, given, workflow=workflow),  # noqa: B023
        ):
            with pytest.raises(ValueError, match=f"Field '{field}' has no raw ids"):
                read(field)
        assert table.to_df(field, workflow=workflow)["raw"].isna().all()


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
    with pytest.raises(ValueError, match="'shoe' has no row for .* None: the workflow fills"):
        table.rows("shoe", [None], **how)  # Categorify saw the median
