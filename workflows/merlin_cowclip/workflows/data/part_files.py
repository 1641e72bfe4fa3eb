"""The files of the training and the test part: which rows go where, and writing them.

Writing one is a task, as in `fitting.py`.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from merlin_cowclip.workflows.data import clusters
from merlin_cowclip.workflows.data.staging import LENGTHS, ROWS, Staging

PART_ROWS = 500_000
ROW_GROUP_ROWS = 65_536
MIN_TRAIN_PARTS = 4  # so that the order of parts can be shuffled, from so many rows on:
MIN_ROWS_TO_PART = 4_000


@dataclass(frozen=True)
class PartJob:
    """One file of a part."""

    part: str  # "train" or "test"
    number: int
    start: int  # the rows from here
    stop: int  # to here, in the order of the part
    group: int  # rows of a row group
    staging: Staging
    folder: Path


def part_jobs(part: str, total: int, most: int, staging: Staging, folder: Path) -> list[PartJob]:
    """A part's rows in files of about one size.

    Args:
        part: "train" or "test".
        total: its rows.
        most: rows of a file.
        staging: where the encoded columns are.
        folder: the prepared folder.
    """
    files = -(-total // most)
    if part == "train" and total >= MIN_ROWS_TO_PART:
        files = max(files, MIN_TRAIN_PARTS)
    cuts = [total * i // files for i in range(files + 1)]
    group = max(1, min(ROW_GROUP_ROWS, -(-cuts[1] // 4)))  # several to a file
    return [PartJob(part, i, cuts[i], cuts[i + 1], group, staging, folder) for i in range(files)]


def write_part(job: PartJob) -> int:
    """Write one output file; returns its rows."""
    spec, staging = job.staging.spec, job.staging
    rows = np.asarray(staging.load(ROWS[job.part])[job.start : job.stop])
    names = (spec.label, *spec.fields)
    table = pa.table({name: _gather(staging, name, rows) for name in names})
    path = job.folder / job.part / f"part-{job.number:05d}.parquet"
    # Not beside it: of a worker that dies meanwhile, nothing stays in the finished folder.
    partial = staging.folder / f"{job.part}-{path.name}-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        pq.write_table(table, partial, row_group_size=job.group)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return len(rows)


def _gather(staging: Staging, name: str, rows: np.ndarray) -> pa.Array:
    clusters.stop_if_unwanted()
    spec, column = staging.spec, staging.load(name)
    if name in spec.continuous:
        return pa.array(column[rows])
    if name not in spec.lists:
        # Merlin's own type for ids and labels; on disk the small ones stay small.
        return pa.array(column[rows].astype(np.int64))
    all_offsets = staging.load(name + LENGTHS)  # row i is offsets[i:i+2]
    starts = all_offsets[rows]
    lengths = all_offsets[rows.astype(np.int64) + 1] - starts
    ends = np.cumsum(lengths)
    places = np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)
    offsets = np.concatenate([[0], ends]).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, column[places].astype(np.int64))
