"""`update="deferred"`: rows that are absent from a batch are updated when they are read next.

What a step does to an absent row depends on that row only. So each row stores the number of the
last step that was applied to it. Before a row is read, the steps since then are applied at once
(`catch_up.py`). Until then the row is *pending*.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from merlin_cowclip.plugins._tensorflow import not_recorded, tf
from merlin_cowclip.plugins.optimizers.catch_up import AdamConstants, Rates, catch_up
from merlin_cowclip.plugins.optimizers.deferrable import (
    check_deferrable,
    stability_rule,
    stable_limit,
)
from merlin_cowclip.plugins.row_ops import beside, unique_rows

MOST_STEPS = 2**24  # float32 holds their numbers
TILE_ELEMENTS, TILE_ROWS_ON_GPU = 8_192, 65_536  # rows that are caught up by one kernel call
CHUNK_ELEMENTS = 2**21  # of a table that is caught up as a whole
_NO_RATE = -1.0  # before the first step

Bar = Callable[[int], AbstractContextManager[Any]]
"""Of a number of rows: a context whose `update(n)` reports n more of them, such as `tqdm`."""
Write = Callable[[tf.Variable, tf.Tensor, tf.Tensor], Any]
"""Sets rows of a variable: the variable, n row numbers, n×d values."""

_bar: contextvars.ContextVar[Bar | None] = contextvars.ContextVar("bar", default=None)


@contextlib.contextmanager
def catch_up_progress(bar: Bar) -> Iterator[None]:
    """Within it, eager calls that catch up whole tables show a bar for each."""
    token = _bar.set(bar)
    try:
        yield
    finally:
        _bar.reset(token)


class DeferredTable(NamedTuple):
    """A table, and the steps that its pending rows have missed."""

    rows: tf.Variable  # V×d
    m: tf.Variable
    v: tf.Variable
    last_step: tf.Variable  # V×1, float32 (GPUs have few kernels for integers)
    step: tf.Tensor  # the optimizer's last step, int32
    rate: tf.Tensor  # η of all missed steps
    adam: AdamConstants
    write: Write


class DeferredRows:
    """The state of deferred updates in a `CowClipAdam`, and when rows catch up.

    In addition to Adam's moments, `last_step` of each row of each table, and the learning rate of
    all steps that pending rows have missed.

    Args:
      optimizer: the `CowClipAdam` that holds it.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._last_steps: dict[Any, tf.Variable] = {}
        self._rate: Any = None  # a variable
        self._places: dict[Any, int] = {}

    def check(self, learning_rate: Any) -> None:
        """Refuse the optimizer's hyperparameters as `check_deferrable` does."""
        if isinstance(learning_rate, tf.Variable):
            learning_rate = float(tf.keras.backend.get_value(learning_rate))
        mine, adam = self._optimizer, self._constants()
        check_deferrable(
            learning_rate, clip=mine.clip, clip_ratio=mine.clip_ratio, **adam._asdict()
        )

    def check_constant(self, name: str, value: Any) -> None:
        """Refuse a new value of a setting that missed steps depend on.

        Raises:
          ValueError: training has begun.
        """
        if self._last_steps:
            raise ValueError(
                f"{name} cannot be changed after the first step with update='deferred'. Received: "
                f"{value!r}. Set it before, or use update='exact'"
            )

    def bind(self, places: dict[Any, int]) -> None:
        """Number the model's tables, by variable; a table that is bound anew has no pending rows.

        (It has missed only steps of another model.)
        """
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
            self._rate = self._weight("deferred_rate", (), _NO_RATE)
        for variable in variables:
            if variable.ref() not in self._last_steps:
                # Not a slot: Keras loads slots only in the variable's shape.
                name = f"last_step_{self._place(variable)}"
                step = float(tf.keras.backend.get_value(self._optimizer.iterations))
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
        """Apply missed steps to rows of a table that are about to be read.

        Args:
          variable: the table's.
          rows: row numbers of any shape, with repeats.
        """
        if variable.ref() not in self._last_steps:
            specs = self._optimizer._specs.values()
            trained = [spec.variable for spec in specs if spec.layer.trainable]
            if tf.executing_eagerly() or all(one is not variable for one in trained):
                return  # not trained yet
            with tf.init_scope():
                self._optimizer._create_all_weights(self.in_order(trained))
        with not_recorded(), beside(variable) as on_cpu:
            flat = tf.reshape(tf.cast(rows, tf.int64), [-1])
            distinct = unique_rows(flat, variable.shape[0], on_cpu).rows
            catch_up_rows(self._table(variable), distinct)

    @tf.autograph.experimental.do_not_convert
    def catch_up_updated(self, variable: tf.Variable, rows: tf.Tensor) -> None:
        """As `catch_up_rows`, of a gradient's rows: pending if a step was made since their lookup.

        Args:
          variable: the table's.
          rows: unique row numbers.
        """
        table = self._table(variable)
        late = tf.reduce_any(tf.gather(table.last_step, rows) < tf.cast(table.step, tf.float32))
        tf.cond(late, lambda: catch_up_rows(table, rows), lambda: None)

    @tf.autograph.experimental.do_not_convert
    def catch_up(self) -> None:
        """Apply missed steps to all rows of the model's tables."""
        for spec in self._optimizer._specs.values():
            if spec.variable.ref() in self._last_steps:
                with not_recorded(), beside(spec.variable):
                    catch_up_table(self._table(spec.variable))

    def _table(self, variable: tf.Variable) -> DeferredTable:
        mine, last_step = self._optimizer, self._last_steps[variable.ref()]
        m, v = (mine.get_slot(variable, name) for name in ("m", "v"))
        step = tf.cast(mine.iterations, tf.int32)
        write = mine._resource_scatter_update
        return DeferredTable(variable, m, v, last_step, step, self._rate, self._constants(), write)

    def _constants(self) -> AdamConstants:
        mine = self._optimizer
        beta_1, beta_2 = (
            float(mine._serialize_hyperparameter(name)) for name in ("beta_1", "beta_2")
        )
        return AdamConstants(beta_1, beta_2, mine.epsilon, mine.l2)

    @tf.autograph.experimental.do_not_convert
    def before_step(self, variables: Sequence[tf.Variable]) -> None:
        """Check a step; where the learning rate has changed, catch up at the one before.

        Args:
          variables: the tables that have a gradient.

        Raises:
          ValueError: a table is read without catching up first, or a table has no gradient.
          tf.errors.InvalidArgumentError: the learning rate is too high, or the step's number.
        """
        specs = self._optimizer._specs
        for variable in variables:
            spec = specs.get(variable.ref())
            if spec is None or not spec.access.is_used or spec.access.catch_up is None:
                raise ValueError(
                    "update='deferred' requires tables that catch up before they are read. "
                    f"Received: a gradient for {variable.name!r}, looked up without. Train "
                    "a model with FusedEmbeddings by CowClipOptimizer.for_model, or use "
                    "update='exact'"
                )
        given = {variable.ref() for variable in variables}
        missing = [
            spec.name for key, spec in specs.items() if key in self._last_steps.keys() - given
        ]
        if missing:
            raise ValueError(
                "update='deferred' requires a gradient for every table in every step. Received: "
                f"none for {', '.join(missing)}, which had one before. Use update='exact' to "
                "freeze a table during training, or to train one task at a time"
            )
        rate = tf.cast(self._optimizer._decayed_lr(tf.float32), tf.float32)
        too_many = self._optimizer.iterations >= MOST_STEPS
        is_new = tf.not_equal(rate, self._rate)
        # Waits for no table, so that a step that is refused changes nothing.
        checked = tf.cond(
            is_new | too_many, lambda: self._checked(rate, too_many), lambda: tf.identity(rate)
        )
        with tf.control_dependencies([checked]):
            tf.cond(is_new, self.catch_up, lambda: None)
            self._rate.assign(checked)

    def _checked(self, rate: tf.Tensor, too_many: tf.Tensor) -> tf.Tensor:
        l2, limit = (
            self._optimizer.l2,
            stable_limit(self._constants().beta_1, self._optimizer.epsilon),
        )
        received = [f"{stability_rule(limit)} Received: {l2:g} *", rate]
        checks = [
            tf.debugging.Assert(rate * l2 <= limit, received),
            tf.debugging.Assert(~too_many, [f"update='deferred' supports {MOST_STEPS} steps."]),
        ]
        with tf.control_dependencies([check for check in checks if check is not None]):
            return tf.identity(rate)

    def after_step(self, variable: tf.Variable, rows: tf.Tensor) -> tf.Operation:
        """Mark the rows of a gradient as up to date after the step that is being made."""
        step = tf.cast(self._optimizer.iterations + 1, tf.float32)
        last_step = self._last_steps[variable.ref()]
        return self._optimizer._resource_scatter_update(
            last_step, rows, tf.fill([tf.size(rows), 1], step)
        )


def catch_up_rows(table: DeferredTable, rows: tf.Tensor) -> None:
    """Apply all missed steps to n rows, by unique int64 numbers."""
    is_pending = tf.gather(table.last_step, rows)[:, 0] < tf.cast(table.step, tf.float32)
    _catch_up(table, tf.boolean_mask(rows, is_pending), functools.partial(_put, table))


def catch_up_table(table: DeferredTable) -> None:
    """Apply all missed steps to all rows, in chunks."""
    pending = tf.where(table.last_step[:, 0] < tf.cast(table.step, tf.float32))[:, 0]
    number = tf.size(pending, tf.int64)
    chunk = max(CHUNK_ELEMENTS // table.rows.shape[1], 1)
    put: Callable[..., None] = functools.partial(_put, table)
    bar = None
    if tf.executing_eagerly():
        put = tf.function(put, autograph=False, reduce_retracing=True)  # Ctrl-C cannot divide it
        bar = _bar.get()
    with contextlib.nullcontext() if bar is None else bar(int(number)) as progress:

        def body(begin: tf.Tensor) -> tuple[tf.Tensor]:
            end = tf.minimum(begin + chunk, number)
            _catch_up(table, pending[begin:end], put)
            if progress is not None:
                progress.update(int(end - begin))
            return (end,)

        tf.while_loop(lambda begin: begin < number, body, (tf.constant(0, tf.int64),))


def _catch_up(table: DeferredTable, rows: tf.Tensor, put: Callable[..., None]) -> None:
    # Sorted, since a tile takes as long as its longest gap; the longest first.
    rows = tf.gather(rows, tf.argsort(tf.gather(table.last_step, rows)[:, 0]))
    state = [tf.gather(variable, rows) for variable in table[:4]]
    dtype, adam = table.rows.dtype, table.adam
    epsilon, l2 = (tf.constant(x, dtype) for x in (adam.epsilon, adam.l2))
    kernel = _kernel(table.rows.shape[1], dtype, table.rows.device or "", adam.beta_1, adam.beta_2)
    put(rows, *kernel(*state, table.step, table.rate, epsilon, l2))


def _put(table: DeferredTable, rows: tf.Tensor, *new: tf.Tensor) -> None:
    """Write rows and moments, then their `last_step`: all or, if the step fails, none of them."""
    now = tf.fill([tf.size(rows), 1], tf.cast(table.step, tf.float32))
    with tf.control_dependencies([rows, now, *new]):
        written = [
            table.write(variable, rows, x) for variable, x in zip(table[:3], new, strict=True)
        ]
    with tf.control_dependencies([] if tf.executing_eagerly() else written):
        table.write(table.last_step, rows, now)


@functools.lru_cache(maxsize=64)
def _kernel(
    width: int, dtype: tf.DType, device: str, beta_1: float, beta_2: float
) -> Callable[..., Sequence[tf.Tensor]]:
    """The function that applies missed steps to rows, n×d, in tiles; tracing it takes seconds."""
    tile = TILE_ROWS_ON_GPU if "GPU" in device else max(TILE_ELEMENTS // width, 512)

    def work(
        rows: tf.Tensor,
        m: tf.Tensor,
        v: tf.Tensor,
        last: tf.Tensor,
        step: tf.Tensor,
        rate: tf.Tensor,
        epsilon: tf.Tensor,
        l2: tf.Tensor,
    ) -> list[tf.Tensor]:
        adam = AdamConstants(beta_1, beta_2, epsilon, l2)
        with tf.device(device):
            rates = Rates.constant(rate, adam, dtype)
            number = tf.shape(rows)[0]
            filled = [[0, -number % tile], [0, 0]]  # by rows that missed nothing
            tiles = [tf.reshape(tf.pad(x, filled), [-1, tile, width]) for x in (rows, m, v)]
            now = tf.cast(step, last.dtype)
            tiles.append(tf.reshape(tf.pad(last, filled, constant_values=now), [-1, tile]))
            found = tf.map_fn(
                lambda one: _compiled(*one, step, rates, adam),
                tuple(tiles),
                fn_output_signature=(dtype,) * 3,
                parallel_iterations=os.cpu_count() or 1,
            )
            return [tf.reshape(x, [-1, width])[:number] for x in found]

    state = [tf.TensorSpec([None, width], dtype)] * 3
    constants = [tf.TensorSpec([], kind) for kind in (tf.int32, tf.float32, dtype, dtype)]
    signature = [*state, tf.TensorSpec([None, 1], tf.float32), *constants]
    return tf.function(work, input_signature=signature, autograph=False)


# As a few fused kernels: op by op it takes five times as long.
_compiled = tf.function(catch_up, autograph=False, jit_compile=True)
