# SPDX-License-Identifier: Apache-2.0
"""Input files: local ones, and the URLs that pyarrow or fsspec opens.

Options of a URL are those of pyarrow: ``s3://logs/a.csv?endpoint_override=host:9000&scheme=http``.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import fsspec
import pyarrow as pa
from dask.utils import natural_sort_key
from fsspec.utils import glob_translate
from pyarrow import fs

from merlin_cowclip.workflows.errors import UserError, clipped

Input = Path | str  # a local file, or the URL of another
HIDDEN = ("_", ".")  # how names begin that Spark and Hive skip
_URL = re.compile(r"([A-Za-z][\w+.-]*)://([^/?]*)([^?]*)(.*)", re.DOTALL)
_HAS_BUCKET = {"s3": True, "gs": True, "gcs": True, "hdfs": False, "viewfs": False}

_arrow_system = functools.lru_cache(fs.FileSystem.from_uri)


def plain(path: Input) -> str:
    """A path or URL, without the options of a URL."""
    return path.partition("?")[0] if isinstance(path, str) else str(path)


@contextlib.contextmanager
def _located(path: Input) -> Iterator[tuple[fs.FileSystem, str, Callable[[str], Input]]]:
    """The file system, the path in it, and what makes inputs of such paths.

    An OSError in this context becomes a UserError that names the file.
    """
    try:
        yield (fs.LocalFileSystem(), str(path), Path) if isinstance(path, Path) else _remote(path)
    except OSError as error:
        remedy = "the URL, credentials, connection and file" * isinstance(path, str)
        raise UserError(
            f"cannot read input file {path}: {clipped(str(error))}. Check "
            f"{remedy or 'the path, and copy or write the file again'}"
        ) from None


def _remote(url: str) -> tuple[fs.FileSystem, str, Callable[[str], Input]]:
    scheme, host, key, options = _URL.fullmatch(url).groups()  # type: ignore[union-attr]
    name = host.rpartition("@")[2]
    try:
        if scheme in _HAS_BUCKET:
            bucket = name if _HAS_BUCKET[scheme] else ""
            system, _ = _arrow_system(f"{scheme}://{host}/{options}")
            return system, bucket + key, lambda p: f"{scheme}://{host}{p[len(bucket) :]}{options}"
        system, path = fsspec.core.url_to_fs(url)
        return fs.PyFileSystem(_Handler(system)), path, system.unstrip_protocol
    except (ImportError, NotImplementedError, ValueError) as error:  # no package, scheme or option
        raise OSError(error) from error


class _Handler(fs.FSSpecHandler):
    """A file system of fsspec, whose errors of reading become OSErrors."""

    def open_input_file(self, path: str) -> pa.PythonFile:
        """Open a file."""
        file = self.fs.open(path, cache_type="none")  # its readers buffer

        def read(size: int, of: Callable[[int], bytes] = file.read) -> bytes:
            try:
                return of(size)
            except Exception as error:
                raise OSError(str(error) or type(error).__name__) from error

        file.read = read
        return pa.PythonFile(file, mode="r")


@contextlib.contextmanager
def open_file(path: Input) -> Iterator[pa.NativeFile]:
    """Open a file of bytes; an OSError until it is closed becomes a UserError."""
    with (
        _located(path) as (system, name, _),
        system.open_input_file(os.fsencode(name)) as file,  # a name need not be UTF-8
    ):
        yield file


def file_info(path: Input) -> fs.FileInfo:
    """Type and size of a file."""
    with _located(path) as (system, name, _):
        return system.get_file_info(os.fsencode(name))


def expand_paths(inputs: str | Path | Sequence[str | Path]) -> dict[Input, Input | None]:
    """List the files of all inputs: in the order given, those of a glob or folder naturally.

    Returns the files with their root, below which names of folders give Hive's columns: the folder
    given, the fixed start of the glob, or None for a file.

    A folder means all files below it. In folders and globs, empty files and names that begin with
    ``_`` or ``.`` are skipped, as in Spark and Hive. Raises UserError if an input has no file, or a
    file is given twice.
    """
    files: list[tuple[Input, Input | None]] = []
    for given in [inputs] if isinstance(inputs, (str, Path)) else inputs:
        url = _URL.fullmatch(given) if isinstance(given, str) else None
        path = given if url and url[1] != "file" else Path(unquote(url[3]) if url else given)
        info = file_info(path)
        if info.type in (fs.FileType.NotFound, fs.FileType.Directory):
            matched = [*_below(path, info.type == fs.FileType.Directory)]
            files += matched
            if not matched:
                raise UserError(f"no input file found for {given}. Check the path")
        elif not info.size:
            what = "is empty" if info.size == 0 else "is not a regular file of known size"
            raise UserError(f"input file {path} {what}. Leave it out, or write it again")
        else:
            files.append((path, None))
    if not files:
        raise UserError("no input file given. Name at least one")
    refuse_twice([path for path, _ in files])
    return dict(files)


def _below(given: Input, is_folder: bool) -> Iterator[tuple[Input, Input]]:
    """The files with bytes of a folder or glob, but hidden ones, in natural order; and the root."""
    if isinstance(given, str) and given.startswith("http"):
        return  # which lists no files
    with _located(given) as (system, name, as_input):
        fixed = itertools.takewhile(lambda part: not glob.has_magic(part), name.split("/"))
        base = name.rstrip("/") if is_folder else "/".join(fixed)
        if isinstance(given, Path):
            matches = [name] if is_folder else glob.glob(name, recursive=True)
            paths = {path for match in matches for path in (Path(match), *Path(match).rglob("*"))}
            sizes = {str(path): path.stat().st_size for path in paths if path.is_file()}
        else:
            patterns = ["**"] if is_folder else [name, f"{name}/**"]
            wanted = re.compile("|".join(map(glob_translate, patterns)))
            selector = fs.FileSelector(base, allow_not_found=True, recursive=True)
            infos = [one for one in system.get_file_info(selector) if wanted.match(one.path)]
            sizes = {one.path: one.size for one in infos if one.type == fs.FileType.File}
    for path in sorted(sizes, key=lambda path: (natural_sort_key(path), path)):
        parts = os.path.relpath(path, base or ".").split("/")
        # "_day=1" is a partition of a column
        if sizes[path] and not any(p.startswith(HIDDEN) and "=" not in p for p in parts):
            yield as_input(path), as_input(base)


def refuse_twice(files: Iterable[Input]) -> None:
    """Raise UserError if a file is given twice; a local one by whatever name and link."""
    seen: dict[Any, Input] = {}
    for path in files:
        stat = path.stat() if isinstance(path, Path) else None
        first = seen.setdefault((stat.st_dev, stat.st_ino) if stat else path, path)
        if first is not path:
            raise UserError(f"input file {path} is given twice (first as {first}). Leave one out")
