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


def part_jobs(part: str, total: int, most: int) -> list[PartJob]:
    """Divide a part's rows into files of about one size, of at most ``most`` rows."""
    files = -(-total // most)
    if part == "train" and total >= MIN_ROWS_TO_PART:
        files = max(files, MIN_TRAIN_PARTS)
    cuts = [total * i // files for i in range(files + 1)]
    group = max(1, min(ROW_GROUP_ROWS, -(-cuts[1] // 4)))  # several to a file
    return [PartJob(part, i, cuts[i], cuts[i + 1], group) for i in range(files)]


def write_part(job: PartJob, store: ColumnStore, folder: Path) -> int:
    """Write one output file; returns its rows."""
    rows = np.asarray(store.load(ROWS[job.part])[job.start : job.stop])
    names = (store.spec.label, *store.spec.fields)
    table = pa.table({name: _gather(store, name, rows) for name in names})
    path = folder / job.part / f"part-{job.number:05d}.parquet"
    # Not beside it: of a worker that dies meanwhile, nothing stays in the finished folder.
    partial = store.folder / f"{job.part}-{path.name}-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        pq.write_table(table, partial, row_group_size=job.group)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return len(rows)


def _gather(store: ColumnStore, name: str, rows: np.ndarray) -> pa.Array:
    spec, column = store.spec, store.load(name)
    if name in spec.continuous:
        return pa.array(column[rows])
    if name not in spec.lists:
        # Merlin's own type for ids and labels; on disk the small ones stay small.
        return pa.array(column[rows].astype(np.int64))
    all_offsets = store.load(name + OFFSETS)
    starts = all_offsets[rows]
    lengths = all_offsets[rows.astype(np.int64) + 1] - starts
    ends = np.cumsum(lengths)
    places = np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)
    offsets = np.concatenate([[0], ends]).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, column[places].astype(np.int64))
