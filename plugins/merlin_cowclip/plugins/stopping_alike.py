"""Callbacks that end a fit on several ranks end it on all of them, after the same step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from merlin_cowclip.plugins._stack import tf
from merlin_cowclip.plugins.joining import gathered, ranks

_OF_BATCHES = tuple(f"on_{of}batch_{at}" for of in ("train_", "") for at in ("begin", "end"))
_KNOWN = ("keras.", "horovod.", "merlin.", f"{__name__.partition('.')[0]}.")
_MAY_STOP = (tf.keras.callbacks.TerminateOnNaN, tf.keras.callbacks.LambdaCallback)


def stopping_alike(callbacks: Sequence[Any]) -> list[Any]:
    """Keras's callbacks of a fit, on several ranks with one more, the last: see `StopAlike`.

    Eagerly, on all ranks at once.

    Args:
      callbacks: this rank's, which may be others than another rank's.
    """
    if ranks().size == 1:
        return list(callbacks)
    mine = any(may_stop_after_a_batch(one) for one in callbacks)
    return [*callbacks, StopAlike(each_batch=bool(gathered(np.array([mine], np.uint8)).any()))]


class StopAlike(tf.keras.callbacks.Callback):
    """Stops on all ranks where a callback stops on one: the others would wait for it for ever.

    Batches, and what Keras logs of them, are each rank's own, so that a callback such as
    `TerminateOnNaN` sees its reason on one rank alone. What ranks agree on is `stop_training` of
    the model: at each epoch's beginning and end, and after each batch where a callback of some rank
    looks at batches, which costs a message to all ranks.

    Args:
      each_batch: whether they agree after each batch.
    """

    _supports_tf_logs = True  # it reads none: Keras would wait for their values

    def __init__(self, *, each_batch: bool) -> None:
        super().__init__()
        self._each_batch = each_batch

    def _implements_train_batch_hooks(self) -> bool:
        return self._each_batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Agree, where a callback looks at batches."""
        if self._each_batch:
            self._agree()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Agree: Keras would end the epoch after its first batch."""
        self._agree()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Agree."""
        self._agree()

    def _agree(self) -> None:
        stops = gathered(np.array([self.model.stop_training], np.uint8))
        self.model.stop_training = bool(stops.any())


def may_stop_after_a_batch(callback: Any) -> bool:
    """Whether a callback does something at batches that may be to stop.

    Those of Keras, Horovod, Merlin and ours do not, but for `TerminateOnNaN` and `LambdaCallback`.
    """
    return isinstance(callback, _MAY_STOP) or has_own(callback, _OF_BATCHES)


def has_own(callback: Any, methods: Sequence[str]) -> bool:
    """Whether a callback was given one of these, or has it of none of Keras's and other classes."""
    if any(name in vars(callback) for name in methods):
        return True
    defining = (_class_with(callback, name) for name in methods)
    return any(one is not None and not one.__module__.startswith(_KNOWN) for one in defining)


def _class_with(callback: Any, name: str) -> type | None:
    """The class that a callback has a method of."""
    return next((one for one in type(callback).__mro__ if name in vars(one)), None)
