"""Csv logs, read in blocks: no row depends on where one ends."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from merlin_cowclip.workflows.data import csv_text
from merlin_cowclip.workflows.data.csv_logs import CsvLog
from merlin_cowclip.workflows.data.datasets import DatasetSpec
from merlin_cowclip.workflows.errors import UserError

SPEC = DatasetSpec(name="clicks", label="y", categorical=("a", "b"))
HEAD = b"y,a,b\r\n"
NAMES = ["log.csv", "log.csv.gz"]


def written(path: Path, text: bytes) -> CsvLog:
    path.write_bytes(gzip.compress(text) if path.name.endswith(".gz") else text)
    return CsvLog(SPEC, path)


def rows(log: CsvLog, size: int = 1 << 20) -> list[dict[str, Any]]:
    return [
        row
        for chunk in log.chunks(size)
        for batch in log.batches(chunk)
        for row in batch.to_pylist()
    ]


@pytest.mark.parametrize(
    ("name", "line_end"), [("log.csv", "\r\n"), ("log.csv.gz", "\n"), ("log.csv", "\r")]
)
def test_line_ends_within_cells_and_blank_lines(tmp_path, monkeypatch, name, line_end):
    """Arrow drops an LF at the beginning of a block if the one before ends in a CR."""
    cell = f"x{line_end}{line_end}"
    line = f'1,"{cell}",u{line_end}'.encode()
    log = written(tmp_path / name, HEAD + line * 9 + line_end.encode() * 90)
    for block in range(60, 90):
        monkeypatch.setattr(csv_text, "BLOCK_BYTES", block)
        assert rows(log) == [{"y": 1, "a": cell, "b": "u"}] * 9, block


def of_one_column(path: Path, text: bytes) -> CsvLog:
    written(path, text)
    return CsvLog(DatasetSpec(name="toy", label="y", categorical=("a",)), path, labelled=False)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("text", "line"), [(b"a\nu\n\nv\n", 3), (b"a\r\nu\r\nv\r\n\r\n", 4), (b"\na\nu\n", 1)]
)
def test_a_blank_line_of_one_column_may_be_a_missing_value(tmp_path, name, text, line):
    """As `cut -d, -f2` writes it; Arrow passes over it, and the rows after it would move up."""
    with pytest.raises(UserError, match=f"no blank line.*{name}, line {line}. Write"):
        of_one_column(tmp_path / name, text).check()


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_value_of_one_column(tmp_path, name):
    """As pandas writes it."""
    log = of_one_column(tmp_path / name, b'a\nu\n""\nv\n')
    assert log.check() == ("a",)
    assert rows(log) == [{"a": "u"}, {"a": None}, {"a": "v"}]


@pytest.mark.parametrize("name", NAMES)
def test_zero_byte(tmp_path, name):
    """Past one Arrow may not see a separator, a line end, or the second of two quotes."""
    log = written(tmp_path / name, HEAD + b"1,u,v\r\n" * 5 + b'0,"u\0""",v\r\n')
    with pytest.raises(UserError, match=f"no zero bytes.*{name}, line 7"):
        rows(log)
