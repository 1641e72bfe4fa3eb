# SPDX-License-Identifier: Apache-2.0
"""The columns of a log on disk, and the files of the parts made of them.

A log is a parquet file by chunk, then an Arrow file by finished column. A task that runs again
writes the same files again; a later step reads them when all have ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from merlin_cowclip.workflows.data.prepared_data import PARTS
from merlin_cowclip.workflows.data.sources.base import ID_TYPE, TIME, Chunk, Source
from merlin_cowclip.workflows.data.spec import DatasetSpec
from merlin_cowclip.workflows.errors import UserError

PART_ROWS = 500_000
ROW_GROUP_ROWS = 65_536
MIN_TRAIN_PARTS = 4  # so that the order of parts can be shuffled, from so many rows on:
MIN_ROWS_TO_PART = 4_000

# Stored next to the columns.
PART_OF = "\0part_of"  # the part of a row, as an index of `PARTS`
ROWS = {part: f"\0{part}_rows" for part in PARTS}  # of a part, in its order


@dataclass(frozen=True)
class ColumnStore:
    """A folder of parquet files by chunk, and of Arrow files by column."""

    folder: Path
    spec: DatasetSpec

    def write_chunk(
        self, number: int, source: Source, chunk: Chunk, advance: Callable[[int], Any] = int
    ) -> tuple[int, Counter[str]]:
        """Read chunk ``number`` of all files into one file.

        Returns its rows and, by column, the numbers that were not finite and became missing.
        """
        rows, replaced, path = 0, Counter[str](), self.folder / f"{number:06d}.parquet"
        writer = None
        for batch in filter(len, source.batches(chunk, advance, replaced)):
            # Numbers for names: a dot would mean a nested column.
            names = [self._number(name) for name in batch.schema.names]
            batch = pa.RecordBatch.from_arrays(batch.columns, names)
            if writer is None:
                ids = [field.name for field in batch.schema if field.type == ID_TYPE]
                options = {"compression": "lz4", "use_dictionary": ids}
                schema = batch.schema
                writer = pq.ParquetWriter(path, schema, write_statistics=False, **options)
            if batch.schema != schema:
                raise self._mixed_times()
            writer.write_batch(batch)
            rows += batch.num_rows
        if writer is not None:
            writer.close()
        return rows, replaced

    def column(self, name: str) -> pa.Array:
        """A column of all chunks: numbers, ids with their dictionary, or large lists of such."""
        text = [self._number(name)] if name in self.spec.categorical else []
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
        if len({chunk.type for chunk in chunks}) > 1:
            raise self._mixed_times()
        return pa.chunked_array(chunks).unify_dictionaries().combine_chunks()

    def store(self, name: str, values: pa.Array) -> None:
        """Save a finished column, or rows."""
        batch = pa.record_batch([values], ["values"])
        with pa.ipc.new_file(str(self._path(name)), batch.schema) as file:
            file.write(batch)

    def load(self, name: str) -> pa.Array:
        """What was saved, memory-mapped."""
        return pa.ipc.open_file(pa.memory_map(str(self._path(name)))).get_batch(0)[0]

    def _mixed_times(self) -> UserError:
        name = self.spec.split.column
        return UserError(f"column {name!r} has numbers and dates. Write its times in one form")

    def _number(self, name: str) -> str:
        spec = self.spec
        return str([spec.label, TIME, *spec.fields, PART_OF, *ROWS.values()].index(name))

    def _path(self, name: str) -> Path:
        return self.folder / f"{self._number(name)}.arrow"


def codes_of(ids: pa.Array) -> tuple[np.ndarray, pa.Array]:
    """Ids with their dictionary as int32 codes, -1 for a missing one, of distinct texts."""
    return ids.indices.fill_null(-1).to_numpy(), ids.dictionary


class PartJob(NamedTuple):
    """One file of a part: its rows from ``start`` to ``stop``, in the order of the part."""

    part: str
    name: str  # in the folder of the parts
    start: int
    stop: int
    group: int  # rows of a row group


def part_jobs(part: str, total: int, most: int) -> list[PartJob]:
    """Divide a part's rows into files of about one size, of at most ``most`` rows."""
    files = max(-(-total // most), 1)
    if part == "train" and total >= MIN_ROWS_TO_PART:
        files = max(files, MIN_TRAIN_PARTS)
    cuts = [total * i // files for i in range(files + 1)]
    group = max(1, min(ROW_GROUP_ROWS, -(-cuts[1] // 4)))  # several to a file
    return [
        PartJob(part, f"{part}/part-{i:05d}.parquet", cuts[i], cuts[i + 1], group)
        for i in range(files if total else 0)
    ]


def part_schema(spec: DatasetSpec, raw: bool = False) -> pa.Schema:
    """Of the files: ids of Merlin's own type, int64, which stay small on disk, or ``raw`` text."""
    ids, numbers = (pa.string(), pa.float64()) if raw else (pa.int64(), pa.float32())
    return pa.schema(
        [
            (spec.label, pa.int64()),
            *((name, numbers) for name in spec.continuous),
            *((name, ids) for name in spec.categorical),
            *((name, pa.list_(ids)) for name in spec.lists),
        ]
    )


def write_part(job: PartJob, store: ColumnStore, folder: Path, raw: bool = False) -> int:
    """Write one output file, encoded or raw as its columns are; returns its rows."""
    rows = store.load(ROWS[job.part])[job.start : job.stop]
    schema = part_schema(store.spec, raw)
    table = pa.table(
        [store.load(field.name).take(rows).cast(field.type) for field in schema], schema=schema
    )
    pq.write_table(table, folder / job.name, row_group_size=job.group)
    return len(rows)
