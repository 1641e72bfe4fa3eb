"""The skew check flags parquet that its workflow did not write, or wrote wrongly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from merlin_cowclip.workflows import UserError, adopt
from merlin_cowclip.workflows.commands.main import main
from merlin_cowclip.workflows.data.adopt import skew
from merlin_cowclip.workflows.quiet import quiet_imports, quiet_operators

with quiet_imports():
    import nvtabular as nvt
    from merlin.schema import Tags
    from nvtabular import ops

pytestmark = pytest.mark.filterwarnings("ignore:(Initializ|Chang)ing an NVTabular Dataset")
ROWS = 600


def log() -> pd.DataFrame:
    random = np.random.default_rng(0)
    city = random.zipf(1.5, ROWS) % 9
    return pd.DataFrame(
        {
            "row": np.arange(ROWS),
            "city": [None if i % 9 == 3 else f"c{i}" for i in city],
            "tags": [[f"t{i}" for i in random.integers(0, 6, n)] for n in city % 3 + 1],
            "price": random.normal(1e3, 2, ROWS),
            "click": random.integers(0, 2, ROWS),
        }
    )


def ids(out: Path):
    return ["row", "city", "tags"] >> ops.Categorify(out_path=str(out / "fitted"))


def label():
    return ["click"] >> ops.AddMetadata(tags=[Tags.TARGET, Tags.BINARY_CLASSIFICATION])


def write(home: Path, nodes, frame: pd.DataFrame) -> None:
    """Fit, save, and write parquet; the raw rows as well, as a user has them."""
    home.mkdir(exist_ok=True)
    frame.reset_index(drop=True).to_parquet(home / "raw.parquet", row_group_size=170)
    with quiet_operators():
        workflow = nvt.Workflow(nodes).fit(nvt.Dataset(frame))
        rows = workflow.transform(nvt.Dataset(frame)).to_ddf().compute()
        workflow.save(str(home / "workflow"))
    (home / "train").mkdir(exist_ok=True)
    rows.to_parquet(home / "train" / "part_0.parquet", index=False)


def checked(home: Path):
    parts = (home / "train", home / "workflow", "click", home / "data")
    return adopt(*parts, check_raw=home / "raw.parquet", progress=False)


def test_rows_that_are_encoded_alike(tmp_path, capsys, monkeypatch):
    """Shuffled rows, lists, last digits that differ, folds of a target; a sample is enough."""
    means = ["city"] >> ops.TargetEncoding("click", kfold=3, out_path=str(tmp_path / "means"))
    write(tmp_path, ids(tmp_path) + (["price"] >> ops.Normalize()) + means + label(), log())
    file = tmp_path / "train/part_0.parquet"
    rows = pd.read_parquet(file).sample(frac=1, random_state=1)
    rows["price"] += np.random.default_rng(2).normal(0, 1e-4, ROWS)
    rows.to_parquet(file, index=False, row_group_size=100)
    monkeypatch.setattr(skew, "ROWS", 50)
    options = ("--workflow", tmp_path / "workflow", "--label", "click", "--out", tmp_path / "data")
    argv = ["adopt", file, "--check-raw", tmp_path / "raw.parquet", *options]
    assert main(list(map(str, argv))) == 0
    assert "--check-raw: raw rows are encoded as in the parquet" in capsys.readouterr().out


def test_a_frame_whose_index_was_not_in_order(tmp_path):
    """NVTabular gives rows the ids of others where some ids are missing."""
    cities = ["city"] >> ops.Categorify(out_path=str(tmp_path / "fitted"))
    rows = ["row"] >> ops.AddMetadata(tags=[Tags.CONTINUOUS])
    write(tmp_path, cities + rows + label(), log().sample(frac=1, random_state=2))
    words = r"\d+ of .* encoded otherwise .*, first row \d+: {.*'city': \d+"
    with pytest.raises(UserError, match=words):
        checked(tmp_path)
    assert not (tmp_path / "data").exists()


def test_a_number_that_another_fit_scaled(tmp_path):
    write(tmp_path, ids(tmp_path) + (["price"] >> ops.Normalize()) + label(), log())
    file = tmp_path / "train/part_0.parquet"
    rows = pd.read_parquet(file)
    rows.assign(price=rows["price"] * 1.1).to_parquet(file)
    words = r"[45]\d\d of 600 raw rows .*, first row \d+: {.*'price'"
    with pytest.raises(UserError, match=words):
        checked(tmp_path)


def test_rows_that_a_filter_drops(tmp_path):
    rows = ["row", "city", "tags", "click"] >> ops.Filter(lambda rows: rows[rows["row"] % 3 > 0])
    nodes = rows["row", "city", "tags"] >> ops.Categorify(out_path=str(tmp_path / "fitted"))
    nodes += rows["click"] >> ops.AddMetadata(tags=[Tags.TARGET, Tags.BINARY_CLASSIFICATION])
    write(tmp_path, nodes, log())
    data = checked(tmp_path)
    assert data.rows["train"] == 400
    assert data.record["notes"] == [
        "the workflow drops 200 of 600 checked raw rows; there are 600 raw rows, 400 in the parquet"
    ]


def test_rows_that_are_not_in_the_parquet(tmp_path):
    write(tmp_path, ids(tmp_path) + label(), log())
    file = tmp_path / "train/part_0.parquet"
    pd.read_parquet(file)[:500].to_parquet(file)
    words = "drops 0 of 600 checked raw rows; there are 600 raw rows, 500 in the parquet. Write all"
    with pytest.raises(UserError, match=words):
        checked(tmp_path)


OF_THE_BATCH = {
    "mean": lambda c: (c - c.mean()) / c.std(),
    "row before": lambda c: c.shift(fill_value=0),
}


@pytest.mark.parametrize("name", OF_THE_BATCH)
def test_an_operator_that_reads_other_rows(tmp_path, name):
    """In one batch of the same rows it makes the numbers of the parquet."""
    prices = ["price"] >> ops.LambdaOp(OF_THE_BATCH[name]) >> ops.AddMetadata(tags=["continuous"])
    write(tmp_path, ids(tmp_path) + prices + label(), log())
    words = "'price': .* Operators must not depend on the other rows of a batch"
    with pytest.raises(UserError, match=words):
        checked(tmp_path)
    assert not (tmp_path / "data").exists()
