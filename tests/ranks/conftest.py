"""A small log, and runs of one process and of two ranks on it."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from merlin_cowclip.workflows import Run
from merlin_cowclip.workflows.commands.main import main
from merlin_cowclip.workflows.data.prepare.pipeline import prepare
from merlin_cowclip.workflows.data.spec import Split
from tests.logs import CLICKS, click_log, write_csv

from .cases import LAUNCHES
from .launch import on_ranks

COMMAND = [sys.executable, "-m", "merlin_cowclip.workflows.commands.main"]
BATCH, EPOCHS = 18, 3
FALLING = ["--dense-schedule", "cosine:to=0.1", "--embedding-schedule", "cosine"]
OPTIONS = ["--batch-size", BATCH, "--epochs", EPOCHS, "--embedding-dim", 3, "--mlp", "6", *FALLING]


def prepared(home: Path, seed: int = 0) -> Path:
    """126 training rows, 7 batches of 18, which 2 and 3 ranks can share."""
    log = click_log(180, seed, users=9, items=9)
    write_csv(log, home / f"log{seed}.csv")
    valid = write_csv(log.sample(45, random_state=seed), home / f"valid{seed}.csv")
    spec = dataclasses.replace(CLICKS, split=Split("random", 0.3, valid=(str(valid),)))
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
def launched(tmp_path_factory) -> Callable[[str], Path]:
    """Gives the folder that the ranks of a launch have written; each is launched once."""

    @functools.cache
    def folder_of(launch: str) -> Path:
        folder = tmp_path_factory.mktemp(launch)
        command = [sys.executable, "-m", "tests.ranks.program", folder, launch]
        ended = on_ranks(LAUNCHES[launch][0], command)
        assert ended.code == 0, ended
        return folder

    return folder_of


def assert_alike(run: Run, reference: Run) -> None:
    """Equal but for the order of sums over ranks."""
    for key in ("auc", "log_loss", "calibration", "best_epoch"):
        assert run.result[key] == pytest.approx(reference.result[key], rel=1e-5)
    for ours, theirs in zip(run.result["epochs"], reference.result["epochs"], strict=True):
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-5)
    weights = reference.model().get_weights()
    largest = max(np.abs(weight).max() for weight in weights)
    for ours, theirs in zip(run.model().get_weights(), weights, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * largest)
