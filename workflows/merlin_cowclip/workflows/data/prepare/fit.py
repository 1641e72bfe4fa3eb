# SPDX-License-Identifier: Apache-2.0
"""Statistics of the training rows: vocabularies and counts of ids, ranges of numbers.

Texts are counted by piece, then in all by DuckDB, which sorts on disk what is too large for memory.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from merlin_cowclip.workflows.data.encoder import scale_of
from merlin_cowclip.workflows.data.prepare.columns import Scan, read_column
from merlin_cowclip.workflows.data.prepared_data import WORKFLOW
from merlin_cowclip.workflows.data.spec import DatasetSpec
from merlin_cowclip.workflows.data.vocabulary import (
    BATCH_ROWS,
    MISSING,
    UNKNOWN,
    Vocabulary,
    read_texts,
    vocabulary_file,
    write_vocabulary,
)
from merlin_cowclip.workflows.errors import UserError, clipped

_COUNTED = pa.schema([("text", pa.string()), ("n", pa.int64()), ("field", pa.int16())])
_VALUES = pa.schema([("value", pa.float64()), ("rows", pa.int64())])


class Encoding(NamedTuple):
    """How an earlier `prepare` encoded its fields."""

    spec: DatasetSpec
    ranges: Mapping[str, Sequence[float]]  # by which numbers were scaled, by continuous field
    folder: Path  # the prepared folder or run, with the vocabularies


Report = dict[str, Any]  # of a field


def fit_ids(
    name: str,
    fields: Sequence[str],
    scan: Scan,
    folder: Path,
    like: Encoding | None = None,
    grow: bool = False,
) -> dict[str, Report]:
    """Fit the fields of the vocabulary ``name``, and write it, its index and counts to ``folder``.

    Returns their reports. With ``like``, ids are those of an earlier `prepare`; others get new ones
    behind them if the vocabulary is to ``grow``. Raises UserError if the training rows of a field
    have no id, or all are rarer than the threshold.
    """
    spec = scan.spec
    grow = (grow or like is None) and name not in spec.hash_only
    buckets = spec.buckets_of(fields[0])
    earlier = like and vocabulary_file(like.folder / WORKFLOW, name)
    base = Vocabulary.open(earlier, buckets) if earlier else Vocabulary.empty(buckets)
    counts = {field: np.zeros(base.cardinality, np.int64) for field in fields}
    counted = scan.scratch / f"{name}.counted"
    with pq.ParquetWriter(counted, _COUNTED, compression="lz4") as writer:
        for number, field in enumerate(fields):
            for texts, occurrences, missing in _training_counts(scan, field):
                counts[field][MISSING] += missing
                ids = base.encode(texts)
                is_new = (ids < base.first) & grow
                np.add.at(counts[field], ids[~is_new], occurrences[~is_new])
                new = texts.filter(pa.array(is_new))
                batch = [new, occurrences[is_new], np.full(len(new), number, np.int16)]
                writer.write_batch(pa.record_batch(batch, schema=_COUNTED))
    table = "read_parquet($source)"
    return rank_ids(name, spec, counts, base, scan.database, counted, table, folder, earlier)


def rank_ids(
    name: str,
    spec: DatasetSpec,
    counts: Mapping[str, np.ndarray],
    base: Vocabulary,
    database: duckdb.DuckDBPyConnection,
    counted: Path,
    table: str,
    folder: Path,
    earlier: Path | None = None,
) -> dict[str, Report]:
    """Order the new ids of a vocabulary by count, and write it; returns the report of each field.

    Args:
        name: of the vocabulary.
        spec: what the columns are.
        counts: by field of the vocabulary, the counts of missing ids and of those in ``base``.
        base: the vocabulary that new ids follow.
        database: sorts on disk what is too large for memory.
        counted: a parquet file of new ids, or a folder.
        table: SQL for its columns ``text``, ``n`` and ``field``, a number; it is ``$source``.
        folder: the prepared folder.
        earlier: the file of ``base``, if it has one: then no field needs an id.
    """
    fields, ranked = [*counts], counted.with_name(f"{name}.ranked")
    threshold = max(spec.threshold_of(fields[0]), 1)
    sums = [
        f"coalesce(sum(n) filter (where field = {i}), 0)::bigint as n{i}"
        for i in range(len(fields))
    ]
    _copy(
        database,
        f"select text, sum(n)::bigint as n, {', '.join(sums)} from {table} "
        "group by text order by n desc, text",
        counted,
        ranked,
    )
    distinct = {field: int(np.count_nonzero(counts[field][base.first :])) for field in fields}
    unknown = slice(UNKNOWN, base.first if earlier else UNKNOWN)
    below = {field: int(counts[field][unknown].sum()) for field in fields}
    kept = {field: [counts[field]] for field in fields}
    for batch in _batches(ranked):
        some = int(np.count_nonzero(batch["n"].to_numpy() >= threshold))
        rare = base.encode(batch["text"].slice(some))
        for number, field in enumerate(fields):
            occurrences = batch[f"n{number}"].to_numpy()
            kept[field].append(occurrences[:some])
            np.add.at(counts[field], rare, occurrences[some:])
            distinct[field] += int(np.count_nonzero(occurrences))
            below[field] += int(occurrences[some:].sum())
    known = sum(map(len, kept[fields[0]])) - base.cardinality
    by_id = {field: np.concatenate(parts) for field, parts in kept.items()}
    for field in fields if earlier is None else ():
        if by_id[field].sum() == by_id[field][MISSING]:
            raise all_missing(field, int(by_id[field][MISSING]))
        if not known and name not in spec.hash_only:
            raise UserError(
                f"no id of {field!r} occurs {threshold:,} times in the training rows "
                "(freq_threshold). Lower it, or take the column out"
            )
    old = read_texts(earlier) if earlier else ()
    new = (batch["text"] for batch in _batches(ranked, known))
    write_vocabulary(folder, name, itertools.chain(old, new), by_id, base)
    reports = {}
    for field in fields:
        report: Report = {
            "occurrences": int(by_id[field].sum()),
            "distinct": distinct[field],
            "missing": int(by_id[field][MISSING]),
            "below_threshold": below[field],
            **({"new": known} if earlier else {}),
        }
        reports[field] = report
    return reports


def _training_counts(scan: Scan, field: str) -> Iterator[tuple[pa.Array, np.ndarray, int]]:
    """Texts, how often training rows have each, and how many ids are missing, by piece."""
    for piece in scan.pieces:
        column = read_column(piece.path, field)
        in_train = scan.part_of[piece.start : piece.stop] == 0
        if field in scan.spec.lists:
            in_train = np.repeat(in_train, np.diff(column.offsets.to_numpy()))
            column = column.values
        codes = column.indices.fill_null(len(column.dictionary)).to_numpy()[in_train]
        by_code = np.bincount(codes, minlength=len(column.dictionary) + 1)
        occurs = by_code[:-1] > 0
        yield column.dictionary.filter(pa.array(occurs)), by_code[:-1][occurs], int(by_code[-1])


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


def fit_numbers(
    name: str, scan: Scan, fixed: Sequence[float] | None = None
) -> tuple[Report, Sequence[float]]:
    """The report of a continuous field, and what scales it: ``fixed``, or of training rows."""
    spec, train = scan.spec, functools.partial(_training_numbers, scan, name)
    scale = scale_of(spec, name, fixed or ())
    rows, count, total, low, high = 0, 0, 0.0, math.inf, -math.inf
    with np.errstate(over="ignore", invalid="ignore"):  # `checked_range` refuses what overflows
        for numbers in train():
            known = numbers[~np.isnan(numbers)]
            rows, count, total = rows + len(numbers), count + len(known), total + known.sum()
            low = min(low, float(known.min(initial=math.inf)))
            high = max(high, float(known.max(initial=-math.inf)))
        if not count:
            if not fixed:
                raise all_missing(name, rows)
            low = high = 0.0
        ends: Sequence[float] = checked_range(spec, name, low, high, count < rows, bool(fixed))
        if scale.method == "standardize":
            mean = sum(scale.filled(numbers).sum() for numbers in train()) / rows
            squares = sum(((scale.filled(numbers) - mean) ** 2).sum() for numbers in train())
            ends = _stable(mean), _stable(math.sqrt(squares / rows))
    if scale.method == "quantiles" and not fixed:
        distinct = (np.unique(scale.filled(numbers), return_counts=True) for numbers in train())
        ends = _quantiles(name, scan, distinct, rows)
    report = {
        "occurrences": rows,
        "missing": rows - count,
        "min": low,
        "max": high,
        "mean": _stable(total / max(count, 1)),
    }
    return report, fixed or ends


def _training_numbers(scan: Scan, name: str) -> Iterator[np.ndarray]:
    """The numbers of the training rows, float64, by piece."""
    for piece in scan.pieces:
        column = read_column(piece.path, name).to_numpy(zero_copy_only=False)
        yield column[scan.part_of[piece.start : piece.stop] == 0]


def checked_range(
    spec: DatasetSpec, name: str, low: float, high: float, has_missing: bool, is_fixed: bool = False
) -> tuple[float, float]:
    """The lowest and highest number of a field that are scaled: a missing one counts as 0.

    Raises UserError if they cannot be scaled.
    """
    if name in spec.log1p and low < 0 and not is_fixed:
        raise UserError(f"log1p needs numbers from 0 on. Column {name!r} has {low!r}")
    if not math.isfinite(high - low):
        raise UserError(f"the range of column {name!r} is too large: {low} to {high}. Scale it")
    ends = [low, high, *[0.0] * has_missing]
    first, last = scale_of(spec, name, ()).filled(np.array([min(ends), max(ends)]))
    return float(first), float(last)


def _stable(number: float) -> float:
    """A sum's first 12 digits, which do not depend on where the log is cut."""
    return float(f"{number:.12g}")


def _quantiles(
    name: str, scan: Scan, distinct: Iterable[tuple[np.ndarray, np.ndarray]], rows: int
) -> list[float]:
    """The lowest numbers that k/n of all rows do not exceed, k from 0 to n.

    ``distinct`` are numbers and how often each occurs.
    """
    values, n = scan.scratch / f"{name}.values", scan.spec.quantiles[name]
    with pq.ParquetWriter(values, _VALUES, compression="lz4") as writer:
        for values_and_rows in distinct:
            writer.write_batch(pa.record_batch([*map(pa.array, values_and_rows)], schema=_VALUES))
    ordered = values.with_suffix(".ordered")
    _copy(
        scan.database,
        "select value, sum(rows)::bigint as rows from read_parquet($source) group by value "
        "order by value",
        values,
        ordered,
    )
    targets = np.maximum(-(-np.arange(n + 1) * rows // n), 1)
    quantiles, before = np.zeros(n + 1), 0
    for batch in _batches(ordered):
        upto = before + np.cumsum(batch["rows"].to_numpy())
        reached = (targets > before) & (targets <= upto[-1])
        quantiles[reached] = batch["value"].to_numpy()[np.searchsorted(upto, targets[reached])]
        before = upto[-1]
    return quantiles.tolist()


def _copy(database: duckdb.DuckDBPyConnection, query: str, source: Path, out: Path) -> None:
    """Write the rows of a query of a parquet file, ``$source``, into another."""
    target = str(out).replace("'", "''")
    try:
        database.cursor().execute(
            f"copy ({query}) to '{target}' (format parquet, compression lz4)",
            {"source": str(source)},
        )
    except duckdb.OutOfMemoryException as error:
        raise UserError(f"memory is too small: {clipped(str(error))}. Raise it") from None


def all_missing(name: str, missing: int) -> UserError:
    """The error of a column without a value."""
    return UserError(
        f"column {name!r} has no value in the {missing:,} training rows. Remove it from the "
        "specification"
    )
