"""The paper's experiments as lists of runs: what is trained for each table and figure.

Pure Python: which runs a study takes is known, and refused if need be, before anything is trained.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from merlin_cowclip.plugins._checks import make_plain
from merlin_cowclip.plugins.scaling import MIN_STEPS, SCALING_RULES, Hyperparameters, recipe, scale
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.study.configuration import NETWORK, network_of
from merlin_cowclip.workflows.training.configuration import BASE_FIELDS, TrainConfig, base_fields
from merlin_cowclip.workflows.training.networks import NETWORKS as OPTIONS
from merlin_cowclip.workflows.training.options import refuse_unknown

FULL, TOP = "full", "top-3"
"""The data as it is, and with the three most frequent ids of every field (Table 1, right)."""

NETWORKS = ("deepfm", "wide_and_deep", "dcn", "dcn_v2")
"""Those of Tables 3 and 4."""

TUNED = "tune"
"""The row of what tunes found, in place of a rule."""

SEEDS = (1234, 1235, 1236)
"""The paper's (Appendix H)."""

VALUES = ("dense_lr", "embedding_lr", "l2", "clip_ratio", "clip_floor")
"""What of a base all rules share; the rest is each rule's recipe."""

_OWN = ("rule", *BASE_FIELDS, "batch_size", "seed")  # of each run's configuration: the study's
_OPTIONS = tuple(one.name for one in dataclasses.fields(TrainConfig) if one.name not in _OWN)
_THRESHOLDS = {"global": 25.0, "field": 0.1, "column": 1e-4}  # of clips, at the base batch size


@dataclass(frozen=True)
class Setting:
    """What all runs of a study have in common, and how far it goes.

    Attributes:
      batch_sizes: in samples per update, rising; the values were tuned at the first, the base.
      values: of the base that replace those of each rule's recipe, by the names of `VALUES`.
      config: options of `TrainConfig` for every run but the rule, base, batch size and seed.
      seeds: of the runs of each cell.
      found: what tunes found, each at another of the batch sizes: a row beside the rules, for as
        many epochs as they.

    Raises:
      UserError: a value out of range, an unknown name, or what was found is of another network or
        batch size.
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
        for name in ("batch_sizes", "seeds"):
            values = tuple(getattr(self, name))
            object.__setattr__(self, name, values)
            if not values or len(set(values)) < len(values):
                raise UserError(
                    f"{name} must name something, and each only once. Received: {list(values)}. "
                    "Correct it"
                )
        if list(self.batch_sizes) != sorted(self.batch_sizes):
            raise UserError(
                "batch_sizes must rise from the base, where the values were tuned. Received: "
                f"{list(self.batch_sizes)}. Sort them, the base first"
            )
        sizes = [config.batch_size for config in self.found]
        if len(set(sizes)) < len(sizes) or not set(sizes) <= set(self.batch_sizes):
            raise UserError(
                "what was tuned must be at one of the batch sizes, and each at another. Received: "
                f"{sizes}, and batch_sizes {list(self.batch_sizes)}. Name others"
            )
        for config in self.found:
            network_of(config, TrainConfig(**self.config).to_dict())  # whose defaults count

    @classmethod
    def of_tune(
        cls,
        tuned: TrainConfig,
        batch_sizes: Sequence[int],
        values: Mapping[str, float],
        config: Mapping[str, Any],
        *,
        networks: Sequence[str] = (),
        **others: Any,
    ) -> Setting:
        """The setting whose base is what a tune found, with its network, update and schedules.

        `values` and `config` go before its own; a study of several `networks` takes of its options
        those that any of them has.
        """
        if batch_sizes[0] != tuned.batch_size:
            raise UserError(
                "the first of the batch sizes must be where the base was tuned. Received: "
                f"{batch_sizes[0]:,}, and a base tuned at {tuned.batch_size:,}. Begin with that"
            )
        network = network_of(tuned, config)
        if networks:
            network = {k: v for k, v in network.items() if any(k in OPTIONS[n] for n in networks)}
        own = {name: getattr(tuned.hyperparameters, name) for name in VALUES}
        return cls(
            batch_sizes, {**own, **values}, {**_of_run(tuned), **network, **config}, **others
        )

    @property
    def base(self) -> int:
        """The batch size where the values were tuned."""
        return self.batch_sizes[0]

    @property
    def largest(self) -> int:
        """The largest batch size."""
        return self.batch_sizes[-1]

    def tuned(self, rule: str) -> Hyperparameters:
        """A rule's recipe with the values of the base."""
        try:
            return recipe(rule).replace(batch_size=self.base, **self.values)
        except ValueError as error:
            raise UserError(str(error)) from None

    def run(self, rule: str, batch_size: int) -> TrainConfig:
        """A run at a batch size, with the base scaled by a rule."""
        return self._of(self.tuned(rule), rule, batch_size)

    def at(self, values: Hyperparameters) -> TrainConfig:
        """A run with these values at their own batch size."""
        return self._of(values, "none", values.batch_size)

    def _of(self, values: Hyperparameters, rule: str, batch_size: int) -> TrainConfig:
        own = {**base_fields(values), "rule": rule, "batch_size": batch_size}
        return TrainConfig(**{**self.config, **own})


def _of_run(tuned: TrainConfig) -> dict[str, Any]:
    """What a tune found beside the network and the values; its schedules for any epochs."""
    return {"update": tuned.update, "deterministic": tuned.deterministic, **tuned.schedules()}


def batch_sizes(base: int, rows: int) -> tuple[int, ...]:
    """The base doubled, up to the paper's 128 times, while an epoch of `rows` has enough steps."""
    found = [base]
    while 2 * found[-1] <= 128 * base and not few_steps(rows, 2 * found[-1]):
        found.append(2 * found[-1])
    return tuple(found)


@dataclass(frozen=True)
class Cell:
    """One cell of a study's table: a run for each seed.

    Attributes:
      row, column: where it stands.
      config: of the run, but for the seed.
      data: `FULL` or `TOP`.
    """

    row: str
    column: str
    config: TrainConfig
    data: str = FULL


@dataclass(frozen=True)
class Quantity:
    """A number of a run's result, and how it is shown.

    Attributes:
      key: in `result.json`.
      name: with its unit.
      factor: from the result's unit to that.
      digits: behind the point.
    """

    key: str
    name: str
    factor: float
    digits: int

    def shown(self, mean: float, deviation: float) -> str:
        """Mean ± deviation; of one run the deviation is 0, and not shown."""
        mean, deviation = self.factor * mean, self.factor * deviation
        digits = self.digits
        return f"{mean:.{digits}f}" + (f" ± {deviation:.{digits}f}" if deviation else "")


AUC = Quantity("auc", "test AUC, %", 100.0, 3)
LOG_LOSS = Quantity("log_loss", "test log loss", 1.0, 5)
MINUTES = Quantity("train_seconds", "minutes of training", 1 / 60, 2)


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


@dataclass(frozen=True)
class Study:
    """An experiment of the paper.

    Attributes:
      name: as users type it.
      title: what it asks.
      paper: the tables and figures that it repeats.
      cells: the runs of a setting.
      rows: what the rows of its table are; its columns are batch sizes.
      quantity: what its table has of each cell.
      networks: that it trains; none: the setting's.
    """

    name: str
    title: str
    paper: str
    cells: Callable[[Setting], Iterator[Cell]]
    rows: str
    quantity: Quantity = AUC
    networks: Sequence[str] = ()


def _scaling_rules(setting: Setting) -> Iterator[Cell]:
    for rule in SCALING_RULES:
        for batch_size in setting.batch_sizes:
            yield Cell(rule, f"{batch_size:,}", setting.run(rule, batch_size))
    for found in setting.found:
        config = dataclasses.replace(setting.at(found.hyperparameters), **_of_run(found))
        yield Cell(TUNED, f"{found.batch_size:,}", config)


def _networks(setting: Setting) -> Iterator[Cell]:
    for name, config in _by_network(setting):
        yield Cell(name, "baseline", config.run("none", setting.base))
        for batch_size in setting.batch_sizes:
            yield Cell(name, f"{batch_size:,}", config.run("cowclip", batch_size))


def _by_network(setting: Setting) -> Iterator[tuple[str, Setting]]:
    """Each of `NETWORKS`, and the setting with it and those of the options that it takes."""
    taken = {option for name in NETWORKS for option in OPTIONS[name]}
    if others := [name for name in NETWORK if name in setting.config and name not in taken]:
        raise UserError(
            f"a study of the networks {', '.join(NETWORKS)} takes their options alone. Received: "
            f"{others[0]}={setting.config[others[0]]!r}. Leave it out"
        )
    for name in NETWORKS:
        gone = taken - set(OPTIONS[name])
        options = {k: v for k, v in setting.config.items() if k not in gone}
        yield name, dataclasses.replace(setting, config={**options, "model": name})


def _control(setting: Setting) -> Iterator[Cell]:
    # Table 1's "Sqrt Scale" has the numbers of Table 2's "Sqrt Scaling*".
    for data in (FULL, TOP):
        for rule in ("none", "sqrt_star", "linear"):
            for batch_size in setting.batch_sizes:
                config = setting.run(rule, batch_size)
                yield Cell(f"{data}, {rule}", f"{batch_size:,}", config, data)


def _clipping(setting: Setting) -> Iterator[Cell]:
    clips: tuple[str | None, ...] = (None, *_THRESHOLDS, "adaptive_field", "adaptive_column")
    for clip in clips:
        threshold = _THRESHOLDS.get(clip or "")
        base = setting.tuned("cowclip").replace(clip=clip, clip_threshold=threshold)
        for batch_size in _eighth_and_largest(setting):
            values = scale(base, to=batch_size, rule="cowclip")
            yield Cell(clip or "no clip", f"{batch_size:,}", setting.at(values))


def _ablation(setting: Setting) -> Iterator[Cell]:
    base = setting.tuned("cowclip")
    plain = recipe("none")

    def scaled(to: int) -> dict[str, Hyperparameters]:
        whole = scale(base, to=to, rule="cowclip")
        dense = base.dense_lr * to / base.batch_size
        return {
            "linear scale on dense": whole.replace(dense_lr=dense),
            "empirical scale": scale(base, to=to, rule="n2_lambda"),
            "without ζ": whole.replace(clip_floor=0.0),
            "without warm-up": whole.replace(warmup_epochs=0.0),
            "without large init": whole.replace(init_stddev=plain.init_stddev),
            "without clip": whole.replace(clip=None),
            "cowclip": whole,
        }

    for batch_size in _eighth_and_largest(setting):
        for name, values in scaled(batch_size).items():
            yield Cell(name, f"{batch_size:,}", setting.at(values))


def _eighth_and_largest(setting: Setting) -> list[int]:
    """The paper's two: 8 times the base, and the largest; of the batch sizes that are wanted.

    The nearest by ratio: at the base itself nothing is scaled.
    """
    middle = min(setting.batch_sizes, key=lambda size: abs(math.log(size / setting.base / 8)))
    return sorted({middle, setting.largest})


def _base_and_largest(setting: Setting) -> list[int]:
    return sorted({setting.base, setting.largest})


def _curves(setting: Setting) -> Iterator[Cell]:
    for batch_size in setting.batch_sizes:
        yield Cell("cowclip", f"{batch_size:,}", setting.run("cowclip", batch_size))


def _time(setting: Setting) -> Iterator[Cell]:
    epochs = setting.config.get("epochs", 1)
    if epochs != 1:
        raise UserError(f"the study time is of one epoch. Received: epochs={epochs}. Leave it out")
    once = dataclasses.replace(setting, config={**setting.config, "epochs": 1})
    for name, config in _by_network(once):
        for batch_size in setting.batch_sizes:
            yield Cell(name, f"{batch_size:,}", config.run("cowclip", batch_size))


def _gradients(setting: Setting) -> Iterator[Cell]:
    for rule in ("none", "cowclip"):
        for batch_size in _base_and_largest(setting):
            yield Cell(rule, f"{batch_size:,}", setting.run(rule, batch_size))


def _learning_rate(setting: Setting) -> Iterator[Cell]:
    for rule in ("none", "cowclip"):
        for factor in (0.1, 0.3, 1.0, 3.0, 10.0):
            for batch_size in _base_and_largest(setting):
                values = setting.run(rule, batch_size).hyperparameters
                moved = values.replace(
                    dense_lr=values.dense_lr * factor, embedding_lr=values.embedding_lr * factor
                )
                yield Cell(f"{rule}, η x {factor:g}", f"{batch_size:,}", setting.at(moved))


_ALL = (
    Study(
        "scaling-rules",
        "Which scaling rule keeps the AUC as the batch grows",
        "Tables 2 and 10",
        _scaling_rules,
        "rule",
    ),
    Study(
        "networks",
        "Whether CowClip holds in every network",
        "Tables 3 and 4",
        _networks,
        "network",
        networks=NETWORKS,
    ),
    Study(
        "control",
        "Whether rare ids are why the usual rules fail",
        "Table 1",
        _control,
        "data, rule",
    ),
    Study("clipping", "What the clip's unit is worth", "Table 6", _clipping, "clip"),
    Study("ablation", "What each part of CowClip is worth", "Table 12", _ablation, "recipe"),
    Study(
        "time",
        "How much time a large batch saves",
        "Tables 5 and 11, Figure 1",
        _time,
        "network",
        MINUTES,
        NETWORKS,
    ),
    Study("curves", "What training looks like, epoch by epoch", "Figures 5 and 6", _curves, "rule"),
    Study(
        "gradients",
        "How large the gradients of frequent and rare ids are",
        "Figure 4",
        _gradients,
        "rule",
    ),
    Study(
        "learning-rate",
        "How narrow the good learning rates are",
        "Figure 2, right",
        _learning_rate,
        "rule, factor",
    ),
)
STUDIES: Mapping[str, Study] = {study.name: study for study in _ALL}
"""The studies, by name. Figure 3, left, is the command `frequencies`."""
