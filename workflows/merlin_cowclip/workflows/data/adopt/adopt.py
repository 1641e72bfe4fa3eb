# SPDX-License-Identifier: Apache-2.0
"""`adopt`: check the parquet that a saved NVTabular workflow wrote, count its ids, refer to it.

The parquet stays as it is and where it is, and is read once.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from merlin_cowclip.models.vocabulary import has_raw_ids, is_encoded, read_vocabulary
from merlin_cowclip.workflows.data.adopt import graph, validate
from merlin_cowclip.workflows.data.adopt.inference import InferenceWorkflow
from merlin_cowclip.workflows.data.adopt.skew import check_skew
from merlin_cowclip.workflows.data.counts import write_counts
from merlin_cowclip.workflows.data.prepare.nvt_workflow import save_schema
from merlin_cowclip.workflows.data.prepared_data import (
    PreparedData,
    domains_of,
    file_state,
    write_record,
)
from merlin_cowclip.workflows.data.sources.files import refuse_twice
from merlin_cowclip.workflows.data.spec import DatasetSpec, check_input_names
from merlin_cowclip.workflows.errors import UserError, quoted
from merlin_cowclip.workflows.folders import all_or_nothing, refuse_existing
from merlin_cowclip.workflows.prefetch import prefetch
from merlin_cowclip.workflows.progress import progress_bar
from merlin_cowclip.workflows.quiet import quiet_imports

with quiet_imports():
    from merlin.schema import ColumnSchema, Schema, Tags

BATCH_ROWS = 1 << 17  # held at a time, twice: one batch is checked while the next is read
UNSCALED = 1e3  # a number column with a larger absolute value is noted
_SAVED = ("workflow.pkl", "metadata.json", graph.SAVED_FILES)  # what nvt.Workflow.save writes
_TARGETS = {
    *(Tags.TARGET, Tags.BINARY_CLASSIFICATION, Tags.MULTI_CLASS_CLASSIFICATION),
    *(Tags.REGRESSION, Tags.CLASSIFICATION),
}


def adopt(
    parquet: str | Path | Sequence[str | Path],
    workflow: str | Path,
    label: str,
    out: str | Path,
    valid: str | Path | Sequence[str | Path] | None = None,
    test: str | Path | Sequence[str | Path] | None = None,
    check_raw: str | Path | Sequence[str | Path] | None = None,
    progress: bool = True,
) -> PreparedData:
    """Make a prepared folder, at ``out``, of parquet that an NVTabular workflow wrote.

    The folder refers to the parquet, and has a copy of the workflow, the schema and the counts. The
    model's inputs are the columns that the workflow's schema tags as categorical (with an int
    domain, as Categorify gives it) and as continuous. ``record["notes"]`` says what was left out.

    Args:
        parquet: the training part: files, globs, or folders that ``to_parquet`` wrote.
        workflow: a folder that ``nvtabular.Workflow.save`` wrote. Loading it runs code from it
            (cloudpickle): give only your own.
        label: the parquet's column of 0 and 1.
        out: the folder to make; must not exist.
        valid: the validation part, or None: a run is then not measured after each epoch.
        test: the test part, or None: a run then has no test metrics.
        check_raw: parquet with the raw rows. Some 10,000 are encoded by the copied workflow, and
            must be among the rows of the parquet.
        progress: show a progress bar on stderr.

    Raises:
        UserError: bad input, or raw rows that are encoded otherwise; nothing is left behind.
    """
    out, workflow = Path(out), Path(workflow)
    refuse_existing(out)
    given = {"train": parquet, "valid": valid, "test": test}
    parts = {part: [] if of is None else validate.open_files(of) for part, of in given.items()}
    files = [*itertools.chain(*parts.values())]
    refuse_twice([file.path for file in files])
    states = {part: [file_state(file.path) for file in of] for part, of in parts.items()}
    with all_or_nothing(out) as folder:
        inputs = _inputs_of(workflow, files, label, out.absolute().name)
        counts, report = _scan(inputs, parts, progress)
        (folder / "counts").mkdir()
        (folder / "workflow").mkdir()
        for name in _SAVED:
            source, copy = workflow / name, folder / "workflow" / name
            if source.exists():
                (shutil.copytree if source.is_dir() else shutil.copy2)(source, copy)
        if check_raw is not None:
            raw = validate.open_files(check_raw)
            inference = InferenceWorkflow(graph.load_saved(folder / "workflow"), inputs.spec)
            # `TargetEncoding` encodes rows of its fit by folds.
            fields = [c for c in inputs.spec.fields if not inputs.columns[c].is_statistic]
            if all(inference.has_label(file.schema.names) for file in raw):
                fields.append(label)
            inputs.notes.extend(check_skew(inference, raw, files, fields))
        for name, by_id in counts.items():
            raw = _raw_ids(inputs.schema[name], folder / "workflow", len(by_id))
            write_counts(folder / "counts", name, by_id, raw)
        save_schema(inputs.schema, folder)
        record = {
            "spec": inputs.spec.to_dict(),
            "workflow": str(workflow.absolute()),
            "files": states,
            "rows": report["rows"],
            "cardinalities": inputs.cardinalities,
            "report": report,
            "notes": inputs.notes,
        }
        write_record(folder, record)
    return PreparedData.open(out)


class _Inputs(NamedTuple):
    """The label and the model's inputs."""

    spec: DatasetSpec
    schema: Schema  # of them in the parquet
    cardinalities: dict[str, int]  # by field, padding included
    columns: dict[str, graph.Column]  # of the workflow
    notes: list[str]  # for the user


def _inputs_of(folder: Path, files: list[validate.InputFile], label: str, name: str) -> _Inputs:
    """What the schema of a workflow says of the parquet, of which it checks the types."""
    workflow, stored = graph.load_saved(folder), files[0].schema
    if not workflow.output_schema:
        raise UserError(f"{folder} is not fitted: it has no schema. Save it after fit")
    columns, outputs = graph.trace(workflow.output_node), workflow.output_schema
    roles = {c.name: _role(c, columns[c.name]) for c in outputs if c.name != label}
    ids, numbers = ([c for c in roles if roles[c] == role] for role in ("id", "number"))
    if not ids:
        raise UserError(
            f"No column of ids in the workflow: none of {quoted(outputs.column_names)} has "
            "Tags.CATEGORICAL. Encode ids with Categorify"
        )
    lists = [c for c in ids if c in stored.names and validate.is_list(stored.field(c).type)]
    single = tuple(c for c in ids if c not in lists)
    spec = DatasetSpec(
        name or "adopted", label, single, tuple(numbers), lists=tuple(lists), format="parquet"
    )
    check_input_names(spec)
    validate.check_columns(spec, files, labelled=True)
    others = [c for c in roles if not roles[c]]
    others += [c for c in stored.names if c not in (label, *roles)]
    left_out = f"left out, tagged neither categorical nor continuous: {quoted(others)}"
    notes = [left_out] if others else []
    cardinalities = {c: _cardinality(outputs[c]) for c in spec.ids}
    domains_of({c: outputs[c] for c in spec.ids}, cardinalities)
    tags, kind = [Tags.TARGET, Tags.BINARY_CLASSIFICATION], stored.field(label).type
    target = ColumnSchema(label, tags=tags, dtype=np.dtype(kind.to_pandas_dtype()))
    inputs = [_input(outputs[c], stored.field(c).type, columns[c], c in ids) for c in spec.fields]
    return _Inputs(spec, Schema([target, *inputs]), cardinalities, columns, notes)


def _raw_ids(column: ColumnSchema, workflow: Path, ids: int) -> pa.Array:
    """The raw ids of a field, n text; null where Categorify combined or hashed them."""
    raw = pd.Series(dtype=object)
    if is_encoded(column) and has_raw_ids(column):
        with contextlib.suppress(ValueError):  # combined ids, times
            raw = read_vocabulary(column, workflow)
    if len(raw) > max(ids - 3, 0):  # after padding, missing and unknown
        raise UserError(
            f"{column.name!r} has {len(raw):,} raw ids, but {ids:,} ids in the schema. Give "
            "Categorify an out_path of its own, and fit again"
        )
    texts = pa.array(raw.astype(str), pa.string())
    return pa.concat_arrays([pa.nulls(ids - len(raw), pa.string()), texts])


def _role(column: ColumnSchema, known: graph.Column) -> str | None:
    """Whether a column is an "id", a "number" or a "target", by its tags; None for others.

    NVTabular gives statistics the tags of the ids and targets that they are computed from.
    """
    tags, is_statistic = set(column.tags), known.is_statistic and known.vocabulary is None
    if tags & _TARGETS and not is_statistic:
        return "target"
    if Tags.CATEGORICAL in tags and not is_statistic:
        return "id"
    return "number" if tags & {Tags.CATEGORICAL, Tags.CONTINUOUS} else None


def _cardinality(column: ColumnSchema) -> int:
    """Number of ids of a field."""
    domain = column.int_domain
    if domain is None or domain.max is None:
        raise UserError(
            f"column {column.name!r} is tagged categorical, but the workflow's schema gives no "
            "range of ids. Encode it with Categorify, or add "
            'AddMetadata(properties={"domain": {"min": 0, "max": …}})'
        )
    return int(domain.max) + 1


def _input(
    column: ColumnSchema, kind: pa.DataType, known: graph.Column, has_ids: bool
) -> ColumnSchema:
    """A column as the parquet holds it, marked if its raw ids are unknown.

    Lists are ragged whatever the workflow says: on a CPU, ListSlice(pad=True) does not pad.
    """
    properties = {k: v for k, v in column.properties.items() if k != "value_count"}
    if known.vocabulary is not None:  # relative to the workflow's folder: folders move
        properties["cat_path"] = f"{graph.SAVED_FILES}/{known.vocabulary.path.name}"
    elif properties.pop("cat_path", None) or (has_ids and known.operators):
        properties["no_raw_ids"] = True
    is_list = validate.is_list(kind)
    dtype = np.dtype(validate.element_type(kind).to_pandas_dtype())
    tags = [tag for tag in column.tags if tag not in _TARGETS]
    return ColumnSchema(column.name, tags, properties, dtype, is_list, is_list)


def _scan(
    inputs: _Inputs, parts: dict[str, list[validate.InputFile]], progress: bool
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Check all rows; returns the counts of training ids by field, and the report."""
    spec, sizes = inputs.spec, inputs.cardinalities
    counts = {name: np.zeros(size, np.int64) for name, size in sizes.items()}
    ranges = {name: {"min": np.inf, "max": -np.inf} for name in spec.continuous}
    rows, positives = dict.fromkeys(parts, 0), dict.fromkeys(parts, 0)
    total = sum(file.rows for files in parts.values() for file in files)
    with progress_bar("checking", total, show=progress) as bar:
        for part, files in parts.items():
            read = validate.batches(files, [spec.label, *spec.fields], BATCH_ROWS)
            for where, batch in prefetch(read):
                labels = validate.checked_labels(batch, spec.label, where)
                rows[part] += batch.num_rows
                positives[part] += int(np.count_nonzero(labels))
                for name, ends in ranges.items():
                    by = ", ".join(map(graph.operator_name, inputs.columns[name].operators))
                    values = validate.checked_numbers(batch, name, where, by or "the model")
                    if part == "train":
                        ends["min"] = min(ends["min"], float(values.min()))
                        ends["max"] = max(ends["max"], float(values.max()))
                for name in spec.ids:
                    ids = validate.checked_ids(batch, name, sizes[name], where)
                    if part == "train":
                        by_id = pc.value_counts(pa.array(ids))
                        ids, often = (by_id.field(i).to_numpy() for i in (0, 1))
                        counts[name][ids] += often
                bar.update(batch.num_rows)
            if files and positives[part] in (0, rows[part]):
                raise UserError(
                    f"column {spec.label!r} has only label {min(positives[part], 1)} in all "
                    f"{rows[part]:,} rows of the {part} part. Give more rows, or name another "
                    "column"
                )
    if large := [c for c, ends in ranges.items() if max(-ends["min"], ends["max"]) > UNSCALED]:
        inputs.notes.append(
            f"numbers beyond ±{UNSCALED:,g}, with which training can fail: {quoted(large)}. "
            "Scale them in the workflow (Normalize, NormalizeMinMax, LogOp)"
        )
    return counts, {"rows": rows, "positives": positives, "fields": ranges}
