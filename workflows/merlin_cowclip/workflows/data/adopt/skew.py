"""Training-serving skew: does the saved workflow encode the user's raw rows as in the parquet?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import numpy as np
import pandas as pd
import pyarrow as pa

from merlin_cowclip.workflows.data.adopt.inference import InferenceWorkflow
from merlin_cowclip.workflows.data.adopt.parquet_files import ParquetFile
from merlin_cowclip.workflows.data.adopt.validate import batches
from merlin_cowclip.workflows.errors import UserError, clipped

ROWS = 10_000  # to compare, spread over all raw rows
BATCH_ROWS = 1 << 16
EXPECTED = 20  # matches in a file by its size; if there are none, it is of another fit
_AGAIN = (
    "Write the parquet again with this workflow; where a frame is given to it, as "
    "Dataset(frame.reset_index(drop=True))"
)


def check_skew(
    inference: InferenceWorkflow,
    raw: Sequence[ParquetFile],
    encoded: Sequence[ParquetFile],
    fields: Sequence[str],
    numbers: Sequence[str] = (),
) -> None:
    """Encode raw rows, and look each up among the rows that the workflow wrote, in any order.

    Of ``fields``, ``numbers`` are compared to 3 digits. The error of rows that are not there names
    the fields that differ.
    """
    rows = _sample(inference, raw, fields)
    hashing = _Hashes(rows, fields, numbers)
    wanted = [hashing(rows, shift).sum(axis=1) for shift in hashing.shifts]
    found = np.zeros(len(rows), bool)
    total = sum(file.rows for file in encoded)
    whole = len(rows) == total  # the raw rows of all: no other may be there
    strange, extra = None, ""
    for file in encoded:
        has_any = False
        for where, batch in batches([file], fields, BATCH_ROWS):
            frame, known = batch.to_pandas(), np.zeros(batch.num_rows, bool)
            for keys, shift in zip(wanted, hashing.shifts, strict=True):
                others = hashing(frame, shift).sum(axis=1)
                found |= np.isin(keys, others)
                known |= np.isin(others, keys)
            has_any |= bool(known.any())
            if whole and not known.all():
                extra = extra or where.row(int(known.argmin()))
            if has_any and found.all() and not whole:
                break
        if not has_any and file.rows * len(rows) / total >= EXPECTED:
            strange = strange or file.path
    if not found.all():
        _refuse(hashing, rows, rows[~found], encoded)
    if strange:
        raise UserError(
            f"{strange} has none of the {len(rows):,} raw rows that were checked. It may be left "
            "from another fit: remove it. Or give the raw rows of all files"
        )
    if extra:
        raise UserError(f"no raw row is encoded as {extra}. {_AGAIN}")


def _sample(
    inference: InferenceWorkflow, raw: Sequence[ParquetFile], fields: Sequence[str]
) -> pd.DataFrame:
    """Encode about every n-th raw row; the index is its number, from 1 on."""
    step = max(1, sum(file.rows for file in raw) // ROWS)
    parts, first = [], 0
    for file in raw:
        names = [name for name in inference.columns if name in file.schema.names]
        for where, batch in batches([file], names, BATCH_ROWS):
            taken = np.arange(-first % step, batch.num_rows, step)
            if len(taken):
                columns = {name: batch.column(name).take(pa.array(taken)) for name in names}
                out = inference.encode(columns, where)[list(fields)]
                kept = len(out) == len(taken)  # else a Filter dropped some
                out.index = pd.Index(first + taken + 1 if kept else np.zeros(len(out), int))
                parts.append(out)
            first += batch.num_rows
    return pd.concat(parts)


class _Hashes:
    """A hash of each value, n×F uint64; the sum of a row is the row's.

    Numbers are cut to intervals, because another machine differs in their last digits. Of two
    close numbers at least one ``shift`` of the intervals has both in one.
    """

    def __init__(self, rows: pd.DataFrame, fields: Sequence[str], numbers: Sequence[str]) -> None:
        self.fields = list(fields)
        self.shifts = (0.0, 0.5) if numbers else (0.0,)
        self._interval = {}
        for name in numbers:
            values = rows[name].to_numpy(np.float64)
            size = np.nanmax(np.abs(values)) if np.isfinite(values).any() else 0
            self._interval[name] = max(1e-3 * float(np.nanstd(values)), 1e-5 * float(size)) or 1.0

    def __call__(self, frame: pd.DataFrame, shift: float) -> np.ndarray:
        found = np.empty((len(frame), len(self.fields)), np.uint64)
        for place, name in enumerate(self.fields):
            values = frame[name]
            if name in self._interval:
                numbers = values.to_numpy(np.float64) / self._interval[name]
                values = pd.Series(np.floor(numbers + shift) + 0.0)
            elif values.dtype == object:  # lists
                values = pd.Series([",".join(map(str, ids)) for ids in values], dtype=object)
            else:
                values = values.fillna(-1).astype("int64")
            hashed = pd.util.hash_pandas_object(values, index=False).to_numpy()
            found[:, place] = hashed * np.uint64(2 * place + 1)  # of which field it is
        return found


def _refuse(
    hashing: _Hashes, rows: pd.DataFrame, lost: pd.DataFrame, encoded: Sequence[ParquetFile]
) -> NoReturn:
    """Tell in which fields the first lost row differs from the most similar one of the parquet."""
    mine, most, nearest, found = lost[:1], -1, "", []
    for where, batch in batches(encoded, hashing.fields, BATCH_ROWS):
        frame = batch.to_pandas()
        same = np.any([hashing(frame, s) == hashing(mine, s) for s in hashing.shifts], axis=0)
        row = int(same.sum(axis=1).argmax())
        if same[row].sum() > most:
            most, nearest = same[row].sum(), where.row(row)
            found = [
                f"{name!r} {mine[name].iloc[0]} instead of {frame[name][row]}"
                for name, is_same in zip(hashing.fields, same[row], strict=True)
                if not is_same
            ]
    raise UserError(
        f"{len(lost):,} of {len(rows):,} raw rows are encoded otherwise than in the parquet. Of "
        f"row {mine.index[0]:,} the workflow makes {clipped(', '.join(found))} as in {nearest}, "
        f"which is most similar. {_AGAIN}. Or give the raw rows that it was written from"
    )
