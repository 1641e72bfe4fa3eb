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
from merlin_cowclip.workflows.data.frequencies import Frequencies, distribution, frequencies
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


# Distributions of counts


def summary(counts, rows, *batch_sizes):
    return module._summary("a", distribution(np.array(counts)), rows, batch_sizes)


def test_a_distribution_by_hand():
    assert distribution(np.array([0, 1, 5, 3, 0, 1])).to_dict() == {5: 1, 3: 1, 1: 2}
    rare = {1: 1.0, 2: 0.75, 3: 0.75, 4: 0.5, 9: 0.5, 10: 0.0, 1024: 0.0}
    found = summary([0, 1, 5, 3, 0, 1], 10, *rare)
    assert (found["ids"], found["occurrences"], found["count_median"]) == (4, 10, 2.0)
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
def test_a_distribution_against_one_number_per_id(counts, batch_size):
    ids = sorted((c for c in counts if c), reverse=True)
    rows = sum(ids)
    found = summary(counts, rows, batch_size)
    assert found["ids"] == len(ids)
    assert found["occurrences"] == rows
    assert found["count_median"] == np.median(ids)
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


def test_in_batch_is_what_batches_hold():
    random = np.random.default_rng(0)
    column = np.minimum(random.zipf(1.3, 5_000), 400)
    ids = np.unique(column)
    held = [len(np.unique(random.choice(column, 64))) / len(ids) for _ in range(400)]
    expected = summary(np.bincount(column), 5_000, 64)["in_batch_64"]
    assert np.mean(held) == pytest.approx(expected, abs=4 * np.std(held) / 20)


# What is written


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


@pytest.mark.parametrize("field", SPEC.ids)
def test_counts_are_value_counts(data, found, field, monkeypatch):
    table = pd.read_parquet(found.path / "frequencies.parquet")
    table = table[table["field"] == field]
    expected = raw_ids(data, field).value_counts()
    names = table["raw"].where(table["id"] != 1, "missing")
    assert dict(zip(names, table["count"], strict=True)) == expected.to_dict()
    assert table["rank"].tolist() == list(range(1, len(expected) + 1))
    assert table["count"].is_monotonic_decreasing
    assert table["raw"].isna().tolist() == (table["id"] == 1).tolist()
    np.testing.assert_allclose(table["probability"], expected.to_numpy() / data.rows["train"])
    np.testing.assert_allclose(table["cumulative"], expected.cumsum() / expected.sum())
    assert table["cumulative"].iloc[-1] == 1.0
    if field == "user":
        assert table["id"].iloc[0] == 1  # the missing one is an id, and here the most frequent


def summary_by_hand(counts: np.ndarray, rows: int) -> dict[str, float]:
    counts = np.sort(counts)[::-1]
    shares = counts.cumsum() / counts.sum()
    return {
        "ids": len(counts),
        "rows": rows,
        "occurrences": counts.sum(),
        "count_min": counts.min(),
        "count_median": np.median(counts),
        "count_mean": counts.mean(),
        "count_max": counts.max(),
        "once": (counts == 1).mean(),
        **{f"top_{k}": shares[min(k, len(counts)) - 1] for k in (1, 3, 10, 100, 1_000, 10_000)},
        **{f"top_{k}": 1.0 for k in (100_000, 1_000_000)},
        **{f"ids_for_{p}": np.argmax(shares >= p / 100 - 1e-12) + 1 for p in (50, 90, 99)},
        **{f"rare_{size}": (counts / rows < 1 / size).mean() for size in SIZES},
        **{f"in_batch_{size}": (1 - (1 - counts / rows) ** size).mean() for size in SIZES},
    }


def test_summary(data, found):
    summary = pd.read_parquet(found.path / "summary.parquet")
    pd.testing.assert_frame_equal(summary, found.summary)
    assert (found.path / "frequencies.png").read_bytes().startswith(b"\x89PNG")
    assert summary["field"].tolist() == [*SPEC.ids, None]
    columns = [raw_ids(data, field).value_counts().to_numpy() for field in SPEC.ids]
    for counts, (_, row) in zip(
        [*columns, np.concatenate(columns)], summary.iterrows(), strict=True
    ):
        expected = summary_by_hand(counts, data.rows["train"])
        assert set(row.index) == {"field", *expected}
        assert {name: row[name] for name in expected} == pytest.approx(expected)


def test_table(data, found):
    above, header, _, *lines = found.table().splitlines()
    assert re.split(r"  +", above)[1:] == ["of all occurrences", "rare ids (%) at batch size"]
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


def test_the_table_of_a_large_log_fits_100_columns():
    line = {"ids": 9_449_445, "top_3": 1.0, "ids_for_90": 1_234_567, "rows": 10**8}
    line |= {f"rare_{size}": 0.99949 for size in module.BATCH_SIZES}
    names = [*AVAZU.categorical, None]
    table = Frequencies(Path(), pd.DataFrame([{"field": name, **line} for name in names])).table()
    assert {len(text) for text in table.splitlines()} == {99}
    assert table.splitlines()[-1].endswith("  99.9  99.9")


def test_a_batch_size_above_the_rows_has_no_share(data, tmp_path):
    sizes = [data.rows["train"], data.rows["train"] + 1]
    table = frequencies(data, tmp_path / "out", batch_sizes=sizes, progress=False).table()
    lines = [re.split(r"  +", line) for line in table.splitlines()[3:]]
    assert len(lines) == len(SPEC.ids) + 1
    assert {line[-1] for line in lines} == {"-"}
    assert "-" not in {line[-2] for line in lines}


def test_a_threshold_leaves_a_pot_that_counts_as_an_id(log, data, tmp_path):
    rare = made(log, tmp_path, dataclasses.replace(SPEC, freq_threshold=20))
    frequencies(rare, progress=False)
    table = pd.read_parquet(rare.path / "frequencies" / "frequencies.parquet")
    pot = table[(table["field"] == "user") & (table["id"] == 2)]
    counts = raw_ids(data, "user").value_counts()
    assert pot["count"].tolist() == [counts[(counts < 20) & (counts.index != "missing")].sum()]
    assert pot["raw"].tolist() == [None]


# Figure 3


def test_panels_show_the_counts(data):
    counts = np.array([40, 7, 7, 1, 1, 1])
    figure = module.plot({"a $b$": distribution(counts)}, 57, [8, 2, 16])
    (panel,) = figure.axes
    assert panel.get_title() == "a $b$: 6 ids"
    assert panel.get_yscale() == "log"
    curve, *lines = panel.lines
    assert curve.get_xdata().tolist() == [0, 1, 3, 6]
    assert curve.get_ydata().tolist() == [40, 7, 1, 1]
    assert [line.get_ydata()[0] for line in lines] == [57 / 2, 57 / 16]
    assert [text.get_text() for text in panel.texts] == ["P = 1/2", "P = 1/16"]


# Refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch-sizes", "1024,0"], "from 1 to 9007199254740992. Received: 0"),
        (["--fields", "price"], "field must be one of .* Received: 'price'"),
        (["--top-k", "0"], "top-k must be a whole number of at least 1. Received: 0"),
        (["--top-k", "3", "--fields", "user"], "--top-k excludes --fields and --batch-sizes"),
    ],
)
def test_options(data, tmp_path, capsys, options, message):
    out = tmp_path / "out"
    assert main(["frequencies", str(data.path), "--out", str(out), *options]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert line.startswith("merlin-cowclip frequencies: error: ")
    assert re.search(message, line), line
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
    found = frequencies(data, progress=False)
    summary = found.summary.set_index("field").loc["few"]
    assert (summary["ids"], summary["occurrences"]) == (2, data.rows["train"])
    ids = pd.read_parquet(found.path / "frequencies.parquet").query("field == 'few'")
    assert ids["id"].tolist() == [0, 1]
    assert ids["count"].tolist() == counts["count"].iloc[:2].tolist()
