"""What a tune searches, and from where: checked, fit for JSON both ways. Pure Python."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
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

_FALLS = {"name": "linear", "to": 0.0}
# First the one that a small budget should not leave out.
_RULES = tuple(sorted(SCALING_RULES, key=lambda name: name != "cowclip"))
_WITH_RULES = 3  # of the portfolio, after what a base's rules predict


def network_of(found: TrainConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """The network that values were tuned for, by the names of `NETWORK`.

    Raises:
      UserError: `given` names another network, or another option of it.
    """
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
    """What a tune searches; everything but the data, its place, and how long it may take.

    Attributes:
      batch_size: samples per update, B, at which the values are searched.
      network: which network, by `TrainConfig`'s names: ``{"model": "dcn", "mlp": (128,)}``; of a
        base that another tune found, its own.
      base: values tuned at ``base["batch_size"]`` (1024 if it is not named), by `Hyperparameters`'
        names; what is left out is each rule's recipe. Or what another tune found, its
        `Tuned.train_config()`, which brings its network, update, rates and epochs along. Without
        a base no rule is tried.
      try_rules: which rules predict points from the base, in this order.
      update: "exact" or "lazy", of the rules' points; both are searched.
      rates: "constant" or "falling", of the rules' points; both are searched.
      rule_epochs: how many the rules' points are trained, or `None` for the most.
      epochs: the most that a trial trains.
      held_out: share of the training rows by which trials are measured, and which they do not
        train on.
      seed: of the hold-out, the search, and all trials' weights and order.
      deterministic: as `TrainConfig`'s.

    Raises:
      UserError: a value out of range, another network than that of a base that was tuned, or a
        base with schedules or clipped tables that no tune searches.
    """

    batch_size: int = 1024
    network: Mapping[str, Any] = field(default_factory=dict)
    base: Mapping[str, Any] | Hyperparameters | TrainConfig | None = None
    try_rules: Sequence[str] = _RULES
    update: str = "exact"
    rates: str = "constant"
    rule_epochs: int | None = None
    epochs: int = 10
    held_out: float = 0.1
    seed: int = 1234
    deterministic: bool = True

    def __post_init__(self) -> None:
        make_plain(self)
        refuse_unknown("network", self.network, NETWORK)
        if not 0 < self.held_out < 1:
            raise UserError(f"held_out must be between 0 and 1. Received: {self.held_out!r}")
        own: dict[str, Any] = {"try_rules": list(self.try_rules)}  # as JSON has it
        if isinstance(self.base, TrainConfig):
            own |= _brought(self.base, self.network)
        elif isinstance(self.base, Hyperparameters):
            own["base"] = self.base.to_dict()
        for name, value in own.items():
            object.__setattr__(self, name, value)
        try:
            _ = self.space
        except ValueError as error:
            raise UserError(str(error)) from None
        options = self.train_config(next(iter(self.queue))).to_dict()
        object.__setattr__(self, "network", {name: options[name] for name in NETWORK})

    @functools.cached_property
    def rules(self) -> dict[str, Point]:
        """By rule the point that it predicts from the base, as `train --rule` would take it."""
        if self.base is None:
            return {}
        assert not isinstance(self.base, TrainConfig)  # which it is given as
        base = base_fields(self.base)
        points, epochs = {}, min(self.rule_epochs or self.epochs, self.epochs)
        for rule in self.try_rules:
            config = TrainConfig.from_dict({**self._shared(), "rule": rule, **base})
            points[rule] = Point(config.hyperparameters, self.update, self.rates, epochs)
        return points

    @functools.cached_property
    def starts(self) -> dict[Point, list[str]]:
        """The points to start from, each once → the rules that predict it."""
        starts: dict[Point, list[str]] = {}
        for rule, point in self.rules.items():
            starts.setdefault(point, []).append(rule)
        return starts

    @functools.cached_property
    def queue(self) -> dict[Point, list[str]]:
        """What is tried first: the rules' points, or what was best elsewhere, or some of both.

        With a base, √-scaling's point with rates that fall and the first three of the portfolio
        follow the rules': no rule of the paper's has such rates, which are best on most logs.
        """
        queue, portfolio = dict(self.starts), self.portfolio
        if self.rules:
            portfolio = portfolio[:_WITH_RULES]
        if "sqrt" in self.rules:
            falling = dataclasses.replace(self.rules["sqrt"], rates="falling")
            queue.setdefault(falling, ["sqrt, falling"])
        for point in portfolio:
            queue.setdefault(point, [])
        return queue

    @functools.cached_property
    def portfolio(self) -> list[Point]:
        """Points that were best at a large batch on data of other kinds; the first cover most.

        `benchmarks/portfolio.py` found them.
        """
        text = Path(__file__).with_name("portfolio.json").read_text(encoding="utf-8")
        points = [Point.from_dict(one) for one in json.loads(text)]
        return [
            dataclasses.replace(
                one,
                hyperparameters=one.hyperparameters.replace(batch_size=self.batch_size),
                max_epochs=min(one.max_epochs, self.epochs),
            )
            for one in points
        ]

    @functools.cached_property
    def space(self) -> SearchSpace:
        """What is searched, with every starting point in it."""
        return SearchSpace(self.batch_size, self.queue, self.epochs)

    def train_config(
        self, point: Point, *, epochs: int | None = None, seed: int | None = None
    ) -> TrainConfig:
        """The training of one point: as `train` would do it.

        Args:
          point: in the space.
          epochs: `None` for the point's.
          seed: `None` for the tune's own.
        """
        own = {**self._shared(), "rule": "none", **base_fields(point.hyperparameters)}
        own |= {"update": point.update, "epochs": point.max_epochs if epochs is None else epochs}
        own |= {"seed": self.seed if seed is None else seed}
        if point.rates == "falling":  # as in a trial, however many epochs are trained
            falls = {**_FALLS, "epochs": float(point.max_epochs)}
            own |= {"dense_schedule": falls, "embedding_schedule": falls}
        return TrainConfig.from_dict(own)

    def _shared(self) -> dict[str, Any]:
        names = ("batch_size", "update", "epochs", "seed", "deterministic")
        return {**self.network, **{name: getattr(self, name) for name in names}}

    def to_dict(self) -> dict[str, Any]:
        """Fit for JSON; `from_dict` is the way back. Of the network nothing is left to defaults."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TuneConfig:
        """What `to_dict` gave.

        Raises:
          UserError: a key that is none, or a value out of range.
        """
        refuse_unknown("what a tune searches", values, [f.name for f in fields(cls)])
        return cls(**values)


def _brought(found: TrainConfig, network: Mapping[str, Any]) -> dict[str, Any]:
    """What another tune found, by the names of `TuneConfig`.

    Raises:
      UserError: it has what no tune searches, and its trials would be without.
    """
    dense: Any = found.dense_schedule
    embedding = found.embedding_schedule
    falls = dense == embedding and found.schedules()["dense_schedule"] == {**_FALLS, "epochs": None}
    if found.clip_tables is not None or ((dense or embedding) and not falls):
        raise UserError(
            "base must have what a tune searches: learning rates that are constant or both fall in "
            "a straight line to 0, and all tables clipped alike. Give its hyperparameters alone, "
            "as base=config.hyperparameters"
        )
    return {
        "network": {**network_of(found, network), **network},
        "base": found.hyperparameters.to_dict(),
        "update": found.update,
        "rates": "falling" if falls else "constant",
        "rule_epochs": int(dense["epochs"] or found.epochs) if falls else found.epochs,
    }
