"""The files of the training and the test part."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from merlin_cowclip.workflows.data.prepare.column_store import OFFSETS, ROWS, ColumnStore

PART_ROWS = 500_000
ROW_GROUP_ROWS = 65_536
MIN_TRAIN_PARTS = 4  # so that the order of parts can be shuffled, from so many rows on:
MIN_ROWS_TO_PART = 4_000


@dataclass(frozen=True)
class PartJob:
    """One file of a part: its rows from ``start`` to ``stop``, in the order of the part."""

    part: str  # "train" or "test"
    number: int
    start: int
    stop: int
    group: int  # rows of a row group

    @property
    def name(self) -> str:
        """The file's, in the folder of the parts."""
        return f"{self.part}/part-{self.number:05d}.parquet"


def part_jobs(part: str, total: int, most: int) -> list[PartJob]:
    """Divide a part's rows into files of about one size, of at most ``most`` rows."""
    files = -(-total // most)
    if part == "train" and total >= MIN_ROWS_TO_PART:
        files = max(files, MIN_TRAIN_PARTS)
    cuts = [total * i // files for i in range(files + 1)]
    group = max(1, min(ROW_GROUP_ROWS, -(-cuts[1] // 4)))  # several to a file
    return [PartJob(part, i, cuts[i], cuts[i + 1], group) for i in range(files)]


def write_part(job: PartJob, store: ColumnStore, folder: Path, raw: bool = False) -> int:
    """Write one output file, with raw ids if they are stored as codes; returns its rows."""
    rows = np.asarray(store.load(ROWS[job.part])[job.start : job.stop])
    names = (store.spec.label, *store.spec.fields)
    table = pa.table({name: _gather(store, name, rows, raw) for name in names})
    path = folder / job.name
    # Not beside it: of a worker that dies meanwhile, nothing stays in the finished folder.
    partial = store.folder / f"{job.part}-{path.name}-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        pq.write_table(table, partial, row_group_size=job.group)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return len(rows)


def _gather(store: ColumnStore, name: str, rows: np.ndarray, raw: bool) -> pa.Array:
    spec, column = store.spec, store.load(name)
    if name in spec.continuous:
        return pa.array(column[rows], from_pandas=True)
    texts = store.load_texts(name) if raw and name in spec.ids else None
    if name not in spec.lists:
        return _values(column[rows], texts)
    all_offsets = store.load(name + OFFSETS)
    starts = all_offsets[rows]
    lengths = all_offsets[rows.astype(np.int64) + 1] - starts
    ends = np.cumsum(lengths)
    places = np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)
    offsets = np.concatenate([[0], ends]).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, _values(column[places], texts))


def _values(values: np.ndarray, texts: pa.Array | None) -> pa.Array:
    if texts is not None:
        return texts.take(pa.array(values, mask=values < 0))
    # Merlin's own type for ids and labels; on disk the small ones stay small.
    return pa.array(values.astype(np.int64))
