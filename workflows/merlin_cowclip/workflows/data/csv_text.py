"""A csv file as text, gzipped or not: where its rows begin and end, and what is wrong with them.

Its rows come one by one and slowly, with their lines: to look at the first one, or to name a fault.
All of them are Arrow's to read (`csv_logs.py`).
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import mmap
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from merlin_cowclip.workflows.data.inputs import refuse_no_csv, refuse_unreadable
from merlin_cowclip.workflows.data.quotes import QuoteScan, line_starts, row_starts, with_next
from merlin_cowclip.workflows.errors import UserError, excerpt

BLOCK_BYTES = 16 << 20  # of text per batch: bounds the memory of reading
MAX_LINE = 16 << 20  # characters of a line, or a cell, that are looked at to name a fault
_GZIP_ERRORS = (gzip.BadGzipFile, EOFError, zlib.error)


@dataclass(frozen=True)
class Row:
    """A row of a csv file, and its first and last line, counted from 1."""

    line: int
    last: int
    cells: list[str]

    @property
    def lines(self) -> str:
        """Where a row of several lines is."""
        return f"lines {self.line} to {self.last}, which a quote in line {self.line} makes one row"


@dataclass(frozen=True)
class CsvText:
    """A csv file, as its bytes have it.

    Args:
        path: the file; gzipped if it is named .gz.
        separator: between two cells.
        quotes: whether cells may stand in quotes.
    """

    path: Path
    separator: str
    quotes: bool

    @property
    def gzipped(self) -> bool:
        """By its name."""
        return self.path.name.endswith(".gz")

    def check_head(self) -> None:
        """Refuse what is no text of ours, by the file's first bytes."""
        try:
            with open(self.path, "rb") as raw:
                head = raw.read(4096)
            if self.gzipped:
                with gzip.open(self.path) as stream:
                    head = stream.read(4096)
            else:
                refuse_no_csv(self.path, head)
        except _GZIP_ERRORS as error:
            self._bad_gzip(error)
        except OSError as error:
            refuse_unreadable(self.path, error)
        # Text has no zero bytes to speak of; UTF-16 and UTF-32 have little else in Latin script.
        if head.startswith((b"\xff\xfe", b"\xfe\xff")) or head.count(0) * 4 > len(head):
            raise UserError(
                f"text must be UTF-8. Received: {self.path}, which is UTF-16, UTF-32 or no text. "
                "Convert it: iconv -f UTF-16 -t UTF-8"
            )

    def parts(self, size: int) -> list[tuple[int, int, bool]]:
        """Parts of about ``size`` bytes and whole rows: first byte, end, and whether it has quotes.

        Raises:
            UserError: a quote that is never closed, or closed too early.
        """
        with (
            open(self.path, "rb") as raw,
            mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ) as text,
        ):
            if self.quotes:
                starts, bad = row_starts(text, size, self.separator)
                if bad:
                    before = _count(text, b"\n", 0, starts[-1])
                    self._bad_quote(_slices(text, starts[-1], len(text)), before)
            else:
                starts = line_starts(text, size)
            return [
                (a, b, self.quotes and text.find(b'"', a, b) >= 0)
                for a, b in zip(starts, [*starts[1:], len(text)], strict=True)
            ]

    def last_row(self, text: bytes) -> tuple[int, bool]:
        """Where one of the last rows begins of a text that starts with a row; 0 if it has but one.

        Returns:
            That byte, and whether a quote behind it is never closed, or closed too early.
        """
        if self.quotes and b'"' in text:
            for end in b"\n", b"\r":
                starts, bad = row_starts(text, max(1, len(text) // 16), self.separator, end)
                if starts[-1]:
                    break
            return starts[-1], bad
        return max(text.rfind(b"\n"), text.rfind(b"\r")) + 1, False

    def rows(self) -> Iterator[Row]:
        """Every row that is not blank, slowly."""
        return (row for row in self._rows() if row.cells)

    def blank_line(self) -> int | None:
        """The first line between rows with nothing in it, counted from 1; slowly."""
        return next((row.line for row in self._rows() if not row.cells), None)

    def _rows(self) -> Iterator[Row]:
        """Every row; a blank one has no cells."""
        csv.field_size_limit(MAX_LINE)  # of the process; Python's own is 131,072
        line = 1
        try:
            with gzip.open(self.path) if self.gzipped else open(self.path, "rb") as raw:
                # A byte that is not UTF-8 is kept, to be found and shown.
                text = io.TextIOWrapper(
                    raw,
                    encoding="utf-8-sig",
                    errors="surrogateescape",
                    newline="",
                )
                reader = csv.reader(
                    self._lines(text),
                    delimiter=self.separator,
                    quoting=csv.QUOTE_MINIMAL if self.quotes else csv.QUOTE_NONE,
                )
                for cells in reader:
                    yield Row(line, reader.line_num, cells)
                    line = reader.line_num + 1
        except _GZIP_ERRORS as error:
            self._bad_gzip(error)
        except OSError as error:
            refuse_unreadable(self.path, error)
        except csv.Error as error:
            if "field limit" in str(error):
                self.refuse_too_long("cell", line)
            raise UserError(
                f"input must be a csv file. Received: {self.path}, line {line}: {error}"
            ) from None

    def _lines(self, text: io.TextIOWrapper) -> Iterator[str]:
        for number in itertools.count(1):
            line = text.readline(MAX_LINE)
            if not line:
                return
            if len(line) == MAX_LINE:
                self.refuse_too_long("line", number)
            yield line

    def refuse_too_long(self, what: str, line: int) -> NoReturn:
        """Raise UserError for a row, line or cell of more text than can be read at once."""
        raise UserError(
            f"a {what} must be shorter than {min(MAX_LINE, BLOCK_BYTES):,} characters. Received: a "
            f"longer one that begins in {self.path}, line {line}. Look for a quote that is not "
            "closed, or another separator or line end"
        )

    def check_stream(self) -> None:
        """Refuse a gzipped file that is damaged, or holds a quote that is never closed."""
        scan = QuoteScan(self.separator)
        try:
            for block, after in with_next(self._blocks()):
                scan.feed(block, after)
            if self.quotes and scan.bad:
                self._bad_quote(self._blocks())
        except _GZIP_ERRORS as error:
            self._bad_gzip(error)

    def refuse_zero_byte(self) -> NoReturn:
        """Raise UserError for the text's first zero byte, past which Arrow may miss a separator."""
        if self.gzipped:
            self.check_stream()  # a damaged one decodes to nonsense
        line = 1
        for block in self._blocks():
            at = block.find(b"\0")
            line += block.count(b"\n", 0, len(block) if at < 0 else at)
            if at >= 0:
                break
        raise UserError(
            f"text must have no zero bytes. Received: one in {self.path}, line {line}. Take them "
            "out: tr -d '\\000'"
        )

    def _blocks(self) -> Iterator[bytes]:
        with gzip.open(self.path) if self.gzipped else open(self.path, "rb") as stream:
            while block := stream.read(1 << 20):
                yield block

    def _bad_gzip(self, error: Exception) -> NoReturn:
        raise UserError(
            f"a .gz file must be whole. Received: {self.path}: {error}. Copy or download it again"
        ) from None

    def _bad_quote(self, blocks: Iterable[bytes], before: int = 0) -> NoReturn:
        """Name the bad cell of the blocks, which ``before`` lines precede."""
        cell = QuoteScan(self.separator).find_bad(blocks)
        rule, fault = "a quote must be closed", "a cell without an end"
        if cell.last is not None:
            rule = "a quoted cell must end with its closing quote"
            fault = f"a cell that is closed in line {before + cell.last + 1} and goes on"
        raise UserError(
            f"{rule}. Received: {excerpt(cell.text)} in {self.path}, line "
            f"{before + cell.line + 1}, {fault}. Close it, double a quote that is meant as text, "
            "or set quotes = false in the description of a log that has none"
        )


def _count(text: mmap.mmap, byte: bytes, start: int, stop: int) -> int:
    step = 16 << 20  # slices are copies
    return sum(text[a : min(a + step, stop)].count(byte) for a in range(start, stop, step))


def _slices(text: mmap.mmap, start: int, stop: int) -> Iterator[bytes]:
    step = 16 << 20
    return (text[a : min(a + step, stop)] for a in range(start, stop, step))
