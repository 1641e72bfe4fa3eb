"""`update="deferred"` in `CowClipAdam`: which rows wait, and when they may do so no longer."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from merlin_cowclip.plugins._stack import not_recorded, tf
from merlin_cowclip.plugins.deferrable import check_deferrable, most_stable, what_is_stable
from merlin_cowclip.plugins.deferring import Table, Write, bring_all_up, bring_rows_up
from merlin_cowclip.plugins.row_sums import beside, unique_rows
from merlin_cowclip.plugins.slow_mode import Adam
from merlin_cowclip.plugins.tables import TableSpec

_MOST_STEPS = 2**24  # whose numbers float32 holds
_TOO_MANY = (
    "update='deferred' must make at most 16777216 steps: rows keep the number of one in float32. "
    "Received: one more. Use update='exact'"
)


_NO_STEP = -1.0  # as a rate: of a table that took part in none


class Waiting(NamedTuple):
    """What a table's rows wait for. Its own, so that a step need know of no other table."""

    last: tf.Variable  # V×1: the steps after which its rows were current
    step: tf.Variable  # the last one that it took part in, as all before it since `last`
    rate: tf.Variable  # the learning rate of the steps that rows wait for


class WaitingRows:
    """What an embedding optimizer does for rows that wait for steps they were not in.

    Its state beside Adam's: for each table what its rows wait for. A table that had no part in a
    step, or was not there yet, has its rows catch up and is told the number when it has part again.
    """

    if TYPE_CHECKING:  # what the optimizer has
        update: str
        l2: float
        clip: str | None
        clip_ratio: float
        epsilon: float
        iterations: tf.Variable
        get_slot: Any
        add_weight: Any
        _weights: list[tf.Variable]
        _specs: Mapping[Any, TableSpec]
        _hyper: Mapping[str, Any]
        _get_hyper: Any
        _decayed_lr: Any
        _create_all_weights: Any
        _serialize_hyperparameter: Any
        _resource_scatter_update: Any

    def _begin_to_wait(self, learning_rate: Any) -> None:
        """Nothing waits yet.

        Raises:
          ValueError: as `_check_deferred`.
        """
        self._waiting: dict[Any, Waiting] = {}
        self._places: Mapping[Any, int] = {}
        if self.update == "deferred":
            self._check_deferred(learning_rate)

    def _check_deferred(self, learning_rate: Any) -> None:
        """Refuse what rows cannot catch up with.

        Raises:
          ValueError: such values.
        """
        if isinstance(learning_rate, tf.Variable):
            learning_rate = float(tf.keras.backend.get_value(learning_rate))
        check_deferrable(
            learning_rate,
            l2=self.l2,
            clip=self.clip,
            clip_ratio=self.clip_ratio,
            beta_1=self._beta_1(),
            beta_2=float(self._serialize_hyperparameter("beta_2")),
            epsilon=self.epsilon,
        )

    def _beta_1(self) -> float:
        return float(self._serialize_hyperparameter("beta_1"))

    def _checked_rate(self, learning_rate: tf.Tensor, is_another: tf.Tensor) -> tf.Tensor:
        """A step's learning rate, once it is known that rows may wait for the step.

        Raises:
          tf.errors.InvalidArgumentError: `check_stable` refuses it, or the step's number is beyond
            float32.
        """
        most = most_stable(self._beta_1(), self.epsilon)
        rule, remedy = what_is_stable(most)
        data = [rule, learning_rate, f"* {self.l2:g}. {remedy}, or learning rate"]

        def unless(refused: tf.Tensor, data: list[Any]) -> tf.Tensor:
            check = tf.raw_ops.Assert(condition=tf.logical_not(refused), data=data)
            with tf.control_dependencies([] if check is None else [check]):
                return tf.identity(learning_rate)

        def check() -> tf.Tensor:
            unstable = unless(learning_rate * self.l2 > most, data)
            with tf.control_dependencies([unstable]):
                return unless(too_many, [_TOO_MANY])

        too_many = self.iterations >= _MOST_STEPS
        return tf.cond(tf.logical_or(is_another, too_many), check, lambda: learning_rate)

    def _create_slots(self, var_list: Sequence[tf.Variable]) -> None:
        super()._create_slots(var_list)  # type: ignore[misc]
        if self.update != "deferred":
            return
        self._check_deferred(self._hyper["learning_rate"])  # which may have been set since
        new = [variable for variable in var_list if not self._waits(variable)]
        for variable in new:
            # No slots: those must have the variable's shape when Keras loads them.
            place = self._place_of(variable)
            # It missed nothing yet, whatever other tables have been trained.
            made = float(tf.keras.backend.get_value(self.iterations))
            self._waiting[variable.ref()] = Waiting(
                self._own_weight(f"last_{place}", (variable.shape[0], 1), made),
                self._own_weight(f"step_{place}", (), made),
                self._own_weight(f"late_rate_{place}", (), _NO_STEP),
            )
        if new:
            self._order_weights()

    def _place_of(self, variable: tf.Variable) -> int:
        """Among the model's tables: the first step may come to them in another order."""
        return self._places.get(self._specs.get(variable.ref()), len(self._waiting))

    def _order_weights(self) -> None:
        """By the tables' places, whichever was looked up first: Keras sets weights by theirs."""
        tables = sorted((table.deref() for table in self._waiting), key=self._place_of)
        in_order = [
            weight
            for table in tables
            for weight in (
                *(self.get_slot(table, name) for name in ("m", "v")),
                *self.waiting_of(table),
            )
        ]
        known = {weight.ref() for weight in in_order}
        self._weights = [w for w in self._weights if w.ref() not in known] + in_order

    def _own_weight(self, name: str, shape: tuple[int, ...], value: float) -> tf.Variable:
        initializer = tf.keras.initializers.Constant(value)
        weight = self.add_weight(name, shape, tf.float32, initializer, trainable=False)
        self._weights.append(weight)
        return weight

    def _set_hyper(self, name: str, value: Any) -> None:
        if name in ("beta_1", "beta_2"):
            self._check_no_row_waits(name, value)
        super()._set_hyper(name, value)  # type: ignore[misc]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("l2", "epsilon"):
            self._check_no_row_waits(name, value)
        super().__setattr__(name, value)

    def _check_no_row_waits(self, name: str, value: Any) -> None:
        if self.__dict__.get("_waiting"):
            raise ValueError(
                f"{name} cannot be changed once rows wait for steps that were made with another. "
                f"Received: {value!r}. Set it before the first step, or use update='exact'"
            )

    def waiting_of(self, variable: tf.Variable) -> Sequence[tf.Variable]:
        """What a table's rows wait for, as `Waiting`; nothing in the other modes."""
        return self._waiting.get(variable.ref(), ())

    def _waits(self, variable: tf.Variable) -> bool:
        return variable.ref() in self._waiting

    @tf.autograph.experimental.do_not_convert
    def bring_up(self, variable: tf.Variable, rows: tf.Tensor) -> None:
        """Make rows of a table as the exact mode would have them; those of a batch to be read.

        Args:
          variable: the table's.
          rows: row numbers of any shape, with repeats.
        """
        if not self._waits(variable):
            spec = self._specs.get(variable.ref())
            if tf.executing_eagerly() or (spec is not None and not spec.layer.trainable):
                return  # not trained yet
            with tf.init_scope():
                self._create_all_weights([variable])
        with not_recorded(), beside(variable) as on_cpu:
            flat = tf.reshape(tf.cast(rows, tf.int64), [-1])
            wanted = unique_rows(flat, variable.shape[0], on_cpu).rows
            bring_rows_up(self._late(variable), wanted, *self._bringing(variable))

    @tf.autograph.experimental.do_not_convert
    def _bring_late(self, variable: tf.Variable, indices: tf.Tensor) -> None:
        """As `bring_up`, for unique rows that hardly ever are late."""
        table = self._late(variable)
        late = tf.reduce_any(tf.gather(table.last, indices) < tf.cast(table.step, tf.float32))

        def bring() -> None:
            bring_rows_up(table, indices, *self._bringing(variable))

        tf.cond(late, bring, lambda: None)

    @tf.autograph.experimental.do_not_convert
    def catch_up(self) -> None:
        """Make all rows of all tables as the exact mode would have them; else does nothing."""
        if self.update != "deferred":
            return
        for spec in self._specs.values():
            if self._waits(spec.variable) and not self._is_current(spec.variable):
                with not_recorded(), beside(spec.variable):
                    bring_all_up(self._late(spec.variable), *self._bringing(spec.variable))

    def _is_current(self, variable: tf.Variable) -> bool:
        """Whether no row of a table is late, where that can be told: a pass over less."""
        last, step, _ = self._waiting[variable.ref()]
        return tf.executing_eagerly() and not bool(tf.reduce_any(last < step))

    def _late(self, variable: tf.Variable) -> Table:
        m, v = (self.get_slot(variable, name) for name in ("m", "v"))
        waiting = self._waiting[variable.ref()]
        return Table(variable, m, v, waiting.last, tf.cast(waiting.step, tf.int32))

    def _bringing(self, variable: tf.Variable) -> tuple[tf.Variable, Adam, Write]:
        """What a table's rows are brought up with."""
        beta_1, beta_2 = (
            float(self._serialize_hyperparameter(name)) for name in ("beta_1", "beta_2")
        )
        adam = Adam(beta_1, beta_2, self.epsilon, self.l2)
        return self._waiting[variable.ref()].rate, adam, self._resource_scatter_update

    @tf.autograph.experimental.do_not_convert
    def _before_a_step(self, trained: Sequence[tf.Variable]) -> None:
        """Let rows of these tables catch up that cannot wait.

        What they missed until now was at the last step's rate, if it changes; and in steps that
        follow each other, if their tables had no part in some.

        Raises:
          ValueError: a table's rows are read without catching up first.
          tf.errors.InvalidArgumentError: a learning rate was set with which rows cannot catch up,
            or the step's number is beyond float32.
        """
        for variable in trained:
            spec = self._specs.get(variable.ref())
            if spec is None or not spec.access.is_used or spec.access.bring_up is None:
                raise ValueError(
                    "update='deferred' needs tables whose rows catch up before they are read. "
                    f"Received: a gradient for {variable.name!r}, looked up without. Train "
                    "a model with FusedEmbeddings by CowClipOptimizer.for_model, or use "
                    "update='exact'"
                )
        now = tf.cast(self._decayed_lr(tf.float32), tf.float32)
        made = tf.cast(self.iterations, tf.float32)
        rates = [self._waiting[variable.ref()].rate for variable in trained]
        others = [tf.not_equal(now, rate) for rate in rates]
        checked = self._checked_rate(now, functools.reduce(tf.logical_or, others))
        with tf.control_dependencies([checked]):  # a step that is refused changes nothing
            for variable, is_another in zip(trained, others, strict=True):
                waiting = self._waiting[variable.ref()]
                had_no_part = tf.not_equal(waiting.step, made)

                def bring(variable: tf.Variable = variable, waiting: Waiting = waiting) -> None:
                    bring_all_up(self._late(variable), *self._bringing(variable))
                    waiting.last.assign(tf.fill(waiting.last.shape, made))
                    waiting.step.assign(made)

                is_another = tf.logical_and(is_another, waiting.rate >= 0.0)  # nothing waits yet
                tf.cond(tf.logical_or(is_another, had_no_part), bring, lambda: None)
                waiting.rate.assign(checked)

    def _after_a_step(self, variable: tf.Variable, indices: tf.Tensor) -> list[Any]:
        """A table's rows are current after a step that they were in; the others wait for it."""
        after = tf.cast(self.iterations + 1, tf.float32)
        last, step, _ = self._waiting[variable.ref()]
        now = tf.fill([tf.size(indices), 1], after)
        return [self._resource_scatter_update(last, indices, now), step.assign(after)]
