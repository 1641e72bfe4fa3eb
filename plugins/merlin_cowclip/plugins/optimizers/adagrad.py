# SPDX-License-Identifier: Apache-2.0
"""Adagrad on embedding rows, by element or by row, after L2 and clip (`row_clip.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.plugins.optimizers.row_clip import ClipsRows
from merlin_cowclip.plugins.scaling import check_number


@tf.keras.utils.register_keras_serializable(package="merlin_cowclip")
class CowClipAdagrad(ClipsRows, tf.keras.optimizers.legacy.Adagrad):
    """Adagrad for embedding tables: `G ← G + g²`, `w ← w - η·g / (√G + ε)`.

    As HugeCTR's AdaGrad and FBGEMM's exact Adagrad.

    Args:
      learning_rate: η of the embeddings, a number or a Keras schedule.
      initial_accumulator_value: G before the first step, not negative.
      epsilon: ε.
      settings: as in `ClipsRows`.

    Raises:
      ValueError: an argument outside its range.
    """

    def __init__(
        self,
        learning_rate: float | tf.keras.optimizers.schedules.LearningRateSchedule = 1e-2,
        initial_accumulator_value: float = 0.0,
        epsilon: float = 1e-7,
        **settings: Any,
    ) -> None:
        check_number("initial_accumulator_value", initial_accumulator_value)
        super().__init__(learning_rate, initial_accumulator_value, epsilon=epsilon, **settings)


@tf.keras.utils.register_keras_serializable(package="merlin_cowclip")
class CowClipRowWiseAdagrad(CowClipAdagrad):
    """Adagrad with one number per row: `G_k ← G_k + mean(g_k²)`, `w_k ← w_k - η·g_k / (√G_k + ε)`.

    As FBGEMM's exact row-wise Adagrad: V instead of V×d numbers of state.
    """

    def _create_slots(self, var_list: Sequence[tf.Variable]) -> None:
        for table in var_list:
            first = tf.keras.initializers.Constant(self._initial_accumulator_value)
            self.add_slot(table, "accumulator", first, shape=[table.shape[0], 1])

    def _resource_apply_dense(
        self, grad: tf.Tensor, var: tf.Variable, apply_state: Any = None
    ) -> tf.Operation:
        total = self.get_slot(var, "accumulator").assign_add(_mean_square(grad))
        return var.assign_sub(self._change(grad, total), read_value=False)

    def _apply_rows(self, grad: tf.Tensor, var: tf.Variable, indices: tf.Tensor) -> tf.Operation:
        slot = self.get_slot(var, "accumulator")
        total = tf.gather(slot, indices) + _mean_square(grad)
        write, raw = self._resource_scatter_operate, tf.raw_ops
        return tf.group(
            write(slot, indices, total, raw.ResourceScatterUpdate),
            write(var, indices, self._change(grad, total), raw.ResourceScatterSub),
        )

    def _change(self, grad: tf.Tensor, total: tf.Tensor) -> tf.Tensor:
        rate, epsilon = self._decayed_lr(grad.dtype), tf.cast(self.epsilon, grad.dtype)
        return rate * grad / (tf.sqrt(total) + epsilon)


def _mean_square(rows: tf.Tensor) -> tf.Tensor:
    """U×d → U×1."""
    return tf.reduce_mean(tf.square(rows), axis=-1, keepdims=True)
