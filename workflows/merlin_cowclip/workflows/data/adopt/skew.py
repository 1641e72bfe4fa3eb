# SPDX-License-Identifier: Apache-2.0
"""Training-serving skew: does the saved workflow encode the user's raw rows as in the parquet?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import pyarrow as pa

from merlin_cowclip.workflows.data.adopt.inference import InferenceWorkflow, halves
from merlin_cowclip.workflows.data.adopt.validate import InputFile, batches
from merlin_cowclip.workflows.errors import UserError, clipped

ROWS = 10_000  # to compare, spread over all raw rows
BATCH_ROWS = 1 << 16
SHIFTS = (0.0, 0.5)


def check_skew(
    inference: InferenceWorkflow,
    raw: Sequence[InputFile],
    encoded: Sequence[InputFile],
    fields: Sequence[str],
) -> list[str]:
    """Encode raw rows, and look each up among the rows that the workflow wrote, in any order.

    Numbers are compared to 3 digits. Raises UserError if a row is not there. Returns a note if the
    workflow drops rows.
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
    # Another machine differs in a number's last digits. Of two close numbers at least one of two
    # divisions into intervals has both in one.
    numbers = rows.select_dtypes("floating").astype("float64").where(np.isfinite)
    ends = pd.concat([1e-3 * numbers.std(ddof=0), 1e-5 * numbers.abs().max()], axis=1)
    widths = ends.max(axis=1).replace(0, 1).fillna(1).to_dict()
    wanted = [_hashes(rows, widths, shift) for shift in SHIFTS]
    same = np.zeros(len(rows), bool)
    for _, batch in batches(encoded, fields, BATCH_ROWS):
        frame = batch.to_pandas()
        for keys, shift in zip(wanted, SHIFTS, strict=True):
            same |= np.isin(keys, _hashes(frame, widths, shift))
    if same.all():
        return [sizes] if len(rows) < taken else []
    first = rows[~same].iloc[0]
    raise UserError(
        f"{(~same).sum():,} of {len(rows):,} raw rows are encoded otherwise than in the parquet, "
        f"first row {first.name:,}: {clipped(str(first.to_dict()))}. Operators must not depend on "
        "the other rows of a batch. Or write the parquet again with this workflow (a frame as "
        "Dataset(frame.reset_index(drop=True))), or give the raw rows that it was written from"
    )


def _sample(
    inference: InferenceWorkflow, raw: Sequence[InputFile], fields: Sequence[str], step: int
) -> pd.DataFrame:
    """Encode every ``step``-th raw row, in small groups; the index is its number, from 1 on."""
    encoded, first = [], 0
    for file in raw:
        names = [name for name in inference.columns if name in file.schema.names]
        for where, batch in batches([file], names, BATCH_ROWS):
            taken = np.arange(-first % step, batch.num_rows, step)
            columns = {name: batch.column(name).take(pa.array(taken)) for name in names}
            out = inference.transform(columns, where, may_drop=True) if len(taken) else None
            if out is not None and len(out) == len(taken):  # else a Filter dropped some
                # Of a group that a Filter drops, NVTabular keeps a row.
                groups = [{n: columns[n][part] for n in names} for part in halves(len(taken))]
                out = pd.concat([inference.transform(group, where) for group in groups])
                out.index = pd.Index(first + taken + 1)
            first += batch.num_rows
            encoded += [] if out is None else [out[list(fields)]]
    return pd.concat(encoded)


def _cut(rows: pd.DataFrame, widths: Mapping[str, float], shift: float) -> pd.DataFrame:
    """What is compared of encoded rows: numbers as intervals, lists as texts, exact ids."""
    cells = rows.copy()
    for name in map(str, rows):
        column = rows[name]
        if name in widths:
            cells[name] = np.floor(column.astype("float64") / widths[name] + shift) + 0.0  # not -0
        elif column.dtype == object:
            cells[name] = [",".join(map(str, ids)) for ids in column]
        else:
            cells[name] = column.astype("float64")  # exact for ids
    return cells


def _hashes(rows: pd.DataFrame, widths: Mapping[str, float], shift: float) -> np.ndarray:
    return pd.util.hash_pandas_object(_cut(rows, widths, shift), index=False).to_numpy()
