"""Quoted cells: a log cut anywhere gives the cells that were written, or names the open quote."""

import csv
import gzip
import io
import mmap
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


@settings(max_examples=150, deadline=None)
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


def test_an_inch_mark_beside_a_cell_of_several_lines(tmp_path):
    """An odd number of quotes, and more lines than rows: once refused."""
    (tmp_path / "log.csv").write_text(HEAD + '1,5" disk,"two\nlines"\n0,x,y\n')
    expected = [(1, '5" disk', "two\nlines"), (0, "x", "y")]
    assert rows_of(CsvLog(SPEC, tmp_path / "log.csv"), 1 << 20) == expected


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
    old = {key: value for key, value in SPEC.to_dict().items() if key != "quotes"}
    assert DatasetSpec.from_dict(old) == SPEC  # of a folder prepared before there was the key
    assert SPEC.quotes


@pytest.mark.parametrize("size", [1, 100, 1 << 20])
@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(
    ("bad", "cell"),
    [('0,x,"open', '"open'), ('1,"a\nb","open', '"open'), ('0,5","a""', '"a""')],
)
def test_an_open_quote_is_named_by_its_line(tmp_path, size, zipped, bad, cell):
    lines = ["y,a,b", *(f"{i % 2},u{i},i{i}" for i in range(100))]
    lines[51] = bad
    text = "\n".join(lines).encode()
    path = tmp_path / ("log.csv.gz" if zipped else "log.csv")
    path.write_bytes(gzip.compress(text) if zipped else text)
    line = 52 + bad.count("\n")
    message = f"a quote must be closed. Received: {cell!r} in .*, line {line}, .*quotes = false"
    with pytest.raises(UserError, match=message):
        rows_of(CsvLog(SPEC, path), size)


@pytest.mark.parametrize("size", [1, 100, 1 << 20])
@pytest.mark.parametrize("zipped", [False, True])
def test_a_quote_that_swallows_rows_is_named_by_its_line(tmp_path, zipped, size):
    """The cells are as many as there should be: only the text behind the closing quote tells."""
    lines = ["y,a,b", *(f"{i % 2},u{i},i{i}" for i in range(300))]
    lines[51], lines[200] = '0,"u,i', '1,"u,i"'
    text = "\n".join(lines).encode()
    path = tmp_path / ("log.csv.gz" if zipped else "log.csv")
    path.write_bytes(gzip.compress(text) if zipped else text)
    message = "must end with its closing quote.*'\"u,i' in .*, line 52, .* closed in line 201 and"
    with pytest.raises(UserError, match=message):
        rows_of(CsvLog(SPEC, path), size)


def test_a_row_of_several_lines_is_named_by_its_first(tmp_path):
    (tmp_path / "log.csv").write_text(HEAD + '1,a,b\n0,"u\n\nv",w,x\n')
    message = "3 columns.*Received: 4 in .*, lines 3 to 5, which a quote in line 3.*Close"
    with pytest.raises(UserError, match=message):
        rows_of(CsvLog(SPEC, tmp_path / "log.csv"), 1 << 20)


def test_a_large_log_is_scanned_in_pieces(tmp_path):
    """Many quotes per block, and rows of several lines at every cut: against Python's reader."""
    lines = [HEAD] + [f'{i % 2},"a""\n{i}",{i}" b\n' for i in range(5_000)]
    path = tmp_path / "log.csv"
    path.write_text("".join(lines))
    with path.open("rb") as raw, mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ) as text:
        starts, bad = quotes.row_starts(text, 1_000, ",")
        rows = [
            row
            for a, b in zip(starts, [*starts[1:], len(text)], strict=True)
            for row in csv.reader(io.StringIO(text[a:b].decode(), newline=""))
        ]
    assert not bad
    assert len(starts) > 50
    assert rows == list(csv.reader(path.open(newline="")))
