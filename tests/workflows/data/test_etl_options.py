"""What can be chosen in `prepare`: chunks, thresholds, hashing, splits, inf and NaN; its report."""

import os
import re

import numpy as np
import pandas as pd
import pytest
from pandas._libs.parsers import STR_NA_VALUES

from merlin_cowclip.workflows import machine
from merlin_cowclip.workflows.commands.main import main
from merlin_cowclip.workflows.data import etl
from merlin_cowclip.workflows.data.arrow_ids import READ_AS_MISSING
from merlin_cowclip.workflows.data.datasets import DatasetSpec, Split
from merlin_cowclip.workflows.data.etl import prepare
from merlin_cowclip.workflows.data.prepared import PreparedData
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.quiet import quiet_imports

with quiet_imports():
    import nvtabular as nvt
    from nvtabular import ops

    from merlin_cowclip.workflows.data.operators import EncodeIds

ROWS = 6_000
FIELDS = {"categorical": ("user", "item"), "continuous": ("price",), "lists": ("genres",)}
SEQUENTIAL = Split("sequential", 0.25)
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
    files = data.train_files if part == "train" else data.test_files
    frame = pd.concat([pd.read_parquet(file) for file in files], ignore_index=True)
    return frame.assign(genres=frame["genres"].map(tuple))


def same(one, other) -> None:
    for part in ("train", "test"):
        pd.testing.assert_frame_equal(rows_of(one, part), rows_of(other, part))
    for field in one.spec.ids:
        pd.testing.assert_frame_equal(one.counts(field), other.counts(field))
    assert one.record["ranges"] == other.record["ranges"]
    assert one.report == other.report


# Chunks


@pytest.mark.parametrize("kind", ["header", "no header", "crlf", "no last line end", "parquet"])
def test_chunks_give_the_same_as_the_whole(tmp_path, log, path, quick, monkeypatch, kind):
    spec = spec_of()
    if kind == "no header":
        spec = spec_of(header=False, columns=tuple(log.columns))
        log.to_csv(path, index=False, header=False)
    elif kind == "crlf":
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    elif kind == "no last line end":
        path.write_bytes(path.read_bytes()[:-1])
    elif kind == "parquet":
        spec = spec_of(format="parquet")
        path = tmp_path / "log.parquet"
        lists = log["genres"].map(lambda text: text.split("|") if text else [])
        log.assign(genres=lists).to_parquet(path, row_group_size=500)
    whole = quick(spec, [path], "whole", seed=1)
    monkeypatch.setattr(etl, "CHUNK_BYTES", (10_000, 10_000))
    cut = []
    staged = etl._stage
    monkeypatch.setattr(etl, "_stage", lambda job, advance: cut.append(job) or staged(job, advance))
    chunked = quick(spec, [path], "chunked", seed=1)
    assert len(cut) > 5
    same(chunked, whole)
    assert len(rows_of(whole)) == TRAIN


def test_a_fault_in_a_later_chunk_is_named_by_its_line(tmp_path, path, quick, monkeypatch):
    lines = path.read_text().splitlines()
    lines[5_000] = lines[5_000].replace(",", ",,", 1)
    path.write_text("\n".join(lines))
    monkeypatch.setattr(etl, "CHUNK_BYTES", (10_000, 10_000))
    with pytest.raises(UserError, match=r"must have 7 columns.*log.csv, line 5001"):
        quick()
    assert [p.name for p in tmp_path.iterdir()] == ["log.csv"]


@pytest.mark.parametrize("name", ["in_train", "train_rows", "test_rows", "0.arrows"])
def test_a_column_may_be_called_as_what_is_kept_beside_it(log, path, quick, name):
    log.rename(columns={"user": name}).to_csv(path, index=False)
    renamed = quick(spec_of(categorical=(name, "item")), out="renamed")
    log.to_csv(path, index=False)
    plain = quick()
    for part in ("train", "test"):
        there = rows_of(renamed, part).rename(columns={name: "user"})
        pd.testing.assert_frame_equal(there, rows_of(plain, part))


@pytest.mark.parametrize("quotes", [True, False])
def test_a_byte_order_mark_within_a_log_is_text(path, quick, monkeypatch, quotes):
    path.write_text("".join(f"\ufeffid{i % 5},{i % 2}\n" for i in range(4_000)), encoding="utf-8")
    spec = spec_of(
        **{"categorical": ("x",), "continuous": (), "lists": ()},
        **{"header": False, "columns": ("x", "y"), "quotes": quotes},
    )
    whole = quick(spec, out="whole").counts("x")
    assert whole["raw"].iloc[3:].str.lstrip("\ufeff").nunique() == 5
    monkeypatch.setattr(etl, "CHUNK_BYTES", (1_000, 1_000))
    pd.testing.assert_frame_equal(quick(spec, out="chunked").counts("x"), whole)


def test_blank_lines_at_the_end_are_no_rows(path, quick, monkeypatch):
    whole = quick(out="whole")
    path.write_bytes(path.read_bytes() + b"\n" * 50_000)
    monkeypatch.setattr(etl, "CHUNK_BYTES", (10_000, 10_000))
    same(quick(out="blank"), whole)


# Ids that are numbers


@pytest.mark.parametrize(
    ("first", "second", "note"),
    [
        (["1382", "77"], ["1382.0", "77.0", ""], "2 ids are written as integers and as floats"),
        (["1382.0", "77.0"], ["1382.0", "77.0", ""], "all ids are written as floats"),
        (["1382", "77"], ["1382", "77", ""], None),
        (["1382", "77"], ["2.5", "5.0", ""], None),
        (["v1382", "v77"], ["v1382.0", "1382.0", ""], None),
    ],
)
@pytest.mark.parametrize("role", ["categorical", "lists"])
def test_integers_written_as_floats_are_told(tmp_path, capsys, first, second, note, role):
    for name, ids in (("a", first), ("b", second)):
        rows = "".join(f"{i % 2},{ids[i % len(ids)]}\n" for i in range(60))
        (tmp_path / f"{name}.csv").write_text("y,x\n" + rows)
    toml = f'name = "ids"\nlabel = "y"\n{role} = ["x"]\nsplit = {{ kind = "random", test = 0.5 }}'
    (tmp_path / "ids.toml").write_text(toml)
    out = str(tmp_path / "out")
    files = [str(tmp_path / name) for name in ("a.csv", "b.csv")]
    assert main(["prepare", str(tmp_path / "ids.toml"), *files, "--out", out]) == 0
    data, printed = PreparedData.open(out), capsys.readouterr().out
    assert data.counts("x")["raw"].iloc[3:].nunique() == len({*first, *second} - {""})
    assert (f"x: {note}" in printed) == (note is not None)
    assert data.report["fields"]["x"].get("note", "").startswith(note or "")
    assert ("note" in data.report["fields"]["x"]) == (note is not None)


@pytest.mark.parametrize(
    ("ids", "told"),
    [("True False", "True"), ("true FALSE", "FALSE"), ("true false", None), ("True No", None)],
)
def test_ids_that_pandas_reads_as_truth_values_are_told(tmp_path, ids, told):
    path = tmp_path / "log.csv"
    one, other = ids.split()
    path.write_text("y,x\n" + f"0,{one}\n1,{other}\n" * 30)
    spec = DatasetSpec(name="ids", label="y", categorical=("x",))
    data = prepare(spec, [path], tmp_path / "out", progress=False)
    note = data.report["fields"]["x"].get("note", "")
    assert note.startswith(f"pandas reads the id {told} as a truth value" if told else "")
    assert bool(note) == bool(told)
    known = []
    for dtype in (None, {"x": str}):
        frame = pd.read_csv(path, dtype=dtype)
        known.append(data.workflow().transform(frame)["x"].ge(3).all())
    assert known == [not told, True]


def test_ids_that_pandas_reads_as_missing_are_told(tmp_path):
    assert STR_NA_VALUES - {""} <= READ_AS_MISSING
    path = tmp_path / "log.csv"
    path.write_text("y,x\n" + "0,NA\n1,DE\n1,\n" * 30)
    spec = DatasetSpec(name="ids", label="y", categorical=("x",))
    data = prepare(spec, [path], tmp_path / "out", progress=False)
    assert data.report["fields"]["x"]["note"].startswith("pandas reads the id NA as a missing")
    frame = pd.read_csv(path, dtype=str, keep_default_na=False, na_values=[""]).head(3)
    ids = data.counts("x").set_index("raw")["id"]
    assert data.workflow().transform(frame.astype({"y": int}))["x"].tolist() == [
        *(ids["NA"], ids["DE"]),
        1,
    ]


# Rare ids


@pytest.mark.parametrize("threshold", [1, 3, 20])
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
    meta = [
        pd.read_parquet(folder / "categories" / "meta.user.parquet")
        for folder in (tmp_path / "nvt", data.path / "workflow")
    ]
    assert meta[0]["num_observed"][2:].tolist() == meta[1]["num_observed"][2:].tolist()
    assert data.schema["user"].properties["freq_threshold"] == (threshold if threshold > 1 else 0)
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
    report = data.report["fields"]["user"]
    assert report["test_unknown"] == hashed.sum()


def test_the_saved_workflow_refuses_cells_of_lists_that_are_text(log, quick):
    workflow, raw = quick(spec_of()).workflow(), log.iloc[TRAIN:].reset_index(drop=True)
    split = raw.assign(genres=raw["genres"].str.split("|"))
    none = raw.assign(genres=None)  # a missing list is empty, whatever its column's type
    empty = [[]] * len(raw)
    assert list(map(list, workflow.transform(none)["genres"])) == empty
    typed = none.astype({"genres": "string"})
    assert list(map(list, workflow.transform(typed)["genres"])) == empty
    assert workflow.transform(split)["genres"].map(len).sum() > len(raw) / 2
    for unsplit in (raw, raw.astype({"genres": "string"}), raw.assign(genres=1)):
        with pytest.raises(UserError, match=r"column 'genres' must hold lists\. Received: .*split"):
            workflow.transform(unsplit)
    some = split["genres"].where(split.index > 3, "rock|pop")
    with pytest.raises(TypeError, match="must hold lists alone"):
        workflow.transform(raw.assign(genres=some))


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
        ({"freq_threshold": {"user": 0.5}}, r"Received: 0.5 for 'user'"),
        ({"hash_buckets": 0}, "hash_buckets must be a whole number of at least 1"),
        ({"hash_buckets": 5}, "hash_buckets needs a freq_threshold.*5 buckets, threshold 0"),
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
    with pytest.raises(UserError, match="freq_threshold must leave ids.*5000 for 'user'"):
        quick(spec_of(freq_threshold=5_000))
    assert [p.name for p in tmp_path.iterdir()] == ["log.csv"]


def test_spec_round_trip():
    spec = spec_of(
        freq_threshold={"user": 3},
        hash_buckets={"user": 7},
        split=Split("time", 0.1, "hour"),
        non_finite="missing",
    )
    assert DatasetSpec.from_dict(spec.to_dict()) == spec


# Splits


@pytest.mark.parametrize("column", ["hour", "when"])
@pytest.mark.parametrize("share", [0.1, 0.33])
def test_split_by_time(log, path, quick, column, share):
    """Shuffled on disk, so that the log's order cannot help."""
    shuffled = log.sample(frac=1, random_state=1)
    shuffled.to_csv(path, index=False)
    data = quick(spec_of(split=Split("time", share, column)))
    cut = shuffled[column].sort_values().unique()
    later = [(shuffled[column] >= time).sum() for time in cut[1:]]
    best = cut[1:][np.argmin(np.abs(np.array(later) - share * ROWS))]
    in_test = shuffled[column] >= best
    assert data.rows == {"train": (~in_test).sum(), "test": in_test.sum()}
    assert abs(data.rows["test"] / ROWS - share) < 0.03
    assert rows_of(data, "test")["y"].tolist() == shuffled["y"][in_test].tolist()
    assert column not in rows_of(data).columns
    counts = shuffled[~in_test]["item"].value_counts()
    assert data.counts("item").set_index("raw")["count"].drop([None]).to_dict() == counts.to_dict()


def test_the_time_may_be_a_field(quick, log):
    spec = spec_of(categorical=("user", "item", "hour"), split=Split("time", 0.2, "hour"))
    data = quick(spec)
    names = data.counts("hour")["raw"].to_numpy()
    last_seen = max(int(names[i]) for i in rows_of(data)["hour"].unique())
    assert (rows_of(data, "test")["hour"] == 2).all()  # later than all that training saw
    assert (log["hour"] > last_seen).sum() == data.rows["test"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda log: log.assign(hour=log["hour"].where(log.index != 7)), "1 of 6000 rows without"),
        (lambda log: log.assign(hour=5), "two times at least. Received: '5' in all 6000"),
        (lambda log: log.drop(columns="hour"), "Missing: 'hour'"),
    ],
)
def test_times_refused(log, path, quick, change, message):
    change(log).to_csv(path, index=False)
    with pytest.raises(UserError, match=message):
        quick(spec_of(split=Split("time", 0.2, "hour")))


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
    with pytest.raises(UserError, match=rf"must be finite.*log.{kind}, (line 5|row 4), .*'price'"):
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
    """As `pandas.read_csv` gives them with dtype=str, or JSON with a missing one."""
    workflow = quick(spec_of(non_finite=non_finite)).workflow()
    raw = log.assign(genres=log["genres"].str.split("|")).iloc[:200]
    raw["price"] = raw["price"].where(raw.index % 7 > 0)
    expected = workflow.transform(raw)["price"].tolist()
    texts = raw["price"].map(repr).where(raw["price"].notna(), None)
    objects = raw["price"].astype(object).where(texts.notna(), None)
    strings = [texts.astype("string")] if non_finite == "missing" else []  # no 0 fills them
    for given in (texts, objects, *strings):
        assert workflow.transform(raw.assign(price=given))["price"].tolist() == expected
    if non_finite == "missing":
        endless = workflow.transform(raw.assign(price=texts.mask(raw.index == 3, "-inf")))
        assert endless["price"][3] == workflow.transform(raw.assign(price=None))["price"][3]
    refused = ["many", "1_000", "+3", "٣", ""] + (["nan", "inf"] if non_finite == "refuse" else [])
    for text in refused:  # as prepare refuses them
        with pytest.raises(UserError, match=f"'price' must hold numbers.*{re.escape(repr(text))}"):
            workflow.transform(raw.assign(price=texts.mask(raw.index == 3, text)))


# The report, and what else is left


def test_report(log, quick):
    data = quick()
    train, test = log.iloc[:TRAIN], log.iloc[TRAIN:]
    report = data.report
    assert report["rows"] == {"train": len(train), "test": len(test)}
    assert report["positives"] == {"train": train["y"].sum(), "test": test["y"].sum()}
    unseen = test["user"].dropna()[~test["user"].dropna().isin(train["user"])]
    assert report["fields"]["user"] == {
        "occurrences": TRAIN,
        "distinct": train["user"].nunique(),
        "missing": train["user"].isna().sum(),
        "below_threshold": 0,
        "test_occurrences": len(test),
        "test_missing": test["user"].isna().sum(),
        "test_unknown": len(unseen),
    }
    price = report["fields"]["price"]
    assert price["mean"] == pytest.approx(train["price"].mean())
    assert (price["min"], price["max"]) == (train["price"].min(), train["price"].max())
    assert price["missing"] == train["price"].isna().sum()
    beyond = (test["price"] < train["price"].min()) | (test["price"] > train["price"].max())
    assert price["test_out_of_range"] == beyond.sum()
    genres = [g for cell in train["genres"] if cell for g in cell.split("|")]
    assert report["fields"]["genres"]["occurrences"] == len(genres)


@pytest.mark.parametrize(
    ("first", "missing", "note"),
    [
        (1990, True, "scaled to [0, 1] with it, fill 0.017 of it, from 0.983 to 1."),
        (1.7e18, True, "scaled to [0, 1] with it, fill 1.5e-14 of it, from 1 to 1."),
        (1990, False, None),
        (0, True, None),
        (-30, True, None),
    ],
)
def test_numbers_far_from_that_of_missing_ones_are_told(log, path, quick, first, missing, note):
    """Of years with one empty cell all others ended near 1, of which nothing told."""
    years = first + np.arange(ROWS) % 35 * (first * 2**-51 if first > 2**53 else 1.0)
    years[7] = np.nan if missing else first
    log.assign(price=years).to_csv(path, index=False)
    found = quick().report["fields"]["price"].get("note")
    assert (found is None) == (note is None)
    assert note is None or note in found


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


def test_a_part_without_any_id(tmp_path, quick):
    """Stock Categorify fails on a part in which a column is all missing."""
    data = quick()
    raw = make_log().iloc[:5].assign(user=None, genres=[[], None, [], [], None])
    out = data.workflow().transform(raw)
    assert out["user"].tolist() == [1] * 5
    assert [list(ids) for ids in out["genres"]] == [[]] * 5
    stock = ["user"] >> ops.Categorify(out_path=str(tmp_path / "stock"))
    fitted = nvt.Workflow(stock).fit(nvt.Dataset(make_log()[["user"]]))
    with pytest.raises(RuntimeError, match="Failed to categorical encode"):
        fitted.transform(raw[["user"]])


def test_buckets_of_one_field_of_two(tmp_path, log):
    """num_buckets by field: stock fails, or counts a row too few, for a field that is not named."""
    frame = log[["user", "item"]].dropna().reset_index(drop=True)
    options = {"freq_threshold": 2, "num_buckets": {"user": 5}}
    stock = ops.Categorify(out_path=str(tmp_path / "stock"), **options)
    with pytest.raises(KeyError, match="item"):
        nvt.Workflow(["user", "item"] >> stock).fit(nvt.Dataset(frame))
    ours = EncodeIds(
        tmp_path / "ours",
        freq_threshold={"user": 2, "item": 2},
        num_buckets={"user": 5, "item": 1},
    )
    workflow = nvt.Workflow(["user", "item"] >> ours).fit(nvt.Dataset(frame))
    assert workflow.output_schema["item"].int_domain.max + 1 == 3 + 50
    assert workflow.transform(frame)["item"].max() == 2 + 50


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
    with pytest.raises(UserError, match=r"'price' must be a column of numbers.*b.parquet"):
        quick(spec, [first, second])


# The command line


def test_command_line(tmp_path, log, path, capsys):
    (tmp_path / "toy.toml").write_text(
        'name = "toy"\nlabel = "y"\ncategorical = ["user", "item"]\ncontinuous = ["price"]\n'
    )
    log.assign(price=log["price"].where(log.index != 9, np.inf)).to_csv(path, index=False)
    command = ["prepare", str(tmp_path / "toy.toml"), str(path), "--out", str(tmp_path / "out")]
    options = ["--split", "time", "--time-column", "hour", "--test", "0.2"]
    options += ["--freq-threshold", "user=3,item=2", "--hash-buckets", "user=4"]
    assert main([*command, *options, "--non-finite", "missing"]) == 0
    assert "price: 1 numbers that were not finite are missing" in capsys.readouterr().out
    data = etl.PreparedData.open(tmp_path / "out")
    assert data.spec.split == Split("time", 0.2, "hour")
    assert data.spec.freq_threshold == {"user": 3, "item": 2}
    assert data.spec.hash_buckets == {"user": 4}
    (tmp_path / "fields.toml").write_text(
        'name = "toy"\nlabel = "y"\ncategorical = ["user", "item"]\ncontinuous = ["price"]\n'
        'freq_threshold = 3\nnon_finite = "missing"\n'
        "[hash_buckets]\nuser = 4\nitem = 5\n"
    )
    ours = ["--freq-threshold", "user=2", "--hash-buckets", "item=6"]
    given = ["prepare", str(tmp_path / "fields.toml"), str(path), "--out", str(tmp_path / "fields")]
    assert main([*given, *ours]) == 0
    data = etl.PreparedData.open(tmp_path / "fields")  # the others keep the description's
    assert data.spec.freq_threshold == {"user": 2, "item": 3}
    assert data.spec.hash_buckets == {"user": 4, "item": 6}
    capsys.readouterr()
    command[-1] += "2"
    for wrong, message in (
        (["--freq-threshold", "many"], "must be a number, or numbers by field: C3=10"),
        (["--freq-threshold", "user=x"], "must be a number, or numbers by field: C3=10"),
        (["--hash-buckets", "4"], "hash_buckets needs a freq_threshold"),
        (["--split", "weekly"], "split.kind must be one of"),
        (["--time-column", "hour"], "split.column must name the column of times"),
        (["--non-finite", "zero"], "non_finite must be one of"),
        (["--workers", "-1"], "workers must be an integer of at least 0"),
        (["--device", "tpu"], "device must be one of cpu, gpu"),
    ):
        assert main([*command, *wrong]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out2").exists()


# Quotes, and what else once slipped through


@pytest.mark.parametrize("chunk_bytes", [40, 200, 100_000])
def test_line_ends_within_quotes_are_not_cut(tmp_path, quick, monkeypatch, chunk_bytes):
    lines = ["y,user,item,price,genres"]
    for i in range(200):
        lines.append(f'{i % 2},"u\n{i % 2},z,{i % 7}",i{i % 5},{i},g')
    path = tmp_path / "quoted.csv"
    path.write_text("\n".join(lines))
    monkeypatch.setattr(etl, "CHUNK_BYTES", (chunk_bytes, chunk_bytes))
    data = quick(inputs=[path], out="quoted")
    assert data.rows == {"train": 150, "test": 50}
    users = set(data.counts("user")["raw"].dropna())
    assert users <= {f"u\n{i % 2},z,{i % 7}" for i in range(200)}


@pytest.mark.parametrize("chunk_bytes", [40, 100_000])
def test_a_quote_that_is_never_closed_is_refused(tmp_path, quick, monkeypatch, chunk_bytes):
    rows = [f"{i % 2},u{i},i{i % 5},{i},g" for i in range(100)]
    rows[50] = '0,u,i,1,"x'
    path = tmp_path / "open.csv"
    path.write_text("\n".join(["y,user,item,price,genres", *rows]))
    monkeypatch.setattr(etl, "CHUNK_BYTES", (chunk_bytes, chunk_bytes))
    with pytest.raises(UserError, match="a quote must be closed.*'\"x'.*open.csv, line 52"):
        quick(inputs=[path])


@pytest.mark.parametrize("chunk_bytes", [1, 100_000])
def test_a_quote_within_a_cell_is_a_part_of_it(tmp_path, quick, monkeypatch, chunk_bytes):
    """Also where only the last part of several has an odd number of them."""
    monkeypatch.setattr(etl, "CHUNK_BYTES", (chunk_bytes, chunk_bytes))
    rows = [f'{i % 2},5" disk {i % 3} 3",i{i % 5},{i},g' for i in range(100)]
    rows.append('1,5" disk 0 3",i"3,100,g')
    path = tmp_path / "inches.csv"
    path.write_text("\n".join(["y,user,item,price,genres", *rows]))
    data = quick(inputs=[path], out="inches")
    assert sum(data.rows.values()) == 101
    assert set(data.counts("user")["raw"].dropna()) == {f'5" disk {i} 3"' for i in range(3)}


@pytest.mark.parametrize("word", ["NULL", "nan", "1_5"])
def test_times_that_are_numbers_but_for_a_word_are_refused(log, path, quick, word):
    hours = log["hour"].astype(str)
    hours[7] = word
    log.assign(hour=hours).to_csv(path, index=False)
    message = f"must be numbers, or all of them text.*'{word}' in column 'hour'"
    with pytest.raises(UserError, match=message):
        quick(spec_of(split=Split("time", 0.2, "hour")))


def test_empty_text_in_a_parquet_dictionary_is_missing(tmp_path, log, quick):
    lists = log["genres"].map(lambda text: text.split("|") if text else [])
    item = log["item"].where(log.index % 9 != 0, "")
    path = tmp_path / "log.parquet"
    log.assign(genres=lists, item=item.astype("category")).to_parquet(path)
    data = quick(spec_of(format="parquet"), [path])
    assert data.counts("item")["count"][1] == (item[:TRAIN] == "").sum()
    assert "" not in set(data.counts("item")["raw"])


@pytest.mark.parametrize("name", ["price", "genres", "item"])
def test_a_parquet_file_in_which_a_columns_values_are_all_missing(tmp_path, log, quick, name):
    """pandas gives such a column no type; of numbers and lists that file was refused."""
    lists = log["genres"].map(lambda text: text.split("|") if text else [])
    parts = [frame.assign(genres=lists) for frame in (log[:300], log[300:])]
    parts[1][name] = None
    for part, file in zip(parts, ("1.parquet", "2.parquet"), strict=True):
        part.to_parquet(tmp_path / file)
    pd.concat(parts).to_parquet(tmp_path / "whole.parquet")
    spec = spec_of(format="parquet")
    data = quick(spec, [tmp_path / "1.parquet", tmp_path / "2.parquet"])
    whole = quick(spec, [tmp_path / "whole.parquet"], "whole")
    pd.testing.assert_frame_equal(rows_of(data), rows_of(whole))
    assert data.record["ranges"] == whole.record["ranges"]
    assert data.counts("item").equals(whole.counts("item"))


def test_parquet_values_that_cannot_be_read_are_named(tmp_path, log, quick):
    lists = log["genres"].map(lambda text: text.split("|") if text else [])
    path = tmp_path / "log.parquet"
    large = log.assign(genres=lists, price=2**60 + np.arange(ROWS))
    large.to_parquet(path)
    assert quick(spec_of(format="parquet"), [path]).record["ranges"]["price"][0] == 2.0**60
    large.assign(item=b"\xff").to_parquet(path)
    with pytest.raises(UserError, match=r"UTF-8. Received: b'.xff' in .*, row 1, column 'item'"):
        quick(spec_of(format="parquet"), [path], "other")


def test_a_log_whose_name_is_not_utf8(tmp_path, path, quick):
    other = tmp_path / os.fsdecode(b"l\xffg.csv")
    path.rename(other)
    data = quick(inputs=[other])
    assert [file["path"] for file in data.record["inputs"]] == [str(other)]
    assert etl.PreparedData.open(data.path).record == data.record


@pytest.mark.parametrize("largest", [1.7e308, 1e39])
def test_numbers_beyond_float32_are_scaled_like_others(log, path, quick, largest):
    """-1.7e308 to 1.7e308 is longer than float64's largest number: the range was NaN."""
    log.assign(price=np.linspace(-1, 1, ROWS) * largest).to_csv(path, index=False)
    data = quick(spec_of(split=Split("random", 0.25)))
    for part in ("train", "test"):
        prices = rows_of(data, part)["price"]
        assert prices.between(0, 1).all()
        assert abs(prices.mean() - 0.5) < 0.05
    report = data.report["fields"]["price"]
    assert np.isfinite(report["mean"])
    frame = log.iloc[:9].assign(price=largest, genres=[[]] * 9)
    assert data.workflow().transform(frame)["price"].between(0.99, 1).all()


def test_hash_buckets_beyond_the_memory_are_refused_before_any_work(quick, monkeypatch):
    monkeypatch.setattr(machine, "memory_limit", lambda: 10 << 30)
    spec = spec_of(freq_threshold=2, hash_buckets={"user": (1 << 27) - 9})
    with pytest.raises(UserError, match=r"134,217,737 .*take 8.0 GiB of the 8.0 GiB"):
        quick(spec_of(freq_threshold=2, hash_buckets={"user": (1 << 27) + 9}), ["nowhere.csv"])
    with pytest.raises(UserError, match="input file must exist"):
        quick(spec, ["nowhere.csv"])  # just fits


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_label_of_minus_0_is_0(tmp_path, log, path, quick, kind):
    lists = log["genres"].map(lambda text: text.split("|") if text else [])
    whole = log.assign(genres=lists if kind == "parquet" else log["genres"])
    minus = whole.assign(y=np.where(whole["y"] == 0, -0.0, 1.0))
    results = []
    for name, frame in (("whole", whole), ("minus", minus)):
        source = tmp_path / f"{name}.{kind}"
        frame.to_parquet(source) if kind == "parquet" else frame.to_csv(source, index=False)
        results.append(quick(spec_of(format=kind), [source], f"out-{name}"))
    same(*results)


def test_more_is_refused():
    with pytest.raises(UserError, match="one time per row. Received: 'genres', a column of lists"):
        spec_of(split=Split("time", 0.2, "genres"))
    with pytest.raises(UserError, match="hash_buckets must be at most 1,073,741,824"):
        spec_of(freq_threshold=2, hash_buckets=1 << 31)
