"""Small click logs as users have them, and the rows that `prepare` makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal
from unittest import mock

import numpy as np
import pandas as pd

from merlin_cowclip.workflows.data import synthetic
from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.data.spec import DatasetSpec, Split

CLICKS = DatasetSpec(
    "clicks", "y", ("user", "item"), ("price",), ("genres",), split=Split("random", 0.3, valid=0)
)


def click_log(
    rows: int = 200, seed: int = 0, *, users: int = 40, items: int = 15, missing: float = 0.0
) -> pd.DataFrame:
    """Clicks that depend on the user and the item, in every log alike.

    Few users are frequent and many are rare. `missing` is a share of users, and of prices. Lists of
    genres have 0 to 3 different ids. `serial` tells rows apart; `hour` ascends with the rows.
    """
    random, effects = np.random.default_rng(seed), np.random.default_rng(99)
    user, item = random.zipf(1.3, rows) % users, random.integers(0, items, rows)
    logit = effects.normal(size=users)[user] + effects.normal(size=items)[item]
    day = np.sort(random.integers(1, 29, rows))
    genres = (random.choice(6, random.integers(0, 4), replace=False) for _ in range(rows))
    log = pd.DataFrame(
        {
            "y": (random.random(rows) < 1 / (1 + np.exp(-logit))).astype("int64"),
            "user": [f"u{u}" for u in user],
            "item": item,
            "price": random.normal(5, 3, rows).round(2),
            "genres": [[f"g{g}" for g in ids] for ids in genres],
            "serial": random.permutation(rows),
            "hour": day * 100 + random.integers(0, 24, rows),
        }
    )
    log["user"] = log["user"].mask(random.random(rows) < missing, None)
    log["price"] = log["price"].mask(random.random(rows) < missing)
    return log


def write_csv(log: pd.DataFrame, path: Path, list_separator: str = "|", **options) -> Path:
    """Write a log with joined lists; `options` are those of `pandas.DataFrame.to_csv`."""
    lists = {name: log[name].map(list_separator.join) for name in ("genres",) if name in log}
    log.assign(**lists).to_csv(path, index=False, **options)
    return path


def write_log(
    path: Path,
    rows: int = 200,
    seed: int = 0,
    kind: Literal["csv", "parquet", "criteo", "avazu"] = "csv",
) -> Path:
    """Write a log of `CLICKS` as CSV or parquet, or one in the format of Criteo or Avazu."""
    if kind in ("criteo", "avazu"):
        with mock.patch.object(synthetic, "CALIBRATION_ROWS", 1_000):  # 100,000 take seconds
            synthetic.write_synthetic(kind, path, rows=rows, seed=seed, cardinality=100)
    elif kind == "parquet":
        click_log(rows, seed).to_parquet(path)
    else:
        write_csv(click_log(rows, seed), path)
    return path


def rows_of(data: PreparedData, part: str = "train") -> pd.DataFrame:
    """The rows of a part in the order on disk, lists as tuples."""
    files = {"train": data.train_files, "valid": data.valid_files, "test": data.test_files}[part]
    frame = pd.concat([pd.DataFrame(), *map(pd.read_parquet, files)], ignore_index=True)
    return frame.assign(**{name: frame[name].map(tuple) for name in data.spec.lists if files})
