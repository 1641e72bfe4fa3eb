# SPDX-License-Identifier: Apache-2.0
"""CowClip on the tables of NVIDIA's SOK (`sparse_operation_kit`), of which each rank has rows.

SOK looks rows up and sends their gradients to the ranks that have them. Each rank counts the ids
that it looked up and sends the counts there, too; the rest is `CowClipAdam`'s. What of SOK's source
(merlin-sok 2.0.0 and 2.1.0) this rests on:

- An owner gets the sum of the gradients of all ranks' losses. Each loss is the mean of a share of
  the batch, so an N-th of the sum is the gradient of the global batch's mean loss.
- A key that is not negative is on rank key mod N, or all are on `target_gpu`; a gradient's indices
  are what `key_map` makes of keys.
- Tables and moments are read and written by row: `sparse_read`, `scatter_sub`, `scatter_update`.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from merlin_cowclip.plugins._tensorflow import filter_empty_gradients, tf
from merlin_cowclip.plugins.clipping import CLIP_RULES, widened
from merlin_cowclip.plugins.distributed.gradients import ReducedRows, RowSums, all_reduce_dense
from merlin_cowclip.plugins.distributed.horovod import all_reduce, all_to_all, broadcast, ranks
from merlin_cowclip.plugins.distributed.sharding import by_owner
from merlin_cowclip.plugins.embeddings.counting import Lookup
from merlin_cowclip.plugins.optimizers.adam import CowClipAdam
from merlin_cowclip.plugins.optimizers.parts import table_parts
from merlin_cowclip.plugins.row_ops import colocated_with, sum_columns, sum_per_row, tally, unique
from merlin_cowclip.plugins.scaling import Hyperparameters
from merlin_cowclip.plugins.schedules import Schedule, check_steps, scheduled_rates

Ids: TypeAlias = Any  # tf.Tensor, tf.RaggedTensor or tf.SparseTensor of integers

_MOMENTS = ("m", "v")


def _sok() -> Any:
    """The package itself; importing Merlin has initialised it, where there is a GPU."""
    try:
        return importlib.import_module("sparse_operation_kit")
    except Exception as error:  # where its libraries are missing, SOK raises plain ones
        raise ImportError(
            f"sparse_operation_kit cannot be used: {error}. NVIDIA's TensorFlow images of Merlin "
            "have it; pip install 'merlin-sok>=2,<3' builds it with CUDA's compiler."
        ) from error


class SokAdam(CowClipAdam):
    """`CowClipAdam` whose tables and moments are SOK's; its gradients are `ReducedRows`."""

    def _create_slots(self, var_list: Sequence[tf.Variable]) -> None:
        for table in var_list:
            if table._unique_id not in self._slots:
                with tf.init_scope(), tf.name_scope(""):  # a dump's files have their names
                    self._slots[table._unique_id] = {n: _moment(table, n) for n in _MOMENTS}

    def _resource_scatter_operate(
        self, resource: tf.Variable, indices: tf.Tensor, update: tf.Tensor, operation: Any
    ) -> tf.Operation:
        if not isinstance(resource, _sok().DynamicVariable):
            return super()._resource_scatter_operate(resource, indices, update, operation)
        slices = tf.IndexedSlices(update, indices)
        if operation is tf.raw_ops.ResourceScatterSub:
            return resource.scatter_sub(slices)
        return resource.scatter_update(slices)


def _moment(table: tf.Variable, name: str) -> tf.Variable:
    """Zeros, of the kind and on the ranks that the table is."""
    sok, name = _sok(), f"{table.name.split(':')[0]}_{name}"
    if isinstance(table, sok.DynamicVariable):
        return sok.DynamicVariable(
            dimension=table.dimension,
            initializer="0",
            var_type=table.backend_type,
            name=name,
            trainable=False,
            key_type=table.key_type,
            dtype=table.handle_dtype,
            mode=table.mode,
            **table.config_dict,
        )
    return sok.Variable(
        shape=tuple(int(size) for size in table.global_shape),
        initializer=tf.zeros_initializer(),
        dtype=table.dtype,
        mode="distributed" if table.target_gpu < 0 else f"localized:{table.target_gpu}",
        name=name,
        trainable=False,
    )


class CowClipSokOptimizer(tf.Module):
    """One optimizer for a script with SOK's tables: the paper's recipe, on one or several ranks.

    Tables have L2, the clip from width 2 on, and Adam on the batch's rows, as `update="lazy"` of
    `CowClipOptimizer`. Every other variable has Keras's Adam, with a warm-up.

    ```python
    optimizer.broadcast(dense.variables)
    ...
    rows = sok.lookup_sparse(tables, ids, combiners=["sum"] * len(tables))
    ...
    optimizer.apply_gradients(zip(gradients, variables), lookups=zip(tables, ids))
    ```

    Its parts `clipped`, `unclipped` and `dense` are optimizers of Keras. `tf.train.Checkpoint`
    saves them without the moments of tables, which `sok.dump` saves (`moments`).

    Args:
      hyperparameters: of the global batch size; `init_stddev` is for whoever makes the tables. The
        other arguments are as in `CowClipOptimizer.for_model`.

    Raises:
      ImportError: SOK is not installed.
      ValueError: a clip that bounds rows together; a warm-up without `steps_per_epoch`, or learning
        rates that decay without `total_steps`.
    """

    def __init__(
        self,
        hyperparameters: Hyperparameters,
        *,
        steps_per_epoch: int | None = None,
        total_steps: int | None = None,
        dense_schedule: Schedule | None = None,
        embedding_schedule: Schedule | None = None,
        name: str = "CowClipSokOptimizer",
    ) -> None:
        super().__init__(name=name)
        _sok()
        self.hyperparameters = hp = hyperparameters
        if hp.clip is not None and not CLIP_RULES[hp.clip].by_row:
            rules = ", ".join(rule.name for rule in CLIP_RULES.values() if rule.by_row)
            raise ValueError(
                f"clip must be None or one of {rules} for SOK's tables. Received: {hp.clip!r}."
            )
        steps = check_steps("steps_per_epoch", steps_per_epoch)
        total = check_steps("total_steps", total_steps)
        if hp.decay and not (dense_schedule and embedding_schedule) and total is None:
            raise ValueError("Pass total_steps=… for the decay, or set decay=False.")
        if hp.warmup_epochs and steps is None:
            raise ValueError("Pass steps_per_epoch=… for the warm-up, or set warmup_epochs=0.")
        warm_up = math.floor(hp.warmup_epochs * (steps or 0))
        dense_rate, rate = scheduled_rates(hp, dense_schedule, embedding_schedule, total, warm_up)
        self.clipped, self.unclipped = table_parts(SokAdam, rate, hp, "lazy")
        self.dense = tf.keras.optimizers.legacy.Adam(dense_rate, name="dense")
        self._is_broadcast = ranks().size == 1

    def moments(self, tables: Iterable[tf.Variable]) -> list[tf.Variable]:
        """The moments of tables, for `sok.dump(folder, [*tables, *moments])` and `sok.load`."""
        found = []
        for table in tables:
            part = self._part(table)
            part._create_slots([table])
            found += [part.get_slot(table, name) for name in _MOMENTS]
        return found

    def broadcast(self, variables: Iterable[tf.Variable]) -> None:
        """Give all ranks the dense variables of rank 0; on all ranks, before the first step."""
        if ranks().size > 1:
            broadcast(variables)
        self._is_broadcast = True

    def _part(self, table: tf.Variable) -> SokAdam:
        return self.clipped if table.shape[-1] > 1 else self.unclipped

    @tf.autograph.experimental.do_not_convert
    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, tf.Variable]],
        lookups: Iterable[tuple[tf.Variable, Ids]] = (),
    ) -> Any:
        """Make one step; on all ranks at once.

        Args:
          grads_and_vars: of the mean loss of this rank's share of the batch, not all-reduced.
          lookups: each table with the ids that this rank has looked up in it, once per feature: a
            list b×(n), in which an id counts once per sample, or a tensor, of which every value
            counts. Tables that are not clipped by counts need none.

        Returns:
          One grouped op.

        Raises:
          ValueError: no variable has a gradient; a dense gradient of a table of SOK's, or a sparse
            one of anything else; a table without lookups; or, on several ranks, no `broadcast`.
          tf.errors.InvalidArgumentError: a table's gradient has other rows than its lookups.
        """
        if not self._is_broadcast:
            raise ValueError(
                "Call optimizer.broadcast(variables) on all ranks before the first step: they "
                "must begin with the same dense weights."
            )
        tables: list[tuple[Any, tf.Variable]] = []
        dense: list[tuple[Any, tf.Variable]] = []
        for gradient, variable in filter_empty_gradients(grads_and_vars):
            is_table = bool(_sok().filter_variables([variable])[0])
            if is_table != isinstance(gradient, tf.IndexedSlices):
                raise ValueError(
                    "Tables must be made and looked up by SOK only. Received: for "
                    f"{variable.name!r}, a {type(variable).__name__}, a {type(gradient).__name__}."
                )
            (tables if is_table else dense).append((gradient, variable))
        reduced = self._reduced(tables, list(lookups))
        if dense and ranks().size > 1:
            gradients, variables = zip(*dense, strict=True)
            dense = list(zip(all_reduce_dense(gradients), variables, strict=True))
        shares = [(self.dense, dense)]
        for part in (self.clipped, self.unclipped):
            shares.append((part, [pair for pair in reduced if self._part(pair[1]) is part]))
        apply = {"experimental_aggregate_gradients": False}
        return tf.group(*(part.apply_gradients(mine, **apply) for part, mine in shares if mine))

    def _reduced(
        self, pairs: Sequence[tuple[Any, tf.Variable]], lookups: Sequence[tuple[tf.Variable, Ids]]
    ) -> list[tuple[ReducedRows, tf.Variable]]:
        """The tables' gradients and counts of the global batch, on the rank that has the rows."""
        rule, tables = self.clipped.clip, [table for _, table in pairs]
        by_counts = rule is not None and CLIP_RULES[rule].adaptive
        counted = [table for table in tables if by_counts and self._part(table) is self.clipped]
        counts = dict(zip(map(id, counted), _count(counted, lookups), strict=True))
        sums = [_sum(gradient, table, counts.get(id(table))) for gradient, table in pairs]
        with tf.control_dependencies(_check_rows([differs for _, differs in sums], tables)):
            return [
                (ReducedRows(rows._replace(gradients=tf.identity(rows.gradients)), table), table)
                for (rows, _), table in zip(sums, tables, strict=True)
            ]


def _count(
    tables: Sequence[tf.Variable], lookups: Sequence[tuple[tf.Variable, Ids]]
) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """For each table, the places of looked-up rows, n with repeats, and their counts."""
    if not tables:
        return []
    size = ranks().size
    counted, owners = [], []
    for number, table in enumerate(tables):
        mine = [ids for looked_up, ids in lookups if looked_up is table]
        if not mine:
            raise ValueError(
                f"lookups must have the ids that were looked up in {table.name!r}, which is "
                "clipped by their counts."
            )
        with colocated_with(table) as on_cpu:
            for ids in mine:
                rows, counts = _samples_per_id(ids, on_cpu)
                columns = [tf.fill(tf.shape(rows), tf.constant(number, tf.int64)), rows, counts]
                counted.append(tf.stack(columns, axis=1))
                owner = tf.constant(table.target_gpu, tf.int64)
                owners.append(
                    rows % size if table.target_gpu < 0 else tf.fill(tf.shape(rows), owner)
                )
    with colocated_with(tables[0]):
        known = tf.concat(counted, axis=0)
        if size > 1:
            order, sizes = by_owner(tf.concat(owners, axis=0), size)
            known, _ = all_to_all(tf.gather(known, order), sizes)
        parts = tf.dynamic_partition(known, tf.cast(known[:, 0], tf.int32), len(tables))
        return [
            (table.key_map(part[:, 1]), tf.cast(part[:, 2], tf.float32))
            for table, part in zip(tables, parts, strict=True)
        ]


def _samples_per_id(ids: Ids, on_cpu: bool) -> tuple[tf.Tensor, tf.Tensor]:
    """Ids of one lookup, each once, and how many samples hold each: U int64 both."""
    if isinstance(ids, tf.SparseTensor):
        ids = tf.RaggedTensor.from_sparse(ids)
    is_list = isinstance(ids, tf.RaggedTensor)
    flat = tf.reshape(tf.cast(ids.flat_values if is_list else ids, tf.int64), [-1])
    rows, position, _ = unique(flat)
    size = tf.size(rows, tf.int64)
    numbered = ids.with_flat_values(position) if is_list else position
    held = Lookup("", numbered).rows_per_sample(size)
    return rows, tf.cast(tally(held, size, on_cpu), tf.int64)


def _sum(
    gradient: tf.IndexedSlices, table: tf.Variable, counted: tuple[tf.Tensor, tf.Tensor] | None
) -> tuple[RowSums, tf.Tensor]:
    """A table's gradient summed per row, with counts (1 without); whether those are of others."""
    with colocated_with(table) as on_cpu:
        places = tf.zeros([0], tf.int64) if counted is None else counted[0]
        indices = tf.cast(gradient.indices, tf.int64)
        rows, position, _ = unique(tf.concat([places, indices], axis=0))
        number, first = tf.size(rows, tf.int64), tf.size(places)
        of_counts, of_gradient = position[:first], position[first:]
        sums = sum_per_row(widened(gradient.values), of_gradient, number, on_cpu) / ranks().size
        if counted is None:
            return RowSums(rows, sums, tf.ones([number])), tf.constant(False)
        counts = sum_columns([counted[1]], of_counts, number, on_cpu)[:, 0]
        both = tf.minimum(counts, tally(of_gradient, number, on_cpu))
        return RowSums(rows, sums, counts), tf.reduce_any(both < 1.0)


def _check_rows(differ: Sequence[tf.Tensor], tables: Sequence[tf.Variable]) -> list[Any]:
    """Refuse a step whose gradients did not come from the recorded lookups."""
    if not tables:
        return []
    found = tf.cast(tf.stack(differ), tf.float32)
    if ranks().size > 1:  # a row's owner alone sees it: no rank may make the step
        found = all_reduce(found, "max")
    names = ", ".join(table.name for table in tables)
    message = (
        "lookups must have all ids that were looked up in this step, on all ranks, and no others. "
        f"Received: a gradient of other rows, for the tables with a 1 of {names}:"
    )
    # A float: of strings alone, TensorFlow makes the check on the host at every step.
    checked = tf.debugging.Assert(tf.logical_not(tf.reduce_any(found > 0)), [message, found], 99)
    return [] if checked is None else [checked]
