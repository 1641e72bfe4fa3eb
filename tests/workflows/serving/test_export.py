"""A run as a model repository: what a server answers is what `predict` writes."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import roc_auc_score

from merlin_cowclip.workflows import Repository, export, predict_logs, rare_costs
from merlin_cowclip.workflows.commands.main import main
from merlin_cowclip.workflows.data.adopt import adopt
from merlin_cowclip.workflows.data.counts import write_counts
from merlin_cowclip.workflows.data.datasets import DatasetSpec
from merlin_cowclip.workflows.data.etl import prepare
from merlin_cowclip.workflows.data.parquet_logs import ParquetLog
from merlin_cowclip.workflows.data.prepared import PreparedData
from merlin_cowclip.workflows.data.raw_columns import name_types
from merlin_cowclip.workflows.errors import Notice, UserError
from merlin_cowclip.workflows.quiet import quiet_imports
from merlin_cowclip.workflows.serving import rare_rows
from merlin_cowclip.workflows.serving.export import _check_types
from merlin_cowclip.workflows.serving.rare_rows import rare_ids, tell_of_what_is_counted
from merlin_cowclip.workflows.training.runs import Run
from merlin_cowclip.workflows.training.train import train
from tests.saves import quick_saves
from tests.workflows.training.test_prediction import (
    CONFIG,
    SHOP,
    as_binary,
    shop_log,
    stock,
    write_shop,
)

with quiet_imports():
    import nvtabular as nvt
    from merlin.dag import ColumnSelector, Graph, postorder_iter_nodes
    from merlin.table import TensorTable
    from nvtabular import ops

    from merlin_cowclip.workflows.data.operators import EncodeIds
    from merlin_cowclip.workflows.serving.served_workflow import ServedWorkflow, _numbers
    from merlin_cowclip.workflows.serving.systems import model_config, triton_type

pytest.importorskip("merlin.systems")
pytest.importorskip("tritonclient.grpc")

pytestmark = [
    pytest.mark.filterwarnings("ignore:Initializing an NVTabular Dataset in CPU mode"),
    pytest.mark.usefixtures("graphs_as_traced"),
]
assert stock  # a fixture: a run on a stock NVTabular workflow, its data and folder
TRAIN = 500  # and 1,000 rows to score
ODD = "Zoë ☂"
IDS = ["user", "item", "genres"]  # of the stock workflow
DOTTED = {"user": "user.id", "genres": "2-genres"}  # as TensorFlow names no argument


@pytest.fixture(scope="module")
def shop(tmp_path_factory) -> tuple[Run, Path, Path]:
    """A run with all that a column may be; its raw rows of both parts; its exported repository.

    The run, and the folder in which it was exported, are gone when the repository is used.
    """
    home = tmp_path_factory.mktemp("shop")
    log = shop_log()
    log.loc[log["user"] == log["user"].mode()[0], "user"] = ODD
    write_shop(log, home / "log.csv")
    raw = pd.read_csv(home / "log.csv", dtype=str).rename(columns=DOTTED)
    raw.to_csv(home / "log.csv", index=False)
    raw[TRAIN:].to_csv(home / "test.csv", index=False)
    names = {
        kind: tuple(DOTTED.get(name, name) for name in getattr(SHOP, kind))
        for kind in ("categorical", "lists")
    }
    spec = replace(SHOP, **names)
    data = prepare(spec, [home / "log.csv"], home / "data", progress=False)
    with quick_saves():
        run = train(data, replace(CONFIG, epochs=2), home / "run", progress=False)
    shutil.copytree(home / "run", home / "copy")
    export(Run.open(home / "copy"), home / "there", progress=False)
    shutil.rmtree(home / "copy")
    shutil.move(home / "there", home / "repository")
    return run, home / "test.csv", home / "repository"


def predicted(run: Run, path: Path, tmp_path: Path, **options: Any) -> np.ndarray:
    predict_logs(run, [path], tmp_path / "scores.parquet", progress=False, **options)
    return pq.read_table(tmp_path / "scores.parquet")["probability"].to_numpy()


def shop_frame(path: Path) -> pd.DataFrame:
    frame = pd.read_csv(path, dtype=str, keep_default_na=False)
    for name in ("2-genres", "tags"):
        frame[name] = [text.split(";") if text else [] for text in frame[name]]
    numbers = {name: pd.to_numeric(frame[name]) for name in SHOP.continuous}
    return frame.assign(**numbers)


def request(frame: pd.DataFrame, record: Any) -> dict[str, np.ndarray]:
    """As a client of Triton's sends it."""
    kinds = {"TYPE_STRING": object, "TYPE_INT64": np.int64, "TYPE_FP64": np.float64}
    tensors: dict[str, np.ndarray] = {}
    for name in record["columns"]:
        column = frame[name]
        if name in record["inputs"]:
            column = column.fillna("") if column.dtype == object else column
            tensors[name] = column.to_numpy().astype(kinds[record["inputs"][name]])
        else:
            kind = kinds[record["inputs"][f"{name}__values"]]
            tensors[f"{name}__values"] = np.array([*(v for row in column for v in row)], kind)
            ends = np.cumsum([0, *map(len, column)])
            tensors[f"{name}__offsets"] = ends.astype(np.int32)
    return tensors


def served(repository: Path, requests: list[dict[str, np.ndarray]], tmp_path: Path) -> list[Any]:
    (tmp_path / "requests").write_bytes(pickle.dumps(requests))
    script = Path(__file__).with_name("triton_stand_in.py")
    done = subprocess.run(
        [sys.executable, script, repository, tmp_path / "requests", tmp_path / "answers"],
        cwd=tmp_path,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found: list[Any] = pickle.loads((tmp_path / "answers").read_bytes())
    return found


def without(inputs: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    return {key: value for key, value in inputs.items() if key != name}


def test_a_server_answers_as_predict_writes(shop, tmp_path):
    """A thousand rows with unseen, missing and rare ids, text beyond ASCII, empty lists."""
    run, path, repository = shop
    frame, record = shop_frame(path), Repository.open(repository).record
    expected = predicted(run, path, tmp_path)
    assert len(expected) == 1_000
    assert len(np.unique(expected)) > 100
    assert (frame["user.id"] == ODD).any()
    assert (frame["item"] == "").any()
    assert frame["price"].isna().any()
    few, five = request(frame, record), request(frame.head(5), record)
    backwards = dict(reversed(list(five.items())))
    text = {**five, "price": np.array(["cheap"] * 5, object)}
    short = {**five, "item": five["item"][:4]}
    bytes_of_another = {**five, "item": np.array([b"\xff"] * 5, object)}
    crooked = {**five, "tags__offsets": np.maximum(five["tags__offsets"], 1)}
    none = request(frame.head(0), record)
    answers = served(
        repository,
        [few, backwards, without(five, "item"), text, short, bytes_of_another, crooked, none],
        tmp_path,
    )
    np.testing.assert_allclose(answers[0]["probability"], expected, rtol=0, atol=1e-6)
    np.testing.assert_allclose(answers[1]["probability"], expected[:5], rtol=0, atol=1e-6)
    assert answers[2:] == [
        "expected 8 tensors but got 7: ['item']",  # the server's own words are others
        "unexpected datatype object for 'price', expecting TYPE_FP64",
        "all columns of a request must have as many rows. Received: 4 of 'item', 5 of 'user.id'",
        "text must be UTF-8. Received: b'\\xff' in column 'item'",
        "offsets of a list must rise from 0 to the number of its values. Received: 'tags' with "
        f"{len(five['tags__values'])} values, and offsets {list(crooked['tags__offsets'])}",
        "a request must have a row. Received: none",
    ]


def test_here_as_predict_writes(shop, tmp_path):
    run, path, repository = shop
    expected = predicted(run, path, tmp_path)
    frame = shop_frame(path)
    found = Repository.open(repository).predict(frame[frame.columns[::-1]])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: f.drop(columns=["item", "price"]), "Missing: 'item', 'price' in "),
        (lambda f: f.assign(price=f["price"].astype(object).where(f.index != 2, "dear")), "'dear'"),
        (lambda f: f.assign(price=f["price"].astype(str)), "'price' must be a column of numbers."),
        (lambda f: pd.concat([f, f[["item"]]], axis=1), "once. Received: 'item' more than once"),
    ],
)
def test_rows_that_are_refused_here(shop, change, words):
    repository = Repository.open(shop[2])
    with pytest.raises(UserError, match=words):
        repository.predict(change(shop_frame(shop[1]).head(9)))


NUMBERS = pd.Series([1.5, 2.0, float("nan")], name="price")


@pytest.mark.parametrize(
    "given",
    [
        NUMBERS,
        NUMBERS.astype("float32"),
        NUMBERS.astype("Float64"),
        NUMBERS.astype("category"),
        NUMBERS.astype(object).where(NUMBERS.notna(), None),
        NUMBERS.map(Decimal),
        pd.Series([Decimal("1.5"), 2, None], name="price"),
    ],
    ids=lambda given: f"{given.dtype} of {type(given[0]).__name__}",
)
def test_numbers_of_a_frame(given):
    found = _numbers(given, SHOP)
    assert found.dtype == "float64"
    np.testing.assert_array_equal(found, NUMBERS)
    assert _numbers(pd.Series([None], name="price", dtype=object), SHOP).isna().all()
    assert _numbers(pd.Series([True, False]), SHOP).tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    "given",
    [
        pd.Series(["1.5", "2"]),
        pd.Series([b"1.5", None]),
        pd.Series(["1.5", "2"]).astype("category"),
        pd.to_datetime(pd.Series(["2024-03-01"])),
        pd.Series([["1.5"], ["2"]]),
    ],
    ids=lambda given: f"{given.dtype} of {type(given[0]).__name__}",
)
def test_a_column_that_predict_refuses(given, tmp_path):
    """By the same sentence."""
    path = tmp_path / "rows.parquet"
    pd.DataFrame({"price": given, "item": 1, "bought": 1}).to_parquet(path)
    with pytest.raises(UserError) as theirs:
        ParquetLog(
            replace(SHOP, categorical=("item",), continuous=("price",), lists=()), path
        ).check()
    with pytest.raises(UserError) as ours:
        _numbers(given.rename("price"), SHOP)
    sentence, _, kind = str(theirs.value).split(" in ")[0].partition(" Received: ")
    assert sentence.startswith("'price' must be a column of ")
    assert str(ours.value).startswith("'price' must be a column of numbers. Received: ")
    assert re.match(r"\w+", kind)[0] in str(ours.value)


@pytest.mark.parametrize("value", ["2", b"2", 2j, object(), [2.0]])
def test_what_is_no_number_among_them(value):
    with pytest.raises(UserError, match="a number must be one. Received: .* in row 2, column 'pr"):
        _numbers(pd.Series([1.5, value], name="price", dtype=object), SHOP)


@pytest.mark.parametrize("value", [10**400, -(10**400), Decimal("1e400")], ids=range(3))
def test_a_number_beyond_any_float_is_infinite(value):
    column = pd.Series([1.5, value, None], name="price", dtype=object)
    with pytest.raises(UserError, match="must be finite. Received: -?inf in row 2, column 'price'"):
        _numbers(column, replace(SHOP, non_finite="refuse"))
    found = _numbers(column, replace(SHOP, non_finite="missing"))
    np.testing.assert_array_equal(np.abs(found), [1.5, np.inf, np.nan])


def test_what_is_served_has_no_label_and_says_what_it_needs(shop):
    record = Repository.open(shop[2]).record
    assert record["columns"] == ["user.id", "item", "2-genres", "tags", "price", "age"]
    assert record["models"] == ["executor_model", "0_predicttensorflowtriton"]
    assert record["packages"].keys() >= {"merlin-cowclip", "merlin-systems", "nvtabular"}
    text = "".join(path.read_text() for path in shop[2].glob("*/config.pbtxt"))
    assert "bought" not in text


def test_the_best_epoch(shop, tmp_path):
    run, path, _ = shop
    first = min(path.name for path in (run.path / "checkpoints").glob("step-*"))
    best = replace(run, result={**run.result, "best_step": int(first.partition("-")[2])})
    repository = export(best, tmp_path / "best", which="best", progress=False)
    expected = predicted(best, path, tmp_path, which="best")
    found = repository.predict(shop_frame(path))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    shutil.move(tmp_path / "scores.parquet", tmp_path / "best.parquet")
    assert np.abs(found - predicted(run, path, tmp_path)).max() > 1e-4


def test_an_adopted_pipeline(stock, tmp_path):
    """Without its targets, which its workflow makes of columns that are no inputs."""
    run, _, home = stock
    repository = export(run, tmp_path / "repository", progress=False)
    record = repository.record
    assert record["columns"] == ["user", "item", "genres", "visits", "weeks"]
    assert record["inputs"]["user"] == "TYPE_INT64"
    path = home / "raw-test/0.parquet"
    expected = predicted(run, path, tmp_path, raw=True)
    frame = pd.read_parquet(path)
    np.testing.assert_allclose(repository.predict(frame), expected, rtol=0, atol=1e-6)
    assert frame["item"].isna().any()
    assert frame["visits"].isna().any()
    (answer,) = served(repository.path, [request(frame, record)], tmp_path)
    np.testing.assert_allclose(answer["probability"], expected, rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Changing an NVTabular Dataset to CPU mode")
def test_booleans_with_a_missing_one_are_served_as_booleans(tmp_path):
    """Objects to pandas, and so text to a schema: every text would be True."""
    flags = pa.array([True, None, True, False, False, False, True, None] * 4)
    table = pa.table({"flag": flags, "user": pa.array([*"abcdefgh"] * 4)})
    pq.write_table(table, tmp_path / "log.parquet")
    workflow = nvt.Workflow(["flag", "user"] >> ops.Categorify(out_path=str(tmp_path / "fit")))
    log = nvt.Dataset(str(tmp_path / "log.parquet"), engine="parquet")
    expected = workflow.fit_transform(log).compute()
    name_types(workflow)
    _check_types(workflow)
    kinds = [triton_type(workflow.input_schema[name].dtype) for name in ("flag", "user")]
    assert [model_config.DataType.Name(kind) for kind in kinds] == ["TYPE_BOOL", "TYPE_STRING"]

    spec = DatasetSpec("flags", label="y", categorical=("flag", "user"))
    encode = ServedWorkflow(
        workflow, spec, {"flag": 5, "user": 11}, workflow.output_schema, is_adopted=True
    )
    encode.input_schema = workflow.input_schema
    rows = table.to_pandas()
    known = rows["flag"].notna().to_numpy()
    sent = {
        "flag": rows["flag"][known].to_numpy(bool),
        "user": rows["user"][known].to_numpy(object),
    }
    found = encode.transform(None, TensorTable(sent)).to_dict()
    for name in sent:
        np.testing.assert_array_equal(np.ravel(found[name]), expected[name][known])
    for given in (rows, rows.astype({"flag": "boolean"})):
        found = encode.transform(None, given).to_dict()
        np.testing.assert_array_equal(np.ravel(found["flag"]), expected["flag"])
    for bad, kind in (("False", "string"), (1, "int64"), (0.0, "double")):
        words = f"Received: {kind} in column 'flag' of a request, which was bool. Give it as bool"
        with pytest.raises(UserError, match=words):
            encode.transform(None, rows.assign(flag=bad))


@pytest.mark.filterwarnings("ignore:Changing an NVTabular Dataset to CPU mode")
def test_dates_and_decimals_are_not_served(tmp_path):
    """Objects to pandas as well; no text that a client can send is one."""
    log = pd.DataFrame(
        {
            "text": [*"abc"],
            "bytes": [b"a", b"b", b"c"],
            "date": pd.date_range("2024-01-01", periods=3).date,
            "price": [Decimal(i) for i in range(3)],
            "at": pd.date_range("2024-01-01", periods=3),
            "hashed": [*"xyz"],
            "own": [True, None, False],
        }
    )
    log.to_parquet(tmp_path / "log.parquet")
    out = str(tmp_path / "fit")

    def fitted(columns: list[str]) -> nvt.Workflow:
        nodes = (columns >> ops.Categorify(out_path=out)) + (["hashed"] >> ops.HashBucket(5))
        nodes += ["own"] >> ops.LambdaOp(lambda column: column.fillna(False).astype("int8"))
        log = nvt.Dataset(str(tmp_path / "log.parquet"), engine="parquet")
        return name_types(nvt.Workflow(nodes).fit(log))

    with pytest.warns(Notice, match="'own', 'hashed' will be served as text|'hashed', 'own' will"):
        _check_types(fitted(["text", "bytes"]))
    words = r"'date' of date32\[day\], 'price' of decimal128\(1, 0\), 'at' of timestamp\[ns\]\. Fit"
    with pytest.raises(UserError, match=words):
        _check_types(fitted(["text", "bytes", "date", "price", "at"]))


def with_workflow(
    monkeypatch, home: Path, out: Path, visits: Any, log: pd.DataFrame | None = None, ids: Any = IDS
) -> None:
    """A stock workflow instead of the run's, with other columns `visits` and `a_week`."""
    log = pd.read_parquet(home / "raw-train/0.parquet") if log is None else log
    ids = ids >> ops.Categorify(out_path=str(out / "fitted"))
    workflow = nvt.Workflow(ids + visits)
    workflow.fit(nvt.Dataset(log)).save(str(out / "workflow"))
    monkeypatch.setattr(
        Run, "workflow", lambda *_, trust=False: nvt.Workflow.load(str(out / "workflow"))
    )


def test_a_workflow_that_fails_without_what_is_left_out_is_refused(
    stock, tmp_path, monkeypatch, capfd
):
    """Its operator reads a column that it does not name."""
    run, _, home = stock
    visits = ["visits", "dwell"] >> ops.FillMissing()
    a_week = visits >> ops.LambdaOp(lambda c, rows: c / rows["dwell"]) >> ops.Rename(postfix="_")
    a_week = a_week["visits_"] >> ops.Rename(name="a_week")
    with_workflow(monkeypatch, home, tmp_path, visits["visits"] + a_week)
    words = "whose workflow without 'dwell' fails: KeyError: 'dwell'. Fit a workflow whose operat"
    with pytest.raises(UserError, match=words):
        export(run, tmp_path / "repository", progress=False)
    assert {path.name for path in tmp_path.iterdir()} == {"fitted", "workflow"}
    assert "Traceback" not in capfd.readouterr().err


def test_what_a_filter_reads_is_asked_for(stock, tmp_path, monkeypatch):
    """Also where it drops the row that an export is tried with, of which all is 1."""
    run, _, home = stock
    rows = [*IDS, "visits", "dwell"] >> ops.Filter(lambda rows: rows[~(rows["dwell"] <= 1)])
    visits = rows["visits"] >> ops.FillMissing()
    visits = visits + (visits >> ops.Rename(name="a_week"))
    log = pd.read_parquet(home / "raw-train/0.parquet")
    with_workflow(monkeypatch, home, tmp_path, visits, log, rows[IDS])
    repository = export(run, tmp_path / "repository", progress=False)
    assert "dwell" in repository.record["columns"]
    log = log[~(log["dwell"] <= 1)].head(9)
    assert np.isfinite(repository.predict(log)).all()
    with pytest.raises(UserError, match="'dwell'"):
        repository.predict(log.drop(columns="dwell"))


def test_a_filter_that_does_without_is_served_without(stock, tmp_path, monkeypatch):
    """One that drops a row of our making is compared past it; with a field of lists."""
    run, _, home = stock
    rows = [*IDS, "visits", "dwell"] >> ops.Filter(
        lambda rows: rows[~(rows["dwell"] <= 1)] if "dwell" in rows.columns else rows
    )
    visits = rows["visits"] >> ops.FillMissing()
    visits = visits + (visits >> ops.Rename(name="a_week"))
    log = pd.read_parquet(home / "raw-train/0.parquet")
    with_workflow(monkeypatch, home, tmp_path, visits, log, rows[IDS])
    repository = export(run, tmp_path / "repository", progress=False)
    assert "dwell" not in repository.record["columns"]
    assert np.isfinite(repository.predict(log.head(9).drop(columns="dwell"))).all()


def test_a_request_of_which_every_id_is_missing(stock, tmp_path):
    """As of a single row; a server's client gives an empty text."""
    run, _, home = stock
    repository = export(run, tmp_path / "repository", progress=False)
    rows = pd.read_parquet(home / "raw-test/0.parquet")
    missing = rows[rows["item"].isna()]
    assert len(missing)
    among = repository.predict(rows)[missing.index]
    np.testing.assert_allclose(repository.predict(missing), among, rtol=0, atol=1e-6)
    missing.to_parquet(tmp_path / "rows.parquet")
    found = predicted(run, tmp_path / "rows.parquet", tmp_path, raw=True)
    np.testing.assert_allclose(found, among, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["object", "string", "category"])
def test_an_empty_text_is_missing_in_a_frame_as_from_a_client(stock, tmp_path, kind):
    run, _, home = stock
    repository = export(run, tmp_path / "repository", progress=False)
    rows = pd.read_parquet(home / "raw-test/0.parquet").head(20)
    empty = rows.index % 3 == 1
    missing = repository.predict(rows.assign(item=rows["item"].mask(empty, None)))
    given = rows.assign(item=rows["item"].mask(empty, "").astype(kind))
    found = repository.predict(given)
    np.testing.assert_allclose(found, missing, rtol=0, atol=1e-6)
    unknown = repository.predict(rows.assign(item=rows["item"].mask(empty, "never seen")))
    assert (np.abs(unknown - found)[empty] > 1e-6).any()


def test_a_workflow_that_needs_the_label_is_refused(stock, tmp_path, monkeypatch):
    """TargetEncoding makes nothing where its target is gone."""
    run, _, home = stock
    log = pd.read_parquet(home / "raw-train/0.parquet")
    log["liked"] = (log["rating"] > 3).astype("int8")
    encoding = ops.TargetEncoding("liked", out_path=str(tmp_path / "fitted"), kfold=1)
    visits = (["visits"] >> ops.FillMissing()) + (["item"] >> encoding >> ops.Rename(name="a_week"))
    with_workflow(monkeypatch, home, tmp_path, visits, log)
    with pytest.raises(UserError, match="whose workflow needs 'liked' to make them"):
        export(run, tmp_path / "repository", progress=False)
    assert not (tmp_path / "repository").exists()


def test_a_workflow_that_needs_what_the_label_is_made_of_is_refused(stock, tmp_path, monkeypatch):
    run, _, home = stock
    liked = ["rating"] >> ops.LambdaOp(lambda c: (c > 3).astype("int8")) >> ops.Rename(name="liked")
    encoding = ops.TargetEncoding(liked, out_path=str(tmp_path / "fitted"), kfold=1)
    means = ["item"] >> encoding >> ops.Rename(name="a_week")
    with_workflow(monkeypatch, home, tmp_path, (["visits"] >> ops.FillMissing()) + means + liked)
    with pytest.raises(UserError, match="whose workflow needs 'rating' to make them"):
        export(run, tmp_path / "repository", progress=False)


YEARS = {
    "of none": lambda column: column.str.split("/").str[1].astype("float64"),
    "refused": lambda column: column.str.removeprefix("in/").map(
        lambda year: int(year) / (int(year) - 1)
    ),
}


@pytest.mark.parametrize("case", YEARS)
def test_a_workflow_that_takes_no_row_of_ours_is_exported(
    stock, tmp_path, monkeypatch, capfd, case
):
    """Where it fails on all such rows, what is not known then is told."""
    run, _, home = stock
    log = pd.read_parquet(home / "raw-train/0.parquet")
    log["since"] = [f"in/{visits:.0f}" for visits in log["visits"].fillna(0) + 2]
    visits = ["visits"] >> ops.FillMissing()
    since = ["since"] >> ops.LambdaOp(YEARS[case]) >> ops.Rename(name="a_week")
    with_workflow(monkeypatch, home, tmp_path, visits + since, log)
    with pytest.warns(Notice) as found:
        repository = export(run, tmp_path / "repository", progress=False)
    told = [str(one.message) for one in found if "was not tried" in str(one.message)]
    assert len(told) == (case == "refused")
    words = "ZeroDivisionError: .*; an empty text in .*'since' is served as a missing one. Hold"
    assert all(re.search(words, one) for one in told)
    assert "Traceback" not in capfd.readouterr().err
    found = repository.predict(log.head(9))
    assert np.isfinite(found).all()


def test_past_a_filter_what_is_exported_is_tried_as_well(stock, tmp_path, monkeypatch):
    """A row of our making is none of those that it keeps; an operator reads beside its column."""
    run, _, home = stock
    rows = [*IDS, "visits", "dwell"] >> ops.Filter(lambda rows: rows[~(rows["visits"] == 1)])
    visits = rows["visits", "dwell"] >> ops.FillMissing()
    a_week = visits >> ops.LambdaOp(lambda c, rows: c / rows["dwell"]) >> ops.Rename(postfix="_")
    a_week = a_week["visits_"] >> ops.Rename(name="a_week")
    with_workflow(monkeypatch, home, tmp_path, visits["visits"] + a_week, ids=rows[IDS])
    with pytest.raises(UserError, match="without 'dwell' fails: KeyError: 'dwell'"):
        export(run, tmp_path / "repository", progress=False)


@pytest.fixture
def odd_texts(stock, tmp_path, monkeypatch) -> tuple[Repository, pd.DataFrame, np.ndarray]:
    """Exported: an operator before Categorify, an empty text that is an id, a first list of none.

    Some rows, and what `predict --raw` writes of them.
    """
    run, _, home = stock
    log = pd.read_parquet(home / "raw-train/0.parquet")
    log["item"] = log["item"].replace("i0", "")
    log["genres"] = [[], *log["genres"][1:]]
    log.to_parquet(tmp_path / "raw.parquet")
    items = ["item"] >> ops.FillMissing("i1") >> ops.Categorify(out_path=str(tmp_path / "items"))
    ids = ["user", "genres"] >> ops.Categorify(out_path=str(tmp_path / "ids"))
    a_week = ["weeks"] >> ops.Rename(name="a_week")
    workflow = nvt.Workflow(ids + items + (["visits"] >> ops.FillMissing()) + a_week)
    workflow.fit(nvt.Dataset(str(tmp_path / "raw.parquet"), engine="parquet"))
    workflow.save(str(tmp_path / "workflow"))
    monkeypatch.setattr(
        Run, "workflow", lambda *_, trust=False: nvt.Workflow.load(str(tmp_path / "workflow"))
    )
    rows = log[["user", "item", "genres", "visits", "weeks"]].head(60)
    rows.to_parquet(tmp_path / "rows.parquet")
    expected = predicted(run, tmp_path / "rows.parquet", tmp_path, raw=True)
    written = as_binary(pq.read_table(tmp_path / "rows.parquet"))
    pq.write_table(written, tmp_path / "binary.parquet")
    (tmp_path / "scores.parquet").unlink()
    found = predicted(run, tmp_path / "binary.parquet", tmp_path, raw=True)
    np.testing.assert_array_equal(found, expected)
    return export(run, tmp_path / "repository", progress=False), rows, expected


def as_bytes(frame: pd.DataFrame) -> pd.DataFrame:
    genres = [[genre.encode() for genre in row] for row in frame["genres"]]
    items = [item if item is None else item.encode() for item in frame["item"]]
    return frame.assign(item=items, genres=genres)


def test_text_is_the_same_wherever_it_comes_from(odd_texts, capfd):
    """As text, as bytes, from a server's client, in a file; and where it is empty."""
    repository, rows, expected = odd_texts
    assert (rows["item"] == "").any()
    assert not len(rows["genres"][0])
    assert repository.record["inputs"]["genres__values"] == "TYPE_STRING"
    for frame in (rows, as_bytes(rows), rows.astype({"item": "category"}), as_bytes(rows)[::-1]):
        found = repository.predict(frame)
        np.testing.assert_allclose(found, expected[frame.index], rtol=0, atol=1e-6)
    (encode,) = [
        node.op
        for node in postorder_iter_nodes(
            repository.ensemble().graph.output_node, flatten_subgraphs=True
        )
        if isinstance(node.op, ServedWorkflow)
    ]
    there = rows[rows["item"].notna()]  # no client can send another
    here = encode.transform(None, there).to_dict()
    sent = TensorTable(request(there, repository.record))
    for name, found in encode.transform(None, sent).to_dict().items():
        np.testing.assert_array_equal(found, here[name], err_msg=name)

    fitted = "that it had at the first rows of the workflow's fit. Received: "
    refused = [
        (rows.assign(user=rows["user"].astype(str)), f"{fitted}string in column 'user' of a req"),
        (rows.assign(user=rows["user"] + 0.5), r"must be a whole one.*\.5 in row 1.* 'user'"),
        (
            rows.assign(item=5),
            f"{fitted}int64 in column 'item' .*, which was text. Give it as text",
        ),
        (rows.assign(item=b"\xff"), r"text must be UTF-8. Received: b'\\xff' in row 1, column 'i"),
        (rows.assign(genres=[["g1", "g2"], [4]] * 30), "of one type. Received: column 'genres'"),
        (rows.assign(visits="many"), f"{fitted}string in column 'visits'"),
        (rows.assign(weeks=pd.Timestamp(0)), f"{fitted}timestamp.* in column 'weeks'"),
    ]
    for frame, words in refused:
        with pytest.raises(UserError, match=words):
            repository.predict(frame)
    assert "Traceback" not in capfd.readouterr().err
    same = rows.astype({"user": float, "visits": object, "weeks": "Int64"})
    np.testing.assert_allclose(repository.predict(same), expected, rtol=0, atol=1e-6)


def rare_texts(data: Any, percent: float) -> tuple[dict[str, set[str]], int]:
    """The rare ids of each field, which are the rarest, and as many as fit; and how often most."""
    kept = rare_ids(data, percent).kept
    tables = {field: data.counts(field) for field in data.spec.ids}
    total = sum(table["count"].sum() for table in tables.values())
    rare = {f: t[~t["id"].isin(kept[f])] for f, t in tables.items()}
    stay = [t[t["id"].isin(kept[f]) & t["raw"].notna()]["count"] for f, t in tables.items()]
    least, held = pd.concat(stay).min(), sum(t["count"].sum() for t in rare.values())
    most = max(t["count"].max() for t in rare.values() if len(t))
    assert most <= least
    assert held <= total * percent / 100 < held + least
    assert all(t["raw"].notna().all() for t in rare.values())
    return {f: set(t["raw"]) for f, t in rare.items()}, int(most)


def test_rare_rows_are_dropped_where_one_says_so(shop, tmp_path, capsys):
    """What is exported without them answers their ids as new ones, and is as good as was told."""
    run, path, repository = shop
    data = run.data()
    rare, most = rare_texts(data, 5)
    assert all(rare[field] for field in ("user.id", "tags"))
    argv = ["export", str(run.path), "--out", str(tmp_path / "small"), "--drop-rare", "5"]
    assert main([*argv, "--rare", "1,5", "--quiet"]) == 0
    one, five, *_ = capsys.readouterr().out.splitlines()
    assert one.startswith("last 1 % of occurrences")
    assert f"(ids whose count is {most} at most)" in five
    small = Repository.open(tmp_path / "small")
    assert small.record["dropped"] == {"percent": 5.0, "most": most}
    count = sum(map(len, rare.values()))
    vocabulary = sum(data.cardinalities.values())
    rows = 2 * count  # embeddings of 3 columns, and the linear part's of 1
    assert (
        f"{rows:,} of {2 * vocabulary:,} rows, {16 * count:,} of {16 * vocabulary:,} bytes" in five
    )
    sizes = [
        sum(file.stat().st_size for file in folder.rglob("variables.data-*"))
        for folder in (repository, small.path)
    ]
    assert sizes[0] - sizes[1] == 16 * count

    frame = shop_frame(path)
    renamed = frame.assign(
        **{n: frame[n].where(~frame[n].isin(rare[n]), "of no row") for n in ("user.id", "item")},
        **{
            name: [["of no row" if v in rare[name] else v for v in row] for row in frame[name]]
            for name in ("2-genres", "tags")
        },
    )
    assert (renamed["user.id"] != frame["user.id"]).any()
    expected = Repository.open(repository).predict(renamed)
    np.testing.assert_allclose(small.predict(frame), expected, rtol=0, atol=1e-6)

    test = frame[-data.rows["test"] :]
    labels = pd.read_csv(path)["bought"].to_numpy()[-len(test) :]
    auc = [roc_auc_score(labels, r.predict(test)) for r in (small, Repository.open(repository))]
    assert f"without them {auc[0]:.6f}, with them {auc[1]:.6f} ({auc[0] - auc[1]:+.6f})" in five


@pytest.mark.slow
def test_of_an_adopted_pipeline_rare_rows_are_dropped(stock, tmp_path):
    run, data, home = stock
    frame = pd.read_parquet(home / "raw-test/0.parquet")
    rare, most = rare_texts(data, 5)
    small = export(run, tmp_path / "small", drop_rare=5, progress=False)
    whole = export(run, tmp_path / "whole", progress=False)
    user = {int(text) for text in rare["user"]}
    assert frame["user"].isin(user).any()
    renamed = frame.assign(
        user=frame["user"].where(~frame["user"].isin(user), -1),
        genres=[[("?" if g in rare["genres"] else g) for g in row] for row in frame["genres"]],
        item=frame["item"].where(~frame["item"].isin(rare["item"]), "?"),
    )
    np.testing.assert_allclose(small.predict(frame), whole.predict(renamed), rtol=0, atol=1e-6)
    (cost,) = rare_costs(run, [5], progress=False)
    assert cost.most == most
    assert cost.rows == 2 * sum(map(len, rare.values()))


def test_fields_whose_rare_rows_stay_are_told(stock, tmp_path, monkeypatch):
    """NVTabular's own hash buckets answer what a vocabulary left out."""
    run, _, home = stock
    log = pd.read_parquet(home / "raw-train/0.parquet")[["user", "item", "rating"]]
    ids = ["user"] >> ops.Categorify(freq_threshold=3, num_buckets=5, out_path=f"{tmp_path}/a")
    ids += ["item"] >> ops.Categorify(out_path=f"{tmp_path}/b")
    ids += ["user"] >> ops.HashBucket(9) >> ops.Rename(name="hashed")
    workflow = nvt.Workflow(ids + (["rating"] >> ops.LambdaOp(lambda c: (c > 3).astype("int8"))))
    workflow.fit(nvt.Dataset(log)).save(str(tmp_path / "workflow"))
    workflow.transform(nvt.Dataset(log)).to_parquet(str(tmp_path / "train"))
    parts = (tmp_path / "train", tmp_path / "workflow", "rating", tmp_path / "data")
    data = adopt(*parts, progress=False)
    kept = rare_ids(data, 20).kept
    assert {name for name, ids in kept.items() if len(ids) == data.cardinalities[name]} == {
        "user",
        "hashed",
    }
    words = "all rows of 'user' stay, those of rare ids too"
    others = (
        f"ids are counted in {data.path}, whose training rows are others than those of {run.path}"
    )
    with pytest.warns(Notice, match=words), pytest.warns(Notice, match=re.escape(others)):
        tell_of_what_is_counted(run, data)

    # Of what is exported, or counted, the same; and of the run's own rows nothing else.
    monkeypatch.setattr(rare_rows, "_fields_that_stay_whole", lambda data: ["user"])
    for call in (
        lambda: rare_costs(run, [5], progress=False),
        lambda: export(run, tmp_path / "served", drop_rare=5, progress=False),
    ):
        with pytest.warns(Notice) as found:
            call()
        (told,) = [str(one.message) for one in found if one.category is Notice]
        assert words in told


def test_padding_is_no_occurrence(stock, tmp_path):
    """As in lists that a pipeline has padded with 0; in a field of one id each 0 is an id."""
    data = stock[1]
    padded = replace(data, path=tmp_path / "data")
    shutil.copytree(data.path, padded.path)
    counts = data.counts("genres")
    counts.loc[0, "count"] = 10 * counts["count"].sum()
    write_counts(padded.path / "counts", "genres", counts["count"].to_numpy(), raw_of(counts))
    assert padded.counts("genres")["count"][0] > 0
    for percent in (1, 5, 20):
        expected, found = rare_ids(data, percent), rare_ids(padded, percent)
        assert expected.occurrences > 0
        assert found.occurrences == expected.occurrences
        np.testing.assert_equal(found.kept, expected.kept)


def raw_of(counts: pd.DataFrame) -> pa.Array:
    """The raw ids, as `write_counts` takes them."""
    return pa.array(counts["raw"][counts["raw"].notna()], pa.string())


def test_where_unknown_ids_are_hashed_rare_ones_are(tmp_path):
    """As `prepare` hashes them where its threshold is that of the rare ids."""
    write_shop(shop_log(), tmp_path / "log.csv")

    def prepared(threshold: int) -> PreparedData:
        spec = replace(SHOP, freq_threshold=threshold, hash_buckets={"user": 7, "tags": 3})
        return prepare(spec, [tmp_path / "log.csv"], tmp_path / f"{threshold}", progress=False)

    data = prepared(2)
    rare = rare_ids(data, 10)
    assert rare.most > 2
    frequent = prepared(rare.most + 1)
    for field, buckets in (("user", 7), ("tags", 3), ("item", 1)):
        counts = data.counts(field)
        is_rare = ~counts["id"].isin(rare.kept[field])
        texts = counts["raw"][is_rare]
        assert len(texts) or field == "item"
        (node,) = Graph.get_nodes_by_op_type([frequent.workflow().output_node], EncodeIds)
        found = node.op.transform(ColumnSelector([field]), pd.DataFrame({field: texts}))
        np.testing.assert_array_equal(rare.answered_as[field][is_rare], found[field])
        assert len(texts) == 0 or found[field].max() < 2 + buckets


def test_a_repository_that_was_changed_is_refused(shop, tmp_path):
    """Its pickles run as they are loaded."""
    frame = shop_frame(shop[1]).head(3)
    shutil.copytree(shop[2], tmp_path / "repository")
    repository = Repository.open(tmp_path / "repository")
    (tmp_path / "repository/executor_model/1/more.py").write_text("")
    with pytest.raises(UserError, match="must have no other files in executor_model"):
        repository.predict(frame)
    repository.predict(frame, trust=True)
    (tmp_path / "repository/executor_model/1/more.py").unlink()
    pickled = tmp_path / "repository/executor_model/1/ensemble/ensemble.pkl"
    pickled.write_bytes(pickled.read_bytes()[:-1] + b"!")
    with pytest.raises(UserError, match="whose content has changed"):
        repository.predict(frame)
