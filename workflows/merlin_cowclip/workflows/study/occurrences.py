"""The study of how often ids occur (Figure 3, left): of the data alone, nothing is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.dataset as ds

from merlin_cowclip.workflows.data.frequencies import (
    SUMMARY,
    TABLE,
    Frequencies,
    few_middle_most,
    frequencies,
)
from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.folders import remove
from merlin_cowclip.workflows.study.pages import Section

NAME = FOLDER = "frequencies"  # of the study, and of its folder in a sweep's
_POINTS = 60  # of a line, at ranks that are as far apart on a logarithmic axis


def count(data: PreparedData, out: Path, sizes: Sequence[int], *, progress: bool) -> str:
    """Count into `OUT/frequencies`, anew, as the batch sizes may be others; returns a table."""
    remove(out / FOLDER)
    return frequencies(data, out / FOLDER, batch_sizes=sizes, progress=progress).table()


def section(out: Path, record: Mapping[str, Any]) -> Section | None:
    """What a report says of it; `None` where the sweep was ended before all was counted."""
    from merlin_cowclip.workflows.study.plots import line_plot

    try:
        found = Frequencies.open(out / FOLDER)
    except FileNotFoundError:
        return None
    sizes, rows = found.batch_sizes, found.lines()
    fields = found.summary.dropna(subset="field").set_index("field")["ids"]
    figure = line_plot(
        _lines(out, few_middle_most(fields.to_dict()), int(fields.max())),
        "rank of the id",
        f"occurrences in {found.rows:,} rows",
        logarithmic=True,
        logarithmic_x=True,
    )
    told = [(share, size) for share, size in zip(rows[-1][4:], sizes, strict=True) if share != "-"]
    ends = dict.fromkeys([*told[:1], *told[-1:]])
    shares = (f"{share} % are rarer than one in a batch of {size:,}" for share, size in ends)
    verdict = f"Of all ids {', '.join(shares)}" if told else "All batches are larger than the data"
    return Section(
        record["title"],
        record["paper"],
        verdict + ".",
        ["field", "ids", "top 3, %", "ids for 90 %", *(f"rare at {size:,}, %" for size in sizes)],
        rows,
        [
            "Top 3: the share of a field's occurrences that its three most frequent ids hold. "
            "Ids for 90 %: as many of the most frequent ones hold that much. Rare: with "
            "P(id) < 1/batch size; such an id is in s times as many batches of s times the size.",
            f"All of it: [{FOLDER}/{SUMMARY}]({FOLDER}/{SUMMARY}), by id "
            f"[{FOLDER}/{TABLE}]({FOLDER}/{TABLE}).",
        ],
        [("how often ids occur, by rank", figure)],
        record["command"],
    )


def _lines(
    out: Path, fields: Sequence[str], ids: int
) -> dict[str, list[tuple[float, float, float]]]:
    """By field the counts of its ids, from the most frequent one to the rarest."""
    wanted = sorted({int(rank) for rank in np.geomspace(1, ids, _POINTS).round()})
    found = (
        ds.dataset(out / FOLDER / TABLE)
        .to_table(columns=["field", "rank", "count"], filter=ds.field("rank").isin(wanted))
        .to_pandas()
    )
    return {
        field: [
            (float(rank), float(n), 0.0) for rank, n in zip(of["rank"], of["count"], strict=True)
        ]
        for field in fields
        if len(of := found[found["field"] == field])
    }
