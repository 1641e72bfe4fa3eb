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
from merlin_cowclip.workflows.study.pages import Cell, Section, Table

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
    fields = found.summary.dropna(subset="field").set_index("field")["ids"].to_dict()
    wanted = sorted({int(rank) for rank in np.geomspace(1, max(fields.values()), _POINTS).round()})
    table = ds.dataset(out / FOLDER / TABLE).to_table(
        columns=["field", "rank", "count"], filter=ds.field("rank").isin(wanted)
    )
    lines = {
        field: [
            (float(rank), float(n), 0.0) for rank, n in zip(of["rank"], of["count"], strict=True)
        ]
        for field, of in table.to_pandas().groupby("field")
        if field in few_middle_most(fields)
    }
    plot = line_plot(
        lines,
        "rank of the id",
        f"occurrences in {found.rows:,} rows",
        logarithmic=True,
        logarithmic_x=True,
    )
    told = [(share, size) for share, size in zip(rows[-1][4:], sizes, strict=True) if share != "-"]
    rare = [Cell(f"rare at {size:,}, %") for size in sizes]
    files = [[Cell(name, f"{FOLDER}/{name}")] for name in (SUMMARY, TABLE)]
    return Section(
        NAME,
        record["title"],
        record["paper"],
        f"{told[-1][0]} % of all ids occur less than once in a batch of {told[-1][1]:,}."
        if told
        else "All batches are larger than the data.",
        tables=[
            Table(["field", "ids", "top 3, %", "ids for 90 %", *rare], rows),
            Table(["all of it"], files, words=True),
        ],
        notes=[
            "Top 3: the share of a field's occurrences that its three most frequent ids have. Ids "
            "for 90 %: how many of the most frequent ids have that share. Rare: P(id) < 1/batch "
            "size."
        ],
        plots=[("how often ids occur, by rank", plot)],
        command=record["command"],
    )
