"""What an optimizer tells of its steps: statistics by field, and where numbers are not finite."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from merlin_cowclip.plugins._stack import tf
from merlin_cowclip.plugins.finite import FiniteCheck, NotFinite, in_fields
from merlin_cowclip.plugins.ownership import Owned
from merlin_cowclip.plugins.rates import DensePart, LearningRates, TablePart
from merlin_cowclip.plugins.scaling import Hyperparameters, check_number
from merlin_cowclip.plugins.statistics import StepStatistics
from merlin_cowclip.plugins.tables import TableSpec


class Observable:
    """What `CowClipOptimizer` tells of its steps."""

    _statistics: StepStatistics | None = None
    _finite_check: FiniteCheck | None = None
    _stepped: weakref.WeakSet[TableSpec]  # of all models so far: their graphs are kept

    if TYPE_CHECKING:  # what the optimizer has
        hyperparameters: Hyperparameters
        default_optimizer: DensePart
        iterations: tf.Variable

        @property
        def table_specs(self) -> tuple[TableSpec, ...]:
            """Its tables."""

        def owned(self) -> list[Owned]:
            """Its variables."""

        def _untrained(self) -> list[tf.Variable]: ...

        def _table_parts(self) -> Sequence[TablePart]: ...

        def _clipped_ranges(self) -> Mapping[TableSpec, Sequence[bool]]: ...

    def observe(self, frequent_share: float = 1e-3) -> StepStatistics:
        """Keep statistics of every step, by field. What a step does to the weights stays the same.

        Call it before the first step, whose graph is traced then. The same object is returned
        however often it is called, until `bind` gives the optimizer other tables.

        Args:
          frequent_share: an id is frequent in a batch if at least this share of
            `hyperparameters.batch_size` samples hold it, and at least 2; else it is rare. So an id
            is of the same kind in small and large batches, chance aside.

        Raises:
          ValueError: a share outside (0, 1], or another one than before; a step on these tables
            was made already; or no model is bound.
        """
        share = check_number("frequent_share", frequent_share, positive=True)
        if share > 1:
            raise ValueError(
                f"frequent_share must be at most 1. Received: frequent_share={frequent_share!r}"
            )
        frequent_from = max(2.0, share * self.hyperparameters.batch_size)
        if self._statistics is None:
            if not self._stepped.isdisjoint(self.table_specs):
                raise ValueError(
                    "Steps must be observed from the first one on, since its graph is kept. "
                    "Received: observe() after a step. Call it right after "
                    "CowClipOptimizer.for_model."
                )
            self._observe_by(StepStatistics(self._clipped_ranges(), frequent_from))
        assert self._statistics is not None
        if self._statistics.frequent_from != frequent_from:
            raise ValueError(
                "frequent_share must be the same in every call of observe(). Received: "
                f"frequent_share={frequent_share!r} after another one"
            )
        return self._statistics

    def _observe_on(self, specs: Sequence[TableSpec]) -> None:
        """Go on with the statistics where they are of these tables; else end them."""
        if self._statistics is not None and not self._statistics.are_of(specs):
            self._statistics.end()
            self._observe_by(None)

    def _observe_by(self, statistics: StepStatistics | None) -> None:
        self._statistics = statistics
        for part in self._table_parts():
            part.observe(statistics)

    def learning_rates(self) -> LearningRates:
        """The learning rates that the last step used, with warm-up, schedules and what was set.

        What was set since that step counts as set before it. Where loss scaling has left out every
        step so far, those that the first one to be made will use.

        Raises:
          ValueError: there was no step yet.
        """
        if not int(self.iterations):
            raise ValueError(
                "learning_rates() tells what the last step used. Received: no step yet. Call it "
                "after one; optimizer.summary() tells what is set."
            )
        parts = self._table_parts()
        # A part whose tables are frozen stays behind, at a rate that no step has any more.
        stepped = [part for part in parts if int(part.iterations)] or parts
        tables = next((part for part in stepped if part.is_trained), stepped[0])
        return LearningRates(self.default_optimizer.last_rate(), tables.last_rate())

    def not_finite(self) -> list[NotFinite]:
        """Where NaN or infinite numbers are: by table and field, or by dense weight.

        Of tables, where steps are observed (see `observe`): whether a row of any batch since the
        first had such a gradient, or such weights. Of dense weights, what they are now, and of
        those that no optimizer trains as well: moving means, frozen layers. It costs little, but
        waits for the steps under way; so call it every few steps, not after each.

        Raises:
          ValueError: the model is not built yet, or none is bound.
        """
        tables = {spec.variable.ref() for spec in self.table_specs if spec.layer.built}
        weights = [*(one.variable for one in self.owned()), *self._untrained()]
        dense = [v for v in weights if v.ref() not in tables and v.dtype.is_floating]
        # Layers may be frozen, and trained again, since the last call.
        if self._finite_check is None or not self._finite_check.is_of(dense):
            self._finite_check = FiniteCheck(dense)
        observed = [] if self._statistics is None else self._statistics.total()
        return in_fields(observed) + self._finite_check()
