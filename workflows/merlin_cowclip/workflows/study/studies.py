# SPDX-License-Identifier: Apache-2.0
"""The paper's experiments as lists of runs: what is trained for each table and figure.

Pure Python: which runs a study takes is known, and refused if need be, before anything is trained.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from merlin_cowclip.plugins._checks import make_plain
from merlin_cowclip.plugins.scaling import MIN_STEPS, SCALING_RULES, Hyperparameters, recipe, scale
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.study.configuration import NETWORK, network_of
from merlin_cowclip.workflows.training.configuration import (
    BASE_FIELDS,
    TrainConfig,
    base_fields,
    refuse_unknown,
)
from merlin_cowclip.workflows.training.networks import NETWORKS as OPTIONS

FULL, TOP = "full", "top-3"  # the data as it is, and with each field's three most frequent ids
NETWORKS = ("deepfm", "wide_and_deep", "dcn", "dcn_v2")  # of Tables 3 and 4
TUNED = "tune"  # the row of what tunes found
SEEDS = (1234, 1235, 1236)  # Appendix H
VALUES = ("dense_lr", "embedding_lr", "l2", "clip_ratio", "clip_floor")
"""What of a base all rules share; the rest is each rule's recipe."""

_OWN = ("rule", *BASE_FIELDS, "batch_size", "seed")  # of each run's configuration: the study's
_OPTIONS = tuple(one.name for one in dataclasses.fields(TrainConfig) if one.name not in _OWN)
_THRESHOLDS = {"global": 25.0, "field": 0.1, "column": 1e-4}  # of clips, at the base batch size
_TENTHS = (0.1, 0.3, 1.0, 3.0, 10.0)


@dataclass(frozen=True)
class Setting:
    """What all runs of a study have in common, and how far it goes.

    Attributes:
      batch_sizes: in samples per update, rising; the values were tuned at the first, the base.
      values: of the base that replace those of each rule's recipe, by the names of `VALUES`.
      config: options of `TrainConfig` for every run but the rule, base, batch size and seed.
      seeds: of the runs of each cell.
      found: what tunes found, each at another of the batch sizes and on the same network: a row
        beside the rules, for as many epochs as they.
    """

    batch_sizes: Sequence[int]
    values: Mapping[str, float] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    seeds: Sequence[int] = SEEDS
    found: Sequence[TrainConfig] = ()

    def __post_init__(self) -> None:
        make_plain(self)
        refuse_unknown("values of a setting", self.values, VALUES)
        refuse_unknown("config of a setting", self.config, _OPTIONS)
        sizes, tuned_at = list(self.batch_sizes), [config.batch_size for config in self.found]
        if not sizes or sizes != sorted(set(sizes)):
            raise UserError(
                "batch_sizes must rise from the base, where the values were tuned. Received: "
                f"{sizes}. Sort them, the base first"
            )
        if len(set(tuned_at)) < len(tuned_at) or not set(tuned_at) <= set(sizes):
            raise UserError(
                "what was tuned must be at one of the batch sizes, and each at another. Received: "
                f"{tuned_at}, and batch_sizes {sizes}. Name others"
            )
        for config in self.found:
            network_of(config, TrainConfig(**self.config).to_dict())  # whose defaults count

    @property
    def base(self) -> int:
        """The batch size where the values were tuned."""
        return self.batch_sizes[0]

    def run(self, rule: str, batch_size: int) -> TrainConfig:
        """A run at a batch size, with the base scaled by a rule."""
        own: dict[str, Any] = {**self.config, **self.values, "base_batch_size": self.base}
        return TrainConfig(**own, rule=rule, batch_size=batch_size)

    def tuned(self, rule: str) -> Hyperparameters:
        """A rule's recipe with the values of the base."""
        return self.run(rule, self.base).base

    def at(self, values: Hyperparameters) -> TrainConfig:
        """A run with these values at their own batch size."""
        own = {**base_fields(values), "rule": "none", "batch_size": values.batch_size}
        return TrainConfig(**self.config, **own)


def of_tune(
    tuned: TrainConfig, batch_size: int, config: Mapping[str, Any]
) -> tuple[dict[str, float], dict[str, Any]]:
    """The values and config of a setting whose base, at `batch_size`, is what a tune found."""
    if batch_size != tuned.batch_size:
        raise UserError(
            "the first of the batch sizes must be where the base was tuned. Received: "
            f"{batch_size:,}, and a base tuned at {tuned.batch_size:,}. Begin with that"
        )
    values = {name: getattr(tuned.hyperparameters, name) for name in VALUES}
    return values, {**_beside_values(tuned), **network_of(tuned, config), **config}


def _beside_values(tuned: TrainConfig) -> dict[str, Any]:
    """What a tune found beside network and values; its schedules fit any number of epochs."""
    return {"update": tuned.update, "deterministic": tuned.deterministic, **tuned.schedules()}


def batch_sizes(base: int, rows: int) -> tuple[int, ...]:
    """The base doubled, up to the paper's 128 times, while an epoch of `rows` has enough steps."""
    found = [base]
    while 2 * found[-1] <= 128 * base and not few_steps(rows, 2 * found[-1]):
        found.append(2 * found[-1])
    return tuple(found)


@dataclass(frozen=True)
class Cell:
    """One cell of a study's table: a run of `config` for each seed, on `data` (`FULL` or `TOP`)."""

    row: str
    config: TrainConfig
    column: str = ""  # by default the batch size
    data: str = FULL

    def __post_init__(self) -> None:
        object.__setattr__(self, "column", self.column or f"{self.config.batch_size:,}")


@dataclass(frozen=True)
class Quantity:
    """A number of a run's result: its key there, its name with the unit, and how it is shown."""

    key: str
    name: str
    factor: float  # from the result's unit to the name's
    digits: int
    paper_format: str = ""

    def shown(self, mean: float, deviation: float = 0.0) -> str:
        """Mean ± deviation; of one run the deviation is 0, and not shown."""
        shown = f"{self.factor * mean:.{self.digits}f}"
        return shown + (f" ± {self.factor * deviation:.{self.digits}f}" if deviation else "")


AUC = Quantity("auc", "test AUC, %", 100.0, 3, ".2f")
LOG_LOSS = Quantity("log_loss", "test log loss", 1.0, 5, ".4f")
MINUTES = Quantity("train_seconds", "minutes of training", 1 / 60, 2, "g")


def few_steps(rows: int, batch_size: int) -> str:
    """What to say of a batch that leaves few steps in an epoch of `rows`; else nothing."""
    steps = -(-rows // batch_size)
    if steps >= MIN_STEPS:
        return ""
    return (
        f"at batch size {batch_size:,} an epoch has only {plural(steps, 'step')}. With fewer than "
        f"{MIN_STEPS} a result reflects the number of steps, not the batch size."
    )


def plural(number: int, what: str) -> str:
    """As in "1 step" and "2 steps"."""
    return f"{number} {what}{'s' * (number != 1)}"


Cells = Callable[[Setting], Iterator[Cell]]


@dataclass(frozen=True)
class Study:
    """An experiment of the paper; the columns of its table are batch sizes."""

    cells: Cells
    name: str
    title: str
    paper: str  # the tables and figures that it repeats
    rows: str  # what the rows of its table are
    quantity: Quantity = AUC

    @property
    def quantities(self) -> tuple[Quantity, ...]:
        """What a report shows of it."""
        return (AUC, LOG_LOSS) if self.quantity is AUC else (self.quantity,)


STUDIES: dict[str, Study] = {}
"""The studies, by name. Figure 3, left, is the command `frequencies`."""


def _study(name: str, *what: Any) -> Callable[[Cells], Cells]:
    """Make a study of the function of its cells, by the other fields of `Study`."""

    def add(cells: Cells) -> Cells:
        STUDIES[name] = Study(cells, name, *what)
        return cells

    return add


def _by_rule(setting: Setting, rules: Iterable[str], batch_sizes: Iterable[int]) -> Iterator[Cell]:
    for rule in rules:
        for batch_size in batch_sizes:
            yield Cell(rule, setting.run(rule, batch_size))


def _by_network(setting: Setting) -> Iterator[tuple[str, Setting]]:
    """Each of `NETWORKS`, and the setting with it and those of the options that it takes."""
    for name in NETWORKS:
        others = set(NETWORK) - set(OPTIONS[name])
        options = {k: v for k, v in setting.config.items() if k not in others}
        yield name, dataclasses.replace(setting, config={**options, "model": name})


def _base_and_largest(setting: Setting) -> list[int]:
    return sorted({setting.base, setting.batch_sizes[-1]})


def _eighth_and_largest(setting: Setting) -> list[int]:
    """The paper's two: 8 times the base, or the nearest by ratio, and the largest."""
    middle = min(setting.batch_sizes, key=lambda size: abs(math.log(size / setting.base / 8)))
    return sorted({middle, setting.batch_sizes[-1]})


@_study("scaling-rules", "Which rule keeps the AUC as the batch grows", "Tables 2 and 10", "rule")
def _scaling_rules(setting: Setting) -> Iterator[Cell]:
    rules = [name for name, rule in SCALING_RULES.items() if not rule.decays]  # the paper's
    yield from _by_rule(setting, rules, setting.batch_sizes)
    for found in setting.found:
        config = setting.at(found.hyperparameters)
        yield Cell(TUNED, dataclasses.replace(config, **_beside_values(found)))


@_study("networks", "Whether CowClip holds in every network", "Tables 3 and 4", "network")
def _networks(setting: Setting) -> Iterator[Cell]:
    for name, its in _by_network(setting):
        yield Cell(name, its.run("none", its.base), column="baseline")
        for batch_size in its.batch_sizes:
            yield Cell(name, its.run("cowclip", batch_size))


@_study("control", "Whether rare ids are why the usual rules fail", "Table 1", "data, rule")
def _control(setting: Setting) -> Iterator[Cell]:
    # Table 1's "Sqrt Scale" has the numbers of Table 2's "Sqrt Scaling*".
    for data in (FULL, TOP):
        for cell in _by_rule(setting, ("none", "sqrt_star", "linear"), setting.batch_sizes):
            yield dataclasses.replace(cell, row=f"{data}, {cell.row}", data=data)


@_study("clipping", "What the clip's unit is worth", "Table 6", "clip")
def _clipping(setting: Setting) -> Iterator[Cell]:
    clips: tuple[str | None, ...] = (None, *_THRESHOLDS, "adaptive_field", "adaptive_column")
    for clip in clips:
        threshold = _THRESHOLDS.get(clip or "")
        base = setting.tuned("cowclip").replace(clip=clip, clip_threshold=threshold)
        for batch_size in _eighth_and_largest(setting):
            values = scale(base, to=batch_size, rule="cowclip")
            yield Cell(clip or "no clip", setting.at(values))


@_study("ablation", "What each part of CowClip is worth", "Table 12", "recipe")
def _ablation(setting: Setting) -> Iterator[Cell]:
    base = setting.tuned("cowclip")
    for batch_size in _eighth_and_largest(setting):
        whole = scale(base, to=batch_size, rule="cowclip")
        changes: dict[str, dict[str, Any]] = {
            "linear scale on dense": {"dense_lr": base.dense_lr * batch_size / base.batch_size},
            "empirical scale": {"l2": scale(base, to=batch_size, rule="n2_lambda").l2},
            "without ζ": {"clip_floor": 0.0},
            "without warm-up": {"warmup_epochs": 0.0},
            "without large init": {"init_stddev": recipe("none").init_stddev},
            "without clip": {"clip": None},
            "cowclip": {},
        }
        for row, change in changes.items():
            yield Cell(row, setting.at(whole.replace(**change)))


@_study(
    "time", "How much time a large batch saves", "Tables 5 and 11, Figure 1", "network", MINUTES
)
def _time(setting: Setting) -> Iterator[Cell]:
    epochs = setting.config.get("epochs", 1)
    if epochs != 1:
        raise UserError(f"the study time is of one epoch. Received: epochs={epochs}. Leave it out")
    once = dataclasses.replace(setting, config={**setting.config, "epochs": 1})
    for name, its in _by_network(once):
        for batch_size in its.batch_sizes:
            yield Cell(name, its.run("cowclip", batch_size))


@_study("curves", "What training looks like, epoch by epoch", "Figures 5 and 6", "rule")
def _curves(setting: Setting) -> Iterator[Cell]:
    return _by_rule(setting, ("cowclip",), setting.batch_sizes)


@_study("gradients", "How large the gradients of frequent and rare ids are", "Figure 4", "rule")
def _gradients(setting: Setting) -> Iterator[Cell]:
    return _by_rule(setting, ("none", "cowclip"), _base_and_largest(setting))


@_study(
    "learning-rate", "How narrow the good learning rates are", "Figure 2, right", "rule, factor"
)
def _learning_rate(setting: Setting) -> Iterator[Cell]:
    for rule, factor in itertools.product(("none", "cowclip"), _TENTHS):
        for batch_size in _base_and_largest(setting):
            values = setting.run(rule, batch_size).hyperparameters
            rates = {name: factor * getattr(values, name) for name in ("dense_lr", "embedding_lr")}
            yield Cell(f"{rule}, η x {factor:g}", setting.at(values.replace(**rates)))
