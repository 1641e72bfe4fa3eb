"""What a `CowClipOptimizer` does on several ranks of Horovod: equal start, gradients of all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from merlin_cowclip.plugins._tensorflow import filter_empty_gradients, tf
from merlin_cowclip.plugins.distributed.gradients import all_reduce_dense
from merlin_cowclip.plugins.distributed.horovod import (
    all_gather_object,
    broadcast,
    check_same,
    ranks,
)
from merlin_cowclip.plugins.distributed.sharding import Shard, finite_together
from merlin_cowclip.plugins.embeddings.tables import TableSpec, check_whole
from merlin_cowclip.plugins.optimizers.learning_rate import TablePart
from merlin_cowclip.plugins.optimizers.state import state_of
from merlin_cowclip.plugins.scaling import Hyperparameters

_ONE_MODEL = "All ranks must train the same model by the same optimizer."


class StepsTogether:
    """Joins the gradients and counts of all ranks before anything else is done with them.

    `apply_gradients` does so by `_joined`; Keras's loss scaling, which then decides whether to make
    the step, before that by `_aggregate_gradients`.
    """

    awaits_rank_sync = False  # a fit has begun, and no RankSync in it yet
    _is_started = False  # whether all ranks have rank 0's state

    if TYPE_CHECKING:  # what the optimizer has
        _model: Any
        hyperparameters: Hyperparameters
        learning_rate: Any
        update_mode: str

        @property
        def table_specs(self) -> tuple[TableSpec, ...]:
            """Its tables."""

        def _clipped_ranges(self) -> Mapping[TableSpec, Sequence[bool]]: ...

        def _checked(self) -> list[tf.Tensor]: ...

        def _own(self) -> Mapping[Any, TablePart]: ...

        def _table_parts(self) -> Sequence[TablePart]: ...

        def create_slots(self, variables: Iterable[tf.Variable]) -> None:
            """Its own."""

    def broadcast(self) -> None:
        """Give all ranks the weights, moments, step counts and learning rates that rank 0 has.

        `model.fit` does it before its first step, and so does a step in a `tf.function`, as it is
        traced. Before the first step that you make eagerly, `train_on_batch` of a model compiled
        with `run_eagerly=True` included, call the model on a batch, so that it is built, and then
        this, on all ranks. On one rank it does nothing.

        Raises:
          ValueError: the ranks differ in tables, hyperparameters or update mode, or a loss is a
            sum.
        """
        model = self._model() if self._model is not None else None
        if ranks().size > 1 and model is not None:
            _check_losses(model)
            own = self.in_shards()
            state = [v for v in state_of(model, self).values() if v.ref() not in own]
            check_same(self._described() | {"variables": len(state)}, _ONE_MODEL)
            broadcast(state)
        self._is_started = True

    def _described(self) -> dict[str, Any]:
        """What all ranks must have the same before they can have the same state."""
        tables = [
            {
                "fields": [column.name for column in spec.columns],
                "first rows": spec.row_offsets,
                "width": spec.width,
                "clipped": clipped,
                "in shards": spec.shard is not None,
            }
            for spec, clipped in self._clipped_ranges().items()
        ]
        hyperparameters = self.hyperparameters.to_dict()
        return {"update": self.update_mode, "hyperparameters": hyperparameters, "tables": tables}

    def _await_rank_sync(self, is_new_fit: bool) -> None:
        """A fit begins: somebody may have loaded weights on rank 0 alone."""
        self.awaits_rank_sync = is_new_fit and ranks().size > 1
        self._is_started &= not is_new_fit

    def synchronize(self) -> None:
        """Broadcast rank 0's state as a fit begins, its learning rate as another epoch does.

        A model that some rank has not built yet is broadcast in its first step.
        """
        model = self._model()
        if self._is_started:
            broadcast([self.learning_rate])
        elif all(all_gather_object(bool(model.built))):
            self.create_slots(model.trainable_variables)
            self.broadcast()

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
        self._start([variable for _, variable in pairs])
        # An id out of range ends the step before the other ranks hear of it: they would make it.
        with tf.control_dependencies(self._checked()):
            joined = self._by_variable(pairs)
        return [(joined[variable.ref()], variable) for _, variable in pairs]

    def _by_variable(self, pairs: Sequence[tuple[Any, tf.Variable]]) -> dict[Any, Any]:
        owner = self._own()
        shares: dict[int, list[Any]] = {}
        for pair in pairs:
            shares.setdefault(id(owner.get(pair[1].ref())), []).append(pair)
        joined: dict[Any, Any] = {}
        for part in self._table_parts():
            found = part.join(shares.get(id(part), []))
            joined.update((variable.ref(), gradient) for gradient, variable in found)
        dense = shares.get(id(None), [])
        means = all_reduce_dense([gradient for gradient, _ in dense])
        joined.update((v.ref(), mean) for mean, (_, v) in zip(means, dense, strict=True))
        return joined

    def _start(self, variables: list[tf.Variable]) -> None:
        if self.awaits_rank_sync:
            raise ValueError(
                "On several ranks, fit needs the callback RankSync. Received: none in callbacks. "
                "Pass it first and last: sync = RankSync(); "
                "fit(…, callbacks=[sync, …, sync])."
            )
        with tf.init_scope():
            self.create_slots(variables)
        if self._is_started:
            return
        if tf.executing_eagerly():
            raise ValueError(
                "On several ranks all must begin with the same weights. Received: a first step "
                "that is made eagerly. Call the model on a batch, so that it is built, then "
                "optimizer.broadcast(), before it. A fit of a built model does so itself, and so "
                "does a step in a tf.function."
            )
        with tf.init_scope():  # while the step is traced: it runs after this
            self.broadcast()


def _check_losses(model: tf.keras.Model) -> None:
    """Refuse losses that are no means over samples: the ranks' gradients are averaged."""
    for loss in tf.nest.flatten(getattr(model, "loss", None)):
        reduction = getattr(loss, "reduction", None)
        if reduction in (tf.keras.losses.Reduction.SUM, tf.keras.losses.Reduction.NONE):
            raise ValueError(
                "On several ranks all losses must be means over their samples: the ranks' "
                f"gradients are averaged. Received: {type(loss).__name__}(reduction="
                f'{reduction!r}). Use reduction="sum_over_batch_size", or leave it out.'
            )
