"""Damaged prepared folders: every command that opens one refuses it in a sentence, before it works.

`frequencies` opens a folder as every command does, and without TensorFlow: the table goes through
it. That the others do the same is asked of all of them, with one damage of each kind.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from merlin_cowclip.workflows.data.datasets import DatasetSpec, Split
from merlin_cowclip.workflows.data.etl import prepare
from merlin_cowclip.workflows.training.runs import Run
from tests.bad_input.contract import command, refused

ROWS = 400
SPEC = DatasetSpec(
    name="toy",
    label="y",
    categorical=("user", "item"),
    continuous=("price",),
    lists=("genres",),
    split=Split("random", 0.25),
)


def forget(beginning: str) -> Callable[[dict[str, Any]], None]:
    """A record whose manifest lacks what begins so."""

    def change(record: dict[str, Any]) -> None:
        names = record["manifest"]
        record["manifest"] = {n: e for n, e in names.items() if not n.startswith(beginning)}

    return change


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Fields of ids that have the same number of ids, so that files can take each other's place."""
    home = tmp_path_factory.mktemp("prepared")
    random = np.random.default_rng(0)
    pd.DataFrame(
        {
            "y": random.integers(0, 2, ROWS),
            "user": random.integers(0, 9, ROWS),
            "item": random.integers(0, 9, ROWS),
            "price": random.normal(5, 3, ROWS).round(2),
            "genres": [f"g{g}|g{g + 1}" for g in random.integers(0, 5, ROWS)],
        }
    ).to_csv(home / "log.csv", index=False)
    return prepare(SPEC, [home / "log.csv"], home / "data", progress=False).path


@pytest.fixture
def data(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "data"))


@pytest.fixture
def old(data) -> Path:
    """As a version without manifests left it."""
    edit(data, lambda record: (record.pop("manifest"), record.update(format=1)))
    return data


def edit(data: Path, change: Callable[[dict], Any]) -> None:
    record = json.loads((data / "prepare.json").read_text(encoding="utf-8"))
    change(record)
    (data / "prepare.json").write_text(json.dumps(record), encoding="utf-8")


def part(data: Path, name: str = "train") -> Path:
    return sorted((data / name).glob("*.parquet"))[0]


def half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def rewritten(path: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    pq.write_table(change(pq.read_table(path)), path)


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def swapped(one: Path, other: Path) -> None:
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def without(data: Path, name: str) -> None:
    path = data / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def vocabulary(data: Path, field: str) -> Path:
    return data / "workflow" / "categories" / f"unique.{field}.parquet"


AGAIN = "Prepare the data again"
KEPT = "prepared data must keep every file as it was written"
DAMAGES = {
    "half a training part": (lambda d: half(part(d)), [KEPT, "train/part", "bytes, which had"]),
    "half a test part": (lambda d: half(part(d, "test")), [KEPT, "test/part", "which had"]),
    "an empty training part": (lambda d: os.truncate(part(d), 0), ["train/part", "of 0 bytes"]),
    "no training part": (lambda d: part(d).unlink(), ["train/part", "which is gone"]),
    "no test part": (lambda d: part(d, "test").unlink(), ["test/part", "which is gone"]),
    "no folder train": (lambda d: without(d, "train"), ["train/part", "which is gone"]),
    "no folder test": (lambda d: without(d, "test"), ["test/part", "which is gone"]),
    "a part of fewer rows": (
        lambda d: rewritten(part(d), lambda t: t.slice(1)),
        ["train/part", "which had"],
    ),
    "a part in another order": (
        lambda d: rewritten(part(d), lambda t: t.take(np.arange(len(t))[::-1])),
        [KEPT, "train/part"],
    ),
    "a part with one bit changed": (lambda d: flipped(part(d)), ["train/part", "content"]),
    "parts that changed places": (lambda d: swapped(part(d), part(d, "test")), ["train/part"]),
    "a part that is a folder": (
        lambda d: (p := part(d), p.unlink(), p.mkdir()),
        [KEPT, "train/part"],
    ),
    "one part more": (
        lambda d: shutil.copy(part(d), d / "train" / "more.parquet"),
        ["train/more.parquet, which was not", "Take it out"],
    ),
    "a link to nowhere": (
        lambda d: (p := part(d), p.unlink(), p.symlink_to(d / "nowhere")),
        ["train/part", "which is gone"],
    ),
    "no schema": (lambda d: without(d, "schema.pbtxt"), ["schema.pbtxt", "which is gone", AGAIN]),
    "a cut schema": (lambda d: half(d / "schema.pbtxt"), ["schema.pbtxt", "bytes, which had"]),
    "an empty schema": (lambda d: os.truncate(d / "schema.pbtxt", 0), ["schema.pbtxt", "of 0 byt"]),
    "another schema": (lambda d: flipped(d / "schema.pbtxt"), ["schema.pbtxt", "content"]),
    "no workflow": (lambda d: without(d, "workflow"), ["workflow/", "which is gone"]),
    "no workflow.pkl": (lambda d: without(d, "workflow/workflow.pkl"), ["workflow.pkl", "gone"]),
    "a cut workflow.pkl": (lambda d: half(d / "workflow" / "workflow.pkl"), ["workflow.pkl, of"]),
    "no metadata.json": (lambda d: without(d, "workflow/metadata.json"), ["metadata.json", "gone"]),
    "no vocabulary": (lambda d: vocabulary(d, "user").unlink(), ["unique.user", "which is gone"]),
    "vocabularies that changed places": (
        lambda d: swapped(vocabulary(d, "user"), vocabulary(d, "item")),
        [KEPT, "workflow/categories/unique.item.parquet"],
    ),
    "no counts": (lambda d: without(d, "counts"), ["counts/genres.parquet, which is gone"]),
    "no counts of a field": (lambda d: without(d, "counts/user.parquet"), ["user.parquet", "gone"]),
    "counts of another field": (
        lambda d: shutil.copy(d / "counts" / "user.parquet", d / "counts" / "item.parquet"),
        [KEPT, "counts/item.parquet"],
    ),
    "counts with one more": (
        lambda d: rewritten(
            d / "counts" / "user.parquet",
            lambda t: t.set_column(2, "count", pa.array(t["count"].to_numpy() + 1)),
        ),
        [KEPT, "counts/user.parquet"],
    ),
    "no .merlin": (lambda d: without(d, ".merlin"), [".merlin/schema.json, which is gone"]),
    "no record": (
        lambda d: without(d, "prepare.json"),
        ["prepare.json", "written last"],
    ),
    "a record cut": (lambda d: half(d / "prepare.json"), ["readable JSON", "prepare.json", AGAIN]),
    "an empty record": (lambda d: os.truncate(d / "prepare.json", 0), ["readable JSON", AGAIN]),
    "a record that is a folder": (
        lambda d: (without(d, "prepare.json"), (d / "prepare.json").mkdir()),
        ["readable JSON", "prepare.json", AGAIN],
    ),
    "a record in UTF-16": (
        lambda d: (d / "prepare.json").write_bytes("{}".encode("utf-16")),
        ["readable JSON", "prepare.json"],
    ),
    "a record a thousand lists deep": (
        lambda d: (d / "prepare.json").write_text("[" * 100_000),
        ["readable JSON", "prepare.json"],
    ),
    "a record of nothing": (lambda d: (d / "prepare.json").write_text("{}"), ["of format", "None"]),
    "a record that is a list": (lambda d: (d / "prepare.json").write_text("[1]"), ["None"]),
    "a record that is null": (lambda d: (d / "prepare.json").write_text("null"), ["None"]),
    "a format to come": (lambda d: edit(d, lambda r: r.update(format=99)), ["99", "this version"]),
    "a format that is true": (lambda d: edit(d, lambda r: r.update(format=True)), ["True"]),
    "a format of 2.0": (
        lambda d: edit(d, lambda r: r.update(format=2.0)),
        ["2.0"],
    ),
    "a format that is text": (lambda d: edit(d, lambda r: r.update(format="2")), ["'2'"]),
    "a format that is a list": (lambda d: edit(d, lambda r: r.update(format=[2])), ["[2]"]),
    "a manifest without the workflow": (
        lambda d: edit(d, forget("workflow/")),
        ["must have", "workflow/", "Prepare the data again"],
    ),
    "a manifest without a field's counts": (
        lambda d: edit(d, forget("counts/item.parquet")),
        ["must have", "counts/item.parquet"],
    ),
    "a manifest with a name that is none": (
        lambda d: edit(d, lambda r: r["manifest"].update({"a\0b": {"bytes": 1, "sha256": ""}})),
        ["must keep every file", "cannot be read"],
    ),
    "nothing but a format": (
        lambda d: (d / "prepare.json").write_text('{"format": 2}'),
        ["'spec'", "none", "prepare.json", AGAIN],
    ),
    **{
        f"no {key} in the record": (
            lambda d, key=key: edit(d, lambda r: r.pop(key)),
            [repr(key), "Received: none", "prepare.json", AGAIN],
        )
        for key in ("spec", "rows", "cardinalities", "report", "manifest")
    },
    **{
        f"{key} that is {value!r}": (
            lambda d, key=key, value=value: edit(d, lambda r: r.update({key: value})),
            [repr(key), "another value", "prepare.json", AGAIN],
        )
        for key, value in (
            ("spec", []),
            ("rows", 5),
            ("rows", {"train": 5}),
            ("rows", {"train": 0, "test": 5}),
            ("rows", {"train": "5", "test": 5}),
            ("rows", {"train": 5.0, "test": 5}),
            ("cardinalities", None),
            ("report", "none"),
            ("seed", -1),
            ("seed", "one"),
            ("manifest", {"schema.pbtxt": None}),
            ("manifest", []),
            ("files", {"train": [{"path": "x"}], "test": []}),
            ("files", {"train": []}),
        )
    },
    "rows that are others": (
        lambda d: edit(d, lambda r: r["rows"].update(train=299)),
        ["train/part", "a train part of 300 rows, which had 299"],
    ),
    "a cardinality too few": (
        lambda d: edit(d, lambda r: r["cardinalities"].pop("user")),
        ["positive cardinality", "prepare.json", AGAIN],
    ),
    "a cardinality of 0": (
        lambda d: edit(d, lambda r: r["cardinalities"].update(user=0)),
        ["positive cardinality", "prepare.json"],
    ),
    "a specification without a label": (
        lambda d: edit(d, lambda r: r["spec"].pop("label")),
        ["prepare.json: 'label' must be given", AGAIN],
    ),
    "a specification with a key more": (
        lambda d: edit(d, lambda r: r["spec"].update(more=1)),
        ["prepare.json", "Received: 'more'"],
    ),
    "a specification of text": (
        lambda d: edit(d, lambda r: r["spec"].update(categorical="user")),
        ["prepare.json", "categorical must be a list of column names"],
    ),
    "a specification with a split of its own": (
        lambda d: edit(d, lambda r: r["spec"].update(split={"kind": ["random"], "test": {}})),
        ["prepare.json", "split.kind must be one of"],
    ),
    "a specification with another field": (
        lambda d: edit(
            d,
            lambda r: (
                r["spec"]["categorical"].append("more"),
                r["cardinalities"].update(more=5),
            ),
        ),
        ["manifest", "counts/more.parquet"],
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder(data, tmp_path, damage):
    hurt, words = DAMAGES[damage]
    hurt(data)
    refused(["frequencies", data], words, folder=tmp_path)


OLD_DAMAGES = {
    "half a part": (lambda d: half(part(d)), ["train/part", "no whole parquet file"]),
    "a part that is text": (
        lambda d: part(d).write_text("ids"),
        ["train/part", "no whole"],
    ),
    "fewer rows": (
        lambda d: rewritten(part(d), lambda t: t.slice(0, 150)),
        ["train/part", "a train part of 150 rows, which had 300"],
    ),
    "no test part": (lambda d: part(d, "test").unlink(), ["test", "of 0 rows, which had 100"]),
    "no folder test": (lambda d: without(d, "test"), ["test", "of 0 rows, which had 100"]),
    "no folder train": (lambda d: without(d, "train"), ["train", "of 0 rows, which had 300"]),
    "one part more": (
        lambda d: shutil.copy(part(d), d / "train" / "more.parquet"),
        ["train/", "a train part of 600 rows, which had 300"],
    ),
    "a column less": (
        lambda d: rewritten(part(d), lambda t: t.drop(["price"])),
        ["train/part", "without column 'price'"],
    ),
    "no schema": (lambda d: without(d, "schema.pbtxt"), ["schema.pbtxt, which is gone"]),
    "no workflow": (lambda d: without(d, "workflow"), ["workflow/metadata.json, which is gone"]),
    "no workflow.pkl": (lambda d: without(d, "workflow/workflow.pkl"), ["workflow.pkl", "gone"]),
    "no counts": (lambda d: without(d, "counts"), ["counts/user.parquet, which is gone"]),
    "no rows": (lambda d: edit(d, lambda r: r.pop("rows")), ["'rows'", "none"]),
    "cut counts": (lambda d: half(d / "counts" / "user.parquet"), ["counts", "user.parquet"]),
    "counts of another field": (
        lambda d: shutil.copy(d / "counts" / "genres.parquet", d / "counts" / "item.parquet"),
        ["counts/item.parquet", "of 9 ids, where the field has 12", AGAIN],
    ),
    "counts of other rows": (
        lambda d: rewritten(
            d / "counts" / "user.parquet",
            lambda t: t.set_column(2, "count", pa.array(2 * t["count"].to_numpy())),
        ),
        ["counts/user.parquet", "600 occurrences in 300 rows", AGAIN],
    ),
    "counts in another order": (
        lambda d: rewritten(
            d / "counts" / "user.parquet", lambda t: t.take(np.arange(len(t))[::-1])
        ),
        ["counts/user.parquet", "in another order", AGAIN],
    ),
    "counts without a count": (
        lambda d: rewritten(d / "counts" / "user.parquet", lambda t: t.drop(["count"])),
        ["counts/user.parquet", "'count'", AGAIN],
    ),
    "counts that are text": (
        lambda d: rewritten(
            d / "counts" / "user.parquet",
            lambda t: t.set_column(2, "count", t["count"].cast(pa.string())),
        ),
        ["counts/user.parquet", "string", AGAIN],
    ),
    "a count that is null": (
        lambda d: rewritten(
            d / "counts" / "user.parquet",
            lambda t: t.set_column(
                2, "count", pa.array([None, *t["count"].to_pylist()[1:]], pa.int64())
            ),
        ),
        ["counts/user.parquet", "null", AGAIN],
    ),
    "a count below 0": (
        lambda d: rewritten(
            d / "counts" / "user.parquet",
            lambda t: t.set_column(2, "count", pa.array([-1, *t["count"].to_pylist()[1:]])),
        ),
        ["counts/user.parquet", "below 0", AGAIN],
    ),
}


@pytest.mark.parametrize("damage", OLD_DAMAGES)
def test_a_damaged_folder_of_an_older_version(old, tmp_path, damage):
    hurt, words = OLD_DAMAGES[damage]
    hurt(old)
    refused(["frequencies", old], words, folder=tmp_path)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda p: os.truncate(p, 0), ["schema.pbtxt", "without 'y'"]),
        (half, ["schema.pbtxt", AGAIN]),
        (lambda p: p.write_text("a schema"), ["schema.pbtxt", AGAIN]),
        (lambda p: p.write_bytes(b"\xff\xfe"), ["schema.pbtxt", AGAIN]),
    ],
    ids=["empty", "cut", "text", "no text"],
)
def test_the_schema_of_an_older_folder_is_read_by_top_k_and_train(old, tmp_path, damage, words):
    damage(old / "schema.pbtxt")
    refused(["frequencies", old, "--top-k", 2, "--out", tmp_path / "top"], words, folder=tmp_path)


def test_an_older_folder_that_is_whole_is_taken(old, tmp_path):
    """But for its workflow, which no manifest confirms."""
    assert command(["frequencies", old]).code == 0
    words = ["manifest lacks workflow/workflow.pkl", AGAIN, "workflow(trust=True)"]
    refused(["frequencies", old, "--top-k", 2, "--out", tmp_path / "top"], words, folder=tmp_path)


# Whatever the command


EVERY_COMMAND = [
    ["frequencies", "DATA"],
    ["frequencies", "DATA", "--top-k", 2, "--out", "OUT"],
    ["train", "DATA", "--out", "OUT", "--batch-size", 64],
    ["evaluate", "RUN", "DATA"],
]
OF_EACH_KIND = ["half a test part", "no workflow", "counts of another field", "one part more"]
OF_EACH_KIND += ["no rows in the record", "a record cut"]


@pytest.mark.parametrize("damage", OF_EACH_KIND)
@pytest.mark.parametrize("argv", EVERY_COMMAND, ids=lambda argv: " ".join(map(str, argv)))
def test_every_command_looks_first(data, tmp_path, monkeypatch, argv, damage):
    hurt, words = DAMAGES[damage]
    hurt(data)
    run = Run(tmp_path, {"config": {}})
    monkeypatch.setattr(Run, "open", lambda path, **_: run)
    places = {"DATA": data, "OUT": tmp_path / "out", "RUN": tmp_path}
    refused([places.get(word, word) for word in argv], words, folder=tmp_path)


def test_train_refuses_before_tensorflow_is_imported(data):
    half(part(data))
    program = (
        "import sys\n"
        "from merlin_cowclip.workflows.commands.main import main\n"
        "code = main(sys.argv[1:])\n"
        "sys.exit(code if 'tensorflow' not in sys.modules else 99)"
    )
    argv = [sys.executable, "-c", program, "train", data, "--out", data.parent / "run"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert KEPT in done.stderr


# Folders that are whole, wherever they lie


@pytest.mark.parametrize("name", ["with spaces", "-[ünïcode]*? 100% ☃"])
def test_a_folder_may_move(data, tmp_path, name):
    moved = data.rename(tmp_path / name)
    done = command(["frequencies", f"{moved}", "--out", tmp_path / "out"])
    assert (done.code, name in done.out or "out" in done.out) == (0, True), done.err
    top = tmp_path / "top" / name
    assert command(["frequencies", moved, "--top-k", 2, "--out", top]).code == 0
    assert command(["frequencies", top, "--out", tmp_path / "of-top"]).code == 0


def test_a_folder_may_be_a_link_and_have_parts_that_are(data, tmp_path):
    (data / "train").rename(tmp_path / "elsewhere")
    (data / "train").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "link").symlink_to(data)
    done = command(["frequencies", tmp_path / "link", "--out", tmp_path / "out"])
    assert done.code == 0, done.err


def test_what_a_file_browser_leaves_is_no_part(data, tmp_path):
    (data / "train" / "._part.0.parquet").write_bytes(b"\0")
    (data / ".DS_Store").touch()
    (data / "notes.txt").touch()
    assert command(["frequencies", data]).code == 0


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("nowhere", ["must be a folder", "nowhere", "merlin-cowclip prepare"]),
        ("log.csv", ["must be a folder", "log.csv"]),
        ("log.csv/data", ["must be a folder", "log.csv/data"]),
        ("data/train", ["prepare.json", "data/train"]),
        ("x" * 300, ["must be a folder"]),
        ("loop", ["must be a folder", "loop"]),
    ],
)
def test_what_is_no_prepared_folder(data, tmp_path, place, words):
    (tmp_path / "log.csv").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    refused(["frequencies", tmp_path / place], words, folder=tmp_path)
