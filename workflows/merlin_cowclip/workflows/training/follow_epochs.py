"""FollowEpochs: the callback that gives each epoch of a fit an order of its own."""

from __future__ import annotations

from typing import Any

from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.workflows.training.loader import Loader

_BESIDE = 2  # passes over an epoch beside the fit's own: an evaluation on it before and after


class FollowEpochs(tf.keras.callbacks.Callback):
    """Gives a loader Keras's own epoch numbers: each epoch of a `fit` has an order of its own.

    So `initial_epoch` holds for it; also with `BackupAndRestore`, which starts at an epoch that
    only Keras knows. Not behind `loader.repeat().prefetch(n)`, which asks for an epoch's first
    batch in the epoch before: `loader.dataset(epochs=None).prefetch(n)` needs no callback.
    """

    def __init__(self, loader: Loader) -> None:
        super().__init__()
        self._loader = loader

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Set the loader's epoch; the first batch is asked for after this."""
        self._loader.epoch = epoch
        self._loader._passes.allow_repeats(_BESIDE)  # few: a failed fit has no `on_train_end`

    def on_train_end(self, logs: Any = None) -> None:
        """What this fit said holds for no later one; but a pass to evaluate may be as its last."""
        self._loader._passes.forget()
