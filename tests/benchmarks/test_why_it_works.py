"""The figures and the table of docs/why.md show what is counted."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from merlin_cowclip.workflows.data.prepare.pipeline import prepare
from merlin_cowclip.workflows.data.spec import DatasetSpec

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ROWS, BATCH = 2000, 128
pytestmark = pytest.mark.extended


def module(name: str):
    found = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    made = importlib.util.module_from_spec(found)
    found.loader.exec_module(made)
    return made


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    home = tmp_path_factory.mktemp("why")
    log, _ = module("heavy_tailed_log").log(ROWS, 0)
    log.to_parquet(home / "log.parquet")
    spec = DatasetSpec.from_toml(BENCHMARKS / "heavy_tailed.toml")
    return prepare(spec, [home / "log.parquet"], home / "data", progress=False)


def test_the_pictures_and_the_table(data, tmp_path, monkeypatch, capsys):
    made = module("why_it_works")
    monkeypatch.setattr(made, "BATCH", BATCH)
    monkeypatch.setattr(made, "EPOCHS", 1)
    made.main(data, tmp_path)
    told = capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {
        f"why-{name}.svg" for name in ("frequencies", "updates", "clip")
    }
    train = pd.concat(pd.read_parquet(path) for path in data.train_files)
    seen = np.concatenate([train[field].value_counts() for field in data.spec.categorical])
    below = (seen / len(train) < 1 / 32).mean()
    assert f"rarer than one in 32: {below:.1%} of {len(seen):,} ids" in told
    most, rare = train["s0"].value_counts().max(), train["r0"].value_counts()
    assert f"frequent id, {most:,} of {len(train):,} rows" in told
    assert 5 in set(rare)
    assert re.search(r"rare id, 5 of .*: 32: [45], .*131,072: 1$", told, re.MULTILINE)
    rows = [line.split(" | ") for line in told.splitlines() if re.match(r"\| \d", line)]
    counted = sum(int(row[1].replace(",", "")) for row in rows)
    loader = made.Loader(data, batch_size=BATCH, seed=made.SEED)
    fields = data.spec.categorical
    assert counted == sum(
        len(np.unique(features[field])) for features, _ in loader.batches(0) for field in fields
    )
