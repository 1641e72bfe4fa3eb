"""What callbacks load on one rank as a fit begins, all ranks have before its first step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from merlin_cowclip.plugins._stack import tf
from merlin_cowclip.plugins.joining import gathered, ranks
from merlin_cowclip.plugins.stopping_alike import has_own

_BATCH = ("on_train_batch_begin", "on_batch_begin")
_BEFORE_A_STEP = ("on_train_begin", "on_epoch_begin", *_BATCH)


def beginning_alike(callbacks: Sequence[Any], share: Callable[[], None]) -> list[Any]:
    """Keras's callbacks of a fit, with one more, the last, where one of some rank may load weights.

    Eagerly, on all ranks at once.

    Args:
      callbacks: this rank's, which may be others than another rank's.
      share: gives all ranks what rank 0 has; eagerly, on all ranks at once.
    """
    if ranks().size == 1:
        return list(callbacks)
    mine = [
        any(may_load_before_a_step(one) for one in callbacks),
        any(has_own(one, _BATCH) for one in callbacks),
    ]
    loads, at_batches = gathered(np.array([mine], np.uint8)).any(axis=0)
    return [*callbacks, BeginAlike(share, at_batch=bool(at_batches))] if loads else list(callbacks)


class BeginAlike(tf.keras.callbacks.Callback):
    """Gives all ranks the weights that callbacks have loaded on rank 0.

    Horovod's `BroadcastGlobalVariablesCallback`, which does so after the first step, is left out
    of a fit (see `metrics_alike`): it knows nothing of tables in shards.

    Args:
      share: does so; eagerly, on all ranks at once.
      at_batch: whether as the first batch begins, and not as the first epoch does.
    """

    _supports_tf_logs = True  # it reads none: Keras would wait for their values

    def __init__(self, share: Callable[[], None], *, at_batch: bool) -> None:
        super().__init__()
        self._share = share
        self._at_batch = at_batch
        self._is_done = False

    def _implements_train_batch_hooks(self) -> bool:
        return self._at_batch

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Share, where no callback does something as a batch begins."""
        if not self._at_batch:
            self._share_once()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Share, where one does."""
        if self._at_batch:
            self._share_once()

    def _share_once(self) -> None:
        if not self._is_done:
            self._is_done = True
            self._share()


def may_load_before_a_step(callback: Any) -> bool:
    """Whether a callback does something before a fit's first step that may be to load weights.

    Those of Keras, Horovod, Merlin and ours do not, but for `BackupAndRestore`, and
    `ModelCheckpoint(load_weights_on_restart=True)`.
    """
    if isinstance(callback, tf.keras.callbacks.BackupAndRestore):
        return True
    return bool(getattr(callback, "load_weights_on_restart", False)) or has_own(
        callback, _BEFORE_A_STEP
    )
