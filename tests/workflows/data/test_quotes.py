"""Quoted cells: a log cut anywhere gives the cells that were written, or names the open quote."""

import csv
import gzip
import io
import tempfile
from pathlib import Path
from unittest import mock

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from merlin_cowclip.workflows.data import quotes
from merlin_cowclip.workflows.data.csv_logs import CsvLog
from merlin_cowclip.workflows.data.datasets import AVAZU, CRITEO, DatasetSpec
from merlin_cowclip.workflows.errors import UserError

SPEC = DatasetSpec("toy", "y", ("a", "b"))
HEAD = "y,a,b\n"


def rows_of(log: CsvLog, size: int) -> list[tuple]:
    batches = [batch for chunk in log.chunks(size) for batch in log.batches(chunk)]
    columns = [pa.chunked_array([batch[name] for batch in batches]).to_pylist() for name in "yab"]
    return list(zip(*columns, strict=True))


def written(cell: str, quoted: bool) -> str:
    """RFC 4180: what must be quoted is; and what only might, if it is so wished."""
    must = any(c in cell for c in ",\r\n") or cell.startswith('"')
    return '"' + cell.replace('"', '""') + '"' if must or quoted else cell


cells = st.tuples(st.text('"ab,\n\r', max_size=6), st.booleans())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 1), cells, cells), min_size=1, max_size=12),
    st.integers(1, 60),
    st.integers(1, 9),
    st.sampled_from(["\n", "\r\n"]),
    st.sampled_from([b"", quotes.BYTE_ORDER_MARK]),
    st.booleans(),
)
def test_any_csv_cut_anywhere_gives_its_cells(rows, size, block, end, mark, zipped):
    lines = ["y,a,b", *(f"{y},{written(*a)},{written(*b)}" for y, a, b in rows)]
    text = mark + end.join([*lines, ""]).encode()
    expected = [(y, a or None, b or None) for y, (a, _), (b, _) in rows]
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(quotes, "BLOCK_BYTES", block):
        path = Path(folder) / ("log.csv.gz" if zipped else "log.csv")
        path.write_bytes(gzip.compress(text) if zipped else text)
        assert rows_of(CsvLog(SPEC, path), size) == expected


@given(st.lists(st.text('",a\n\r', max_size=9), max_size=9))
def test_the_scan_refuses_what_pythons_strict_reader_refuses(blocks):
    scan = quotes.QuoteScan(",")
    for block, after in quotes.with_next(block.encode() for block in blocks):
        scan.feed(block, after)
    try:
        list(csv.reader(io.StringIO("".join(blocks), newline=""), strict=True))
    except csv.Error:
        assert scan.bad
    else:
        assert not scan.bad


def test_a_cut_never_falls_within_a_cell(tmp_path):
    """Two inch marks make the number of quotes before the cut even, and its place was a cell."""
    cell = "1\n0,x,y\n" * 9
    (tmp_path / "log.csv").write_text(HEAD + f'0,5" 3" 1",3"\n1,a,"{cell}"\n')
    expected = [(0, '5" 3" 1"', '3"'), (1, "a", cell)]
    for size in range(1, 60):
        assert rows_of(CsvLog(SPEC, tmp_path / "log.csv"), size) == expected


def test_without_quotes_a_quote_is_text(tmp_path):
    spec = DatasetSpec("toy", "y", ("a", "b"), quotes=False)
    (tmp_path / "log.csv").write_text(HEAD + '1,"a,b"\n0,""," x\n')
    expected = [(1, '"a', 'b"'), (0, '""', '" x')]
    for size in (1, 1 << 20):
        assert rows_of(CsvLog(spec, tmp_path / "log.csv"), size) == expected
    assert CsvLog(spec, tmp_path / "log.csv").check() == ("y", "a", "b")


def test_the_published_logs_have_no_quotes():
    assert not CRITEO.quotes
    assert not AVAZU.quotes
    assert SPEC.quotes


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (
            {51: '0,x,"open'},
            "a quote must be closed. Received: '\"open' in .*, line 52, .*quotes = f",
        ),
        ({51: '1,"a\nb","open'}, "a quote must be closed. Received: '\"open' in .*, line 53,"),
        # As many cells as there should be: only the text behind the closing quote tells.
        (
            {51: '0,"u,i', 90: '1,"u,i"'},
            "must end with its closing quote.*'\"u,i' in .*, line 52, .* closed in line 91 and",
        ),
    ],
)
@pytest.mark.parametrize(("size", "zipped"), [(1, False), (1 << 20, False), (100, True)])
def test_an_open_quote_is_named_by_its_line(tmp_path, size, zipped, rows, words):
    lines = ["y,a,b", *(f"{i % 2},u{i},i{i}" for i in range(100))]
    for place, row in rows.items():
        lines[place] = row
    text = "\n".join(lines).encode()
    path = tmp_path / ("log.csv.gz" if zipped else "log.csv")
    path.write_bytes(gzip.compress(text) if zipped else text)
    with pytest.raises(UserError, match=words):
        rows_of(CsvLog(SPEC, path), size)


def test_a_row_of_several_lines_is_named_by_its_first(tmp_path):
    (tmp_path / "log.csv").write_text(HEAD + '1,a,b\n0,"u\n\nv",w,x\n')
    message = "3 columns.*Received: 4 in .*, lines 3 to 5, which a quote in line 3.*Close"
    with pytest.raises(UserError, match=message):
        rows_of(CsvLog(SPEC, tmp_path / "log.csv"), 1 << 20)
