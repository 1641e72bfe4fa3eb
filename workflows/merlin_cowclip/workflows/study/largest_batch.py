"""The largest batch size that loses nothing: what a tune found, scaled to other sizes."""

from __future__ import annotations

import dataclasses
from typing import Any

from merlin_cowclip.plugins._text import format_table
from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.folders import write_json
from merlin_cowclip.workflows.study.configuration import TuneConfig
from merlin_cowclip.workflows.study.tune import tune
from merlin_cowclip.workflows.study.tuned import Tuned

LARGEST = "largest.json"
TOLERANCE = 5e-4
"""AUC that a batch size may lose to the best one."""
_FACTORS = (0.25, 2, 4)
_RULES = ("sqrt", "none")
_SEARCHED_AGAIN = 8  # trials


def largest_batch(
    data: PreparedData, tuned: Tuned, *, seeds: int = 3, progress: bool = True
) -> list[dict[str, Any]]:
    """Try what a tune found at a quarter of its batch size, twice and four times it.

    The values are scaled by √-scaling and left as they are. Where both lose more than `TOLERANCE`
    to the best of all sizes, values are searched again there. Each size is a tune in a folder of
    the tune's own (`batch-16384`), so that a second call resumes the first.

    Returns:
      By batch size, rising: `batch_size`, `steps` per epoch, `mean` and `deviation` of the AUC on
      the held-out rows over `seeds` seeds, `searched` (whether again), and `is_largest`: of the
      largest size within `TOLERANCE` of the best. Also in `largest.json`.
    """
    searched = TuneConfig.from_dict(tuned.record["config"])
    found = {searched.batch_size: tuned}
    configs = {
        size: dataclasses.replace(
            searched, batch_size=size, base=tuned.train_config(), try_rules=_RULES
        )
        for size in (round(searched.batch_size * factor) for factor in _FACTORS)
    }

    def search(size: int, trials: int) -> None:
        config = configs[size]
        if progress:
            print(f"\nBatch size {size:,}", flush=True)
        found[size] = tune(
            data,
            config,
            tuned.path / f"batch-{size}",
            trials=len(config.starts) + trials,
            seeds=seeds,
            progress=progress,
        )

    def losing() -> list[int]:
        best = max(map(_mean, found.values()))
        return [size for size, one in found.items() if _mean(one) < best - TOLERANCE]

    for size in configs:
        search(size, 0)
    again = [size for size in losing() if size in configs]
    for size in again:
        search(size, _SEARCHED_AGAIN)
    largest = max(found.keys() - losing())
    rows = [
        {
            "batch_size": size,
            "steps": one.result["rows"]["train"] // size,
            **{key: one.result["table"][0][key] for key in ("mean", "deviation", "seeds")},
            "searched": size in again or one is tuned,
            "is_largest": size == largest,
        }
        for size, one in sorted(found.items())
    ]
    write_json(tuned.path / LARGEST, rows)
    return rows


def _mean(tuned: Tuned) -> float:
    """Of the best point over its seeds; 0 where it diverged or was not repeated."""
    return float(tuned.result["table"][0]["mean"] or 0.0)


def largest_batch_table(rows: list[dict[str, Any]]) -> str:
    """What `largest_batch` returned, for a person to read."""
    header = ("batch size", "steps/epoch", "held-out AUC", "±", "seeds", "values")
    cells = [
        (
            f"{row['batch_size']:,}",
            f"{row['steps']:,}",
            f"{row['mean'] or 0:.5f}",
            f"{row['deviation'] or 0:.5f}",
            str(len(row["seeds"])),
            "searched" if row["searched"] else "scaled",
        )
        for row in rows
    ]
    size = next(row["batch_size"] for row in rows if row["is_largest"])
    said = f"Largest batch size within {TOLERANCE:.2%} AUC of the best: {size:,}."
    if size == max(row["batch_size"] for row in rows):
        said += " No larger one was tried."
    return f"{format_table(header, cells)}\n{said}"
