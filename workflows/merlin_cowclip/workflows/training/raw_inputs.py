# SPDX-License-Identifier: Apache-2.0
"""Rows from outside, as the inputs of a run's model: raw ones through the run's own workflow.

The saved workflow encodes them, not what `prepare` encodes with: it is what is served, and all that
an adopted pipeline has. Files are read in parts, so that memory is bounded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from merlin_cowclip.workflows.data.adopt.validate import (
    InputFile,
    batches,
    check_columns,
    open_files,
)
from merlin_cowclip.workflows.data.prepare.pipeline import READERS
from merlin_cowclip.workflows.data.prepared_data import PARTS, RECORD
from merlin_cowclip.workflows.data.sources.base import Source
from merlin_cowclip.workflows.data.sources.files import Input, expand_paths
from merlin_cowclip.workflows.data.sources.parquet import is_parquet
from merlin_cowclip.workflows.data.spec import DatasetSpec, Split
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.training.rows import as_rows, checked_rows
from merlin_cowclip.workflows.training.runs import Run

if TYPE_CHECKING:
    from merlin_cowclip.workflows.data.adopt.inference import InferenceWorkflow

CHUNK_BYTES = 8 << 20  # of a log that is read and encoded at a time
BATCH_ROWS = 1 << 16  # of parquet, read and encoded at a time


@dataclass(frozen=True)
class RawInputs:
    """Some files of rows, all of them with the label, or none.

    Attributes:
        files: their paths.
        size: of them all.
        unit: of the size.
        labelled: whether they have the label.
        pieces: gives all rows in order, as read and encoded (`as_rows`). It calls its argument
            with the size that was read since, and raises a UserError for the first bad value, with
            its file and row.
    """

    files: list[Input]
    size: int
    unit: str
    labelled: bool
    pieces: Callable[[Callable[[int], Any]], Iterator[tuple[pa.RecordBatch, pa.Table]]]


def open_raw_inputs(run: Run, inputs: Sequence[str | Path], *, raw: bool = False) -> RawInputs:
    """Look at the heads of files of rows for a run.

    Args:
        run: whose inputs they are to become.
        inputs: files or globs: raw logs as `prepare` took the run's own; for a run on an adopted
            pipeline parquet, or folders of it, that its workflow wrote.
        raw: for such a run, whether they are what the workflow reads instead.
    """
    spec = run.spec()
    split = Split(time_format=spec.split.time_format)  # its column of times is no input
    spec = dataclasses.replace(spec, split=split)
    if not run.is_adopted:
        return _raw_logs(run, spec, expand_paths(inputs))
    inference = run.inference() if raw else None
    return _parquet(run, spec, open_files(inputs), inference)


def _raw_logs(run: Run, spec: DatasetSpec, paths: dict[Input, Input | None]) -> RawInputs:
    """What `prepare` takes."""
    for path in paths:
        part = Path(path).resolve().parent
        if part.name in PARTS and (part.parent / RECORD).is_file():
            raise UserError(
                f"expected raw data, but {path} is a part of prepared data. Evaluate the folder "
                f"{part.parent}, or give the raw data"
            )
    logs = [_log(spec, path, root) for path, root in paths.items()]
    labelled = _all_labelled(spec, {log.path: log.has_label() for log in logs})
    logs = [dataclasses.replace(log, labelled=labelled) for log in logs]
    for log in logs:
        log.check()
    encoder = run.encoder()

    def pieces(advance: Callable[[int], Any]) -> Iterator[tuple[pa.RecordBatch, pa.Table]]:
        read = (b for log in logs for c in log.chunks(CHUNK_BYTES) for b in log.batches(c, advance))
        for batch in read:
            if batch.num_rows:
                rows = pa.table({n: encoder.encode(n, batch.column(n)) for n in spec.fields})
                if labelled:
                    rows = rows.append_column(spec.label, batch.column(spec.label))
                yield batch, as_rows(rows, spec, labelled)

    return RawInputs([*paths], sum(log.size for log in logs), "B", labelled, pieces)


def _log(spec: DatasetSpec, path: Input, root: Input | None) -> Source:
    """A log in the run's format, or in parquet, which is known by its first bytes."""
    if is_parquet(path):
        spec = dataclasses.replace(spec, format="parquet", header=True, columns=None)
    return READERS[spec.format](spec, path, root=root, raw_times=True)


def _all_labelled(spec: DatasetSpec, labelled: Mapping[Input, bool]) -> bool:
    """Whether files have the label, which must be the same for all."""
    if any(labelled.values()) and not all(labelled.values()):
        without = next(path for path, has in labelled.items() if not has)
        raise UserError(
            f"all files must have the label, or none. Received: {without} without column "
            f"{spec.label!r}. Pass these files separately"
        )
    return all(labelled.values())


def _parquet(
    run: Run, spec: DatasetSpec, files: list[InputFile], inference: InferenceWorkflow | None
) -> RawInputs:
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

    def pieces(advance: Callable[[int], Any]) -> Iterator[tuple[pa.RecordBatch, pa.Table]]:
        for where, batch in batches(files, read, BATCH_ROWS):
            rows = batch
            if inference is not None:
                columns = dict(zip(batch.schema.names, batch.columns, strict=True))
                out = inference.transform(columns, where)[wanted]
                rows = pa.RecordBatch.from_pandas(out, preserve_index=False)
            yield batch, checked_rows(rows, spec, run.config["cardinalities"], where, labelled)
            advance(batch.num_rows)

    paths, size = [file.path for file in files], sum(file.rows for file in files)
    return RawInputs(paths, size, " rows", labelled, pieces)
