# SPDX-License-Identifier: Apache-2.0
"""How often IDs occur, from the counts of prepared data: why scaling rules fail (Section 3.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from merlin_cowclip.plugins._text import format_table
from merlin_cowclip.plugins.scaling import K
from merlin_cowclip.workflows.data.counts import counts_of_ids, read_counts
from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.errors import check_whole
from merlin_cowclip.workflows.folders import all_or_nothing
from merlin_cowclip.workflows.progress import progress_bar

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BATCH_SIZES = tuple(K * 2**i for i in range(8))  # 1K to 128K
TOP = (1, 3, 10, 100, 1_000, 10_000, 100_000, 1_000_000)
PERCENTS = (50, 90, 99)


@dataclass(frozen=True)
class Frequencies:
    """What `frequencies` wrote."""

    path: Path
    summary: pd.DataFrame

    @property
    def rows(self) -> int:
        """Training rows."""
        return int(self.summary["rows"].iloc[0])

    @property
    def batch_sizes(self) -> list[int]:
        """Batch sizes of the summary."""
        return [int(name[5:]) for name in map(str, self.summary) if name.startswith("rare_")]

    def table(self) -> str:
        """One line per field: IDs, coverage, and the share of rare IDs by batch size.

        Shares are in percent; "-" if the batch exceeds the data. All fields come last.
        """
        lines = []
        for row in self.summary.to_dict("records"):
            rare = [_percent(row[f"rare_{b}"]) if b <= self.rows else "-" for b in self.batch_sizes]
            name = "all fields" if row["field"] is None else row["field"]
            held = [f"{row['ids']:,}", _percent(row["top_3"]), f"{row['ids_for_90']:,}"]
            lines.append([name, *held, *rare])
        header = ["field", "ids", "top 3, %", "ids for 90 %", *map(_short, self.batch_sizes)]
        table = format_table(header, lines)
        end = table.index("90 %") + 4
        rest = table.index("\n") - end - 2
        return f"{'of all occurrences':>{end}}  {'rare ids (%) at batch size':>{rest}}\n{table}"


def frequencies(
    data: PreparedData,
    out: str | Path | None = None,
    *,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    fields: Sequence[str] | None = None,
    progress: bool = True,
) -> Frequencies:
    """Write how often the IDs of every field occur in the training split.

    P(id) = count / rows (Section 3). A missing ID is an ID, as in the paper. So are all unknown IDs
    together, if a threshold makes some of training rows. In a list field every occurrence counts.

    ``frequencies.parquet``, by field and descending count: ``field``, ``rank`` (from 1), ``id``,
    ``raw`` (null for missing and unknown), ``count``, ``probability``, ``cumulative`` (share of the
    field's occurrences up to this rank).

    ``summary.parquet``, one row per field and one, with ``field`` null, for all fields, in which
    the IDs of a shared vocabulary count once: ``ids`` (distinct), ``rows``, ``occurrences``,
    ``count_min``, ``count_median``, ``count_mean``, ``count_max``, ``once`` (share of IDs with
    count 1), ``top_k`` (share of occurrences of the k most frequent IDs), ``ids_for_90`` (number of
    IDs with 90 % of the occurrences), ``rare_B`` and ``in_batch_B``.

    ``rare_B`` is the share of IDs with P(id) < 1 / B. Such an ID is in s times as many batches of
    size s·B (equation 1), so its learning rate must not be scaled. ``in_batch_B`` is the expected
    share of IDs in a batch, the mean of 1 - (1 - P(id))^B (Section 3.1).

    ``frequencies.png``: Figure 3 (left), one panel per field.

    Args:
        data: the prepared folder.
        out: the folder to write; ``frequencies`` in the prepared folder if None.
        batch_sizes: B, in samples.
        fields: of the figure; by default those with the fewest, the median and the most IDs.
        progress: show a progress bar on stderr.

    Raises:
        UserError: a bad argument, counts that cannot be read, or the folder exists.
    """
    out = data.path / "frequencies" if out is None else Path(out)
    for size in batch_sizes:
        check_whole("batch size", size, 1, 1 << 53)  # a float holds it
    sizes = sorted({int(size) for size in batch_sizes})
    for field in fields or ():
        data.check_field(field)
    rows = data.rows["train"]
    found: dict[str, pd.Series[int]] = {}
    with all_or_nothing(out) as folder:
        with (
            pq.ParquetWriter(folder / "frequencies.parquet", _LONG) as writer,
            progress_bar("counting", len(data.spec.ids), " fields", show=progress) as bar,
        ):
            for field in data.spec.ids:
                table = read_counts(data, field)
                found[field] = distribution(table["count"].to_numpy())
                writer.write_table(_ranked(table, field, rows))
                bar.update(1)
        lines = [_summary(field, found[field], rows, sizes) for field in data.spec.ids]
        by_domain = pd.concat([distribution(counts_of_ids(data, one)) for one in data.domains])
        lines.append(_summary(None, by_domain.groupby(level=0).sum()[::-1], rows, sizes))
        summary = pd.DataFrame(lines)
        summary.to_parquet(folder / "summary.parquet", index=False)
        by_ids = sorted(found, key=lambda field: int(found[field].sum()))
        panels = fields or dict.fromkeys(by_ids[i] for i in (0, len(by_ids) // 2, -1))
        figure = plot({field: found[field] for field in panels}, rows, sizes)
        figure.savefig(folder / "frequencies.png")
    return Frequencies(out, summary)


def distribution(counts: np.ndarray) -> pd.Series[int]:
    """How many of n IDs have each count, by descending count; zeros are left out."""
    return pd.Series(counts[counts > 0]).value_counts().sort_index(ascending=False)


def plot(
    distributions: Mapping[str, pd.Series[int]], rows: int, batch_sizes: Sequence[int]
) -> Figure:
    """Figure 3 (left): counts by rank; dashed lines at P(id) = 1/B of the least and largest B."""
    from matplotlib.figure import Figure  # without pyplot and its global state
    from matplotlib.ticker import MaxNLocator

    columns = min(3, len(distributions))
    lines = -(-len(distributions) // columns)
    figure = Figure(figsize=(4 * columns, 3 * lines), dpi=150, layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).ravel()
    for panel, (field, ids) in zip(panels, distributions.items(), strict=False):
        counts, edges = ids.index.to_numpy(), np.append(0, np.cumsum(ids))
        # IDs of one count are one step: as exact as a bar per ID, and never many.
        panel.stairs(counts, edges, baseline=0.5, fill=True, color="tab:blue")
        # The first of many IDs are narrower than a pixel: a line shows them.
        panel.step(edges, [*counts, counts[-1]], where="post", color="tab:blue", linewidth=1)
        panel.set(yscale="log", ylim=(0.5, 2 * max(rows, counts[0])))
        panel.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        for size in sorted({min(batch_sizes), max(batch_sizes)}):
            panel.axhline(rows / size, color="tab:red", linestyle="--", linewidth=1)
            place = {"transform": panel.get_yaxis_transform(), "ha": "right", "va": "bottom"}
            text = f"P = 1/{_short(size)}"
            panel.text(0.99, rows / size, text, color="tab:red", clip_on=True, **place)
        panel.set_title(f"{field}: {edges[-1]:,} ids", parse_math=False)
        panel.set(xlabel="id, by falling count", ylabel=f"count in {rows:,} rows")
    for panel in panels[len(distributions) :]:
        panel.set_axis_off()
    return figure


_LONG = pa.schema(
    [
        *(("field", pa.dictionary(pa.int32(), pa.string())), ("rank", pa.int64())),
        *(("id", pa.int64()), ("raw", pa.string()), ("count", pa.int64())),
        *(("probability", pa.float64()), ("cumulative", pa.float64())),
    ]
)


def _ranked(table: pa.Table, field: str, rows: int) -> pa.Table:
    """The rows of ``frequencies.parquet`` of one field."""
    by_count = [("count", "descending"), ("id", "ascending")]
    table = table.filter(pc.greater(table["count"], 0)).sort_by(by_count)
    counts = table["count"].to_numpy()
    held, ranks = np.cumsum(counts), np.arange(1, len(counts) + 1)
    name = pa.DictionaryArray.from_arrays(np.zeros(len(counts), np.int32), [field])
    columns = [name, ranks, *table.select(["id", "raw", "count"]), counts / rows, held / held[-1]]
    return pa.table(columns, schema=_LONG)


def _summary(
    field: str | None, distribution: pd.Series[int], rows: int, batch_sizes: Sequence[int]
) -> dict[str, Any]:
    """One row of ``summary.parquet``."""
    counts, ids = distribution.index.to_numpy(), distribution.to_numpy()
    upto, held = np.append(0, np.cumsum(ids)), np.append(0, np.cumsum(counts * ids))
    n, occurrences = int(upto[-1]), int(held[-1])
    middle = np.searchsorted(upto[1:], [(n - 1) // 2, n // 2], side="right")
    with np.errstate(divide="ignore"):  # log 0 for P = 1
        log_absent = np.log1p(-np.minimum(counts / rows, 1.0))

    def ids_for(percent: int) -> int:
        wanted = -(-percent * occurrences // 100)
        last = int(np.searchsorted(held, wanted))
        return int(upto[last] - (held[last] - wanted) // counts[last - 1])

    return {
        "field": field,
        "ids": n,
        "rows": rows,
        "occurrences": occurrences,
        "count_min": int(counts[-1]),
        "count_median": float(counts[middle].mean()),
        "count_mean": occurrences / n,
        "count_max": int(counts[0]),
        "once": float(ids[counts == 1].sum() / n),
        **{f"top_{k}": float(np.interp(k, upto, held) / occurrences) for k in TOP},
        **{f"ids_for_{percent}": ids_for(percent) for percent in PERCENTS},
        # count · B < rows, in integers
        **{f"rare_{b}": float(ids[counts <= (rows - 1) // b].sum() / n) for b in batch_sizes},
        **{f"in_batch_{b}": float(-np.expm1(b * log_absent) @ ids / n) for b in batch_sizes},
    }


def _percent(share: float) -> str:
    return "100" if share > 0.9995 else f"{100 * share:.1f}"


def _short(size: int) -> str:
    return f"{size // K}K" if size % K == 0 else f"{size}"
