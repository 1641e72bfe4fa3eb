"""What `prepare` refuses on the command line, and prepared folders that are damaged.

Rules of a description are tested in test_spec, those of cells and types in test_sources.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from merlin_cowclip.workflows.data.prepare.pipeline import prepare
from tests.logs import CLICKS, write_log
from tests.refused import command, refused

SPEC = """
name = "toy"
label = "y"
categorical = ["user"]
continuous = ["price"]
lists = ["tags"]
split = { kind = "sequential", test = 0.5, valid = 0 }
"""
HEAD = "y,user,price,tags\n"
ROWS = "1,a,1.5,x|y\n0,b,2,\n1,a,,x\n0,,4,z\n" * 20


def preparing(folder: Path, log: str = HEAD + ROWS, spec: str = SPEC, name="log.csv") -> list[Any]:
    """The command that prepares that log by that description."""
    (folder / "toy.toml").write_text(spec)
    (folder / name).write_text(log)
    return ["prepare", folder / "toy.toml", folder / name, "--out", folder / "new" / "data"]


def check(argv: list[Any], words: str, folder: Path) -> None:
    refused(argv, words.split(" … "), folder=folder)


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (HEAD, "log.csv has no rows"),
        (HEAD + "0,,1,x\n1,,2,y\n" * 40, "column 'user' has no value in the 40 training rows"),
        (HEAD + "0,a,,x\n1,b,,y\n" * 40, "column 'price' has no value"),
        (HEAD + "0,a,1,\n1,b,2,\n" * 40, "column 'tags' has no value"),
    ],
    ids=["header only", "no id", "no number", "no list"],
)
def test_text(tmp_path, log, words):
    check(preparing(tmp_path, log), words, tmp_path)


@pytest.mark.parametrize("value", ["user=", "user=x", "user=3,user=5"])
def test_numbers_by_field(tmp_path, value):
    check(
        [*preparing(tmp_path), "--freq-threshold", value], f"each once: C3=10 … {value}", tmp_path
    )


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def spoil_page(path: Path) -> None:
    content = path.read_bytes()
    place = pq.read_metadata(path).row_group(0).column(1).data_page_offset
    path.write_bytes(content[:place] + b"\xff" * 30 + content[place + 30 :])


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (cut, "log.parquet is not a whole parquet file"),
        (spoil_page, "cannot read input file … log.parquet: … write the file again"),
        (lambda path: path.write_text(HEAD), "log.parquet is not parquet, but may be CSV"),
        (lambda path: pq.write_table(pq.read_table(path)[:0], path), "has no rows"),
    ],
    ids=["cut", "spoiled", "csv", "no row"],
)
def test_parquet(tmp_path, spoil, words):
    argv = preparing(tmp_path, "", SPEC + "format = 'parquet'", name="log.parquet")
    columns = {"y": [1, 0] * 40, "user": ["a", "b"] * 40, "price": [1.0, 2.0] * 40}
    pq.write_table(pa.table({**columns, "tags": [["x"], []] * 40}), tmp_path / "log.parquet")
    spoil(tmp_path / "log.parquet")
    check(argv, words, tmp_path)


# Files, folders and the machine


def test_a_full_disk(tmp_path, monkeypatch):
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("merlin_cowclip.workflows.data.prepare.fit.write_vocabulary", full)
    check(preparing(tmp_path), "No space left on device. Free some … another disk", tmp_path)


# Prepared folders


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("prepared")
    return prepare(CLICKS, [write_log(home / "log.csv")], home / "data", progress=False).path


@pytest.fixture
def data(prepared, tmp_path) -> Path:
    return Path(shutil.copytree(prepared, tmp_path / "data"))


def other_format(data: Path) -> None:
    record = json.loads((data / RECORD).read_text())
    (data / RECORD).write_text(json.dumps({**record, "format": 99}))


TRAIN, TEST = "train/part-00000.parquet", "test/part-00000.parquet"
RECORD = "prepare.json"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "half a part": (lambda d: cut(d / TEST), f"as it was written … {TEST} has changed"),
    "no part": (lambda d: (d / TRAIN).unlink(), f"{TRAIN} cannot be read … Prepare the data again"),
    "no record": (lambda d: (d / RECORD).unlink(), "not a folder that prepare or adopt wrote"),
    "half a record": (lambda d: cut(d / RECORD), "not a folder … prepare.json … write it again"),
    "to come": (other_format, "prepare.json has format 99 instead of 4 … this version"),
    "no folder": (shutil.rmtree, "is not a folder that prepare or adopt wrote"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder(data, tmp_path, damage):
    hurt, words = DAMAGES[damage]
    hurt(data)
    check(["frequencies", data], words, tmp_path)


def test_a_folder_may_be_moved_and_have_notes(data, tmp_path):
    (data / "train" / "._part-00000.parquet").write_bytes(b"\0")
    (data / "notes.txt").touch()
    moved = data.rename(tmp_path / "-[ünïcode]*? 100% ☃")
    done = command(["frequencies", moved])
    assert done.code == 0, done.err
