"""Raw logs to prepared data, against pandas, NumPy and stock NVTabular as oracles."""

import gzip
import os
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from merlin_cowclip.workflows.data.prepare import pipeline
from merlin_cowclip.workflows.data.prepare.pipeline import prepare
from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.data.sources import csv
from merlin_cowclip.workflows.data.spec import AVAZU, CRITEO, DatasetSpec, Split
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.quiet import quiet_imports

with quiet_imports():
    import nvtabular as nvt
    from merlin.schema import Tags
    from nvtabular import ops

ROWS = 6_000
SPEC = DatasetSpec(
    name="toy",
    label="y",
    categorical=("user", "item"),
    continuous=("price", "constant"),
    lists=("genres",),
    split=Split("random", 0.2, valid=0),
)


def last(share: float) -> Split:
    """The last rows for testing, no validation part."""
    return Split("sequential", share, valid=0)


def make_log(rows: int = ROWS, seed: int = 0) -> pd.DataFrame:
    """Raw rows: ids as text, numbers as floats, None or NaN where missing."""
    random = np.random.default_rng(seed)
    users = random.zipf(1.5, rows) % 900
    genres = [[f"g{g}" for g in random.integers(0, 8, random.integers(0, 4))] for _ in range(rows)]
    return pd.DataFrame(
        {
            "row": np.arange(rows),  # not in the spec: must be dropped
            "y": (random.random(rows) < 0.3).astype("int64"),
            "user": [None if u % 11 == 0 else f"u{u}" for u in users],
            "item": random.integers(0, 50, rows).astype(str),
            "price": np.where(random.random(rows) < 0.1, np.nan, random.normal(5, 3, rows)),
            "constant": 7.0,
            "genres": genres,
        }
    )


def write_csv(log: pd.DataFrame, path: Path) -> Path:
    log.assign(genres=log["genres"].map("|".join)).to_csv(path, index=False)
    return path


def read(files: list[Path]) -> pd.DataFrame:
    return pd.concat([pd.read_parquet(file) for file in files], ignore_index=True)


def quick(spec, inputs, out, **options) -> PreparedData:
    return prepare(spec, inputs, out, progress=False, **options)


def as_rows(frame: pd.DataFrame, columns: list[str]) -> list[tuple]:
    lists = [c for c in columns if c == "genres"]
    frame = frame.assign(**{c: frame[c].map(tuple) for c in lists})
    return sorted(frame[columns].itertuples(index=False, name=None))


@pytest.fixture(scope="module")
def log():
    return make_log()


@pytest.fixture(scope="module")
def prepared(log, tmp_path_factory):
    home = tmp_path_factory.mktemp("toy")
    return quick(SPEC, [write_csv(log, home / "log.csv")], home / "data", seed=1)


@pytest.fixture(scope="module")
def decoded(prepared):
    """Both parts with their ids turned back into text through counts/."""
    parts = {}
    for part, files in (("train", prepared.train_files), ("test", prepared.test_files)):
        frame = read(files)
        for field in ("user", "item"):
            frame[field] = prepared.counts(field)["raw"].to_numpy()[frame[field]]
        parts[part] = frame
    return parts


# What is written


def test_folder_and_record(prepared):
    names = sorted(p.name for p in prepared.path.iterdir())
    assert names == [
        *(".merlin", "counts", "prepare.json", "schema.pbtxt"),
        *("test", "train", "valid", "workflow"),
    ]
    assert prepared.spec == SPEC
    assert prepared.seed == 1
    assert prepared.rows == {"train": 4_800, "valid": 0, "test": 1_200}
    assert len(read(prepared.train_files)) == 4_800
    assert len(read(prepared.test_files)) == 1_200
    assert len(prepared.train_files) >= 4
    assert all(pq.ParquetFile(f).num_row_groups >= 4 for f in prepared.train_files)
    assert {p.name for p in (prepared.path / "workflow/categories").iterdir()} == {
        f"unique.{field}.{end}"
        for field in ("genres", "item", "user")
        for end in ("parquet", "hashes.npy", "places.npy")
    }
    assert list(prepared.path.parent.glob(".*")) == []
    schema = pq.read_schema(prepared.train_files[0])
    assert dict(zip(schema.names, schema.types, strict=True)) == {
        "y": pa.int64(),
        "price": pa.float32(),
        "constant": pa.float32(),
        "user": pa.int64(),
        "item": pa.int64(),
        "genres": pa.list_(pa.int64()),
    }


def test_every_row_is_in_one_part_once(log, prepared):
    train = read(prepared.train_files)
    workflow = prepared.workflow()
    expected = workflow.transform(log.drop(columns="row"))
    columns = ["y", "user", "item", "price", "genres"]
    both = pd.concat([train, read(prepared.test_files)])
    assert as_rows(both, columns) == as_rows(expected, columns)


def test_random_split_takes_rows_from_all_over_and_test_keeps_the_order(tmp_path, log):
    # price is the row's number here, so that rows can be told apart
    spec = DatasetSpec("rows", "y", ("item",), ("price",), split=Split("random", 0.2, valid=0))
    log = log.assign(price=np.arange(ROWS, dtype=float))
    data = quick(spec, [write_csv(log, tmp_path / "a.csv")], tmp_path / "out", part_rows=700)
    low, high = data.record["ranges"]["price"]
    test, train = (
        np.rint(read(files)["price"] * (high - low) + low).astype(int)
        for files in (data.test_files, data.train_files)
    )
    assert len(data.train_files) == 7  # 4800 rows, at most 700 each
    assert len(test) == 1_200
    assert test.is_monotonic_increasing
    assert not set(test) & set(train)
    assert len(set(train)) == 4_800
    assert 400 < np.median(test) - 2_400 < 800  # all over the log
    # Fully shuffled: each quarter of the training file order spans the log.
    for quarter in np.array_split(train.to_numpy(), 4):
        assert abs(quarter.mean() - (ROWS - 1) / 2) < 200
    assert abs(np.corrcoef(train[:-1], train[1:])[0, 1]) < 0.1


def test_sequential_split_takes_the_last_rows(tmp_path, log):
    spec = DatasetSpec("rows", "y", ("item",), split=last(0.25))
    data = quick(spec, [write_csv(log, tmp_path / "a.csv")], tmp_path / "out")
    assert data.rows == {"train": 4_500, "valid": 0, "test": 1_500}
    raw = data.counts("item")["raw"].to_numpy()
    test, train = read(data.test_files), read(data.train_files)
    assert raw[test["item"]].tolist() == log["item"].iloc[4_500:].tolist()
    assert sorted(raw[train["item"]]) == sorted(log["item"].iloc[:4_500])
    assert raw[train["item"]].tolist() != log["item"].iloc[:4_500].tolist()


@pytest.mark.parametrize("field", ["user", "item"])
def test_counts_are_the_training_parts_value_counts(prepared, decoded, field):
    counts = prepared.counts(field)
    assert counts["id"].tolist() == list(range(len(counts)))
    assert counts["raw"].iloc[:3].tolist() == [None, None, None]
    train = decoded["train"][field]
    expected = train.value_counts()
    real = counts.iloc[3:].set_index("raw")["count"]
    assert real.to_dict() == expected.to_dict()
    assert real.is_monotonic_decreasing
    assert counts["count"].iloc[:3].tolist() == [0, train.isna().sum(), 0]
    assert counts["count"].sum() == prepared.rows["train"]
    assert prepared.cardinalities[field] == len(counts)


def test_missing_ids_are_1_and_unseen_ids_are_2(log, prepared, decoded):
    test = read(prepared.test_files)
    missing = (test["user"] == 1).sum() + (read(prepared.train_files)["user"] == 1).sum()
    assert missing == log["user"].isna().sum() > 0
    # A user that only the test part holds: known from the log's counts less training's.
    rest = log["user"].value_counts().sub(decoded["train"]["user"].value_counts(), fill_value=0)
    unseen = rest[~rest.index.isin(decoded["train"]["user"].dropna().unique())].sum()
    assert (test["user"] == 2).sum() == unseen > 0
    assert (read(prepared.train_files)["user"] != 2).all()


def test_numbers_are_scaled_by_the_training_parts_range_and_clipped(tmp_path):
    random = np.random.default_rng(0)
    log = make_log(2_000)
    log["price"] = random.normal(5, 3, 2_000)
    log.loc[::10, "price"] = np.nan
    log.loc[1_900, "price"] = 1e6  # in the test part: the last tenth
    log.loc[1_901, "price"] = -1e6
    log["constant"] = np.where(np.arange(2_000) == 1_902, 9.0, 0.0)  # constant in training
    spec = DatasetSpec("n", "y", ("item",), ("price", "constant"), split=last(0.1))
    data = quick(spec, [write_csv(log, tmp_path / "a.csv")], tmp_path / "out")
    filled = log["price"].fillna(0).to_numpy()
    low, high = filled[:1_800].min(), filled[:1_800].max()
    expected = np.clip((filled - low) / (high - low), 0, 1).astype(np.float32)
    test, train = read(data.test_files), read(data.train_files)
    np.testing.assert_array_equal(test["price"], expected[1_800:])
    np.testing.assert_array_equal(np.sort(train["price"]), np.sort(expected[:1_800]))
    assert test["price"].iloc[[100, 101]].tolist() == [1.0, 0.0]
    assert (train["constant"] == 0).all()
    assert np.isfinite(test["constant"]).all()
    assert test["constant"].iloc[102] == 1.0


def test_lists(log, prepared):
    train = read(prepared.train_files)
    counts = prepared.counts("genres")
    seen = pd.Series(np.concatenate(train["genres"].tolist())).value_counts()
    assert counts.set_index("id")["count"].loc[3:].to_dict() == seen.to_dict()
    assert set(counts["raw"].iloc[3:]) == {f"g{i}" for i in range(8)}
    lengths = pd.concat([train, read(prepared.test_files)])["genres"].map(len)
    expected = log["genres"].map(len)
    assert lengths.value_counts().to_dict() == expected.value_counts().to_dict()
    assert (lengths == 0).any()  # an empty cell is an empty list


def test_schema(prepared):
    schema = prepared.schema
    assert schema.column_names == ["y", *SPEC.fields]
    tagged = {
        tag: schema.select_by_tag(tag).column_names for tag in (Tags.TARGET, Tags.CATEGORICAL)
    }
    assert tagged == {Tags.TARGET: ["y"], Tags.CATEGORICAL: ["user", "item", "genres"]}
    assert schema.select_by_tag(Tags.CONTINUOUS).column_names == ["price", "constant"]
    assert schema.select_by_tag(Tags.BINARY_CLASSIFICATION).column_names == ["y"]
    for field, cardinality in prepared.cardinalities.items():
        assert schema[field].int_domain.max == cardinality - 1
    assert schema["genres"].is_list
    assert schema["genres"].is_ragged
    assert not schema["user"].is_list
    assert schema["price"].dtype.name == "float32"
    assert str(prepared.path.parent) not in (prepared.path / "schema.pbtxt").read_text()


# Determinism


def test_the_same_seed_gives_the_same_rows_in_the_same_order(tmp_path, log, prepared, monkeypatch):
    path = write_csv(log, tmp_path / "log.csv")
    monkeypatch.setattr(csv, "BLOCK_BYTES", 20_000)  # other batches, other threads' luck
    again = quick(SPEC, [path], tmp_path / "again", seed=1)
    for old, new in zip(
        [*prepared.train_files, *prepared.test_files],
        [*again.train_files, *again.test_files],
        strict=True,
    ):
        assert old.read_bytes() == new.read_bytes()
    other = quick(SPEC, [path], tmp_path / "other", seed=2)
    assert not read(other.train_files)["price"].equals(read(again.train_files)["price"])


def test_pieces_give_the_same_as_the_whole(tmp_path, log, prepared):
    for i, part in enumerate(np.array_split(np.arange(ROWS), 3)):
        write_csv(log.iloc[part], tmp_path / f"log-{i}.csv")
    write_csv(log.iloc[[]], tmp_path / "nothing.txt")
    pieces = quick(SPEC, [tmp_path / "log-*.csv"], tmp_path / "out", seed=1)
    pd.testing.assert_frame_equal(read(pieces.train_files), read(prepared.train_files))


def test_gzip_of_two_members_gives_the_same_as_plain_text(tmp_path, log, prepared):
    """As `cat a.gz b.gz` makes them."""
    text = write_csv(log, tmp_path / "log.csv").read_bytes()
    half = text.index(b"\n", len(text) // 2) + 1
    zipped = gzip.compress(text[:half]) + gzip.compress(text[half:])
    (tmp_path / "log.csv.gz").write_bytes(zipped)
    same = quick(SPEC, [tmp_path / "log.csv.gz"], tmp_path / "out", seed=1)
    pd.testing.assert_frame_equal(read(same.train_files), read(prepared.train_files))


def test_the_last_of_a_globs_files_is_the_last_by_number(tmp_path):
    for day in range(1, 12):
        (tmp_path / f"day_{day}").mkdir()
        (tmp_path / f"day_{day}" / "log.csv").write_text(f"y,day\n0,d{day}\n1,d{day}\n")
    spec = DatasetSpec("days", "y", ("day",), split=last(0.2))
    data = quick(spec, [tmp_path / "day_*" / "log.csv"], tmp_path / "out")
    assert data.counts("day")["raw"].iloc[3:].tolist() == sorted(f"d{day}" for day in range(1, 10))


# The saved workflow


def test_saved_workflow_gives_the_same_after_the_folder_has_moved(tmp_path, log, prepared):
    moved = tmp_path / "moved"
    shutil.copytree(prepared.path, moved)
    workflow = PreparedData.open(moved).workflow()
    raw = log.drop(columns="row")
    before = raw.copy()
    dataset = workflow.transform(nvt.Dataset(raw, npartitions=3))
    frame = dataset.to_ddf().compute().reset_index(drop=True)
    pd.testing.assert_frame_equal(raw, before)  # a user's frame is left alone
    counts = {f: prepared.counts(f).iloc[3:].set_index("raw")["id"] for f in SPEC.ids}
    for field in ("user", "item"):
        expected = raw[field].map(counts[field]).fillna(2).mask(raw[field].isna(), 1).astype(int)
        assert frame[field].tolist() == expected.tolist()
    expected_lists = [[counts["genres"][g] for g in row] for row in raw["genres"]]
    assert [list(row) for row in frame["genres"]] == expected_lists
    assert frame["price"].dtype == np.float32


def test_serving_frames(prepared):
    workflow = prepared.workflow().remove_inputs(["y"])
    rows = pd.DataFrame(
        {
            "user": ["never seen", None, ""],
            "item": [None, None, None],
            "price": [np.nan, 1e300, -1e300],
            "constant": [7, 7, 7],
            "genres": [["g1", "never seen"], [], None],
        }
    )
    out = workflow.transform(rows)
    assert out["user"].tolist() == [2, 1, 1]
    assert out["item"].tolist() == [1, 1, 1]  # stock Categorify fails on an all-null part
    assert out["price"].iloc[1:].tolist() == [1.0, 0.0]
    assert [len(row) for row in out["genres"]] == [2, 0, 0]
    assert out["genres"][0][1] == 2
    assert [row.tolist() for row in workflow.transform(rows[2:])["genres"]] == [[]]
    for lists, expected in (([None], [[]]), ([None, []], [[], []]), ([[None]], [[1]]), ([], [])):
        some = rows[: len(lists)].assign(genres=pd.Series(lists, dtype=object))
        out = workflow.transform(some)["genres"]
        assert (out.dtype, [row.tolist() for row in out]) == (object, expected)


@pytest.mark.parametrize("rows", [["x", None, "y"], [None, "x", "x", "y", "z"]])
def test_stock_categorify_is_wrong_on_a_shuffled_index_and_ours_is_right(tmp_path, rows):
    """If the first assertion fails, the trap is gone upstream."""
    straight = {"x": 3, "y": 4, "z": 2, None: 1}
    frame = pd.DataFrame({"a": rows}, index=np.roll(np.arange(len(rows)), 1))
    (tmp_path / "log.csv").write_text("label,a\n0,x\n1,x\n0,y\n")
    data = quick(
        DatasetSpec("t", "label", ("a",), split=last(0)), [tmp_path / "log.csv"], tmp_path / "out"
    )
    stock = nvt.Workflow(["a"] >> ops.Categorify(out_path=str(tmp_path)))
    stock.fit(nvt.Dataset(pd.DataFrame({"a": ["x", "y"]})))
    ours = data.workflow().remove_inputs(["label"])
    theirs, found = (
        one.transform(nvt.ColumnSelector(["a"]), frame)["a"].tolist()
        for one in (stock.output_node.op, ours.output_node.parents[0].op)
    )
    expected = [straight[value] for value in rows]
    assert theirs != expected
    assert found == expected


def test_statistics_are_those_that_nvtabular_would_fit(tmp_path, log, prepared):
    """Fit with NVTabular itself, on the training part's raw rows."""
    workflow = prepared.workflow()
    raw = log.drop(columns="row")
    spec = DatasetSpec("s", "y", ("user", "item"), ("price",), split=last(0.5))
    data = quick(spec, [write_csv(log, tmp_path / "a.csv")], tmp_path / "out")
    train = raw.iloc[: ROWS // 2][["y", "user", "item", "price"]]
    home = data.path / "workflow"
    ids = ["user", "item"] >> ops.Categorify(out_path=str(tmp_path / "stock"))
    unit = ["price"] >> ops.FillMissing(0) >> ops.NormalizeMinMax() >> ops.Clip(0.0, 1.0)
    stock = nvt.Workflow(ids + unit + ["y"]).fit(nvt.Dataset(train, npartitions=2))
    for field in ("user", "item"):
        files = [f / f"categories/unique.{field}.parquet" for f in (tmp_path / "stock", home)]
        theirs, ours = (  # ids of the same count may stand in another order
            pd.read_parquet(f).sort_values([f"{field}_size", field], ignore_index=True)
            for f in files
        )
        pd.testing.assert_frame_equal(ours, theirs, check_dtype=False)
    ours, theirs = data.workflow().transform(raw), stock.transform(raw)
    np.testing.assert_allclose(ours["price"], theirs["price"], atol=1e-7)
    assert stock.output_schema["user"].int_domain == data.schema["user"].int_domain
    assert workflow.output_schema["user"].int_domain.max == prepared.cardinalities["user"] - 1


# Parquet logs


def test_parquet_logs_with_integer_ids(tmp_path, log):
    spec = DatasetSpec(**{**SPEC.to_dict(), "format": "parquet", "split": last(0.2)})
    log = log.assign(
        item=log["item"].astype("int64"),
        user=log["user"].str.slice(1).astype(float),  # integers beside missing ones, as pandas has
        y=log["y"].astype(bool),
    )
    log.to_parquet(tmp_path / "a.parquet", row_group_size=1_000)
    data = quick(spec, [tmp_path / "a.parquet"], tmp_path / "out")
    test = read(data.test_files)
    items = data.counts("item")["raw"].to_numpy()[test["item"]]
    assert items.tolist() == log["item"].iloc[4_800:].astype(str).tolist()
    known = test["user"] > 2
    users = data.counts("user")["raw"].to_numpy()[test["user"][known]]
    expected = log["user"].iloc[4_800:].reset_index(drop=True)[known].astype(int).astype(str)
    assert users.tolist() == expected.tolist()
    assert test["genres"].map(len).tolist() == log["genres"].iloc[4_800:].map(len).tolist()
    again = data.workflow().transform(log.drop(columns="row"))
    assert again["item"].iloc[4_800:].tolist() == test["item"].tolist()
    assert again["user"].iloc[4_800:].tolist() == test["user"].tolist()


# Real rows


@pytest.mark.skipif("COWCLIP_REAL_DATA" not in os.environ, reason="COWCLIP_REAL_DATA is not set")
@pytest.mark.parametrize(
    ("spec", "file", "rows"),
    [
        (CRITEO, "criteo_train.txt.gz", {"train": 6_480, "valid": 720, "test": 800}),
        (AVAZU, "avazu_train.csv.gz", {"train": 6_479, "valid": 720, "test": 1_800}),
    ],
)
def test_real_rows(tmp_path, spec, file, rows):
    path = Path(os.environ["COWCLIP_REAL_DATA"]) / file
    data = quick(spec, [path], tmp_path / "out")
    assert data.rows == rows
    raw = pd.read_csv(
        path,
        sep=spec.separator,
        names=spec.columns,
        header=0 if spec.header else None,
        dtype=dict.fromkeys(spec.categorical, str),
    )
    columns = [spec.label, *spec.fields]
    parts = (data.train_files, data.valid_files, data.test_files)
    expected = data.workflow().transform(raw)
    assert as_rows(pd.concat(map(read, parts)), columns) == as_rows(expected, columns)
    for field in spec.categorical:
        assert data.counts(field)["count"].sum() == rows["train"]
    for field in spec.continuous:
        assert read(data.train_files)[field].agg(["min", "max"]).tolist() == [0.0, 1.0]


# Errors

HEAD = "y,user,item,price,constant,genres\n"
GOOD = "0,u1,5,1.5,7,g1|g2\n1,u2,6,,7,\n"


def _many(bad_line: int, bad: str) -> str:
    """A log of 3000 good rows with one bad one, on that line of the file."""
    lines = [HEAD, *GOOD.splitlines(keepends=True) * 1_500]
    lines[bad_line - 1] = bad + "\n"
    return "".join(lines)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            _many(900, "7,u1,5,1.5,7,g1"),
            "log.csv, line 900, column 'y': the label is '7' instead of '0' or '1'",
        ),
        (_many(5, "1,u1,5"), "log.csv, line 5: Expected 6 columns, got 3"),
        (
            HEAD + "0,u1,5,1.5,7,g1|g2\n" * 49 + "1,u2,6,,7,\n",
            "the test part has 10 rows with label 0 and 0 with label 1, column 'y'",
        ),
    ],
)
def test_csv_errors_say_where_and_leave_nothing(tmp_path, text, message):
    (tmp_path / "log.csv").write_text(text)
    with pytest.raises(UserError, match=message):
        quick(SPEC, [tmp_path / "log.csv"], tmp_path / "deep" / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["log.csv"]


def test_byte_order_marks_line_ends_and_quotes(tmp_path, log, prepared):
    text = write_csv(log, tmp_path / "plain.csv").read_text()
    text = text.replace("item", '"item"').replace(",u1,", ',"u1",').replace("\n", "\r\n")
    (tmp_path / "log.csv").write_bytes(b"\xef\xbb\xbf" + text.encode())
    same = quick(SPEC, [tmp_path / "log.csv"], tmp_path / "out", seed=1)
    pd.testing.assert_frame_equal(read(same.train_files), read(prepared.train_files))


@pytest.mark.parametrize("step", ["split_rows", "write_parts"])
def test_an_interruption_leaves_nothing(tmp_path, log, monkeypatch, step):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    write_csv(log, tmp_path / "log.csv")
    monkeypatch.setattr(pipeline, step, interrupt)
    with pytest.raises(KeyboardInterrupt):
        quick(SPEC, [tmp_path / "log.csv"], tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["log.csv"]


def test_a_folder_that_is_not_whole_is_refused(tmp_path, prepared):
    with pytest.raises(UserError, match="not a folder that prepare or adopt wrote"):
        PreparedData.open(tmp_path)
    (tmp_path / "prepare.json").write_text('{"format": 99}')
    with pytest.raises(UserError, match=r"prepare.json has format 99 instead of 4"):
        PreparedData.open(tmp_path)
    with pytest.raises(UserError, match=r"field must be one of 'user', 'item', 'genres'"):
        prepared.counts("price")
