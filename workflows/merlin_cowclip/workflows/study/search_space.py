# SPDX-License-Identifier: Apache-2.0
"""The search space of hyperparameters at one batch size, and its parameters. Pure Python."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from merlin_cowclip.plugins.scaling import Hyperparameters

CHOICES: Mapping[str, tuple[str, str]] = {
    "clip": ("none", "adaptive_column"),
    "update": ("exact", "lazy"),
    "rates": ("constant", "falling"),
}
_RANGES: Mapping[str, tuple[float, float]] = {
    "dense_lr": (1e-4, 3e-2),
    "embedding_lr": (1e-4, 1e-1),
    "l2": (1e-8, 1e-2),
    "init_stddev": (1e-4, 1e-1),
    "clip_ratio": (1e-3, 1e1),
    "clip_floor": (1e-6, 1e-2),
    "warmup_epochs": (0.0, 2.0),
}
_MAY_BE_ZERO = ("l2", "clip_floor")
_OF_CLIP = ("clip_ratio", "clip_floor")


@dataclass(frozen=True)
class Point:
    """Values to train with, at their own batch size.

    Attributes:
      hyperparameters: without a clip, or with CowClip's; of `rates` says whether they decay.
      update: "exact" or "lazy".
      rates: "constant", or "falling": both learning rates decay linearly to 0 over all epochs.
      max_epochs: how many are trained, unless the AUC falls before.
    """

    hyperparameters: Hyperparameters
    update: str = "exact"
    rates: str = "constant"
    max_epochs: int = 10

    def __post_init__(self) -> None:
        hp = self.hyperparameters
        if hp.decay:
            object.__setattr__(self, "rates", "falling")
            object.__setattr__(self, "hyperparameters", hp := hp.replace(decay=False))
        if hp.clip is None:  # r and ζ mean nothing then
            plain = {name: getattr(Hyperparameters(), name) for name in _OF_CLIP}
            object.__setattr__(self, "hyperparameters", hp.replace(**plain))

    def to_dict(self) -> dict[str, Any]:
        """Fit for JSON; `from_dict` is the way back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Point:
        """What `to_dict` gave; other keys are left out."""
        rest = {name: values[name] for name in ("update", "rates", "max_epochs")}
        return cls(Hyperparameters(**values["hyperparameters"]), **rest)


class SearchSpace:
    """Points at one batch size, of at most so many epochs, as parameters of Optuna.

    All numbers except the warm-up are searched logarithmically. For λ and ζ, a value below their
    range stands for 0. r and ζ are parameters only of points with a clip. Ranges grow to hold the
    points `starts`; a ValueError says which of their values cannot be searched.
    """

    def __init__(self, batch_size: int, starts: Iterable[Point] = (), epochs: int = 10) -> None:
        self.batch_size, self.epochs = batch_size, epochs
        points = [_values(point) for point in starts]
        self.ranges: dict[str, tuple[float, float]] = {}
        for name, (low, high) in _RANGES.items():
            values = [values[name] for values in points if values[name] > 0]
            self.ranges[name] = min([low, *values]), max([high, *values])

    def params(self, point: Point) -> dict[str, Any]:
        """A point's parameters; `point` is the way back, to the last digit."""
        values = _values(point)
        for name in _MAY_BE_ZERO:
            values[name] = values[name] or self._least(name)
        unused = _OF_CLIP if values["clip"] == "none" else ()
        names = [name for name in (*self.ranges, *CHOICES) if name not in unused]
        return {**{name: values[name] for name in names}, "max_epochs": point.max_epochs}

    def point(self, params: Mapping[str, Any]) -> Point:
        """The point of some parameters."""
        values = {name: params[name] for name in self.ranges if name in params}
        for name in _MAY_BE_ZERO:
            if name in values and values[name] < self.ranges[name][0]:
                values[name] = 0.0
        clip = None if params["clip"] == "none" else params["clip"]
        hp = Hyperparameters(batch_size=self.batch_size, clip=clip, **values)
        return Point(hp, params["update"], params["rates"], params["max_epochs"])

    def suggest(self, trial: Any) -> Point:
        """The point that a trial of Optuna is to try."""
        params = {name: trial.suggest_categorical(name, CHOICES[name]) for name in CHOICES}
        for name, (_, high) in self.ranges.items():
            if name not in _OF_CLIP or params["clip"] != "none":
                log = name != "warmup_epochs"
                params[name] = trial.suggest_float(name, self._least(name), high, log=log)
        params["max_epochs"] = trial.suggest_int("max_epochs", 1, self.epochs, log=True)
        return self.point(params)

    def _least(self, name: str) -> float:
        """The lower end of a parameter; of λ and ζ it stands for 0."""
        low = self.ranges[name][0]
        return low / 10 if name in _MAY_BE_ZERO else low

    def at_the_edge(self, point: Point) -> dict[str, float]:
        """The numbers of a point within a twentieth of an end of their range, by name.

        Below the ranges of λ, ζ and the warm-up, 0 is searched.
        """
        found = {}
        params = self.params(point)
        for name, (low, high) in self.ranges.items():
            value = params.get(name)
            if value is None:
                continue
            if name == "warmup_epochs":
                place = max(value / high, 0.5)
            else:
                place = math.log(value / low) / math.log(high / low)
            if place > 0.95 or (place < 0.05 and name not in _MAY_BE_ZERO):
                found[name] = value
        return found


def _values(point: Point) -> dict[str, Any]:
    """All values of a point by name, checked."""
    values = point.hyperparameters.to_dict()
    values |= {"clip": values["clip"] or "none", "update": point.update, "rates": point.rates}
    for name, choices in CHOICES.items():
        if values[name] not in choices:
            raise ValueError(
                f"{name} must be one of {', '.join(choices)} to be searched. Received: "
                f"{values[name]!r}"
            )
    if values["init_stddev"] == 0:
        raise ValueError("init_stddev must be positive to be searched. Received: 0")
    return values
