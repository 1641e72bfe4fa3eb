# SPDX-License-Identifier: Apache-2.0
"""`adopt`: check the parquet that a saved NVTabular workflow wrote, count its ids, refer to it.

The parquet stays as it is and where it is, and is read once.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from merlin_cowclip.workflows.data.adopt import validate
from merlin_cowclip.workflows.data.adopt.graph import SAVED_FILES, load_saved, operator_name
from merlin_cowclip.workflows.data.adopt.inference import InferenceWorkflow
from merlin_cowclip.workflows.data.adopt.inputs import WORKFLOW_FILES, Pipeline
from merlin_cowclip.workflows.data.adopt.skew import check_skew
from merlin_cowclip.workflows.data.adopt.validate import ParquetFile
from merlin_cowclip.workflows.data.counts import write_counts
from merlin_cowclip.workflows.data.prepare.nvt_workflow import save_schema
from merlin_cowclip.workflows.data.prepared_data import (
    PreparedData,
    check_unchanged,
    file_state,
    write_record,
)
from merlin_cowclip.workflows.data.sources.files import refuse_twice
from merlin_cowclip.workflows.errors import UserError, quoted
from merlin_cowclip.workflows.folders import all_or_nothing, refuse_existing
from merlin_cowclip.workflows.progress import progress_bar

BATCH_ROWS = 1 << 17  # held at a time, twice: one batch is checked while the next is read
UNSCALED = 1e3  # a number column with a larger absolute value is noted


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

    The model's inputs are the columns that the workflow's schema tags as categorical (with an int
    domain, as Categorify gives it) and as continuous. ``record["notes"]`` says what was left out.

    Args:
        parquet: the training part: files, globs, or folders that ``to_parquet`` wrote.
        workflow: a folder that ``nvtabular.Workflow.save`` wrote. Loading it runs code from it
            (cloudpickle): give only your own.
        label: the parquet's column of 0 and 1.
        out: the folder to make; must not exist. It refers to the parquet, and holds a copy of the
            workflow, the schema and the counts.
        valid: the validation part, or None: a run is then not measured after each epoch.
        test: the test part, or None: a run then has no test metrics.
        check_raw: parquet with the raw rows. Some 10,000 are encoded by the copied workflow, and
            must be among the rows of the parquet.
        progress: show a progress bar on stderr.

    Raises:
        UserError: bad input, or a field of raw rows that is encoded otherwise than in the parquet;
            nothing is left behind.
    """
    out, workflow = Path(out), Path(workflow)
    refuse_existing(out)
    given = {"train": parquet, "valid": valid, "test": test}
    splits = {p: [] if of is None else validate.open_files(of) for p, of in given.items()}
    files = [*itertools.chain(*splits.values())]
    refuse_twice([file.path for file in files])
    states = {split: [file_state(file.path) for file in files] for split, files in splits.items()}
    with all_or_nothing(out) as folder:
        pipeline = Pipeline.of(workflow, files, label, out.absolute().name)
        counts, report = _scan(pipeline, splits, progress)
        ends = {name: max(-of["min"], of["max"]) for name, of in report["fields"].items()}
        if unscaled := [name for name, end in ends.items() if end > UNSCALED]:
            pipeline.notes.append(
                f"numbers beyond ±{UNSCALED:,g}, with which training can fail: {quoted(unscaled)}. "
                "Scale them in the workflow (Normalize, NormalizeMinMax, LogOp)"
            )
        check_unchanged(itertools.chain(*states.values()))  # while it was read
        (folder / "workflow").mkdir()
        for name in WORKFLOW_FILES:
            shutil.copy2(workflow / name, folder / "workflow" / name)
        if (workflow / SAVED_FILES).is_dir():
            shutil.copytree(workflow / SAVED_FILES, folder / "workflow" / SAVED_FILES)
        if check_raw is not None:
            raw = validate.open_files(check_raw)
            pipeline.notes.extend(_check_raw(pipeline, folder / "workflow", raw, files))
        (folder / "counts").mkdir()
        for name, by_id in counts.items():
            vocabulary = pipeline.columns[name].vocabulary
            raw = pa.nulls(0, pa.string()) if vocabulary is None else vocabulary.raw()
            write_counts(folder / "counts", name, by_id, raw)
        save_schema(pipeline.schema, folder)
        record = {
            "spec": pipeline.spec.to_dict(),
            "workflow": str(workflow.absolute()),
            "files": states,
            "rows": report["rows"],
            "cardinalities": pipeline.cardinalities,
            "report": report,
            "notes": pipeline.notes,
        }
        write_record(folder, record)
    return PreparedData.open(out)


def _check_raw(
    pipeline: Pipeline, workflow: Path, raw: list[ParquetFile], files: list[ParquetFile]
) -> list[str]:
    """Compare raw rows, encoded by the copied workflow, with the parquet; returns notes."""
    spec = pipeline.spec
    inference = InferenceWorkflow(load_saved(workflow), spec)
    # `TargetEncoding` encodes rows of its fit by folds.
    fields = [c for c in spec.fields if not pipeline.columns[c].is_statistic]
    if all(inference.has_label(file.schema.names) for file in raw):
        fields.append(spec.label)
    return check_skew(inference, raw, files, fields)


def _scan(
    pipeline: Pipeline, splits: dict[str, list[ParquetFile]], progress: bool
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Check all rows; returns the counts of training ids by field, and the report."""
    spec, sizes, remedy = pipeline.spec, pipeline.cardinalities, validate.LABEL_REMEDY
    by = {n: [operator_name(x.op) for x in c.changed_by] for n, c in pipeline.columns.items()}
    if names := ", ".join(by.get(spec.label, [])):
        remedy = f"The workflow changed the label ({names}). Let it pass the label unchanged"
    counts = {name: np.zeros(size, np.int64) for name, size in sizes.items()}
    ranges = {name: {"min": np.inf, "max": -np.inf} for name in spec.continuous}
    rows, positives = dict.fromkeys(splits, 0), dict.fromkeys(splits, 0)
    total = sum(file.rows for files in splits.values() for file in files)
    with progress_bar("checking", total, show=progress) as bar:
        for split, files in splits.items():
            read = validate.batches(files, [spec.label, *spec.fields], BATCH_ROWS)
            for where, batch in validate.prefetch(read):
                labels = validate.checked_labels(batch, spec.label, where, remedy)
                rows[split] += batch.num_rows
                positives[split] += int(np.count_nonzero(labels))
                for name in spec.continuous:
                    before = ", ".join(by[name]) or "the model"
                    values = validate.checked_numbers(batch, name, where, before)
                    if split == "train":
                        ranges[name]["min"] = min(ranges[name]["min"], float(values.min()))
                        ranges[name]["max"] = max(ranges[name]["max"], float(values.max()))
                for name in spec.ids:
                    ids = validate.checked_ids(batch, name, sizes[name], where)
                    if split == "train":
                        found = pc.value_counts(pa.array(ids))
                        ids, often = (found.field(i).to_numpy() for i in (0, 1))
                        counts[name][ids] += often
                bar.update(batch.num_rows)
            if files and positives[split] in (0, rows[split]):
                raise UserError(
                    f"column {spec.label!r} has only label {min(positives[split], 1)} in all "
                    f"{rows[split]:,} rows of the {split} split. Give more rows, or name another "
                    "column"
                )
    return counts, {"rows": rows, "positives": positives, "fields": ranges}
