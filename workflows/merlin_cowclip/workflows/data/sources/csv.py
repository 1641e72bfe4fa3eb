"""CSV logs, gzipped or not, read by Arrow."""

from __future__ import annotations

import contextlib
import csv
import functools
import gzip
import io
import itertools
import mmap
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from merlin_cowclip.workflows.data.sources.base import ID_TYPE, Chunk, Source, is_text
from merlin_cowclip.workflows.data.sources.files import refuse_unreadable
from merlin_cowclip.workflows.errors import UserError, clipped

BLOCK_BYTES = 16 << 20  # of text in a batch: bounds the memory of reading
GZIP_BLOCK_BYTES = 4 << 20  # Arrow inflates up to 32 blocks ahead
_FAULT = re.compile(
    r"(?:In CSV column #(?P<column>\d+): )?(?:.*: )?Row #(?P<row>\d+): (?P<text>.*)"
)
GZIP_ERRORS = (OSError, EOFError, zlib.error)  # of Arrow and Python
SEPARATORS = {"\t": "tab", ",": "comma", ";": "semicolon", "|": "pipe", " ": "space"}


class CsvSource(Source):
    """A CSV file whose columns its header, or else its spec, names."""

    @functools.cached_property
    def gzipped(self) -> bool:
        """Whether it begins as gzip does."""
        return self._head().startswith(b"\x1f\x8b")

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The column names; a file without labels and header lacks the label's column."""
        columns = self.spec.columns
        if columns is None:
            return tuple(self._first_row())
        return tuple(c for c in columns if self.labelled or c != self.spec.label)

    def has_label(self) -> bool:
        """Whether its header has it or, without one, its first row is not just one cell short."""
        if self.spec.columns is None:
            return self.spec.label in self.names
        return len(self._first_row()) != len(self.spec.columns) - 1

    def check(self) -> tuple[str, ...]:
        """Check the first row against the spec."""
        if self._head().startswith(b"PAR1"):
            raise UserError(
                f"{self.path} is a parquet file. Set format = 'parquet' in the specification"
            )
        cells = self._first_row()
        columns = self.names if self.spec.columns is not None else self.wanted
        width = len(columns)
        if self.spec.columns is not None and len(cells) == width:
            return self.names
        if self.spec.columns is None and (len(cells) > 1 or width == 1):
            self.check_names(cells)
            return self.names
        separator = SEPARATORS.get(self.spec.separator, repr(self.spec.separator))
        least, name = "at least " if self.spec.columns is None else "", self.spec.name
        raise UserError(
            f"{self.path} is not in {name[:1].upper()}{name[1:]} format (expected {least}{width} "
            f"{separator}-separated columns, found {len(cells)}){self._other_format(cells)}"
        )

    def _other_format(self, cells: list[str]) -> str:
        """Which built-in data set the file belongs to, or what to change."""
        (line,) = cells if len(cells) == 1 else [""]
        for separator in SEPARATORS:
            if found := self.suggestion(line.split(separator) if line else cells):
                return found
        return ". Set separator, header and columns in the specification as the file has them"

    def chunks(self, size: int) -> list[Chunk]:
        """Parts that end with a line; a file that is gzipped or has quotes is one part."""
        end = self.state.bytes
        if self.gzipped:
            return [Chunk(0, end, end, quotes=self.spec.quotes)]
        with self._mapped() as text:
            if self.spec.quotes and text.find(b'"') >= 0:
                return [Chunk(0, end, end, quotes=True)]
            starts = [0]
            while 0 < (start := text.find(b"\n", starts[-1] + size) + 1) < end:
                starts.append(start)
        return [Chunk(a, b, b - a) for a, b in zip(starts, [*starts[1:], end], strict=True)]

    def batches(
        self,
        chunk: Chunk,
        advance: Callable[[int], Any] = int,
        replaced: Counter[str] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Read the rows of a part."""
        replaced, rows, read = Counter() if replaced is None else replaced, 0, 0
        unchecked = chunk.quotes
        try:
            with self._stream(chunk) as stream, self._open(chunk, stream) as batches:
                for batch in batches:
                    if unchecked and _has_line_ends(batch):
                        self._check_quotes()
                        unchecked = False

                    def place(row: int, before: int = rows) -> str:
                        return self._place(chunk, before + row)

                    yield self.cast(batch, place, replaced)
                    rows += batch.num_rows
                    advance(stream.tell() - read)
                    read = stream.tell()
        except (pa.ArrowInvalid, *GZIP_ERRORS) as error:
            self._fail(chunk, error)

    @contextlib.contextmanager
    def _open(self, chunk: Chunk, stream: Any, threads: bool = True) -> Iterator[Any]:
        """Arrow's reader; it tells the row of a fault only if it has no threads."""
        spec, kept = self.spec, self.names if chunk.quotes else self.wanted
        types = dict.fromkeys(kept, pa.binary()) | dict.fromkeys(self.wanted, pa.string())
        types |= dict.fromkeys(spec.categorical, ID_TYPE)
        types |= dict.fromkeys({*spec.continuous} - {spec.split.column}, pa.float64())
        if self.labelled and spec.label_values is None:
            types[spec.label] = pa.float64()
        text = pa.CompressedInputStream(stream, "gzip") if self.gzipped else stream
        block = GZIP_BLOCK_BYTES if self.gzipped else BLOCK_BYTES
        named_by_file = spec.columns is None and chunk.start == 0
        try:
            reader = pa.csv.open_csv(
                text,
                pa.csv.ReadOptions(
                    block_size=block,
                    column_names=None if named_by_file else self.names,
                    use_threads=threads,
                ),
                pa.csv.ParseOptions(
                    delimiter=spec.separator,
                    quote_char='"' if spec.quotes else False,
                    newlines_in_values=chunk.quotes,
                    ignore_empty_lines=len(self.names) > 1,
                ),
                pa.csv.ConvertOptions(
                    column_types={name: types[name] for name in kept},
                    include_columns=kept,
                    null_values=["", *spec.null_values],
                    strings_can_be_null=True,
                ),
            )
        except pa.ArrowInvalid as error:
            if "Empty CSV" not in str(error):  # a part of blank lines
                raise
            reader = contextlib.nullcontext([])
        with reader as batches:
            yield batches

    def _fail(self, chunk: Chunk, error: Exception) -> NoReturn:
        """Raise the error of a fault that Arrow found, with its line."""
        if chunk.quotes:
            with contextlib.suppress(*GZIP_ERRORS):
                self._check_quotes()
        if isinstance(error, OSError) and error.errno is not None:
            refuse_unreadable(self.path, error)
        if isinstance(error, pa.ArrowInvalid):
            try:  # again, without threads: to be told the row
                with self._stream(chunk) as stream, self._open(chunk, stream, False) as batches:
                    for _ in batches:
                        pass
            except (pa.ArrowInvalid, OSError) as again:
                error = again
        reason = clipped(str(error))
        if found := _FAULT.search(reason):
            has_header = self.spec.columns is None and chunk.start == 0
            row = int(found["row"]) - 1 - has_header
            name = f", column {self.names[int(found['column'])]!r}" if found["column"] else ""
            reason, where = found["text"], f"{self.path}, {self._place(chunk, row)}{name}"
            raise UserError(f"{where}: {reason}. {self._remedy(reason)}") from None
        if self.gzipped and not isinstance(error, pa.ArrowInvalid):
            raise UserError(
                f"{self.path} is a damaged gzip file: {reason}. Copy or download it again"
            ) from None
        raise UserError(f"cannot read {self.path} as CSV: {reason}") from None

    def _remedy(self, reason: str) -> str:
        if "UTF8" in reason:
            return "Convert the file to UTF-8: iconv -f LATIN1 -t UTF-8"
        if "Expected" in reason:
            hint = "" if self.spec.quotes else " (quotes = true, if the file has quoted cells)"
            return f"Correct the row or remove it{hint}"
        return "Correct it, leave it empty, or name it in null_values (a label: label_values)"

    def _place(self, chunk: Chunk, row: int) -> str:
        """The line of a row of a part, counted from 0 and without the header."""
        has_header = self.spec.columns is None and chunk.start == 0
        with self._text(chunk.start) as text, contextlib.suppress(csv.Error, *GZIP_ERRORS):
            reader = self._reader(text)
            blank = len(self.names) == 1
            ends = (reader.line_num for cells in reader if cells or blank)
            line = next(itertools.islice(ends, row + has_header, None), None)
            if line is not None:
                return f"line {self._lines_before(chunk.start) + line}"
        return f"row {row + 1}"

    def _lines_before(self, start: int) -> int:
        with self._mapped() as text:
            step = 16 << 20  # slices are copies
            return sum(text[a : min(a + step, start)].count(b"\n") for a in range(0, start, step))

    def _check_quotes(self) -> None:
        """Check that every quoted cell is closed: one that is not swallows the rows behind it.

        Arrow does not. Python's reader does, but slowly: it is asked only if a cell has a line end.
        """
        with self._text() as text:
            reader, line = self._reader(text, strict=True), 1
            try:
                for _ in reader:
                    line = reader.line_num + 1
            except csv.Error as error:
                raise UserError(
                    f"{self.path}, line {line}: a quoted cell is not closed, or goes on behind its "
                    f"closing quote ({error}). Close it, double a quote that is text, or set "
                    "quotes = false in the specification"
                ) from None

    def _first_row(self) -> list[str]:
        try:
            with self._text() as text:
                cells = next((cells for cells in self._reader(text) if cells), None)
                "".join(cells or ()).encode()
        except (UnicodeEncodeError, csv.Error, *GZIP_ERRORS) as error:
            raise UserError(
                f"{self.path} is not a CSV file in UTF-8, gzipped or not: {clipped(str(error))}"
            ) from None
        if cells is None:
            raise UserError(f"{self.path} has no rows. Leave it out")
        return cells

    def _reader(self, text: Any, strict: bool = False) -> Any:
        csv.field_size_limit(BLOCK_BYTES)
        return csv.reader(
            text,
            delimiter=self.spec.separator,
            quoting=csv.QUOTE_MINIMAL if self.spec.quotes else csv.QUOTE_NONE,
            strict=strict,
        )

    @contextlib.contextmanager
    def _text(self, start: int = 0) -> Iterator[io.TextIOWrapper]:
        """The file's text from a byte on."""
        with gzip.open(self.path) if self.gzipped else open(self.path, "rb") as raw:
            raw.seek(start)
            yield io.TextIOWrapper(raw, "utf-8-sig", "surrogateescape", "")

    def _head(self) -> bytes:
        try:
            with open(self.path, "rb") as file:
                return file.read(4)
        except OSError as error:
            refuse_unreadable(self.path, error)

    def _mapped(self) -> mmap.mmap:
        with open(self.path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def _stream(self, chunk: Chunk) -> pa.NativeFile:
        path = os.fsencode(self.path)  # a name need not be UTF-8
        if self.gzipped:
            return pa.OSFile(path)
        with pa.memory_map(path) as mapped:
            mapped.seek(chunk.start)
            return pa.BufferReader(mapped.read_buffer(chunk.stop - chunk.start))


def _has_line_ends(batch: pa.RecordBatch) -> bool:
    """Whether a cell of text has a line end."""
    for column in batch.columns:
        if pa.types.is_dictionary(column.type):
            column = column.dictionary
        if is_text(column.type) and pc.any(pc.match_substring_regex(column, "[\r\n]")).as_py():
            return True
    return False
