"""What a `CowClipOptimizer` does on several ranks of Horovod: it begins and steps as on one."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from merlin_cowclip.plugins._stack import filter_empty_gradients, tf
from merlin_cowclip.plugins.fits import Fit
from merlin_cowclip.plugins.joining import (
    broadcast,
    check_equal,
    check_same,
    join_dense,
    of_all_ranks,
    over_all,
    ranks,
)
from merlin_cowclip.plugins.rates import TablePart
from merlin_cowclip.plugins.schedules import LinearWarmup
from merlin_cowclip.plugins.sharding import Shard, finite_together
from merlin_cowclip.plugins.tables import TableSpec, check_whole

_RATES = (
    "All ranks must step with the same learning rates. A callback that sets them by what each rank "
    "has measured needs the mean of all: put horovod.keras.callbacks.MetricAverageCallback() "
    "before it. Received, of clipped tables, other tables and dense weights, rank by rank:"
)


_ALIKE = "On several ranks all must begin with the same weights."
_ONE_MODEL = "All ranks must train the same model by the same optimizer."
_ALL_EPOCHS = (
    "A fit must make the same epochs on all ranks: they wait for each other. Pass the same "
    "epochs=… and initial_epoch=…, and give BackupAndRestore to all ranks, or to none."
)
_ALL_CALLS = (
    "All ranks must make as many calls of a model whose tables are in shards: they ask each other "
    "for rows. Pass steps=… or validation_steps=…, or share the batches evenly."
)

_NO_MEANS = (tf.keras.losses.Reduction.SUM, tf.keras.losses.Reduction.NONE)


class StepsTogether:
    """Joins the gradients and counts of all ranks before anything else is done with them.

    `apply_gradients` does so by `_joined`; Keras's loss scaling, which then decides whether to make
    the step, before that by `_aggregate_gradients`.
    """

    _is_alike = False
    _samples: tf.Tensor | None = None  # of the batch that a step of Keras's is on
    _is_stepping = False

    if TYPE_CHECKING:  # what the optimizer has
        _model: Any

        @property
        def optimizers(self) -> list[Any]:
            """Its parts."""

        @property
        def weights(self) -> list[tf.Variable]:
            """Its own."""

        @property
        def table_specs(self) -> tuple[TableSpec, ...]:
            """Its tables."""

        def get_config(self) -> dict[str, Any]:
            """Its own."""

        def _clipped_ranges(self) -> Mapping[TableSpec, Sequence[bool]]: ...

        def _checked(self) -> list[tf.Tensor]: ...

        def _own(self) -> Mapping[Any, TablePart]: ...

        def _table_parts(self) -> Sequence[TablePart]: ...

        def create_slots(self, variables: Iterable[tf.Variable]) -> None:
            """Its own."""

    def broadcast(self) -> None:
        """Give all ranks the weights, moments, step counts and learning rates that rank 0 has.

        `model.fit` does it as it begins, and before its first step once more where callbacks may
        have loaded weights on rank 0; so does a step in a `tf.function`, as it is traced. Before
        the first step that you make eagerly, `train_on_batch` of a model compiled with
        `run_eagerly=True` included, call the model on a batch, so that it is built, and then this,
        on all ranks. A `fit` with `run_eagerly=True` needs no more than that the model is built. On
        one rank it does nothing.
        """
        if ranks().size > 1:
            check_same(self._described(), _ONE_MODEL)
            broadcast(self._state())
        self._is_alike = True

    def _described(self) -> dict[str, Any]:
        """What all ranks must have the same before they can have the same state."""
        tables = [
            {
                "fields": [column.name for column in spec.columns],
                "first rows": spec.row_offsets,
                "width": spec.width,
                "clipped": clipped,
                "trained": spec.layer.trainable,
                "in shards": spec.shard is not None,
            }
            for spec, clipped in self._clipped_ranges().items()
        ]
        shapes = [[*variable.shape, variable.dtype.name] for variable in self._state()]
        own = {key: value for key, value in self.get_config().items() if key != "clip_tables"}
        settings = {**own, "tables": tables, "shapes of weights": shapes}
        for number, part in enumerate(self.optimizers):
            config = part.get_config()
            kept = {key: config[key] for key in config if key not in part._hyper}
            settings[f"settings of part {number}"] = kept
        # Of what is no number nor text, the kind: addresses are others on each rank.
        text = json.dumps(settings, default=lambda one: type(one).__name__)
        described: dict[str, Any] = json.loads(text)
        return described

    def _state(self) -> Iterator[tf.Variable]:
        """What all ranks have alike: not the rows that one has alone."""
        model = self._model() if self._model is not None else None
        own = self.in_shards()
        weights = () if model is None else tuple(model.weights)
        every = [*weights, *self._weights_as(weights)]
        yield from (variable for variable in every if variable.ref() not in own)
        for optimizer in (self, *self.optimizers):
            for _, value in sorted(optimizer._hyper.items()):
                is_warm_up = isinstance(value, LinearWarmup)
                values = (value.learning_rate, value.warmup_steps) if is_warm_up else (value,)
                yield from (one for one in values if isinstance(one, tf.Variable))

    def _weights_as(self, weights: Sequence[tf.Variable]) -> list[tf.Variable]:
        """Its own weights, moments in the order of what they are of.

        Keras has them as they were made, and on a rank that restored a checkpoint before its first
        step they were made in another order: one rank's m would become another one's v.
        """
        places = {variable._unique_id: place for place, variable in enumerate(weights)}
        order = {
            moment.ref(): (places.get(key, len(places)), name)
            for part in self.optimizers
            for key, moments in part._slots.items()
            for name, moment in moments.items()
        }
        return sorted(self.weights, key=lambda variable: order.get(variable.ref(), (-1, "")))

    def in_shards(self) -> dict[Any, Shard]:
        """By reference, which rows this rank has of a table in shards, and of its moments."""
        found: dict[Any, Shard] = {}
        for variable, part in self._own().items():
            table = variable.deref()
            shard = part.shard_of(table)
            if shard is not None:
                slots = (slot.ref() for slot in part.slots_of(table).values())
                found |= dict.fromkeys((variable, *slots), shard)
        return found

    def _begin_together(self, fit: Fit) -> None:
        """A fit begins: with rank 0's weights, and with as many steps on all ranks.

        Raises:
          ValueError: it has not as many, or it is not known; the first step is made eagerly, before
            there are weights.
        """
        if ranks().size == 1:
            return
        model = self._model() if self._model is not None else None
        is_late = model is not None and not model.built and model.run_eagerly
        told = of_all_ranks([fit.steps, is_late, self._is_built()])
        steps, late, built = zip(*told, strict=True)
        if len(set(steps)) > 1 or None in steps:
            received = ("unknown" if one is None else str(one) for one in steps)
            raise ValueError(
                "A fit must make as many steps on each rank: they wait for each other. Received: "
                f"{', '.join(received)} steps per epoch. Pass steps_per_epoch=…, or train on "
                "batches of known number that all ranks share."
            )
        if any(late):
            raise ValueError(
                f"{_ALIKE} Received: a fit with run_eagerly=True of a model that is not built. "
                "Call the model on a batch before a fit with run_eagerly=True, or leave that out."
            )
        self._share(built)

    def epochs_begin(self, epochs: int | None, first: tuple[int, int]) -> None:
        """A fit's callbacks have begun, which may have changed where it does.

        Args:
          epochs: up to which it goes.
          first: the epoch, and the step within, that it begins at.

        Raises:
          ValueError: the ranks have not the same.
        """
        if ranks().size > 1:
            at = dict(zip(("first epoch", "first step"), map(int, first), strict=True))
            check_same({"epochs": epochs, **at}, _ALL_EPOCHS)

    def share_loaded(self) -> None:
        """Give all ranks what callbacks have loaded on rank 0, before a fit's first step."""
        self._share(of_all_ranks(self._is_built()))

    def _is_built(self) -> bool:
        model = self._model() if self._model is not None else None
        return model is not None and bool(model.built)

    def _share(self, built: Sequence[bool]) -> None:
        """As `broadcast`: now, where the model is built on all ranks; else in its first step."""
        self._is_alike = False  # somebody may have loaded weights on rank 0 alone
        if all(built):
            self.create_slots(self._model().trainable_variables)
            self.broadcast()

    @contextlib.contextmanager
    def stepping_on(self, data: Any) -> Iterator[None]:
        """Within it, gradients are of the mean loss of a batch, as Keras takes it."""
        before = self._samples, self._is_stepping
        self._is_stepping = ranks().size > 1
        _, labels, _ = tf.keras.utils.unpack_x_y_sample_weight(data)
        self._samples = _samples_in(labels) if self._is_stepping else None
        try:
            yield
        finally:
            self._samples, self._is_stepping = before

    def takes_mean_over(
        self, targets: Any, predictions: Any, losses: Mapping[str, tf.keras.losses.Loss]
    ) -> None:
        """A loss is the mean over these, which may be others than the batch has: Merlin's `pre`.

        Args:
          targets: what it is taken of, as are the predictions.
          predictions: with Keras's masks, if any.
          losses: by output.

        Raises:
          ValueError: one of them is a sum.
        """
        if not self._is_stepping:
            return
        for output, loss in losses.items():
            if loss.reduction in _NO_MEANS:
                raise ValueError(
                    "On several ranks all losses must be means: the ranks' gradients are averaged. "
                    f"Received: {type(loss).__name__}(reduction={loss.reduction!r}) of {output!r}. "
                    'Use reduction="sum_over_batch_size", or leave it out.'
                )
        masks = (getattr(one, "_keras_mask", None) for one in tf.nest.flatten(predictions))
        mask = next((mask for mask in masks if mask is not None), None)
        found = _samples_in(targets) if mask is None else tf.math.count_nonzero(mask)
        self._samples = self._samples if found is None else found

    def _weight_of_share(self) -> tf.Tensor | None:
        """Of this rank's mean loss in that of the global batch; 1 where all shares are equal."""
        if self._samples is None:
            return None
        mine = tf.cast(self._samples, tf.float64)
        return tf.math.divide_no_nan(mine * ranks().size, over_all(mine, "sum"))

    def call_begins(self, steps: int | None) -> None:
        """An evaluation or a prediction begins: where rows are asked for, of as many batches.

        Raises:
          ValueError: the ranks have not as many, or it is not known.
        """
        if any(spec.shard is not None for spec in self.table_specs):
            check_same({"batches": "unknown" if steps is None else steps}, _ALL_CALLS)
            if steps is None:
                raise ValueError(
                    f"{_ALL_CALLS} Received: data whose number of batches is not known."
                )

    def check_trains_by(self, other: Any) -> None:
        """Refuse another optimizer for tables in shards.

        Raises:
          ValueError: there are some.
        """
        names = [spec.name for spec in self.table_specs if spec.shard is not None]
        if names:
            raise ValueError(
                "A table in shards must be trained by a CowClipOptimizer, which knows where its "
                f"rows are. Received: {type(other).__name__}, for {names[0]!r}. Compile the model "
                "with CowClipOptimizer.for_model, or leave sharded=True out."
            )

    def check_whole(self, what: str) -> None:
        """Refuse what would take this rank's rows for the tables.

        Raises:
          ValueError: there are tables in shards.
        """
        check_whole(self.table_specs, what)

    @tf.autograph.experimental.do_not_convert  # it does not know zip(…, strict=True)
    def _aggregate_gradients(self, grads_and_vars: Iterable[tuple[Any, tf.Variable]]) -> list[Any]:
        """As `_joined`, and on all ranks not finite where they are not on one: for loss scaling."""
        pairs = filter_empty_gradients(grads_and_vars)
        if ranks().size == 1:
            return list(super()._aggregate_gradients(pairs))  # type: ignore[misc]
        joined, shards = self._joined(pairs), self.in_shards()
        seen = iter(finite_together([mine for mine, v in joined if v.ref() in shards]))
        return [(next(seen) if v.ref() in shards else mine, v) for mine, v in joined]

    @tf.autograph.experimental.do_not_convert
    def _joined(self, pairs: Sequence[tuple[Any, tf.Variable]]) -> list[Any]:
        """The gradients of the global batch, with its counts.

        The same on all ranks, but of tables in shards, of which each has those of its rows.
        """
        self._begin_alike([variable for _, variable in pairs])
        # An id out of range ends the step before the other ranks hear of it: they would make it.
        with tf.control_dependencies(self._checked()):
            joined = self._by_variable(pairs)
        return [(joined[variable.ref()], variable) for _, variable in pairs]

    def _by_variable(self, pairs: Sequence[tuple[Any, tf.Variable]]) -> dict[Any, Any]:
        weight = self._weight_of_share()
        check_equal(tf.stack([part._decayed_lr(tf.float32) for part in self.optimizers]), _RATES)
        owner = self._own()
        shares: dict[int, list[Any]] = {}
        for pair in pairs:
            shares.setdefault(id(owner.get(pair[1].ref())), []).append(pair)
        joined: dict[Any, Any] = {}
        for part in self._table_parts():
            found = part.join(shares.get(id(part), []), weight)
            joined.update((variable.ref(), gradient) for gradient, variable in found)
        dense = shares.get(id(None), [])
        means = join_dense([gradient for gradient, _ in dense], weight)
        joined.update((v.ref(), mean) for mean, (_, v) in zip(means, dense, strict=True))
        return joined

    def _begin_alike(self, variables: list[tf.Variable]) -> None:
        with tf.init_scope():
            self.create_slots(variables)
        if self._is_alike:
            return
        if tf.executing_eagerly():
            raise ValueError(
                f"{_ALIKE} Received: a first step that is made eagerly. Call the model on a batch, "
                "so that it is built, then optimizer.broadcast(), before it. A fit of a built "
                "model does so itself, and so does a step in a tf.function."
            )
        with tf.init_scope():  # while the step is traced: it runs after this
            self.broadcast()


def _samples_in(labels: Any) -> tf.Tensor | None:
    """How many samples labels are of; `None` where there are none."""
    for one in tf.nest.flatten(labels):
        if isinstance(one, tf.Tensor) and one.shape.rank:
            return tf.shape(one, tf.int64)[0]
    return None
