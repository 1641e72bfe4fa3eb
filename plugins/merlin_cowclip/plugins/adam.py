"""CowClipAdam: Adam on embedding rows, with L2 and CowClip, for one or more tables.

The wiring only: the clip itself is in `clipping.py`, the counting in `tables.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from merlin_cowclip.plugins._stack import mm, tf
from merlin_cowclip.plugins.clipping import (
    CLIP_RULES,
    RowNorms,
    clip_by_adaptive_column_norm,
    row_norms,
    with_lengths,
)
from merlin_cowclip.plugins.not_offered import RefusesOptions
from merlin_cowclip.plugins.scaling import check_clip, check_number
from merlin_cowclip.plugins.tables import TableSpec, lookups_in, repeats_per_row, samples_per_row

UPDATES = ("exact", "lazy")


class RowGradients(NamedTuple):
    """The gradient of one table on the rows of a batch, summed per row, with L2."""

    indices: tf.Tensor  # U, unique
    gradients: tf.Tensor  # U×d
    rows: tf.Tensor  # U×d, before the update
    counts: tf.Tensor  # U


@tf.keras.utils.register_keras_serializable(package="merlin_cowclip")
class CowClipAdam(RefusesOptions, mm.LazyAdam):
    """Adam for embedding tables with the paper's L2 and clip (Algorithm 1, lines 5 to 10).

    One step on a table W (V×d) with the gradient of the mean loss, rows `g_k`:

    1. `g_k ← g_k + 2λ·w_k` (λ as in Keras: the loss grows by `λ·Σw²`; the paper writes `λ/2·‖w‖²`).
    2. `cnt_k` = samples of the batch that hold id k. On a bare `tf.Variable`, the repeats of k in
       the gradient's `IndexedSlices`; on a table bound with `bind_tables`, from the ids looked up.
    3. `g_k ← g_k · min(1, cnt_k · max(r·‖w_k‖, ζ) / ‖g_k‖)`.
    4. Adam. `update="exact"`, the paper: on every row of the table. A row absent from the batch has
       the gradient `2λ·w_k` and the count 1, and its moments decay. `update="lazy"`: L2 and
       Adam on the batch's rows only, as in Merlin's `LazyAdam`: the cost grows with the ids in the
       batch and not with V, and rare ids do not shrink between their appearances.

    The exact update clips on the batch's U rows, then makes one pass over the table with one
    V×d temporary.

    Args:
      learning_rate: η of the embeddings, a number or a Keras schedule.
      beta_1: decay of the first moment.
      beta_2: decay of the second moment.
      epsilon: Adam's ε (Keras's "epsilon hat").
      l2: λ, not negative.
      clip: a rule of `CLIP_RULES`; "adaptive_column" is CowClip, `None` no clip. The unit of
        "global" is all tables of this optimizer.
      clip_ratio: r, positive.
      clip_floor: ζ, not negative, in units of the gradient's norm.
      clip_threshold: c of the rules "global", "field" and "column".
      update: "exact" or "lazy".
      name: prefix of the optimizer's variables.

    Raises:
      ValueError: an argument outside its range.
    """

    not_offered: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("clipnorm", "clipvalue", "global_clipnorm", "gradient_transformers"),
            "Choose a rule with clip, and clip_threshold.",
        ),
        "weight_decay": "Its L2 is l2.",
        "amsgrad": "Merlin's LazyAdam has none.",
    }

    def __init__(
        self,
        learning_rate: float | tf.keras.optimizers.schedules.LearningRateSchedule = 1e-4,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        *,
        l2: float = 1e-5,
        clip: str | None = "adaptive_column",
        clip_ratio: float = 1.0,
        clip_floor: float = 3.162e-5,
        clip_threshold: float | None = None,
        update: str = "exact",
        name: str = "CowClipAdam",
    ) -> None:
        check_clip(clip, clip_threshold)
        if update not in UPDATES:
            raise ValueError(
                f"update must be one of {', '.join(UPDATES)}. Received: update={update!r}"
            )
        if isinstance(learning_rate, (int, float)):
            check_number("learning_rate", learning_rate, positive=True)
        for beta_name, beta in (("beta_1", beta_1), ("beta_2", beta_2)):
            if check_number(beta_name, beta) >= 1:
                raise ValueError(f"{beta_name} must be below 1. Received: {beta_name}={beta!r}")
        super().__init__(
            learning_rate=learning_rate,
            beta_1=beta_1,
            beta_2=beta_2,
            epsilon=check_number("epsilon", epsilon, positive=True),
            name=name,
        )
        self.l2 = check_number("l2", l2)
        self.clip = clip
        self.clip_ratio = check_number("clip_ratio", clip_ratio, positive=True)
        self.clip_floor = check_number("clip_floor", clip_floor)
        self.clip_threshold = clip_threshold
        self.update = update
        self._specs: dict[Any, TableSpec] = {}
        self._exempt: dict[Any, tuple[bool, ...]] = {}

    def bind_tables(self, tables: Mapping[TableSpec, Sequence[bool]]) -> None:
        """Take the counts of these built tables from the ids that they record.

        Args:
          tables: for each table, whether each of its ranges of rows is clipped.
        """
        self._specs = {spec.variable.ref(): spec for spec in tables}
        self._exempt = {
            spec.variable.ref(): tuple(not c for c in clipped)
            for spec, clipped in tables.items()
            if not all(clipped)
        }

    def _transform_gradients(
        self, grads_and_vars: Iterable[tuple[Any, tf.Variable]]
    ) -> list[tuple[tf.IndexedSlices, tf.Variable]]:
        """L2 on the batch's rows, then the clip: Keras's hook between gradients and update."""
        pairs = list(grads_and_vars)
        found = [self._row_gradients(gradient, variable) for gradient, variable in pairs]
        clipped = self._clipped(found, [variable for _, variable in pairs])
        return [
            (tf.IndexedSlices(gradients, table.indices), variable)
            for gradients, table, (_, variable) in zip(clipped, found, pairs, strict=True)
        ]

    def _row_gradients(self, gradient: Any, variable: tf.Variable) -> RowGradients:
        if not isinstance(gradient, tf.IndexedSlices):
            raise ValueError(
                "The gradient of an embedding table must be sparse (tf.IndexedSlices). Received: a "
                f"dense gradient for {self._name_of(variable)}. A regularizer on the table or a "
                "layer that reads the whole table makes it dense: remove the regularizer (l2=… "
                "takes its place), or leave this table to another optimizer."
            )
        spec = self._specs.get(variable.ref())
        if spec is None:
            indices, position, counts = repeats_per_row(gradient.indices)
        else:
            indices, position, counts = self._counted(spec, gradient.indices)
        summed = tf.math.unsorted_segment_sum(gradient.values, position, tf.size(indices))
        rows = tf.gather(self._readable(variable), indices)
        if self.l2:
            summed += 2.0 * self.l2 * tf.cast(rows, summed.dtype)
        return RowGradients(indices, summed, rows, counts)

    def _readable(self, variable: tf.Variable) -> Any:
        """What to gather a variable's rows from: see `TableAccess`."""
        return tf.convert_to_tensor(variable) if self.update == "exact" else variable

    def _name_of(self, variable: tf.Variable) -> str:
        spec = self._specs.get(variable.ref())
        return repr(variable.name) if spec is None else f"the table {spec.name!r}"

    def _counted(
        self, spec: TableSpec, indices: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        if self.clip is None:
            return repeats_per_row(indices)
        lookups = spec.recorder.lookups()
        recorded = bool(lookups) and all(lookup.key for lookup in lookups)
        if not recorded or lookups_in(indices) > len(lookups):
            raise ValueError(
                f"The ids that the table {spec.name!r} looked up in this step were not recorded, "
                "or not all, so they cannot be counted. Call the table itself within the training "
                "step (not its variable, and not inside a tf.function or XLA-compiled function of "
                "its own), a table of several features with a dict of them; or do not clip it."
            )
        if len(lookups) == 1 and not lookups[0].is_list and not tf.executing_eagerly():
            # Looked up once, one-hot: repeats are counts. (Eagerly, "once" cannot be known.)
            return repeats_per_row(indices)
        return samples_per_row(lookups, indices, spec.num_rows)

    def _clipped(self, tables: list[RowGradients], variables: list[tf.Variable]) -> list[tf.Tensor]:
        """The clipped gradients of all tables, as one set of rows: U×d each."""
        if self.clip is None:
            return [table.gradients for table in tables]
        norms = [row_norms(table.gradients) for table in tables]
        fields, num_fields = self._fields(tables, variables)
        known = RowNorms(
            tf.concat(norms, axis=0),
            tf.concat([row_norms(table.rows) for table in tables], axis=0),
            tf.concat([table.counts for table in tables], axis=0),
            fields,
            num_fields,
        )
        exempt = self._exempt_rows(known, variables)
        if exempt is not None:  # such rows take no part in a norm, and keep their own
            known = known._replace(
                gradients=tf.where(exempt, 0.0, known.gradients),
                rows=tf.where(exempt, 0.0, known.rows),
            )
        rule = CLIP_RULES[self.clip]
        given = {name: getattr(self, f"clip_{name}") for name in rule.parameters}
        lengths = rule.lengths(known, **given)
        if exempt is not None:
            lengths = tf.where(exempt, tf.concat(norms, axis=0), lengths)
        parts = tf.split(lengths, [tf.size(n) for n in norms]) if len(norms) > 1 else [lengths]
        return [
            with_lengths(table.gradients, n, part)
            for table, n, part in zip(tables, norms, parts, strict=True)
        ]

    def _exempt_rows(self, known: RowNorms, variables: list[tf.Variable]) -> tf.Tensor | None:
        """Which rows of all tables are not to be clipped, U booleans; `None` for none."""
        if not self._exempt:
            return None
        by_field: list[bool] = []
        for variable in variables:
            spec = self._specs.get(variable.ref())
            ranges = 1 if spec is None else len(spec.row_offsets) - 1
            by_field += self._exempt.get(variable.ref(), (False,) * ranges)
        return tf.gather(tf.constant(by_field), known.fields)

    def _fields(
        self, tables: list[RowGradients], variables: list[tf.Variable]
    ) -> tuple[tf.Tensor, int]:
        """The field of every row of all tables, counted through, and how many there are."""
        numbers, total = [], 0
        for table, variable in zip(tables, variables, strict=True):
            spec = self._specs.get(variable.ref())
            starts = (0,) if spec is None else spec.row_offsets[:-1]
            if len(starts) == 1:
                numbers.append(tf.fill(tf.shape(table.indices), tf.constant(total, tf.int64)))
            else:
                after = tf.constant(starts[1:], tf.int64)
                within = tf.searchsorted(after, table.indices, side="right", out_type=tf.int64)
                numbers.append(total + within)
            total += len(starts)
        return tf.concat(numbers, axis=0), total

    def _resource_apply_sparse_duplicate_indices(
        self, grad: tf.Tensor, handle: tf.Variable, indices: tf.Tensor
    ) -> tf.Operation:
        # Rows are unique since _transform_gradients; Keras would make them so once more.
        return self._resource_apply_sparse(grad, handle, indices)

    def _resource_apply_sparse(
        self, grad: tf.Tensor, var: tf.Variable, indices: tf.Tensor
    ) -> tf.Operation:
        if self.update == "lazy":
            return super()._resource_apply_sparse(grad, var, indices)
        return self._resource_apply_dense(self._whole_gradient(grad, var, indices), var)

    def _whole_gradient(self, grad: tf.Tensor, var: tf.Variable, indices: tf.Tensor) -> tf.Tensor:
        """V×d: the batch's rows as clipped, `2λw` on all others, in one V×d temporary."""
        rows = tf.convert_to_tensor(var)
        if not self.l2:
            return tf.scatter_nd(tf.expand_dims(indices, -1), grad, tf.shape(rows, tf.int64))
        decay = 2.0 * self.l2 * rows
        if self.clip == "adaptive_column" and self.clip_ratio < 2.0 * self.l2:
            # Only then can an absent row, of count 1, exceed its bound. The norms of the other
            # rules leave absent rows out.
            ones = tf.ones(tf.shape(rows)[:1])
            decay = clip_by_adaptive_column_norm(
                decay, rows, ones, ratio=self.clip_ratio, floor=self.clip_floor
            )
        # Into the buffer of `decay`, which nothing else reads; tensor_scatter_nd_update copies it.
        return tf.raw_ops.InplaceUpdate(x=decay, i=tf.cast(indices, tf.int32), v=grad)

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {
            "name": self._name,
            "learning_rate": self._serialize_hyperparameter("learning_rate"),
            "beta_1": self._serialize_hyperparameter("beta_1"),
            "beta_2": self._serialize_hyperparameter("beta_2"),
            "epsilon": self.epsilon,
            "l2": self.l2,
            "clip": self.clip,
            "clip_ratio": self.clip_ratio,
            "clip_floor": self.clip_floor,
            "clip_threshold": self.clip_threshold,
            "update": self.update,
        }
