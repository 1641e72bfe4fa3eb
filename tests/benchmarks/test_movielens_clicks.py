"""The log of the README's study, made from an archive of the published form."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from merlin_cowclip.workflows.data.datasets import DatasetSpec

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
USERS, MOVIES, RATINGS = 40, 30, 600
pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def rated() -> pd.DataFrame:
    random = np.random.default_rng(0)
    pairs = random.choice(USERS * (MOVIES - 5), RATINGS, replace=False)  # five are never rated
    return pd.DataFrame({"user": pairs // (MOVIES - 5) + 1, "movie": pairs % (MOVIES - 5) + 1})


@pytest.fixture(scope="module")
def archive(rated, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("archive") / "ml-1m.zip"
    with zipfile.ZipFile(path, "w") as file:
        lines = [f"{u}::{m}::5::978300760" for u, m in rated.itertuples(index=False)]
        file.writestr("ml-1m/ratings.dat", "\n".join(lines))
        lines = [f"{m}::Über, A (Part {m}) ({1900 + 3 * m})::Drama|War" for m in range(1, MOVIES)]
        file.writestr("ml-1m/movies.dat", "\n".join(lines).encode("latin-1"))
    return path


def made(archive: Path, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, BENCHMARKS / "movielens_clicks.py", archive, out, *options]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)


def test_clicks_and_as_many_movies_that_were_not_rated(archive, rated, tmp_path):
    done = made(archive, tmp_path / "log.csv.gz")
    assert done.returncode == 0, done.stderr
    log = pd.read_csv(tmp_path / "log.csv.gz")
    clicked, others = (log[log["label"] == label] for label in (1, 0))
    pairs = set(rated.itertuples(index=False, name=None))
    assert set(clicked[["user", "movie"]].itertuples(index=False, name=None)) == pairs
    assert pairs.isdisjoint(others[["user", "movie"]].itertuples(index=False, name=None))
    assert others["user"].value_counts().to_dict() == rated["user"].value_counts().to_dict()
    assert set(others["movie"]) == set(rated["movie"])
    assert (log["decade"] == (1900 + 3 * log["movie"]) // 10).all()
    assert set(log["genres"]) == {"Drama|War"}
    assert log["label"].autocorr() < 0.2  # shuffled


def test_the_same_seed_gives_the_same_log(archive, tmp_path):
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        made(archive, tmp_path / name, "--seed", seed)
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b != c


def test_another_archive_is_refused(tmp_path):
    done = made(Path(__file__), tmp_path / "log.csv")
    assert done.returncode == 1
    assert done.stderr.startswith("the archive must be GroupLens's ml-1m.zip. Received: ")


def test_its_description_fits():
    spec = DatasetSpec.from_toml(BENCHMARKS / "movielens1m.toml")
    assert (spec.label, spec.lists) == ("label", ("genres",))
