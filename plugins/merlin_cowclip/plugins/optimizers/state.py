"""All variables that training changes, by name: for broadcasts, checkpoints and resuming."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from merlin_cowclip.plugins._tensorflow import mm, tf
from merlin_cowclip.plugins.distributed.sharding import Shard
from merlin_cowclip.plugins.schedules import LinearWarmup

if TYPE_CHECKING:
    from merlin_cowclip.plugins.optimizers.cowclip import CowClipOptimizer


def training_state(model: mm.Model) -> dict[str, tf.Variable]:
    """Every variable that a step changes, flat, by a name of its kind and place.

    `weight/…`, in the order of `model.weights`; `optimizer/…`: of the whole and its three parts the
    step counts, moments and learning rates, and the warm-up; `loss_scale/…` where mixed precision
    has one; `loss/…`: the running mean of the loss. Two models that were made by the same calls
    have the same names, each with the same shape and dtype: with the values of one assigned to the
    other, both go on alike, to the last bit.

    Args:
      model: built, and compiled with a `CowClipOptimizer`; the moments that it lacks are created.

    Raises:
      ValueError: it is not.
    """
    optimizer = optimizer_of(model)
    if not model.built:
        raise ValueError("The model must be built before it has a state. Call it on a batch first.")
    optimizer.create_slots(model.trainable_variables)
    return state_of(model, optimizer) | _named({"loss": mean_loss(model).variables})


def state_of(model: tf.keras.Model, optimizer: Any) -> dict[str, tf.Variable]:
    """As `training_state`, of what was created; without the loss, which differs by rank."""
    kinds = {
        "weight": model.weights,
        "optimizer": [*_weights_of(optimizer, model), *_hypers((optimizer, *optimizer.optimizers))],
        "loss_scale": _loss_scale(getattr(model, "optimizer", None)),
    }
    return _named(kinds)


def shards_of(model: mm.Model, state: Mapping[str, tf.Variable]) -> dict[str, Shard]:
    """Of variables by name, such as `training_state`'s, those that have this rank's rows alone."""
    held = optimizer_of(model).in_shards()
    return {name: held[v.ref()] for name, v in state.items() if v.ref() in held}


def optimizer_of(model: mm.Model) -> CowClipOptimizer:
    """The optimizer that a model is compiled with, within Keras's loss scaling or not.

    Raises:
      ValueError: it is another kind.
    """
    from merlin_cowclip.plugins.optimizers.cowclip import (
        CowClipOptimizer,  # which broadcasts its state
    )

    optimizer = getattr(model, "optimizer", None)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if not isinstance(inner, CowClipOptimizer):
        raise ValueError(
            "The model must be compiled with a CowClipOptimizer. Received: "
            f"{type(inner).__name__}. Other optimizers: model.save."
        )
    return inner


def weights_of(model: mm.Model) -> dict[str, tf.Variable]:
    """The part of `training_state` that a prediction needs, of any built model."""
    return _named({"weight": model.weights})


def _named(kinds: Mapping[str, Iterable[tf.Variable]]) -> dict[str, tf.Variable]:
    return {
        f"{kind}/{place:04}": variable
        for kind, variables in kinds.items()
        for place, variable in enumerate(_each_once(variables))
    }


def mean_loss(model: mm.Model) -> tf.keras.metrics.Mean:
    """The running mean of the loss, which Keras lists among the metrics from the first step on."""
    return model.compiled_loss._total_loss_mean


def _weights_of(optimizer: Any, model: tf.keras.Model) -> list[tf.Variable]:
    """Step counts and moments; moments in the order of the weights, however they were created.

    A checkpoint that is restored before the first step creates them in its own order.
    """
    place = {variable._unique_id: number for number, variable in enumerate(model.weights)}
    found = list(optimizer._weights)
    for part in optimizer.optimizers:
        order = dict.fromkeys((v.ref() for v in part.weights), ("", 0))
        for key, moments in part._slots.items():
            number = place.get(key, len(place))
            order.update((moment.ref(), (name, number)) for name, moment in moments.items())
        found += (reference.deref() for reference in sorted(order, key=order.__getitem__))
    return found


def _hypers(optimizers: Iterable[Any]) -> list[tf.Variable]:
    """Learning rates, betas and the like, which Keras does not count among the weights."""
    found: list[tf.Variable] = []
    for optimizer in optimizers:
        for _, value in sorted(optimizer._hyper.items()):
            is_warm_up = isinstance(value, LinearWarmup)
            found += (value.learning_rate, value.warmup_steps) if is_warm_up else (value,)
    return [value for value in found if isinstance(value, tf.Variable)]


def _loss_scale(optimizer: Any) -> list[tf.Variable]:
    if not isinstance(optimizer, tf.keras.mixed_precision.LossScaleOptimizer):
        return []
    scale = optimizer._loss_scale  # a plain number unless it is dynamic
    return [] if isinstance(scale, float) else list(scale._weights.values())


def _each_once(variables: Iterable[tf.Variable]) -> list[tf.Variable]:
    return list({variable.ref(): variable for variable in variables}.values())
