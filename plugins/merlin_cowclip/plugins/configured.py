"""An optimizer's configuration: what of it is saved with a model, beside its state."""

from __future__ import annotations

import contextlib
import contextvars
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from merlin_cowclip.plugins._stack import tf
from merlin_cowclip.plugins.ownership import as_text, from_text

_SCHEDULES = "dense_schedule", "embedding_schedule"
_state_follows = contextvars.ContextVar("merlin_cowclip_state_follows", default=False)


def to_config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A constructor's arguments, fit for JSON."""
    config = dict(arguments)
    for key in _SCHEDULES:
        if config[key] is not None:
            config[key] = tf.keras.optimizers.schedules.serialize(config[key])
    if config["clip_tables"] is not None:
        config["clip_tables"] = [as_text(item) for item in config["clip_tables"]]
    return config


def as_json(value: Any) -> Any:
    """What JSON does not take, as it does: numbers of NumPy and TensorFlow, arrays too.

    Raises:
      ValueError: it is something else.
    """
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise ValueError(
            "The configuration of an optimizer and its schedules must be made of numbers and "
            f"texts to be saved. Received: an object of type {type(value).__name__} in it."
        )
    return array.tolist()


def from_config(config: Mapping[str, Any], custom_objects: Any = None) -> dict[str, Any]:
    """The constructor's arguments again; warns of what they lack, but within `state_follows`."""
    if not _state_follows.get():
        warnings.warn(
            "A CowClipOptimizer was made from its configuration: its moments, step "
            "count and learning rates start anew, whatever was set on it or its parts since is "
            "lost, and it knows no model until optimizer.bind(model). To go on with a "
            "saved model, use merlin_cowclip.plugins.save_model and load_model.",
            stacklevel=3,
        )
    arguments = dict(config)
    for key in _SCHEDULES:
        if arguments.get(key) is not None:
            schedule = tf.keras.optimizers.schedules.deserialize(arguments[key], custom_objects)
            arguments[key] = schedule
    if arguments.get("clip_tables") is not None:
        arguments["clip_tables"] = [from_text(item) for item in arguments["clip_tables"]]
    return arguments


@contextlib.contextmanager
def state_follows() -> Iterator[None]:
    """Within it, `from_config` does not warn: whoever calls it restores the state."""
    token = _state_follows.set(True)
    try:
        yield
    finally:
        _state_follows.reset(token)
