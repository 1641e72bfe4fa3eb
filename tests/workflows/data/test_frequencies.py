"""Frequencies, against pandas, exact fractions and numbers counted by hand; and what is refused."""

import dataclasses
import os
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from merlin_cowclip.workflows.commands.main import main
from merlin_cowclip.workflows.data import frequencies as module
from merlin_cowclip.workflows.data import top_ids
from merlin_cowclip.workflows.data.adopt import adopt
from merlin_cowclip.workflows.data.counts import occurring_ids
from merlin_cowclip.workflows.data.frequencies import CountDistribution, Frequencies, frequencies
from merlin_cowclip.workflows.data.prepared import PreparedData
from merlin_cowclip.workflows.data.top_ids import keep_top_ids
from merlin_cowclip.workflows.errors import UserError
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


def test_a_distribution_by_hand():
    found = CountDistribution.of(np.array([0, 1, 5, 3, 0, 1]))
    assert found.counts.tolist() == [5, 3, 1]
    assert found.ids.tolist() == [1, 1, 2]
    assert (found.total_ids, found.occurrences, found.median) == (4, 10, 2.0)
    held = [found.coverage(k) for k in (0, 1, 2, 3, 4, 100)]
    assert held == pytest.approx([0, 0.5, 0.8, 0.9, 1, 1])
    covers = {1: 1, 50: 1, 51: 2, 80: 2, 81: 3, 90: 3, 91: 4, 99: 4, 100: 4}
    assert {percent: found.ids_to_cover(percent) for percent in covers} == covers
    # P = 0.5, 0.3, 0.1, 0.1: not below 1/B where it is equal
    rare = {1: 1.0, 2: 0.75, 3: 0.75, 4: 0.5, 9: 0.5, 10: 0.0, 1024: 0.0}
    assert {size: found.rare(10, size) for size in rare} == rare
    in_two = [1 - 0.5**2, 1 - 0.7**2, 1 - 0.9**2, 1 - 0.9**2]
    assert found.in_batch(10, 2) == pytest.approx(np.mean(in_two))
    both = CountDistribution.joined([found, CountDistribution.of(np.array([4, 3, 3]))])
    assert both.counts.tolist() == [5, 4, 3, 1]
    assert both.ids.tolist() == [1, 1, 3, 2]


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=40).filter(any),
    st.integers(1, 50),
    st.integers(1, 100),
    st.integers(1, 300),
)
def test_a_distribution_against_one_number_per_id(counts, k, percent, batch_size):
    found = CountDistribution.of(np.array(counts))
    ids = sorted((c for c in counts if c), reverse=True)
    rows = sum(ids)
    assert found.total_ids == len(ids)
    assert found.occurrences == rows
    assert found.median == np.median(ids)
    assert found.coverage(k) == pytest.approx(sum(ids[:k]) / rows)
    covers = next(n for n in range(1, len(ids) + 1) if 100 * sum(ids[:n]) >= percent * rows)
    assert found.ids_to_cover(percent) == covers
    p = [Fraction(c, rows) for c in ids]
    rare = sum(q < Fraction(1, batch_size) for q in p)
    assert found.rare(rows, batch_size) == rare / len(ids)
    present = sum(1 - (1 - q) ** batch_size for q in p) / len(p)
    assert found.in_batch(rows, batch_size) == pytest.approx(float(present))


def test_in_batch_is_what_batches_hold():
    random = np.random.default_rng(0)
    column = np.minimum(random.zipf(1.3, 5_000), 400)
    ids = np.unique(column)
    held = [len(np.unique(random.choice(column, 64))) / len(ids) for _ in range(400)]
    expected = CountDistribution.of(np.bincount(column)).in_batch(5_000, 64)
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


def test_files(data, found):
    assert found.path == data.path / "frequencies"
    assert sorted(p.name for p in found.path.iterdir()) == [
        *("frequencies.parquet", "frequencies.png", "summary.parquet"),
    ]
    assert not [p for p in data.path.iterdir() if "partial" in p.name]
    assert PreparedData.open(data.path).rows == data.rows  # still what it was


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


def test_fields_are_written_in_pieces(data, found, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "GROUP_ROWS", 7)
    frequencies(data, tmp_path / "out", batch_sizes=SIZES, progress=False)
    path = tmp_path / "out" / "frequencies.parquet"
    groups = pq.ParquetFile(path).metadata
    assert max(groups.row_group(i).num_rows for i in range(groups.num_row_groups)) == 7
    whole = pd.read_parquet(found.path / "frequencies.parquet")
    pd.testing.assert_frame_equal(pd.read_parquet(path), whole)


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
    assert summary["field"].tolist() == [*SPEC.ids, None]
    columns = [raw_ids(data, field).value_counts().to_numpy() for field in SPEC.ids]
    for counts, (_, row) in zip(
        [*columns, np.concatenate(columns)], summary.iterrows(), strict=True
    ):
        expected = summary_by_hand(counts, data.rows["train"])
        assert set(row.index) == {"field", *expected}
        assert {name: row[name] for name in expected} == pytest.approx(expected)


def test_table(data, found):
    header, _, *lines = found.table().splitlines()
    assert re.split(r"  +", header) == ["field", "ids", "top 3 %", "ids for 90 %", "4", "64", "1K"]
    cells = {cell[0]: cell[1:] for cell in (re.split(r"  +", line) for line in lines)}
    assert list(cells) == [*SPEC.ids, "all fields"]
    # Two ids with P of about 0.7 and 0.3: neither is below 1/4.
    assert cells["few"] == ["2", "100.0", "2", "0.0", "0.0", "0.0"]
    counts = raw_ids(data, "user").value_counts()
    assert cells["user"][0] == str(len(counts))
    assert cells["user"][1] == f"{100 * counts[:3].sum() / counts.sum():.1f}"
    assert cells["user"][3] == f"{100 * (counts * 4 < data.rows['train']).mean():.1f}"


def test_a_threshold_leaves_a_pot_that_counts_as_an_id(log, data, tmp_path):
    rare = made(log, tmp_path, dataclasses.replace(SPEC, freq_threshold=20))
    frequencies(rare, progress=False)
    table = pd.read_parquet(rare.path / "frequencies" / "frequencies.parquet")
    pot = table[(table["field"] == "user") & (table["id"] == 2)]
    counts = raw_ids(data, "user").value_counts()
    assert pot["count"].tolist() == [counts[(counts < 20) & (counts.index != "missing")].sum()]
    assert pot["raw"].tolist() == [None]


# Figure 3


def pixels(path: Path) -> np.ndarray:
    from PIL import Image

    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB")).astype(int)


def is_blue(image: np.ndarray) -> np.ndarray:
    return (image[..., 2] > image[..., 0] + 80) & (image[..., 2] > 120)


def test_figure_has_the_fewest_middle_and_most_ids(found):
    image = pixels(found.path / "frequencies.png")
    assert image.shape == (450, 1800, 3)  # 3 panels of 4 by 3 inches at 150 dots per inch
    for panel in np.array_split(image, 3, axis=1):
        assert 0.01 < is_blue(panel).mean() < 0.9


def test_figure_of_named_fields(data, tmp_path):
    fields = ["few", "user", "genres", "a $b$ c", "few"]
    frequencies(data, tmp_path / "out", fields=fields, progress=False)
    image = pixels(tmp_path / "out" / "frequencies.png")
    assert image.shape == (900, 1800, 3)  # 4 panels: two lines of three
    fourth, fifth = image[450:, :600], image[450:, 600:]
    assert is_blue(fourth).mean() > 0.1
    assert (fifth == 255).all()


def test_panels_show_the_counts(data):
    counts = np.array([40, 7, 7, 1, 1, 1])
    figure = module.plot({"a $b$": CountDistribution.of(counts)}, 57, [8, 2, 16])
    (panel,) = figure.axes
    assert panel.get_title() == "a $b$: 6 ids"
    assert panel.get_yscale() == "log"
    curve, *lines = panel.lines
    assert curve.get_xdata().tolist() == [0, 1, 3, 6]
    assert curve.get_ydata().tolist() == [40, 7, 1, 1]
    assert [line.get_ydata()[0] for line in lines] == [57 / 2, 57 / 16]
    assert [text.get_text() for text in panel.texts] == ["P = 1/2", "P = 1/16"]


def test_plotting_touches_no_global_state(data, tmp_path):
    program = (
        "import sys, matplotlib\n"
        "before = dict(matplotlib.rcParams)\n"
        "from merlin_cowclip.workflows.commands.main import main\n"
        "assert 'merlin_cowclip.workflows.data.frequencies' not in sys.modules\n"
        "assert main(['frequencies', *sys.argv[1:]]) == 0\n"
        "assert dict(matplotlib.rcParams) == before\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "slow = {'tensorflow', 'nvtabular', 'merlin.models'} & set(sys.modules)\n"
        "assert not slow, slow\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(data.path), "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        env={**os.environ, "MPLBACKEND": "svg", "DISPLAY": ""},
    )
    assert done.returncode == 0, done.stderr
    assert "all fields" in done.stdout
    assert done.stdout.splitlines()[-1] == f"2,400 training rows: {tmp_path / 'out'}"
    assert "Warning" not in done.stderr


# Refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch-sizes", "1024", "0"], r"at most 2\^53. Received: 0"),
        (["--batch-sizes", "-3"], r"at most 2\^53. Received: -3"),
        (["--fields", "user", "C1"], "field must be one of 'user', .*'genres'. Received: 'C1'"),
        (["--fields", "price"], "field must be one of .* Received: 'price'"),
        (["--top-k", "0"], "top-k must be a whole number of at least 1. Received: 0"),
        (["--top-k", "-1"], "top-k must be a whole number of at least 1. Received: -1"),
        (["--top-k", "3", "--fields", "user"], "--top-k excludes --fields. Received: both"),
        (["--top-k", "3", "--batch-sizes", "8"], "--top-k excludes --batch-sizes"),
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


def test_arguments(data, tmp_path):
    for size in (True, 1.5, "8"):
        with pytest.raises(UserError, match="positive whole numbers"):
            frequencies(data, tmp_path / "out", batch_sizes=[size])
        with pytest.raises(UserError, match="top-k must be a whole number"):
            keep_top_ids(data, size, tmp_path / "out")
    with pytest.raises(UserError, match="batch sizes must be given"):
        frequencies(data, tmp_path / "out", batch_sizes=[])
    with pytest.raises(UserError, match="1 to 60 fields. Received: 0"):
        frequencies(data, tmp_path / "out", fields=[])
    assert everything(tmp_path) == set()


def test_an_adopted_pipeline_has_frequencies_and_no_top_k(data, found, tmp_path):
    adopted = dataclasses.replace(data, record={**data.record, "files": {"train": [], "test": []}})
    again = frequencies(adopted, tmp_path / "a", batch_sizes=SIZES, progress=False)
    pd.testing.assert_frame_equal(again.summary, found.summary)
    with pytest.raises(UserError, match=r"top-k needs data that .* an adopted pipeline"):
        keep_top_ids(adopted, 3, tmp_path / "b")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_padding_is_no_id(log, tmp_path):
    data = made(log, tmp_path)
    path = data.path / "counts" / "genres.parquet"
    counts = pd.read_parquet(path)
    counts.loc[0, "count"] = 10_000  # as lists of fixed length have it, in an adopted pipeline
    counts.to_parquet(path)
    summary = frequencies(data, progress=False).summary.set_index("field")
    assert summary.loc["genres", "ids"] == log["genres"].explode().nunique()
    assert summary.loc["genres", "occurrences"] == counts["count"].iloc[1:].sum()


def test_the_ids_that_commands_tell_of_are_those_of_the_frequencies(data, tmp_path, capsys):
    """`prepare`, `adopt` and `frequencies --top-k` say how many there are."""
    argv = ["frequencies", str(data.path), "--top-k", "3", "--out", str(tmp_path / "top3")]
    assert main(argv) == 0
    top = PreparedData.open(tmp_path / "top3")
    assert f" test rows, {occurring_ids(top):,} ids in " in capsys.readouterr().out
    for folder in (data, top):
        ids = frequencies(folder, tmp_path / f"of-{folder.path.name}", progress=False).summary[
            "ids"
        ]
        assert occurring_ids(folder) == ids.iloc[-1] == ids.iloc[:-1].sum()
        assert occurring_ids(folder) < sum(folder.cardinalities.values())


def test_batch_sizes_by_commas_as_sweep_takes_them(data, tmp_path):
    for out, sizes in (("a", ["64,4", "1024"]), ("b", ["4", "64", "1024"])):
        argv = ["frequencies", str(data.path), "--out", str(tmp_path / out), "--batch-sizes"]
        assert main([*argv, *sizes]) == 0
    found, other = (Frequencies.open(tmp_path / out) for out in ("a", "b"))
    assert found.batch_sizes == SIZES
    pd.testing.assert_frame_equal(found.summary, other.summary)


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


def test_top_k_needs_a_place(data, capsys):
    before = everything(data.path)
    assert main(["frequencies", str(data.path), "--top-k", "3"]) == 2
    assert "--top-k needs --out, the folder to write" in capsys.readouterr().err
    assert everything(data.path) == before


def test_what_is_there_is_left_alone(data, found, tmp_path, capsys):
    before = everything(data.path)
    assert main(["frequencies", str(data.path)]) == 2  # written by the fixture
    assert f"must not exist. Received: {found.path}" in capsys.readouterr().err
    (tmp_path / "out").mkdir()
    for more in ([], ["--top-k", "3"]):
        assert main(["frequencies", str(data.path), "--out", str(tmp_path / "out"), *more]) == 2
        assert f"must not exist. Received: {tmp_path / 'out'}" in capsys.readouterr().err
    assert main(["frequencies", str(tmp_path / "nowhere")]) == 2
    assert "prepared data must be a folder" in capsys.readouterr().err
    assert everything(data.path) == before
    assert everything(tmp_path) == {"out"}


@pytest.mark.parametrize("harm", ["gone", "cut", "zeros"])
def test_counts_that_cannot_be_read(log, tmp_path, harm):
    data = made(log, tmp_path)
    path = data.path / "counts" / "few.parquet"
    if harm == "zeros":
        pd.read_parquet(path).assign(count=0).to_parquet(path)
    else:
        content = path.read_bytes()
        path.unlink()
        if harm == "cut":
            path.write_bytes(content[:-100])
    before = everything(tmp_path)
    for run in (frequencies, lambda d, o: keep_top_ids(d, 3, o)):
        with pytest.raises(UserError, match=r"counts must .*few.parquet.*Prepare the data again"):
            run(data, tmp_path / "out")
    assert everything(tmp_path) == before


@pytest.mark.parametrize(
    "step", ["plot", "_ranked", "_save_workflow", "_rewrite_part", "write_record"]
)
def test_an_interruption_leaves_nothing(data, tmp_path, monkeypatch, step):
    def interrupt(*_):
        raise KeyboardInterrupt

    counting = step in ("plot", "_ranked")
    monkeypatch.setattr(module if counting else top_ids, step, interrupt)
    before = everything(data.path)
    options, run = ({}, frequencies) if counting else ({"k": 3}, keep_top_ids)
    with pytest.raises(KeyboardInterrupt):
        run(data, out=tmp_path / "deep" / "out", progress=False, **options)
    assert everything(tmp_path) == set()
    assert everything(data.path) == before


def test_progress_goes_to_stderr_and_can_be_silenced(data, tmp_path, capfd):
    frequencies(data, tmp_path / "a", progress=False)
    keep_top_ids(data, 3, tmp_path / "b", progress=False)
    assert capfd.readouterr() == ("", "")
    frequencies(data, tmp_path / "c")
    keep_top_ids(data, 3, tmp_path / "d")
    shown = capfd.readouterr()
    assert shown.out == ""
    for step in ("counting", "train", "test"):
        assert step in shown.err
