"""The parts of a `CowClipOptimizer` and their learning rates; the warm-up of the dense one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from merlin_cowclip.plugins._checks import RefusesOptions
from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.plugins.optimizers.adam import CowClipAdam
from merlin_cowclip.plugins.scaling import check_number
from merlin_cowclip.plugins.schedules import LinearWarmup

_UNKNOWN = -1  # the length of a warm-up before the steps per epoch are known


class LearningRates(NamedTuple):
    """η of the two kinds of weights."""

    dense: float
    embedding: float


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

    @property
    def warm_up(self) -> LinearWarmup | None:
        """Its learning rate, where it is one that `warm_up_to` made."""
        rate = self._hyper.get("learning_rate")
        is_own = isinstance(rate, LinearWarmup) and isinstance(rate.learning_rate, tf.Variable)
        return rate if is_own else None

    def _set_hyper(self, name: str, value: Any) -> None:
        if name == "learning_rate" and self.warm_up is not None and not callable(value):
            rate = float(tf.keras.backend.get_value(value))
            self.warm_up.learning_rate.assign(check_number(name, rate, positive=True))
        else:
            super()._set_hyper(name, value)

    @property
    def warmup_steps(self) -> int | None:
        """Updates until its learning rate has risen; `None` without a known warm-up."""
        steps = _UNKNOWN if self.warm_up is None else int(self.warm_up.warmup_steps)
        return None if steps == _UNKNOWN else steps

    @warmup_steps.setter
    def warmup_steps(self, steps: int | None) -> None:
        if self.warm_up is not None and steps is not None:
            self.warm_up.warmup_steps.assign(steps)


def warm_up_to(learning_rate: float) -> LinearWarmup:
    """A warm-up of unknown length. Its variables may change without a new trace."""
    return LinearWarmup(
        tf.Variable(learning_rate, trainable=False, dtype=tf.float32, name="warmup_height"),
        tf.Variable(_UNKNOWN, trainable=False, dtype=tf.int64, name="warmup_steps"),
    )
