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
            "update='deferred' requires a number as learning rate of the embeddings, because rows "
            f"apply missed steps at one rate. Received: {learning_rate!r}. Use update='exact'"
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
        # Of each row of each table, V×1; float32, up to step 2**24: GPUs lack kernels for integers.
        self._last_steps: dict[Any, tf.Variable] = {}
        self._rate: Any = None  # a variable: the learning rate of all missed steps
        self._places: dict[Any, int] = {}

    def check(self, learning_rate: Any) -> None:
        """As `check_deferrable`."""
        if isinstance(learning_rate, tf.Variable):
            learning_rate = float(tf.keras.backend.get_value(learning_rate))
        mine, adam = self._optimizer, self._constants()._asdict()
        check_deferrable(learning_rate, clip=mine.clip, clip_ratio=mine.clip_ratio, **adam)

    def check_constant(self, name: str, value: Any) -> None:
        """Refuse, once training has begun, a new value of what missed steps depend on."""
        if self._last_steps:
            raise ValueError(
                f"{name} cannot be changed after the first step with update='deferred'. Received: "
                f"{value!r}. Set it before, or use update='exact'"
            )

    def bind(self, places: dict[Any, int]) -> None:
        """Number the model's tables; one that is bound anew has missed steps of others only."""
        for key in self._last_steps.keys() & (places.keys() - self._places.keys()):
            with tf.init_scope():
                last_step, step = self._last_steps[key], self._optimizer.iterations
                last_step.assign(tf.fill(last_step.shape, tf.cast(step, tf.float32)))
        self._places = places

    def in_order(self, variables: Iterable[tf.Variable]) -> list[tf.Variable]:
        """Tables in the model's order, whichever is used first: `weights` have a fixed order."""
        return sorted(variables, key=self._place)

    def _place(self, variable: tf.Variable) -> int:
        return self._places.get(variable.ref(), len(self._last_steps))

    def create_state(self, variables: Iterable[tf.Variable]) -> None:
        """Create the state of tables that have none; no row is pending."""
        self.check(self._optimizer._hyper["learning_rate"])  # may have been set after construction
        if self._rate is None:
            self._rate = self._weight("deferred_rate", (), -1.0)  # before the first step
        step = float(tf.keras.backend.get_value(self._optimizer.iterations))
        for variable in variables:
            if variable.ref() not in self._last_steps:
                # Not a slot: Keras loads slots only in the variable's shape.
                name = f"last_step_{self._place(variable)}"
                self._last_steps[variable.ref()] = self._weight(name, (variable.shape[0], 1), step)

    def _weight(self, name: str, shape: tuple[int, ...], value: float) -> tf.Variable:
        initializer = tf.keras.initializers.Constant(value)
        weight = self._optimizer.add_weight(name, shape, tf.float32, initializer, trainable=False)
        self._optimizer._weights.append(weight)
        return weight

    def last_step_of(self, variable: tf.Variable) -> tf.Variable | None:
        """The step up to which each row of a table is up to date, V×1; `None` before training."""
        return self._last_steps.get(variable.ref())

    @tf.autograph.experimental.do_not_convert
    def catch_up_rows(self, variable: tf.Variable, rows: tf.Tensor) -> None:
        """Apply missed steps to rows of a table, by numbers of any shape, with repeats."""
        if variable.ref() not in self._last_steps:
            specs = self._optimizer._specs.values()
            trained = [spec.variable for spec in specs if spec.layer.trainable]
            if tf.executing_eagerly() or all(one is not variable for one in trained):
                return  # not trained yet
            with tf.init_scope():
                self._optimizer._create_all_weights(self.in_order(trained))
        with not_recorded(), colocated_with(variable) as on_cpu:
            flat = tf.reshape(tf.cast(rows, tf.int64), [-1])
            self._catch_up(variable, unique_rows(flat, variable.shape[0], on_cpu).rows)

    @tf.autograph.experimental.do_not_convert
    def catch_up_updated(self, variable: tf.Variable, rows: tf.Tensor) -> None:
        """As `catch_up_rows`, of a gradient's unique rows, if a step was made since the lookup."""
        last, step = tf.gather(self._last_steps[variable.ref()], rows), self._optimizer.iterations
        late = tf.reduce_any(last < tf.cast(step, tf.float32))
        tf.cond(late, lambda: self._catch_up(variable, rows), lambda: None)

    @tf.autograph.experimental.do_not_convert
    def catch_up(self) -> None:
        """Apply missed steps to all rows of the model's tables."""
        for spec in self._optimizer._specs.values():
            if spec.variable.ref() in self._last_steps:
                with not_recorded(), colocated_with(spec.variable):
                    self._catch_up_all(spec.variable)

    def _catch_up_all(self, variable: tf.Variable) -> None:
        number, width = variable.shape
        chunk = max(CHUNK_ELEMENTS // width, 1)

        def body(begin: tf.Tensor) -> tuple[tf.Tensor]:
            end = tf.minimum(begin + chunk, number)
            self._catch_up(variable, tf.range(begin, end))
            return (end,)

        tf.while_loop(lambda begin: begin < number, body, (tf.constant(0, tf.int64),))

    def _catch_up(self, variable: tf.Variable, rows: tf.Tensor) -> None:
        self._catch_up_table(list(self._last_steps).index(variable.ref()), rows)

    @tf.function(autograph=False, reduce_retracing=True)  # as one op, which Ctrl-C cannot divide
    def _catch_up_table(self, number: int, rows: tf.Tensor) -> None:
        """Apply all missed steps to rows of the table `number`, by unique int64 numbers."""
        mine, (key, last_step) = self._optimizer, list(self._last_steps.items())[number]
        table = key.deref()
        variables = [table, mine.get_slot(table, "m"), mine.get_slot(table, "v")]
        step = tf.cast(mine.iterations, tf.float32)
        with tf.device(table.device):
            last = tf.gather(last_step, rows)[:, 0]
            rows, last = (tf.boolean_mask(x, last < step) for x in (rows, last))
            # Sorted, since a tile takes as long as its longest gap; the longest first.
            order = tf.argsort(last)
            rows, last = (tf.gather(x, order) for x in (rows, last))
            state = [tf.gather(variable, rows) for variable in variables]
            new = _in_tiles(state, last, step, self._rate, self._constants())
            now = tf.fill([tf.size(rows), 1], step)
            write = mine._resource_scatter_update
            with tf.control_dependencies([rows, now, *new]):  # all or, if one fails, none
                written = [write(x, rows, y) for x, y in zip(variables, new, strict=True)]
            with tf.control_dependencies(written):
                write(last_step, rows, now)

    def _constants(self) -> AdamConstants:
        mine = self._optimizer
        beta_1, beta_2 = (float(mine._serialize_hyperparameter(f"beta_{i}")) for i in (1, 2))
        return AdamConstants(beta_1, beta_2, mine.epsilon, mine.l2)

    @tf.autograph.experimental.do_not_convert
    def before_step(self, variables: Sequence[tf.Variable]) -> None:
        """Check a step on tables; where the learning rate has changed, catch up at the last one."""
        mine, specs = self._optimizer, self._optimizer._specs
        for variable in variables:
            spec = specs.get(variable.ref())
            if spec is None or spec.access.catch_up is None:
                raise ValueError(
                    "update='deferred' requires tables that catch up before they are read. "
                    f"Received: a gradient for {variable.name!r}. Train a model with "
                    "FusedEmbeddings by CowClipOptimizer.for_model, or use update='exact'"
                )
        absent = self._last_steps.keys() - {variable.ref() for variable in variables}
        names = [spec.name for key, spec in specs.items() if key in absent]
        if names:
            raise ValueError(
                "update='deferred' requires a gradient for every table in every step. Received: "
                f"none for {', '.join(names)}, which had one before. Use update='exact' to "
                "freeze a table during training, or to train one task at a time"
            )
        rate = tf.cast(mine._decayed_lr(tf.float32), tf.float32)
        is_stable = rate * mine.l2 <= STABLE * mine.epsilon
        check = tf.debugging.Assert(is_stable, [f"{UNSTABLE} Received: learning_rate", rate])
        with tf.control_dependencies([] if check is None else [check]):
            tf.cond(tf.not_equal(rate, self._rate), self.catch_up, lambda: None)
            self._rate.assign(rate)

    def after_step(self, variable: tf.Variable, rows: tf.Tensor) -> tf.Operation:
        """Mark a gradient's rows as up to date after this step."""
        now = tf.fill([tf.size(rows), 1], tf.cast(self._optimizer.iterations + 1, tf.float32))
        last_step = self._last_steps[variable.ref()]
        return self._optimizer._resource_scatter_update(last_step, rows, now)


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
