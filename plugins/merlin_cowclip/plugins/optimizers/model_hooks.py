# SPDX-License-Identifier: Apache-2.0
"""Hooks on the model of an optimizer: eight methods of Keras and Merlin, and what they do before.

Keras tells optimizers neither of fits nor of uses of weights. So methods of the model object are
replaced: a copied model has them, too, and Keras saves nothing of them.
"""

from __future__ import annotations

import inspect
import math
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.plugins.distributed.horovod import ranks
from merlin_cowclip.plugins.embeddings.tables import check_whole
from merlin_cowclip.plugins.optimizers.micro_batches import rows_of, step_in_parts
from merlin_cowclip.plugins.optimizers.rank_sync import with_rank_sync
from merlin_cowclip.plugins.optimizers.state import unwrapped
from merlin_cowclip.plugins.scaling import MIN_STEPS

_REDUCTION = tf.keras.losses.Reduction


class FitBegins(tf.keras.callbacks.Callback):
    """Tells the optimizer how long a `fit` is; warns of few steps, and of another batch size."""

    _supports_tf_logs = True  # else Keras waits for the values of each batch's logs

    def __init__(self, optimizer: Any, epochs: int, *caller: Any) -> None:
        super().__init__()
        self._optimizer, self._epochs, self._is_first = optimizer, epochs, True
        self._warn = lambda message: warnings.warn_explicit(message, UserWarning, *caller)

    def on_train_begin(self, logs: Any = None) -> None:
        """Set the lengths of warm-up and decay."""
        if self.model.built:  # else a step would create them, which TensorFlow traces twice
            self._optimizer.create_slots(self.model.trainable_variables)
        steps = math.ceil(self.params.get("steps") or 0)
        self._optimizer.fit_begins(self._epochs, steps or None)
        if 0 < steps < MIN_STEPS:
            self._warn(
                f"This fit has {steps} step{'s' * (steps != 1)} per epoch. With fewer than "
                f"{MIN_STEPS}, the warm-up and the updates are too coarse, and AUC suffers under "
                "every scaling rule. Use a smaller batch, or more data."
            )

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Check the size of the first batch."""
        is_first, self._is_first = self._is_first, False
        wanted = self._optimizer.hyperparameters.batch_size
        if is_first and (rows := int(self._optimizer.batch_rows)) not in (0, wanted):
            self._warn(
                f"The hyperparameters are for batches of {wanted:,} samples, but this fit has "
                f"batches of {rows:,}. Use scale(…, to={rows}), or the batch size that they are "
                "for."
            )


def install_hooks(model: tf.keras.Model, optimizer: Any) -> None:
    """Replace methods of `model`: its own `CowClipOptimizer`, else `optimizer`, hears of calls."""
    bound = weakref.ref(optimizer)  # which copies do not follow
    for name, hook in _HOOKS.items():
        # object.__setattr__: Keras would look for layers in it.
        object.__setattr__(model, name, types.MethodType(_method(name, hook, bound), model))


def _method(name: str, hook: Callable[..., Any], bound: Callable[[], Any]) -> Callable[..., Any]:
    def method(self: Any, *arguments: Any, **named: Any) -> Any:
        compiled = unwrapped(getattr(self, "optimizer", None))
        original = partial(getattr(type(self), name), self)
        return hook(compiled, bound(), self, original, *arguments, **named)

    method.__name__ = name
    return method


# Hooks take the optimizer that the model is compiled with, if it is ours; the one that it was bound
# to (a custom loop compiles nothing), if any; the model; and the method itself.


def _fit(compiled: Any, bound: Any, model: Any, fit: Any, *arguments: Any, **named: Any) -> Any:
    if compiled is None:
        return fit(*arguments, **named)
    given = inspect.signature(fit).bind(*arguments, **named)
    epochs = given.arguments.get("epochs", 1) - given.arguments.get("initial_epoch", 0)
    caller, callbacks = sys._getframe(2), given.arguments.get("callbacks") or []
    if isinstance(callbacks, tf.keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    # The first: another callback may restore the lengths from a checkpoint.
    begins = FitBegins(compiled, epochs, caller.f_code.co_filename, caller.f_lineno)
    callbacks = [begins, *tf.nest.flatten(callbacks)]
    given.arguments["callbacks"] = with_rank_sync(callbacks) if ranks().size > 1 else callbacks
    compiled.is_started = False  # somebody may have loaded weights on rank 0 alone
    compiled.take_tables()
    return fit(*given.args, **given.kwargs)


def _train_step(compiled: Any, bound: Any, model: Any, step: Any, data: Any) -> Any:
    with tf.init_scope():  # as the step is traced
        if compiled is not None:
            compiled.take_tables()
        elif bound is not None:  # another optimizer trains its tables
            bound.release_tables()
    if compiled is None:
        return step(data)
    if model._jit_compile:
        raise ValueError(
            "A model with a CowClipOptimizer must be compiled without jit_compile: XLA has no "
            "kernels for sparse updates. Leave it out, or compile dense layers by "
            "@tf.function(jit_compile=True) on their call."
        )
    for loss in tf.nest.flatten(model.loss):
        if getattr(loss, "reduction", None) in (_REDUCTION.SUM, _REDUCTION.NONE):
            raise ValueError(
                "Losses must be means over samples: λ, the clip and the scaling rules assume it. "
                f"Received: {type(loss).__name__}(reduction={loss.reduction!r}). Use "
                "reduction='sum_over_batch_size'."
            )
    with tf.device("CPU:0"):  # the largest batch: the last one of a fit may be smaller
        rows = tf.cast(rows_of(data) * ranks().size, tf.int64)
        compiled.batch_rows.assign(tf.maximum(compiled.batch_rows, rows))
    number = compiled.accumulate
    return step(data) if number == 1 else step_in_parts(model, step, data, number)


def _use_weights(
    name: str, compiled: Any, bound: Any, model: Any, use: Any, *arguments: Any, **named: Any
) -> Any:
    optimizer = compiled or bound
    if optimizer is None:
        return use(*arguments, **named)
    check_whole(optimizer.table_specs, name)
    optimizer.catch_up()
    if name == "save":  # Keras cannot load the optimizer's state: `save_model` saves it
        named["include_optimizer"] = False
    return use(*arguments, **named)


def _add_horovod_callbacks(compiled: Any, bound: Any, model: Any, add: Any, callbacks: Any) -> Any:
    """Of a Merlin model's fit on several ranks."""
    return add(callbacks) if compiled is None else callbacks


_HOOKS: Mapping[str, Callable[..., Any]] = {
    "fit": _fit,
    "train_step": _train_step,
    **{
        name: partial(_use_weights, name)
        for name in ("save", "get_weights", "set_weights", "save_weights", "load_weights")
    },
    "_add_horovod_callbacks": _add_horovod_callbacks,
}
