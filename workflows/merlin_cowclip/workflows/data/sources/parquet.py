# SPDX-License-Identifier: Apache-2.0
"""Parquet logs, with the columns that the names of Hive's folders give (``day=1/part.parquet``)."""

from __future__ import annotations

import contextlib
import functools
import os
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

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
        with open_parquet(self.path) as file:
            held = file.schema_arrow.names
        return (*held, *(key for key in self._partition if key not in held))

    def chunks(self, size: int) -> list[Chunk]:
        """Row groups, as many as make about ``size`` bytes."""
        chunks: list[Chunk] = []
        start = held = 0
        with open_parquet(self.path) as file:
            groups = file.metadata.num_row_groups
            for i in range(groups):
                held += file.metadata.row_group(i).total_byte_size
                if held >= size or i == groups - 1:
                    chunks.append(Chunk(start, i + 1, held))
                    start, held = i + 1, 0
        return chunks

    def read(self, chunk: Chunk) -> Iterator[tuple[pa.RecordBatch, int]]:
        """Read the rows of some row groups."""
        with open_parquet(self.path) as file:
            groups = range(chunk.start, chunk.stop)
            total = max(1, sum(file.metadata.row_group(i).num_rows for i in groups))
            held = [name for name in self.wanted if name in file.schema_arrow.names]
            for batch in file.iter_batches(BATCH_ROWS, row_groups=groups, columns=held):
                columns = dict(zip(batch.schema.names, batch.columns, strict=True))
                for name, text in self._partition.items():
                    if name in self.wanted and name not in columns:
                        columns[name] = pa.array([text] * batch.num_rows, pa.string())
                size = chunk.size * batch.num_rows // total
                yield pa.RecordBatch.from_pydict(columns), size

    def _place(self, chunk: Chunk, before: int, row: int) -> str:
        with open_parquet(self.path) as file:
            groups = map(file.metadata.row_group, range(chunk.start))
            return f"row {sum(group.num_rows for group in groups) + before + row + 1}"

    @property
    def _partition(self) -> dict[str, str | None]:
        """The columns that names of folders give, as text."""
        folders = self.path.relative_to(self.root or self.path.parent).parts[:-1]
        pairs = [part.split("=", 1) for part in folders if "=" in part]
        texts = {urllib.parse.unquote(key): urllib.parse.unquote(text) for key, text in pairs}
        return {key: None if text == HIVE_NULL else text for key, text in texts.items()}


@contextlib.contextmanager
def open_parquet(path: Path) -> Iterator[pq.ParquetFile]:
    """A parquet file; raises UserError for what Arrow raises while it is open."""
    try:
        if not is_parquet(path):
            raise UserError(f"{path} is not parquet, but may be CSV. Give a parquet file")
        with pa.OSFile(os.fsencode(path)) as file:  # a name need not be UTF-8
            yield pq.ParquetFile(file)
    except (OSError, pa.ArrowException) as error:
        raise UserError(
            f"{path} is not a whole parquet file: {clipped(str(error))}. Write it again"
        ) from None


def is_parquet(path: Path) -> bool:
    """Whether a file begins as parquet does."""
    with path.open("rb") as file:
        return file.read(4) == b"PAR1"
