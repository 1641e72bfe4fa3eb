"""Which ids of a pipeline have raw ones: a vocabulary's, as long as nothing changed them since."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from merlin_cowclip.models import FusedEmbeddings, read_vocabulary
from merlin_cowclip.workflows.data.adopt import adopt
from merlin_cowclip.workflows.data.id_origins import Origin, id_origins
from merlin_cowclip.workflows.data.prepared import PreparedData
from merlin_cowclip.workflows.quiet import quiet_imports
from merlin_cowclip.workflows.serving.rare_rows import rare_ids

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
