"""Damaged runs, and data that is not theirs: what `evaluate` refuses, in a sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from merlin_cowclip.workflows.data.datasets import DatasetSpec
from merlin_cowclip.workflows.data.etl import prepare
from merlin_cowclip.workflows.data.prepared import PreparedData
from merlin_cowclip.workflows.data.top_ids import keep_top_ids
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.manifest import checksum
from merlin_cowclip.workflows.training.runs import Run, inputs_of
from tests.bad_input.conftest import TOY, toy_log
from tests.bad_input.contract import command, refused

AGAIN = "Train again into another folder"


def gone(name: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return damage


def cut(name: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        content = (run / name).read_bytes()
        (run / name).write_bytes(content[: len(content) // 2])

    return damage


def flipped(name: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        content = bytearray((run / name).read_bytes())
        content[len(content) // 2] ^= 1
        (run / name).write_bytes(content)

    return damage


def written(content: Any) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        (run / "result.json").write_bytes(data)

    return damage


def without(*keys: str, value: Any = None) -> Callable[[Path], None]:
    """A value of the result gone, or another."""

    def damage(run: Path) -> None:
        result = json.loads((run / "result.json").read_text())
        holder = result
        for key in keys[:-1]:
            holder = holder[key]
        if value is None:
            del holder[keys[-1]]
        else:
            holder[keys[-1]] = value
        (run / "result.json").write_text(json.dumps(result))

    return damage


def a_folder(run: Path) -> None:
    gone("result.json")(run)
    (run / "result.json").mkdir()


VARIABLES = "model/variables/variables"
CATEGORIES = "workflow/categories"
KEPT = "a run must keep every file as it was written"
JSON = "result.json must be readable JSON"
FORMAT = "a run must be of format 1"

DAMAGES = [
    # result.json
    ("result is {}", written({}), [FORMAT, "None", "result.json", AGAIN[:11]]),
    ("result is []", written([]), [FORMAT, "None"]),
    ("result is a text", written("done"), [FORMAT]),
    ("result is empty", written(b""), [JSON, AGAIN]),
    ("result is binary", written(b"\xff\xfe\x00"), [JSON]),
    ("result is deep", written(b"[" * 100_000), [JSON]),
    ("result is cut", cut("result.json"), [JSON, AGAIN]),
    ("result is gone", gone("result.json"), ["a run must hold result.json", "did not finish"]),
    ("result is a folder", a_folder, [JSON, "directory"]),
    *(
        (f"no {key}", without(key), [f"result.json must hold '{key}'", AGAIN])
        for key in (
            *("auc", "log_loss", "epochs", "samples_per_second", "train_seconds"),
            *("parameters", "config", "manifest"),
        )
    ),
    ("no format", without("format"), [FORMAT, "None"]),
    ("another format", without("format", value=99), [FORMAT, "99", "this version"]),
    ("a format of text", without("format", value="1"), [FORMAT, "'1'"]),
    ("auc is a text", without("auc", value="high"), ["must hold 'auc'"]),
    ("epochs is a number", without("epochs", value=3), ["must hold 'epochs'"]),
    ("config is a list", without("config", value=[1]), ["must hold 'config'"]),
    *(
        (f"no {key} in config", without("config", key), [f"must hold 'config.{key}'", AGAIN])
        for key in ("data", "cardinalities", "continuous", "model")
    ),
    ("data is a number", without("config", "data", value=3), ["must hold 'config.data'"]),
    ("manifest is a list", without("manifest", value=["a"]), ["must hold 'manifest'"]),
    ("manifest is empty", without("manifest", value={}), ["must hold 'manifest'"]),
    ("manifest is another's", without("manifest", value={"a": {"size": 3}}), ["hold 'manifest'"]),
    *(
        (f"manifest lacks {name}", without("manifest", name), ["manifest lacks", name, AGAIN])
        for name in ("config.json", "model/saved_model.pb", "workflow/workflow.pkl")
    ),
    # The files
    ("no model", gone("model"), [KEPT, "model/", "gone", AGAIN]),
    ("no graph", gone("model/saved_model.pb"), [KEPT, "saved_model.pb", "gone"]),
    ("graph cut", cut("model/saved_model.pb"), [KEPT, "saved_model.pb", "bytes, which had"]),
    ("graph changed", flipped("model/saved_model.pb"), [KEPT, "content has changed"]),
    ("no variables", gone("model/variables"), [KEPT, "variables", "gone"]),
    ("variables cut", cut(f"{VARIABLES}.data-00000-of-00001"), [KEPT, "variables.data", "had"]),
    ("variables changed", flipped(f"{VARIABLES}.data-00000-of-00001"), [KEPT, "variables.data"]),
    ("index cut", cut(f"{VARIABLES}.index"), [KEPT, "variables.index", "bytes, which had"]),
    ("no index", gone(f"{VARIABLES}.index"), [KEPT, "variables.index", "gone"]),
    ("no schema of Merlin's", gone("model/.merlin"), [KEPT, ".merlin", "gone"]),
    ("no metadata of Keras's", gone("model/keras_metadata.pb"), [KEPT, "keras_metadata.pb"]),
    ("no workflow", gone("workflow"), [KEPT, "workflow/", "gone"]),
    ("workflow cut", cut("workflow/workflow.pkl"), [KEPT, "workflow.pkl", "bytes, which had"]),
    ("no vocabularies", gone(CATEGORIES), [KEPT, "categories", "gone"]),
    ("no vocabulary", gone(f"{CATEGORIES}/unique.user.parquet"), [KEPT, "unique.user", "gone"]),
    ("vocabulary changed", flipped(f"{CATEGORIES}/unique.item.parquet"), [KEPT, "unique.item"]),
    ("no config", gone("config.json"), [KEPT, "config.json", "gone"]),
    ("config changed", flipped("config.json"), [KEPT, "config.json", "has changed"]),
    ("metrics cut", cut("metrics.csv"), [KEPT, "metrics.csv"]),
]


@pytest.fixture
def run(toy_run, tmp_path) -> Path:
    return Path(shutil.copytree(toy_run, tmp_path / "run"))


@pytest.mark.parametrize(("damage", "words"), [pytest.param(*d[1:], id=d[0]) for d in DAMAGES])
def test_damaged_runs(run, tmp_path, damage, words):
    damage(run)
    refused(["evaluate", run], words, folder=tmp_path)


def test_what_is_no_part_of_a_run_is_let_be(run, tmp_path):
    """Notes beside it, TensorBoard's logs."""
    (run / "notes.txt").write_text("a good one")
    gone("logs")(run)
    assert Run.open(run).result["config"]["model"] == "lr"


@pytest.mark.parametrize("which", [[], ["--best"]])
def test_a_run_of_a_sweep_has_no_model(run, tmp_path, which):
    """It read as if its checkpoints were damaged."""
    result = json.loads((run / "result.json").read_text())
    for name in ("model", "checkpoints"):
        shutil.rmtree(run / name)
        gone = [path for path in result["manifest"] if path.startswith(f"{name}/")]
        for path in gone:
            del result["manifest"][path]
    result["config"]["keeping"] = {**result["config"].get("keeping", {}), "saved_model": False}
    (run / "result.json").write_text(json.dumps(result))
    words = ["a run must have a model", str(run), "a sweep", "--config"]
    refused(["evaluate", run, *which], words, folder=tmp_path)


@pytest.mark.parametrize("make", ["nothing", "file", "folder", "link"])
def test_what_is_no_run(tmp_path, toy_data, make):
    path = tmp_path / "run"
    word = "a run must be a folder"
    if make == "file":
        path.touch()
    elif make == "folder":
        path.mkdir()
        word = "a run must be a folder that train wrote"
    elif make == "link":
        path.symlink_to("nowhere")
    refused(["evaluate", path], [word, path], folder=tmp_path)
    refused(["evaluate", path, toy_data], [word, path], folder=tmp_path)


def test_the_data_in_place_of_the_run(run, toy_data, tmp_path):
    words = ["a run must be a folder", toy_data, "prepared data: the run is named first"]
    refused(["evaluate", toy_data, run], words, folder=tmp_path)


def test_a_path_that_no_disk_takes(tmp_path):
    refused(["evaluate", tmp_path / ("x" * 5000)], ["a run must be a folder"], folder=tmp_path)


# Data


def test_data_that_moved_needs_naming_only(run, toy_data, tmp_path):
    data = shutil.copytree(toy_data, tmp_path / "data")
    moved = str(tmp_path / "old")
    without("config", "data", value=moved)(run)
    words = ["the data of a run must be where it was", moved, f"merlin-cowclip evaluate {run} DATA"]
    refused(["evaluate", run], words, folder=tmp_path)
    done = command(["evaluate", run, data])
    assert done.code == 0, done.err
    auc = json.loads((run / "result.json").read_text())["auc"]
    assert done.out.startswith(f"test AUC {auc:.6f}, ")
    behind = command(["evaluate", run, "--batch-size", 100, data, "--quiet"])
    assert (behind.code, behind.out) == (0, done.out), behind.err
    behind = command(["evaluate", run, "--quiet", "--", data])
    assert (behind.code, behind.out) == (0, done.out), behind.err
    spaced = shutil.copytree(run, tmp_path / "a run")
    words = [f"merlin-cowclip evaluate '{spaced}' DATA"]
    refused(["evaluate", spaced], words, folder=tmp_path)
    words = [f"merlin-cowclip train DATA --resume '{spaced}'"]
    config = json.loads((spaced / "config.json").read_text())
    (spaced / "config.json").write_text(json.dumps({**config, "data": moved}))
    refused(["train", "--resume", spaced, "--epochs", 2], words, folder=tmp_path)
    words = ["unrecognized arguments", "--batchsize"]
    refused(["evaluate", run, "--batchsize", 100, data], words, folder=tmp_path)


def test_its_own_data_split_anew(tmp_path):
    """What is a test row now was trained on; every id means the same."""
    log = pd.DataFrame({"y": [0, 1] * 50, "user": [0] * 60 + [1] * 40})
    log.to_csv(tmp_path / "log.csv", index=False)
    spec = DatasetSpec(name="toy", label="y", categorical=("user",))
    first, anew = (
        prepare(spec, [tmp_path / "log.csv"], tmp_path / f"{seed}", seed=seed, progress=False)
        for seed in (0, 1)
    )
    own = tmp_path / "run-of-it"
    argv = ["train", first.path, "--out", own, "--model", "lr", "--epochs", 1, "--batch-size", 32]
    assert command([*argv, "--no-saved-model"]).code == 0
    shutil.rmtree(first.path)
    anew.path.rename(first.path)
    words = ["must be what it was when it began", "it may have been trained", f"{own} {first.path}"]
    refused(["evaluate", own], words, folder=tmp_path)
    assert command(["evaluate", own, first.path]).code == 0
    shutil.rmtree(first.path)
    log.assign(user=range(100)).to_csv(tmp_path / "log.csv", index=False)
    prepare(spec, [tmp_path / "log.csv"], first.path, progress=False)
    words = ["must have the vocabulary of the run", f"raw rows (merlin-cowclip evaluate {own} LOG)"]
    refused(["evaluate", own], words, folder=tmp_path)  # and not sent to the same folder


def test_raw_with_prepared_data(run, toy_data, tmp_path):
    for given in ([], [toy_data]):
        words = ["--raw is for raw logs. Received: it with prepared data", "Leave it out"]
        refused(["evaluate", run, *given, "--raw"], [*words, *given], folder=tmp_path)


def test_named_data_that_is_none(run, tmp_path):
    words = ["input file must exist", "nowhere"]
    refused(["evaluate", run, tmp_path / "nowhere"], words, folder=tmp_path)
    refused(["evaluate", run, run], ["prepared data must hold prepare.json"], folder=tmp_path)


@pytest.mark.parametrize(
    ("log", "spec", "words"),
    [
        pytest.param({"ids": 30}, {}, ["'user' differs", "instead of"], id="more ids"),
        pytest.param({"ids": 4}, {}, ["'user' differs", "instead of"], id="fewer ids"),
        pytest.param({"seed": 5}, {}, ["unique.", "ids mean something else"], id="other ids"),
        pytest.param(
            {}, {"lists": ()}, ["'genres' differs", "(0 ids instead of"], id="a field less"
        ),
        pytest.param({}, {"continuous": ()}, ["columns of numbers", "'price'"], id="no numbers"),
        pytest.param(
            {"change": lambda log: log.assign(price=log["price"] * 10)},
            {},
            ["ranges of numbers", "'price' from [", "] instead of ["],
            id="numbers scaled otherwise",
        ),
        pytest.param(
            {"change": lambda log: log.rename(columns={"y": "bought"})},
            {"label": "bought"},
            ["the label of the run", "'bought' instead of 'y'"],
            id="another label",
        ),
    ],
)
def test_data_that_means_something_else(run, tmp_path, log, spec, words):
    spec = DatasetSpec(**{**vars(TOY), **spec})
    change = log.get("change", lambda log: log)
    path = toy_log(tmp_path / "l.csv", **{k: v for k, v in log.items() if k != "change"})
    change(pd.read_csv(path)).to_csv(path, index=False)
    data = prepare(spec, [path], tmp_path / "data", progress=False)
    words = ["the data must have the", "of the run", *words, "or train on this one"]
    refused(["evaluate", run, data.path], words, folder=tmp_path)


def relabelled(data: Path, **change: Any) -> None:
    """A value of the record changed, as another adoption would have it."""
    path = data / "prepare.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def test_a_vocabulary_is_its_ids_not_its_bytes(run, toy_data, tmp_path):
    """Written by another version of pyarrow, it has other bytes; one more field is another."""
    data = PreparedData.open(shutil.copytree(toy_data, tmp_path / "data"))
    path = data.path / CATEGORIES / "unique.user.parquet"
    before = path.read_bytes()
    pd.read_parquet(path).to_parquet(path, compression="gzip")
    assert path.read_bytes() != before
    Run.open(run).check_vocabulary(data)
    pd.DataFrame({"town": ["x"]}).to_parquet(path.with_name("unique.town.parquet"))
    with pytest.raises(UserError, match="unique.town.parquet differs"):
        Run.open(run).check_vocabulary(data)


def test_a_missing_id_is_the_same_one(tmp_path):
    """By a threshold or as the k most frequent, the same ids are kept: a missing one is 1, or 2."""
    ids = ["a"] * 50 + ["b"] * 40 + ["c"] * 30 + [""] * 20 + [f"d{i}" for i in range(10)]
    rows = "".join(f"{i % 2},{ids[i * 7 % 150]}\n" for i in range(150))
    (tmp_path / "log.csv").write_text("y,user\n" + rows)
    spec = DatasetSpec("missing", "y", ("user",))
    log = [tmp_path / "log.csv"]
    rare = prepare(replace(spec, freq_threshold=15), log, tmp_path / "rare", progress=False)
    plain = prepare(spec, log, tmp_path / "plain", progress=False)
    top = keep_top_ids(plain, 3, tmp_path / "top", progress=False)
    assert rare.cardinalities == top.cardinalities == {"user": 6}
    config = {"data": str(rare.path), "cardinalities": rare.cardinalities, **inputs_of(rare)}
    run = Run(tmp_path / "run", {"config": config})
    shutil.copytree(rare.path / "workflow", run.path / "workflow")
    run.check_vocabulary(rare)
    with pytest.raises(UserError, match=r"what is missing and unknown.*'user' as .*'missing': 2"):
        run.check_vocabulary(top)
    del config["special_ids"]  # a run of before there was such a thing
    run.check_vocabulary(top)


def test_adopted_data_is_known_by_its_workflow(run, toy_data, tmp_path):
    """What an adopted pipeline does to numbers is in its workflow alone."""
    data = Path(shutil.copytree(toy_data, tmp_path / "data"))
    pickled = data / "workflow" / "workflow.pkl"
    relabelled(data, ranges=None)
    opened = PreparedData.open(data)
    Run.open(run).check_vocabulary(opened)
    pickled.write_bytes(pickled.read_bytes() + b"more")
    with pytest.raises(UserError, match="must come from the pipeline of the run"):
        Run.open(run).check_vocabulary(opened)
    opened.record["workflow_sha256"] = checksum(toy_data / "workflow" / "workflow.pkl")
    Run.open(run).check_vocabulary(opened)
