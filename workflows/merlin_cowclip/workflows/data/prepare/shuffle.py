# SPDX-License-Identifier: Apache-2.0
"""Encode the rows and write the parts: an external sort by key in two passes.

The first pass encodes as many rows as memory holds, sorts them by key and writes a run of each
part. The second reads the keys of one output file in all runs, and sorts them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from merlin_cowclip.workflows.data.encoder import Encoder
from merlin_cowclip.workflows.data.prepare.columns import Piece, Scan, read_column
from merlin_cowclip.workflows.data.prepare.split import key_cuts, keys_of
from merlin_cowclip.workflows.data.prepared_data import HELD_OUT, PARTS
from merlin_cowclip.workflows.data.spec import DatasetSpec
from merlin_cowclip.workflows.data.vocabulary import MISSING, UNKNOWN
from merlin_cowclip.workflows.progress import progress_bar

PART_ROWS = 500_000
ROW_GROUP_ROWS = 65_536
MIN_TRAIN_PARTS = 4  # so that the order of parts can be shuffled, from so many rows on:
MIN_ROWS_TO_PART = 4_000
_KEY = "\0key"
Reports = dict[str, dict[str, Any]]  # of fields
MEMORY_SHARE = 6  # a run takes this share of the memory: it is copied, and its columns are read


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
    scratch: Path,
    *,
    seed: int,
    memory: int,
    part_rows: int,
    executor: Executor,
    progress: bool,
) -> None:
    """Write the files of all parts, and add what is known of held-out rows to the reports."""
    spec = scan.spec
    runs: dict[str, list[Path]] = {part: [] for part in PARTS}
    with progress_bar("encoding", scan.rows, show=progress) as bar:
        for number, pieces in enumerate(
            scan.runs(memory // (MEMORY_SHARE * _row_bytes(scan, reports)))
        ):
            names = [spec.label, *spec.fields]
            encode = functools.partial(
                _encode, scan=scan, pieces=pieces, encoder=encoder, reports=reports
            )
            columns = dict(zip(names, executor.map(encode, names), strict=True))
            start, stop = pieces[0].start, pieces[-1].stop
            part_of = scan.part_of[start:stop]
            for place, part in enumerate(PARTS):
                mine = np.flatnonzero(part_of == place)
                if not len(mine):
                    continue
                if part == "train":
                    keys = keys_of(start, stop, seed)[mine]
                    order = np.argsort(keys, kind="stable")
                    keys, mine = keys[order], mine[order]
                else:  # in the order of the log
                    keys = (mine + start).astype(np.uint64) * np.uint64(2**64 // scan.rows)
                chosen = pa.array(mine)
                batch = pa.record_batch(
                    [pa.array(keys), *(column.take(chosen) for column in columns.values())],
                    [_KEY, *columns],
                )
                runs[part].append(scratch / f"{number:06d}-{part}.run")
                with pa.ipc.new_file(str(runs[part][-1]), batch.schema) as file:
                    file.write(batch)
            bar.update(stop - start)
    jobs = []
    for part in PARTS:
        (folder / part).mkdir()
        files = part_jobs(part, rows[part], part_rows)
        ranks = [job.start for job in files[1:]]
        paths = runs[part]
        cuts = key_cuts(functools.partial(_keys, paths), ranks).tolist() if ranks else []
        jobs += [*zip(files, itertools.repeat(paths), [0, *cuts], [*cuts, None], strict=False)]
    write = functools.partial(_write_file, spec=spec, folder=folder)
    with progress_bar("writing", scan.rows, show=progress) as bar:
        for written in executor.map(write, *zip(*jobs, strict=True)):
            bar.update(written)


def _row_bytes(scan: Scan, reports: Reports) -> int:
    """Bytes of an encoded row, with its key, on average."""
    lists = sum(reports[name]["occurrences"] for name in scan.spec.lists)
    return 16 + 4 * len(scan.spec.fields) + 4 * lists // scan.rows


def _encode(
    name: str, scan: Scan, pieces: Sequence[Piece], encoder: Encoder, reports: Reports
) -> pa.Array:
    """A column of a run, encoded; what its held-out rows have is added to the field's report."""
    spec, encoded = scan.spec, list[pa.Array]()
    for piece in pieces:
        column, part_of = read_column(piece.path, name), scan.part_of[piece.start : piece.stop]
        if name == spec.label:
            encoded.append(column)
            continue
        encoded.append(values := encoder.encode(name, column))
        if name in spec.lists:
            part_of = np.repeat(part_of, np.diff(values.offsets.to_numpy()))
            values = values.values
        elif name in spec.continuous:
            values = column
        for part in HELD_OUT:
            mine = values.to_numpy(zero_copy_only=False)[part_of == PARTS.index(part)]
            for key, number in _counted(mine, encoder, name).items():
                key = f"{part}_{key}"
                reports[name][key] = reports[name].get(key, 0) + number
    return pa.concat_arrays(encoded)


def _counted(values: np.ndarray, encoder: Encoder, name: str) -> dict[str, int]:
    """What a report says of ids, or of raw numbers, of a held-out part."""
    if scale := encoder.scales.get(name):
        missing, low, high = np.isnan(values), min(scale.values), max(scale.values)
        filled = scale.filled(values)
        is_range = scale.method != "standardize"
        beyond = ((filled < low) | (filled > high)) & ~missing & is_range
        flags = {"missing": missing, "out_of_range": beyond}
    else:
        unknown = (values >= UNKNOWN) & (values < encoder.vocabularies[name].first)
        flags = {"missing": values == MISSING, "unknown": unknown}
    return {"occurrences": len(values)} | {key: int(of.sum()) for key, of in flags.items()}


def _keys(runs: Sequence[Path]) -> Iterator[np.ndarray]:
    """The keys of runs."""
    for path in runs:
        yield _run(path)[0]


def _run(path: Path) -> tuple[np.ndarray, pa.RecordBatch]:
    """A run's keys and rows, memory-mapped."""
    batch = pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)
    return batch.column(0).to_numpy(), batch


def _write_file(
    job: PartJob, runs: Sequence[Path], low: int, high: int | None, spec: DatasetSpec, folder: Path
) -> int:
    """Write the rows of the keys from ``low`` to below ``high``; returns how many."""
    found = []
    for path in runs:
        keys, batch = _run(path)
        start = np.searchsorted(keys, np.uint64(low))
        stop = len(keys) if high is None else np.searchsorted(keys, np.uint64(high))
        found.append(batch.slice(start, stop - start))
    table = pa.Table.from_batches(found)
    order = np.argsort(table[_KEY].to_numpy(), kind="stable")
    table = table.select(range(1, table.num_columns)).take(pa.array(order))
    table = table.cast(part_schema(spec))
    pq.write_table(table, folder / job.name, row_group_size=job.group)
    return len(table)
