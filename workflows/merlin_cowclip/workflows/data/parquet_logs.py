"""Logs in parquet: row groups to typed batches; a fault is named with its row."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from merlin_cowclip.workflows.data.arrow_ids import exact_ids
from merlin_cowclip.workflows.data.id_text import as_text
from merlin_cowclip.workflows.data.inputs import refuse_unreadable
from merlin_cowclip.workflows.data.raw_logs import Chunk, RawLog, column_of
from merlin_cowclip.workflows.errors import UserError, clipped

BATCH_ROWS = 65_536


class ParquetLog(RawLog):
    """A parquet file of the columns that its spec names, whatever their order."""

    def has_label(self) -> bool:
        """Whether its schema has it."""
        with self._open() as file:
            return self.spec.label in file.schema_arrow.names

    def check(self) -> tuple[str, ...]:
        """The column names, once it is known that the types fit the columns' roles."""
        spec = self.spec
        with self._open() as file:
            schema, rows = file.schema_arrow, file.metadata.num_rows
        self.check_names(schema.names)
        for name in self.wanted:
            kind = plain_type(schema.field(name).type)
            if pa.types.is_null(kind) and name != spec.label:
                continue  # all are missing, of whose type pandas knows nothing
            if name in spec.lists:
                if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
                    self._bad_type(name, "a list column", kind)
                if not _has_text(plain_type(kind.value_type)):
                    self._bad_type(name, "a column of lists of single ids", kind)
            elif pa.types.is_nested(kind):
                self._bad_type(name, "a column of single values", kind)
            elif name in (spec.label, *spec.continuous):
                if not is_number(kind):
                    self._bad_type(name, "a column of numbers", kind)
            elif not _has_text(kind):
                self._bad_type(name, "a column of text or numbers", kind)
        if rows == 0:
            raise UserError(f"input file must not be empty. Received: {self.path}, without a row")
        return tuple(schema.names)

    def id_types(self) -> dict[str, pa.DataType]:
        """Of ids and of the times of a split."""
        times = [self.spec.split.column] if self.spec.split.column else []
        with self._open() as file:
            schema = file.schema_arrow
        return {name: schema.field(name).type for name in (*self.spec.ids, *times)}

    def chunks(self, size: int) -> list[Chunk]:
        """Row groups, as many as make about ``size`` bytes."""
        chunks: list[Chunk] = []
        start = first_row = rows = held = 0
        with self._open() as file:
            groups = file.metadata.num_row_groups
            for i in range(groups):
                group = file.metadata.row_group(i)
                rows, held = rows + group.num_rows, held + group.total_byte_size
                if held >= size or i == groups - 1:
                    chunks.append(Chunk(start, i + 1, first_row, held))
                    start, first_row, held = i + 1, rows, 0
        return chunks

    def batches(
        self,
        chunk: Chunk,
        advance: Callable[[int], Any] = int,
        replaced: Counter[str] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """The rows of some row groups."""
        replaced = Counter() if replaced is None else replaced
        row, left = chunk.first_row, chunk.size
        with self._open() as file:
            groups = range(chunk.start, chunk.stop)
            rows = sum(file.metadata.row_group(i).num_rows for i in groups)
            batches = file.iter_batches(BATCH_ROWS, row_groups=groups, columns=list(self.wanted))
            while True:
                try:
                    batch = next(batches, None)
                    if batch is None:
                        break
                    typed = self.typed(batch, _Fault(self, batch, row), replaced)
                except (pa.ArrowException, OSError) as error:
                    self._refuse(error)
                yield typed
                row += batch.num_rows
                read = min(left, chunk.size * batch.num_rows // rows)
                left -= read
                advance(read)
        advance(left)

    def _open(self) -> pq.ParquetFile:
        try:
            return pq.ParquetFile(pa.OSFile(os.fsencode(self.path)))
        except (pa.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                refuse_unreadable(self.path, error)
            self._refuse(error)

    def _refuse(self, error: Exception) -> NoReturn:
        raise UserError(
            f"input must be a whole parquet file. Received: {self.path}: {clipped(str(error))}. "
            "Write it again, or set format = 'csv' in the data set's description"
        ) from None

    def _bad_type(self, name: str, rule: str, kind: pa.DataType) -> NoReturn:
        raise UserError(
            f"{name!r} must be {rule}. Received: {kind} in {self.path}. "
            "Change its role in the data set's description, or its type in the file"
        )


@dataclass(frozen=True)
class _Fault:
    """Finds the first bad row of a batch; ``first`` is the number of rows before it in the file."""

    log: ParquetLog
    batch: pa.RecordBatch
    first: int

    def _place(self, row: int) -> str:
        return f"row {self.first + row + 1}"

    def __call__(self, reason: str) -> NoReturn:
        spec = self.log.spec
        if self.log.labelled:
            labels = column_of(self.batch, spec.label)
            values = labels.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
            bad = ~np.isin(values, (0, 1))
            if bad.any():
                row = int(bad.argmax())
                self.log.refuse_label(repr(labels[row].as_py()), self._place(row))
        for name in spec.continuous:
            numbers = column_of(self.batch, name).cast(pa.float64(), safe=False)
            finite = pc.fill_null(pc.is_finite(numbers), True).to_numpy(zero_copy_only=False)
            if self.log.refuses_non_finite and not finite.all():
                row = int(finite.argmin())
                self.log.refuse_number(str(numbers[row].as_py()), self._place(row), name)
        for name in self.log.wanted:
            if name in (spec.label, *spec.continuous):
                continue
            values = self.batch.column(self.batch.schema.get_field_index(name))
            if pa.types.is_dictionary(values.type):
                values = values.dictionary_decode()
            for row in range(len(values)):
                cell = values.slice(row, 1)
                for value in cell.flatten() if name in spec.lists else cell:
                    where = f" in {self.log.path}, {self._place(row)}, column {name!r}"
                    try:
                        one = pa.array([value.as_py()], value.type)
                        as_text(one).validate(full=True)
                        if name in spec.ids:
                            exact_ids(one, where)
                    except (pa.ArrowInvalid, UnicodeDecodeError):
                        self.log.refuse_text(_bytes(value), self._place(row), name)
        raise AssertionError(reason)  # a fault was seen, so one of the above has raised


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Of a dictionary, the type of what it holds."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def is_number(kind: pa.DataType) -> bool:
    """Whether a column of that type holds numbers."""
    numeric = (
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_decimal(kind)
    )
    return numeric and _converts(lambda: pa.nulls(0, kind).cast(pa.float64(), safe=False))


def _has_text(kind: pa.DataType) -> bool:
    """Whether `as_text` takes it."""
    return not pa.types.is_nested(kind) and _converts(lambda: as_text(pa.nulls(0, kind)))


def _converts(conversion: Callable[[], Any]) -> bool:
    try:
        conversion()
    except (pa.ArrowException, NotImplementedError):
        return False
    return True


def _bytes(value: pa.Scalar) -> bytes:
    """What a text holds, whether it is UTF-8 or not."""
    return bytes(value.as_buffer())
