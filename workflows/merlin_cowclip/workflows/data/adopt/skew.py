# SPDX-License-Identifier: Apache-2.0
"""Training-serving skew: does the saved workflow encode the user's raw rows as in the parquet?"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NoReturn

import numpy as np
import pandas as pd
import pyarrow as pa

from merlin_cowclip.workflows.data.adopt.inference import InferenceWorkflow, halves
from merlin_cowclip.workflows.data.adopt.validate import ParquetFile, batches
from merlin_cowclip.workflows.errors import UserError, clipped

ROWS = 10_000  # to compare, spread over all raw rows
BATCH_ROWS = 1 << 16
EXPECTED = 20  # matches in a file by its size; if there are none, it is of another fit


def check_skew(
    inference: InferenceWorkflow,
    raw: Sequence[ParquetFile],
    encoded: Sequence[ParquetFile],
    fields: Sequence[str],
) -> list[str]:
    """Encode raw rows, and look each up among the rows that the workflow wrote, in any order.

    Numbers are compared to 3 digits. The error of rows that are not there names the fields that
    differ. Returns a note if the workflow drops rows.
    """
    given, total = (sum(file.rows for file in files) for files in (raw, encoded))
    step = max(1, given // ROWS)
    rows, taken = _sample(inference, raw, fields, step), -(-given // step)
    sizes = (
        f"the workflow drops {taken - len(rows):,} of {taken:,} checked raw rows; there are "
        f"{given:,} raw rows, {total:,} in the parquet"
    )
    if rows.empty or (len(rows) == taken and given > total):
        raise UserError(f"{sizes}. Write all rows again, or give the raw rows of this parquet")
    views = _views(rows)
    wanted = [_hashes(view(rows)) for view in views]
    found, strange = np.zeros(len(rows), bool), None
    for file in encoded:
        matches = np.zeros(len(rows), bool)
        for _, batch in batches([file], fields, BATCH_ROWS):
            frame = batch.to_pandas()
            for keys, view in zip(wanted, views, strict=True):
                matches |= np.isin(keys, _hashes(view(frame)))
        found |= matches
        if not matches.any() and file.rows * len(rows) / total >= EXPECTED:
            strange = strange or file.path
    if not found.all():
        _refuse(views, rows, rows[~found], encoded)
    if strange:
        raise UserError(
            f"{strange} has none of the {len(rows):,} raw rows that were checked. It may be left "
            "from another fit: remove it. Or give the raw rows of all files"
        )
    return [sizes] if len(rows) < taken else []


def _sample(
    inference: InferenceWorkflow, raw: Sequence[ParquetFile], fields: Sequence[str], step: int
) -> pd.DataFrame:
    """Encode every ``step``-th raw row, in small groups; the index is its number, from 1 on."""
    parts, first = [], 0
    for file in raw:
        names = [name for name in inference.columns if name in file.schema.names]
        for where, batch in batches([file], names, BATCH_ROWS):
            taken = np.arange(-first % step, batch.num_rows, step)
            if len(taken):
                columns = {name: batch.column(name).take(pa.array(taken)) for name in names}
                out = inference.transform(columns, where, may_drop=True)[list(fields)]
                kept = len(out) == len(taken)  # else a Filter dropped some
                if kept:  # of a group that a Filter drops, NVTabular keeps a row
                    groups = [{n: columns[n][part] for n in names} for part in halves(len(taken))]
                    out = pd.concat([inference.transform(group, where) for group in groups])
                    out = out[list(fields)]
                out.index = pd.Index(first + taken + 1 if kept else np.zeros(len(out), int))
                parts.append(out)
            first += batch.num_rows
    return pd.concat(parts)


def _views(rows: pd.DataFrame) -> list[Callable[[pd.DataFrame], pd.DataFrame]]:
    """Functions from encoded rows to what is compared of them.

    Numbers are cut to intervals, because another machine differs in their last digits. Of two
    close numbers at least one of two divisions into intervals has both in one.
    """
    numbers = rows.select_dtypes("floating").astype("float64")
    numbers = numbers.where(np.isfinite(numbers))
    sizes = pd.concat([1e-3 * numbers.std(ddof=0), 1e-5 * numbers.abs().max()], axis=1)
    intervals = sizes.max(axis=1).replace(0, 1).fillna(1).to_dict()

    def view(frame: pd.DataFrame, shift: float) -> pd.DataFrame:
        found = frame[[*rows]].copy()
        for name in found:
            if name in intervals:
                cut = np.floor(found[name].astype("float64") / intervals[name] + shift)
                found[name] = cut + 0.0  # not -0.0
            elif found[name].dtype == object:  # lists
                found[name] = [",".join(map(str, ids)) for ids in found[name]]
            else:
                found[name] = found[name].astype("float64")  # exact for ids
        return found

    return [functools.partial(view, shift=shift) for shift in (0.0, 0.5)]


def _hashes(frame: pd.DataFrame) -> np.ndarray:
    return pd.util.hash_pandas_object(frame, index=False).to_numpy()


def _refuse(
    views: Sequence[Callable[[pd.DataFrame], pd.DataFrame]],
    rows: pd.DataFrame,
    lost: pd.DataFrame,
    encoded: Sequence[ParquetFile],
) -> NoReturn:
    """Tell in which fields the first lost row differs from the most similar one of the parquet."""
    mine, most, found, nearest = lost[:1], -1, "", ""
    for where, batch in batches(encoded, list(rows.columns), BATCH_ROWS):
        frame = batch.to_pandas()
        same = np.any([view(frame) == view(mine).iloc[0] for view in views], axis=0)
        row = int(same.sum(axis=1).argmax())
        if same[row].sum() > most:
            most, nearest = same[row].sum(), where.row(row)
            differ = rows.columns[~same[row]]
            found = ", ".join(f"{n!r} {mine[n].iloc[0]} instead of {frame[n][row]}" for n in differ)
    raise UserError(
        f"{len(lost):,} of {len(rows):,} raw rows are encoded otherwise than in the parquet. Of "
        f"row {mine.index[0]:,} the workflow makes {clipped(found)} as in {nearest}, "
        "which is most similar. Operators must not depend on the other rows of a batch. Or write "
        "the parquet again with this workflow (a frame as Dataset(frame.reset_index(drop=True))), "
        "or give the raw rows that it was written from"
    )
