"""What `prepare` and `adopt` refuse, one case for each rule; and prepared folders that are damaged.

Every case goes through the command line: one sentence, exit code 2, nothing left (`refused`). The
tables hold the parts of the sentence, with … between them. The rules of a data set's description
are tested one by one in test_spec, those of cells and types in test_sources.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from merlin_cowclip.workflows.data.prepare.pipeline import prepare
from merlin_cowclip.workflows.data.sources import csv
from merlin_cowclip.workflows.training.runs import Run
from tests.refused import TOY, command, refused, toy_log

SPEC = """
name = "toy"
label = "y"
categorical = ["user"]
continuous = ["price"]
lists = ["tags"]
split = { kind = "sequential", test = 0.5, valid = 0 }
"""
BY_TIME = SPEC.replace('"sequential"', '"time", column = "user"')
HEAD = "y,user,price,tags\n"
ROWS = "1,a,1.5,x|y\n0,b,2,\n1,a,,x\n0,,4,z\n" * 20
TIMES = HEAD + "1,7,1,x\n0,{0},2,x\n" * 9


def preparing(folder: Path, log: Any = HEAD + ROWS, spec: Any = SPEC, name="log.csv") -> list[Any]:
    """The command that prepares that log by that description."""
    for path, content in ((folder / "toy.toml", spec), (folder / name, log)):
        text = isinstance(content, str)
        path.write_bytes(content.encode("utf-8", "surrogateescape") if text else content)
    return ["prepare", folder / "toy.toml", folder / name, "--out", folder / "new" / "data"]


def check(argv: list[Any], words: str, folder: Path) -> None:
    refused(argv, words.split(" … "), folder=folder)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--split time --time-column hour", "log.csv has no column 'hour'"),
        ("--split time --time-column user", "log.csv, line 2, column 'user': the time 'a' is not"),
        ("--test nan", "split.test must be a share from 0 to below 1, or files … nan"),
        ("--test 1e-9", "the test part has 0 rows with label 0 and 0 with label 1"),
        ("--freq-threshold user=", "--freq-threshold … 'user=' … C3=10"),
        ("--freq-threshold user=3,user=5", "each once: C3=10,C4=5. Received: 'user=3,user=5'"),
        ("--freq-threshold price=3", "freq_threshold must name fields … 'price'"),
        ("--freq-threshold 1000", "no id of 'user' occurs 1,000 times … Lower it"),
    ],
)
def test_options(tmp_path, options, words):
    check([*preparing(tmp_path), *options.split()], words, tmp_path)


# Text


def no(column: int) -> str:
    """A log without a value in that column."""
    rows = [["01"[i % 2], "a", "1", "x"] for i in range(80)]
    return HEAD + "".join(",".join([*row[:column], "", *row[column + 1 :]]) + "\n" for row in rows)


LOGS: dict[str, tuple[str | bytes, str]] = {
    "header only": (HEAD, "log.csv has no rows"),
    "all clicks": (HEAD + "1,a,1,x\n" * 80, "the training part has 0 rows with label 0"),
    "no id": (no(1), "column 'user' has no value in the 40 training rows"),
    "no number": (no(2), "column 'price' has no value"),
    "no list": (no(3), "column 'tags' has no value"),
}
SPECS = {
    "deep": ("x = " + "[" * 3000, HEAD, "toy.toml as TOML: "),
    "no text": (SPEC.encode("utf-16"), HEAD, "toy.toml as TOML: "),
    "one time": (BY_TIME, TIMES.format(7), "all 18 rows … have the same time, column 'user'"),
}


@pytest.mark.parametrize("log", LOGS)
def test_text(tmp_path, log):
    text, words = LOGS[log]
    check(preparing(tmp_path, text), words, tmp_path)


@pytest.mark.parametrize("spec", SPECS)
def test_descriptions(tmp_path, spec):
    text, log, words = SPECS[spec]
    check(preparing(tmp_path, log, text), words, tmp_path)


def test_a_row_too_long(tmp_path, monkeypatch):
    """16 MiB, but for this test."""
    monkeypatch.setattr(csv, "BLOCK_BYTES", 20_000)
    argv = preparing(tmp_path, HEAD + '1,"' + "a\n" * 50_000 + '",1,x\n' + ROWS)
    check(argv, "log.csv, line 2: a quoted cell … field limit", tmp_path)


# Parquet


def write(path: Path) -> None:
    columns = {"y": [1, 0] * 40, "user": ["a", "b"] * 40, "price": [1.0, 2.0] * 40}
    pq.write_table(pa.table({**columns, "tags": [["x"], []] * 40}), path)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def garbled(path: Path) -> None:
    """A page spoiled; the footer is whole."""
    content = path.read_bytes()
    place = pq.read_metadata(path).row_group(0).column(1).data_page_offset
    path.write_bytes(content[:place] + b"\xff" * 30 + content[place + 30 :])


PARQUET: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut": (cut, "log.parquet is not a whole parquet file"),
    "garbled": (garbled, "cannot read input file … log.parquet: … write the file again"),
    "csv": (lambda path: path.write_text(HEAD), "log.parquet is not parquet, but may be CSV"),
    "no row": (lambda path: pq.write_table(pq.read_table(path)[:0], path), "has no rows"),
}


@pytest.mark.parametrize("harm", PARQUET)
def test_parquet(tmp_path, harm):
    spoil, words = PARQUET[harm]
    argv = preparing(tmp_path, b"", SPEC + "format = 'parquet'", name="log.parquet")
    write(tmp_path / "log.parquet")
    spoil(tmp_path / "log.parquet")
    check(argv, words, tmp_path)


# Files, folders and the machine


@pytest.mark.parametrize(
    ("out", "words"),
    [
        ("dangling", "must not exist … dangling"),
        ("log.csv/data", "can be written … log.csv"),
    ],
    ids=["there", "in a file"],
)
def test_outputs(tmp_path, monkeypatch, out, words):
    monkeypatch.chdir(tmp_path)
    Path("dangling").symlink_to("gone")
    check([*preparing(tmp_path)[:-1], out], words, tmp_path)


@pytest.mark.parametrize(
    ("name", "mode", "words"),
    [
        ("log.csv", 0, "cannot read input file … log.csv … Permission denied"),
        ("new", 0o555, "can be written … new"),
    ],
)
def test_what_may_not_be_read_or_written(name, mode, words):
    """As another user, for root may do everything."""
    folder, root = Path(tempfile.mkdtemp(prefix="cowclip-")), os.geteuid() == 0
    argv = preparing(folder)
    (folder / "new").mkdir()
    (folder / "new").chmod(0o777)
    (folder / name).chmod(mode)
    folder.chmod(0o777)
    try:
        if root:
            os.setresuid(65534, 65534, 0)  # os.access asks for the real one
        check(argv, words, folder)
    finally:
        if root:
            os.setresuid(0, 0, 0)
        shutil.rmtree(folder)


def test_a_full_disk(tmp_path, monkeypatch):
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("merlin_cowclip.workflows.data.prepare.fit.write_vocabulary", full)
    check(preparing(tmp_path), "No space left on device. Free some … another disk", tmp_path)


# Adopted parquet


def save(home: Path, nodes: Callable[[Any], Any]) -> Path:
    """A workflow of NVTabular's own, and the parquet that it writes."""
    from merlin_cowclip.workflows.quiet import quiet_imports

    with quiet_imports():
        import nvtabular as nvt
        from merlin.io import Dataset
    log = pd.DataFrame({"click": [0, 1] * 30, "user": [*range(6)] * 10, "price": 1.5})
    workflow = nvt.Workflow(nodes(nvt.ops))
    rows = workflow.fit_transform(Dataset(log)).to_ddf().compute()
    workflow.save(str(home / "workflow"))
    table = pa.Table.from_pandas(rows, preserve_index=False)
    pq.write_table(table, home / "train.parquet", row_group_size=25)
    return home


@pytest.fixture(scope="module")
def adoptable(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("adopt")
    out = str(home / "fitted")
    return save(home, lambda ops: (["user"] >> ops.Categorify(out_path=out)) + ["price", "click"])


@pytest.fixture
def place(adoptable, tmp_path) -> Path:
    """workflow/ and train.parquet, to be spoiled."""
    return Path(shutil.copytree(adoptable, tmp_path / "place"))


def adopt(place: Path, parquet: str = "train.parquet") -> list[Any]:
    places = ["--workflow", place / "workflow", "--out", place / "out"]
    return ["adopt", place / parquet, *places, "--label", "click"]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: pq.write_table(pq.read_table(path)[:0], path), "train.parquet has no rows"),
        (
            lambda path: (path.parent / "workflow/workflow.pkl").unlink(),
            "workflow does not load … workflow.pkl … save it again",
        ),
    ],
    ids=["no row", "no pickle"],
)
def test_adopted_parquet(place, spoil, words):
    """The rules of rows, types and workflows are tested in test_adopt."""
    spoil(place / "train.parquet")
    check(adopt(place), words, place)


def test_adopted_parquet_that_changed(place):
    done = command(adopt(place))
    assert done.code == 0, done.err
    path, taken = place / "train.parquet", (place / "train.parquet").stat()
    garbled(path)
    os.utime(path, ns=(taken.st_atime_ns, taken.st_mtime_ns))  # its size and time are the same
    argv = ["frequencies", place / "out"]
    check(argv, "adopted parquet … train.parquet has changed", place)
    path.unlink()
    check(argv, "adopted parquet … train.parquet cannot be read (No such file … Put it back", place)


# Prepared folders


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("prepared")
    return prepare(TOY, [toy_log(home / "log.csv")], home / "data", progress=False).path


@pytest.fixture
def data(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "data"))


def edited(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """The record changed."""

    def edit(data: Path) -> None:
        record = json.loads((data / "prepare.json").read_text())
        change(record)
        (data / "prepare.json").write_text(json.dumps(record))

    return edit


TRAIN, TEST = "train/part-00000.parquet", "test/part-00000.parquet"
RECORD = "prepare.json"
KEPT = "prepared data must keep every file as it was written"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "half a part": (lambda d: cut(d / TEST), f"{KEPT} … {TEST} has changed … bytes; it had"),
    "a part gone": (lambda d: (d / TRAIN).unlink(), f"{TRAIN} cannot be read"),
    "a part spoiled": (lambda d: garbled(d / TRAIN), f"{KEPT} … {TRAIN} has changed"),
    "no workflow": (lambda d: shutil.rmtree(d / "workflow"), "workflow/ … cannot be read"),
    "no record": (
        lambda d: (d / RECORD).unlink(),
        "not a folder that prepare or adopt wrote … prepare.json",
    ),
    "a record cut": (lambda d: cut(d / RECORD), "not a folder … prepare.json … write it again"),
    "to come": (
        edited(lambda r: r.update(format=99)),
        "prepare.json has format 99 instead of 4 … this version",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder(data, tmp_path, damage):
    hurt, words = DAMAGES[damage]
    hurt(data)
    check(["frequencies", data], words, tmp_path)


def test_every_command_looks_at_the_folder_first(data, tmp_path, monkeypatch):
    cut(data / TEST)
    monkeypatch.setattr(Run, "open", lambda path, **_: Run(tmp_path, {"config": {"ranges": None}}))
    out, grid = ["--out", tmp_path / "out"], tmp_path / "grid.toml"
    for argv in (
        ["train", data, *out],
        ["tune", data, "--batch-size", 64, *out],
        ["sweep", data, grid, *out],
        ["evaluate", tmp_path, data],
    ):
        check(argv, f"{KEPT} … {TEST}", tmp_path)


def test_what_is_no_prepared_folder_and_what_is_none_of_it(data, tmp_path):
    for path in (tmp_path / "nowhere", data / RECORD, tmp_path / ("x" * 300)):
        check(["frequencies", path], "is not a folder that prepare or adopt wrote", tmp_path)
    (data / "train" / "._part-00000.parquet").write_bytes(b"\0")
    (data / "notes.txt").touch()
    moved = data.rename(tmp_path / "-[ünïcode]*? 100% ☃")
    done = command(["frequencies", moved])
    assert done.code == 0, done.err
