"""Frequencies, against pandas, exact fractions and numbers counted by hand; and what is refused."""

import dataclasses
import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from merlin_cowclip.workflows.commands.main import main
from merlin_cowclip.workflows.data import frequencies as module
from merlin_cowclip.workflows.data.adopt.adopt import adopt
from merlin_cowclip.workflows.data.counts import occurring_ids
from merlin_cowclip.workflows.data.frequencies import Frequencies, frequencies
from merlin_cowclip.workflows.data.spec import AVAZU
from merlin_cowclip.workflows.quiet import quiet_imports

from .counted import SIZES, SPEC, everything, made, raw_ids

with quiet_imports():
    import nvtabular as nvt
    from merlin.schema import Tags
    from nvtabular import ops


@pytest.fixture(scope="module")
def found(data):
    return frequencies(data, batch_sizes=SIZES, progress=False)


def summary(counts, rows, *batch_sizes):
    return module._summary("a", np.array(counts), rows, batch_sizes)


def test_a_summary_by_hand():
    rare = {1: 1.0, 2: 0.75, 3: 0.75, 4: 0.5, 9: 0.5, 10: 0.0, 1024: 0.0}
    found = summary([0, 1, 5, 3, 0, 1], 10, *rare)
    assert (found["ids"], found["occurrences"]) == (4, 10)
    assert [found[f"top_{k}"] for k in (1, 3, 10)] == pytest.approx([0.5, 0.9, 1])
    assert [found[f"ids_for_{percent}"] for percent in (50, 90, 99)] == [1, 3, 4]
    # P = 0.5, 0.3, 0.1, 0.1: not below 1/B where it is equal
    assert {size: found[f"rare_{size}"] for size in rare} == rare
    in_two = [1 - 0.5**2, 1 - 0.7**2, 1 - 0.9**2, 1 - 0.9**2]
    assert found["in_batch_2"] == pytest.approx(np.mean(in_two))


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=40).filter(any),
    st.integers(1, 300),
)
def test_a_summary_against_exact_fractions(counts, batch_size):
    ids = sorted((c for c in counts if c), reverse=True)
    rows = sum(ids)
    found = summary(counts, rows, batch_size)
    assert found["ids"] == len(ids)
    assert found["occurrences"] == rows
    for k in module.TOP:
        assert found[f"top_{k}"] == pytest.approx(sum(ids[:k]) / rows)
    for percent in module.PERCENTS:
        covers = next(n for n in range(1, len(ids) + 1) if 100 * sum(ids[:n]) >= percent * rows)
        assert found[f"ids_for_{percent}"] == covers
    p = [Fraction(c, rows) for c in ids]
    rare = sum(q < Fraction(1, batch_size) for q in p)
    assert found[f"rare_{batch_size}"] == rare / len(ids)
    present = sum(1 - (1 - q) ** batch_size for q in p) / len(p)
    assert found[f"in_batch_{batch_size}"] == pytest.approx(float(present))


def test_an_id_that_fields_share_is_one(tmp_path):
    """Of one vocabulary, and one row of a table; its counts add up, as the optimizer's do."""
    random = np.random.default_rng(4)
    teams = np.minimum(random.zipf(1.4, (400, 2)), 60)
    away = [list(set(row)) for row in np.minimum(random.zipf(1.4, (400, 2)), 60)]
    log = pd.DataFrame({"home": teams[:, 0], "city": teams[:, 1], "away": away})
    log["won"] = random.integers(0, 2, 400)
    joint = [["home", "away"]] >> ops.Categorify(encode_type="joint", out_path=f"{tmp_path}/a")
    ids = joint + (["city"] >> ops.Categorify(out_path=f"{tmp_path}/b"))
    workflow = nvt.Workflow(ids + (["won"] >> ops.AddMetadata(tags=[Tags.TARGET])))
    workflow.fit(nvt.Dataset(log)).save(str(tmp_path / "workflow"))
    workflow.transform(nvt.Dataset(log)).to_parquet(str(tmp_path / "train"))
    parts = (tmp_path / "train", tmp_path / "workflow", "won", tmp_path / "data")
    data = adopt(*parts, progress=False)

    of_teams = pd.concat([log["home"], log["away"].explode()]).value_counts()
    counts = np.concatenate([of_teams, log["city"].value_counts()])
    line = frequencies(data, batch_sizes=SIZES, progress=False).summary.iloc[-1]
    assert line["field"] is None
    for name, value in summary_by_hand(counts, 400).items():
        assert line[name] == pytest.approx(value), name
    assert line["ids"] == occurring_ids(data) == len(counts)
    assert {len(fields) for fields in data.domains} == {1, 2}
    assert data.table_rows == len(counts) + 2 * 3  # padding, missing and unknown of both


def summary_by_hand(counts: np.ndarray, rows: int) -> dict[str, float]:
    counts = np.sort(counts)[::-1]
    shares = counts.cumsum() / counts.sum()
    return {
        "ids": len(counts),
        "rows": rows,
        "occurrences": counts.sum(),
        **{f"top_{k}": shares[min(k, len(counts)) - 1] for k in module.TOP},
        **{f"ids_for_{p}": np.argmax(shares >= p / 100 - 1e-12) + 1 for p in (50, 90, 99)},
        **{f"rare_{size}": (counts / rows < 1 / size).mean() for size in SIZES},
        **{f"in_batch_{size}": (1 - (1 - counts / rows) ** size).mean() for size in SIZES},
    }


def test_summary(data, found):
    summary = pd.read_parquet(found.path / "summary.parquet")
    pd.testing.assert_frame_equal(summary, found.summary)
    assert summary["field"].tolist() == [*SPEC.ids, None]
    columns = [raw_ids(data, field).value_counts().to_numpy() for field in SPEC.ids]
    for counts, (_, row) in zip(
        [*columns, np.concatenate(columns)], summary.iterrows(), strict=True
    ):
        expected = summary_by_hand(counts, data.rows["train"])
        assert set(row.index) == {"field", *expected}
        assert {name: row[name] for name in expected} == pytest.approx(expected)


def test_table(data, found, tmp_path):
    header, _, *lines = found.table().splitlines()
    held = ["top 3, %", "ids for 90 %"]
    assert re.split(r"  +", header) == ["field", "ids", *held, "4", "64", "1K"]
    cells = {cell[0]: cell[1:] for cell in (re.split(r"  +", line) for line in lines)}
    assert list(cells) == [*SPEC.ids, "all fields"]
    # Two ids with P of about 0.7 and 0.3: neither is below 1/4.
    assert cells["few"] == ["2", "100", "2", "0.0", "0.0", "0.0"]
    counts = raw_ids(data, "user").value_counts()
    assert cells["user"][0] == str(len(counts))
    assert cells["user"][1] == f"{100 * counts[:3].sum() / counts.sum():.1f}"
    assert cells["user"][3] == f"{100 * (counts * 4 < data.rows['train']).mean():.1f}"
    sizes = [data.rows["train"], data.rows["train"] + 1]  # the second has no share
    table = frequencies(data, tmp_path / "out", batch_sizes=sizes, progress=False).table()
    last = [line.split()[-2:] for line in table.splitlines()[2:]]
    assert {share for _, share in last} == {"-"}
    assert "-" not in {share for share, _ in last}


def test_the_table_of_a_large_log_fits_100_columns():
    line = {"ids": 9_449_445, "top_3": 1.0, "ids_for_90": 1_234_567, "rows": 10**8}
    line |= {f"rare_{size}": 0.99949 for size in module.BATCH_SIZES}
    names = [*AVAZU.categorical, None]
    table = Frequencies(Path(), pd.DataFrame([{"field": name, **line} for name in names])).table()
    assert {len(text) for text in table.splitlines()} == {99}
    assert table.splitlines()[-1].endswith("  99.9  99.9")


def test_a_threshold_leaves_unknown_ids_that_count_as_one(log, data, tmp_path):
    rare = made(log, tmp_path, dataclasses.replace(SPEC, freq_threshold=20))
    summary = frequencies(rare, progress=False).summary.set_index("field")
    counts = raw_ids(data, "user").value_counts()
    few = counts[(counts < 20) & (counts.index != "missing")]
    assert summary.loc["user", "ids"] == len(counts) - len(few) + 1
    assert summary.loc["user", "occurrences"] == counts.sum()


# Refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch-sizes", "1024,0"], "from 1 to 9007199254740992. Received: 0"),
    ],
)
def test_options(data, tmp_path, capsys, options, message):
    out = tmp_path / "out"
    assert main(["frequencies", str(data.path), "--out", str(out), *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("merlin-cowclip frequencies: error: ")
    assert message in line
    assert everything(tmp_path) == set()


def test_padding_is_no_id(log, tmp_path):
    data = made(log, tmp_path)
    path = data.path / "counts" / "genres.parquet"
    counts = pd.read_parquet(path)
    counts.loc[0, "count"] = 10_000  # as lists of fixed length have it, in an adopted pipeline
    counts.to_parquet(path)
    summary = frequencies(data, progress=False).summary.set_index("field")
    assert summary.loc["genres", "ids"] == log["genres"].explode().nunique()
    assert summary.loc["genres", "occurrences"] == counts["count"].iloc[1:].sum()


def test_an_id_0_of_a_row_is_an_id(log, tmp_path):
    """Lists are padded, single ids are not: of an adopted pipeline's own encoding 0 is an id."""
    data = made(log, tmp_path)
    path = data.path / "counts" / "few.parquet"
    counts = pd.read_parquet(path)
    counts["count"] = [*counts["count"].iloc[3:], 0, 0, 0]
    counts.to_parquet(path)
    summary = frequencies(data, progress=False).summary.set_index("field").loc["few"]
    assert (summary["ids"], summary["occurrences"]) == (2, data.rows["train"])
