"""Rows from outside, as the inputs of a run's model: raw ones through the run's own workflow.

The saved workflow encodes them, and not what `prepare` encodes with: it is what is served, and all
that an adopted pipeline has. Files are read in parts and in order, so that memory is bounded at any
size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pandas as pd
import pyarrow as pa

from merlin_cowclip.workflows.data.encoded_rows import (
    Place,
    batches,
    check_numbers,
    checked_ids,
    checked_labels,
)
from merlin_cowclip.workflows.data.existing_parquet import (
    check_present,
    check_types,
    open_files,
)
from merlin_cowclip.workflows.data.inputs import in_folders
from merlin_cowclip.workflows.data.prepare.pipeline import READERS
from merlin_cowclip.workflows.data.prepared_data import PARTS, RECORD
from merlin_cowclip.workflows.data.raw_columns import RawColumns, name_types
from merlin_cowclip.workflows.data.raw_rows import RawRows
from merlin_cowclip.workflows.data.raw_types import check_raw_types
from merlin_cowclip.workflows.data.sources.base import FileState, Source, column_of, unchanged
from merlin_cowclip.workflows.data.sources.files import (
    expand_paths,
    refuse_twice,
    refuse_unreadable,
)
from merlin_cowclip.workflows.data.spec import DatasetSpec, Split
from merlin_cowclip.workflows.errors import UserError, quoted
from merlin_cowclip.workflows.quiet import quiet_operators
from merlin_cowclip.workflows.training.rows import Rows
from merlin_cowclip.workflows.training.runs import Run, how_to_evaluate

CHUNK_BYTES = 8 << 20  # of a log that is read and encoded at a time
BATCH_ROWS = 1 << 16  # of parquet, read and encoded at a time


class Incoming(Protocol):
    """Some files of rows.

    Attributes:
        files: their paths.
        labelled: whether they have the label.
        unlabelled: if not, what they lack, behind the first one's name.
        size: of them all.
        unit: of the size.
    """

    files: list[Path]
    labelled: bool
    unlabelled: str
    size: int
    unit: str

    def rows(self, advance: Callable[[int], Any]) -> Iterator[Rows]:
        """All rows, encoded, in order; their labels are 0 where there are none.

        Args:
            advance: told how much of the size was read since.

        Raises:
            UserError: the first bad value, by its file and place.
        """


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

    Raises:
        UserError: no such file, columns are missing or of another type, some files have the label
            and some not, or the workflow must not be loaded.
    """
    spec = dataclasses.replace(run.spec(), split=Split())  # a column of times is no input
    if run.is_adopted:
        kind = _RawParquet if raw else _EncodedParquet
        return kind(run, spec, inputs, trust_workflow)
    return _RawLogs(run, spec, inputs, trust_workflow)


class _RawLogs:
    """What `prepare` takes."""

    unit = "B"

    def __init__(
        self, run: Run, spec: DatasetSpec, inputs: Sequence[str | Path], trust: bool
    ) -> None:
        self.files = expand_paths(inputs)
        for path in self.files:
            part = path.resolve().parent
            if part.name in PARTS and (part.parent / RECORD).is_file():
                raise UserError(
                    "raw logs must be raw. Received: "
                    f"{path}, a part of prepared data, whose ids would be taken for raw ones. "
                    f"Evaluate the folder: {how_to_evaluate(run.path, part.parent)}; or give the "
                    "log that it is made of"
                )
        logs = [_log(spec, path) for path in self.files]
        self.labelled = _all_or_none({log.path: log.has_label() for log in logs}, spec.label)
        self.unlabelled = f"without column {spec.label!r}"
        self._logs = [dataclasses.replace(log, labelled=self.labelled) for log in logs]
        for log in self._logs:
            log.check()
        self.size = sum(log.state.bytes for log in self._logs)
        self._spec = spec
        self._workflow = run.workflow_for_new_rows(trust=trust).remove_inputs([spec.label])

    def rows(self, advance: Callable[[int], Any]) -> Iterator[Rows]:
        with unchanged(self._logs):
            for log in self._logs:
                empty = True
                for chunk in log.chunks(CHUNK_BYTES):
                    for batch in log.batches(chunk, advance):
                        if batch.num_rows:
                            yield self._encoded(batch)
                            empty = False
                if empty:
                    raise UserError(
                        f"input file must not be empty. Received: {log.path}, without a row"
                    )

    def _encoded(self, batch: pa.RecordBatch) -> Rows:
        spec = self._spec
        out = self._workflow.transform(
            pd.DataFrame({name: _plain(batch, name) for name in spec.fields})
        )
        columns = {name: pa.array(out[name]) for name in (*spec.categorical, *spec.continuous)}
        columns |= {name: pa.array(out[name], pa.list_(pa.int64())) for name in spec.lists}
        labels = column_of(batch, spec.label).to_numpy() if self.labelled else None
        return Rows.of(spec, columns, labels)


def _log(spec: DatasetSpec, path: Path) -> Source:
    """A log in the run's format, or in parquet, which is known by its first bytes."""
    try:
        with path.open("rb") as file:
            is_parquet = file.read(4) == b"PAR1"
    except OSError as error:
        refuse_unreadable(path, error)
    if is_parquet:
        spec = dataclasses.replace(spec, format="parquet", header=True, columns=None)
    return READERS[spec.format](spec, path)


def _plain(batch: pa.RecordBatch, name: str) -> Any:
    column = batch.column(name)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return column.to_numpy(zero_copy_only=False)


def _all_or_none(labelled: dict[Path, bool], label: str) -> bool:
    """Whether all files have the label, or none."""
    having = [path for path, has in labelled.items() if has]
    without = [path for path, has in labelled.items() if not has]
    if having and without:
        raise UserError(
            f"all files must have the label, or none. Received: {having[0]} with column {label!r}, "
            f"{without[0]} without. Give them apart"
        )
    return bool(having)


@dataclass(frozen=True)
class _SeenFile:
    path: Path
    state: FileState


class _Parquet:
    """Parquet of an adopted pipeline, whose encoded rows are checked as `adopt` checks its own."""

    unit = " rows"

    def __init__(
        self, run: Run, spec: DatasetSpec, inputs: Sequence[str | Path], trust: bool
    ) -> None:
        self._run, self._spec, self._trust = run, spec, trust
        self._files = open_files(inputs)
        self.files = [file.path for file in self._files]
        refuse_twice(self.files)
        self._seen = [_SeenFile(path, FileState.of(path)) for path in self.files]
        self.size = sum(file.rows for file in self._files)
        self.labelled, self.unlabelled = False, f"without column {spec.label!r}"
        self._columns: list[str] = []  # to read
        self._look()

    def _look(self) -> None:
        """At columns and types, and whether there is a label."""
        raise NotImplementedError

    def _encoded(self, batch: pa.RecordBatch, place: Place) -> pa.RecordBatch:
        raise NotImplementedError

    @property
    def _wanted(self) -> list[str]:
        return [*self._spec.fields, *([self._spec.label] if self.labelled else [])]

    def rows(self, advance: Callable[[int], Any]) -> Iterator[Rows]:
        with unchanged(self._seen):
            for place, batch in batches(self._files, self._columns, BATCH_ROWS):
                yield self._checked(self._encoded(batch, place), place)
                advance(batch.num_rows)

    def _checked(self, batch: pa.RecordBatch, place: Place) -> Rows:
        spec = self._spec
        for name in spec.ids:
            checked_ids(batch, name, self._run.config["cardinalities"][name], place)
        for name in spec.continuous:
            check_numbers(batch, name, place)
        labels = checked_labels(batch, spec.label, place) if self.labelled else None
        return Rows.of(spec, {name: batch.column(name) for name in spec.fields}, labels)


class _EncodedParquet(_Parquet):
    """What the workflow wrote."""

    def _look(self) -> None:
        label = self._spec.label
        try:
            check_present(self._spec.fields, self._files)
            has = {file.path: label in file.schema.names for file in self._files}
            self.labelled = _all_or_none(has, label)
            check_types(self._spec, self._files)
        except UserError as error:
            raise UserError(
                f"{error}. Raw rows, for the workflow to encode, need --raw (raw=True)"
            ) from None
        self._columns = self._wanted

    def _encoded(self, batch: pa.RecordBatch, place: Place) -> pa.RecordBatch:
        return batch


class _RawParquet(_Parquet):
    """What the workflow reads."""

    def _look(self) -> None:
        self._refuse_encoded()
        first, *others = self._files
        workflow = name_types(self._run.workflow_for_new_rows(trust=self._trust))
        label = self._spec.label
        makes_label = label in workflow.output_schema.column_names  # with all columns
        raw = RawColumns(workflow, self._spec.fields)
        self._columns = [name for name in raw.names if name in first.schema.names]
        lacking = [name for name in raw.names if name not in first.schema.names]
        if not raw.may_lack(lacking):
            needed = [name for name in lacking if not raw.may_lack([name])] or lacking
            raise UserError(
                "every column of which the workflow makes an input must be in the file. Missing: "
                f"{quoted(needed, brief=True)} in {first.path}, which has: "
                f"{quoted(first.schema.names, brief=True)}{in_folders(needed, first.path)}"
            )
        self._workflow = raw.remove(lacking)
        for file in others:
            gone = [name for name in self._columns if name not in file.schema.names]
            more = [name for name in lacking if name in file.schema.names]
            if gone or more:
                without, having = (file, first) if gone else (first, file)
                raise UserError(
                    f"all files must have the same columns. Received: {without.path}, without "
                    f"{quoted(gone or more, brief=True)}, which {having.path} has. Give them apart"
                )
        # One that was read together with those that lack alone is read no more.
        read = self._workflow.input_schema.column_names
        self._columns = [name for name in self._columns if name in read]
        self._rows = RawRows(self._workflow, self._spec.ids, self._transformed)
        for file in self._files:
            check_raw_types(file, self._rows.types, self._columns)
        # Not the files' own column of that name: who knows what the workflow made of it.
        self.labelled = label in self._workflow.output_schema.column_names
        if not makes_label:
            self.unlabelled = (
                f"of which the run's workflow makes no {label!r}, as one that was saved after "
                "remove_inputs"
            )
        elif not self.labelled:
            self.unlabelled = f"without columns of which the workflow makes {label!r}"

    def _refuse_encoded(self) -> None:
        """Refuse the run's own parts, whose ids would be taken for raw ones."""
        try:
            data = self._run.data()
        except UserError:  # moved, or adopted anew: what its parts were nobody knows
            return
        own = {path.resolve() for path in (*data.train_files, *data.test_files)}
        for path in self.files:
            if path.resolve() in own:
                raise UserError(
                    f"raw rows must be raw. Received: {path}, which the workflow wrote, and whose "
                    "ids would be taken for raw ones. Leave --raw (raw=True) out"
                )

    def _encoded(self, batch: pa.RecordBatch, place: Place) -> pa.RecordBatch:
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        return self._rows.of_columns(columns, place)

    def _transformed(self, frame: pd.DataFrame) -> pa.RecordBatch:
        from merlin_cowclip.workflows.data.row_for_row import transformed

        with quiet_operators():
            out = transformed(self._workflow, frame)[self._wanted]
        return pa.RecordBatch.from_pandas(out, preserve_index=False)

    def _checked(self, batch: pa.RecordBatch, place: Place) -> Rows:
        label = self._spec.label
        if self.labelled:
            kind = batch.schema.field(label).type
            try:
                batch.column(label).cast(pa.float64(), safe=False)
            except pa.ArrowException:  # text, lists, times
                raise UserError(
                    f"column {label!r} must hold 0 or 1. Received: {kind} in {place.path}, row "
                    f"group {place.group}, with others than numbers. Write it as numbers, or leave "
                    "out the columns that it is made of"
                ) from None
        return super()._checked(batch, place)


def in_batches(pieces: Iterator[Rows], size: int) -> Iterator[Rows]:
    """The same rows, `size` at a time; the last ones may be fewer."""
    held: list[Rows] = []
    room = size
    for rows in pieces:
        start = 0
        while start < len(rows):
            stop = min(len(rows), start + room)
            held.append(rows.part(start, stop))
            room -= stop - start
            start = stop
            if not room:
                yield Rows.joined(held)
                held, room = [], size
    if held:
        yield Rows.joined(held)
