# SPDX-License-Identifier: Apache-2.0
"""What a saved workflow says of its parquet: roles, number of ids, vocabularies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from merlin_cowclip.workflows.data.adopt import validate
from merlin_cowclip.workflows.data.adopt.graph import (
    SAVED_FILES,
    Column,
    Vocabulary,
    load_fitted,
    operator_name,
    trace,
)
from merlin_cowclip.workflows.data.adopt.inference import why_not_raw
from merlin_cowclip.workflows.data.prepared_data import domains_of
from merlin_cowclip.workflows.data.spec import DatasetSpec, check_input_names
from merlin_cowclip.workflows.errors import UserError, quoted
from merlin_cowclip.workflows.quiet import quiet_imports

with quiet_imports():
    from merlin.schema import ColumnSchema, Schema, Tags

WORKFLOW_FILES = ("workflow.pkl", "metadata.json")  # what nvt.Workflow.save writes
_TARGETS = {
    *(Tags.TARGET, Tags.BINARY_CLASSIFICATION, Tags.MULTI_CLASS_CLASSIFICATION),
    *(Tags.REGRESSION, Tags.CLASSIFICATION),
}


@dataclass(frozen=True)
class Pipeline:
    """What a workflow says of its parquet."""

    spec: DatasetSpec
    schema: Schema  # of label and inputs in the parquet
    cardinalities: dict[str, int]  # by field, padding included
    columns: dict[str, Column]  # of the workflow
    notes: list[str]  # for the user

    @classmethod
    def of(cls, folder: Path, files: list[validate.ParquetFile], label: str, name: str) -> Pipeline:
        """Load a workflow, and check that it is supported and fits the parquet."""
        workflow = load_fitted(folder)
        columns = trace(workflow.output_node)
        numbers, ids, left_out = _roles(workflow.output_schema, label, columns)
        stored, given = files[0].schema, {label, *workflow.output_schema.column_names}
        left_out += [name for name in stored.names if name not in given]
        lists = {c for c in ids if c in stored.names and validate.is_list(stored.field(c).type)}
        spec = DatasetSpec(
            name=name or "adopted",
            label=label,
            categorical=tuple(c for c in ids if c not in lists),
            continuous=tuple(numbers),
            lists=tuple(c for c in ids if c in lists),
            format="parquet",
        )
        check_input_names(spec)
        validate.check_columns(spec, files, labelled=True)
        _refuse_partial_row_ops({c: columns[c] for c in (label, *spec.fields) if c in columns})
        notes = []
        if left_out:
            notes.append(f"left out, tagged neither categorical nor continuous: {quoted(left_out)}")
        if reason := why_not_raw(workflow, {c: columns[c] for c in spec.fields}):
            notes.append(f"raw rows cannot be scored or served: {reason}")
        schemas = {c: workflow.output_schema[c] for c in spec.fields}
        cardinalities = {c: _cardinality(schemas[c], columns[c].vocabulary) for c in spec.ids}
        domains_of({c: schemas[c] for c in spec.ids}, cardinalities)
        target = ColumnSchema(
            label,
            tags=[Tags.TARGET, Tags.BINARY_CLASSIFICATION],
            dtype=np.dtype(stored.field(label).type.to_pandas_dtype()),
        )
        inputs = [
            _input_schema(schemas[c], stored.field(c).type, columns[c], c in spec.ids)
            for c in spec.fields
        ]
        return cls(spec, Schema([target, *inputs]), cardinalities, columns, notes)


def _refuse_partial_row_ops(columns: Mapping[str, Column]) -> None:
    """Refuse a Filter, say, that is applied to some columns only: rows would be mixed."""
    for name, column in columns.items():
        for node in column.row_ops:
            if without := [n for n, other in columns.items() if node not in other.row_ops]:
                raise UserError(
                    f"{operator_name(node.op)} is applied to {name!r} but not to "
                    f"{quoted(without)}. NVTabular joins columns by position, so their "
                    "rows do not belong together. Apply it to all columns, before anything else, "
                    "fit and write again"
                )


def _roles(
    schema: Schema, label: str, traced: Mapping[str, Column]
) -> tuple[list[str], list[str], list[str]]:
    """Columns of numbers, columns of ids and those left out, by their tags."""
    numbers, ids, left_out = [], [], []
    for column in schema:
        tags, known = set(column.tags), traced[column.name]
        # NVTabular gives statistics the tags of the ids and targets that they are computed from.
        is_statistic = known.is_statistic and known.vocabulary is None
        if column.name == label or (tags & _TARGETS and not is_statistic):
            continue
        if Tags.CATEGORICAL in tags and not is_statistic:
            ids.append(column.name)
        elif tags & {Tags.CATEGORICAL, Tags.CONTINUOUS}:
            numbers.append(column.name)
        else:
            left_out.append(column.name)
    if not ids:
        raise UserError(
            f"No column of ids in the workflow: none of {quoted(schema.column_names)} "
            "has Tags.CATEGORICAL. Encode ids with Categorify"
        )
    return numbers, ids, left_out


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
        first = cardinality - vocabulary.rows  # after padding, missing, and unknown or hashed ids
        if first < 3 or (first > 3 and not column.properties.get("num_buckets")):
            raise UserError(
                f"{vocabulary.path} has {vocabulary.rows:,} ids, but the schema gives "
                f"{column.name!r} {cardinality:,}. Another fit may have written to Categorify's "
                "out_path: give it one of its own, and fit again"
            )
    return cardinality


def _input_schema(
    column: ColumnSchema, kind: pa.DataType, known: Column, has_ids: bool
) -> ColumnSchema:
    """A column as the parquet holds it, marked if its raw ids are unknown.

    Lists are ragged whatever the workflow says: on a CPU, ListSlice(pad=True) does not pad.
    """
    properties = dict(column.properties)
    properties.pop("value_count", None)
    if known.vocabulary is not None:  # relative to the workflow's folder: folders move
        properties["cat_path"] = f"{SAVED_FILES}/{known.vocabulary.path.name}"
    elif properties.pop("cat_path", None) or (has_ids and known.changed_by):
        properties["no_raw_ids"] = True
    return ColumnSchema(
        column.name,
        tags=[tag for tag in column.tags if tag not in _TARGETS],
        properties=properties,
        dtype=np.dtype(validate.element_type(kind).to_pandas_dtype()),
        is_list=validate.is_list(kind),
        is_ragged=validate.is_list(kind),
    )
