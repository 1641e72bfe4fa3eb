"""What has to be as it was for a run to go on, and what may differ with a warning."""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.errors import Notice, UserError, clipped, shown
from merlin_cowclip.workflows.training.configuration import TrainConfig
from merlin_cowclip.workflows.training.epochs import Progress
from merlin_cowclip.workflows.training.keeping import Keeping
from merlin_cowclip.workflows.training.runs import (
    COLUMNS,
    CONFIG,
    RESULT,
    described,
    how_to_resume,
)

if TYPE_CHECKING:
    from merlin_cowclip.workflows.training.loader import Loader

_KEYS = ("data", "data_sha256", "keeping", "precision", "versions", "machine")


def read_config(run: Path) -> dict[str, Any]:
    """A run's `config.json`, finished or not.

    Raises:
      UserError: there is no run, or none that can go on.
    """
    if not os.path.isdir(run):
        raise UserError(
            f"a run must be a folder. Received: {shown(run)}. Make one with 'merlin-cowclip train'."
        )
    try:
        record = dict(json.loads((run / CONFIG).read_text(encoding="utf-8")))
        if missing := [key for key in _KEYS if key not in record]:
            raise ValueError(f"without {missing[0]!r}")
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"a run that goes on must hold its configuration. Received: {run / CONFIG}: {error}. "
            "Train again into another folder"
        ) from None
    return record


def resumed_config(
    record: Mapping[str, Any], run: Path, epochs: int | None
) -> tuple[TrainConfig, Keeping]:
    """What a run trains from now on, by its `config.json`.

    Args:
      record: its content.
      run: the folder.
      epochs: how many to train; `None`: as before.

    Raises:
      UserError: no configuration, fewer epochs, or the run is finished.
    """
    names = [field.name for field in dataclasses.fields(TrainConfig)]
    try:
        before = TrainConfig.from_dict({n: record[n] for n in names if n in record})
        keeping = Keeping.from_dict(record["keeping"])
    except UserError as error:
        raise UserError(f"{run / CONFIG} must be as it was written: {error}") from None
    config = with_epochs(before, epochs, run)
    try:
        done = json.loads((run / RESULT).read_text(encoding="utf-8"))["epochs"]
    except FileNotFoundError:
        return config, keeping
    except (OSError, ValueError, LookupError, TypeError):
        done = []  # it is damaged, and written again
    why = None
    if Progress(done).is_out_of(before.patience):
        why = (
            f"which stopped after {len(done)} epochs, of which the last {before.patience} were "
            "not its best (patience). Train another run with more patience"
        )
    elif config.epochs == before.epochs:
        resume = how_to_resume(run)
        why = f"which has all of its {before.epochs} epochs. Raise them: {resume} --epochs N"
    if why:
        raise UserError(f"a run that goes on must not be finished. Received: {run}, {why}")
    return config, keeping


def with_epochs(config: TrainConfig, epochs: int | None, run: Path) -> TrainConfig:
    """The configuration with more epochs; `None`: as it is.

    Raises:
      UserError: fewer, or a learning rate that depends on how many there are.
    """
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


def reopened(
    before: Mapping[str, Any],
    run: Path,
    moved: str | Path | None,
    config: TrainConfig,
    keeping: Keeping,
) -> tuple[PreparedData, dict[str, Any]]:
    """The data that a run was trained on, where it is now, and the run's new `config.json`.

    Raises:
      UserError: it is not there, or not what it was.
    """
    path = Path(before["data"] if moved is None else moved)
    if not os.path.isdir(path):
        raise UserError(
            f"the data of a run must be there. Received: {path}, which is no folder. If it was "
            f"moved, name its place: {how_to_resume(run, moved=True)}"
        )
    data = PreparedData.open(path)
    now = described(data, config, keeping, drop_last=before.get("drop_last", False))
    for key in ("data_sha256", "cardinalities", *COLUMNS):  # adopted parquet: its columns' meaning
        if before[key] != now[key]:
            raise UserError(
                f"the data of a run must be what it was when it began. Received: {path}, with "
                f"{key} {clipped(repr(now[key]))} instead of {clipped(repr(before[key]))}. Put the "
                "data back, or train another run"
            )
    kept = ("values_from", "warm_start")
    return data, now | {name: before[name] for name in kept if name in before}


def check_last_batch(before: Mapping[str, Any], run: Path, loader: Loader) -> None:
    """Refuse several ranks for a run of one process whose epochs end with a smaller batch."""
    left = loader.rows % loader.batch_size
    if loader.ranks > 1 and left and not before.get("drop_last"):
        raise UserError(
            "a run that began in one process goes on with several ranks if its batches are equal. "
            f"Received: {run}, whose epochs end with a batch of {left:,} of {loader.batch_size:,} "
            "rows. Go on in one process"
        )


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
            f"the run goes on, but not to the last digit as it would have: {', '.join(changes)}",
            Notice,
            stacklevel=3,
        )
