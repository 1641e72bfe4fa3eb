# SPDX-License-Identifier: Apache-2.0
"""How often ids occur, from the counts of prepared data: why scaling rules fail (Section 3.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from merlin_cowclip.plugins._text import format_table
from merlin_cowclip.plugins.scaling import K
from merlin_cowclip.workflows.data.counts import counts_of_ids
from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.errors import check_whole
from merlin_cowclip.workflows.folders import all_or_nothing
from merlin_cowclip.workflows.progress import progress_bar

BATCH_SIZES = tuple(K * 2**i for i in range(8))  # 1K to 128K
TOP = (1, 3, 10, 100, 1_000, 10_000, 100_000, 1_000_000)
PERCENTS = (50, 90, 99)


@dataclass(frozen=True)
class Frequencies:
    """What `frequencies` wrote: ``summary`` is ``summary.parquet``."""

    path: Path
    summary: pd.DataFrame

    def table(self) -> str:
        """One line per field: ids, coverage, and the share of rare ids by batch size, in percent.

        A share is "-" if the batch exceeds the data. All fields come last.
        """
        sizes = [int(name[5:]) for name in map(str, self.summary) if name.startswith("rare_")]
        lines = []
        for row in self.summary.to_dict("records"):
            rare = [_percent(row[f"rare_{b}"]) if b <= row["rows"] else "-" for b in sizes]
            cells = [f"{row['ids']:,}", _percent(row["top_3"]), f"{row['ids_for_90']:,}"]
            lines.append([row["field"] or "all fields", *cells, *rare])
        header = ["field", "ids", "top 3, %", "ids for 90 %", *map(_short, sizes)]
        return format_table(header, lines)


def frequencies(
    data: PreparedData,
    out: str | Path | None = None,
    *,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    progress: bool = True,
) -> Frequencies:
    """Write how often the ids of every field occur in the training part.

    P(id) = count / rows (Section 3). A missing id is an id, as in the paper. So are all unknown ids
    together, if a threshold makes some of training rows. In a list field every occurrence counts.

    ``summary.parquet`` has one row per field and one, with ``field`` null, for all fields, in which
    the ids of a shared vocabulary count once: ``ids`` (distinct), ``rows``, ``occurrences``,
    ``top_k`` (share of occurrences of the k most frequent ids), ``ids_for_90`` (number of ids with
    90 % of the occurrences), ``rare_B`` (share of ids with P(id) < 1 / B for a batch size B in
    ``batch_sizes``) and ``in_batch_B`` (expected share of ids in a batch: the mean of
    1 - (1 - P(id))^B). It is in ``out``; by default ``frequencies`` in the prepared folder. Raises
    UserError for a bad batch size, bad counts, or if the folder exists.
    """
    out = data.path / "frequencies" if out is None else Path(out)
    for size in batch_sizes:
        check_whole("batch size", size, 1, 1 << 53)  # a float holds it
    sizes, rows = sorted({int(size) for size in batch_sizes}), data.rows["train"]
    with (
        all_or_nothing(out) as folder,
        progress_bar("counting", len(data.spec.ids), " fields", show=progress) as bar,
    ):
        lines = []
        for field in data.spec.ids:
            lines.append(_summary(field, counts_of_ids(data, [field]), rows, sizes))
            bar.update(1)
        by_domain = np.concatenate([counts_of_ids(data, names) for names in data.domains])
        summary = pd.DataFrame([*lines, _summary(None, by_domain, rows, sizes)])
        summary.to_parquet(folder / "summary.parquet", index=False)
    return Frequencies(out, summary)


def _summary(
    field: str | None, counts: np.ndarray, rows: int, batch_sizes: Sequence[int]
) -> dict[str, Any]:
    """One row of ``summary.parquet``."""
    counts = -np.sort(-counts[counts > 0])
    cumulated, n = np.cumsum(counts), len(counts)
    with np.errstate(divide="ignore"):  # log 0 for P = 1
        log_absent = np.log1p(-np.minimum(counts / rows, 1.0))
    return {
        **{"field": field, "ids": n, "rows": rows, "occurrences": int(cumulated[-1])},
        **{f"top_{k}": float(cumulated[min(k, n) - 1] / cumulated[-1]) for k in TOP},
        **{f"ids_for_{p}": int((100 * cumulated < p * cumulated[-1]).sum()) + 1 for p in PERCENTS},
        # count · B < rows, in integers
        **{f"rare_{b}": float((counts <= (rows - 1) // b).mean()) for b in batch_sizes},
        **{f"in_batch_{b}": float(-np.expm1(b * log_absent).mean()) for b in batch_sizes},
    }


def _percent(share: float) -> str:
    return "100" if share > 0.9995 else f"{100 * share:.1f}"


def _short(size: int) -> str:
    return f"{size // K}K" if size % K == 0 else f"{size}"
