"""What has to be as it was for a run to go on, and what may differ with a warning."""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.errors import Notice, UserError, clipped
from merlin_cowclip.workflows.folders import refuse_pattern
from merlin_cowclip.workflows.training.configuration import TrainConfig
from merlin_cowclip.workflows.training.keeping import Keeping
from merlin_cowclip.workflows.training.ranks import here
from merlin_cowclip.workflows.training.runs import (
    COLUMNS,
    CONFIG,
    RESULT,
    config_in,
    described,
    how_to_resume,
)


def read_config(run: Path) -> dict[str, Any]:
    """A run's `config.json`, finished or not; refuses what is no run."""
    refuse_pattern(run, "run")
    try:
        return dict(json.loads((run / CONFIG).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"a run to resume must have its configuration. Received: {run / CONFIG}: "
            f"{clipped(str(error))}. Train again into another folder"
        ) from None


def reopened(
    before: Mapping[str, Any], run: Path, moved: str | Path | None, epochs: int | None, jobs: int
) -> tuple[TrainConfig, PreparedData, dict[str, Any]]:
    """What a run trains from now on, on its data where they are now; and its new `config.json`.

    Args:
      before: its `config.json`.
      run: the folder.
      moved: where the data are, if they have moved.
      epochs: how many to train; `None`: as before.
      jobs: as of `train`.
    """
    was = config_in(before)
    config = with_epochs(was, epochs, run)
    if (run / RESULT).exists() and config == was:
        raise UserError(
            f"a run to resume must not be finished. Received: {run}, which has all of its epochs. "
            f"Raise them: {how_to_resume(run)} --epochs N"
        )
    path = Path(before["data"] if moved is None else moved)
    if not os.path.isdir(path):
        raise UserError(
            f"the data of a run must be there. Received: {path}, which is no folder. If it was "
            f"moved, name its place: {how_to_resume(run, moved=True)}"
        )
    data, dropped = PreparedData.open(path), before.get("drop_last", False)
    now = described(data, config, Keeping(**before["keeping"]), drop_last=dropped)
    for key in ("data_sha256", "cardinalities", *COLUMNS):  # adopted parquet: its columns' meaning
        if before[key] != now[key]:
            raise UserError(
                f"the data of a run must be what it was when it began. Received: {path}, with "
                f"{key} {clipped(repr(now[key]))} instead of {clipped(repr(before[key]))}. Put the "
                "data back, or train another run"
            )
    left = data.rows["train"] % config.batch_size
    if here().size > 1 and left and not dropped:
        raise UserError(
            "a run of one process resumes on several ranks if its batches are equal. "
            f"Received: {run}, whose epochs end with a batch of {left:,} of {config.batch_size:,} "
            "rows. Resume in one process"
        )
    now |= {"warm_start": before["warm_start"]} if "warm_start" in before else {}
    most = max(jobs, before.get("jobs", 1))
    return config, data, now | ({"jobs": most} if most > 1 else {})


def with_epochs(config: TrainConfig, epochs: int | None, run: Path) -> TrainConfig:
    """The configuration with more epochs; `None`: as it is."""
    if epochs is None or epochs == config.epochs:
        return config
    names = ("dense_schedule", "embedding_schedule")
    falling = [n for n in names if (getattr(config, n) or {}).get("epochs", 0) is None]
    if epochs < config.epochs or falling:
        why = f", and {falling[0]} ends with the last epoch" if falling else ""
        raise UserError(
            "epochs of a run can only be raised, and only where no learning rate depends on them. "
            f"Received: {epochs}, for {config.epochs} in {run / CONFIG}{why}. Leave them out, or "
            "train another run"
        )
    return dataclasses.replace(config, epochs=epochs)


def warn_of_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Warn of other versions and another machine, with which the last digits may differ."""
    changes = [
        f"{name} {now[kind].get(name)} instead of {was}"
        for kind in ("versions", "machine")
        for name, was in before[kind].items()
        if now[kind].get(name) != was
    ]
    if changes:
        warnings.warn(
            f"the run resumes, but the result will not be bit-identical: {', '.join(changes)}",
            Notice,
            stacklevel=3,
        )
