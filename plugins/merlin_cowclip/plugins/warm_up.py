"""The warm-up of the dense learning rate, whose length follows the fits of the model."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any

from merlin_cowclip.plugins._stack import tf
from merlin_cowclip.plugins.fits import Fit, is_fitted
from merlin_cowclip.plugins.scaling import Hyperparameters
from merlin_cowclip.plugins.schedules import UNKNOWN, LinearWarmup, whole_steps

_HEIGHT, _LENGTH = "warmup_height", "warmup_steps"  # in checkpoints


class _SavedLength(tf.__internal__.tracking.Trackable):
    """The warm-up's length as checkpoints have it: it comes back where nothing else tells it."""

    def __init__(self, optimizer: FollowsFits, length: tf.Variable) -> None:
        self.optimizer, self.length = optimizer, length

    def _serialize_to_tensors(self) -> dict[str, Any]:
        saved: dict[str, Any] = self.length._serialize_to_tensors()
        return saved

    def _restore_from_tensors(self, tensors: dict[str, tf.Tensor]) -> Any:
        if self.optimizer._is_told_steps():
            return tf.no_op()
        known = {name: self._or_mine(saved) for name, saved in tensors.items()}
        return self.length._restore_from_tensors(known)

    def _or_mine(self, saved: tf.Tensor) -> tf.Tensor:
        """A checkpoint of before the length was known does not take it away."""
        return tf.where(saved == UNKNOWN, self.length.read_value(), saved)


class FollowsFits:
    """What `CowClipOptimizer` takes over from a fit: its steps per epoch and its batch size."""

    _steps_per_epoch: int | None = None
    _warmup_steps: tf.Variable | None = None
    _saved_length: _SavedLength | None = None
    _fit = Fit(None, None)
    _told_of_batch = False

    if TYPE_CHECKING:  # what the optimizer has
        hyperparameters: Hyperparameters
        dense_schedule: Any
        default_optimizer: Any
        learning_rate: Any

        _model: Any

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
        self._warmup_steps = _variable(UNKNOWN, tf.int64, _LENGTH)
        self._saved_length = _SavedLength(self, self._warmup_steps)
        height = _variable(float(tf.keras.backend.get_value(height)), tf.float32, _HEIGHT)
        dense.learning_rate = LinearWarmup(height, self._warmup_steps)
        self._follow_fit()

    def _trackable_children(self, save_type: str = "checkpoint", **named: Any) -> dict[str, Any]:
        children: dict[str, Any] = super()._trackable_children(save_type, **named)  # type: ignore[misc]
        if self._saved_length is None:
            return children
        height, is_checkpoint = self.default_optimizer.warmup_height, save_type == "checkpoint"
        length = self._saved_length if is_checkpoint else self._warmup_steps
        children = {**children, _LENGTH: length}
        if height is None or (is_checkpoint and not self._height_was_set(height)):
            return children  # by which a restore knows that it was not: see _lookup_dependency
        return {**children, _HEIGHT: height}

    def _lookup_dependency(self, name: str) -> Any:
        """What a checkpoint has by this name goes into; TensorFlow asks before it restores."""
        if name in (_LENGTH, _HEIGHT):
            self._create_warm_up()  # else what is read or set before the first step knew of neither
        if name == _HEIGHT:
            return self.default_optimizer.warmup_height
        if name == _LENGTH:  # each checkpoint of one that warms up has it
            self._unset_height()  # else one that lacks it would leave what was set since
            return self._saved_length
        return super()._lookup_dependency(name)  # type: ignore[misc]

    def _height_was_set(self, height: tf.Variable) -> bool:
        made_with = tf.constant(self.hyperparameters.dense_lr, tf.float32)
        return bool(tf.keras.backend.get_value(height) != tf.keras.backend.get_value(made_with))

    def _unset_height(self) -> None:
        """Warm up to `dense_lr` again; a schedule that was set in its place stays."""
        dense = self.default_optimizer
        is_number = not callable(dense._hyper["learning_rate"])
        if dense.warmup_height is not None or (is_number and self.hyperparameters.warmup_epochs):
            dense.learning_rate = self.hyperparameters.dense_lr

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

    def _is_told_steps(self) -> bool:
        """Whether `steps_per_epoch`, or else the fit under way, tells the steps per epoch."""
        if self.steps_per_epoch:
            return True
        model = self._model() if self._model is not None else None
        return self._fit.steps is not None and is_fitted(model)

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
        try a model out, does not end the warm-up of the next. A checkpoint that is restored with
        neither, as in a loop of one's own, brings its own length. Update t has the dense η of t /
        `warmup_steps` of the rise in either case.
        """
        if self._warmup_steps is None:
            return None
        steps = int(self._warmup_steps.numpy())
        return None if steps == UNKNOWN else steps


def _variable(value: float, dtype: tf.DType, name: str) -> tf.Variable:
    """What the warm-up reads at each step."""
    aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA
    return tf.Variable(value, trainable=False, name=name, dtype=dtype, aggregation=aggregation)
