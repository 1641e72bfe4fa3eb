"""Frequencies, against NumPy and numbers counted by hand."""

import numpy as np
import pandas as pd
import pytest

from merlin_cowclip.workflows.data import frequencies as module
from merlin_cowclip.workflows.data.adopt.adopt import adopt
from merlin_cowclip.workflows.data.counts import occurring_ids
from merlin_cowclip.workflows.data.frequencies import frequencies
from merlin_cowclip.workflows.data.prepare.pipeline import prepare
from merlin_cowclip.workflows.quiet import quiet_imports
from tests.logs import CLICKS, click_log, rows_of

with quiet_imports():
    import nvtabular as nvt
    from merlin.schema import Tags
    from nvtabular import ops

SIZES = (4, 64, 1024)


@pytest.fixture
def data(tmp_path):
    log = click_log(1_000, missing=0.1)
    log.assign(item=log["item"] // 8).to_parquet(tmp_path / "log.parquet")  # two items
    spec = CLICKS.from_dict({**CLICKS.to_dict(), "format": "parquet"})
    return prepare(spec, [tmp_path / "log.parquet"], tmp_path / "data", progress=False)


def test_a_summary_by_hand():
    rare = {1: 1.0, 2: 0.75, 3: 0.75, 4: 0.5, 9: 0.5, 10: 0.0, 1024: 0.0}
    summary = module._summary("a", np.array([0, 1, 5, 3, 0, 1]), 10, [*rare])
    assert (summary["ids"], summary["occurrences"]) == (4, 10)
    assert [summary[f"top_{k}"] for k in (1, 3, 10)] == pytest.approx([0.5, 0.9, 1])
    assert [summary[f"ids_for_{percent}"] for percent in (50, 90, 99)] == [1, 3, 4]
    # P = 0.5, 0.3, 0.1, 0.1: not below 1/B where it is equal
    assert {size: summary[f"rare_{size}"] for size in rare} == rare
    in_two = [1 - 0.5**2, 1 - 0.7**2, 1 - 0.9**2, 1 - 0.9**2]
    assert summary["in_batch_2"] == pytest.approx(np.mean(in_two))


def summary_by_numpy(counts: np.ndarray, rows: int) -> dict[str, float]:
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


def test_summary_and_table(data):
    result = frequencies(data, batch_sizes=SIZES, progress=False)
    summary = pd.read_parquet(result.path / "summary.parquet")
    pd.testing.assert_frame_equal(summary, result.summary)
    assert summary["field"].tolist() == ["user", "item", "genres", None]
    rows = rows_of(data)
    columns = [rows[field].explode().dropna().value_counts() for field in data.spec.ids]
    for counts, (_, row) in zip([*columns, pd.concat(columns)], summary.iterrows(), strict=True):
        expected = summary_by_numpy(counts.to_numpy(), len(rows))
        assert {name: row[name] for name in expected} == pytest.approx(expected)
    header, _, *lines = result.table().splitlines()
    assert header.split()[-3:] == ["4", "64", "1K"]
    # Two ids with P of about 0.5; there are fewer than 1,024 rows.
    assert lines[1].split() == ["item", "2", "100", "2", "0.0", "0.0", "-"]


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
    expected = summary_by_numpy(counts, 400)
    assert {name: line[name] for name in expected} == pytest.approx(expected)
    assert line["ids"] == occurring_ids(data) == len(counts)
    assert data.table_rows == len(counts) + 2 * 3  # padding, missing and unknown of both


def test_id_0_is_padding_in_lists_only(data):
    """As adopted pipelines have it: lists are padded, and an own encoding begins at 0."""
    expected = {}
    for field in ("genres", "item"):
        path = data.path / "counts" / f"{field}.parquet"
        counts = pd.read_parquet(path)
        expected[field] = counts["count"][3:].sum()
        counts["count"] = [*counts["count"][3:], 0, 0, 0]
        if field == "genres":
            counts["count"] = [10_000, 0, 0, *counts["count"][:-3]]
        counts.to_parquet(path)
    summary = frequencies(data, progress=False).summary.set_index("field")
    assert summary.loc[["genres", "item"], "occurrences"].tolist() == [*expected.values()]
    assert summary.loc[["genres", "item"], "ids"].tolist() == [6, 2]
