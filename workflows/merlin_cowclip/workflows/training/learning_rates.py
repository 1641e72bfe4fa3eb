# SPDX-License-Identifier: Apache-2.0
"""Learning-rate schedules that a configuration can name, fit for JSON.

    {"name": "exponential", "rate": 0.5, "epochs": 1.0}     η · rate^(t / epochs)
    {"name": "linear", "to": 0.0, "epochs": None}           from η to η · to, in a straight line
    {"name": "cosine", "to": 0.0, "epochs": None}           from η to η · to, along half a cosine
    {"name": "steps", "at": [5, 8], "factors": [0.1, 0.01]} η, from epoch 5 on η · 0.1, …

t is the time since the beginning in epochs, η the scaled learning rate; `epochs` None means all
epochs of the run. The dense η's warm-up is applied on top of the schedule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from merlin_cowclip.plugins.scaling import check_number

if TYPE_CHECKING:
    from merlin_cowclip.plugins.schedules import Schedule
    from merlin_cowclip.workflows.training.configuration import TrainConfig

SCHEDULES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "exponential": {"rate": ..., "epochs": 1.0},
        "linear": {"to": 0.0, "epochs": None},
        "cosine": {"to": 0.0, "epochs": None},
        "steps": {"at": ..., "factors": ...},
    }
)
"""Name → default by parameter; `...`: required."""

TO_ZERO: Mapping[str, Any] = {"name": "linear", "to": 0.0, "epochs": None}
CONSTANT_SCHEDULE: Mapping[str, Any] = {**TO_ZERO, "to": 1.0}


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
        if name == "steps":
            if not isinstance(value, list | tuple) or not value:
                raise ValueError(f"{label} must be a list of numbers. Received: {label}={value!r}")
            plain[key] = [check_number(label, number) for number in value]
        elif value is not default:
            plain[key] = check_number(label, value, positive=key != "to")
    at, factors = plain.get("at"), plain.get("factors", ())
    if at and (len(at) != len(factors) or at != sorted(set(at)) or not at[0]):
        raise ValueError(
            f"{option} 'steps' needs rising, positive epochs and a factor for each. Received: "
            f"at={at}, factors={factors}"
        )
    return plain


def option_text(schedule: Mapping[str, Any]) -> str:
    """A plain schedule as its option is written, such as linear:to=0,epochs=3."""
    pairs = {key: value for key, value in schedule.items() if key != "name" and value is not None}
    if schedule["name"] == "steps":
        pairs = dict(zip(pairs["at"], pairs["factors"], strict=True))
    return f"{schedule['name']}:{','.join(f'{key}={value:g}' for key, value in pairs.items())}"


def over_all_epochs(schedule: Any) -> dict[str, Any] | None:
    """A plain schedule for a run of another length: linear and cosine decay over all of it."""
    return schedule and {**schedule, **({"epochs": None} if "to" in schedule else {})}


def schedule_of(config: TrainConfig, part: str, steps_per_epoch: int) -> Schedule:
    """The Keras schedule (step → learning rate) of a part, "dense" or "embedding"."""
    from merlin_cowclip.plugins._tensorflow import tf

    def steps_of(epochs: float) -> float:
        """Not rounded: an epoch of a large batch has few updates."""
        steps = epochs * steps_per_epoch
        return round(steps) if math.isclose(steps, round(steps), rel_tol=1e-9) else steps

    rate: float = getattr(config.hyperparameters, f"{part}_lr")
    schedule = getattr(config, f"{part}_schedule") or CONSTANT_SCHEDULE
    keras, name = tf.keras.optimizers.schedules, schedule["name"]
    if name == "steps":
        # Keras changes after its boundary, not at it: with the first update of t ≥ `at`.
        at = [max(math.ceil(steps_of(epoch)) - 1, 0) for epoch in schedule["at"]]
        return keras.PiecewiseConstantDecay(at, [rate, *(rate * f for f in schedule["factors"])])
    steps = steps_of(schedule["epochs"] or config.epochs)
    if name == "exponential":
        return keras.ExponentialDecay(rate, steps, schedule["rate"])
    if name == "linear":
        return keras.PolynomialDecay(rate, steps, rate * schedule["to"])
    return keras.CosineDecay(rate, steps, schedule["to"])
