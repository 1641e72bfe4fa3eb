"""`prepare`, and what a user may give it: refused in one sentence, and nothing is left."""

import errno
import gzip
import json
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from merlin_cowclip.workflows import folders, machine
from merlin_cowclip.workflows.data import csv_text, etl

from .contract import command, listing, refused

SPEC: dict[str, Any] = {
    "name": "toy",
    "label": "y",
    "categorical": ["user"],
    "continuous": ["price"],
    "lists": ["tags"],
    "split": {"kind": "sequential", "test": 0.5},
}
HEAD = "y,user,price,tags\n"
ROWS = "1,a,1.5,x|y\n0,b,2,\n1,a,,x\n0,,4,z\n" * 20


@pytest.fixture(autouse=True)
def _machine(monkeypatch):
    """The same one for all cases: 16 GiB, and few rows to a block."""
    monkeypatch.setattr(machine, "memory_limit", lambda: 16 << 30)


def toml(**changes: Any) -> str:
    """The specification with some keys changed, or left out (None)."""
    return as_toml({**SPEC, **changes})


def as_toml(values: dict[str, Any]) -> str:
    return "".join(f"{key} = {inline(v)}\n" for key, v in values.items() if v is not None)


def inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(k)} = {inline(v)}" for k, v in value.items()) + " }"
    return json.dumps(value)


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(
        content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
    )
    return path


def at(line: int, row: str, rows: str = HEAD + ROWS) -> str:
    """A log with that row on that line of the file."""
    lines = rows.splitlines()
    lines[line - 1] = row
    return "\n".join(lines) + "\n"


def check(folder: Path, spec: str, log: str | bytes, words, *options: Any, name="log.csv") -> str:
    specification = write(folder, "toy.toml", spec)
    path = write(folder, name, log)
    argv = ["prepare", specification, path, "--out", folder / "new" / "data", *options]
    return refused(argv, words, folder=folder)


# Specifications


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("", ["'name'", "'label'", "must be given"], id="empty"),
        pytest.param("[[[[", ["toy.toml", "must be TOML", "line 1"], id="no TOML"),
        pytest.param("x = " + "[" * 3000, ["toy.toml", "must be TOML"], id="nested too deep"),
        pytest.param("\ufeff" + toml(), ["toy.toml", "must be TOML"], id="byte order mark"),
        pytest.param(toml().encode("utf-16"), ["toy.toml", "readable text"], id="UTF-16"),
        pytest.param(b"\x00\xff\xfe", ["toy.toml", "readable text"], id="binary"),
        pytest.param(
            toml() + "label = 'z'\n", ["toy.toml", "must be TOML", "line 7"], id="key twice"
        ),
        pytest.param("seed = " + "1" * 5000, ["toy.toml", "must be"], id="a number of 5000 digits"),
        pytest.param(toml(name=None), ["'name' must be given"], id="no name"),
        pytest.param(toml(name=""), ["name must be a text"], id="empty name"),
        pytest.param(toml(label=None), ["'label' must be given"], id="no label"),
        pytest.param(toml(label=3), ["label must be a text", "3"], id="label is a number"),
        pytest.param(toml(label="\0time"), ["label", "zero byte"], id="label with a zero byte"),
        pytest.param(
            "label = 2020-01-01\nname = 'x'", ["label must be a text"], id="label is a date"
        ),
        pytest.param(toml(label="user"), ["one role", "'user'"], id="label is a field"),
        pytest.param(toml(categorical=[], lists=[]), ["categorical must name"], id="no ids"),
        pytest.param(toml(categorical="user"), ["list of column names"], id="no list"),
        pytest.param(toml(categorical=[1]), ["list of column names"], id="a number for a name"),
        pytest.param(toml(categorical=["user", "user"]), ["one role", "'user'"], id="field twice"),
        *(
            pytest.param(
                toml(**{role: [name]}), [f"'{name}' beside the list 'tags'", "Rename"], id=name
            )
            for role, name in (("categorical", "tags__values"), ("continuous", "tags__offsets"))
        ),
        pytest.param(toml(categorical=[""]), ["file names", "''"], id="empty field"),
        pytest.param(toml(categorical=["../x"]), ["file names", "'../x'"], id="field with a slash"),
        pytest.param(toml(categorical=[".x"]), ["file names", "'.x'"], id="hidden field"),
        pytest.param(toml(categorical=["a\nb"]), ["file names"], id="field with a line end"),
        pytest.param(
            toml(categorical=["é" * 150]), ["file names", "bytes"], id="field name too long"
        ),
        pytest.param(toml(format="orc"), ["format must be one of", "'orc'"], id="format"),
        pytest.param(toml(separator=";;"), ["separator must be one ASCII"], id="separator of two"),
        pytest.param(
            toml(separator="§"), ["separator must be one ASCII"], id="separator not ASCII"
        ),
        pytest.param(toml(separator='"'), ["must not be a quote"], id="separator a quote"),
        pytest.param(toml(separator="\u0000"), ["zero byte"], id="separator a zero byte"),
        pytest.param(toml(list_separator=","), ["must differ", "','"], id="separators equal"),
        pytest.param(toml(quotes="no"), ["quotes must be true or false", "'no'"], id="quotes"),
        pytest.param(toml(header=1), ["header must be true or false"], id="header"),
        pytest.param(toml(header=False), ["columns must be given"], id="no columns"),
        pytest.param(toml(columns=["y"]), ["columns must be left out"], id="columns and header"),
        pytest.param(toml(header=False, columns=["y", "y"]), ["unique", "'y'"], id="columns twice"),
        pytest.param(
            toml(header=False, columns=["y"]), ["Missing", "'user'"], id="columns missing"
        ),
        pytest.param(toml(split=3), ["split must be a table"], id="split a number"),
        pytest.param(toml(split={"kind": "random"}), ["'split.test' must be given"], id="no share"),
        pytest.param(toml(split={"kind": "odd", "test": 0.1}), ["split.kind", "'odd'"], id="kind"),
        pytest.param(
            toml(split={"kind": "random", "test": "a"}), ["split.test", "'a'"], id="share text"
        ),
        pytest.param(toml(split={"kind": "time", "test": 0.1}), ["split.column"], id="no time"),
        pytest.param(
            toml(split={"kind": "time", "test": 0.1, "column": "tags"}),
            ["split.column", "'tags'"],
            id="time a list",
        ),
        pytest.param(
            toml(freq_threshold=1.5), ["freq_threshold", "1.5"], id="threshold a fraction"
        ),
        pytest.param(toml(freq_threshold=True), ["freq_threshold", "True"], id="threshold a truth"),
        pytest.param(toml(freq_threshold={"price": 2}), ["'price'"], id="threshold of a number"),
        pytest.param(toml(hash_buckets=0), ["hash_buckets", "at least 1"], id="no buckets"),
        pytest.param(toml(hash_buckets=9), ["needs a freq_threshold"], id="buckets, no threshold"),
        pytest.param(toml(non_finite=0), ["non_finite must be one of"], id="non_finite"),
        pytest.param(
            toml(nonfinite="x"), ["a key must be one of", "'nonfinite'"], id="unknown key"
        ),
    ],
)
def test_specifications(tmp_path, text, words):
    path = write(tmp_path, "toy.toml", text)
    log = write(tmp_path, "log.csv", HEAD + ROWS)
    refused(["prepare", path, log, "--out", tmp_path / "data"], words, folder=tmp_path)


# Options


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--seed", "-1"], ["seed", "at least 0", "-1"]),
        (["--workers", "-1"], ["workers", "at least 0"]),
        (["--workers", "1000000"], ["1,000,000 workers", "500,000.0 GiB", "16.0 GiB", "Use 25"]),
        (["--workers", "9" * 30], ["workers must fit the memory", "Use 25"]),
        (["--workers", "many"], ["--workers", "'many'"]),
        (["--seed", "one"], ["--seed", "'one'"]),
        (["--seed", "1" * 5000 + "x"], ["--seed"]),
        (["--test", "half"], ["--test", "'half'"]),
        (["--quotes", "no"], ["--quotes"]),
        (["--device", "tpu"], ["device must be one of cpu, gpu", "'tpu'"]),
        (["--device", "gpu"], ["device 'gpu' needs"]),
        (["--split", "weekly"], ["split.kind", "'weekly'"]),
        (["--split", ""], ["split.kind", "''"]),
        (["--split", "time"], ["split.column must name the column of times"]),
        (["--time-column", "user"], ["split.column", "'sequential'"]),
        (["--split", "time", "--time-column", ""], ["split.column", "''"]),
        (["--split", "time", "--time-column", "hour"], ["Missing: 'hour'", "log.csv"]),
        (["--split", "time", "--time-column", "tags"], ["one time per row", "'tags'"]),
        (["--split", "time", "--time-column", "user"], ["20 of 80 rows without", "'user'"]),
        (["--split", "time", "--time-column", "y"], ["label must be 0 in some", "only 0"]),
        (["--test", "0"], ["split.test must lie between 0 and 1", "0.0"]),
        (["--test", "1"], ["split.test must lie between 0 and 1", "1.0"]),
        (["--test", "nan"], ["split.test must lie between 0 and 1", "nan"]),
        (["--test", "-0.1"], ["split.test must lie between 0 and 1", "-0.1"]),
        (["--test", "1e-9"], ["both parts must have rows", "80 rows"]),
        (["--freq-threshold", "many"], ["--freq-threshold", "'many'"]),
        (["--freq-threshold", ""], ["--freq-threshold", "''"]),
        (["--freq-threshold", "user="], ["--freq-threshold", "'user='"]),
        (
            ["--freq-threshold", "user=3,user=5"],
            ["--freq-threshold", "name a field once", "'user'"],
        ),
        (["--freq-threshold", "user=3,,tags=5"], ["--freq-threshold", "C3=10"]),
        (["--freq-threshold", "usr=3"], ["freq_threshold must name fields", "'usr'"]),
        (["--freq-threshold", "price=3"], ["freq_threshold must name fields", "'price'"]),
        (["--freq-threshold", "-3"], ["freq_threshold", "at least 0", "-3"]),
        (["--freq-threshold", "user=1.5"], ["--freq-threshold", "'user=1.5'"]),
        (["--freq-threshold", "9" * 25], ["must leave ids", "'user'"]),
        (["--freq-threshold", "9" * 5000 + "x"], ["--freq-threshold"]),
        (["--freq-threshold", "1000"], ["must leave ids", "1000 for 'user'"]),
        (["--hash-buckets", "0"], ["hash_buckets", "at least 1"]),
        (["--hash-buckets", "4"], ["hash_buckets needs a freq_threshold"]),
        (["--hash-buckets", "user=4,user=4"], ["--hash-buckets", "name a field once", "'user'"]),
        (
            ["--freq-threshold", "2", "--hash-buckets", "1073741824"],
            ["hash_buckets", "1,073,741,824", "128.0 GiB", "12.8 GiB"],
        ),
        (["--freq-threshold", "2", "--hash-buckets", "9" * 12], ["at most 1,073,741,824"]),
        (["--non-finite", "zero"], ["non_finite must be one of", "'zero'"]),
    ],
)
def test_options(tmp_path, options, words):
    check(tmp_path, toml(), HEAD + ROWS, words, *options)


# Text


def long_cell(line: str) -> str:
    return f"{line}\n" + f"1,{'u' * 200_000},1,x\n" + ROWS + "7,a,1,x\n"


@pytest.mark.parametrize(
    ("log", "words"),
    [
        pytest.param("\n\n", ["must not be empty", "log.csv"], id="blank lines"),
        pytest.param(HEAD, ["must not be empty", "log.csv", "without a row"], id="header only"),
        pytest.param(
            HEAD.replace(",", ";") + ROWS, ["','", "one column", "line 1"], id="separator"
        ),
        pytest.param(HEAD.replace(",", "\t") + ROWS, ["','", "one column", "line 1"], id="tabs"),
        pytest.param(ROWS, ["Missing: 'y'"], id="no header"),
        pytest.param(HEAD.replace("user", "User") + ROWS, ["Missing: 'user'", "'User'"], id="case"),
        pytest.param(HEAD.replace("tags", "user") + ROWS, ["unique", "'user'"], id="name twice"),
        pytest.param(HEAD + "1,a,1,x\n", ["both parts must have rows", "1 rows"], id="one row"),
        pytest.param(at(9, "1,a,1"), ["4 columns", "3 in", "line 9"], id="a cell too few"),
        pytest.param(at(9, "1,a,1,x,y"), ["4 columns", "5 in", "line 9"], id="a cell too many"),
        pytest.param(HEAD + ROWS + "1,a", ["4 columns", "2 in", "line 82"], id="cut off"),
        pytest.param(at(9, "2,a,1,x"), ["label", "'2'", "line 9", "'y'"], id="label 2"),
        pytest.param(at(9, "-1,a,1,x"), ["label", "'-1'", "line 9", "'y'"], id="label -1"),
        pytest.param(at(9, "0.5,a,1,x"), ["label", "'0.5'", "line 9", "'y'"], id="label 0.5"),
        pytest.param(at(9, "yes,a,1,x"), ["label", "'yes'", "line 9", "'y'"], id="label text"),
        pytest.param(at(9, ",a,1,x"), ["label", "''", "line 9", "'y'"], id="label missing"),
        pytest.param(at(9, "nan,a,1,x"), ["label", "'nan'", "line 9", "'y'"], id="label nan"),
        pytest.param(at(9, "+1,a,1,x"), ["label", "'+1'", "line 9", "'y'"], id="label +1"),
        pytest.param(
            at(9, "４,a,1,x"), ["label", "'４'", "line 9", "'y'"], id="label of another script"
        ),
        pytest.param(at(9, "1,a,+4,x"), ["number", "'+4'", "line 9", "'price'"], id="plus sign"),
        pytest.param(at(9, "1,a,٤,x"), ["number", "'٤'", "line 9", "'price'"], id="other digits"),
        pytest.param(at(9, "1,a,1_0,x"), ["number", "'1_0'", "line 9", "'price'"], id="underscore"),
        pytest.param(
            at(9, "1,a,1 0,x"), ["number", "'1 0'", "line 9", "'price'"], id="blank within"
        ),
        pytest.param(at(9, "1,a,\xa04,x"), ["number", "line 9", "'price'"], id="hard blank"),
        pytest.param(at(9, '1,a,"1,5",x'), ["number", "'1,5'", "line 9"], id="decimal comma"),
        pytest.param(at(9, "1,a,0x1f,x"), ["number", "'0x1f'", "line 9"], id="hexadecimal"),
        pytest.param(at(9, "1,a,$5,x"), ["number", "'$5'", "line 9"], id="dollars"),
        pytest.param(at(9, "1,a,NULL,x"), ["number", "'NULL'", "line 9"], id="NULL"),
        pytest.param(at(9, "1,a, ,x"), ["number", "' '", "line 9", "'price'"], id="a blank"),
        pytest.param(at(9, "1,a,-inf,x"), ["finite", "'-inf'", "line 9", "non_finite"], id="inf"),
        pytest.param(at(9, "1,a,1e999,x"), ["finite", "'1e999'", "line 9"], id="beyond float64"),
        pytest.param(
            at(9, "1,a,nan(1),x"), ["finite", "'nan(1)'", "line 9"], id="nan with a number"
        ),
        pytest.param(
            at(9, f"1,a,{'9' * 999}x,x"), ["number", "long", "line 9"], id="long no number"
        ),
        pytest.param(
            at(9, "1,u\udcff,1,x"), ["UTF-8", "b'u\\xff'", "line 9", "'user'"], id="Latin-1"
        ),
        pytest.param(at(9, "1,a,1,\udcff"), ["UTF-8", "line 9", "'tags'"], id="Latin-1 in a list"),
        pytest.param(
            at(1, "y,us\udcffer,price,tags"), ["Missing: 'user'"], id="Latin-1 in the header"
        ),
        pytest.param(
            at(52, '1,"a,1,x'), ["quote must be closed", "'\"a,1,x'", "line 52,"], id="open quote"
        ),
        pytest.param(
            at(70, '1,"b",1,x', at(52, '1,"a,1,x')),
            ["closing quote", "'\"a,1,x'", "line 52,", "line 70"],
            id="open quote, and others",
        ),
        pytest.param(
            '"' + HEAD + ROWS, ["one column", "lines 1 to 8", "Close"], id="open in header"
        ),
        pytest.param(
            at(9, '1,"a"b,1,x'), ["closing quote", "line 9,", "goes on"], id="text behind"
        ),
        pytest.param(
            at(9, '1,"a" ,1,x'), ["closing quote", "line 9,", "goes on"], id="blank behind"
        ),
        pytest.param(
            at(9, '1,"a\n\nb",1'), ["3 in", "lines 9 to 11", "line 9"], id="lines of a row"
        ),
        pytest.param(
            long_cell(HEAD.strip()), ["label", "'7'", "line 83", "'y'"], id="a long cell before"
        ),
        pytest.param(
            long_cell("y,user,price,tags")
            .replace(",x\n", ",x,\n")
            .replace("tags\n", f"tags,{'n' * 200_000}\n")
            .replace("x|y\n", "x|y,\n")
            .replace("2,\n", "2,,\n")
            .replace("z\n", "z,\n"),
            ["label", "'7'", "line 83", "'y'"],
            id="a long name, unused",
        ),
        pytest.param(
            HEAD.replace("user", "u" * 99_999) + ROWS, ["Missing: 'user'"], id="a long name"
        ),
        pytest.param((HEAD + ROWS).encode("utf-16"), ["UTF-16", "iconv"], id="UTF-16"),
        pytest.param((HEAD + ROWS).encode("utf-16-be"), ["UTF-16", "iconv"], id="UTF-16, no mark"),
        pytest.param((HEAD + ROWS).encode("utf-32"), ["UTF-32", "iconv"], id="UTF-32"),
        pytest.param(bytes(5_000), ["UTF-8", "no text"], id="zeros"),
        pytest.param(gzip.compress(ROWS.encode()), ["named .gz", "Rename it"], id="gzip"),
        pytest.param(b"PK\x03\x04" + bytes(99), ["zip archive", "unpack"], id="zip"),
        pytest.param(b"BZh9" + bytes(99), ["bzip2", "unpack"], id="bzip2"),
        pytest.param(b"\xfd7zXZ\x00" + bytes(99), ["xz", "unpack"], id="xz"),
        pytest.param(b"(\xb5/\xfd" + bytes(99), ["zstd", "unpack"], id="zstd"),
        pytest.param(b"PAR1" + bytes(99), ["format = 'parquet'"], id="parquet"),
        pytest.param(HEAD + "0,a,1,x\n" * 80, ["label must be 0 in some", "only 0"], id="no click"),
        pytest.param(
            HEAD + "1,a,1,x\n" * 80, ["label must be 0 in some", "only 1"], id="all clicks"
        ),
        pytest.param(
            HEAD + "1,,1,x\n0,,1,x\n" * 40, ["column of ids must hold some", "'user'"], id="no id"
        ),
        pytest.param(
            HEAD + "1,a,,x\n0,b,,x\n" * 40, ["column of numbers must", "'price'"], id="no number"
        ),
        pytest.param(
            HEAD + "1,a,1,\n0,b,1,\n" * 40, ["lists of ids must hold", "'tags'"], id="no list"
        ),
    ],
)
def test_text(tmp_path, log, words):
    check(tmp_path, toml(), log, words)


@pytest.mark.parametrize(
    "log",
    [
        pytest.param(HEAD + "1,a," + "1" * 50_000 + ",x\n" + ROWS + "7,a,1,x\n", id="long row"),
        pytest.param(
            HEAD + '1,"' + "a\n" * 50_000 + '",1,x\n' + ROWS + "7,a,1,x\n", id="long cell"
        ),
        pytest.param("y" * 50_000, id="no line end"),
    ],
)
def test_rows_too_long(tmp_path, monkeypatch, log):
    """16 MiB in earnest."""
    for name in ("BLOCK_BYTES", "MAX_LINE"):
        monkeypatch.setattr(csv_text, name, 20_000)
    check(tmp_path, toml(), log, ["must be shorter than 20,000 characters", "log.csv, line "])


@pytest.mark.parametrize(
    ("changes", "log", "words"),
    [
        pytest.param(
            {"quotes": False},
            at(9, '1,"a,b",1,x'),
            ["5 in", "line 9", "quotes = true"],
            id="quotes",
        ),
        pytest.param(
            {"header": False, "columns": ["y", "user", "price", "tags", "z"]},
            ROWS,
            ["5 columns", "4 in", "line 1"],
            id="columns",
        ),
        pytest.param(
            {"header": False, "columns": ["y", "user", "price", "tags"]},
            HEAD + ROWS,
            ["label", "'y'", "line 1"],
            id="header where none is",
        ),
        pytest.param({"separator": "\t"}, HEAD + ROWS, ["'\\t'", "one column"], id="tab"),
        pytest.param({"format": "parquet"}, HEAD + ROWS, ["whole parquet", "log.csv"], id="format"),
        pytest.param(
            {
                "split": {"kind": "time", "test": 0.5, "column": "user"},
                "categorical": ["price"],
                "continuous": [],
            },
            HEAD + "1,7,1,x\n0,noon,2,x\n" * 9,
            ["times must be numbers, or all of them text", "'noon'", "'user'"],
            id="times mixed",
        ),
        pytest.param(
            {"split": {"kind": "time", "test": 0.5, "column": "user"}},
            HEAD + "1,7,1,x\n0,7,2,x\n" * 9,
            ["two times at least", "'7'", "'user'"],
            id="one time",
        ),
    ],
)
def test_text_and_its_description(tmp_path, changes, log, words):
    check(tmp_path, toml(**changes), log, words)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(b"y,user,price,tags\n", [".gz file must be whole"], id="no gzip"),
        pytest.param(gzip.compress(ROWS.encode())[:-9], [".gz file must be whole"], id="cut"),
        pytest.param(
            gzip.compress(ROWS.encode())[:9], [".gz file must be whole"], id="cut at once"
        ),
        pytest.param(gzip.compress(b""), ["must not be empty"], id="nothing"),
        pytest.param(gzip.compress((HEAD + ROWS).encode("utf-16")), ["UTF-16"], id="UTF-16"),
        pytest.param(
            gzip.compress(at(52, '1,"a,1,x').encode()),
            ["quote must be closed", "line 52"],
            id="quote",
        ),
        pytest.param(gzip.compress(at(9, "2,a,1,x").encode()), ["'2'", "line 9"], id="label"),
        pytest.param(
            gzip.compress(at(9, "2,a,1,x").encode()) + bytes(512), ["'2'", "line 9"], id="padded"
        ),
        pytest.param(
            gzip.compress((HEAD + ROWS).encode())[:-50] + bytes(50), ["must be whole"], id="zeroed"
        ),
        pytest.param(gzip.compress(HEAD.encode()) + b"junk", [".gz file must be whole"], id="junk"),
    ],
)
def test_gzip(tmp_path, content, words):
    check(tmp_path, toml(), content, [*words, "log.csv.gz"], name="log.csv.gz")


# The published logs

CRITEO = ["1", *map(str, range(13)), *(f"{i:08x}" for i in range(26))]
AVAZU_HEAD = "id,click,hour,C1,banner_pos,site_id,site_domain,site_category,app_id,app_domain,"
AVAZU_HEAD += "app_category,device_id,device_ip,device_model,device_type,device_conn_type,"
AVAZU_HEAD += ",".join(f"C{i}" for i in range(14, 22))
AVAZU = ["1", "0", "14102100", *(f"{i:x}" for i in range(21))]


def criteo(place: int, cell: str) -> str:
    rows = [list(CRITEO) for _ in range(20)]
    rows[6][place] = cell
    return "".join("\t".join(row) + "\n" for row in rows)


def avazu(place: int, cell: str) -> str:
    rows = [list(AVAZU) for _ in range(20)]
    rows[6][place] = cell
    return AVAZU_HEAD + "\n" + "".join(",".join(row) + "\n" for row in rows)


@pytest.mark.parametrize(
    ("dataset", "log", "words"),
    [
        pytest.param("criteo", criteo(0, "2"), ["label", "'2'", "line 7"], id="criteo label"),
        pytest.param("criteo", criteo(0, ""), ["label", "''", "line 7"], id="criteo test set"),
        pytest.param("criteo", criteo(3, "x"), ["'x'", "line 7", "'I3'"], id="criteo number"),
        pytest.param("criteo", criteo(20, "a\tb"), ["40 columns", "41", "line 7"], id="criteo tab"),
        pytest.param("criteo", criteo(5, '"1"'), ["'\"1\"'", "line 7", "'I5'"], id="criteo quote"),
        pytest.param("criteo", criteo(5, "1\n"), ["40 columns", "6", "line 7"], id="criteo line"),
        pytest.param(
            "criteo", criteo(0, "1").replace("\t", ","), ["'\\t'", "one column"], id="commas"
        ),
        pytest.param("criteo", criteo(0, "1"), ["only 1"], id="criteo clicks"),
        pytest.param("criteo", avazu(1, "1"), ["40 columns", "one column"], id="avazu for criteo"),
        pytest.param(
            "avazu", criteo(0, "1"), ["at least 23 columns", "one"], id="criteo for avazu"
        ),
        pytest.param(
            "avazu", avazu(1, "x"), ["label", "'x'", "line 8", "'click'"], id="avazu label"
        ),
        pytest.param("avazu", avazu(5, "a,b"), ["24 columns", "25", "line 8"], id="avazu comma"),
        pytest.param(
            "avazu", avazu(5, '"a,b"'), ["25", "line 8", "quotes = true"], id="avazu quoted comma"
        ),
        pytest.param(
            "avazu", avazu(1, "1").replace("click,", ""), ["Missing: 'click'"], id="avazu test set"
        ),
        pytest.param("avazu", avazu(1, "1"), ["label must be 0 in some"], id="avazu one click"),
    ],
)
def test_published_logs(tmp_path, dataset, log, words):
    path = write(tmp_path, "log.txt", log)
    refused(["prepare", dataset, path, "--out", tmp_path / "data"], words, folder=tmp_path)


# Parquet


def frame() -> dict[str, Any]:
    return {
        "y": pa.array([1, 0] * 40),
        "user": pa.array(["a", "b"] * 40),
        "price": pa.array([1.0, 2.0] * 40),
        "tags": pa.array([["x"], []] * 40, pa.list_(pa.string())),
    }


def with_row(kind: pa.DataType | None, usual: Any, odd: Any) -> pa.Array:
    return pa.array([usual] * 40 + [odd] + [usual] * 39, kind)


def unchecked(good: list[bytes], kind: pa.DataType) -> pa.Array:
    """Text as a writer that does not look makes it: bytes that are not UTF-8."""
    return pa.array(good, pa.binary()).view(kind)


LATIN = [b"a", b"b"] * 20 + [b"\xff"] + [b"a"] * 39


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({"y": with_row(None, 1, 2)}, ["label", "2 in", "row 41", "'y'"], id="label 2"),
        pytest.param(
            {"y": with_row(None, 1, 2**62)}, ["label", f"{2**62} in", "row 41"], id="2^62"
        ),
        pytest.param(
            {"y": with_row(pa.uint64(), 1, 2**64 - 1)}, [f"{2**64 - 1}", "row 41"], id="2^64"
        ),
        pytest.param({"y": with_row(None, 1, None)}, ["label", "None", "row 41"], id="label null"),
        pytest.param({"y": with_row(None, 1.0, 0.5)}, ["label", "0.5", "row 41"], id="label 0.5"),
        pytest.param(
            {"y": with_row(None, 1.0, np.nan)}, ["label", "nan", "row 41"], id="label NaN"
        ),
        pytest.param(
            {"y": pa.array(["1", "0"] * 40)}, ["'y'", "numbers", "string"], id="label text"
        ),
        pytest.param({"y": pa.nulls(80)}, ["'y'", "numbers", "null"], id="label of nothing"),
        pytest.param({"y": pa.array([[1], [0]] * 40)}, ["'y'", "single values"], id="label a list"),
        pytest.param(
            {"price": with_row(None, 1.0, np.inf)}, ["inf", "row 41", "'price'"], id="inf"
        ),
        pytest.param(
            {"price": with_row(None, 1.0, np.nan)}, ["nan", "row 41", "'price'"], id="NaN"
        ),
        pytest.param({"price": pa.array(["1"] * 80)}, ["'price'", "numbers", "string"], id="text"),
        pytest.param(
            {"price": pa.nulls(80, pa.float64())}, ["'price'", "hold some"], id="no number"
        ),
        pytest.param(
            {"price": pa.array([0] * 80, pa.timestamp("s"))}, ["'price'", "timestamp"], id="a time"
        ),
        pytest.param({"user": pa.nulls(80)}, ["'user'", "hold some"], id="no id"),
        pytest.param(
            {"user": pa.array([["a"]] * 80)}, ["'user'", "single values"], id="ids a list"
        ),
        pytest.param(
            {"user": pa.array([{"a": 1}] * 80)}, ["'user'", "single", "struct"], id="struct"
        ),
        pytest.param(
            {"user": unchecked(LATIN, pa.binary())},
            ["UTF-8", "b'\\xff'", "row 41", "'user'"],
            id="bytes",
        ),
        pytest.param(
            {"user": unchecked(LATIN, pa.string())},
            ["UTF-8", "b'\\xff'", "row 41", "'user'"],
            id="Latin-1",
        ),
        pytest.param(
            {
                "user": pa.DictionaryArray.from_arrays(
                    [0] * 40 + [1] * 40, unchecked([b"a", b"\xff"], pa.string())
                )
            },
            ["UTF-8", "row 41", "'user'"],
            id="Latin-1 in a dictionary",
        ),
        pytest.param(
            {"tags": pa.ListArray.from_arrays(list(range(81)), unchecked(LATIN, pa.string()))},
            ["UTF-8", "b'\\xff'", "row 41", "'tags'"],
            id="Latin-1 in a list",
        ),
        pytest.param(
            {"tags": pa.array(["x"] * 80)}, ["'tags'", "list column", "string"], id="no list"
        ),
        pytest.param(
            {"tags": pa.array([[["x"]]] * 80)},
            ["'tags'", "single ids", "list"],
            id="lists of lists",
        ),
        pytest.param(
            {"tags": pa.array([[{"a": 1}]] * 80)}, ["'tags'", "struct"], id="list of structs"
        ),
        pytest.param(
            {"tags": pa.array([[]] * 80, pa.list_(pa.string()))},
            ["'tags'", "hold some"],
            id="empty",
        ),
        pytest.param(
            {"tags": pa.nulls(80, pa.list_(pa.string()))}, ["'tags'", "hold some"], id="null lists"
        ),
        pytest.param(
            {"user": pa.array([0, 1] * 40, pa.duration("s"))},
            ["'user'", "duration"],
            id="durations",
        ),
        pytest.param(
            {"user": with_row(pa.float64(), 7.0, 2.0**60)},
            ["2^53", "e+18 in", "row 41", "'user'", "integers or text"],
            id="large float",
        ),
        pytest.param(
            {"tags": with_row(pa.list_(pa.float32()), [7.0], [1.0, -(2.0**24)])},
            ["32-bit float of 2^24", "-16777216.0 in", "row 41", "'tags'"],
            id="large float in a list",
        ),
        pytest.param({"user": None}, ["Missing: 'user'"], id="missing"),
        pytest.param({"Y": pa.array([1] * 80), "y": None}, ["Missing: 'y'"], id="case"),
    ],
)
def test_parquet(tmp_path, changes, words):
    columns = {
        name: values for name, values in {**frame(), **changes}.items() if values is not None
    }
    path = tmp_path / "log.parquet"
    pq.write_table(pa.table(columns), path)
    spec = write(tmp_path, "toy.toml", toml(format="parquet"))
    words = [*words, *(["log.parquet"] if "hold some" not in words else [])]
    refused(["prepare", spec, path, "--out", tmp_path / "data"], words, folder=tmp_path)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-50])


def garbled(path: Path) -> None:
    place = pq.read_metadata(path).row_group(0).column(1).data_page_offset
    whole = path.read_bytes()
    path.write_bytes(whole[:place] + b"\xff" * 30 + whole[place + 30 :])


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (cut, ["whole parquet file"]),
        (garbled, ["whole parquet file"]),
        (lambda path: path.write_bytes(b"PAR1"), ["whole parquet file"]),
        (lambda path: path.write_bytes(b"PAR1" * 9), ["whole parquet file"]),
        (lambda path: path.write_bytes(b""), ["must not be empty"]),
        (lambda path: path.write_text(HEAD + ROWS), ["whole parquet file", "format = 'csv'"]),
        (lambda path: pq.write_table(pa.table(frame()).slice(0, 0), path), ["without a row"]),
    ],
)
def test_harmed_parquet(tmp_path, harm, words):
    path = tmp_path / "log.parquet"
    pq.write_table(pa.table(frame()), path)
    harm(path)
    spec = write(tmp_path, "toy.toml", toml(format="parquet"))
    argv = ["prepare", spec, path, "--out", tmp_path / "data"]
    refused(argv, [*words, "log.parquet"], folder=tmp_path)


def test_an_id_of_two_texts(tmp_path):
    """0.1 is 0.1 in the one file and 0.10000000149011612 in the other."""
    for kind in (pa.float32(), pa.float64()):
        columns = {**frame(), "user": pa.array([0.1] * 80, kind)}
        pq.write_table(pa.table(columns), tmp_path / f"{kind}.parquet")
    spec = write(tmp_path, "toy.toml", toml(format="parquet"))
    # Text agrees with each of the two, which do not with each other.
    pq.write_table(pa.table(frame()), tmp_path / "text.parquet")
    files = [tmp_path / f"{name}.parquet" for name in ("text", "float", "double")]
    words = ["one type", "'user'", "double in", "float in", *files[1:]]
    refused(["prepare", spec, *files, "--out", tmp_path / "data"], words, folder=tmp_path)


# Files and folders


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (["nowhere.csv"], ["must exist", "nowhere.csv"]),
        (["log.csv", "nowhere.csv"], ["must exist", "nowhere.csv"]),
        (["*.tsv"], ["must match a file", "*.tsv"]),
        (["["], ["must match a file", "["]),
        (["folder"], ["must be a file", "folder", "Name its files"]),
        (["f*"], ["must be a file", "folder"]),
        (["*"], ["must exist", "dangling.csv", "link to nowhere"]),
        (["log.csv", "log.csv"], ["given once", "log.csv"]),
        (["log.csv", "folder/../log.csv"], ["given once", "log.csv"]),
        (["log.csv", "link.csv"], ["given once", "link.csv"]),
        (["log.csv", "hard.csv"], ["given once", "hard.csv, first as", "Leave one out"]),
        (["dangling.csv"], ["must exist", "dangling.csv"]),
        (["loop.csv"], ["must exist", "loop.csv"]),
        (["empty.csv"], ["must not be empty", "empty.csv"]),
        (["pipe"], ["device or pipe", "pipe"]),
        (["log.csv", "other.csv"], ["same columns", "other.csv", "'more'"]),
        (["log.csv", "empty.csv"], ["must not be empty", "empty.csv"]),
        (["n" * 5000], ["must be a file name", "File name too long"]),
        (["x/" * 3000], ["must be a file name", "File name too long"]),
        (["log.csv/inside"], ["must exist"]),
    ],
)
def test_inputs(tmp_path, inputs, words):
    write(tmp_path, "log.csv", HEAD + ROWS)
    write(tmp_path, "other.csv", "y,user,price,tags,more\n1,a,1,x,\n")
    write(tmp_path, "empty.csv", "")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, target in (("link", "log.csv"), ("dangling", "gone"), ("loop", "loop.csv")):
        (tmp_path / f"{name}.csv").symlink_to(target)
    os.link(tmp_path / "log.csv", tmp_path / "hard.csv")
    home = tempfile.mkdtemp(prefix="spec-")
    spec = write(Path(home), "toy.toml", toml())
    try:
        paths = [tmp_path / name for name in inputs]
        refused(["prepare", spec, *paths, "--out", tmp_path / "data"], words, folder=tmp_path)
    finally:
        shutil.rmtree(home)


def rewrite(path: Path) -> None:
    """With other rows, as many bytes of them."""
    path.write_text(path.read_text().replace(",a,", ",b,"))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda path: path.write_text(HEAD + ROWS * 2), id="longer"),
        pytest.param(lambda path: path.write_text(HEAD + ROWS + "1,a"), id="half a row"),
        pytest.param(lambda path: rewrite(path), id="rewritten"),
        pytest.param(lambda path: path.rename(path.with_name("moved")), id="gone"),
        pytest.param(lambda path: Path(shutil.copy2(path, f"{path}2")).rename(path), id="replaced"),
    ],
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_log_that_changes_while_it_is_read(tmp_path, monkeypatch, change, when):
    stage = etl._Preparation._stage
    home = Path(tempfile.mkdtemp(prefix="changing-"))

    def changing(self: Any) -> None:
        if when == "before":
            change(log)
        stage(self)
        if when == "after":
            change(log)

    monkeypatch.setattr(etl._Preparation, "_stage", changing)
    spec, log = write(home, "toy.toml", toml()), write(home, "log.csv", HEAD + ROWS)
    try:
        words = ["stay as it is while it is read", log, "changed meanwhile"]
        refused(["prepare", spec, log, "--out", tmp_path / "data"], words, folder=tmp_path)
    finally:
        shutil.rmtree(home)


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        ("cliteo", ["'avazu', 'criteo'", ".toml", "'cliteo'"]),
        ("", ["'avazu', 'criteo'", "''"]),
        ("CRITEO", ["'avazu', 'criteo'", "'CRITEO'"]),
        ("nowhere.toml", ["must exist", "nowhere.toml"]),
        ("folder.toml", ["readable text", "folder.toml"]),
        ("n" * 5000 + ".toml", ["readable text", "File name too long"]),
        ("n" * 5000, ["'avazu', 'criteo'"]),
    ],
)
def test_data_sets(tmp_path, monkeypatch, dataset, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.toml").mkdir()
    log = write(tmp_path, "log.csv", HEAD + ROWS)
    refused(["prepare", dataset, log, "--out", tmp_path / "data"], words, folder=tmp_path)


@pytest.mark.parametrize(
    ("out", "words"),
    [
        ("folder", ["must not exist", "folder"]),
        ("log.csv", ["must not exist", "log.csv"]),
        ("dangling", ["must not exist", "dangling"]),
        ("", ["must not exist"]),
        ("log.csv/data", ["can be written", "log.csv", "Not a directory"]),
        ("n" * 5000, ["output folder", "File name too long"]),
        ("n" * 256, ["output folder", "File name too long"]),
        ("x/" * 3000, ["output folder", "File name too long"]),
        ("missing/..", ["name of its own"]),
        (os.fsdecode(b"d\xff"), ["name that is text", "d\\udcff"]),
        ("s3://bucket/data", ["on this machine", "s3:/bucket/data"]),
    ],
)
def test_outputs(tmp_path, monkeypatch, out, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "dangling").symlink_to("gone")
    spec, log = write(tmp_path, "toy.toml", toml()), write(tmp_path, "log.csv", HEAD + ROWS)
    refused(["prepare", spec, log, "--out", out], words, folder=tmp_path)


# The machine


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def beyond_the_limit(*_: Any, **__: Any) -> None:
    """`ulimit -f`."""
    raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))


def short(file: Any, values: np.ndarray) -> None:
    """As np.save says that the disk is full."""
    raise OSError(f"{values.size} requested and 0 written")


@pytest.mark.parametrize(
    ("place", "failure"),
    [
        ("merlin_cowclip.workflows.data.staging.pa.ipc.new_stream", full),
        ("merlin_cowclip.workflows.data.staging.np.save", short),
        ("merlin_cowclip.workflows.data.saved_workflow.write_vocabulary", full),
        ("merlin_cowclip.workflows.data.saved_workflow.write_counts", full),
        ("merlin_cowclip.workflows.data.saved_workflow.write_counts", beyond_the_limit),
    ],
)
def test_a_full_disk(tmp_path, monkeypatch, place, failure):
    monkeypatch.setattr(place, failure)
    words = ["needs disk space", "none left", "data", "another disk"]
    check(tmp_path, toml(), HEAD + ROWS, words)


@pytest.mark.parametrize("name", ["log.csv", "log.csv.gz", "log.parquet", "toy.toml"])
def test_what_may_not_be_read(nobody, name):
    folder, become = nobody
    kind = "parquet" if name.endswith("parquet") else "csv"
    spec = write(folder, "toy.toml", toml(format=kind))
    log = write(folder, "log.csv" if name == "toy.toml" else name, HEAD + ROWS)
    (folder / name).chmod(0o000)
    become()
    argv = ["prepare", spec, log, "--out", folder / "data"]
    refused(argv, ["readable", folder / name, "Permission denied"], folder=folder)


@pytest.mark.parametrize("out", ["data", "new/data"])
def test_where_may_not_be_written(nobody, out):
    folder, become = nobody
    spec, log = write(folder, "toy.toml", toml()), write(folder, "log.csv", HEAD + ROWS)
    (folder / "closed").mkdir(mode=0o555)
    become()
    argv = ["prepare", spec, log, "--out", folder / "closed" / out]
    refused(argv, ["can be written", "Permission denied", out], folder=folder)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("step", ["_stage", "_split", "_fit_and_encode", "_save_workflow"])
def test_a_signal(tmp_path, monkeypatch, number, step):
    """One that ends the work, and another one that must not end the tidying up."""
    spec, log = write(tmp_path, "toy.toml", toml()), write(tmp_path, "log.csv", HEAD + ROWS)
    before, remove = listing(tmp_path), shutil.rmtree
    monkeypatch.setattr(etl._Preparation, step, lambda *_: os.kill(os.getpid(), number))

    def remove_under_fire(*arguments: Any, **options: Any) -> None:
        os.kill(os.getpid(), number)
        remove(*arguments, **options)

    monkeypatch.setattr(folders.shutil, "rmtree", remove_under_fire)
    done = command(["prepare", spec, log, "--out", tmp_path / "data"])
    assert done.code == 128 + number
    (line,) = [
        line for line in done.err.replace("\r", "\n").splitlines() if line and "%|" not in line
    ]
    assert line.startswith("merlin-cowclip prepare: ")
    assert "nothing is left of it" in line
    assert listing(tmp_path) == before
