"""A prepared folder: what is in it and where, and whether it is as it was written.

`prepare`, `adopt` and `frequencies --top-k` write one; every command opens it here.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from merlin_cowclip.plugins._checks import is_whole
from merlin_cowclip.workflows.data.confirmed_workflow import load_confirmed
from merlin_cowclip.workflows.data.spec import DatasetSpec
from merlin_cowclip.workflows.errors import UserError, quoted
from merlin_cowclip.workflows.folders import package_versions, write_json
from merlin_cowclip.workflows.manifest import (
    check_manifest,
    checksum,
    entry_of,
    is_manifest,
    manifest_of,
)
from merlin_cowclip.workflows.quiet import quiet_imports

if TYPE_CHECKING:
    import pandas as pd

FORMAT_VERSION = 2
RECORD = "prepare.json"  # written last: without it the folder is not whole
PARTS = ("train", "test")
MEMBERS = {*PARTS, "workflow", "counts", "schema.pbtxt", ".merlin"}
_AGAIN = "Prepare the data again"
_ADOPT_AGAIN = "Put it back as it was, or adopt it again into another folder"


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

        Its files are compared with its manifest once, here (see `manifest`); no row is read.

        Raises:
            UserError: not a prepared folder, of another version, or a file is missing, added to a
                part, or changed.
        """
        path = Path(path)
        if not os.path.isdir(path):  # which is false, too, of a name that is too long
            raise UserError(
                f"prepared data must be a folder. Received: {path}. Write one with "
                "'merlin-cowclip prepare'"
            )
        record = _read_record(path)
        try:
            spec = DatasetSpec.from_dict(record["spec"])
        except UserError as error:
            raise UserError(f"{path / RECORD}: {error}. {_AGAIN}") from None
        data = cls(path, spec, record)
        needed = ["schema.pbtxt", "workflow/metadata.json", "workflow/workflow.pkl"]
        needed += [f"counts/{name}.parquet" for name in spec.ids]
        check_manifest(path, data._members(""), "prepared data", _AGAIN, needed)
        for part in PARTS:
            data.check_part(part)
        return data

    def _members(self, part: str) -> dict[str, Any]:
        """The manifest of one part, or ("") of what belongs to none."""
        manifest = self.record["manifest"]
        folders = {name: name.split("/")[0] for name in manifest}
        part_of = {name: folder * (folder in PARTS) for name, folder in folders.items()}
        return {name: entry for name, entry in manifest.items() if part_of[name] == part}

    def check_part(self, part: str) -> None:
        """Check that a part has its files as they were written, and no others.

        Raises:
            UserError: it has not.
        """
        if self._is_adopted:
            for state in self.record["files"][part]:
                check_unchanged(state)
        else:
            check_manifest(self.path, self._members(part), "prepared data", _AGAIN)
            members = {*self._files(part)}
            for path in sorted((self.path / part).glob("*.parquet")):
                if path not in members and not path.name.startswith("."):
                    raise UserError(
                        f"{path} was not written by prepare. Take it out, or prepare the data with "
                        "it"
                    )
        self.footers(part)

    def footers(self, part: str) -> dict[Path, pq.FileMetaData]:
        """The footers of a part's files, in their order.

        Raises:
            UserError: a file is missing or not parquet, lacks a column, or the number of rows is
                not that of the record.
        """
        remedy = _ADOPT_AGAIN if self._is_adopted else _AGAIN
        footers = {}
        for path in self._files(part):
            try:
                footers[path] = pq.read_metadata(path)
            except (OSError, pa.ArrowException) as error:
                raise UserError(f"cannot read {path}: {error}. {remedy}") from None
            columns = footers[path].schema.to_arrow_schema().names
            for name in (self.spec.label, *self.spec.fields):
                if name not in columns:
                    raise UserError(f"{path} has no column {name!r}. {remedy}")
        rows = sum(footer.num_rows for footer in footers.values())
        if rows != self.rows[part]:
            raise UserError(
                f"{self.path}: the {part} part has {rows:,} rows, expected {self.rows[part]:,}. "
                f"{remedy}"
            )
        return footers

    @property
    def _is_adopted(self) -> bool:
        return "files" in self.record

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
        if self._is_adopted:
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
        """The columns as a ``merlin.schema.Schema``, tagged; ids carry their domain."""
        with quiet_imports():
            from merlin.schema.io.tensorflow_metadata import TensorflowMetadata
        text = (self.path / "schema.pbtxt").read_text(encoding="utf-8")
        return TensorflowMetadata.from_proto_text(text).to_merlin_schema()

    def counts(self, field: str) -> pd.DataFrame:
        """How often each id of a field occurs in the training part: ``id``, ``raw``, ``count``.

        Row i is id i: 0 padding, 1 missing, 2 unknown (raw is None for these), 3 the most
        frequent id. The counts of a one-hot field sum up to the training rows. In an adopted
        pipeline ids have the order of its own workflow, and hashed ones have no raw id.
        """
        import pandas as pd

        self.check_field(field)
        return pd.read_parquet(self.path / "counts" / f"{field}.parquet")

    def check_field(self, field: str) -> None:
        """Raise UserError if there is no such field of ids."""
        if field not in self.spec.ids:
            raise UserError(f"field must be one of {quoted(self.spec.ids)}. Received: {field!r}")

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


def write_record(folder: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    """Write ``prepare.json``, the last file, with package versions and the manifest; returns it."""
    others = {path.name for path in folder.iterdir()} - MEMBERS
    record = {
        **record,
        "versions": package_versions(),
        "format": FORMAT_VERSION,
        "manifest": manifest_of(folder, others),
    }
    write_json(folder / RECORD, record)
    return record


def file_state(path: Path) -> dict[str, Any]:
    """Fingerprint of adopted parquet: ``path``, ``mtime_ns``, and an entry of the manifest."""
    return {"path": str(path), "mtime_ns": path.stat().st_mtime_ns, **entry_of(path)}


def check_unchanged(state: Mapping[str, Any]) -> None:
    """Check that adopted parquet has the fingerprint that `file_state` took.

    Raises:
        UserError: the file is missing or has changed.
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


def _read_record(path: Path) -> dict[str, Any]:
    """``prepare.json``, with everything that commands read."""
    place = path / RECORD
    try:
        record = json.loads(place.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{path} is not a whole prepared folder: it has no {RECORD}, which is written last. "
            "Write one with 'merlin-cowclip prepare'"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read {place}: {error}. {_AGAIN}") from None
    version = record.get("format") if isinstance(record, dict) else None
    if version != FORMAT_VERSION or type(version) is not int:
        raise UserError(
            f"{place} has format {version!r} instead of {FORMAT_VERSION}. Prepare the data again "
            "with this version"
        )
    for key, is_valid in _VALID.items():
        if not is_valid(record.get(key)):
            raise UserError(f"{place} is not valid: {key!r} was changed. {_AGAIN}")
    return record


def _are_numbers(keys: Collection[str], value: Any, least: int) -> bool:
    is_mapping = isinstance(value, dict) and value.keys() >= set(keys)
    return is_mapping and all(is_whole(number, least) for number in value.values())


def _are_files(value: Any) -> bool:
    if value is None:  # not adopted
        return True
    return (
        isinstance(value, dict)
        and value.keys() == set(PARTS)
        and all(isinstance(files, list) for files in value.values())
        and all(
            is_manifest({"": file}) and {"path", "mtime_ns"} <= file.keys()
            for files in value.values()
            for file in files
        )
    )


# Key of the record → whether its value can be read.
_VALID: dict[str, Callable[[Any], bool]] = {
    "spec": lambda value: isinstance(value, dict),
    "rows": lambda value: _are_numbers(PARTS, value, 0) and value["train"] > 0,
    "cardinalities": lambda value: _are_numbers((), value, 1),
    "report": lambda value: isinstance(value, dict),
    "manifest": is_manifest,
    "seed": lambda value: value is None or is_whole(value, 0),
    "files": _are_files,
}


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
