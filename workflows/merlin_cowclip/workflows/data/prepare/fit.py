# SPDX-License-Identifier: Apache-2.0
"""Statistics of the training rows: vocabularies and counts of ids, ranges of numbers.

Texts are counted by piece, then in all by DuckDB, which sorts on disk what is too large for memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from merlin_cowclip.workflows.data.prepare.columns import Scan, read_column
from merlin_cowclip.workflows.data.spec import DatasetSpec
from merlin_cowclip.workflows.data.vocabulary import (
    MISSING,
    Vocabulary,
    read_texts,
    vocabulary_file,
    write_vocabulary,
)
from merlin_cowclip.workflows.errors import UserError

BATCH_ROWS = 1 << 16  # of a vocabulary
_COUNTED = pa.schema([("text", pa.string()), ("n", pa.int64()), ("field", pa.int16())])


class Encoding(NamedTuple):
    """How an earlier `prepare` encoded its fields."""

    spec: DatasetSpec
    ranges: Mapping[str, tuple[float, float]]  # lowest and highest number, by continuous field
    folder: Path  # the prepared folder or run, with the vocabularies


class Fitted(NamedTuple):
    """What encodes a field, and its report."""

    report: dict[str, Any]
    vocabulary: Vocabulary | None = None
    range: tuple[float, float] = (0.0, 0.0)


def fit_ids(
    name: str,
    fields: Sequence[str],
    scan: Scan,
    database: duckdb.DuckDBPyConnection,
    scratch: Path,
    folder: Path,
    like: Encoding | None = None,
    grow: bool = True,
) -> dict[str, Fitted]:
    """Fit the fields of the vocabulary ``name``, and write it, its index and counts to ``folder``.

    With ``like``, ids are those of an earlier `prepare`; others get new ones behind them if the
    vocabulary is to ``grow``. Raises UserError if the training rows of a field have no id, or all
    are rarer than the threshold.
    """
    spec = scan.spec
    buckets, threshold = spec.buckets_of(fields[0]), max(spec.threshold_of(fields[0]), 1)
    earlier = like and vocabulary_file(like.folder, name)
    held = Vocabulary.open(earlier, buckets) if earlier else Vocabulary.empty(buckets)
    counts = {field: np.zeros(held.cardinality, np.int64) for field in fields}
    below = dict.fromkeys(fields, 0)
    counted, ranked = scratch / f"{name}.counted", scratch / f"{name}.ranked"
    with pq.ParquetWriter(counted, _COUNTED, compression="lz4") as writer:
        for number, field in enumerate(fields):
            for texts, found, missing in _training_counts(scan, field):
                counts[field][MISSING] += missing
                ids = held.encode(texts)
                is_new = (ids < held.first) & grow
                np.add.at(counts[field], ids[~is_new], found[~is_new])
                below[field] += int(found[(ids < held.first) & ~is_new].sum())
                new = texts.filter(pa.array(is_new))
                batch = [new, found[is_new], np.full(len(new), number, np.int16)]
                writer.write_batch(pa.record_batch(batch, schema=_COUNTED))
    sums = [
        f"coalesce(sum(n) filter (where field = {i}), 0)::bigint as n{i}"
        for i in range(len(fields))
    ]
    target = str(ranked).replace("'", "''")
    database.cursor().execute(
        f"""
        copy (select text, sum(n)::bigint as n, {", ".join(sums)} from read_parquet($source)
            group by text order by n desc, text)
        to '{target}' (format parquet, compression lz4)
        """,
        {"source": str(counted)},
    )
    distinct = {field: int(np.count_nonzero(counts[field][held.first :])) for field in fields}
    kept = {field: [counts[field]] for field in fields}
    for batch in _batches(ranked):
        some = int(np.count_nonzero(batch["n"].to_numpy() >= threshold))
        rare = held.encode(batch["text"].slice(some))
        for number, field in enumerate(fields):
            found = batch[f"n{number}"].to_numpy()
            kept[field].append(found[:some])
            np.add.at(counts[field], rare, found[some:])
            distinct[field] += int(np.count_nonzero(found))
            below[field] += int(found[some:].sum())
    known = sum(map(len, kept[fields[0]])) - held.cardinality
    by_id = {field: np.concatenate(parts) for field, parts in kept.items()}
    for field in fields if like is None and grow else ():
        _check_some(field, by_id[field], distinct[field], known, threshold)
    old = read_texts(earlier) if earlier else ()
    new = (batch["text"] for batch in _batches(ranked, known))
    vocabulary = write_vocabulary(folder, name, itertools.chain(old, new), by_id, held)
    return {
        field: Fitted(
            {
                "occurrences": int(by_id[field].sum()),
                "distinct": distinct[field],
                "missing": int(by_id[field][MISSING]),
                "below_threshold": below[field],
            },
            vocabulary,
        )
        for field in fields
    }


def _training_counts(scan: Scan, field: str) -> Iterator[tuple[pa.Array, np.ndarray, int]]:
    """Texts, how often training rows have each, and how many ids are missing, by piece."""
    for piece in scan.pieces:
        column = read_column(piece.path, field)
        in_train = scan.part_of[piece.start : piece.stop] == 0
        if field in scan.spec.lists:
            in_train = np.repeat(in_train, np.diff(column.offsets.to_numpy()))
            column = column.values
        codes = column.indices.fill_null(len(column.dictionary)).to_numpy()[in_train]
        found = np.bincount(codes, minlength=len(column.dictionary) + 1)
        occurs = found[:-1] > 0
        yield column.dictionary.filter(pa.array(occurs)), found[:-1][occurs], int(found[-1])


def _batches(ranked: Path, rows: int | None = None) -> Iterator[pa.RecordBatch]:
    """The first ``rows`` of the ranked texts, or all."""
    left = rows
    with pq.ParquetFile(ranked) as file:
        for batch in file.iter_batches(BATCH_ROWS) if file.num_row_groups else ():
            batch = batch if left is None else batch.slice(0, left)
            if not len(batch):
                return
            left = None if left is None else left - len(batch)
            yield batch


def _check_some(field: str, counts: np.ndarray, distinct: int, known: int, threshold: int) -> None:
    if not distinct:
        raise _all_missing(field, int(counts[MISSING]))
    if not known:
        raise UserError(
            f"no id of {field!r} occurs {threshold:,} times in the training rows (freq_threshold). "
            "Lower it, or take the column out"
        )


def fit_numbers(name: str, scan: Scan, fixed: tuple[float, float] | None = None) -> Fitted:
    """The report of a continuous field, and its range: ``fixed``, or of the training rows."""
    held = missing = 0
    total, ends = 0.0, [np.inf, -np.inf]
    for piece in scan.pieces:
        column = read_column(piece.path, name).to_numpy(zero_copy_only=False)
        train = column[scan.part_of[piece.start : piece.stop] == 0]
        numbers = train[~np.isnan(train)]
        missing += len(train) - len(numbers)
        if len(numbers):
            held, total = held + len(numbers), total + float(numbers.sum())
            ends = [min(ends[0], float(numbers.min())), max(ends[1], float(numbers.max()))]
    if not held:
        if fixed is None:
            raise _all_missing(name, missing)
        held, ends = 1, [0.0, 0.0]
    filled = [*ends, 0.0] if missing else ends  # a missing number counts as 0
    low, high = fixed or (min(filled), max(filled))
    if not np.isfinite(np.subtract(high, low)):
        raise UserError(f"the range of column {name!r} is too large: {low} to {high}. Scale it")
    report = {"occurrences": held + missing, "missing": missing, "min": ends[0], "max": ends[1]}
    return Fitted({**report, "mean": float(f"{total / held:.12g}")}, range=(low, high))


def _all_missing(name: str, missing: int) -> UserError:
    return UserError(
        f"column {name!r} has no value in the {missing:,} training rows. Take it out of the "
        "specification"
    )
