"""A run as a model repository: what a server answers is what `predict` writes."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from merlin_cowclip.workflows import Repository, export, predict_logs
from merlin_cowclip.workflows.commands.main import main
from merlin_cowclip.workflows.data.adopt.adopt import adopt
from merlin_cowclip.workflows.data.adopt.graph import load_saved
from merlin_cowclip.workflows.data.adopt.inference import InferenceWorkflow
from merlin_cowclip.workflows.data.encoder import Encoder
from merlin_cowclip.workflows.data.prepare.pipeline import prepare
from merlin_cowclip.workflows.data.spec import DatasetSpec
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.quiet import quiet_imports
from merlin_cowclip.workflows.serving import served_model
from merlin_cowclip.workflows.serving.export import _inputs, _own_modules
from merlin_cowclip.workflows.training.evaluation import predict
from merlin_cowclip.workflows.training.loader import Loader
from merlin_cowclip.workflows.training.runs import Run
from merlin_cowclip.workflows.training.train import train
from tests.logs import click_log, write_csv
from tests.saves import quick_saves
from tests.workflows.data.test_fields import SPEC as FIELDS
from tests.workflows.data.test_fields import make_log
from tests.workflows.training.test_prediction import CONFIG, SHOP, SPECS, shop_log

with quiet_imports():
    import nvtabular as nvt
    from nvtabular import ops

    from merlin_cowclip.workflows.serving.prepared_rows import PreparedRows
    from merlin_cowclip.workflows.serving.served_model import probabilities

pytestmark = [
    pytest.mark.filterwarnings("ignore:Initializing an NVTabular Dataset in CPU mode"),
    pytest.mark.usefixtures("graphs_as_traced"),
]
TRAIN = 500  # and 1,000 rows to score
PARTS = ("train", "test")
ODD = "Zoë ☂"
DOTTED = {"user": "user.id", "genres": "2-genres"}  # as TensorFlow names no argument


@pytest.fixture(scope="module")
def shop(tmp_path_factory) -> tuple[Run, Path, Path]:
    """A run with all kinds of columns; raw rows of both splits; its repository.

    The exported run and the folder of the export are gone when the repository is used.
    """
    home = tmp_path_factory.mktemp("shop")
    log = shop_log()
    log.loc[log["user"] == log["user"].mode()[0], "user"] = ODD
    log = log.assign(genres=log["genres"].map(";".join)).rename(columns=DOTTED)
    log.to_csv(home / "log.csv", index=False)
    log[TRAIN:].to_csv(home / "test.csv", index=False)
    names = {"categorical": ("user.id", "item"), "lists": ("2-genres",)}
    split = replace(SHOP.split, valid=(str(home / "test.csv"),))
    spec = replace(SHOP, **names, split=split)
    data = prepare(spec, [home / "log.csv"], home / "data", progress=False)
    with quick_saves():
        run = train(data, replace(CONFIG, epochs=2), home / "run", progress=False)
    shutil.copytree(home / "run", home / "copy")
    run_folder = os.path.relpath(home / "copy")
    export(Run.open(run_folder), home / "there", progress=False)
    shutil.move(home / "there", home / "repository")
    shutil.rmtree(home / "copy")
    return run, home / "test.csv", home / "repository"


def predicted(run: Run, path: Path, tmp_path: Path, **options: Any) -> np.ndarray:
    predict_logs(run, [path], tmp_path / "scores.parquet", progress=False, **options)
    return pq.read_table(tmp_path / "scores.parquet")["probability"].to_numpy()


def shop_frame(path: Path) -> pd.DataFrame:
    frame = pd.read_csv(path, dtype=str, keep_default_na=False)
    frame["2-genres"] = [text.split(";") if text else [] for text in frame["2-genres"]]
    numbers = {name: pd.to_numeric(frame[name]) for name in SHOP.continuous}
    return frame.assign(**numbers)


def test_predict_of_a_repository(shop, tmp_path):
    """A thousand rows with unseen, missing and rare ids, text beyond ASCII, empty lists."""
    run, path, repository = shop
    frame, expected = shop_frame(path), predicted(run, path, tmp_path)
    assert len(expected) == 1_000
    assert len(np.unique(expected)) > 100
    assert (frame["user.id"] == ODD).any()
    assert (frame["user.id"] == "").any()
    assert frame["price"].isna().any()
    answers = Repository.open(repository).predict(frame[frame.columns[::-1]])
    np.testing.assert_allclose(answers, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["plain", "hashed"])
def test_a_request_is_encoded_as_by_the_workflow(name, tmp_path):
    """To the bit: rare, unseen and missing ids, hash buckets, lists, numbers out of range, inf."""
    write_csv(shop_log(), tmp_path / "log.csv", ";")
    spec = replace(SPECS[name], null_values=("3", "g1"))
    data = prepare(spec, [tmp_path / "log.csv"], tmp_path / "data", progress=False)
    frame = pd.read_csv(tmp_path / "log.csv", dtype=str, keep_default_na=False)
    numbers = {n: pd.to_numeric(frame[n]) for n in SHOP.continuous}
    lists = {n: [t.split(";") if t else [] for t in frame[n]] for n in SHOP.lists}
    frame = frame.assign(**numbers, **lists, y=0)
    frame.loc[::7, "user"] = ODD
    kinds = dict.fromkeys(SHOP.continuous, "TYPE_FP64")
    kinds |= dict.fromkeys((*SHOP.categorical, *(f"{n}__values" for n in lists)), "TYPE_STRING")
    record = {"columns": data.spec.fields, "inputs": kinds, "is_adopted": False}
    sent = Repository(tmp_path, record).request(frame)
    encoder = Encoder.open(data.path / "workflow", data.spec, data.record["ranges"])
    columns = {column: array[0] for column, array in sent.items()}
    encoded = PreparedRows(data.spec, encoder).encode(columns)
    expected = data.workflow().transform(frame)
    for field in (*SHOP.categorical, *SHOP.continuous):
        np.testing.assert_array_equal(encoded[field], expected[field].to_numpy(), field)
    for field in SHOP.lists:
        values, offsets = encoded[f"{field}__values"], encoded[f"{field}__offsets"]
        np.testing.assert_array_equal(values, np.concatenate(expected[field].to_numpy()), field)
        np.testing.assert_array_equal(np.diff(offsets), expected[field].map(len), field)
    strict = PreparedRows(replace(data.spec, non_finite="refuse"), encoder)
    with pytest.raises(UserError, match="is -?inf in row"):
        strict.encode(columns)


def test_modules_that_no_package_installs_are_saved_with_the_workflow(tmp_path, monkeypatch):
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "own_operators.py").write_text("def half(column): return column / 2")
    monkeypatch.syspath_prepend(tmp_path / "modules")
    half = importlib.import_module("own_operators").half
    rows = pd.DataFrame({"x": [1.0, 2.0, 5.0]})
    workflow = nvt.Workflow(["x"] >> ops.LambdaOp(half))
    workflow.fit(nvt.Dataset(rows))
    workflow.save(str(tmp_path / "saved"), modules_byvalue=_own_modules())
    shutil.rmtree(tmp_path / "modules")
    monkeypatch.delitem(sys.modules, "own_operators")
    loaded = nvt.Workflow.load(str(tmp_path / "saved"))
    assert loaded.transform(rows)["x"].tolist() == [0.5, 1, 2.5]


def test_requests_are_joined_and_a_bad_one_fails_alone(shop, tmp_path, monkeypatch):
    """Of any number of rows, lists among them; a batch of good ones is scored once."""
    repository, frame = Repository.open(shop[2]), shop_frame(shop[1])
    expected, model = predicted(*shop[:2], tmp_path), repository.load()
    scored, network = [], model._network
    monkeypatch.setattr(model, "_network", lambda inputs: scored.append(1) or network(inputs))
    parts = [frame[:1], frame[1:3], frame[3:100], frame[100:]]
    good = [repository.request(part) for part in parts]
    np.testing.assert_allclose(probabilities(model.answers(good)), expected, rtol=0, atol=1e-6)
    assert len(scored) == 1
    five = repository.request(frame.head(5))
    bad = {
        "columns differ in their number of rows: 5 in 'price', 4 in 'item'": {
            **five,
            "item": five["item"][:, :4],
        },
        "'2-genres__offsets' must rise from 0 to the number of values, ": {
            **five,
            "2-genres__offsets": np.maximum(five["2-genres__offsets"], 1),
        },
        "the request has no rows": repository.request(frame.head(0)),
        "'price' must have the shape (1, n), not (5, 1)": {**five, "price": five["price"].T},
    }
    answers = model.answers([r for pair in zip(good, bad.values(), strict=True) for r in pair])
    np.testing.assert_allclose(probabilities(answers[::2]), expected, rtol=0, atol=1e-6)
    assert [str(error)[: len(text)] for error, text in zip(answers[1::2], bad, strict=True)] == [
        *bad
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: f.drop(columns=["item", "price"]), "each of the columns 'item', 'price' once"),
        (lambda f: f.assign(price=f["price"].astype(object).where(f.index != 8, "dear")), "dear"),
        (lambda f: f.assign(**{"2-genres": "g1;g2"}), "'2-genres': it is string, not"),
        (lambda f: pd.concat([f, f[["item"]]], axis=1), "each of the columns 'item' once"),
    ],
)
def test_rows_that_are_refused_here(shop, change, words):
    repository = Repository.open(shop[2])
    with pytest.raises(UserError, match=words):
        repository.predict(change(shop_frame(shop[1]).head(9)))


def test_ids_of_a_frame_are_text(shop):
    """As `prepare` reads them: pandas makes floats of integers beside missing values."""
    sent = Repository.open(shop[2]).request(
        shop_frame(shop[1]).head(3).assign(item=[7, 1382, None])
    )
    assert sent["item"].tolist() == [[b"7", b"1382", b""]]


def test_config_and_record(shop):
    """As Triton parses it: requests of any shape are joined; the label is no input."""
    schema = pytest.importorskip("tritonclient.grpc.model_config_pb2")
    text_format = pytest.importorskip("google.protobuf.text_format")
    record = Repository.open(shop[2]).record
    assert record["columns"] == ["user.id", "item", "2-genres", "price"]
    (path,) = shop[2].glob("*/config.pbtxt")
    config = text_format.Parse(path.read_text(), schema.ModelConfig())
    inputs = {one.name: schema.DataType.Name(one.data_type) for one in config.input}
    assert inputs == record["inputs"]
    assert inputs["2-genres__values"] == "TYPE_STRING"
    assert all(one.allow_ragged_batch and one.dims == [-1] for one in config.input)
    assert config.max_batch_size > 1


@pytest.mark.extended
def test_the_best_epoch(shop, tmp_path):
    run, path, _ = shop
    first = min(path.name for path in (run.path / "checkpoints").glob("step-*"))
    best = replace(run, result={**run.result, "best_step": int(first.partition("-")[2])})
    repository = export(best, tmp_path / "best", which="best", progress=False)
    expected = predicted(best, path, tmp_path, which="best")
    answers = repository.predict(shop_frame(path))
    np.testing.assert_allclose(answers, expected, rtol=0, atol=1e-6)
    (tmp_path / "scores.parquet").unlink()
    assert np.abs(answers - predicted(run, path, tmp_path)).max() > 1e-4


@pytest.fixture(scope="module")
def stock(tmp_path_factory) -> tuple[Run, Path]:
    """An adopted pipeline's run, and raw rows: integers, text with missing values, lists."""
    home = tmp_path_factory.mktemp("stock")
    log = click_log(1_500, missing=0.1)
    log = log.assign(item=log["user"], user=log["serial"] % 60 * 1_000_003)
    log = log.drop(columns=["serial", "hour"])
    for part, rows in (("train", log[:1_000]), ("test", log[1_000:])):
        rows.reset_index(drop=True).to_parquet(home / f"raw-{part}.parquet", row_group_size=70)
    raw = {n: nvt.Dataset(str(home / f"raw-{n}.parquet"), engine="parquet") for n in PARTS}
    workflow = nvt.Workflow(
        (["user", "item", "genres"] >> ops.Categorify(out_path=str(home / "fitted")))
        + (["price"] >> ops.FillMissing() >> ops.Normalize())
        + (["y"] >> ops.AddMetadata(tags=["target", "binary_classification"]))
    )
    workflow.fit(raw["train"]).save(str(home / "workflow"))
    for part in PARTS:
        workflow.transform(raw[part]).to_parquet(str(home / part))
    folders = (home / "train", home / "workflow", "y", home / "data")
    data = adopt(*folders, test=home / "test", progress=False)
    with quick_saves():
        return train(data, CONFIG, home / "run", progress=False), home / "raw-test.parquet"


@pytest.fixture(scope="module")
def of_stock(stock, tmp_path_factory) -> Repository:
    """The adopted pipeline, exported."""
    return export(stock[0], tmp_path_factory.mktemp("stock") / "repository", progress=False)


@pytest.fixture(scope="module")
def every_kind(tmp_path_factory) -> tuple[Run, Path, Path]:
    """A run with shared, hashed and scaled fields, lists and fields of times; as `shop`.

    Some have names that TensorFlow cannot save.
    """
    home = tmp_path_factory.mktemp("fields")
    log = make_log().rename(columns={"device": "the device", "when": "the time"})
    log["tags"] = ["|".join(f"t{j}" for j in range(i % 4)) for i in range(len(log))]
    log[:3_000].to_csv(home / "log.csv", index=False)
    log[3_000:].to_csv(home / "test.csv", index=False)
    spec = replace(
        FIELDS,
        categorical=("seller", "buyer", "the device"),
        lists=("tags",),
        list_separator="|",
        hash_only={"the device": 64},
        hour="the time",
        weekday="the time",
        split=replace(FIELDS.split, test=(str(home / "test.csv"),), valid=0.1),
    )
    data = prepare(spec, [home / "log.csv"], home / "data", progress=False)
    with quick_saves():
        run = train(data, CONFIG, home / "run", progress=False)
        export(run, home / "repository", check_raw=home / "test.csv", progress=False)
    return run, home / "test.csv", home / "repository"


def every_kind_frame(path: Path) -> pd.DataFrame:
    frame = pd.read_csv(path, dtype=str, keep_default_na=False)
    numbers = {name: pd.to_numeric(frame[name]) for name in FIELDS.continuous}
    return frame.assign(**numbers, tags=[text.split("|") if text else [] for text in frame["tags"]])


def test_fields_of_every_kind(every_kind, tmp_path):
    run, path, repository = every_kind
    repository, frame = Repository.open(repository), every_kind_frame(path)
    expected = predicted(run, path, tmp_path)
    of_parts = predict(run.model(), Loader(run.data(), "test", batch_size=512))[1]
    np.testing.assert_allclose(expected, of_parts, atol=1e-6)
    np.testing.assert_allclose(repository.predict(frame), expected, atol=1e-6)
    times = pd.to_datetime(frame["the time"], dayfirst=True)
    with pytest.raises(UserError, match="times as text"):
        repository.predict(frame.assign(**{"the time": times}))


def test_an_adopted_pipeline(stock, of_stock, tmp_path):
    """Without its target."""
    run, path = stock
    record = of_stock.record
    assert record["columns"] == ["user", "item", "genres", "price"]
    assert record["inputs"]["user"] == "TYPE_INT64"
    expected = predicted(run, path, tmp_path, raw=True)
    frame = pd.read_parquet(path)
    np.testing.assert_allclose(of_stock.predict(frame), expected, rtol=0, atol=1e-6)
    parts = [of_stock.request(part) for part in (frame[:1], frame[1:200], frame[200:])]
    answers = of_stock.load().answers(parts)
    np.testing.assert_allclose(probabilities(answers), expected, rtol=0, atol=1e-6)
    missing = frame[frame["item"].isna()]  # as of a single row, of which every id is missing
    answers = of_stock.predict(missing)
    np.testing.assert_allclose(answers, expected[missing.index], rtol=0, atol=1e-6)


def test_types_of_an_adopted_pipelines_columns(stock, of_stock):
    """Text as text, as bytes and as categories; what is of another type is refused."""
    rows = pd.read_parquet(stock[1]).head(60)
    expected = of_stock.predict(rows)
    as_bytes = rows.assign(
        item=[item if item is None else item.encode() for item in rows["item"]],
        genres=[[genre.encode() for genre in row] for row in rows["genres"]],
    )
    for frame in (as_bytes, rows.astype({"item": "category", "user": float}), rows[::-1]):
        answers = of_stock.predict(frame)
        np.testing.assert_allclose(answers, expected[frame.index], rtol=0, atol=1e-6)
    for frame, words in (
        (rows.assign(user=rows["user"].astype(str)), "column 'user' is string, but was int64"),
        (rows.assign(item=b"\xff"), "'item' of the request, .* string .*UTF8"),
    ):
        with pytest.raises(UserError, match=words):
            of_stock.predict(frame)


TIMES = pa.array(pd.date_range("2024-01-01", periods=4))
COLUMNS = {  # raw columns of a request: their values, and Triton's type, or why there is none
    "i8": (pa.array([1, 2, 3, 4], "int8"), "TYPE_INT8"),
    "u64": (pa.array([1, 2, 3, 4], "uint64"), "TYPE_UINT64"),
    "f32": (pa.array([1, 2, 3, None], pa.float32()), "TYPE_FP32"),
    "truth": (pa.array([True, False, True, False]), "TYPE_BOOL"),
    "text": (pa.array(["a", "☂", None, "d"]), "TYPE_STRING"),
    "bytes": (pa.array([b"\xff", b"b", b"c", None]), "TYPE_STRING"),
    "category": (pa.array([*"abcd"]).dictionary_encode(), "TYPE_STRING"),
    "words": (pa.array([["a", "b"], [], ["b"], []]), "TYPE_STRING"),
    "pair": (pa.array([[1, 2]] * 4, pa.list_(pa.int32(), 2)), "TYPE_INT32"),
    "date": (TIMES.cast(pa.date32()), r"date32\[day\]"),
    "zone": (TIMES.cast(pa.timestamp("us", "UTC")), r"timestamp\[ns, tz=UTC\]"),
}


@pytest.mark.filterwarnings("ignore:Changing an NVTabular Dataset to CPU mode")
@pytest.mark.parametrize("name", COLUMNS)
def test_types_of_raw_columns(tmp_path, name):
    """`predict --raw` takes them all."""
    values, kind = COLUMNS[name]
    rows = pa.table({"x": values})
    pq.write_table(rows, tmp_path / "raw.parquet")
    workflow = nvt.Workflow(["x"] >> ops.Categorify(out_path=str(tmp_path / "fit")))
    dataset = nvt.Dataset(str(tmp_path / "raw.parquet"), engine="parquet")
    workflow.fit(dataset).save(str(tmp_path / "workflow"))
    workflow = load_saved(tmp_path / "workflow")
    is_list = pa.types.is_list(values.type) or pa.types.is_fixed_size_list(values.type)
    lists = ("x",) * is_list
    spec = DatasetSpec("log", "y", ("x",)[len(lists) :], (), lists)
    inference = InferenceWorkflow(workflow, spec)
    if kind.startswith("TYPE"):
        assert _inputs(workflow, inference.types)["x__values" if lists else "x"] == kind
    else:
        with pytest.raises(UserError, match=f"Triton has no type for 'x' \\({kind}\\)"):
            _inputs(workflow, inference.types)
    assert len(inference.transform({"x": rows["x"]}, "rows")) == 4


def test_raw_rows_are_checked(stock, shop, tmp_path, monkeypatch, capsys):
    """What is exported answers them as `predict`; nothing is left where it does not."""
    run, raw = stock
    argv = ["export", run.path, "--out", tmp_path / "good", "--check-raw", raw, "--quiet"]
    assert main(list(map(str, argv))) == 0
    assert "the exported model answers as predict" in capsys.readouterr().out
    join = served_model._join
    monkeypatch.setattr(served_model, "_join", lambda name, of: join(name, of[::-1]))
    with pytest.raises(UserError, match=r"\d+ of 1,000 raw rows get another probability"):
        export(shop[0], tmp_path / "bad", check_raw=shop[1], progress=False)
    assert {path.name for path in tmp_path.iterdir()} == {"good"}


def test_a_repository_that_was_changed_is_refused(shop, tmp_path):
    """Its pickles run as they are loaded."""
    shutil.copytree(shop[2], tmp_path / "repository")
    pickled = tmp_path / "repository/executor_model/1/workflow/workflow.pkl"
    pickled.write_bytes(pickled.read_bytes()[:-1] + b"!")
    with pytest.raises(UserError, match="workflow.pkl has changed"):
        Repository.open(tmp_path / "repository")
