"""The warm-up of the dense learning rate: its variables, and its length in updates."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any

from merlin_cowclip.plugins._stack import tf
from merlin_cowclip.plugins.fits import Fit
from merlin_cowclip.plugins.scaling import Hyperparameters
from merlin_cowclip.plugins.schedules import LinearWarmup, whole_steps

_UNKNOWN = -1  # a length before `steps_per_epoch` or a fit tells it


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
    _told_of_batch = False

    if TYPE_CHECKING:  # what the optimizer has
        hyperparameters: Hyperparameters
        learning_rate: Any

        def _create_slots_of_model(self) -> None: ...

        def _take_tables(self) -> None: ...

        def _begin_together(self, fit: Fit) -> None: ...

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

    def fit_begins(self, fit: Fit | None) -> None:
        """Take over what a fit of the model brings along, before the first step; else nothing."""
        self._take_tables()
        self._create_slots_of_model()
        if fit is None:
            return
        if fit.steps is not None and self.warmup_steps is None:
            self._set_warm_up(fit.steps)
        self._begin_together(fit)
        wanted = self.hyperparameters.batch_size
        if fit.batch_size not in (None, wanted) and not self._told_of_batch:
            self._told_of_batch = True
            warnings.warn(
                f"The hyperparameters are for batches of {wanted:,} samples, but this fit has "
                f"batches of {fit.batch_size:,}. Use scale(…, to={fit.batch_size}), or the batch "
                "size that they are for.",
                stacklevel=7,  # the call of fit, past Keras's, Merlin's and our own frames
            )
