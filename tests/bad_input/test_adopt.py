"""Bad input to `adopt`: parquet of every odd kind, workflows that are none, options."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from merlin_cowclip.workflows.data.existing_parquet import open_files
from merlin_cowclip.workflows.quiet import quiet_imports
from tests.bad_input.contract import command, refused

with quiet_imports():
    import nvtabular as nvt
    from merlin.io import Dataset
    from merlin.schema import Tags
    from nvtabular import ops

ROWS = 60
pytestmark = pytest.mark.filterwarnings(
    "ignore:Initializing an NVTabular Dataset in CPU mode", "ignore:Performing a hash-based"
)


def raw_log() -> pd.DataFrame:
    random = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "click": np.arange(ROWS) % 2,
            "user": random.integers(0, 5, ROWS),
            "item": [f"i{i}" for i in random.integers(0, 7, ROWS)],
            "genres": [[f"g{g}", "g0"] for g in random.integers(0, 4, ROWS)],
            "price": random.normal(5, 3, ROWS),
        }
    )


def fitted(folder: Path, nodes: Any) -> Path:
    """A workflow of NVTabular's own, saved."""
    workflow = nvt.Workflow(nodes)
    workflow.fit(Dataset(raw_log()))
    workflow.save(str(folder))
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("adopt")
    nodes = (
        (["user", "item", "genres"] >> ops.Categorify(out_path=str(home / "fitted")))
        + (["price"] >> ops.Normalize())
        + (["click"] >> ops.AddMetadata(tags=[Tags.TARGET, Tags.BINARY_CLASSIFICATION]))
    )
    folder = fitted(home / "workflow", nodes)
    rows = nvt.Workflow.load(str(folder)).transform(Dataset(raw_log())).to_ddf().compute()
    table = pa.Table.from_pandas(rows, preserve_index=False)
    pq.write_table(table, home / "train.parquet", row_group_size=25)
    return home


@pytest.fixture
def place(home, tmp_path) -> Path:
    """workflow/ and train.parquet, to be spoiled."""
    shutil.copytree(home / "workflow", tmp_path / "workflow")
    shutil.copy(home / "train.parquet", tmp_path / "train.parquet")
    return tmp_path


def argv(place: Path, parquet: Any = None, **options: Any) -> list[Any]:
    given = {
        "workflow": place / "workflow",
        "label": "click",
        "out": place / "out",
        **options,
    }
    named = [text for key, value in given.items() for text in (f"--{key}", value)]
    return ["adopt", place / "train.parquet" if parquet is None else parquet, *named]


def rewritten(place: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    path = place / "train.parquet"
    pq.write_table(change(pq.read_table(path)), path, row_group_size=25)


def column(name: str, values: Any) -> Callable[[pa.Table], pa.Table]:
    """The same table with another column, or with another value in row 31."""

    def change(table: pa.Table) -> pa.Table:
        new = values(table[name].combine_chunks()) if callable(values) else values
        return table.set_column(table.column_names.index(name), name, new)

    return change


def cell(name: str, value: Any, kind: pa.DataType | None = None) -> Callable[[pa.Table], pa.Table]:
    """Row 31, which is in row group 1, holds another value."""

    def values(old: pa.Array) -> pa.Array:
        new = old.to_pylist()
        new[30] = value
        return pa.array(new, kind or old.type)

    return column(name, values)


def cast(kind: pa.DataType) -> Callable[[pa.Array], pa.Array]:
    return lambda old: old.cast(kind)


WHERE = ["train.parquet", "row group 1", "row 31 of the file"]
HERE = ["train.parquet"]
LISTS = pa.list_(pa.int64())

TABLES: dict[str, tuple[Callable[[pa.Table], pa.Table], list[Any]]] = {
    "a null id": (cell("user", None), ["no nulls", *WHERE, "'user'"]),
    "a null number": (cell("price", None), ["no nulls", *WHERE, "'price'"]),
    "a null label": (cell("click", None), ["label must be 0 or 1", "null", *WHERE]),
    "a null list": (cell("genres", None), ["no nulls", *WHERE, "'genres'"]),
    "a null in a list": (cell("genres", [3, None]), ["null in a list", *WHERE, "'genres'"]),
    "a column of nulls": (
        column("user", lambda c: pa.nulls(len(c), c.type)),
        ["no nulls", *HERE, "row 1 of the file", "'user'"],
    ),
    "a column of type null": (
        column("user", lambda c: pa.nulls(len(c))),
        ["integer ids", "null", *HERE],
    ),
    "an id below 0": (cell("user", -1), ["from 0 to", "Received: -1", *WHERE, "'user'"]),
    "an id one too large": (cell("user", 8), ["cardinality - 1, here 7", "Received: 8", *WHERE]),
    "the largest id": (cell("user", 2**63 - 1), [str(2**63 - 1), *WHERE]),
    "the largest unsigned id": (
        cell("user", 2**64 - 1, pa.uint64()),
        ["cardinality - 1", str(2**64 - 1), *WHERE],
    ),
    "a list with an id too large": (cell("genres", [3, 99]), ["Received: 99", *WHERE, "'genres'"]),
    "a list with an id below 0": (cell("genres", [-3]), ["Received: -3", *WHERE, "'genres'"]),
    "a label of 2": (cell("click", 2), ["label must be 0 or 1", "Received: 2", *WHERE]),
    "a label of -1": (cell("click", -1), ["label must be 0 or 1", "Received: -1", *WHERE]),
    "a label of 0.5": (cell("click", 0.5, pa.float64()), ["label", "Received: 0.5", *WHERE]),
    "a label of NaN": (cell("click", float("nan"), pa.float64()), ["label", "nan", *WHERE]),
    "a label of 2^62": (cell("click", 2**62), ["label must be 0 or 1", str(2**62), *WHERE]),
    "a label of 2^64 - 1": (cell("click", 2**64 - 1, pa.uint64()), [str(2**64 - 1), *WHERE]),
    "labels of text": (column("click", cast(pa.string())), ["0 or 1", "string", *HERE]),
    "labels in lists": (
        column("click", lambda c: pa.array([[v.as_py()] for v in c])),
        ["0 or 1", "list", *HERE],
    ),
    "one label only": (column("click", lambda c: pa.array([1] * len(c))), ["only 1", "'click'"]),
    "dates for labels": (column("click", cast(pa.timestamp("s"))), ["0 or 1", "timestamp"]),
    "NaN": (cell("price", float("nan")), ["finite", "nan", *WHERE, "'price'"]),
    "inf": (cell("price", float("inf")), ["finite", "inf", *WHERE, "'price'"]),
    "-inf": (cell("price", float("-inf")), ["finite", "-inf", *WHERE, "'price'"]),
    "beyond float32": (cell("price", 1e300), ["finite", "float32", "1e+300", *WHERE]),
    "numbers of text": (column("price", cast(pa.string())), ["numbers", "string", "'price'"]),
    "numbers in lists": (
        column("price", lambda c: pa.array([[v.as_py()] for v in c])),
        ["numbers", "list", "'price'"],
    ),
    "decimals": (
        column("price", lambda c: pa.array([1] * len(c)).cast(pa.decimal128(21, 2))),
        ["numbers", "decimal128", "'price'"],
    ),
    "ids of text": (column("user", cast(pa.string())), ["integer ids", "string", "'user'"]),
    "ids that are floats": (column("user", cast(pa.float64())), ["integer ids", "double"]),
    "ids that are booleans": (
        column("user", lambda c: pa.array([True] * len(c))),
        ["integer ids", "bool"],
    ),
    "ids that are dates": (column("user", cast(pa.timestamp("s"))), ["integer ids", "timestamp"]),
    "ids in a dictionary": (
        column("user", lambda c: c.cast(pa.string()).dictionary_encode()),
        ["integer ids", "dictionary"],
    ),
    "ids in structs": (
        column("user", lambda c: pa.StructArray.from_arrays([c], ["id"])),
        ["integer ids", "struct"],
    ),
    "ids in binary": (
        column("user", lambda c: c.cast(pa.string()).cast(pa.binary())),
        ["integer ids", "binary"],
    ),
    "lists of lists": (
        column("genres", lambda c: pa.array([[v.as_py()] for v in c])),
        ["lists of integer ids", "list<", "'genres'"],
    ),
    "lists of lists for single ids": (
        column("user", lambda c: pa.array([[[v.as_py()]] for v in c])),
        ["lists of integer ids", "list<", "'user'"],
    ),
    "lists of text": (column("genres", cast(pa.list_(pa.string()))), ["lists of integer ids"]),
    "lists of floats": (column("genres", cast(pa.list_(pa.float64()))), ["lists of integer ids"]),
    "lists of structs": (
        column("genres", lambda c: pa.array([[{"id": 3}]] * len(c))),
        ["lists of integer ids", "struct"],
    ),
    "maps": (
        column("genres", lambda c: pa.array([[(1, 2)]] * len(c), pa.map_(pa.int64(), pa.int64()))),
        ["'genres'", "map<"],
    ),
    "a column less": (lambda t: t.drop(["item"]), ["Missing: 'item'", *HERE]),
    "no column of the workflow's": (lambda t: t.select(["click"]), ["Missing: 'user'", *HERE]),
    "no label": (lambda t: t.drop(["click"]), ["the label must be a column", *HERE]),
    "no rows": (lambda t: t.slice(0, 0), ["must hold rows", *HERE]),
    "a column twice": (
        lambda t: t.append_column("user", t["user"]),
        ["every column once", "Received twice: 'user'", *HERE],
    ),
}


@pytest.mark.parametrize("table", TABLES)
def test_parquet_of_an_odd_kind(place, table):
    change, words = TABLES[table]
    rewritten(place, change)
    refused(argv(place), words, folder=place)


def flip(path: Path, at: int, length: int = 1) -> None:
    content = bytearray(path.read_bytes())
    for i in range(at, at + length):
        content[i] ^= 0xFF
    path.write_bytes(content)


def cut(path: Path, size: int) -> None:
    os.truncate(path, size)


FILES: dict[str, tuple[Callable[[Path], Any], list[Any]]] = {
    "half a file": (lambda p: cut(p, p.stat().st_size // 2), ["whole and readable", *HERE]),
    "a file less its last byte": (lambda p: cut(p, p.stat().st_size - 1), ["whole and", *HERE]),
    "an empty file": (lambda p: cut(p, 0), ["whole and readable", *HERE]),
    "a file of four bytes": (lambda p: p.write_bytes(b"PAR1"), ["whole and readable", *HERE]),
    "text": (lambda p: p.write_text("click,user\n1,2\n"), ["whole and readable", *HERE]),
    "spoiled pages": (lambda p: flip(p, 8, 400), ["whole and readable", *HERE]),
    "a spoiled footer": (lambda p: flip(p, p.stat().st_size - 60, 40), ["whole and", *HERE]),
    "gone": (Path.unlink, ["must be there", *HERE]),
    "a link to itself": (
        lambda p: (p.unlink(), p.symlink_to(p)),
        ["parquet must be", *HERE],
    ),
    "an empty folder": (lambda p: (p.unlink(), p.mkdir()), ["*.parquet", "without one", *HERE]),
}


@pytest.mark.parametrize("file", FILES)
def test_files_that_are_no_parquet(place, file):
    damage, words = FILES[file]
    damage(place / "train.parquet")
    refused(argv(place), words, folder=place)


PICKLE, METADATA = "workflow/workflow.pkl", "workflow/metadata.json"
WORKFLOWS: dict[str, tuple[Callable[[Path], Any], list[Any]]] = {
    "no folder": (lambda h: shutil.rmtree(h / "workflow"), ["workflow", "metadata.json"]),
    "a file": (
        lambda h: (shutil.rmtree(h / "workflow"), (h / "workflow").touch()),
        ["workflow", "Workflow.save wrote"],
    ),
    "no pickle": (lambda h: (h / PICKLE).unlink(), ["without workflow.pkl"]),
    "no metadata": (lambda h: (h / METADATA).unlink(), ["without metadata.json"]),
    "half a pickle": (lambda h: cut(h / PICKLE, 100), ["must load", "save it again"]),
    "an empty pickle": (lambda h: cut(h / PICKLE, 0), ["must load", "save it again"]),
    "a pickle of something else": (
        lambda h: (h / PICKLE).write_bytes(__import__("pickle").dumps({"a": 1})),
        ["must load", "save it again"],
    ),
    "a pickle of nothing that is here": (
        lambda h: (h / PICKLE).write_bytes(b"cno_such_module\nThing\n."),
        ["must load", "no_such_module"],
    ),
    "empty metadata": (lambda h: cut(h / METADATA, 0), ["must load", "workflow"]),
    "metadata that is a list": (lambda h: (h / METADATA).write_text("[]"), ["must load"]),
    "metadata of another size": (lambda h: (h / METADATA).write_text("{}"), ["must load"]),
    "no vocabularies": (
        lambda h: shutil.rmtree(h / "workflow" / "categories"),
        ["vocabularies must lie in its folder", "unique.", "Copy the whole folder"],
    ),
    "no vocabulary of a field": (
        lambda h: (h / "workflow" / "categories" / "unique.item.parquet").unlink(),
        ["vocabularies must lie in its folder", "unique.item.parquet"],
    ),
    "half a vocabulary": (
        lambda h: cut(h / "workflow" / "categories" / "unique.item.parquet", 500),
        ["unique.item.parquet", "whole and readable"],
    ),
    "the vocabulary of another field": (
        lambda h: shutil.copy(
            h / "workflow" / "categories" / "unique.user.parquet",
            h / "workflow" / "categories" / "unique.item.parquet",
        ),
        ["unique.item.parquet", "must fit the workflow's schema"],
    ),
}


@pytest.mark.parametrize("workflow", WORKFLOWS)
def test_workflows_that_are_none(place, workflow):
    damage, words = WORKFLOWS[workflow]
    damage(place)
    refused(argv(place), words, folder=place)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"label": "clicked"}, ["'clicked'", "train.parquet", "Name another column"]),
        ({"label": ""}, ["the label must be a column", "''"]),
        ({"label": "user"}, ["label must be 0 or 1"]),
        ({"label": "genres"}, ["'genres'", "0 or 1"]),
        ({"label": "x" * 5_000}, ["the label must be a column"]),
        ({"out": "EXISTS"}, ["must not exist"]),
        ({"out": "train.parquet/out"}, ["folder", "train.parquet"]),
        ({"out": "x" * 300}, ["output folder", "too long"]),
        ({"out": "x" * 300 + "/out"}, ["output folder", "too long"]),
        ({"test": "nowhere"}, ["must be there", "nowhere"]),
        ({"test": "train.parquet"}, ["given once", "training part", "test part"]),
        ({"test": "*.nothing"}, ["pattern", "*.nothing"]),
        ({"test": "same.parquet"}, ["given once", "same.parquet"]),
        ({"workflow": "nowhere"}, ["nowhere", "without"]),
        ({"workflow": "train.parquet"}, ["train.parquet", "without"]),
        ({"parquet": "[x"}, ["pattern", "[x"]),
        ({"parquet": ""}, ["must be there", "''"]),
        ({"parquet": "y" * 300}, ["parquet must be there"]),
        ({"parquet": "workflow"}, ["*.parquet", "without one"]),
        ({"test": ""}, ["must be there", "''"]),
        ({"workflow": "x" * 300}, ["workflow must be a folder", "without"]),
    ],
    ids=lambda value: None if isinstance(value, list) else repr(value)[:40],
)
def test_options(place, monkeypatch, options, words):
    monkeypatch.chdir(place)
    (place / "EXISTS").mkdir()
    os.link(place / "train.parquet", place / "same.parquet")
    refused(argv(place, **options), words, folder=place)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda t: column("user", cast(pa.int32()))(t), ["same types", "int32"]),
        (lambda t: t.drop(["price"]), ["Missing: 'price'", "b.parquet"]),
        (lambda t: t.drop(["click"]), ["label", "b.parquet"]),
    ],
    ids=["types", "columns", "label"],
)
def test_files_that_differ(place, other, words):
    (place / "parts").mkdir()
    table = pq.read_table(place / "train.parquet")
    pq.write_table(table, place / "parts" / "a.parquet")
    pq.write_table(other(table), place / "parts" / "b.parquet")
    refused(argv(place, place / "parts"), words, folder=place)


@pytest.mark.parametrize("given", ["parts", "parts/*", "parts/**/*"])
@pytest.mark.parametrize("kind", ["a link to nowhere", "a folder"])
def test_a_part_that_is_no_file(place, given, kind):
    (place / "parts").mkdir()
    shutil.copy(place / "train.parquet", place / "parts" / "a.parquet")
    odd = place / "parts" / "b.parquet"
    odd.mkdir() if kind == "a folder" else odd.symlink_to("gone")
    words = ["a part must be a file", odd, "a folder or a link to nowhere", "Put the file back"]
    refused(argv(place, place / given), words, folder=place)


@pytest.mark.parametrize("given", ["parts", "parts/*"])
@pytest.mark.parametrize("within", ["day_2", "day_2/hour_1"])
def test_parts_in_a_folder_beside_parts(place, given, within):
    """Of a folder and a pattern only files are read: those rows would be missing."""
    (place / "parts" / within).mkdir(parents=True)
    for part in ("a.parquet", f"{within}/b.parquet"):
        shutil.copy(place / "train.parquet", place / "parts" / part)
    words = ["beside files", f"{within}/b.parquet", "Name the files", "parts/*.parquet"]
    refused(argv(place, place / given), words, folder=place)


@pytest.mark.parametrize("given", ["parts", "parts/*"])
@pytest.mark.parametrize(
    "name", ["b.PARQUET", "b.pq", "part-00001", "b.parquet.snappy", "day_2/b.pq"]
)
def test_parquet_of_another_name_beside_parts(place, given, name):
    """Its rows were missing without a word."""
    other = place / "parts" / name
    other.parent.mkdir(parents=True)
    for part in (place / "parts" / "a.parquet", other):
        shutil.copy(place / "train.parquet", part)
    words = ["beside", other, "Name", "*.parquet"]
    if "/" in name:  # the folder by itself would be refused: nothing in it is named *.parquet
        words.append(f"'{place / 'parts'}/*.parquet', and {other};")
    refused(argv(place, place / given), words, folder=place)
    assert len(open_files([place / "parts" / "a.parquet", other])) == 2


@pytest.mark.parametrize("given", ["parts/**/*.parquet", "parts/**/*", "parts/*/*/*/*.parquet"])
def test_parts_that_spark_has_not_finished(place, given):
    """Their rows would be there twice. What a pattern names is read, whatever its name."""
    place = place / "_mine"
    left, kept = "parts/day_1/_temporary/0/b.parquet", "parts/_day=1/hour_1/0/a.parquet"
    for part in (left, kept):
        (place / part).parent.mkdir(parents=True)
        shutil.copy(place.parent / "train.parquet", place / part)
    assert [file.path for file in open_files(place / given)] == [place / kept]
    named = place / "parts" / "*" / "_temporary" / "**" / "*.parquet"
    assert [file.path for file in open_files(named)] == [place / left]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_is_beside_parts_and_may_not_be_read(place, kind, monkeypatch):
    """Rows may be in it. (The tests may run as root, who reads whatever there is.)"""
    odd = place / "parts" / "b"
    odd.mkdir(parents=True) if kind == "folder" else odd.parent.mkdir()
    shutil.copy(place / "train.parquet", place / "parts" / "a.parquet")
    if kind == "file":
        odd.write_bytes(b"PAR1")
    open_file, list_folder = Path.open, os.scandir

    def refused_to(other):
        def opened(path, *rest, **options):
            if str(path) == str(odd):
                raise PermissionError(13, "Permission denied", str(odd))
            return other(path, *rest, **options)

        return opened

    monkeypatch.setattr(Path, "open", refused_to(open_file))
    monkeypatch.setattr(os, "scandir", refused_to(list_folder))
    words = ["must be readable", odd, "Permission denied"]
    refused(argv(place, place / "parts"), words, folder=place)


def test_parts_in_a_folder_that_a_link_leads_to(place):
    (place / "parts" / "more").mkdir(parents=True)
    (place / "elsewhere").mkdir()
    (place / "parts" / "more" / "linked").symlink_to("../../elsewhere")
    (place / "elsewhere" / "again").symlink_to("../elsewhere")
    for part in ("parts/a.parquet", "elsewhere/b.parquet"):
        shutil.copy(place / "train.parquet", place / part)
    words = ["beside files", "more/linked/b.parquet"]
    refused(argv(place, place / "parts"), words, folder=place)


@pytest.mark.parametrize(
    "left",
    [
        "_temporary/b.parquet",
        "more/_b.parquet",
        "_metadata",
        "notes/b.txt",
        "b.pq.crc",
        "latest",
        "link",
    ],
)
def test_what_is_no_part_may_lie_in_a_folder_beside_parts(place, left):
    files = [place / "parts" / part for part in ("a.parquet", left)]
    files[1].parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(place / "train.parquet", files[0])
    if files[1].name == "link":
        files[1].hardlink_to(files[0])
    elif files[1].name == "latest":
        files[1].symlink_to("a.parquet")
    elif files[1].suffix in (".txt", ".crc"):
        files[1].write_text("no rows")
    else:
        shutil.copy(place / "train.parquet", files[1])
    for given in ("parts", "parts/*", "parts/*.parquet"):
        assert [file.path for file in open_files(place / given)] == files[:1]


@pytest.mark.parametrize("given", ["parts", "parts/*.parquet", "parts/*"])
def test_parts_of_what_was_written_before(place, given):
    """NVTabular leaves them where it writes fewer, and names in a list what it wrote."""
    (place / "parts").mkdir()
    for number in range(3):
        shutil.copy(place / "train.parquet", place / "parts" / f"part_{number}.parquet")
    names = [f"{place}/parts/part_{number}.parquet" for number in range(3)]
    (place / "parts" / "_file_list.txt").write_text("\n".join(["2", *names[:2], ""]))
    words = ["parts must be those that _file_list.txt", "part_2.parquet, which it does not name"]
    refused(argv(place, place / given), [*words, "remove such parts"], folder=place)
    listed = open_files(names[:2])  # by name
    (place / "parts" / "part_2.parquet").unlink()
    assert [file.path for file in open_files(place / given)] == [file.path for file in listed]
    (place / "parts" / "part_1.parquet").unlink()
    if given == "parts":
        words = ["part_1.parquet, which it names, and which is not there", "remove _file_list.txt"]
        refused(argv(place, place / given), words, folder=place)
    (place / "parts" / "_file_list.txt").write_text("of another program\n")
    assert [file.path for file in open_files(place / given)] == [listed[0].path]


def test_a_second_writing_of_fewer_parts(place):
    """As NVTabular itself leaves a folder."""
    folder, workflow = place / "parts", nvt.Workflow(["click", "user"] >> ops.AddMetadata())
    workflow.fit(Dataset(raw_log()))
    for rows, parts in ((raw_log(), 3), (raw_log()[:20], 1)):
        workflow.transform(Dataset(rows, npartitions=3)).to_parquet(str(folder), output_files=parts)
    refused(argv(place, folder), ["_file_list.txt", "part_1.parquet and 1 more"], folder=place)
    assert nvt.Dataset(str(folder), engine="parquet").num_rows == 20


def test_a_test_part_of_other_types(place):
    table = pq.read_table(place / "train.parquet")
    listed = column("user", lambda c: pa.array([[v] for v in c.to_pylist()]))
    pq.write_table(listed(table), place / "test.parquet")
    words = ["'user'", "integer ids", "list<", "test.parquet"]
    refused(argv(place, test=place / "test.parquet"), words, folder=place)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["schema.json", "Remove it"]),
        ("{", ["schema.json", "Remove it"]),
        ('{"feature": 5}', ["schema.json", "Remove it"]),
    ],
)
def test_a_schema_beside_the_parquet_that_is_none(place, text, words):
    (place / ".merlin").mkdir()
    (place / ".merlin" / "schema.json").write_text(text)
    refused(argv(place), words, folder=place)


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        (lambda out: ["click", "price"] >> ops.FillMissing(), ["a column of ids", "Categorify"]),
        (
            lambda out: (["user"] >> ops.AddMetadata(tags=[Tags.CATEGORICAL])) + ["click"],
            ["int domain", "'user'", "Categorify"],
        ),
        (
            lambda out: (
                (["user"] >> ops.Categorify(out_path=out) >> ops.Rename(name="user id")) + ["click"]
            ),
            ["Missing: 'user id'"],
        ),
        (
            lambda out: (
                (
                    ["user"]
                    >> ops.Rename(name="order")
                    >> ops.Categorify(out_path=out)
                    >> ops.Rename(name="user")
                )
                + ["click"]
            ),
            ["a column called 'order'", "the ids of others", "Rename it"],
        ),
    ],
    ids=["no ids", "no domain", "another name", "order"],
)
def test_workflows_of_other_pipelines(place, nodes, words):
    shutil.rmtree(place / "workflow")
    fitted(place / "workflow", nodes(str(place / "fitted")))
    refused(argv(place), words, folder=place)


def test_a_workflow_that_was_not_fitted(place):
    shutil.rmtree(place / "workflow")
    nvt.Workflow(["user"] >> ops.Categorify()).save(str(place / "workflow"))
    refused(argv(place), ["must be fitted", "Save it after fit"], folder=place)


# What was adopted and is no longer as it was


AFTER: dict[str, tuple[Callable[[Path], Any], list[Any]]] = {
    "gone": (Path.unlink, ["adopted parquet must stay where it was", *HERE, "Put it back"]),
    "cut": (lambda p: cut(p, 500), ["adopted parquet must stay as it was", *HERE]),
    "another of its size and time": (
        lambda p: (s := p.stat(), flip(p, 40), os.utime(p, ns=(s.st_atime_ns, s.st_mtime_ns))),
        ["adopted parquet must stay as it was", *HERE],
    ),
    "a folder": (lambda p: (p.unlink(), p.mkdir()), ["adopted parquet must stay", *HERE]),
}


@pytest.mark.parametrize("change", AFTER)
def test_adopted_parquet_that_changed(place, change):
    damage, words = AFTER[change]
    assert command(argv(place)).code == 0
    damage(place / "train.parquet")
    refused(["frequencies", place / "out"], words, folder=place)


@pytest.mark.parametrize(
    "files", [None, [], {"train": None}, {"train": [], "test": [{}]}, {"train": ["x"], "test": []}]
)
def test_an_adopted_record_that_is_spoiled(place, files):
    assert command(argv(place)).code == 0
    record = json.loads((place / "out" / "prepare.json").read_text())
    (place / "out" / "prepare.json").write_text(json.dumps({**record, "files": files}))
    refused(["frequencies", place / "out"], ["'files'", "prepare.json"], folder=place)


def test_what_is_odd_but_good(place):
    """Narrow, unsigned and large types, booleans, empty lists: what a workflow may write."""
    genres = pq.read_table(place / "train.parquet")["genres"].to_pylist()
    genres[:2] = [[], [3]]
    changes = {
        "click": cast(pa.bool_()),
        "user": cast(pa.uint8()),
        "item": cast(pa.int16()),
        "genres": pa.array(genres, pa.large_list(pa.uint64())),
        "price": cast(pa.float32()),
    }
    for name, values in changes.items():
        rewritten(place, column(name, values))
    (place / "with spaces ünï").mkdir()
    done = command(argv(place, out=place / "with spaces ünï" / "[out]*"))
    assert done.code == 0, done.err
    done = command(["frequencies", place / "with spaces ünï" / "[out]*"])
    assert done.code == 0, done.err
