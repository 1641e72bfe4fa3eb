"""What a saved workflow says of its parquet: roles, number of ids, vocabularies."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from dask.utils import natural_sort_key

from merlin_cowclip.workflows.data.adopt.graph import (
    SAVED_FILES,
    Column,
    files_of,
    load_saved,
    nodes,
    operator_name,
    trace,
)
from merlin_cowclip.workflows.data.adopt.inference import why_not_raw
from merlin_cowclip.workflows.data.adopt.parquet_files import (
    ParquetFile,
    bad_parquet,
    check_columns,
    check_types,
    is_list,
)
from merlin_cowclip.workflows.data.prepared_data import domains_of
from merlin_cowclip.workflows.data.spec import DatasetSpec, check_input_names
from merlin_cowclip.workflows.errors import UserError, quoted
from merlin_cowclip.workflows.quiet import quiet_imports

with quiet_imports():
    import nvtabular as nvt
    from merlin.dag import Node
    from merlin.schema import ColumnSchema, Schema, Tags
    from merlin.schema.io.tensorflow_metadata import TensorflowMetadata
    from nvtabular import ops

WORKFLOW_FILES = ("workflow.pkl", "metadata.json")  # what nvt.Workflow.save writes
_TARGETS = {
    *(Tags.TARGET, Tags.BINARY_CLASSIFICATION, Tags.MULTI_CLASS_CLASSIFICATION),
    *(Tags.REGRESSION, Tags.CLASSIFICATION),
}


@dataclass(frozen=True)
class Vocabulary:
    """The raw ids of one field, or of several that Categorify encodes jointly."""

    storage: str  # Categorify's name of it: the field's own, or for two fields a and b "a_b"
    path: Path  # a parquet file, or a folder of them

    @functools.cached_property
    def files(self) -> list[Path]:
        """In the order of their ids."""
        if self.path.is_file():
            return [self.path]
        return sorted(self.path.glob("*.parquet"), key=lambda path: natural_sort_key(path.name))

    @functools.cached_property
    def rows(self) -> int:
        """How many ids it holds; they are the last ones of the field."""
        try:
            return sum(pq.read_metadata(file).num_rows for file in self.files)
        except (pa.ArrowException, OSError) as error:
            bad_parquet(self.path, error)

    def raw(self) -> pa.ChunkedArray:
        """Raw ids as text, by id; combined ones are joined by "_"."""
        columns = [_text(column) for column in self._read(self._names[0]).columns]
        nulls = {"null_handling": "replace", "null_replacement": ""}
        return pc.binary_join_element_wise(*columns, "_", **nulls) if columns[1:] else columns[0]

    def sizes(self) -> np.ndarray | None:
        """How often each id occurred in the rows of the fit, if the workflow says so."""
        size = self._names[1]
        return self._read([size])[size].to_numpy() if size else None

    @property
    def _names(self) -> tuple[list[str], str | None]:
        """The columns of raw ids, several if combined, and of their counts."""
        names = pq.read_schema(self.files[0]).names
        names = [name for name in names if not name.startswith("__index_level_")]
        sizes = [n for n in names if n.startswith(self.storage) and n.endswith("size")]
        size = next((name for name in sizes if name != self.storage), None)
        raw = [name for name in names if name != size]
        return [self.storage] if self.storage in names else raw, size

    def _read(self, names: list[str]) -> pa.Table:
        return pa.concat_tables([pq.read_table(file, columns=names) for file in self.files])


def _text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Values as text; integers beside a null are floats in pandas."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    try:
        is_float = pa.types.is_floating(column.type)
        return (column.cast(pa.int64()) if is_float else column).cast(pa.string())
    except pa.ArrowException:  # fractions, bytes that are not UTF-8
        texts = [None if one is None else str(one) for one in column.to_pylist()]
        return pa.chunked_array([texts], pa.string())


@dataclass(frozen=True)
class Pipeline:
    """What a workflow says of its parquet."""

    folder: Path  # of the saved workflow
    spec: DatasetSpec
    schema: Schema  # of label and inputs in the parquet
    cardinalities: dict[str, int]  # by field, padding included
    vocabularies: dict[str, Vocabulary]  # not of hashed ids, or of those that an operator changed
    columns: dict[str, Column]  # of the workflow
    notes: list[str]  # for the user

    @classmethod
    def of(
        cls, folder: Path, parts: Mapping[str, list[ParquetFile]], label: str, name: str
    ) -> Pipeline:
        """Load a workflow, and check that it is supported and fits the parquet."""
        workflow = load_workflow(folder)
        refuse_unsupported(workflow, folder)
        columns, _ = trace(workflow)
        stored = parts["train"][0].schema
        notes: list[str] = []
        schemas, roles = _roles(workflow, parts["train"][0], label, columns, notes)
        for files in parts.values():
            check_columns(roles, files)
        ids = [c for c, role in roles.items() if role == "categorical"]
        lists = tuple(c for c in ids if is_list(stored.field(c).type))
        spec = DatasetSpec(
            name=name or "adopted",
            label=label,
            categorical=tuple(c for c in ids if c not in lists),
            continuous=tuple(c for c, role in roles.items() if role == "continuous"),
            lists=lists,
            format="parquet",
        )
        check_input_names(spec)
        for files in parts.values():
            check_types(spec, files)
        _refuse_partial_row_ops({c: columns[c] for c in (label, *spec.fields) if c in columns})
        if reason := why_not_raw(workflow, {c: columns[c] for c in spec.fields}):
            notes.append(f"raw rows cannot be scored or served: {reason}")
        vocabularies, unknown = {}, []
        for field in spec.ids:
            encoder = columns[field].encoder
            if encoder is not None:
                node, output = encoder
                storage = node.op.storage_name.get(output, output)
                vocabularies[field] = Vocabulary(storage, Path(node.op.categories[storage]))
            elif schemas[field].properties.get("cat_path") or columns[field].changed_by:
                unknown.append(field)
        if unnamed := [c for c in unknown if schemas[c].properties.get("cat_path")]:
            notes.append(
                f"raw ids of {quoted(unnamed)} are not known: no Categorify of this workflow made "
                "them, or an operator after it may have changed them"
            )
        cardinalities = {c: _cardinality(schemas[c], vocabularies.get(c)) for c in spec.ids}
        domains_of({c: schemas[c] for c in spec.ids}, cardinalities)
        schema = Schema(
            [
                ColumnSchema(
                    label,
                    tags=[Tags.TARGET, Tags.BINARY_CLASSIFICATION],
                    dtype=stored.field(label).type.to_pandas_dtype(),
                ),
                *(
                    _input_schema(schemas[c], stored, vocabularies.get(c), c in unknown)
                    for c in spec.fields
                ),
            ]
        )
        return cls(folder, spec, schema, cardinalities, vocabularies, columns, notes)


def load_workflow(folder: Path) -> nvt.Workflow:
    """Load a fitted workflow that has all its files; this runs code from its folder."""
    if missing := [name for name in WORKFLOW_FILES if not (folder / name).is_file()]:
        raise UserError(
            f"{folder} is not a saved workflow: {' and '.join(missing)} is missing. Name a folder "
            "that nvtabular.Workflow.save wrote"
        )
    try:
        workflow = load_saved(folder)
    except Exception as error:  # it runs whatever was pickled
        raise UserError(
            f"{folder} does not load in this environment: {type(error).__name__}: {error}. Install "
            "what it needs, or save it again here"
        ) from error
    if not workflow.output_schema:
        raise UserError(f"{folder} is not fitted: it has no schema. Save it after fit")
    for node in nodes(workflow.output_node):
        for path in map(Path, files_of(node.op).values()):
            if not path.exists():
                raise UserError(
                    f"{folder} lacks {SAVED_FILES}/{path.name}. Copy the whole folder, or fit with "
                    "an absolute out_path and save again"
                )
    return workflow


# Limits ------------------------------------------------------------------------------------------


def refuse_unsupported(workflow: nvt.Workflow, folder: Path) -> None:
    """Refuse options of Categorify, and names, with which NVTabular makes wrong ids."""
    writers: dict[str, Any] = {}
    for node in nodes(workflow.output_node):
        op = node.op
        for path in map(Path, files_of(op).values()):
            other = writers.setdefault(path.name, op)
            if other is not op:
                raise UserError(
                    f"{operator_name(other)} and {operator_name(op)} both save to {path.name} in "
                    f"{folder}, so that one file is lost. Rename the column before one of them, "
                    "fit, write and save again"
                )
        if not isinstance(op, ops.Categorify):
            continue
        if op.single_table:
            raise UserError(
                f"Categorify(single_table=True) in {folder} gives ids beyond its own schema. Fit "
                "with single_table=False"
            )
        if type(op) is ops.Categorify and "order" in node.input_schema.column_names:
            raise UserError(
                f"Categorify in {folder} reads a column called 'order', a name that it uses "
                "itself: rows get ids of others. Rename the column, fit and write again"
            )
        if op.encode_type == "combo":
            _refuse_replaced(workflow, node, folder)


def _refuse_replaced(workflow: nvt.Workflow, combo: Node, folder: Path) -> None:
    """Refuse a combo Categorify, which hands on its raw columns, behind columns of their names."""
    read = {name for group in combo.selector.subgroups for name in group.names}
    others = {name for name in combo.selector.grouped_names if isinstance(name, str)}
    for node in nodes(workflow.output_node):
        before: list[str] = []
        for above in node.parents_with_dependencies:  # the last column of a name is taken
            others |= set(before) if combo in nodes(above) else set()
            before += above.output_schema.column_names
    if read & others:
        raise UserError(
            f"column {min(read & others)!r} is overwritten by its raw values: in {folder}, "
            'Categorify(encode_type="combo") also returns its inputs. Put it first (combo + '
            "others), and encode single columns with another Categorify"
        )


def _refuse_partial_row_ops(columns: Mapping[str, Column]) -> None:
    """Refuse a Filter, say, that is applied to some columns only: rows would be mixed."""
    for name, column in columns.items():
        for key, operator in sorted(column.row_ops):
            without = [n for n, other in columns.items() if (key, operator) not in other.row_ops]
            if without:
                raise UserError(
                    f"{operator} is applied to {name!r} but not to {quoted(without, brief=True)}. "
                    "NVTabular joins columns by position, so their rows do not belong together. "
                    "Apply it to all columns, before anything else, fit and write again"
                )


# Columns -----------------------------------------------------------------------------------------


def _roles(
    workflow: nvt.Workflow,
    file: ParquetFile,
    label: str,
    traced: Mapping[str, Column],
    notes: list[str],
) -> tuple[dict[str, ColumnSchema], dict[str, str]]:
    """Schemas and roles ("categorical" or "continuous") of the inputs, by their tags."""
    place = file.path.parent / ".merlin" / "schema.json"
    in_file = _parquet_schema(place)
    schemas: dict[str, ColumnSchema] = {}
    roles: dict[str, str] = {}
    left_out, tagged_in_file = [], []
    for column in workflow.output_schema:
        name, known = column.name, traced[column.name]
        if name == label:
            continue
        role = _role(column.tags, known)
        if role is None and name in in_file and (role := _role(in_file[name].tags, known)):
            column = in_file[name]
            tagged_in_file.append(name)
        if role in ("categorical", "continuous"):
            inherited = _TARGETS if known.is_statistic else set()
            tags = set(column.tags) - inherited
            schemas[name], roles[name] = dataclasses.replace(column, tags=tags), role
        elif role is None:
            left_out.append(name)
    given = {label, *workflow.output_schema.column_names}
    left_out += [name for name in file.schema.names if name not in given]
    if tagged_in_file:
        notes.append(f"tags of {quoted(tagged_in_file)} are from {place}: the workflow's has none")
    if left_out:
        notes.append(f"left out, tagged neither categorical nor continuous: {quoted(left_out)}")
    if "categorical" not in roles.values():
        raise UserError(
            "No column of ids in the workflow: none of "
            f"{quoted(workflow.output_schema.column_names, brief=True)} has Tags.CATEGORICAL. "
            "Encode ids with Categorify"
        )
    return schemas, roles


def _role(tags: Any, known: Column) -> str | None:
    """What the tags say: "categorical", "continuous", "target" or None."""
    # NVTabular gives statistics the tags of the ids and targets that they are computed from.
    if known.is_statistic and known.encoder is None:
        return "continuous" if {Tags.CATEGORICAL, Tags.CONTINUOUS} & set(tags) else None
    if _TARGETS & set(tags):
        return "target"
    if Tags.CATEGORICAL in tags:
        return "categorical"
    return "continuous" if Tags.CONTINUOUS in tags else None


def _parquet_schema(place: Path) -> dict[str, ColumnSchema]:
    try:
        schema = TensorflowMetadata.from_json(place.read_text(encoding="utf-8")).to_merlin_schema()
    except FileNotFoundError:
        return {}
    except Exception as error:
        raise UserError(
            f"{place} is not a schema of Merlin's: {error}. Remove it, or write it again"
        ) from error
    return {column.name: column for column in schema}


def _cardinality(column: ColumnSchema, vocabulary: Vocabulary | None) -> int:
    """Number of ids of a field, by the schema; the vocabulary must have as many."""
    domain = column.int_domain
    if domain is None or domain.max is None:
        raise UserError(
            f"column {column.name!r} is tagged categorical, but the workflow's schema gives no "
            "range of ids. Encode it with Categorify, or add "
            'AddMetadata(properties={"domain": {"min": 0, "max": …}})'
        )
    cardinality = int(domain.max) + 1
    if vocabulary is not None:
        rows = vocabulary.rows
        first = cardinality - rows  # after padding, missing, and unknown or hashed ids
        if first < 3 or (first > 3 and not column.properties.get("num_buckets")):
            raise UserError(
                f"{vocabulary.path} has {rows:,} ids, but the schema gives {column.name!r} "
                f"{cardinality:,}. Another fit may have written to Categorify's out_path: give it "
                "one of its own, and fit again"
            )
    return cardinality


def _input_schema(
    column: ColumnSchema, stored: pa.Schema, vocabulary: Vocabulary | None, unknown: bool
) -> ColumnSchema:
    """A column as the parquet holds it, marked if its raw ids are unknown.

    Lists are ragged whatever the workflow says: on a CPU, ListSlice(pad=True) does not pad.
    """
    kind, properties = stored.field(column.name).type, dict(column.properties)
    properties.pop("value_count", None)
    if unknown:
        properties.pop("cat_path", None)
        properties["no_raw_ids"] = True
    elif vocabulary is not None:  # relative to the workflow's folder: folders move
        properties["cat_path"] = f"{SAVED_FILES}/{vocabulary.path.name}"
    return ColumnSchema(
        column.name,
        tags=list(column.tags),
        properties=properties,
        dtype=(kind.value_type if is_list(kind) else kind).to_pandas_dtype(),
        is_list=is_list(kind),
        is_ragged=is_list(kind),
    )
