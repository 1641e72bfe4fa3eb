# SPDX-License-Identifier: Apache-2.0
"""Hooks on the model of an optimizer: ten methods that Keras calls, and what they do before.

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
from merlin_cowclip.plugins.embeddings.tables import check_whole
from merlin_cowclip.plugins.optimizers.micro_batches import step_in_parts
from merlin_cowclip.plugins.optimizers.rank_sync import with_rank_sync
from merlin_cowclip.plugins.optimizers.state import unwrapped

_REDUCTION = tf.keras.losses.Reduction


class BatchSizeCheck(tf.keras.callbacks.Callback):
    """Warns after the first batch of a `fit` if it has another size than the hyperparameters'."""

    _supports_tf_logs = True  # else Keras waits for the values of each batch's logs

    def __init__(self, optimizer: Any, file: str, line: int) -> None:
        super().__init__()
        self._caller: tuple[str, int] | None = (file, line)
        self._optimizer = optimizer

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Check the first batch."""
        caller, self._caller = self._caller, None
        wanted = self._optimizer.hyperparameters.batch_size
        if caller is not None and (found := int(self._optimizer.batch_rows)) not in (0, wanted):
            message = (
                f"The hyperparameters are for batches of {wanted:,} samples, but this fit has "
                f"batches of {found:,}. Use scale(…, to={found}), or the batch size that they are "
                "for."
            )
            warnings.warn_explicit(message, UserWarning, *caller)


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
    frame = sys._getframe(2)
    caller = frame.f_code.co_filename, frame.f_lineno
    check = BatchSizeCheck(compiled, *caller)
    given = inspect.signature(fit).bind(*arguments, **named)
    ends = given.arguments.get("epochs", 1), given.arguments.get("initial_epoch", 0)
    compiled.fit_begins(ends[0] - ends[1], caller)
    callbacks = given.arguments.get("callbacks")
    if isinstance(callbacks, tf.keras.callbacks.CallbackList):
        callbacks.append(check)
    else:
        given.arguments["callbacks"] = [*tf.nest.flatten(callbacks or []), check]
    return fit(*given.args, **given.kwargs)


def _make_train_function(
    compiled: Any, bound: Any, model: Any, make: Any, *force: Any, **named: Any
) -> Any:
    if compiled is None and bound is not None:  # another optimizer trains its tables
        bound.release_tables()
    elif compiled is not None:
        if model._jit_compile:
            raise ValueError(
                "A model with a CowClipOptimizer must be compiled without jit_compile: XLA has no "
                "kernels for sparse updates. Leave it out, or compile dense layers by "
                "@tf.function(jit_compile=True) on their call."
            )
        for loss in tf.nest.flatten(model.loss):
            if getattr(loss, "reduction", None) in (_REDUCTION.SUM, _REDUCTION.NONE):
                raise ValueError(
                    "Losses must be means over samples: λ, the clip and the scaling rules assume "
                    f"it. Received: {type(loss).__name__}(reduction={loss.reduction!r}). Use "
                    "reduction='sum_over_batch_size'."
                )
        compiled.training_begins(_steps_per_epoch(model))
    return make(*force, **named)


def _train_step(compiled: Any, bound: Any, model: Any, step: Any, data: Any) -> Any:
    number = 1 if compiled is None else compiled.accumulate
    return step(data) if number == 1 else step_in_parts(model, step, data, number)


def _save(compiled: Any, bound: Any, model: Any, save: Any, *arguments: Any, **named: Any) -> Any:
    optimizer = compiled or bound
    if optimizer is None:
        return save(*arguments, **named)
    check_whole(optimizer.table_specs, "save")
    optimizer.release_tables()  # else a SavedModel would have their pending rows
    try:
        # Keras cannot load its state: `save_model` saves it.
        return save(*arguments, **{**named, "include_optimizer": False})
    finally:
        optimizer.take_tables()


def _use_weights(
    name: str, compiled: Any, bound: Any, model: Any, use: Any, *arguments: Any, **named: Any
) -> Any:
    optimizer = compiled or bound
    if optimizer is not None:
        check_whole(optimizer.table_specs, name)
        optimizer.catch_up()
    return use(*arguments, **named)


def _add_horovod_callbacks(compiled: Any, bound: Any, model: Any, add: Any, callbacks: Any) -> Any:
    """Of a Merlin model's fit on several ranks."""
    return add(callbacks) if compiled is None else with_rank_sync(callbacks)


def _create_optimizer(compiled: Any, bound: Any, model: Any, create: Any, optimizer: Any) -> Any:
    """Of a Merlin model's compile: on several ranks it would remake loss scaling."""
    return create(optimizer) if unwrapped(optimizer) is None else optimizer


_HOOKS: Mapping[str, Callable[..., Any]] = {
    "fit": _fit,
    "make_train_function": _make_train_function,
    "train_step": _train_step,
    "save": _save,
    **{
        name: partial(_use_weights, name)
        for name in ("get_weights", "set_weights", "save_weights", "load_weights")
    },
    "_add_horovod_callbacks": _add_horovod_callbacks,
    "_create_optimizer": _create_optimizer,
}


def _steps_per_epoch(model: Any) -> int | None:
    """Updates per epoch of the fit that begins; `None` where Keras does not know them."""
    steps = (getattr(getattr(model, "history", None), "params", None) or {}).get("steps")
    return math.ceil(steps) if steps and steps > 0 else None
