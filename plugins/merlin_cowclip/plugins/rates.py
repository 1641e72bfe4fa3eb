"""How the learning rates of an optimizer's parts follow the one that Keras's callbacks set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from merlin_cowclip.plugins._stack import tf
from merlin_cowclip.plugins.adam import CowClipAdam


class _Proportional:
    """A part of a whole: its learning rate, scheduled or not, is multiplied by `factor`."""

    factor: Callable[[], tf.Tensor]  # float32 scalar, read at each step

    def _decayed_lr(self, var_dtype: Any) -> tf.Tensor:
        rate = super()._decayed_lr(var_dtype)  # type: ignore[misc]
        return rate * tf.cast(self.factor(), var_dtype)


class TablePart(_Proportional, CowClipAdam):
    """`CowClipAdam` as a part of a `CowClipOptimizer`."""


class DensePart(_Proportional, tf.keras.optimizers.legacy.Adam):
    """Keras's Adam as a part of a `CowClipOptimizer`."""
