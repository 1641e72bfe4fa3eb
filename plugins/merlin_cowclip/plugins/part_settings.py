"""What was set on a part of an optimizer, such as `beta_1` or `clipnorm`: to JSON and back."""

from __future__ import annotations

import json
import warnings
from typing import Any

from merlin_cowclip.plugins._stack import tf
from merlin_cowclip.plugins.configured import as_json
from merlin_cowclip.plugins.schedules import LinearWarmup

_schedules = tf.keras.optimizers.schedules


def settings_of(part: Any) -> dict[str, Any]:
    """A part's configuration; of a learning rate that warms up, what it rises to.

    Warns of `gradient_transformers`, which are functions, and not part of it.
    """
    config = dict(part.get_config())
    if part.gradient_transformers:
        warnings.warn(
            f"The gradient_transformers of {config['name']!r} are functions, and not saved. Set "
            "them again on the loaded optimizer's part.",
            stacklevel=4,  # the call of save_model, past a comprehension
        )
    rate = part._hyper["learning_rate"]
    if isinstance(rate, LinearWarmup) and isinstance(rate.warmup_steps, tf.Variable):
        config["learning_rate"] = rate.get_config()["learning_rate"]
    settings: dict[str, Any] = json.loads(json.dumps(config, default=as_json))
    _check_schedule(config["name"], rate, settings["learning_rate"])
    return settings


def _check_schedule(part: str, rate: Any, saved: Any) -> None:
    """Refuse a schedule by whose name Keras would load one of its own."""
    if not isinstance(saved, dict) or isinstance(rate, LinearWarmup):
        return
    try:
        found = _schedules.deserialize(saved)
    except (TypeError, ValueError):  # unknown to Keras: loading says so
        return
    if type(found) is not type(rate):
        raise ValueError(
            "A schedule must load as what it is. Received: the learning rate of "
            f"{part!r} is a {type(rate).__name__!r}, a name of another class, which Keras would "
            "load. Register it: @tf.keras.utils.register_keras_serializable()."
        )


def set_again(part: Any, settings: dict[str, Any]) -> None:
    """Set on a part that was made anew what differs from it in another's `settings_of`."""
    now = settings_of(part)
    for name, value in settings.items():
        if value != now.get(name):
            is_schedule = name == "learning_rate" and isinstance(value, dict)
            setattr(part, name, _schedules.deserialize(value) if is_schedule else value)
