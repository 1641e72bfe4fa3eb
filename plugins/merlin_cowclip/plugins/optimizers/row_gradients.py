"""A table's gradient summed per row and counted, of one rank or of all: Algorithm 1, line 7."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.plugins.clipping import CLIP_RULES, widened
from merlin_cowclip.plugins.distributed.gradients import ReducedRows, RowSums, all_gather_rows
from merlin_cowclip.plugins.distributed.sharding import Shard, join_shards
from merlin_cowclip.plugins.embeddings.counting import (
    Counts,
    NotRecordedError,
    count_all_rows,
    count_repeats,
    count_samples,
    repeats_per_row,
)
from merlin_cowclip.plugins.embeddings.discovery import check_regularizer
from merlin_cowclip.plugins.embeddings.tables import TableSpec
from merlin_cowclip.plugins.monitoring.statistics import StepStatistics
from merlin_cowclip.plugins.optimizers.deferred import DeferredRows
from merlin_cowclip.plugins.row_ops import beside, sum_per_row

T = TypeVar("T")


class SumsRows:
    """What an embedding optimizer knows of a batch's rows before L2 and the clip."""

    if TYPE_CHECKING:  # what the optimizer has
        clip: str | None
        update: str
        _specs: Mapping[Any, TableSpec]
        _statistics: StepStatistics | None
        deferred: DeferredRows | None

    def join(self, grads_and_vars: Iterable[tuple[Any, tf.Variable]]) -> list[Any]:
        """Reduce tables' gradients of this share of the batch over all ranks (`gradients.py`).

        Args:
          grads_and_vars: of its mean loss.

        Raises:
          ValueError: the ids are not recorded.
        """
        shares, variables = [], []
        for gradient, variable in grads_and_vars:
            with beside(variable) as on_cpu:
                shares.append(self._summed(gradient, variable, on_cpu))
            variables.append(variable)
        return list(zip(self._joined(shares, variables), variables, strict=True))

    def _joined(
        self, shares: Sequence[RowSums], variables: Sequence[tf.Variable]
    ) -> list[ReducedRows]:
        """Of all ranks; of a table in shards, the rows that this one has."""
        shards = [self.shard_of(variable) for variable in variables]
        found: dict[int, ReducedRows] = {}
        whole = [i for i, shard in enumerate(shards) if shard is None]
        everywhere = all_gather_rows([shares[i] for i in whole], [variables[i] for i in whole])
        found.update(zip(whole, everywhere, strict=True))
        places = [(i, shard) for i, shard in enumerate(shards) if shard is not None]
        mine = join_shards(
            [shares[i] for i, _ in places],
            [variables[i] for i, _ in places],
            [shard for _, shard in places],
        )
        found.update((i, one) for (i, _), one in zip(places, mine, strict=True))
        return [found[i] for i in range(len(shares))]

    def shard_of(self, variable: tf.Variable) -> Shard | None:
        """Which rows of a table this rank has, where the ranks share them."""
        spec = self._specs.get(variable.ref())
        return None if spec is None else spec.shard

    def _summed(self, gradient: Any, variable: tf.Variable, on_cpu: bool) -> RowSums:
        """A table's gradient summed per row, and how many samples hold the row.

        Dense, every row is one of the batch's.
        """
        spec = self._specs.get(variable.ref())
        if not isinstance(gradient, tf.IndexedSlices):
            return self._all_rows(spec, gradient, variable, on_cpu)
        if spec is None:
            indices, position, counts = self._repeated(variable, gradient.indices, on_cpu)
        else:
            indices, position, counts = self._counted(spec, gradient.indices, on_cpu)
        if self.deferred is not None:
            self.deferred.catch_up_updated(variable, indices)
        summed = sum_per_row(widened(gradient.values), position, tf.size(indices), on_cpu)
        return RowSums(indices, summed, counts)

    def _all_rows(
        self,
        spec: TableSpec | None,
        gradient: tf.Tensor,
        variable: tf.Variable,
        on_cpu: bool,
    ) -> RowSums:
        if spec is None:
            raise ValueError(
                "The gradient of an embedding table must be sparse (tf.IndexedSlices). Received: a "
                f"dense gradient for {variable.name!r}. A regularizer on the table or a layer that "
                "reads the whole table makes it dense: remove the regularizer (l2=… takes its "
                "place), or train a model by CowClipOptimizer.for_model, which knows what was "
                "looked up."
            )
        check_regularizer(spec.name, spec.layer)
        if spec.shard is not None:
            raise ValueError(
                "A table in shards must be read by row. Received: a dense gradient of "
                f"{spec.name!r}, of a layer that reads all of it. Leave sharded=True out."
            )
        if not spec.is_tied:
            raise ValueError(
                f"The gradient of table {spec.name!r} is dense, so its ids cannot be counted. To "
                "accumulate gradients, concatenate their slices (values and indices) in place of a "
                "sum. A custom layer that reads the whole table sets is_tied in its TableSpec."
            )
        if self.update == "deferred":
            raise ValueError(
                "update='deferred' needs tables that are read by row. Received: a dense gradient "
                f"of {spec.name!r}, of a layer that reads all of it. Use update='exact'"
            )
        number = spec.num_rows
        counts = self._from_lookups(
            spec,
            lambda: count_all_rows(spec.recorder, number, on_cpu=on_cpu),
            lambda: tf.zeros([number]),
        )
        indices = tf.range(number, dtype=tf.int64)
        return RowSums(indices, widened(gradient), counts, is_whole=True)

    def _repeated(self, variable: tf.Variable, indices: tf.Tensor, on_cpu: bool) -> Counts:
        num_rows = variable.shape[0]
        if self.clip is None:
            return repeats_per_row(indices, num_rows, on_cpu=on_cpu)
        if hasattr(variable, "key_map"):
            raise ValueError(
                "The gradient of a table of SOK's does not tell how often an id was looked up. "
                f"Received: one of {variable.name!r}. Train it by CowClipSokOptimizer."
            )
        if not CLIP_RULES[self.clip].adaptive:  # whose bounds follow no counts
            return repeats_per_row(indices, num_rows, on_cpu=on_cpu)
        try:
            return count_repeats(indices, num_rows, on_cpu=on_cpu)
        except NotRecordedError as received:
            raise ValueError(
                "A CowClipAdam of its own counts the repeats of a row in the gradient, so ids must "
                f"be looked up once for each sample that holds them. Received: {received}, in "
                f"{variable.name!r}. Train the model by CowClipOptimizer.for_model, which records "
                "them; or call bind_tables."
            ) from None

    def _counted(self, spec: TableSpec, indices: tf.Tensor, on_cpu: bool) -> Counts:
        return self._from_lookups(
            spec,
            lambda: count_samples(
                spec.recorder, indices, spec.num_rows, name=spec.name, on_cpu=on_cpu
            ),
            lambda: repeats_per_row(indices, spec.num_rows, on_cpu=on_cpu),
        )

    def _from_lookups(
        self, spec: TableSpec, samples: Callable[[], T], otherwise: Callable[[], T]
    ) -> T:
        """A table's counts of samples; `otherwise` those that need no lookups, where none clips.

        Raises:
          ValueError: the table is clipped, and its lookups are not recorded.
        """
        if self.clip is not None or self._statistics is not None:
            try:
                return samples()
            except NotRecordedError as received:
                if self.clip is not None:
                    raise _uncounted(spec, received) from None
        spec.recorder.forget()
        return otherwise()


def _uncounted(spec: TableSpec, received: NotRecordedError) -> ValueError:
    return ValueError(
        f"Cannot count the ids of table {spec.name!r}: {received}. Call the table itself within "
        "the training step (not its variable, not in a tf.function of its own), and apply the "
        "gradients in the same function; or do not clip it."
    )
