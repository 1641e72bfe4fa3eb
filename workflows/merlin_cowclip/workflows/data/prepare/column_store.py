"""The columns of a log on disk: a parquet file by chunk, and an Arrow file by finished column.

A task that runs again writes the same files again; a later step reads them when all have ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from merlin_cowclip.workflows.data.sources.base import ID_TYPE, TIME, Chunk, Source
from merlin_cowclip.workflows.data.spec import DatasetSpec

# Stored next to the columns.
IN_TRAIN = "\0in_train"  # whether a row belongs to the training part
ROWS = {"train": "\0train_rows", "test": "\0test_rows"}  # of a part, in its order


@dataclass(frozen=True)
class ColumnStore:
    """A folder of parquet files by chunk, and of Arrow files by column."""

    folder: Path
    spec: DatasetSpec

    def write_chunk(
        self, number: int, source: Source, chunk: Chunk, advance: Callable[[int], Any] = int
    ) -> tuple[int, Counter[str]]:
        """Read chunk ``number`` of all files into one file; raises UserError for a bad value.

        Returns its rows and, by column, the numbers that were not finite and became missing.
        """
        rows, replaced, path = 0, Counter[str](), self.folder / f"{number:06d}.parquet"
        writer = None
        for batch in source.batches(chunk, advance, replaced):
            # Numbers for names: a dot would mean a nested column.
            names = [self._number(name) for name in batch.schema.names]
            batch = pa.RecordBatch.from_arrays(batch.columns, names)
            if writer is None:
                ids = [field.name for field in batch.schema if field.type == ID_TYPE]
                options = {"compression": "lz4", "use_dictionary": ids}
                writer = pq.ParquetWriter(path, batch.schema, write_statistics=False, **options)
            writer.write_batch(batch)
            rows += batch.num_rows
        if writer is not None:
            writer.close()
        return rows, replaced

    def column(self, name: str) -> pa.Array:
        """A column of all chunks: numbers, ids with their dictionary, or large lists of such."""
        text = [self._number(name)] if name in (*self.spec.categorical, TIME) else []
        chunks: list[pa.Array] = []
        for path in sorted(self.folder.glob("*.parquet")):
            with pq.ParquetFile(path, read_dictionary=text) as file:
                read = file.read(columns=[self._number(name)], use_threads=False)
            chunks += read.column(0).chunks
        if name in self.spec.lists:
            chunks = [
                pa.LargeListArray.from_arrays(
                    chunk.offsets.cast(pa.int64()), chunk.values.dictionary_encode()
                )
                for chunk in chunks
            ]
        return pa.chunked_array(chunks).unify_dictionaries().combine_chunks()

    def store(self, name: str, values: pa.Array) -> None:
        """Save a finished column, or rows."""
        batch = pa.record_batch([values], ["values"])
        with pa.ipc.new_file(str(self._path(name)), batch.schema) as file:
            file.write(batch)

    def load(self, name: str) -> pa.Array:
        """What was saved, memory-mapped."""
        return pa.ipc.open_file(pa.memory_map(str(self._path(name)))).get_batch(0)[0]

    def _number(self, name: str) -> str:
        spec = self.spec
        return str([spec.label, TIME, *spec.fields, IN_TRAIN, *ROWS.values()].index(name))

    def _path(self, name: str) -> Path:
        return self.folder / f"{self._number(name)}.arrow"


def codes_of(ids: pa.Array) -> tuple[np.ndarray, pa.Array]:
    """Ids with their dictionary as int32 codes, -1 for a missing one, of distinct texts."""
    return ids.indices.fill_null(-1).to_numpy(), ids.dictionary
