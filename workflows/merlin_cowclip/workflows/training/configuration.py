"""A training run's configuration: checked, fit for JSON both ways, and with an identity.

Pure Python: a wrong option is refused before TensorFlow's seconds of importing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from merlin_cowclip.plugins._checks import is_whole, make_plain, whole_number
from merlin_cowclip.plugins.scaling import (
    ADAPTIVE_CLIPS,
    SCALING_RULES,
    Hyperparameters,
    find_rule,
    recipe,
    scale,
)
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.training.learning_rates import (
    falls_to_zero_in,
    over_all_epochs,
    plain_schedule,
)
from merlin_cowclip.workflows.training.networks import NETWORKS, options_of

UPDATES = ("exact", "lazy", "deferred")
"""As in `CowClipAdam`, which takes seconds to import."""

TABLES = ("replicated", "sharded")
"""Where the rows of tables are, of several ranks: on each, or each on one."""

LARGEST_SEED = 2**32 - 1  # NumPy's

_IDENTITY_FORMAT = 1
_NETWORK_OPTIONS = tuple(dict.fromkeys(name for options in NETWORKS.values() for name in options))


@dataclass(frozen=True, eq=False)
class TrainConfig:
    """What to train, and how; everything but the data and the place of the run.

    Two are equal if they mean the same: an option left out is its default, and one of a part that
    the network has not (`embedding_dim`, `mlp`) is without effect.

    Attributes:
      model: a name in `MODELS`.
      batch_size: global samples per update.
      rule: a name in `SCALING_RULES`, or another name that the paper has for it: how the base
        becomes the values for `batch_size`.
      base: the hyperparameters tuned at `base.batch_size`; `None` for the rule's recipe. `tuned`
        is either.
      epochs: passes over the training part.
      seed: of the initial weights and of the order of the rows, below 2³².
      update: "exact", "lazy" or "deferred".
      tables: "replicated", or "sharded": of several ranks, each has an N-th of the rows of all
        tables, with their moments.
      deterministic: the same result to the last digit with the same seed on the same machine, for
        slower kernels on GPUs.
      embedding_dim: width of the embeddings; `lr` has none.
      mlp: units of the deep stream's layers, in DLRM of the top MLP's; `lr` and `fm` have none.
      cross_layers: depth of the cross stream of `dcn` and `dcn_v2` (3).
      low_rank_dim: rank of `dcn_v2`'s matrices; `None` for full rank.
      bottom_mlp: units of DLRM's bottom MLP, before one of width `embedding_dim` (512, 256, 64);
        of no effect where the data have no numbers.
      combiner: how a list column's embeddings become one: "mean" (the default), "sum" or "sqrtn",
        for all or by field.
      clip_tables: fields or tables ("embeddings", "linear") to clip; `None` for every table of
        width 2 and more.
      dense_schedule: how the dense learning rate falls, as in `learning_rates`; the warm-up goes on
        top. `None`: it stays.
      embedding_schedule: the same for the embeddings' learning rate.
      patience: epochs without a better test AUC after which training ends; `None`: all `epochs`.

    Raises:
      UserError: an unknown name, an option that the network does not take, a number out of range,
        or values that deferred updates cannot take.
    """

    model: str = "deepfm"
    batch_size: int = 1024
    rule: str = "cowclip"
    base: Hyperparameters | None = None
    epochs: int = 10
    seed: int = 1234
    update: str = "exact"
    tables: str = "replicated"
    deterministic: bool = True
    embedding_dim: int = 10
    mlp: Sequence[int] = (400, 400, 400)
    cross_layers: int | None = None
    low_rank_dim: int | None = None
    bottom_mlp: Sequence[int] | None = None
    combiner: str | Mapping[str, str] | None = None
    clip_tables: Sequence[str] | None = None
    dense_schedule: str | Mapping[str, Any] | None = None
    embedding_schedule: str | Mapping[str, Any] | None = None
    patience: int | None = None

    def __post_init__(self) -> None:
        make_plain(self)
        try:
            self._check()
        except (ValueError, OverflowError) as error:
            raise UserError(str(error)) from None

    def _check(self) -> None:
        _ = self.network_options
        if self.update not in UPDATES:
            raise ValueError(
                f"update must be one of {', '.join(UPDATES)}. Received: update={self.update!r}"
            )
        if self.tables not in TABLES:
            raise ValueError(
                f"tables must be one of {', '.join(TABLES)}. Received: tables={self.tables!r}"
            )
        if not is_whole(self.batch_size, 1, 2**48):
            raise ValueError(
                "batch_size must be a positive whole number of samples. Received: "
                f"batch_size={self.batch_size!r}"
            )
        whole_number("epochs", self.epochs)
        whole_number("seed", self.seed, LARGEST_SEED, least=0)
        if self.patience is not None:
            whole_number("patience", self.patience)
        if not isinstance(self.deterministic, bool):
            raise ValueError(
                f"deterministic must be true or false. Received: {self.deterministic!r}"
            )
        if self.base is not None and not isinstance(self.base, Hyperparameters):
            raise ValueError(
                f"base must be Hyperparameters, or None for the rule's recipe. Received: "
                f"base={self.base!r}"
            )
        if not isinstance(self.rule, str):
            raise ValueError(
                f"rule must be one of {', '.join(SCALING_RULES)}. Received: rule={self.rule!r}"
            )
        object.__setattr__(self, "rule", find_rule(self.rule).name)
        _ = self.hyperparameters
        for name in ("mlp", "bottom_mlp"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, tuple(getattr(self, name)))
        self._check_clip_tables()
        for name in ("dense_schedule", "embedding_schedule"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, plain_schedule(name, getattr(self, name)))
        self._check_falling_rates()
        if self.update == "deferred":
            from merlin_cowclip.plugins.optimizers.deferred import check_deferrable  # TensorFlow

            try:
                values, schedule = self.hyperparameters, self.embedding_schedule
                check_deferrable(
                    values.embedding_lr if schedule is None else schedule,
                    l2=values.l2,
                    clip=values.clip,
                    clip_ratio=values.clip_ratio,
                )
            except ValueError as error:
                raise ValueError(f"at batch size {self.batch_size:,}: {error}") from None

    def schedules(self) -> dict[str, Any]:
        """Both schedules by name, for a training of as many epochs or others."""
        return {
            "dense_schedule": over_all_epochs(self.dense_schedule),
            "embedding_schedule": over_all_epochs(self.embedding_schedule),
        }

    def _check_falling_rates(self) -> None:
        """Refuse epochs that change nothing: both learning rates have fallen to 0 before."""
        ends = [falls_to_zero_in(s) for s in (self.dense_schedule, self.embedding_schedule)]
        end = max(math.inf if end is None else end for end in ends)
        if end < self.epochs:
            raise ValueError(
                "learning rates must not both be 0 before the last epoch. Received: schedules that "
                f"fall to 0 in {end:g} epochs, and {self.epochs} epochs. Let them fall later, over "
                "all by epochs=None, or train fewer"
            )

    def _check_clip_tables(self) -> None:
        wanted = self.clip_tables
        if wanted is None:
            return
        lists = isinstance(wanted, list | tuple)
        if not lists or not all(isinstance(name, str) and name for name in wanted):
            raise ValueError(
                "clip_tables must be a list of names of fields or tables. Received: "
                f"clip_tables={wanted!r}"
            )
        if not wanted or len(set(wanted)) < len(wanted):
            raise ValueError(
                "clip_tables must name something, and each only once. Received: "
                f"clip_tables={list(wanted)}. To clip nothing, use clip=None"
            )
        if self.tuned.clip is None:
            is_of_rule = recipe(self.rule).clip is None
            by_rule = f", as rule {self.rule!r} has it" if is_of_rule else ""
            raise ValueError(
                f"clip_tables needs a clip rule. Received: clip_tables={list(wanted)} with "
                f"clip=None{by_rule}. Choose a clip, or leave it out"
            )
        object.__setattr__(self, "clip_tables", tuple(wanted))

    @property
    def tuned(self) -> Hyperparameters:
        """`base`, or without one the rule's recipe."""
        return recipe(self.rule) if self.base is None else self.base

    @property
    def hyperparameters(self) -> Hyperparameters:
        """`tuned`, scaled to `batch_size` by `rule`."""
        return scale(self.tuned, to=self.batch_size, rule=self.rule)

    @property
    def network_options(self) -> dict[str, Any]:
        """What the network's builder takes, by name, as JSON has it."""
        return options_of(self.model, {name: getattr(self, name) for name in _NETWORK_OPTIONS})

    def to_dict(self) -> dict[str, Any]:
        """Fit for JSON; `from_dict` is the way back. Nothing is left to defaults that may change.

        Options that the network does not take are `None`.
        """
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        options = {name: None for name in _NETWORK_OPTIONS} | self.network_options
        tables = None if self.clip_tables is None else list(self.clip_tables)
        return {**given, "base": self.tuned.to_dict(), **options, "clip_tables": tables}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        """The configuration that `to_dict` describes; what is left out has its default.

        `base` may name some values only: the others are the rule's recipe.

        Raises:
          UserError: a key that is none, or a value out of range.
        """
        refuse_unknown("a configuration", values, [f.name for f in dataclasses.fields(cls)])
        values = dict(values)
        for name in ("embedding_dim", "mlp"):  # these have no None that stands for a default
            if values.get(name, 0) is None:
                raise UserError(f"{name} must have a value. Received: None. Leave it out")
        base = values.get("base")
        if isinstance(base, Mapping):
            known = [field.name for field in dataclasses.fields(Hyperparameters)]
            refuse_unknown("base", base, known)
            try:
                values["base"] = recipe(str(values.get("rule", "cowclip"))).replace(**base)
            except (ValueError, TypeError) as error:
                raise UserError(str(error)) from None
        return cls(**values)

    @property
    def identity(self) -> str:
        """A SHA-256, in hex, of what determines the result: the same in every process and version.

        Of the network with the options that it uses, the hyperparameters scaled to the batch size,
        the epochs, the seed, the update mode, whether tables are in shards (whose initial rows are
        others), whether it is deterministic, the clipped tables and the schedules. Not of `rule`
        and `base`, from which the scaled values come: where two rules agree, at the base batch
        size, they are one run. Not of r and ζ where the clip has none. An option left out is its
        default. Keras's precision is no part of a configuration: a run has it beside its own.
        """
        options, hp = NETWORKS[self.model], self.hyperparameters
        unused = () if hp.clip in ADAPTIVE_CLIPS else ("clip_ratio", "clip_floor")
        meant = {
            "format": _IDENTITY_FORMAT,
            **{k: v for k, v in self.to_dict().items() if k not in (*_NETWORK_OPTIONS, "base")},
            "scaled": {
                # 1 and 1.0 are one number, -0.0 and 0.0 are one.
                name: float(value) + 0.0 if isinstance(value, int | float) else value
                for name, value in hp.to_dict().items()
                if name not in unused
            },
            "network": {k: v for k, v in self.network_options.items() if options[k].used},
        }
        del meant["rule"]
        if self.tables == TABLES[0]:
            meant["tables"] = None
        combiner = meant["network"]["combiner"]
        if isinstance(combiner, dict) and len(set(combiner.values())) == 1:
            meant["network"]["combiner"] = next(iter(combiner.values()))
        if self.clip_tables is not None:
            meant["clip_tables"] = sorted(self.clip_tables)
        for name in ("dense_schedule", "embedding_schedule"):
            schedule = meant[name]
            if schedule is not None and schedule.get("epochs", 0) is None:
                meant[name] = {**schedule, "epochs": float(self.epochs)}
        # What a later version adds and this configuration does not use must not change it.
        present = {name: value for name, value in meant.items() if value is not None}
        text = json.dumps(present, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(text.encode("ascii")).hexdigest()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TrainConfig):
            return NotImplemented
        return self._meant() == other._meant()

    def _meant(self) -> dict[str, Any]:
        """All but the options of which the network makes nothing."""
        unused = [name for name, option in NETWORKS[self.model].items() if not option.used]
        return {name: value for name, value in self.to_dict().items() if name not in unused}

    def __hash__(self) -> int:
        return hash(self.identity)


def base_hyperparameters(rule: str, **changes: Any) -> Hyperparameters:
    """The rule's recipe with some values replaced; `None` leaves a value alone.

    Raises:
      UserError: an unknown rule, or a value out of range.
    """
    try:
        return recipe(rule).replace(**{k: v for k, v in changes.items() if v is not None})
    except ValueError as error:
        raise UserError(str(error)) from None


def refuse_unknown(what: str, values: Mapping[str, Any], known: Sequence[str]) -> None:
    """Refuse a key that is none, and what has no keys.

    Raises:
      UserError: names it, and those that are.
    """
    if not isinstance(values, Mapping):
        raise UserError(f"{what} must be values by name. Received: {values!r}")
    unknown = [key for key in values if key not in known]
    if unknown:
        raise UserError(
            f"{what} has the keys {', '.join(known)}. Received: {str(unknown[0])!r}. Correct it, "
            "or take it out"
        )
