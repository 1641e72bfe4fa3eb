"""`prepare --engine nvtabular`: the default engine's ids, rows and refusals, in another order."""

import copy
import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from merlin_cowclip.workflows.data.prepare.pipeline import prepare
from merlin_cowclip.workflows.data.prepared_data import PARTS, PreparedData
from merlin_cowclip.workflows.data.sources.csv import CsvSource
from merlin_cowclip.workflows.data.spec import AVAZU, CRITEO, DatasetSpec, Split
from merlin_cowclip.workflows.data.synthetic import write_synthetic
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.quiet import quiet_imports
from tests.logs import rows_of

from .dask_cluster import running_cluster, wait_for

with quiet_imports():
    from merlin_cowclip.workflows.data.prepare import nvtabular_engine

ROWS = 6_000
ENGINES = ("duckdb", "nvtabular")
OWN = DatasetSpec(
    "own",
    "y",
    ("user", "item"),
    ("price", "one"),
    ("tags",),
    null_values=("-",),
    label_values=("no", "yes"),
    split=Split("time", 0.3, "day"),
    freq_threshold={"user": 3, "tags": 4},
    hash_buckets={"tags": 5},
    non_finite="missing",
)


def own_log() -> pd.DataFrame:
    random = np.random.default_rng(3)
    users = "user-" + pd.Series(random.zipf(1.5, ROWS) % 900).astype(str)
    tags = [
        "|".join(map(str, random.zipf(1.3, random.integers(0, 5)) % 2_000))
        + random.choice(["", "|"])
        for _ in range(ROWS)
    ]
    log = pd.DataFrame(
        {
            "y": random.choice(["no", "yes"], ROWS),
            "user": users.mask(random.random(ROWS) < 0.1, "-"),
            "item": np.where(np.arange(ROWS) < ROWS * 0.9, random.integers(0, 50, ROWS), -1),
            "price": random.choice(["-", "", "inf", "1.5", "-20", "1e3"], ROWS),
            "one": 0,  # stock NormalizeMinMax makes NaN of it
            "tags": tags,
            "day": random.choice(pd.date_range("2024-01-01", "2024-02-09").astype(str), ROWS),
        }
    ).sort_values("user", ignore_index=True)  # whole chunks without a user
    return pd.concat([log, log[:50]])  # some rows twice


@pytest.fixture(autouse=True)
def _small_files(monkeypatch):
    monkeypatch.setattr(nvtabular_engine, "CHUNK_BYTES", (1 << 17, 1 << 17))
    monkeypatch.setattr(nvtabular_engine, "CELLS", 10_000)


def make_log(name: str, folder: Path) -> tuple[DatasetSpec, list[Path]]:
    """A data set with a split that both engines make alike, and its log."""
    log = folder / "log"
    if name == "own":
        own_log().to_csv(log, index=False)
        return OWN, [log]
    if name == "parquet":
        frame = own_log().drop(columns=["price"])
        frame["y"] = frame["y"] == "yes"
        frame["tags"] = frame["tags"].str.split("|")
        frame["day"] = pd.to_datetime(frame["day"])
        frame.to_parquet(log, row_group_size=1_000)
        options = {"format": "parquet", "label_values": None, "continuous": ("one",)}
        return dataclasses.replace(OWN, **options), [log]
    write_synthetic(name, log, rows=ROWS, seed=5, cardinality=2_000)
    header, *lines = log.read_text().splitlines(keepends=True)
    for part, of in (("a", lines[:1_000]), ("b", lines[1_000:2_000]), ("log", lines[2_000:])):
        (folder / part).write_text("".join([header, *of]))
    spec = {"criteo": CRITEO, "avazu": AVAZU}[name]
    split = Split("random", valid=(str(folder / "a"),), test=(str(folder / "b"),))
    return dataclasses.replace(spec, split=split, freq_threshold=4, hash_buckets=11), [log]


def quick(*arguments, **options) -> PreparedData:
    return prepare(*arguments, progress=False, **options)


def alike(one: PreparedData, other: PreparedData) -> None:
    """The same rows as sets, in held-out parts in order, and the same ids, counts and records."""
    for part in PARTS:
        frames = [rows_of(data, part) for data in (one, other)]
        if part == "train":
            frames = [rows.sort_values([*rows], ignore_index=True) for rows in frames]
        pd.testing.assert_frame_equal(*frames)
    assert pq.read_schema(one.train_files[0]).equals(pq.read_schema(other.train_files[0]))
    for field in one.spec.ids:
        pd.testing.assert_frame_equal(one.counts(field), other.counts(field))
    assert one.schema == other.schema  # its text has maps, whose order varies
    records = [copy.deepcopy(data.record) for data in (one, other)]
    means = [[r["report"]["fields"][c].pop("mean") for c in one.spec.continuous] for r in records]
    assert means[0] == pytest.approx(means[1])
    for record in records:
        del record["manifest"], record["engine"]
    assert records[0] == records[1]


@pytest.mark.parametrize(
    "name", [pytest.param("avazu", marks=pytest.mark.extended), "own", "parquet"]
)
def test_the_data_of_the_default_engine(tmp_path, name, capfd, monkeypatch):
    spec, log = make_log(name, tmp_path)
    if name == "avazu":  # many columns
        monkeypatch.setattr(nvtabular_engine, "CHUNK_BYTES", (1 << 19, 1 << 19))
        monkeypatch.setattr(nvtabular_engine, "CELLS", 100_000)
    ours = quick(spec, log, tmp_path / "duckdb", seed=3)
    options = {"seed": 3, "part_rows": 1_500, "engine": "nvtabular"}
    theirs = prepare(spec, log, tmp_path / "nvtabular", **options)
    shown = capfd.readouterr().err
    assert all(step in shown for step in ("reading", "counting", "encoding", "writing"))
    assert (ours.record["engine"], theirs.record["engine"]) == ("duckdb", "nvtabular")
    alike(ours, theirs)
    assert {"duckdb", "nvtabular"} == {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert not list(theirs.path.glob(".s*"))
    assert len(theirs.train_files) >= 3
    hashed = {name: spec.buckets_of(name) for name in spec.ids if spec.buckets_of(name) > 1}
    used = [np.count_nonzero(theirs.counts(c)["count"][2 : 2 + n]) for c, n in hashed.items()]
    assert max(used) > 2  # rare ids are in several buckets


def test_few_rows_and_two_parts(tmp_path):
    log = pd.DataFrame({"y": [0, 1] * 6, "c": [*"abcdef"] * 2, "t": range(12)})
    log.to_csv(tmp_path / "log.gz", index=False)
    spec = DatasetSpec("toy", "y", ("c",), split=Split("time", 0.25, "t", 0))
    log = [tmp_path / "log.gz"]
    data = [quick(spec, log, tmp_path / e, engine=e, part_rows=5) for e in ENGINES]
    alike(*data)
    assert data[1].rows == {"train": 9, "valid": 0, "test": 3}


def test_training_rows_are_shuffled(tmp_path):
    """Each row once; every file has rows of all of the log, in random order; by the seed."""
    log = pd.DataFrame({"y": np.arange(ROWS) % 2, "n": np.arange(ROWS), "c": "x"})
    log.to_csv(tmp_path / "log", index=False)
    spec = DatasetSpec("toy", "y", ("c",), ("n",), split=Split(valid=0.25, test=0.2))
    options = {"engine": "nvtabular", "part_rows": 1_000}
    data = [
        quick(spec, [tmp_path / "log"], tmp_path / f"data-{i}", seed=i % 2, **options)
        for i in range(3)
    ]
    frames = [pd.concat([rows_of(d, p) for p in PARTS])["n"].to_numpy() for d in data]
    assert (frames[0] == frames[2]).all()
    assert not (frames[0] == frames[1]).all()
    high = [d.record["ranges"]["n"][1] for d in data]
    numbers = [np.unique(np.round(f * h)) for f, h in zip(frames, high, strict=True)]
    assert min(map(len, numbers)) >= ROWS - 9  # a few held-out ones are clipped
    train = rows_of(data[0])["n"].to_numpy()
    assert abs(np.corrcoef(train[1:], train[:-1])[0, 1]) < 0.06  # 3.5 standard deviations
    for file in data[0].train_files:
        numbers = pd.read_parquet(file)["n"].to_numpy()
        assert 700 < len(numbers) < 1_200
        assert np.histogram(numbers, 4, (0, 1))[0].min() > 0.15 * len(numbers)
    assert (np.diff(rows_of(data[0], "test")["n"]) > 0).all()
    shares = np.array([data[0].rows[part] for part in PARTS]) / ROWS
    assert shares == pytest.approx([0.6, 0.2, 0.2], abs=0.02)


def test_vocabularies_merged_by_several_tasks(tmp_path, monkeypatch):
    """NVTabular's `split_out`, which large fields need."""
    spec, log = make_log("own", tmp_path)
    one = quick(spec, log, tmp_path / "one", engine="nvtabular")
    monkeypatch.setattr(nvtabular_engine, "SPLIT_IDS", 2_000)
    alike(one, quick(spec, log, tmp_path / "other", engine="nvtabular"))


def test_many_times_are_divided_nearly(tmp_path, monkeypatch):
    """A chunk is known by a few of its times; the boundary is one of them."""
    monkeypatch.setattr(nvtabular_engine, "SKETCH", 50)
    random = np.random.default_rng(0)
    log = pd.DataFrame({"y": random.integers(0, 2, ROWS), "c": "x", "t": random.random(ROWS)})
    log.to_csv(tmp_path / "log", index=False)
    spec = DatasetSpec("toy", "y", ("c",), split=Split("time", 0.2, "t", 0.25))
    data = quick(spec, [tmp_path / "log"], tmp_path / "data", engine="nvtabular")
    assert [data.rows[p] / ROWS for p in PARTS] == pytest.approx([0.6, 0.2, 0.2], abs=0.01)
    ends = {part: float(time) for part, time in data.record["boundaries"].items()}
    assert ends["train"] < ends["valid"] < ends["test"]
    assert (log["t"] <= ends["train"]).sum() == data.rows["train"]
    assert (log["t"] >= ends["test"]).sum() == data.rows["test"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"freq_threshold": 10_000}, "no id of 'user' occurs 10,000 times in the training rows"),
        ({"user": None}, "column 'user' has no value in the .* training rows"),
        ({"y": "maybe"}, "log, line 2, column 'y': the label is 'maybe'"),
        ({"y": "no"}, "the training part has .* rows with label 0 and 0 with label 1"),
        ({"day": "2024-01-01"}, "all 6,050 rows to divide have the same time, column 'day'"),
        ({"price": ["1e308", "-1e308"] * 3025}, "the range of column 'price' is too large"),
    ],
)
def test_bad_logs_are_refused_alike(tmp_path, change, message):
    frame = own_log()
    columns = {name: value for name, value in change.items() if name in frame}
    frame.assign(**columns).to_csv(tmp_path / "log", index=False)
    spec = dataclasses.replace(OWN, **({} if columns else change))
    for engine in ENGINES:
        with pytest.raises(UserError, match=message):
            quick(spec, [tmp_path / "log"], tmp_path / "out", engine=engine)
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_times_of_two_forms_in_two_files(tmp_path):
    for name, days in (("a", ["2024-01-01", "2024-01-02"]), ("b", ["7", "8"])):
        own_log().assign(day=days * 3_025).to_csv(tmp_path / name, index=False)
    for engine in ENGINES:
        with pytest.raises(UserError, match="column 'day' has numbers and dates"):
            quick(OWN, [tmp_path / "a", tmp_path / "b"], tmp_path / "out", engine=engine)


def test_arguments_are_checked(tmp_path):
    own_log().to_csv(tmp_path / "log", index=False)
    last = dataclasses.replace(OWN, split=Split("sequential"))
    shared = dataclasses.replace(OWN, shared=(("item", "user"),), freq_threshold=3)
    for spec, options, message in (
        (OWN, {"engine": "polars"}, "engine must be 'duckdb' or 'nvtabular'"),
        (OWN, {"engine": "duckdb", "device": "gpu"}, "device 'gpu', workers and scheduler need"),
        (OWN, {"engine": "duckdb", "scheduler": "x:1"}, "workers and scheduler need"),
        (OWN, {"workers": 2, "scheduler": "x:1"}, "Leave workers out"),
        (last, {"engine": "nvtabular"}, "has no sequential split. Split by time or at random"),
        (shared, {"engine": "nvtabular"}, "does not offer 'shared' of the specification"),
    ):
        with pytest.raises(UserError, match=message):
            quick(spec, [tmp_path / "log"], tmp_path / "out", **options)
    assert [p.name for p in tmp_path.iterdir()] == ["log"]


def test_names_that_stock_categorify_uses_itself(tmp_path):
    random = np.random.default_rng(0)
    names = ("order", "labels")
    log = pd.DataFrame({name: random.choice([*"abcdefgh"], 200) for name in names})
    log = log.assign(y=np.arange(200) % 2, day=np.arange(200) // 50)
    log.to_csv(tmp_path / "log", index=False)
    spec = DatasetSpec("toy", "y", names, split=Split("time", 0.25, "day"))
    alike(*[quick(spec, [tmp_path / "log"], tmp_path / e, engine=e) for e in ENGINES])


# A cluster that somebody else started


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with running_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.mark.extended
def test_a_failure_on_a_cluster_leaves_nothing(cluster, tmp_path):
    frame = own_log()
    frame["y"].iloc[-1] = "maybe"
    frame.to_csv(tmp_path / "log", index=False)
    with pytest.raises(UserError, match="line 6051, column 'y': the label is 'maybe'"):
        prepare(OWN, [tmp_path / "log"], tmp_path / "out", scheduler=cluster.address)
    assert [p.name for p in tmp_path.iterdir()] == ["log"]


@pytest.mark.extended
def test_a_worker_dies_while_ids_are_counted(cluster, tmp_path, monkeypatch):
    """The result is complete, both workers worked, and no file is read by this process."""
    from distributed import Client, get_task_stream

    spec, log = make_log("own", tmp_path)
    ours = quick(spec, log, tmp_path / "duckdb", seed=3)
    (cluster.home / "slow").touch()
    monkeypatch.setattr(nvtabular_engine, "CHUNK_BYTES", (1 << 14, 1 << 14))

    def kill_one() -> None:
        wait_for(lambda: list(cluster.home.glob(f"fit-{cluster.workers[0].pid}")))
        cluster.workers[0].kill()

    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
        for reader in ("pyarrow.parquet.ParquetFile.read", "pandas.read_parquet"):
            patch.setattr(reader, None)
        patch.setattr(CsvSource, "read", None)
        observer = Client(cluster.address, set_as_default=False)
        with observer, get_task_stream(observer) as stream:
            observer.run(exec, f"import {nvtabular_engine.__name__}")  # which takes seconds
            killing = pool.submit(kill_one)
            options = {"seed": 3, "scheduler": cluster.address}
            data = prepare(spec, log, tmp_path / "data", **options)
            killing.result()
    assert cluster.workers[0].wait() != 0
    alike(ours, PreparedData.open(data.path))
    workers = {task["worker"] for task in stream.data if task["key"].startswith("reading")}
    assert len(workers) == 2
