# SPDX-License-Identifier: Apache-2.0
"""A raw log: the rows of one file as typed Arrow batches."""

from __future__ import annotations

import abc
import functools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn
from urllib.parse import unquote

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from merlin_cowclip.workflows.data.sources.files import Input, file_info, plain
from merlin_cowclip.workflows.data.spec import TIME_FIELDS, DatasetSpec
from merlin_cowclip.workflows.errors import UserError, clipped, quoted

ID_TYPE = pa.dictionary(pa.int32(), pa.string())
TIME = "\0time"  # the batch column of the split's times
RAW_TIME = "\0raw "  # how those begin that have the text of a column of times
UTC = pa.timestamp("us", "UTC")
_ISO_8601 = r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d([.,]\d+)?)?(Z|[+-]\d\d(:?\d\d)?)?)?"
HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
EXACT = {16: 2**11, 32: 2**24, 64: 2**53}  # bits of a float → from where integers share a float


Fail = Callable[[int, str, str], NoReturn]  # a row of a batch, its column, and what is wrong


class Chunk(NamedTuple):
    """A part of a file that can be read by itself."""

    start: int  # the first byte of a CSV file, or the first row group of a parquet file
    stop: int  # one beyond the last
    size: int  # its bytes


@dataclass(frozen=True)
class Source(abc.ABC):
    """One file of a log, read as its spec says.

    A batch has the label (int8), numbers (float64), ids (`ID_TYPE`), lists of ids (lists of text)
    and the times of a split by time (`TIME`, float64 or UTC timestamps). Missing values are null,
    missing lists empty.
    """

    spec: DatasetSpec
    path: Input
    labelled: bool = True  # whether to read the label
    root: Input | None = None  # names of folders below it may give columns (``day=1/log.csv``)
    raw_times: bool = False  # whether to give columns of times as text, too

    @functools.cached_property
    def size(self) -> int:
        """Bytes of the file."""
        return file_info(self.path).size

    @property
    def wanted(self) -> tuple[str, ...]:
        """The columns to read."""
        return tuple(dict.fromkeys(self._sources.values()))

    @property
    def _sources(self) -> dict[str, str]:
        """The column of the file that each column of a batch is made of."""
        spec = self.spec
        names = [*([spec.label] if self.labelled else []), *spec.fields]
        times = {TIME: spec.split.column} if spec.split.column else {}
        for name in (spec.hour, spec.weekday) if self.raw_times else ():
            times |= {f"{RAW_TIME}{name}": name} if name else {}
        return {name: spec.column_of(name) for name in names} | times

    @property
    @abc.abstractmethod
    def file_columns(self) -> tuple[str, ...]:
        """The columns of the file, in order."""

    @functools.cached_property
    def folder_columns(self) -> dict[str, str | None]:
        """The columns that names of folders give, as text."""
        if self.root is None:
            return {}
        folders = os.path.relpath(plain(self.path), plain(self.root)).split("/")[:-1]
        pairs = [map(unquote, folder.split("=", 1)) for folder in folders if "=" in folder]
        return {key: None if text == HIVE_NULL else text for key, text in pairs}

    @property
    def names(self) -> tuple[str, ...]:
        """The columns of the file, then those of its folders."""
        columns = self.file_columns
        return (*columns, *(name for name in self.folder_columns if name not in columns))

    @property
    def from_file(self) -> list[str]:
        """The columns to read that the file has."""
        return [name for name in self.wanted if name in self.file_columns]

    def has_label(self) -> bool:
        """Whether the file has the label's column."""
        return self.spec.column_of(self.spec.label) in self.names

    def check(self) -> None:
        """Raise UserError unless the column names are unique and include those of the spec."""
        names = self.names
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise UserError(f"{self.path} has two columns named {quoted(twice)}. Rename one")
        if missing := [name for name in self.wanted if name not in names]:
            raise UserError(
                f"{self.path} has no column {quoted(missing)} of data set "
                f"{self.spec.name!r}. It has: {quoted(names)}"
            )

    @abc.abstractmethod
    def chunks(self, size: int) -> list[Chunk]:
        """The file in parts of about ``size`` bytes, each of whole rows."""

    def batches(
        self,
        chunk: Chunk,
        advance: Callable[[int], Any] = int,
        replaced: Counter[str] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Read the rows of a part, in order; the error of a bad value names its place.

        ``advance`` is called with the bytes read since the last call. ``replaced`` counts, by
        column, the numbers that are not finite and become missing.
        """
        rows, replaced = 0, Counter() if replaced is None else replaced
        for batch, size in self.read(chunk):

            def fail(row: int, name: str, what: str, before: int = rows) -> NoReturn:
                place = self._place(chunk, before + row)
                raise UserError(f"{self.path}, {place}, column {name!r}: {what}")

            yield self._cast(batch, fail, replaced)
            rows += batch.num_rows
            advance(size)

    @abc.abstractmethod
    def read(self, chunk: Chunk) -> Iterator[tuple[pa.RecordBatch, int]]:
        """The columns `wanted` of a part that the file has, and the bytes read since."""

    @abc.abstractmethod
    def _place(self, chunk: Chunk, row: int) -> str:
        """The line or row of the file where a row of a part is."""

    def _cast(self, batch: pa.RecordBatch, fail: Fail, replaced: Counter[str]) -> pa.RecordBatch:
        """The columns `wanted` of a batch in our types; ``fail`` raises the error of a row."""
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        for name in {*self.wanted} - {*columns}:
            text = pa.scalar(self.folder_columns[name], pa.string())
            columns[name] = pa.repeat(text, batch.num_rows)
        if self.spec.format == "parquet":
            columns = {name: decoded(column) for name, column in columns.items()}
        return typed(self.spec, self._sources, columns, fail, replaced, f"of {self.path}")


def typed(
    spec: DatasetSpec,
    sources: Mapping[str, str],
    columns: Mapping[str, pa.Array],
    fail: Fail,
    replaced: Counter[str],
    where: str,
) -> pa.RecordBatch:
    """Raw columns in our types: what each of ``sources`` is made of.

    Raises UserError for a type that cannot be read, ``where`` it is; ``fail`` raises that of a row.
    """
    typed_columns = {}
    for field, name in sources.items():
        column = columns[name]
        try:
            if field == spec.label:
                typed_columns[field] = _labels(column, spec, fail)
            elif field in spec.continuous:
                typed_columns[field] = _numbers(column, name, spec, fail, replaced)
            elif field.startswith(RAW_TIME):
                typed_columns[field] = column.cast(pa.string())
            elif field == TIME:
                typed_columns[field] = times_of(column, name, spec, fail, may_be_missing=False)
            elif field in TIME_FIELDS and getattr(spec, field):
                typed_columns[field] = time_field(field, column, spec, fail)
            else:
                typed_columns[field] = _ids(column, field, spec, fail)
        except (pa.ArrowException, ValueError) as error:
            raise UserError(
                f"cannot read column {name!r} {where}: {clipped(str(error))}. Change its type, or "
                "its role in the specification"
            ) from None
    return pa.RecordBatch.from_pydict(typed_columns)


def decoded(column: pa.Array) -> pa.Array:
    """A column without a dictionary."""
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _labels(column: pa.Array, spec: DatasetSpec, fail: Fail) -> pa.Array:
    values, above = spec.label_values, spec.label_above
    if above is not None:
        labels = pc.greater(column.cast(pa.float64(), safe=False), above).cast(pa.int8())
    elif values is None:
        labels = column.cast(pa.float64(), safe=False)
    else:
        labels = pc.index_in(column.cast(pa.string()), value_set=pa.array(values))
    row = pc.index(pc.is_in(labels, pa.array([0, 1], labels.type)), False).as_py()
    if row >= 0:
        text = column.slice(row, 1).cast(pa.string())[0].as_py()
        wanted = " or ".join(map(repr, values or "01")) if above is None else "a number"
        fail(
            row,
            spec.column_of(spec.label),
            f"the label is {repr(text) if text else 'missing'} instead of {wanted}. Correct the "
            "row or remove it, or set label_values in the specification",
        )
    return labels.cast(pa.int8())


def _numbers(
    column: pa.Array, name: str, spec: DatasetSpec, fail: Fail, replaced: Counter[str]
) -> pa.Array:
    if is_text(column.type):
        column = with_nulls(column, spec.null_values)
    numbers = column.cast(pa.float64(), safe=False)  # large integers round
    finite = pc.is_finite(numbers)  # null for a missing one
    row = pc.index(finite, False).as_py()
    if row < 0:
        return numbers
    if spec.non_finite == "refuse":
        fail(
            row,
            name,
            f"the number is {numbers[row].as_py()}. Correct it or leave it empty; non_finite = "
            "'missing' treats inf and NaN as missing",
        )
    replaced[name] += pc.sum(pc.invert(finite)).as_py()
    return pc.if_else(finite, numbers, None)


def _ids(column: pa.Array, name: str, spec: DatasetSpec, fail: Fail) -> pa.Array:
    if column.type == ID_TYPE:  # of a CSV file, with its nulls
        return column
    is_list, separator = name in spec.lists, spec.list_separator
    if is_list and is_text(column.type):
        # As pandas writes lists. An id such as "[deleted]" is text.
        list_text = rf"^\[([^\[\]]*[,\x{ord(separator):02x}][^\[\]]*)?\]$"
        row = pc.index(pc.match_substring_regex(column, list_text), True).as_py()
        if row >= 0:
            fail(
                row,
                spec.column_of(name),
                f"the list {clipped(repr(column[row].as_py()))} is in brackets. Write only its "
                f"ids, with list_separator {separator!r} between them",
            )
        column = pc.split_pattern(with_nulls(column, spec.null_values), separator)
    texts = ids_as_text(column, is_list, spec.null_values)
    return texts if is_list else texts.dictionary_encode()


def without_place(row: int, name: str, what: str) -> NoReturn:
    """Raise the error of a row that has no place in a file."""
    raise UserError(f"column {name!r}: {what}")


def times_of(
    column: pa.Array, name: str, spec: DatasetSpec, fail: Fail, may_be_missing: bool
) -> pa.Array:
    """Times as float64, if they are numbers, or as timestamps in UTC; null for missing ones."""
    layout, missing = spec.split.time_format, column.is_null()
    if pa.types.is_temporal(column.type):
        times = column.cast(pa.timestamp("us"), safe=False).cast(UTC)
    elif pa.types.is_dictionary(column.type) or is_text(column.type):
        texts = with_nulls(column.cast(pa.string()), spec.null_values).dictionary_encode()
        times = parsed_times(texts.dictionary.to_pandas(), layout).take(texts.indices)
        missing = texts.is_null()
    elif layout:  # 01092024 as an integer may be 1 or 10 September
        raise ValueError(f"it is {column.type}, not text in the time_format {layout!r}")
    else:
        numbers = column.cast(pa.float64(), safe=False)
        times = pc.if_else(pc.is_finite(numbers), numbers, None)
    unread = pc.and_(times.is_null(), pc.invert(missing))
    if (row := pc.index(unread, True).as_py()) >= 0:
        form = f"in time_format {layout!r}" if layout else "a number, a timestamp or ISO 8601"
        fail(
            row,
            name,
            f"the time {column[row].as_py()!r} is not {form}. Set time_format in [split] "
            "(--time-format), or correct the row",
        )
    if not may_be_missing and (row := pc.index(missing, True).as_py()) >= 0:
        fail(row, name, "the time is missing. Correct the row")
    return times


def time_field(
    field: str, column: pa.Array, spec: DatasetSpec, fail: Fail = without_place
) -> pa.Array:
    """The ids of the field ``hour`` or ``weekday`` of n times, null for missing ones.

    ``fail`` raises the error of what is no time.
    """
    times = times_of(column, spec.column_of(field), spec, fail, may_be_missing=True)
    if pa.types.is_floating(times.type):
        micros = pc.floor(pc.multiply(times, 1e6))
        times = micros.cast(pa.int64(), safe=False).cast(UTC)
    parts = pc.hour(times) if field == "hour" else pc.day_of_week(times)
    return parts.cast(pa.string()).dictionary_encode()


def is_text(kind: pa.DataType) -> bool:
    """Whether values of that type are text."""
    return kind in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())


def with_nulls(texts: pa.Array, null_values: Sequence[str]) -> pa.Array:
    """Text with null in place of the empty text and of ``null_values``."""
    missing = pc.is_in(texts, pa.array(["", *null_values], texts.type))
    # A copy: Arrow's if_else is wrong for a slice of text.
    return pc.if_else(missing, pa.scalar(None, texts.type), pa.concat_arrays([texts]))


def ids_as_text(ids: pa.Array, is_list: bool, null_values: Sequence[str] = ()) -> pa.Array:
    """Ids as text, or lists of ids as lists of text; a missing list is empty.

    Ids are text, integers, booleans, or whole floats (pandas' integers beside missing values).
    ``null_values`` and the empty text mean a missing id. Raises ValueError or an ArrowException for
    another type, a fraction, text that is not UTF-8, or a float that several integers share.
    """
    kind = ids.type
    if is_list:
        if pa.types.is_null(kind):
            ids = ids.cast(pa.list_(pa.string()))
        elif not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
            raise ValueError(f"it is {kind}, not a list")
        lengths = pc.fill_null(pc.list_value_length(ids), 0)
        ends = pc.cumulative_sum(lengths.cast(pa.int64()))
        offsets = pa.concat_arrays([pa.array([0], pa.int64()), ends]).cast(pa.int32())
        return pa.ListArray.from_arrays(offsets, ids_as_text(ids.flatten(), False, null_values))
    if pa.types.is_dictionary(kind):
        return ids_as_text(ids.dictionary_decode(), False, null_values)
    if pa.types.is_floating(kind):
        ids = ids.cast(pa.float64())
        ids = pc.if_else(pc.is_nan(ids), None, ids)
        if (pc.max(pc.abs(ids)).as_py() or 0) >= EXACT[kind.bit_width]:
            raise ValueError(
                f"ids of type {kind} from {EXACT[kind.bit_width]:,} on are not exact. Write them "
                "as integers or text"
            )
        ids = ids.cast(pa.int64())
    elif not (is_text(kind) or pa.types.is_integer(kind) or kind in (pa.bool_(), pa.null())):
        raise ValueError(f"it is {kind}; ids must be integers or text")
    texts = ids.cast(pa.string())
    texts.validate(full=True)
    return with_nulls(texts, null_values)


def parsed_times(texts: pd.Series, layout: str | None) -> pa.Array:
    """Times of (n,) text, null where it is none: numbers, or by ISO 8601 or a strptime format."""
    if layout is None:
        numbers = pd.to_numeric(texts, errors="coerce").replace([np.inf, -np.inf], np.nan)
        if numbers.notna().any():  # the others are null
            return pa.array(numbers, pa.float64(), from_pandas=True)
        texts = texts.where(texts.str.fullmatch(_ISO_8601)).str.replace(",", ".")
        # pandas 2.3 takes a text without a zone to be in the zone of the one before.
        texts = texts.str.replace("^([0-9-]{10})$", r"\1T00:00", regex=True)
        texts = texts.str.replace(r"([T ]\d\d:\d\d(:[\d.]+)?)$", r"\1Z", regex=True)
    layout = layout or ("ISO8601" if pd.__version__ >= "2" else None)  # 1.5 looks at each text
    times = pd.to_datetime(texts, format=layout, utc=True, errors="coerce")
    return pa.array(times, UTC, safe=False)
