"""Parquet logs, with the columns that the names of Hive's folders give (``day=1/part.parquet``)."""

from __future__ import annotations

import contextlib
import functools
import os
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from merlin_cowclip.workflows.data.sources.base import Chunk, Source
from merlin_cowclip.workflows.errors import UserError, clipped

BATCH_ROWS = 65_536
HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"


class ParquetSource(Source):
    """A parquet file with the columns that its spec names, in any order."""

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The columns of the file, then those of its folders' names."""
        with self._open() as file:
            held = file.schema_arrow.names
        return (*held, *(key for key in self._partition if key not in held))

    def check(self) -> None:
        """Check the names."""
        self.check_names(self.names)

    def chunks(self, size: int) -> list[Chunk]:
        """Row groups, as many as make about ``size`` bytes."""
        chunks: list[Chunk] = []
        start = held = 0
        with self._open() as file:
            groups = file.metadata.num_row_groups
            for i in range(groups):
                held += file.metadata.row_group(i).total_byte_size
                if held >= size or i == groups - 1:
                    chunks.append(Chunk(start, i + 1, held))
                    start, held = i + 1, 0
        return chunks

    def batches(
        self,
        chunk: Chunk,
        advance: Callable[[int], Any] = int,
        replaced: Counter[str] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Read the rows of some row groups."""
        replaced = Counter() if replaced is None else replaced
        with self._open() as file:
            rows = [file.metadata.row_group(i).num_rows for i in range(chunk.stop)]
            first, total = sum(rows[: chunk.start]), max(1, sum(rows[chunk.start :]))
            groups = range(chunk.start, chunk.stop)
            columns = [name for name in self.wanted if name in file.schema_arrow.names]
            for batch in file.iter_batches(BATCH_ROWS, row_groups=groups, columns=columns):
                batch = self._with_partition(batch)
                yield self.cast(batch, functools.partial(_place, first), replaced)
                first += batch.num_rows
                advance(chunk.size * batch.num_rows // total)

    @property
    def _partition(self) -> dict[str, str | None]:
        """The columns that names of folders give, as text."""
        pairs = [part.split("=", 1) for part in self.path.parent.parts if "=" in part]
        texts = {urllib.parse.unquote(key): urllib.parse.unquote(text) for key, text in pairs}
        return {key: None if text == HIVE_NULL else text for key, text in texts.items()}

    def _with_partition(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        for name, text in self._partition.items():
            if name in self.wanted and name not in columns:
                columns[name] = pa.array([text] * batch.num_rows, pa.string())
        return pa.RecordBatch.from_pydict(columns)

    @contextlib.contextmanager
    def _open(self) -> Iterator[pq.ParquetFile]:
        """The file; what Arrow raises while it is open becomes a UserError."""
        try:
            yield pq.ParquetFile(pa.OSFile(os.fsencode(self.path)))
        except (OSError, pa.ArrowException) as error:
            raise UserError(
                f"{self.path} is not a whole parquet file: {clipped(str(error))}. Write it again, "
                "or set format = 'csv' in the specification"
            ) from None


def _place(first: int, row: int) -> str:
    return f"row {first + row + 1}"
