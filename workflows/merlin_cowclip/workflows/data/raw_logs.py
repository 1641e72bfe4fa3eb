"""A raw log: one file's rows as typed Arrow batches, part by part, and what is wrong with them.

Every fault is named with its file and place. How a format is read is `csv_logs.py`'s and
`parquet_logs.py`'s; splitting, counting and encoding are `etl.py`'s.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NoReturn, Protocol

import pyarrow as pa
import pyarrow.compute as pc

import merlin_cowclip.workflows.pickled_types  # noqa: F401  (before parquet is read)
from merlin_cowclip.workflows.data.arrow_ids import exact_ids, same_text
from merlin_cowclip.workflows.data.datasets import DatasetSpec
from merlin_cowclip.workflows.data.id_text import as_text
from merlin_cowclip.workflows.data.inputs import in_folders
from merlin_cowclip.workflows.errors import UserError, excerpt, quoted

ID_TYPE = pa.dictionary(pa.int32(), pa.string())
TIME = "\0time"  # the batch column of the split's time; no column of a log can be called so
# Arrow's grammar of numbers: no plus sign, ASCII digits only, blanks around.
_NUMBER = re.compile(
    r"[ \t]*(-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
    r"|-?(?i:inf(?:inity)?)|-?(?P<nan>(?i:nan))(?:\([A-Za-z0-9_]*\))?)[ \t]*"
)


@dataclass(frozen=True)
class Chunk:
    """A part of a log file that can be read by itself.

    Attributes:
        start: the first byte of a csv file, or row group of a parquet file.
        stop: one beyond the last.
        first_row: rows before it in a parquet file.
        size: its bytes.
        quotes: whether a csv part may hold quotes, and so line ends within cells.
    """

    start: int
    stop: int
    first_row: int
    size: int
    quotes: bool = False


class FileState(NamedTuple):
    """By what a file is known that has not changed."""

    bytes: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        """As it is now."""
        status = path.stat()
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)


class Seen(Protocol):
    """A file that was looked at."""

    @property
    def path(self) -> Path:
        """Where it lies."""

    @property
    def state(self) -> FileState:
        """How it was then."""


@dataclass(frozen=True)
class RawLog(abc.ABC):
    """One log file, read as its spec says.

    `check` looks at the header or schema only; `batches` reads the rows. A batch holds the label
    (int8) if it is read, every number (float64, missing: null), every id (`ID_TYPE`, missing:
    null), every list of ids (list of text), and the time of a split by time (`TIME`, as an id).
    """

    text_is_checked: ClassVar[bool] = False  # the reader has seen that text is UTF-8

    spec: DatasetSpec
    path: Path
    labelled: bool = True  # whether the label is read; without it no column need be called so
    state: FileState = field(init=False)  # when it was first looked at

    def __post_init__(self) -> None:
        object.__setattr__(self, "state", FileState.of(self.path))

    @property
    def wanted(self) -> tuple[str, ...]:
        """The columns we read."""
        label = [self.spec.label] if self.labelled else []
        time = [self.spec.split.column] if self.spec.split.column else []
        return tuple(dict.fromkeys((*label, *self.spec.fields, *time)))

    @abc.abstractmethod
    def has_label(self) -> bool:
        """Whether the file has the label's column.

        Raises:
            UserError: it cannot be read.
        """

    @abc.abstractmethod
    def check(self) -> tuple[str, ...]:
        """The file's column names, once it is known that its head fits the spec.

        Raises:
            UserError: it does not, or the file has no row.
        """

    def id_types(self) -> dict[str, pa.DataType]:
        """The types of the columns whose values are told apart as text; none where all is text."""
        return {}

    @abc.abstractmethod
    def chunks(self, size: int) -> list[Chunk]:
        """The file in parts of about ``size`` bytes, each of whole rows; a gzipped one is one part.

        Raises:
            UserError: a quote that is never closed, or closed too early.
        """

    @abc.abstractmethod
    def batches(
        self,
        chunk: Chunk,
        advance: Callable[[int], Any] = int,
        replaced: Counter[str] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """The rows of a part, in order.

        Args:
            chunk: one of `chunks`.
            advance: told how many bytes of the file were read since.
            replaced: counts, by column, the numbers that were not finite, where the spec says
                that they are missing.

        Raises:
            UserError: the first bad value, or what the file is if it cannot be read.
        """

    def check_names(self, names: Sequence[str]) -> None:
        """Refuse a file whose columns are not unique, or not all that the spec names."""
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise UserError(
                f"column names must be unique. Received twice: {quoted(twice, brief=True)} in "
                f"{self.path}. Rename one of each"
            )
        missing = [name for name in self.wanted if name not in names]
        if missing:
            raise UserError(
                f"every column of data set {self.spec.name!r} must be in the file. "
                f"Missing: {quoted(missing, brief=True)} in {self.path}, which has: "
                f"{quoted(names, brief=True)}{in_folders(missing, self.path)}"
            )

    @property
    def refuses_non_finite(self) -> bool:
        """Whether inf and NaN are faults."""
        return self.spec.non_finite == "refuse"

    def typed(
        self, batch: pa.RecordBatch, fault: Callable[[str], Any], replaced: Counter[str]
    ) -> pa.RecordBatch:
        """The batch in our own types; calls ``fault``, which raises, on a bad value."""
        spec = self.spec
        columns: dict[str, pa.Array] = {}
        if self.labelled:
            labels = _floats(column_of(batch, spec.label))
            good = pc.or_(pc.equal(labels, 0.0), pc.equal(labels, 1.0))  # -0.0 is 0; null for null
            if labels.null_count or pc.all(good).as_py() is False:  # None: there is no row
                fault("label")
            columns[spec.label] = labels.cast(pa.int8())
        for name in spec.continuous:
            numbers = _floats(column_of(batch, name))
            finite = pc.is_finite(numbers)  # null for a missing one
            if pc.all(finite).as_py() is False:
                if self.refuses_non_finite:
                    fault("number")
                replaced[name] += pc.sum(pc.invert(finite)).as_py()
                numbers = pc.if_else(finite, numbers, None)
            columns[name] = numbers
        for name in spec.categorical:
            columns[name] = self.ids(column_of(batch, name), fault)
        for name in spec.lists:
            columns[name] = self.lists(column_of(batch, name), fault)
        if spec.split.column:
            times = column_of(batch, spec.split.column)
            if times.type == ID_TYPE:
                times = times.dictionary_decode()
            if pa.types.is_timestamp(times.type):  # in UTC: a zone's letters would not sort
                times = times.cast(pa.timestamp(times.type.unit))
            columns[TIME] = self._text(times, fault).dictionary_encode()
        return pa.RecordBatch.from_pydict(columns)

    def ids(self, column: pa.Array, fault: Callable[[str], Any]) -> pa.Array:
        """A column of ids as `ID_TYPE`."""
        return self._id_text(column, fault).dictionary_encode()

    def lists(self, column: pa.Array, fault: Callable[[str], Any]) -> pa.Array:
        """A column of lists of ids as lists of text."""
        if pa.types.is_null(column.type):
            column = pa.nulls(len(column), pa.list_(pa.string()))
        return self._id_text(column, fault)

    def _id_text(self, values: pa.Array, fault: Callable[[str], Any]) -> pa.Array:
        try:
            exact_ids(values)
        except UserError as error:
            fault(str(error))
        return self._text(values, fault)

    def _text(self, values: pa.Array, fault: Callable[[str], Any]) -> pa.Array:
        try:
            texts = as_text(values)
            if not self.text_is_checked:
                texts.validate(full=True)
        except pa.ArrowInvalid as error:
            fault(str(error))
            raise
        return texts

    def refuse_text(self, value: bytes, place: str, name: str) -> NoReturn:
        """Raise UserError for text that is not UTF-8."""
        raise UserError(
            f"text must be UTF-8. Received: {excerpt(value)} in {self.path}, {place}, column "
            f"{name!r}. Convert the file to UTF-8"
        )

    def refuse_label(self, value: str, place: str) -> NoReturn:
        """Raise UserError for a label that is not 0 or 1."""
        raise UserError(
            f"label must be 0 or 1. Received: {value} in {self.path}, {place}, "
            f"column {self.spec.label!r}. Correct the row or remove it"
        )

    def refuse_number(self, value: str, place: str, name: str) -> NoReturn:
        """Raise UserError for a number that is none, or not finite."""
        raise UserError(
            f"a number must be finite, as in -12.5e3, or empty where missing. Received: {value} in "
            f"{self.path}, {place}, column {name!r}. Correct it, empty it, or make the column "
            "categorical; non_finite = 'missing' takes inf and NaN for missing"
        )


def check_logs(logs: Sequence[RawLog]) -> None:
    """Refuse files whose columns do not fit the spec, or each other.

    Raises:
        UserError: a wrong separator, missing columns, files with different columns, not parquet.
    """
    columns = [log.check() for log in logs]
    for log, names in itertools.islice(zip(logs, columns, strict=True), 1, None):
        if names != columns[0]:
            different = sorted(set(names) ^ set(columns[0])) or list(names)
            raise UserError(
                f"all input files must have the same columns, in the same order. Received: "
                f"{log.path}, which differs from {logs[0].path} in "
                f"{quoted(different, brief=True)}. Prepare them apart, or give the files the same "
                "columns"
            )
    _check_same_text(logs)


@contextlib.contextmanager
def unchanged(logs: Sequence[Seen]) -> Iterator[None]:
    """Refuse files that change while they are read: no one could tell what of them was.

    Raises:
        UserError: one has, also where that made the reading fail, as at half a row.
    """
    try:
        yield
    except Exception:
        _check_unchanged(logs)
        raise
    _check_unchanged(logs)


def _check_unchanged(logs: Sequence[Seen]) -> None:
    for log in logs:
        try:
            same = FileState.of(log.path) == log.state
        except OSError:
            same = False
        if not same:
            raise UserError(
                f"an input file must stay as it is while it is read. Received: {log.path}, which "
                "has changed meanwhile. Begin again once nothing writes to it, or with a copy of it"
            )


def _check_same_text(logs: Sequence[RawLog]) -> None:
    """Refuse files in which one id would have two texts, and so be two ids."""
    seen: dict[str, dict[pa.DataType, Path]] = {}
    for log in logs:
        for name, kind in log.id_types().items():
            if pa.types.is_null(kind):
                continue
            for before, path in seen.setdefault(name, {}).items():
                if not same_text(before, kind):
                    raise UserError(
                        "a column of ids must be of one type in all files. Received: column "
                        f"{name!r}, {kind} in {log.path} and {before} in {path}, which write one "
                        "value as two texts. Write the files with one type"
                    )
            seen[name].setdefault(kind, log.path)


def column_of(batch: pa.RecordBatch, name: str) -> pa.Array:
    """A column by its name, decoded unless it is of `ID_TYPE`."""
    column = batch.column(batch.schema.get_field_index(name))
    if pa.types.is_dictionary(column.type) and column.type != ID_TYPE:
        return column.dictionary_decode()
    return column


def parse_number(text: str) -> float | None:
    """A number as Arrow reads it, or None."""
    found = _NUMBER.fullmatch(text)
    if found is None:
        return None
    return math.nan if found["nan"] else float(found[1])


def _floats(column: pa.Array) -> pa.Array:
    """Numbers as the nearest float64: Arrow itself makes 0.9999999999999999 of a decimal's 1."""
    if pa.types.is_decimal(column.type):  # as text Arrow 10 has none
        numbers = (None if value is None else float(value) for value in column.to_pylist())
        return pa.array(numbers, pa.float64(), size=len(column))
    return column.cast(pa.float64(), safe=False)  # large integers round
