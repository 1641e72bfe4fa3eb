"""Logs in csv: parts of the text to typed batches, by Arrow; a fault is named with its line.

Only when Arrow has met a fault is the file read again, slowly, to say where (`csv_text.py`).
"""

from __future__ import annotations

import contextlib
import gzip
import math
import os
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from merlin_cowclip.workflows.data import csv_text
from merlin_cowclip.workflows.data.csv_text import CsvText, Row
from merlin_cowclip.workflows.data.inputs import refuse_unreadable
from merlin_cowclip.workflows.data.prefetch import prefetch
from merlin_cowclip.workflows.data.quotes import BYTE_ORDER_MARK
from merlin_cowclip.workflows.data.raw_logs import ID_TYPE, Chunk, RawLog, parse_number
from merlin_cowclip.workflows.errors import UserError, clipped, excerpt


class CsvLog(RawLog):
    """A csv file whose columns its header, or else its spec, names."""

    text_is_checked: ClassVar[bool] = True

    @property
    def text(self) -> CsvText:
        """The file, for what is no batch."""
        return CsvText(self.path, self.spec.separator, self.spec.quotes)

    @property
    def columns(self) -> tuple[str, ...] | None:
        """The file's columns, if its spec names them; without its label, if it has none."""
        if self.spec.columns is None or self.labelled:
            return self.spec.columns
        return tuple(name for name in self.spec.columns if name != self.spec.label)

    def has_label(self) -> bool:
        """Whether its header has it or, without one, its first row is not just one cell short."""
        self.text.check_head()
        first = next(self.text.rows(), None)
        cells = [] if first is None else first.cells
        if self.spec.columns is None:
            return self.spec.label in cells
        return len(cells) != len(self.spec.columns) - 1

    def check(self) -> tuple[str, ...]:
        """The column names, once it is known that they and the separator fit the spec."""
        spec = self.spec
        self.text.check_head()
        first = next(self.text.rows(), None)
        if first is None:
            raise UserError(f"input file must not be empty. Received: {self.path}, without a row")
        line, cells = first.line, first.cells
        expected = self.columns if self.columns is not None else self.wanted
        if len(cells) == 1 and len(expected) > 1:
            place, remedy = f"line {line}", "Name the separator that the file uses"
            if first.last > line:
                place, remedy = first.lines, "Close the quote, or name the separator"
            raise UserError(
                f"rows must have {self._count_rule(len(expected))}, separated by "
                f"{spec.separator!r}. Received: one column in {self.path}, {place}. "
                f"{remedy} in the data set's description"
            )
        if self.columns is None:
            self.check_names(cells)
        elif len(cells) != len(self.columns):
            self._wrong_width(first, len(self.columns))
        if len(cells) == 1:
            self._refuse_blank_line()
        return self.columns or tuple(cells)

    def _refuse_blank_line(self) -> None:
        """Of one column it may be a row whose value is missing, and Arrow passes over it."""
        line = self.text.blank_line()
        if line is not None:
            write = 'Write "" for' if self.spec.quotes else "Add a column beside"
            raise UserError(
                "a log of one column must have no blank line, which may be a missing value or no "
                f"row. Received: one in {self.path}, line {line}. {write} a missing value, or "
                "remove the line"
            )

    def chunks(self, size: int) -> list[Chunk]:
        """Parts of the text, cut between rows; a gzipped file is one."""
        if self.text.gzipped:
            end = self.path.stat().st_size
            return [Chunk(0, end, 0, end, quotes=self.spec.quotes)]
        return [Chunk(a, b, 0, b - a, quotes) for a, b, quotes in self.text.parts(size)]

    def batches(
        self,
        chunk: Chunk,
        advance: Callable[[int], Any] = int,
        replaced: Counter[str] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """The rows of a part of the text."""
        spec, replaced = self.spec, Counter() if replaced is None else replaced
        types: dict[str, pa.DataType] = dict.fromkeys(self.wanted, pa.string())
        types |= dict.fromkeys(spec.categorical, ID_TYPE)
        types |= dict.fromkeys(spec.continuous, pa.float64())
        types |= {spec.label: pa.float64()} if self.labelled else {}
        convert = pyarrow.csv.ConvertOptions(
            column_types=types,
            include_columns=self.wanted,
            null_values=[""],
            strings_can_be_null=True,
        )
        read, first = 0, chunk.start == 0
        with self._stream(chunk) as raw, contextlib.closing(self._texts(raw)) as texts:
            try:
                for text in texts:
                    for batch in self._parsed(text, chunk.quotes, first, convert):
                        yield self.typed(batch, self._find_fault, replaced)
                        advance(raw.tell() - read)
                        read = raw.tell()
                    first = False
            except (pa.ArrowInvalid, OSError, EOFError, zlib.error) as error:
                if isinstance(error, OSError) and error.errno is not None:
                    refuse_unreadable(self.path, error)
                self._find_fault(str(error))

    def _texts(self, raw: pa.NativeFile) -> Generator[pa.NativeFile, None, None]:
        """A part's text: as it is or, gzipped, in pieces of whole rows, of a block or so each."""
        if self.text.gzipped:
            stream = _inflated(raw, self.path)  # with which, once it is gone, raw is closed
            yield from prefetch(self._rows_of(stream))
        else:
            yield raw

    def _rows_of(self, stream: Any) -> Iterator[pa.BufferReader]:
        """Pieces of inflated text.

        Arrow could read the stream itself, but its thread would read far ahead, and need the
        interpreter's lock while that waits for the thread to end.
        """
        held, bad = b"", False
        while block := stream.read(csv_text.BLOCK_BYTES):
            held += block
            last, bad = self.text.last_row(held)
            if last > 1:
                yield _reader_of(held[:last])
                # Arrow would take out a mark of byte order, which is none there. It skips the line.
                held = b"\n" + held[last:]
            elif len(held) > csv_text.BLOCK_BYTES:
                self._find_fault("a row that does not end")
        if bad:
            self.text.check_stream()
        if held:
            yield _reader_of(held)

    def _parsed(
        self,
        text: pa.NativeFile,
        quotes: bool,
        first: bool,
        convert: pyarrow.csv.ConvertOptions,
    ) -> Iterable[pa.RecordBatch]:
        """The rows of a text; ``first``: it may begin with the header."""
        if not np.frombuffer(text.read_buffer(), np.uint8).all():
            self.text.refuse_zero_byte()
        text.seek(0)
        try:
            return pyarrow.csv.open_csv(
                text,
                read_options=pyarrow.csv.ReadOptions(
                    block_size=_block_bytes(text),
                    column_names=self.columns if first else self._names(),
                ),
                parse_options=pyarrow.csv.ParseOptions(
                    delimiter=self.spec.separator,
                    quote_char='"' if self.spec.quotes else False,
                    newlines_in_values=quotes,
                ),
                convert_options=convert,
            )
        except pa.ArrowInvalid as error:
            if not first and "Empty CSV" in str(error):  # blank lines
                return ()
            raise

    def ids(self, column: pa.Array, fault: Callable[[str], Any]) -> pa.Array:
        """As Arrow has read them: empty text is null already."""
        return column

    def lists(self, column: pa.Array, fault: Callable[[str], Any]) -> pa.Array:
        """Cells cut at the list separator."""
        return super().lists(pc.split_pattern(column, self.spec.list_separator), fault)

    def _stream(self, chunk: Chunk) -> pa.NativeFile:
        if self.text.gzipped:
            return pa.OSFile(os.fsencode(self.path))  # its name need not be UTF-8
        with pa.memory_map(os.fsencode(self.path)) as mapped:
            mapped.seek(chunk.start)
            text = mapped.read_buffer(chunk.stop - chunk.start)
            if chunk.start and text[: len(BYTE_ORDER_MARK)].to_pybytes() == BYTE_ORDER_MARK:
                # Arrow would take it out of the row: it is no mark there. A blank line is no row.
                return _reader_of(b"\n" + text.to_pybytes())
            return pa.BufferReader(text)

    def _names(self) -> tuple[str, ...]:
        """The file's column names, from its header if the spec does not give them."""
        return self.columns or tuple(next(self.text.rows()).cells)

    def _find_fault(self, reason: str) -> NoReturn:
        """Read the file again and raise the error of its first bad row."""
        if self.text.gzipped:
            # First, for a damaged stream decodes to nonsense before it ends.
            self.text.check_stream()
        spec, rows = self.spec, self.text.rows()
        names = self.columns or tuple(next(rows).cells)
        place = {name: names.index(name) for name in self.wanted}
        for row in rows:
            cells, where = row.cells, f"line {row.line}"
            if len(cells) != len(names):
                self._wrong_width(row, len(names))
            if sum(map(len, cells)) >= csv_text.BLOCK_BYTES:
                self.text.refuse_too_long("row", row.line)
            for name in self.wanted:
                if any("\udc80" <= c <= "\udcff" for c in cells[place[name]]):
                    raw = cells[place[name]].encode("utf-8", "surrogateescape")
                    self.refuse_text(raw, where, name)
            if self.labelled and parse_number(cells[place[spec.label]]) not in (0.0, 1.0):
                self.refuse_label(excerpt(cells[place[spec.label]]), where)
            for name in spec.continuous:
                value = cells[place[name]]
                number = parse_number(value)
                finite = number is not None and math.isfinite(number)
                if value and not finite and (number is None or self.refuses_non_finite):
                    self.refuse_number(excerpt(value), where, name)
        if self.text.gzipped and ("inflate" in reason or "compressed stream" in reason):
            raise UserError(
                f"a .gz file must hold nothing but gzip. Received: {self.path}, with zeros between "
                "its parts. Unpack it, and gzip it again"
            )
        raise UserError(
            f"input must be a csv file that Arrow reads. Received: {self.path}: {clipped(reason)}"
        )

    def _count_rule(self, columns: int) -> str:
        return (
            f"{columns} columns" if self.spec.columns is not None else f"at least {columns} columns"
        )

    def _wrong_width(self, row: Row, expected: int) -> NoReturn:
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


def _reader_of(text: bytes) -> pa.BufferReader:
    """Of a copy in Arrow's memory: for Python's, its threads would need the interpreter's lock."""
    copy = pa.BufferOutputStream()
    copy.write(text)
    return pa.BufferReader(copy.getvalue())


def _block_bytes(text: pa.NativeFile) -> int:
    """How much of a text Arrow is to take at a time, so that no block ends between CR and LF.

    It would drop that LF, in a quoted cell as well.
    """
    size = text.size()
    return next(
        block
        for block in range(csv_text.BLOCK_BYTES, 0, -1)
        if all(text.read_at(2, at - 1) != b"\r\n" for at in range(block, size, block))
    )


def _inflated(raw: pa.NativeFile, path: Path) -> Any:
    """The text of a gzipped file; one filled up with zeros, as of a tape, Arrow takes for damaged.

    Any other ends with its text's size, which ends with a zero below 16 MiB: those are quick to
    read in either way.
    """
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        maybe_padded = file.read() == b"\0"
    return gzip.GzipFile(fileobj=raw) if maybe_padded else pa.CompressedInputStream(raw, "gzip")
