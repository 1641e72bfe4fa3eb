# SPDX-License-Identifier: Apache-2.0
"""A `CowClipOptimizer` on several ranks of Horovod: equal start, summed gradients, `RankSync`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.plugins.distributed.gradients import all_reduce_dense
from merlin_cowclip.plugins.distributed.horovod import (
    all_gather,
    all_gather_object,
    broadcast,
    broadcasts_variables,
    check_same,
    ranks,
)
from merlin_cowclip.plugins.optimizers.state import optimizer_of, state_of


def broadcast_state(optimizer: Any, model: tf.keras.Model) -> None:
    """Give all ranks rank 0's state, after checking that they train the same by the same."""
    sharded = optimizer.in_shards()
    state = [v for v in state_of(model, optimizer).values() if v.ref() not in sharded]
    settings = {
        "update": optimizer.update_mode,
        "variables": len(state),
        "hyperparameters": optimizer.hyperparameters.to_dict(),
    }
    for place, (spec, clipped) in enumerate(optimizer.clipped_ranges().items()):
        rows = spec.range_names, spec.row_offsets, spec.width
        settings[f"table {place}"] = [*rows, clipped, spec.shard is not None]
    check_same(settings, "All ranks must train the same model by the same optimizer.")
    broadcast(state)


def synchronize(optimizer: Any, model: tf.keras.Model) -> None:
    """Broadcast rank 0's state as a fit begins (or in its first step), and later its rate."""
    if optimizer.is_started:
        broadcast([optimizer.learning_rate])
    elif all(all_gather_object(bool(model.built))):
        optimizer.create_slots(model.trainable_variables)
        optimizer.broadcast()


def reduce_gradients(
    optimizer: Any, pairs: Sequence[tuple[Any, tf.Variable]], *, scaled: bool = False
) -> list[Any]:
    """Gradients and counts of the global batch; of sharded tables, those of this rank's rows.

    `scaled`: loss scaling decides by them whether to make the step, so all must agree on NaN.
    """
    _start(optimizer, [variable for _, variable in pairs])
    reduced: dict[Any, Any] = {}
    # An id out of range ends the step before the other ranks hear of it: they would make it.
    with tf.control_dependencies(optimizer.checks_of_ids()):
        for part, mine in optimizer.by_part(pairs):
            if part is not optimizer.default_optimizer:
                reduced.update((v.ref(), gradient) for gradient, v in part.reduce(mine))
            else:
                gradients = [gradient for gradient, _ in mine]
                sharded = optimizer.in_shards()
                if scaled and sharded:
                    local = [gradient for gradient, v in pairs if v.ref() in sharded]
                    gradients = _with_nan_of(local, gradients)
                means = all_reduce_dense(gradients)
                reduced.update((v.ref(), mean) for mean, (_, v) in zip(means, mine, strict=True))
    return [(reduced[variable.ref()], variable) for _, variable in pairs]


def _with_nan_of(tables: list[Any], dense: list[Any]) -> list[Any]:
    """Dense gradients, NaN where a gradient of these tables is not finite."""
    finite = tf.stack([tf.reduce_all(tf.math.is_finite(one.values)) for one in tables])
    nan = tf.where(tf.reduce_all(finite), 0.0, float("nan"))
    return [g + tf.cast(nan, g.dtype) if isinstance(g, tf.Tensor) else g for g in dense]


def _start(optimizer: Any, variables: list[tf.Variable]) -> None:
    with tf.init_scope():
        optimizer.create_slots(variables)
    if optimizer.is_started:
        return
    if tf.executing_eagerly():
        raise ValueError(
            "On several ranks all must begin with the same weights. Build the model and call "
            "optimizer.broadcast() before a first eager step; fit and a tf.function do so."
        )
    with tf.init_scope():  # while the step is traced: it runs after this
        optimizer.broadcast()


class RankSync(tf.keras.callbacks.Callback):
    """Keeps all ranks of a `fit` equal.

    - Before the first epoch all ranks get rank 0's weights, moments, step counts and learning
      rates; before other epochs its learning rate.
    - At the end of each epoch, metrics in `logs` become the mean over the ranks that have them, and
      all ranks stop if a callback has stopped one.

    The `fit` of a model with a `CowClipOptimizer` adds it, first and last: callbacks after it see
    the means, and what stops a rank stops all.

    Args:
      each_batch: whether all ranks stop after a batch, too, as `TerminateOnNaN` requires: a message
        to all ranks per batch.
    """

    _supports_tf_logs = True  # else Keras waits for the values of each batch's logs

    def __init__(self, *, each_batch: bool = False) -> None:
        super().__init__()
        self._each_batch = each_batch

    def on_train_begin(self, logs: Any = None) -> None:
        """Agree on `each_batch`."""
        if ranks().size > 1:
            self._each_batch = _any(self._each_batch)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Broadcast the state or, after the first epoch, the learning rate."""
        if ranks().size > 1:
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
        gathered = all_gather_object([mine, bool(self.model.stop_training)])
        self.model.stop_training = any(stops for _, stops in gathered)
        for name in dict.fromkeys(name for metrics, _ in gathered for name in metrics):
            mean = np.mean([metrics[name] for metrics, _ in gathered if name in metrics], axis=0)
            logs[name] = mean if mean.ndim else float(mean)


def _any(flag: bool) -> bool:
    """Whether one rank's is true; on all ranks at once."""
    return bool(all_gather(np.array([flag], np.uint8)).any())


def with_rank_sync(callbacks: Sequence[Any]) -> list[Any]:
    """A fit's callbacks with `RankSync` first and last, in place of Horovod's broadcast."""
    given = [one for one in callbacks if not broadcasts_variables(one)]
    each_batch = any(isinstance(one, tf.keras.callbacks.TerminateOnNaN) for one in given)
    return [RankSync(), *given, RankSync(each_batch=each_batch)]
