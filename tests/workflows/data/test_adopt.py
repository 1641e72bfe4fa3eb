"""A stock NVTabular workflow and its parquet go in as they are: counts, training, refusals."""

import contextlib
import filecmp
import io
import json
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
from merlin_cowclip.workflows.data.adopt.validate import open_files
from merlin_cowclip.workflows.data.counts import read_counts
from merlin_cowclip.workflows.data.prepared_data import PreparedData, inputs_of
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.quiet import quiet_imports
from merlin_cowclip.workflows.training.runs import Run

with quiet_imports():
    import nvtabular as nvt
    from merlin.io import Dataset
    from merlin.schema import Tags
    from nvtabular import ops

ROWS, TRAIN = 6_000, 4_800
TARGET = [Tags.TARGET, Tags.BINARY_CLASSIFICATION]
OPTIONS = ["--batch-size", "256", "--base-batch-size", "256", "--dense-lr", "3e-3"]
OPTIONS += ["--embedding-lr", "1e-2", "--clip-floor", "1e-3", "--mlp", "16"]


pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:Initializing an NVTabular Dataset in CPU mode", "ignore:Performing a hash-based"
    ),
    pytest.mark.usefixtures("quick_saves", "graphs_as_traced"),
]


@pytest.fixture(scope="module")
def log() -> pd.DataFrame:
    """Clicks that depend on the user, the item and the genres; the other columns are noise."""
    random = np.random.default_rng(0)
    user, item = random.zipf(1.3, ROWS) % 60, random.integers(0, 15, ROWS)
    genres = [sorted(random.choice(6, random.integers(1, 4), replace=False)) for _ in range(ROWS)]
    effects = [random.normal(size=n) for n in (60, 15, 6)]
    logit = effects[0][user] + effects[1][item] + [effects[2][g].sum() for g in genres]
    return pd.DataFrame(
        {
            "click": random.random(ROWS) < 1 / (1 + np.exp(-logit)),
            "user": user * 1_000_003,  # integers
            "item": [None if i == 14 else f"i{i}" for i in item],
            "src": [f"c{c}" for c in random.integers(0, 9, ROWS)],
            "dst": [f"c{c}" for c in random.integers(4, 12, ROWS)],
            "site": [f"s{s}" for s in random.integers(0, 30, ROWS)],
            "genres": [[f"g{g}" for g in gs] for gs in genres],
            "price": random.normal(5, 2, ROWS).round(2),
            "visits": np.where(random.random(ROWS) < 0.1, np.nan, random.integers(0, 99, ROWS)),
            "dwell": random.random(ROWS),
            "comment": "none",
        }
    )


def dataset(log: pd.DataFrame, folder: Path, parts: int = 3) -> Dataset:
    folder.mkdir(parents=True)
    for i in range(parts):
        piece = log[i * len(log) // parts : (i + 1) * len(log) // parts]
        piece.reset_index(drop=True).to_parquet(folder / f"{i}.parquet")
    return Dataset(str(folder / "*.parquet"), engine="parquet")


@pytest.fixture(scope="module")
def home(log, tmp_path_factory) -> Path:
    """What a user of NVTabular has: workflow/, train/ and test/; nothing of ours made it."""
    home = tmp_path_factory.mktemp("stock")
    fitted = str(home / "fitted")
    nodes = (
        (["user"] >> ops.Categorify(out_path=fitted, dtype="int32"))
        + (["item", "genres"] >> ops.Categorify(out_path=fitted) >> ops.TagAsItemFeatures())
        + ([["src", "dst"]] >> ops.Categorify(out_path=fitted, encode_type="joint"))
        + (
            ["site"]
            >> ops.Categorify(out_path=fitted, max_size=25, num_buckets=4)
            >> ops.Rename(postfix="_hashed")
        )
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


def adopted_from(
    tmp_path: Path, log: pd.DataFrame | str, made, label: str = "click"
) -> PreparedData:
    """A workflow of these columns and the label, fitted and adopted on the same rows."""
    workflow = nvt.Workflow(made)
    workflow.fit(Dataset(log)).save(str(tmp_path / "workflow"))
    (tmp_path / "train").mkdir(parents=True)
    rows = workflow.transform(Dataset(log)).to_ddf().compute()
    rows.to_parquet(tmp_path / "train" / "part.parquet", index=False)
    return quick(tmp_path, tmp_path / "data", label=label)


def clicks():
    return ["click"] >> ops.AddMetadata(tags=TARGET)


# What is written


def test_what_is_written(data, home):
    assert {p.name for p in data.path.iterdir()} == {
        *(".merlin", "counts", "prepare.json", "schema.pbtxt", "workflow")
    }
    assert data.train_files == sorted((home / "train").glob("part_*.parquet"))
    assert data.test_files == sorted((home / "test").glob("part_*.parquet"))
    assert data.rows == {"train": TRAIN, "valid": 0, "test": ROWS - TRAIN}
    assert [p.name for p in home.glob(".*")] == []
    spec, schema = data.spec, data.schema
    assert (spec.name, spec.label, spec.format) == ("data", "click", "parquet")
    assert spec.categorical == ("user", "item", "src", "dst", "site_hashed")
    assert (spec.lists, spec.continuous) == (("genres",), ("price", "visits"))
    assert data.cardinalities == {
        **{"user": 60 + 3, "item": 14 + 3, "src": 12 + 3, "dst": 12 + 3},
        **{"site_hashed": 25, "genres": 6 + 3},
    }
    assert schema.column_names == ["click", *spec.fields]
    assert schema.select_by_tag(Tags.TARGET).column_names == ["click"]
    assert set(schema.select_by_tag(Tags.CATEGORICAL).column_names) == set(spec.ids)
    assert Tags.ITEM in schema["genres"].tags
    assert (schema["genres"].is_list, schema["user"].is_list) == (True, False)
    train = read(home / "train")
    for field, cardinality in data.cardinalities.items():
        assert schema[field].int_domain.max == cardinality - 1
        assert (data.path / "workflow" / schema[field].properties["cat_path"]).is_file()
        ids = train[field].explode().astype("int64")
        expected = ids.value_counts().reindex(range(cardinality), fill_value=0)
        np.testing.assert_array_equal(data.counts(field)["count"], expected)


def test_raw_ids_are_those_of_the_log(data, home, log):
    """Ids, looked up in counts/, give back the log: the vocabulary is read as it was written."""
    train = read(home / "train")
    raw = log[:TRAIN].reset_index(drop=True)
    for field, column in {"user": "user", "src": "src", "dst": "dst", "item": "item"}.items():
        names = data.counts(field)["raw"].to_numpy()
        expected = raw[column].map(lambda value: None if value is None else str(value))
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
    data, printed = adopted
    lines = [line.split(maxsplit=1) for line in printed.splitlines()]
    table = {line[0]: " ".join(line[1].split()) for line in lines[:11]}
    rate = pd.concat(map(pd.read_parquet, data.train_files))["click"].mean()
    assert table["click"] == f"label {rate:.4g} positive"
    assert table["user"] == "id 63 rows user"
    assert table["src"] == table["dst"] == "id 15 rows src + dst"
    assert table["genres"] == "list of ids 9 rows genres"
    assert table["price"].startswith("number -3.")
    occur = {field: data.counts(field)["count"] > 0 for field in data.spec.ids}
    occur["genres"][0] = False  # padding
    occur["src"] |= occur.pop("dst")  # of one vocabulary
    ids = sum(int(of_field.sum()) for of_field in occur.values())
    assert printed.splitlines()[11:] == [
        "Note: left out, tagged neither categorical nor continuous: 'comment'",
        f"4,800 training, 0 validation, 1,200 test rows, {ids} ids in 6 fields: {data.path}",
    ]


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


# Training


@pytest.fixture(scope="module")
def run(data, home) -> Run:
    assert command("train", data.path, "--out", home / "run", *OPTIONS, "--epochs", 3) == 0
    return Run.open(home / "run")


def test_it_trains_and_evaluates(run, data, home, tmp_path, capsys):
    """Fields of one vocabulary share their rows."""
    assert run.result["auc"] > 0.7
    assert run.config["table_rows"] == data.table_rows < sum(data.cardinalities.values())
    assert run.config["rows"] == {"train": TRAIN, "valid": 0, "test": ROWS - TRAIN}
    assert command("evaluate", run.path) == 0
    (line,) = capsys.readouterr().out.splitlines()
    auc, loss = run.result["auc"], run.result["log_loss"]
    assert line.startswith(f"test AUC {auc:.6f}, log loss {loss:.6f}, calibration ")
    assert line.endswith(f" on 1,200 rows of {data.path}, by the last checkpoint, epoch 3 of 3")
    other = quick(home, tmp_path / "other", test=home / "train", parquet=home / "test")
    assert command("evaluate", run.path, other.path) == 0
    auc = float(re.match(r"test AUC (\S+),", capsys.readouterr().out)[1])
    assert auc > run.result["auc"]  # on the rows it learned from


@pytest.fixture(scope="module")
def bare(log, tmp_path_factory) -> Path:
    """Only Categorify: ids in folders of parts, a combination, no numbers, no target tagged."""
    bare = tmp_path_factory.mktemp("bare")
    fitted = str(bare / "fitted")
    ids = ["user", "item"] >> ops.Categorify(out_path=fitted, split_out=12)
    pairs = [["src", "dst"]] >> ops.Categorify(out_path=fitted, encode_type="combo")
    workflow = nvt.Workflow(ids + pairs + ["click"])
    train = dataset(log[:TRAIN], bare / "raw")
    workflow.fit(train)
    workflow.save(str(bare / "workflow"))
    workflow.transform(train).to_parquet(str(bare / "train"))
    return bare


def test_a_validation_part(data, home, tmp_path, capsys):
    options = ["--workflow", home / "workflow", "--label", "click", "--out", tmp_path / "data"]
    assert command("adopt", home / "train", "--valid", home / "test", *options) == 0
    valid = PreparedData.open(tmp_path / "data")
    assert (valid.valid_files, valid.test_files) == (data.test_files, [])
    assert valid.rows == {"train": TRAIN, "valid": ROWS - TRAIN, "test": 0}
    clicks = dict(data.report["positives"])
    assert valid.report["positives"] == {**clicks, "valid": clicks["test"], "test": 0}
    for field in data.spec.ids:
        pd.testing.assert_frame_equal(valid.counts(field), data.counts(field))
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("4,800 training, 1,200 validation, 0 test rows, ")
    file = data.test_files[0]
    with pytest.raises(UserError, match=r"given twice \(first as "):
        quick(home, tmp_path / "twice", valid=home / "test", test=file)


@pytest.mark.extended
def test_without_a_test_part_and_without_numbers(bare, tmp_path, capsys):
    data = quick(bare, tmp_path / "data")
    assert (data.test_files, data.rows) == ([], {"train": TRAIN, "valid": 0, "test": 0})
    assert data.spec.continuous == ()
    assert command("train", data.path, "--out", tmp_path / "run", *OPTIONS, "--epochs", 1) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert last.startswith(f"no test part, training loss {result['epochs'][0]['train_loss']:.6f}, ")
    assert (result["auc"], result["log_loss"]) == (None, None)
    metrics = pd.read_csv(tmp_path / "run" / "metrics.csv")
    assert metrics[["valid_auc", "valid_log_loss"]].isna().all(axis=None)
    assert metrics["train_loss"][0] < np.log(2) + 0.1
    assert command("evaluate", tmp_path / "run") == 2
    assert "has no test part. Prepare it again with --test" in capsys.readouterr().err


def test_vocabularies_in_parts_and_combined(bare, log, tmp_path):
    data = quick(bare, tmp_path / "data")
    train, raw = read(bare / "train"), log[:TRAIN].reset_index(drop=True)
    assert (data.path / "workflow/categories/unique.user.parquet").is_dir()
    names = data.counts("user")["raw"].to_numpy()
    assert names[train["user"]].tolist() == raw["user"].astype(str).tolist()
    assert data.counts("src_dst")["raw"].isna().all()
    pairs = (raw["src"] + raw["dst"]).value_counts().tolist()
    assert data.counts("src_dst")["count"][3:].tolist() == pairs
    assert data.record["notes"] == []

    run = run_of(data, tmp_path / "run")
    part = run.path / "workflow/categories/unique.user.parquet/part.1.parquet"
    frame = pd.read_parquet(part)
    frame[::-1].to_parquet(part)
    message = r"numbers and ids of the run.*unique.user.parquet.*Evaluate on raw rows"
    with pytest.raises(UserError, match=message):  # its own data is no remedy: it is this
        run.check_vocabulary(data)


def run_of(data: PreparedData, place: Path) -> Run:
    learned = {"data": str(data.path), "cardinalities": data.cardinalities, **inputs_of(data)}
    run = Run(place, {"config": learned})
    shutil.copytree(data.path / "workflow", run.path / "workflow")
    run.check_vocabulary(data)
    return run


def shifted(by: int):
    return lambda values: (values + by) % 24


def test_ids_that_only_the_workflow_knows(log, tmp_path):
    """One field has a vocabulary, the same one; the other is what a function makes of it."""
    log = log[["user", "click"]][:TRAIN].assign(age=range(TRAIN))
    made = []
    for shift in range(2):
        home = tmp_path / f"pipeline{shift}"
        users = ["user"] >> ops.Categorify(out_path=str(home / "fitted"))
        hours = ["age"] >> ops.LambdaOp(shifted(shift))
        hours = hours >> ops.AddMetadata(["categorical"], {"domain": {"min": 0, "max": 23}})
        made.append(adopted_from(home, log, users + hours + ["click"]))
    with pytest.raises(UserError, match="the pipeline that it was adopted from"):
        run_of(made[0], tmp_path / "run").check_vocabulary(made[1])


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
    made = []
    for night in range(2):
        log = pd.DataFrame({"click": np.arange(600) % 2, "item": np.arange(600) % 5})
        log["price"] = (log["item"] + 1.0) * (1 + 9 * night)
        job = tmp_path / "job"
        means = ["item"] >> ops.JoinGroupby(cont_cols=["price"], stats=["mean"], out_path=str(job))
        means = means["item_price_mean"] >> ops.AddMetadata(tags=["continuous"])
        ids = ["item"] >> ops.Categorify(out_path=str(job))
        data = adopted_from(job, log, ids + means + clicks())
        if not night:
            run = run_of(data, tmp_path / "run")
        made.append(PreparedData.open(data.path.rename(tmp_path / f"night{night}")))
        os.rename(job, tmp_path / f"job{night}")
    mine, other = made
    assert inputs_of(mine)["pipeline"] == inputs_of(other)["pipeline"]
    with pytest.raises(UserError, match=r"in \S*cat_stats\.item\.parquet, so that ids"):
        run.check_vocabulary(other)


def test_without_a_column_of_ids(tmp_path):
    log = pd.DataFrame({"ad": [3, 4, 3, 5], "price": [1, 2, 3, 4], "click": [0, 1, 1, 0]})
    with pytest.raises(UserError, match="No column of ids in the workflow: none of 'ad', 'pr"):
        adopted_from(tmp_path, log, ["ad", "price", "click"] >> ops.AddMetadata(tags=["seen"]))


def test_ids_of_ones_own_from_0(tmp_path):
    """0 is an id like others, also in lists, which Categorify did not encode."""
    raw = pd.DataFrame({"ad": [0, 0, 2, 1], "genres": [[0], [1, 0], [2], []]})
    own = {"tags": [Tags.CATEGORICAL], "properties": {"domain": {"min": 0, "max": 2}}}
    nodes = (["ad", "genres"] >> ops.AddMetadata(**own)) + ["click"]
    data = adopted_from(tmp_path, raw.assign(click=[0, 1, 1, 0]), nodes)
    assert data.counts("ad")["count"].tolist() == [2, 1, 1]
    assert read_counts(data, "genres")["count"].to_pylist() == [2, 1, 1]
    assert data.record["notes"] == []


def test_numbers_that_are_not_scaled_are_noted(tmp_path):
    """Training on times of 1.6e9 ends at AUC 0.5."""
    log = pd.DataFrame({"ad": [*"abab"], "time": [1.6e9, 1.61e9, 1.62e9, 1.6e9], "low": -1001.0})
    numbers = ["time", "low", "fine"] >> ops.AddMetadata(tags=[Tags.CONTINUOUS])
    ids = ["ad"] >> ops.Categorify(out_path=str(tmp_path / "fitted"))
    log = log.assign(fine=1000.0, click=[0, 1, 1, 0])
    assert adopted_from(tmp_path, log, ids + numbers + clicks()).record["notes"] == [
        "numbers beyond ±1,000, with which training can fail: 'time', 'low'. Scale them in the "
        "workflow (Normalize, NormalizeMinMax, LogOp)"
    ]


def test_a_number_that_an_operator_makes_nan(tmp_path):
    """NVTabular writes it as null."""
    log = pd.DataFrame({"ad": [*"abab"], "price": [1.0, 2.0, -5.0, 0.0], "click": [0, 1, 1, 0]})
    nodes = ["ad"] >> ops.Categorify(out_path=str(tmp_path / "fitted"))
    words = r"'price' has null or NaN, .* in row 3 of .*\(FillMissing, Clip\) before LogOp"
    with pytest.raises(UserError, match=words):
        adopted_from(tmp_path, log, nodes + (["price"] >> ops.LogOp()) + clicks())


def test_an_empty_text_is_an_id(tmp_path):
    log = pd.DataFrame({"ad": ["", "a", "", None], "click": [0, 1, 1, 0]})
    ids = ["ad"] >> ops.Categorify(out_path=str(tmp_path / "fitted"))
    counts = adopted_from(tmp_path, log, ids + clicks()).counts("ad")
    assert counts["raw"].tolist() == [None, None, None, "", "a"]
    assert counts["count"].tolist() == [0, 1, 0, 2, 1]


def test_files_globs_and_folders(home, tmp_path):
    for i in (10, 2, 1):
        shutil.copy(home / "train" / "part_0.parquet", tmp_path / f"p_{i}.parquet")
    (tmp_path / "_metadata").write_text("not ours to read")
    (tmp_path / "empty.txt").write_text("")
    files = [file.path.name for file in open_files([tmp_path / "*"])]
    assert files == ["p_1.parquet", "p_2.parquet", "p_10.parquet"]
    one = [tmp_path / "p_10.parquet", str(tmp_path / "p_[12].parquet")]
    files = [file.path.name for file in open_files(one)]
    assert files == ["p_10.parquet", "p_1.parquet", "p_2.parquet"]


def test_a_folder_as_spark_writes_it(home, tmp_path):
    """A file without rows, an empty mark, a file without ending, and temporary files."""
    rows = pq.read_table(home / "train" / "part_0.parquet")
    pq.write_table(rows[:0], tmp_path / "part-00000.snappy.parquet")
    pq.write_table(rows, tmp_path / "part-00001")
    for name in ("_SUCCESS", "_temporary/part.parquet", ".part.crc", "readme.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [file.rows for file in open_files(tmp_path)] == [0, len(rows)]


# Refused


@pytest.fixture
def copy(home, tmp_path):
    """A copy of train/ whose last part can be changed: column → a function of its values."""

    def make(**changes) -> Path:
        folder = tmp_path / "in" / "train"
        shutil.copytree(home / "train", folder)
        file = sorted(folder.glob("part_*.parquet"))[-1]
        table = pq.read_table(file)
        for name, change in changes.items():
            column = change(table[name].to_pylist())
            place = table.schema.get_field_index(name)
            if column is None:
                table = table.remove_column(place)
            elif isinstance(column, pa.Array):
                table = table.set_column(place, name, column)
            else:
                table = table.set_column(place, name, pa.array(column, table[name].type))
        pq.write_table(table, file, row_group_size=500)
        return folder

    return make


def put(row: int, value):
    return lambda values: [value if i == row else v for i, v in enumerate(values)]


def as_type(kind: pa.DataType):
    return lambda values: pa.array(values, kind)


def nothing(values):
    return None


def numbers(*values):
    return lambda old: pa.array([values[i % len(values)] for i in range(len(old))])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"user": put(503, 63)},
            "column 'user' has id 63, beyond the schema's 0 to 62, in row 504 of LAST. Give "
            "the parquet that",
        ),
        ({"dst": put(0, -1)}, "column 'dst' has id -1, beyond the schema's 0 to 14, in row 1 of "),
        ({"genres": put(7, [3, 9])}, "column 'genres' has id 9, beyond the schema's 0 to 8, in ro"),
        ({"item": put(999, None)}, "column 'item' has a null in row 1000 of LAST. "),
        ({"genres": put(7, None)}, "column 'genres' has a null in row 8 of LAST. "),
        ({"genres": put(9, [3, None])}, "column 'genres' has a null in row 10 of LAST. "),
        (
            {"price": put(2, float("nan"))},
            "column 'price' has null or NaN, which is not a finite float32, in row 3 of LAST. Fill "
            "missing numbers or clip them (FillMissing, Clip) before Normalize",
        ),
        (
            {"click": put(4, None)},
            "column 'click' has label null, which is not 0 or 1, in row 5 of LAST. Correct it, or",
        ),
        ({"click": numbers(0.0, 0.5)}, "label 0.5, which is not 0 or 1, in row 2 of LAST"),
        ({"click": numbers(0, 1, 7)}, "label 7, which is not 0 or 1, in row 3 of LAST"),
        ({"user": numbers(3.0)}, "column 'user' must be integer ids, but is double in LAST"),
        ({"genres": numbers(["3"])}, "column 'genres' must be lists of integer ids, but is list<"),
        ({"site_hashed": nothing}, "LAST has no column 'site_hashed' (it has"),
        ({"click": nothing}, "LAST has no column 'click' (it has"),
    ],
)
def test_bad_rows_and_files(home, copy, tmp_path, changes, message):
    folder = copy(**changes)
    last = sorted(folder.glob("part_*.parquet"))[-1]
    pattern = re.escape(message).replace(re.escape(".*"), ".*")
    pattern = pattern.replace("LAST", re.escape(str(last)))
    with pytest.raises(UserError, match=pattern):
        quick(home, tmp_path / "out", parquet=folder)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_a_bad_row_of_the_test_part(home, copy, tmp_path):
    with pytest.raises(UserError, match="'user' has id 63, .* row 504 of"):
        quick(home, tmp_path / "out", test=copy(user=put(503, 63)))


def test_one_label_in_all_rows(home, copy, tmp_path):
    last = sorted(copy(click=numbers(1)).glob("part_*.parquet"))[-1]
    words = "column 'click' has only label 1 in all 1,600 rows of the train part"
    with pytest.raises(UserError, match=words):
        quick(home, tmp_path / "out", parquet=last)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_integer_and_float_labels_are_labels(home, copy, tmp_path):
    changes = {"click": numbers(0.0, 1.0), "user": as_type(pa.uint8()), "price": numbers(1, -2)}
    last = sorted(copy(**changes).glob("part_*.parquet"))[-1]
    data = quick(home, tmp_path / "data", parquet=last)
    positives = {"train": data.rows["train"] // 2, "valid": 0, "test": 0}
    assert data.record["report"]["positives"] == positives
    assert data.counts("user")["count"].sum() == data.rows["train"]


def test_bad_workflows(home, log, tmp_path):
    given = tmp_path / "in"

    def refused(match):
        with pytest.raises(UserError, match=match):
            quick(home, tmp_path / "out", workflow=given)
        assert [p.name for p in tmp_path.iterdir()] == ["in"]
        shutil.rmtree(given)

    shutil.copytree(home / "workflow", given)
    (given / "workflow.pkl").write_bytes(b"cnothere\nnothing\n.")
    refused("in does not load in this environment: ModuleNotFoundError: .*'nothere'")

    shutil.copytree(home / "workflow", given)
    path = given / "categories" / "unique.user.parquet"
    vocabulary = pd.read_parquet(path)
    pd.concat([vocabulary] * 2).to_parquet(path)
    refused("'user' has 120 raw ids, but 63 ids in the schema. Give Categorify an out_path of its")

    shutil.copytree(home / "workflow", given)
    (given / "categories" / "unique.user.parquet").unlink()
    refused("in lacks categories/unique.user.parquet. Copy the whole folder, or fit with an absol")

    unfitted = nvt.Workflow(["user"] >> ops.Categorify(out_path=str(given)))
    unfitted.save(str(given))
    refused("in is not fitted: it has no schema")


LOG = pd.DataFrame(
    {
        "click": np.arange(300) % 2,
        "user": np.arange(300) % 40,
        "item": [f"i{i % 9}" for i in range(300)],
        "price": np.arange(300) % 7,
    }
)


def pairs(out: Path):
    return [["user", "item"]] >> ops.Categorify(encode_type="combo", out_path=f"{out}/pairs")


def alone(out: Path, *names: str):
    return [*names] >> ops.Categorify(out_path=f"{out}/alone")


def test_a_label_that_is_encoded(tmp_path):
    words = r"label \d, which is not 0 or 1, .* The workflow must pass the label unchanged"
    with pytest.raises(UserError, match=words):
        adopted_from(tmp_path, LOG, alone(tmp_path, "user", "click"))
    assert not (tmp_path / "data").exists()


def own_with_buckets(out: Path):
    vocabs = {"user": pd.Series(range(9))}
    return ["user"] >> ops.Categorify(vocabs=vocabs, num_buckets=3, out_path=f"{out}/alone")


BEYOND = {
    "vocabs with num_buckets": own_with_buckets,  # its buckets are added to ids twice
    "encode_type='combo' after others": lambda out: alone(out, "user") + pairs(out),  # raw values
    "single_table": lambda out: (
        ["item", "user"] >> ops.Categorify(single_table=True, out_path=f"{out}/alone")
    ),
}


@pytest.mark.parametrize("option", BEYOND)
def test_ids_that_nvtabular_puts_beyond_its_schema(tmp_path, option):
    log = LOG.assign(user=LOG["user"] * 1000 if "combo" in option else LOG["user"])
    words = rf"'user' has id \d+, beyond the schema's 0 to \d+, .* exceed its own .*{option}"
    with pytest.raises(UserError, match=words):
        adopted_from(tmp_path, log, BEYOND[option](tmp_path) + clicks())
    assert not (tmp_path / "data").exists()


def halved(column):
    return column // 2


@pytest.fixture(scope="module")
def origins(tmp_path_factory) -> PreparedData:
    """Ids in every way that NVTabular makes them."""
    home = tmp_path_factory.mktemp("origins")
    log = LOG.assign(genres=[["a", "b", "c"]] * 300)
    for name in ("brand", "city", "age", "half"):
        log[name] = log["user"]

    def ids(name: str, before=None):
        node = [name] if before is None else [name] >> before
        return node >> ops.Categorify(out_path=f"{home}/{name}")

    own = ops.AddMetadata([Tags.CATEGORICAL], {"domain": {"min": 0, "max": 9}})
    made = (
        (ids("user") >> ops.Rename(name="renamed") >> ops.TagAsUserFeatures())
        + (ids("genres") >> ops.ListSlice(0, 2))
        + (ids("brand") >> ops.LambdaOp(halved))
        + ids("age", ops.Bucketize({"age": [10, 20]}))
        + (["item"] >> ops.HashBucket(7))
        + (["half"] >> ops.Bucketize({"half": [20]}) >> own)
        + (["price"] >> own)
        + clicks()
    )
    return adopted_from(home, log, made)


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
