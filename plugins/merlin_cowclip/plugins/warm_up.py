"""The warm-up of the dense learning rate, whose length follows the fits of the model."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any

from merlin_cowclip.plugins._stack import tf
from merlin_cowclip.plugins.fits import Fit
from merlin_cowclip.plugins.scaling import Hyperparameters
from merlin_cowclip.plugins.schedules import UNKNOWN, LinearWarmup

_HEIGHT = "warmup_height"  # in checkpoints


class FollowsFits:
    """What `CowClipOptimizer` takes over from a fit: its steps per epoch and its batch size."""

    _steps_per_epoch: int | None = None
    _warmup_steps: tf.Variable | None = None
    _fit = Fit(None, None)
    _told_of_batch = False

    if TYPE_CHECKING:  # what the optimizer has
        hyperparameters: Hyperparameters
        dense_schedule: Any
        default_optimizer: Any
        learning_rate: Any

        def add_weight(self, name: str, **kwargs: Any) -> tf.Variable:
            """Keras's."""

        def _handle_deferred_dependencies(self, name: str, trackable: tf.Variable) -> None: ...

        def _create_slots_of_model(self) -> None: ...

        def _take_tables(self) -> None: ...

        def _begin_together(self, fit: Fit) -> None: ...

    @property
    def steps_per_epoch(self) -> int | None:
        """Updates per epoch, as given; set, the warm-up follows from the next update on."""
        return self._steps_per_epoch

    @steps_per_epoch.setter
    def steps_per_epoch(self, steps: int | None) -> None:
        if steps is not None and steps <= 0:
            raise ValueError(f"steps_per_epoch must be positive. Received: steps_per_epoch={steps}")
        self._steps_per_epoch = steps
        self._follow_fit()

    def fit_begins(self, fit: Fit | None) -> None:
        """Take over what a fit of the model brings along, before the first step; else nothing."""
        self._take_tables()
        if fit is None:
            self._create_slots_of_model()
            return
        self._warn_of_another_length(fit)
        self._fit = fit
        self._follow_fit()
        self._create_slots_of_model()
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

    def _warn_of_another_length(self, fit: Fit) -> None:
        """A fit of unknown length would keep that of the last, which may have been a try-out's.

        The last fit may be one before the model was saved.
        """
        before = self.warmup_steps
        if self.steps_per_epoch or fit.steps or before is None:
            return
        warnings.warn(
            "The number of updates per epoch of this fit is not known; the dense learning rate "
            f"warms up over {before:,} updates in all, as in the last fit. Pass steps_per_epoch=… "
            "to CowClipOptimizer.for_model, or to fit.",
            stacklevel=8,  # the call of fit, as below
        )

    def _create_warm_up(self) -> None:
        """Give the dense optimizer its schedule, of a length that may change."""
        dense = self.default_optimizer
        height = dense._hyper["learning_rate"]  # dense_lr, or what was set on the part since
        warms_up = self.hyperparameters.warmup_epochs and not callable(height)
        if self._warmup_steps is not None or not warms_up:
            return
        # Variables: another fit may have epochs of another length, and somebody may set what it
        # rises to, without a new trace.
        self._warmup_steps = self.add_weight(
            "warmup_steps",
            shape=[],
            dtype=tf.int64,
            initializer=tf.constant_initializer(UNKNOWN),
            trainable=False,
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )
        height = tf.Variable(
            float(tf.keras.backend.get_value(height)),
            dtype=tf.float32,
            trainable=False,
            name=_HEIGHT,
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )
        dense.learning_rate = LinearWarmup(height, self._warmup_steps)
        self._handle_deferred_dependencies(_HEIGHT, height)  # a checkpoint that was restored before
        self._follow_fit()

    def _trackable_children(self, save_type: str = "checkpoint", **named: Any) -> dict[str, Any]:
        children: dict[str, Any] = super()._trackable_children(save_type, **named)  # type: ignore[misc]
        height = self.default_optimizer.warmup_height
        if height is None or (save_type == "checkpoint" and not self._height_was_set(height)):
            return children  # as older checkpoints have them
        return {**children, _HEIGHT: height}

    def _lookup_dependency(self, name: str) -> Any:
        """What a checkpoint has by this name goes into."""
        if name == _HEIGHT:
            return self.default_optimizer.warmup_height
        return super()._lookup_dependency(name)  # type: ignore[misc]

    def _height_was_set(self, height: tf.Variable) -> bool:
        made_with = tf.constant(self.hyperparameters.dense_lr, tf.float32)
        return bool(tf.keras.backend.get_value(height) != tf.keras.backend.get_value(made_with))

    def _check_warm_up(self) -> None:
        if self._warmup_steps is not None and self.warmup_steps is None:
            raise ValueError(
                "The warm-up of the dense learning rate needs the number of updates per epoch. "
                "Pass steps_per_epoch=… to CowClipOptimizer.for_model, or train with model.fit on "
                "data of known length, or set warmup_epochs=0."
            )

    def resume(self, learning_rate: float, warmup_steps: int | None) -> None:
        """Go on with the learning rate and the warm-up that a saved optimizer had."""
        self.learning_rate = learning_rate
        self._create_warm_up()
        if self._warmup_steps is not None and warmup_steps is not None:
            self._warmup_steps.assign(warmup_steps)

    def _follow_fit(self) -> None:
        """The warm-up's length from `steps_per_epoch`, or from the fit under way."""
        steps = self.steps_per_epoch or self._fit.steps
        if self._warmup_steps is not None and steps is not None:
            wanted = math.floor(self.hyperparameters.warmup_epochs * steps)
            self._warmup_steps.assign(wanted)

    @property
    def warmup_steps(self) -> int | None:
        """Updates until the dense learning rate has risen; `None` while that is not known.

        ⌊`warmup_epochs` · steps per epoch⌋, the steps per epoch as given or those of the `fit`
        under way: each fit without `steps_per_epoch` sets them anew, so one on a few batches, to
        try a model out, does not end the warm-up of the next. Update t has the dense η of t /
        `warmup_steps` of the rise in either case.
        """
        if self._warmup_steps is None:
            return None
        steps = int(self._warmup_steps.numpy())
        return None if steps == UNKNOWN else steps
