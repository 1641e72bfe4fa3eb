"""`update="deferred"` in `CowClipAdam`: which rows wait, and when they may do so no longer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from merlin_cowclip.plugins._stack import not_recorded, tf
from merlin_cowclip.plugins.deferrable import check_deferrable, most_stable, what_is_stable
from merlin_cowclip.plugins.deferring import Table, Write, bring_all_up, bring_rows_up
from merlin_cowclip.plugins.row_sums import beside, unique_rows
from merlin_cowclip.plugins.slow_mode import Adam
from merlin_cowclip.plugins.tables import TableSpec
from merlin_cowclip.plugins.taking_over import TAKEN

_MOST_STEPS = 2**24  # whose numbers float32 holds
_TOO_MANY = (
    "update='deferred' must make at most 16777216 steps: rows keep the number of one in float32. "
    "Received: one more. Use update='exact'"
)


class WaitingRows:
    """What an embedding optimizer does for rows that wait for steps they were not in.

    Its state beside Adam's: for each table the steps after which its rows were current, and the
    learning rate of the steps that they wait for.
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
        self._last: dict[Any, tf.Variable] = {}
        self._late_rate: tf.Variable | None = None
        self._has_tables: tf.Variable | None = None
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
            epsilon=self.epsilon,
        )

    def _beta_1(self) -> float:
        return float(self._serialize_hyperparameter("beta_1"))

    def _checked_rate(self, learning_rate: tf.Tensor, is_another: tf.Tensor) -> tf.Tensor:
        """A step's learning rate, once it is known that rows may wait for the step.

        Raises:
          tf.errors.InvalidArgumentError: `check_stable` refuses it, the step's number is beyond
            float32, or another optimizer has taken a table over.
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
            with tf.control_dependencies([unstable, unless(too_many, [_TOO_MANY])]):
                return unless(taken, [TAKEN])

        assert self._has_tables is not None
        too_many, taken = self.iterations >= _MOST_STEPS, self._has_tables < 0.5
        looked_at = tf.logical_or(is_another, tf.logical_or(too_many, taken))
        return tf.cond(looked_at, check, lambda: learning_rate)

    def has_tables(self, it_has: bool) -> None:
        """Whether its tables are looked up for it, or for another optimizer."""
        if self._has_tables is not None:
            self._has_tables.assign(float(it_has))

    def _create_slots(self, var_list: Sequence[tf.Variable]) -> None:
        super()._create_slots(var_list)  # type: ignore[misc]
        if self.update != "deferred":
            return
        self._check_deferred(self._hyper["learning_rate"])  # which may have been set since
        for variable in var_list:
            if not self._waits(variable):
                # No slot: those must have the variable's shape when Keras loads them.
                # By its place: the first step may come to the tables in another order.
                known = list(self._specs)
                place = known.index(variable.ref()) if variable.ref() in known else len(self._last)
                name = f"last_{place}"
                # It missed nothing yet, whatever other tables have been trained.
                made = float(tf.keras.backend.get_value(self.iterations))
                self._last[variable.ref()] = self._own_weight(name, (variable.shape[0], 1), made)
        if self._late_rate is None:
            self._late_rate = self._own_weight("late_rate", (), 0.0)
            self._has_tables = tf.Variable(1.0, trainable=False)  # no state: nothing saves it

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
        if self.__dict__.get("_last"):
            raise ValueError(
                f"{name} cannot be changed once rows wait for steps that were made with another. "
                f"Received: {value!r}. Set it before the first step, or use update='exact'"
            )

    def last_of(self, variable: tf.Variable) -> list[tf.Variable]:
        """The steps after which a table's rows were current, V×1, where rows wait; else nothing."""
        return [self._last[variable.ref()]] if self._waits(variable) else []

    def _waits(self, variable: tf.Variable) -> bool:
        return variable.ref() in self._last

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
            bring_rows_up(self._late(variable), wanted, *self._bringing())

    @tf.autograph.experimental.do_not_convert
    def _bring_late(self, variable: tf.Variable, indices: tf.Tensor) -> None:
        """As `bring_up`, for unique rows that hardly ever are late."""
        table = self._late(variable)
        late = tf.reduce_any(tf.gather(table.last, indices) < tf.cast(table.step, tf.float32))

        def bring() -> None:
            bring_rows_up(table, indices, *self._bringing())

        tf.cond(late, bring, lambda: None)

    @tf.autograph.experimental.do_not_convert
    def catch_up(self) -> None:
        """Make all rows of all tables as the exact mode would have them; else does nothing."""
        if self.update != "deferred":
            return
        for spec in self._specs.values():
            if self._waits(spec.variable):
                with not_recorded(), beside(spec.variable):
                    bring_all_up(self._late(spec.variable), *self._bringing())

    def _late(self, variable: tf.Variable) -> Table:
        m, v = (self.get_slot(variable, name) for name in ("m", "v"))
        return Table(variable, m, v, self._last[variable.ref()], tf.cast(self.iterations, tf.int32))

    def _bringing(self) -> tuple[tf.Variable, Adam, Write]:
        """What rows are brought up with, of whichever table."""
        beta_1, beta_2 = (
            float(self._serialize_hyperparameter(name)) for name in ("beta_1", "beta_2")
        )
        assert self._late_rate is not None
        adam = Adam(beta_1, beta_2, self.epsilon, self.l2)
        return self._late_rate, adam, self._resource_scatter_update

    @tf.autograph.experimental.do_not_convert
    def _before_a_step(self, trained: Sequence[tf.Variable]) -> None:
        """Let rows catch up that cannot wait.

        What they missed until now was at the last step's rate: if it changes, all of them do. A
        table without a gradient has no part in the step that comes.

        Raises:
          ValueError: a table's rows are read without catching up first.
          tf.errors.InvalidArgumentError: a learning rate was set with which rows cannot catch up,
            the step's number is beyond float32, or another optimizer has taken a table over.
        """
        for variable in trained:
            spec = self._specs.get(variable.ref())
            if spec is None or not spec.access.is_used:
                raise ValueError(
                    "update='deferred' needs tables whose rows catch up before they are read. "
                    f"Received: a gradient for {variable.name!r}, looked up without. Train "
                    "a model with FusedEmbeddings by CowClipOptimizer.for_model, or use "
                    "update='exact'"
                )
        assert self._late_rate is not None
        now = tf.cast(self._decayed_lr(tf.float32), tf.float32)
        mine = [reference.deref() for reference in self._last]

        def bring() -> None:
            for variable in mine:
                bring_all_up(self._late(variable), *self._bringing())

        another = tf.not_equal(now, self._late_rate)
        rate = self._checked_rate(now, another)
        with_gradient = {variable.ref() for variable in trained}
        with tf.control_dependencies([rate]):  # a step that is refused changes nothing
            tf.cond(tf.logical_and(self.iterations > 0, another), bring, lambda: None)
            self._late_rate.assign(rate)
            for variable in mine:
                if variable.ref() not in with_gradient:
                    last = self._last[variable.ref()]
                    bring_all_up(self._late(variable), *self._bringing())
                    last.assign(tf.fill(last.shape, tf.cast(self.iterations + 1, tf.float32)))
