"""Rows from outside, as the inputs of a run's model: raw ones through the run's own workflow.

The saved workflow encodes them, and not what `prepare` encodes with: it is what is served, and all
that an adopted pipeline has. Files are read in parts and in order, so that memory is bounded at any
size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa

from merlin_cowclip.workflows.data.adopt.validate import (
    BatchLocation,
    ParquetFile,
    batches,
    check_columns,
    checked_ids,
    checked_labels,
    checked_numbers,
    open_files,
)
from merlin_cowclip.workflows.data.prepare.pipeline import READERS
from merlin_cowclip.workflows.data.prepared_data import PARTS, RECORD
from merlin_cowclip.workflows.data.sources.base import Source
from merlin_cowclip.workflows.data.sources.files import expand_paths
from merlin_cowclip.workflows.data.spec import DatasetSpec, Split
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.training.rows import Rows
from merlin_cowclip.workflows.training.runs import Run

if TYPE_CHECKING:
    from merlin_cowclip.workflows.data.adopt.inference import InferenceWorkflow

CHUNK_BYTES = 8 << 20  # of a log that is read and encoded at a time
BATCH_ROWS = 1 << 16  # of parquet, read and encoded at a time


@dataclass(frozen=True)
class Incoming:
    """Some files of rows, all of them with the label, or none.

    Attributes:
        files: their paths.
        size: of them all.
        unit: of the size.
        labelled: whether they have the label.
        pieces: gives all rows in order, as read and as encoded; labels are 0 where there are none.
            It calls its argument with the size that was read since, and raises a UserError for the
            first bad value, with its file and row.
    """

    files: list[Path]
    size: int
    unit: str
    labelled: bool
    pieces: Callable[[Callable[[int], Any]], Iterator[tuple[pa.RecordBatch, Rows]]]


def open_incoming(
    run: Run, inputs: Sequence[str | Path], *, raw: bool = False, trust_workflow: bool = False
) -> Incoming:
    """Look at the heads of files of rows for a run.

    Args:
        run: whose inputs they are to become.
        inputs: files or globs: raw logs as `prepare` took the run's own; for a run on an adopted
            pipeline parquet, or folders of it, that its workflow wrote.
        raw: for such a run, whether they are what the workflow reads instead.
        trust_workflow: see `Run.workflow`.
    """
    spec = dataclasses.replace(run.spec(), split=Split())  # a column of times is no input
    if run.is_adopted:
        files = open_files(inputs)
        return _parquet(run, spec, files, run.inference(trust=trust_workflow) if raw else None)
    return _raw_logs(run, spec, expand_paths(inputs), trust_workflow)


def _raw_logs(run: Run, spec: DatasetSpec, paths: list[Path], trust: bool) -> Incoming:
    """What `prepare` takes."""
    for path in paths:
        part = path.resolve().parent
        if part.name in PARTS and (part.parent / RECORD).is_file():
            raise UserError(
                f"expected raw data, but {path} is a part of prepared data. Evaluate the folder "
                f"{part.parent}, or give the raw data"
            )
    logs = [_log(spec, path) for path in paths]
    labelled = _all_labelled(spec, {log.path: log.has_label() for log in logs})
    logs = [dataclasses.replace(log, labelled=labelled) for log in logs]
    for log in logs:
        log.check()
    workflow = run.workflow(trust=trust).remove_inputs([spec.label])

    def encoded(batch: pa.RecordBatch) -> Rows:
        out = workflow.transform(raw_frame(batch)[[*spec.fields]])
        columns = {name: pa.array(out[name]) for name in (*spec.categorical, *spec.continuous)}
        columns |= {name: pa.array(out[name], pa.list_(pa.int64())) for name in spec.lists}
        return Rows.of(spec, columns, batch.column(spec.label).to_numpy() if labelled else None)

    def pieces(advance: Callable[[int], Any]) -> Iterator[tuple[pa.RecordBatch, Rows]]:
        for log in logs:
            for chunk in log.chunks(CHUNK_BYTES):
                for batch in log.batches(chunk, advance):
                    if batch.num_rows:
                        yield batch, encoded(batch)

    return Incoming(paths, sum(log.size for log in logs), "B", labelled, pieces)


def _all_labelled(spec: DatasetSpec, labelled: Mapping[Path, bool]) -> bool:
    """Whether files have the label, which must be the same for all."""
    if any(labelled.values()) and not all(labelled.values()):
        without = next(path for path, has in labelled.items() if not has)
        raise UserError(
            f"all files must have the label, or none. Received: {without} without column "
            f"{spec.label!r}. Pass these files separately"
        )
    return all(labelled.values())


def _log(spec: DatasetSpec, path: Path) -> Source:
    """A log in the run's format, or in parquet, which is known by its first bytes."""
    with path.open("rb") as file:
        is_parquet = file.read(4) == b"PAR1"
    if is_parquet:
        spec = dataclasses.replace(spec, format="parquet", header=True, columns=None)
    return READERS[spec.format](spec, path)


def raw_frame(batch: pa.RecordBatch) -> pd.DataFrame:
    """Rows as read, for a workflow."""
    columns = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        is_dictionary = pa.types.is_dictionary(column.type)
        column = column.dictionary_decode() if is_dictionary else column
        columns[name] = column.to_numpy(zero_copy_only=False)
    return pd.DataFrame(columns)


def _parquet(
    run: Run, spec: DatasetSpec, files: list[ParquetFile], inference: InferenceWorkflow | None
) -> Incoming:
    """Parquet that an adopted pipeline's workflow wrote, or, for its `inference`, that it reads."""
    if inference is None:
        try:
            labelled = _all_labelled(spec, {f.path: spec.label in f.schema.names for f in files})
            check_columns(spec, files, labelled=labelled)
        except UserError as error:
            raise UserError(f"{error}. If these are raw rows, add --raw (raw=True)") from None
    else:
        has_label = inference.has_label
        labelled = _all_labelled(spec, {f.path: has_label(f.schema.names) for f in files})
    wanted = [*spec.fields, *([spec.label] if labelled else [])]
    read = wanted if inference is None else inference.columns  # those that are there
    cardinalities = run.config["cardinalities"]

    def encoded(batch: pa.RecordBatch, where: BatchLocation) -> pa.RecordBatch:
        if inference is None:
            return batch
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        out = inference.transform(columns, where)
        return pa.RecordBatch.from_pandas(out[wanted], preserve_index=False)

    def pieces(advance: Callable[[int], Any]) -> Iterator[tuple[pa.RecordBatch, Rows]]:
        for where, batch in batches(files, read, BATCH_ROWS):
            rows = encoded(batch, where)
            for name in spec.ids:
                checked_ids(rows, name, cardinalities[name], where)
            for name in spec.continuous:
                checked_numbers(rows, name, where)
            labels = checked_labels(rows, spec.label, where) if labelled else None
            yield batch, Rows.of(spec, {name: rows.column(name) for name in spec.fields}, labels)
            advance(batch.num_rows)

    paths, size = [file.path for file in files], sum(file.rows for file in files)
    return Incoming(paths, size, " rows", labelled, pieces)
