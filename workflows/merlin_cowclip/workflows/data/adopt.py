"""A pipeline that is there already, as a prepared folder: a saved NVTabular workflow, its parquet.

The parquet stays as it is and where it is. It is read once: every id, number and label is checked,
every id counted. What a workflow says of its parquet is `existing_workflow.py`'s; raw logs to
prepared data is `etl.py`.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from merlin_cowclip.workflows.data.counts import write_counts
from merlin_cowclip.workflows.data.encoded_rows import (
    ahead,
    batches,
    check_numbers,
    checked_ids,
    checked_labels,
)
from merlin_cowclip.workflows.data.existing_parquet import (
    PARTS,
    ParquetFile,
    check_given_once,
    check_label,
    open_files,
    others,
)
from merlin_cowclip.workflows.data.existing_workflow import (
    WORKFLOW_FILES,
    Pipeline,
)
from merlin_cowclip.workflows.data.prepare.nvt_workflow import save_schema
from merlin_cowclip.workflows.data.prepare.statistics import MISSING, PADDING, UNKNOWN
from merlin_cowclip.workflows.data.prepared_data import PreparedData, check_unchanged, write_record
from merlin_cowclip.workflows.data.workflow_graph import (
    SAVED_FILES,
    every_node,
    file_name,
    files_of,
    load_saved,
)
from merlin_cowclip.workflows.errors import UserError, quoted
from merlin_cowclip.workflows.folders import all_or_nothing, refuse_existing
from merlin_cowclip.workflows.manifest import checksum
from merlin_cowclip.workflows.progress import progress_bar

BATCH_ROWS = 1 << 17  # held at a time, twice: one batch is checked while the next is read


def adopt(
    parquet: str | Path | Sequence[str | Path],
    workflow: str | Path,
    label: str,
    out: str | Path,
    test: str | Path | Sequence[str | Path] | None = None,
    progress: bool = True,
) -> PreparedData:
    """Make a prepared folder, at ``out``, of parquet that an NVTabular workflow wrote.

    The model's inputs are what the workflow's schema tags as categorical (with an int domain, as
    Categorify gives it) and as continuous; where it tags nothing, the schema beside the parquet
    (``.merlin/schema.json``) is asked. What was left out, and the like, is in ``record["notes"]``.

    Args:
        parquet: the training part: files, globs, or folders that ``to_parquet`` wrote.
        workflow: a folder that ``nvtabular.Workflow.save`` wrote. Loading it runs code from it
            (cloudpickle): give only your own.
        label: the parquet's column of 0 and 1.
        out: the folder to make; must not exist. It refers to the parquet, and holds a copy of the
            workflow, the schema and the counts.
        test: the test part, or None: a run then has no test metrics.
        progress: show a progress bar on stderr.

    Returns:
        The folder, opened.

    Raises:
        UserError: bad input; the message names the place and the remedy, and nothing is left
            behind.
    """
    out, workflow = Path(out), Path(workflow)
    refuse_existing(out)
    parts = {"train": open_files(parquet), "test": [] if test is None else open_files(test)}
    check_given_once(parts)
    for files in filter(None, parts.values()):
        check_label(files, label)
    with all_or_nothing(out) as folder:
        pipeline = Pipeline.of(workflow, parts, label, out.absolute().name)
        scan = _Scan(pipeline, progress)
        scan.read(parts)
        for file in itertools.chain(*parts.values()):
            check_unchanged(file.state)  # while it was read
        _save(pipeline, scan, parts, folder)
    return PreparedData.open(out)


# The rows ------------------------------------------------------------------------------------


class _Scan:
    """One pass over all rows: checks them, and counts the ids of the training part."""

    def __init__(self, pipeline: Pipeline, progress: bool) -> None:
        self.spec, self.cardinalities = pipeline.spec, pipeline.cardinalities
        self.progress = progress
        self.counts = {c: np.zeros(n, np.int64) for c, n in self.cardinalities.items()}
        self.rows: dict[str, int] = {}
        self.positives: dict[str, int] = {}
        self.shortest = dict.fromkeys(pipeline.padded, np.inf)  # list of the training part

    def read(self, parts: dict[str, list[ParquetFile]]) -> None:
        """Check all rows.

        Raises:
            UserError: names file, row group, row and column of the first bad value.
        """
        total = sum(file.rows for files in parts.values() for file in files)
        with progress_bar("checking", total, show=self.progress) as bar:
            for part, files in parts.items():
                rows = positives = 0
                columns = [self.spec.label, *self.spec.fields]
                for place, batch in ahead(batches(files, columns, BATCH_ROWS)):
                    rows += batch.num_rows
                    labels = checked_labels(batch, self.spec.label, place)
                    positives += int(np.count_nonzero(labels))
                    for name in self.spec.continuous:
                        check_numbers(batch, name, place)
                    for name in self.spec.ids:
                        ids = checked_ids(batch, name, self.cardinalities[name], place)
                        if part == "train":
                            _add_counts(self.counts[name], ids)
                            self._measure(name, batch)
                    bar.update(batch.num_rows)
                if files and positives in (0, rows):
                    raise UserError(
                        f"label must be 0 in some rows and 1 in others, in the {PARTS[part]} "
                        f"too. Received: only {min(positives, 1)} in column {self.spec.label!r} of "
                        f"{files[0].path}{others(files)}. Give more rows, or name another column"
                    )
                self.rows[part], self.positives[part] = rows, positives

    def _measure(self, name: str, batch: pa.RecordBatch) -> None:
        if name in self.shortest and batch.num_rows:
            shortest = pc.min(pc.list_value_length(batch.column(name))).as_py()
            self.shortest[name] = min(self.shortest[name], shortest)


def _add_counts(counts: np.ndarray, ids: np.ndarray) -> None:
    """Add to ``counts`` how often each id occurs."""
    ids = ids.astype(np.int64, copy=False)
    if len(counts) <= 4 * len(ids):
        counts += np.bincount(ids, minlength=len(counts))
    else:  # a table so large that to go through it costs more than to sort the ids
        seen, often = np.unique(ids, return_counts=True)
        counts[seen] += often


# The folder ----------------------------------------------------------------------------------


def _save(
    pipeline: Pipeline, scan: _Scan, parts: dict[str, list[ParquetFile]], folder: Path
) -> None:
    _copy_workflow(pipeline, folder / "workflow")
    (folder / "counts").mkdir()
    for name, counts in scan.counts.items():
        vocabulary = pipeline.vocabularies.get(name)
        raw = pa.nulls(0, pa.string()) if vocabulary is None else vocabulary.raw()
        write_counts(folder / "counts", name, counts, raw)
    save_schema(pipeline.schema, folder, pipeline.bucketed)
    other, whole = _counted_otherwise(pipeline, scan)
    notes = list(pipeline.notes)
    if other:
        note = (
            "counts are those of the training rows; the workflow's own, of the rows it was fitted "
            f"on, differ for {quoted(other)}"
        )
        if any(scan.counts[name][[MISSING, UNKNOWN]].any() for name in whole):
            note += (
                f". If these are the rows that it was fitted on, ids of {quoted(whole)} are other "
                "rows': so "
                "NVTabular writes them, where some are missing, of a pandas frame whose index is "
                "not 0, 1, 2, …. Then give it as Dataset(frame.reset_index(drop=True)), fit again, "
                "write the parquet again, and adopt that"
            )
            if set(whole) & set(pipeline.spec.lists):
                note += (
                    ". Of lists that hold missing values it does so whatever the index: take these "
                    "out of them first"
                )
        notes.append(note)
    padded = [
        name
        for name in pipeline.spec.lists
        if name not in pipeline.vocabularies and scan.counts[name][PADDING]
    ]
    if padded:  # Categorify has no other 0
        notes.append(
            f"id 0 in lists of {quoted(padded)} is padding, which the networks leave out: if it is "
            "an id there, let the workflow write ids from 1 on"
        )
    filled = [name for name, to in pipeline.padded.items() if scan.shortest[name] == to]
    if filled:
        notes.append(
            f"lists of {quoted(filled)} are of one length in all rows, as ListSlice(pad=True) "
            "makes them of a pandas frame's lists or on a GPU: of what it reads from parquet, and "
            "so of raw rows, scored or served, it pads none on a CPU. Shorter ones are other lists "
            "then: pad them before the workflow, or leave pad out"
        )
    record = {
        "spec": pipeline.spec.to_dict(),
        "workflow": str(pipeline.folder.absolute()),
        "workflow_sha256": checksum(pipeline.folder / "workflow.pkl"),
        "files": {part: [file.state for file in files] for part, files in parts.items()},
        "rows": scan.rows,
        "cardinalities": pipeline.cardinalities,
        "report": {"rows": scan.rows, "positives": scan.positives, "fields": {}},
        "notes": notes,
    }
    write_record(folder, record)


def _copy_workflow(pipeline: Pipeline, home: Path) -> None:
    """Copy what NVTabular saved, and see to it that the copy finds its vocabularies."""
    from nvtabular.ops import Categorify

    home.mkdir()
    for name in WORKFLOW_FILES:
        shutil.copy2(pipeline.folder / name, home / name)
    if (pipeline.folder / SAVED_FILES).is_dir():
        shutil.copytree(pipeline.folder / SAVED_FILES, home / SAVED_FILES)
    (home / SAVED_FILES).mkdir(exist_ok=True)
    found = load_saved(pipeline.folder.absolute())
    workflow = load_saved(home.absolute(), find_again=False)
    strayed = False
    nodes = zip(every_node(workflow.output_node), every_node(found.output_node), strict=True)
    for node, as_found in nodes:
        files = files_of(node.op)
        for storage, path in files_of(as_found.op).items():
            target = home / SAVED_FILES / file_name(node.op, storage)
            if not target.exists():
                is_vocabulary = isinstance(node.op, Categorify)
                source = pipeline.found[storage] if is_vocabulary else Path(path)
                (shutil.copytree if source.is_dir() else shutil.copy2)(source, target)
            if os.path.abspath(files[storage]) != str(target.absolute()):
                files[storage] = str(target.absolute())
                strayed = True
    if strayed:
        workflow.save(str(home.absolute()))


def _counted_otherwise(pipeline: Pipeline, scan: _Scan) -> tuple[list[str], list[str]]:
    """Fields whose counts are not the ones in the workflow's vocabularies.

    And which of these should not if the rows are those of the fit: those of which no operator left
    ids out, nor of what was encoded with them, or some of whose ids are too many.
    """
    fields: dict[str, list[str]] = {}
    for field, vocabulary in pipeline.vocabularies.items():
        fields.setdefault(vocabulary.storage, []).append(field)
    other, whole = [], []
    for storage, names in fields.items():
        vocabulary = pipeline.vocabularies[names[0]]
        sizes = vocabulary.sizes()
        if sizes is None:
            continue
        properties = pipeline.schema[names[0]].properties
        limits = [properties.get(key) for key in ("freq_threshold", "max_size", "num_buckets")]
        # Of columns that are encoded together counts add up; of one that has several names not.
        found = [([name], [name], True) for name in names]
        if storage in pipeline.joint:
            whole_last = sorted(names, key=lambda name: name not in pipeline.thinned)
            by_column = {pipeline.encoded.get(name, name): name for name in whole_last}
            is_all = pipeline.joint[storage] <= set(by_column)
            found = [(names, list(by_column.values()), is_all)]
        for of, summed, is_all in found:
            each = np.array([scan.counts[name] for name in summed])
            left = [name not in pipeline.thinned for name in summed]
            known = each[:, each.shape[1] - vocabulary.rows :]
            unseen = (each[:, UNKNOWN] > 0) & (not any(limits))  # a fit without leaves none out
            if not unseen.any() and np.array_equal(sizes, known.sum(axis=0)):
                continue
            other += of
            # Where ids are left out each may be rarer than at the fit, and none more frequent.
            too_many = unseen[left].any() or (known[left].sum(axis=0) > sizes).any()
            if too_many or (is_all and all(left)):
                whole += [name for name in of if name not in pipeline.thinned]
    return other, whole
