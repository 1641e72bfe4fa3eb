# SPDX-License-Identifier: Apache-2.0
"""Learning-rate schedules as Keras takes them: step → learning rate."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any, TypeAlias

from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.plugins.scaling import Hyperparameters, check_number

Schedule: TypeAlias = Any  # tf.keras.optimizers.schedules.LearningRateSchedule; Keras has no types

_KERAS_SCHEDULE = tf.keras.optimizers.schedules.LearningRateSchedule


def check_steps(name: str, steps: Any) -> int | None:
    """A number of updates, or `None`; a float, as a division gives it, must be whole."""
    if steps is not None and (not isinstance(steps, numbers.Real) or steps < 1 or steps % 1):
        raise ValueError(
            f"{name} must be a positive whole number, or None for that of each fit. Received: "
            f"{name}={steps}"
        )
    return None if steps is None else int(float(steps))


def loaded_schedule(given: Any) -> Any:
    """A schedule that may be given as Keras serializes it; numbers and variables as they are."""
    if callable(given) and not isinstance(given, _KERAS_SCHEDULE):
        raise ValueError(f"a schedule must be a Keras LearningRateSchedule. Received: {given!r}")
    return tf.keras.optimizers.schedules.deserialize(given) if isinstance(given, dict) else given


def scheduled_rates(
    hp: Hyperparameters,
    dense: Schedule | None,
    embedding: Schedule | None,
    decay_steps: Any,
    warmup_steps: Any,
) -> tuple[Any, Any]:
    """η of dense weights and of tables: numbers or schedules, with decay and warm-up as `hp` has.

    The lengths, in updates, are integers or variables.
    """
    if hp.decay:
        to_zero = tf.keras.optimizers.schedules.PolynomialDecay
        dense = dense or to_zero(hp.dense_lr, decay_steps, 0.0)
        embedding = embedding or to_zero(hp.embedding_lr, decay_steps, 0.0)
    dense = dense or hp.dense_lr
    dense = LinearWarmup(dense, warmup_steps) if hp.warmup_epochs else dense
    return dense, embedding or hp.embedding_lr


@tf.keras.utils.register_keras_serializable(package="merlin_cowclip")
class LinearWarmup(tf.keras.optimizers.schedules.LearningRateSchedule):
    """Rises linearly from `initial` at step 0 to `learning_rate` at `warmup_steps`, then stays.

    The paper warms up the dense weights for one epoch, `warmup_steps` = ⌊N/b⌋ (Appendix G).

    Args:
      learning_rate: the value from step `warmup_steps` on, or a Keras schedule of it that counts
        from step 0.
      warmup_steps: number of updates; 0 for a constant learning rate; a variable is read at each
        step.
      initial: the value at step 0.
    """

    def __init__(
        self,
        learning_rate: float | Schedule,
        warmup_steps: int | tf.Variable,
        initial: float = 1e-8,
    ) -> None:
        learning_rate = loaded_schedule(learning_rate)
        if not isinstance(learning_rate, _KERAS_SCHEDULE):
            learning_rate = check_number("learning_rate", learning_rate, positive=True)
        self.learning_rate: Any = learning_rate
        if not isinstance(warmup_steps, tf.Variable):
            if check_number("warmup_steps", warmup_steps) % 1:
                raise ValueError(f"warmup_steps must be a whole number. Received: {warmup_steps!r}")
            warmup_steps = int(warmup_steps)
        self.warmup_steps: Any = warmup_steps
        self.initial = check_number("initial", initial)

    def __call__(self, step: tf.Tensor) -> tf.Tensor:
        """The learning rate, a float32 scalar, of the update with number `step` (from 0)."""
        end = self.learning_rate
        end = tf.cast(end(step) if isinstance(end, _KERAS_SCHEDULE) else end, tf.float32)
        steps = tf.cast(self.warmup_steps, tf.float32)
        done = tf.minimum(tf.cast(step, tf.float32) / tf.maximum(steps, 1.0), 1.0)
        done = tf.where(steps > 0, done, 1.0)
        # Not initial + done · (end - initial): this form ends at learning_rate to the last digit.
        return self.initial * (1.0 - done) + end * done

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        end, steps = self.learning_rate, int(self.warmup_steps)
        if isinstance(end, _KERAS_SCHEDULE):
            end = tf.keras.optimizers.schedules.serialize(end)
        return {"learning_rate": end, "warmup_steps": steps, "initial": self.initial}


class Proportional(tf.keras.optimizers.schedules.LearningRateSchedule):
    """A learning rate or schedule, times a factor that is read at each step."""

    def __init__(self, rate: float | Schedule, factor: Callable[[], tf.Tensor]) -> None:
        self.rate: Any = rate
        self._factor = factor

    def __call__(self, step: tf.Tensor) -> tf.Tensor:
        """The learning rate of the update with number `step`, of its dtype; else float32."""
        dtype = tf.convert_to_tensor(step).dtype
        dtype = dtype if dtype.is_floating else tf.float32
        rate = self.rate(step) if callable(self.rate) else self.rate
        return tf.cast(rate, dtype) * tf.cast(self._factor(), dtype)

    def get_config(self) -> dict[str, Any]:
        """Nothing: the factor is not serializable, nor is the rate if it reads variables."""
        return {}
