"""Notebook 01: its statistics are those that pandas counts."""

from __future__ import annotations

import re

import pandas as pd
import pytest

pytestmark = pytest.mark.extended
NOTEBOOK = "01-prepare"
PARTS = ("train", "valid", "test")
IDS = [f"C{i}" for i in range(1, 27)]


@pytest.fixture(scope="module")
def raw(executed):
    names = ["label", *(f"I{i}" for i in range(1, 14)), *IDS]
    return pd.read_csv(executed.folder / "train.txt.gz", sep="\t", names=names, dtype=str)


@pytest.fixture(scope="module")
def parts(executed):
    return {part: pd.read_parquet(executed.folder / "data" / part) for part in PARTS}


def test_every_row_is_in_one_part(raw, parts, executed):
    assert sorted(pd.concat(parts.values()).label) == sorted(raw.label.astype(int))
    assert str({part: len(rows) for part, rows in parts.items()}) in executed.shown()
    printed = executed.streams("stdout")
    rows = len(parts["train"])
    assert f"{-(-rows // 1024)} batches an epoch; 39 inputs; labels (1024, 1)" in printed
    assert "the same batch: True\nanother epoch: True\n" in printed
    assert f"rows in an epoch: {rows} of {rows}" in printed


def test_counts_are_those_of_the_log(raw, parts, executed):
    field = "C3"
    counts = pd.read_parquet(executed.folder / "data" / "counts" / f"{field}.parquet")
    in_train = parts["train"][field].value_counts()
    held_out = pd.concat([parts["valid"], parts["test"]])[field].value_counts()
    assert counts.set_index("id")["count"].loc[in_train.index].tolist() == in_train.tolist()
    known = counts[counts.raw.notna()].set_index("raw")
    both = known["count"] + known.id.map(held_out).fillna(0).astype(int)
    assert both.to_dict() == raw[field].value_counts().loc[known.index].to_dict()
    assert known["count"].min() >= 2  # the description's threshold


def test_rare_ids_are_counted_at_each_batch_size(parts, executed):
    table = executed.streams("stdout").split("batches an epoch")[0]
    train = parts["train"]
    rare = {size: [] for size in (256, 1024, 4096, 16_384)}
    for field in IDS:
        p = train[field].value_counts() / len(train)
        for size, found in rare.items():
            found.append(p < 1 / size)
        (line,) = re.findall(rf"^{field} +(.*)$", table, re.MULTILINE)
        shares = [f"{100 * found[-1].mean():.1f}" for found in rare.values()]
        assert line.split()[-4:] == shares, field
    (line,) = re.findall(r"^all fields +(.*)$", table, re.MULTILINE)
    together = [f"{100 * pd.concat(found).mean():.1f}" for found in rare.values()]
    assert line.split()[-4:] == together
    assert len(executed.shown("image/png")) == 1


def test_new_rows_are_encoded_as_the_log_was(raw, executed):
    counts = pd.read_parquet(executed.folder / "data" / "counts" / "C3.parquet")
    third = raw.C3[2]
    (own,) = counts.id[counts.raw == third]
    lines = executed.table("its id")
    assert [line[-3] for line in lines] == ["2", "1", str(own)]
    assert lines[2][0] == third
    assert float(lines[2][-1]) == 1.0
    assert float(lines[1][-1]) == 0.0
