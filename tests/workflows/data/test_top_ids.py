"""The top-k data, against pandas and NVTabular."""

import dataclasses

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from merlin_cowclip.workflows.commands.main import main
from merlin_cowclip.workflows.data.frequencies import frequencies
from merlin_cowclip.workflows.data.prepare.pipeline import prepare
from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.data.spec import CRITEO, Split
from merlin_cowclip.workflows.data.synthetic import write_synthetic
from merlin_cowclip.workflows.data.top_ids import keep_top_ids
from merlin_cowclip.workflows.quiet import quiet_imports

from .counted import SPEC, made, raw_ids, read

with quiet_imports():
    import nvtabular as nvt
    from merlin.schema import Tags


@pytest.fixture(scope="module")
def top3(data, tmp_path_factory):
    return keep_top_ids(data, 3, tmp_path_factory.mktemp("top") / "data", progress=False)


@pytest.fixture(scope="module")
def criteo(tmp_path_factory):
    """Raw rows of a synthetic Criteo log, prepared, and its top 3."""
    home = tmp_path_factory.mktemp("criteo")
    write_synthetic("criteo", home / "train.txt", rows=4_000, seed=1, cardinality=300)
    spec = dataclasses.replace(CRITEO, split=Split("sequential", 0.25, valid=0))
    data = prepare(spec, [home / "train.txt"], home / "data", progress=False)
    assert main(["frequencies", str(data.path), "--top-k", "3", "--out", str(home / "top3")]) == 0
    types = dict.fromkeys(CRITEO.categorical, str)
    raw = pd.read_csv(home / "train.txt", sep="\t", header=None, names=CRITEO.columns, dtype=types)
    return raw, data, PreparedData.open(home / "top3")


def top_by_pandas(ids: pd.Series, k: int) -> list[str]:
    """The k most frequent values, ties by Categorify's order: missing first, then by text."""
    counts = ids.value_counts().rename_axis("id").reset_index(name="count")
    counts["present"] = counts["id"] != "missing"
    return counts.sort_values(["count", "present", "id"], ascending=[False, True, True])["id"][
        :k
    ].tolist()


def decoded(data: PreparedData, ids: np.ndarray, field: str) -> np.ndarray:
    raw = data.counts(field)["raw"].to_numpy(dtype=object).copy()
    raw[1:3] = "missing", "other"
    return raw[ids]


def test_criteo_keeps_three_ids_of_each_field(criteo):
    raw, data, top3 = criteo
    new = {part: read(getattr(top3, f"{part}_files")) for part in ("train", "test")}
    old_train = read(data.train_files)
    for field in CRITEO.categorical:
        column = raw[field].fillna("missing")
        kept = top_by_pandas(column.iloc[:3_000], 3)
        assert new["train"][field].nunique() == min(4, column.iloc[:3_000].nunique())
        assert new["test"][field].nunique() <= 4
        # The test part is the log's end, in order; the training part is shuffled as it was.
        expected = column.where(column.isin(kept), "other")
        assert decoded(top3, new["test"][field], field).tolist() == expected.iloc[3_000:].tolist()
        was = pd.Series(decoded(data, old_train[field], field))
        assert decoded(top3, new["train"][field], field).tolist() == (
            was.where(was.isin(kept), "other").tolist()
        )
        # Kept ids are 3, 4, … by falling count.
        real = [name for name in kept if name != "missing"]
        assert top3.counts(field)["raw"].iloc[3:].tolist() == real
    for part in new:
        old = read(getattr(data, f"{part}_files"))
        rest = [CRITEO.label, *CRITEO.continuous]
        pd.testing.assert_frame_equal(new[part][rest], old[rest])


def test_criteo_workflow_gives_the_same(criteo):
    raw, _, top3 = criteo
    test = read(top3.test_files)
    again = top3.workflow().transform(raw.iloc[3_000:])  # and so with another index
    for name in (*CRITEO.categorical, *CRITEO.continuous):
        np.testing.assert_array_equal(again[name], test[name])


def test_criteo_is_frequent(criteo):
    """What the data is for: "all four ids are very frequent" (Section 3.1)."""
    _, data, top3 = criteo
    whole, top = (
        frequencies(d, batch_sizes=[64], progress=False).summary.iloc[-1] for d in (data, top3)
    )
    assert whole["rare_64"] > 0.8
    assert top["rare_64"] < 0.1
    assert top["ids"] <= 4 * 26


@pytest.mark.parametrize("field", SPEC.ids)
def test_counts_of_the_top_k_data(data, top3, field):
    counts = top3.counts(field)
    before = raw_ids(data, field).value_counts()
    kept = top_by_pandas(raw_ids(data, field), 3)
    assert counts["id"].tolist() == list(range(len(counts)))
    assert counts["raw"].iloc[:3].tolist() == [None, None, None]
    assert counts["raw"].iloc[3:].tolist() == [name for name in kept if name != "missing"]
    missing = before["missing"] if "missing" in kept else 0
    assert counts["count"].iloc[:3].tolist() == [0, missing, before.drop(kept).sum()]
    assert counts["count"].iloc[3:].tolist() == before[counts["raw"].iloc[3:]].tolist()
    seen = read(top3.train_files)[field].explode().dropna().astype(int).value_counts()
    held = counts[counts["count"] > 0].set_index("id")["count"]
    assert held.to_dict() == seen.to_dict()
    assert top3.cardinalities[field] == len(counts)


def test_the_folder_is_whole(data, top3):
    assert {p.name for p in top3.path.iterdir()} == {
        *(".merlin", "counts", "prepare.json", "schema.pbtxt"),
        *("test", "train", "valid", "workflow"),
    }
    assert (top3.rows, top3.seed, top3.spec) == (data.rows, data.seed, data.spec)
    for old, new in zip(
        [*data.train_files, *data.test_files], [*top3.train_files, *top3.test_files], strict=True
    ):
        assert old.name == new.name
        assert pq.read_schema(old).equals(pq.read_schema(new))
        groups = [
            [m.row_group(i).num_rows for i in range(m.num_row_groups)]
            for m in (pq.read_metadata(old), pq.read_metadata(new))
        ]
        assert groups[0] == groups[1]  # so that the loader's order is the same


def test_schema_and_vocabularies_are_nvtabulars_own(log, data, top3, tmp_path):
    """Against stock Categorify with max_size, on the rows that are not missing."""
    for field in ("a.b-c", "rarely_missing"):
        train = log[[field]].iloc[: data.rows["train"]]
        out = tmp_path / field
        stock = nvt.Workflow([field] >> nvt.ops.Categorify(out_path=str(out), max_size=6))
        stock.fit(nvt.Dataset(train.dropna()))
        theirs, ours = stock.output_schema[field], top3.schema[field]
        assert ours.int_domain == theirs.int_domain
        for name in ("max_size", "embedding_sizes", "freq_threshold"):
            assert ours.properties[name] == theirs.properties[name]
        expected, found = (
            pd.read_parquet(folder / "categories" / f"unique.{field}.parquet")
            for folder in (out, top3.path / "workflow")
        )
        pd.testing.assert_frame_equal(found, expected, check_dtype=False)
    schema = top3.schema
    assert schema.select_by_tag(Tags.TARGET).column_names == ["y"]
    assert schema.column_names == data.schema.column_names
    assert schema["few"].properties["max_size"] == 0  # nothing was merged: never trained
    assert schema["user"].properties["max_size"] == top3.cardinalities["user"] == 5


def test_missing_ids_stay_or_go(log, data, top3):
    train, before = read(top3.train_files), read(data.train_files)
    assert (train["user"] == 1).equals(before["user"] == 1)  # among the three
    assert (before["user"] == 1).any()
    gone = before["rarely_missing"] == 1
    assert gone.any()
    assert (train["rarely_missing"][gone] == 2).all()
    rows = pd.DataFrame(
        {
            "user": ["never seen", None, ""],
            "rarely_missing": ["never seen", None, ""],
            "a.b-c": [None, None, None],
            "few": ["x", "never seen", None],
            "price": [1.0, 2.0, 3.0],
            "genres": [["never seen", "g1"], [], None],
        }
    )
    out = top3.workflow().remove_inputs(["y"]).transform(rows)
    assert out["user"].tolist() == [2, 1, 1]
    assert out["rarely_missing"].tolist() == [2, 2, 2]
    assert out["a.b-c"].tolist() == [2, 2, 2]
    assert out["few"].tolist() == [3, 2, 2]
    assert [list(ids) for ids in out["genres"]] == [[2, 3], [], []]


def test_lists_are_mapped_id_by_id(log, data, top3):
    kept = top_by_pandas(raw_ids(data, "genres"), 3)
    code = {name: i + 3 for i, name in enumerate(kept)}
    expected = [[code.get(g, 2) for g in row] for row in log["genres"]]
    test = read(top3.test_files)["genres"]
    assert [list(row) for row in test] == expected[data.rows["train"] :]
    assert any(list(row).count(2) > 1 for row in test)
    again = top3.workflow().transform(log.iloc[data.rows["train"] :])
    assert [list(row) for row in again["genres"]] == [list(row) for row in test]
    assert [len(row) for row in read(top3.train_files)["genres"]] == [
        len(row) for row in read(data.train_files)["genres"]
    ]


def test_more_ids_than_there_are_is_what_it_was(data, tmp_path):
    same = keep_top_ids(data, 10_000, tmp_path / "same", progress=False)
    for old, new in zip(data.train_files, same.train_files, strict=True):
        pd.testing.assert_frame_equal(pd.read_parquet(new), pd.read_parquet(old))
    assert same.cardinalities == data.cardinalities
    assert all(same.schema[field].properties["max_size"] == 0 for field in SPEC.ids)


def test_ids_below_a_threshold_are_among_the_others(log, top3, tmp_path):
    rare = made(log, tmp_path, dataclasses.replace(SPEC, freq_threshold=5, hash_buckets=3))
    again = keep_top_ids(rare, 3, tmp_path / "top3", progress=False)
    for part in ("train_files", "test_files"):
        pd.testing.assert_frame_equal(read(getattr(again, part)), read(getattr(top3, part)))
    assert again.cardinalities == top3.cardinalities
    assert again.spec.freq_threshold == 0
    assert again.spec.hash_buckets == 1
    rows = log.iloc[:500]
    for field in SPEC.categorical:
        expected = top3.workflow().transform(rows)[field]
        assert again.workflow().transform(rows)[field].tolist() == expected.tolist()
