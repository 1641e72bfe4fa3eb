"""What callbacks of a fit see at an epoch's end is, on several ranks, the same on all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from merlin_cowclip.plugins._stack import tf
from merlin_cowclip.plugins.joining import of_all_ranks, ranks


def metrics_alike(given: Sequence[Any]) -> list[Any]:
    """Keras's callbacks of a fit, on several ranks with one more, the first: see `MetricsAlike`.

    Horovod's that give all ranks the weights of one are left out: they have them, but for rows of
    their own.

    Args:
      given: this rank's, which may be others than another rank's.
    """
    if ranks().size == 1:
        return list(given)
    return [MetricsAlike(), *(one for one in given if not _is_broadcast(one))]


def _is_broadcast(callback: Any) -> bool:
    """Whether it is Horovod's, which has one for each of `horovod.keras` and its like."""
    kinds = type(callback).__mro__
    names = [kind.__name__ for kind in kinds if kind.__module__.startswith("horovod.")]
    return "BroadcastGlobalVariablesCallback" in names


class MetricsAlike(tf.keras.callbacks.Callback):
    """Gives all ranks the mean of what Keras has measured on each in an epoch.

    Whoever stops or sets a learning rate by a metric must do so on all ranks alike. A metric that
    not all have, as of a validation that one rank makes alone, is of those that have it: Horovod's
    `MetricAverageCallback` would wait for the others for ever.
    """

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Put the means into `logs`, which all callbacks are given."""
        logs = {} if logs is None else logs
        of_each = of_all_ranks({name: np.asarray(logs[name]).tolist() for name in logs})
        for name in dict.fromkeys(name for one in of_each for name in one):
            mean = np.mean([one[name] for one in of_each if name in one], axis=0)
            logs[name] = mean if mean.ndim else float(mean)
