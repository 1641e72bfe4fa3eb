"""Prepared folders, which `prepare`, `adopt` and `frequencies --top-k` write."""

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
    """Prepared training and test data; open it with `PreparedData.open`.

    ``train/*.parquet`` (shuffled), ``test/*.parquet`` (in the log's order), ``workflow/``
    (NVTabular), ``schema.pbtxt``, ``counts/<field>.parquet`` and ``prepare.json``. The parquet of
    an adopted pipeline is elsewhere, and may have no test split.
    """

    path: Path
    spec: DatasetSpec
    record: dict[str, Any] = field(repr=False)

    @classmethod
    def open(cls, path: str | Path) -> PreparedData:
        """Open a folder and compare its files with the manifest; no row is read.

        Raises:
            UserError: not a prepared folder, of another version, or a file is missing, new or
                changed.
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
        """The manifest of one part, or ("") of the other files."""
        found = {}
        for name, entry in self.record["manifest"].items():
            folder = name.split("/")[0]
            if part == (folder if folder in PARTS else ""):
                found[name] = entry
        return found

    def check_part(self, part: str) -> None:
        """Raise UserError unless a part has its files as they were written, and no others."""
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
        """The footers of a part's files, in order.

        Raises:
            UserError: a file is missing, not parquet or lacks a column, or rows are missing.
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
        """The files of the training split, by name, or if adopted in the order given."""
        return self._files("train")

    @property
    def test_files(self) -> list[Path]:
        """The files of the test split; may be none if adopted."""
        return self._files("test")

    def _files(self, part: str) -> list[Path]:
        if self._is_adopted:
            return [Path(file["path"]) for file in self.record["files"][part]]
        names = [name for name in self.record["manifest"] if name.startswith(f"{part}/")]
        return [self.path / name for name in sorted(names) if name.endswith(".parquet")]

    @property
    def rows(self) -> dict[str, int]:
        """Rows by split: ``{"train": …, "test": …}``."""
        return dict(self.record["rows"])

    @property
    def cardinalities(self) -> dict[str, int]:
        """Embedding rows by field, including padding, missing and unknown."""
        return dict(self.record["cardinalities"])

    @functools.cached_property
    def domains(self) -> list[tuple[str, ...]]:
        """The fields of ids by int domain: those of one domain share an embedding table."""
        if self.record.get("ranges") is not None:  # prepared here, where each has its own
            return [(name,) for name in self.spec.ids]
        return domains_of({name: self.schema[name] for name in self.spec.ids}, self.cardinalities)

    @property
    def table_rows(self) -> int:
        """Embedding rows of all tables."""
        return sum(self.cardinalities[fields[0]] for fields in self.domains)

    @property
    def report(self) -> dict[str, Any]:
        """Rows and clicks by split, and statistics by field.

        IDs: occurrences in the training split, distinct IDs, occurrences of missing IDs and of
        those below the threshold; in the test split also of IDs without an embedding
        (``test_unknown``). Numbers: range, mean, missing and not finite numbers (``not_finite``, in
        both splits), and test numbers out of range.
        """
        return dict(self.record["report"])

    @property
    def seed(self) -> int:
        """The seed of split and shuffle; 0 if adopted."""
        return int(self.record.get("seed", 0))

    @functools.cached_property
    def schema(self) -> Any:
        """The columns as a ``merlin.schema.Schema``, with tags and int domains."""
        with quiet_imports():
            from merlin.schema.io.tensorflow_metadata import TensorflowMetadata
        text = (self.path / "schema.pbtxt").read_text(encoding="utf-8")
        return TensorflowMetadata.from_proto_text(text).to_merlin_schema()

    def counts(self, field: str) -> pd.DataFrame:
        """How often each ID of a field occurs in the training split: ``id``, ``raw``, ``count``.

        Row i is ID i: 0 padding, 1 missing, 2 unknown (``raw`` is None for these), 3 the most
        frequent ID. In an adopted pipeline IDs have the order of its own workflow.
        """
        import pandas as pd

        self.check_field(field)
        return pd.read_parquet(self.path / "counts" / f"{field}.parquet")

    def check_field(self, field: str) -> None:
        """Raise UserError if there is no such field of ids."""
        if field not in self.spec.ids:
            raise UserError(f"field must be one of {quoted(self.spec.ids)}. Received: {field!r}")

    def workflow(self, *, trust: bool = False) -> Any:
        """The fitted ``nvtabular.Workflow``; loading it runs code from the folder (cloudpickle).

        Args:
            trust: load it also if the manifest does not confirm its files.

        Raises:
            UserError: the manifest does not confirm it, or it does not load here.
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
    """Fingerprint of adopted parquet: ``path``, ``mtime_ns`` and an entry of a manifest."""
    return {"path": str(path), "mtime_ns": path.stat().st_mtime_ns, **entry_of(path)}


def check_unchanged(state: Mapping[str, Any]) -> None:
    """Raise UserError if adopted parquet has not the fingerprint that `file_state` took."""
    path = Path(state["path"])
    try:
        now = path.stat()
        same = (now.st_size, now.st_mtime_ns) == (state["bytes"], state["mtime_ns"])
        found = "" if same and checksum(path) == state["sha256"] else "has changed"
    except OSError as error:
        found = f"cannot be read ({error.strerror})"
    if found:
        raise UserError(f"adopted parquet {path} {found}. {_ADOPT_AGAIN}")


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
    is_mapping = isinstance(value, dict) and value.keys() == set(PARTS)
    return is_mapping and all(
        isinstance(files, list)
        and all(is_manifest({"": f}) and {"path", "mtime_ns"} <= f.keys() for f in files)
        for files in value.values()
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
    columns: Mapping[str, Any], cardinalities: Mapping[str, int]
) -> list[tuple[str, ...]]:
    """Fields of IDs by int domain.

    Args:
        columns: schemas by field.
        cardinalities: by field.

    Raises:
        UserError: two fields of one domain differ in size.
    """
    found: dict[str, list[str]] = {}
    for name, column in columns.items():
        domain = column.int_domain  # without a name it is the field's own
        found.setdefault((domain and domain.name) or name, []).append(name)
    for domain, (first, *others) in found.items():
        for name in others:
            sizes = cardinalities[first], cardinalities[name]
            if sizes[0] != sizes[1]:
                raise UserError(
                    f"{first!r} ({sizes[0]:,} ids) and {name!r} ({sizes[1]:,} ids) share the int "
                    f"domain {domain!r}, and so an embedding table, but not a vocabulary. Encode "
                    "them jointly, or name their domains: AddMetadata(properties={'domain': "
                    "{'min': 0, 'max': …, 'name': …}})"
                )
    return [tuple(fields) for fields in found.values()]
