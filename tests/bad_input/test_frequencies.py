"""Bad input to `frequencies`, and what may happen to a prepared folder while it is used."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from merlin_cowclip.workflows import folders
from merlin_cowclip.workflows.data.datasets import DatasetSpec, Split
from merlin_cowclip.workflows.data.etl import prepare
from merlin_cowclip.workflows.data.frequencies import CountDistribution, frequencies
from merlin_cowclip.workflows.data.prepared import PreparedData
from merlin_cowclip.workflows.data.top_ids import keep_top_ids
from merlin_cowclip.workflows.errors import UserError
from tests.bad_input.contract import command, listing, refused

ROWS = 200
SPEC = DatasetSpec(
    name="toy",
    label="y",
    categorical=("user", "item"),
    continuous=("price",),
    split=Split("random", 0.25),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("frequencies")
    random = np.random.default_rng(0)
    pd.DataFrame(
        {
            "y": random.integers(0, 2, ROWS),
            "user": random.integers(0, 9, ROWS),
            "item": random.integers(0, 5, ROWS),
            "price": random.normal(5, 3, ROWS).round(2),
        }
    ).to_csv(home / "log.csv", index=False)
    return prepare(SPEC, [home / "log.csv"], home / "data", progress=False).path


@pytest.fixture
def data(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "data"))


TOP = ["--top-k", "2", "--out", "OUT"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--batch-sizes", "0"], ["batch sizes must be positive", "0"]),
        (["--batch-sizes", "1024", "-5"], ["batch sizes must be positive", "-5"]),
        (["--fields", "color"], ["'user', 'item'", "'color'"]),
        (["--fields", "price"], ["'user', 'item'", "'price'"]),
        (["--fields", "y"], ["'user', 'item'", "'y'"]),
        (["--fields", ""], ["'user', 'item'", "''"]),
        (["--fields", "user", "User"], ["'User'"]),
        (["--fields", "x" * 5_000], ["field must be one of"]),
        (["--out", "EXISTS"], ["must not exist", "EXISTS"]),
        (["--out", "DATA"], ["must not exist", "data"]),
        (["--out", "FILE/out"], ["output folder", "Not a directory"]),
        (["--out", "DANGLING"], ["must not exist", "DANGLING"]),
        (["--out", "x" * 300], ["output folder", "too long"]),
        (["--out", "x" * 300 + "/out"], ["output folder", "too long"]),
        (["--out", "LOOP/out"], ["output folder", "LOOP"]),
        (["--top-k", "2"], ["--top-k needs --out"]),
        (["--top-k", "0", "--out", "OUT"], ["top-k must be a whole number of at least 1", "0"]),
        (["--top-k", "-3", "--out", "OUT"], ["top-k", "-3"]),
        ([*TOP, "--fields", "user"], ["--top-k excludes --fields"]),
        ([*TOP, "--batch-sizes", "4"], ["--top-k excludes --batch-sizes"]),
        (["--top-k", "2", "--out", "EXISTS"], ["must not exist", "EXISTS"]),
        (["--top-k", "2", "--out", "FILE/out"], ["output folder", "Not a directory"]),
        (["--top-k", "2", "--out", "x" * 300], ["output folder", "too long"]),
    ],
    ids=lambda value: None if "must" in " ".join(value) else " ".join(value)[:40],
)
def test_options(data, tmp_path, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "EXISTS").mkdir()
    (tmp_path / "FILE").touch()
    (tmp_path / "DANGLING").symlink_to("nowhere")
    (tmp_path / "LOOP").symlink_to("LOOP")
    options = [str(data) if option == "DATA" else option for option in options]
    refused(["frequencies", data, *options], words, folder=tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        ["--batch-sizes", "1e3"],
        ["--batch-sizes", "many"],
        ["--batch-sizes"],
        ["--top-k", "2.5"],
        ["--top-k", "all"],
        ["--fields"],
        ["--out"],
        ["--nothing"],
        ["another"],
    ],
    ids=" ".join,
)
def test_what_the_parser_refuses(data, tmp_path, options):
    before = listing(tmp_path)
    done = command(["frequencies", data, *options])
    assert done.code == 2
    assert "Traceback" not in done.err
    assert done.err.strip().splitlines()[-1].startswith("merlin-cowclip")
    assert listing(tmp_path) == before


@pytest.mark.parametrize("size", [2**63, 2**53 + 1, 10**400])
def test_batches_beyond_any(data, tmp_path, size):
    words = ["batch sizes must be", "at most 2^53"]
    refused(["frequencies", data, "--batch-sizes", size], words, folder=tmp_path)


def test_a_batch_that_times_a_count_is_beyond_int64(data):
    """The product was negative, and every id with it rare."""
    found = frequencies(PreparedData.open(data), batch_sizes=[2**53], progress=False)
    row = found.summary.iloc[0]
    assert (row[f"rare_{2**53}"], row[f"in_batch_{2**53}"]) == (0, 1)
    distribution = CountDistribution.of(np.array([2000]))
    assert distribution.rare(10**9, 2**53) == 0


def test_a_second_time_is_refused(data, tmp_path):
    assert command(["frequencies", data]).code == 0
    refused(["frequencies", data], ["must not exist", "data/frequencies"], folder=tmp_path)


def test_top_k_of_an_adopted_pipeline(data, tmp_path):
    opened = PreparedData.open(data)
    adopted = dataclasses.replace(opened, record={**opened.record, "files": {}})
    before = listing(tmp_path)
    with pytest.raises(UserError, match="Received: .*, an adopted pipeline. Prepare its raw logs"):
        keep_top_ids(adopted, 2, tmp_path / "out")
    assert listing(tmp_path) == before


def test_top_k_of_data_that_changes_while_it_is_read(data, tmp_path, monkeypatch):
    opened = PreparedData.open(data)
    (data / "workflow" / "workflow.pkl").unlink()
    before = listing(tmp_path)
    with pytest.raises(UserError, match="workflow.pkl"):
        keep_top_ids(opened, 2, tmp_path / "out", progress=False)
    assert listing(tmp_path) == before


# Folders


def test_two_at_once_leave_one_whole_folder(data, tmp_path):
    """Each writes a folder of its own; the first has the name, the others a sentence.

    What a slower one has written whole by then lies beside it, where the sentence says.
    """
    opened = PreparedData.open(data)
    ended = []

    def run() -> None:
        try:
            frequencies(opened, tmp_path / "out", progress=False)
            ended.append("done")
        except UserError as error:
            ended.append(str(error))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ended.count("done") == 1
    refusals = [text for text in ended if text != "done"]
    assert all("output folder must not exist" in text for text in refusals)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"frequencies.parquet", "frequencies.png", "summary.parquet"}
    assert pq.read_metadata(tmp_path / "out" / "frequencies.parquet").num_rows == 9 + 5
    beside = {Path(text.split(" ")[-1]).name for text in refusals if "lies in" in text}
    assert {path.name for path in tmp_path.iterdir()} == {"data", "out", *beside}
    assert all({p.name for p in (tmp_path / name).iterdir()} == names for name in beside)


@pytest.mark.parametrize("made", [Path.mkdir, Path.touch], ids=["folder", "file"])
def test_a_name_taken_at_the_last_moment(tmp_path, monkeypatch, made):
    """Between the look whether it is there and the renaming."""
    out = tmp_path / "out"

    def rename(source: Path, target: Path) -> None:
        if target == out:
            made(out)
            if out.is_dir():
                (out / "theirs").touch()
        os.replace(source, target)

    monkeypatch.setattr(folders.os, "rename", rename)
    with (
        pytest.raises(UserError, match="output folder must not exist.*lies in") as refusal,
        folders.all_or_nothing(out) as folder,
    ):
        (folder / "ours").touch()
    beside = Path(str(refusal.value).split(" ")[-1])
    assert {path.name for path in tmp_path.iterdir()} == {"out", beside.name}
    assert [path.name for path in beside.iterdir()] == ["ours"]
    assert not (out / "ours").exists()


def test_a_folder_that_cannot_be_written(data, tmp_path, monkeypatch):
    """A prepared folder on a read-only disk: it is read, and what is written goes elsewhere."""

    mkdir = Path.mkdir

    def read_only(path: Path, *arguments: Any, **options: Any) -> None:
        if data in path.parents:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        mkdir(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", read_only)
    words = ["can be written", "data/frequencies", "Read-only file system", "Name another"]
    refused(["frequencies", data], words, folder=tmp_path)
    assert command(["frequencies", data, "--out", tmp_path / "out"]).code == 0
