"""One prepared folder and one trained run for all suites that need them."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from merlin_cowclip.workflows.commands.main import main
from merlin_cowclip.workflows.data.datasets import DatasetSpec, Split
from merlin_cowclip.workflows.data.etl import prepare

TOY = DatasetSpec(
    name="toy",
    label="y",
    categorical=("user", "item"),
    continuous=("price",),
    lists=("genres",),
    split=Split("random", 0.3),
)


def toy_log(path: Path, rows: int = 200, seed: int = 0, ids: int = 9) -> Path:
    """A log of `TOY`."""
    random = np.random.default_rng(seed)
    pd.DataFrame(
        {
            "y": random.integers(0, 2, rows),
            "user": random.integers(0, ids, rows),
            "item": random.integers(0, 9, rows),
            "price": random.normal(5, 3, rows).round(2),
            "genres": [f"g{g}|g{g + 1}" for g in random.integers(0, 5, rows)],
        }
    ).to_csv(path, index=False)
    return path


@pytest.fixture(scope="session")
def toy_data(tmp_path_factory) -> Path:
    """140 training and 60 test rows."""
    home = tmp_path_factory.mktemp("toy")
    return prepare(TOY, [toy_log(home / "log.csv")], home / "data", progress=False).path


@pytest.fixture(scope="session")
def toy_run(toy_data) -> Path:
    """A run on it; logistic regression, which is saved fastest."""
    out = toy_data.parent / "run"
    options = ["--model", "lr", "--epochs", "1", "--batch-size", "64"]
    assert main(["train", str(toy_data), "--out", str(out), *options]) == 0
    return out


@pytest.fixture
def nobody():
    """A folder of everybody's, and a user who may not do everything, as root may."""
    folder = Path(tempfile.mkdtemp(prefix="cowclip-"))
    folder.chmod(0o777)
    was = os.geteuid()

    def become() -> None:
        if was == 0:
            os.setresuid(65534, 65534, 0)  # os.access asks for the real one

    yield folder, become
    if was == 0:
        os.setresuid(0, 0, 0)
    shutil.rmtree(folder)
