"""One prepared folder for all tests of the loader and of training; runs that were interrupted."""

import dataclasses
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from merlin_cowclip.workflows.data.prepare.pipeline import prepare
from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.training import loader

from .batches import ROWS, SPEC, TRAIN, VALID
from .interrupted import Runs


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> PreparedData:
    home = tmp_path_factory.mktemp("loader")
    log(home / "log.csv", ROWS, seed=0)
    log(home / "valid.csv", VALID, seed=1)
    split = dataclasses.replace(SPEC.split, valid=(str(home / "valid.csv"),))
    spec = dataclasses.replace(SPEC, split=split)
    return prepare(spec, [home / "log.csv"], home / "data", progress=False)


def log(path: Path, rows: int, seed: int) -> None:
    random = np.random.default_rng(seed)

    def ids_of(field: str, most: int) -> list[str]:
        return [
            "|".join(f"{field}{i}" for i in random.integers(0, 9, random.integers(0, most)))
            for _ in range(rows)
        ]

    pd.DataFrame(
        {
            "y": random.integers(0, 2, rows),
            "user": [f"u{u}" for u in random.zipf(1.5, rows) % 400],
            "item": random.integers(0, 40, rows),
            "serial": random.permutation(rows),
            "price": random.normal(5, 3, rows),
            "genres": ids_of("g", 4),
            "tags": ids_of("t", 3),
        }
    ).to_csv(path, index=False)


@pytest.fixture(scope="session")
def on_disk(data) -> dict[str, pd.DataFrame]:
    """The training and the test part in the order on disk, lists as tuples."""
    parts = {}
    for part in ("train", "test"):
        files = sorted((data.path / part).glob("*.parquet"))
        frame = pd.concat([pd.read_parquet(file) for file in files], ignore_index=True)
        for name in SPEC.lists:
            frame[name] = frame[name].map(lambda ids: tuple(int(i) for i in ids))
        parts[part] = frame
    assert len(parts["train"]) == TRAIN
    assert parts["train"]["serial"].is_unique
    return parts


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
    """A run that is never interrupted."""
    return runs.reference("reference")


@pytest.fixture(scope="session")
def stopped(runs) -> Path:
    """A run that was stopped in its second epoch, after update 18 of 32, to copy."""
    run = runs.home / "stopped"
    done = runs.begin(run, place="in the second epoch@SIGINT")
    assert done.returncode == 130, done.stderr
    return run
