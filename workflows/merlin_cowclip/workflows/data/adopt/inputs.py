"""What a saved workflow says of its parquet: roles, number of ids, vocabularies."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from dask.utils import natural_sort_key

from merlin_cowclip.workflows.data.adopt.graph import (
    SAVED_FILES,
    Column,
    file_name,
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

if TYPE_CHECKING:
    import nvtabular as nvt
    from merlin.schema import ColumnSchema, Schema

WORKFLOW_FILES = ("workflow.pkl", "metadata.json")  # what nvt.Workflow.save writes


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
        return sum(pq.read_metadata(file).num_rows for file in self.files)

    def raw(self) -> pa.ChunkedArray:
        """Raw ids as text, by id; combined ones are joined by "_"."""
        nulls = {"null_handling": "replace", "null_replacement": ""}
        texts = []
        for batch in (b for file in self.files for b in pq.read_table(file).to_batches()):
            names = [self.storage]
            if self.storage not in batch.schema.names:  # Categorify(encode_type="combo")
                names = [n for n in batch.schema.names if n != self._size(batch.schema)]
                names = [n for n in names if not n.startswith("__index_level_")]
            columns = [_text(batch.column(name)) for name in names]
            texts.append(
                pc.binary_join_element_wise(*columns, "_", **nulls) if columns[1:] else columns[0]
            )
        return pa.chunked_array(texts, pa.string())

    def sizes(self) -> np.ndarray | None:
        """How often each id occurred in the rows of the fit, if the workflow says so."""
        named = [(file, self._size(pq.read_schema(file))) for file in self.files]
        sizes = [pq.read_table(file, columns=[n])[n].to_numpy() for file, n in named if n]
        return np.concatenate(sizes) if sizes and len(sizes) == len(named) else None

    def _size(self, schema: pa.Schema) -> str | None:
        """The column of sizes; between its parts stands the `name_sep` of the Categorify."""
        ours = (n for n in schema.names if n != self.storage and n.startswith(self.storage))
        return next((name for name in ours if name.endswith("size")), None)


def _text(column: pa.Array) -> pa.Array:
    """Values as text; integers beside a null are floats in pandas."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    try:
        if pa.types.is_floating(column.type):
            return column.cast(pa.int64()).cast(pa.string())
        return column.cast(pa.string())
    except pa.ArrowException:  # fractions, bytes that are not UTF-8
        return pa.array([None if one is None else str(one) for one in column.to_pylist()])


@dataclass(frozen=True)
class Pipeline:
    """What a workflow says of its parquet.

    Attributes:
        folder: of the saved workflow.
        spec: the label and the inputs.
        schema: of their columns in the parquet.
        cardinalities: number of ids by field, padding included.
        vocabularies: by field; not of hashed ids, or of those that an operator changed.
        columns: where each column of the workflow comes from.
        notes: for the user.
    """

    folder: Path
    spec: DatasetSpec
    schema: Schema
    cardinalities: dict[str, int]
    vocabularies: dict[str, Vocabulary]
    columns: dict[str, Column]
    notes: list[str]

    @classmethod
    def of(
        cls, folder: Path, parts: Mapping[str, list[ParquetFile]], label: str, name: str
    ) -> Pipeline:
        """Load a workflow and read its schema.

        Raises:
            UserError: the workflow is not supported, or the parquet is not what it says.
        """
        workflow = load_workflow(folder)
        refuse_unsupported(workflow, folder)
        columns = trace(workflow).outputs
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
        if reason := why_not_raw(workflow, {c: columns.get(c, Column()) for c in spec.fields}):
            notes.append(f"raw rows cannot be scored or served: {reason}")
        vocabularies, unknown = {}, []
        for field in spec.ids:
            column, encoder = schemas[field], columns.get(field, Column()).encoder
            if encoder is not None:
                node, output = encoder
                storage = node.op.storage_name.get(output, output)
                vocabularies[field] = Vocabulary(storage, Path(node.op.categories[storage]))
            elif column.properties.get("cat_path") or columns.get(field, Column()).changed_by:
                unknown.append(field)
        unnamed = [c for c in unknown if schemas[c].properties.get("cat_path")]
        if unnamed:
            notes.append(
                f"raw ids of {quoted(unnamed)} are not known: no Categorify of this workflow made "
                "them, or an operator after it may have changed them"
            )
        cardinalities = {c: _cardinality(schemas[c], vocabularies.get(c)) for c in spec.ids}
        hashed = [c for c in spec.ids if c in columns and columns[c].is_hashed and c in unknown]
        domains_of({c: schemas[c] for c in spec.ids}, cardinalities, hashed)
        return cls(
            folder=folder,
            spec=spec,
            schema=_schema(spec, stored, schemas, vocabularies, unknown),
            cardinalities=cardinalities,
            vocabularies=vocabularies,
            columns=columns,
            notes=notes,
        )

    @property
    def bucketed(self) -> set[str]:
        """Fields all of whose ids are buckets."""
        without = {
            c: self.columns.get(c, Column()) for c in self.spec.ids if c not in self.vocabularies
        }
        return {c for c, of in without.items() if of.is_hashed or "Bucketize" in of.changed_by}

    def label_remedy(self) -> str:
        """What to do about a label that is not 0 or 1; empty if the workflow only passes it on."""
        by = self.columns.get(self.spec.label, Column()).changed_by
        if not by:
            return ""
        return f"The workflow changed the label ({', '.join(by)}). Let it pass the label unchanged"


def load_workflow(folder: Path) -> nvt.Workflow:
    """Load a fitted workflow, which runs code from its folder.

    Raises:
        UserError: not a workflow's folder, a file of it is missing, it does not load here, or it
            was not fitted.
    """
    missing = [name for name in WORKFLOW_FILES if not os.path.isfile(folder / name)]
    if missing:
        raise UserError(
            f"{folder} is not a saved workflow: {' and '.join(missing)} is missing. Name a folder "
            "that nvtabular.Workflow.save wrote"
        )
    try:
        workflow = load_saved(folder.absolute())
    except Exception as error:  # it runs whatever was pickled
        raise UserError(
            f"{folder} does not load in this environment: {type(error).__name__}: {error}. Install "
            "what it needs, or save it again here"
        ) from error
    if not workflow.output_schema:
        raise UserError(f"{folder} is not fitted: it has no schema. Save it after fit")
    for node in nodes(workflow.output_node):
        files = files_of(node.op)
        for storage, path in files.items():
            name = file_name(node.op, storage)
            # A replaced path, for out_path="cat": a/aegories/unique.user.parquet.
            found = path if os.path.exists(path) else next(folder.absolute().rglob(name), None)
            if found is None:
                raise UserError(
                    f"{folder} lacks {SAVED_FILES}/{name}. Copy the whole folder, or save the "
                    "workflow again"
                )
            files[storage] = str(found)
    return workflow


# Limits ------------------------------------------------------------------------------------------


def refuse_unsupported(workflow: nvt.Workflow, folder: Path) -> None:
    """Refuse options of Categorify, and names, with which NVTabular makes wrong ids.

    Raises:
        UserError: names the first.
    """
    with quiet_imports():
        from nvtabular.ops import Categorify

    writers: dict[str, Any] = {}
    for node in nodes(workflow.output_node):
        op = node.op
        for storage in files_of(op):
            name = file_name(op, storage)
            if writers.setdefault(name, op) is not op:
                one, two = operator_name(writers[name]), operator_name(op)
                raise UserError(
                    f"{one} and {two} both save to {name} in {folder}, so that one file is lost. "
                    "Rename the column before one of them, fit, write and save again"
                )
        if not isinstance(op, Categorify):
            continue
        if op.single_table:
            raise UserError(
                f"Categorify(single_table=True) in {folder} gives ids beyond its own schema. Fit "
                "with single_table=False"
            )
        if type(op) is Categorify and "order" in node.input_schema.column_names:
            raise UserError(
                f"Categorify in {folder} reads a column called 'order', a name that it uses "
                "itself: rows get ids of others. Rename the column, fit and write again"
            )
        if op.encode_type == "combo":
            _refuse_replaced(workflow, node, folder)


def _refuse_replaced(workflow: nvt.Workflow, combo: Any, folder: Path) -> None:
    """Refuse a combo Categorify that hands on raw columns under names of other outputs."""
    read = {name for group in combo.selector.subgroups for name in group.names}
    others = {name for name in combo.selector.grouped_names if isinstance(name, str)}
    for node in nodes(workflow.output_node):
        before: list[str] = []
        for above in node.parents_with_dependencies:  # the last column of a name is taken
            others |= set(before) if _hands_on(above, combo) else set()
            before += above.output_schema.column_names
    if read & others:
        raise UserError(
            f"column {min(read & others)!r} is overwritten by its raw values: in {folder}, "
            'Categorify(encode_type="combo") also returns its inputs. Put it first (combo + '
            "others), and encode single columns with another Categorify"
        )


def _hands_on(node: Any, combo: Any) -> bool:
    """Whether a node returns the columns that another returns past its schema."""
    with quiet_imports():
        from nvtabular.ops import Dropna, Filter

    filters = isinstance(node.op, Filter | Dropna)
    return node is combo or (filters and any(_hands_on(p, combo) for p in node.parents))


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
    """The model's inputs: their schemas, and their roles, "categorical" or "continuous".

    Columns without tags have those of the schema that lies with the parquet.

    Raises:
        UserError: none of them has ids, or the schema with the parquet is not Merlin's.
    """
    in_file = _parquet_schema(file.path)
    schemas: dict[str, ColumnSchema] = {}
    roles: dict[str, str] = {}
    left_out, targets, tagged_in_file = [], [], []
    for column in workflow.output_schema:
        name, known = column.name, traced.get(column.name, Column())
        if name == label:
            continue
        role = _role(column, known)
        if role is None and name in in_file and _role(in_file[name], known):
            column, role = in_file[name], _role(in_file[name], known)
            tagged_in_file.append(name)
        if role in ("categorical", "continuous"):
            inherited = _target_tags() if known.is_statistic else set()
            tags = set(column.tags) - inherited
            schemas[name], roles[name] = dataclasses.replace(column, tags=tags), role
        elif role is None:
            left_out.append(name)
        elif _role(dataclasses.replace(column, tags=set(column.tags) - _target_tags()), known):
            targets.append(name)
    given = {label, *workflow.output_schema.column_names}
    left_out += [name for name in file.schema.names if name not in given]
    if tagged_in_file:
        place = _schema_file(file.path)
        notes.append(f"tags of {quoted(tagged_in_file)} are from {place}: the workflow's has none")
    if left_out:
        notes.append(f"left out, tagged neither categorical nor continuous: {quoted(left_out)}")
    if targets:
        notes.append(f"left out, tagged as targets: {quoted(targets)}")
    if "categorical" not in roles.values():
        raise UserError(
            "No column of ids in the workflow: none of "
            f"{quoted(workflow.output_schema.column_names, brief=True)} has Tags.CATEGORICAL. "
            "Encode ids with Categorify"
        )
    return schemas, roles


def _role(column: ColumnSchema, known: Column) -> str | None:
    """What the tags say: "categorical", "continuous", "target" or None."""
    with quiet_imports():
        from merlin.schema import Tags

    tags = set(column.tags)
    # NVTabular gives statistics the tags of the ids and targets that they are computed from.
    if known.is_statistic and known.encoder is None:
        return "continuous" if {Tags.CATEGORICAL, Tags.CONTINUOUS} & tags else None
    if _target_tags() & tags:
        return "target"
    if Tags.CATEGORICAL in tags:
        return "categorical"
    return "continuous" if Tags.CONTINUOUS in tags else None


def _target_tags() -> set[Any]:
    with quiet_imports():
        from merlin.schema import Tags

    return {
        *(Tags.TARGET, Tags.BINARY_CLASSIFICATION, Tags.MULTI_CLASS_CLASSIFICATION),
        *(Tags.REGRESSION, Tags.CLASSIFICATION),
    }


def _schema_file(path: Path) -> Path:
    return path.parent / ".merlin" / "schema.json"


def _parquet_schema(path: Path) -> dict[str, ColumnSchema]:
    with quiet_imports():
        from merlin.schema.io.tensorflow_metadata import TensorflowMetadata

    place = _schema_file(path)
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
    """Number of ids of a field.

    Raises:
        UserError: the schema does not say, or the vocabulary has another number of them.
    """
    domain = column.int_domain
    if domain is None or domain.max is None:
        raise UserError(
            f"column {column.name!r} is tagged categorical, but the workflow's schema gives no "
            "range of ids. Encode it with Categorify, or add "
            'AddMetadata(properties={"domain": {"min": 0, "max": …}})'
        )
    cardinality = int(domain.max) + 1
    if vocabulary is None:
        return cardinality
    try:
        rows = vocabulary.rows
    except (pa.ArrowException, OSError) as error:
        bad_parquet(vocabulary.path, error)
    first = cardinality - rows  # after padding, missing, and unknown or hashed ids
    if first < 3 or (first > 3 and not column.properties.get("num_buckets")):
        raise UserError(
            f"{vocabulary.path} has {rows:,} ids, but the schema gives {column.name!r} "
            f"{cardinality:,}. Another fit may have written to Categorify's out_path: give it one "
            "of its own, and fit again"
        )
    return cardinality


def _schema(
    spec: DatasetSpec,
    stored: pa.Schema,
    schemas: Mapping[str, ColumnSchema],
    vocabularies: Mapping[str, Vocabulary],
    unknown: Sequence[str],
) -> Schema:
    """The label and the inputs as the parquet holds them; fields of ``unknown`` are marked.

    Lists are ragged whatever the workflow says: on a CPU, ListSlice(pad=True) does not pad.
    """
    with quiet_imports():
        from merlin.schema import ColumnSchema, Schema, Tags

    def column(name: str) -> ColumnSchema:
        kind = stored.field(name).type
        properties: dict[str, Any] = {}
        tags: list[Any] = [Tags.TARGET, Tags.BINARY_CLASSIFICATION]
        if name != spec.label:
            properties, tags = dict(schemas[name].properties), list(schemas[name].tags)
            properties.pop("value_count", None)
        if name in unknown:
            properties.pop("cat_path", None)
            properties["no_raw_ids"] = True
        elif name in vocabularies:  # relative to the workflow's folder: folders move
            file = f"unique.{vocabularies[name].storage}.parquet"
            properties["cat_path"] = f"{SAVED_FILES}/{file}"
        return ColumnSchema(
            name,
            tags=tags,
            properties=properties,
            dtype=(kind.value_type if is_list(kind) else kind).to_pandas_dtype(),
            is_list=is_list(kind),
            is_ragged=is_list(kind),
        )

    return Schema([column(name) for name in (spec.label, *spec.fields)])
