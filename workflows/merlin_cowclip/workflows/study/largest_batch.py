"""The largest batch size that loses nothing: what a tune found, scaled to other sizes."""

from __future__ import annotations

import dataclasses
from typing import Any

from merlin_cowclip.plugins._text import format_table
from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.folders import write_json
from merlin_cowclip.workflows.study.configuration import TuneConfig
from merlin_cowclip.workflows.study.tune import tune
from merlin_cowclip.workflows.study.tuned import Tuned, difference, plus_minus

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
    the tune's own (`batch-16384`), so that a second call resumes the first. Sizes that exceed the
    training rows are left out.

    Args:
      data: what was tuned on.
      tuned: a search that has ended.
      seeds: how often the best are trained again.
      progress: whether to show bars and a line per trial.

    Returns:
      By batch size, rising: `batch_size`, `steps` per epoch, `mean` and `deviation` of the AUC on
      the validation part over `seeds`, `loss` and `loss_deviation` to the best size with the same
      seeds, `values` (the rule, or "search"), `folder` (its tune), and `is_largest`: of the largest
      size within `TOLERANCE` of the best. Also in `largest.json`.
    """
    searched = TuneConfig(**tuned.record["config"])
    own, rows = searched.batch_size, tuned.result["rows"]["train"]
    found = {own: tuned}

    def search(size: int, more: int, why: str = "") -> None:
        base = tuned.train_config()
        config = dataclasses.replace(searched, batch_size=size, base=base, try_rules=_RULES)
        trials, out = config.min_trials + more, tuned.path / f"batch-{size}"
        if progress:
            print(f"\nBatch size {size:,}{why}", flush=True)
        found[size] = tune(data, config, out, trials=trials, seeds=seeds, progress=progress)

    def losing() -> set[int]:
        best = max(map(_mean, found.values()))
        return {size for size, one in found.items() if _mean(one) < best - TOLERANCE}

    for size in (round(own * factor) for factor in _FACTORS):
        if 1 <= size <= rows:
            search(size, 0)
    for size in sorted(losing() - {own}):
        search(size, _SEARCHED_AGAIN, f" loses more than {TOLERANCE:.2%}: more trials")
    best = max(found.values(), key=_mean).result["table"][0]
    largest = max(found.keys() - losing())
    table = [
        {
            "batch_size": size,
            "steps": -(-rows // size),
            **{key: row[key] for key in ("mean", "deviation", "seeds")},
            **dict(zip(("loss", "loss_deviation"), difference(best, row), strict=True)),
            "values": ", ".join(row["rules"]) or "search",
            "folder": str(one.path),
            "is_largest": size == largest,
        }
        for size, one in sorted(found.items())
        for row in one.result["table"][:1]
    ]
    write_json(tuned.path / LARGEST, table)
    return table


def _mean(tuned: Tuned) -> float:
    """Of the best point over its seeds; 0 where it diverged or was not repeated."""
    return float(tuned.result["table"][0]["mean"] or 0.0)


def largest_batch_table(rows: list[dict[str, Any]]) -> str:
    """What `largest_batch` returned, for a person to read."""
    header = ("batch size", "steps/epoch", "validation AUC", "loss", "seeds", "values")
    cells = [
        (
            f"{row['batch_size']:,}",
            f"{row['steps']:,}",
            plus_minus(row["mean"] or 0, row["deviation"]),
            plus_minus(row["loss"], row["loss_deviation"]),
            str(len(row["seeds"])),
            row["values"],
        )
        for row in rows
    ]
    size = next(row["batch_size"] for row in rows if row["is_largest"])
    said = f"Largest batch size within {TOLERANCE:.2%} AUC of the best: {size:,}."
    if size == max(row["batch_size"] for row in rows):
        said += " No larger one was tried."
    return f"{format_table(header, cells)}\n{said}"
