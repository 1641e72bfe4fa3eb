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

SCHEDULES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "exponential": {"rate": ..., "epochs": 1.0},
        "linear": {"to": 0.0, "epochs": None},
        "cosine": {"to": 0.0, "epochs": None},
        "steps": {"at": ..., "factors": ...},
    }
)
"""Name → default by parameter; `...`: required."""


def plain_schedule(option: str, given: Any) -> dict[str, Any]:
    """A schedule with all its parameters, checked; `option` is its name in errors."""
    given = {"name": given} if isinstance(given, str) else given
    name = given.get("name") if isinstance(given, Mapping) else None
    if not isinstance(name, str) or name not in SCHEDULES:
        raise ValueError(
            f"{option} must be one of {', '.join(SCHEDULES)}, with its parameters. Received: "
            f"{given!r}"
        )
    parameters, plain = SCHEDULES[name], dict[str, Any](name=name)
    missing = [key for key, default in parameters.items() if default is ... and key not in given]
    if missing or not {*given} <= {"name", *parameters}:
        raise ValueError(
            f"{option} {name!r} has the parameters {', '.join(parameters)}. Received: {given!r}"
        )
    for key, default in parameters.items():
        value = given.get(key, default)
        is_all = value is None is default
        plain[key] = None if is_all else _checked(f"{option} {key}", value, key)
    at, factors = plain.get("at"), plain.get("factors", ())
    if at and (len(at) != len(factors) or at != sorted(set(at)) or not at[0]):
        raise ValueError(
            f"{option} 'steps' needs rising, positive epochs and a factor for each. Received: "
            f"at={at}, factors={factors}"
        )
    return plain


def _checked(name: str, value: Any, key: str) -> float | list[float]:
    if key not in ("at", "factors"):
        return check_number(name, value, positive=key != "to")
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"{name} must be a list of numbers. Received: {name}={value!r}")
    return [check_number(name, number) for number in value]


def over_all_epochs(schedule: Any) -> dict[str, Any] | None:
    """A plain schedule for a run of another length: linear and cosine decay over all of it."""
    return schedule and {**schedule, **({"epochs": None} if "to" in schedule else {})}


def keras_schedule(
    schedule: Mapping[str, Any], learning_rate: float, *, epochs: int, steps_per_epoch: int
) -> Schedule:
    """A plain schedule as a Keras schedule (step → learning rate) that starts from η."""
    from merlin_cowclip.plugins._tensorflow import tf

    def updates(epochs: float) -> float:
        """Not rounded: an epoch of a large batch has few updates."""
        exact = epochs * steps_per_epoch
        return round(exact) if math.isclose(exact, round(exact), rel_tol=1e-9) else exact

    keras, name = tf.keras.optimizers.schedules, schedule["name"]
    if name == "steps":
        # Keras changes after its boundary, not at it: with the first update of t ≥ `at`.
        at = [max(math.ceil(updates(epoch)) - 1, 0) for epoch in schedule["at"]]
        factors = [1.0, *schedule["factors"]]
        return keras.PiecewiseConstantDecay(at, [learning_rate * factor for factor in factors])
    steps = updates(schedule["epochs"] or epochs)
    if name == "exponential":
        return keras.ExponentialDecay(learning_rate, steps, schedule["rate"])
    if name == "linear":
        return keras.PolynomialDecay(learning_rate, steps, learning_rate * schedule["to"])
    return keras.CosineDecay(learning_rate, steps, schedule["to"])
