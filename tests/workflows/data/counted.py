"""What the tests of counts share: a log whose ids are counted easily, and readers of folders."""

import dataclasses
from pathlib import Path

import numpy as np
import pandas as pd

from merlin_cowclip.workflows.data.prepare.pipeline import prepare
from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.data.spec import DatasetSpec, Split

ROWS = 3_000
SPEC = DatasetSpec(
    name="toy",
    label="y",
    categorical=("user", "rarely_missing", "a.b-c", "few"),
    continuous=("price",),
    lists=("genres",),
    split=Split("sequential", 0.2, valid=0),  # so that the test part is the log's end
)
SIZES = (4, 64, 1024)


def make_log() -> pd.DataFrame:
    """`user` is missing in more rows than any id holds; `few` has two ids."""
    random = np.random.default_rng(0)
    users = random.zipf(1.4, ROWS) % 500
    items = random.zipf(1.6, ROWS) % 90
    return pd.DataFrame(
        {
            "y": (random.random(ROWS) < 0.3).astype("int64"),
            "user": [None if u == 1 else f"u{u}" for u in users],
            "rarely_missing": [None if i == 7 else str(i) for i in items],
            "a.b-c": (random.zipf(1.5, ROWS) % 40).astype(str),
            "few": np.where(random.random(ROWS) < 0.7, "x", "y"),
            "price": random.normal(5, 3, ROWS),
            "genres": [
                [f"g{g}" for g in random.zipf(1.3, random.integers(0, 5)) % 9] for _ in range(ROWS)
            ],
        }
    )


def made(log: pd.DataFrame, home: Path, spec: DatasetSpec = SPEC) -> PreparedData:
    log.to_parquet(home / "log.parquet")
    spec = dataclasses.replace(spec, format="parquet")
    return prepare(spec, [home / "log.parquet"], home / "data", progress=False)


def read(files: list[Path]) -> pd.DataFrame:
    return pd.concat([pd.read_parquet(file) for file in files], ignore_index=True)


def raw_ids(data: PreparedData, field: str, part: str = "train") -> pd.Series:
    """The ids of a field as text again, lists in a row, a missing one as "missing"."""
    files = data.train_files if part == "train" else data.test_files
    column = read(files)[field].explode().dropna().astype(int)
    raw = data.counts(field)["raw"].fillna("unknown").to_numpy()
    raw[1] = "missing"
    return pd.Series(raw[column])


def everything(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}
