"""Points trained again from other seeds, as `train` will: how much of a difference is chance."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.folders import write_json
from merlin_cowclip.workflows.study.claims import Claims
from merlin_cowclip.workflows.study.trials import DivergedError, Epoch, epochs_of
from merlin_cowclip.workflows.training.configuration import TrainConfig
from merlin_cowclip.workflows.training.stopping import Stopping


@dataclass(frozen=True)
class Repeat:
    """One training from one seed.

    Attributes:
      seed: of weights and order.
      epochs: all that were to be trained, unless it diverged.
      why: how it diverged, or `None`.
    """

    seed: int
    epochs: tuple[Epoch, ...]
    why: str | None

    @property
    def auc(self) -> float | None:
        """After the last epoch, `None` if it diverged: none is chosen by the rows it is of."""
        return None if self.why else self.epochs[-1].auc


class Repeats:
    """The repeats in a tune's folder: each is a file, written once it has ended.

    Args:
      folder: where they lie; is made.
      claims: of the tune.
      rows: what they train on.
    """

    def __init__(self, folder: Path, claims: Claims, rows: PreparedData) -> None:
        self._folder = folder
        self._claims = claims
        self._rows = rows
        folder.mkdir(exist_ok=True)

    def read(self, config: TrainConfig) -> Repeat | None:
        """A repeat that has ended, or `None`."""
        try:
            found = json.loads(self._path(config).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return Repeat(found["seed"], tuple(Epoch(**e) for e in found["epochs"]), found["why"])

    def train(
        self, config: TrainConfig, stopping: Stopping, advance: Callable[[], Any]
    ) -> Repeat | None:
        """Train one that has not ended; `None` if another process is at it.

        Raises:
          Interrupted: it was asked to stop; the repeat begins again another time.
        """
        claim = self._claims.take(f"repeat-{_name(config)}")
        if claim is None:
            return None
        try:
            if (done := self.read(config)) is not None:
                return done
            epochs: list[Epoch] = []
            why = None
            try:
                epochs.extend(epochs_of(self._rows, config, stopping, advance))
            except DivergedError as error:
                why = str(error)
            repeat = Repeat(config.seed, tuple(epochs), why)
            write_json(
                self._path(config), {**dataclasses.asdict(repeat), "config": config.to_dict()}
            )
            return repeat
        finally:
            claim.let_go()

    def _path(self, config: TrainConfig) -> Path:
        return self._folder / f"{_name(config)}.json"


def _name(config: TrainConfig) -> str:
    return config.identity[:16]


def mean_and_deviation(aucs: list[float]) -> tuple[float | None, float | None]:
    """Mean and sample standard deviation; `None` where there are not enough for one."""
    mean = statistics.fmean(aucs) if aucs else None
    return mean, statistics.stdev(aucs) if len(aucs) > 1 else None
