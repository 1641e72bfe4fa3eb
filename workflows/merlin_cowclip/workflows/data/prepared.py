"""A prepared folder, opened: what lies in it and where, and whether it is as it was written.

`etl.py`, `adopt.py` and `top_ids.py` write one (`saved_workflow.py`); every command opens it here.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq

from merlin_cowclip.plugins._checks import is_whole
from merlin_cowclip.workflows.data.confirmed_workflow import load_confirmed
from merlin_cowclip.workflows.data.spec import DatasetSpec
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.manifest import (
    check_manifest,
    checksum,
    entry_of,
    is_manifest,
)
from merlin_cowclip.workflows.quiet import quiet_imports

if TYPE_CHECKING:
    import pandas as pd

FORMAT_VERSION = 2
RECORD = "prepare.json"  # written last: without it the folder is not whole
PARTS = ("train", "test")
MEMBERS = {*PARTS, "workflow", "counts", "schema.pbtxt", ".merlin"}


def file_state(path: Path) -> dict[str, Any]:
    """By what adopted parquet is known again: ``path``, ``mtime_ns``, and a manifest's entry."""
    return {"path": str(path), "mtime_ns": path.stat().st_mtime_ns, **entry_of(path)}


@dataclass(frozen=True)
class PreparedData:
    """Prepared training and test data; open one with `PreparedData.open`.

    ``train/*.parquet`` (rows shuffled), ``test/*.parquet`` (rows in the log's order), ``workflow/``
    (NVTabular), ``schema.pbtxt``, ``counts/<field>.parquet`` and ``prepare.json``. An adopted
    pipeline's parquet lies elsewhere, as ``prepare.json`` says, and may have no test part.
    """

    path: Path
    spec: DatasetSpec
    record: dict[str, Any] = field(repr=False)

    @classmethod
    def open(cls, path: str | Path) -> PreparedData:
        """The folder that `prepare`, `adopt` or `frequencies --top-k` wrote.

        It is held against its manifest (see `manifest`), and its parts against its record, from
        their footers: no row is read.

        Raises:
            UserError: not there, not whole, of another version, or a file of it is gone, was added
                to a part, or has changed.
        """
        path = Path(path)
        if not os.path.isdir(path):  # which is false, too, of a name that is too long
            raise UserError(
                f"prepared data must be a folder. Received: {path}. Write one with "
                "'merlin-cowclip prepare'"
            )
        record = _read_record(path)
        data = cls(path, _spec_of(record, path), record)
        data._check_manifest("")
        for part in PARTS:
            data.footers(part)
        return data

    def _check_manifest(self, part: str) -> None:
        """Of one part, or ("") of what belongs to none."""
        of_part = {name: name.split("/")[0] for name in self.record["manifest"]}
        members = {
            name: entry
            for name, entry in self.record["manifest"].items()
            if of_part[name] == part or (not part and of_part[name] not in PARTS)
        }
        needed = () if part else _needed(self)
        check_manifest(self.path, members, "prepared data", _AGAIN, needed)

    def footers(self, part: str) -> dict[Path, pq.FileMetaData]:
        """The footers of a part's files, in their order, held against the record.

        Raises:
            UserError: a file is gone, is none of the part's, is no whole parquet file, has not its
                columns, or the rows are not as many as they were.
        """
        adopted = "files" in self.record
        if adopted:
            for state in self.record["files"][part]:
                check_unchanged(state)
        else:
            self._check_manifest(part)
            self._check_members(part)
        footers = {}
        for path in self._files(part):
            try:
                footers[path] = pq.read_metadata(path)
            except (OSError, pa.ArrowException) as error:
                _refuse_part(path, f"which is no whole parquet file ({error})", adopted)
            columns = footers[path].schema.to_arrow_schema().names
            for name in (self.spec.label, *self.spec.fields):
                if name not in columns:
                    _refuse_part(path, f"without column {name!r}", adopted)
        rows = sum(footer.num_rows for footer in footers.values())
        if rows != self.rows[part]:
            where = next(iter(footers), self.path / part)
            found = f"a {part} part of {rows:,} rows, which had {self.rows[part]:,}"
            _refuse_part(where, found, adopted)
        return footers

    def _check_members(self, part: str) -> None:
        """What is in a part's folder belongs to it: another file would not be read in silence."""
        members = set(self._files(part))
        for path in sorted((self.path / part).glob("*.parquet")):
            if path not in members and not path.name.startswith("."):
                raise UserError(
                    f"a part of prepared data must hold what was written there alone. Received: "
                    f"{path}, which was not. Take it out, or prepare the data with it"
                )

    @property
    def train_files(self) -> list[Path]:
        """The training part's files, by name; rows are shuffled across all of them.

        Those of an adopted pipeline lie where they were, in the order given.
        """
        return self._files("train")

    @property
    def test_files(self) -> list[Path]:
        """The test part's files, by name; rows keep the log's order. May be none, if adopted."""
        return self._files("test")

    def _files(self, part: str) -> list[Path]:
        if "files" in self.record:
            return [Path(file["path"]) for file in self.record["files"][part]]
        names = [name for name in self.record["manifest"] if name.startswith(f"{part}/")]
        return [self.path / name for name in sorted(names) if name.endswith(".parquet")]

    @property
    def rows(self) -> dict[str, int]:
        """Rows of each part: ``{"train": …, "test": …}``."""
        return dict(self.record["rows"])

    @property
    def cardinalities(self) -> dict[str, int]:
        """Per id field, how many rows its table needs: padding, missing and unknown included."""
        return dict(self.record["cardinalities"])

    @functools.cached_property
    def domains(self) -> list[tuple[str, ...]]:
        """The id fields by int domain: those of one share their ids, and the rows of a table.

        Raises:
            UserError: two of one domain differ in size.
        """
        if self.record.get("ranges") is not None:  # prepared here, where each has its own
            return [(name,) for name in self.spec.ids]
        return domains_of({name: self.schema[name] for name in self.spec.ids}, self.cardinalities)

    @property
    def table_rows(self) -> int:
        """The rows of a table for all fields: as `cardinalities`, those of a shared domain once."""
        return sum(self.cardinalities[fields[0]] for fields in self.domains)

    @property
    def report(self) -> dict[str, Any]:
        """What the data is like: rows and clicks by part, and by field what was found.

        Of ids: occurrences in the training part, distinct ones, and the occurrences of missing ones
        and of those below the threshold; of the test part the same, and as `test_unknown` the
        occurrences of those that have no id of their own. Of numbers: range, mean, missing and not
        finite ones (``not_finite``, among the missing of both parts), and how many of the test part
        lie beyond the range.
        """
        return dict(self.record["report"])

    @property
    def seed(self) -> int:
        """The seed of the split and the shuffle; 0 for an adopted pipeline, which had neither."""
        return int(self.record.get("seed", 0))

    @functools.cached_property
    def schema(self) -> Any:
        """The columns as a ``merlin.schema.Schema``, tagged; ids carry their domain.

        Raises:
            UserError: ``schema.pbtxt`` is no schema, or has not the label and every field.
        """
        with quiet_imports():
            from merlin.schema.io.tensorflow_metadata import TensorflowMetadata
        path = self.path / "schema.pbtxt"
        try:
            text = path.read_text(encoding="utf-8")
            schema = TensorflowMetadata.from_proto_text(text).to_merlin_schema()
        except Exception as error:  # the parser's own, and whatever it makes of half a schema
            raise UserError(
                f"prepared data must hold its schema. Received: {path}: {error}. {_AGAIN}"
            ) from None
        for name in (self.spec.label, *self.spec.fields):
            if name not in schema.column_names:
                raise UserError(
                    "the schema of prepared data must have the label and every field. Received: "
                    f"{path}, without {name!r}. {_AGAIN}"
                )
        return schema

    def counts(self, field: str) -> pd.DataFrame:
        """How often each id of a field occurs in the training part: ``id``, ``raw``, ``count``.

        Row i is id i: 0 padding, 1 missing, 2 unknown (raw is None for these), 3 the most
        frequent id. The counts of a one-hot field sum up to the training rows. In an adopted
        pipeline ids have the order of its own workflow, and hashed ones have no raw id.
        """
        import pandas as pd

        if field not in self.spec.ids:
            raise UserError(
                f"field must be one of {', '.join(map(repr, self.spec.ids))}. Received: {field!r}"
            )
        return pd.read_parquet(self.path / "counts" / f"{field}.parquet")

    def workflow(self, *, trust: bool = False) -> Any:
        """The fitted ``nvtabular.Workflow``: raw rows in, the rows of ``train/`` and ``test/`` out.

        Loading runs code from the folder (NVTabular uses cloudpickle): open only your own.

        Args:
            trust: load it also where the manifest does not confirm every file of it.

        Raises:
            UserError: the manifest does not, at this moment; or it does not load here.
        """
        manifest = self.record["manifest"]
        return load_confirmed(self.path, manifest, "prepared data", f"{_AGAIN}.", trust=trust)


_AGAIN = "Prepare the data again"
_ADOPT_AGAIN = "Put it back as it was, or adopt it again into another folder"


def _read_record(path: Path) -> dict[str, Any]:
    """``prepare.json``, of a format that can be opened and with everything that commands read."""
    place = path / RECORD
    try:
        record = json.loads(place.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"prepared data must hold {RECORD}, which is written last. Received: {path}, "
            "not a whole prepared folder. Write one with 'merlin-cowclip prepare'"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{place} must be readable JSON. Received: {error}. {_AGAIN}") from None
    version = record.get("format") if isinstance(record, dict) else None
    if version != FORMAT_VERSION or type(version) is not int:
        raise UserError(
            f"prepared data must be of format {FORMAT_VERSION}. Received: {version!r} in {path}. "
            "Prepare it again with this version"
        )
    required: dict[str, Callable[[Any], bool]] = {
        "spec": lambda value: isinstance(value, dict),
        "rows": lambda value: _numbers_by(PARTS, value, 0) and value["train"] > 0,
        "cardinalities": lambda value: isinstance(value, dict),
        "report": lambda value: isinstance(value, dict),
        "manifest": is_manifest,
    }
    if "files" in record:
        required["files"] = lambda value: (
            isinstance(value, dict)
            and set(value) == set(PARTS)
            and all(isinstance(v, list) and all(map(_is_file_state, v)) for v in value.values())
        )
    if "seed" in record:
        required["seed"] = lambda value: is_whole(value, 0)
    for key, holds in required.items():
        if key not in record or not holds(record[key]):
            found = "another value" if key in record else "none"
            raise UserError(
                f"{RECORD} must hold {key!r} as it was written. Received: {found} in {place}. "
                f"{_AGAIN}"
            )
    return record


def _spec_of(record: dict[str, Any], path: Path) -> DatasetSpec:
    """The record's specification, which its cardinalities must fit."""
    try:
        spec = DatasetSpec.from_dict(record["spec"])
    except UserError as error:
        raise UserError(f"{path / RECORD}: {error}. {_AGAIN}") from None
    if not _numbers_by(spec.ids, record["cardinalities"], 1):
        raise UserError(
            f"{RECORD} must hold a positive cardinality for every field of ids. "
            f"Received: others in {path / RECORD}. {_AGAIN}"
        )
    return spec


def _numbers_by(keys: Sequence[str], value: Any, least: int) -> bool:
    return (
        isinstance(value, dict)
        and set(value) == set(keys)
        and all(is_whole(number, least) for number in value.values())
    )


def _is_file_state(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("path"), str)
        and isinstance(value.get("mtime_ns"), int)
        and is_manifest({"": value})
    )


def _needed(data: PreparedData) -> list[str]:
    """What every folder has beside its parts."""
    files = ["schema.pbtxt", "workflow/metadata.json", "workflow/workflow.pkl"]
    return files + [f"counts/{name}.parquet" for name in data.spec.ids]


def check_unchanged(state: dict[str, Any]) -> None:
    """Refuse adopted parquet that is not as `file_state` had it.

    Raises:
        UserError: it is gone or has changed.
    """
    path = Path(state["path"])
    try:
        now = path.stat()
        same = (now.st_size, now.st_mtime_ns) == (state["bytes"], state["mtime_ns"])
        same = same and checksum(path) == state["sha256"]
    except OSError as error:
        raise UserError(
            f"adopted parquet must stay where it was. Received: {path}: {error.strerror}. "
            f"{_ADOPT_AGAIN}"
        ) from None
    if not same:
        raise UserError(
            f"adopted parquet must stay as it was. Received: {path}, which has changed since. "
            f"{_ADOPT_AGAIN}"
        )


def _refuse_part(path: Path, found: str, adopted: bool) -> NoReturn:
    raise UserError(
        f"the parts of prepared data must stay as they were written. Received: {path}, {found}. "
        f"{_ADOPT_AGAIN if adopted else _AGAIN}"
    ) from None


def domains_of(
    columns: Mapping[str, Any], cardinalities: Mapping[str, int], hashed: Collection[str] = ()
) -> list[tuple[str, ...]]:
    """Id fields by their int domain, as a table shares rows among those of one.

    Args:
        columns: by field its schema.
        cardinalities: by field.
        hashed: fields whose ids are hashed, which no vocabulary has.

    Raises:
        UserError: two of one domain differ in size, or in how they got their ids.
    """
    found: dict[str, list[str]] = {}
    for name, column in columns.items():
        domain = column.int_domain  # without a name it is the field's own
        found.setdefault((domain and domain.name) or name, []).append(name)
    for domain, (first, *others) in found.items():
        for name in others:
            sizes = cardinalities[first], cardinalities[name]
            if sizes[0] != sizes[1] or (first in hashed) != (name in hashed):
                raise UserError(
                    "fields of one int domain must have one vocabulary, for they share the rows of "
                    f"a table. Received: {first!r} with {sizes[0]:,} ids and {name!r} with "
                    f"{sizes[1]:,}, both of the domain {domain!r}. Encode them jointly, or give "
                    "their domains names of their own: AddMetadata(properties={'domain': "
                    "{'min': 0, 'max': …, 'name': …}})"
                )
    return [tuple(fields) for fields in found.values()]
