"""What all runs of a study have in common. Pure Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from merlin_cowclip.plugins._checks import make_plain
from merlin_cowclip.plugins.scaling import Hyperparameters, recipe
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.study.configuration import network_of
from merlin_cowclip.workflows.training.configuration import TrainConfig
from merlin_cowclip.workflows.training.networks import NETWORKS

SEEDS = (1234, 1235, 1236)
"""The paper's (Appendix H)."""

VALUES = ("dense_lr", "embedding_lr", "l2", "clip_ratio", "clip_floor")
"""What of a base all rules share; the rest is each rule's recipe."""

_OWN = ("rule", "base", "batch_size", "seed")  # of each run's configuration: the study's
_OPTIONS = tuple(one.name for one in fields(TrainConfig) if one.name not in _OWN)


def shared_values(base: Hyperparameters) -> dict[str, float]:
    """What all rules take of a base that was tuned; of CowClip's clip only if it clips so."""
    clips = base.clip == "adaptive_column"
    return {name: getattr(base, name) for name in (VALUES if clips else VALUES[:3])}


def _refuse_clip_tables(found: TrainConfig) -> None:
    """No study clips some tables alone: its runs would be without, and no word."""
    if found.clip_tables is not None:
        raise UserError(
            "a study's base, and what was tuned, must clip all tables alike. Received: "
            f"clip_tables={list(found.clip_tables)}, tuned at {found.batch_size:,}. Give it "
            "without, as dataclasses.replace(config, clip_tables=None)"
        )


@dataclass(frozen=True)
class Setting:
    """What all runs of a study have in common, and how far it goes.

    Attributes:
      batch_sizes: in samples per update, rising; the first one is the base, where the values were
        tuned.
      values: of the base that replace those of each rule's recipe, by the names of `VALUES`.
      config: options of `TrainConfig` for every run: the network, `epochs`, `update`; not its rule,
        base, batch size and seed, which are the study's.
      seeds: of the runs of each cell.
      thresholds: constants of the clips "global", "field" and "column" at the base batch size.
      found: what tunes found, each at its own one of the batch sizes: a row beside the rules, for
        as many epochs as they.

    Raises:
      UserError: another value or option; no batch size or seed, one twice, or out of range, or
        sizes that do not rise; or
        what was found is of another network or batch size, or clips some tables alone.
    """

    batch_sizes: Sequence[int]
    values: Mapping[str, float] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    seeds: Sequence[int] = SEEDS
    thresholds: Mapping[str, float] = field(
        default_factory=lambda: {"global": 25.0, "field": 0.1, "column": 1e-4}
    )
    found: Sequence[TrainConfig] = ()

    def __post_init__(self) -> None:
        for name in ("batch_sizes", "seeds"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        make_plain(self)
        self._check_names()
        for name in ("batch_sizes", "seeds"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise UserError(
                    f"{name} must name something, and each only once. Received: {list(values)}. "
                    "Correct it"
                )
        for seed in self.seeds:
            TrainConfig(seed=seed)
        for size in self.batch_sizes:
            TrainConfig(batch_size=size)
        if list(self.batch_sizes) != sorted(self.batch_sizes):
            raise UserError(
                "batch_sizes must rise from the base, where the values were tuned. Received: "
                f"{list(self.batch_sizes)}. Sort them, the base first"
            )
        self._check_found()

    def _check_names(self) -> None:
        for given, allowed in (("values", VALUES), ("config", _OPTIONS)):
            if others := sorted(set(getattr(self, given)) - set(allowed)):
                raise UserError(
                    f"{given} of a setting must be among {', '.join(allowed)}: the rules, batch "
                    f"sizes and seeds are the study's. Received: {others}. Leave them out"
                )

    def _check_found(self) -> None:
        if not self.found:
            return
        sizes = [config.batch_size for config in self.found]
        if len(set(sizes)) < len(sizes) or not set(sizes) <= set(self.batch_sizes):
            raise UserError(
                "what was tuned must be at one of the batch sizes, and each at another. Received: "
                f"{sizes}, and batch_sizes {list(self.batch_sizes)}. Name others"
            )
        for config in self.found:
            _refuse_clip_tables(config)
            network_of(config, TrainConfig(**self.config).to_dict())  # whose defaults count

    @classmethod
    def of_tune(
        cls,
        tuned: TrainConfig,
        batch_sizes: Sequence[int],
        values: Mapping[str, float] | None = None,
        config: Mapping[str, Any] | None = None,
        *,
        networks: Sequence[str] = (),
        **others: Any,
    ) -> Setting:
        """The setting whose base is what a tune found: its values, network, update, schedules.

        And whether it is deterministic.

        Args:
          tuned: `Tuned.train_config()`.
          batch_sizes: of which the first is the one that was tuned at.
          values: that go before its own.
          config: what goes before its own update and schedules; the network is its own.
          networks: of a study of several, `Study.networks`, which take of its options their own.
          others: as they are.

        Raises:
          UserError: the base is another batch size, `config` names another network, or the base
            clips some tables alone.
        """
        _refuse_clip_tables(tuned)
        if batch_sizes and batch_sizes[0] != tuned.batch_size:
            raise UserError(
                "the first of the batch sizes must be where the base was tuned. Received: "
                f"{batch_sizes[0]:,}, and a base tuned at {tuned.batch_size:,}. Begin with that"
            )
        given = config or {}
        network = network_of(tuned, given)
        of_run = {"update": tuned.update, "deterministic": tuned.deterministic}
        if networks:
            network = {
                option: value
                for option, value in network.items()
                if any(option in NETWORKS[name] for name in networks)
            }
        return cls(
            batch_sizes,
            {**shared_values(tuned.hyperparameters), **(values or {})},
            {**of_run, **tuned.schedules(), **network, **given},
            **others,
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
        given = {k: v for k, v in self.values.items() if v is not None}
        try:
            return recipe(rule).replace(batch_size=self.base, **given)
        except ValueError as error:
            raise UserError(str(error)) from None

    def run(self, rule: str, batch_size: int, **options: Any) -> TrainConfig:
        """A run at a batch size, with the base scaled by a rule."""
        given = {**self.config, "rule": rule, "base": self.tuned(rule), "batch_size": batch_size}
        return TrainConfig(**{**given, **options})

    def at(self, values: Hyperparameters, **options: Any) -> TrainConfig:
        """A run with these values at their own batch size."""
        given = {**self.config, "rule": "none", "base": values, "batch_size": values.batch_size}
        return TrainConfig(**{**given, **options})


def batch_sizes(base: int, rows: int, *, times: int = 128, steps: int = 30) -> tuple[int, ...]:
    """The base batch size doubled, up to `times` as many samples and `steps` updates an epoch.

    Args:
      base: the smallest.
      rows: of the training part.
      times: the largest over the base at most: the paper's 128.
      steps: in an epoch of the largest at least; fewer would tell of the steps, not of the batch.
    """
    found = [base]
    while 2 * found[-1] <= times * base and rows // (2 * found[-1]) >= steps:
        found.append(2 * found[-1])
    return tuple(found)
