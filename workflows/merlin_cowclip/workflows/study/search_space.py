"""What is searched: points of values for one batch size, and how they become parameters and back.

Pure Python: it knows neither TensorFlow nor Optuna, whose trials it asks by `suggest_float` and
`suggest_categorical`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from merlin_cowclip.plugins.scaling import Hyperparameters

CLIP = "adaptive_column"
CLIP_CHOICES = ("none", CLIP)
UPDATES = ("exact", "lazy")
RATES = ("constant", "falling")

_RANGES: Mapping[str, tuple[float, float]] = {
    "dense_lr": (1e-5, 1e-1),
    "embedding_lr": (1e-5, 1e-1),
    "l2": (1e-9, 1e-2),
    "init_stddev": (1e-5, 1e-1),
    "clip_ratio": (1e-4, 1e1),
    "clip_floor": (1e-8, 1e-2),
}
_MOST_WARMUP = 2.0  # epochs
_MAY_BE_ZERO = ("l2", "clip_floor")  # a tenth below their range stands for 0
_OF_CLIP = ("clip_ratio", "clip_floor")


@dataclass(frozen=True)
class Point:
    """Values to train with, at their own batch size.

    Attributes:
      hyperparameters: without a clip, or with CowClip's.
      update: "exact" or "lazy".
      rates: "constant", or "falling": both learning rates, in a straight line over all epochs to 0.
    """

    hyperparameters: Hyperparameters
    update: str = "exact"
    rates: str = "constant"

    def __post_init__(self) -> None:
        hp = self.hyperparameters
        if hp.clip is None:  # r and ζ mean nothing then
            plain = Hyperparameters()
            hp = hp.replace(clip_ratio=plain.clip_ratio, clip_floor=plain.clip_floor)
            object.__setattr__(self, "hyperparameters", hp)

    def to_dict(self) -> dict[str, Any]:
        """Fit for JSON; `from_dict` is the way back."""
        hyperparameters = self.hyperparameters.to_dict()
        return {"hyperparameters": hyperparameters, "update": self.update, "rates": self.rates}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Point:
        """What `to_dict` gave."""
        return cls(Hyperparameters(**values["hyperparameters"]), values["update"], values["rates"])


class SearchSpace:
    """Points at one batch size, as parameters of a search: numbers and choices by name.

    All numbers but the warm-up's are searched logarithmically. λ and ζ may be 0, for which a tenth
    below their least value stands. r and ζ are parameters of points with a clip alone. Ranges grow
    to hold the starting points.

    Raises:
      ValueError: a starting point cannot be searched: another batch size, another clip than
        CowClip's, a σ of 0, or deferred updates.
    """

    def __init__(self, batch_size: int, starts: Iterable[Point] = ()) -> None:
        self.batch_size = batch_size
        points = list(starts)
        for point in points:
            self._check(point)
        self.ranges: dict[str, tuple[float, float]] = {}
        """Name → the least and the greatest value; of λ and ζ the least that is not 0."""
        for name, (low, high) in _RANGES.items():
            values = [getattr(p.hyperparameters, name) for p in points]
            positive = [value for value in values if value > 0]
            self.ranges[name] = min([low, *positive]), max([high, *positive])
        warmups = [p.hyperparameters.warmup_epochs for p in points]
        self.ranges["warmup_epochs"] = 0.0, max([_MOST_WARMUP, *warmups])

    def params(self, point: Point) -> dict[str, Any]:
        """A point as parameters; `point` is the way back, to the last digit.

        Raises:
          ValueError: it lies outside.
        """
        hp = point.hyperparameters
        self._check(point)
        names = [name for name in self.ranges if hp.clip or name not in _OF_CLIP]
        params: dict[str, Any] = {}
        for name in names:
            value = float(getattr(hp, name))
            low, high = self.ranges[name]
            if value == 0 and name in _MAY_BE_ZERO:
                value = _zero(low)
            elif not low <= value <= high:
                raise ValueError(f"{name} must be from {low:g} to {high:g}. Received: {value!r}")
            params[name] = value
        choices = {"clip": hp.clip or CLIP_CHOICES[0], "update": point.update}
        return params | choices | {"rates": point.rates}

    def point(self, params: Mapping[str, Any]) -> Point:
        """The point of some parameters."""
        values = {k: v for k, v in params.items() if k in self.ranges}
        for name in _MAY_BE_ZERO:
            if name in values and values[name] < self.ranges[name][0]:
                values[name] = 0.0
        clip = None if params["clip"] == CLIP_CHOICES[0] else params["clip"]
        hp = Hyperparameters(batch_size=self.batch_size, clip=clip, **values)
        return Point(hp, params["update"], params["rates"])

    def suggest(self, trial: Any) -> Point:
        """The point that a trial of Optuna's is to try."""
        params: dict[str, Any] = {
            "clip": trial.suggest_categorical("clip", CLIP_CHOICES),
            "update": trial.suggest_categorical("update", UPDATES),
            "rates": trial.suggest_categorical("rates", RATES),
        }
        for name, (low, high) in self.ranges.items():
            if name in _OF_CLIP and params["clip"] == CLIP_CHOICES[0]:
                continue
            if name in _MAY_BE_ZERO:
                low = _zero(low)
            params[name] = trial.suggest_float(name, low, high, log=name != "warmup_epochs")
        return self.point(params)

    def _check(self, point: Point) -> None:
        hp = point.hyperparameters
        size = self.batch_size
        wrong = {
            f"a point must be of batch size {size}": (hp.batch_size, (size,)),
            f"clip must be None or {CLIP} to be searched": (hp.clip, (None, CLIP)),
            f"update must be one of {', '.join(UPDATES)} to be searched": (point.update, UPDATES),
            f"rates must be one of {', '.join(RATES)}": (point.rates, RATES),
        }
        for rule, (value, allowed) in wrong.items():
            if value not in allowed:
                raise ValueError(f"{rule}. Received: {value!r}")
        if hp.init_stddev == 0:
            raise ValueError("init_stddev must be positive to be searched. Received: 0")


def _zero(low: float) -> float:
    return low / 10
