# SPDX-License-Identifier: Apache-2.0
"""Encode the rows and write the parts: an external sort by key in two passes.

The first pass encodes as many rows as memory holds, sorts them by key and writes a run of each
part, a batch for each output file. The second sorts the batches of an output file.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from merlin_cowclip.workflows.data.encoder import Encoder
from merlin_cowclip.workflows.data.prepare.columns import Piece, Scan, read_column
from merlin_cowclip.workflows.data.prepare.split import key_cuts, keys_of
from merlin_cowclip.workflows.data.prepared_data import PARTS
from merlin_cowclip.workflows.data.spec import DatasetSpec
from merlin_cowclip.workflows.folders import replacing
from merlin_cowclip.workflows.progress import progress_bar

PART_ROWS = 500_000
ROW_GROUP_ROWS = 65_536
MIN_TRAIN_PARTS = 4  # so that the order of parts can be shuffled, from so many rows on:
MIN_ROWS_TO_PART = 4_000
_KEY = "\0key"
Reports = dict[str, dict[str, Any]]  # of fields
MEMORY_SHARE = 6  # a run takes this share of the memory: it is copied, and its columns are read
WRITE_SHARE = 4  # a file takes this share: it is copied, and ids become int64


class PartJob(NamedTuple):
    """One file of a part: its rows from ``start`` on, in the order of the part."""

    name: str  # in the folder of the parts
    start: int
    group: int  # rows of a row group


def part_jobs(part: str, total: int, most: int) -> list[PartJob]:
    """Divide a part's rows into files of about one size, of at most ``most`` rows."""
    files = max(-(-total // most), 1)
    if part == "train" and total >= MIN_ROWS_TO_PART:
        files = max(files, MIN_TRAIN_PARTS)
    cuts = [total * i // files for i in range(files + 1)]
    group = max(1, min(ROW_GROUP_ROWS, -(-cuts[1] // 4)))  # several to a file
    return [
        PartJob(f"{part}/part-{i:05d}.parquet", cuts[i], group)
        for i in range(files if total else 0)
    ]


def part_schema(spec: DatasetSpec) -> pa.Schema:
    """Of the files: ids of Merlin's own type, int64, which stay small on disk."""
    return pa.schema(
        [
            (spec.label, pa.int64()),
            *((name, pa.float32()) for name in spec.continuous),
            *((name, pa.int64()) for name in spec.categorical),
            *((name, pa.list_(pa.int64())) for name in spec.lists),
        ]
    )


def write_parts(
    scan: Scan,
    encoder: Encoder,
    reports: Reports,
    rows: dict[str, int],
    folder: Path,
    *,
    seed: int,
    memory: int,
    part_rows: int,
    executor: Executor,
    progress: bool,
) -> None:
    """Write the files of all parts."""
    row_bytes = _row_bytes(scan, reports)
    files = {part: part_jobs(part, rows[part], part_rows) for part in PARTS}
    cuts = {}
    for part in PARTS:
        ranks = [job.start for job in files[part][1:]]
        all_keys = functools.partial(_keys, scan, part, seed)
        cuts[part] = key_cuts(all_keys, ranks) if ranks else np.zeros(0, np.uint64)
    runs: dict[str, list[Path]] = {part: [] for part in PARTS}
    with progress_bar("encoding", scan.rows, show=progress) as bar:
        for number, pieces in enumerate(scan.runs(memory // (MEMORY_SHARE * row_bytes))):
            names = [scan.spec.label, *scan.spec.fields]
            encode = functools.partial(_encode, scan=scan, pieces=pieces, encoder=encoder)
            columns = dict(zip(names, executor.map(encode, names), strict=True))
            for part in PARTS:
                chosen, keys = _rows_of(scan, part, pieces[0].start, pieces[-1].stop, seed)
                runs[part].append(scan.scratch / f"{number:06d}-{part}.run")
                write_run(runs[part][-1], columns, chosen, keys, cuts[part])
            bar.update(pieces[-1].stop - pieces[0].start)
    jobs = [(job, i, runs[part]) for part in PARTS for i, job in enumerate(files[part])]
    for part in PARTS:
        (folder / part).mkdir()
    write = functools.partial(write_file, spec=scan.spec, folder=folder)
    threads = max(1, memory // (WRITE_SHARE * row_bytes * part_rows))
    with (
        progress_bar("writing", scan.rows, show=progress) as bar,
        ThreadPoolExecutor(min(threads, len(os.sched_getaffinity(0)))) as pool,
    ):
        for written in pool.map(write, *zip(*jobs, strict=True)):
            bar.update(written)


def write_run(
    path: Path, columns: Mapping[str, pa.Array], rows: np.ndarray, keys: np.ndarray, cuts: Any
) -> None:
    """Write ``rows`` of columns, sorted by their keys, in a batch for each file of the part."""
    order = np.argsort(keys, kind="stable")
    chosen = pa.array(rows[order])
    batch = pa.record_batch(
        [pa.array(keys[order]), *(column.take(chosen) for column in columns.values())],
        [_KEY, *columns],
    )
    with pa.ipc.new_file(str(path), batch.schema) as file:
        ends = [0, *np.searchsorted(keys[order], cuts), len(rows)]
        for start, stop in itertools.pairwise(ends):
            file.write(batch.slice(start, stop - start))


def _rows_of(
    scan: Scan, part: str, start: int, stop: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """The rows of a part from ``start`` to ``stop``, from 0 on, and their keys."""
    chosen = np.flatnonzero(scan.part_of[start:stop] == PARTS.index(part))
    if part == "train":
        return chosen, keys_of(start, stop, seed)[chosen]
    return chosen, (chosen + start).astype(np.uint64) * np.uint64(2**64 // scan.rows)  # their order


def _keys(scan: Scan, part: str, seed: int) -> Iterator[np.ndarray]:
    """The keys of all rows of a part."""
    for piece in scan.pieces:
        yield _rows_of(scan, part, piece.start, piece.stop, seed)[1]


def _row_bytes(scan: Scan, reports: Reports) -> int:
    """Bytes of an encoded row, with its key, on average."""
    lists = sum(reports[name]["occurrences"] for name in scan.spec.lists)
    return 16 + 4 * len(scan.spec.fields) + 4 * lists // scan.rows


def _encode(name: str, scan: Scan, pieces: Sequence[Piece], encoder: Encoder) -> pa.Array:
    """A column of a run, encoded."""
    columns = [read_column(piece.path, name) for piece in pieces]
    if name != scan.spec.label:
        columns = [encoder.encode(name, column) for column in columns]
    return pa.concat_arrays(columns)


def write_file(
    job: PartJob, number: int, runs: Sequence[Path], spec: DatasetSpec, folder: Path
) -> int:
    """Write a file of a part, of batch ``number`` of each run, if it has rows; returns them."""
    batches = []
    for path in runs:
        with pa.OSFile(str(path)) as file:  # reads one batch; a mapped file would stay in memory
            batches.append(pa.ipc.open_file(file).get_batch(number))
    table = pa.Table.from_batches(batches)
    order = np.argsort(table[_KEY].to_numpy(), kind="stable")
    table = table.select(range(1, table.num_columns)).take(pa.array(order))
    if len(table):
        with replacing(folder / job.name) as partial:
            pq.write_table(table.cast(part_schema(spec)), partial, row_group_size=job.group)
    return len(table)
