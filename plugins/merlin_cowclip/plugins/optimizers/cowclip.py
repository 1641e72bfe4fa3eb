# SPDX-License-Identifier: Apache-2.0
"""CowClipOptimizer: embedding tables → CowClipAdam (or Adagrad), everything else → Keras's Adam."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypedDict

from merlin_cowclip.plugins._checks import RefusesOptions, integer
from merlin_cowclip.plugins._tensorflow import Tags, filter_empty_gradients, mm, tf
from merlin_cowclip.plugins.distributed.horovod import ranks, refuse_replicas
from merlin_cowclip.plugins.distributed.sharding import Shard
from merlin_cowclip.plugins.embeddings.discovery import check_known, tables_of
from merlin_cowclip.plugins.embeddings.initializers import initialize
from merlin_cowclip.plugins.embeddings.tables import TableSpec, normalize_clip_tables
from merlin_cowclip.plugins.monitoring.statistics import NotFinite, StepStatistics, not_finite
from merlin_cowclip.plugins.optimizers.averages import (
    add_steps,
    averages_in_place,
    create_averages,
)
from merlin_cowclip.plugins.optimizers.model_hooks import install_hooks
from merlin_cowclip.plugins.optimizers.parts import BASES, DensePart, table_parts
from merlin_cowclip.plugins.optimizers.rank_sync import broadcast_state, reduce_gradients
from merlin_cowclip.plugins.optimizers.row_clip import CLIPS_OF_KERAS
from merlin_cowclip.plugins.optimizers.state import TrainsModel
from merlin_cowclip.plugins.optimizers.summary import Owned, owned_by, summary_of
from merlin_cowclip.plugins.scaling import Hyperparameters, check_number
from merlin_cowclip.plugins.schedules import (
    Proportional,
    Schedule,
    check_steps,
    loaded_schedule,
    scheduled_rates,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

_CLIPPED = "Use hyperparameters.clip for tables; set it on optimizer.default_optimizer for others."
_PER_PART = "Each of optimizer.optimizers, its three parts, has its own."
_UNKNOWN = -1  # the length of a warm-up or decay before the steps are known


def _length(name: str, steps: int | None = None) -> tf.Variable:
    return tf.Variable(steps or _UNKNOWN, trainable=False, dtype=tf.int64, name=name)


class Options(TypedDict, total=False):
    """Arguments of `CowClipOptimizer`, for type checkers and editors."""

    update: str
    base: str
    accumulate: int
    ema: float | None
    steps_per_epoch: int | None
    total_steps: int | None
    clip_tables: Sequence[Any] | None
    dense_schedule: Schedule | None
    embedding_schedule: Schedule | None
    name: str


class LearningRates(NamedTuple):
    """η of the two kinds of weights."""

    dense: float
    embedding: float


@tf.keras.utils.register_keras_serializable(package="merlin_cowclip")
class CowClipOptimizer(TrainsModel, RefusesOptions, mm.MultiOptimizer):
    """One optimizer for a whole Merlin model, by the paper's recipe.

    Three optimizers own its variables: `CowClipAdam` (or another `base`) with the clip for
    embedding tables, one without it for tables of width 1 (the linear part) and others that are not
    to be clipped, and Keras's Adam with warm-up for the rest. L2 acts on tables only.

    ```python
    big = scale(tuned, to=131_072)
    model.compile(optimizer=CowClipOptimizer.for_model(model, big))
    model.fit(loader, epochs=10)
    ```

    `optimizer.learning_rate` (or `lr`) is a variable that starts at `dense_lr`. Set it, or let
    Keras's `ReduceLROnPlateau` or `LearningRateScheduler` do so, and the learning rates of all
    three parts, warm-up and schedules included, are multiplied by `learning_rate / dense_lr`.

    Args:
      hyperparameters: for the batch size trained with, or its `to_dict()`.
      update: "exact", "lazy" or, with Adam, "deferred".
      base: the optimizer of the tables: "adam", "adagrad" or "rowwise_adagrad".
      accumulate: micro-batches per step of `model.fit`, which computes their gradients one after
        the other: the same update, with the activations of one in memory.
      ema: D of a moving average of all weights, from 0 to below 1, for `averages`; not with
        "deferred".
      steps_per_epoch: updates per epoch, ⌊N/b⌋, for the warm-up of the dense learning rate; without
        it, those of each `model.fit` that begins before or as the warm-up ends.
      total_steps: updates after which learning rates that decay are 0; without it, those so far and
        all of each `model.fit` as it begins.
      clip_tables: what to clip: names of tables or fields, `merlin.schema.Tags`, or layers, by
        their names; `None` for every table of width 2 and more.
      dense_schedule: a Keras schedule in place of `dense_lr`; the warm-up multiplies it.
      embedding_schedule: a Keras schedule in place of `embedding_lr`.
    """

    not_offered: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(CLIPS_OF_KERAS, _CLIPPED),
        **dict.fromkeys(("beta_1", "beta_2", "epsilon", "l2", "clip"), _PER_PART),
        **dict.fromkeys(("clip_ratio", "clip_floor", "clip_threshold"), _PER_PART),
    }
    settled: ClassVar[Collection[str]] = {
        *("hyperparameters", "update_mode", "base", "accumulate", "clip_tables", "total_steps"),
        *("default_optimizer", "dense_schedule", "embedding_schedule"),
    }

    is_started = False  # whether all ranks have rank 0's state
    _model: Callable[[], Any] = staticmethod(lambda: None)  # a weak reference
    _bound: tuple[Any, ...] = ()
    _specs: list[TableSpec] | None = None
    _has_stepped = False

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        if cls.__module__.partition(".")[0] == "horovod":
            raise ValueError(
                "hvd.DistributedOptimizer does not add up id counts. Pass the CowClipOptimizer to "
                "compile: it reduces the gradients of all ranks itself."
            )

    def __init__(
        self,
        hyperparameters: Hyperparameters | dict[str, Any],
        *,
        update: str = "exact",
        base: str = "adam",
        accumulate: int = 1,
        ema: float | None = None,
        steps_per_epoch: int | None = None,
        total_steps: int | None = None,
        clip_tables: Sequence[Any] | None = None,
        dense_schedule: Schedule | None = None,
        embedding_schedule: Schedule | None = None,
        name: str = "CowClipOptimizer",
    ) -> None:
        if base not in BASES:
            raise ValueError(f"base must be one of {', '.join(BASES)}. Received: {base!r}")
        if ema is not None and (check_number("ema", ema) >= 1 or update == "deferred"):
            raise ValueError(
                f"ema must be below 1, and update exact or lazy. Received: {ema}, {update!r}"
            )
        if isinstance(hyperparameters, dict):
            hyperparameters = Hyperparameters(**hyperparameters)
        hp, given = hyperparameters, (dense_schedule, embedding_schedule)
        clip_tables = normalize_clip_tables(clip_tables, hp.clip)
        dense_schedule, embedding_schedule = map(loaded_schedule, given)
        total_steps = check_steps("total_steps", total_steps)
        decays = hp.decay and not (dense_schedule and embedding_schedule)
        decay_steps = _length("decay_steps", total_steps) if decays else None
        warm_up = _length("warmup_steps") if hp.warmup_epochs else None
        rates = scheduled_rates(hp, dense_schedule, embedding_schedule, decay_steps, warm_up)
        dense_rate, embedding_rate = (Proportional(rate, self._factor) for rate in rates)
        clipped, unclipped = table_parts(BASES[base], embedding_rate, hp, update)
        dense = DensePart(dense_rate, name="dense")
        super().__init__(
            [mm.OptimizerBlocks(clipped, []), mm.OptimizerBlocks(unclipped, [])],
            default_optimizer=dense,
            name=name,
        )
        # On several ranks, Merlin's compile would remake each of these with N times the rate.
        self._tables = clipped, unclipped
        self.optimizers_and_blocks = []
        # MultiOptimizer neither tracks nor lists it, so checkpoints would lose its moments.
        self._track_trackable(dense, name="dense")
        self.warm_up, self.decay_steps = warm_up, decay_steps  # lengths, where there are such
        for variable in (warm_up, decay_steps):
            if variable is not None:
                self._track_trackable(variable, name=variable.name.removesuffix(":0"))
        with tf.init_scope(), tf.device("CPU:0"):
            self.batch_rows = tf.Variable(0, trainable=False, dtype=tf.int64)  # not saved
        self.hyperparameters = hp
        self.update_mode = update
        self.base = base
        self.accumulate = integer("accumulate", accumulate)
        self.ema = ema
        self.clip_tables = clip_tables
        self.dense_schedule = dense_schedule
        self.embedding_schedule = embedding_schedule
        self.total_steps = total_steps
        self.steps_per_epoch = steps_per_epoch
        self._set_hyper("learning_rate", hp.dense_lr)
        # Not a constant, by whose reciprocal a graph would multiply: so `_factor` begins as 1.
        self._first_rate = tf.Variable(hp.dense_lr, trainable=False, dtype=tf.float32)

    @classmethod
    def for_model(
        cls,
        model: tf.keras.Model,
        hyperparameters: Hyperparameters,
        *,
        init_tables: bool = False,
        **options: Unpack[Options],
    ) -> CowClipOptimizer:
        """An optimizer for `model`, which may be built or not.

        Args:
          model: any Merlin or Keras model. Its tables, found by type, record their lookups from now
            on.
          hyperparameters: for the batch size that the model will be trained with.
          init_tables: initialize tables of width 2 and more with N(0, `init_stddev`), in place of
            uniform and normal initializers; without it, tables keep their own (see `summary`).
          options: the other arguments of the class.

        Raises:
          ValueError: an argument outside its range, a model without tables, `clip_tables` that name
            none of them, a table with a regularizer, or `init_tables` for a table that is built.
        """
        optimizer = cls(hyperparameters, **options)
        specs = tables_of(model, optimizer.clip_tables)
        if init_tables:
            initialize(hyperparameters.init_stddev, specs)
        optimizer.bind(model)  # takes the tables from another optimizer: after all refusals
        return optimizer

    def bind(self, model: tf.keras.Model) -> None:
        """Own the variables of `model`: what `for_model` does for a new optimizer."""
        refuse_replicas()
        specs, deferred = tables_of(model, self.clip_tables), self.update_mode == "deferred"
        if deferred and ranks().size > 1:
            raise ValueError(
                "update='deferred' is not offered on several ranks. Use 'exact' or 'lazy'; to "
                "predict, load the model by tf.keras.models.load_model(path, compile=False)."
            )
        others = ", ".join(spec.name for spec in specs if not spec.uses_gather)
        if deferred and others:
            raise ValueError(
                "update='deferred' needs tables whose rows can catch up before they are read: "
                f"those of FusedEmbeddings. Received: {others}. Use 'exact' or 'lazy', or "
                "mm.DLRMModel(schema, embeddings=FusedEmbeddings(schema, 16, stacked=False), …)"
            )
        if deferred and self._has_stepped and not set(self._specs or ()) <= set(specs):
            raise ValueError(
                "With update='deferred' an optimizer trains the tables of one model. Make another "
                "optimizer for this model."
            )
        install_hooks(model, self)
        if set(specs) != set(self._specs or ()):
            self._has_stepped = False
            for part in self._tables:
                part.statistics = None
        self._model = weakref.ref(model)
        self._specs = specs
        self._bound = ()
        self.take_tables()

    def take_tables(self) -> None:
        """Own the tables, no longer another optimizer, whose pending rows are caught up."""
        for spec in self._specs or ():
            before = spec.catch_up
            if before is not None and before != self._catch_up_rows and spec.layer.built:
                before(spec.variable, None)
            spec.reads_value = self.update_mode == "exact"
            spec.catch_up = self._catch_up_rows if self.update_mode == "deferred" else None

    def release_tables(self) -> None:
        """Own the tables no more, until `take_tables`; no row is pending."""
        self.catch_up()
        for spec in self._specs or ():
            spec.reads_value = spec.catch_up = None

    @tf.autograph.experimental.do_not_convert
    def _catch_up_rows(self, variable: tf.Variable, rows: tf.Tensor | None) -> None:
        """Catch up `rows` (all if `None`) before they are read; a copied model has no owner."""
        part = self.owner().get(variable.ref())
        if part is not None:
            part.deferred.catch_up_rows(variable, rows)

    def catch_up(self) -> None:
        """With `update="deferred"`, make all rows of all tables as `"exact"` would have them.

        Call it before you read a table's variable; methods of the model and `save_model` do so.
        """
        for spec in self._specs or ():
            if spec.catch_up is not None and spec.layer.built:
                spec.catch_up(spec.variable, None)

    @property
    def optimizers(self) -> list[Any]:
        """Its three parts, of clipped tables, of other tables and of dense weights."""
        return [*self._tables, self.default_optimizer]

    def clipped_ranges(self) -> dict[TableSpec, tuple[bool, ...]]:
        """For each range of rows of each table, whether the clip applies to it."""
        wanted, found = self.clip_tables, {}
        for spec in self.table_specs:
            if wanted is None:
                is_clipped = spec.width > 1 and self.hyperparameters.clip is not None
                found[spec] = (is_clipped,) * len(spec.range_names)
            else:
                found[spec] = spec.selected(wanted)
        return found

    @property
    def table_specs(self) -> tuple[TableSpec, ...]:
        """The model's embedding tables."""
        if self._specs is None:
            raise ValueError(
                "This optimizer knows no model yet. Use CowClipOptimizer.for_model(model, …), or "
                "call optimizer.bind(model), before compile."
            )
        return tuple(self._specs)

    def owner(self) -> dict[Any, Any]:
        """Variable → the optimizer of its table; built tables only."""
        built = {s: ranges for s, ranges in self.clipped_ranges().items() if s.layer.built}
        owner = {s.variable.ref(): self._tables[not any(r)] for s, r in built.items()}
        if tuple(owner) != self._bound:
            for part in self._tables:
                mine = {s: r for s, r in built.items() if owner[s.variable.ref()] is part}
                part.bind_tables(mine)
            self._bound = tuple(owner)
        return owner

    def by_part(self, pairs: Iterable[Any]) -> list[tuple[Any, list[Any]]]:
        """Each of the three parts with those of some tuples whose last item it trains."""
        owner, default = self.owner(), self.default_optimizer
        owned = [(owner.get(pair[-1].ref(), default), pair) for pair in pairs]
        return [(part, [pair for its, pair in owned if its is part]) for part in self.optimizers]

    def in_shards(self) -> dict[Any, Shard]:
        """By reference, which rows this rank has of a sharded table, and of its moments."""
        found: dict[Any, Shard] = {}
        for variable, part in self.owner().items():
            if shard := part.shard_of(variable.deref()):
                slots = (slot.ref() for slot in part.slots_of(variable.deref()).values())
                found |= dict.fromkeys((variable, *slots), shard)
        return found

    @property
    def steps_per_epoch(self) -> int | None:
        """Updates per epoch, as given; set, the warm-up follows from the next update on."""
        return self._steps_per_epoch

    @steps_per_epoch.setter
    def steps_per_epoch(self, steps: int | None) -> None:
        self._steps_per_epoch = steps = check_steps("steps_per_epoch", steps)
        if steps is not None:
            self._warm_up_for(steps)

    @property
    def warmup_steps(self) -> int | None:
        """⌊`warmup_epochs` · steps per epoch⌋; `None` without a warm-up, or before it is known."""
        steps = _UNKNOWN if self.warm_up is None else int(self.warm_up)
        return None if steps == _UNKNOWN else steps

    def _warm_up_for(self, steps_per_epoch: int) -> None:
        if self.warm_up is not None:
            epochs = self.hyperparameters.warmup_epochs
            self.warm_up.assign(math.floor(epochs * steps_per_epoch))

    def fit_begins(self, epochs: int, steps: int | None) -> None:
        """A `fit` of so many epochs begins, each of so many steps; `None`: not known."""
        self.batch_rows.assign(0)
        known, made = self.warmup_steps, int(self.default_optimizer.iterations)
        per_epoch = self.steps_per_epoch or steps
        if self.decay_steps is not None and self.total_steps is None and per_epoch:
            self.decay_steps.assign(made + epochs * per_epoch)
        # While no update has been made at the full learning rate: a fit before was a trial, say.
        if steps and self.steps_per_epoch is None and (known is None or made <= known):
            self._warm_up_for(steps)

    def broadcast(self) -> None:
        """Give all ranks the weights, moments, step counts and learning rates that rank 0 has.

        `model.fit` and a traced step do so. Call it before a first eager step, once the model is
        built, on all ranks; it refuses ranks that differ.
        """
        if ranks().size > 1 and self._model() is not None:
            broadcast_state(self, self._model())
        self.is_started = True

    def _factor(self) -> tf.Tensor:
        """What all three parts' learning rates are multiplied by, float32."""
        rate = tf.cast(self._get_hyper("learning_rate"), tf.float32)
        # Of two float32: exactly 1 until somebody sets a learning rate.
        return rate / self._first_rate

    def _set_hyper(self, name: str, value: Any) -> None:
        # Keras's: a variable from the first use on, which callbacks assign and checkpoints keep.
        if callable(value):
            raise ValueError(
                f"{name} must be a number. Received: {value!r}. Give CowClipOptimizer.for_model a "
                "schedule: dense_schedule or embedding_schedule."
            )
        value = check_number(name, float(tf.keras.backend.get_value(value)))
        super()._set_hyper(name, value)

    def create_slots(self, variables: Iterable[tf.Variable]) -> None:
        """Create all state for `variables`, as the first `apply_gradients` does."""
        _ = self.iterations
        self._create_hypers()
        for part, mine in self.by_part((variable,) for variable in variables):
            part._create_all_weights([variable for (variable,) in mine])
            if self.ema is not None:
                create_averages(part, [variable for (variable,) in mine])

    def _aggregate_gradients(self, grads_and_vars: Iterable[tuple[Any, tf.Variable]]) -> list[Any]:
        """Keras's, by which its loss scaling decides whether to make the step."""
        pairs = filter_empty_gradients(grads_and_vars)
        if ranks().size == 1:
            return list(super()._aggregate_gradients(pairs))
        return reduce_gradients(self, pairs, scaled=True)

    @tf.autograph.experimental.do_not_convert  # as in a `fit`: a loop of one's own may be converted
    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, tf.Variable]],
        name: str | None = None,
        experimental_aggregate_gradients: bool = True,
    ) -> Any:
        """Apply each gradient by the optimizer that owns its variable; returns one grouped op.

        Raises:
          ValueError: no model is bound, or another one; no variable has a gradient; a sparse
            gradient belongs to no table; or a table's ids are not recorded.
        """
        refuse_replicas()
        pairs = filter_empty_gradients(grads_and_vars)
        mine = self._catch_up_rows if self.update_mode == "deferred" else None
        if any(spec.catch_up != mine for spec in self.table_specs):
            raise ValueError(
                "These tables now belong to another optimizer, and update='deferred' allows one at "
                "a time. Call optimizer.bind(model), then re-trace your step."
            )
        check_known(pairs, self.owner(), self._model())
        self._has_stepped = True
        with tf.init_scope():
            # All slots before any control flow: loss scaling applies gradients inside a tf.cond.
            self.create_slots([v for _, v in pairs])
        if experimental_aggregate_gradients and ranks().size > 1:
            pairs = reduce_gradients(self, pairs)
        if not pairs:  # all is frozen: no update, which Keras does not count either
            return tf.no_op()
        needed = {
            "steps_per_epoch=…": (self.warm_up, "warmup_epochs=0"),
            "total_steps=…": (self.decay_steps, "decay=False"),
        }
        with tf.init_scope():  # now a length is rank 0's
            for argument, (length, other) in needed.items():
                if length is not None and int(length) == _UNKNOWN:
                    raise ValueError(
                        "Warm-up and decay need the number of updates. Pass "
                        f"{argument} to CowClipOptimizer.for_model, train with model.fit on data "
                        f"of known length, or set {other}."
                    )
        updates: list[Any] = []
        checked = self.checks_of_ids()
        for part, share in self.by_part(pairs):
            for gradient, variable in share if self.ema is not None else ():
                is_lazy = self.update_mode == "lazy" and isinstance(gradient, tf.IndexedSlices)
                add_steps(self, part, variable, gradient.indices if is_lazy else None)
            # One part after the other: the exact mode takes a table-sized temporary, and a step
            # that the deferred mode refuses must not change dense weights.
            before = checked + (updates[-1:] if self.update_mode != "lazy" else [])
            with tf.control_dependencies(before):
                apply = {"name": name, "experimental_aggregate_gradients": False}
                updates += [part.apply_gradients(share, **apply)] if share else []
        for spec in self.table_specs:
            if not spec.layer.trainable:  # no update takes its lookups
                spec.recorder.forget()
        with tf.control_dependencies(updates):
            return tf.group(self.iterations.assign_add(1, read_value=False))

    def checks_of_ids(self) -> list[tf.Tensor]:
        """The step's rows, there once their ids are known to be in range: else it does nothing."""
        lookups = [lookup for spec in self.table_specs for lookup in spec.recorder.lookups()]
        return [lookup.check for lookup in lookups if lookup.check is not None]

    @contextlib.contextmanager
    def averages(self) -> Iterator[None]:
        """With `ema`: within it, the bound model's trainable weights are their moving averages.

        Evaluate, predict or export within it; do not train. It holds a copy of the weights.
        """
        trained = [] if self.ema is None else self._model().trainable_variables
        self.create_slots(trained)
        shares = self.by_part((variable,) for variable in trained)
        with averages_in_place(self, [(part, v) for part, mine in shares for (v,) in mine]):
            yield

    def owned(self) -> list[Owned]:
        """Every trainable variable of the built model with its one optimizer, in model order."""
        return owned_by(self, self._model())

    def observe(self, frequent_share: float = 1e-3) -> StepStatistics:
        """Keep statistics of every step, by field; called before the first step is traced.

        Further calls return the same object, until `bind` gives the optimizer other tables.

        Args:
          frequent_share: an id is frequent in a batch if at least this share of
            `hyperparameters.batch_size` samples hold it, and at least 2; else it is rare.
        """
        share = check_number("frequent_share", frequent_share, positive=True)
        frequent_from = max(2.0, share * self.hyperparameters.batch_size)
        found = self._tables[0].statistics
        if found is None and not self._has_stepped:
            found = StepStatistics(self.clipped_ranges(), frequent_from)
        if found is None or found.frequent_from != frequent_from:
            raise ValueError(
                "observe() must be called before the first training step, right after for_model, "
                f"and always with the same frequent_share. Received: {frequent_share!r}."
            )
        for part in self._tables:
            part.statistics = found
        return found

    def learning_rates(self) -> LearningRates:
        """The learning rates of the last step, with warm-up, schedules and what was set since."""
        # A part whose tables are frozen stays behind, at a rate that no step has any more.
        tables = max(self._tables, key=lambda part: int(part.iterations))
        dense, embedding = (
            float(part.learning_rate(tf.constant(max(int(part.iterations) - 1.0, 0.0))))
            for part in (self.default_optimizer, tables)
        )
        return LearningRates(dense, embedding)

    def not_finite(self) -> list[NotFinite]:
        """NaN check: where NaN or infinite numbers are, by table and field, or by dense weight.

        Of tables, if `observe` was called: in a gradient or row of any batch so far. Of dense
        weights, frozen ones and moving means included: now. It waits for the steps under way.
        """
        tables = {spec.variable.ref() for spec in self.table_specs if spec.layer.built}
        weights = self._model().weights
        dense = [v for v in weights if v.ref() not in tables and v.dtype.is_floating]
        statistics = self._tables[0].statistics
        return not_finite([] if statistics is None else statistics.total(), dense)

    def summary(self) -> str:
        """A table of all trainable variables: rows, width, initial σ, rule, learning rate, L2."""
        table = summary_of(self.owned(), self.table_specs, float(self._factor()))
        parts = f"\n{self.accumulate} micro-batches" if self.accumulate > 1 else ""
        return table + parts + ("" if self.ema is None else f"\naveraged weights, ema {self.ema:g}")

    # Keras's, not that of MultiOptimizer's first pair, which may own no variable: the number of
    # updates, skipped ones of loss scaling too. Each part counts its own.
    iterations = tf.keras.optimizers.legacy.Optimizer.iterations

    @property
    def weights(self) -> list[tf.Variable]:
        """Every variable of this optimizer, with the step count and all slots of all three parts.

        Read eagerly, as by Keras's `get_weights` and `set_weights`, no row is pending.
        """
        if tf.executing_eagerly():
            self.catch_up()
        own = list(self._weights)
        return own + [v for optimizer in self.optimizers for v in optimizer.variables()]

    def _trackable_children(self, save_type: str = "checkpoint", **named: Any) -> dict[str, Any]:
        if tf.executing_eagerly():
            self.catch_up()
        children: dict[str, Any] = super()._trackable_children(save_type, **named)
        return children

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments; a model is not part of them (see `bind`)."""
        wanted, write = self.clip_tables, tf.keras.optimizers.schedules.serialize
        return {
            "name": self.name,
            "hyperparameters": self.hyperparameters.to_dict(),
            "update": self.update_mode,
            "base": self.base,
            "accumulate": self.accumulate,
            "ema": self.ema,
            "steps_per_epoch": self.steps_per_epoch,
            "total_steps": self.total_steps,
            "clip_tables": wanted
            and [f"tag:{one.value}" if isinstance(one, Tags) else one for one in wanted],
            "dense_schedule": self.dense_schedule and write(self.dense_schedule),
            "embedding_schedule": self.embedding_schedule and write(self.embedding_schedule),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> CowClipOptimizer:
        """An optimizer without state that knows no model yet (see `bind`)."""
        with tf.keras.utils.custom_object_scope(custom_objects or {}):
            return cls(**config)
