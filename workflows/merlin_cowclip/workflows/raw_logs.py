"""Raw logs as a stream of typed Arrow batches; every fault is named with its file and line.

The fast path is Arrow's; only when it has met a fault is the file read again, slowly, to say where.
Splitting, counting and encoding are `etl.py`'s.
"""

from __future__ import annotations

import csv
import glob
import gzip
import io
import itertools
import math
import mmap
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from merlin_cowclip.workflows.arrow_ids import as_text
from merlin_cowclip.workflows.datasets import DatasetSpec
from merlin_cowclip.workflows.errors import UserError

BLOCK_BYTES = 16 << 20  # of text per batch: bounds the memory of reading
BATCH_ROWS = 65_536  # of parquet per batch
_GZIP_ERRORS = (gzip.BadGzipFile, EOFError, zlib.error)
ID_TYPE = pa.dictionary(pa.int32(), pa.string())
TIME = "\0time"  # the batch column of the split's time; no column of a log can be called so


def expand_inputs(inputs: Sequence[str | Path]) -> list[Path]:
    """Files and globs to files: arguments in the order given, a glob's files by name.

    Raises:
        UserError: nothing given, a missing file, a glob without a match, a folder, an empty file,
            a file given twice.
    """
    if isinstance(inputs, (str, Path)):
        inputs = [inputs]
    files: list[Path] = []
    for given in inputs:
        path = Path(given)
        if path.exists():
            files.append(path)
        elif glob.has_magic(str(given)):
            found = sorted(glob.glob(str(given), recursive=True))
            if not found:
                raise UserError(f"input pattern must match a file. Received: {str(given)!r}")
            files += map(Path, found)
        else:
            raise UserError(f"input file must exist. Received: {path}")
    if not files:
        raise UserError("at least one input file must be given. Received: none")
    for path in files:
        if path.is_dir():
            raise UserError(
                f"input must be a file. Received the folder: {path}. Name its files: '{path}/*'"
            )
        if path.stat().st_size == 0:
            raise UserError(f"input file must not be empty. Received: {path}")
    seen: set[Path] = set()
    for path in files:
        if path.resolve() in seen:
            raise UserError(f"an input file must be given once. Received twice: {path}")
        seen.add(path.resolve())
    return files


@dataclass(frozen=True)
class Chunk:
    """A part of a log file that can be read by itself.

    Attributes:
        start: the first byte of a csv file, or row group of a parquet file.
        stop: one beyond the last.
        first_row: rows before it in a parquet file.
        size: its bytes.
        quotes: whether a csv part may hold quotes, and so line ends within cells.
        odd_quotes: whether their number is odd: one of them may never be closed.
    """

    start: int
    stop: int
    first_row: int
    size: int
    quotes: bool = False
    odd_quotes: bool = False


@dataclass(frozen=True)
class RawLog:
    """One log file, read as its spec says.

    `check` looks at the header or schema only; `batches` reads the rows. A batch holds the label
    (int8), every number (float64, missing: null), every id (`ID_TYPE`, missing: null), every
    list of ids (list of text), and the time of a split by time (`TIME`, as an id).
    """

    spec: DatasetSpec
    path: Path

    @property
    def wanted(self) -> tuple[str, ...]:
        """The columns we read."""
        time = self.spec.split.column
        return tuple(dict.fromkeys((self.spec.label, *self.spec.fields, *([time] if time else []))))

    def chunks(self, size: int) -> list[Chunk]:
        """The file in parts of about ``size`` bytes.

        A gzipped file is one part, and so is one that could only be cut within quotes.
        """
        if self.spec.format == "parquet":
            return self._parquet_chunks(size)
        end = self.path.stat().st_size
        if self._gzipped:
            return [Chunk(0, end, 0, end, quotes=True)]
        starts = [0]
        with (
            open(self.path, "rb") as raw,
            mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ) as text,
        ):
            while (line := text.find(b"\n", starts[-1] + size)) >= 0 and line + 1 < end:
                starts.append(line + 1)
            spans = list(zip(starts, [*starts[1:], end], strict=True))
            quotes = [_count(text, b'"', a, b) for a, b in spans]
        if any(number % 2 for number in quotes[:-1]):
            spans, quotes = [(0, end)], [sum(quotes)]
        return [
            Chunk(a, b, 0, b - a, quotes=number > 0, odd_quotes=number % 2 == 1)
            for (a, b), number in zip(spans, quotes, strict=True)
        ]

    def check(self) -> tuple[str, ...]:
        """The file's column names, once it is known that they and the separator fit the spec."""
        if self.spec.format == "parquet":
            return self._check_parquet()
        return self._check_csv()

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
        """
        replaced = Counter() if replaced is None else replaced
        if self.spec.format == "parquet":
            return self._parquet_batches(chunk, advance, replaced)
        return self._csv_batches(chunk, advance, replaced)

    # csv -------------------------------------------------------------------------------------

    def _check_csv(self) -> tuple[str, ...]:
        spec = self.spec
        first = next(self._rows(), None)
        if first is None:
            raise UserError(f"input file must not be empty. Received: {self.path}, without a row")
        line, cells = first
        expected = spec.columns if spec.columns is not None else self.wanted
        if len(cells) == 1 and len(expected) > 1:
            raise UserError(
                f"rows must have {self._count_rule(len(expected))}, separated by "
                f"{spec.separator!r}. Received: one column in {self.path}, line {line}. "
                "Name the separator that the file uses in the data set's description"
            )
        if spec.columns is not None:
            if len(cells) != len(spec.columns):
                self._wrong_width(line, len(cells), len(spec.columns))
            return spec.columns
        self._check_names(cells)
        return tuple(cells)

    def _count_rule(self, columns: int) -> str:
        return (
            f"{columns} columns" if self.spec.columns is not None else f"at least {columns} columns"
        )

    def _wrong_width(self, line: int, received: int, expected: int) -> NoReturn:
        raise UserError(
            f"every row must have {expected} columns, separated by {self.spec.separator!r}. "
            f"Received: {received} in {self.path}, line {line}. Correct the row or remove it"
        )

    def _check_names(self, names: Sequence[str]) -> None:
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise UserError(
                f"column names must be unique. Received twice: {_names(twice)} in {self.path}. "
                "Rename one of each"
            )
        missing = [name for name in self.wanted if name not in names]
        if missing:
            raise UserError(
                f"every column of data set {self.spec.name!r} must be in the file. "
                f"Missing: {_names(missing)} in {self.path}, which has: {_names(names)}"
            )

    def _csv_batches(
        self, chunk: Chunk, advance: Callable[[int], Any], replaced: Counter[str]
    ) -> Iterator[pa.RecordBatch]:
        spec = self.spec
        types: dict[str, pa.DataType] = dict.fromkeys(self.wanted, pa.string())
        types |= dict.fromkeys(spec.categorical, ID_TYPE)
        types |= dict.fromkeys((spec.label, *spec.continuous), pa.float64())
        # Only the file's first part has the header.
        names = spec.columns if chunk.start == 0 else self._names()
        with self._text(chunk) as raw:
            try:
                stream = pa.CompressedInputStream(raw, "gzip") if self._gzipped else raw
                reader = pyarrow.csv.open_csv(
                    stream,
                    read_options=pyarrow.csv.ReadOptions(
                        block_size=BLOCK_BYTES, column_names=names
                    ),
                    parse_options=pyarrow.csv.ParseOptions(
                        delimiter=spec.separator, newlines_in_values=chunk.quotes
                    ),
                    convert_options=pyarrow.csv.ConvertOptions(
                        column_types=types,
                        include_columns=self.wanted,
                        null_values=[""],
                        strings_can_be_null=True,
                    ),
                )
                read = rows = 0
                for batch in reader:
                    rows += batch.num_rows
                    yield self._typed(batch, self._find_csv_fault, replaced)
                    advance(raw.tell() - read)
                    read = raw.tell()
            except (pa.ArrowInvalid, OSError, EOFError, zlib.error) as error:
                if getattr(error, "errno", None) is not None:  # the disk's fault, not the file's
                    raise
                if chunk.start and "Empty CSV" in str(error):  # a part of blank lines
                    return
                self._find_csv_fault(str(error))
        if chunk.odd_quotes:
            self._check_quotes(chunk, rows)

    def _check_quotes(self, chunk: Chunk, rows: int) -> None:
        """Refuse a quote that is never closed: it would have swallowed the rows after it."""
        with open(self.path, "rb") as raw:
            raw.seek(chunk.start)
            lines, left = 0, chunk.stop - chunk.start
            while left and (line := raw.readline()):
                lines, left = lines + bool(line.strip()), left - len(line)
        lines -= chunk.start == 0 and self.spec.columns is None  # the header
        if rows < lines:
            raise UserError(
                f"a quote must be closed. Received: {self.path}, with an odd number of quotes, "
                f"{lines} lines and {rows} rows from byte {chunk.start} on. Close it, or "
                "double a quote that is meant as one"
            )

    def _text(self, chunk: Chunk) -> pa.NativeFile:
        if self._gzipped:
            return pa.OSFile(str(self.path))
        with pa.memory_map(str(self.path)) as mapped:
            mapped.seek(chunk.start)
            return pa.BufferReader(mapped.read_buffer(chunk.stop - chunk.start))

    def _names(self) -> tuple[str, ...]:
        """The file's column names, from its header if the spec does not give them."""
        return self.spec.columns or tuple(next(self._rows())[1])

    @property
    def _gzipped(self) -> bool:
        return self.path.name.endswith(".gz")

    def _rows(self) -> Iterator[tuple[int, list[str]]]:
        """(line, cells) of every row, slowly; the line is the row's last, counted from 1."""
        try:
            with gzip.open(self.path) if self._gzipped else open(self.path, "rb") as raw:
                # A byte that is not UTF-8 is kept, to be found and shown.
                text = io.TextIOWrapper(
                    raw,
                    encoding="utf-8-sig",
                    errors="surrogateescape",
                    newline="",
                )
                reader = csv.reader(text, delimiter=self.spec.separator)
                for cells in reader:
                    if cells:
                        yield reader.line_num, cells
        except _GZIP_ERRORS as error:
            self._bad_gzip(error)
        except csv.Error as error:
            raise UserError(f"input must be a csv file. Received: {self.path}: {error}") from None

    def _check_gzip(self) -> None:
        try:
            with gzip.open(self.path) as stream:
                while stream.read(1 << 20):
                    pass
        except _GZIP_ERRORS as error:
            self._bad_gzip(error)

    def _bad_gzip(self, error: Exception) -> NoReturn:
        raise UserError(
            f"a .gz file must be whole. Received: {self.path}: {error}. Copy or download it again"
        ) from None

    def _find_csv_fault(self, reason: str) -> NoReturn:
        """Read the file again and raise the error of its first bad row."""
        if self._gzipped:
            self._check_gzip()  # first, for a damaged stream decodes to nonsense before it ends
        spec, rows = self.spec, self._rows()
        names = spec.columns or tuple(next(rows)[1])
        place = {name: names.index(name) for name in self.wanted}
        for line, cells in rows:
            if len(cells) != len(names):
                self._wrong_width(line, len(cells), len(names))
            for name in self.wanted:
                value = cells[place[name]]
                if any("\udc80" <= c <= "\udcff" for c in value):
                    raw = value.encode("utf-8", "surrogateescape")
                    raise UserError(
                        f"text must be UTF-8. Received: {raw!r} in {self.path}, line {line}, "
                        f"column {name!r}. Convert the file to UTF-8"
                    )
            label = parse_number(cells[place[spec.label]])
            if label not in (0.0, 1.0):
                self._bad_label(repr(cells[place[spec.label]]), f"line {line}")
            for name in spec.continuous:
                value = cells[place[name]]
                number = parse_number(value)
                finite = number is not None and math.isfinite(number)
                if value and not finite and (number is None or self._refuses_non_finite):
                    self._bad_number(repr(value), f"line {line}", name)
        raise UserError(
            f"input must be a csv file that Arrow reads. Received: {self.path}: {reason}"
        )

    # parquet ---------------------------------------------------------------------------------

    def _open_parquet(self) -> pq.ParquetFile:
        try:
            return pq.ParquetFile(self.path)
        except (pa.ArrowException, OSError) as error:
            self._bad_parquet(error)

    def _bad_parquet(self, error: Exception) -> NoReturn:
        raise UserError(
            f"input must be a whole parquet file. Received: {self.path}: {error}. "
            "Write it again, or set format = 'csv' in the data set's description"
        ) from None

    def _check_parquet(self) -> tuple[str, ...]:
        spec = self.spec
        with self._open_parquet() as file:
            schema, rows = file.schema_arrow, file.metadata.num_rows
        self._check_names(schema.names)
        for name in self.wanted:
            kind = schema.field(name).type
            if pa.types.is_dictionary(kind):
                kind = kind.value_type
            listed = pa.types.is_list(kind) or pa.types.is_large_list(kind)
            if name in spec.lists and not listed:
                self._bad_type(name, "a list column", kind)
            if name not in spec.lists and pa.types.is_nested(kind):
                self._bad_type(name, "a column of single values", kind)
            if name in (spec.label, *spec.continuous) and not (
                pa.types.is_integer(kind)
                or pa.types.is_floating(kind)
                or pa.types.is_boolean(kind)
                or pa.types.is_decimal(kind)
            ):
                self._bad_type(name, "a column of numbers", kind)
        if rows == 0:
            raise UserError(f"input file must not be empty. Received: {self.path}, without a row")
        return tuple(schema.names)

    def _bad_type(self, name: str, rule: str, kind: pa.DataType) -> NoReturn:
        raise UserError(
            f"{name!r} must be {rule}. Received: {kind} in {self.path}. "
            "Change its role in the data set's description, or its type in the file"
        )

    def _parquet_chunks(self, size: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        start = first_row = rows = held = 0
        with self._open_parquet() as file:
            groups = file.metadata.num_row_groups
            for i in range(groups):
                group = file.metadata.row_group(i)
                rows, held = rows + group.num_rows, held + group.total_byte_size
                if held >= size or i == groups - 1:
                    chunks.append(Chunk(start, i + 1, first_row, held))
                    start, first_row, held = i + 1, rows, 0
        return chunks

    def _parquet_batches(
        self, chunk: Chunk, advance: Callable[[int], Any], replaced: Counter[str]
    ) -> Iterator[pa.RecordBatch]:
        row, left = chunk.first_row, chunk.size
        with self._open_parquet() as file:
            groups = range(chunk.start, chunk.stop)
            rows = sum(file.metadata.row_group(i).num_rows for i in groups)
            batches = file.iter_batches(BATCH_ROWS, row_groups=groups, columns=list(self.wanted))
            while True:
                try:
                    batch = next(batches, None)
                    if batch is None:
                        break
                    typed = self._typed(batch, _ParquetFault(self, batch, row), replaced)
                except (pa.ArrowException, OSError) as error:
                    self._bad_parquet(error)
                yield typed
                row += batch.num_rows
                read = min(left, chunk.size * batch.num_rows // rows)
                left -= read
                advance(read)
        advance(left)

    # both ------------------------------------------------------------------------------------

    @property
    def _refuses_non_finite(self) -> bool:
        return self.spec.non_finite == "refuse"

    def _typed(
        self, batch: pa.RecordBatch, fault: Callable[[str], Any], replaced: Counter[str]
    ) -> pa.RecordBatch:
        """The batch in our own types; calls ``fault``, which raises, on a bad value."""
        spec = self.spec
        columns: dict[str, pa.Array] = {}
        labels = _column(batch, spec.label).cast(pa.float64())
        good = pc.is_in(labels, pa.array([0.0, 1.0]))  # false for null and NaN
        if not pc.all(good).as_py():
            fault("label")
        columns[spec.label] = labels.cast(pa.int8())
        for name in spec.continuous:
            numbers = _column(batch, name).cast(pa.float64(), safe=False)  # large integers round
            finite = pc.is_finite(numbers)  # null for a missing one
            if pc.all(finite).as_py() is False:
                if self._refuses_non_finite:
                    fault("number")
                replaced[name] += pc.sum(pc.invert(finite)).as_py()
                numbers = pc.if_else(finite, numbers, None)
            columns[name] = numbers
        for name in spec.categorical:
            ids = _column(batch, name)
            # Only the csv reader has made empty text null.
            ready = spec.format == "csv" and ids.type == ID_TYPE
            columns[name] = ids if ready else as_text(ids).dictionary_encode()
        for name in spec.lists:
            cells = _column(batch, name)
            if spec.format == "csv":
                cells = pc.split_pattern(cells, spec.list_separator)
            columns[name] = as_text(cells)
        if spec.split.column:
            times = _column(batch, spec.split.column)
            if times.type == ID_TYPE:
                times = times.dictionary_decode()
            columns[TIME] = as_text(times).dictionary_encode()
        return pa.RecordBatch.from_pydict(columns)

    def _bad_label(self, value: str, place: str) -> NoReturn:
        raise UserError(
            f"label must be 0 or 1. Received: {value} in {self.path}, {place}, "
            f"column {self.spec.label!r}. Correct the row or remove it"
        )

    def _bad_number(self, value: str, place: str, name: str) -> NoReturn:
        raise UserError(
            f"a number must be finite, or empty where missing. Received: {value} in {self.path}, "
            f"{place}, column {name!r}. Correct it, empty it, or make the column categorical; "
            "non_finite = 'missing' takes inf and NaN for missing"
        )


@dataclass(frozen=True)
class _ParquetFault:
    """Finds the first bad row of a batch; ``first`` is the number of rows before it in the file."""

    log: RawLog
    batch: pa.RecordBatch
    first: int

    def __call__(self, reason: str) -> NoReturn:
        spec = self.log.spec
        labels = _column(self.batch, spec.label).cast(pa.float64()).to_numpy(zero_copy_only=False)
        bad = ~np.isin(labels, (0.0, 1.0))
        if bad.any():
            row = int(bad.argmax())
            value = _column(self.batch, spec.label)[row].as_py()
            self.log._bad_label(repr(value), f"row {self.first + row + 1}")
        for name in spec.continuous:
            numbers = _column(self.batch, name).cast(pa.float64(), safe=False)
            finite = pc.fill_null(pc.is_finite(numbers), True).to_numpy(zero_copy_only=False)
            if self.log._refuses_non_finite and not finite.all():
                row = int(finite.argmin())
                self.log._bad_number(str(numbers[row].as_py()), f"row {self.first + row + 1}", name)
        raise AssertionError(reason)  # a fault was seen, so one of the above has raised


def check_logs(spec: DatasetSpec, files: Sequence[Path]) -> list[RawLog]:
    """Every file as a log whose columns are known to fit the spec, and each other.

    Raises:
        UserError: a wrong separator, missing columns, files with different columns, not parquet.
    """
    logs = [RawLog(spec, path) for path in files]
    columns = [log.check() for log in logs]
    for log, names in itertools.islice(zip(logs, columns, strict=True), 1, None):
        if names != columns[0]:
            different = sorted(set(names) ^ set(columns[0])) or list(names)
            raise UserError(
                f"all input files must have the same columns, in the same order. Received: "
                f"{log.path}, which differs from {logs[0].path} in {_names(different)}. "
                "Prepare them apart, or give the files the same columns"
            )
    return logs


def _column(batch: pa.RecordBatch, name: str) -> pa.Array:
    column = batch.column(batch.schema.get_field_index(name))
    if pa.types.is_dictionary(column.type) and column.type != ID_TYPE:
        return column.dictionary_decode()
    return column


def _count(text: mmap.mmap, byte: bytes, start: int, stop: int) -> int:
    step = 16 << 20  # slices are copies
    return sum(text[a : min(a + step, stop)].count(byte) for a in range(start, stop, step))


def parse_number(text: str) -> float | None:
    """A number as Arrow reads it, or None."""
    try:
        return None if "_" in text else float(text)  # Python takes 1_000, Arrow does not
    except ValueError:
        return None


def _names(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
