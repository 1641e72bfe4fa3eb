"""Raw rows, scored by a run as they are: the same probabilities as on the prepared data."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
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
from merlin_cowclip.workflows.data.spec import AVAZU, CRITEO, Split
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.manifest import SMALL, entry_of
from merlin_cowclip.workflows.quiet import quiet_imports
from merlin_cowclip.workflows.training import prediction, raw_inputs
from merlin_cowclip.workflows.training.configuration import TrainConfig, base_fields
from merlin_cowclip.workflows.training.evaluation import MetricAccumulator, evaluate, predict
from merlin_cowclip.workflows.training.loader import Loader
from merlin_cowclip.workflows.training.runs import Run
from merlin_cowclip.workflows.training.train import train
from tests.logs import CLICKS, click_log, write_csv, write_log

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
LAST = Split("sequential", (ROWS - TRAIN) / ROWS, valid=0)
SHOP = replace(CLICKS, list_separator=";", split=LAST, non_finite="missing")
SPECS = {
    "plain": SHOP,
    "hashed": replace(
        SHOP, freq_threshold={"user": 4, "genres": 30}, hash_buckets={"user": 7, "genres": 3}
    ),
    "time": replace(SHOP, split=Split("time", LAST.test, "hour", valid=0)),
    "criteo": replace(CRITEO, split=LAST),
    "avazu": replace(AVAZU, split=LAST),
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
    """Rare ids, ids of the test part only, missing ones, quotes, infinite numbers."""
    log = click_log(ROWS, users=300, missing=0.1)
    log["user"] = [user and f'u"{user}", {user}' for user in log["user"]]
    log["price"] = log["price"].mask(log["serial"] % 99 == 0, np.inf)
    return log.assign(hour=np.arange(ROWS) // 20)  # none is in both parts


def world_of(name: str, home: Path) -> World:
    spec, raw = SPECS[name], home / "test.csv"
    if name in ("criteo", "avazu"):
        write_log(home / "log", ROWS, 1, name)
        lines = (home / "log").read_text().splitlines(keepends=True)
        raw.write_text("".join(lines[: spec.header] + lines[-(ROWS - TRAIN) :]))
    else:
        write_csv(shop_log(), home / "log", ";")
        write_csv(shop_log()[TRAIN:], raw, ";")
    data = prepare(spec, [home / "log"], home / "data", progress=False)
    return World(train(data, CONFIG, home / "run", progress=False), data, raw)


@pytest.fixture(scope="module", autouse=True)
def loaded_once() -> Iterator[None]:
    """Models, which take the longest of all to load."""
    with pytest.MonkeyPatch.context() as patch:
        model = Run.model
        loaded: dict[tuple[Path, str | None], Any] = {}

        def once(run: Run, which: str | None = None) -> Any:
            key = run.path, which
            loaded[key] = loaded[key] if key in loaded else model(run, which)
            return loaded[key]

        patch.setattr(Run, "model", once)
        yield


@pytest.fixture(scope="module")
def shop(tmp_path_factory) -> World:
    return world_of("plain", tmp_path_factory.mktemp("shop"))


def scores(run: Run, inputs, out: Path, **options) -> pd.DataFrame:
    rows = predict_logs(run, inputs, out, **{"progress": False, "batch_size": BATCH, **options})
    table = pq.read_table(out)
    assert len(table) == rows
    return table.to_pandas()


@pytest.mark.parametrize(
    "name", ["plain", *(pytest.param(n, marks=pytest.mark.extended) for n in [*SPECS][1:])]
)
def test_raw_rows_score_as_prepared_ones(shop, name, tmp_path):
    """To the bit; with the label and without."""
    world = shop if name == "plain" else world_of(name, tmp_path)
    labels, expected = world.expected
    assert len(np.unique(expected)) > 20
    frame = scores(world.run, [world.raw], tmp_path / "scores.parquet")
    assert list(frame) == ["label", "probability"]
    assert frame.dtypes.tolist() == [np.int8, np.float32]
    np.testing.assert_array_equal(frame["label"], labels)
    np.testing.assert_array_equal(frame["probability"], expected)

    spec, bare = world.run.spec(), tmp_path / "bare.csv"
    if spec.header:
        columns = [spec.label, *({"hour"} - set(spec.fields))]  # the split's times, too
        pd.read_csv(world.raw, dtype=str).drop(columns=columns).to_csv(bare, index=False)
    else:
        bare.write_text("".join(line[2:] for line in world.raw.open()))
    frame = scores(world.run, [bare], tmp_path / "bare.parquet")
    assert list(frame) == ["probability"]
    np.testing.assert_array_equal(frame["probability"], expected)


def test_raw_rows_are_evaluated_as_prepared_ones(shop):
    quality, rows = evaluate_logs(shop.run, [shop.raw], batch_size=BATCH, progress=False)
    assert rows == ROWS - TRAIN
    assert quality == evaluate(shop.run.model(), Loader(shop.data, "test", batch_size=BATCH))
    whole = MetricAccumulator()
    whole.add(*shop.expected)
    assert tuple(quality) == pytest.approx(tuple(whole.quality()), rel=1e-12)


def test_small_parts_are_the_same(shop, tmp_path, monkeypatch):
    """Of a log, of a batch and of what is written."""
    monkeypatch.setattr(raw_inputs, "CHUNK_BYTES", 1_000)
    monkeypatch.setattr(prediction, "GROUP_ROWS", 100)
    frame = scores(shop.run, [shop.raw], tmp_path / "a.parquet", batch_size=7)
    np.testing.assert_allclose(frame["probability"], shop.expected[1], rtol=0, atol=1e-6)
    assert 4 <= pq.read_metadata(tmp_path / "a.parquet").num_row_groups <= 5


def test_files_in_order_gzipped_or_parquet(shop, tmp_path):
    """Columns are in any order, and there may be more of them."""
    log = shop_log()[TRAIN:]
    for i in range(12):
        part = log[i::12].iloc[:, :: (-1) ** i].assign(more="x")
        write_csv(part, tmp_path / f"part_{i}.csv.gz", ";")
    order = np.concatenate([np.arange(len(log))[i::12] for i in range(12)])
    frame = scores(shop.run, [tmp_path / "part_*.csv.gz"], tmp_path / "a.parquet")
    np.testing.assert_allclose(frame["probability"], shop.expected[1][order], rtol=0, atol=1e-6)
    (tmp_path / "rows").mkdir()
    log[:0].to_parquet(tmp_path / "rows/part-0")  # Spark leaves such files
    log.assign(item=log["item"].astype(str)).to_parquet(tmp_path / "rows/part-1")
    frame = scores(shop.run, [tmp_path / "rows"], tmp_path / "b.parquet")
    np.testing.assert_array_equal(frame["probability"], shop.expected[1])


def test_unknown_ids_and_missing_values(shop, tmp_path):
    """One unknown id is like another; nothing at all is a row as well."""
    rows = ["nobody,3,1,g1", "somebody else,3,1,g1", ",,,", ",,,new;newer", "x,3,,g1"]
    (tmp_path / "a.csv").write_text("\n".join(["user,item,price,genres", *rows, ""]))
    probabilities = scores(shop.run, [tmp_path / "a.csv"], tmp_path / "a.parquet")["probability"]
    assert probabilities[0] == probabilities[1] != probabilities[2]
    assert probabilities[4] != probabilities[0]
    assert probabilities.notna().all()


def test_shares_of_unknown_ids(shop, tmp_path, capsys):
    """Integers became floats: every id is another text."""
    frame = pd.read_csv(shop.raw, dtype=str)
    frame.assign(item=frame["item"] + ".0").to_csv(tmp_path / "a.csv", index=False)
    scores(shop.run, [tmp_path / "a.csv"], tmp_path / "a.parquet", progress=True)
    share = frame["item"].notna().mean()
    assert f"Unknown ids: item {share:.1%}" in capsys.readouterr().err


# An adopted pipeline


@pytest.fixture(scope="module")
def stock(tmp_path_factory) -> World:
    """A stock workflow's run; integers, a label that the workflow makes, one more target."""
    home = tmp_path_factory.mktemp("stock")
    log = click_log(ROWS).assign(user=lambda log: log["serial"] % 60 * 1_000_003)
    log["dwell"], log["rating"] = np.random.default_rng(0).random(ROWS), log["y"] * 3 + 1
    for name, rows in (("train", log[:TRAIN]), ("test", log[TRAIN:])):
        rows.drop(columns="y").to_parquet(home / f"raw-{name}.parquet", row_group_size=70)
    raw = {n: Dataset(str(home / f"raw-{n}.parquet"), engine="parquet") for n in ("train", "test")}
    liked = (
        ["rating"]
        >> ops.LambdaOp(liked_or_not, dtype="int8")
        >> ops.Rename(name="liked")
        >> ops.AddMetadata(tags=[Tags.TARGET, Tags.BINARY_CLASSIFICATION])
    )
    workflow = nvt.Workflow(
        (["user", "item", "genres"] >> ops.Categorify(out_path=str(home / "fitted")))
        + (["price"] >> ops.FillMissing() >> ops.Normalize())
        + (["dwell"] >> ops.AddMetadata(tags=[Tags.TARGET, Tags.REGRESSION]))
        + liked
    )
    workflow.fit(raw["train"]).save(str(home / "workflow"))
    for name in raw:
        workflow.transform(raw[name]).to_parquet(str(home / name))
    options = {"valid": shutil.copytree(home / "test", home / "valid"), "test": home / "test"}
    folders = (home / "train", home / "workflow", "liked", home / "data")
    data = adopt(*folders, **options, progress=False)
    return World(train(data, CONFIG, home / "run", progress=False), data, home / "raw-test.parquet")


def liked_or_not(column, _):
    return (column > 3).astype("int8")


def test_rows_for_an_adopted_pipeline(stock, tmp_path):
    """Those that its workflow wrote, and those that it reads: with an index, or without targets."""
    labels, expected = stock.expected
    assert len(np.unique(expected)) > 20
    table = pq.read_table(stock.raw)
    rows = table.to_pandas()
    rows.set_index(pd.RangeIndex(len(rows), 0, -1)).to_parquet(tmp_path / "indexed.parquet")
    bare = table.drop(["rating", "dwell"])
    bare = bare.append_column("liked", pa.array([1] * len(bare)))  # not what the workflow makes
    pq.write_table(bare, tmp_path / "bare.parquet", row_group_size=50)
    encoded = pq.read_table(next((stock.raw.parent / "test").glob("part_*.parquet")))
    pq.write_table(encoded.drop(["liked"]), tmp_path / "encoded.parquet")
    for path, raw, is_labelled in (
        (stock.raw.parent / "test", False, True),
        (tmp_path / "indexed.parquet", True, True),
        (tmp_path / "encoded.parquet", False, False),
        (tmp_path / "bare.parquet", True, False),
    ):
        out = tmp_path / f"scores-{path.stem}.parquet"
        frame = scores(stock.run, [path], out, raw=raw)
        np.testing.assert_array_equal(frame["probability"], expected)
        assert ("label" in frame) == is_labelled
        if is_labelled:
            np.testing.assert_array_equal(frame["label"], labels)
    with pytest.raises(UserError, match="without label 'liked'. R"):
        evaluate_logs(stock.run, tmp_path / "bare.parquet", raw=True, progress=False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda world: pq.read_table(world.raw), r"are raw rows, add --raw \(raw=True\)"),
        (lambda world: with_id(world, 10**6), "'user' .*1000000"),
    ],
)
def test_encoded_rows_are_checked(stock, tmp_path, change, words):
    pq.write_table(change(stock), tmp_path / "rows.parquet")
    with pytest.raises(UserError, match=words):
        predict_logs(stock.run, [tmp_path / "rows.parquet"], tmp_path / "out.parquet")
    assert [path.name for path in tmp_path.iterdir()] == ["rows.parquet"]


def with_id(world: World, user: int) -> pa.Table:
    """The encoded rows with this user."""
    table = pq.read_table(next((world.raw.parent / "test").glob("part_*.parquet")))
    place = table.schema.get_field_index("user")
    return table.set_column(place, "user", pa.array([user] * len(table), pa.int64()))


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
    """Of other large files only the ends."""
    path = tmp_path / "workflow.pkl"
    path.write_bytes(bytes(2 * SMALL))
    before = entry_of(path)
    path.write_bytes(bytes(SMALL) + b"\1" + bytes(SMALL - 1))
    assert before["sha256"] != entry_of(path)["sha256"]
