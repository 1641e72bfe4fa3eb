"""Raw rows, scored by a run as they are: the same probabilities as on the prepared data."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from merlin_cowclip.plugins import Hyperparameters
from merlin_cowclip.workflows import evaluate_logs, predict_logs
from merlin_cowclip.workflows.commands.main import main
from merlin_cowclip.workflows.data.adopt.adopt import adopt
from merlin_cowclip.workflows.data.prepare.pipeline import prepare
from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.data.spec import AVAZU, CRITEO, DatasetSpec, Split
from merlin_cowclip.workflows.data.synthetic import write_synthetic
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.manifest import SMALL, entry_of
from merlin_cowclip.workflows.quiet import quiet_imports
from merlin_cowclip.workflows.training import prediction, raw_inputs
from merlin_cowclip.workflows.training.configuration import (
    CheckpointConfig,
    TrainConfig,
    base_fields,
)
from merlin_cowclip.workflows.training.evaluation import MetricAccumulator, evaluate, predict
from merlin_cowclip.workflows.training.loader import Loader
from merlin_cowclip.workflows.training.runs import Run
from merlin_cowclip.workflows.training.train import train
from tests.saves import quick_saves

with quiet_imports():
    import nvtabular as nvt
    from merlin.io import Dataset
    from merlin.schema import Tags
    from nvtabular import ops

pytestmark = [
    pytest.mark.filterwarnings("ignore:Initializing an NVTabular Dataset in CPU mode"),
    pytest.mark.usefixtures("graphs_as_traced"),
]
ROWS, TRAIN = 1_500, 1_000
BATCH = 64
FAST = Hyperparameters(batch_size=64, dense_lr=1e-2, embedding_lr=5e-2, clip_floor=1e-2)
CONFIG = TrainConfig(**base_fields(FAST), batch_size=64, epochs=1, model="fm", embedding_dim=3)
UNSAVED = CheckpointConfig(saved_model=False)
LAST = Split("sequential", (ROWS - TRAIN) / ROWS, valid=0)
SHOP = DatasetSpec(
    name="shop",
    label="bought",
    categorical=("user", "item"),
    continuous=("price", "age"),
    lists=("genres", "tags"),
    list_separator=";",
    split=LAST,
    non_finite="missing",
)
SPECS = {
    "plain": SHOP,
    "rare": replace(SHOP, freq_threshold={"user": 4, "genres": 30}),
    "hashed": replace(SHOP, freq_threshold=5, hash_buckets={"user": 7, "tags": 3}),
    "time": replace(SHOP, split=Split("time", LAST.test, "hour", valid=0)),
}


@dataclass(frozen=True)
class World:
    """A run, what it was trained on, and the raw rows of its test part."""

    run: Run
    data: PreparedData
    raw: Path

    @property
    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        return predict(self.run.model(), Loader(self.data, "test", batch_size=BATCH))


def shop_log() -> pd.DataFrame:
    """Rare ids, ids of the test part alone, missing ones of every kind, numbers out of range."""
    random = np.random.default_rng(0)

    def some(letter: str, most: int) -> list[str]:
        return [
            ";".join(f"{letter}{i}" for i in random.zipf(1.5, random.integers(0, 4)) % most)
            for _ in range(ROWS)
        ]

    item = random.integers(0, 15, ROWS)
    price = random.normal(5, 2, ROWS).round(2).astype(str)
    price[random.random(ROWS) < 0.1] = ""
    price[[3, TRAIN + 5]] = "inf"
    return pd.DataFrame(
        {
            "hour": np.arange(ROWS) // 20,  # none is in both parts
            "bought": (random.random(ROWS) < (item + 1) / 17).astype(int),
            "user": [f'u"{u}", {u}' for u in random.zipf(1.3, ROWS) % 300],
            "item": [None if i == 14 else i for i in item],
            "price": price,
            "age": random.integers(18, 80, ROWS),
            "genres": some("g", 9),
            "tags": some("t", 40),
        }
    )


def write_shop(frame: pd.DataFrame, path: Path) -> Path:
    frame.astype({"item": "Int64"}).to_csv(path, index=False)
    return path


def make(name: str, home: Path) -> World:
    raw = home / "test.csv"
    if name in ("criteo", "avazu"):
        spec = replace({"criteo": CRITEO, "avazu": AVAZU}[name], split=LAST)
        write_synthetic(name, home / "log", rows=ROWS, seed=1, cardinality=60)
        lines = (home / "log").read_text().splitlines(keepends=True)
        header = lines[:1] if spec.header else []
        raw.write_text("".join(header + lines[-(ROWS - TRAIN) :]))
        data = prepare(spec, [home / "log"], home / "data", progress=False)
    else:
        log = shop_log()
        write_shop(log, home / "log.csv")
        write_shop(log[TRAIN:], raw)
        spec = SPECS.get(name, SHOP)
        data = prepare(spec, [home / "log.csv"], home / "data", progress=False)
    return World(
        train(data, CONFIG, home / "run", checkpointing=UNSAVED, progress=False), data, raw
    )


@pytest.fixture(scope="session")
def worlds(tmp_path_factory) -> Callable[[str], World]:
    made: dict[str, World] = {}

    def world(name: str) -> World:
        if name not in made:
            made[name] = make(name, tmp_path_factory.mktemp(name.replace(" ", "-")))
        return made[name]

    return world


@pytest.fixture(scope="module", autouse=True)
def loaded_once() -> Iterator[None]:
    """Models, which take the longest of all to load."""
    with pytest.MonkeyPatch.context() as patch:
        model = Run.model
        loaded: dict[tuple[Path, str], Any] = {}

        def once(run: Run, which: str = "last") -> Any:
            key = run.path, which
            loaded[key] = loaded[key] if key in loaded else model(run, which)
            return loaded[key]

        patch.setattr(Run, "model", once)
        yield


@pytest.fixture
def shop(worlds) -> World:
    return worlds("plain")


def scores(run: Run, inputs, out: Path, **options) -> pd.DataFrame:
    rows = predict_logs(run, inputs, out, **{"progress": False, "batch_size": BATCH, **options})
    table = pq.read_table(out)
    assert len(table) == rows
    return table.to_pandas()


@pytest.mark.parametrize(
    "name",
    [
        *("plain", "criteo"),
        *(pytest.param(n, marks=pytest.mark.extended) for n in ("avazu", "rare", "hashed", "time")),
    ],
)
def test_raw_rows_score_as_prepared_ones(worlds, name, tmp_path):
    """To the bit; with the label and without."""
    world = worlds(name)
    labels, expected = world.expected
    assert len(np.unique(expected)) > 20
    found = scores(world.run, [world.raw], tmp_path / "scores.parquet")
    assert list(found) == ["label", "probability"]
    assert found.dtypes.tolist() == [np.int8, np.float32]
    np.testing.assert_array_equal(found["label"], labels)
    np.testing.assert_array_equal(found["probability"], expected)

    spec = world.run.spec()
    bare = tmp_path / "bare.csv"
    lines = world.raw.read_text()
    if spec.header:
        without = pd.read_csv(world.raw, dtype=str).drop(columns=spec.label)
        without.to_csv(bare, index=False)
    else:
        bare.write_text("".join(line[2:] for line in lines.splitlines(keepends=True)))
    found = scores(world.run, [bare], tmp_path / "bare.parquet")
    assert list(found) == ["probability"]
    np.testing.assert_array_equal(found["probability"], expected)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("spec", "file"), [(CRITEO, "criteo_train.txt.gz"), (AVAZU, "avazu_train.csv.gz")]
)
def test_real_rows(real_data, tmp_path, spec, file):
    """The last ones of the log, gzipped as they are."""
    spec = replace(spec, split=Split("sequential", 0.1, valid=0))
    data = prepare(spec, [real_data / file], tmp_path / "data", progress=False)
    config = replace(CONFIG, batch_size=512)
    run = train(data, config, tmp_path / "run", checkpointing=UNSAVED, progress=False)
    with gzip.open(real_data / file, "rt") as log:
        lines = log.readlines()
    with gzip.open(tmp_path / "test.gz", "wt") as log:
        log.writelines((lines[:1] if spec.header else []) + lines[-data.rows["test"] :])
    labels, expected = predict(run.model(), Loader(data, "test", batch_size=BATCH))
    found = scores(run, [tmp_path / "test.gz"], tmp_path / "scores.parquet")
    np.testing.assert_array_equal(found["label"], labels)
    np.testing.assert_array_equal(found["probability"], expected)


def test_raw_rows_are_evaluated_as_prepared_ones(shop):
    quality, rows = evaluate_logs(shop.run, [shop.raw], batch_size=BATCH, progress=False)
    assert rows == ROWS - TRAIN
    assert quality == evaluate(shop.run.model(), Loader(shop.data, "test", batch_size=BATCH))
    whole = MetricAccumulator()
    whole.add(*shop.expected)
    assert quality.auc == whole.quality().auc
    assert tuple(quality) == pytest.approx(tuple(whole.quality()), rel=1e-12)


# What live rows bring


def test_small_parts_are_the_same(shop, tmp_path, monkeypatch):
    """Of a log, of a batch and of what is written."""
    monkeypatch.setattr(raw_inputs, "CHUNK_BYTES", 1_000)
    monkeypatch.setattr(prediction, "GROUP_ROWS", 100)
    found = scores(shop.run, [shop.raw], tmp_path / "a.parquet", batch_size=7)
    np.testing.assert_allclose(found["probability"], shop.expected[1], rtol=0, atol=1e-6)
    footer = pq.read_metadata(tmp_path / "a.parquet")
    assert 4 <= footer.num_row_groups <= 5


def test_files_in_order_gzipped_or_parquet(shop, tmp_path):
    frame = pd.read_csv(shop.raw, dtype=str)
    for i in range(12):
        piece = frame[i::12] if i < 11 else frame[11::12]
        piece.to_csv(tmp_path / f"part_{i}.csv.gz", index=False)
    order = np.concatenate([np.arange(len(frame))[i::12] for i in range(12)])
    found = scores(shop.run, [tmp_path / "part_*.csv.gz"], tmp_path / "a.parquet")
    np.testing.assert_allclose(found["probability"], shop.expected[1][order], rtol=0, atol=1e-6)
    lists = {name: frame[name].str.split(";") for name in SHOP.lists}
    numbers = {name: frame[name].astype(float) for name in (*SHOP.continuous, "bought")}
    typed = frame.assign(**lists, **numbers, item=frame["item"].astype("Int64"))
    (tmp_path / "rows").mkdir()
    typed[:0].to_parquet(tmp_path / "rows/part-0")  # Spark leaves such files
    typed.to_parquet(tmp_path / "rows/part-1")
    found = scores(shop.run, [tmp_path / "rows"], tmp_path / "b.parquet")
    np.testing.assert_array_equal(found["probability"], shop.expected[1])


def test_columns_in_any_order_and_more_of_them(shop, tmp_path):
    frame = pd.read_csv(shop.raw, dtype=str)
    frame[frame.columns[::-1]].assign(more="x").to_csv(tmp_path / "a.csv", index=False)
    frame.to_csv(tmp_path / "b.csv", index=False)
    found = scores(shop.run, [tmp_path / "a.csv", tmp_path / "b.csv"], tmp_path / "a.parquet")
    expected = np.tile(shop.expected[1], 2)
    np.testing.assert_allclose(found["probability"], expected, rtol=0, atol=1e-6)


def test_ids_that_training_has_not_seen_and_missing_ones(shop, tmp_path):
    """One unknown id is like another; nothing at all is a row as well."""
    rows = [
        "nobody,3,1,20,g1,",
        "somebody else,3,1,20,g1,",
        ",,,,,",
        ",,,,new;newer,",
        "x,3,,20,g1,",
    ]
    (tmp_path / "a.csv").write_text("user,item,price,age,genres,tags\n" + "\n".join(rows) + "\n")
    found = scores(shop.run, [tmp_path / "a.csv"], tmp_path / "a.parquet")["probability"]
    assert found[0] == found[1] != found[2]
    assert found[4] != found[0]
    assert found.notna().all()
    (tmp_path / "b.csv").write_text("user,item,price,age,genres,tags\n" + rows[2] + "\n")
    alone = scores(shop.run, [tmp_path / "b.csv"], tmp_path / "b.parquet")["probability"]
    assert alone[0] == pytest.approx(found[2], abs=1e-6)


def test_shares_of_unknown_ids(shop, tmp_path, capsys):
    """Integers became floats: every id is another text."""
    frame = pd.read_csv(shop.raw, dtype=str)
    frame.assign(item=frame["item"] + ".0").to_csv(tmp_path / "a.csv", index=False)
    scores(shop.run, [tmp_path / "a.csv"], tmp_path / "a.parquet", progress=True)
    share = frame["item"].notna().mean()
    assert f"Unknown ids: item {share:.1%}" in capsys.readouterr().err


# An adopted pipeline


@pytest.fixture(scope="module")
def stock(tmp_path_factory) -> tuple[Run, PreparedData, Path]:
    """A stock workflow's run; integers, a label that the workflow makes, one more target.

    An operator reads a column, weeks, that is no input.
    """
    home = tmp_path_factory.mktemp("stock")
    random = np.random.default_rng(0)
    user = random.zipf(1.3, ROWS) % 60
    log = pd.DataFrame(
        {
            "dwell": random.random(ROWS) * (user % 5),
            "rating": random.integers(1, 6, ROWS),
            "user": user * 1_000_003,
            "item": [None if i == 9 else f"i{i}" for i in random.integers(0, 10, ROWS)],
            "genres": [[f"g{g}" for g in random.integers(0, 9, n)] for n in user % 3 + 1],
            "visits": np.where(random.random(ROWS) < 0.1, np.nan, random.integers(0, 99, ROWS)),
            "weeks": random.integers(1, 9, ROWS),
        }
    )
    for name, rows in (("train", log[:TRAIN]), ("test", log[TRAIN:])):
        (home / f"raw-{name}").mkdir()
        rows.reset_index(drop=True).to_parquet(home / f"raw-{name}/0.parquet", row_group_size=70)
    raw = {
        n: Dataset(str(home / f"raw-{n}/0.parquet"), engine="parquet") for n in ("train", "test")
    }
    weeks = {week: week for week in range(1, 9)}  # an error of its own for others
    liked = (
        ["rating"]
        >> ops.LambdaOp(liked_or_not, dtype="int8")
        >> ops.Rename(name="liked")
        >> ops.AddMetadata(tags=[Tags.TARGET, Tags.BINARY_CLASSIFICATION])
    )
    workflow = nvt.Workflow(
        (["user", "item", "genres"] >> ops.Categorify(out_path=str(home / "fitted")))
        + (["visits"] >> ops.FillMissing() >> ops.Normalize())
        + (
            ["visits"]
            >> ops.FillMissing()
            >> ops.LambdaOp(
                lambda visits, rows: visits / rows["weeks"].map(weeks.__getitem__),
                dependency=["weeks"],
            )
            >> ops.Rename(name="a_week")
            >> ops.Normalize()
        )
        + (["dwell"] >> ops.AddMetadata(tags=[Tags.TARGET, Tags.REGRESSION]))
        + liked
    )
    workflow.fit(raw["train"])
    workflow.save(str(home / "workflow"))
    for name in raw:
        workflow.transform(raw[name]).to_parquet(str(home / name))
    data = adopt(
        *(home / "train", home / "workflow", "liked", home / "data"),
        valid=shutil.copytree(home / "test", home / "valid"),
        test=home / "test",
        progress=False,
    )
    with quick_saves():
        return train(data, CONFIG, home / "run", progress=False), data, home


def liked_or_not(column, _):
    return (column > 3).astype("int8")


def test_rows_for_an_adopted_pipeline(stock, tmp_path):
    """Those that its workflow wrote, and those that it reads: without any target, too."""
    run, data, home = stock
    labels, expected = predict(run.model(), Loader(data, "test", batch_size=BATCH))
    assert len(np.unique(expected)) > 20
    raw = home / "raw-test/0.parquet"
    (tmp_path / "bare").mkdir()
    bare = pq.read_table(raw).drop(["rating", "dwell"])
    bare = bare.append_column("liked", pa.array([1] * len(bare)))  # not what the workflow makes
    pq.write_table(bare, tmp_path / "bare/raw.parquet", row_group_size=50)
    encoded = pq.read_table(next((home / "test").glob("part_*.parquet")))
    pq.write_table(encoded.drop(["liked"]), tmp_path / "bare/encoded.parquet")
    for i, (path, options) in enumerate(
        [
            (home / "test", {}),
            (raw, {"raw": True}),
            (tmp_path / "bare/encoded.parquet", {}),
            (tmp_path / "bare/raw.parquet", {"raw": True}),
        ]
    ):
        found = scores(run, [path], tmp_path / f"{i}.parquet", **options)
        assert ("label" in found) == (i < 2)
        if i < 2:
            np.testing.assert_array_equal(found["label"], labels)
        np.testing.assert_array_equal(found["probability"], expected)
    quality, _ = evaluate_logs(run, raw, raw=True, batch_size=BATCH, progress=False)
    assert quality == evaluate(run.model(), Loader(data, "test", batch_size=BATCH))
    with pytest.raises(UserError, match="without label 'liked'. R"):
        evaluate_logs(run, tmp_path / "bare/raw.parquet", raw=True, progress=False)


def as_binary(table: pa.Table) -> pa.Table:
    """As Hive and others write text."""
    kinds = {"item": pa.binary(), "genres": pa.list_(pa.binary())}
    fields = [field.with_type(kinds.get(field.name, field.type)) for field in table.schema]
    return table.cast(pa.schema(fields, table.schema.metadata))


def test_an_index_and_text_in_binary_columns_change_nothing(stock, tmp_path):
    """As pandas and Hive write them; stock `Categorify` would take the index for places."""
    run, data, home = stock
    _, expected = predict(run.model(), Loader(data, "test", batch_size=BATCH))
    raw, out = tmp_path / "raw.parquet", tmp_path / "scores.parquet"
    rows = pd.read_parquet(home / "raw-test/0.parquet")
    rows.set_index(pd.RangeIndex(len(rows), 0, -1)).to_parquet(raw)
    np.testing.assert_array_equal(scores(run, [raw], out, raw=True)["probability"], expected)
    table = as_binary(pq.read_table(home / "raw-test/0.parquet"))
    pq.write_table(table, raw)
    out.unlink()
    np.testing.assert_array_equal(scores(run, [raw], out, raw=True)["probability"], expected)
    bad = pa.array([b"\xff", *table["item"].to_pylist()[1:]])
    pq.write_table(table.set_column(3, "item", bad), raw)
    with pytest.raises(UserError, match=r"column 'item' of .*raw.parquet, .*UTF8"):
        predict_logs(run, [raw], tmp_path / "out.parquet", raw=True)


def with_column(table: pa.Table, name: str, value: list) -> pa.Table:
    """With the same value in each row."""
    place = table.schema.get_field_index(name)
    return table.set_column(place, name, [value * len(table)])


@pytest.mark.parametrize(
    ("change", "raw", "words"),
    [
        (lambda t: t.drop(["weeks"]), True, "lacks columns of the workflow: 'weeks'"),
        (lambda t: t, False, r"'user' must be integer ids|are raw rows, add --raw \(raw=True\)"),
        (lambda t: with_column(t, "user", ["7"]), True, "'user' .* is string, but was int64 when"),
        (lambda t: with_column(t, "genres", [[7]]), True, "'genres' .* but was list<item: string"),
        (lambda t: with_column(t, "weeks", [0]), True, r"fails on .*: KeyError: 0\."),
    ],
)
def test_refused_of_an_adopted_pipeline(stock, tmp_path, change, raw, words):
    run, _, home = stock
    table = change(pq.read_table(home / "raw-test/0.parquet"))
    pq.write_table(table, tmp_path / "raw.parquet", row_group_size=70)
    with pytest.raises(UserError, match=words):
        predict_logs(run, [tmp_path / "raw.parquet"], tmp_path / "out.parquet", raw=raw)
    assert [p.name for p in tmp_path.iterdir()] == ["raw.parquet"]


def test_a_workflow_that_drops_a_row_is_refused(stock, tmp_path, monkeypatch):
    """Probabilities would be those of other rows."""
    run, _, home = stock
    log = pd.read_parquet(home / "raw-test/0.parquet")[:70].assign(visits=np.arange(70))
    log.to_parquet(tmp_path / "0.parquet")
    rows = ["user", "item", "genres", "visits", "weeks"] >> ops.Filter(
        f=lambda rows: rows["visits"] != 50
    )
    workflow = nvt.Workflow(
        (rows["user", "item", "genres"] >> ops.Categorify(out_path=str(tmp_path / "fitted")))
        + (rows["visits"] >> ops.Normalize())
        + (rows["weeks"] >> ops.Normalize() >> ops.Rename(name="a_week"))
    )
    workflow.fit(nvt.Dataset(log)).save(str(tmp_path / "workflow"))
    monkeypatch.setattr(Run, "workflow", lambda *_: nvt.Workflow.load(str(tmp_path / "workflow")))
    words = r"returned 69 rows for 70, so scores cannot be matched to rows: .*0.parqu"
    with pytest.raises(UserError, match=words):
        predict_logs(run, [tmp_path / "0.parquet"], tmp_path / "out.parquet", raw=True)
    assert not (tmp_path / "out.parquet").exists()


# Files that run code


def test_a_changed_workflow_is_not_loaded(shop, tmp_path, capsys):
    run = Path(shutil.copytree(shop.run.path, tmp_path / "run"))
    assert Run.open(run).workflow().output_schema
    path = run / "workflow" / "metadata.json"
    path.write_text(path.read_text() + " ")
    assert main(["predict", str(run), str(shop.raw), "--out", str(tmp_path / "a.parquet")]) == 2
    assert f"a run must keep every file as it was written. {path} has" in capsys.readouterr().err


def test_a_prepared_folders_workflow_as_well(shop, tmp_path):
    path = Path(shutil.copytree(shop.data.path, tmp_path / "data")) / "workflow" / "workflow.pkl"
    assert PreparedData.open(tmp_path / "data").workflow().output_schema
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(UserError, match="prepared data must keep every .*workflow.pkl has changed"):
        PreparedData.open(tmp_path / "data")


def test_a_large_pickle_is_confirmed_whole(tmp_path):
    """Of other large files the ends alone."""
    path = tmp_path / "workflow.pkl"
    path.write_bytes(bytes(2 * SMALL))
    before = entry_of(path)
    content = bytearray(2 * SMALL)
    content[SMALL] = 1
    path.write_bytes(content)
    after = entry_of(path)
    assert before["sha256"] != after["sha256"]
