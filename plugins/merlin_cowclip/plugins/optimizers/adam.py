# SPDX-License-Identifier: Apache-2.0
"""CowClipAdam: Merlin's Adam on embedding rows, after L2 and clip (`row_clip.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from merlin_cowclip.plugins._tensorflow import mm, tf
from merlin_cowclip.plugins.optimizers.deferred import DeferredRows
from merlin_cowclip.plugins.optimizers.row_clip import ClipsRows
from merlin_cowclip.plugins.scaling import check_number


@tf.keras.utils.register_keras_serializable(package="merlin_cowclip")
class CowClipAdam(ClipsRows, mm.LazyAdam):
    """Adam for embedding tables with the paper's L2 and clip (Algorithm 1, lines 5 to 10).

    `ClipsRows` says what a step does before Adam. As a part of `CowClipOptimizer` it also has
    `update="deferred"`: as "exact", but absent rows are updated when they are read next
    (`deferred.py`).

    Args:
      learning_rate: η of the embeddings, a number or a Keras schedule; this, `beta_1`, `beta_2` and
        `epsilon` (Keras's "epsilon hat") are as in Keras's Adam.
      settings: as in `ClipsRows`.

    Raises:
      ValueError: an argument outside its range.
    """

    def __init__(
        self,
        learning_rate: float | tf.keras.optimizers.schedules.LearningRateSchedule = 1e-4,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        **settings: Any,
    ) -> None:
        if max(check_number("beta_1", beta_1), check_number("beta_2", beta_2)) >= 1:
            raise ValueError(f"beta_1 and beta_2 must be below 1. Received: {beta_1}, {beta_2}")
        super().__init__(learning_rate, beta_1, beta_2, epsilon=epsilon, **settings)
        if self.update == "deferred":
            self.deferred = DeferredRows(self)

    def __setattr__(self, name: str, value: Any) -> None:
        if self.deferred is not None:
            self.deferred.check_change(name, value)
        super().__setattr__(name, value)

    def _create_slots(self, var_list: Sequence[tf.Variable]) -> None:
        super()._create_slots(var_list)
        if self.deferred is not None:
            self.deferred.create_state(var_list)

    def _apply_rows(self, grad: tf.Tensor, var: tf.Variable, indices: tf.Tensor) -> tf.Operation:
        done = super()._apply_rows(grad, var, indices)
        if self.deferred is None:
            return done
        return tf.group(done, self.deferred.after_step(var, indices))
