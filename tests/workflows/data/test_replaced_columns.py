"""Columns that stand in the place of others of their name in a workflow's parquet."""

from __future__ import annotations

import numpy as np
import nvtabular as nvt
import pandas as pd
import pytest
from merlin.io import Dataset
from nvtabular import ops

from merlin_cowclip.workflows import adopt
from merlin_cowclip.workflows.errors import UserError

ROWS = 300
RANDOM = np.random.default_rng(5)
LOG = pd.DataFrame(
    {
        **{name: RANDOM.integers(0, n, ROWS) for name, n in dict(user=60, item=9, city=7).items()},
        "price": RANDOM.random(ROWS),
        "day": [f"2024-03-{day:02}" for day in RANDOM.integers(1, 29, ROWS)],
        "click": RANDOM.integers(0, 2, ROWS),
    }
)


def pairs(out):
    return [["user", "city"]] >> ops.Categorify(encode_type="combo", out_path=f"{out}/pairs")


def alone(out, *names):
    return [*names] >> ops.Categorify(out_path=f"{out}/alone")


def scaled(out):
    numbers = ["price", "city"] >> ops.FillMissing(0) >> ops.Normalize()
    return alone(out, "item") + numbers + pairs(out)


def days():
    """Which takes no row but such as the log has."""
    day = ["day"] >> ops.LambdaOp(lambda c: pd.to_datetime(c, format="%Y-%m-%d").dt.dayofweek)
    return day >> ops.Rename(name="weekday") >> ops.AddMetadata(tags=["continuous"])


REPLACED = {
    "what has its name by Rename": (
        lambda out: (alone(out, "item") >> ops.Rename(name="user")) + pairs(out),
        "'user'",
    ),
    "behind a filter": (
        lambda out: (
            alone(out, "user") + (pairs(out) >> ops.Filter(lambda rows: rows.user_city > 2))
        ),
        "'user'",
    ),
    "a number": (scaled, "'city'"),
}
OWN = {
    "beside an operator of one's own": lambda out: pairs(out) + days() + alone(out, "user"),
    "the pairs first": lambda out: pairs(out) + alone(out, "user", "item"),
    "joint": lambda out: (
        [["user", "city"], "item"] >> ops.Categorify(encode_type="joint", out_path=str(out))
    ),
}


def adopted(made, folder):
    label = ["click"] >> ops.AddMetadata()
    workflow = nvt.Workflow(made(folder / "fitted") + label).fit(Dataset(LOG))
    workflow.save(str(folder / "workflow"))
    parquet = workflow.transform(Dataset(LOG)).to_ddf().compute()
    (folder / "train").mkdir()
    parquet.to_parquet(folder / "train" / "part.parquet")
    found = adopt(folder / "train", folder / "workflow", "click", folder / "data", progress=False)
    return found, parquet


@pytest.mark.parametrize("case", REPLACED)
def test_columns_that_another_operator_hands_on_in_their_place_are_refused(case, tmp_path):
    made, name = REPLACED[case]
    words = f"must be what the workflow's schema says. Received: {name} in .*what Categorify read"
    with pytest.raises(UserError, match=words):
        adopted(made, tmp_path)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("case", OWN)
def test_columns_that_are_their_own(case, tmp_path):
    found, parquet = adopted(OWN[case], tmp_path)
    for field in found.spec.categorical:
        counts = pd.read_parquet(tmp_path / "data" / "counts" / f"{field}.parquet")
        held = counts[counts["count"] > 0].set_index("id")
        if field in LOG:  # raw ids are those of the rows that hold them
            raw = pd.Series(LOG[field].astype(str).to_numpy(), index=parquet[field].to_numpy())
            assert all(set(raw[[i]]) == {one} for i, one in held["raw"].items())
        assert held["count"].sum() == ROWS
