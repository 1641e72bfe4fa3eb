# SPDX-License-Identifier: Apache-2.0
"""Options of a tuning study, checked, and the points that it tries first. Pure Python."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from merlin_cowclip.plugins._checks import make_plain
from merlin_cowclip.plugins.scaling import SCALING_RULES, Hyperparameters
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.study.search_space import Point, SearchSpace
from merlin_cowclip.workflows.training.configuration import TrainConfig, base_fields, refuse_unknown
from merlin_cowclip.workflows.training.networks import OPTIONS

NETWORK = ("model", *OPTIONS)
"""The keys of `TrainConfig` that say which network is trained."""

_DECAY = {"name": "linear", "to": 0.0}
_STEPS = (
    *(("l2", 4.0), ("l2", 0.25), ("embedding_lr", 2.0), ("embedding_lr", 0.5)),
    *(("dense_lr", 2.0), ("dense_lr", 0.5)),
)
_FIRST = 3  # settings of the portfolio that are tried before the search


def network_of(found: TrainConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """The network that values were tuned for, by `NETWORK`; refuses that `given` is another."""
    its = {"model": found.model, **found.network_options}
    for name in its:
        value = given.get(name, its[name])
        if (tuple(value) if isinstance(value, list) else value) != its[name]:
            raise UserError(
                f"what was tuned must be of the same network. Received: {name}={its[name]!r}, "
                f"tuned at {found.batch_size:,}, and {name}={value!r} for its values. Give the "
                "options that were tuned with, or another tune"
            )
    return its


@dataclass(frozen=True, eq=False)
class TuneConfig:
    """What a tuning study searches; `dataclasses.asdict` is fit for JSON.

    Attributes:
      batch_size: samples per update, B, at which the values are searched.
      network: which network, by `TrainConfig`'s names: ``{"model": "dcn", "mlp": (128,)}``; of a
        base that another tune found, its own.
      base: values tuned at ``base["batch_size"]`` (1024 if it is not named), by `Hyperparameters`'
        names; what is left out is each rule's recipe. Or what another tune found, its
        `Tuned.train_config()`, with its network, update, rates and epochs. Without a base no rule
        is tried.
      try_rules: which rules predict points from the base, in this order.
      update: "exact" or "lazy", of the rules' points; both are searched.
      rates: "constant" or "falling", of the rules' points; both are searched.
      rule_epochs: how many the rules' points are trained, or `None` for the most.
      epochs: the most that a trial trains.
      rows: of the training part, by which the portfolio's λ is scaled; `tune` takes the data's.
      seed: of the hold-out, the search, and all trials' weights and order.
      deterministic: as `TrainConfig`'s.

    Raises:
      UserError: a value out of range, another network than that of a base that was tuned, or a
        base with schedules or clipped tables that no tune searches.
    """

    batch_size: int = 1024
    network: Mapping[str, Any] = field(default_factory=dict)
    base: Mapping[str, Any] | Hyperparameters | TrainConfig | None = None
    try_rules: Sequence[str] = tuple(SCALING_RULES)
    update: str = "exact"
    rates: str = "constant"
    rule_epochs: int | None = None
    epochs: int = 10
    rows: int | None = None
    seed: int = 1234
    deterministic: bool = True

    def __post_init__(self) -> None:
        make_plain(self)
        refuse_unknown("network", self.network, NETWORK)
        if isinstance(self.base, TrainConfig):
            for name, value in _from_tuned(self.base, self.network).items():
                object.__setattr__(self, name, value)
        elif isinstance(self.base, Hyperparameters):
            object.__setattr__(self, "base", self.base.to_dict())
        try:
            _ = self.space
        except ValueError as error:
            raise UserError(str(error)) from None
        options = self.train_config(next(iter(self.queue))).to_dict()  # with all defaults
        object.__setattr__(self, "network", {name: options[name] for name in NETWORK})

    @functools.cached_property
    def rules(self) -> dict[str, Point]:
        """By rule the point that it predicts from the base, as `train --rule` would take it."""
        if self.base is None:
            return {}
        assert not isinstance(self.base, TrainConfig)  # replaced by `__post_init__`
        own = {**self._shared(), **base_fields(self.base)}
        values = {rule: TrainConfig(**own, rule=rule).hyperparameters for rule in self.try_rules}
        epochs = min(self.rule_epochs or self.epochs, self.epochs)
        return {rule: Point(hp, self.update, self.rates, epochs) for rule, hp in values.items()}

    @functools.cached_property
    def queue(self) -> dict[Point, dict[str, Any]]:
        """The points to try first, each once → where they come from: `rules` or `portfolio`.

        These are the rules' points, the default rule's first, and the first three of the portfolio.
        """
        queue: dict[Point, dict[str, Any]] = {}
        for rule, point in self.rules.items():
            queue.setdefault(point, {"rules": []})["rules"].append(rule)
        for number, point in enumerate(self.portfolio[:_FIRST], 1):
            queue.setdefault(point, {"portfolio": number})
        return queue

    def after(self, best: Point) -> dict[Point, dict[str, Any]]:
        """The points to try once the queue is over: steps from the best, the rest of the portfolio.

        λ matters most, then the embedding rate. As each better point has steps of its own, this is
        a pattern search (Hooke and Jeeves 1961); a value outside of its range is left out.
        """
        hp, points = best.hyperparameters, dict[Point, dict[str, Any]]()
        for name, factor in _STEPS:
            value, (low, high) = factor * getattr(hp, name), self.space.ranges[name]
            if low <= value <= high:
                step = dataclasses.replace(best, hyperparameters=hp.replace(**{name: value}))
                points[step] = {"step": f"{name} × {factor:g}"}
        return points | {point: {"portfolio": n} for n, point in enumerate(self.portfolio, 1)}

    @property
    def min_trials(self) -> int:
        """How many points the rules predict; at least 1."""
        return max(len({*self.rules.values()}), 1)

    @functools.cached_property
    def portfolio(self) -> list[Point]:
        """Points that were best on data of other kinds, by `benchmarks/portfolio.py`.

        λ times the training rows stays constant (docs/internals/portfolio.md).
        """
        text = Path(__file__).with_name("portfolio.json").read_text(encoding="utf-8")
        points = []
        for one in json.loads(text):
            point = Point.from_dict(one)
            l2 = point.hyperparameters.l2 * one["rows"] / (self.rows or one["rows"])
            points.append(self.adapted(point, l2=l2))
        return points

    def adapted(self, point: Point, **changes: Any) -> Point:
        """A point at this batch size, with changed values, for no more epochs than trials train."""
        values = point.hyperparameters.replace(batch_size=self.batch_size, **changes)
        epochs = min(point.max_epochs, self.epochs)
        return dataclasses.replace(point, hyperparameters=values, max_epochs=epochs)

    @functools.cached_property
    def space(self) -> SearchSpace:
        """What is searched, with every point of the queue and the portfolio in it."""
        return SearchSpace(self.batch_size, [*self.queue, *self.portfolio], self.epochs)

    def train_config(self, point: Point) -> TrainConfig:
        """The training of a point; with fewer `epochs` in its place the decay is the same."""
        own = {**self._shared(), **base_fields(point.hyperparameters)}
        own |= {"update": point.update, "epochs": point.max_epochs}
        if point.rates == "falling":
            decay = {**_DECAY, "epochs": float(point.max_epochs)}
            own |= {"dense_schedule": decay, "embedding_schedule": decay}
        return TrainConfig(**own, rule="none")

    def _shared(self) -> dict[str, Any]:
        names = ("batch_size", "update", "epochs", "seed", "deterministic")
        return {**self.network, **{name: getattr(self, name) for name in names}}


def _from_tuned(found: TrainConfig, network: Mapping[str, Any]) -> dict[str, Any]:
    """What another tune found, by the names of `TuneConfig`; refuses what no tune searches."""
    dense: Any = found.dense_schedule
    decays = found.schedules()["dense_schedule"] == {**_DECAY, "epochs": None}
    is_searched = dense == found.embedding_schedule and (dense is None or decays)
    if found.clip_tables is not None or not is_searched:
        raise UserError(
            "base must have what a tune searches: learning rates that are constant or both fall in "
            "a straight line to 0, and all tables clipped alike. Give its hyperparameters alone, "
            "as base=config.hyperparameters"
        )
    return {
        "network": {**network_of(found, network), **network},
        "base": found.hyperparameters.to_dict(),
        "update": found.update,
        "rates": "falling" if decays else "constant",
        "rule_epochs": int(dense["epochs"] or found.epochs) if decays else found.epochs,
    }
