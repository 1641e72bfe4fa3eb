# SPDX-License-Identifier: Apache-2.0
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
from collections.abc import Iterator
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from merlin_cowclip.workflows.data.sources.base import ID_TYPE, Chunk, Source, is_text
from merlin_cowclip.workflows.data.spec import SPECS
from merlin_cowclip.workflows.errors import UserError, clipped, quoted

BLOCK_BYTES = 16 << 20  # of text in a batch: bounds the memory of reading
GZIP_BLOCK_BYTES = 4 << 20  # Arrow inflates up to 32 blocks ahead
_FAULT = re.compile(
    r"(?:In CSV column #(?P<column>\d+): )?(?:.*: )?Row #(?P<row>\d+): (?P<text>.*)"
)
GZIP_ERRORS = (OSError, EOFError, zlib.error)  # of Arrow and Python
SEPARATORS = {"\t": "tab", ",": "comma", ";": "semicolon", "|": "pipe", " ": "space"}


class CsvSource(Source):
    """A CSV file with columns named by its spec, or else by its header."""

    @functools.cached_property
    def gzipped(self) -> bool:
        """Whether it begins as gzip does."""
        with open(self.path, "rb") as file:
            return file.read(2) == b"\x1f\x8b"

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The column names; the spec's names leave the label out where the file has none."""
        columns = self.spec.columns
        if columns is None:
            return tuple(self._first_row())
        return tuple(c for c in columns if self.labelled or c != self.spec.label)

    def has_label(self) -> bool:
        """Whether its header has it; with the spec's names: unless one cell is too few."""
        if self.spec.columns is None:
            return super().has_label()
        return len(self._first_row()) != len(self.spec.columns) - 1

    def check(self) -> None:
        """Check the first row against the spec."""
        cells, expected = self._first_row(), str(len(self.names))
        fits = len(cells) == len(self.names)
        if self.spec.columns is None:
            expected = f"at least {len(self.wanted)}"
            fits = len(cells) > 1 or len(self.wanted) == 1  # else it has another separator
        if not fits:
            remedy = "Set separator, header and columns in the specification as the file has them"
            for spec in SPECS.values():
                row = cells[0].split(spec.separator) if len(cells) == 1 else cells
                if len(row) == len(spec.columns or ()) or {spec.label, *spec.fields} <= {*row}:
                    remedy = f"Did you mean `prepare {spec.name}`?"
            name, separator = self.spec.name, self.spec.separator
            raise UserError(
                f"{self.path} is not in {name[:1].upper()}{name[1:]} format (expected {expected} "
                f"{SEPARATORS.get(separator, repr(separator))}-separated columns, found "
                f"{len(cells)}). {remedy}"
            )
        pairs = zip(cells, self.names, strict=True) if self.spec.header else ()
        if moved := [name for cell, name in pairs if cell != name and name in cells]:
            raise UserError(
                f"{self.path} has {quoted(moved)} at another place than columns in the "
                "specification. List them in the order of the header"
            )
        super().check()

    @functools.cached_property
    def quoted(self) -> bool:
        """Whether it may have quoted cells."""
        return self.spec.quotes and (self.gzipped or self._mapped().find(b'"') >= 0)

    def chunks(self, size: int) -> list[Chunk]:
        """Parts that end with a line; a file that is gzipped or has quotes is one part."""
        starts, end = [0], self.size
        if not (self.gzipped or self.quoted):
            text = self._mapped()
            while 0 < (start := text.find(b"\n", starts[-1] + size) + 1) < end:
                starts.append(start)
        return [Chunk(a, b, b - a) for a, b in zip(starts, [*starts[1:], end], strict=True)]

    def read(self, chunk: Chunk) -> Iterator[tuple[pa.RecordBatch, int]]:
        """Read the rows of a part."""
        unchecked, read = self.quoted, 0
        try:
            with self._stream(chunk) as stream, self._reader(chunk, stream) as batches:
                for batch in batches:
                    if unchecked and _has_line_ends(batch):
                        self._check_quotes()
                        unchecked = False
                    yield batch, stream.tell() - read
                    read = stream.tell()
        except (pa.ArrowInvalid, *GZIP_ERRORS) as error:
            if "Empty CSV" not in str(error):  # a part of blank lines
                self._fail(chunk, error)

    def _stream(self, chunk: Chunk) -> pa.NativeFile:
        """A part's bytes."""
        if self.gzipped:
            return pa.OSFile(os.fsencode(self.path))  # a name need not be UTF-8
        text = pa.py_buffer(self._mapped())
        return pa.BufferReader(text.slice(chunk.start, chunk.stop - chunk.start))

    def _reader(self, chunk: Chunk, stream: pa.NativeFile) -> pyarrow.csv.CSVStreamingReader:
        spec, kept = self.spec, self.names if self.quoted else self.wanted
        has_header = self._has_header(chunk)
        types = dict.fromkeys(kept, pa.binary()) | dict.fromkeys(self.wanted, pa.string())
        types |= dict.fromkeys(spec.categorical, ID_TYPE)
        types |= dict.fromkeys({*spec.continuous} - {spec.split.column}, pa.float64())
        if self.labelled and spec.label_values is None:
            types[spec.label] = pa.float64()
        return pa.csv.open_csv(
            pa.CompressedInputStream(stream, "gzip") if self.gzipped else stream,
            pa.csv.ReadOptions(
                block_size=GZIP_BLOCK_BYTES if self.gzipped else BLOCK_BYTES,
                column_names=None if has_header and spec.columns is None else self.names,
                skip_rows_after_names=int(has_header and spec.columns is not None),
                use_threads=False,  # with threads it does not tell the row of a fault
            ),
            pa.csv.ParseOptions(
                delimiter=spec.separator,
                quote_char='"' if spec.quotes else False,
                newlines_in_values=self.quoted,
                ignore_empty_lines=len(self.names) > 1,
            ),
            pa.csv.ConvertOptions(
                column_types={name: types[name] for name in kept},
                include_columns=kept,
                null_values=["", *spec.null_values],
                strings_can_be_null=True,
            ),
        )

    def _fail(self, chunk: Chunk, error: Exception) -> NoReturn:
        """Raise the error of a fault that Arrow found, with its line."""
        if self.quoted:
            with contextlib.suppress(*GZIP_ERRORS):
                self._check_quotes()
        reason = clipped(str(error))
        if not isinstance(error, pa.ArrowInvalid):
            raise UserError(
                f"{self.path} is a damaged gzip file: {reason}. Copy or download it again"
            ) from None
        found = _FAULT.search(reason)
        if found is None:
            raise UserError(f"cannot read {self.path} as CSV: {reason}") from None
        name = f", column {self.names[int(found['column'])]!r}" if found["column"] else ""
        place = self._place(chunk, 0, int(found["row"]) - 1 - self._has_header(chunk))
        raise UserError(
            f"{self.path}, {place}{name}: {found['text']}. Correct the row or remove it, convert "
            "the file to UTF-8 (iconv), or describe it in the specification (quotes, null_values, "
            "label_values)"
        ) from None

    def _place(self, chunk: Chunk, before: int, row: int) -> str:
        row += before
        with (
            contextlib.suppress(csv.Error, StopIteration, *GZIP_ERRORS),
            self._rows(chunk.start) as rows,
            self._mapped() as text,
        ):
            ends = (rows.line_num for cells in rows if cells or len(self.names) == 1)
            line = next(itertools.islice(ends, row + self._has_header(chunk), None))
            starts = range(0, chunk.start, BLOCK_BYTES)  # slices are copies
            breaks = (text[a : min(a + BLOCK_BYTES, chunk.start)].count(b"\n") for a in starts)
            return f"line {line + sum(breaks)}"
        return f"row {row + 1}"

    def _has_header(self, chunk: Chunk) -> bool:
        return self.spec.header and chunk.start == 0

    def _check_quotes(self) -> None:
        """Check that every quoted cell is closed: one that is not swallows the rows behind it.

        Arrow does not. Python's reader does, but slowly: it is asked only if a cell has a line end.
        """
        with self._rows(strict=True) as rows:
            line = 1
            try:
                for _ in rows:
                    line = rows.line_num + 1
            except csv.Error as error:
                raise UserError(
                    f"{self.path}, line {line}: a quoted cell is not closed, or continues after "
                    f"its closing quote ({error}). Close it, double a quote that is text, or set "
                    "quotes = false in the specification"
                ) from None

    def _first_row(self) -> list[str]:
        try:
            with self._rows() as rows:
                cells: list[str] = next(filter(None, rows), [])
                "".join(cells).encode()
        except (UnicodeEncodeError, csv.Error, *GZIP_ERRORS) as error:
            raise UserError(
                f"{self.path} is not a CSV file in UTF-8, gzipped or not: {clipped(str(error))}. "
                "For parquet, set format = 'parquet' in the specification"
            ) from None
        if not cells:
            raise UserError(f"{self.path} has no rows. Leave it out")
        return cells

    @contextlib.contextmanager
    def _rows(self, start: int = 0, strict: bool = False) -> Iterator[Any]:
        """Python's reader of the text from a byte on."""
        csv.field_size_limit(BLOCK_BYTES)
        with gzip.open(self.path) if self.gzipped else open(self.path, "rb") as raw:
            raw.seek(start)
            text = io.TextIOWrapper(raw, "utf-8-sig", "surrogateescape", "")
            yield csv.reader(
                text,
                delimiter=self.spec.separator,
                quoting=csv.QUOTE_MINIMAL if self.spec.quotes else csv.QUOTE_NONE,
                strict=strict,
            )

    def _mapped(self) -> mmap.mmap:
        with open(self.path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _has_line_ends(batch: pa.RecordBatch) -> bool:
    """Whether a cell of text has a line end."""
    for column in batch.columns:
        if pa.types.is_dictionary(column.type):
            column = column.dictionary
        if is_text(column.type) and pc.any(pc.match_substring_regex(column, "[\r\n]")).as_py():
            return True
    return False
