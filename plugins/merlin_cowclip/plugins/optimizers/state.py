"""All variables that training changes, by name: for broadcasts, checkpoints, saving, resuming."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from merlin_cowclip.plugins._tensorflow import mm, tf
from merlin_cowclip.plugins.distributed.sharding import Shard
from merlin_cowclip.plugins.schedules import LinearWarmup

if TYPE_CHECKING:
    from merlin_cowclip.plugins.optimizers.cowclip import CowClipOptimizer


def training_state(model: mm.Model) -> dict[str, tf.Variable]:
    """Every variable that a step changes, by name.

    `weight/…` and `moment/…`, in the order of `model.weights`; `optimizer/…`: step counts, learning
    rates and the like; `loss_scale/…` with mixed precision; `loss/…`: the running mean of the loss.
    Two models made by the same calls have the same names, shapes and dtypes, and with equal values
    train alike to the last bit.

    Args:
      model: built, and compiled with a `CowClipOptimizer`; moments that it lacks are created.

    Raises:
      ValueError: it is not.
    """
    optimizer = optimizer_of(model)
    if not model.built:
        raise ValueError("The model must be built before it has a state. Call it on a batch first.")
    optimizer.create_slots(model.trainable_variables)
    return state_of(model, optimizer) | _named("loss", mean_loss(model).variables)


def state_of(
    model: tf.keras.Model, optimizer: Any, weights: Sequence[tf.Variable] | None = None
) -> dict[str, tf.Variable]:
    """As `training_state`, of what was created; without the loss, which differs by rank.

    Args:
      model: built.
      optimizer: its `CowClipOptimizer`.
      weights: those of the model in another order.
    """
    weights = model.weights if weights is None else weights
    state = _named("weight", weights)
    for place, variable in enumerate(weights):
        for part in optimizer.optimizers:
            state |= {f"moment/{place:04}/{k}": v for k, v in _moments(part, variable)}
    scale = getattr(
        getattr(model, "optimizer", None), "_loss_scale", None
    )  # a number, or an object
    state |= _named("loss_scale", getattr(scale, "_weights", {}).values())
    return state | _named("optimizer", _settings(optimizer))


def shards_of(model: mm.Model, state: Mapping[str, tf.Variable]) -> dict[str, Shard]:
    """Of variables by name, such as `training_state`'s, those that have this rank's rows alone."""
    held = optimizer_of(model).in_shards()
    return {name: held[v.ref()] for name, v in state.items() if v.ref() in held}


def optimizer_of(model: mm.Model) -> CowClipOptimizer:
    """The optimizer that a model is compiled with, within Keras's loss scaling or not.

    Raises:
      ValueError: it is another kind.
    """
    from merlin_cowclip.plugins.optimizers import cowclip  # which broadcasts its state

    optimizer = getattr(model, "optimizer", None)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if not isinstance(inner, cowclip.CowClipOptimizer):
        raise ValueError(
            "The model must be compiled with a CowClipOptimizer. Received: "
            f"{type(inner).__name__}. Other optimizers: model.save."
        )
    return inner


def weights_of(model: mm.Model) -> dict[str, tf.Variable]:
    """The part of `training_state` that a prediction needs, of any built model."""
    return _named("weight", model.weights)


def mean_loss(model: mm.Model) -> tf.keras.metrics.Mean:
    """The running mean of the loss, which Keras lists among the metrics from the first step on."""
    return model.compiled_loss._total_loss_mean


def _named(kind: str, variables: Iterable[tf.Variable]) -> dict[str, tf.Variable]:
    return {f"{kind}/{place:04}": variable for place, variable in enumerate(variables)}


def _moments(part: Any, variable: tf.Variable) -> list[tuple[str, tf.Variable]]:
    """What a part of the optimizer keeps of a variable; in any order of creation, in this order."""
    deferred = getattr(part, "deferred", None)
    last_step = deferred and deferred.last_step_of(variable)
    found = sorted(part._slots.get(variable._unique_id, {}).items())
    return found if last_step is None else [*found, ("last_step", last_step)]


def _settings(optimizer: Any) -> list[tf.Variable]:
    """Step counts; learning rates, betas and the like, which Keras does not list as weights."""
    found: list[Any] = []
    for one in (optimizer, *optimizer.optimizers):
        found += [one.iterations, getattr(getattr(one, "deferred", None), "_rate", None)]
        for _, value in sorted(one._hyper.items()):
            found += vars(value).values() if isinstance(value, LinearWarmup) else [value]
    return [value for value in found if isinstance(value, tf.Variable)]
