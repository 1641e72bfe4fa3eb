# SPDX-License-Identifier: Apache-2.0
"""Hyperparameters and how they follow the batch size: the paper's scaling rules, and our own.

Pure Python: nothing here knows TensorFlow. "K" is x 1024, and "batch size" is always the global
number of samples per update.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from merlin_cowclip.plugins._checks import integer, make_plain, plain
from merlin_cowclip.plugins._text import format_table

K = 1024
MIN_STEPS = 30
"""Per epoch: with fewer, AUC reflects the number of steps, and there is a warning."""

CONSTANT_CLIPS = ("global", "field", "column")
ADAPTIVE_CLIPS = ("adaptive_field", "adaptive_column")
CLIPS = CONSTANT_CLIPS + ADAPTIVE_CLIPS
"""Names of the clip rules of Table 6 (`clipping.CLIP_RULES`); "adaptive_column" is CowClip."""


@dataclass(frozen=True)
class Hyperparameters:
    """Everything that a scaling rule sets, for one batch size.

    Attributes:
      batch_size: global samples per update.
      dense_lr: learning rate η of the dense weights (Adam).
      embedding_lr: learning rate η of the embedding rows (Adam).
      l2: λ of the embedding rows in Keras's convention: the loss grows by `λ·Σw²`, the gradient by
        `2λw`. (The paper writes `λ/2·‖w‖²`; its published code uses Keras's, and so do we.)
      clip: name of the clip rule of the embedding tables, `None` for no clip.
      clip_ratio: r of Algorithm 1, the bound on a gradient row relative to its embedding row.
      clip_floor: ζ of Algorithm 1, the least bound per occurrence, in units of the gradient's norm.
        The default and the presets are for width 10. The published code has ζ·√(d/10) at width d.
      clip_threshold: constant c of the rules "global", "field" and "column", which need it.
      init_stddev: standard deviation σ of the normal initialisation of the embedding tables.
      warmup_epochs: epochs over which the dense learning rate rises linearly from 1e-8.
      decay: whether both learning rates decay linearly to 0 over all steps of the training.

    `print` shows the values as a table; of those that `scale` returns, beside the values before.

    Raises:
      TypeError: no hyperparameter has that name.
      ValueError: a value lies outside its range.
    """

    _scaled: ClassVar[tuple[Hyperparameters, str] | None] = None  # from which and by which rule

    batch_size: int = 1 * K
    dense_lr: float = 8e-4
    embedding_lr: float = 1e-4
    l2: float = 1e-5
    clip: str | None = "adaptive_column"
    clip_ratio: float = 1.0
    clip_floor: float = 3.162e-5
    clip_threshold: float | None = None
    init_stddev: float = 1e-2
    warmup_epochs: float = 1.0
    decay: bool = False

    def __post_init__(self) -> None:
        integer("batch_size", self.batch_size)
        for name in ("dense_lr", "embedding_lr", "clip_ratio"):
            check_number(name, getattr(self, name), positive=True)
        for name in ("l2", "clip_floor", "init_stddev", "warmup_epochs"):
            check_number(name, getattr(self, name))
        clip, threshold = self.clip, self.clip_threshold
        if clip not in (None, *CLIPS):
            wanted = f"None or one of {', '.join(CLIPS)}"
            raise ValueError(f"clip must be {wanted}. Received: clip={clip!r}")
        if clip in CONSTANT_CLIPS and threshold is None:
            raise ValueError(f"clip={clip!r} needs clip_threshold, its constant. Received: None")
        if clip in CONSTANT_CLIPS:
            check_number("clip_threshold", threshold, positive=True)
        elif threshold is not None:
            raise ValueError(
                f"clip_threshold belongs to {', '.join(CONSTANT_CLIPS)}. Received: "
                f"clip_threshold={threshold!r} with clip={clip!r}"
            )
        make_plain(self)
        if not isinstance(self.decay, bool):
            raise ValueError(f"decay must be True or False. Received: decay={self.decay!r}")

    def replace(self, **changes: Any) -> Hyperparameters:
        """A copy with `changes`, validated again."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """The fields as a plain dict, fit for JSON; `Hyperparameters(**d)` is the way back."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        if self._scaled is not None:
            tuned, rule = self._scaled
            return f"{scaling_table(tuned, self)}\nrule: {rule}, {SCALING_RULES[rule].paper}"
        rows = [(name, _show(value)) for name, value in self.to_dict().items()]
        return format_table(("hyperparameter", "value"), rows)


def check_number(name: str, value: Any, *, positive: bool = False) -> float:
    """`value` (NumPy's too) as a finite float >= 0, > 0 where `positive`, or a ValueError."""
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_real or not math.isfinite(value) or value < 0 or (positive and value == 0):
        wanted = "a positive number" if positive else "a number that is not negative"
        raise ValueError(f"{name} must be {wanted}. Received: {name}={plain(value)!r}")
    return float(value)


def _show(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str("none" if value is None else value)


@dataclass(frozen=True)
class ScalingRule:
    """Powers of s = new batch size / base batch size by which dense η, embedding η and λ grow.

    `recipe` is where it starts from: dense η, clip, initialisation, warm-up (Table 2, Appendix G),
    and whether the learning rates decay.
    """

    name: str
    paper: str
    dense_lr: float
    embedding_lr: float
    l2: float
    recipe: Mapping[str, Any]

    @property
    def decays(self) -> bool:
        """Whether both learning rates decay to 0."""
        return bool(self.recipe.get("decay"))


_PLAIN = {"dense_lr": 1e-4, "clip": None, "init_stddev": 1e-4, "warmup_epochs": 0.0}
_COWCLIP = {"dense_lr": 8e-4, "clip": "adaptive_column", "init_stddev": 1e-2, "warmup_epochs": 1.0}
_DECAY = {**_COWCLIP, "decay": True}
_RULES = (
    ScalingRule("sqrt_decay", "ours, the default", 0.5, 0.5, 0.5, _DECAY),
    ScalingRule("none", "No Scaling", 0, 0, 0, _PLAIN),
    ScalingRule("sqrt", "Sqrt Scaling (Rule 1)", 0.5, 0.5, 0.5, _PLAIN),
    ScalingRule("sqrt_star", "Sqrt Scaling*", 0.5, 0.5, 0, _PLAIN),
    ScalingRule("linear", "Linear Scaling (Rule 2)", 1, 1, 0, _PLAIN),
    ScalingRule("n2_lambda", "n²–λ Scaling (Rule 4)", 0.5, 0, 2, _PLAIN),
    ScalingRule("cowclip", "CowClip Scaling (Rule 3)", 0.5, 0, 1, _COWCLIP),
)
SCALING_RULES: Mapping[str, ScalingRule] = MappingProxyType({rule.name: rule for rule in _RULES})
"""The default, and the paper's six rules (Section 3.1 and Table 2), by name."""


def find_rule(name: str) -> ScalingRule:
    """The rule called `name`; a ValueError if none is."""
    rule = SCALING_RULES.get(name) if isinstance(name, str) else None
    if rule is None:
        raise ValueError(f"rule must be one of {', '.join(SCALING_RULES)}. Received: rule={name!r}")
    return rule


def recipe(rule: str) -> Hyperparameters:
    """The hyperparameters that a rule starts from at the base batch size 1K (Criteo's values).

    `cowclip`: clip on, embeddings N(0, 1e-2), one epoch of dense warm-up, dense η 8e-4.
    `sqrt_decay`: the same, and both learning rates decay linearly to 0. The other five, as in
    Table 2: no clip, N(0, 1e-4), no warm-up, every η 1e-4.
    """
    return Hyperparameters(**find_rule(rule).recipe)


def scale(tuned: Hyperparameters, *, to: int, rule: str = "sqrt_decay") -> Hyperparameters:
    """Hyperparameters for batch size `to`, from those tuned at `tuned.batch_size`.

    Scales dense η, embedding η and λ by the rule's factors of s = `to` / `tuned.batch_size`, and a
    constant clip threshold by √s (Appendix I); `sqrt_decay` lets both learning rates decay. All
    else stays (`recipe` has what suits a rule).

    Args:
      tuned: the values found at the base batch size.
      to: the new global batch size in samples per update, a positive whole number.
      rule: a name in `SCALING_RULES`.
    """
    found, to = find_rule(rule), integer("to", to)
    s = to / tuned.batch_size
    threshold = tuned.clip_threshold
    scaled = tuned.replace(
        batch_size=to,
        dense_lr=tuned.dense_lr * s**found.dense_lr,
        embedding_lr=tuned.embedding_lr * s**found.embedding_lr,
        l2=tuned.l2 * s**found.l2,
        clip_threshold=None if threshold is None else threshold * math.sqrt(s),
        decay=tuned.decay or found.decays,
    )
    object.__setattr__(scaled, "_scaled", (tuned, found.name))
    return scaled


def scaling_table(tuned: Hyperparameters, scaled: Hyperparameters) -> str:
    """Base and scaled values side by side, with their factors, for a person to read."""
    rows = []
    for name, value in tuned.to_dict().items():
        new = getattr(scaled, name)
        are_numbers = isinstance(value, int | float) and isinstance(new, int | float)
        factor = f"x {new / value:.6g}" if are_numbers and value and new != value else ""
        rows.append((name, _show(value), _show(new), factor))
    return format_table(("hyperparameter", "base", "scaled", "factor"), rows)
