"""Raw logs as a stream of typed Arrow batches; every fault is named with its file and line.

The fast path is Arrow's; only when it has met a fault is the file read again, slowly, to say where.
Splitting, counting and encoding are `etl.py`'s.
"""

from __future__ import annotations

import contextlib
import csv
import glob
import gzip
import io
import itertools
import math
import mmap
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from merlin_cowclip.workflows.data.arrow_ids import as_text, exact_ids, same_text
from merlin_cowclip.workflows.data.datasets import DatasetSpec
from merlin_cowclip.workflows.data.natural_order import natural_order
from merlin_cowclip.workflows.data.quotes import (
    BYTE_ORDER_MARK,
    QuoteScan,
    line_starts,
    row_starts,
    with_next,
)
from merlin_cowclip.workflows.errors import UserError, shown

BLOCK_BYTES = 16 << 20  # of text per batch: bounds the memory of reading
MAX_LINE = 16 << 20  # characters of a line, or a cell, that are looked at to name a fault
BATCH_ROWS = 65_536  # of parquet per batch
_GZIP_ERRORS = (gzip.BadGzipFile, EOFError, zlib.error)
_SHOWN = 60  # characters of a value in a message
# A file's first bytes: what it is, and what to do.
_MAGIC = {
    b"\x1f\x8b": ("a gzipped file must be named .gz", "Rename it"),
    b"PK\x03\x04": ("a file must be csv, or csv gzipped", "It is a zip archive: unpack it"),
    b"BZh": ("a file must be csv, or csv gzipped", "It is compressed by bzip2: unpack it"),
    b"\xfd7zXZ": ("a file must be csv, or csv gzipped", "It is compressed by xz: unpack it"),
    b"(\xb5/\xfd": ("a file must be csv, or csv gzipped", "It is compressed by zstd: unpack it"),
    b"PAR1": ("a file must be csv", "It is parquet: set format = 'parquet' in the description"),
}
# Arrow's grammar of numbers: no plus sign, ASCII digits only, blanks around.
_NUMBER = re.compile(
    r"[ \t]*(-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
    r"|-?(?i:inf(?:inity)?)|-?(?P<nan>(?i:nan))(?:\([A-Za-z0-9_]*\))?)[ \t]*"
)
ID_TYPE = pa.dictionary(pa.int32(), pa.string())
TIME = "\0time"  # the batch column of the split's time; no column of a log can be called so


def expand_inputs(inputs: Sequence[str | Path]) -> list[Path]:
    """Files and globs to files: arguments in the order given, a glob's by `natural_order`.

    Raises:
        UserError: nothing given, a missing file, a glob without a match, a folder, an empty file,
            a file given twice, a name that cannot be one.
    """
    if isinstance(inputs, (str, Path)):
        inputs = [inputs]
    files: list[Path] = []
    for given in inputs:
        path = Path(given)
        try:
            there = path.exists()
        except (OSError, ValueError) as error:  # too long, or with a zero byte
            reason = getattr(error, "strerror", None) or error
            raise UserError(
                f"input must be a file name. Received: {shown(given)}: {reason}"
            ) from None
        if there:
            files.append(path)
        elif glob.has_magic(str(given)):
            found = sorted(map(Path, glob.glob(str(given), recursive=True)), key=natural_order)
            if not found:
                raise UserError(f"input pattern must match a file. Received: {str(given)!r}")
            files += found
        else:
            raise UserError(f"input file must exist. Received: {path}")
    if not files:
        raise UserError("at least one input file must be given. Received: none")
    for path in files:
        if not path.exists():
            raise UserError(f"input file must exist. Received: {path}, a link to nowhere")
        if path.is_dir():
            raise UserError(
                f"input must be a file. Received the folder: {path}. Name its files: '{path}/*'"
            )
        if not path.is_file():
            raise UserError(
                f"input must be a file on a disk. Received the device or pipe: {path}. Write it "
                "to a file first"
            )
        if path.stat().st_size == 0:
            raise UserError(f"input file must not be empty. Received: {path}")
    seen: dict[tuple[int, int], Path] = {}
    for path in files:
        status = path.stat()
        known = (status.st_dev, status.st_ino)  # by whatever name and link
        if known in seen:
            raise UserError(
                f"an input file must be given once. Received twice: {path}, first as {seen[known]}"
                ". Leave one out"
            )
        seen[known] = path
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
    """

    start: int
    stop: int
    first_row: int
    size: int
    quotes: bool = False


@dataclass(frozen=True)
class _Row:
    """A row of a csv file, and its first and last line, counted from 1."""

    line: int
    last: int
    cells: list[str]

    @property
    def lines(self) -> str:
        """Where a row of several lines is."""
        return f"lines {self.line} to {self.last}, which a quote in line {self.line} makes one row"


class _Watched(io.RawIOBase):
    """A stream that shows a scan of quotes what is read from it."""

    def __init__(self, stream: pa.NativeFile, scan: QuoteScan) -> None:
        self._stream, self._scan, self._held = stream, scan, b""

    def readable(self) -> bool:
        """It is there to be read."""
        return True

    def read(self, size: int = -1) -> bytes:
        """The next bytes."""
        block = self._stream.read(size)
        self._scan.feed(self._held, block)  # one behind, for the byte that follows
        self._held = block
        return block


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


@dataclass(frozen=True)
class RawLog:
    """One log file, read as its spec says.

    `check` looks at the header or schema only; `batches` reads the rows. A batch holds the label
    (int8), every number (float64, missing: null), every id (`ID_TYPE`, missing: null), every
    list of ids (list of text), and the time of a split by time (`TIME`, as an id).
    """

    spec: DatasetSpec
    path: Path
    state: FileState = field(init=False)  # when it was first looked at

    def __post_init__(self) -> None:
        object.__setattr__(self, "state", FileState.of(self.path))

    @property
    def wanted(self) -> tuple[str, ...]:
        """The columns we read."""
        time = self.spec.split.column
        return tuple(dict.fromkeys((self.spec.label, *self.spec.fields, *([time] if time else []))))

    def chunks(self, size: int) -> list[Chunk]:
        """The file in parts of about ``size`` bytes, each of whole rows; a gzipped one is one part.

        Raises:
            UserError: a quote that is never closed, or closed too early.
        """
        if self.spec.format == "parquet":
            return self._parquet_chunks(size)
        end = self.path.stat().st_size
        if self._gzipped:
            return [Chunk(0, end, 0, end, quotes=self.spec.quotes)]
        with (
            open(self.path, "rb") as raw,
            mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ) as text,
        ):
            if self.spec.quotes:
                starts, bad = row_starts(text, size, self.spec.separator)
                if bad:
                    before = _count(text, b"\n", 0, starts[-1])
                    self._bad_quote(_slices(text, starts[-1], len(text)), before)
            else:
                starts = line_starts(text, size)
            return [
                Chunk(a, b, 0, b - a, quotes=self.spec.quotes and text.find(b'"', a, b) >= 0)
                for a, b in zip(starts, [*starts[1:], len(text)], strict=True)
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
        self._check_head()
        first = next(self._rows(), None)
        if first is None:
            raise UserError(f"input file must not be empty. Received: {self.path}, without a row")
        line, cells = first.line, first.cells
        expected = spec.columns if spec.columns is not None else self.wanted
        if len(cells) == 1 and len(expected) > 1:
            place, remedy = f"line {line}", "Name the separator that the file uses"
            if first.last > line:
                place, remedy = first.lines, "Close the quote, or name the separator"
            raise UserError(
                f"rows must have {self._count_rule(len(expected))}, separated by "
                f"{spec.separator!r}. Received: one column in {self.path}, {place}. "
                f"{remedy} in the data set's description"
            )
        if spec.columns is not None:
            if len(cells) != len(spec.columns):
                self._wrong_width(first, len(spec.columns))
            return spec.columns
        self._check_names(cells)
        return tuple(cells)

    def _check_head(self) -> None:
        """Refuse what is no text of ours, by the file's first bytes."""
        try:
            with open(self.path, "rb") as raw:
                head = raw.read(4096)
            if self._gzipped:
                with gzip.open(self.path) as stream:
                    head = stream.read(4096)
            else:
                for magic, (rule, remedy) in _MAGIC.items():
                    if head.startswith(magic):
                        raise UserError(f"{rule}. Received: {self.path}. {remedy}")
        except _GZIP_ERRORS as error:
            self._bad_gzip(error)
        except OSError as error:
            self._unreadable(error)
        # Text has no zero bytes to speak of; UTF-16 and UTF-32 have little else in Latin script.
        if head.startswith((b"\xff\xfe", b"\xfe\xff")) or head.count(0) * 4 > len(head):
            raise UserError(
                f"text must be UTF-8. Received: {self.path}, which is UTF-16, UTF-32 or no text. "
                "Convert it: iconv -f UTF-16 -t UTF-8"
            )

    def _unreadable(self, error: OSError) -> NoReturn:
        raise UserError(
            f"input file must be readable. Received: {self.path}: {error.strerror}"
        ) from None

    def _count_rule(self, columns: int) -> str:
        return (
            f"{columns} columns" if self.spec.columns is not None else f"at least {columns} columns"
        )

    def _wrong_width(self, row: _Row, expected: int) -> NoReturn:
        place, remedy = f"line {row.line}", "Correct the row or remove it"
        if row.last > row.line:
            place = row.lines
            remedy = "Close the quote, or double one that is meant as text"
        elif not self.spec.quotes and any(cell.startswith('"') for cell in row.cells):
            remedy = "If its quotes are to be read as such, set quotes = true in the description"
        raise UserError(
            f"every row must have {expected} columns, separated by {self.spec.separator!r}. "
            f"Received: {len(row.cells)} in {self.path}, {place}. {remedy}"
        )

    def _bad_quote(self, blocks: Iterable[bytes], before: int = 0) -> NoReturn:
        """Name the bad cell of the blocks, which ``before`` lines precede."""
        cell = QuoteScan(self.spec.separator).find_bad(blocks)
        rule, fault = "a quote must be closed", "a cell without an end"
        if cell.last is not None:
            rule = "a quoted cell must end with its closing quote"
            fault = f"a cell that is closed in line {before + cell.last + 1} and goes on"
        raise UserError(
            f"{rule}. Received: {_shown(cell.text)} in {self.path}, line {before + cell.line + 1}, "
            f"{fault}. Close it, double a quote that is meant as text, or set quotes = false in "
            "the description of a log that has none"
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
        scan = QuoteScan(spec.separator)
        with self._stream(chunk) as raw:
            try:
                stream: Any = raw
                if self._gzipped:
                    stream = _inflated(raw, self.path)
                    if spec.quotes:
                        stream = _Watched(stream, scan)
                reader = pyarrow.csv.open_csv(
                    stream,
                    read_options=pyarrow.csv.ReadOptions(
                        block_size=BLOCK_BYTES, column_names=names
                    ),
                    parse_options=pyarrow.csv.ParseOptions(
                        delimiter=spec.separator,
                        quote_char='"' if spec.quotes else False,
                        newlines_in_values=chunk.quotes,
                    ),
                    convert_options=pyarrow.csv.ConvertOptions(
                        column_types=types,
                        include_columns=self.wanted,
                        null_values=[""],
                        strings_can_be_null=True,
                    ),
                )
                read = 0
                for batch in reader:
                    yield self._typed(batch, self._find_csv_fault, replaced)
                    advance(raw.tell() - read)
                    read = raw.tell()
            except (pa.ArrowInvalid, OSError, EOFError, zlib.error) as error:
                if isinstance(error, OSError) and error.errno is not None:
                    self._unreadable(error)
                if chunk.start and "Empty CSV" in str(error):  # a part of blank lines
                    return
                self._find_csv_fault(str(error))
        if scan.bad:
            self._check_stream()

    def _stream(self, chunk: Chunk) -> pa.NativeFile:
        if self._gzipped:
            return pa.OSFile(os.fsencode(self.path))  # its name need not be UTF-8
        with pa.memory_map(os.fsencode(self.path)) as mapped:
            mapped.seek(chunk.start)
            text = mapped.read_buffer(chunk.stop - chunk.start)
            if chunk.start and text[: len(BYTE_ORDER_MARK)].to_pybytes() == BYTE_ORDER_MARK:
                # Arrow would take it out of the row: it is no mark there. A blank line is no row.
                text = pa.py_buffer(b"\n" + text.to_pybytes())
            return pa.BufferReader(text)

    def _names(self) -> tuple[str, ...]:
        """The file's column names, from its header if the spec does not give them."""
        return self.spec.columns or tuple(next(self._rows()).cells)

    @property
    def _gzipped(self) -> bool:
        return self.path.name.endswith(".gz")

    def _rows(self) -> Iterator[_Row]:
        """Every row that is not blank, slowly."""
        csv.field_size_limit(MAX_LINE)  # of the process; Python's own is 131,072
        line = 1
        try:
            with gzip.open(self.path) if self._gzipped else open(self.path, "rb") as raw:
                # A byte that is not UTF-8 is kept, to be found and shown.
                text = io.TextIOWrapper(
                    raw,
                    encoding="utf-8-sig",
                    errors="surrogateescape",
                    newline="",
                )
                reader = csv.reader(
                    self._lines(text),
                    delimiter=self.spec.separator,
                    quoting=csv.QUOTE_MINIMAL if self.spec.quotes else csv.QUOTE_NONE,
                )
                for cells in reader:
                    if cells:
                        yield _Row(line, reader.line_num, cells)
                    line = reader.line_num + 1
        except _GZIP_ERRORS as error:
            self._bad_gzip(error)
        except OSError as error:
            self._unreadable(error)
        except csv.Error as error:
            if "field limit" in str(error):
                self._too_long("cell", line)
            raise UserError(
                f"input must be a csv file. Received: {self.path}, line {line}: {error}"
            ) from None

    def _lines(self, text: io.TextIOWrapper) -> Iterator[str]:
        for number in itertools.count(1):
            line = text.readline(MAX_LINE)
            if not line:
                return
            if len(line) == MAX_LINE:
                self._too_long("line", number)
            yield line

    def _too_long(self, what: str, line: int) -> NoReturn:
        raise UserError(
            f"a {what} must be shorter than {min(MAX_LINE, BLOCK_BYTES):,} characters. Received: a "
            f"longer one that begins in {self.path}, line {line}. Look for a quote that is not "
            "closed, or another separator or line end"
        )

    def _check_stream(self) -> None:
        """Refuse a gzipped file that is damaged, or holds a quote that is never closed."""
        scan = QuoteScan(self.spec.separator)
        try:
            for block, after in with_next(self._gzip_blocks()):
                scan.feed(block, after)
            if self.spec.quotes and scan.bad:
                self._bad_quote(self._gzip_blocks())
        except _GZIP_ERRORS as error:
            self._bad_gzip(error)

    def _gzip_blocks(self) -> Iterator[bytes]:
        with gzip.open(self.path) as stream:
            while block := stream.read(1 << 20):
                yield block

    def _bad_gzip(self, error: Exception) -> NoReturn:
        raise UserError(
            f"a .gz file must be whole. Received: {self.path}: {error}. Copy or download it again"
        ) from None

    def _find_csv_fault(self, reason: str) -> NoReturn:
        """Read the file again and raise the error of its first bad row."""
        if self._gzipped:
            self._check_stream()  # first, for a damaged stream decodes to nonsense before it ends
        spec, rows = self.spec, self._rows()
        names = spec.columns or tuple(next(rows).cells)
        place = {name: names.index(name) for name in self.wanted}
        for row in rows:
            cells, where = row.cells, f"line {row.line}"
            if len(cells) != len(names):
                self._wrong_width(row, len(names))
            if sum(map(len, cells)) >= BLOCK_BYTES:
                self._too_long("row", row.line)
            for name in self.wanted:
                if any("\udc80" <= c <= "\udcff" for c in cells[place[name]]):
                    raw = cells[place[name]].encode("utf-8", "surrogateescape")
                    self._bad_text(raw, where, name)
            label = parse_number(cells[place[spec.label]])
            if label not in (0.0, 1.0):
                self._bad_label(_shown(cells[place[spec.label]]), where)
            for name in spec.continuous:
                value = cells[place[name]]
                number = parse_number(value)
                finite = number is not None and math.isfinite(number)
                if value and not finite and (number is None or self._refuses_non_finite):
                    self._bad_number(_shown(value), where, name)
        if self._gzipped and ("inflate" in reason or "compressed stream" in reason):
            raise UserError(
                f"a .gz file must hold nothing but gzip. Received: {self.path}, with zeros between "
                "its parts or behind them. Unpack it, and gzip it again"
            )
        raise UserError(
            f"input must be a csv file that Arrow reads. Received: {self.path}: {_clipped(reason)}"
        )

    # parquet ---------------------------------------------------------------------------------

    def _open_parquet(self) -> pq.ParquetFile:
        try:
            return pq.ParquetFile(pa.OSFile(os.fsencode(self.path)))
        except (pa.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                self._unreadable(error)
            self._bad_parquet(error)

    def _bad_parquet(self, error: Exception) -> NoReturn:
        raise UserError(
            f"input must be a whole parquet file. Received: {self.path}: {_clipped(str(error))}. "
            "Write it again, or set format = 'csv' in the data set's description"
        ) from None

    def _check_parquet(self) -> tuple[str, ...]:
        spec = self.spec
        with self._open_parquet() as file:
            schema, rows = file.schema_arrow, file.metadata.num_rows
        self._check_names(schema.names)
        for name in self.wanted:
            kind = _plain_type(schema.field(name).type)
            if name in spec.lists:
                if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
                    self._bad_type(name, "a list column", kind)
                if not _has_text(_plain_type(kind.value_type)):
                    self._bad_type(name, "a column of lists of single ids", kind)
            elif pa.types.is_nested(kind):
                self._bad_type(name, "a column of single values", kind)
            elif name in (spec.label, *spec.continuous):
                if not _is_number(kind):
                    self._bad_type(name, "a column of numbers", kind)
            elif not _has_text(kind):
                self._bad_type(name, "a column of text or numbers", kind)
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
        labels = _column(batch, spec.label).cast(pa.float64(), safe=False)  # large integers round
        good = pc.or_(pc.equal(labels, 0.0), pc.equal(labels, 1.0))  # -0.0 is 0; null for null
        if labels.null_count or not pc.all(good).as_py():
            fault("label")
        columns[spec.label] = labels.cast(pa.int8())
        for name in spec.continuous:
            numbers = _column(batch, name).cast(pa.float64(), safe=False)
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
            columns[name] = ids if ready else self._ids(ids, fault).dictionary_encode()
        for name in spec.lists:
            cells = _column(batch, name)
            if spec.format == "csv":
                cells = pc.split_pattern(cells, spec.list_separator)
            columns[name] = self._ids(cells, fault)
        if spec.split.column:
            times = _column(batch, spec.split.column)
            if times.type == ID_TYPE:
                times = times.dictionary_decode()
            if pa.types.is_timestamp(times.type):  # in UTC: a zone's letters would not sort
                times = times.cast(pa.timestamp(times.type.unit))
            columns[TIME] = self._text(times, fault).dictionary_encode()
        return pa.RecordBatch.from_pydict(columns)

    def _ids(self, values: pa.Array, fault: Callable[[str], Any]) -> pa.Array:
        try:
            exact_ids(values)
        except UserError as error:
            fault(str(error))
        return self._text(values, fault)

    def _text(self, values: pa.Array, fault: Callable[[str], Any]) -> pa.Array:
        """`as_text`, once it is known to be UTF-8; of csv, the reader has looked."""
        try:
            texts = as_text(values)
            if self.spec.format == "parquet":
                texts.validate(full=True)
        except pa.ArrowInvalid as error:
            fault(str(error))
            raise
        return texts

    def _bad_text(self, value: bytes, place: str, name: str) -> NoReturn:
        raise UserError(
            f"text must be UTF-8. Received: {_shown(value)} in {self.path}, {place}, column "
            f"{name!r}. Convert the file to UTF-8"
        )

    def _bad_label(self, value: str, place: str) -> NoReturn:
        raise UserError(
            f"label must be 0 or 1. Received: {value} in {self.path}, {place}, "
            f"column {self.spec.label!r}. Correct the row or remove it"
        )

    def _bad_number(self, value: str, place: str, name: str) -> NoReturn:
        raise UserError(
            f"a number must be finite, as in -12.5e3, or empty where missing. Received: {value} in "
            f"{self.path}, {place}, column {name!r}. Correct it, empty it, or make the column "
            "categorical; non_finite = 'missing' takes inf and NaN for missing"
        )


@dataclass(frozen=True)
class _ParquetFault:
    """Finds the first bad row of a batch; ``first`` is the number of rows before it in the file."""

    log: RawLog
    batch: pa.RecordBatch
    first: int

    def _place(self, row: int) -> str:
        return f"row {self.first + row + 1}"

    def __call__(self, reason: str) -> NoReturn:
        spec = self.log.spec
        labels = _column(self.batch, spec.label)
        bad = ~np.isin(labels.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False), (0, 1))
        if bad.any():
            row = int(bad.argmax())
            self.log._bad_label(repr(labels[row].as_py()), self._place(row))
        for name in spec.continuous:
            numbers = _column(self.batch, name).cast(pa.float64(), safe=False)
            finite = pc.fill_null(pc.is_finite(numbers), True).to_numpy(zero_copy_only=False)
            if self.log._refuses_non_finite and not finite.all():
                row = int(finite.argmin())
                self.log._bad_number(str(numbers[row].as_py()), self._place(row), name)
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
                        self.log._bad_text(_bytes(value), self._place(row), name)
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
    if spec.format == "parquet":
        _check_same_text(spec, logs)
    return logs


@contextlib.contextmanager
def unchanged(logs: Sequence[RawLog]) -> Iterator[None]:
    """Refuse logs that change while they are read: no one could tell what of them was.

    Raises:
        UserError: one has, also where that made the reading fail, as at half a row.
    """
    try:
        yield
    except Exception:
        _check_unchanged(logs)
        raise
    _check_unchanged(logs)


def _check_unchanged(logs: Sequence[RawLog]) -> None:
    for log in logs:
        try:
            same = FileState.of(log.path) == log.state
        except OSError:
            same = False
        if not same:
            raise UserError(
                f"an input file must stay as it is while it is read. Received: {log.path}, which "
                "has changed meanwhile. Prepare it again once nothing writes to it, or a copy of it"
            )


def _check_same_text(spec: DatasetSpec, logs: Sequence[RawLog]) -> None:
    """Refuse files in which one id would have two texts, and so be two ids."""
    times = [spec.split.column] if spec.split.column else []
    seen: dict[str, dict[pa.DataType, Path]] = {}
    for log in logs:
        with log._open_parquet() as file:
            schema = file.schema_arrow
        for name in (*spec.ids, *times):
            kind = schema.field(name).type
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


def _column(batch: pa.RecordBatch, name: str) -> pa.Array:
    column = batch.column(batch.schema.get_field_index(name))
    if pa.types.is_dictionary(column.type) and column.type != ID_TYPE:
        return column.dictionary_decode()
    return column


def _count(text: mmap.mmap, byte: bytes, start: int, stop: int) -> int:
    step = 16 << 20  # slices are copies
    return sum(text[a : min(a + step, stop)].count(byte) for a in range(start, stop, step))


def _slices(text: mmap.mmap, start: int, stop: int) -> Iterator[bytes]:
    step = 16 << 20
    return (text[a : min(a + step, stop)] for a in range(start, stop, step))


def _inflated(raw: pa.NativeFile, path: Path) -> Any:
    """The text of a gzipped file; one filled up with zeros, as of a tape, Arrow takes for damaged.

    Any other ends with its size, which is 0 of no log.
    """
    with open(path, "rb") as file:
        file.seek(-4, os.SEEK_END)
        padded = not any(file.read())
    return gzip.GzipFile(fileobj=raw) if padded else pa.CompressedInputStream(raw, "gzip")


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """Of a dictionary, the type of what it holds."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _is_number(kind: pa.DataType) -> bool:
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


def parse_number(text: str) -> float | None:
    """A number as Arrow reads it, or None."""
    found = _NUMBER.fullmatch(text)
    if found is None:
        return None
    return math.nan if found["nan"] else float(found[1])


def _shown(value: str | bytes) -> str:
    """A value in a message, not all of it if it is long."""
    return repr(value) if len(value) <= _SHOWN else f"{value[:_SHOWN]!r}… ({len(value):,} long)"


def _clipped(reason: str) -> str:
    """A library's reason in a message: its first line, and not all of it."""
    line = " ".join(reason.split())
    return line if len(line) <= 300 else f"{line[:300]}…"


def _names(names: Sequence[str]) -> str:
    """Names in a message, as many as there is room for."""
    texts = [_shown(name) for name in names]
    held = list(itertools.accumulate(len(text) + 2 for text in texts))
    room = max(1, sum(length <= 200 for length in held))
    return ", ".join(texts[:room]) + (f" and {len(texts) - room} more" if texts[room:] else "")
