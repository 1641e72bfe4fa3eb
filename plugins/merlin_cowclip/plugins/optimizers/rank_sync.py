"""RankSync: the callback of a fit on several ranks of Horovod."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.plugins.distributed.horovod import (
    all_gather,
    all_gather_object,
    broadcasts_variables,
    ranks,
)
from merlin_cowclip.plugins.optimizers.startup import synchronize
from merlin_cowclip.plugins.optimizers.state import optimizer_of

_KERAS = tf.keras.callbacks


class RankSync(tf.keras.callbacks.Callback):
    """Keeps all ranks of a `fit` equal.

    - At the first batch of the fit all ranks get the state that rank 0 has: weights, moments, step
      counts, learning rates. At the first batch of other epochs they get its learning rate.
    - At the end of each epoch, metrics in `logs` become the mean over the ranks that have them, and
      all ranks stop if a callback has stopped one.

    Merlin's `fit` adds it. To the `fit` of another Keras model on several ranks, pass it first, for
    the callbacks after it to see the means, and last, for what stops a rank to stop all:

    ```python
    sync = RankSync()
    model.fit(data, callbacks=[sync, tf.keras.callbacks.EarlyStopping("loss"), sync])
    ```

    On one rank it does nothing.

    Args:
      each_batch: whether all ranks stop after a batch, too, as `TerminateOnNaN` requires. It costs
        a message to all ranks per batch. Enough that one rank has it.
    """

    _supports_tf_logs = True  # else Keras waits for the values of each batch's logs

    def __init__(self, *, each_batch: bool = False) -> None:
        super().__init__()
        self._each_batch = each_batch
        self._epoch_begins = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Check that the model has a `CowClipOptimizer`, and agree on `each_batch`."""
        if ranks().size > 1:
            optimizer_of(self.model).awaits_rank_sync = False
            self._each_batch = _any(self._each_batch)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Expect its first batch."""
        self._epoch_begins = ranks().size > 1

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Broadcast at the first batch, once all callbacks have begun."""
        if self._epoch_begins:
            self._epoch_begins = False
            synchronize(optimizer_of(self.model), self.model)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Stop all ranks where one stops, if `each_batch`."""
        if self._each_batch and ranks().size > 1:
            self.model.stop_training = _any(self.model.stop_training)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Average the metrics, and stop all ranks where one stops."""
        if ranks().size == 1:
            return
        logs = {} if logs is None else logs
        mine = {name: np.asarray(logs[name]).tolist() for name in logs}
        told = all_gather_object([mine, bool(self.model.stop_training)])
        self.model.stop_training = any(stops for _, stops in told)
        for name in dict.fromkeys(name for metrics, _ in told for name in metrics):
            mean = np.mean([metrics[name] for metrics, _ in told if name in metrics], axis=0)
            logs[name] = mean if mean.ndim else float(mean)


def _any(flag: bool) -> bool:
    """Whether one rank's is true; called on all ranks at once."""
    return bool(all_gather(np.array([flag], np.uint8)).any())


def with_rank_sync(callbacks: Any) -> Sequence[Any]:
    """A fit's callbacks with `RankSync` first and last, in place of Horovod's broadcast.

    That would overwrite rows of sharded tables, and waits for variables of the same names.
    """
    if isinstance(callbacks, _KERAS.CallbackList):
        callbacks = callbacks.callbacks
    given = [one for one in tf.nest.flatten(callbacks or []) if not broadcasts_variables(one)]
    each_batch = any(isinstance(one, _KERAS.TerminateOnNaN) for one in given)
    return [RankSync(), *given, RankSync(each_batch=each_batch)]
