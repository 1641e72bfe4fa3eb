"""A small log, and runs of one process and of two ranks on it."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from merlin_cowclip.workflows import Run
from merlin_cowclip.workflows.commands.main import main
from merlin_cowclip.workflows.data.prepare.pipeline import prepare
from merlin_cowclip.workflows.data.spec import DatasetSpec, Split

from .cases import LAUNCHES
from .launch import on_ranks

COMMAND = [sys.executable, "-m", "merlin_cowclip.workflows.commands.main"]
BATCH, EPOCHS = 18, 3
FALLING = ["--dense-schedule", "cosine:to=0.1", "--embedding-schedule", "cosine"]
OPTIONS = ["--batch-size", BATCH, "--epochs", EPOCHS, "--embedding-dim", 3, "--mlp", "6", *FALLING]
SPEC = DatasetSpec(
    name="toy",
    label="y",
    categorical=("user", "item"),
    continuous=("price",),
    lists=("genres",),
    split=Split("random", 0.3),
)


def prepared(home: Path, seed: int = 0) -> Path:
    """126 training rows, 7 batches of 18, which 2 and 3 ranks can share."""
    random = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "y": random.integers(0, 2, 180),
            "user": random.integers(0, 9, 180),
            "item": random.integers(0, 9, 180),
            "price": random.normal(5, 3, 180).round(2),
            "genres": [f"g{g}|g{g + 1}" for g in random.integers(0, 5, 180)],
        }
    )
    frame.to_csv(home / f"log{seed}.csv", index=False)
    frame.sample(45, random_state=seed).to_csv(home / f"valid{seed}.csv", index=False)
    split = dataclasses.replace(SPEC.split, valid=(str(home / f"valid{seed}.csv"),))
    spec = dataclasses.replace(SPEC, split=split)
    return prepare(spec, [home / f"log{seed}.csv"], home / f"data{seed}", progress=False).path


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    return prepared(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def one(data, tmp_path_factory) -> Run:
    """A run of one process."""
    out = tmp_path_factory.mktemp("one") / "run"
    assert main(["train", str(data), "--out", str(out), *map(str, OPTIONS)]) == 0
    return Run.open(out)


@pytest.fixture(scope="session")
def in_shards(data, tmp_path_factory) -> Path:
    """A run of two ranks with sharded tables."""
    out = tmp_path_factory.mktemp("shards") / "run"
    ended = on_ranks(2, [*COMMAND, "train", data, "--out", out, *OPTIONS, "--tables", "sharded"])
    assert ended.code == 0, ended
    return out


@pytest.fixture(scope="session")
def launched(data, tmp_path_factory) -> Callable[[str], Path]:
    """Gives the folder that the ranks of a launch have written; each is launched once."""

    @functools.cache
    def folder_of(launch: str) -> Path:
        folder = tmp_path_factory.mktemp(launch)
        command = [sys.executable, "-m", "tests.ranks.program", folder, data, launch]
        ended = on_ranks(LAUNCHES[launch][0], command)
        assert ended.code == 0, ended
        return folder

    return folder_of
