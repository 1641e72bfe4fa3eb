"""What can be chosen in `prepare`: chunks, thresholds, hashing, splits, inf and NaN; its report."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from merlin_cowclip.workflows.commands.main import main
from merlin_cowclip.workflows.data.prepare import columns, pipeline, shuffle
from merlin_cowclip.workflows.data.prepare.fit import Encoding
from merlin_cowclip.workflows.data.prepare.pipeline import prepare
from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.data.sources import csv
from merlin_cowclip.workflows.data.spec import DatasetSpec, Split
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.quiet import quiet_imports

with quiet_imports():
    import nvtabular as nvt
    from nvtabular import ops


ROWS = 6_000
FIELDS = {"categorical": ("user", "item"), "continuous": ("price",), "lists": ("genres",)}
SEQUENTIAL = Split("sequential", 0.25, valid=0)
TRAIN = ROWS * 3 // 4


def spec_of(**changes) -> DatasetSpec:
    return DatasetSpec(**{"name": "toy", "label": "y", "split": SEQUENTIAL, **FIELDS, **changes})


def make_log() -> pd.DataFrame:
    random = np.random.default_rng(3)
    users = random.zipf(1.3, ROWS) % 2_000
    day = np.sort(random.integers(1, 29, ROWS))
    return pd.DataFrame(
        {
            "y": (random.random(ROWS) < 0.3).astype("int64"),
            "user": [None if u % 11 == 0 else f"u{u}" for u in users],
            "item": random.integers(0, 50, ROWS).astype(str),
            "price": np.where(random.random(ROWS) < 0.1, np.nan, random.normal(5, 3, ROWS)),
            "genres": ["|".join(f"g{g}" for g in random.integers(0, 8, d % 4)) for d in day],
            "hour": day * 100 + random.integers(0, 24, ROWS),
            "when": [f"2014-10-{d:02d}" for d in day],
        }
    )


@pytest.fixture(scope="module")
def log():
    return make_log()


@pytest.fixture
def path(tmp_path, log):
    log.to_csv(tmp_path / "log.csv", index=False)
    return tmp_path / "log.csv"


@pytest.fixture
def quick(tmp_path, path):
    def run(spec=None, inputs=None, out="out", **options):
        inputs = [path] if inputs is None else inputs
        return prepare(spec or spec_of(), inputs, tmp_path / out, progress=False, **options)

    return run


def rows_of(data, part="train") -> pd.DataFrame:
    files = getattr(data, f"{part}_files")
    frame = pd.concat([pd.read_parquet(file) for file in files], ignore_index=True)
    return frame.assign(genres=frame["genres"].map(tuple)) if "genres" in frame else frame


def same(one, other) -> None:
    for part in ("train", "test"):
        pd.testing.assert_frame_equal(rows_of(one, part), rows_of(other, part))
    for field in one.spec.ids:
        pd.testing.assert_frame_equal(one.counts(field), other.counts(field))
    assert one.record["ranges"] == other.record["ranges"]
    assert one.report == other.report


# Chunks


@pytest.mark.parametrize("kind", ["header", "no header", "crlf", "parquet"])
def test_chunks_give_the_same_as_the_whole(tmp_path, log, path, quick, monkeypatch, kind):
    spec = spec_of()
    if kind == "no header":
        spec = spec_of(header=False, columns=tuple(log.columns))
        log.to_csv(path, index=False, header=False)
    elif kind == "crlf":
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    elif kind == "parquet":
        spec = spec_of(format="parquet")
        path = tmp_path / "log.parquet"
        lists = log["genres"].map(lambda text: text.split("|") if text else [])
        log.assign(genres=lists).to_parquet(path, row_group_size=500)
    whole = quick(spec, [path], "whole", seed=1)
    monkeypatch.setattr(pipeline, "CHUNK_BYTES", 10_000)
    monkeypatch.setattr(columns, "PIECE_BYTES", 5_000)  # several to a chunk
    monkeypatch.setattr(shuffle, "MEMORY_SHARE", 10_000)  # several runs
    cut = []
    write = pipeline.write_pieces
    monkeypatch.setattr(
        pipeline, "write_pieces", lambda *job, **kw: cut.append(job) or write(*job, **kw)
    )
    monkeypatch.setattr(pipeline.os, "sched_getaffinity", lambda _: range(4))
    chunked = quick(spec, [path], "chunked", seed=1, memory="1GB")
    assert len(cut) > 5
    same(chunked, whole)
    assert len(rows_of(whole)) == TRAIN


def test_a_fault_in_a_later_chunk_is_named_by_its_line(tmp_path, path, quick, monkeypatch):
    lines = path.read_text().splitlines()
    lines[5_000] = lines[5_000].replace(",", ",,", 1)
    path.write_text("\n".join(lines))
    monkeypatch.setattr(pipeline, "CHUNK_BYTES", 10_000)
    with pytest.raises(UserError, match=r"log.csv, line 5001: Expected 7 columns"):
        quick()
    assert [p.name for p in tmp_path.iterdir()] == ["log.csv"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": "8"}, "memory must be at least 256MB.*'8'"),
        ({"memory": "much"}, "memory must be at least 256MB.*'much'"),
        ({"scratch": "missing"}, "scratch must be a folder that can be written.*missing"),
        ({"memory": "1GB", "engine": "nvtabular"}, "memory, scratch, .* need engine 'duckdb'"),
        ({"grow": True}, "grow needs a vocabulary"),
    ],
)
def test_options_refused(quick, tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        quick(**options)
    assert [p.name for p in tmp_path.iterdir()] == ["log.csv"]


def test_scratch_is_left_empty(quick, tmp_path):
    (tmp_path / "scratch").mkdir()
    same(quick(out="one", scratch=tmp_path / "scratch"), quick(out="two", memory=1 << 28))
    assert not list((tmp_path / "scratch").iterdir())


# Rare ids


@pytest.mark.parametrize("threshold", [1, 3])
def test_ids_below_the_threshold_are_unknown(tmp_path, log, quick, threshold):
    data = quick(spec_of(freq_threshold={"user": threshold}))
    train = log.iloc[:TRAIN]
    counts = train["user"].value_counts()
    kept = counts[counts >= threshold]
    assert data.cardinalities["user"] == 3 + len(kept)
    table = data.counts("user").set_index("id")
    assert table["count"].sum() == TRAIN
    assert table["count"][1] == train["user"].isna().sum()
    assert table["count"][2] == counts[counts < threshold].sum()
    assert table["raw"][3:].tolist() == sorted(kept.index, key=lambda u: (-kept[u], u))
    assert data.report["fields"]["user"]["below_threshold"] == table["count"][2]
    assert data.cardinalities["item"] == 53  # has no threshold
    # As NVTabular itself counts, its traps left out: no missing ids, an index from 0.
    frame = train.loc[train["user"].notna(), ["user"]].reset_index(drop=True)
    theirs = ops.Categorify(freq_threshold=threshold, out_path=str(tmp_path / "nvt"))
    stock = nvt.Workflow(["user"] >> theirs).fit(nvt.Dataset(frame))
    assert stock.output_schema["user"].int_domain.max + 1 == data.cardinalities["user"]
    meta = pd.read_parquet(tmp_path / "nvt/categories/meta.user.parquet")
    observed = [table["count"][2], table["count"][3:].sum()]
    assert meta["num_observed"][2:].tolist() == observed
    assert data.schema["user"].properties["freq_threshold"] == threshold
    assert _untrained(data, "user") == set(np.flatnonzero(table["count"][:3] == 0))
    assert _untrained(data, "item") == set(np.flatnonzero(data.counts("item")["count"][:3] == 0))


def test_unknown_ids_share_rows_by_hash(log, quick):
    data = quick(spec_of(freq_threshold=3, hash_buckets={"user": 7}))
    counts = log.iloc[:TRAIN]["user"].value_counts()
    kept = counts[counts >= 3]
    assert data.cardinalities["user"] == 2 + 7 + len(kept)
    table = data.counts("user")
    assert table["raw"][:9].isna().all()
    assert table["raw"][9:].tolist() == sorted(kept.index, key=lambda u: (-kept[u], u))
    assert (table["count"][2:9] > 0).all()
    assert table["count"][2:9].sum() == counts[counts < 3].sum()
    # One raw id has one row, in training, in testing, and in the saved workflow.
    test, raw = rows_of(data, "test"), log.iloc[TRAIN:].reset_index(drop=True)
    hashed = ~raw["user"].isin(kept.index) & raw["user"].notna()
    assert test["user"][hashed].between(2, 8).all()
    assert test["user"][hashed].nunique() == 7
    assert (test["user"].groupby(raw["user"]).nunique() == 1).all()
    served = data.workflow().transform(raw.assign(genres=raw["genres"].str.split("|")))
    np.testing.assert_array_equal(served["user"], test["user"])
    schema = data.schema["user"]
    assert schema.int_domain.max == data.cardinalities["user"] - 1
    assert schema.properties["num_buckets"] == 7
    assert data.schema["item"].int_domain.max == data.cardinalities["item"] - 1
    assert not data.schema["item"].properties["num_buckets"]


def _untrained(data, field):
    """Ids that are said to have no training row."""
    ends = np.array(data.schema[field].properties["untrained_ids"], int).reshape(-1, 2)
    return {i for first, end in ends for i in range(first, end)}


def test_hash_buckets_without_a_training_row_are_known(log, quick):
    data = quick(spec_of(freq_threshold=3, hash_buckets={"user": 900}))
    counts = data.counts("user")["count"]
    empty = set(np.flatnonzero(counts[: 2 + 900] == 0))
    assert 3 < len(empty) < 900
    assert _untrained(data, "user") == empty


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"freq_threshold": -1}, "freq_threshold must be a whole number of at least 0"),
        ({"freq_threshold": {"price": 2}}, "freq_threshold must name fields of ids.*'price'"),
        ({"freq_threshold": {"user": 0.5}}, "freq_threshold of 'user' must .* Received: 0.5"),
        ({"hash_buckets": 0}, "hash_buckets must be a whole number from 1 to 1073741824"),
        ({"non_finite": "zero"}, "non_finite must be one of 'refuse', 'missing'"),
        ({"split": {"kind": "time", "test": 0.1}}, "split.column must name the column of times"),
        (
            {"split": {"kind": "random", "test": 0.1, "column": "hour"}},
            "split.column must name the column of times",
        ),
    ],
)
def test_refused(changes, message):
    with pytest.raises(UserError, match=message):
        DatasetSpec.from_dict({**spec_of().to_dict(), **changes})


def test_a_threshold_that_leaves_no_id_is_refused(quick, tmp_path):
    with pytest.raises(UserError, match="no id of 'user' occurs 5,000 times"):
        quick(spec_of(freq_threshold=5_000))
    assert [p.name for p in tmp_path.iterdir()] == ["log.csv"]


# Splits


def latest(times: pd.Series, share: float) -> pd.Series:
    """The rows from the time on that makes them most nearly that share."""
    cuts = times.sort_values().unique()[1:]
    later = np.array([(times >= time).sum() for time in cuts])
    return times >= cuts[np.argmin(np.abs(later - share * len(times)))]


@pytest.mark.parametrize(("column", "share"), [("hour", 0.33), ("when", 0.1)])
def test_split_by_time(log, path, quick, column, share):
    """Shuffled on disk, so that the log's order cannot help."""
    shuffled = log.sample(frac=1, random_state=1)
    shuffled.to_csv(path, index=False)
    data = quick(spec_of(split=Split("time", share, column, valid=0)))
    in_test = latest(shuffled[column], share)
    assert data.rows == {"train": (~in_test).sum(), "valid": 0, "test": in_test.sum()}
    assert abs(data.rows["test"] / ROWS - share) < 0.03
    assert rows_of(data, "test")["y"].tolist() == shuffled["y"][in_test].tolist()
    assert column not in rows_of(data).columns
    counts = shuffled[~in_test]["item"].value_counts()
    assert data.counts("item").set_index("raw")["count"].drop([None]).to_dict() == counts.to_dict()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda log: log.assign(hour=log["hour"].where(log.index != 7)),
            "log.csv, line 9, column 'hour': the time is missing",
        ),
        (
            lambda log: log.assign(hour=5),
            "all 6,000 rows to divide have the same time, column 'hour'",
        ),
        (lambda log: log.drop(columns="hour"), "no column 'hour'"),
    ],
)
def test_times_refused(log, path, quick, change, message):
    change(log).to_csv(path, index=False)
    with pytest.raises(UserError, match=message):
        quick(spec_of(split=Split("time", 0.2, "hour")))


NAIVE = pd.Timestamp("2024-08-28") + pd.to_timedelta(
    7 * np.random.default_rng(5).integers(0, 2_000, 400), "min"
)
EVEN = {"y": [0, 1] * 200, "item": ["a", "b", "a", "c"] * 100}


def seconds(times):
    return times.to_numpy().astype("datetime64[s]").astype(np.int64)


def stamps(unit, zone=None):
    kind = pa.timestamp(unit, zone)
    if zone is None:
        return lambda times: pa.array(times).cast(kind)
    return lambda times: pa.array(times.tz_localize("UTC").tz_convert(zone)).cast(kind)


def dates(times):
    return pa.array(times).cast(pa.timestamp("s")).cast(pa.date32(), safe=False)


def iso_8601(times):
    """Local times of many zones: their text does not sort by time."""
    zones = (("Z", 0), ("+05:30", 330), ("-1100", -660), ("", 0), ("+14", 840))
    layouts = ("%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M", "%Y-%m-%d %H:%M:%S.000000001")
    return [
        f"{time + pd.Timedelta(minutes=zones[i % 5][1]):{layouts[i % 3]}}{zones[i % 5][0]}"
        for i, time in enumerate(times)
    ]


def as_text(layout):
    return lambda times: times.strftime(layout)


FORMS = {  # of the times in two files
    "seconds": ("csv", seconds, seconds, None),
    "integers beside floats": ("parquet", seconds, lambda t: seconds(t).astype(float), None),
    "s beside ns": ("parquet", stamps("s"), lambda t: stamps("ns")(t + pd.Timedelta(1)), None),
    "ms beside us": ("parquet", stamps("ms"), stamps("us"), None),
    "zones": ("parquet", stamps("ms", "America/New_York"), stamps("us", "Asia/Kolkata"), None),
    "a zone beside none": ("parquet", stamps("ns", "Europe/Berlin"), stamps("s"), None),
    "ISO 8601": ("csv", iso_8601, iso_8601, None),
    "ISO 8601 beside timestamps": ("parquet", iso_8601, stamps("us"), None),
    "day first": ("csv", *[as_text("%d/%m/%Y %H:%M")] * 2, "%d/%m/%Y %H:%M"),
    "dates": ("parquet", dates, dates, None),
    "dates beside timestamps": ("parquet", dates, lambda t: stamps("us")(t.floor("D")), None),
}


@pytest.mark.parametrize("form", FORMS)
def test_times_of_any_form_are_instants(tmp_path, form):
    kind, *writers, layout = FORMS[form]
    times = NAIVE.floor("D") if "dates" in form else NAIVE
    labels = np.random.default_rng(2).permutation(EVEN["y"])
    for i, writer in enumerate(writers):
        half = slice(200 * i, 200 * i + 200)
        columns = {"y": labels[half], "item": EVEN["item"][half], "when": writer(NAIVE[half])}
        if kind == "csv":
            pd.DataFrame(columns).to_csv(tmp_path / f"{i}.csv", index=False)
        else:
            pq.write_table(pa.table(columns), tmp_path / f"{i}.parquet", version="2.6")
    split = Split("time", 0.2, "when", 0.25, layout)
    spec = DatasetSpec("times", "y", ("item",), format=kind, split=split)
    data = prepare(spec, [tmp_path / f"*.{kind}"], tmp_path / "out", progress=False)
    found, rest = pd.Series(times), pd.Series(labels)
    for part, share in (("test", 0.2), ("valid", 0.25)):
        held_out = latest(found, share)
        assert rows_of(data, part)["y"].tolist() == rest[held_out].tolist()
        first = found[held_out].min()
        numbers = form in ("seconds", "integers beside floats")
        said = str(int(first.timestamp())) if numbers else f"{first:%Y-%m-%d %H:%M} UTC"
        assert data.record["boundaries"][part] == said
        found, rest = found[~held_out], rest[~held_out]
    assert data.rows["train"] == len(rest)
    assert data.report["positives"]["train"] == rest.sum()


DAY = "the time '9/9/2024' is not a number, a timestamp or ISO 8601. Set"
MIXED = "column 'when' has numbers and dates. Write its times in one form"


@pytest.mark.parametrize(
    ("kind", "times", "layout", "message"),
    [
        ("csv", ["9/9/2024"] * 400, None, rf"0.csv, line 2, column 'when': {DAY} time_format"),
        ("parquet", ["2024-09-09", *["9/9/2024"] * 399], None, rf"0.parquet, row 2, .*: {DAY}"),
        ("csv", ["2024-09-31"] * 400, None, "the time '2024-09-31' is not a number"),
        (
            *("csv", ["31/01/2024", "30/02/2024"] * 200, "%d/%m/%Y"),
            "0.csv, line 3, .*: the time '30/02/2024' is not in time_format '%d/%m/%Y'",
        ),
        ("csv", [*[7] * 350, "noon", *[7] * 49], None, "1.csv, line 152, .*: the time 'noon' is"),
        ("csv", [*[7] * 350, "inf", *[7] * 49], None, "1.csv, line 152, .*: the time 'inf' is"),
        ("parquet", [1092024] * 400, "%d%m%Y", "column 'when' of .*: it is int64, not text in"),
        ("csv", [7] * 200 + ["2024-09-09"] * 200, None, MIXED),
        ("csv", [7] * 100 + ["2024-09-09"] * 300, None, MIXED),  # in two blocks of one file
    ],
)
def test_times_of_no_form_are_refused(tmp_path, monkeypatch, kind, times, layout, message):
    monkeypatch.setattr(csv, "BLOCK_BYTES", 100 * len("1,a,7\n") + len("y,item,when\n"))
    frame = pd.DataFrame({**EVEN, "when": times})
    for i, half in enumerate((frame[:200], frame[200:])):
        if kind == "csv":
            half.to_csv(tmp_path / f"{i}.csv", index=False)
        else:
            half.to_parquet(tmp_path / f"{i}.parquet")
    split = Split("time", 0.2, "when", time_format=layout)
    spec = DatasetSpec("times", "y", ("item",), format=kind, split=split)
    with pytest.raises(UserError, match=message):
        prepare(spec, [tmp_path / f"*.{kind}"], tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


TOML = 'name = "toy"\nlabel = "y"\ncategorical = ["user", "item"]\ncontinuous = ["price"]\n'


@pytest.fixture
def cut(tmp_path, log):
    """The command `prepare`; the log is in files of 4,000, 600, 400 and 1,000 rows."""
    sizes = {"a": (0, 4_000), "v1": (4_000, 4_600), "v2": (4_600, 5_000), "t": (5_000, 6_000)}
    for name, (start, end) in sizes.items():
        log[start:end].to_csv(tmp_path / f"{name}.csv", index=False)
    (tmp_path / "toy.toml").write_text(TOML)

    def run(options: str, out="out", code=0):
        words = [tmp_path / w if w.endswith((".csv", ".toml")) else w for w in options.split()]
        argv = ["prepare", *words, "--out", tmp_path / out]
        assert main([str(word) for word in argv]) == code
        return None if code else PreparedData.open(tmp_path / out)

    return run


def test_files_as_parts(tmp_path, log, cut, capsys):
    """Ids, counts and ranges are those of the rows that are not held out."""
    data = cut("toy.toml a.csv --valid v1.csv --valid v2.csv --test t.csv")
    rates = [f"{100 * of['y'].mean():.1f}" for of in (log[:4_000], log[4_000:5_000], log[5_000:])]
    assert capsys.readouterr().out.splitlines()[0] == (
        f"4,000 training rows ({rates[0]} % clicks), 1,000 validation rows ({rates[1]} % clicks), "
        f"1,000 test rows ({rates[2]} % clicks): {data.path}"
    )
    parts = {"train": log[:4_000], "valid": log[4_000:5_000], "test": log[5_000:]}
    assert data.rows == {part: len(rows) for part, rows in parts.items()}
    counts = parts["train"]["user"].value_counts()
    table = data.counts("user").iloc[3:].set_index("raw")
    assert table["count"].to_dict() == counts.to_dict()
    filled = parts["train"]["price"].fillna(0)
    assert data.record["ranges"]["price"] == pytest.approx([filled.min(), filled.max()])
    report = data.report["fields"]
    assert report["price"]["occurrences"] == 4_000
    assert report["price"]["mean"] == pytest.approx(parts["train"]["price"].mean())
    for part in ("valid", "test"):
        raw, rows = parts[part].reset_index(drop=True), rows_of(data, part)
        expected = raw["user"].map(table["id"]).fillna(2).mask(raw["user"].isna(), 1)
        assert rows["user"].tolist() == expected.tolist()
        assert rows["y"].tolist() == raw["y"].tolist()
    found, expected = (sorted(of["y"]) for of in (rows_of(data), parts["train"]))
    assert found == expected


@pytest.mark.parametrize("given", ["test", "valid"])
def test_files_beside_a_share(log, cut, capsys, given):
    """The share is of the log's rows, whatever the times of the files."""
    share = {"test": "valid", "valid": "test"}[given]
    options = f"--{given} a.csv --{share} 0.2 --split time --time-column hour"
    data = cut(f"toy.toml v1.csv v2.csv t.csv {options}")
    rest = log[4_000:].reset_index(drop=True)
    held_out = latest(rest["hour"], 0.2)
    sizes = {"train": (~held_out).sum(), share: held_out.sum(), given: 4_000}
    assert data.rows == sizes
    assert rows_of(data, given)["y"].tolist() == log["y"][:4_000].tolist()
    assert rows_of(data, share)["y"].tolist() == rest["y"][held_out].tolist()
    first = {share: str(rest["hour"][held_out].min()), given: str(log["hour"][:4_000].min())}
    last = str(rest["hour"][~held_out].max())
    assert data.record["boundaries"] == {"train": last, **first}
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(f" % clicks), split time by 'hour': {data.path}")
    held = f"valid from {first['valid']}, test from {first['test']}"
    assert lines[1] == f"training until {last}, {held}"


@pytest.mark.parametrize(
    "options", ["--test a.csv", "--valid link.csv", "--valid t.csv --test t.csv"]
)
def test_a_file_in_two_parts_is_refused(tmp_path, cut, capsys, options):
    (tmp_path / "link.csv").symlink_to("a.csv")
    cut(f"toy.toml a.csv {options}", code=2)
    assert "is given twice (first as " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_rows_like_those_of_a_folder_are_split_anew(cut, tmp_path, capsys):
    """Kind, column and shares are the folder's; its files are not those of the new rows."""
    old = cut("toy.toml a.csv --valid v1.csv --test t.csv --split time --time-column hour")
    assert old.spec.split == Split("time", (f"{tmp_path}/t.csv",), "hour", (f"{tmp_path}/v1.csv",))
    new = cut(f"--vocabulary-from {old.path} v2.csv", "new")
    assert new.spec.split == Split("time", 0.1, "hour", 0.1)
    assert new.cardinalities == old.cardinalities
    whole = cut(f"--vocabulary-from {old.path} v2.csv --test 0 --valid 0", "whole")
    assert whole.rows == {"train": 400, "valid": 0, "test": 0}
    assert (whole.valid_files, whole.test_files, [*whole.record["boundaries"]]) == (
        [],
        [],
        ["train"],
    )
    again = cut(f"--vocabulary-from {whole.path} v2.csv --test v1.csv --split random", "again")
    assert again.spec.split == Split("random", (f"{tmp_path}/v1.csv",), valid=0)
    assert again.rows == {"train": 400, "valid": 0, "test": 600}
    grown = cut(f"--vocabulary-from {old.path} v2.csv --grow", "grown").cardinalities
    new = grown["user"] - old.cardinalities["user"]
    assert (new > 0, grown["item"]) == (True, old.cardinalities["item"])
    assert f"\n{new} new ids: user {new}\n" in capsys.readouterr().out


# inf and NaN


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_numbers_that_are_not_finite(tmp_path, log, path, quick, kind):
    log = log.copy()
    log.loc[[3, 4_999], "price"] = [np.inf, -np.inf]
    clean = log.assign(price=log["price"].replace([np.inf, -np.inf], np.nan))
    if kind == "parquet":
        lists = log["genres"].map(lambda text: text.split("|") if text else [])
        for name, frame in (("log", log), ("clean", clean)):
            frame.assign(genres=lists).to_parquet(tmp_path / f"{name}.parquet")
    else:
        log.to_csv(path, index=False)
        path.write_text(path.read_text().replace(",inf,", ",NaN,"))
        clean.to_csv(tmp_path / "clean.csv", index=False)
    source = tmp_path / f"log.{kind}"
    with pytest.raises(
        UserError, match=rf"log.{kind}, (line 5|row 4), column 'price': the number is (inf|nan)"
    ):
        quick(spec_of(format=kind), [source])
    data = quick(spec_of(format=kind, non_finite="missing"), [source])
    assert data.report["fields"]["price"]["not_finite"] == 2
    assert np.isfinite(rows_of(data)["price"]).all()
    same_numbers = quick(spec_of(format=kind), [tmp_path / f"clean.{kind}"], "clean")
    pd.testing.assert_frame_equal(rows_of(data), rows_of(same_numbers))
    lists = log["genres"].map(lambda text: text.split("|") if text else [])
    raw = log.assign(genres=lists)[["y", *FIELDS["categorical"], "price", "genres"]]
    served = data.workflow().transform(raw.iloc[TRAIN:])
    assert served["price"].tolist() == rows_of(data, "test")["price"].tolist()
    assert same_numbers.report["fields"]["price"]["not_finite"] == 0


@pytest.mark.parametrize("non_finite", ["missing", "refuse"])
def test_the_saved_workflow_takes_numbers_as_text(log, quick, non_finite):
    """As `pandas.read_csv` gives them with dtype=str, also lists."""
    workflow = quick(spec_of(non_finite=non_finite)).workflow()
    raw = log.assign(genres=log["genres"].str.split("|")).iloc[:200]
    expected = workflow.transform(raw)["price"].tolist()
    texts = raw["price"].map(repr).where(raw["price"].notna(), None)
    assert workflow.transform(raw.assign(price=texts))["price"].tolist() == expected
    with pytest.raises(UserError, match="cannot read column 'price'.*'many'"):
        workflow.transform(raw.assign(price=texts.mask(raw.index == 3, "many")))
    infinite = raw.assign(price=texts.mask(raw.index == 3, "inf"))
    if non_finite == "refuse":
        with pytest.raises(UserError, match="'price': the number is inf"):
            workflow.transform(infinite)
    else:
        missing = workflow.transform(raw.assign(price=texts.mask(raw.index == 3)))
        assert workflow.transform(infinite)["price"].tolist() == missing["price"].tolist()
    split = workflow.transform(log.iloc[:200])["genres"]
    assert split.map(tuple).tolist() == workflow.transform(raw)["genres"].map(tuple).tolist()


# The report, and what else is left


def test_report(log, quick):
    data = quick()
    train, test = log.iloc[:TRAIN], log.iloc[TRAIN:]
    report = data.report
    assert report["rows"] == {"train": len(train), "valid": 0, "test": len(test)}
    positives = {"train": train["y"].sum(), "valid": 0, "test": test["y"].sum()}
    assert report["positives"] == positives
    assert report["fields"]["user"] == {
        "occurrences": TRAIN,
        "distinct": train["user"].nunique(),
        "missing": train["user"].isna().sum(),
        "below_threshold": 0,
    }
    price = report["fields"]["price"]
    assert price["mean"] == pytest.approx(train["price"].mean())
    assert (price["min"], price["max"]) == (train["price"].min(), train["price"].max())
    assert price["missing"] == train["price"].isna().sum()
    genres = [g for cell in train["genres"] if cell for g in cell.split("|")]
    assert report["fields"]["genres"]["occurrences"] == len(genres)


def test_vocabularies_are_each_runs_own(tmp_path, log, quick, monkeypatch):
    """Stock Categorify writes to ./categories by default: two workflows overwrite each other."""
    monkeypatch.chdir(tmp_path)
    one = quick(out="one")
    log.iloc[::-1].to_csv("other.csv", index=False)
    two = quick(inputs=["other.csv"], out="two")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.csv", "one", "other.csv", "two"]
    raw = log.iloc[:500].assign(genres=log["genres"].str.split("|"))
    first, second = (data.workflow().transform(raw) for data in (one, two))
    assert first["user"].tolist() != second["user"].tolist()
    for data, frame in ((one, first), (two, second)):
        texts = data.counts("user")["raw"].to_numpy()[frame["user"]]
        known = pd.notna(texts)
        assert (texts[known] == raw["user"].to_numpy()[known]).all()


def test_parquet_files_of_one_log_may_hold_ids_as_numbers_or_text(tmp_path, log, quick):
    lists = log["genres"].map(lambda text: text.split("|") if text else [])
    log = log.assign(genres=lists)
    whole, first, second = (tmp_path / f"{name}.parquet" for name in ("whole", "a", "b"))
    log.to_parquet(whole)
    log.iloc[:2_000].to_parquet(first)
    log.iloc[2_000:].assign(item=log["item"].astype(int)).to_parquet(second)
    spec = spec_of(format="parquet")
    same(quick(spec, [first, second], "two"), quick(spec, [whole], "one"))
    log.iloc[2_000:].assign(price="cheap").to_parquet(second)
    with pytest.raises(UserError, match=r"cannot read column 'price' of .*b.parquet: .*'cheap'"):
        quick(spec, [first, second])


# The command line


def test_command_line(tmp_path, log, path, capsys):
    (tmp_path / "toy.toml").write_text(
        'name = "toy"\nlabel = "y"\ncategorical = ["user", "item"]\ncontinuous = ["price"]\n'
        "freq_threshold = 3\n[hash_buckets]\nuser = 4\nitem = 5\n"
    )
    log.assign(price=log["price"].where(log.index != 9, np.inf)).to_csv(path, index=False)
    command = ["prepare", str(tmp_path / "toy.toml"), str(path), "--out", str(tmp_path / "out")]
    options = ["--split", "time", "--time-column", "hour", "--test", "0.2"]
    options += ["--freq-threshold", "user=2", "--hash-buckets", "item=6"]
    assert main([*command, *options, "--non-finite", "missing"]) == 0
    assert "price: 1 numbers that were not finite are missing" in capsys.readouterr().out
    spec = PreparedData.open(tmp_path / "out").spec
    assert spec.split == Split("time", 0.2, "hour")
    assert spec.freq_threshold == {"user": 2, "item": 3}  # the description's, where none is given
    assert spec.hash_buckets == {"user": 4, "item": 6}
    assert main([*command[:-1], str(tmp_path / "out2"), "--freq-threshold", "user=x"]) == 2
    assert "must be a number, or numbers by field, each once: C3=10" in capsys.readouterr().err


def test_a_folder_of_parts_by_spark(tmp_path, log, quick, capsys):
    """Part 0 has no row, `_SUCCESS` no byte; one field has one id."""
    lists = log["genres"].map(lambda text: text.split("|") if text else [])
    log = log.assign(genres=lists, item="same")
    (tmp_path / "log.parquet").mkdir()
    for i, part in enumerate([log[:0], log[:2_000], log[2_000:]]):
        part.to_parquet(tmp_path / "log.parquet" / f"part-{i:05}.snappy.parquet", index=False)
    (tmp_path / "log.parquet" / "_SUCCESS").touch()
    log.to_parquet(tmp_path / "whole.parquet")
    spec = spec_of(format="parquet")
    parts = quick(spec, [tmp_path / "log.parquet"], "parts")
    same(parts, quick(spec, [tmp_path / "whole.parquet"], "whole"))


def test_spellings_go_into_the_saved_workflow(tmp_path, log, quick):
    """What means a missing value in the log means one in raw rows."""
    log = log.assign(y=log["y"].map({0: "no", 1: "yes"}))
    log.loc[::7, "genres"] = "\\N"
    log.fillna("\\N").to_csv(tmp_path / "spelt.csv", index=False)
    data = quick(
        spec_of(null_values=("\\N",), label_values=("no", "yes")), [tmp_path / "spelt.csv"]
    )
    guide = (Path(__file__).parents[3] / "docs" / "data.md").read_text()
    recipe = re.search(r"`(dtype=str, [^`]*)`", guide)[1]
    read = pd.read_csv(tmp_path / "spelt.csv", **eval(f"dict({recipe})", {"data": data}))
    splits = {"genres": lambda frame: frame["genres"].str.split("|")}
    texts = log.fillna("\\N").astype({"price": str})
    raw, by_recipe = texts.assign(**splits), read.assign(**splits)
    test = rows_of(data, "test")
    for rows in (raw[TRAIN:], by_recipe[TRAIN:]):
        served = data.workflow().remove_inputs(["y"]).transform(rows[[*data.spec.fields]])
        for name in ("user", "price"):
            assert served[name].tolist() == test[name].tolist()
    assert served["genres"].map(tuple).tolist() == test["genres"].tolist()
    assert (test["user"] == 1).sum() == log["user"][TRAIN:].isna().sum() > 0


def test_logs_encoded_as_an_earlier_folder(quick, log, tmp_path):
    """New rows have the ids and ranges of the folder, as its own workflow gives them."""
    spec = spec_of(freq_threshold=2, hash_buckets={"user": 3})
    old = quick(spec)
    rows = log[::-1].assign(user=log["user"][::-1].replace("u1", "new"), price=log["price"] * 2)
    rows.to_csv(tmp_path / "next.csv", index=False)
    like = Encoding(spec, old.record["ranges"], old.path)
    new = quick(spec, [tmp_path / "next.csv"], "next", like=like)
    assert (new.cardinalities, new.record["ranges"]) == (old.cardinalities, old.record["ranges"])
    raw = rows[TRAIN:].reset_index(drop=True)
    raw["genres"] = raw["genres"].fillna("").map(lambda text: text.split("|") if text else [])
    for data in (old, new):
        encoded = data.workflow().transform(raw[["y", *spec.fields]])
        for name in spec.fields:
            expected = encoded[name].map(tuple) if name == "genres" else encoded[name]
            assert rows_of(new, "test")[name].tolist() == expected.tolist(), name
    raw_ids = old.counts("user")["raw"]
    train = rows["user"][:TRAIN]
    assert new.counts("user")["count"][3 + 2 :].tolist() == [
        int((train == text).sum()) for text in raw_ids[3 + 2 :]
    ]
    assert (
        new.report["fields"]["user"]["below_threshold"]
        == (~train.isin(raw_ids) & train.notna()).sum()
    )
