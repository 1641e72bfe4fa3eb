# SPDX-License-Identifier: Apache-2.0
"""The clip of embedding tables as a transformation of gradients, before any optimizer of Keras.

(row sums, rows, counts) → gradients: sums per row and counts (`counting.py`), L2, the clip
(`clipping.py`). What an optimizer of tables does with them is its own: `adam.py`, `adagrad.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from merlin_cowclip.plugins._checks import KERAS_OPTIONS, RefusesOptions
from merlin_cowclip.plugins._tensorflow import is_op_determinism_enabled, tf
from merlin_cowclip.plugins.clipping import CLIP_RULES, RowNorms, row_norms, widened, with_norms
from merlin_cowclip.plugins.distributed.gradients import ReducedRows, RowSums, all_gather_rows
from merlin_cowclip.plugins.distributed.horovod import all_reduce, refuse_replicas
from merlin_cowclip.plugins.distributed.sharding import Shard, join_shards
from merlin_cowclip.plugins.embeddings.counting import check_repeats, count_all_rows, count_samples
from merlin_cowclip.plugins.embeddings.tables import TableSpec
from merlin_cowclip.plugins.monitoring.statistics import StepStatistics, plain_norms
from merlin_cowclip.plugins.optimizers.deferred import DeferredRows
from merlin_cowclip.plugins.row_ops import colocated_with, sum_per_row, unique_rows, with_rows
from merlin_cowclip.plugins.scaling import Hyperparameters, check_number

CLIPS_OF_KERAS = "clipnorm", "clipvalue", "global_clipnorm", "gradient_transformers"
_NUMBERS = "l2", "clip_ratio", "clip_floor", "clip_threshold"  # of `Hyperparameters`

# Mixed into optimizers of Keras, which a type checker takes it to be.
_Keras: Any = tf.keras.optimizers.legacy.Optimizer if TYPE_CHECKING else object


class ClipsRows(RefusesOptions, _Keras):
    """Mixed into an optimizer of Keras, for embedding tables: L2 and the clip before its update.

    One step on a table W (V×d) with the gradient of the mean loss, rows `g_k` (Algorithm 1, lines 5
    to 9):

    1. `g_k ← g_k + 2λ·w_k` (λ as in Keras: the loss grows by `λ·Σw²`; the paper writes `λ/2·‖w‖²`).
    2. `cnt_k` = samples of the batch that hold id k, from the lookups of a bound table; on a bare
       `tf.Variable`, the repeats of k in the gradient's `IndexedSlices`.
    3. `g_k ← g_k · min(1, cnt_k · max(r·‖w_k‖, ζ) / ‖g_k‖)`.
    4. The optimizer. `update="exact"`, the paper: on every row of the table, in one pass with one
       V×d temporary. A row absent from the batch has the gradient `2λ·w_k` and the count 1.
       `update="lazy"`: L2 and the optimizer on the batch's rows only.

    Args:
      learning_rate: η.
      arguments: of the optimizer of Keras.
      epsilon: of the optimizer of Keras; here also 0 is refused, which Keras takes for its default.
      l2: λ, not negative.
      clip: a rule of `CLIP_RULES`; "adaptive_column" is CowClip, `None` no clip. The unit of
        "global" is all tables of this optimizer.
      clip_ratio: r, positive.
      clip_floor: ζ, not negative, in units of the gradient's norm.
      clip_threshold: c of the rules "global", "field" and "column".
      update: "exact" or "lazy".
      name: prefix of the optimizer's variables; `None` for that of the class.

    Raises:
      ValueError: an argument outside its range.
    """

    _weights: list[tf.Variable]  # Keras's
    deferred: DeferredRows | None = None  # with `update="deferred"`
    statistics: StepStatistics | None = None  # to which steps on bound tables are added
    not_offered: ClassVar[Mapping[str, str]] = dict.fromkeys(
        CLIPS_OF_KERAS, "Choose a rule with clip, and clip_threshold."
    )
    settled: ClassVar[Collection[str]] = ("clip", "update")
    updates: ClassVar[Sequence[str]] = ("exact", "lazy")

    def __init__(
        self,
        learning_rate: Any,
        *arguments: Any,
        epsilon: float,
        l2: float = 1e-5,
        clip: str | None = "adaptive_column",
        clip_ratio: float = 1.0,
        clip_floor: float = 3.162e-5,
        clip_threshold: float | None = None,
        update: str = "exact",
        name: str | None = None,
    ) -> None:
        if update not in self.updates:
            wanted = ", ".join(self.updates)
            raise ValueError(f"update must be one of {wanted}. Received: {update!r}")
        if not callable(learning_rate) and not tf.is_tensor(learning_rate):
            learning_rate = check_number("learning_rate", learning_rate, positive=True)
        name = type(self).__name__ if name is None else name
        super().__init__(learning_rate, *arguments, epsilon=epsilon, name=name)
        self.epsilon = epsilon
        self.l2 = l2
        self.clip_ratio = clip_ratio
        self.clip_floor = clip_floor
        self.clip_threshold = clip_threshold
        self.clip = clip
        self.update = update
        self._check_settings()
        # What steps read, on the host: `tf.cond` does. Configurations save them, not checkpoints.
        numbers = {name: getattr(self, name) or 0.0 for name in _NUMBERS}
        with tf.init_scope(), tf.device("CPU:0"):
            self._numbers = {n: tf.Variable(x, False, dtype=tf.float64) for n, x in numbers.items()}
        self._specs: dict[Any, TableSpec] = {}
        self._is_clipped: dict[Any, Sequence[bool]] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        if (variable := self.__dict__.get("_numbers", {}).get(name)) is not None:
            self._check_settings(**{name: value})
            variable.assign(value or 0.0)  # which the next step reads, traced or not
        super().__setattr__(name, value)

    def _check_settings(self, **changed: Any) -> None:
        """Refuse settings out of range, and several replicas."""
        refuse_replicas()
        Hyperparameters(clip=self.clip, **{n: getattr(self, n) for n in _NUMBERS} | changed)
        check_number("epsilon", self.epsilon, positive=True)

    def _number(self, name: str, dtype: tf.DType) -> tf.Tensor:
        """A setting as a step reads it."""
        return tf.cast(self._numbers[name], dtype)

    def bind_tables(self, tables: Mapping[TableSpec, Sequence[bool]]) -> None:
        """Count the ids that these built tables record; each with what ranges are clipped."""
        self._specs = {spec.variable.ref(): spec for spec in tables}
        self._is_clipped = {spec.variable.ref(): clipped for spec, clipped in tables.items()}

    def slots_of(self, variable: tf.Variable) -> dict[str, tf.Variable]:
        """A table's moments and the like by name; none before they are made."""
        return dict(self._slots.get(variable._unique_id, {}))

    def change_table(
        self, old: tf.Variable, new: tf.Variable, moments: Mapping[str, tf.Variable]
    ) -> None:
        """Have another variable, with these moments, in the place of a table."""
        before = self._slots.pop(old._unique_id, {})
        self._slots[new._unique_id] = dict(moments)
        replaced = {slot.ref(): moments[name] for name, slot in before.items()}
        self._weights = [replaced.get(v.ref(), v) for v in self._weights]

    def shard_of(self, variable: tf.Variable) -> Shard | None:
        """Which rows of a table this rank has, where the ranks share them."""
        spec = self._specs.get(variable.ref())
        return None if spec is None else spec.shard

    def reduce(self, grads_and_vars: Iterable[tuple[Any, tf.Variable]]) -> list[Any]:
        """`ReducedRows` of the global batch; of sharded tables, those that this rank has."""
        found = []
        for gradient, variable in grads_and_vars:
            share, shard = self._sum_rows(gradient, variable), self.shard_of(variable)
            if shard is None:
                sums = all_gather_rows(share, variable)
            else:
                sums = join_shards(share, variable, shard)
            found.append((ReducedRows(sums, variable), variable))
        return found

    def _sum_rows(self, gradient: Any, variable: tf.Variable) -> RowSums:
        """A table's gradient summed per row, and in how many samples of the batch each occurs."""
        spec = self._specs.get(variable.ref())
        number = variable.shape[0] if spec is None else spec.num_rows
        is_counted = self.clip is not None or self.statistics is not None
        if spec is not None and not is_counted:
            spec.recorder.forget()
        with colocated_with(variable) as on_cpu:
            if not isinstance(gradient, tf.IndexedSlices):
                spec, counts = _checked(spec, variable, self.update), tf.zeros([number])
                if is_counted:
                    counts = count_all_rows(spec, on_cpu)
                rows = tf.range(number, dtype=tf.int64)
                return RowSums(rows, widened(gradient), counts, is_dense=True)
            indices = gradient.indices
            if spec is not None and is_counted:
                found = count_samples(spec, indices, on_cpu)
            else:
                if self.clip is not None and CLIP_RULES[self.clip].adaptive:
                    check_repeats(indices, variable)
                found = unique_rows(indices, number, on_cpu)
            values = widened(gradient.values)
            sums = sum_per_row(values, found.position, tf.size(found.rows), on_cpu)
            return RowSums(found.rows, sums, found.counts)

    def _transform_gradients(
        self, grads_and_vars: Iterable[tuple[Any, tf.Variable]]
    ) -> list[tuple[tf.IndexedSlices, tf.Variable]]:
        """L2 on the batch's rows, then the clip: Keras's hook between gradients and update."""
        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]
        self._check_settings()
        if self.deferred is not None:
            self.deferred.before_step(variables)
        found = [self._with_l2(gradient, variable) for gradient, variable in pairs]
        tables, rows = [table for table, _ in found], [rows for _, rows in found]
        clipped, transformed = self._clipped(tables, rows, variables), []
        for table, new, variable in zip(tables, clipped, variables, strict=True):
            new = tf.cast(new, variable.dtype)
            new = new if table.is_dense else tf.IndexedSlices(new, table.indices)
            transformed.append((new, variable))
        return transformed

    def _with_l2(self, gradient: Any, variable: tf.Variable) -> tuple[RowSums, tf.Tensor]:
        """A table's summed gradient with L2, and the same rows of the table before the update."""
        with colocated_with(variable):
            is_reduced = isinstance(gradient, ReducedRows)
            sums = gradient.sums if is_reduced else self._sum_rows(gradient, variable)
            if self.deferred is not None:
                self.deferred.catch_up_updated(variable, sums.indices)
            # See `TableSpec.gather`.
            from_value = sums.is_dense or self.update == "exact"
            rows = tf.convert_to_tensor(variable) if from_value else variable
            rows = rows if sums.is_dense else tf.gather(rows, sums.indices)
            dtype = sums.gradients.dtype
            decay = 2.0 * self._number("l2", dtype) * tf.cast(rows, dtype)
            return sums._replace(gradients=sums.gradients + decay), rows

    def _clipped(
        self, tables: list[RowSums], rows: list[tf.Tensor], variables: list[tf.Variable]
    ) -> list[tf.Tensor]:
        """The clipped gradients of all tables, as one set of rows: U×d each."""
        if self.clip is None and self.statistics is None:
            return [table.gradients for table in tables]
        norms_of = plain_norms if self.clip is None else row_norms
        norms = [norms_of(table.gradients) for table in tables]
        fields, num_fields = [], 0
        for table, variable in zip(tables, variables, strict=True):
            fields.append(num_fields + self._field_of(variable, table.indices))
            num_fields += len(self.clipped_ranges_of(variable))
        known = RowNorms(
            tf.concat(norms, axis=0),
            tf.concat([row_norms(some) for some in rows], axis=0),
            tf.concat([table.counts for table in tables], axis=0),
            tf.concat(fields, axis=0),
            num_fields,
            *self._over_all(variables),
        )
        new_norms = known.grad_norms if self.clip is None else self._clipped_norms(known, variables)
        if self.statistics is not None:
            specs = [self._specs[variable.ref()] for variable in variables]
            with colocated_with(variables[0]) as on_cpu:
                # Of a dense gradient every row is one of the batch's; of another not the padding.
                held = [tf.maximum(t.counts, 1.0) if t.is_dense else t.counts for t in tables]
                self.statistics.add(known, tf.concat(held, axis=0), new_norms, rows, specs, on_cpu)
        if self.clip is None:
            return [table.gradients for table in tables]
        parts = tf.split(new_norms, [tf.size(n) for n in norms]) if len(norms) > 1 else [new_norms]
        return [
            with_norms(table.gradients, n, part)
            for table, n, part in zip(tables, norms, parts, strict=True)
        ]

    def _over_all(self, variables: list[tf.Variable]) -> tuple[Any, ...]:
        """How sums over rows become those of all ranks, where each has rows of its own."""
        sharded = [self.shard_of(variable) is not None for variable in variables]
        if not any(sharded) or self.clip is None or CLIP_RULES[self.clip].by_row:
            return ()
        if not all(sharded):
            raise ValueError(
                f"clip={self.clip!r} bounds rows together, so all tables or none must be sharded."
            )
        return (all_reduce,)

    def _clipped_norms(self, given: RowNorms, variables: list[tf.Variable]) -> tf.Tensor:
        """The gradients' norms after the clip, U."""
        rule, exempt, known = CLIP_RULES[self.clip or ""], None, given
        is_clipped = [one for variable in variables for one in self.clipped_ranges_of(variable)]
        if not all(is_clipped):  # the others' rows take no part in a norm, and keep their own
            exempt = tf.logical_not(tf.gather(tf.constant(is_clipped), known.fields))
            without = tf.where(exempt, tf.zeros_like(known.grad_norms), known.grad_norms)
            known = known._replace(grad_norms=without)
        dtype = known.grad_norms.dtype
        parameters = {name: self._number(f"clip_{name}", dtype) for name in rule.parameters}
        new_norms = rule.clipped_norms(known, **parameters)
        return new_norms if exempt is None else tf.where(exempt, given.grad_norms, new_norms)

    def _field_of(self, variable: tf.Variable, indices: tf.Tensor) -> tf.Tensor:
        """For rows of a variable, the number of the range that each belongs to, int64."""
        spec = self._specs.get(variable.ref())
        if spec is None or len(spec.row_offsets) == 2:
            return tf.zeros(tf.shape(indices), tf.int64)
        rows, after = tf.cast(indices, tf.int64), tf.constant(spec.row_offsets[1:-1], tf.int64)
        rows = rows if spec.shard is None else spec.shard.global_row(rows)
        return tf.searchsorted(after, rows, side="right", out_type=tf.int64)

    def clipped_ranges_of(self, variable: tf.Variable) -> Sequence[bool]:
        """For each range of rows of a variable, whether the clip applies to it."""
        return self._is_clipped.get(variable.ref(), (True,))

    def _resource_apply_sparse_duplicate_indices(
        self, grad: tf.Tensor, handle: tf.Variable, indices: tf.Tensor
    ) -> tf.Operation:
        # Rows are unique since _transform_gradients; Keras would make them so once more.
        return self._resource_apply_sparse(grad, handle, indices)

    def _resource_apply_sparse(
        self, grad: tf.Tensor, var: tf.Variable, indices: tf.Tensor
    ) -> tf.Operation:
        if self.update != "exact":
            return self._apply_rows(grad, var, indices)
        return self._resource_apply_dense(self._dense_gradient(grad, var, indices), var)

    def _apply_rows(self, grad: tf.Tensor, var: tf.Variable, indices: tf.Tensor) -> tf.Operation:
        """The optimizer on some rows, each once."""
        return super()._resource_apply_sparse(grad, var, indices)

    def _dense_gradient(self, grad: tf.Tensor, var: tf.Variable, indices: tf.Tensor) -> tf.Tensor:
        """V×d: the batch's rows as clipped, all others as absent, in one V×d temporary."""
        rows = tf.convert_to_tensor(var)
        dense = absent = 2.0 * self._number("l2", rows.dtype) * rows

        def clipped() -> tf.Tensor:
            norms, exempt = row_norms(absent), self._exempt_mask(var)
            r, floor = (self._number(n, norms.dtype) for n in ("clip_ratio", "clip_floor"))
            new_norms = tf.minimum(norms, tf.maximum(r * row_norms(rows), floor))
            new_norms = new_norms if exempt is None else tf.where(exempt, norms, new_norms)
            return with_norms(absent, norms, new_norms)

        # Other rules leave absent rows out. The norm of 2λ·w exceeds r·‖w‖ only if r < 2λ.
        if self.clip == "adaptive_column":
            with tf.device("CPU:0"):
                is_reached = self._numbers["clip_ratio"] < 2.0 * self._numbers["l2"]
            dense = tf.cond(is_reached, clipped, lambda: absent)
        # tensor_scatter_nd_update would copy it, and, deterministic on a GPU, take it to the host.
        return with_rows(dense, indices, grad, in_range=not _on_gpu(var))

    def _exempt_mask(self, var: tf.Variable) -> tf.Tensor | None:
        """Which rows of a table are not to be clipped, V booleans; `None` for none."""
        is_clipped, shard = self.clipped_ranges_of(var), self.shard_of(var)
        if all(is_clipped):
            return None
        mask = tf.repeat(tf.logical_not(is_clipped), np.diff(self._specs[var.ref()].row_offsets))
        return mask if shard is None else mask[shard.rank :: shard.size]

    def _resource_scatter_operate(
        self, resource: tf.Variable, indices: tf.Tensor, update: tf.Tensor, operation: Any
    ) -> tf.Operation:
        """Write rows of a variable, each once: what lazy steps do to W and to their state."""
        if not _scatters_through_host(resource):
            return operation(resource=resource.handle, indices=indices, updates=update)
        if operation is tf.raw_ops.ResourceScatterSub:
            update = tf.gather(resource, indices) - update
        # A copy: the value that is read may or may not be the variable's own buffer.
        rows = tf.raw_ops.DeepCopy(x=tf.convert_to_tensor(resource))
        rows = with_rows(rows, indices, update, in_range=not _on_gpu(resource))
        return resource.assign(rows, read_value=False)

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        kept = {k: value for k, value in super().get_config().items() if k not in KERAS_OPTIONS}
        return {**kept, **{name: getattr(self, name) for name in (*_NUMBERS, "clip", "update")}}


def _scatters_through_host(variable: tf.Variable) -> bool:
    """Whether a scatter copies all of it to the host and back, as TensorFlow's GPU kernels do."""
    # `DoScatterOnCpu` in resource_variable_ops.cc.
    return _on_gpu(variable) and is_op_determinism_enabled()


def _on_gpu(variable: tf.Variable) -> bool:
    return "GPU" in (variable.device or "")


def _checked(spec: TableSpec | None, variable: tf.Variable, update: str) -> TableSpec:
    """The table, which may have a dense gradient: that of a tied output."""
    if spec is None or not spec.is_tied:
        raise ValueError(
            f"The gradient of {variable.name!r} is dense, so its ids cannot be counted. Remove a "
            "regularizer on the table (use l2=…), accumulate gradients by concatenating slices, or "
            "set is_tied in the TableSpec of a layer that reads the whole table."
        )
    if spec.shard is not None or update == "deferred":
        option = "sharded=True" if spec.shard is not None else "update='deferred'"
        raise ValueError(
            f"A table with {option} must be read by row. A layer reads all of {spec.name!r}. "
            f"Leave {option} out."
        )
    return spec
