# SPDX-License-Identifier: Apache-2.0
"""All variables that training changes, by name: for broadcasts, checkpoints, saving, resuming."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from merlin_cowclip.plugins._tensorflow import mm, tf
from merlin_cowclip.plugins.distributed.sharding import Shard


class TrainsModel:
    """Base of `CowClipOptimizer`, by which the modules that it imports know it."""


def training_state(model: mm.Model) -> dict[str, tf.Variable]:
    """Every variable that a step changes, by name; of a model compiled with a `CowClipOptimizer`.

    `weight/…` and `moment/…`, in the order of `model.weights`; `optimizer/…`: step counts, learning
    rates and the like; `loss_scale/…` with mixed precision; `loss/…`: the running mean of the loss.
    """
    optimizer = optimizer_of(model)
    if not model.built:
        raise ValueError("The model must be built before it has a state. Call it on a batch first.")
    optimizer.create_slots(model.trainable_variables)
    return state_of(model, optimizer) | _named("loss", mean_loss(model).variables)


def state_of(
    model: tf.keras.Model, optimizer: Any, weights: Sequence[tf.Variable] | None = None
) -> dict[str, tf.Variable]:
    """As `training_state`, without what is to be created and the loss; `weights` in any order."""
    weights = model.weights if weights is None else weights
    state = _named("weight", weights)
    for place, variable in enumerate(weights):
        for part in optimizer.optimizers:
            slots = sorted(part._slots.get(variable._unique_id, {}).items())
            state |= {f"moment/{place:04}/{name}": slot for name, slot in slots}
    scale = getattr(getattr(model, "optimizer", None), "_loss_scale", None)  # a number or an object
    state |= _named("loss_scale", getattr(scale, "_weights", {}).values())
    return state | _named("optimizer", _settings(optimizer))


def shards_of(model: mm.Model, state: Mapping[str, tf.Variable]) -> dict[str, Shard]:
    """Of variables by name, those that have only this rank's rows."""
    held = optimizer_of(model).in_shards()
    return {name: held[v.ref()] for name, v in state.items() if v.ref() in held}


def optimizer_of(model: mm.Model) -> Any:
    """The `CowClipOptimizer` that a model is compiled with, or a ValueError."""
    optimizer = getattr(model, "optimizer", None)
    if (found := unwrapped(optimizer)) is not None:
        return found
    raise ValueError(
        "The model must be compiled with a CowClipOptimizer. Received: "
        f"{type(getattr(optimizer, 'inner_optimizer', optimizer)).__name__}."
    )


def unwrapped(optimizer: Any) -> Any:
    """A `CowClipOptimizer`, within Keras's loss scaling or not; `None` for another optimizer."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return inner if isinstance(inner, TrainsModel) else None


def weights_of(model: mm.Model) -> dict[str, tf.Variable]:
    """The part of `training_state` that a prediction needs, of any built model."""
    return _named("weight", model.weights)


def mean_loss(model: mm.Model) -> tf.keras.metrics.Mean:
    """The running mean of the loss, which Keras lists among the metrics from the first step on."""
    return model.compiled_loss._total_loss_mean


def _named(kind: str, variables: Iterable[tf.Variable]) -> dict[str, tf.Variable]:
    return {f"{kind}/{place:04}": variable for place, variable in enumerate(variables)}


def _settings(optimizer: Any) -> list[tf.Variable]:
    """Step counts; learning rates, betas and the like, which Keras does not list as weights."""
    found: list[Any] = [optimizer.warm_up, optimizer.decay_steps]
    for one in (optimizer, *optimizer.optimizers):
        found += [one.iterations, getattr(getattr(one, "deferred", None), "rate", None)]
        found += [value for _, value in sorted(one._hyper.items())]
    return [value for value in found if isinstance(value, tf.Variable)]
