"""How the learning rates of an optimizer's parts follow the one that Keras's callbacks set."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

from merlin_cowclip.plugins._stack import tf
from merlin_cowclip.plugins.adam import CowClipAdam
from merlin_cowclip.plugins.not_offered import RefusesOptions
from merlin_cowclip.plugins.scaling import check_number
from merlin_cowclip.plugins.schedules import LinearWarmup


class _Proportional:
    """A part of a whole: its learning rate, scheduled or not, is multiplied by `factor`."""

    factor: Callable[[], tf.Tensor]  # float32 scalar, read at each step

    def _set_hyper(self, name: str, value: Any) -> None:
        if name == "learning_rate" and not callable(value):
            check_number(name, float(tf.keras.backend.get_value(value)))
        super()._set_hyper(name, value)  # type: ignore[misc]

    def _decayed_lr(self, var_dtype: Any) -> tf.Tensor:
        rate = super()._decayed_lr(var_dtype)  # type: ignore[misc]
        return rate * tf.cast(self.factor(), var_dtype)

    def last_rate(self) -> float:
        """η of its last step, as `_decayed_lr` gave it; where it made none, of its first."""
        rate: Any = self._get_hyper("learning_rate")  # type: ignore[attr-defined]
        if isinstance(rate, tf.keras.optimizers.schedules.LearningRateSchedule):
            steps = self.iterations  # type: ignore[attr-defined]
            rate = rate(tf.cast(tf.maximum(steps - 1, 0), tf.float32))
        return float(tf.cast(rate, tf.float32) * tf.cast(self.factor(), tf.float32))


class LearningRates(NamedTuple):
    """η of the two kinds of weights."""

    dense: float
    embedding: float


class TablePart(_Proportional, CowClipAdam):
    """`CowClipAdam` as a part of a `CowClipOptimizer`."""

    @property
    def is_trained(self) -> bool:
        """Whether one of its tables is not frozen."""
        return any(spec.layer.trainable for spec in self._specs.values())


class DensePart(_Proportional, RefusesOptions, tf.keras.optimizers.legacy.Adam):
    """Keras's Adam as a part of a `CowClipOptimizer`.

    A learning rate that is set while it warms up, a number, is what it warms up to, in steps that
    were traced before, too.
    """

    not_offered: ClassVar[Mapping[str, str]] = {
        "amsgrad": "It is Adam as the paper has it.",
        "decay": "Give the optimizer a Keras schedule as dense_schedule.",
        "weight_decay": "This Adam has none: give the layers a kernel_regularizer.",
        "use_ema": "Keep a moving average of the weights by a callback.",
    }

    def _set_hyper(self, name: str, value: Any) -> None:
        now = self._hyper.get(name)
        height = now.learning_rate if isinstance(now, LinearWarmup) else None
        if isinstance(height, tf.Variable) and not callable(value):
            rate = float(tf.keras.backend.get_value(value))
            height.assign(check_number(name, rate, positive=True))
        else:
            super()._set_hyper(name, value)
