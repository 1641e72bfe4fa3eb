"""`adopt`: check the parquet that a saved NVTabular workflow wrote, count its ids, refer to it.

The parquet stays as it is and where it is, and is read once.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from merlin_cowclip.workflows.data.adopt.graph import SAVED_FILES, Column, load_saved
from merlin_cowclip.workflows.data.adopt.inference import InferenceWorkflow
from merlin_cowclip.workflows.data.adopt.inputs import WORKFLOW_FILES, Pipeline
from merlin_cowclip.workflows.data.adopt.parquet_files import ParquetFile, open_files
from merlin_cowclip.workflows.data.adopt.skew import check_skew
from merlin_cowclip.workflows.data.adopt.validate import (
    LABEL_REMEDY,
    batches,
    checked_ids,
    checked_labels,
    checked_numbers,
    prefetch,
)
from merlin_cowclip.workflows.data.counts import write_counts
from merlin_cowclip.workflows.data.prepare.nvt_workflow import save_schema
from merlin_cowclip.workflows.data.prepare.statistics import UNKNOWN
from merlin_cowclip.workflows.data.prepared_data import PreparedData, check_unchanged, write_record
from merlin_cowclip.workflows.data.sources.files import refuse_twice
from merlin_cowclip.workflows.errors import UserError, quoted
from merlin_cowclip.workflows.folders import all_or_nothing, refuse_existing
from merlin_cowclip.workflows.manifest import checksum
from merlin_cowclip.workflows.progress import progress_bar

_LIMITS = ("freq_threshold", "max_size", "num_buckets")  # of a vocabulary
BATCH_ROWS = 1 << 17  # held at a time, twice: one batch is checked while the next is read


def adopt(
    parquet: str | Path | Sequence[str | Path],
    workflow: str | Path,
    label: str,
    out: str | Path,
    test: str | Path | Sequence[str | Path] | None = None,
    check_raw: str | Path | Sequence[str | Path] | None = None,
    progress: bool = True,
) -> PreparedData:
    """Make a prepared folder, at ``out``, of parquet that an NVTabular workflow wrote.

    The model's inputs are the columns that the workflow's schema tags as categorical (with an int
    domain, as Categorify gives it) and as continuous; where it tags nothing, the schema beside the
    parquet (``.merlin/schema.json``) is asked. ``record["notes"]`` says what was left out.

    Args:
        parquet: the training split: files, globs, or folders that ``to_parquet`` wrote.
        workflow: a folder that ``nvtabular.Workflow.save`` wrote. Loading it runs code from it
            (cloudpickle): give only your own.
        label: the parquet's column of 0 and 1.
        out: the folder to make; must not exist. It refers to the parquet, and holds a copy of the
            workflow, the schema and the counts.
        test: the test split, or None: a run then has no test metrics.
        check_raw: parquet with the raw rows. Some 10,000 are encoded by the copied workflow, and
            must be among the rows of the parquet.
        progress: show a progress bar on stderr.

    Returns:
        The folder, opened.

    Raises:
        UserError: bad input, or a field of raw rows that is encoded otherwise than in the parquet;
            nothing is left behind.
    """
    out, workflow = Path(out), Path(workflow)
    refuse_existing(out)
    splits = {"train": open_files(parquet), "test": [] if test is None else open_files(test)}
    files = [*splits["train"], *splits["test"]]
    refuse_twice([file.path for file in files])
    for file in files:
        if label not in file.schema.names:
            raise UserError(
                f"{file.path} has no column {label!r} for the label, but "
                f"{quoted(file.schema.names, brief=True)}. Name another column, or let the "
                "workflow pass the label on"
            )
    with all_or_nothing(out) as folder:
        pipeline = Pipeline.of(workflow, splits, label, out.absolute().name)
        scan = _Scan(pipeline, progress)
        scan.read(splits)
        for file in files:
            check_unchanged(file.state)  # while it was read
        (folder / "workflow").mkdir()
        for name in WORKFLOW_FILES:
            shutil.copy2(workflow / name, folder / "workflow" / name)
        if (workflow / SAVED_FILES).is_dir():
            shutil.copytree(workflow / SAVED_FILES, folder / "workflow" / SAVED_FILES)
        if check_raw is not None:
            _check_raw(pipeline, folder / "workflow", open_files(check_raw), files)
        _save(pipeline, scan, splits, folder)
    return PreparedData.open(out)


def _check_raw(
    pipeline: Pipeline, workflow: Path, raw: list[ParquetFile], files: list[ParquetFile]
) -> None:
    """Compare raw rows, encoded by the copied workflow, with the parquet."""
    spec = pipeline.spec
    inference = InferenceWorkflow(load_saved(workflow), spec.fields, spec.label, spec.lists)
    # `TargetEncoding` encodes rows of its fit by folds.
    fields = [c for c in spec.fields if not pipeline.columns[c].is_statistic]
    if all(inference.has_label(file.schema.names) for file in raw):
        fields.append(spec.label)
    numbers = [name for name in spec.continuous if name in fields]
    check_skew(inference, raw, files, fields, numbers)


# The rows ----------------------------------------------------------------------------------------


class _Scan:
    """One pass over all rows: checks them, counts the training ids, finds ranges of numbers."""

    def __init__(self, pipeline: Pipeline, progress: bool) -> None:
        self.pipeline, self.progress = pipeline, progress
        self.counts = {c: np.zeros(n, np.int64) for c, n in pipeline.cardinalities.items()}
        self.rows: dict[str, int] = {}
        self.positives: dict[str, int] = {}
        self.ranges: dict[str, tuple[float, float]] = {}  # in the training split

    def read(self, splits: dict[str, list[ParquetFile]]) -> None:
        """Check all rows; the error of a bad value names file, row and column."""
        spec, remedy = self.pipeline.spec, LABEL_REMEDY
        if by := self.pipeline.columns.get(spec.label, Column()).changed_by:
            remedy = (
                f"The workflow changed the label ({', '.join(by)}). Let it pass the label unchanged"
            )
        total = sum(file.rows for files in splits.values() for file in files)
        with progress_bar("checking", total, show=self.progress) as bar:
            for split, files in splits.items():
                rows = positives = 0
                columns = [spec.label, *spec.fields]
                for where, batch in prefetch(batches(files, columns, BATCH_ROWS)):
                    rows += batch.num_rows
                    labels = checked_labels(batch, spec.label, where, remedy)
                    positives += int(np.count_nonzero(labels))
                    for name in spec.continuous:
                        values = checked_numbers(batch, name, where)
                        if split == "train":
                            low, high = self.ranges.get(name, (np.inf, -np.inf))
                            low, high = min(low, values.min()), max(high, values.max())
                            self.ranges[name] = float(low), float(high)
                    for name in spec.ids:
                        ids = checked_ids(batch, name, self.pipeline.cardinalities[name], where)
                        if split == "train":
                            _add_counts(self.counts[name], ids)
                    bar.update(batch.num_rows)
                if files and positives in (0, rows):
                    raise UserError(
                        f"column {spec.label!r} has only label {min(positives, 1)} in all "
                        f"{rows:,} rows of the {split} split. Give more rows, or name another "
                        "column"
                    )
                self.rows[split], self.positives[split] = rows, positives


def _add_counts(counts: np.ndarray, ids: np.ndarray) -> None:
    """Add to ``counts`` how often each id occurs."""
    ids = ids.astype(np.int64, copy=False)
    if len(counts) <= 4 * len(ids):
        counts += np.bincount(ids, minlength=len(counts))
    else:  # a table so large that to go through it costs more than to sort the ids
        seen, often = np.unique(ids, return_counts=True)
        counts[seen] += often


# The folder --------------------------------------------------------------------------------------


def _save(
    pipeline: Pipeline, scan: _Scan, splits: dict[str, list[ParquetFile]], folder: Path
) -> None:
    (folder / "counts").mkdir()
    for name, counts in scan.counts.items():
        vocabulary = pipeline.vocabularies.get(name)
        raw = pa.nulls(0, pa.string()) if vocabulary is None else vocabulary.raw()
        write_counts(folder / "counts", name, counts, raw)
    bucketed = {
        name
        for name in pipeline.spec.ids
        if name not in pipeline.vocabularies
        and (pipeline.columns[name].is_hashed or "Bucketize" in pipeline.columns[name].changed_by)
    }
    save_schema(pipeline.schema, folder, bucketed)
    notes = list(pipeline.notes)
    if other := _counted_otherwise(pipeline, scan):
        notes.append(
            f"counts of {quoted(other)} differ from those of the fit: the rows are others, or "
            "NVTabular was given a frame whose index is not 0, 1, 2, …, and wrote wrong ids "
            "(--check-raw tells)"
        )
    fields = {name: {"min": low, "max": high} for name, (low, high) in scan.ranges.items()}
    record = {
        "spec": pipeline.spec.to_dict(),
        "workflow": str(pipeline.folder.absolute()),
        "workflow_sha256": checksum(pipeline.folder / "workflow.pkl"),
        "files": {split: [file.state for file in files] for split, files in splits.items()},
        "rows": scan.rows,
        "cardinalities": pipeline.cardinalities,
        "report": {"rows": scan.rows, "positives": scan.positives, "fields": fields},
        "notes": notes,
    }
    write_record(folder, record)


def _counted_otherwise(pipeline: Pipeline, scan: _Scan) -> list[str]:
    """Fields whose counts are not those in the workflow's vocabularies."""
    by_vocabulary: dict[str, list[str]] = {}
    for field, vocabulary in pipeline.vocabularies.items():
        by_vocabulary.setdefault(vocabulary.storage, []).append(field)
    other = []
    for fields in by_vocabulary.values():
        vocabulary = pipeline.vocabularies[fields[0]]
        sizes = vocabulary.sizes()
        counts = np.sum([scan.counts[field] for field in fields], axis=0)
        limits = map(pipeline.schema[fields[0]].properties.get, _LIMITS)
        strange = counts[UNKNOWN] > 0 and not any(limits)  # a fit without limits knows all ids
        known = counts[len(counts) - vocabulary.rows :]
        if sizes is not None and (strange or not np.array_equal(sizes, known)):
            other += fields
    return other
