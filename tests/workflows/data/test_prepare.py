"""Raw logs to prepared data, against pandas, NumPy and stock NVTabular as oracles."""

import dataclasses
import shutil

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from merlin_cowclip.workflows.data.prepare import columns, pipeline, shuffle
from merlin_cowclip.workflows.data.prepare.pipeline import prepare
from merlin_cowclip.workflows.data.prepared_data import PARTS, PreparedData
from merlin_cowclip.workflows.data.sources import csv
from merlin_cowclip.workflows.data.spec import AVAZU, CRITEO, DatasetSpec, Split
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.quiet import quiet_imports
from tests.logs import CLICKS, click_log, rows_of, write_csv

with quiet_imports():
    import nvtabular as nvt
    from nvtabular import ops

ROWS, TRAIN = 6_000, 4_800
SPEC = dataclasses.replace(CLICKS, split=Split("random", 0.2, valid=0))
LAST = Split("sequential", 0.2, valid=0)


def quick(spec, inputs, out, **options) -> PreparedData:
    return prepare(spec, inputs, out, progress=False, **options)


@pytest.fixture(scope="module")
def log():
    return click_log(ROWS, users=900, missing=0.1)


@pytest.fixture(scope="module")
def prepared(log, tmp_path_factory):
    home = tmp_path_factory.mktemp("clicks")
    return quick(SPEC, [write_csv(log, home / "log.csv")], home / "data", seed=1)


def raw_ids(data: PreparedData, field: str, part: str = "train") -> pd.Series:
    """The ids of a field as text again; None for missing and unknown ones."""
    return pd.Series(data.counts(field)["raw"].to_numpy()[rows_of(data, part)[field]])


# What is written


def test_folder_and_record(prepared):
    assert {path.name for path in prepared.path.iterdir()} == {
        *(".merlin", "counts", "prepare.json", "schema.pbtxt", "workflow"),
        *PARTS,
    }
    assert (prepared.spec, prepared.seed) == (SPEC, 1)
    assert prepared.rows == {"train": TRAIN, "valid": 0, "test": ROWS - TRAIN}
    assert [len(rows_of(prepared, part)) for part in PARTS] == [TRAIN, 0, ROWS - TRAIN]
    assert len(prepared.train_files) >= 4
    assert all(pq.ParquetFile(file).num_row_groups >= 4 for file in prepared.train_files)
    assert list(prepared.path.parent.glob(".*")) == []
    types = {"y": pa.int64(), "user": pa.int64(), "item": pa.int64(), "price": pa.float32()}
    schema = pq.read_schema(prepared.train_files[0])
    kinds = dict(zip(schema.names, schema.types, strict=True))
    assert kinds == {**types, "genres": pa.list_(pa.int64())}
    with pytest.raises(UserError, match=r"field must be one of 'user', 'item', 'genres'"):
        prepared.counts("price")


def test_a_random_split_takes_rows_from_all_over_and_test_keeps_the_order(tmp_path, log):
    spec = DatasetSpec("rows", "y", ("item",), ("serial",), split=SPEC.split)
    log = log.assign(serial=np.arange(ROWS, dtype=float))
    data = quick(spec, [write_csv(log, tmp_path / "a.csv")], tmp_path / "out", part_rows=700)
    low, high = data.record["ranges"]["serial"]
    test, train = (
        np.rint(rows_of(data, part)["serial"] * (high - low) + low).astype(int)
        for part in ("test", "train")
    )
    assert len(data.train_files) == 7  # 4,800 rows, at most 700 each
    assert len(test) == ROWS - TRAIN
    assert test.is_monotonic_increasing
    assert not set(test) & set(train)
    assert len(set(train)) == TRAIN
    assert 400 < np.median(test) - 2_400 < 800  # all over the log
    # Fully shuffled: each quarter of the training file order spans the log.
    for quarter in np.array_split(train.to_numpy(), 4):
        assert abs(quarter.mean() - (ROWS - 1) / 2) < 200
    assert abs(np.corrcoef(train[:-1], train[1:])[0, 1]) < 0.1


def test_counts_are_the_training_parts_value_counts(log, prepared):
    counts, train = prepared.counts("user"), raw_ids(prepared, "user")
    assert counts["id"].tolist() == list(range(len(counts)))
    assert counts["raw"][:3].tolist() == [None, None, None]
    in_log = counts[3:].set_index("raw")["count"]
    assert in_log.to_dict() == train.value_counts().to_dict()
    assert in_log.is_monotonic_decreasing
    assert counts["count"][:3].tolist() == [0, train.isna().sum(), 0]
    assert prepared.cardinalities["user"] == len(counts)
    test = rows_of(prepared, "test")["user"]
    assert (test == 1).sum() + train.isna().sum() == log["user"].isna().sum() > 0
    # A user that only the test part has: known from the log's counts less training's.
    rest = log["user"].value_counts().sub(train.value_counts(), fill_value=0)
    assert (test == 2).sum() == rest[~rest.index.isin(train)].sum() > 0


def test_lists(log, prepared):
    both = pd.concat([rows_of(prepared, part)["genres"] for part in ("train", "test")])
    assert both.map(len).value_counts().to_dict() == log["genres"].map(len).value_counts().to_dict()
    counts = prepared.counts("genres")
    assert set(counts["raw"][3:]) == {f"g{i}" for i in range(6)}
    ids = rows_of(prepared)["genres"].explode().dropna().value_counts()
    assert counts.set_index("id")["count"][3:].to_dict() == ids.to_dict()


def test_numbers_are_scaled_by_the_training_parts_range_and_clipped(tmp_path, log):
    log = log.assign(constant=np.where(np.arange(ROWS) == TRAIN + 2, 9.0, 0.0))
    log.loc[[TRAIN, TRAIN + 1], "price"] = [1e6, -1e6]  # in the test part
    spec = DatasetSpec("n", "y", ("item",), ("price", "constant"), split=LAST)
    data = quick(spec, [write_csv(log, tmp_path / "a.csv")], tmp_path / "out")
    filled = log["price"].fillna(0).to_numpy()
    low, high = filled[:TRAIN].min(), filled[:TRAIN].max()
    expected = np.clip((filled - low) / (high - low), 0, 1).astype(np.float32)
    train, test = rows_of(data), rows_of(data, "test")
    np.testing.assert_array_equal(test["price"], expected[TRAIN:])
    np.testing.assert_array_equal(np.sort(train["price"]), np.sort(expected[:TRAIN]))
    assert (train["constant"] == 0).all()
    assert test["constant"][:4].tolist() == [0, 0, 1, 0]


# However the rows are cut


def test_the_seed_decides_the_rows_and_their_order(tmp_path, log, prepared, monkeypatch):
    """Whether one file is read in large blocks, or several in small ones."""
    for i, part in enumerate(np.array_split(np.arange(ROWS), 3)):
        write_csv(log.iloc[part], tmp_path / f"log-{i}.csv")
    write_csv(log[:0], tmp_path / "log-9.csv")
    monkeypatch.setattr(csv, "BLOCK_BYTES", 20_000)
    again = quick(SPEC, [tmp_path / "log-*.csv"], tmp_path / "again", seed=1)
    for part in ("train", "test"):
        pd.testing.assert_frame_equal(rows_of(again, part), rows_of(prepared, part))
    other = quick(SPEC, [tmp_path / "log-*.csv"], tmp_path / "other", seed=2)
    assert not rows_of(other)["price"].equals(rows_of(again)["price"])


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_chunks_give_the_same_as_the_whole(tmp_path, log, monkeypatch, kind):
    """In little memory, with temporary files elsewhere."""
    spec = dataclasses.replace(SPEC, format=kind, split=LAST)
    if kind == "csv":
        write_csv(log, tmp_path / "log.csv")
    else:
        log.to_parquet(tmp_path / "log.parquet", row_group_size=500)
    (tmp_path / "scratch").mkdir()
    inputs = [tmp_path / f"log.{kind}"]
    expected = quick(spec, inputs, tmp_path / "expected", seed=1)
    monkeypatch.setattr(pipeline, "CHUNK_BYTES", 10_000)
    monkeypatch.setattr(columns, "PIECE_BYTES", 5_000)  # several to a chunk
    monkeypatch.setattr(shuffle, "MEMORY_SHARE", 10_000)  # several runs
    chunks, write = [], pipeline.write_pieces

    def noted(*job, **options):
        chunks.append(job)
        assert any((tmp_path / "scratch").iterdir())
        return write(*job, **options)

    monkeypatch.setattr(pipeline, "write_pieces", noted)
    options = {"seed": 1, "memory": "1GB", "scratch": tmp_path / "scratch"}
    chunked = quick(spec, inputs, tmp_path / "chunked", **options)
    assert len(chunks) > 5
    assert not any((tmp_path / "scratch").iterdir())
    for part in ("train", "test"):
        pd.testing.assert_frame_equal(rows_of(chunked, part), rows_of(expected, part))
    for field in spec.ids:
        pd.testing.assert_frame_equal(chunked.counts(field), expected.counts(field))
    assert chunked.record["ranges"] == expected.record["ranges"]
    assert chunked.report == expected.report


def test_an_interruption_leaves_nothing(tmp_path, log, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    write_csv(log, tmp_path / "log.csv")
    monkeypatch.setattr(pipeline, "write_parts", interrupt)
    with pytest.raises(KeyboardInterrupt):
        quick(SPEC, [tmp_path / "log.csv"], tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["log.csv"]


# The saved workflow


def test_the_saved_workflow_gives_the_same_after_the_folder_has_moved(tmp_path, log, prepared):
    moved = PreparedData.open(shutil.copytree(prepared.path, tmp_path / "moved"))
    before = log.copy()
    dataset = moved.workflow().transform(nvt.Dataset(log, npartitions=3))
    frame = dataset.to_ddf().compute().reset_index(drop=True)
    pd.testing.assert_frame_equal(log, before)  # a user's frame is left alone
    ids = {f: prepared.counts(f)[3:].set_index("raw")["id"] for f in SPEC.ids}
    for field in ("user", "item"):
        raw = log[field].map(str, na_action="ignore")
        expected = raw.map(ids[field]).fillna(2).mask(raw.isna(), 1).astype(int)
        assert frame[field].tolist() == expected.tolist()
    assert frame["genres"].map(list).tolist() == [
        [ids["genres"][g] for g in of] for of in log.genres
    ]
    assert frame["price"].dtype == np.float32


def test_serving_frames(prepared):
    workflow = prepared.workflow().remove_inputs(["y"])
    rows = pd.DataFrame(
        {
            "user": ["never seen", None, ""],
            "item": [None, None, None],  # on which stock Categorify fails
            "price": [np.nan, 1e300, -1e300],
            "genres": [["g1", "never seen"], [], None],
        },
        index=[1, 2, 0],  # for which stock Categorify gives rows the ids of others
    )
    out = workflow.transform(rows)
    assert out.index.tolist() == [1, 2, 0]
    assert out["user"].tolist() == [2, 1, 1]
    assert out["item"].tolist() == [1, 1, 1]
    assert out["price"].tolist()[1:] == [1.0, 0.0]
    assert out["genres"].map(len).tolist() == [2, 0, 0]
    assert out["genres"].iloc[0][1] == 2
    for lists, expected in (([None], [[]]), ([None, []], [[], []]), ([[None]], [[1]]), ([], [])):
        some = rows[: len(lists)].assign(genres=pd.Series(lists, rows.index[: len(lists)], object))
        out = workflow.transform(some)["genres"]
        assert (out.dtype, [row.tolist() for row in out]) == (object, expected)


def test_statistics_are_those_that_nvtabular_would_fit(tmp_path, log):
    """Fit with NVTabular itself, on the training part's raw rows."""
    spec = DatasetSpec("s", "y", ("user", "item"), ("price",), split=LAST)
    data = quick(spec, [write_csv(log, tmp_path / "a.csv")], tmp_path / "out")
    raw = log[["y", "user", "item", "price"]].assign(item=log["item"].astype(str))
    ids = ["user", "item"] >> ops.Categorify(out_path=str(tmp_path / "stock"))
    unit = ["price"] >> ops.FillMissing(0) >> ops.NormalizeMinMax() >> ops.Clip(0.0, 1.0)
    stock = nvt.Workflow(ids + unit + ["y"]).fit(nvt.Dataset(raw[:TRAIN], npartitions=2))
    for field in ("user", "item"):
        file = f"categories/unique.{field}.parquet"
        theirs, ours = (  # ids of the same count may have another order
            pd.read_parquet(home / file).sort_values([f"{field}_size", field], ignore_index=True)
            for home in (tmp_path / "stock", data.path / "workflow")
        )
        pd.testing.assert_frame_equal(ours, theirs, check_dtype=False)
        assert stock.output_schema[field].int_domain == data.schema[field].int_domain
    ours, theirs = data.workflow().transform(raw), stock.transform(raw)
    np.testing.assert_allclose(ours["price"], theirs["price"], atol=1e-7)


# Other logs


def test_parquet_files_of_one_log_may_have_ids_as_numbers_or_text(tmp_path, log):
    spec = dataclasses.replace(SPEC, format="parquet", split=LAST)
    typed = log.assign(user=log["user"].str[1:].astype(float))  # as pandas has missing integers
    typed[:2_000].to_parquet(tmp_path / "a.parquet")
    texts = typed["user"].astype("Int64").astype("string")
    second = typed.assign(item=log["item"].astype(str), user=texts, y=log["y"].astype(bool))
    second[2_000:].to_parquet(tmp_path / "b.parquet")
    data = quick(spec, [tmp_path], tmp_path / "out")
    test = log[TRAIN:].reset_index(drop=True)
    assert raw_ids(data, "item", "test").tolist() == test["item"].astype(str).tolist()
    users = raw_ids(data, "user", "test")
    assert users[users.notna()].tolist() == test["user"][users.notna()].str[1:].tolist()
    assert rows_of(data, "test")["genres"].map(len).tolist() == test["genres"].map(len).tolist()
    second[2_000:].assign(price="cheap").to_parquet(tmp_path / "b.parquet")
    with pytest.raises(UserError, match=r"cannot read column 'price' of .*b.parquet: .*'cheap'"):
        quick(spec, [tmp_path / "a.parquet", tmp_path / "b.parquet"], tmp_path / "out2")


@pytest.mark.extended
@pytest.mark.parametrize(
    ("spec", "file", "rows"),
    [
        (CRITEO, "criteo_train.txt.gz", {"train": 6_480, "valid": 720, "test": 800}),
        (AVAZU, "avazu_train.csv.gz", {"train": 6_479, "valid": 720, "test": 1_800}),
    ],
)
def test_real_rows(tmp_path, real_data, spec, file, rows):
    path = real_data / file
    data = quick(spec, [path], tmp_path / "out")
    assert data.rows == rows
    header, texts = 0 if spec.header else None, dict.fromkeys(spec.categorical, str)
    raw = pd.read_csv(path, sep=spec.separator, names=spec.columns, header=header, dtype=texts)
    names = [spec.label, *spec.fields]
    expected = data.workflow().transform(raw)[names].sort_values(names, ignore_index=True)
    every = pd.concat([rows_of(data, part) for part in PARTS])[names]
    pd.testing.assert_frame_equal(every.sort_values(names, ignore_index=True), expected)
    for field in spec.categorical:
        assert data.counts(field)["count"].sum() == rows["train"]
