"""What a run is given to score, and is not as it should be: `predict`, `evaluate` on raw logs."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest

from merlin_cowclip.workflows.training import prediction
from tests.bad_input.conftest import toy_log
from tests.bad_input.contract import command, refused

Change = Callable[[pd.DataFrame], pd.DataFrame]


def put(column: str, row: int, value: object) -> Change:
    def change(log: pd.DataFrame) -> pd.DataFrame:
        log = log.astype({column: object})
        log.loc[row, column] = value
        return log

    return change


def without(*columns: str) -> Change:
    return lambda log: log.drop(columns=list(columns))


ROWS = [
    ("no user", without("user"), ["every column", "Missing: 'user' in", "which has: 'y'"]),
    ("two gone", without("user", "genres"), ["Missing: 'user', 'genres' in", "log.csv"]),
    ("a word", put("price", 7, "cheap"), ["a number must", "'cheap'", "line 9", "'price'"]),
    ("inf", put("price", 7, "inf"), ["a number must be finite", "line 9", "'price'"]),
    ("a label of 2", put("y", 0, 2), ["label must be 0 or 1", "line 2", "'y'"]),
    ("a label that is missing", put("y", 4, None), ["label must be 0 or 1", "line 6"]),
    ("no row", lambda log: log[:0], ["input file must not be empty", "log.csv"]),
]


@pytest.fixture
def log(tmp_path) -> Path:
    return toy_log(tmp_path / "log.csv", rows=60)


def score(run: Path, tmp_path: Path, *inputs: Path) -> list:
    return ["predict", run, *inputs, "--out", tmp_path / "scores.parquet"]


@pytest.mark.parametrize(("change", "words"), [pytest.param(*r[1:], id=r[0]) for r in ROWS])
@pytest.mark.parametrize("how", ["predict", "evaluate"])
def test_rows(toy_run, tmp_path, log, change, words, how):
    change(pd.read_csv(log)).to_csv(log, index=False)
    argv = score(toy_run, tmp_path, log) if how == "predict" else ["evaluate", toy_run, log]
    refused(argv, words, folder=tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(put("price", 7, "cheap"), ["'price' must be a column of numbers"], id="text"),
        pytest.param(
            lambda log: put("price", 7, float("inf"))(log).astype({"price": float}),
            ["a number must be finite", "row 8", "'price'"],
            id="inf",
        ),
        pytest.param(without("item"), ["Missing: 'item' in"], id="no item"),
    ],
)
def test_rows_in_parquet(toy_run, tmp_path, log, change, words):
    frame = change(pd.read_csv(log)).astype({"price": object}, errors="ignore")
    frame["genres"] = frame["genres"].str.split("|")
    if words[0].startswith("'price'"):
        frame["price"] = frame["price"].astype(str)
    else:
        frame["price"] = frame["price"].astype(float)
    path = tmp_path / "log.parquet"
    frame.to_parquet(path)
    refused(score(toy_run, tmp_path, path), [*words, "log.parquet"], folder=tmp_path)


def damaged(log: Path) -> Path:
    path = log.with_suffix(".csv.gz")
    path.write_bytes(gzip.compress(log.read_bytes())[:-20])
    return path


@pytest.mark.parametrize(
    ("make", "words"),
    [
        pytest.param(lambda log: log.with_name("none"), ["input file must exist"], id="none"),
        pytest.param(lambda log: log.with_name("*.txt"), ["must match a file"], id="no match"),
        pytest.param(lambda log: log.parent, ["input must be a file"], id="a folder"),
        pytest.param(damaged, ["a .gz file must be whole", "log.csv.gz"], id="half a file"),
    ],
)
def test_files(toy_run, tmp_path, log, make, words):
    refused(score(toy_run, tmp_path, make(log)), words, folder=tmp_path)


def test_some_with_a_label_and_some_without(toy_run, tmp_path, log):
    bare = tmp_path / "bare.csv"
    without("y")(pd.read_csv(log)).to_csv(bare, index=False)
    words = ["all files must have the label, or none", "log.csv with column 'y'", "bare.csv"]
    refused(score(toy_run, tmp_path, log, bare), words, folder=tmp_path)
    words = ["must have labels of 0 and of 1", "bare.csv, without column 'y'", "predict"]
    refused(["evaluate", toy_run, bare], words, folder=tmp_path)


def test_one_label_alone(toy_run, tmp_path, log):
    pd.read_csv(log).assign(y=1).to_csv(log, index=False)
    words = ["must have labels of 0 and of 1", "only 1, in 60 rows"]
    refused(["evaluate", toy_run, log], words, folder=tmp_path)
    assert command(score(toy_run, tmp_path, log)).code == 0


@pytest.mark.parametrize(
    ("out", "words"),
    [
        ("there.parquet", ["output file must not exist", "there.parquet", "Name another"]),
        ("scores.csv", ["output file must be named *.parquet", "scores.csv"]),
        ("scores", ["output file must be named *.parquet"]),
        ("log.csv/scores.parquet", ["output file must be in a folder that can be written"]),
        ("x" * 300 + ".parquet", ["output file must be in a folder that can be written"]),
    ],
)
def test_places(toy_run, tmp_path, log, out, words):
    (tmp_path / "there.parquet").write_text("mine")
    refused(["predict", toy_run, log, "--out", tmp_path / out], words, folder=tmp_path)


@pytest.mark.parametrize("size", [0, -1])
@pytest.mark.parametrize("how", ["predict", "evaluate", "evaluate the run's own"])
def test_batches_of_no_rows(toy_run, tmp_path, log, size, how):
    argv = {
        "predict": score(toy_run, tmp_path, log),
        "evaluate": ["evaluate", toy_run, log],
    }.get(how, ["evaluate", toy_run])
    refused([*argv, "--batch-size", size], ["batch size must be", size], folder=tmp_path)


def test_an_error_at_the_end_leaves_nothing(toy_run, tmp_path, monkeypatch):
    """What was written before is gone, the file's folders too."""
    monkeypatch.setattr(prediction, "GROUP_ROWS", 10)
    log = toy_log(tmp_path / "log.csv", rows=30_000)
    with log.open("a") as file:
        file.write("1,u,i,expensive,g1\n")
    argv = ["predict", toy_run, log, "--out", tmp_path / "new" / "scores.parquet"]
    refused([*argv, "--batch-size", 64], ["'expensive'", "line 30002"], folder=tmp_path)


def test_a_file_that_appears_meanwhile_is_let_be(toy_run, tmp_path, log, monkeypatch):
    """The scores are whole all the same, under a name beside it."""
    out = tmp_path / "scores.parquet"
    write = prediction._write

    def slow(*arguments):
        rows = write(*arguments)
        out.write_text("mine")
        return rows

    monkeypatch.setattr(prediction, "_write", slow)
    done = command(["predict", toy_run, log, "--out", out])
    assert done.code == 2
    assert out.read_text() == "mine"
    (beside,) = tmp_path.glob("scores-*.parquet")
    assert str(beside) in done.err
    assert len(pq.read_table(beside)) == 60
    assert not list(tmp_path.glob(".*"))
