# SPDX-License-Identifier: Apache-2.0
"""The configuration of a training run and of what it keeps: checked once, fit for JSON both ways.

A field says what its option on the command line is, and how it is checked. Pure Python: a wrong
option is refused before TensorFlow's seconds of importing.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from merlin_cowclip.plugins._checks import integer, layer_units, make_plain
from merlin_cowclip.plugins.scaling import (
    ADAPTIVE_CLIPS,
    CLIPS,
    MIN_STEPS,
    SCALING_RULES,
    Hyperparameters,
    check_number,
    recipe,
    scale,
)
from merlin_cowclip.workflows.errors import UserError

COMBINERS = ("mean", "sum", "sqrtn")

_DEEP: Mapping[str, Any] = {"embedding_dim": 10, "mlp": (400, 400, 400), "combiner": "mean"}
NETWORKS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "lr": {"combiner": "mean"},
        "fm": {"embedding_dim": 10, "combiner": "mean"},
        "wide_and_deep": _DEEP,
        "deepfm": _DEEP,
        "dcn": {**_DEEP, "cross_layers": 3},
        "dcn_v2": {**_DEEP, "cross_layers": 3, "low_rank_dim": None},
        "dlrm": {**_DEEP, "bottom_mlp": (512, 256, 64)},
    }
)
"""Name → the options that it makes something of, with the builder's defaults."""

OPTIONS = tuple(dict.fromkeys(name for options in NETWORKS.values() for name in options))

SCHEDULES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "exponential": {"rate": ..., "epochs": 1.0},
        "linear": {"to": 0.0, "epochs": None},
        "cosine": {"to": 0.0, "epochs": None},
    }
)
"""Name → default by parameter; `...`: required.

η is the scaled learning rate, t the time since the beginning in epochs; `epochs` None means all
epochs of the run. exponential: η · rate^(t / epochs). linear, cosine: from η to η · `to`, in a
straight line or along half a cosine. The dense warm-up multiplies the schedule.
"""

TO_ZERO: Mapping[str, Any] = {"name": "linear", "to": 0.0, "epochs": None}
CONSTANT_SCHEDULE: Mapping[str, Any] = {**TO_ZERO, "to": 1.0}

UPDATES = ("exact", "lazy", "deferred")
"""As in `CowClipAdam`, which takes seconds to import."""

TABLES = ("replicated", "sharded")
PRECISIONS = ("float32", "mixed_float16", "mixed_bfloat16")
LARGEST_SEED = 2**32 - 1  # NumPy's
NO_CLIP, CONSTANT = "none", "constant"
GROUP = "Checkpoints and stopping"
_IDENTITY_FORMAT = 2

Check = Callable[[str, Any], Any]
"""(name, value) → the value as the configuration has it; a ValueError for one out of range."""


def units_or_none(name: str, value: Any) -> tuple[int, ...]:
    """The units of layers, of which there may be none."""
    return () if value in ((), []) else layer_units(name, value)


def check_combiner(name: str, value: Any) -> str | dict[str, str]:
    """How a list column's embeddings become one, for all or by field."""
    named = list(value.values()) if isinstance(value, Mapping) else [value]
    for one in named:
        if not isinstance(one, str) or one not in COMBINERS:
            raise ValueError(
                f"{name} must be one of {', '.join(COMBINERS)}, for all lists or by field. "
                f"Received: {name}={value!r}"
            )
    return dict(value) if isinstance(value, Mapping) else value


def options_of(model: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a network: those given, and the defaults of the others.

    Args:
      model: a name in `NETWORKS`.
      given: by name; `None` for the default.
    """
    options = NETWORKS[model]
    for name, value in given.items():
        if value is not None and name not in options:
            takers = ", ".join(other for other, names in NETWORKS.items() if name in names)
            raise ValueError(
                f"{name} belongs to {takers}. Received: {name}={value!r} with model={model!r}. "
                "Leave it out, or choose another network"
            )
    return {n: d if given.get(n) is None else given[n] for n, d in options.items()}


def plain_schedule(option: str, given: Any) -> dict[str, Any]:
    """A schedule with all its parameters, checked; `option` is its name in errors."""
    given = {"name": given} if isinstance(given, str) else given
    name = given.get("name") if isinstance(given, Mapping) else None
    if not isinstance(name, str) or name not in SCHEDULES:
        raise ValueError(
            f"{option} must be one of {', '.join(SCHEDULES)}, with its parameters. Received: "
            f"{given!r}"
        )
    defaults = SCHEDULES[name]
    plain = {"name": name, **defaults, **given}
    if ... in plain.values() or plain.keys() != {"name", *defaults}:
        raise ValueError(
            f"{option} {name!r} has the parameters {', '.join(defaults)}. Received: {given!r}"
        )
    for key, default in defaults.items():
        label, value = f"{option} {key}", plain[key]
        if value is not default:
            plain[key] = check_number(label, value, positive=key != "to")
    return plain


def option_text(schedule: Mapping[str, Any]) -> str:
    """A plain schedule as its option is written, such as linear:to=0,epochs=3."""
    pairs = {key: value for key, value in schedule.items() if key != "name" and value is not None}
    return f"{schedule['name']}:{','.join(f'{key}={value:g}' for key, value in pairs.items())}"


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false. Received: {value!r}")
    return value


_CHECKS: dict[str, Check] = {
    **{"size": integer, "count": integer, "number": check_number},
    "positive": functools.partial(check_number, positive=True),
    **{"units": layer_units, "flag": _flag},
}  # by kind


def option(
    help: str,
    default: Any = None,
    *,
    group: str,
    kind: str = "text",
    choices: Sequence[str] = (),
    check: Check | None = None,
    **texts: str,
) -> Any:
    """A field of a configuration: its help, with the unit, its default, and its help's heading.

    The default is `None` where it depends on other fields. `kind` is how its text is read
    (`commands.options.TYPES`) and, without a `check`, checked; `None` is not checked. `choices` are
    all values. `texts` are for help: `symbol`, the paper's; `shown`, the default in words;
    `metavar`; `flag`, the option's name where it is not the field's.
    """
    check = check or _CHECKS.get(kind)
    metadata = {"help": help, "group": group, "kind": kind, "choices": choices, "check": check}
    none = dict.fromkeys(("symbol", "shown", "metavar", "flag"), "")
    return dataclasses.field(default=default, metadata={**metadata, **none, **texts})


def check_fields(instance: Any) -> None:
    """Check the fields of a frozen dataclass, each by its own check, and let them be plain."""
    make_plain(instance)
    for field in dataclasses.fields(instance):
        name, value = field.name, getattr(instance, field.name)
        choices, check = field.metadata["choices"], field.metadata["check"]
        try:
            if value is None and field.default is not None:
                raise ValueError(f"{name} must have a value. Received: None. Leave it out")
            if value is not None and choices and value not in choices:
                known = ", ".join(choices)
                raise ValueError(f"{name} must be one of {known}. Received: {name}={value!r}")
            if value is not None and check:
                object.__setattr__(instance, name, check(name, value))
        except ValueError as error:
            raise UserError(str(error)) from None


def refuse_unknown(what: str, values: Mapping[str, Any], known: Sequence[str]) -> None:
    """Refuse a key that is none, and what has no keys."""
    if not isinstance(values, Mapping):
        raise UserError(f"{what} must be values by name. Received: {values!r}")
    if unknown := [key for key in values if key not in known]:
        raise UserError(
            f"{what} has the keys {', '.join(known)}. Received: {str(unknown[0])!r}. Correct it, "
            "or remove it"
        )


def _names(name: str, value: Any) -> tuple[str, ...]:
    is_list = isinstance(value, list | tuple) and all(isinstance(n, str) and n for n in value)
    if not is_list or not value or len(set(value)) < len(value):
        raise ValueError(
            f"{name} must be a list of names of fields or tables, each once. Received: "
            f"{name}={value!r}. To clip nothing, use clip='none'"
        )
    return tuple(sorted(value))


_OURS = "sqrt_decay or cowclip"
_CONSTANT = (None, CONSTANT_SCHEDULE)
_seed = functools.partial(integer, most=LARGEST_SEED, least=0)
_network, _run, _value, _clip = (
    functools.partial(option, group=group)
    for group in (
        "The network",
        "Training",
        "Hyperparameters at the base batch size",
        "Clipping of the embeddings' gradients",
    )
)
_schedule = functools.partial(
    _value,
    kind="schedule",
    metavar="NAME[:KEY=VALUE,…]",
    shown="linear:to=0 with rule sqrt_decay, else constant",
    check=lambda name, value: plain_schedule(
        name, CONSTANT_SCHEDULE if value == CONSTANT else value
    ),
)


@dataclass(frozen=True)
class TrainConfig:
    """What to train, and how; everything but the data and the place of the run.

    What is `None` becomes the rule's recipe or the network's default as it is made, so a
    configuration says all its values. `dataclasses.replace` keeps them, also with another rule or
    network. Each field is an option of the command line.

    Raises:
      UserError: an unknown name, an option of another network, a number out of range, or values
        that deferred updates cannot take.
    """

    model: str = _network("network", "deepfm", choices=tuple(NETWORKS))
    embedding_dim: int | None = _network("width of the embeddings", kind="count", shown="10")
    mlp: Sequence[int] | None = _network(
        "units of the deep layers; of dlrm those of the top MLP", kind="units", shown="400,400,400"
    )
    cross_layers: int | None = _network(
        "depth of the cross layers of dcn and dcn_v2", kind="count", shown="3"
    )
    low_rank_dim: int | None = _network(
        "rank of dcn_v2's cross matrices", kind="count", shown="full rank"
    )
    bottom_mlp: Sequence[int] | None = _network(
        "units of dlrm's bottom MLP without its last layer; '' for none",
        kind="units",
        check=units_or_none,
        shown="512,256,64",
    )
    combiner: str | Mapping[str, str] | None = _network(
        f"how a list's embeddings become one, for all or by field: {', '.join(COMBINERS)}",
        kind="combiner",
        metavar="NAME|FIELD=NAME,…",
        check=check_combiner,
        shown="mean",
    )
    batch_size: int = _run("samples per update", 1024, kind="size")
    rule: str = _run(
        "how the hyperparameters follow the batch size", "sqrt_decay", choices=tuple(SCALING_RULES)
    )
    epochs: int = _run("passes over the training rows", 10, kind="count")
    patience: int | None = _run(
        "stop after N epochs without a better AUC on the validation part, and use the best epoch",
        kind="count",
        metavar="N",
    )
    seed: int = _run("random seed of initial weights and row order", 1234, kind="seed", check=_seed)
    update: str = _run(
        "updates of rows that are absent from a batch: in every step as in the paper (exact), none "
        "(lazy), or the same as exact when they are next read (deferred)",
        "exact",
        choices=UPDATES,
    )
    tables: str = _run(
        "on several ranks: all embedding rows on each rank, or a part of them",
        "replicated",
        choices=TABLES,
    )
    deterministic: bool = _run(
        "bit-identical results; off: faster kernels on GPUs", True, kind="flag", flag="determinism"
    )
    precision: str = _run(
        "Keras's policy: with a mixed one, layers compute in half precision; weights are float32",
        PRECISIONS[0],
        choices=PRECISIONS,
    )
    micro_batch: int | None = _run(
        "samples per micro-batch, on each rank: an update adds up their gradients, one after the "
        "other, which takes less memory",
        kind="size",
        shown="the whole batch",
    )
    base_batch_size: int = _value("batch size of the tuned hyperparameters", 1024, kind="size")
    dense_lr: float | None = _value(
        "learning rate of the dense layers",
        kind="positive",
        symbol="η",
        shown=f"8e-4 with rule {_OURS}, else 1e-4",
    )
    embedding_lr: float | None = _value(
        "learning rate of the embeddings", kind="positive", symbol="η", shown="1e-4"
    )
    l2: float | None = _value(
        "L2 penalty of the embeddings: λ·w² is added to the loss",
        kind="number",
        symbol="λ",
        shown="1e-5",
    )
    init_stddev: float | None = _value(
        "standard deviation of the initial embeddings",
        kind="number",
        symbol="σ",
        shown=f"1e-2 with rule {_OURS}, else 1e-4",
    )
    warmup_epochs: float | None = _value(
        "epochs in which the dense learning rate rises from 0",
        kind="number",
        shown=f"1 with rule {_OURS}, else 0",
    )
    ema: float | None = _value(
        "measure and use a moving average of the weights, of this decay per update, such as 0.99",
        kind="number",
        metavar="DECAY",
        shown="the weights themselves",
    )
    dense_schedule: str | Mapping[str, Any] | None = _schedule(
        f"how the dense learning rate falls: {', '.join((CONSTANT, *SCHEDULES))}, as in "
        "cosine:to=0.1 or exponential:rate=0.5,epochs=1"
    )
    embedding_schedule: str | Mapping[str, Any] | None = _schedule(
        "the same for the embeddings' learning rate"
    )
    clip: str | None = _clip(
        "clip rule (adaptive_column is CowClip)",
        choices=(NO_CLIP, *CLIPS),
        shown=f"adaptive_column with rule {_OURS}, else none",
    )
    clip_ratio: float | None = _clip(
        "ratio of the adaptive clips: bound of a gradient, in norms of the row's weights",
        kind="positive",
        symbol="r",
        shown="1",
    )
    clip_floor: float | None = _clip(
        "least bound of the adaptive clips, of an id that occurs once in a batch",
        kind="number",
        symbol="ζ",
        shown="3.162e-5",
    )
    clip_threshold: float | None = _clip(
        "bound of the clips global, field and column", kind="positive", symbol="c"
    )
    clip_tables: Sequence[str] | None = _clip(
        "fields or tables (embeddings, linear) to clip",
        kind="names",
        metavar="NAME,…",
        check=_names,
        shown="all of width 2 and more",
    )

    def __post_init__(self) -> None:
        try:
            check_fields(self)
            self._fill(base_fields(recipe(self.rule)))
            self._fill(options_of(self.model, {name: getattr(self, name) for name in OPTIONS}))
            for name in ("dense_schedule", "embedding_schedule"):
                if getattr(self, name) == CONSTANT_SCHEDULE and not SCALING_RULES[self.rule].decays:
                    object.__setattr__(self, name, None)
            _ = self.base, self.hyperparameters
            self._check_together()
        except (ValueError, OverflowError) as error:
            raise UserError(str(error)) from None

    def _fill(self, defaults: Mapping[str, Any]) -> None:
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    def _check_together(self) -> None:
        if self.clip_tables is not None and self.clip == NO_CLIP:
            raise ValueError(
                f"clip_tables needs a clip rule. Received: clip_tables={list(self.clip_tables)} "
                f"with rule={self.rule!r} and clip='none'. Choose a clip, or leave it out"
            )
        if self.ema is not None and (self.ema >= 1 or self.update == "deferred"):
            raise ValueError(
                "ema must be below 1, and not with deferred updates. Received: "
                f"ema={self.ema:g} with update={self.update!r}"
            )
        if self.update == "deferred":
            from merlin_cowclip.plugins.optimizers.deferred import check_deferrable  # TensorFlow

            values, schedule = self.hyperparameters, self.embedding_schedule
            learning_rate = values.embedding_lr if schedule in _CONSTANT else schedule
            try:
                check_deferrable(
                    learning_rate, l2=values.l2, clip=values.clip, clip_ratio=values.clip_ratio
                )
            except ValueError as error:
                raise ValueError(f"at batch size {self.batch_size:,}: {error}") from None

    @functools.cached_property
    def base(self) -> Hyperparameters:
        """The hyperparameters at the base batch size."""
        names = [f.name for f in dataclasses.fields(Hyperparameters)]
        values: dict[str, Any] = {name: getattr(self, name, None) for name in names}
        values["batch_size"] = self.base_batch_size
        values["clip"] = None if self.clip == NO_CLIP else self.clip
        values["decay"] = self._decays
        return Hyperparameters(**values)

    @functools.cached_property
    def hyperparameters(self) -> Hyperparameters:
        """`base`, scaled to `batch_size` by `rule`: what is trained with."""
        scaled = scale(self.base, to=self.batch_size, rule=self.rule)
        return scaled if scaled.decay == self._decays else scaled.replace(decay=self._decays)

    @property
    def scaled_ema(self) -> float | None:
        """The decay of averages per update of `batch_size`, the same per sample.

        The EMA scaling rule of Busbridge et al. 2023, arXiv 2307.13813.
        """
        s = self.batch_size / self.base_batch_size
        return None if self.ema is None else self.ema**s

    @property
    def _decays(self) -> bool:
        return self.dense_schedule == self.embedding_schedule == TO_ZERO

    @property
    def network_options(self) -> dict[str, Any]:
        """What the network's builder takes, by name."""
        return {name: getattr(self, name) for name in NETWORKS[self.model]}

    def to_dict(self) -> dict[str, Any]:
        """Fit for JSON; what the network does not take is `None`; `from_dict` is the way back."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {n: list(v) if isinstance(v, tuple) else v for n, v in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        """The configuration that `to_dict` describes; what is left out has its default."""
        refuse_unknown("a configuration", values, [f.name for f in dataclasses.fields(cls)])
        return cls(**values)

    @property
    def identity(self) -> str:
        """A SHA-256, in hex, of what determines the result, the same in every process and version.

        The values are those scaled to the batch size, without the base and the rule, from which
        they come: where two rules agree, at the base batch size, they are one run.
        """
        meant = {"format": _IDENTITY_FORMAT, **self.to_dict(), **self.hyperparameters.to_dict()}
        meant["ema"] = self.scaled_ema
        unused = {"rule", "base_batch_size", "decay"}  # which the schedules are
        unused |= set() if self.clip in ADAPTIVE_CLIPS else {"clip_ratio", "clip_floor"}
        unused |= {"precision"} if self.precision == PRECISIONS[0] else set()
        # What a later version adds and this configuration does not use must not change it.
        present = {k: v for k, v in meant.items() if v is not None and k not in unused}
        text = json.dumps(present, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode("ascii")).hexdigest()


def base_fields(values: Hyperparameters | Mapping[str, Any]) -> dict[str, Any]:
    """Hyperparameters, or some of them by name, as the fields that `TrainConfig` has for them."""
    if isinstance(values, Hyperparameters):
        values = values.to_dict()
    refuse_unknown("base", values, [field.name for field in dataclasses.fields(Hyperparameters)])
    options = {("base_batch_size" if k == "batch_size" else k): v for k, v in values.items()}
    if options.pop("decay", False):
        options |= {"dense_schedule": TO_ZERO, "embedding_schedule": TO_ZERO}
    return options if options.get("clip", "") is not None else {**options, "clip": NO_CLIP}


BASE_FIELDS = tuple(base_fields(Hyperparameters()))
"""The fields of `TrainConfig` that are a base."""


def few_steps(rows: int, batch_size: int) -> str:
    """What to say of a batch that leaves few steps in an epoch of `rows`; else nothing."""
    steps = -(-rows // batch_size)
    if steps >= MIN_STEPS:
        return ""
    return (
        f"at batch size {batch_size:,} an epoch has only {steps} step{'s' * (steps != 1)}. With "
        f"fewer than {MIN_STEPS} a result reflects the number of steps, not the batch size."
    )


def _every(name: str, value: Any) -> int | str:
    text = str(value)
    if re.fullmatch(r"[1-9][0-9]*", text):
        return int(text)
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?m", text) and float(text[:-1]):
        return text
    raise ValueError(
        f"{name} must be a positive number of updates, or of minutes as in 10m. Received: {value!r}"
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are taken, beside the end of each epoch, what stays, and when to log.

    Raises:
      UserError: a value out of range.
    """

    checkpoint_every: int | str | None = option(
        "write a checkpoint every N steps, or minutes as in 10m, and after each epoch",
        group=GROUP,
        metavar="N|Nm",
        check=_every,
    )
    keep: int = option(
        "recent checkpoints to keep, in addition to the best epoch", 2, group=GROUP, kind="count"
    )
    saved_model: bool = option(
        "write a SavedModel with the optimizer's state to RUN/model",
        False,
        group=GROUP,
        kind="flag",
    )
    log_every: int | None = option(
        "write TensorBoard's scalars and, without a terminal, print a line every N steps",
        group=GROUP,
        kind="count",
        shown="50 steps; a line each minute",
    )

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def interval(self) -> tuple[float, float]:
        """Updates and seconds between checkpoints; infinity for one that does not count."""
        every = self.checkpoint_every or math.inf
        return (math.inf, 60 * float(every[:-1])) if isinstance(every, str) else (every, math.inf)
