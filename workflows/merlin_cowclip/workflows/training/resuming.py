"""What has to be as it was for a run to go on, and what may differ with a warning."""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from merlin_cowclip.workflows.data.prepared import PreparedData
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
    place = run / CONFIG
    try:
        record = json.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"a run that goes on must hold its configuration. Received: {place}: {error}. Train "
            "again into another folder"
        ) from None
    missing = [key for key in _KEYS if not isinstance(record, dict) or key not in record]
    if missing:
        raise UserError(
            f"{place} must be as it was written. Received: it without {missing[0]!r}. Train again "
            "into another folder"
        )
    return dict(record)


def leaves_rows_out(record: Mapping[str, Any]) -> bool:
    """Whether the epochs of a run end with the last whole batch: it began on several ranks."""
    return bool(record.get("drop_last", False))


def refuse_last_batch(record: Mapping[str, Any], run: Path, loader: Loader) -> None:
    """Refuse to share the batches of a run of which one is smaller, on several ranks.

    Args:
      record: the run's `config.json`.
      run: its folder.
      loader: of this rank.

    Raises:
      UserError: it began in one process, and its epochs end with such a batch.
    """
    left = loader.rows % loader.batch_size
    if loader.ranks > 1 and left and not leaves_rows_out(record):
        raise UserError(
            "a run that began in one process goes on with several ranks if its batches are equal. "
            f"Received: {run}, whose epochs end with a batch of {left:,} of {loader.batch_size:,} "
            "rows. Go on in one process"
        )


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
        progress = Progress(json.loads((run / RESULT).read_text(encoding="utf-8"))["epochs"])
        early = progress.is_out_of(before.patience)
    except FileNotFoundError:
        return
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        early = False  # it is damaged, and written again
    if early:
        raise UserError(
            f"a run that goes on must not be finished. Received: {run}, which stopped after "
            f"{len(progress.epochs)} epochs, of which the last {before.patience} were not its best "
            "(patience). Train another run with more patience"
        )
    if wanted.epochs == before.epochs:
        raise UserError(
            f"a run that goes on must not be finished. Received: {run}, which has all of its "
            f"{before.epochs} epochs. Raise them: {how_to_resume(run)} --epochs N"
        )


def with_epochs(config: TrainConfig, epochs: int, run: Path) -> TrainConfig:
    """The configuration with more epochs.

    Raises:
      UserError: fewer, or a learning rate that depends on how many there are.
    """
    more = dataclasses.replace(config, epochs=epochs)
    if epochs < config.epochs:
        raise UserError(
            f"epochs of a run can only be raised. Received: {epochs}, and {config.epochs} in "
            f"{run / CONFIG}. Leave them out, or train another run"
        )
    for name in ("dense_schedule", "embedding_schedule"):
        schedule = getattr(config, name)
        if epochs > config.epochs and schedule and schedule.get("epochs", 0) is None:
            raise UserError(
                f"epochs of a run can only be raised where no learning rate depends on them. "
                f"Received: {epochs} instead of {config.epochs}, and {name} "
                f"{schedule['name']!r}, which reaches its end with the last epoch. Train another "
                "run"
            )
    return more


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
    if identity_of(data) != record["data_sha256"]:
        raise UserError(
            f"the data of a run must be what it was when it began. Received: {path}, with other "
            "rows, so that some would be trained on twice and others never. Put the data back, or "
            "train another run"
        )
    _refuse_other_columns(record, data)
    return data


def _refuse_other_columns(record: Mapping[str, Any], data: PreparedData) -> None:
    """Refuse the same rows with another meaning: parquet that was adopted in two ways."""
    for key, found in {**columns_of(data), "cardinalities": data.cardinalities}.items():
        was = record[key]
        if was != found:
            raise UserError(
                f"the data of a run must be what it was when it began. Received: {data.path}, with "
                f"{key} {clipped(repr(found))} instead of {clipped(repr(was))}. Name the data that "
                "the run began with, or train another run"
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
