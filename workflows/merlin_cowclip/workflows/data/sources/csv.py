# SPDX-License-Identifier: Apache-2.0
"""CSV logs, compressed or not, read by Arrow."""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import itertools
import os
import re
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from merlin_cowclip.workflows.data.sources.base import ID_TYPE, Chunk, Source, is_text
from merlin_cowclip.workflows.data.sources.files import open_file
from merlin_cowclip.workflows.errors import UserError, clipped, quoted

BLOCK_BYTES = 4 << 20  # of text in a batch; Arrow reads up to 32 ahead
SCAN_BYTES = 1 << 18  # of text that Python reads at a time
MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_FAULT = re.compile(
    r"(?:In CSV column #(?P<column>\d+): )?(?:.*: )?Row #(?P<row>\d+): (?P<text>.*)"
)


class CsvSource(Source):
    """A CSV file with columns named by its spec, or else by its header."""

    @functools.cached_property
    def compression(self) -> str | None:
        """What it begins as: "gzip", "zstd" or None."""
        with open_file(self.path) as file:
            start = file.read(4)
        return next((kind for magic, kind in MAGIC.items() if start.startswith(magic)), None)

    @functools.cached_property
    def file_columns(self) -> tuple[str, ...]:
        """The column names; the spec's names leave the label out where the file has none."""
        columns = self.spec.columns
        if columns is None:
            return tuple(self._first_row())
        label = self.spec.column_of(self.spec.label)
        return tuple(c for c in columns if self.labelled or c != label)

    def has_label(self) -> bool:
        """Whether its header has it; with the spec's names: unless one cell is too few."""
        if self.spec.columns is None:
            return super().has_label()
        return len(self._first_row()) != len(self.spec.columns) - 1

    def check(self) -> None:
        """Check the first row against the spec."""
        cells, expected = self._first_row(), str(len(self.file_columns))
        fits = len(cells) == len(self.file_columns)
        if self.spec.columns is None:
            least = len({*self.wanted} - {*self.folder_columns})
            expected, fits = f"at least {least}", len(cells) > 1 or least <= 1  # else: separator
        if not fits:
            raise UserError(
                f"{self.path} is not as specification {self.spec.name!r} says: expected {expected} "
                f"columns separated by {self.spec.separator!r}, found {len(cells)}. Set separator, "
                "header and columns in the specification as the file has them"
            )
        pairs = zip(cells, self.file_columns, strict=True) if self.spec.header else ()
        if moved := [name for cell, name in pairs if cell != name and name in cells]:
            raise UserError(
                f"{self.path} has {quoted(moved)} at another place than columns in the "
                "specification. List them in the order of the header"
            )
        super().check()

    @functools.cached_property
    def quoted(self) -> bool:
        """Whether it may have quoted cells; only a local file is searched."""
        if not self.spec.quotes or self.compression or isinstance(self.path, str):
            return self.spec.quotes
        with open_file(self.path) as file:
            return any(b'"' in block for block in iter(lambda: file.read(BLOCK_BYTES), b""))

    def chunks(self, size: int) -> list[Chunk]:
        """Parts that end with a line; a file that is compressed or has quotes is one part."""
        starts, start, end = [0], size, self.size
        if not (self.compression or self.quoted):
            with open_file(self.path) as file:
                while start < end and (block := file.read_at(SCAN_BYTES, start)):
                    line_end = block.find(b"\n") + 1
                    start += line_end or len(block)
                    if line_end and start < end:
                        starts.append(start)
                        start += size
        return [Chunk(a, b, b - a) for a, b in zip(starts, [*starts[1:], end], strict=True)]

    def read(self, chunk: Chunk) -> Iterator[tuple[pa.RecordBatch, int]]:
        """Read the rows of a part."""
        unchecked, read = self.quoted, 0
        try:
            with (
                self._text(chunk, BLOCK_BYTES) as (text, position),
                self._reader(chunk, text) as batches,
            ):
                for batch in batches:
                    if unchecked and _has_line_ends(batch):
                        self._check_quotes()
                        unchecked = False
                    yield batch, position() - read
                    read = position()
        except pa.ArrowInvalid as error:
            if "Empty CSV" not in str(error):  # a part of blank lines
                self._fail(chunk, error)

    @contextlib.contextmanager
    def _text(self, chunk: Chunk, buffer: int) -> Iterator[tuple[pa.NativeFile, Callable[[], int]]]:
        """The text of a part, decompressed, and what returns how many of its bytes were read."""
        if isinstance(self.path, Path) and not self.compression:
            with pa.memory_map(os.fsencode(self.path)) as mapped:  # a name need not be UTF-8
                mapped.seek(chunk.start)
                text = pa.BufferReader(mapped.read_buffer(chunk.stop - chunk.start))  # no copy
                yield text, text.tell
            return
        with open_file(self.path) as file:
            start = chunk.start

            def read(size: int) -> bytes:
                nonlocal start
                wanted = min(size, chunk.stop - start)
                block: bytes = file.read_at(wanted, start) if wanted else b""
                start += len(block)
                return block

            part = types.SimpleNamespace(read=read, close=lambda: None, closed=False)
            text = pa.BufferedInputStream(pa.PythonFile(part, "r"), buffer)
            kind = self.compression
            text = pa.CompressedInputStream(text, kind) if kind else text
            yield text, lambda: start - chunk.start

    def _reader(self, chunk: Chunk, text: pa.NativeFile) -> pyarrow.csv.CSVStreamingReader:
        spec, kept = self.spec, self.file_columns if self.quoted else self.from_file
        has_header = self._has_header(chunk)
        kinds = dict.fromkeys(kept, pa.binary()) | dict.fromkeys(self.wanted, pa.string())
        times = {spec.split.column, spec.hour, spec.weekday}
        kinds |= {n: ID_TYPE for n in map(spec.column_of, spec.categorical) if n not in times}
        numbers = {*map(spec.column_of, spec.continuous)} - times
        if self.labelled and spec.label_values is None:
            numbers.add(spec.column_of(spec.label))
        kinds |= dict.fromkeys(numbers, pa.float64())
        return pa.csv.open_csv(
            text,
            pa.csv.ReadOptions(
                block_size=BLOCK_BYTES,
                column_names=None if has_header and spec.columns is None else self.file_columns,
                skip_rows_after_names=int(has_header and spec.columns is not None),
                use_threads=False,  # with threads it does not tell the row of a fault
            ),
            pa.csv.ParseOptions(
                delimiter=spec.separator,
                quote_char='"' if spec.quotes else False,
                newlines_in_values=self.quoted,
                ignore_empty_lines=len(self.file_columns) > 1,
            ),
            pa.csv.ConvertOptions(
                column_types={name: kinds[name] for name in kept},
                include_columns=kept,
                null_values=["", *spec.null_values],
                strings_can_be_null=True,
            ),
        )

    def _fail(self, chunk: Chunk, error: Exception) -> NoReturn:
        """Raise the error of a fault that Arrow found, with its line."""
        if self.quoted:
            self._check_quotes()
        reason = clipped(str(error))
        fault = _FAULT.search(reason)
        if fault is None:
            raise UserError(f"cannot read {self.path} as CSV: {reason}") from None
        name = f", column {self.file_columns[int(fault['column'])]!r}" if fault["column"] else ""
        place = self._place(chunk, int(fault["row"]) - 1 - self._has_header(chunk))
        raise UserError(
            f"{self.path}, {place}{name}: {fault['text']}. Correct the row or remove it, convert "
            "the file to UTF-8 (iconv), or describe it in the specification (quotes, null_values, "
            "label_values)"
        ) from None

    def _place(self, chunk: Chunk, row: int) -> str:
        with (
            contextlib.suppress(csv.Error, StopIteration, UserError),
            self._rows(chunk.start) as rows,
            open_file(self.path) as file,
        ):
            ends = (rows.line_num for cells in rows if cells or len(self.file_columns) == 1)
            line = next(itertools.islice(ends, row + self._has_header(chunk), None))
            sizes = (min(BLOCK_BYTES, chunk.start - a) for a in range(0, chunk.start, BLOCK_BYTES))
            line += sum(file.read(size).count(b"\n") for size in sizes)
            return f"line {line}"
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
        except (UnicodeEncodeError, csv.Error) as error:
            raise UserError(
                f"{self.path} is not a CSV file in UTF-8: {clipped(str(error))}. "
                "For parquet, set format = 'parquet' in the specification"
            ) from None
        if not cells:
            raise UserError(f"{self.path} has no rows. Leave it out")
        return cells

    @contextlib.contextmanager
    def _rows(self, start: int = 0, strict: bool = False) -> Iterator[Any]:
        """Python's reader of the text from a byte on."""
        csv.field_size_limit(BLOCK_BYTES)
        with self._text(Chunk(start, self.size, 0), SCAN_BYTES) as (text, _):
            yield csv.reader(
                io.TextIOWrapper(text, "utf-8-sig", "surrogateescape", ""),
                delimiter=self.spec.separator,
                quoting=csv.QUOTE_MINIMAL if self.spec.quotes else csv.QUOTE_NONE,
                strict=strict,
            )


def _has_line_ends(batch: pa.RecordBatch) -> bool:
    """Whether a cell of text has a line end."""
    columns = (c.dictionary if pa.types.is_dictionary(c.type) else c for c in batch.columns)
    texts = (column for column in columns if is_text(column.type))
    return any(pc.any(pc.match_substring_regex(text, "[\r\n]")).as_py() for text in texts)
