"""Learning-rate schedules that a configuration can say: a name and numbers, fit for JSON.

    {"name": "exponential", "rate": 0.5, "epochs": 1.0}     η · rate^(t / epochs)
    {"name": "linear", "to": 0.0, "epochs": None}           from η to η · to, in a straight line
    {"name": "cosine", "to": 0.0, "epochs": None}           from η to η · to, along half a cosine
    {"name": "steps", "at": [5, 8], "factors": [0.1, 0.01]} η, from epoch 5 on η · 0.1, …

t is the time since the beginning in epochs, η the scaled learning rate, and `epochs` of `None` is
all that are trained. The dense η's warm-up goes on top: what it rises to is the schedule's value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from merlin_cowclip.plugins.scaling import check_number

if TYPE_CHECKING:
    from merlin_cowclip.plugins.schedules import Schedule


def _positive(name: str, value: Any) -> float:
    return check_number(name, value, positive=True)


def _positive_or_none(name: str, value: Any) -> float | None:
    return None if value is None else _positive(name, value)


def _numbers(name: str, value: Any) -> list[float]:
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"{name} must be a list of numbers. Received: {name}={value!r}")
    return [check_number(name, number) for number in value]


_MUST: Any = object()
_FALLING: Mapping[str, tuple[Callable[[str, Any], Any], Any]] = {
    "to": (check_number, 0.0),
    "epochs": (_positive_or_none, None),
}
SCHEDULES: Mapping[str, Mapping[str, tuple[Callable[[str, Any], Any], Any]]] = MappingProxyType(
    {
        "exponential": {"rate": (_positive, _MUST), "epochs": (_positive, 1.0)},
        "linear": _FALLING,
        "cosine": _FALLING,
        "steps": {"at": (_numbers, _MUST), "factors": (_numbers, _MUST)},
    }
)
"""Name → its parameters: name → (check, default)."""


def plain_schedule(option: str, given: Any) -> dict[str, Any]:
    """A schedule with all its parameters, checked; `option` is what errors call it.

    Raises:
      ValueError: an unknown name or parameter, a missing one, or one out of range.
    """
    if isinstance(given, str):
        given = {"name": given}
    name = given.get("name") if isinstance(given, Mapping) else None
    if not isinstance(name, str) or name not in SCHEDULES:
        raise ValueError(
            f"{option} must be one of {', '.join(SCHEDULES)}, with its parameters. Received: "
            f"{given!r}"
        )
    parameters = SCHEDULES[name]
    for key in given:
        if key != "name" and key not in parameters:
            raise ValueError(
                f"{option} {name!r} has the parameters {', '.join(parameters)}. Received: {key!r}"
            )
    plain: dict[str, Any] = {"name": name}
    for key, (check, default) in parameters.items():
        value = given.get(key, default)
        if value is _MUST:
            raise ValueError(f"{option} {name!r} needs {key}. Received: {given!r}")
        plain[key] = check(f"{option} {key}", value)
    if name == "steps":
        at = plain["at"]
        if len(at) != len(plain["factors"]) or at != sorted(set(at)) or not at[0]:
            raise ValueError(
                f"{option} 'steps' needs rising, positive epochs and a factor for each. Received: "
                f"at={at}, factors={plain['factors']}"
            )
    return plain


def over_all_epochs(schedule: Any) -> dict[str, Any] | None:
    """What `plain_schedule` gave for one training, for another: what falls, over its epochs."""
    if schedule is None:
        return None
    falls = SCHEDULES[schedule["name"]] is _FALLING
    return {**schedule, "epochs": None} if falls else dict(schedule)


_LEAST = -126  # exponent of float32's least normal number, below which TensorFlow has 0


def falls_to_zero_in(schedule: Any) -> float | None:
    """Epochs after which a learning rate is 0, where what `plain_schedule` gave says so."""
    if schedule is None:
        return None
    name, epochs = schedule["name"], schedule.get("epochs")
    if name == "exponential":
        return _LEAST / math.log2(schedule["rate"]) * epochs if schedule["rate"] < 1 else None
    if name == "steps":
        end = None
        for at, factor in zip(schedule["at"], schedule["factors"], strict=True):
            end = (at if end is None else end) if factor < 2.0**_LEAST else None
        return end
    return None if epochs is None or schedule["to"] >= 2.0**_LEAST else float(epochs)


def keras_schedule(
    schedule: Mapping[str, Any], learning_rate: float, *, epochs: int, steps_per_epoch: int
) -> Schedule:
    """What `plain_schedule` gave as a Keras schedule: step → learning rate.

    Args:
      schedule: the name and all parameters.
      learning_rate: η, which it starts from.
      epochs: how many are trained.
      steps_per_epoch: updates per epoch.
    """
    from merlin_cowclip.plugins._tensorflow import tf

    def updates(epochs: float) -> float:
        """Not rounded to whole ones, of which an epoch of a large batch has few."""
        exact = epochs * steps_per_epoch
        return round(exact) if math.isclose(exact, round(exact), rel_tol=1e-9) else exact

    keras = tf.keras.optimizers.schedules
    name = schedule["name"]
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
