"""Parquet that is there already: its files, and whether they are what a pipeline says."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq

import merlin_cowclip.workflows.pickled_types  # noqa: F401  (before parquet is read)
from merlin_cowclip.workflows.data.inputs import (
    as_list,
    in_folders,
    matches,
    unfinished,
)
from merlin_cowclip.workflows.data.prepared_data import file_state
from merlin_cowclip.workflows.data.sources.files import natural_order
from merlin_cowclip.workflows.data.spec import DatasetSpec
from merlin_cowclip.workflows.errors import UserError, quoted

PARTS = {"train": "training part", "test": "test part"}


_LIST = "_file_list.txt"


@dataclass(frozen=True)
class ParquetFile:
    """A parquet file of ours to read, its footer read."""

    path: Path  # absolute
    schema: pa.Schema
    rows: int
    state: dict[str, Any]  # as `file_state` gave it before anything was read


def open_files(given: str | Path | Sequence[str | Path]) -> list[ParquetFile]:
    """Files, globs and folders to files, their footers read.

    Raises:
        UserError: nothing there, not parquet, damaged, or without a row.
    """
    paths: list[Path] = []
    for one in as_list(given):
        paths += _expand(one)
    if not paths:
        raise UserError("at least one parquet file must be given. Received: none")
    files = []
    for path in map(Path.absolute, paths):
        try:
            state = file_state(path)
            with pq.ParquetFile(path) as parquet:
                rows = parquet.metadata.num_rows
                files.append(ParquetFile(path, parquet.schema_arrow.remove_metadata(), rows, state))
        except (pa.ArrowException, OSError) as error:
            bad_parquet(path, error)
        names = files[-1].schema.names
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise UserError(
                f"parquet must have every column once. Received twice: {quoted(twice)} in {path}. "
                "Write it again"
            )
    if not sum(file.rows for file in files):
        raise UserError(f"parquet must hold rows. Received: none in {paths[0]}{others(paths)}")
    return files


def _expand(given: str | Path) -> list[Path]:
    """The parquet files of one argument; of a folder or glob, only what is named so.

    Beside its parts, ``to_parquet`` writes ``_metadata``, ``_file_list.txt`` and more.
    """
    path = Path(given)
    # Of `os.path`: false, too, of a name that is too long, or a link to itself.
    if os.path.isfile(path):
        return [path]
    if os.path.isdir(path) and str(given):  # "" would be the folder that we are in
        found = list(path.iterdir())
    elif (globbed := matches(given)) is not None:
        found = [one for one in globbed if unfinished(given, one) is None]
    else:
        raise UserError(f"parquet must be there. Received: {str(given)!r}. Check the path")
    parts = [p for p in found if p.suffix == ".parquet" and p.name[0] not in "._"]
    homes = {home for p in found for home in p.parents}  # `**` finds a folder and what is in it
    parts = [p for p in parts if p not in homes]
    for part in parts:
        if not part.is_file():
            raise UserError(
                f"a part must be a file. Received: {part}, a folder or a link to nowhere. Put the "
                "file back, or name the parts one by one"
            )
    if parts:
        beside = sorted({*found} - {*parts} - homes, key=natural_order)
        _refuse_passed_over(beside, {_file_of(part) for part in parts})
        _check_listed(parts, whole=os.path.isdir(path))
    else:
        kind = "folder" if path.is_dir() else "pattern"
        raise UserError(
            f"a {kind} must hold files named *.parquet. Received: {str(given)!r}, without one. "
            "Name the files, or the folder that they lie in"
        )
    return sorted(parts, key=natural_order)


def _refuse_passed_over(found: Sequence[Path], read: Collection[tuple[int, int]]) -> None:
    """Refuse what was found beside parts and holds rows as they do, which would be missing.

    Files that begin as parquet does, whatever their name, but links to parts; and folders with any.
    """
    for one in found:
        if one.name[0] in "._":
            continue
        if not one.is_dir():
            if one.is_file() and _file_of(one) not in read and _is_parquet(one):
                raise UserError(
                    "parquet beside files named *.parquet must be named so, too. Received: "
                    f"{one}. Name it so, put it elsewhere, or name the files one by one"
                )
            continue
        for part in sorted(_files_within(one), key=natural_order):
            if _file_of(part) in read:
                continue
            if part.suffix == ".parquet" or _is_parquet(part):
                more = f"the folder, {one}" if part.suffix == ".parquet" else part
                raise UserError(
                    "parquet in a folder beside files must be given by itself, or left out. "
                    f"Received: {one.parent}, with {part}. Name the files, "
                    f"'{one.parent}/*.parquet', and {more}; or the files alone"
                )


def _check_listed(parts: Sequence[Path], *, whole: bool) -> None:
    """Hold parts to the list of them that Merlin's ``to_parquet`` writes beside them.

    It leaves what it wrote there before, maybe in more parts, with ids of another fit.

    Args:
        parts: that were found.
        whole: whether they are all that their folder has.

    Raises:
        UserError: one that the list has not; or one that it has, and that is not there.
    """
    for home in dict.fromkeys(part.parent for part in parts):
        try:
            number, *lines = (home / _LIST).read_text(encoding="utf-8").splitlines()
            if int(number) != len(lines):
                continue  # another program's
        except (OSError, ValueError):
            continue
        listed = {Path(line).name for line in lines}
        here = {part.name for part in parts if part.parent == home}
        for names, found in (
            (here - listed, "which it does not name: written before, maybe by another fit"),
            (listed - here if whole else set(), "which it names, and which is not there"),
        ):
            if names:
                name = min(names, key=lambda name: natural_order(Path(name)))
                more = f" and {len(names) - 1} more" if names - {name} else ""
                raise UserError(
                    f"parts must be those that {_LIST} beside them names, which NVTabular writes "
                    f"last. Received: {home / name}{more}, {found}. Write the folder anew, or "
                    f"remove {'such parts' if name in here else _LIST}, or name files one by one"
                )


def _files_within(folder: Path) -> Iterator[Path]:
    """Files of a folder, of folders in it and of those that links lead to, but hidden ones."""
    seen = {_file_of(folder)}
    for home, folders, names in os.walk(folder, onerror=_refuse_unread, followlinks=True):
        shown = {name: Path(home, name) for name in (*folders, *names) if name[0] not in "._"}
        folders[:] = [n for n in folders if n in shown and _file_of(shown[n]) not in seen]
        seen |= {_file_of(shown[name]) for name in folders}
        yield from (shown[n] for n in names if n in shown and shown[n].is_file())


def _file_of(path: Path) -> tuple[int, int]:
    """Which file it is, by whatever name and link."""
    status = path.stat()
    return status.st_dev, status.st_ino


def _is_parquet(path: Path) -> bool:
    """Whether it begins as parquet does."""
    try:
        with path.open("rb") as file:
            return file.read(4) == b"PAR1"
    except OSError as error:
        _refuse_unread(error)


def _refuse_unread(error: OSError) -> NoReturn:
    raise UserError(
        "what lies beside files named *.parquet must be readable, as rows may be in it. Received: "
        f"{error.filename}: {error.strerror}. Make it so, or name the files one by one"
    ) from None


def check_given_once(parts: dict[str, list[ParquetFile]]) -> None:
    """Refuse a file that is in a part twice, or in two."""
    seen: dict[tuple[int, int], str] = {}
    for part, files in parts.items():
        for file in files:
            known = _file_of(file.path)
            if known in seen:
                raise UserError(
                    f"a parquet file must be given once. Received twice: {file.path}, for the "
                    f"{PARTS[seen[known]]} and for the {PARTS[part]}. Leave one out"
                )
            seen[known] = part


def check_label(files: list[ParquetFile], label: str) -> None:
    """Refuse files without the label."""
    for file in files:
        if label not in file.schema.names:
            raise UserError(
                f"the label must be a column of the parquet. Received: {label!r}, but {file.path} "
                f"has {quoted(file.schema.names)}. Name another column, or let the workflow pass "
                "the label on"
            )


def bad_parquet(path: Path, error: Exception, place: str = "") -> NoReturn:
    """Raise UserError for a file that cannot be read."""
    raise UserError(
        f"parquet must be whole and readable. Received: {path}{place}: {error}. Write it again"
    ) from None


def check_present(columns: Iterable[str], files: list[ParquetFile]) -> None:
    """Refuse files without an input of the workflow."""
    for file in files:
        missing = [name for name in columns if name not in file.schema.names]
        if missing:
            raise UserError(
                "parquet must have every column that the workflow tags as an input. Missing: "
                f"{quoted(missing)} in {file.path}, which has {quoted(file.schema.names)}"
                f"{in_folders(missing, file.path)}. Give the parquet that this workflow wrote"
            )


def check_types(spec: DatasetSpec, files: list[ParquetFile]) -> None:
    """Every column has the same type in all files, and one that fits its role.

    The label may be in none of them.
    """
    label = [spec.label] if any(spec.label in file.schema.names for file in files) else []
    for file in files:
        for name in (*label, *spec.fields):
            kind, first = file.schema.field(name).type, files[0].schema.field(name).type
            if kind != first:
                raise UserError(
                    "the files of one part must have the same types. Received: "
                    f"{kind} for column {name!r} in {file.path}, and {first} in {files[0].path}. "
                    "Write them with one workflow"
                )
            rule, held = _type_rule(spec, name), kind.value_type if is_list(kind) else kind
            whole = pa.types.is_integer(held)
            fits = {
                "integer ids": whole and not is_list(kind),
                "lists of integer ids": whole and is_list(kind),
                "numbers": not is_list(kind)
                and (whole or pa.types.is_floating(kind) or pa.types.is_boolean(kind)),
                "0 or 1": not is_list(kind)
                and (whole or pa.types.is_floating(kind) or pa.types.is_boolean(kind)),
            }
            if not fits[rule]:
                remedy = "Change it in the workflow"
                if rule == "numbers" and is_list(kind):
                    remedy += (
                        ": a column for each of its numbers, or without its tag to leave it out"
                    )
                raise UserError(
                    f"column {name!r} must hold {rule}. Received: {kind} in {file.path}. {remedy}"
                )


def _type_rule(spec: DatasetSpec, name: str) -> str:
    if name == spec.label:
        return "0 or 1"
    if name in spec.continuous:
        return "numbers"
    return "lists of integer ids" if name in spec.lists else "integer ids"


def is_list(kind: pa.DataType) -> bool:
    """Whether a column of that type holds lists."""
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)


def others(files: Sequence[Any]) -> str:
    """What is said of files beyond the first."""
    return f" and {len(files) - 1} more" if len(files) > 1 else ""
