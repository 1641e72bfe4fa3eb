"""Raw logs: files and folders to rows, cut anywhere; a bad value is named with its place."""

import dataclasses
import gzip
import tempfile
from functools import partial
from pathlib import Path
from unittest import mock

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from merlin_cowclip.workflows.data.prepare.pipeline import READERS
from merlin_cowclip.workflows.data.sources import csv
from merlin_cowclip.workflows.data.sources.base import ids_as_text, times_of, without_place
from merlin_cowclip.workflows.data.sources.csv import CsvSource
from merlin_cowclip.workflows.data.sources.files import expand_paths
from merlin_cowclip.workflows.data.sources.parquet import ParquetSource
from merlin_cowclip.workflows.data.spec import AVAZU, CRITEO, DatasetSpec, Split
from merlin_cowclip.workflows.errors import UserError

SPEC = DatasetSpec("toy", "y", ("a", "b"))
HEAD = "y,a,b\n"
MARK = b"\xef\xbb\xbf"


def rows_of(source, size=1 << 20):
    batches = [batch for chunk in source.chunks(size) for batch in source.batches(chunk)]
    return [tuple(row.values()) for batch in batches for row in batch.to_pylist()]


def source(path, text, spec=SPEC, **options):
    content = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return CsvSource(spec, path, **options)


# CSV: quotes and line ends


def written(cell, quoted):
    """RFC 4180: what must be quoted is; and what only might, if it is so wished."""
    must = any(c in cell for c in ",\r\n") or cell.startswith('"')
    return '"' + cell.replace('"', '""') + '"' if must or quoted else cell


cells = st.tuples(st.text('"ab,\n\r', max_size=6), st.booleans())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 1), cells, cells), min_size=1, max_size=12),
    st.integers(1, 60),
    st.one_of(st.just(1 << 24), st.integers(60, 99)),
    st.sampled_from(["\n", "\r\n"]),
    st.sampled_from([b"", MARK]),
    st.booleans(),
)
def test_any_csv_cut_anywhere_gives_its_cells(rows, size, block, end, mark, zipped):
    lines = ["y,a,b", *(f"{y},{written(*a)},{written(*b)}" for y, a, b in rows)]
    text = mark + end.join([*lines, ""]).encode()
    if any("\r\n" in cell for _, a, b in rows for cell in (a[0], b[0])):
        block = 1 << 24  # Arrow drops an LF of a cell where a block ends between CR and LF
    expected = [(y, a or None, b or None) for y, (a, _), (b, _) in rows]
    blocks = {"BLOCK_BYTES": block}
    with tempfile.TemporaryDirectory() as folder, mock.patch.multiple(csv, **blocks):
        path = Path(folder) / ("log.csv.gz" if zipped else "log.csv")
        path.write_bytes(gzip.compress(text) if zipped else text)
        assert rows_of(CsvSource(SPEC, path), size) == expected


def test_without_quotes_a_quote_is_text(tmp_path):
    spec = DatasetSpec("toy", "y", ("a", "b"), quotes=False)
    log = source(tmp_path / "log.csv", HEAD + '1,"a,b"\n0,""," x\n', spec)
    for size in (1, 1 << 20):
        assert rows_of(log, size) == [(1, '"a', 'b"'), (0, '""', '" x')]
    log.check()
    assert log.names == ("y", "a", "b")
    assert not CRITEO.quotes
    assert not AVAZU.quotes


def test_only_a_file_with_quotes_is_one_part(tmp_path):
    lines = "".join(f"{i % 2},u{i},i{i}\n" for i in range(100))
    assert len(source(tmp_path / "log.csv", HEAD + lines).chunks(100)) > 5
    quoted = source(tmp_path / "quoted.csv", HEAD + lines + '1,"u",i\n')
    assert len(quoted.chunks(100)) == 1
    assert rows_of(quoted)[-1] == (1, "u", "i")


@pytest.mark.parametrize(
    "rows",
    [
        {51: '1,"a\nb","open'},
        {51: '0,"open,i'},
        # As many cells as there should be: only the text behind the closing quote tells.
        {51: '0,"u,i', 90: '1,"u,i"'},
    ],
)
def test_an_open_quote_swallows_no_rows(tmp_path, rows):
    lines = ["y,a,b", *(f"{i % 2},u{i},i{i}" for i in range(100))]
    for place, row in rows.items():
        lines[place] = row
    with pytest.raises(UserError, match="log.csv, line 52: a quoted cell is not closed"):
        rows_of(source(tmp_path / "log.csv", "\n".join(lines)))


def test_a_blank_line_of_one_column_is_a_missing_value(tmp_path):
    """As `cut -d, -f2` writes it."""
    spec = DatasetSpec(name="toy", label="y", categorical=("a",))
    for blank in ("", '""'):
        log = source(tmp_path / "log.csv", f"a\nu\n{blank}\nv\n", spec, labelled=False)
        log.check()
        assert rows_of(log) == [("u",), (None,), ("v",)]


# Places


@pytest.mark.parametrize(("name", "size"), [("log.csv", 50), ("log.csv.gz", 1 << 20)])
@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("7,u,1.5", "line {}, column 'y': the label is '7' instead of '0' or '1'"),
        ("x,u,1.5", "line {}, column 'y': .*'x'.*label_values"),
        ("1,u,0x1f", "line {}, column 'n': .*'0x1f'"),
        ("1,u,inf", "line {}, column 'n': the number is inf.*non_finite"),
        ("1,\udcff,1.5", "line {}, column 'a': .*UTF8.*iconv"),
        ("1,u", "line {}: Expected 3 columns, got 2"),
    ],
)
def test_a_bad_value_is_named_by_line_and_column(tmp_path, name, size, row, words):
    spec = DatasetSpec("toy", "y", ("a",), ("n",))
    lines = ["y,a,n", *["1,u,1.5", "", "0,v,"] * 9, row, *["1,u,1.5"] * 9]
    log = source(tmp_path / name, "\n".join(lines), spec)
    with pytest.raises(UserError, match=f"{name}, {words.format(29)}"):
        rows_of(log, size)


@pytest.mark.parametrize(
    ("spec", "text", "message"),
    [
        (CRITEO, "id,click,hour\n1,0,2\n", "not as .* 'criteo' says: expected 40 col.*, found 1"),
        (SPEC, "y;a;b\n", r"expected at least 3 columns separated by ',', found 1. Set separator"),
        (SPEC, "y,A,b\n", "log.csv has no column 'a' of data set 'toy'. It has: 'y', 'A', 'b'"),
        (SPEC, "y,a,b,a\n", "two columns named 'a'"),
        (SPEC, "\n\n", "has no rows"),
        (SPEC, HEAD.encode("utf-16"), "not a CSV file in UTF-8.*parquet, set format = 'parquet'"),
    ],
)
def test_another_format(tmp_path, spec, text, message):
    with pytest.raises(UserError, match=message):
        source(tmp_path / "log.csv", text, spec).check()


@pytest.mark.parametrize("kind", ["gzip", "zstd"])
def test_compressed_files(tmp_path, kind):
    """Whatever their names; several compressed files may follow each other."""
    compress = partial(pa.Codec(kind).compress, asbytes=True)
    rows = [f"{i % 2},u{i},i{i * i}\n" for i in range(20_000)]
    packed = compress((HEAD + "".join(rows[:9])).encode()) + compress("".join(rows[9:]).encode())
    assert len(rows_of(source(tmp_path / "log.csv", packed))) == 20_000
    with pytest.raises(UserError, match="input file .*log.csv: Truncated compressed stream"):
        rows_of(source(tmp_path / "log.csv", packed[:-2_000]))


# Spellings


def test_spellings_of_missing_values_and_labels(tmp_path):
    categories = pa.array(["\\N", "x"]).dictionary_encode()
    columns = {"y": ["True", "False"], "a": categories, "n": ["\\N", "1"]}
    table = pa.table({**columns, "t": [["\\N"], ["u", "\\N"]]})
    pq.write_table(table, tmp_path / "log.parquet")
    options = {"null_values": ("\\N",), "label_values": ("False", "True"), "format": "parquet"}
    spec = DatasetSpec("toy", "y", ("a",), ("n",), ("t",), **options)
    log = ParquetSource(spec, tmp_path / "log.parquet")
    assert rows_of(log) == [(1, None, None, [None]), (0, 1.0, "x", ["u", None])]


@pytest.mark.parametrize("label", [-1, 2, 0.5])
def test_a_number_that_is_no_label(tmp_path, label):
    """-1 and 1 are the labels of many other tools."""
    spec = DatasetSpec("toy", "y", ("a",))
    words = f"column 'y': the label is '{label}' instead of '0' or '1'"
    with pytest.raises(UserError, match=f"line 3, {words}"):
        rows_of(source(tmp_path / "log.csv", f"y,a\n1,x\n{label},x\n", spec))
    table = pa.table({"y": [1, 1, label], "a": ["x", "x", "x"]})
    pq.write_table(table, tmp_path / "log.parquet", row_group_size=2)
    log = ParquetSource(dataclasses.replace(spec, format="parquet"), tmp_path / "log.parquet")
    with pytest.raises(UserError, match=f"row 3, {words}"):
        rows_of(log, 1)


@pytest.mark.parametrize(("cell", "separator"), [("[3, 0]", ","), ("['a' 'b']", " "), ("[]", "|")])
def test_lists_in_brackets(tmp_path, cell, separator):
    """As pandas and NumPy write lists into a CSV file; other ids may have brackets."""
    spec = DatasetSpec("toy", "y", (), (), ("t",), list_separator=separator)
    log = source(tmp_path / "log.csv", f'y,t\n1,[deleted]\n1,\n0,"{cell}"\n', spec)
    with pytest.raises(UserError, match=r"log.csv, line 4, column 't': the list .* in brackets"):
        rows_of(log)


@pytest.mark.parametrize("head", ['u:token,"a\nb",y', "\ufeffu,x:float,y:label"])
def test_columns_rename_those_of_a_header(tmp_path, head):
    """As pandas.read_csv(header=0, names=…) does."""
    spec = DatasetSpec("toy", "y", ("u", "b"), columns=("u", "b", "y"))
    lines = [f"{i},x{i},{i % 2}" for i in range(50)]
    log = source(tmp_path / "log.csv", "\n".join([head, *lines, ""]), spec)
    read = pd.read_csv(log.path, header=0, names=spec.columns, dtype=str)
    assert log.has_label()
    log.check()
    for size in (1, 1 << 20):
        rows = read.itertuples(index=False, name=None)
        assert rows_of(log, size) == [(int(y), u, b) for u, b, y in rows]
    lines[41] = "41,x41,2"
    log = source(tmp_path / "log.csv", "\n".join([head, *lines]), spec)
    with pytest.raises(UserError, match=rf"line {43 + head.count(chr(10))}, column 'y': .*2"):
        rows_of(log)


def test_columns_of_a_header_at_another_place_or_without_the_label(tmp_path):
    spec = DatasetSpec("toy", "y", ("u", "b"), columns=("u", "b", "y"))
    log = source(tmp_path / "log.csv", "u,b\n0,x0\n", spec, labelled=False)
    assert not log.has_label()
    log.check()
    assert rows_of(log) == [("0", "x0")]
    log = source(tmp_path / "log.csv", "b,u:token,y\nx0,0,1\n", spec)
    with pytest.raises(UserError, match="has 'b' at another place .* the order of the header"):
        log.check()
    source(tmp_path / "log.csv", "u,u,y\nx0,0,1\n", spec).check()  # two columns with one name


# Parquet


@pytest.mark.parametrize(
    ("ids", "texts"),
    [
        (pa.array([3, None, 2**62 + 1]), ["3", None, str(2**62 + 1)]),
        (pa.array([3.0, None, float("nan"), -7.0]), ["3", None, None, "-7"]),
        (pa.array(["a", "", None]).dictionary_encode()[1:], [None, None]),
        (pa.array([True, False]), ["true", "false"]),
        (pa.array([b"a", None]), ["a", None]),
        (pa.nulls(2), [None, None]),
        (pa.array([["a", ""], None, []])[1:], [[], []]),
        (pa.array([[1, None], None]), [["1", None], []]),
    ],
    ids=str,
)
def test_ids_as_text(ids, texts):
    assert ids_as_text(ids, isinstance(texts[-1], list)).to_pylist() == texts


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (pa.array([1.5]), "1.5"),
        (pa.array([2.0**53]), "double from 9,007,199,254,740,992 on are not exact"),
        (pa.array([2.0**24], pa.float32()), "float from 16,777,216 on"),
        (pa.array([pd.Timestamp("2024-01-01")]), "timestamp.*ids must be integers or text"),
        (pa.array([["a"]]), "list.*ids must be"),
        (pa.array([b"\xff"]), "UTF8"),
    ],
)
def test_what_is_no_id(ids, message):
    with pytest.raises((ValueError, pa.ArrowException), match=message):
        ids_as_text(ids, False)


def test_parquet_types(tmp_path):
    spec = DatasetSpec("toy", "y", ("a",), ("n",), ("t",), format="parquet")
    columns = {"y": [1, 0], "a": ["x", "z"], "n": [1.0, None], "t": [["u"], []]}
    log = ParquetSource(spec, tmp_path / "log.parquet")
    for name, values, message in (
        ("n", [1.0, float("inf")], "row 2, column 'n': the number is inf"),
        ("n", ["1", "x"], "cannot read column 'n' of .*: .*'x'"),
        ("t", [1, 2], "cannot read column 't' of .*: it is int64, not a list"),
        ("a", [["x"], []], "cannot read column 'a' of .*: it is list"),
    ):
        pq.write_table(pa.table({**columns, name: values}), log.path)
        with pytest.raises(UserError, match=message):
            rows_of(log)
    texts = {"n": ["1.5", ""], "y": ["1", "0"], "t": ["u|v", ""]}
    pq.write_table(pa.table({**columns, **texts}), log.path)
    assert rows_of(log) == [(1, 1.5, "x", ["u", "v"]), (0, None, "z", [])]


# Times


LATE = pd.Timestamp("2024-08-28 23:50", tz="UTC")
ISO_8601 = ["2024-08-28T23:50Z", "2024-08-29 05:20:00+05:30", "2024-08-28T12:50-1100"]
ISO_8601 += ["2024-08-28 23:50", "2024-08-29 13:50:00.000000001+14", "2024-08-28T23:50:00,0"]


@pytest.mark.parametrize(
    ("column", "layout"),
    [
        (pa.array([1724889000, 1724889000.0]), None),
        (pa.array([LATE.tz_localize(None)], pa.timestamp("s")), None),
        (pa.array([LATE + pd.Timedelta(1)], pa.timestamp("ns", "Asia/Kolkata")), None),
        (pa.array(ISO_8601), None),
        (pa.array(["28/08/2024 23:50"]).dictionary_encode(), "%d/%m/%Y %H:%M"),
    ],
)
def test_times_of_any_form_are_instants(column, layout):
    """Text without a zone is UTC, whatever the zone of the text before."""
    times = times_of(column, "t", timed(layout), without_place, may_be_missing=False)
    assert times.type in (pa.float64(), pa.timestamp("us", "UTC"))
    seconds = times.cast(pa.timestamp("s", "UTC") if times.type != pa.float64() else times.type)
    assert set(seconds.cast(pa.int64()).to_pylist()) == {LATE.timestamp()}


@pytest.mark.parametrize(
    ("column", "layout", "message"),
    [
        (pa.array(["9/9/2024"]), None, "'9/9/2024' is not a number, a timestamp or ISO 8601. Set"),
        (pa.array(["2024-09-31"]), None, "the time '2024-09-31' is not a number"),
        (pa.array(["30/02/2024"]), "%d/%m/%Y", "'30/02/2024' is not in time_format '%d/%m/%Y'"),
        (pa.array(["7", "noon"]), None, "the time 'noon' is not"),
        (pa.array(["7", "inf"]), None, "the time 'inf' is not"),
        (pa.array([None, 7.0]), None, "the time is missing"),
        (pa.array([1092024]), "%d%m%Y", "it is int64, not text in the time_format"),
    ],
)
def test_times_of_no_form_are_refused(column, layout, message):
    with pytest.raises((UserError, ValueError), match=message):
        times_of(column, "t", timed(layout), without_place, may_be_missing=False)


def timed(layout: str | None) -> DatasetSpec:
    return dataclasses.replace(SPEC, split=Split("time", 0.5, "t", time_format=layout))


# Files and folders


def test_folders_and_globs(tmp_path):
    """As Spark writes them: hidden files, files without bytes, day_9 before day_10."""
    home = tmp_path / "_logs"
    for name in ("day_10/b.csv", "day_9/a.csv", "day_9/_temporary/a.csv", "day_9/.b.csv.crc"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(HEAD)
    (home / "day_9" / "_SUCCESS").touch()
    (home / "day_9" / "part-0.csv").touch()
    days = [home / "day_9" / "a.csv", home / "day_10" / "b.csv"]
    for inputs in (home, f"{home}/*", f"{home}/**/*", f"{home}/*/*.csv", days):
        assert list(expand_paths(inputs)) == days
    assert list(expand_paths(home / "day_9" / "_temporary")) == [home / "day_9/_temporary/a.csv"]
    (tmp_path / "dangling.csv").symlink_to("gone")
    for inputs, message in (
        (home / "nowhere", "no input file found"),
        (home / "day_9" / "_SUCCESS", "_SUCCESS is empty"),
        (f"{tmp_path}/d*.csv", r"no input file found for .*/d\*.csv"),
        ([], "no input file given"),
        ([days[0], home], "day_9/a.csv is given twice"),
    ):
        with pytest.raises(UserError, match=message):
            expand_paths(inputs)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_hive_partitions(tmp_path, kind):
    roles = ("y", ("site", "ad"), ("hour",))
    spec = DatasetSpec("toy", *roles, format=kind, split=Split("time", 0.5, "day"))
    columns = {"y": [0, 1, 1, 0], "hour": [1, 2, 1, 2], "site": ["a b", None, "c", "c"]}
    frame = pd.DataFrame({**columns, "ad": [1, 2, 3, 4], "day": ["2024-01-01", "2024-01-02"] * 2})
    frame.to_parquet(tmp_path / "logs", partition_cols=["day", "site", "hour"])
    rows = []
    for path, root in expand_paths(tmp_path / "logs").items():
        if kind == "csv":
            pq.ParquetFile(path).read().to_pandas().to_csv(path, index=False)
        log = READERS[kind](spec, path, root=root)
        assert log.names == ("y", "ad", "day", "site", "hour")
        log.check()
        rows += rows_of(log)
    expected = frame.astype({"ad": str, "hour": float})
    expected["day"] = pd.to_datetime(frame["day"], utc=True)
    expected = expected.astype(object).where(expected.notna(), None)
    assert sorted(rows, key=str) == sorted(expected.itertuples(index=False, name=None), key=str)


def test_hive_columns_come_from_below_the_input(tmp_path):
    """As pandas reads a folder or a file; a glob counts from its first folder without a pattern."""
    home = tmp_path / "user=alice" / "logs"
    frame = pd.DataFrame({"y": [1], "day": [2], "hour": [3]})
    frame.to_parquet(home, partition_cols=["day", "hour"])
    (file,) = home.rglob("*.parquet")
    for inputs, columns in (
        (home, ["day", "hour"]),
        (home / "day=2", ["hour"]),
        (file, []),
        (f"{home}/*/hour=*", ["day", "hour"]),
        (f"{home}/day=2/**/*.parquet", ["hour"]),
        (f"{tmp_path}/*/logs", ["user", "day", "hour"]),
    ):
        ((path, root),) = expand_paths(inputs).items()
        spec = DatasetSpec("toy", "y", ("day",), format="parquet")
        assert ParquetSource(spec, path, root=root).names == ("y", *columns)
        if "*" not in str(inputs):
            assert list(pd.read_parquet(inputs).columns) == ["y", *columns]
