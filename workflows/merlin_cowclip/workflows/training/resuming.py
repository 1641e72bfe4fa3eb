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
from merlin_cowclip.workflows.errors import Notice, UserError, clipped, shown
from merlin_cowclip.workflows.training.configuration import TrainConfig
from merlin_cowclip.workflows.training.epochs import Progress
from merlin_cowclip.workflows.training.runs import (
    CONFIG,
    RESULT,
    columns_of,
    how_to_resume,
    identity_of,
)

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


def config_of(record: Mapping[str, Any], run: Path) -> TrainConfig:
    """The configuration in a run's `config.json`.

    Raises:
      UserError: it holds none.
    """
    names = [field.name for field in dataclasses.fields(TrainConfig)]
    try:
        return TrainConfig.from_dict({n: record[n] for n in names if n in record})
    except UserError as error:
        raise UserError(f"{run / CONFIG} must be as it was written: {error}") from None


def refuse_finished(run: Path, before: TrainConfig, wanted: TrainConfig) -> None:
    """Refuse a finished run that is to have no more epochs, and more for one that stopped early.

    Raises:
      UserError: it is one.
    """
    try:
        epochs = json.loads((run / RESULT).read_text(encoding="utf-8"))["epochs"]
    except FileNotFoundError:
        return
    except (OSError, ValueError, LookupError, TypeError):
        epochs = []  # it is damaged, and written again
    why = None
    if Progress(epochs).is_out_of(before.patience):
        why = (
            f"which stopped after {len(epochs)} epochs, of which the last {before.patience} were "
            "not its best (patience). Train another run with more patience"
        )
    elif wanted.epochs == before.epochs:
        why = (
            f"which has all of its {before.epochs} epochs. Raise them: {how_to_resume(run)} "
            "--epochs N"
        )
    if why:
        raise UserError(f"a run that goes on must not be finished. Received: {run}, {why}")


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


def open_data(record: Mapping[str, Any], run: Path, moved: str | Path | None) -> PreparedData:
    """The data that a run was trained on, where it is now.

    Raises:
      UserError: it is not there, or not what it was.
    """
    path = Path(record["data"] if moved is None else moved)
    if not os.path.isdir(path):
        raise UserError(
            f"the data of a run must be there. Received: {path}, which is no folder. If it was "
            f"moved, name its place: {how_to_resume(run, moved=True)}"
        )
    data = PreparedData.open(path)
    found = {"data_sha256": identity_of(data), "cardinalities": data.cardinalities}
    for key, now in {**found, **columns_of(data)}.items():  # adopted parquet may mean another thing
        if record[key] != now:
            raise UserError(
                f"the data of a run must be what it was when it began. Received: {path}, with "
                f"{key} {clipped(repr(now))} instead of {clipped(repr(record[key]))}. Put the data "
                "back, or train another run"
            )
    return data


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
