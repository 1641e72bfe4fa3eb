# SPDX-License-Identifier: Apache-2.0
"""`update="deferred"`: rows that are absent from a batch are updated when they are read next.

What a step does to an absent row depends on that row only. So each row stores the number of the
last step that was applied to it. Before a row is read, the steps since then are applied at once
(`catch_up.py`). Until then the row is *pending*.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

from merlin_cowclip.plugins._tensorflow import not_recorded, tf
from merlin_cowclip.plugins.optimizers.catch_up import AdamConstants, Rates, catch_up
from merlin_cowclip.plugins.row_ops import colocated_with, unique_rows

LAST_STEP = "last_step"  # the name of a slot
BETA_1, BETA_2 = 0.9, (0.999, 0.9999)  # which `catch_up` is tested for
ROUNDED = 1e-6  # of β, which float32 may have held
# Above this ηλ/ε, which is (1 + β₁) / (1 - β₁), a row near zero, whose v has decayed, overshoots by
# more at each step, until its own gradient has increased v. No shortcut tells where it will be.
STABLE = 19.0
UNSTABLE = (
    "update='deferred' requires learning_rate * l2 <= 19 * epsilon; above it, Adam oscillates "
    "around zero. Use update='exact' or a smaller l2."
)
TILE_ELEMENTS, TILE_ROWS_ON_GPU = 8_192, 65_536  # rows that are caught up by one kernel call
CHUNK_ELEMENTS = 2**21  # of a table that is caught up as a whole


def check_deferrable(
    learning_rate: Any,
    *,
    l2: float,
    clip: str | None,
    clip_ratio: float,
    beta_1: float = BETA_1,
    beta_2: float = BETA_2[0],
    epsilon: float = 1e-7,
) -> None:
    """Refuse hyperparameters of `CowClipAdam` with which missed steps cannot be applied later."""
    if not isinstance(learning_rate, (int, float)):
        raise ValueError(
            "update='deferred' requires a number as learning rate of the embeddings. Received: "
            f"{learning_rate!r}. Use update='exact', or a rule and a schedule that keep it constant"
        )
    least, most = BETA_2
    if abs(beta_1 - BETA_1) > ROUNDED or not least - ROUNDED <= beta_2 <= most + ROUNDED:
        raise ValueError(
            f"update='deferred' requires beta_1 of {BETA_1} and beta_2 from {least} to {most}. "
            f"Received: beta_1={beta_1:.6g} and beta_2={beta_2:.6g}. Use update='exact'"
        )
    if clip == "adaptive_column" and clip_ratio < 2 * l2:
        raise ValueError(
            "update='deferred' requires clip_ratio of at least 2 * l2; below, rows absent from a "
            f"batch are clipped too. Received: {clip_ratio:g} and l2={l2:g}. Use update='exact'"
        )
    if learning_rate * l2 > STABLE * epsilon:
        raise ValueError(f"{UNSTABLE} Received: {learning_rate:g} * {l2:g}, epsilon={epsilon:g}")


class DeferredRows:
    """The state of deferred updates in a `CowClipAdam`, and when rows catch up."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.rate: Any = None  # a variable: the learning rate of all missed steps
        self._constants = self._settings()  # of all missed steps

    def create_state(self, variables: Iterable[tf.Variable]) -> None:
        """Create the state of tables that have none; no row is pending."""
        mine = self._optimizer
        if self.rate is None:
            self._constants = self._settings()  # as they were set since
            before = tf.keras.initializers.Constant(-1.0)  # the first step
            self.rate = mine.add_weight("deferred_rate", (), tf.float32, before, trainable=False)
            mine._weights.append(self.rate)
        step = float(tf.keras.backend.get_value(mine.iterations))
        for variable in variables:
            if variable.dtype.size < 4:
                raise ValueError(
                    "update='deferred' requires float32 or float64 tables: step numbers do not fit "
                    f"into {variable.dtype.name}. Received: {variable.name!r}. Use update='exact'"
                )
            # Not integers, for which GPUs lack kernels: exact up to step 2**24.
            up_to = tf.cast(tf.fill([variable.shape[0], 1], step), variable.dtype)
            mine.add_slot(variable, LAST_STEP, up_to)

    def check_change(self, name: str, value: Any) -> None:
        """Refuse to change what missed steps depend on."""
        if self.rate is None:
            return  # `create_state` checks it
        if name in AdamConstants._fields:
            raise ValueError(
                "l2, epsilon, beta_1 and beta_2 cannot be changed after the first step with "
                "update='deferred'. Set them before, or use update='exact'"
            )
        if name == "clip_ratio":
            self._settings(value)

    def _settings(self, clip_ratio: float | None = None) -> AdamConstants:
        """What missed steps depend on, if rows can apply them later."""
        mine = self._optimizer
        clip_ratio = mine.clip_ratio if clip_ratio is None else clip_ratio
        rate = mine._hyper["learning_rate"].rate
        beta_1, beta_2 = (float(mine._serialize_hyperparameter(f"beta_{i}")) for i in (1, 2))
        adam = AdamConstants(beta_1, beta_2, mine.epsilon, mine.l2)
        check_deferrable(rate, clip=mine.clip, clip_ratio=clip_ratio, **adam._asdict())
        return adam

    def _last_step(self, variable: tf.Variable) -> tf.Variable | None:
        """The step up to which each row of a table is up to date, V×1; `None` before training."""
        return self._optimizer.slots_of(variable).get(LAST_STEP)

    def catch_up_rows(self, variable: tf.Variable, rows: tf.Tensor | None) -> None:
        """Apply missed steps to a table's rows (of any shape, with repeats; or all: `None`)."""
        if self._last_step(variable) is None:
            spec = self._optimizer._specs.get(variable.ref())
            if tf.executing_eagerly() or spec is None or not spec.layer.trainable:
                return  # not trained yet
            with tf.init_scope():
                self._optimizer._create_all_weights([variable])
        with not_recorded(), colocated_with(variable) as on_cpu:
            if rows is None:
                self._catch_up_all(variable)
                return
            flat = tf.reshape(tf.cast(rows, tf.int64), [-1])
            self._catch_up(variable, unique_rows(flat, variable.shape[0], on_cpu).rows)

    def catch_up_updated(self, variable: tf.Variable, rows: tf.Tensor) -> None:
        """As `catch_up_rows`, of a gradient's unique rows, if a step was made since the lookup."""
        last = tf.gather(self._last_step(variable), rows)
        late = tf.reduce_any(last < tf.cast(self._optimizer.iterations, last.dtype))
        tf.cond(late, lambda: self._catch_up(variable, rows), lambda: None)

    def catch_up(self) -> None:
        """Apply missed steps to all rows of the model's tables."""
        for spec in self._optimizer._specs.values():
            if self._last_step(spec.variable) is not None:
                self.catch_up_rows(spec.variable, None)

    def _catch_up_all(self, variable: tf.Variable) -> None:
        number, width = variable.shape
        chunk = max(CHUNK_ELEMENTS // width, 1)

        def body(begin: tf.Tensor) -> tuple[tf.Tensor]:
            end = tf.minimum(begin + chunk, number)
            self._catch_up(variable, tf.range(begin, end))
            return (end,)

        tf.while_loop(lambda begin: begin < number, body, (tf.constant(0, tf.int64),))

    def _catch_up(self, variable: tf.Variable, rows: tf.Tensor) -> None:
        self._catch_up_table(variable._unique_id, rows)

    @tf.function(autograph=False, reduce_retracing=True)  # as one op, which Ctrl-C cannot divide
    def _catch_up_table(self, unique_id: str, rows: tf.Tensor) -> None:
        """Apply all missed steps to rows of a variable, by unique int64 numbers."""
        mine = self._optimizer
        tables = (spec.variable for spec in mine._specs.values())
        table = next(one for one in tables if one._unique_id == unique_id)
        variables = [table, mine.get_slot(table, "m"), mine.get_slot(table, "v")]
        last_step = self._last_step(table)
        step = tf.cast(mine.iterations, table.dtype)
        with tf.device(table.device):
            last = tf.gather(last_step, rows)[:, 0]
            rows, last = (tf.boolean_mask(x, last < step) for x in (rows, last))
            # Sorted, since a tile takes as long as its longest gap; the longest first.
            order = tf.argsort(last)
            rows, last = (tf.gather(x, order) for x in (rows, last))
            state = [tf.gather(variable, rows) for variable in variables]
            new = _in_tiles(state, last, step, self.rate, self._constants)
            now = tf.fill([tf.size(rows), 1], step)
            write = mine._resource_scatter_update
            with tf.control_dependencies([rows, now, *new]):  # all or, if one fails, none
                written = [write(x, rows, y) for x, y in zip(variables, new, strict=True)]
            with tf.control_dependencies(written):
                write(last_step, rows, now)

    def before_step(self, variables: Sequence[tf.Variable]) -> None:
        """Check a step on tables; where the learning rate has changed, catch up at the last one."""
        mine, specs = self._optimizer, self._optimizer._specs
        used = {variable.ref() for variable in variables}
        had_one = (spec for key, spec in specs.items() if key not in used)
        names = [spec.name for spec in had_one if self._last_step(spec.variable) is not None]
        if names:
            raise ValueError(
                "update='deferred' requires a gradient for every table in every step. Received: "
                f"none for {', '.join(names)}. Use update='exact' to freeze tables during training"
            )
        rate = tf.cast(mine._decayed_lr(tf.float32), tf.float32)
        is_stable = rate * mine.l2 <= STABLE * mine.epsilon
        check = tf.debugging.Assert(is_stable, [f"{UNSTABLE} Received: learning_rate", rate])
        with tf.control_dependencies([] if check is None else [check]):
            tf.cond(tf.not_equal(rate, self.rate), self.catch_up, lambda: None)
            self.rate.assign(rate)

    def after_step(self, variable: tf.Variable, rows: tf.Tensor) -> tf.Operation:
        """Mark a gradient's rows as up to date after this step."""
        now = tf.cast(self._optimizer.iterations + 1, variable.dtype)
        write = self._optimizer._resource_scatter_update
        return write(self._last_step(variable), rows, tf.fill([tf.size(rows), 1], now))


def _in_tiles(
    state: Sequence[tf.Tensor],
    last: tf.Tensor,
    step: tf.Tensor,
    rate: tf.Tensor,
    adam: AdamConstants,
) -> list[tf.Tensor]:
    """The w, m and v of n rows, n×d each, after all missed steps: tiles of rows in parallel."""
    dtype, width = state[0].dtype, state[0].shape[1]
    on_gpu = "GPU" in state[0].device
    tile = TILE_ROWS_ON_GPU if on_gpu else max(TILE_ELEMENTS // width, 512)
    filled = [[0, -tf.size(last) % tile], [0, 0]]  # by rows that missed nothing
    tiles = [tf.reshape(tf.pad(x, filled), [-1, tile, width]) for x in state]
    tiles.append(tf.reshape(tf.pad(last, filled[:1], constant_values=step), [-1, tile]))
    rates = Rates.constant(rate, adam, dtype)
    # Tensors, so that other values need no other trace.
    adam = adam._replace(epsilon=tf.constant(adam.epsilon, dtype), l2=tf.constant(adam.l2, dtype))
    found = tf.map_fn(
        lambda one: _compiled(*one, step, rates, adam),
        tuple(tiles),
        fn_output_signature=(dtype,) * 3,
        parallel_iterations=os.cpu_count() or 1,
    )
    return [tf.reshape(x, [-1, width])[: tf.size(last)] for x in found]


# As a few fused kernels: op by op it takes five times as long.
_compiled = tf.function(catch_up, autograph=False, jit_compile=True)
