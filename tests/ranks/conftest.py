"""A little log, what one process and two ranks train on it, and what ranks do in scripts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from merlin_cowclip.workflows import Run
from merlin_cowclip.workflows.commands.main import main
from merlin_cowclip.workflows.data.etl import prepare
from tests.bad_input.conftest import TOY, toy_log

from .cases import OF_RANKS
from .launch import on_ranks

COMMAND = [sys.executable, "-m", "merlin_cowclip.workflows.commands.main"]
ROWS, BATCH, EPOCHS = 126, 18, 3
FALLING = ["--dense-schedule", "cosine:to=0.1", "--embedding-schedule", "cosine"]
OPTIONS = ["--batch-size", BATCH, "--epochs", EPOCHS, "--embedding-dim", 3, "--mlp", "6", *FALLING]


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """126 training rows, 7 batches of 18, which 2 and 3 ranks can share."""
    home = tmp_path_factory.mktemp("data")
    log = toy_log(home / "log.csv", rows=180)
    return prepare(TOY, [log], home / "data", progress=False).path


@pytest.fixture(scope="session")
def one(data, tmp_path_factory) -> Run:
    """What one process trains."""
    out = tmp_path_factory.mktemp("one") / "run"
    assert main(["train", str(data), "--out", str(out), *map(str, OPTIONS)]) == 0
    return Run.open(out)


@pytest.fixture(scope="session")
def in_shards(data, tmp_path_factory) -> Path:
    """What two ranks train with tables in shards."""
    out = tmp_path_factory.mktemp("shards") / "run"
    ended = on_ranks(2, [*COMMAND, "train", data, "--out", out, *OPTIONS, "--tables", "sharded"])
    assert ended.code == 0, ended
    return out


@pytest.fixture(scope="session")
def results(data, tmp_path_factory) -> dict[int, Path]:
    """Folders of what the ranks of two launches have written, by their number."""
    folders = {}
    for ranks, names in OF_RANKS.items():
        folders[ranks] = tmp_path_factory.mktemp(f"of_{ranks}")
        command = [sys.executable, "-m", "tests.ranks.program", folders[ranks], data, *names]
        ended = on_ranks(ranks, command)
        assert ended.code == 0, ended
    return folders
