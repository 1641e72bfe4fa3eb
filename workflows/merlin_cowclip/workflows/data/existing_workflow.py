"""A saved NVTabular workflow: which columns are the inputs, what they mean, their vocabularies."""

from __future__ import annotations

import functools
import glob
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from merlin_cowclip.workflows.data.existing_parquet import (
    ParquetFile,
    bad_parquet,
    check_present,
    check_types,
    is_list,
)
from merlin_cowclip.workflows.data.id_origins import (
    Origin,
    RawValues,
    encoded_columns,
    id_origins,
    padded_lists,
    raw_values,
)
from merlin_cowclip.workflows.data.id_text import as_text
from merlin_cowclip.workflows.data.input_columns import input_columns
from merlin_cowclip.workflows.data.prepare.statistics import UNKNOWN
from merlin_cowclip.workflows.data.prepared_data import domains_of
from merlin_cowclip.workflows.data.saved_files import (
    refuse_shared_files,
    statistics_of_no_rows,
)
from merlin_cowclip.workflows.data.sources.files import natural_order
from merlin_cowclip.workflows.data.spec import DatasetSpec, check_input_names
from merlin_cowclip.workflows.data.workflow_graph import (
    SAVED_FILES,
    file_name,
    load_saved,
    made_so,
    nodes_of,
)
from merlin_cowclip.workflows.errors import UserError, quoted

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
    def rows(self) -> int:
        """How many ids it holds; they are the last ones of the field."""
        return sum(pq.read_metadata(file).num_rows for file in self.files)

    @property
    def files(self) -> list[Path]:
        """In the order of their ids."""
        if self.path.is_file():
            return [self.path]
        return sorted(self.path.glob("*.parquet"), key=natural_order)

    def ids(self, first: int) -> np.ndarray:
        """The ids that Categorify gives its rows: their index in pandas.

        Where that begins before ``first``, the first real id, they are the places behind it.
        """
        if not self.rows:
            return np.empty(0, np.int64)
        indices = []
        for file in self.files:
            # A column that is short; none at all has no index.
            one = self._size(file) or self._columns(file)[0]
            indices.append(pd.read_parquet(file, columns=[one]).index.to_numpy())
        ids = np.concatenate(indices)
        return ids + first if ids.dtype.kind in "iu" and ids[0] < first else ids

    def raw(self) -> pa.ChunkedArray:
        """Raw ids as text, by id; those of several columns together are joined by "_"."""
        texts: list[pa.Array] = []
        for file in self.files:
            table = pq.read_table(file, columns=self._columns(file))
            for batch in table.to_batches():
                columns = [_raw_text(column) for column in batch.columns]
                texts.append(
                    columns[0]
                    if len(columns) == 1
                    else pc.binary_join_element_wise(
                        *columns, "_", null_handling="replace", null_replacement=""
                    )
                )
        return pa.chunked_array(texts, pa.string())

    def sizes(self) -> np.ndarray | None:
        """How often each id occurred in the rows that the workflow was fitted on, if it says."""
        named = [(file, self._size(file)) for file in self.files]
        sizes = [pq.read_table(file, columns=[n])[n].to_numpy() for file, n in named if n]
        return np.concatenate(sizes) if sizes and len(sizes) == len(named) else None

    def _size(self, file: Path) -> str | None:
        """Its column of how often each id occurred, if there is one.

        Behind the storage's name is what `name_sep` of the Categorify was.
        """
        for name in pq.read_schema(file).names:
            if name != self.storage and name.startswith(self.storage) and name.endswith("size"):
                return str(name)
        return None

    def _columns(self, file: Path) -> list[str]:
        names = pq.read_schema(file).names
        if self.storage in names:
            return [self.storage]
        # Categorify(encode_type="combo"): one column for each that is combined.
        ours = [name for name in names if name != self._size(file)]
        return [name for name in ours if not name.startswith("__index_level_")]


def _raw_text(column: pa.Array) -> pa.Array:
    if pa.types.is_dictionary(column.type):  # of a pandas category
        column = column.dictionary_decode()
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return column.cast(pa.string())  # an empty text is an id here
    try:
        return as_text(column)
    except pa.ArrowInvalid as error:
        raise UserError(
            f"ids that are bytes must be UTF-8. Received: others in a vocabulary: {error}. Fit the "
            "workflow on text, or on numbers"
        ) from None


@dataclass(frozen=True)
class Pipeline:
    """What a workflow says of its parquet: which columns are the inputs, and what they mean."""

    folder: Path
    spec: DatasetSpec
    schema: Schema  # the label and the inputs
    cardinalities: dict[str, int]
    vocabularies: dict[str, Vocabulary]  # by field; not of hashed ones
    padded: dict[str, int]  # fields of lists that may have been padded, and to how many values
    found: dict[str, Path]  # every vocabulary of the workflow, by storage name
    joint: dict[str, set[str]]  # by storage name of one of several columns these columns
    encoded: dict[str, str]  # by field the column of Categorify that it is, where it is one
    bucketed: set[str]  # fields whose ids are all buckets
    thinned: set[str]  # fields of which an operator behind Categorify may drop or double ids
    notes: list[str]

    @classmethod
    def of(
        cls, folder: Path, parts: dict[str, list[ParquetFile]], label: str, name: str
    ) -> Pipeline:
        """Load a workflow and read its schema, or refuse it."""
        from nvtabular.ops import Categorify

        from merlin_cowclip.workflows.data.replaced_columns import check_columns_are_their_own
        from merlin_cowclip.workflows.data.row_for_row import moving  # they import NVTabular

        workflow = load_workflow(folder)
        refuse_shared_files(workflow, folder)
        check_columns_are_their_own(workflow, folder)
        stored = parts["train"][0].schema
        notes: list[str] = []
        columns = input_columns(workflow, parts["train"][0], label, notes)
        for files in parts.values():
            check_present(columns, files)
        listed = {c for c in columns if is_list(stored.field(c).type)}
        ids = [c for c, (_, role) in columns.items() if role == "categorical"]
        spec = DatasetSpec(
            name=name or "adopted",
            label=label,
            categorical=tuple(c for c in ids if c not in listed),
            continuous=tuple(c for c, (_, role) in columns.items() if role == "continuous"),
            lists=tuple(c for c in ids if c in listed),
            format="parquet",
        )
        check_input_names(spec)
        for files in parts.values():
            check_types(spec, files)
        uncounted = statistics_of_no_rows(workflow, folder)
        if uncounted:
            notes.append(
                f"missing values of {quoted(uncounted)} were counted as none, as NVTabular does on "
                "a CPU: what TargetEncoding and JoinGroupby made of them (a mean, a count) is wrong"
                ", in the parquet and of raw rows. Fill them before (FillMissing)"
            )
        hashed = sorted(_hashed_on_cpu(workflow, folder).intersection(spec.fields))
        if hashed:
            notes.append(
                f"hashed ids in {quoted(hashed)} are noise if a CPU wrote the parquet, where "
                "NVTabular hashes the row's number along with the id: write it on a GPU, or do "
                "without num_buckets and HashBucket"
            )
        neighbours = _of_neighbours(workflow)
        if neighbours:
            notes.append(
                f"{quoted(neighbours)} are differences to other rows (DifferenceLag): of raw rows, "
                "scored or served, they depend on which stand together, and how they are cut"
            )
        moved = moving(workflow)
        if moved:
            notes.append(
                f"{' and '.join(moved)} may move rows, or drop some and double others: raw rows, "
                "scored or served, are refused where it does. Encode them with the workflow "
                "yourself, and give predict the parquet that it wrote"
            )
        origins = id_origins(workflow)
        after = (Origin.CHANGED, Origin.NO_IDS)
        without = {c for c in spec.ids if origins.get(c) in (Origin.HASH, *after)}
        changed = [c for c in spec.ids if origins.get(c) in after]
        if changed:
            notes.append(
                f"raw ids of {quoted(changed)} are not known: an operator after Categorify may "
                "have changed the ids. To know them, let it come before"
            )
        apart = {c for c in spec.ids if origins.get(c) is Origin.NO_IDS}
        if apart:
            notes.append(
                f"{quoted(sorted(apart))} are numbers made of ids, which the schema tags as ids of "
                "theirs: taken for ids with rows of their own. As numbers, make them of the column "
                "before Categorify"
            )
        shared = _shared_rows({c: columns[c][0] for c in spec.ids if c not in apart}, changed)
        if shared:
            notes.append(
                f"{shared} share rows, as in Merlin's own models: if what an operator made there "
                "is no such id, let it come before Categorify"
            )
        named = (c for c in spec.ids if columns[c][0].properties.get("cat_path"))
        unmade = [c for c in named if c not in origins]
        without |= set(unmade)
        if unmade:
            notes.append(
                f"raw ids of {quoted(unmade)} are not known: their schema names a vocabulary, but "
                "no Categorify of this workflow made them (one of a workflow before, or Groupby, "
                "which takes its keys from before the operators that it follows). To know them, "
                "let one workflow encode them and do the rest"
            )
        values = {c: v for c, v in raw_values(workflow).items() if c in spec.ids}
        bucketed = {
            c
            for c, of in values.items()
            if origins.get(c) is Origin.HASH or (c not in origins and "Bucketize" in of.changed_by)
        }
        before = [c for c in spec.ids if c not in without and values[c].changed_by]
        if before:
            made = "; ".join(f"{c!r} ({', '.join(values[c].changed_by)})" for c in before)
            notes.append(
                f"ids of {made} are of values that operators may have changed before: "
                "FusedEmbeddings takes and gives no raw ids of them"
            )
        found = _find_vocabularies(workflow, folder)
        known = {c: {} if c in without else found for c in spec.ids}
        fields = {c: _Field.of(columns[c][0], known[c]) for c in spec.ids}
        domains_of(
            {c: columns[c][0] for c in spec.ids},
            {c: field.cardinality for c, field in fields.items()},
            [c for c in spec.ids if origins.get(c) is Origin.HASH],
        )
        joint: dict[str, set[str]] = {}
        for node in nodes_of(workflow.output_node, Categorify):
            if node.op.encode_type == "joint":
                for column, storage in node.op.storage_name.items():  # of groups of columns alone
                    joint.setdefault(storage, set()).add(column)
        return cls(
            folder=folder,
            spec=spec,
            schema=_schema(
                spec,
                stored,
                {c: schema for c, (schema, _) in columns.items()},
                found,
                {c: of for c, of in values.items() if c not in without},
                apart,
            ),
            cardinalities={c: field.cardinality for c, field in fields.items()},
            vocabularies={c: field.vocabulary for c, field in fields.items() if field.vocabulary},
            found=found,
            joint=joint,
            encoded={c: name for c, of in encoded_columns(workflow).items() for _, name in of},
            bucketed=bucketed,
            thinned=_thinned(workflow),
            padded={c: to for c, to in padded_lists(workflow).items() if c in spec.lists},
            notes=notes,
        )


@dataclass(frozen=True)
class _Field:
    cardinality: int
    vocabulary: Vocabulary | None

    @classmethod
    def of(cls, column: ColumnSchema, found: dict[str, Path]) -> _Field:
        domain = column.int_domain
        if domain is None or domain.max is None:
            raise UserError(
                f"a categorical column must have an int domain in the workflow's schema. Received: "
                f"none for {column.name!r}. Encode it with Categorify, or give one with "
                'AddMetadata(properties={"domain": {"min": 0, "max": …}})'
            )
        cardinality = int(domain.max) + 1
        storage = _storage(column)
        if storage not in found:
            return cls(cardinality, None)
        vocabulary = Vocabulary(storage, found[storage])
        try:
            rows = vocabulary.rows
        except (pa.ArrowException, OSError) as error:
            bad_parquet(vocabulary.path, error)
        first = cardinality - rows  # after padding, missing and unknown, or so many hashed ones
        if first < 3 or (first > 3 and not column.properties.get("num_buckets")):
            raise UserError(
                "a vocabulary must fit the workflow's schema. Received: "
                f"{rows:,} ids in {vocabulary.path}, and a cardinality of {cardinality:,} for "
                f"{column.name!r}. Another fit may have written to Categorify's out_path: give it "
                "one of its own, and fit again"
            )
        ids = vocabulary.ids(UNKNOWN + int(column.properties.get("num_buckets") or 1))
        if not np.array_equal(ids, np.arange(first, cardinality)):
            raise UserError(
                "a vocabulary must number its ids as the schema does. Received: "
                f"{vocabulary.path}, whose index makes its first row id {ids[0]} of "
                f"{column.name!r}, and a schema with {first} to {cardinality - 1}. Give "
                "Categorify(vocabs=…) one without an index and without num_buckets, and fit again"
            )
        return cls(cardinality, vocabulary)


def load_workflow(folder: Path) -> nvt.Workflow:
    """A fitted workflow, loaded, which runs code from its folder.

    Raises:
        UserError: not a workflow's folder, it does not load here, or was not fitted.
    """
    missing = [name for name in WORKFLOW_FILES if not os.path.isfile(folder / name)]
    if missing:
        raise UserError(
            "the workflow must be a folder that nvtabular.Workflow.save wrote. Received: "
            f"{folder}, without {' and '.join(missing)}"
        )
    try:
        workflow = load_saved(folder.absolute())
    except Exception as error:  # it runs whatever was pickled
        raise UserError(
            f"the workflow must load in this environment. Received: {folder}: "
            f"{type(error).__name__}: {error}. Install what it needs, or save it again here"
        ) from error
    if not workflow.output_schema:
        raise UserError(
            f"the workflow must be fitted. Received: {folder}, which has no schema. Save it after "
            "fit"
        )
    return workflow


def _storage(column: ColumnSchema) -> str | None:
    """Under which name Categorify keeps the column's vocabulary; None if it has not encoded it."""
    properties = column.properties
    return properties["domain"].get("name") if properties.get("cat_path") else None


def _shared_rows(columns: Mapping[str, ColumnSchema], changed: Sequence[str]) -> str:
    """Fields that share rows with others of whose ids an operator made them, as a sentence's."""
    domains: dict[str, list[str]] = {}
    for name, column in columns.items():
        domain = (column.properties.get("domain") or {}).get("name")
        if domain:
            domains.setdefault(domain, []).append(name)
    found = [names for names in domains.values() if names[1:] and set(names) & set(changed)]
    return "; ".join(" and ".join(map(repr, names)) for names in found)


def _find_vocabularies(workflow: nvt.Workflow, folder: Path) -> dict[str, Path]:
    """Every vocabulary of the workflow: storage name → file or folder.

    NVTabular replaces the old folder's name in a path by the new one wherever it occurs, in the
    file's name too: a saved workflow that was moved may look for its files where they are not.
    """
    from nvtabular.ops import Categorify

    found: dict[str, Path] = {}
    for node in nodes_of(workflow.output_node, Categorify):
        if node.op.single_table:
            raise UserError(
                "Categorify must keep one table per field: with single_table=True its schema gives "
                f"cardinalities that its ids exceed. Received: single_table=True in {folder}. "
                "Fit it with single_table=False"
            )
        if type(node.op) is Categorify and "order" in node.input_schema.column_names:
            raise UserError(
                "Categorify must not read a column called 'order': NVTabular numbers rows by that "
                f"name within it, and gives rows the ids of others. Received: one in {folder}. "
                "Rename it before, write the parquet again, and adopt that"
            )
        for storage, path in node.op.categories.items():
            file = file_name(node.op, storage)
            anywhere = folder.rglob(glob.escape(file))
            places = itertools.chain([Path(path), folder / SAVED_FILES / file], anywhere)
            there = next((place for place in places if place.exists()), None)
            if there is None:
                raise UserError(
                    f"a workflow's vocabularies must lie in its folder. Received: {folder}, "
                    f"without {file}. Copy the whole folder, or save the workflow again"
                )
            found[storage] = there
    return found


def _hashed_on_cpu(workflow: nvt.Workflow, folder: Path) -> set[str]:
    """Outputs made of what NVTabular hashes, if the workflow was saved without cudf."""
    from nvtabular.ops import Categorify, HashBucket, HashedCross

    saved = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))
    if "cudf" in saved.get("versions", {}):
        return set()

    def hashes(op: Any) -> bool:
        # Our own subclass of Categorify hashes the id alone.
        stock = type(op) is Categorify and bool(op.num_buckets)
        return stock or isinstance(op, HashBucket | HashedCross)

    return made_so(workflow.output_node, lambda op, of_such: of_such or hashes(op))


def _thinned(workflow: nvt.Workflow) -> set[str]:
    """Columns of which an operator behind Categorify leaves out or doubles rows, or cuts lists."""
    from nvtabular.ops import Categorify, Dropna, Filter, Groupby, JoinExternal, ListSlice

    thinning = Dropna | Filter | Groupby | JoinExternal | ListSlice

    def thins(op: Any, of_such: bool) -> bool:
        return not isinstance(op, Categorify) and (of_such or isinstance(op, thinning))

    return made_so(workflow.output_node, thins)


def _of_neighbours(workflow: nvt.Workflow) -> list[str]:
    """Columns for which NVTabular reads other rows than their own."""
    from nvtabular.ops import DifferenceLag

    nodes = nodes_of(workflow.output_node, DifferenceLag)
    return sorted(c for n in nodes for c in n.output_schema.column_names)


def _schema(
    spec: DatasetSpec,
    stored: pa.Schema,
    columns: dict[str, ColumnSchema],
    found: dict[str, Path],
    raw: dict[str, RawValues],
    apart: set[str],
) -> Schema:
    """The label and the inputs as the parquet holds them, as `save_workflow` writes a schema.

    Ids without raw ones are marked, which no operator does: without a vocabulary they would be
    taken for ids that were never encoded (`read_vocabulary`). So are those whose raw ones, ``raw``,
    are others than the log's.

    Those in ``apart`` are no ids of the column that they were made of, whose rows they share by
    its name.

    Lists are ragged ones whatever the workflow says: on CPU, ListSlice(pad=True) does not pad.
    """
    from merlin.schema import ColumnSchema, Schema, Tags

    def column(name: str) -> ColumnSchema:
        kind = stored.field(name).type
        listed = is_list(kind)
        properties: dict[str, Any] = {}
        tags: list[Any] = [Tags.TARGET, Tags.BINARY_CLASSIFICATION]
        if name != spec.label:
            properties, tags = dict(columns[name].properties), list(columns[name].tags)
            properties.pop("value_count", None)
            if name in raw and raw[name].changed_by:
                properties["changed_before"] = ", ".join(raw[name].changed_by)
            elif name in raw and raw[name].filled:
                properties["missing_filled"] = True
            if name in spec.ids and name not in raw:
                properties.pop("cat_path", None)
                properties["no_raw_ids"] = True
                if name in apart:
                    domain = properties.get("domain") or {}
                    properties["domain"] = {k: v for k, v in domain.items() if k != "name"}
            elif _storage(columns[name]) in found:
                # Relative to the workflow's folder: folders move.
                file = f"unique.{_storage(columns[name])}.parquet"
                properties["cat_path"] = f"{SAVED_FILES}/{file}"
        return ColumnSchema(
            name,
            tags=tags,
            properties=properties,
            dtype=(kind.value_type if listed else kind).to_pandas_dtype(),
            is_list=listed,
            is_ragged=listed,
        )

    return Schema([column(name) for name in (spec.label, *spec.fields)])
