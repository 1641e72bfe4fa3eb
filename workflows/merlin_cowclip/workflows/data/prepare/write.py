"""The files of the training and the test part."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from merlin_cowclip.workflows.data.prepare.column_store import ROWS, ColumnStore
from merlin_cowclip.workflows.data.spec import DatasetSpec

PART_ROWS = 500_000
ROW_GROUP_ROWS = 65_536
MIN_TRAIN_PARTS = 4  # so that the order of parts can be shuffled, from so many rows on:
MIN_ROWS_TO_PART = 4_000


class PartJob(NamedTuple):
    """One file of a part: its rows from ``start`` to ``stop``, in the order of the part."""

    part: str  # "train" or "test"
    name: str  # in the folder of the parts
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
    return [
        PartJob(part, f"{part}/part-{i:05d}.parquet", cuts[i], cuts[i + 1], group)
        for i in range(files)
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
