"""CowClipOptimizer: embedding tables → CowClipAdam, everything else → Adam, as one Keras optimizer.

Composition and ownership only; the update of a table is in `adam.py`.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from typing import Any

from merlin_cowclip.plugins._stack import mm, tf
from merlin_cowclip.plugins.adam import CowClipAdam
from merlin_cowclip.plugins.scaling import Hyperparameters
from merlin_cowclip.plugins.schedules import LinearWarmup
from merlin_cowclip.plugins.tables import TableSpec, find_tables


@tf.keras.utils.register_keras_serializable(package="merlin_cowclip")
class CowClipOptimizer(mm.MultiOptimizer):
    """One optimizer for a whole Merlin model, by the paper's recipe.

    Three optimizers own the model's variables: `CowClipAdam` with the clip for embedding tables,
    `CowClipAdam` without it for tables of width 1 (the linear part), and Keras's Adam for
    the rest, whose learning rate warms up. L2 acts on tables only.

    ```python
    big = scale(tuned, to=131_072)
    model.compile(optimizer=CowClipOptimizer.for_model(model, big))
    model.fit(loader, epochs=10)
    ```

    Args:
      hyperparameters: for the batch size trained with, or its `to_dict()`.
      update: "exact" (the paper: L2 and Adam on every row) or "lazy" (on the batch's rows).
      steps_per_epoch: updates per epoch, for the warm-up; `None` takes it from `model.fit`.
      name: the optimizer's name.

    Raises:
      ValueError: an argument outside its range.
    """

    def __init__(
        self,
        hyperparameters: Hyperparameters | dict[str, Any],
        *,
        update: str = "exact",
        steps_per_epoch: int | None = None,
        name: str = "CowClipOptimizer",
    ) -> None:
        if isinstance(hyperparameters, dict):
            hyperparameters = Hyperparameters(**hyperparameters)
        if steps_per_epoch is not None and steps_per_epoch <= 0:
            raise ValueError(
                f"steps_per_epoch must be positive. Received: steps_per_epoch={steps_per_epoch!r}"
            )
        hp = hyperparameters
        tables, linear = (
            CowClipAdam(
                hp.embedding_lr,
                l2=hp.l2,
                clip=clip,
                clip_ratio=hp.clip_ratio,
                clip_floor=hp.clip_floor,
                update=update,
                name=part,
            )
            for part, clip in (("tables", hp.clip), ("linear", None))
        )
        dense = tf.keras.optimizers.legacy.Adam(hp.dense_lr, name="dense")
        super().__init__(
            [mm.OptimizerBlocks(tables, []), mm.OptimizerBlocks(linear, [])],
            default_optimizer=dense,
            name=name,
        )
        # MultiOptimizer neither tracks nor lists it, so checkpoints would lose its moments.
        self._track_trackable(dense, name="dense")
        self.hyperparameters = hp
        self.update_mode = update
        self.steps_per_epoch = steps_per_epoch
        self._model: Any = None
        self._specs: list[TableSpec] | None = None
        self._bound = False

    @classmethod
    def for_model(
        cls,
        model: tf.keras.Model,
        hyperparameters: Hyperparameters,
        *,
        update: str = "exact",
        steps_per_epoch: int | None = None,
    ) -> CowClipOptimizer:
        """An optimizer for `model`, which may be built or not.

        Args:
          model: any Merlin model. Its tables are found by type, and from now on they record the
            ids that they look up, which gives the counts.
          hyperparameters: for the batch size that the model will be trained with.
          update: "exact" or "lazy".
          steps_per_epoch: updates per epoch, ⌊N/b⌋, for the warm-up of the dense learning rate;
            without it the first `model.fit` tells.

        Raises:
          ValueError: an argument outside its range.
        """
        optimizer = cls(hyperparameters, update=update, steps_per_epoch=steps_per_epoch)
        optimizer.bind(model)
        return optimizer

    def bind(self, model: tf.keras.Model) -> None:
        """Own the variables of `model`: what `for_model` does for a new optimizer."""
        self._model = weakref.ref(model)
        self._specs = find_tables(model)
        self._bound = False

    @property
    def table_specs(self) -> tuple[TableSpec, ...]:
        """The model's embedding tables."""
        if self._specs is None:
            raise ValueError(
                "This optimizer knows no model yet. Use CowClipOptimizer.for_model(model, …), or "
                "call optimizer.bind(model) after loading one."
            )
        return tuple(self._specs)

    def _own(self) -> dict[Any, Any]:
        """Variable → the optimizer of its table; needs built tables."""
        tables, linear, _ = self.optimizers
        owner: dict[Any, Any] = {}
        for spec in self.table_specs:
            if not spec.layer.built:
                continue
            optimizer = linear if spec.width == 1 else tables
            if spec.variable.ref() in owner:
                raise ValueError(
                    f"Each variable must belong to one table. Received: {spec.variable.name!r} in "
                    f"the table {spec.name!r} and in another one."
                )
            owner[spec.variable.ref()] = optimizer
        if not self._bound:
            for optimizer in (tables, linear):
                optimizer.bind_tables(
                    spec
                    for spec in self.table_specs
                    if spec.layer.built and owner[spec.variable.ref()] is optimizer
                )
            self._set_warmup()
            self._bound = True
        return owner

    def _set_warmup(self) -> None:
        hp = self.hyperparameters
        if not hp.warmup_epochs:
            return
        steps = self.steps_per_epoch or self._steps_of_fit()
        if steps is None:
            raise ValueError(
                "The warm-up of the dense learning rate needs the number of updates per epoch. "
                "Pass steps_per_epoch=… to CowClipOptimizer.for_model, or train with model.fit on "
                "data of known length, or set warmup_epochs=0."
            )
        self.steps_per_epoch = steps
        warmup_steps = math.floor(hp.warmup_epochs * steps)
        self.default_optimizer.learning_rate = LinearWarmup(hp.dense_lr, warmup_steps)

    def _steps_of_fit(self) -> int | None:
        """The steps per epoch of the `model.fit` that is under way, as Keras tells callbacks."""
        model = self._model() if self._model is not None else None
        params = getattr(getattr(model, "history", None), "params", None) or {}
        steps = params.get("steps")
        return steps if isinstance(steps, int) and steps > 0 else None

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, tf.Variable]],
        name: str | None = None,
        experimental_aggregate_gradients: bool = True,
    ) -> Any:
        """Apply each gradient by the optimizer that owns its variable; returns one grouped op.

        Raises:
          ValueError: no model is bound, a table's gradient is dense, or its ids are not recorded.
        """
        pairs = [(g, v) for g, v in grads_and_vars if g is not None]
        owner = self._own()
        shares: list[tuple[Any, list[Any]]] = [(optimizer, []) for optimizer in self.optimizers]
        for pair in pairs:
            mine = owner.get(pair[1].ref(), self.default_optimizer)
            next(share for optimizer, share in shares if optimizer is mine).append(pair)
        with tf.init_scope():
            # All slots before any control flow: loss scaling applies gradients inside a tf.cond.
            _ = self.iterations
            for optimizer, share in shares:
                optimizer._create_all_weights([v for _, v in share])
        updates = [
            optimizer.apply_gradients(
                share,
                name=name,
                experimental_aggregate_gradients=experimental_aggregate_gradients,
            )
            for optimizer, share in shares
            if share
        ]
        with tf.control_dependencies([u for u in updates if u is not None]):
            return tf.group(self.iterations.assign_add(1, read_value=False))

    # MultiOptimizer takes the count from its first pair, which may own no variable.
    @property
    def iterations(self) -> tf.Variable:
        """Number of updates made, an int64 variable of this optimizer's own."""
        return tf.keras.optimizers.legacy.Optimizer.iterations.fget(self)

    @iterations.setter
    def iterations(self, variable: tf.Variable) -> None:
        tf.keras.optimizers.legacy.Optimizer.iterations.fset(self, variable)

    @property
    def weights(self) -> list[tf.Variable]:
        """Every variable of this optimizer: the step count and all slots of all three parts."""
        own = list(self._weights)
        return own + [v for optimizer in self.optimizers for v in optimizer.variables()]

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments; a model is not part of them (see `bind`)."""
        return {
            "name": self.name,
            "hyperparameters": self.hyperparameters.to_dict(),
            "update": self.update_mode,
            "steps_per_epoch": self.steps_per_epoch,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> CowClipOptimizer:
        """An optimizer that knows no model yet."""
        return cls(**config)
