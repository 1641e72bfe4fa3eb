"""Parquet whose schema is a pickle runs nothing, whichever of our doors it comes in by."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from merlin_cowclip.workflows.commands.main import main

DOORS = ["sources.base", "adopt.parquet_files", "prepared_data"]


class RunsCode(pa.PyExtensionType):
    """When it is unpickled it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__(pa.int64())

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.fixture
def evil(tmp_path) -> Path:
    """A log whose first column would touch `ran`."""
    column = pa.ExtensionArray.from_storage(RunsCode(tmp_path / "ran"), pa.array([0, 1] * 20))
    others = {name: pa.array(["a"] * 40) for name in ("user", "item")}
    path = tmp_path / "evil.parquet"
    pq.write_table(pa.table({"y": column, **others}), path)
    return path


def read_by(evil: Path, *modules: str) -> str:
    """What Python says of it."""
    lines = [f"import {module}" for module in modules]
    lines += ["import pyarrow.parquet as pq", f"pq.ParquetFile({str(evil)!r})"]
    argv = [sys.executable, "-c", "\n".join(lines)]
    return subprocess.run(argv, capture_output=True, text=True, check=False).stderr


def test_pyarrow_alone_runs_it(evil, tmp_path):
    """Else there is no need of the module any more."""
    read_by(evil)
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("door", DOORS)
def test_what_reads_parquet_refuses_first(evil, tmp_path, door):
    assert "type is a pickle" in read_by(evil, f"merlin_cowclip.workflows.data.{door}")
    assert not (tmp_path / "ran").exists()


def test_it_is_refused_in_a_sentence(evil, tmp_path, capsys):
    toml = tmp_path / "log.toml"
    toml.write_text('name = "x"\nlabel = "y"\ncategorical = ["user", "item"]\nformat = "parquet"\n')
    assert main(["prepare", str(toml), str(evil), "--out", str(tmp_path / "data")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    for words in ("evil.parquet", "a column's type is a pickle", "Write it again"):
        assert words in line
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "data").exists()
