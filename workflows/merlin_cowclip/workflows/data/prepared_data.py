# SPDX-License-Identifier: Apache-2.0
"""Prepared folders, which `prepare` and `adopt` write."""

from __future__ import annotations

import filecmp
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq

from merlin_cowclip.workflows.data.spec import DatasetSpec
from merlin_cowclip.workflows.errors import UserError, quoted
from merlin_cowclip.workflows.folders import package_versions, read_record, write_json
from merlin_cowclip.workflows.manifest import check_manifest, checksum, entry_of, manifest_of
from merlin_cowclip.workflows.quiet import quiet_imports

if TYPE_CHECKING:
    import pandas as pd

FORMAT_VERSION = 4
RECORD = "prepare.json"  # written last: without it the folder is not whole
PARTS = ("train", "valid", "test")
HELD_OUT = PARTS[1:]
WORKFLOW = "workflow"
COLUMNS = ("label", "categorical", "lists", "continuous")  # of `inputs_of`
_OF_SPEC = (  # its other keys that say what values mean
    *("null_values", "label_values", "label_above", "hour", "weekday"),
    *("log1p", "standardize", "quantiles"),
)
TITLES = {"train": "training", "valid": "validation", "test": "test"}
_AGAIN = "Prepare the data again"
_ADOPT_AGAIN = "Put it back as it was, or adopt it again into another folder"


@dataclass(frozen=True)
class PreparedData:
    """Prepared training, validation and test data; open it with `PreparedData.open`.

    ``train/*.parquet`` (shuffled), ``valid/*.parquet`` and ``test/*.parquet`` (in the log's order,
    each may be empty), ``workflow/`` (NVTabular), ``schema.pbtxt``, ``counts/<field>.parquet`` and
    ``prepare.json``. The parquet of an adopted pipeline is elsewhere.
    """

    path: Path
    spec: DatasetSpec
    record: dict[str, Any] = field(repr=False)

    @classmethod
    def open(cls, path: str | Path) -> PreparedData:
        """Open a folder and compare its files with the manifest; no row is read.

        Raises UserError for another folder or version, and for a missing or changed file.
        """
        path = Path(path)
        record = read_record(path, RECORD, FORMAT_VERSION, "a folder that prepare or adopt wrote")
        check_manifest(path, record["manifest"], "prepared data", _AGAIN)
        for files in record.get("files", {}).values():
            manifest = {file["path"]: file for file in files}
            check_manifest(Path("/"), manifest, "adopted parquet", _ADOPT_AGAIN)
        return cls(path, DatasetSpec.from_dict(record["spec"]), record)

    @classmethod
    def open_all(cls, paths: Sequence[str | Path]) -> PreparedData:
        """Open one folder, or several of one vocabulary, such as days, as one.

        Its training rows are those of all; vocabulary, validation and test part are those of the
        last, whose vocabulary may have grown. A UserError if their columns, numbers or ids mean
        something else.
        """
        folders = [cls.open(path) for path in paths]
        last = folders[-1]
        if len(folders) == 1:
            return last
        for other in folders[:-1]:
            was = {**inputs_of(other), "cardinalities": other.cardinalities}
            if change := difference(was, other.path, last, grown=True):
                raise UserError(
                    f"{other.path} and {last.path} differ in {change}. Prepare later logs with "
                    f"--vocabulary-from {other.path}, and name the folders in their order"
                )
        files = {part: last.file_states(part) for part in PARTS}
        files["train"] = [state for folder in folders for state in folder.file_states("train")]
        reports = {
            key: {**last.report[key], "train": sum(of.report[key]["train"] for of in folders)}
            for key in ("rows", "positives")
        }
        paths = [str(folder.path.resolve()) for folder in folders]
        changed = {"files": files, "rows": reports["rows"], "folders": paths}
        return cls(
            last.path, last.spec, {**last.record, "report": {**last.report, **reports}, **changed}
        )

    def file_states(self, part: str) -> list[dict[str, Any]]:
        """Fingerprints of a part's files, in order, as of `file_state`."""
        if "files" in self.record:
            return list(self.record["files"][part])
        names = [path.relative_to(self.path).as_posix() for path in self._files(part)]
        return [
            {"path": str((self.path / name).resolve()), **self.record["manifest"][name]}
            for name in names
        ]

    @property
    def folders(self) -> list[str]:
        """The folders that it was opened from."""
        return list(self.record.get("folders", [str(self.path.resolve())]))

    def footers(self, part: str) -> dict[Path, pq.FileMetaData]:
        """The footers of a part's files, in order."""
        return {path: pq.read_metadata(path) for path in self._files(part)}

    @property
    def train_files(self) -> list[Path]:
        """The files of the training split, by name, or if adopted in the order given."""
        return self._files("train")

    @property
    def valid_files(self) -> list[Path]:
        """The files of the validation part, which may be none."""
        return self._files("valid")

    @property
    def test_files(self) -> list[Path]:
        """The files of the test part, which may be none."""
        return self._files("test")

    def _files(self, part: str) -> list[Path]:
        if "files" in self.record:  # adopted
            return [Path(file["path"]) for file in self.record["files"][part]]
        names = [name for name in self.record["manifest"] if name.startswith(f"{part}/")]
        return [self.path / name for name in sorted(names) if name.endswith(".parquet")]

    @property
    def rows(self) -> dict[str, int]:
        """Rows by part, ``{"train": …, "valid": …, "test": …}``."""
        return dict(self.record["rows"])

    def require(self, part: str) -> None:
        """Raise UserError if a held-out part has no rows."""
        if not self.rows[part]:
            what = f"{self.path} has no {TITLES[part]} part"
            raise UserError(f"{what}. Prepare it again with --{part} 0.1, or adopt with --{part}")

    @property
    def cardinalities(self) -> dict[str, int]:
        """Embedding rows by field, including padding, missing and unknown."""
        return dict(self.record["cardinalities"])

    @functools.cached_property
    def domains(self) -> list[tuple[str, ...]]:
        """The fields of ids by int domain: those of one domain share an embedding table."""
        if self.record.get("ranges") is not None:  # prepared here
            return [*self.spec.vocabularies.values()]
        return domains_of({name: self.schema[name] for name in self.spec.ids}, self.cardinalities)

    @property
    def table_rows(self) -> int:
        """Embedding rows of all tables."""
        return sum(self.cardinalities[fields[0]] for fields in self.domains)

    @property
    def report(self) -> dict[str, Any]:
        """Rows and clicks by part, and statistics by field.

        Ids, in the training part: occurrences, distinct ids, occurrences of missing ids and of
        those below the threshold, ``new`` ids of a grown vocabulary. Numbers: range, mean, missing
        ones, and those not finite in all parts (``not_finite``).
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
        """How often each id of a field occurs in the training split: ``id``, ``raw``, ``count``.

        Row i is id i: 0 padding, 1 missing, 2 unknown (``raw`` is None for these), 3 the most
        frequent id. In an adopted pipeline ids have the order of its own workflow.
        """
        import pandas as pd

        self.check_field(field)
        return pd.read_parquet(self.path / "counts" / f"{field}.parquet")

    def check_field(self, field: str) -> None:
        """Raise UserError if there is no such field of ids."""
        if field not in self.spec.ids:
            raise UserError(f"field must be one of {quoted(self.spec.ids)}. Received: {field!r}")

    def workflow(self) -> Any:
        """The fitted ``nvtabular.Workflow``; loading it runs code from the folder (cloudpickle).

        Raises UserError if it does not load here.
        """
        from merlin_cowclip.workflows.data.adopt.graph import load_saved

        return load_saved(self.path / WORKFLOW)


def inputs_of(data: PreparedData) -> dict[str, Any]:
    """What the inputs of a model trained on `data` mean, beside its vocabularies; fit for JSON.

    `spec` is how to read raw rows. `ranges`, by which numbers were scaled, is None for an adopted
    pipeline, which its workflow's checksum identifies. `buckets` has by field how many ids
    unknown ones share by hash.
    """
    spec = data.spec
    return {
        "spec": spec.to_dict(),
        "label": spec.label,
        "categorical": sorted(spec.categorical),
        "lists": sorted(spec.lists),
        "continuous": sorted(spec.continuous),
        "ranges": data.record.get("ranges"),
        "buckets": {
            field: int(data.schema[field].properties.get("num_buckets") or 1)
            for field in sorted(spec.ids)
        },
        "pipeline": checksum(data.path / WORKFLOW / "workflow.pkl"),
    }


def difference(
    was: Mapping[str, Any], home: Path, data: PreparedData, *, grown: bool
) -> str | None:
    """The first thing in which columns, numbers or ids of data mean something else, or None.

    Args:
        was: `inputs_of` and ``cardinalities`` of the prepared folder or run to compare with.
        home: that folder.
        data: what is compared.
        grown: whether data prepared here may have more ids, behind those of ``home``.
    """
    now = {**inputs_of(data), "cardinalities": data.cardinalities}
    is_adopted = None in (was["ranges"], now["ranges"])
    if grown and not is_adopted:
        sizes = data.cardinalities
        known = {n: min(sizes.get(n, 0), of) for n, of in was["cardinalities"].items()}
        now["cardinalities"] = known
    keys = ("cardinalities", *COLUMNS, "buckets", *([] if is_adopted else ["ranges"]))
    was, now = {**was["spec"], **was}, {**now["spec"], **now}
    for key in (*keys, *_OF_SPEC):
        old, new = was[key], now[key]
        if isinstance(old, dict) and old != new:
            name = min(n for n in {**old, **new} if old.get(n) != new.get(n))
            key, old, new = f"{key} of {name!r}", old.get(name), new.get(name)
        if old != new:
            return f"{key}: {new!r} instead of {old!r}"
    if is_adopted and was["pipeline"] != now["pipeline"]:
        return "the pipeline that it was adopted from"
    # Vocabularies; and statistics of other fits, which a job may save where the last one did.
    for path in sorted((home / WORKFLOW).rglob("*.parquet")):
        if path.name.startswith("meta.") or path.parent.suffix == ".parquet":  # a part of one
            continue
        name = path.relative_to(home)
        if not _has_ids(path, data.path / name, grown):
            return f"{name}, so that ids or numbers mean something else"
    return None


def _has_ids(old: Path, new: Path, grown: bool) -> bool:
    """Whether two files or folders of parts have the same ids, or numbers, in the same order.

    Their bytes may differ: beside the ids are counts. With ``grown``, others may follow.
    """
    if not new.exists():
        return False
    if old.is_file() and filecmp.cmp(old, new, shallow=False):  # NaN is not equal to NaN
        return True
    tables = (pq.read_table(path) for path in (old, new))
    a, b = (t.select([n for n in t.schema.names if not n.endswith("_size")]) for t in tables)
    return bool(a.equals(b.slice(0, len(a)) if grown else b))


def write_record(folder: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    """Write ``prepare.json``, the last file, with package versions and the manifest; returns it."""
    record = {**record, "versions": package_versions(), "format": FORMAT_VERSION}
    record["manifest"] = manifest_of(folder)
    write_json(folder / RECORD, record)
    return record


def file_state(path: str | Path) -> dict[str, Any]:
    """Fingerprint of adopted parquet: its absolute ``path`` and an entry of a manifest."""
    if isinstance(path, str):
        raise UserError(f"adopted parquet must be local. Received: {path}. Copy it first")
    return {"path": str(path), **entry_of(path)}


def domains_of(
    columns: Mapping[str, Any], cardinalities: Mapping[str, int]
) -> list[tuple[str, ...]]:
    """Fields of ids by int domain; raises UserError if two fields of one domain differ in size."""
    by_domain: dict[str, list[str]] = {}
    for name, column in columns.items():
        domain = column.int_domain  # without a name it is the field's own
        by_domain.setdefault((domain and domain.name) or name, []).append(name)
    for domain, fields in by_domain.items():
        sizes = [f"{name!r} ({cardinalities[name]:,} ids)" for name in fields]
        if len({cardinalities[name] for name in fields}) > 1:
            raise UserError(
                f"{' and '.join(sizes)} share the int domain {domain!r}, and so an embedding "
                "table, but not a vocabulary. Encode them jointly, or name their domains: "
                "AddMetadata(properties={'domain': {'min': 0, 'max': …, 'name': …}})"
            )
    return [tuple(fields) for fields in by_domain.values()]
