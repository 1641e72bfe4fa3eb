"""A stock NVTabular workflow and its parquet go in as they are: counts, training, refusals."""

import contextlib
import filecmp
import io
import json
import os
import re
import shutil
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from merlin_cowclip.models import FusedEmbeddings
from merlin_cowclip.workflows.commands.main import main
from merlin_cowclip.workflows.data.adopt import adopt
from merlin_cowclip.workflows.data.datasets import DatasetSpec
from merlin_cowclip.workflows.data.etl import prepare
from merlin_cowclip.workflows.data.prepared import PreparedData
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.quiet import quiet_imports
from merlin_cowclip.workflows.training.memory import least_bytes
from merlin_cowclip.workflows.training.runs import Run, inputs_of, pipelines_of

with quiet_imports():
    import nvtabular as nvt
    from merlin.io import Dataset
    from merlin.io.worker import clean_worker_cache
    from merlin.schema import ColumnSchema, Schema, Tags
    from merlin.schema.io.tensorflow_metadata import TensorflowMetadata
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
    (tmp_path / "train").mkdir()
    rows = workflow.transform(Dataset(log)).to_ddf().compute()
    rows.to_parquet(tmp_path / "train" / "part.parquet", index=False)
    return quick(tmp_path, tmp_path / "data", label=label)


def clicks():
    return ["click"] >> ops.AddMetadata(tags=TARGET)


# What is written


def test_the_fixture_is_stock(home):
    beside = {p.name for p in (home / "train").iterdir()}
    assert {"_metadata", "_file_list.txt", "_metadata.json", ".merlin"} < beside
    assert len(list((home / "train").glob("part_*.parquet"))) > 1
    types = pq.read_schema(home / "train" / "part_0.parquet")
    assert types.field("user").type == pa.int32()
    assert types.field("click").type == pa.bool_()
    assert types.field("visits").type == pa.float64()
    assert types.field("genres").type == pa.list_(pa.int64())


def test_the_folder_refers_to_the_parquet(data, home):
    assert {p.name for p in data.path.iterdir()} == {
        *(".merlin", "counts", "prepare.json", "schema.pbtxt", "workflow")
    }
    assert data.train_files == sorted((home / "train").glob("part_*.parquet"))
    assert data.test_files == sorted((home / "test").glob("part_*.parquet"))
    assert data.rows == {"train": TRAIN, "test": ROWS - TRAIN}
    assert [p.name for p in home.glob(".*")] == []


def test_roles(data):
    spec = data.spec
    assert (spec.name, spec.label, spec.format) == ("data", "click", "parquet")
    assert spec.categorical == ("user", "item", "src", "dst", "site_hashed")
    assert spec.lists == ("genres",)
    assert spec.continuous == ("price", "visits")
    assert data.cardinalities == {
        **{"user": 60 + 3, "item": 14 + 3, "src": 12 + 3, "dst": 12 + 3},
        **{"site_hashed": 25, "genres": 6 + 3},
    }


def test_schema(data):
    schema = data.schema
    assert schema.column_names == ["click", *data.spec.fields]
    assert schema.select_by_tag(Tags.TARGET).column_names == ["click"]
    assert set(schema.select_by_tag(Tags.CATEGORICAL).column_names) == set(data.spec.ids)
    assert set(schema.select_by_tag(Tags.CONTINUOUS).column_names) == {"price", "visits"}
    assert Tags.ITEM in schema["genres"].tags
    assert schema["genres"].is_list
    assert not schema["user"].is_list
    for field, cardinality in data.cardinalities.items():
        assert schema[field].int_domain.max == cardinality - 1
        assert (data.path / "workflow" / schema[field].properties["cat_path"]).is_file()
    assert "unique.site.parquet" in schema["site_hashed"].properties["cat_path"]


def test_counts_are_those_of_pandas(data, home):
    train = read(home / "train")
    for field, cardinality in data.cardinalities.items():
        counts = data.counts(field)
        assert counts["id"].tolist() == list(range(cardinality))
        ids = train[field].explode().astype("int64")
        expected = ids.value_counts().reindex(range(cardinality), fill_value=0)
        np.testing.assert_array_equal(counts["count"], expected)


def test_small_batches_count_the_same(data, home, copy, tmp_path, monkeypatch):
    monkeypatch.setattr("merlin_cowclip.workflows.data.adopt.BATCH_ROWS", 7)
    small = quick(home, tmp_path / "out")
    for field in data.spec.ids:
        pd.testing.assert_frame_equal(small.counts(field), data.counts(field))
    with pytest.raises(UserError, match="Received: 63 in .*, row group 1, row 504 of the file"):
        quick(home, tmp_path / "bad", parquet=copy(user=put(503, 63)))


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
    data, printed = adopted
    occur = {field: data.counts(field)["count"] > 0 for field in data.spec.ids}
    occur["genres"][0] = False  # padding
    occur["src"] |= occur.pop("dst")  # of one vocabulary
    ids = sum(int(of_field.sum()) for of_field in occur.values())
    assert printed.splitlines() == [
        "left out of the inputs, tagged neither categorical nor continuous: 'comment'",
        "hashed ids in 'site_hashed' are noise if a CPU wrote the parquet, where NVTabular hashes "
        "the row's number along with the id: write it on a GPU, or do without num_buckets and "
        "HashBucket",
        f"4,800 training and 1,200 test rows, {ids} ids in 6 fields: {data.path}",
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


def test_it_trains_and_learns(run):
    assert run.result["auc"] > 0.7
    assert run.config["rows"] == {"train": TRAIN, "test": ROWS - TRAIN}


def test_the_rows_that_it_must_hold_are_those_of_its_tables(run, data):
    """Fields of one vocabulary share theirs."""
    weights = run.result["parameters"]["embedding"]
    assert run.config["table_rows"] == data.table_rows < sum(data.cardinalities.values())
    assert weights % data.table_rows == 0
    spec = data.spec
    sizes = len(spec.ids), data.table_rows, len(spec.continuous)
    assert least_bytes(run.train_config(), *sizes)["tables"] == 3 * 4 * weights


def test_evaluate_prints_the_same(run, data, capsys):
    assert command("evaluate", run.path) == 0
    (line,) = capsys.readouterr().out.splitlines()
    auc, loss = run.result["auc"], run.result["log_loss"]
    assert line.startswith(f"test AUC {auc:.6f}, log loss {loss:.6f}, calibration ")
    assert line.endswith(f" on 1,200 rows of {data.path}")


def test_evaluate_on_other_parquet_of_the_same_workflow(run, home, tmp_path, capsys):
    other = quick(home, tmp_path / "other", test=home / "train", parquet=home / "test")
    assert command("evaluate", run.path, other.path) == 0
    auc = float(re.match(r"test AUC (\S+),", capsys.readouterr().out)[1])
    assert auc > run.result["auc"]  # on the rows it learned from


def test_changed_parquet_is_refused_by_later_commands(run, home, tmp_path, capsys):
    shutil.copytree(home / "train", tmp_path / "train")
    data = quick(home, tmp_path / "data", parquet=tmp_path / "train", test=home / "test")
    file = data.train_files[1]
    os.utime(file, ns=(0, 0))
    message = f"adopted parquet must stay as it was. Received: {file}, which has changed since."
    commands = (["train", data.path, "--out", tmp_path / "run"], ["evaluate", run.path, data.path])
    for arguments in commands:
        assert command(*arguments) == 2
        assert message in capsys.readouterr().err
    file.unlink()
    assert command(*commands[0]) == 2
    assert f"must stay where it was. Received: {file}: No such file" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


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


def test_without_a_test_part_and_without_numbers(bare, tmp_path, capsys):
    data = quick(bare, tmp_path / "data")
    assert (data.test_files, data.rows) == ([], {"train": TRAIN, "test": 0})
    assert data.spec.continuous == ()
    assert command("train", data.path, "--out", tmp_path / "run", *OPTIONS, "--epochs", 1) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert last.startswith(f"no test part, training loss {result['epochs'][0]['train_loss']:.6f}, ")
    assert last.endswith(f"of training: {tmp_path / 'run'}")
    assert (result["auc"], result["log_loss"]) == (None, None)
    metrics = pd.read_csv(tmp_path / "run" / "metrics.csv")
    assert metrics[["auc", "log_loss"]].isna().all(axis=None)
    assert metrics["train_loss"][0] < np.log(2) + 0.1
    assert command("evaluate", tmp_path / "run") == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error == (
        "merlin-cowclip evaluate: error: the data must have a test part. Received: "
        f"{data.path}, adopted without one. Name a prepared folder that has one: "
        f"merlin-cowclip evaluate {tmp_path / 'run'} DATA"
    )


def test_vocabularies_in_parts_and_combined(bare, log, tmp_path):
    data = quick(bare, tmp_path / "data")
    train, raw = read(bare / "train"), log[:TRAIN].reset_index(drop=True)
    assert (data.path / "workflow/categories/unique.user.parquet").is_dir()
    names = data.counts("user")["raw"].to_numpy()
    assert names[train["user"]].tolist() == raw["user"].astype(str).tolist()
    names = data.counts("src_dst")["raw"].to_numpy()
    assert names[train["src_dst"]].tolist() == (raw["src"] + "_" + raw["dst"]).tolist()
    assert data.record["notes"] == []

    learned = {"cardinalities": data.cardinalities, "continuous": data.spec.continuous}
    run = Run(tmp_path / "run", {"config": {"data": str(data.path), **learned}})
    shutil.copytree(data.path / "workflow", run.path / "workflow")
    run.check_vocabulary(data)
    part = run.path / "workflow/categories/unique.user.parquet/part.1.parquet"
    frame = pd.read_parquet(part)
    frame[::-1].to_parquet(part)
    message = (
        r"must have the vocabulary of the run.*unique.user.parquet.*Evaluate on raw rows \(mer"
    )
    with pytest.raises(UserError, match=message):  # its own data is no remedy: it is this
        run.check_vocabulary(data)


def shifted(by: int):
    return lambda values: (values + by) % 24


def test_ids_that_only_the_workflow_knows(log, tmp_path):
    """One field has a vocabulary, the same one; the other is what a function makes of it."""
    train = dataset(log[:TRAIN].assign(age=range(TRAIN)), tmp_path / "raw")
    made = []
    for shift in range(2):
        home = tmp_path / f"pipeline{shift}"
        users = ["user"] >> ops.Categorify(out_path=str(home / "fitted"))
        hours = ["age"] >> ops.LambdaOp(shifted(shift))
        hours = hours >> ops.AddMetadata(["categorical"], {"domain": {"min": 0, "max": 23}})
        workflow = nvt.Workflow(users + hours + ["click"])
        workflow.fit(train)
        workflow.save(str(home / "workflow"))
        workflow.transform(train).to_parquet(str(home / "train"))
        made.append(quick(home, home / "data"))
    mine, other = made
    learned = {"cardinalities": mine.cardinalities, "continuous": []}
    config = {"config": {"data": str(mine.path), "ranges": None, **learned}}
    run = Run(tmp_path / "run", config)
    shutil.copytree(mine.path / "workflow", run.path / "workflow")
    run.check_vocabulary(mine)
    with pytest.raises(UserError, match="must come from the pipeline of the run"):
        run.check_vocabulary(other)


@pytest.mark.parametrize("what", ["slice", "values"])
def test_what_happens_around_a_vocabulary_is_of_one_pipeline(tmp_path, what):
    """Other ids of a list, or other values behind one vocabulary that was given."""
    log = pd.DataFrame({"click": np.arange(600) % 2, "hour": np.arange(600) % 24})
    log["tags"] = [[f"t{i % 5}", f"t{i % 7}", f"t{i % 3}"] for i in range(600)]
    train, made = dataset(log, tmp_path / "raw"), []
    for number in range(2):
        home = tmp_path / f"pipeline{number}"
        shift, length = (number, 1) if what == "values" else (0, (1, -1)[number])
        tags = ["tags"] >> ops.Categorify(out_path=str(home)) >> ops.ListSlice(length)
        known = {"hour": pd.Series(np.arange(24))}
        hours = ["hour"] >> ops.LambdaOp(shifted(shift))
        hours = hours >> ops.Categorify(vocabs=known, out_path=str(home))
        target = ["click"] >> ops.AddMetadata(tags=TARGET)
        workflow = nvt.Workflow(tags + hours + target)
        workflow.fit(train)
        workflow.save(str(home / "workflow"))
        workflow.transform(train).to_parquet(str(home / "train"))
        made.append(quick(home, home / "data"))
    mine, other = made
    learned = {"data": str(mine.path), "cardinalities": mine.cardinalities, **inputs_of(mine)}
    run = Run(tmp_path / "run", {"config": learned})
    shutil.copytree(mine.path / "workflow", run.path / "workflow")
    run.check_vocabulary(mine)
    with pytest.raises(UserError, match="must come from the pipeline of the run"):
        run.check_vocabulary(other)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_targets_means_are_inputs_however_the_target_was_named(tmp_path, scaled):
    """Of a node NVTabular hands the target's tags on to them; of another target's numbers, too."""
    log = pd.DataFrame({"click": np.arange(600) % 2, "item": np.arange(600) % 5})
    log = log.assign(price=np.arange(600) % 7 + 0.5, site=np.arange(600) % 3)
    train = dataset(log, tmp_path / "raw")
    target = ["click"] >> ops.AddMetadata(tags=TARGET)
    means = ["item"] >> ops.TargetEncoding(target, kfold=3, out_path=str(tmp_path / "fitted"))
    means = means >> ops.Normalize() if scaled else means
    sums = ["site"] >> ops.JoinGroupby(target, stats=["sum"], out_path=str(tmp_path / "fitted"))
    sums = sums["site_click_sum"] >> ops.AddMetadata(tags=[Tags.CONTINUOUS])
    ids = ["item"] >> ops.Categorify(out_path=str(tmp_path / "fitted"))
    other = ["price"] >> ops.Normalize() >> ops.AddMetadata(tags=[Tags.REGRESSION, Tags.TARGET])
    mine = ["site"] >> ops.JoinGroupby(["price"], stats=["mean"], out_path=str(tmp_path / "mine"))
    mine = mine["site_price_mean"] >> ops.AddMetadata(tags=[Tags.REGRESSION])  # a target itself
    workflow = nvt.Workflow(ids + means + target + other + (mine if scaled else sums))
    workflow.fit(train)
    workflow.save(str(tmp_path / "workflow"))
    workflow.transform(train).to_parquet(str(tmp_path / "train"))
    data = quick(tmp_path, tmp_path / "data")
    made = {"TE_item_click"} if scaled else {"TE_item_click", "site_click_sum"}
    assert set(data.spec.continuous) == made
    for name in data.spec.continuous:
        assert not {Tags.TARGET, Tags.BINARY_CLASSIFICATION} & set(data.schema[name].tags)
    notes = " ".join(data.record["notes"])
    assert "left out of the inputs, tagged as targets beside: 'price'" in notes


@pytest.mark.parametrize("kind", ["counts", "sessions", "remainders"])
def test_what_operators_make_of_ids_does_not_share_their_rows_in_silence(tmp_path, kind):
    """NVTabular hands the ids' tags and domain on: 4 clicks had the row of the user of id 4."""
    log = pd.DataFrame({"click": np.arange(600) % 2, "user": np.arange(600) % 50})
    log = log.assign(time=np.arange(600), ad=(np.arange(600) * 7) % 30)
    train, out = dataset(log, tmp_path / "raw"), str(tmp_path / "fitted")
    target = ["click"] >> ops.AddMetadata(tags=TARGET)
    users = ["user"] >> ops.Categorify(out_path=out)
    if kind == "counts":
        made = users >> ops.JoinGroupby(cont_cols=["time"], stats=["count"], out_path=out)
        nodes, name, of = users + made + target, "user_count", "user"
    elif kind == "remainders":
        made = users >> ops.LambdaOp(lambda ids: ids % 5) >> ops.Rename(postfix="_m")
        nodes, name, of = users + made + target, "user_m", "user"
    else:
        ads = ["ad"] >> ops.Categorify(out_path=out)
        aggregates = {"ad": ["list", "count"], "click": ["last"]}
        rest = ["user", "time", "click"]
        sessions = (ads + rest) >> ops.Groupby(
            groupby_cols=["user"], sort_cols=["time"], aggs=aggregates, name_sep="-"
        )
        target = sessions["click-last"] >> ops.Rename(name="click")
        target = target >> ops.AddMetadata(tags=TARGET)
        nodes, name, of = sessions["ad-list", "ad-count"] + target, "ad-count", "ad-list"
    workflow = nvt.Workflow(nodes)
    workflow.fit(train)
    workflow.save(str(tmp_path / "workflow"))
    workflow.transform(train).to_parquet(str(tmp_path / "train"))
    data = quick(tmp_path, tmp_path / "data")
    table = FusedEmbeddings(data.schema, 4)
    ranges = table.table_specs()[0].range_names
    notes = "\n".join(data.record["notes"])
    if kind == "remainders":  # which may be ids of theirs
        assert len(ranges) == 1
        assert "'user' and 'user_m' share rows, as in Merlin's own models" in notes
    else:
        assert set(ranges) == {name, of}
        assert f"{name!r} are numbers made of ids" in notes


def test_statistics_of_groups_are_of_one_fit(tmp_path):
    """A job that fits anew each night and saves where it did: NVTabular pickles their paths."""
    made = []
    for night in range(2):
        log = pd.DataFrame({"click": np.arange(600) % 2, "item": np.arange(600) % 5})
        log["price"] = (log["item"] + 1.0) * (1 + 9 * night)
        train, home = dataset(log, tmp_path / f"raw{night}"), tmp_path / "job"
        means = ["item"] >> ops.JoinGroupby(cont_cols=["price"], stats=["mean"], out_path=str(home))
        means = means["item_price_mean"] >> ops.AddMetadata(tags=["continuous"])
        ids = ["item"] >> ops.Categorify(out_path=str(home))
        workflow = nvt.Workflow(ids + means + (["click"] >> ops.AddMetadata(tags=TARGET)))
        workflow.fit(train)
        workflow.save(str(home / "workflow"))
        workflow.transform(train).to_parquet(str(home / "train"))
        made.append(quick(home, tmp_path / f"night{night}"))
        shutil.rmtree(home)
    mine, other = made
    assert pipelines_of(mine) == pipelines_of(other)
    learned = {"data": str(mine.path), "cardinalities": mine.cardinalities, **inputs_of(mine)}
    run = Run(tmp_path / "run", {"config": learned})
    shutil.copytree(mine.path / "workflow", run.path / "workflow")
    run.check_vocabulary(mine)
    with pytest.raises(UserError, match=r"cat_stats\.item\.parquet\S* differs from .* another fit"):
        run.check_vocabulary(other)


def test_hashed_ids_are_those_of_one_pipeline(tmp_path):
    """One vocabulary and as many buckets, but another hash."""
    ids = ["a"] * 500 + ["b"] * 400 + ["c"] * 300 + [f"d{i}" for i in range(200)]
    log = pd.DataFrame({"click": np.arange(1_400) % 2, "user": ids})
    log = log.sample(frac=1, random_state=0, ignore_index=True)
    log.to_csv(tmp_path / "log.csv", index=False)
    made = []
    for buckets in (5, 6):
        spec = DatasetSpec("hashed", "click", ("user",), freq_threshold=50, hash_buckets=buckets)
        files, home = [tmp_path / "log.csv"], tmp_path / f"{buckets}"
        made.append(prepare(spec, files, home, progress=False))
    mine, more = made
    kinds = {"freq_threshold": 50, "num_buckets": 5, "out_path": str(tmp_path / "fitted")}
    nodes = (["user"] >> ops.Categorify(**kinds)) + (["click"] >> ops.AddMetadata(tags=TARGET))
    workflow = nvt.Workflow(nodes)
    train = dataset(log, tmp_path / "raw")
    workflow.fit(train)
    workflow.save(str(tmp_path / "workflow"))
    workflow.transform(train).to_parquet(str(tmp_path / "train"))
    theirs = quick(tmp_path, tmp_path / "theirs")
    assert mine.cardinalities == theirs.cardinalities == {"user": 10}

    def run_of(data: PreparedData) -> Run:
        run = Run(data.path.with_name(f"run-{data.path.name}"), {"config": {}})
        shutil.copytree(data.path / "workflow", run.path / "workflow")
        learned = {"data": str(data.path), "cardinalities": data.cardinalities, **inputs_of(data)}
        run.result["config"].update(learned)
        run.check_vocabulary(data)
        return run

    for run, other in ((run_of(mine), theirs), (run_of(theirs), mine)):
        message = (
            f"must come from the pipeline of the run.* data, {run.config['data']}, .*LOG --raw"
        )
        with pytest.raises(UserError, match=message):
            run.check_vocabulary(other)
        with pytest.raises(UserError, match="'user' differs"):
            run.check_vocabulary(more)


FRAMES = {
    "as it is": lambda log: log,
    "shuffled": lambda log: log.sample(frac=1, random_state=2),
    "of two days": lambda log: pd.concat([log[:150], log[150:].reset_index(drop=True)]),
    "clicks twice": lambda log: pd.concat([log, log[log["click"] == 1]]),
}


@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("limit", [{}, {"freq_threshold": 30}, {"max_size": 6}])
def test_ids_in_other_rows_are_noted(tmp_path, frame, limit):
    """NVTabular's, of a frame as pandas and scikit-learn leave it, where some ids are missing."""
    random = np.random.default_rng(8)
    log = pd.DataFrame({"city": random.integers(0, 12, 400), "click": random.integers(0, 2, 400)})
    log["city"] = log["city"].map(lambda i: None if i == 3 else f"c{i}")
    log = FRAMES[frame](log)
    cities = ["city"] >> ops.Categorify(out_path=str(tmp_path / "fitted"), **limit)
    notes = adopted_from(tmp_path, log, cities + clicks()).record["notes"]
    told = [note for note in notes if "differ for 'city'. If these are the rows" in note]
    # Of repeated rows whose missing ids are unknown now nothing tells, where others are as well.
    is_seen = frame != "as it is" and not (limit and frame == "clicks twice")
    assert len(told) == len(notes) == is_seen


ALIKE = {
    "of other sizes": (302, "'user_id' with 43 ids and 'user' with 303, both of the domain 'user'"),
    "hashed": (42, "'user_id' with 43 ids and 'user' with 43, both of the domain 'user'"),
}


@pytest.mark.parametrize("case", ALIKE)
@pytest.mark.parametrize("named", [False, True])
def test_fields_that_share_a_domains_name_and_no_vocabulary_are_refused(tmp_path, case, named):
    """A column by its vocabulary and by hash, as NVTabular names both: rows would be both's."""
    buckets, words = ALIKE[case]
    random = np.random.default_rng(8)
    log = pd.DataFrame({"user": np.r_[:40, random.integers(0, 40, 360)]})
    log["click"] = random.integers(0, 2, 400)
    ids = ["user"] >> ops.Categorify(out_path=str(tmp_path / "fitted")) >> ops.Rename(postfix="_id")
    hashed = ["user"] >> ops.HashBucket(buckets)
    if named:
        domain = {"min": 0, "max": buckets - 1, "name": "hashed"}
        hashed = hashed >> ops.AddMetadata(properties={"domain": domain})
    if named:
        assert len(adopted_from(tmp_path, log, ids + hashed + clicks()).domains) == 2
        return
    with pytest.raises(UserError, match=words):
        adopted_from(tmp_path, log, ids + hashed + clicks())
    assert not (tmp_path / "data").exists()


def log_of_cities() -> pd.DataFrame:
    random = np.random.default_rng(8)
    log = pd.DataFrame({"city": random.integers(0, 12, 400), "click": random.integers(0, 2, 400)})
    log["tags"] = [[f"t{i}" for i in random.integers(0, 9, k)] for k in random.integers(1, 5, 400)]
    return log.assign(city=log["city"].map(lambda i: None if i == 3 else f"c{i}"))


def test_one_column_under_two_names_is_as_it_was_fitted(tmp_path):
    ids = ["city", "tags"] >> ops.Categorify(out_path=str(tmp_path / "fitted"))
    made = ids + (ids >> ops.Rename(postfix="_too")) + clicks()
    assert adopted_from(tmp_path, log_of_cities(), made).record["notes"] == []


@pytest.mark.parametrize("encode_type", ["joint", "combo"])
def test_names_that_are_joined_otherwise(tmp_path, encode_type):
    """By a `name_sep` of the user's: so is the name of what says how often an id occurred."""
    log = log_of_cities()[["city", "click"]].assign(site=[f"s{i % 5}" for i in range(400)])
    log = log.sample(frac=1, random_state=2)
    fitted = str(tmp_path / "fitted")
    pair = [["city", "site"]] >> ops.Categorify(
        encode_type=encode_type, name_sep="__", out_path=fitted
    )
    city = ["city"] >> ops.Rename(postfix="2") >> ops.Categorify(name_sep="-", out_path=fitted)
    data = adopted_from(tmp_path, log, pair + city + clicks())
    told = " ".join(data.record["notes"])
    assert re.search("ids of [^.]*'city2' are other rows'", told)
    raw = data.counts("city__site" if encode_type == "combo" else "city")["raw"].dropna()
    cities, sites = log["city"].dropna(), log["site"]
    known = (cities + "_" + sites).dropna() if encode_type == "combo" else [*cities, *sites]
    assert set(raw) <= {*known, *("_" + sites)}
    assert set(known) <= set(raw)


def test_lists_that_are_cut_hide_no_ids_in_other_rows(tmp_path):
    """Of another field; those that were cut have other counts for that."""
    ids = ["city"] >> ops.Categorify(out_path=str(tmp_path / "fitted"))
    tags = ["tags"] >> ops.Categorify(out_path=str(tmp_path / "fitted")) >> ops.ListSlice(2)
    log = log_of_cities().sample(frac=1, random_state=2)
    (note,) = adopted_from(tmp_path, log, ids + tags + clicks()).record["notes"]
    assert "differ for 'city', 'tags'. If these are the rows" in note
    assert "ids of 'city' are other rows'" in note


JOINT = {
    "cut": lambda ids: ids["city"] + (ids["tags"] >> ops.ListSlice(-2)),
    "no input": lambda ids: ids["city"],
    "under two names": lambda ids: ids + (ids >> ops.Rename(postfix="_too")),
}


@pytest.mark.parametrize("case", JOINT)
def test_ids_of_a_joint_vocabulary_are_counted_together(tmp_path, case):
    """Where ids of one field are left out, those of the other are where they were."""
    log = log_of_cities()
    log["tags"] = [[f"c{one[1:]}" for one in row] for row in log["tags"]]
    ids = [["city", "tags"]] >> ops.Categorify(encode_type="joint", out_path=str(tmp_path / "f"))
    notes = adopted_from(tmp_path, log, JOINT[case](ids) + clicks()).record["notes"]
    differ = ["differ for 'city'" in note for note in notes]
    assert differ == ([] if case == "under two names" else [True])
    assert not any("If these are the rows" in note for note in notes)


@pytest.mark.parametrize("case", ["cut", "no input"])
def test_ids_that_are_too_many_stand_in_other_rows(tmp_path, case):
    """Whatever is left out of the others of their vocabulary."""
    log = log_of_cities()
    log["tags"] = [["c0"]] * len(log)
    log = log.sample(frac=1, random_state=2)
    ids = [["city", "tags"]] >> ops.Categorify(encode_type="joint", out_path=str(tmp_path / "f"))
    notes = adopted_from(tmp_path, log, JOINT[case](ids) + clicks()).record["notes"]
    assert any("ids of 'city' are other rows'" in note for note in notes)


@pytest.mark.parametrize("padded", ["before", "behind", "not"])
@pytest.mark.parametrize("of", ["frame", "parquet"])
def test_lists_that_were_padded_are_noted(tmp_path, padded, of):
    """NVTabular pads Python's lists, as a frame has them, and no arrays: raw rows are these."""
    log = log_of_cities()[["tags", "click"]]
    cut = ops.ListSlice(3, pad=padded != "not", pad_value="none" if padded == "before" else 0)
    ids = ops.Categorify(out_path=str(tmp_path / "fitted"))
    made = ["tags"] >> ids >> cut if padded == "behind" else ["tags"] >> cut >> ids
    if of == "parquet":
        log.to_parquet(tmp_path / "log.parquet")
        log = str(tmp_path / "log.parquet")
    notes = adopted_from(tmp_path, log, made + clicks()).record["notes"]
    told = [note for note in notes if note.startswith("lists of 'tags' are of one length in all")]
    assert len(told) == (padded == "before" and of == "frame")


SESSIONS = {
    "grouped": lambda ids: ids >> ops.Groupby(["user"], aggs={"city": ["last"], "click": "last"}),
    "filtered": lambda ids: ids >> ops.Filter(lambda rows: rows[rows["user"] > 9]),
}


@pytest.mark.parametrize("case", SESSIONS)
def test_counts_that_are_others_by_the_workflow_have_no_remedy(tmp_path, case):
    """Sessions, say: the ids of the rows that are left are right."""
    random = np.random.default_rng(8)
    log = pd.DataFrame({"user": random.integers(0, 40, 400), "city": random.integers(0, 12, 400)})
    log["city"] = log["city"].map(lambda i: None if i == 3 else f"c{i}")
    log["click"] = random.integers(0, 2, 400)
    ids = ["user", "city"] >> ops.Categorify(out_path=str(tmp_path / "fitted"))
    made = SESSIONS[case](ids + (["click"] >> ops.AddMetadata()))
    last = "click_last" if case == "grouped" else "click"
    inputs = made["city_last" if case == "grouped" else "city"]
    made = inputs + (made[last] >> ops.AddMetadata(tags=TARGET))
    notes = adopted_from(tmp_path, log, made, last).record["notes"]
    (told,) = [note for note in notes if "differ for 'city" in note]
    assert "If these are the rows" not in told


@pytest.mark.parametrize("missing", [True, False])
def test_lists_that_hold_missing_values_are_noted(tmp_path, missing):
    """NVTabular puts their ids into other rows, whatever the index."""
    random = np.random.default_rng(8)
    lists = [random.integers(0, 9, k) for k in random.integers(1, 5, 400)]
    tags = [[None if missing and i == 3 else f"t{i}" for i in one] for one in lists]
    log = pd.DataFrame({"tags": tags, "click": random.integers(0, 2, 400)})
    encoded = ["tags"] >> ops.Categorify(out_path=str(tmp_path / "fitted"))
    notes = adopted_from(tmp_path, log, encoded + clicks()).record["notes"]
    told = [note for note in notes if note.endswith("take these out of them first")]
    assert len(told) == len(notes) == missing


MEANS = {
    "TargetEncoding": lambda: ops.TargetEncoding("click", kfold=3),
    "counts": lambda: ops.JoinGroupby(cont_cols=["click"], stats=["count"]),
    "means": lambda: ops.JoinGroupby(cont_cols=["click"], stats=["mean"]),
    "deviations": lambda: ops.JoinGroupby(cont_cols=["click"], stats=["std"]),
    "another separator": lambda: ops.TargetEncoding("click", kfold=1, p_smooth=20, name_sep="-"),
}


@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("case", MEANS)
def test_means_over_missing_keys_are_noted(tmp_path, case, filled):
    """On a CPU NVTabular counts none of them, and adds up their targets."""
    log = log_of_cities()[["city", "click"]].assign(tags=np.arange(400) % 7)
    ids = ["city", "tags"] >> ops.Categorify(out_path=str(tmp_path / "fitted"))
    statistics = MEANS[case]()
    statistics.out_path = str(tmp_path / "statistics")
    keys = ["city"] >> ops.FillMissing(fill_val="none") if filled else ["city"]
    made = keys >> statistics >> ops.FillMissing()
    notes = adopted_from(tmp_path, log, ids + made + clicks()).record["notes"]
    told = [note for note in notes if "missing values of 'city' were counted as none" in note]
    assert bool(told) == (not filled)


def test_counts_of_other_rows_are_noted(bare, tmp_path):
    first = bare / "train" / "part_0.parquet"
    data = quick(bare, tmp_path / "data", parquet=first)
    (note,) = data.record["notes"]
    assert note.startswith(
        "counts are those of the training rows; the workflow's own, of the rows it was fitted on, "
        "differ for 'user', 'item', 'src_dst'. If these are the rows that it was fitted on, "
    )


# Workflows that are not where they were


def test_vocabularies_that_strayed_are_found(log, tmp_path, monkeypatch):
    """NVTabular replaces "cat" by "a" wherever it stands, so the files lie in a/aegories/."""
    monkeypatch.chdir(tmp_path)
    workflow = nvt.Workflow((["user", "src"] >> ops.Categorify(out_path="cat")) + ["click"])
    train = dataset(log[:TRAIN], tmp_path / "raw")
    workflow.fit(train)
    workflow.save("a")
    workflow.transform(train).to_parquet("train")
    os.rename("a", "moved")
    data = adopt(["train"], "moved", "click", "data", progress=False)
    shutil.rmtree("cat")
    shutil.rmtree("moved")
    _check_moved(data, log, tmp_path / "train", tmp_path / "there")


@pytest.mark.parametrize("kept", ["stats", "cat"])
@pytest.mark.parametrize("statistics", [ops.TargetEncoding, ops.JoinGroupby])
def test_a_folder_whose_name_is_in_a_keys(tmp_path, monkeypatch, statistics, kept):
    """NVTabular replaces "wf" by the folder's path in `cat_stats.wf_id.parquet` as well.

    And "cat" by "wf" as it saves: then the file lies in wf/wfegories/.
    """
    monkeypatch.chdir(tmp_path)
    log = log_of_cities()[["city", "click"]].rename(columns={"city": "wf_id"})
    log.to_parquet("raw.parquet")
    if statistics is ops.TargetEncoding:
        means = statistics("click", kfold=1, out_path=kept)
    else:
        means = statistics(cont_cols=["click"], stats=["mean"], out_path=kept)
    ids = ["wf_id"] >> ops.Categorify(out_path="out")
    workflow = nvt.Workflow(ids + (["wf_id"] >> means) + clicks())
    workflow.fit_transform(Dataset("raw.parquet", engine="parquet")).to_parquet("train")
    workflow.save("wf")
    data = adopt(["train"], "wf", "click", "data", progress=False)
    told = " ".join(data.record["notes"])
    assert "missing values of 'wf_id' were counted as none" in told
    for place in ("wf", kept, "out"):
        shutil.rmtree(place)
    os.rename("data", "there")
    for load in (
        lambda: PreparedData.open("there").workflow(),
        lambda: stock_load("there/workflow"),
    ):
        clean_worker_cache("cats")
        encoded = load().transform(log)
        assert encoded["wf_id"].tolist() == read(Path("train"))["wf_id"].tolist()


def stock_load(folder: str) -> nvt.Workflow:
    return nvt.Workflow.load(os.path.abspath(folder))


def test_a_workflow_without_its_statistics_is_refused(tmp_path):
    log = log_of_cities()[["city", "click"]]
    means = ["city"] >> ops.TargetEncoding("click", kfold=1, out_path=str(tmp_path / "stats"))
    ids = ["city"] >> ops.Categorify(out_path=str(tmp_path / "ids"))
    adopted_from(tmp_path, log, ids + means + clicks())
    shutil.rmtree(tmp_path / "workflow/categories/cat_stats.city.parquet")  # a folder of parts
    with pytest.raises(UserError, match="statistics must lie in .* without cat_stats.city.parquet"):
        quick(tmp_path, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_vocabularies_from_elsewhere_are_taken_along(log, tmp_path):
    given = tmp_path / "given.parquet"
    pd.DataFrame({"src": [f"c{i}" for i in range(9)]}).to_parquet(given)
    vocabulary = ops.Categorify(out_path=str(tmp_path / "out"), vocabs={"src": str(given)})
    users = ["user"] >> ops.Categorify(out_path=str(tmp_path / "out"))
    workflow = nvt.Workflow(users + (["src"] >> vocabulary) + ["click"])
    train = dataset(log[:TRAIN], tmp_path / "raw")
    workflow.fit(train)
    workflow.save(str(tmp_path / "workflow"))
    workflow.transform(train).to_parquet(str(tmp_path / "train"))
    data = quick(tmp_path, tmp_path / "data")
    given.unlink()
    _check_moved(data, log, tmp_path / "train", tmp_path / "there")
    counts = PreparedData.open(tmp_path / "there").counts("src")
    assert counts["raw"].tolist() == [None] * 3 + [f"c{i}" for i in range(9)]


def _check_moved(data: PreparedData, log: pd.DataFrame, train: Path, there: Path) -> None:
    """In another place, the workflow still encodes as the parquet is."""
    os.rename(data.path, there)
    clean_worker_cache("cats")  # NVTabular keeps vocabularies by path
    encoded = PreparedData.open(there).workflow().transform(log[:1000].reset_index(drop=True))
    stored = read(train)[:1000]
    assert encoded["user"].tolist() == stored["user"].tolist()
    assert encoded["src"].tolist() == stored["src"].tolist()


def test_tags_from_the_schema_beside_the_parquet(home, tmp_path):
    raw = Dataset(pd.DataFrame({"ad": [3, 4, 3, 5], "price": [1, 2, 3, 4], "click": [0, 1, 1, 0]}))
    workflow = nvt.Workflow(["ad", "price", "click"] >> ops.AddMetadata(tags=["seen"]))
    workflow.fit(raw)
    workflow.save(str(tmp_path / "workflow"))
    workflow.transform(raw).to_parquet(str(tmp_path / "train"))
    given = {"parquet": tmp_path / "train", "workflow": tmp_path / "workflow"}
    with pytest.raises(
        UserError, match="must give a column of ids, tagged .*none among 'ad', 'pri"
    ):
        quick(home, tmp_path / "none", **given)
    domain = {"domain": {"min": 0, "max": 5}}
    schema = Schema(
        [
            ColumnSchema("ad", dtype="int64", tags=[Tags.CATEGORICAL], properties=domain),
            ColumnSchema("price", dtype="int64", tags=[Tags.CONTINUOUS]),
        ]
    )
    proto = TensorflowMetadata.from_merlin_schema(schema)
    proto.to_json_file(str(tmp_path / "train" / ".merlin"))
    data = quick(home, tmp_path / "data", **given)
    assert (data.spec.categorical, data.spec.continuous) == (("ad",), ("price",))
    assert data.record["notes"] == [
        f"tags of 'ad', 'price' are from the schema beside the parquet, "
        f"{tmp_path / 'train' / '.merlin' / 'schema.json'}: the workflow's has none"
    ]
    counts = data.counts("ad")
    assert counts["count"].tolist() == [0, 0, 0, 2, 1, 1]
    assert counts["raw"].isna().all()


def test_hash_buckets(log, tmp_path):
    """HashBucket has no vocabulary, and int32 ids from 0."""
    raw = Dataset(log[["site", "click"]][:500].reset_index(drop=True))
    workflow = nvt.Workflow((["site"] >> ops.HashBucket(7)) + ["click"])
    workflow.fit(raw)
    workflow.save(str(tmp_path / "workflow"))
    workflow.transform(raw).to_parquet(str(tmp_path / "train"))
    data = quick(tmp_path, tmp_path / "data")
    counts = data.counts("site")
    assert counts["raw"].isna().all()
    assert counts["count"].sum() == 500
    (note,) = data.record["notes"]
    assert note.startswith("hashed ids in 'site' are noise if a CPU wrote the parquet")
    metadata = json.loads((tmp_path / "workflow/metadata.json").read_text())
    metadata["versions"]["cudf"] = metadata["versions"].pop("pandas")
    (tmp_path / "workflow/metadata.json").write_text(json.dumps(metadata))
    with pytest.warns(UserWarning, match="Loading workflow generated on GPU"):
        assert quick(tmp_path, tmp_path / "gpu").record["notes"] == []


@pytest.mark.parametrize("hashes", [ops.HashBucket, ops.Categorify])
def test_hashed_columns_are_told_by_the_inputs_that_they_are(log, tmp_path, hashes):
    """Renamed, beside the raw column; and what is made of one."""
    place = {"out_path": str(tmp_path)} if hashes is ops.Categorify else {}
    op = hashes(num_buckets=7, **place)
    raw = Dataset(log[["site", "price", "click"]][:500].reset_index(drop=True))
    renamed = ["site"] >> op >> ops.Rename(postfix="_id")
    means = ops.JoinGroupby(cont_cols=["click"], stats=["mean"], out_path=str(tmp_path))
    ranks = pd.DataFrame({"site_id": range(40), "rank": range(40)})
    ranked = renamed >> ops.JoinExternal(ranks, on=["site_id"], columns_ext=["site_id", "rank"])
    lower = ["price"] >> ops.LambdaOp(lambda c, f: c - f["site_id"], dependency=[renamed])
    made = (renamed >> means) + ranked["rank"] + lower
    numbers = made >> ops.AddMetadata(tags=[Tags.CONTINUOUS])
    workflow = nvt.Workflow(renamed + numbers + ["site", "click"])
    workflow.fit(raw)
    workflow.save(str(tmp_path / "workflow"))
    workflow.transform(raw).to_parquet(str(tmp_path / "train"))
    notes = quick(tmp_path, tmp_path / "data").record["notes"]
    (note,) = [note for note in notes if "noise" in note]
    told = "hashed ids in 'price', 'rank', 'site_id', 'site_id_click_mean' are noise if a CPU"
    assert note.startswith(told)


def test_hashed_columns_that_are_no_inputs_are_not_told(log, tmp_path):
    raw = Dataset(log[["site", "user", "click"]][:500].reset_index(drop=True))
    crossed = [["site", "user"]] >> ops.HashedCross(7)  # which has no tag
    workflow = nvt.Workflow(
        (["user"] >> ops.Categorify(out_path=str(tmp_path))) + crossed + ["click"]
    )
    workflow.fit(raw)
    workflow.save(str(tmp_path / "workflow"))
    workflow.transform(raw).to_parquet(str(tmp_path / "train"))
    (note,) = quick(tmp_path, tmp_path / "data").record["notes"]
    assert note.startswith("left out of the inputs")
    assert "'site_X_user'" in note


def test_operators_that_may_move_rows_are_noted(log, tmp_path):
    """Of raw rows each would get the score of another."""
    sites = pd.DataFrame({"site": [f"s{i}" for i in range(30)]})
    rows = ["user", "site", "click"] >> ops.JoinExternal(sites, on="site", how="inner")
    workflow = nvt.Workflow(
        (rows["user", "site"] >> ops.Categorify(out_path=str(tmp_path / "fitted")))
        + (rows["click"] >> ops.AddMetadata(tags=TARGET))
    )
    workflow.fit_transform(dataset(log, tmp_path / "raw")).to_parquet(str(tmp_path / "train"))
    workflow.save(str(tmp_path / "workflow"))
    (note,) = quick(tmp_path, tmp_path / "data").record["notes"]
    assert note.startswith("JoinExternal(how='inner') may move rows, or drop some and double oth")


def test_ids_of_ones_own_from_0(tmp_path):
    """In a row 0 is an id like others; in a list it is padding to the networks, which is told."""
    raw = pd.DataFrame({"ad": [0, 0, 2, 1], "genres": [[0], [1, 0], [2], []]})
    raw["click"] = [0, 1, 1, 0]
    own = {"tags": [Tags.CATEGORICAL], "properties": {"domain": {"min": 0, "max": 2}}}
    workflow = nvt.Workflow((["ad", "genres"] >> ops.AddMetadata(**own)) + ["click"])
    workflow.fit(Dataset(raw))
    workflow.save(str(tmp_path / "workflow"))
    workflow.transform(Dataset(raw)).to_parquet(str(tmp_path / "train"))
    data = quick(tmp_path, tmp_path / "data")
    assert data.counts("ad")["count"].tolist() == [2, 1, 1]
    (note,) = data.record["notes"]
    assert note == (
        "id 0 in lists of 'genres' is padding, which the networks leave out: if it is an id there, "
        "let the workflow write ids from 1 on"
    )


@pytest.mark.parametrize(
    ("index", "num_buckets", "first"),
    [
        (None, None, None),  # ids by place
        (range(3, 8), None, None),  # as Categorify writes it
        (range(5, 10), None, "5"),
        ([7, 6, 5, 4, 3], None, "7"),
        (range(3, 8), 4, "9"),  # behind the buckets, twice
    ],
)
def test_vocabularies_of_ones_own(tmp_path, index, num_buckets, first):
    """Categorify takes a vocabulary's index for its ids, whatever its schema says."""
    given = pd.DataFrame({"ad": list("abcde")}, index=index)
    given.to_parquet(tmp_path / "mine.parquet")
    raw = pd.DataFrame({"ad": list("abab"), "click": [0, 1, 1, 0]})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of hashing
        categorify = ops.Categorify(
            out_path=str(tmp_path / "fitted"),
            vocabs={"ad": str(tmp_path / "mine.parquet")},
            num_buckets=num_buckets,
        )
    workflow = nvt.Workflow((["ad"] >> categorify) + ["click"])
    workflow.fit(Dataset(raw))
    workflow.save(str(tmp_path / "workflow"))
    workflow.transform(Dataset(raw)).to_parquet(str(tmp_path / "train"))
    clean_worker_cache()
    if first is not None:
        message = rf"must number its ids as the schema does.*mine.parquet, .* id {first} .*'ad'"
        with pytest.raises(UserError, match=message):
            quick(tmp_path, tmp_path / "data")
        return
    counts = quick(tmp_path, tmp_path / "data").counts("ad")
    ids = read(tmp_path / "train")["ad"]
    assert counts["raw"].iloc[ids].tolist() == raw["ad"].tolist()


@pytest.mark.parametrize("dtype", [object, "category"])
def test_an_empty_text_is_an_id(tmp_path, dtype):
    ads = pd.Series(["", "a", "", None], dtype=dtype)
    raw = Dataset(pd.DataFrame({"ad": ads, "click": [0, 1, 1, 0]}))
    categorify = ops.Categorify(out_path=str(tmp_path / "fitted"))
    workflow = nvt.Workflow((["ad"] >> categorify) + ["click"])
    workflow.fit(raw)
    workflow.save(str(tmp_path / "workflow"))
    workflow.transform(raw).to_parquet(str(tmp_path / "train"))
    counts = quick(tmp_path, tmp_path / "data").counts("ad")
    assert counts["raw"].tolist() == [None, None, None, "", "a"]
    assert counts["count"].tolist() == [0, 1, 0, 2, 1]


def test_files_globs_and_folders(home, tmp_path):
    for i in (10, 2, 1):
        shutil.copy(home / "train" / "part_0.parquet", tmp_path / f"p_{i}.parquet")
    (tmp_path / "_metadata").write_text("not ours to read")
    (tmp_path / "empty.txt").write_text("")
    data = quick(home, tmp_path / "out" / "a", parquet=[tmp_path / "*"])
    assert [p.name for p in data.train_files] == ["p_1.parquet", "p_2.parquet", "p_10.parquet"]
    one = [tmp_path / "p_10.parquet", str(tmp_path / "p_[12].parquet")]
    data = quick(home, tmp_path / "out" / "b", parquet=one)
    assert [p.name for p in data.train_files] == ["p_10.parquet", "p_1.parquet", "p_2.parquet"]


def test_help_says_that_loading_runs_code(capsys):
    with pytest.raises(SystemExit):
        main(["adopt", "--help"])
    assert "runs code from its folder (cloudpickle)" in " ".join(capsys.readouterr().out.split())


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"user": put(503, 63)},
            "an id must be from 0 to its field's cardinality - 1, here 62. Received: 63 in "
            "LAST, row group 1, row 504 of the file, column 'user'. Give the parquet that",
        ),
        ({"dst": put(0, -1)}, "Received: -1 in LAST, row group 0, row 1 of the file, column 'dst'"),
        (
            {"genres": put(7, [3, 9])},
            "here 8. Received: 9 in LAST, row group 0, row 8 of the file, column 'genres'",
        ),
        (
            {"genres": put(501, [3, None])},
            "must hold no nulls. Received: null in a list in LAST, row group 1, row 502 of the",
        ),
        ({"genres": put(5, None)}, "no nulls. Received: null in LAST, row group 0, row 6 of the"),
        (
            {"item": put(999, None)},
            "parquet must hold no nulls. Received: null in LAST, row group 1, row 1000 of the "
            "file, column 'item'. Fill it in the workflow",
        ),
        (
            {"price": put(2, float("nan"))},
            "a number must be finite, as a float32 too: another turns every weight into NaN. "
            "Received: nan in LAST, row group 0, row 3 of the file, column 'price'. Fill or clip",
        ),
        ({"visits": put(2, float("-inf"))}, "Received: -inf in LAST, row group 0, row 3 of"),
        ({"visits": put(2, 1e300)}, "finite, as a float32 too.*Received: 1e+300 in LAST"),
        ({"visits": put(501, None)}, "no nulls. Received: null in LAST, row group 1, row 502"),
        (
            {"click": put(4, None)},
            "label must be 0 or 1. Received: null in LAST, row group 0, row 5 of the file, column "
            "'click'. Remove the row",
        ),
        (
            {"price": as_type(pa.float64())},
            "the files of one part must have the same types. Received: double for column 'price' "
            "in LAST, and float in FIRST. Write",
        ),
        (
            {"site_hashed": nothing},
            "parquet must have every column that the workflow tags as an input. Missing: "
            "'site_hashed' in LAST, which has 'user'",
        ),
    ],
)
def test_bad_rows_and_files(home, copy, tmp_path, changes, message):
    folder = copy(**changes)
    first, *_, last = sorted(folder.glob("part_*.parquet"))
    pattern = re.escape(message).replace(re.escape(".*"), ".*")
    pattern = pattern.replace("LAST", re.escape(str(last))).replace("FIRST", re.escape(str(first)))
    for part in ({"parquet": folder}, {"test": folder}):
        with pytest.raises(UserError, match=pattern):
            quick(home, tmp_path / "out", **part)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def numbers(*values):
    return lambda old: pa.array([values[i % len(values)] for i in range(len(old))])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"click": numbers(0, 1, 7)}, "label must be 0 or 1. Received: 7 in .*row 3 of the file"),
        ({"click": numbers(0.0, 0.5)}, "label must be 0 or 1. Received: 0.5 in .*row 2 of the"),
        ({"click": numbers("0", "1")}, "column 'click' must hold 0 or 1. Received: string in"),
        (
            {"click": numbers(1)},
            "label must be 0 in some rows and 1 in others.*Received: only 1 in",
        ),
        ({"user": numbers("3")}, "column 'user' must hold integer ids. Received: string in"),
        ({"user": numbers(3.0)}, "column 'user' must hold integer ids. Received: double in"),
        (
            {"genres": numbers(["3"])},
            "column 'genres' must hold lists of integer ids. Received: list<item: string> in",
        ),
        (
            {"price": numbers([1.0])},
            "column 'price' must hold numbers. Received: list<item: doub.* or without its tag",
        ),
    ],
)
def test_bad_types_and_labels(home, copy, tmp_path, changes, message):
    last = sorted(copy(**changes).glob("part_*.parquet"))[-1]
    for part in ({"parquet": last}, {"test": last}):
        with pytest.raises(UserError, match=message):
            quick(home, tmp_path / "out", **part)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_integer_and_float_labels_are_labels(home, copy, tmp_path):
    changes = {"click": numbers(0.0, 1.0), "user": as_type(pa.uint8()), "price": numbers(1, -2)}
    last = sorted(copy(**changes).glob("part_*.parquet"))[-1]
    data = quick(home, tmp_path / "data", parquet=last)
    assert data.record["report"]["positives"] == {"train": data.rows["train"] // 2, "test": 0}
    assert data.counts("user")["count"].sum() == data.rows["train"]


@pytest.mark.parametrize("damage", ["truncated", "overwritten", "empty", "text"])
def test_damaged_parquet(home, copy, tmp_path, damage):
    file = sorted(copy().glob("part_*.parquet"))[-1]
    whole = file.read_bytes()
    file.write_bytes(
        {
            "truncated": whole[: len(whole) // 2],
            "overwritten": whole[:4] + b"\xff" * 400 + whole[404:],  # the footer is sound
            "empty": b"",
            "text": b"user,click\n1,0\n",
        }[damage]
    )
    place = ", row group 0" if damage == "overwritten" else ""
    message = f"parquet must be whole and readable. Received: {file}{place}: "
    with pytest.raises(UserError, match=re.escape(message)):
        quick(home, tmp_path / "out", parquet=file.parent)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_bad_arguments(home, tmp_path):
    def refused(match, **changes):
        with pytest.raises(UserError, match=match):
            quick(home, tmp_path / "out", **changes)
        assert list(tmp_path.iterdir()) == []

    part = home / "train" / "part_0.parquet"
    refused("parquet must be there. Received: '/nowhere'. Check", parquet="/nowhere")
    refused("at least one parquet file must be given. Received: none", parquet=[])
    refused("a folder must hold files named .*workflow', without one", parquet=home / "workflow")
    refused("a pattern must hold files named", parquet=str(home / "*.csv"))
    refused(
        "must be given once. Received twice: .*part_0.parquet, for the training part and for the "
        "training part",
        parquet=[part, home / "train"],
    )
    refused("part_0.parquet, for the training part and for the test part", test=part)
    refused(
        "label must be a column of the parquet. Received: 'clicks', but .* has 'user",
        label="clicks",
    )
    refused(
        "must have every column .* Missing: 'site_hashed' in .*raw.0.parquet, which has 'click'",
        parquet=home / "raw",
    )
    refused("must be a folder that .*Workflow.save wrote.*without workflow.pkl and", workflow=home)
    with pytest.raises(UserError, match="output folder must not exist. Received: .*train"):
        quick(home, home / "train")


def test_bad_workflows(home, log, tmp_path):
    given = tmp_path / "in"

    def refused(match):
        with pytest.raises(UserError, match=match):
            quick(home, tmp_path / "out", workflow=given)
        assert [p.name for p in tmp_path.iterdir()] == ["in"]
        shutil.rmtree(given)

    shutil.copytree(home / "workflow", given)
    (given / "workflow.pkl").write_bytes(b"cnothere\nnothing\n.")
    refused("must load in this environment. Received: .*in: ModuleNotFoundError: .*'nothere'")

    shutil.copytree(home / "workflow", given)
    (given / "categories" / "unique.user.parquet").unlink()
    refused("vocabularies must lie in its folder. Received: .*, without unique.user.parquet")

    shutil.copytree(home / "workflow", given)
    path = given / "categories" / "unique.user.parquet"
    pd.read_parquet(path)[:-2].to_parquet(path)
    refused("must fit the workflow's schema. Received: 58 ids in .* a cardinality of 63 for 'user'")

    shutil.copytree(home / "workflow", given)
    path = given / "categories" / "unique.user.parquet"
    vocabulary = pd.read_parquet(path)
    pd.concat([vocabulary, vocabulary[-1:]]).to_parquet(path)
    refused("must fit the workflow's schema. Received: 61 ids in .* a cardinality of 63 for 'user'")

    unfitted = nvt.Workflow(["user"] >> ops.Categorify(out_path=str(given)))
    unfitted.save(str(given))
    refused("the workflow must be fitted. Received: .*in, which has no schema")

    frame = Dataset(log[["user", "item", "visits", "click"]][:100].reset_index(drop=True))
    one_table = nvt.Workflow(
        ["user", "item"] >> ops.Categorify(out_path=str(given), single_table=True)
    )
    one_table.fit(frame)
    one_table.save(str(given))
    refused("must keep one table per field.*Received: single_table=True in")


@pytest.mark.parametrize("name", ["from", "self", "user id", "größe", "_x"])
def test_names_that_could_not_be_saved_after_training(tmp_path, name):
    raw = Dataset(pd.DataFrame({name: ["a", "b", "a"], "click": [0, 1, 1]}))
    categorify = ops.Categorify(out_path=str(tmp_path / "in" / "fitted"))
    workflow = nvt.Workflow(([name] >> categorify) + ["click"])
    workflow.fit(raw)
    workflow.save(str(tmp_path / "in" / "workflow"))
    workflow.transform(raw).to_parquet(str(tmp_path / "in" / "train"))
    with pytest.raises(UserError, match=rf"can save: .* Received: '{name}'. Rename them"):
        quick(tmp_path / "in", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_ids_without_a_domain(tmp_path):
    raw = Dataset(pd.DataFrame({"visits": [0.5, 20.0, 60.0], "click": [0, 1, 1]}))
    workflow = nvt.Workflow((["visits"] >> ops.Bucketize({"visits": [10, 50]})) + ["click"])
    workflow.fit(raw)
    workflow.save(str(tmp_path / "in" / "workflow"))
    workflow.transform(raw).to_parquet(str(tmp_path / "in" / "train"))
    with pytest.raises(UserError, match="must have an int domain.* Received: none for 'visits'"):
        quick(tmp_path / "in", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["in"]
