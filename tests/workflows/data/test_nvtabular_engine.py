"""`prepare --engine nvtabular` gives the default engine's data, up to the order of equal counts."""

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from merlin_cowclip.workflows.data.top_ids import keep_top_ids

from merlin_cowclip.workflows import TrainConfig, export, predict_logs, train
from merlin_cowclip.workflows.commands.main import main
from merlin_cowclip.workflows.data.frequencies import frequencies
from merlin_cowclip.workflows.data.prepare.pipeline import prepare
from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.data.spec import AVAZU, CRITEO, DatasetSpec, Split
from merlin_cowclip.workflows.data.synthetic import write_synthetic
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.quiet import quiet_imports

with quiet_imports():
    from nvtabular import ColumnSelector

    from merlin_cowclip.workflows.data.prepare.operators import EncodeIds

ROWS = 6_000
TOML = DatasetSpec(
    "own",
    "y",
    ("user", "item"),
    ("price", "one"),
    ("tags",),
    null_values=("-",),
    label_values=("no", "yes"),
    split=Split("sequential", 0.3, valid=0),
    freq_threshold={"user": 3, "tags": 4},
    hash_buckets={"tags": 5},
    non_finite="missing",
)


def own_log() -> pd.DataFrame:
    random = np.random.default_rng(3)
    users = "u" + pd.Series(random.zipf(1.5, ROWS) % 900).astype(str)
    tags = [
        "|".join(map(str, random.zipf(1.3, random.integers(0, 5)) % 2_000))
        + random.choice(["", "|"])
        for _ in range(ROWS)
    ]
    return pd.DataFrame(
        {
            "y": random.choice(["no", "yes"], ROWS),
            "user": users.mask(random.random(ROWS) < 0.1, "-"),
            "item": np.where(np.arange(ROWS) < ROWS * 0.9, random.integers(0, 50, ROWS), -1),
            "price": random.choice(["-", "", "inf", "1.5", "-20", "1e3"], ROWS),
            "one": 0,  # stock NormalizeMinMax makes NaN of it
            "tags": tags,
        }
    ).sort_values("user", ignore_index=True)  # whole row groups without a user


def make_log(name: str, folder: Path) -> tuple[DatasetSpec, str]:
    """A data set and its log."""
    if name == "own":
        own_log().to_csv(folder / "log", index=False)
        return TOML, str(folder / "log")
    write_synthetic(name, folder / "log", rows=ROWS, seed=5, cardinality=2_000)
    spec = {"criteo": CRITEO, "avazu": AVAZU}[name]
    rare = {"freq_threshold": 4, "hash_buckets": 11 if name == "avazu" else 1}
    return DatasetSpec.from_dict({**spec.to_dict(), **rare}), str(folder / "log")


def raw_ids(data: PreparedData, file: Path, field: str) -> pa.Array:
    """The ids of a file: special ones as they are, the others by their raw value."""
    counts = data.counts(field)
    special = "special " + counts["id"].astype(str)
    names = counts["raw"].where(counts["raw"].notna(), special).to_numpy()
    ids = pq.read_table(file, columns=[field])[field].combine_chunks()
    if field in data.spec.lists:
        return pa.ListArray.from_arrays(ids.offsets, pa.array(names[ids.flatten().to_numpy()]))
    return pa.array(names[ids.to_numpy()])


def alike(one: PreparedData, other: PreparedData) -> None:
    """The same files, rows and records, but for the numbers of ids that occur equally often."""
    files = [(*data.train_files, *data.test_files) for data in (one, other)]
    assert [f.relative_to(one.path) for f in files[0]] == [
        f.relative_to(other.path) for f in files[1]
    ]
    for ours, theirs in zip(*files, strict=True):
        assert pq.read_schema(ours).equals(pq.read_schema(theirs))
        numbers = [one.spec.label, *one.spec.continuous]
        assert pq.read_table(ours, columns=numbers).equals(pq.read_table(theirs, columns=numbers))
        for field in one.spec.ids:
            assert raw_ids(one, ours, field).equals(raw_ids(other, theirs, field)), field
    for field in one.spec.ids:
        counts = [data.counts(field) for data in (one, other)]
        assert counts[0]["count"].tolist() == counts[1]["count"].tolist()
        pd.testing.assert_frame_equal(
            *(c[["raw", "count"]].sort_values(["count", "raw"], ignore_index=True) for c in counts)
        )
    assert one.schema == other.schema  # its text has maps, whose order varies
    records = [
        {k: v for k, v in data.record.items() if k not in ("manifest", "engine")}
        for data in (one, other)
    ]
    assert records[0] == records[1]


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        ("criteo", 0),
        ("avazu", 0),
        ("own", 0),
        pytest.param("own", 2, marks=pytest.mark.extended),
    ],
)
def test_the_data_of_the_default_engine(tmp_path, name, workers, capfd):
    spec, log = make_log(name, tmp_path)
    ours = prepare(spec, [log], tmp_path / "arrow", seed=3, part_rows=1_500, progress=False)
    theirs = prepare(
        spec,
        [log],
        tmp_path / "nvtabular",
        seed=3,
        part_rows=1_500,
        workers=workers,
        engine="nvtabular",
    )
    shown = capfd.readouterr().err
    for step in ("reading", "columns", "raw rows", "fitting", "encoding", "checking"):
        assert step in shown
    assert ("Dask dashboard" in shown) == bool(workers)
    assert (ours.record["engine"], theirs.record["engine"]) == ("arrow", "nvtabular")
    alike(ours, theirs)
    assert {"arrow", "nvtabular"} == {p.name for p in tmp_path.iterdir() if p.is_dir()}
    assert not list(theirs.path.glob(".s*"))
    hashed = {c: spec.buckets_of(c) for c in spec.ids if spec.buckets_of(c) > 1}
    used = [np.count_nonzero(theirs.counts(c)["count"][2 : 2 + n]) for c, n in hashed.items()]
    assert max(used, default=9) > 2  # rare ids are in several buckets


@pytest.mark.extended
def test_all_commands_take_it(tmp_path, monkeypatch):
    spec, log = make_log("own", tmp_path)
    ours = prepare(spec, [log], tmp_path / "arrow", progress=False)
    theirs = prepare(spec, [log], tmp_path / "nvtabular", engine="nvtabular", progress=False)
    tables = [frequencies(data, progress=False).table() for data in (ours, theirs)]
    assert tables[0] == tables[1]
    top = [
        keep_top_ids(data, 2, data.path.with_suffix(".top"), progress=False)
        for data in (ours, theirs)
    ]
    assert top[0].cardinalities == top[1].cardinalities
    config = TrainConfig(
        batch_size=64,
        base_batch_size=64,
        dense_lr=1e-2,
        embedding_lr=5e-2,
        epochs=1,
        model="fm",
        embedding_dim=3,
    )
    run = train(theirs, config, tmp_path / "run", progress=False)
    predict_logs(run, [log], tmp_path / "scores.parquet", progress=False)
    assert pq.read_metadata(tmp_path / "scores.parquet").num_rows == ROWS
    export(run, tmp_path / "repository", check_raw=[log], progress=False)  # compares scores
    assert main(["evaluate", str(run.path), "--quiet"]) == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"freq_threshold": 10_000}, "no id of 'user' occurs 10,000 times"),
        ({"user": None}, "column 'user' has no value in the .* training rows"),
        ({"price": "x"}, "column 'price'"),
        ({"y": "no"}, "the training part has .* rows with label 0 and 0 with label 1"),
    ],
)
def test_bad_logs_are_refused_alike(tmp_path, change, says):
    frame = own_log().assign(**{k: v for k, v in change.items() if k in own_log()})
    frame.to_csv(tmp_path / "log", index=False)
    options = {k: v for k, v in change.items() if k not in frame}
    spec = DatasetSpec.from_dict({**TOML.to_dict(), **options})
    for engine in ("arrow", "nvtabular"):
        with pytest.raises(UserError, match=says):
            prepare(spec, [tmp_path / "log"], tmp_path / "out", engine=engine, progress=False)
    assert [p.name for p in tmp_path.iterdir()] == ["log"]


def test_a_failure_within_nvtabular_leaves_nothing(tmp_path, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("out of memory")

    monkeypatch.setattr("nvtabular.Workflow.fit", fails)
    _, log = make_log("own", tmp_path)
    with pytest.raises(RuntimeError, match="out of memory"):
        prepare(TOML, [log], tmp_path / "out", engine="nvtabular", progress=False)
    assert [p.name for p in tmp_path.iterdir()] == ["log"]


def test_arguments_are_checked(tmp_path):
    for options, says in (
        ({"engine": "polars"}, "engine must be 'arrow' or 'nvtabular'"),
        ({"engine": "arrow", "device": "gpu"}, "device 'gpu' needs engine 'nvtabular'"),
    ):
        with pytest.raises(UserError, match=says):
            prepare(TOML, [tmp_path / "log"], tmp_path / "out", **options)


class OnDevice(pd.DataFrame):
    """What `EncodeIds` needs of a cuDF frame."""

    @property
    def _constructor(self):
        return OnDevice

    def to_pandas(self) -> pd.DataFrame:
        return pd.DataFrame(self)

    @classmethod
    def from_pandas(cls, frame: pd.DataFrame) -> "OnDevice":
        return cls(frame)


@pytest.mark.parametrize("buckets", [None, {"a": 1, "b": 1, "c": 3, "l": 1}])
def test_frames_on_a_gpu_are_encoded_as_those_on_a_cpu(tmp_path, buckets):
    """With a stand-in for cuDF's frames: stock Categorify encodes a, ours the other columns."""
    frame = pd.DataFrame(
        {
            "a": ["x", None, "y", "?"],
            "b": [None] * 4,
            "c": ["x", "p", "q", None],
            "l": [["x"], ["y", "?"], [], ["x"]],
        },
        index=[3, 1, 0, 2],
    )
    encode = EncodeIds(tmp_path, num_buckets=buckets, freq_threshold=2, lists=["l"])
    for name in frame:
        path = tmp_path / f"unique.{name}.parquet"
        first = 2 + (buckets or {}).get(name, 1)
        pd.DataFrame({name: ["x", "y"]}, index=pd.RangeIndex(first, first + 2)).to_parquet(path)
        encode.fit_finalize({**encode.categories, name: str(path)})
    selector = ColumnSelector(list(frame))
    expected = encode.transform(selector, frame).reset_index(drop=True)
    found = encode.transform(selector, OnDevice(frame))
    assert isinstance(found, OnDevice)
    assert expected["a"].tolist() == [2 + (buckets or {}).get("a", 1), 1, 4, 2]
    pd.testing.assert_frame_equal(found.to_pandas(), expected, check_frame_type=False)


@pytest.mark.parametrize("name", ["order", "labels"])
def test_names_that_stock_categorify_uses_itself(tmp_path, name):
    """Frames on a GPU are encoded right, by hand, and the engine takes such fields."""
    texts = np.random.default_rng(0).choice([*"abcdefgh"], 200)
    path = tmp_path / f"unique.{name}.parquet"
    pd.DataFrame({name: [*"abcdefgh"]}, index=pd.RangeIndex(3, 11)).to_parquet(path)
    encode = EncodeIds(tmp_path)
    encode.fit_finalize({name: str(path)})
    found = encode.transform(ColumnSelector([name]), OnDevice({name: texts}))
    assert found[name].tolist() == [3 + ord(text) - ord("a") for text in texts]

    pd.DataFrame({"y": np.arange(200) % 2, name: texts}).to_csv(tmp_path / "log", index=False)
    spec = DatasetSpec("toy", "y", (name,))
    for engine in ("arrow", "nvtabular"):
        prepare(spec, [tmp_path / "log"], tmp_path / engine, engine=engine, progress=False)
    alike(*(PreparedData.open(tmp_path / engine) for engine in ("arrow", "nvtabular")))
