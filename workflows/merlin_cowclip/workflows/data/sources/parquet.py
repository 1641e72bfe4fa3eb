# SPDX-License-Identifier: Apache-2.0
"""Parquet logs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from merlin_cowclip.workflows.data.sources.base import Chunk, Source
from merlin_cowclip.workflows.data.sources.files import Input, open_file
from merlin_cowclip.workflows.errors import UserError, clipped

BATCH_ROWS = 65_536


class ParquetSource(Source):
    """A parquet file with the columns that its spec names, in any order."""

    @functools.cached_property
    def file_columns(self) -> tuple[str, ...]:
        """The columns of the file."""
        with open_parquet(self.path) as file:
            return tuple(file.schema_arrow.names)

    def chunks(self, size: int) -> list[Chunk]:
        """Row groups, as many as make about ``size`` bytes."""
        chunks: list[Chunk] = []
        start = total = 0
        with open_parquet(self.path) as file:
            groups = file.metadata.num_row_groups
            for i in range(groups):
                total += file.metadata.row_group(i).total_byte_size
                if total >= size or i == groups - 1:
                    chunks.append(Chunk(start, i + 1, total))
                    start, total = i + 1, 0
        return chunks

    def read(self, chunk: Chunk) -> Iterator[tuple[pa.RecordBatch, int]]:
        """Read the rows of some row groups."""
        with open_parquet(self.path, pre_buffer=isinstance(self.path, str)) as file:
            groups = range(chunk.start, chunk.stop)
            total = max(1, sum(file.metadata.row_group(i).num_rows for i in groups))
            for batch in file.iter_batches(BATCH_ROWS, row_groups=groups, columns=self.from_file):
                yield batch, chunk.size * batch.num_rows // total

    def _place(self, chunk: Chunk, row: int) -> str:
        with open_parquet(self.path) as file:
            groups = map(file.metadata.row_group, range(chunk.start))
            return f"row {sum(group.num_rows for group in groups) + row + 1}"


@contextlib.contextmanager
def open_parquet(path: Input, pre_buffer: bool = False) -> Iterator[pq.ParquetFile]:
    """A parquet file; raises UserError for what Arrow raises while it is open.

    With ``pre_buffer`` all row groups that are read at once are fetched first, in few requests.
    """
    with open_file(path) as file:
        if file.read(4) != b"PAR1":
            raise UserError(f"{path} is not parquet, but may be CSV. Give a parquet file")
        try:
            yield pq.ParquetFile(file, pre_buffer=pre_buffer)
        except pa.ArrowException as error:
            raise UserError(
                f"{path} is not a whole parquet file: {clipped(str(error))}. Write it again"
            ) from None


def is_parquet(path: Input) -> bool:
    """Whether a file begins as parquet does."""
    with open_file(path) as file:
        return file.read(4) == b"PAR1"
