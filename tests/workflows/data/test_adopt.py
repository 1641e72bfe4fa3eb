"""A stock NVTabular workflow and its parquet go in as they are: counts, training, refusals."""

import contextlib
import filecmp
import io
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from merlin_cowclip.models import FusedEmbeddings
from merlin_cowclip.workflows.commands.main import main
from merlin_cowclip.workflows.data.adopt.adopt import adopt
from merlin_cowclip.workflows.data.counts import read_counts
from merlin_cowclip.workflows.data.prepared_data import PreparedData, inputs_of
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.quiet import quiet_imports
from merlin_cowclip.workflows.training.runs import Run
from tests.logs import click_log

with quiet_imports():
    import nvtabular as nvt
    from merlin.io import Dataset
    from merlin.schema import Tags
    from nvtabular import ops

ROWS, TRAIN = 6_000, 4_800
TARGET = [Tags.TARGET, Tags.BINARY_CLASSIFICATION]

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:Initializing an NVTabular Dataset in CPU mode", "ignore:Performing a hash-based"
    ),
    pytest.mark.usefixtures("quick_saves", "graphs_as_traced"),
]


@pytest.fixture(scope="module")
def log() -> pd.DataFrame:
    random = np.random.default_rng(0)
    log = click_log(ROWS, users=60).rename(columns={"y": "click"})
    return log[["click", "user", "item", "genres", "price"]].assign(
        user=log["user"].str[1:].astype(int) * 1_000_003,
        item=[None if i == 14 else f"i{i}" for i in log["item"]],
        src=[f"c{c}" for c in random.integers(0, 9, ROWS)],
        dst=[f"c{c}" for c in random.integers(4, 12, ROWS)],
        site=[f"s{s}" for s in random.integers(0, 30, ROWS)],
        visits=np.where(random.random(ROWS) < 0.1, np.nan, random.integers(0, 99, ROWS)),
        dwell=random.random(ROWS),
        comment="none",
    )


def dataset(log: pd.DataFrame, folder: Path, parts: int = 3) -> Dataset:
    folder.mkdir(parents=True)
    for i in range(parts):
        piece = log[i * len(log) // parts : (i + 1) * len(log) // parts]
        piece.reset_index(drop=True).to_parquet(folder / f"{i}.parquet")
    return Dataset(str(folder / "*.parquet"), engine="parquet")


@pytest.fixture(scope="module")
def home(log, tmp_path_factory) -> Path:
    """What a user of NVTabular has: workflow/, train/ and test/."""
    home = tmp_path_factory.mktemp("stock")
    fitted = str(home / "fitted")
    site = ops.Categorify(out_path=fitted, max_size=25, num_buckets=4)
    nodes = (
        (["user"] >> ops.Categorify(out_path=fitted, dtype="int32"))
        + (["item", "genres"] >> ops.Categorify(out_path=fitted) >> ops.TagAsItemFeatures())
        + ([["src", "dst"]] >> ops.Categorify(out_path=fitted, encode_type="joint"))
        + (["site"] >> site >> ops.Rename(postfix="_hashed"))
        + (["price"] >> ops.Normalize(out_dtype="float32"))
        + (["visits"] >> ops.FillMissing() >> ops.LogOp() >> ops.Normalize())
        + (["click"] >> ops.AddMetadata(tags=TARGET))
        + (["dwell"] >> ops.AddMetadata(tags=[Tags.TARGET, Tags.REGRESSION]))
        + ["comment"]
    )
    workflow = nvt.Workflow(nodes)
    train = dataset(log[:TRAIN], home / "raw")
    workflow.fit(train)
    workflow.save(str(home / "workflow"))
    workflow.transform(train).to_parquet(str(home / "train"))
    workflow.transform(dataset(log[TRAIN:], home / "raw-test", 2)).to_parquet(str(home / "test"))
    shutil.rmtree(home / "fitted")  # the saved workflow must do
    return home


@pytest.fixture(scope="module")
def adopted(home) -> tuple[PreparedData, str]:
    """The folder, and what the command printed."""
    out, printed = home / "data", io.StringIO()
    options = ["--workflow", home / "workflow", "--label", "click", "--out", out]
    with contextlib.redirect_stdout(printed):
        assert command("adopt", home / "train", "--test", home / "test", *options) == 0
    return PreparedData.open(out), printed.getvalue()


@pytest.fixture(scope="module")
def data(adopted) -> PreparedData:
    return adopted[0]


def command(*arguments) -> int:
    return main([str(argument) for argument in arguments])


def read(folder: Path) -> pd.DataFrame:
    files = sorted(folder.glob("part_*.parquet"))
    return pd.concat([pd.read_parquet(file) for file in files], ignore_index=True)


def quick(home: Path, out: Path, **changes) -> PreparedData:
    given = {"parquet": home / "train", "workflow": home / "workflow", "label": "click"}
    return adopt(**{**given, **changes}, out=out, progress=False)


def adopted_from(home: Path, log: pd.DataFrame, nodes) -> PreparedData:
    """A workflow of these columns, fitted and adopted on the same rows."""
    workflow = nvt.Workflow(nodes)
    workflow.fit(Dataset(log)).save(str(home / "workflow"))
    (home / "train").mkdir(parents=True)
    rows = workflow.transform(Dataset(log)).to_ddf().compute()
    rows.to_parquet(home / "train" / "part.parquet", index=False)
    return quick(home, home / "data")


def clicks():
    return ["click"] >> ops.AddMetadata(tags=TARGET)


# What is written


def test_what_is_written(data, home):
    assert {path.name for path in data.path.iterdir()} == {
        *(".merlin", "counts", "prepare.json", "schema.pbtxt", "workflow")
    }
    assert data.train_files == sorted((home / "train").glob("part_*.parquet"))
    assert data.test_files == sorted((home / "test").glob("part_*.parquet"))
    assert data.rows == {"train": TRAIN, "valid": 0, "test": ROWS - TRAIN}
    spec, schema = data.spec, data.schema
    assert (spec.name, spec.label, spec.format) == ("data", "click", "parquet")
    assert spec.categorical == ("user", "item", "src", "dst", "site_hashed")
    assert (spec.lists, spec.continuous) == (("genres",), ("price", "visits"))
    sizes = {"user": 63, "item": 17, "src": 15, "dst": 15, "site_hashed": 25, "genres": 9}
    assert data.cardinalities == sizes
    assert data.table_rows == sum(sizes.values()) - 15  # of one vocabulary
    assert schema.column_names == ["click", *spec.fields]
    assert schema.select_by_tag(Tags.TARGET).column_names == ["click"]
    assert set(schema.select_by_tag(Tags.CATEGORICAL).column_names) == set(spec.ids)
    assert Tags.ITEM in schema["genres"].tags
    assert (schema["genres"].is_list, schema["user"].is_list) == (True, False)
    train = read(home / "train")
    for field, cardinality in sizes.items():
        assert schema[field].int_domain.max == cardinality - 1
        assert (data.path / "workflow" / schema[field].properties["cat_path"]).is_file()
        ids = train[field].explode().dropna().astype("int64")
        expected = ids.value_counts().reindex(range(cardinality), fill_value=0)
        np.testing.assert_array_equal(data.counts(field)["count"], expected)


def test_raw_ids_are_those_of_the_log(data, home, log):
    """Ids, looked up in counts/, give back the log: the vocabulary is read as it was written."""
    train = read(home / "train")
    raw = log[:TRAIN].reset_index(drop=True)
    for field in ("user", "src", "dst", "item"):
        names = data.counts(field)["raw"].to_numpy()
        expected = raw[field].map(lambda value: None if value is None else str(value))
        assert names[train[field]].tolist() == expected.tolist()
    names = data.counts("genres")["raw"].to_numpy()
    assert [names[ids].tolist() for ids in train["genres"]] == raw["genres"].map(list).tolist()
    counts = data.counts("site_hashed")
    assert counts["raw"].isna().tolist() == [True] * 6 + [False] * 19  # 4 hashed ones among them
    names, sites = counts["raw"].to_numpy()[train["site_hashed"]], raw["site"].to_numpy()
    assert all(name in (None, site) for name, site in zip(names, sites, strict=True))
    assert counts["count"][2:6].sum() > 0


def test_what_adopt_prints(adopted):
    """A table of the columns; notes; sizes."""
    _, printed = adopted
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    assert "user id 63 rows user" in lines
    assert "src id 15 rows src + dst" in lines
    assert "genres list of ids 9 rows genres" in lines
    note, sizes = lines[-2:]
    assert note == "Note: left out, tagged neither categorical nor continuous: 'comment'"
    assert re.fullmatch(r"4,800 training, 0 validation, 1,200 test rows, \d+ ids in 6 f.*", sizes)


def test_the_copied_workflow_encodes_as_the_parquet_is(data, home, log, tmp_path):
    moved = tmp_path / "elsewhere"
    shutil.copytree(data.path, moved)
    assert filecmp.cmp(home / "workflow/workflow.pkl", moved / "workflow/workflow.pkl")
    raw = log[TRAIN:].reset_index(drop=True)
    encoded = PreparedData.open(moved).workflow().transform(raw)
    stored = read(home / "test")
    for name in ("user", "item", "src", "dst"):
        assert encoded[name].tolist() == stored[name].tolist()
    # On CPU Categorify hashes the row's number as well: hashed ids differ from one call to another.
    known = stored["site_hashed"] >= 6
    assert encoded["site_hashed"][known].tolist() == stored["site_hashed"][known].tolist()
    assert encoded["site_hashed"][~known].between(2, 5).all()
    assert encoded["genres"].map(list).tolist() == stored["genres"].map(list).tolist()
    np.testing.assert_allclose(encoded["visits"], stored["visits"], rtol=1e-6)


def test_it_trains(data, tmp_path):
    """Fields of one vocabulary share their rows."""
    options = ["--batch-size", 256, "--base-batch-size", 256, "--dense-lr", 3e-3, "--mlp", 16]
    options += ["--embedding-lr", 1e-2, "--clip-floor", 1e-3, "--epochs", 3, "--quiet"]
    assert command("train", data.path, "--out", tmp_path / "run", *options) == 0
    run = Run.open(tmp_path / "run")
    assert run.result["auc"] > 0.7
    assert run.config["table_rows"] == data.table_rows
    assert run.config["rows"] == {"train": TRAIN, "valid": 0, "test": ROWS - TRAIN}


def test_a_validation_part(data, home, tmp_path):
    valid = quick(home, tmp_path / "data", valid=home / "test")
    assert (valid.valid_files, valid.test_files) == (data.test_files, [])
    assert valid.rows == {"train": TRAIN, "valid": ROWS - TRAIN, "test": 0}
    positives = data.report["positives"]
    assert valid.report["positives"] == {**positives, "valid": positives["test"], "test": 0}
    for field in data.spec.ids:
        pd.testing.assert_frame_equal(valid.counts(field), data.counts(field))
    with pytest.raises(UserError, match=r"given twice \(first as "):
        quick(home, tmp_path / "twice", valid=home / "test", test=data.test_files[0])


# Other pipelines


def test_vocabularies_in_parts_and_combined(log, tmp_path):
    """Only Categorify: no numbers, no test part, no target tagged."""
    fitted = str(tmp_path / "fitted")
    ids = ["user", "item"] >> ops.Categorify(out_path=fitted, split_out=12)
    pairs = [["src", "dst"]] >> ops.Categorify(out_path=fitted, encode_type="combo")
    train = dataset(log[:TRAIN], tmp_path / "raw")
    workflow = nvt.Workflow(ids + pairs + ["click"]).fit(train)
    workflow.save(str(tmp_path / "workflow"))
    workflow.transform(train).to_parquet(str(tmp_path / "train"))
    data = quick(tmp_path, tmp_path / "data")
    assert (data.test_files, data.spec.continuous) == ([], ())
    assert (data.path / "workflow/categories/unique.user.parquet").is_dir()
    encoded, raw = read(tmp_path / "train"), log[:TRAIN].reset_index(drop=True)
    names = data.counts("user")["raw"].to_numpy()
    assert names[encoded["user"]].tolist() == raw["user"].astype(str).tolist()
    assert data.counts("src_dst")["raw"].isna().all()
    both = (raw["src"] + raw["dst"]).value_counts().tolist()
    assert data.counts("src_dst")["count"][3:].tolist() == both
    assert data.record["notes"] == []


def test_statistics_are_numbers(tmp_path):
    """NVTabular gives them the tags and the domain of their ids and targets."""
    log = pd.DataFrame({"click": np.arange(600) % 2, "item": np.arange(600) % 5})
    log, out = log.assign(price=np.arange(600) % 7 + 0.5), str(tmp_path / "fitted")
    items = ["item"] >> ops.Categorify(out_path=out)
    target = clicks()
    means = items >> ops.TargetEncoding(target, kfold=3, out_path=out) >> ops.Normalize()
    counted = items >> ops.JoinGroupby(cont_cols=["price"], stats=["count"], out_path=out)
    other = ["price"] >> ops.Normalize() >> ops.AddMetadata(tags=[Tags.REGRESSION, Tags.TARGET])
    groups = counted >> ops.Bucketize({"item_count": [119]}) >> ops.Rename(name="group")
    groups = groups >> ops.Categorify(out_path=f"{tmp_path}/2")
    data = adopted_from(tmp_path, log, items + means + counted + groups + target + other)
    assert data.spec.categorical == ("item", "group")
    assert data.spec.continuous == ("TE_item_click", "item_count")
    assert not {Tags.TARGET, Tags.BINARY_CLASSIFICATION} & set(data.schema["TE_item_click"].tags)


def test_statistics_of_groups_are_of_one_fit(tmp_path):
    """A job that fits anew each night and saves where it did: NVTabular pickles their paths."""
    folders = []
    for night in range(2):
        log = pd.DataFrame({"click": np.arange(600) % 2, "item": np.arange(600) % 5})
        log["price"] = (log["item"] + 1.0) * (1 + 9 * night)
        job = tmp_path / "job"
        means = ["item"] >> ops.JoinGroupby(cont_cols=["price"], stats=["mean"], out_path=str(job))
        means = means["item_price_mean"] >> ops.AddMetadata(tags=["continuous"])
        ids = ["item"] >> ops.Categorify(out_path=str(job))
        data = adopted_from(job, log, ids + means + clicks())
        folders.append(PreparedData.open(data.path.rename(tmp_path / f"night{night}")))
        os.rename(job, tmp_path / f"job{night}")
    first, second = folders
    config = {"data": str(first.path), "cardinalities": first.cardinalities, **inputs_of(first)}
    run = Run(tmp_path / "run", {"config": config})
    shutil.copytree(first.path / "workflow", run.path / "workflow")
    run.check_vocabulary(first)
    with pytest.raises(UserError, match=r"in \S*cat_stats\.item\.parquet, so that ids"):
        run.check_vocabulary(second)


def test_ids_of_ones_own_from_0(tmp_path):
    """0 is an id like others, also in lists, which Categorify did not encode."""
    raw = pd.DataFrame({"ad": [0, 0, 2, 1], "genres": [[0], [1, 0], [2], []]})
    own = {"tags": [Tags.CATEGORICAL], "properties": {"domain": {"min": 0, "max": 2}}}
    nodes = (["ad", "genres"] >> ops.AddMetadata(**own)) + ["click"]
    data = adopted_from(tmp_path, raw.assign(click=[0, 1, 1, 0]), nodes)
    assert data.counts("ad")["count"].tolist() == [2, 1, 1]
    assert read_counts(data, "genres")["count"].to_pylist() == [2, 1, 1]


def test_numbers_that_are_not_scaled_are_noted(tmp_path):
    """Training on times of 1.6e9 ends at AUC 0.5."""
    log = pd.DataFrame({"ad": [*"abab"], "time": [1.6e9, 1.61e9, 1.62e9, 1.6e9], "low": -1001.0})
    numbers = ["time", "low", "fine"] >> ops.AddMetadata(tags=[Tags.CONTINUOUS])
    ids = ["ad"] >> ops.Categorify(out_path=str(tmp_path / "fitted"))
    log = log.assign(fine=1000.0, click=[0, 1, 1, 0])
    (note,) = adopted_from(tmp_path, log, ids + numbers + clicks()).record["notes"]
    assert note.startswith("numbers beyond ±1,000, with which training can fail: 'time', 'low'.")


def halved(column):
    return column // 2


@pytest.fixture(scope="module")
def origins(tmp_path_factory) -> PreparedData:
    """Ids in every way that NVTabular makes them."""
    home = tmp_path_factory.mktemp("origins")
    log = pd.DataFrame({"click": np.arange(300) % 2, "price": np.arange(300) % 7})
    log = log.assign(genres=[["a", "b", "c"]] * 300, item=[f"i{i % 9}" for i in range(300)])
    for name in ("user", "brand", "age", "half"):
        log[name] = np.arange(300) % 40

    def ids(name: str, before=None):
        node = [name] if before is None else [name] >> before
        return node >> ops.Categorify(out_path=f"{home}/{name}")

    own = ops.AddMetadata([Tags.CATEGORICAL], {"domain": {"min": 0, "max": 9}})
    nodes = (
        (ids("user") >> ops.Rename(name="renamed") >> ops.TagAsUserFeatures())
        + (ids("genres") >> ops.ListSlice(0, 2))
        + (ids("brand") >> ops.LambdaOp(halved))
        + ids("age", ops.Bucketize({"age": [10, 20]}))
        + (["item"] >> ops.HashBucket(7))
        + (["half"] >> ops.Bucketize({"half": [20]}) >> own)
        + (["price"] >> own)
        + clicks()
    )
    return adopted_from(home, log, nodes)


def test_raw_ids_are_what_categorify_read(origins):
    assert set(origins.counts("renamed")["raw"].dropna()) == set(map(str, range(40)))
    assert set(origins.counts("genres")["raw"].dropna()) == {"a", "b", "c"}
    assert set(origins.counts("age")["raw"].dropna()) == {"0", "1", "2"}  # not the ages


def test_ids_that_were_changed_hashed_or_bucketed_have_no_raw_ones(origins):
    table = FusedEmbeddings(origins.schema.select_by_name(list(origins.spec.ids)), 2)
    for field in ("brand", "item", "half"):
        assert origins.counts(field)["raw"].isna().all()
        with pytest.raises(ValueError, match=f"Field '{field}' has no raw ids"):
            table.rows(field, [3], workflow=origins.path / "workflow")
    assert table.rows("price", [3])[0] - table.rows("price", [0])[0] == 3  # their own, from 0


# Refused


def with_column(home: Path, folder: Path, name: str, change) -> Path:
    """The last training file with other values of a column: by row, all in turn, or none."""
    table = pq.read_table(sorted((home / "train").glob("part_*.parquet"))[-1])
    place, values = table.schema.get_field_index(name), table[name].to_pylist()
    if isinstance(change, dict):
        for row, value in change.items():
            values[row] = value
        table = table.set_column(place, name, pa.array(values, table[name].type))
    elif change:
        values = [change[i % len(change)] for i in range(len(table))]
        table = table.set_column(place, name, pa.array(values))
    else:
        table = table.remove_column(place)
    folder.mkdir()
    pq.write_table(table, folder / "last.parquet", row_group_size=500)
    return folder / "last.parquet"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("user", {503: 63}, "has id 63, beyond the schema's 0 to 62, in row 504 of LAST. Give the"),
        ("dst", {0: -1}, "has id -1, beyond the schema's 0 to 14, in row 1 of LAST"),
        ("genres", {7: [3, 9]}, "has id 9, beyond the schema's 0 to 8, in row 8 of LAST"),
        ("item", {999: None}, "has a null in row 1000 of LAST"),
        ("genres", {7: None}, "has a null in row 8 of LAST"),
        ("genres", {9: [3, None]}, "has a null in row 10 of LAST"),
        ("price", {2: float("nan")}, "has null or NaN, .* in row 3 of LAST. .* before Normalize"),
        ("click", {4: None}, "has label null, which is not 0 or 1, in row 5 of LAST"),
        ("click", [0.0, 0.5], "has label 0.5, which is not 0 or 1, in row 2 of LAST"),
        ("click", [0, 1, 7], "has label 7, which is not 0 or 1, in row 3 of LAST"),
        ("click", [1], "has only label 1 in all 1,600 rows of the test part"),
        ("user", [3.0], "must be integer ids, but is double in LAST"),
        ("genres", [["3"]], "must be lists of integer ids, but is list<"),
        ("click", None, "LAST has no column 'click' .it has"),
    ],
)
def test_bad_rows_and_files(home, tmp_path, name, change, message):
    last = with_column(home, tmp_path / "in", name, change)
    start = f"column '{name}' " if change else ""
    with pytest.raises(UserError, match=start + message.replace("LAST", re.escape(str(last)))):
        quick(home, tmp_path / "out", test=last)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_float_labels_and_integer_numbers_are_taken(home, tmp_path):
    labels = with_column(home, tmp_path / "in", "click", [0.0, 1.0])
    numbers = with_column(home, tmp_path / "in2", "price", [1, -2])
    data = quick(home, tmp_path / "data", parquet=[labels, numbers])
    assert data.rows["train"] == data.counts("user")["count"].sum() == 3_200
    assert data.report["fields"]["price"]["min"] <= -2


def test_parquet_that_changed(home, tmp_path):
    last = with_column(home, tmp_path / "in", "price", [1.0])
    data, before = quick(home, tmp_path / "data", parquet=last), last.stat()
    content = bytearray(last.read_bytes())
    content[100] ^= 1
    last.write_bytes(content)
    os.utime(last, ns=(before.st_atime_ns, before.st_mtime_ns))  # its size and time are the same
    with pytest.raises(UserError, match="adopted parquet .*last.parquet has changed"):
        PreparedData.open(data.path)


def test_bad_workflows(home, tmp_path):
    given = tmp_path / "in"

    def refused(match):
        with pytest.raises(UserError, match=match):
            quick(home, tmp_path / "out", workflow=given)
        assert [path.name for path in tmp_path.iterdir()] == ["in"]
        shutil.rmtree(given)

    shutil.copytree(home / "workflow", given)
    (given / "workflow.pkl").write_bytes(b"cnothere\nnothing\n.")
    refused("in does not load in this environment: ModuleNotFoundError: .*'nothere'")

    shutil.copytree(home / "workflow", given)
    path = given / "categories" / "unique.user.parquet"
    pd.concat([pd.read_parquet(path)] * 2).to_parquet(path)
    refused("'user' has 120 raw ids, but 63 ids in the schema. Give Categorify an out_path of its")

    shutil.copytree(home / "workflow", given)
    (given / "categories" / "unique.user.parquet").unlink()
    refused("in lacks categories/unique.user.parquet. Copy the whole folder, or fit with an absol")

    nvt.Workflow(["user"] >> ops.Categorify(out_path=str(given))).save(str(given))
    refused("in is not fitted: it has no schema")


def test_without_a_column_of_ids(tmp_path):
    log = pd.DataFrame({"ad": [3, 4, 3, 5], "price": [1, 2, 3, 4], "click": [0, 1, 1, 0]})
    with pytest.raises(UserError, match="No column of ids in the workflow: none of 'ad', 'pr"):
        adopted_from(tmp_path, log, ["ad", "price", "click"] >> ops.AddMetadata(tags=["seen"]))


def test_fields_of_one_domain_need_one_vocabulary(tmp_path):
    """As an own encoding may name them: they would share an embedding table."""
    log = pd.DataFrame({"ad": [0, 1, 2, 1], "shop": [0, 1, 1, 0], "click": [0, 1, 1, 0]})
    nodes = clicks()
    for name, highest in (("ad", 2), ("shop", 1)):
        domain = {"domain": {"min": 0, "max": highest, "name": "one"}}
        nodes = nodes + ([name] >> ops.AddMetadata([Tags.CATEGORICAL], domain))
    with pytest.raises(UserError, match="share the int domain 'one'"):
        adopted_from(tmp_path, log, nodes)
