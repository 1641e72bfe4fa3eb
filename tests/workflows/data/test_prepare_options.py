"""What can be chosen in `prepare`: chunks, thresholds, hashing, splits, inf and NaN; its report."""

import numpy as np
import pandas as pd
import pytest

from merlin_cowclip.workflows.commands.main import main
from merlin_cowclip.workflows.data.prepare import pipeline
from merlin_cowclip.workflows.data.prepare.column_store import ColumnStore
from merlin_cowclip.workflows.data.prepare.fit import Encoding
from merlin_cowclip.workflows.data.prepare.pipeline import prepare
from merlin_cowclip.workflows.data.prepared_data import PreparedData
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
    monkeypatch.setattr(pipeline, "CHUNK_BYTES", (10_000, 10_000))
    cut = []
    write = ColumnStore.write_chunk
    monkeypatch.setattr(
        ColumnStore, "write_chunk", lambda *job, **kw: cut.append(job) or write(*job, **kw)
    )
    chunked = quick(spec, [path], "chunked", seed=1)
    assert len(cut) > 5
    same(chunked, whole)
    assert len(rows_of(whole)) == TRAIN


def test_a_fault_in_a_later_chunk_is_named_by_its_line(tmp_path, path, quick, monkeypatch):
    lines = path.read_text().splitlines()
    lines[5_000] = lines[5_000].replace(",", ",,", 1)
    path.write_text("\n".join(lines))
    monkeypatch.setattr(pipeline, "CHUNK_BYTES", (10_000, 10_000))
    with pytest.raises(UserError, match=r"log.csv, line 5001: Expected 7 columns"):
        quick()
    assert [p.name for p in tmp_path.iterdir()] == ["log.csv"]


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


@pytest.mark.parametrize(("column", "share"), [("hour", 0.33), ("when", 0.1)])
def test_split_by_time(log, path, quick, column, share):
    """Shuffled on disk, so that the log's order cannot help."""
    shuffled = log.sample(frac=1, random_state=1)
    shuffled.to_csv(path, index=False)
    data = quick(spec_of(split=Split("time", share, column, valid=0)))
    cut = shuffled[column].sort_values().unique()
    later = [(shuffled[column] >= time).sum() for time in cut[1:]]
    best = cut[1:][np.argmin(np.abs(np.array(later) - share * ROWS))]
    in_test = shuffled[column] >= best
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
            "log.csv, line 9, column 'hour': the time None is not a number, a timestamp or ISO 8601",
        ),
        (lambda log: log.assign(hour=5), "all 6,000 rows to divide have the same time, column 'hour'"),
        (lambda log: log.drop(columns="hour"), "no column 'hour'"),
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
    """As `pandas.read_csv` gives them with dtype=str; lists must be lists."""
    workflow = quick(spec_of(non_finite=non_finite)).workflow()
    raw = log.assign(genres=log["genres"].str.split("|")).iloc[:200]
    expected = workflow.transform(raw)["price"].tolist()
    texts = raw["price"].map(repr).where(raw["price"].notna(), None)
    assert workflow.transform(raw.assign(price=texts))["price"].tolist() == expected
    with pytest.raises(UserError, match="'price' must hold numbers.*'many'"):
        workflow.transform(raw.assign(price=texts.mask(raw.index == 3, "many")))
    infinite = raw.assign(price=texts.mask(raw.index == 3, "inf"))
    if non_finite == "refuse":
        with pytest.raises(UserError, match="'price' has an infinite number"):
            workflow.transform(infinite)
    else:
        missing = workflow.transform(raw.assign(price=texts.mask(raw.index == 3)))
        assert workflow.transform(infinite)["price"].tolist() == missing["price"].tolist()
    with pytest.raises(
        UserError, match=r"cannot read column 'genres': it is string, not a list.*split"
    ):
        workflow.transform(log.iloc[:200])


# The report, and what else is left


def test_report(log, quick):
    data = quick()
    train, test = log.iloc[:TRAIN], log.iloc[TRAIN:]
    report = data.report
    assert report["rows"] == {"train": len(train), "valid": 0, "test": len(test)}
    positives = {"train": train["y"].sum(), "valid": 0, "test": test["y"].sum()}
    assert report["positives"] == positives
    unseen = test["user"].dropna()[~test["user"].dropna().isin(train["user"])]
    assert report["fields"]["user"] == {
        "occurrences": TRAIN,
        "distinct": train["user"].nunique(),
        "missing": train["user"].isna().sum(),
        "below_threshold": 0,
        **{"valid_occurrences": 0, "valid_missing": 0, "valid_unknown": 0},
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
    assert "all training rows have the same id" in parts.report["fields"]["item"]["note"]


def test_spellings_go_into_the_saved_workflow(tmp_path, log, quick):
    """What means a missing value in the log means one in raw rows."""
    log = log.assign(y=log["y"].map({0: "no", 1: "yes"}))
    log.fillna("\\N").to_csv(tmp_path / "spelt.csv", index=False)
    data = quick(
        spec_of(null_values=("\\N",), label_values=("no", "yes")), [tmp_path / "spelt.csv"]
    )
    raw = log.fillna("\\N").assign(genres=log["genres"].str.split("|"))[TRAIN:]
    served = data.workflow().remove_inputs(["y"]).transform(raw[[*data.spec.fields]])
    test = rows_of(data, "test")
    for name in ("user", "price"):
        assert served[name].tolist() == test[name].tolist()
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
