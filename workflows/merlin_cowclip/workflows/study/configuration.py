# SPDX-License-Identifier: Apache-2.0
"""What a tuning study searches, and what it tries first. Pure Python."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from merlin_cowclip.plugins._checks import make_plain
from merlin_cowclip.plugins.scaling import SCALING_RULES, Hyperparameters, scale
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.training.configuration import (
    OPTIONS,
    TO_ZERO,
    TrainConfig,
    base_fields,
    refuse_unknown,
)

NETWORK = ("model", *OPTIONS)
"""The keys of `TrainConfig` that describe the network."""

CHOICES: Mapping[str, tuple[Any, Any]] = {
    "clip": ("none", "adaptive_column"),
    "update": ("exact", "lazy"),
    "decay": (False, True),
    "average": (False, True),  # of the weights, over about an epoch
}
RANGES: Mapping[str, tuple[float, float]] = {
    "dense_lr": (1e-4, 3e-2),
    "embedding_lr": (1e-4, 1e-1),
    "l2": (1e-8, 1e-2),
    "init_stddev": (1e-4, 1e-1),
    "clip_ratio": (1e-3, 1e1),
    "clip_floor": (1e-6, 1e-2),
    "warmup_epochs": (0.0, 2.0),
}
"""All but the warm-up are searched logarithmically, and grow to contain the first trials."""

_MOST_STEPS = 133  # in an epoch of the data where the portfolio was found
_MAY_BE_ZERO = ("l2", "clip_floor")  # which a parameter below the range means
_OF_CLIP = ("clip_ratio", "clip_floor")
AVERAGED = "averaged weights"  # the origin of a step from the best trial
_STEPS = [(name, by) for name in ("l2", "embedding_lr", "dense_lr") for by in (2.0, 0.5)]

Params = dict[str, Any]
"""A point of the search: Optuna's parameters, by the names of `RANGES`, `CHOICES`, and "epochs"."""


@dataclass(frozen=True, eq=False)
class TuneConfig:
    """What a tuning study searches; `dataclasses.asdict` is fit for JSON.

    Attributes:
      batch_size: samples per update at which hyperparameters are searched.
      network: options of `TrainConfig`, such as ``{"model": "dcn"}``.
      base: hyperparameters tuned at ``base["batch_size"]`` (default: 1024), by `Hyperparameters`'
        names; each rule's recipe has the rest. Without a base no rule is tried.
      epochs: the most that a trial trains.
      rows: training rows, which scale the portfolio; `tune` takes the data's.
      seed: of the hold-out, the search, and the weights and row order of trials.
      deterministic, precision, micro_batch: as in `TrainConfig`.

    Raises a UserError for a value out of range, or a base with what is not searched.
    """

    batch_size: int = 1024
    network: Mapping[str, Any] = field(default_factory=dict)
    base: Mapping[str, Any] | Hyperparameters | None = None
    epochs: int = 10
    rows: int | None = None
    seed: int = 1234
    deterministic: bool = True
    precision: str = "float32"
    micro_batch: int | None = None

    def __post_init__(self) -> None:
        make_plain(self)
        refuse_unknown("network", self.network, NETWORK)
        if isinstance(self.base, Hyperparameters):
            object.__setattr__(self, "base", self.base.to_dict())
        options = self.train_config(self.queue[0][0]).to_dict()  # with all defaults
        object.__setattr__(self, "network", {name: options[name] for name in NETWORK})

    @functools.cached_property
    def rules(self) -> dict[str, TrainConfig]:
        """The training that each rule predicts from the base, as `train --rule` has it."""
        if self.base is None:
            return {}
        own = {**self._shared(), **base_fields(self.base)}
        return {rule: TrainConfig(**own, rule=rule) for rule in SCALING_RULES}

    @functools.cached_property
    def portfolio(self) -> list[TrainConfig]:
        """The settings that won on other data sets, chosen by `benchmarks/portfolio.py`."""
        text = Path(__file__).with_name("portfolio.json").read_text(encoding="utf-8")
        return [self.adapted(one) for one in json.loads(text)]

    def adapted(self, found: Mapping[str, Any]) -> TrainConfig:
        """A setting of other data at this batch size, with λ times the training rows constant.

        It is for at most `_MOST_STEPS` steps per epoch; a smaller batch scales it by `sqrt`.
        """
        rows, hp = self.rows or found["rows"], Hyperparameters(**found["hyperparameters"])
        large = max(rows // _MOST_STEPS, self.batch_size)
        hp = hp.replace(batch_size=large, l2=hp.l2 * found["rows"] / rows)
        own = {**self._shared(), **base_fields(scale(hp, to=self.batch_size, rule="sqrt"))}
        own |= {"update": found["update"], "epochs": min(found["epochs"], self.epochs)}
        return TrainConfig(**own, rule="none")

    @functools.cached_property
    def queue(self) -> list[tuple[Params, str]]:
        """What is tried first, each once, and its origin: the rules, then the portfolio."""
        portfolio = {f"portfolio {n}": config for n, config in enumerate(self.portfolio, 1)}
        origins: dict[str, list[str]] = {}
        for origin, config in {**self.rules, **portfolio}.items():
            origins.setdefault(json.dumps(self.params(config)), []).append(origin)
        return [(json.loads(params), ", ".join(names)) for params, names in origins.items()]

    def steps_from(self, best: Params) -> Iterator[tuple[Params, str]]:
        """Averages in place of decay; steps of a pattern search (Hooke and Jeeves 1961)."""
        if best["decay"] and not best["average"]:
            yield {**best, "decay": False, "average": True}, AVERAGED
        for name, factor in _STEPS:
            if self.ranges[name][0] <= factor * best[name] <= self.ranges[name][1]:
                yield {**best, name: factor * best[name]}, f"{name} × {factor:g}"

    @functools.cached_property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """`RANGES` that contain the first trials."""
        starts = [_values(config) for config in (*self.rules.values(), *self.portfolio)]
        known = {name: [one[name] for one in starts if one[name] > 0] for name in RANGES}
        return {n: (min(low, *known[n]), max(high, *known[n])) for n, (low, high) in RANGES.items()}

    def params(self, config: TrainConfig) -> Params:
        """The parameters of a training; `train_config` is the inverse."""
        values = _values(config)
        for name in _MAY_BE_ZERO:
            values[name] = values[name] or self.ranges[name][0] / 10
        unused = _OF_CLIP if values["clip"] == "none" else ()
        return {n: values[n] for n in (*CHOICES, *RANGES, "epochs") if n not in unused}

    def suggest(self, trial: Any) -> Params:
        """The parameters of a new trial of Optuna."""
        params = {name: trial.suggest_categorical(name, CHOICES[name]) for name in CHOICES}
        for name, (low, high) in self.ranges.items():
            if name not in _OF_CLIP or params["clip"] != "none":
                least = low / 10 if name in _MAY_BE_ZERO else low
                log = name != "warmup_epochs"
                params[name] = trial.suggest_float(name, least, high, log=log)
        return {**params, "epochs": trial.suggest_int("epochs", 1, self.epochs, log=True)}

    def train_config(self, params: Params, epochs: int | None = None) -> TrainConfig:
        """The training of some parameters; if it stops after `epochs`, its schedule is the same."""
        values = {name: params[name] for name in ("clip", "update", *RANGES) if name in params}
        for name in _MAY_BE_ZERO:
            if name in values and values[name] < self.ranges[name][0]:
                values[name] = 0.0
        own = {**self._shared(), **values, "epochs": epochs or params["epochs"]}
        if params["average"]:
            rows = self.rows or _MOST_STEPS * self.batch_size
            own["ema"] = 1 - 1 / math.ceil(rows / self.batch_size)
        if params["decay"]:
            end = None if own["epochs"] == params["epochs"] else float(params["epochs"])
            own["dense_schedule"] = own["embedding_schedule"] = {**TO_ZERO, "epochs": end}
        return TrainConfig(**own, rule="none", base_batch_size=self.batch_size)

    def _shared(self) -> dict[str, Any]:
        names = ("batch_size", "epochs", "seed", "deterministic", "precision", "micro_batch")
        return {**self.network, **{name: getattr(self, name) for name in names}}


def _values(config: TrainConfig) -> dict[str, Any]:
    """All that is searched, by name, checked."""
    hp = config.hyperparameters.to_dict()
    values = {**hp, "clip": config.clip, "update": config.update, "epochs": config.epochs}
    values["average"] = config.ema is not None
    for name, choices in CHOICES.items():
        if values[name] not in choices:
            known = ", ".join(map(str, choices))
            raise UserError(f"tune searches {name} among {known}. Received: {values[name]!r}")
    if not values["init_stddev"]:
        raise UserError("tune searches a positive init_stddev. Received: 0")
    return values
