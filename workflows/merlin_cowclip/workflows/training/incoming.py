"""Rows from outside, as the inputs of a run's model: raw ones through the run's own workflow.

The saved workflow encodes them, and not what `prepare` encodes with: it is what is served, and all
that an adopted pipeline has. Files are read in parts and in order, so that memory is bounded at any
size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from merlin_cowclip.workflows.data.adopt.parquet_files import ParquetFile, check_columns, open_files
from merlin_cowclip.workflows.data.adopt.validate import (
    BatchLocation,
    batches,
    checked_ids,
    checked_labels,
    checked_numbers,
)
from merlin_cowclip.workflows.data.prepare.pipeline import READERS
from merlin_cowclip.workflows.data.prepared_data import PARTS, RECORD
from merlin_cowclip.workflows.data.sources.base import Source
from merlin_cowclip.workflows.data.sources.files import expand_paths
from merlin_cowclip.workflows.data.spec import DatasetSpec, Split
from merlin_cowclip.workflows.errors import UserError, quoted
from merlin_cowclip.workflows.training.rows import Rows
from merlin_cowclip.workflows.training.runs import Run

CHUNK_BYTES = 8 << 20  # of a log that is read and encoded at a time
BATCH_ROWS = 1 << 16  # of parquet, read and encoded at a time


class Incoming:
    """Some files of rows, all of them with the label, or none.

    Attributes:
        files: their paths.
        labelled: whether they have the label.
        unlabelled: if not, what they lack, behind the first one's name.
        size: of them all.
        unit: of the size.
    """

    unit = " rows"
    labelled: bool

    def __init__(self, run: Run, spec: DatasetSpec, files: list[Path], size: int) -> None:
        self._run, self._spec, self.files, self.size = run, spec, files, size
        self.unlabelled = f"without column {spec.label!r}"

    def pieces(self, advance: Callable[[int], Any]) -> Iterator[tuple[pa.RecordBatch, Rows]]:
        """All rows in order, as read and as encoded; labels are 0 where there are none.

        Args:
            advance: called with the size that was read since.

        Raises:
            UserError: the first bad value, with its file and row.
        """
        raise NotImplementedError

    def _look_for_labels(self, labelled: Mapping[Path, bool]) -> None:
        """Set `labelled`, which is the same for all files."""
        self.labelled = all(labelled.values())
        if any(labelled.values()) and not self.labelled:
            without = next(path for path, has in labelled.items() if not has)
            raise UserError(
                f"all files must have the label, or none. Received: {without} without column "
                f"{self._spec.label!r}. Pass these files separately"
            )


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
        kind = _RawParquet if raw else _EncodedParquet
        return kind(run, spec, open_files(inputs), trust_workflow)
    return _RawLogs(run, spec, inputs, trust_workflow)


class _RawLogs(Incoming):
    """What `prepare` takes."""

    unit = "B"

    def __init__(
        self, run: Run, spec: DatasetSpec, inputs: Sequence[str | Path], trust: bool
    ) -> None:
        logs = [_log(spec, path) for path in expand_paths(inputs)]
        super().__init__(run, spec, [log.path for log in logs], sum(log.size for log in logs))
        for path in self.files:
            part = path.resolve().parent
            if part.name in PARTS and (part.parent / RECORD).is_file():
                raise UserError(
                    f"expected raw data, but {path} is a part of prepared data. Evaluate the "
                    f"folder {part.parent}, or give the raw data"
                )
        self._look_for_labels({log.path: log.has_label() for log in logs})
        self._logs = [dataclasses.replace(log, labelled=self.labelled) for log in logs]
        for log in self._logs:
            log.check()
        self._workflow = run.workflow(trust=trust).remove_inputs([spec.label])

    def pieces(self, advance: Callable[[int], Any]) -> Iterator[tuple[pa.RecordBatch, Rows]]:
        empty = True
        for log in self._logs:
            for chunk in log.chunks(CHUNK_BYTES):
                for batch in log.batches(chunk, advance):
                    if batch.num_rows:
                        yield batch, self._encoded(batch)
                        empty = False
        if empty:
            raise UserError(f"{self.files[0]} has no rows. Give files with rows")

    def _encoded(self, batch: pa.RecordBatch) -> Rows:
        spec = self._spec
        out = self._workflow.transform(raw_frame(batch)[[*spec.fields]])
        columns = {name: pa.array(out[name]) for name in (*spec.categorical, *spec.continuous)}
        columns |= {name: pa.array(out[name], pa.list_(pa.int64())) for name in spec.lists}
        labels = batch.column(spec.label).to_numpy() if self.labelled else None
        return Rows.of(spec, columns, labels)


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


class _EncodedParquet(Incoming):
    """Parquet that an adopted pipeline's workflow wrote; checked as `adopt` checks it."""

    def __init__(self, run: Run, spec: DatasetSpec, files: list[ParquetFile], trust: bool) -> None:
        super().__init__(run, spec, [file.path for file in files], sum(f.rows for f in files))
        self._files = files
        self._look(trust)

    def _look(self, trust: bool) -> None:
        """At the columns: which are to be read, and whether the label is among them."""
        spec = self._spec
        try:
            self._look_for_labels({f.path: spec.label in f.schema.names for f in self._files})
            check_columns(spec, self._files, labelled=self.labelled)
        except UserError as error:
            raise UserError(f"{error}. If these are raw rows, add --raw (raw=True)") from None
        self._columns = [*spec.fields, *([spec.label] if self.labelled else [])]

    def pieces(self, advance: Callable[[int], Any]) -> Iterator[tuple[pa.RecordBatch, Rows]]:
        spec, ids = self._spec, self._run.config["cardinalities"]
        for where, batch in batches(self._files, self._columns, BATCH_ROWS):
            encoded = self._encoded(batch, where)
            for name in spec.ids:
                checked_ids(encoded, name, ids[name], where)
            for name in spec.continuous:
                checked_numbers(encoded, name, where)
            labels = checked_labels(encoded, spec.label, where) if self.labelled else None
            columns = {name: encoded.column(name) for name in spec.fields}
            yield batch, Rows.of(spec, columns, labels)
            advance(batch.num_rows)

    def _encoded(self, batch: pa.RecordBatch, where: BatchLocation) -> pa.RecordBatch:
        return batch


class _RawParquet(_EncodedParquet):
    """Parquet that an adopted pipeline's workflow reads."""

    def _look(self, trust: bool) -> None:
        inference = self._inference = self._run.inference(trust=trust)
        names = {file.path: file.schema.names for file in self._files}
        self._columns = [n for n in inference.columns if n in names[self.files[0]]]
        for path, there in names.items():
            gone = [name for name in self._columns if name not in there]
            if missing := inference.missing(there) or gone:
                raise UserError(
                    f"{path} lacks columns that the workflow needs, or that {self.files[0]} has: "
                    f"{quoted(missing, brief=True)} (it has {quoted(there, brief=True)})"
                )
        self._look_for_labels({path: inference.has_label(n) for path, n in names.items()})
        none = inference.of_label is None
        of = "and the workflow makes no" if none else "without the columns of"
        self.unlabelled = f"{of} label {self._spec.label!r}"

    def _encoded(self, batch: pa.RecordBatch, where: BatchLocation) -> pa.RecordBatch:
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        out = self._inference.transform(columns, where)
        wanted = [*self._spec.fields, *([self._spec.label] if self.labelled else [])]
        return pa.RecordBatch.from_pandas(out[wanted], preserve_index=False)
