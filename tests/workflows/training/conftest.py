"""One prepared folder for all tests of the loader and of training; runs that were interrupted."""

import dataclasses
from pathlib import Path

import pandas as pd
import pytest

from merlin_cowclip.workflows.data.prepare.pipeline import prepare
from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.training import loader
from tests.kills import Runs
from tests.logs import click_log, rows_of, write_csv, write_log

from .batches import ROWS, SPEC, VALID


@pytest.fixture(scope="session")
def log() -> pd.DataFrame:
    return click_log(ROWS)


@pytest.fixture(scope="session")
def data(log, tmp_path_factory) -> PreparedData:
    home = tmp_path_factory.mktemp("loader")
    write_csv(log, home / "log.csv")
    split = dataclasses.replace(SPEC.split, valid=(str(write_log(home / "valid.csv", VALID, 1)),))
    spec = dataclasses.replace(SPEC, split=split)
    return prepare(spec, [home / "log.csv"], home / "data", progress=False)


@pytest.fixture(scope="session")
def on_disk(data) -> dict[str, pd.DataFrame]:
    """The training and the test part in the order on disk, lists as tuples."""
    return {part: rows_of(data, part) for part in ("train", "test")}


@pytest.fixture
def small_windows(monkeypatch) -> int:
    """Windows of two row groups and of a number of rows that no batch divides."""
    monkeypatch.setattr(loader, "WINDOW_ROWS", 320)
    monkeypatch.setattr(loader, "BLOCK_ROWS", 80)
    return 320


@pytest.fixture(scope="session")
def runs(interpreter, data, tmp_path_factory) -> Runs:
    return Runs(interpreter, data.path, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def reference(runs) -> Path:
    """A run that is never interrupted, with all its checkpoints."""
    return runs.finish("reference", "--keep", 99)


@pytest.fixture(scope="session")
def stopped(runs) -> Path:
    """A run that was stopped in its second epoch, after update 18 of 32, to copy."""
    run = runs.home / "stopped"
    ended = runs.start(run, place="trainer.Trainer.see:18@SIGINT")
    assert ended.returncode == 130, ended.stderr
    return run
