"""What can be chosen in `prepare`: thresholds, hashing, splits, inf and NaN; its report."""

import dataclasses

import numpy as np
import pandas as pd
import pytest

from merlin_cowclip.workflows.commands.main import main
from merlin_cowclip.workflows.data.prepare import pipeline
from merlin_cowclip.workflows.data.prepare.pipeline import prepare
from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.data.sources import csv
from merlin_cowclip.workflows.data.spec import DatasetSpec, Split
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.quiet import quiet_imports
from tests.logs import CLICKS, click_log, rows_of, write_csv

with quiet_imports():
    import nvtabular as nvt
    from nvtabular import ops


ROWS, TRAIN = 6_000, 4_500


def spec_of(**changes) -> DatasetSpec:
    changes = {"split": Split("sequential", 0.25, valid=0), **changes}
    return dataclasses.replace(CLICKS, **changes)


@pytest.fixture(scope="module")
def log():
    return click_log(ROWS, users=2_000, missing=0.1)


@pytest.fixture
def path(tmp_path, log):
    return write_csv(log, tmp_path / "log.csv")


@pytest.fixture
def quick(tmp_path, path):
    def run(spec=None, inputs=None, out="out", **options):
        inputs = [path] if inputs is None else inputs
        return prepare(spec or spec_of(), inputs, tmp_path / out, progress=False, **options)

    return run


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


# Rare ids


def untrained(data, field):
    """Ids that are said to have no training row."""
    ends = np.array(data.schema[field].properties["untrained_ids"], int).reshape(-1, 2)
    return {i for first, end in ends for i in range(first, end)}


@pytest.mark.parametrize("threshold", [1, 3])
def test_ids_below_the_threshold_are_unknown(tmp_path, log, quick, threshold):
    data = quick(spec_of(freq_threshold={"user": threshold}))
    train = log[:TRAIN]
    counts = train["user"].value_counts()
    kept = counts[counts >= threshold]
    table = data.counts("user")
    assert len(table) == data.cardinalities["user"] == 3 + len(kept)
    rare = counts[counts < threshold].sum()
    assert table["count"][:3].tolist() == [0, train["user"].isna().sum(), rare]
    assert table["raw"][3:].tolist() == sorted(kept.index, key=lambda u: (-kept[u], u))
    assert table["count"][3:].tolist() == sorted(kept, reverse=True)
    assert data.report["fields"]["user"]["below_threshold"] == rare
    assert data.cardinalities["item"] == 3 + 15  # has no threshold
    # As NVTabular itself counts, its traps left out: no missing ids, an index from 0.
    frame = train.loc[train["user"].notna(), ["user"]].reset_index(drop=True)
    theirs = ops.Categorify(freq_threshold=threshold, out_path=str(tmp_path / "nvt"))
    stock = nvt.Workflow(["user"] >> theirs).fit(nvt.Dataset(frame))
    assert stock.output_schema["user"].int_domain.max + 1 == data.cardinalities["user"]
    meta = pd.read_parquet(tmp_path / "nvt/categories/meta.user.parquet")
    assert meta["num_observed"][2:].tolist() == [rare, kept.sum()]
    assert data.schema["user"].properties["freq_threshold"] == threshold
    assert untrained(data, "user") == {0} | ({2} if threshold == 1 else set())


def test_unknown_ids_share_rows_by_hash(log, quick):
    data = quick(spec_of(freq_threshold=3, hash_buckets={"user": 7}))
    counts = log[:TRAIN]["user"].value_counts()
    kept = counts[counts >= 3]
    assert data.cardinalities == {"user": 2 + 7 + len(kept), "item": 3 + 15, "genres": 3 + 6}
    table = data.counts("user")
    assert table["raw"][:9].isna().all()
    assert table["raw"][9:].tolist() == sorted(kept.index, key=lambda u: (-kept[u], u))
    assert (table["count"][2:9] > 0).all()
    assert table["count"][2:9].sum() == counts[counts < 3].sum()
    # One raw id has one row, in training, in testing, and in the saved workflow.
    test, raw = rows_of(data, "test"), log[TRAIN:].reset_index(drop=True)
    hashed = ~raw["user"].isin(kept.index) & raw["user"].notna()
    assert test["user"][hashed].between(2, 8).all()
    assert test["user"][hashed].nunique() == 7
    assert (test["user"].groupby(raw["user"]).nunique() == 1).all()
    np.testing.assert_array_equal(data.workflow().transform(raw)["user"], test["user"])
    assert data.schema["user"].int_domain.max == data.cardinalities["user"] - 1
    assert data.schema["user"].properties["num_buckets"] == 7


def test_hash_buckets_without_a_training_row_are_known(quick):
    data = quick(spec_of(freq_threshold=3, hash_buckets={"user": 900}))
    empty = set(np.flatnonzero(data.counts("user")["count"][: 2 + 900] == 0))
    assert 3 < len(empty) < 900
    assert untrained(data, "user") == empty


# Splits


def latest(times: pd.Series, share: float) -> pd.Series:
    """The rows from the time on that makes them most nearly that share."""
    cuts = times.sort_values().unique()[1:]
    later = np.array([(times >= time).sum() for time in cuts])
    return times >= cuts[np.argmin(np.abs(later - share * len(times)))]


def test_times_in_two_forms_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(csv, "BLOCK_BYTES", len("y,item,when\n") + 100 * len("0,a,7\n"))
    times = [7] * 100 + ["2024-09-09"] * 300  # in two blocks of one file
    log = pd.DataFrame({"y": [0, 1] * 200, "item": ["a", "b"] * 200, "when": times})
    log.to_csv(tmp_path / "log.csv", index=False)
    spec = DatasetSpec("times", "y", ("item",), split=Split("time", 0.2, "when"))
    with pytest.raises(UserError, match="column 'when' has numbers and dates"):
        prepare(spec, [tmp_path / "log.csv"], tmp_path / "out", progress=False)


TOML = 'name = "toy"\nlabel = "y"\ncategorical = ["user", "item"]\ncontinuous = ["price"]\n'


@pytest.fixture
def command(tmp_path, log):
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


def test_files_as_parts(log, command):
    """Ids, counts and ranges are those of the rows that are not held out."""
    data = command("toy.toml a.csv --valid v1.csv --valid v2.csv --test t.csv")
    parts = {"train": log[:4_000], "valid": log[4_000:5_000], "test": log[5_000:]}
    assert data.rows == {part: len(rows) for part, rows in parts.items()}
    table = data.counts("user")[3:].set_index("raw")
    assert table["count"].to_dict() == parts["train"]["user"].value_counts().to_dict()
    filled = parts["train"]["price"].fillna(0)
    assert data.record["ranges"]["price"] == pytest.approx([filled.min(), filled.max()])
    for part in ("valid", "test"):
        raw, rows = parts[part].reset_index(drop=True), rows_of(data, part)
        expected = raw["user"].map(table["id"]).fillna(2).mask(raw["user"].isna(), 1)
        assert rows["user"].tolist() == expected.tolist()
        assert rows["y"].tolist() == raw["y"].tolist()


def test_a_file_and_a_share(log, command, capsys):
    """The share is of the log's rows, whatever the times of the file."""
    options = "--test a.csv --valid 0.2 --split time --time-column hour"
    data = command(f"toy.toml v1.csv v2.csv t.csv {options}")
    rest = log[4_000:].reset_index(drop=True)
    held_out = latest(rest["hour"], 0.2)
    assert data.rows == {"train": (~held_out).sum(), "valid": held_out.sum(), "test": 4_000}
    assert rows_of(data, "test")["y"].tolist() == log["y"][:4_000].tolist()
    assert rows_of(data, "valid")["y"].tolist() == rest["y"][held_out].tolist()
    first = {"valid": str(rest["hour"][held_out].min()), "test": str(log["hour"].min())}
    last = str(rest["hour"][~held_out].max())
    assert data.record["boundaries"] == {"train": last, **first}
    line = capsys.readouterr().out.splitlines()[1]
    assert line.endswith(f"until {last}, valid from {first['valid']}, test from {first['test']}")


@pytest.mark.parametrize("options", ["--valid link.csv", "--valid t.csv --test t.csv"])
def test_a_file_in_two_parts_is_refused(tmp_path, command, capsys, options):
    (tmp_path / "link.csv").symlink_to("a.csv")
    command(f"toy.toml a.csv {options}", code=2)
    assert "is given twice (first as " in capsys.readouterr().err


def test_rows_like_those_of_a_folder_are_split_anew(command, tmp_path, capsys):
    """Kind, column and shares are the folder's; its files are not those of the new rows."""
    old = command("toy.toml a.csv --valid v1.csv --test t.csv --split time --time-column hour")
    assert old.spec.split == Split("time", (f"{tmp_path}/t.csv",), "hour", (f"{tmp_path}/v1.csv",))
    new = command(f"--vocabulary-from {old.path} v2.csv", "new")
    assert new.spec.split == Split("time", 0.1, "hour", 0.1)
    assert new.cardinalities == old.cardinalities
    train = command(f"--vocabulary-from {old.path} v2.csv --test 0 --valid 0", "train")
    assert train.rows == {"train": 400, "valid": 0, "test": 0}
    assert [*train.record["boundaries"]] == ["train"]
    again = command(f"--vocabulary-from {train.path} v2.csv --test v1.csv --split random", "again")
    assert again.spec.split == Split("random", (f"{tmp_path}/v1.csv",), valid=0)
    grown = command(f"--vocabulary-from {old.path} v2.csv --grow", "grown").cardinalities
    new_ids = grown["user"] - old.cardinalities["user"]
    assert (new_ids > 0, grown["item"]) == (True, old.cardinalities["item"])
    assert f"\n{new_ids} new ids: user {new_ids}\n" in capsys.readouterr().out


def test_command_line(command, tmp_path):
    more = "freq_threshold = 3\nhash_buckets = { user = 4, item = 5 }\n"
    (tmp_path / "toy.toml").write_text(TOML + more)
    options = "--split time --time-column hour --test 0.2 --freq-threshold user=2"
    spec = command(f"toy.toml a.csv {options} --hash-buckets item=6 --non-finite missing").spec
    assert spec.split == Split("time", 0.2, "hour")
    assert spec.freq_threshold == {"user": 2, "item": 3}  # the description's, where none is given
    assert spec.hash_buckets == {"user": 4, "item": 6}
    assert spec.non_finite == "missing"


# inf and NaN; spellings


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_numbers_that_are_not_finite(tmp_path, log, path, quick, kind, monkeypatch):
    monkeypatch.setattr(pipeline, "CHUNK_BYTES", 50_000)  # several
    log = log.copy()
    log.loc[[3, 4_999], "price"] = [np.inf, -np.inf]
    source = tmp_path / f"log.{kind}"
    if kind == "parquet":
        log.to_parquet(source, row_group_size=1_000)
    else:
        write_csv(log, path)
        path.write_text(path.read_text().replace(",inf,", ",NaN,"))
    with pytest.raises(
        UserError, match=rf"log.{kind}, (line 5|row 4), column 'price': the number is (inf|nan)"
    ):
        quick(spec_of(format=kind), [source])
    data = quick(spec_of(format=kind, non_finite="missing"), [source])
    clean = log["price"].replace([np.inf, -np.inf], np.nan)
    filled = clean[:TRAIN].fillna(0)
    expected = (clean.fillna(0) - filled.min()) / (filled.max() - filled.min())
    expected = np.clip(expected.astype(np.float32), 0, 1)
    assert sorted(rows_of(data)["price"]) == pytest.approx(sorted(expected[:TRAIN]), abs=1e-6)
    assert data.report["fields"]["price"]["not_finite"] == 2
    assert data.report["fields"]["price"]["missing"] == clean[:TRAIN].isna().sum()
    served = data.workflow().transform(log[TRAIN:])["price"]
    assert served.tolist() == rows_of(data, "test")["price"].tolist()


def test_spellings_go_into_the_saved_workflow(tmp_path, log, quick):
    """A text that means a missing value in the log means one in raw rows."""
    texts = log.assign(y=log["y"].map({0: "no", 1: "yes"}), price=log["price"].astype(str))
    texts["genres"] = texts["genres"].map("|".join).mask(texts.index % 7 == 0, "\\N")
    texts = texts.replace({"user": {None: "\\N"}, "price": {"nan": "\\N"}})
    texts.to_csv(tmp_path / "texts.csv", index=False)
    spec = spec_of(null_values=("\\N",), label_values=("no", "yes"))
    data = quick(spec, [tmp_path / "texts.csv"])
    test = rows_of(data, "test")
    served = data.workflow().remove_inputs(["y"]).transform(texts[TRAIN:][[*spec.fields]])
    for name in ("user", "price"):
        assert served[name].tolist() == test[name].tolist()
    assert served["genres"].map(tuple).tolist() == test["genres"].tolist()
    assert (test["user"] == 1).sum() == log["user"][TRAIN:].isna().sum() > 0


# The report


def test_report(log, quick):
    data = quick()
    train, test = log[:TRAIN], log[TRAIN:]
    report, fields = data.report, data.report["fields"]
    assert report["rows"] == {"train": len(train), "valid": 0, "test": len(test)}
    positives = {"train": train["y"].sum(), "valid": 0, "test": test["y"].sum()}
    assert report["positives"] == positives
    assert fields["user"] == {
        "occurrences": TRAIN,
        "distinct": train["user"].nunique(),
        "missing": train["user"].isna().sum(),
        "below_threshold": 0,
    }
    price = fields["price"]
    assert price["mean"] == pytest.approx(train["price"].mean())
    assert (price["min"], price["max"]) == (train["price"].min(), train["price"].max())
    assert price["missing"] == train["price"].isna().sum()
    assert fields["genres"]["occurrences"] == train["genres"].map(len).sum()
