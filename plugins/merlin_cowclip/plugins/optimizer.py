"""CowClipOptimizer: embedding tables → CowClipAdam, everything else → Adam, as one Keras optimizer.

Composition and ownership only; the update of a table is in `adam.py`.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias

from merlin_cowclip.plugins._stack import Tags, filter_empty_gradients, mm, tf
from merlin_cowclip.plugins.fits import Fit, notify_of_fits
from merlin_cowclip.plugins.initial import initialize, others_than
from merlin_cowclip.plugins.merlin_tables import find_tables
from merlin_cowclip.plugins.not_offered import RefusesOptions
from merlin_cowclip.plugins.rates import DensePart, TablePart
from merlin_cowclip.plugins.scaling import Hyperparameters, check_number, format_table
from merlin_cowclip.plugins.schedules import UNKNOWN, LinearWarmup
from merlin_cowclip.plugins.tables import TableSpec

Schedule: TypeAlias = Any  # tf.keras.optimizers.schedules.LearningRateSchedule; Keras has no types

_state_follows = contextvars.ContextVar("merlin_cowclip_state_follows", default=False)


_CLIPPED_BY_RULE = (
    "Tables are clipped by the rule of hyperparameters.clip; to clip dense weights, set it on "
    "optimizer.default_optimizer."
)
_PER_PART = "Each of optimizer.optimizers, its three parts, has its own."
_MAKE_ANOTHER = (
    "Make another optimizer by CowClipOptimizer.for_model, and compile the model with it."
)


class Owned(NamedTuple):
    """One line of `CowClipOptimizer.summary`."""

    variable: tf.Variable
    optimizer: Any
    rule: str
    l2: float


@tf.keras.utils.register_keras_serializable(package="merlin_cowclip")
class CowClipOptimizer(RefusesOptions, mm.MultiOptimizer):
    """One optimizer for a whole Merlin model, by the paper's recipe.

    Three optimizers own the model's variables: `CowClipAdam` with the clip for embedding tables,
    `CowClipAdam` without it for tables of width 1 (the linear part) and tables that are not to be
    clipped, and Keras's Adam for the rest, whose learning rate warms up. L2 acts on tables only.

    ```python
    big = scale(tuned, to=131_072)
    model.compile(optimizer=CowClipOptimizer.for_model(model, big))
    model.fit(loader, epochs=10)
    ```

    `optimizer.learning_rate` (or `lr`) is a variable that starts at `dense_lr`. Set it, or let
    Keras's `ReduceLROnPlateau` or `LearningRateScheduler` do so, and the learning rates of all
    three parts, warm-up and schedules included, are multiplied by `learning_rate / dense_lr` from
    the next step on. It is saved with the rest of the state.

    Args:
      hyperparameters: for the batch size trained with, or its `to_dict()`.
      update: "exact" (the paper: L2 and Adam on every row) or "lazy" (on the batch's rows).
      steps_per_epoch: updates per epoch, for the warm-up; `None` takes it from each `model.fit`
        (see `warmup_steps`).
      clip_tables: what to clip: names of tables or fields, `merlin.schema.Tags`, or layers; `None`
        for every table of width 2 and more.
      dense_schedule: a Keras schedule in place of `dense_lr` and its warm-up.
      embedding_schedule: a Keras schedule in place of `embedding_lr`.
      name: the optimizer's name.

    Raises:
      ValueError: an argument outside its range.
    """

    not_offered: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("clipnorm", "clipvalue", "global_clipnorm", "gradient_transformers"), _CLIPPED_BY_RULE
        ),
        **dict.fromkeys(("beta_1", "beta_2", "epsilon"), _PER_PART),
        "weight_decay": "Tables have hyperparameters.l2; dense weights take a kernel_regularizer.",
        "decay": "Give Keras schedules as dense_schedule and embedding_schedule.",
        "amsgrad": "Its parts are Adam as the paper has it.",
    }
    settled: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("hyperparameters", "update_mode", "clip_tables", "dense_schedule", "embedding_schedule"),
        _MAKE_ANOTHER,
    )

    def __init__(
        self,
        hyperparameters: Hyperparameters | dict[str, Any],
        *,
        update: str = "exact",
        steps_per_epoch: int | None = None,
        clip_tables: Sequence[Any] | None = None,
        dense_schedule: Schedule | None = None,
        embedding_schedule: Schedule | None = None,
        name: str = "CowClipOptimizer",
    ) -> None:
        if isinstance(hyperparameters, dict):
            hyperparameters = Hyperparameters(**hyperparameters)
        if steps_per_epoch is not None and steps_per_epoch <= 0:
            raise ValueError(
                f"steps_per_epoch must be positive. Received: steps_per_epoch={steps_per_epoch!r}"
            )
        hp = hyperparameters
        clipped, unclipped = (
            TablePart(
                embedding_schedule or hp.embedding_lr,
                l2=hp.l2,
                clip=clip,
                clip_ratio=hp.clip_ratio,
                clip_floor=hp.clip_floor,
                clip_threshold=hp.clip_threshold if clip else None,
                update=update,
                name=part,
            )
            for part, clip in (("clipped", hp.clip), ("unclipped", None))
        )
        dense = DensePart(dense_schedule or hp.dense_lr, name="dense")
        for part_optimizer in (clipped, unclipped, dense):
            part_optimizer.factor = self._factor
        super().__init__(
            [mm.OptimizerBlocks(clipped, []), mm.OptimizerBlocks(unclipped, [])],
            default_optimizer=dense,
            name=name,
        )
        # MultiOptimizer neither tracks nor lists it, so checkpoints would lose its moments.
        self._track_trackable(dense, name="dense")
        self.hyperparameters = hp
        self.update_mode = update
        self.steps_per_epoch = steps_per_epoch
        self.clip_tables = None if clip_tables is None else tuple(clip_tables)
        self.dense_schedule = dense_schedule
        self.embedding_schedule = embedding_schedule
        self._model: Any = None
        self._specs: list[TableSpec] | None = None
        self._bound: tuple[Any, ...] = ()
        self._warmup_steps: tf.Variable | None = None
        self._fit = Fit(None, None)
        self._told_of_batch = False
        self._set_hyper("learning_rate", hp.dense_lr)

    @classmethod
    def for_model(
        cls,
        model: tf.keras.Model,
        hyperparameters: Hyperparameters,
        *,
        update: str = "exact",
        steps_per_epoch: int | None = None,
        clip_tables: Sequence[Any] | None = None,
        dense_schedule: Schedule | None = None,
        embedding_schedule: Schedule | None = None,
        init_tables: bool = False,
    ) -> CowClipOptimizer:
        """An optimizer for `model`, which may be built or not.

        Args:
          model: any Merlin model. Its tables are found by type, and from now on they record the
            ids that they look up, which gives the counts.
          hyperparameters: for the batch size that the model will be trained with.
          update: "exact" or "lazy".
          steps_per_epoch: updates per epoch, ⌊N/b⌋, for the warm-up of the dense learning rate;
            without it each `model.fit` tells (see `warmup_steps`).
          clip_tables: what to clip: names of tables or fields, `merlin.schema.Tags`, or layers;
            `None` for every table of width 2 and more.
          dense_schedule: a Keras schedule in place of `dense_lr` and its warm-up.
          embedding_schedule: a Keras schedule in place of `embedding_lr`.
          init_tables: let the tables of width 2 and more start from N(0, `init_stddev`), in place
            of their layers' own initializers. Without it, one warning names those that differ.

        Raises:
          ValueError: an argument outside its range, a model without tables, `clip_tables` that name
            no table of the model or a frozen one, a table with a regularizer, or `init_tables` for
            a table that is built already.
        """
        optimizer = cls(
            hyperparameters,
            update=update,
            steps_per_epoch=steps_per_epoch,
            clip_tables=clip_tables,
            dense_schedule=dense_schedule,
            embedding_schedule=embedding_schedule,
        )
        optimizer.bind(model)
        sigma = hyperparameters.init_stddev
        if init_tables:
            initialize(sigma, optimizer.table_specs)
        differ = others_than(sigma, optimizer.table_specs)
        if differ:
            spec, found = differ[0]
            warnings.warn(
                f"init_stddev is {sigma:g}, but {len(differ)} of the model's tables start with "
                f"another standard deviation, the first of them {spec.name!r} with {found:.3g}. "
                "init_tables=True sets it, before the model is built; or give the layers this one.",
                stacklevel=2,
            )
        return optimizer

    def bind(self, model: tf.keras.Model) -> None:
        """Own the variables of `model`: what `for_model` does for a new optimizer."""
        specs = find_tables(model)
        if not specs:
            raise ValueError(
                "The model must hold embedding tables (layers with table_specs(), Merlin's tables, "
                f"or Keras's Embedding). Received: {model.name!r}, in which none was found. If its "
                "layers are made when it is built, call it on a batch first; a model without "
                "tables needs no CowClipOptimizer."
            )
        for wanted in self.clip_tables or ():
            found = [spec for spec in specs if any(spec.selected([wanted]))]
            if not found:
                names = ", ".join(spec.name for spec in specs)
                raise ValueError(
                    "clip_tables must name tables, fields, tags or layers of the model. Received: "
                    f"{wanted!r}; the model's tables: {names}"
                )
            frozen = [spec.name for spec in found if not spec.layer.trainable]
            if frozen:
                raise ValueError(
                    f"clip_tables must be trainable. Received: {wanted!r}, whose table "
                    f"{frozen[0]!r} is frozen"
                )
        for spec in specs:
            spec.access.whole = self.update_mode == "exact"
        notify_of_fits(model, CowClipOptimizer)
        self._model = weakref.ref(model)
        self._specs = specs
        self._bound = ()

    @property
    def table_specs(self) -> tuple[TableSpec, ...]:
        """The model's embedding tables."""
        if self._specs is None:
            raise ValueError(
                "This optimizer knows no model yet. Use CowClipOptimizer.for_model(model, …), or "
                "call optimizer.bind(model) after loading one."
            )
        return tuple(self._specs)

    def _clipped_ranges(self, spec: TableSpec) -> tuple[bool, ...]:
        """For each range of rows of a table, whether it is clipped."""
        if self.clip_tables is None:
            return (spec.width > 1,) * (len(spec.row_offsets) - 1)
        return spec.selected(self.clip_tables)

    def _own(self) -> dict[Any, Any]:
        """Variable → the optimizer of its table; built tables only."""
        clipped, unclipped, _ = self.optimizers
        owner: dict[Any, Any] = {}
        shares: tuple[dict[TableSpec, tuple[bool, ...]], ...] = ({}, {})
        for spec in self.table_specs:
            if not spec.layer.built:
                continue
            reference = spec.variable.ref()
            if reference in owner:
                raise ValueError(
                    f"Each variable must belong to one table. Received: {spec.variable.name!r} in "
                    f"the table {spec.name!r} and in another one."
                )
            ranges = self._clipped_ranges(spec)
            owner[reference] = clipped if any(ranges) else unclipped
            shares[0 if any(ranges) else 1][spec] = ranges
        if tuple(owner) != self._bound:
            clipped.bind_tables(shares[0])
            unclipped.bind_tables(shares[1])
            self._bound = tuple(owner)
        return owner

    def _check_belongs(
        self, pairs: Sequence[tuple[Any, tf.Variable]], owner: dict[Any, Any]
    ) -> None:
        """Refuse gradients of another model's variables, and of tables that were not found."""
        model = self._model() if self._model is not None else None
        layers = [] if model is None else list(model._flatten_layers())
        # Of the layers, not of the model: it may be used by parts, and never be built as a whole.
        mine = {
            v.ref()
            for layer in layers
            for v in (*layer._trainable_weights, *layer._non_trainable_weights)
        }
        if model is not None and pairs and not any(v.ref() in mine for _, v in pairs):
            raise ValueError(
                "The optimizer must be compiled into the model that it was made for, "
                f"{model.name!r}. Received: gradients of other variables, the first of "
                f"{pairs[0][1].name!r}. Use CowClipOptimizer.for_model with this model, or "
                "optimizer.bind(model)."
            )
        # The wide part of a stock W&D is one: its input is sparse, but it is a layer, not a table.
        dense = (layer for layer in layers if isinstance(layer, tf.keras.layers.Dense))
        known = {*owner, *(layer.kernel.ref() for layer in dense if layer.built)}
        for gradient, variable in pairs:
            if isinstance(gradient, tf.IndexedSlices) and variable.ref() not in known:
                raise ValueError(
                    "Each sparse gradient must belong to an embedding table that was found in the "
                    f"model. Received: one of {variable.name!r}, which belongs to none. Look its "
                    "rows up by a Keras Embedding or a Merlin table, or give its layer a "
                    "table_specs() method; make the optimizer for the model that it is compiled "
                    "into, once all its layers are made (or call optimizer.bind(model))."
                )

    def fit_begins(self, fit: Fit) -> None:
        """Take over what a fit of the model brings along; `model.fit` calls it."""
        self._fit = fit
        self._follow_fit()
        wanted = self.hyperparameters.batch_size
        if fit.batch_size not in (None, wanted) and not self._told_of_batch:
            self._told_of_batch = True
            warnings.warn(
                f"The hyperparameters are for batches of {wanted:,} samples, but this fit has "
                f"batches of {fit.batch_size:,}. Use scale(…, to={fit.batch_size}), or the batch "
                "size that they are for.",
                stacklevel=6,  # the call of fit, past Keras's, Merlin's and our own frames
            )

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Within it, `from_config` does not warn: Merlin's `model.save` loads what it saved."""
        with state_follows():
            yield

    def _create_warm_up(self) -> None:
        """Give the dense optimizer its schedule, of a length that may change."""
        dense = self.default_optimizer
        height = dense._hyper["learning_rate"]  # dense_lr, or what was set on the part since
        warms_up = self.hyperparameters.warmup_epochs and not callable(height)
        if self._warmup_steps is not None or not warms_up:
            return
        # A variable: another fit may have epochs of another length, without a new trace.
        self._warmup_steps = self.add_weight(
            "warmup_steps",
            shape=[],
            dtype=tf.int64,
            initializer=tf.constant_initializer(UNKNOWN),
            trainable=False,
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )
        height = float(tf.keras.backend.get_value(height))
        dense.learning_rate = LinearWarmup(height, self._warmup_steps)
        self._follow_fit()

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

    def _factor(self) -> tf.Tensor:
        """What all three parts' learning rates are multiplied by, float32."""
        rate = tf.cast(self._get_hyper("learning_rate"), tf.float32)
        # Of two float32: exactly 1 until somebody sets a learning rate.
        return rate / tf.constant(self.hyperparameters.dense_lr, tf.float32)

    def _set_hyper(self, name: str, value: Any) -> None:
        # Keras's: a variable from the first use on, which callbacks assign and checkpoints keep.
        if callable(value):
            raise ValueError(
                f"{name} must be a number. Received: {value!r}. A schedule is given to "
                "CowClipOptimizer.for_model, as dense_schedule or embedding_schedule."
            )
        value = check_number(name, float(tf.keras.backend.get_value(value)))
        super()._set_hyper(name, value)

    def create_slots(self, variables: Iterable[tf.Variable]) -> None:
        """Create all state for `variables`, as the first `apply_gradients` does."""
        owner = self._own()
        shares: dict[int, list[tf.Variable]] = {}
        for variable in variables:
            mine = owner.get(variable.ref(), self.default_optimizer)
            shares.setdefault(id(mine), []).append(variable)
        _ = self.iterations
        self._create_hypers()
        self._create_warm_up()
        for optimizer in self.optimizers:
            optimizer._create_all_weights(shares.get(id(optimizer), []))

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, tf.Variable]],
        name: str | None = None,
        experimental_aggregate_gradients: bool = True,
    ) -> Any:
        """Apply each gradient by the optimizer that owns its variable; returns one grouped op.

        Raises:
          ValueError: no model is bound, or another one; there is no gradient at all; a sparse
            gradient belongs to no table; or a table's ids are not recorded.
        """
        pairs = filter_empty_gradients(grads_and_vars)
        owner = self._own()
        self._check_belongs(pairs, owner)
        with tf.init_scope():
            # All slots before any control flow: loss scaling applies gradients inside a tf.cond.
            self.create_slots([v for _, v in pairs])
            self._check_warm_up()
        shares: dict[int, list[Any]] = {}
        for pair in pairs:
            mine = owner.get(pair[1].ref(), self.default_optimizer)
            shares.setdefault(id(mine), []).append(pair)
        updates: list[Any] = []
        # Recorded rows are there once their ids are known to be in range: else nothing is updated.
        lookups = [lookup for spec in self.table_specs for lookup in spec.recorder.lookups()]
        checked = tf.nest.flatten([lookup.rows for lookup in lookups], expand_composites=True)
        for optimizer in self.optimizers:
            if id(optimizer) not in shares:
                continue
            # The exact mode takes a table-sized temporary: one table after the other.
            before = checked + (updates[-1:] if self.update_mode == "exact" else [])
            with tf.control_dependencies(before):
                update = optimizer.apply_gradients(
                    shares[id(optimizer)],
                    name=name,
                    experimental_aggregate_gradients=experimental_aggregate_gradients,
                )
            updates += [] if update is None else [update]
        with tf.control_dependencies(updates):
            return tf.group(self.iterations.assign_add(1, read_value=False))

    def add(self, optimizer_blocks: Any) -> None:
        """Refused: blocks are assigned by `for_model`, and one added here would be passed over."""
        raise ValueError(
            "A CowClipOptimizer assigns variables itself, by table. Received blocks to add: "
            f"{optimizer_blocks!r}. Choose what is clipped with clip_tables."
        )

    def update(self, optimizer_blocks: Any) -> None:
        """Refused, as `add` is."""
        self.add(optimizer_blocks)

    def owned(self) -> list[Owned]:
        """Every trainable variable of the built model with its one optimizer, in model order."""
        model = self._model() if self._model is not None else None
        owner = self._own()
        if model is None or not model.built:
            raise ValueError(
                "The optimizer's model must be built before its variables can be listed. Call the "
                "model on a batch, or fit it, first."
            )
        specs = {spec.variable.ref(): spec for spec in self.table_specs if spec.layer.built}
        hp = self.hyperparameters
        lines = []
        for variable in model.trainable_variables:
            spec = specs.get(variable.ref())
            if spec is None:
                lines.append(Owned(variable, self.default_optimizer, "Adam", 0.0))
                continue
            ranges = self._clipped_ranges(spec)
            rule = f"clip {hp.clip}" if hp.clip and any(ranges) else "no clip"
            if hp.clip and any(ranges) and not all(ranges):
                rule += f" on {sum(ranges)} of {len(ranges)} fields"
            rule = f"{rule}, {self.update_mode} Adam"
            lines.append(Owned(variable, owner[variable.ref()], rule, hp.l2))
        return lines

    def summary(self) -> str:
        """A table of all trainable variables: rows, width, rule, learning rate, L2."""
        header = ("variable", "rows", "width", "rule", "learning rate", "L2")
        specs = {spec.variable.ref(): spec.name for spec in self.table_specs if spec.layer.built}
        rows = []
        for variable, optimizer, rule, l2 in self.owned():
            # Merlin's tables all have a variable called "embeddings".
            table = specs.get(variable.ref(), "")
            named = table in ("", *variable.name.split("/"))
            name = variable.name if named else f"{table}: {variable.name}"
            rate, factor = optimizer.learning_rate, float(self._factor())
            shape = tuple(variable.shape)
            rows.append(
                (
                    name,
                    f"{shape[0] if shape else 1:,}",
                    f"{math.prod(shape[1:]):,}",
                    rule,
                    _show_rate(rate, factor),
                    f"{l2:.6g}" if l2 else "-",
                )
            )
        return format_table(header, rows)

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
        schedules = tf.keras.optimizers.schedules
        wanted = None if self.clip_tables is None else [_as_text(item) for item in self.clip_tables]
        return {
            "name": self.name,
            "hyperparameters": self.hyperparameters.to_dict(),
            "update": self.update_mode,
            "steps_per_epoch": self.steps_per_epoch,
            "clip_tables": wanted,
            **{
                key: None if schedule is None else schedules.serialize(schedule)
                for key, schedule in (
                    ("dense_schedule", self.dense_schedule),
                    ("embedding_schedule", self.embedding_schedule),
                )
            },
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> CowClipOptimizer:
        """An optimizer without state that knows no model yet; warns so, except in `load_model`."""
        if not _state_follows.get():
            warnings.warn(
                "A CowClipOptimizer was made from its configuration: its moments and step count "
                "start anew, and it knows no model until optimizer.bind(model). To go on with a "
                "saved model, use merlin_cowclip.plugins.save_model and load_model.",
                stacklevel=2,
            )
        config = dict(config)
        for key in ("dense_schedule", "embedding_schedule"):
            if config.get(key) is not None:
                config[key] = tf.keras.optimizers.schedules.deserialize(config[key], custom_objects)
        if config.get("clip_tables") is not None:
            config["clip_tables"] = [_from_text(item) for item in config["clip_tables"]]
        return cls(**config)


@contextlib.contextmanager
def state_follows() -> Iterator[None]:
    """Within it, `from_config` does not warn: whoever calls it restores the state."""
    token = _state_follows.set(True)
    try:
        yield
    finally:
        _state_follows.reset(token)


def _show_rate(rate: Any, factor: float) -> str:
    if not callable(rate):
        return f"{float(rate) * factor:.6g}"
    return type(rate).__name__ + ("" if factor == 1 else f" x {factor:.6g}")


def _as_text(item: Any) -> str:
    """A name, `tag:…` for a tag, and a layer by its name."""
    if isinstance(item, Tags):
        return f"tag:{item.value}"
    if isinstance(item, str):
        return item
    table_name = getattr(item, "table_name", None)
    return str(table_name or item.name)


def _from_text(item: str) -> Any:
    return Tags(item.removeprefix("tag:")) if item.startswith("tag:") else item
