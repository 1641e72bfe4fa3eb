"""The learning rates of an optimizer's parts, and the warm-up of the dense one."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from merlin_cowclip.plugins._checks import RefusesOptions
from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.plugins.optimizers.adam import CowClipAdam
from merlin_cowclip.plugins.scaling import Hyperparameters, check_number
from merlin_cowclip.plugins.schedules import LinearWarmup, whole_steps


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


_UNKNOWN = -1  # a length before `steps_per_epoch` or a fit tells it
_FEW_STEPS = 30


def warm_up_to(learning_rate: float) -> LinearWarmup:
    """A warm-up of unknown length. Its variables may change without a new trace."""
    return LinearWarmup(
        tf.Variable(learning_rate, trainable=False, dtype=tf.float32, name="warmup_height"),
        tf.Variable(_UNKNOWN, trainable=False, dtype=tf.int64, name="warmup_steps"),
    )


class FollowsFits:
    """What `CowClipOptimizer` takes over from a fit: its steps per epoch and its batch size."""

    _steps_per_epoch: int | None = None
    _warm_up: LinearWarmup | None = None
    _is_new_fit = False  # `fit` was called, and has not made its train function yet
    _warned_of_batch = _warned_of_steps = False

    if TYPE_CHECKING:  # what the optimizer has
        hyperparameters: Hyperparameters
        learning_rate: Any

        def _create_slots_of_model(self) -> None: ...

        def _take_tables(self) -> None: ...

        def _await_rank_sync(self, is_new_fit: bool) -> None: ...

    @property
    def steps_per_epoch(self) -> int | None:
        """Updates per epoch, as given; set, the warm-up follows from the next update on."""
        return self._steps_per_epoch

    @steps_per_epoch.setter
    def steps_per_epoch(self, steps: int | None) -> None:
        self._steps_per_epoch = whole_steps(steps)
        if self._steps_per_epoch is not None:
            self._set_warm_up(self._steps_per_epoch)

    @property
    def warmup_steps(self) -> int | None:
        """Updates until the dense learning rate has risen; `None` without a known warm-up.

        ⌊`warmup_epochs` · steps per epoch⌋ with `steps_per_epoch` or the steps of the first `fit`.
        It is saved with the optimizer's state. Update t has the dense η of t / `warmup_steps` of
        the rise.
        """
        if self._warm_up is None:
            return None
        steps = int(self._warm_up.warmup_steps)
        return None if steps == _UNKNOWN else steps

    def _set_warm_up(self, steps_per_epoch: int) -> None:
        if self._warm_up is not None:
            length = math.floor(self.hyperparameters.warmup_epochs * steps_per_epoch)
            self._warm_up.warmup_steps.assign(length)

    def _check_warm_up(self) -> None:
        if self._warm_up is not None and self.warmup_steps is None:
            raise ValueError(
                "The warm-up of the dense learning rate needs the number of updates per epoch. "
                "Pass steps_per_epoch=… to CowClipOptimizer.for_model, or train with model.fit on "
                "data of known length, or set warmup_epochs=0."
            )

    def resume(self, learning_rate: float, warmup_steps: int | None) -> None:
        """Set the learning rate and the length of the warm-up that a saved optimizer had."""
        self.learning_rate = learning_rate
        if self._warm_up is not None and warmup_steps is not None:
            self._warm_up.warmup_steps.assign(warmup_steps)

    def fit_begins(self, batch_size: int | None) -> None:
        """A `fit` was called; on data of so many samples per batch, where that is known."""
        self._is_new_fit = True
        wanted = self.hyperparameters.batch_size
        if batch_size not in (None, wanted) and not self._warned_of_batch:
            self._warned_of_batch = True
            warnings.warn(
                f"The hyperparameters are for batches of {wanted:,} samples, but this fit has "
                f"batches of {batch_size:,}. Use scale(…, to={batch_size}), or the batch "
                "size that they are for.",
                stacklevel=4,  # the call of fit, past two functions of `model_hooks`
            )

    def fit_ends(self) -> None:
        """It is over, or it failed before its first step."""
        self._is_new_fit = False

    def training_begins(self, steps_per_epoch: int | None) -> None:
        """Keras makes or reuses its train function, for a new fit or for `train_on_batch`."""
        self._take_tables()
        self._create_slots_of_model()
        is_new_fit, self._is_new_fit = self._is_new_fit, False
        self._await_rank_sync(is_new_fit)
        if not is_new_fit or steps_per_epoch is None:
            return
        if self.warmup_steps is None:
            self._set_warm_up(steps_per_epoch)
        if steps_per_epoch < _FEW_STEPS and not self._warned_of_steps:
            self._warned_of_steps = True
            warnings.warn(
                f"This fit has {steps_per_epoch} steps per epoch. With fewer than {_FEW_STEPS}, "
                "the warm-up and the updates are too coarse, and AUC suffers under every scaling "
                "rule. Use a smaller batch, or more data.",
                stacklevel=2,
            )
