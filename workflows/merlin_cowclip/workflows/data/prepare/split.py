# SPDX-License-Identifier: Apache-2.0
"""The split: which rows are for training, validation and test.

Each row has a random 64-bit key, a function of seed and row. A random split takes the rows of the
lowest keys; training rows are written in the order of theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from merlin_cowclip.workflows.data.prepare.columns import (
    Piece,
    Scan,
    mixed_times,
    read_column,
)
from merlin_cowclip.workflows.data.prepared_data import HELD_OUT, PARTS, TITLES
from merlin_cowclip.workflows.data.sources.base import TIME
from merlin_cowclip.workflows.data.spec import DatasetSpec, Split
from merlin_cowclip.workflows.errors import UserError

_TOP = np.uint64(48)  # a key's lower bits, of which a histogram takes none


class Parts(NamedTuple):
    """What the split found."""

    rows: dict[str, int]  # by part
    positives: dict[str, int]  # rows with label 1, by part
    boundaries: dict[str, str]  # of a split by time: the last time of training, the first of others


def keys_of(start: int, stop: int, seed: int) -> np.ndarray:
    """The keys, uint64, of the rows from ``start`` to ``stop``."""
    numbers = np.random.Philox(key=seed)
    numbers.advance(start // 4)  # it makes four at a time
    return numbers.random_raw(start % 4 + stop - start)[start % 4 :]


def key_cuts(keys: Callable[[], Iterator[np.ndarray]], ranks: Sequence[int]) -> np.ndarray:
    """The keys of these ranks, uint64: so many of all ``keys``, read twice, are lower."""
    counts = np.zeros(1 << 16, np.int64)
    for batch in keys():
        counts += np.bincount((batch >> _TOP).astype(np.int64), minlength=len(counts))
    ends = np.cumsum(counts)
    bucket = np.searchsorted(ends, ranks, "right")
    chosen = np.unique(bucket).astype(np.uint64)
    candidates = np.sort(np.concatenate([b[np.isin(b >> _TOP, chosen)] for b in keys()]))
    first = np.searchsorted(candidates, bucket.astype(np.uint64) << _TOP)
    return candidates[first + ranks - (ends - counts)[bucket]]


def split_rows(scan: Scan, given: Mapping[str, int], seed: int) -> Parts:
    """Set the part of each row.

    ``given`` has the numbers of rows of held-out parts whose files were given: the last of all
    rows, validation rows first. Raises UserError for a part without both labels, and where all
    times are the same.
    """
    spec, split = scan.spec, scan.spec.split
    start = left = scan.rows - sum(given.values())
    divided = [piece for piece in scan.pieces if piece.stop <= start]
    cuts: dict[str, Any] = {}  # rows from there on are in the part, by time, row or key
    if split.kind == "time":
        times = scan.scratch / "times.parquet"
        _count_times(scan, divided, times)
        cuts = time_cuts(split, scan.database, times)
    for part in reversed(HELD_OUT) if split.kind != "time" else ():
        if part not in given and (rest := left - int(left * getattr(split, part) + 0.5)) < left:
            cuts[part] = left = rest
    if split.kind == "random" and cuts:
        keys = key_cuts(lambda: (keys_of(p.start, p.stop, seed) for p in divided), [*cuts.values()])
        cuts = dict(zip(cuts, keys, strict=True))
    parts = Parts(dict.fromkeys(PARTS, 0), dict.fromkeys(PARTS, 0), {})
    ends: dict[str, Any] = {}
    for piece in scan.pieces:
        labels = read_column(piece.path, spec.label).to_numpy()
        place = np.arange(piece.start, piece.stop)
        if split.kind == "time":
            place = as_numbers(read_column(piece.path, TIME))
        elif split.kind == "random":
            place = keys_of(piece.start, piece.stop, seed)
        part_of = parts_of(place, cuts)
        if piece.start >= start:  # of a part that was given
            is_valid = piece.start - start < given.get("valid", 0)
            part_of[:] = PARTS.index("valid" if is_valid else "test")
        scan.part_of[piece.start : piece.stop] = part_of
        for number, part in enumerate(PARTS):
            in_part = part_of == number
            parts.rows[part] += int(np.count_nonzero(in_part))
            parts.positives[part] += int(np.count_nonzero(labels[in_part]))
            if split.kind == "time" and in_part.any():
                end = np.max if part == "train" else np.min
                ends[part] = end([ends.get(part, place[in_part][0]), end(place[in_part])])
    check_labels(spec, parts.rows, parts.positives)
    parts.boundaries.update({part: time_text(ends[part]) for part in PARTS if part in ends})
    return parts


def check_labels(spec: DatasetSpec, rows: Mapping[str, int], positives: Mapping[str, int]) -> None:
    """Raise UserError if a part that must have rows has not both labels."""
    for part, total in rows.items():
        ones = positives[part]
        if not 0 < ones < total and (part == "train" or getattr(spec.split, part)):
            raise UserError(
                f"the {TITLES[part]} part has {total - ones:,} rows with label 0 and {ones:,} with "
                f"label 1, column {spec.label!r}. Both must occur: give more rows, or another seed "
                "or split"
            )


def as_numbers(times: pa.Array) -> np.ndarray:
    """(n,) numbers that sort as times do: timestamps as whole microseconds."""
    return (times.cast(pa.int64()) if pa.types.is_timestamp(times.type) else times).to_numpy()


def _count_times(scan: Scan, pieces: Sequence[Piece], file: Path) -> None:
    """Write the distinct times of each piece and their rows."""
    kinds = [read_column(piece.path, TIME).type for piece in pieces]
    if len({*kinds}) > 1:
        raise mixed_times(scan.spec)
    number = pa.float64() if pa.float64() in kinds else pa.int64()
    schema = pa.schema([("time", number), ("rows", pa.int64())])
    with pq.ParquetWriter(file, schema) as writer:
        for piece in pieces:
            counted = np.unique(as_numbers(read_column(piece.path, TIME)), return_counts=True)
            writer.write_batch(pa.record_batch([*map(pa.array, counted)], schema=schema))


def time_cuts(split: Split, database: duckdb.DuckDBPyConnection, file: Path) -> dict[str, Any]:
    """The times from which on rows are in the test part, and the validation part.

    ``file`` has ``time`` and ``rows``. Parts come as near to their shares as possible. Raises
    UserError if no time divides the rows.
    """
    cuts: dict[str, Any] = {}
    for part in reversed(HELD_OUT):
        share = getattr(split, part)
        if isinstance(share, tuple) or not share:
            continue
        before = min(cuts.values(), default=None)
        row = database.execute(
            """
            with counts as (
                select time, sum(rows) as rows from read_parquet($file)
                where $before is null or time < $before group by time
            ), later as (
                select time, sum(rows) over (order by time desc) as rows,
                    sum(rows) over () as total, count(*) over () as times from counts
            )
            select total::bigint, times, time from later
            order by rows = total, abs(rows - $share * total), time limit 1
            """,
            {"file": str(file), "share": share, "before": before},
        ).fetchone()
        total, distinct, cuts[part] = row or (0, 0, None)
        if distinct < 2:
            raise UserError(
                f"all {total:,} rows to divide have the same time, column {split.column!r}. Choose "
                "another column or split, or a share of 0"
            )
    return cuts


def parts_of(places: np.ndarray, cuts: Mapping[str, Any]) -> np.ndarray:
    """(n,) uint8, the parts of rows by ``cuts`` of their times, rows or keys: test, then valid."""
    parts = np.zeros(len(places), np.uint8)
    for part in reversed([*cuts]):  # the rows of the test part are among the others', too
        parts[places >= cuts[part]] = PARTS.index(part)
    return parts


def time_text(time: Any) -> str:
    """A number, or microseconds since 1970 as a date, to show."""
    if isinstance(time, np.floating):
        return repr(float(time)).removesuffix(".0")
    text = pd.Timestamp(int(time), unit="us").isoformat(sep=" ", timespec="auto")
    return f"{text.removesuffix(':00')} UTC"
