"""What an optimizer is told of what its model does: fits, saves, and uses of weights as a whole.

Keras gives optimizers no such notice, and the update itself is Python only while it is traced, so
methods of the bound model say it. Each is a bound method of the model's own: it is copied
with the model, and Keras saves nothing of it.
"""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import itertools
import math
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, Protocol

from merlin_cowclip.plugins._stack import tf
from merlin_cowclip.plugins.beginning_alike import beginning_alike
from merlin_cowclip.plugins.checks import is_whole
from merlin_cowclip.plugins.joining import ranks
from merlin_cowclip.plugins.metrics_alike import metrics_alike
from merlin_cowclip.plugins.stopping_alike import stopping_alike

_NEEDS_ROWS = ("get_weights", "set_weights", "save_weights", "load_weights")

_FUNCTIONS = {
    "fit": "make_train_function",
    "evaluate": "make_test_function",
    "predict": "make_predict_function",
}


class _Call(NamedTuple):
    """A call of a method of a model for many batches."""

    model: Any
    function: str  # of a batch, which it asks for
    data: Any
    batch_size: int | None  # of the data, where it is known
    is_validation: bool  # of a fit


# Until it asks. What is asked for without one is for a batch alone: the last history is another's.
_called = contextvars.ContextVar[_Call | None]("merlin_cowclip_called", default=None)
_fitted = contextvars.ContextVar[tuple[Any, ...]]("merlin_cowclip_fitted", default=())


def is_fitted(model: Any) -> bool:
    """Whether a fit of `model` is under way, as it is for a callback of it."""
    return any(one is model for one in _fitted.get())


class Fit(NamedTuple):
    """What Keras and Merlin know of a fit as it begins.

    Attributes:
      steps: updates per epoch; `None` where the data has none, or no known length.
      batch_size: samples per batch on all ranks, where the data is a loader's or a Merlin
        `Dataset`.
    """

    steps: int | None
    batch_size: int | None


class Notified(Protocol):
    """An optimizer that wants to know."""

    def fit_begins(self, fit: Fit | None) -> None:
        """Called before the first step by every `fit`, and, without one, by `train_on_batch`."""
        ...

    def epochs_begin(self, epochs: int | None, first: tuple[int, int]) -> None:
        """Called before the first of a fit's epochs, with the epoch and step that it begins at."""
        ...

    def share_loaded(self) -> None:
        """Called before a fit's first step, where its callbacks may have loaded weights."""
        ...

    def stepping_on(self, data: Any) -> AbstractContextManager[None]:
        """Entered around each step of Keras's, where it is Python, with its batch."""
        ...

    def takes_mean_over(
        self, targets: Any, predictions: Any, losses: Mapping[str, tf.keras.losses.Loss]
    ) -> None:
        """Called where the loss of a batch is taken, with what it is taken of, and by what."""
        ...

    def call_begins(self, steps: int | None) -> None:
        """Called before the first of so many batches of an evaluation or a prediction."""
        ...

    def check_trains_by(self, other: Any) -> None:
        """Called where another optimizer is about to train the model."""
        ...

    def check_whole(self, what: str) -> None:
        """Called before weights are read or set, or saved."""
        ...

    def saving(self) -> AbstractContextManager[None]:
        """Entered around `model.save`."""
        ...

    def catch_up(self) -> None:
        """Called before weights are read or set, and before another optimizer takes over."""
        ...


def notify_of_fits(model: tf.keras.Model, bound: Notified) -> None:
    """Tell the optimizer of `model` of fits, and of uses of its weights.

    Args:
      model: its methods are replaced.
      bound: the optimizer that the model's tables know. One that the model is compiled with goes
        before it; one of another kind is told nothing.
    """
    kind, reference = type(bound), weakref.ref(bound)  # its copies take no copy of it along

    def compiled(model: Any) -> Notified | None:
        optimizer = getattr(model, "optimizer", None)
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # loss scaling wraps it
        return optimizer if isinstance(optimizer, kind) else None

    def known(model: Any) -> Notified | None:
        return compiled(model) or reference()  # a loop of one's own compiles nothing

    def over_batches(name: str) -> Callable[..., Any]:
        def method(self: Any, *arguments: Any, **named: Any) -> Any:
            data = arguments[0] if arguments else named.get("x")
            is_keras = not hasattr(type(self), "_add_horovod_callbacks")
            if name == "fit" and is_keras and ranks().size > 1:
                change = partial(on_ranks, self)
                arguments, named = _with_callbacks(type(self).fit, arguments, named, change)
            size = _batch_size(data, arguments, named)
            is_validation = bool(named.get("_use_cached_eval_dataset"))
            token = _called.set(_Call(self, _FUNCTIONS[name], data, size, is_validation))
            fits = _fitted.set((*_fitted.get(), *([self] if name == "fit" else [])))
            try:
                return getattr(type(self), name)(self, *arguments, **named)
            finally:
                _fitted.reset(fits)
                _called.reset(token)

        method.__name__ = name
        return method

    def begun(model: Any, function: str) -> _Call | None:
        call = _called.get()
        if call is None or call.model is not model or call.function != function:
            return None
        _called.set(None)
        return call

    def make_train_function(self: Any, force: bool = False) -> Callable[..., Any]:
        optimizer, call = compiled(self), begun(self, "make_train_function")
        if optimizer is not None:
            _check_no_jit(self._jit_compile)
            optimizer.fit_begins(None if call is None else _fit_of(self, call))
        elif (mine := reference()) is not None:
            mine.check_trains_by(self.optimizer)
        return type(self).make_train_function(self, force)

    def train_step(self: Any, data: Any) -> Any:
        optimizer = compiled(self)
        if optimizer is None:
            return type(self).train_step(self, data)
        with optimizer.stepping_on(data):
            return type(self).train_step(self, data)

    def compute_loss(
        self: Any, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None
    ) -> Any:
        loss = type(self).compute_loss(self, x, y, y_pred, sample_weight)
        optimizer = compiled(self)
        if optimizer is not None:
            optimizer.takes_mean_over(y, y_pred, _losses_of(self))
        return loss

    def before_batches(name: str) -> Callable[..., Any]:
        def method(self: Any, force: bool = False) -> Callable[..., Any]:
            optimizer, call = known(self), begun(self, name)
            if compiled(self) is not None:
                _check_no_jit(self._jit_compile)
            if optimizer is not None:
                with _forgotten_where_refused(self):
                    optimizer.call_begins(1 if call is None else _steps_of(self, call))
            made: Callable[..., Any] = getattr(type(self), name)(self, force)
            return made

        method.__name__ = name
        return method

    def save(self: Any, *arguments: Any, **named: Any) -> None:
        optimizer = known(self)
        if optimizer is None:
            return type(self).save(self, *arguments, **named)
        optimizer.check_whole("save")
        with optimizer.saving(), _loaded_without_loss_scaling():
            return type(self).save(self, *arguments, **named)

    def on_current_rows(name: str) -> Callable[..., Any]:
        def method(self: Any, *arguments: Any, **named: Any) -> Any:
            optimizer = known(self)
            if optimizer is not None:
                optimizer.check_whole(name)
                optimizer.catch_up()
            return getattr(type(self), name)(self, *arguments, **named)

        method.__name__ = name
        return method

    def compile(self: Any, *arguments: Any, **named: Any) -> None:
        given = arguments[0] if arguments else named.get("optimizer")
        if isinstance(getattr(given, "inner_optimizer", given), kind):
            _check_no_jit(named.get("jit_compile"))
        optimizer = known(self)
        if optimizer is not None:
            optimizer.catch_up()
        return type(self).compile(self, *arguments, **named)

    def _create_optimizer(self: Any, optimizer: Any) -> Any:
        # On several ranks Merlin would make loss scaling anew, with ranks times the learning rate.
        if isinstance(getattr(optimizer, "inner_optimizer", optimizer), kind):
            return optimizer
        return type(self)._create_optimizer(self, optimizer)

    def on_ranks(model: Any, callbacks: Any) -> Any:
        """A fit's callbacks, where there are several ranks for these."""
        optimizer = compiled(model)
        if optimizer is None or ranks().size == 1:
            return callbacks
        if isinstance(callbacks, tf.keras.callbacks.CallbackList):
            callbacks = callbacks.callbacks
        alike = stopping_alike(metrics_alike(tf.nest.flatten(callbacks or [])))
        return beginning_alike(alike, optimizer.share_loaded)

    def _add_horovod_callbacks(self: Any, callbacks: Any) -> Any:
        if compiled(self) is None:
            return type(self)._add_horovod_callbacks(self, callbacks)
        return on_ranks(self, callbacks)

    def _maybe_load_initial_counters_from_ckpt(
        self: Any, steps_per_epoch: int | None, initial_epoch: int
    ) -> tuple[int, int]:
        # Keras asks once all callbacks have begun, on which it may depend (BackupAndRestore).
        kind = type(self)
        first = kind._maybe_load_initial_counters_from_ckpt(self, steps_per_epoch, initial_epoch)
        optimizer = compiled(self)
        if optimizer is not None:
            optimizer.epochs_begin(_params_of_history(self).get("epochs"), first)
        found: tuple[int, int] = first
        return found

    methods: list[Callable[..., Any]] = [make_train_function, train_step, compute_loss]
    methods += [save, compile, _create_optimizer, *map(over_batches, _FUNCTIONS)]
    methods += map(before_batches, ("make_test_function", "make_predict_function"))
    methods += map(on_current_rows, _NEEDS_ROWS)
    methods += [_add_horovod_callbacks, _maybe_load_initial_counters_from_ckpt]
    for method in methods:
        # object.__setattr__: Keras would look for layers in it.
        object.__setattr__(model, method.__name__, types.MethodType(method, model))


def _with_callbacks(
    fit: Callable[..., Any],
    arguments: tuple[Any, ...],
    named: dict[str, Any],
    change: Callable[[Any], Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a fit, without its model, with other callbacks; if it takes any."""
    parameters = inspect.signature(fit).parameters
    taken = parameters.get("callbacks")
    if taken is not None and taken.kind != taken.KEYWORD_ONLY:
        place = list(parameters).index("callbacks") - 1
        if len(arguments) > place:
            return (*arguments[:place], change(arguments[place]), *arguments[place + 1 :]), named
    if taken is None and all(one.kind != one.VAR_KEYWORD for one in parameters.values()):
        return arguments, named
    return arguments, {**named, "callbacks": change(named.get("callbacks"))}


def _check_no_jit(jit_compile: Any) -> None:
    """Refuse XLA for whole steps: it has no kernel for their sums of rows, and drops asserts."""
    if jit_compile:
        raise ValueError(
            "A model with a CowClipOptimizer must be compiled without jit_compile: XLA has none of "
            "the ops that sum the gradients of rows, and would drop the checks of ids. Received: "
            f"jit_compile={jit_compile!r}. Leave it out, or compile dense layers of your own, by "
            "@tf.function(jit_compile=True) on their call."
        )


class _InnerOptimizer(tf.keras.mixed_precision.LossScaleOptimizer):
    """What loss scaling is loaded as: what is within it."""

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        return tf.keras.optimizers.deserialize(config["inner_optimizer"], custom_objects)


def _loaded_without_loss_scaling() -> AbstractContextManager[Any]:
    """Within it, on several ranks, a model is loaded without its loss scaling.

    Merlin loads what it saves, for the schema of its outputs, and compiles it; see
    `_create_optimizer`, which that model has not.
    """
    if ranks().size == 1:
        return contextlib.nullcontext()
    names = "LossScaleOptimizer", "lossscaleoptimizer"  # Keras looks for the second
    return tf.keras.utils.custom_object_scope(dict.fromkeys(names, _InnerOptimizer))


def _batch_size(data: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> int | None:
    """Of the data of a call; of a Merlin `Dataset`, which has none, the one that is given."""
    size = getattr(data, "batch_size", None)
    if size is None and hasattr(data, "to_ddf"):
        size = arguments[2] if len(arguments) > 2 else named.get("batch_size")
    return int(size) if size is not None and is_whole(size, 1, numpys=True) else None


def _fit_of(model: Any, call: _Call) -> Fit:
    steps, batch = _steps_of_history(model), call.batch_size
    # A loader that knows of ranks tells the size of the batches that they share.
    shares = max(1, ranks().size // getattr(call.data, "ranks", 1))
    return Fit(
        steps if steps and steps > 0 else None,
        batch * shares if batch is not None else None,
    )


def _steps_of_history(model: Any) -> int | None:
    """Batches, or of a fit those of an epoch, of the last call of many, where Keras knows them."""
    return _whole(_params_of_history(model).get("steps"))


def _params_of_history(model: Any) -> dict[str, Any]:
    return getattr(getattr(model, "history", None), "params", None) or {}


def _whole(steps: Any) -> int | None:
    """A number of steps, as Keras counts to it: of any type of number, and with a fraction too."""
    return None if steps is None else math.ceil(float(steps))


def _steps_of(model: Any, call: _Call) -> int | None:
    """Batches of the evaluation or prediction that begins, where Keras knows them."""
    handler = getattr(model, "_eval_data_handler", None)
    if call.is_validation and handler is not None:
        return _whole(handler.inferred_steps)
    return _steps_of_history(model)


@contextlib.contextmanager
def _forgotten_where_refused(model: Any) -> Iterator[None]:
    """Data that is refused is not kept: Keras would validate the next fit by it."""
    try:
        yield
    except ValueError:
        if hasattr(model, "_eval_data_handler"):
            del model._eval_data_handler
        raise


def _losses_of(model: Any) -> dict[str, tf.keras.losses.Loss]:
    """Keras's losses of the outputs that have one, by output, once Keras has made them.

    It does so as it first takes the loss, of names and functions, too, with means as reduction.
    """
    losses = model.compiled_loss
    if losses is None or not losses.built:  # the model takes its loss otherwise
        return {}
    # A Merlin model without an output block, which takes its loss by `add_loss`, names no output.
    named = itertools.zip_longest(losses._output_names or (), losses._losses)
    found = {name or f"output {i}": loss for i, (name, loss) in enumerate(named)}
    return {output: loss for output, loss in found.items() if loss is not None}
