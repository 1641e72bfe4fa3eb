"""What the steps do to ids, by field: how many there are, how many are clipped, how long rows are.

Sums over rows and steps, kept in small variables on the device; nothing here changes an update.
`CowClipOptimizer.observe` switches it on.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass

import numpy as np

from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.plugins.clipping import RowNorms, widened
from merlin_cowclip.plugins.distributed.horovod import all_gather
from merlin_cowclip.plugins.embeddings.tables import TableSpec, distinct_names
from merlin_cowclip.plugins.row_ops import sum_columns

_COUNTED, _SUMMED = 4, 2  # of `RowStatistics`: integers, then norms
_LOWEST, _BINS = -40, 48  # of gradient norms, by powers of two: from 2^-40, 1e-12, to 2^8
_SUMS = (  # of a field: the steps, then of rare and of frequent ids
    ("counts", 1 + 2 * _COUNTED, tf.int64),
    ("norms", 2 * _SUMMED, tf.float64),
    ("bins", 2 * _BINS, tf.int64),
)


@dataclass(frozen=True)
class RowStatistics:
    """Sums over some rows of some steps, and what follows from them.

    A row counts once in every step whose batch holds its id.

    Attributes:
      rows: how many; the row of padding, which no sample holds, is none of them.
      occurrences: samples that hold them, the counts of the clip; of a table that is not clipped
        and whose lookups are not recorded, how often the gradient has them, padding among them.
      clipped_rows: those whose gradient the clip made shorter.
      clipped_occurrences: samples that hold these.
      gradient_norms: sum of the norms of their gradients, with L2, before the clip. It is NaN or
        infinite once a gradient of one of them was.
      weight_norms: sum of the norms of their weights before the update; NaN or infinite likewise.
    """

    rows: int
    occurrences: int
    clipped_rows: int
    clipped_occurrences: int
    gradient_norms: float
    weight_norms: float

    def __add__(self, other: RowStatistics) -> RowStatistics:
        """The sums over the rows of both."""
        return RowStatistics(*map(operator.add, astuple(self), astuple(other)))

    @property
    def gradient_norm(self) -> float | None:
        """Mean norm of a row's gradient; `None` where there is no row."""
        return _quotient(self.gradient_norms, self.rows)

    @property
    def weight_norm(self) -> float | None:
        """Mean norm of a row's weights; `None` where there is no row."""
        return _quotient(self.weight_norms, self.rows)

    @property
    def share_of_rows_clipped(self) -> float | None:
        """From 0 to 1; `None` where there is no row."""
        return _quotient(self.clipped_rows, self.rows)

    @property
    def share_of_occurrences_clipped(self) -> float | None:
        """From 0 to 1; `None` where there is no row."""
        return _quotient(self.clipped_occurrences, self.occurrences)


@dataclass(frozen=True)
class NormBin:
    """Rows whose gradient norms, with L2 and before the clip, lie between two powers of two.

    The lowest bin holds those below it as well, and what is NaN; the highest one those above it.

    Attributes:
      norm: the lower end.
      rare: rows of rare ids; a row counts once in every step whose batch holds its id.
      frequent: rows of frequent ids.
    """

    norm: float
    rare: int
    frequent: int


def _quotient(total: float, number: int) -> float | None:
    return total / number if number else None


@dataclass(frozen=True)
class FieldStatistics:
    """What some steps did to the ids of one field, or of fields that share rows.

    Attributes:
      table: the table's name; of several tables of one name, with a number from the second on.
      field: the field's name; those of fields that share rows, with a "+" between.
      width: d of the table.
      is_clipped: whether the clip applies to it.
      steps: updates of the table.
      frequent: ids that many samples of the batch hold (see `CowClipOptimizer.observe`).
      rare: all other ids.
    """

    table: str
    field: str
    width: int
    is_clipped: bool
    steps: int
    frequent: RowStatistics
    rare: RowStatistics

    @property
    def all(self) -> RowStatistics:
        """Of frequent and rare ids together."""
        return self.frequent + self.rare


class StepStatistics:
    """Sums of what each step does to the ids of each field.

    Integers are exact; norms are added in float64.

    Args:
      tables: the tables, built or not, and whether the clip applies to each of its fields.
      frequent_from: samples of a batch that must hold an id for it to be a frequent one.
    """

    def __init__(self, tables: Mapping[TableSpec, Sequence[bool]], frequent_from: float) -> None:
        self.frequent_from = frequent_from
        self._tables = dict(tables)
        fields = sum(len(spec.range_names) for spec in tables)
        with tf.init_scope():
            self._sums, self._before = (
                [
                    tf.Variable(
                        tf.zeros([fields, width], dtype),
                        trainable=False,
                        name=f"statistics/{name}{when}",
                    )
                    for name, width, dtype in _SUMS
                ]
                for when in ("", "_before")  # from the beginning, and until `reset`
            )

    @property
    def variables(self) -> list[tf.Variable]:
        """All state, in a fixed order: restored, the sums go on as if nothing had been."""
        return [*self._sums, *self._before]

    def add(
        self,
        norms: RowNorms,
        counts: tf.Tensor,
        lengths: tf.Tensor,
        rows: Sequence[tf.Tensor],
        specs: Sequence[TableSpec],
        on_cpu: bool,
    ) -> None:
        """Add a step.

        Args:
          norms: of U rows, before the clip.
          counts: U, of each how many samples of the batch hold it; 0 where it is none of its ids.
          lengths: U, the gradients' norms after it.
          rows: U×d in all, before the update, by table.
          specs: the tables whose fields `norms.fields` numbers, in their order.
          on_cpu: whether the ops are placed on a CPU; see `row_ops.py`.
        """
        # In float64 also within a step: float32 is exact up to 2^24, and lists in a large batch
        # hold more ids.
        frequent = tf.cast(counts >= tf.constant(self.frequent_from, counts.dtype), tf.int64)
        counts = tf.cast(counts, tf.float64)
        is_held = counts > 0  # not padding, and no id beyond the table: see `adam.py`
        # Not norms.rows: TensorFlow's graph optimizer multiplies by the clip's ratio elsewhere once
        # something else reads them, which changes a last digit of the clip.
        weights = tf.concat([plain_norms(some) for some in rows], axis=0)
        clipped = tf.cast(tf.logical_and(is_held, lengths < norms.gradients), tf.float64)
        zeros = tf.zeros_like(counts)
        columns = [
            tf.cast(is_held, tf.float64),
            counts,
            clipped,
            clipped * counts,
            tf.where(is_held, tf.cast(norms.gradients, tf.float64), zeros),
            tf.where(is_held, tf.cast(weights, tf.float64), zeros),
        ]
        groups = tf.constant(2 * norms.num_fields, tf.int64)
        sums = sum_columns(columns, 2 * norms.fields + frequent, groups, on_cpu)
        shape = [norms.num_fields, 2, _COUNTED + _SUMMED]
        sums = tf.reshape(sums, shape)
        counted = tf.reshape(sums[:, :, :_COUNTED], [norms.num_fields, 2 * _COUNTED])
        steps = tf.ones([norms.num_fields, 1], tf.int64)
        counted = tf.concat([steps, tf.cast(counted, tf.int64)], axis=1)
        summed = tf.reshape(sums[:, :, _COUNTED:], [norms.num_fields, 2 * _SUMMED])
        bins = (2 * norms.fields + frequent) * _BINS + _bin(norms.gradients)
        rows = sum_columns([columns[0]], bins, groups * _BINS, on_cpu)
        binned = tf.cast(tf.reshape(rows, [norms.num_fields, 2 * _BINS]), tf.int64)
        places = self._places(specs)
        for total, of_step in zip(self._sums, (counted, summed, binned), strict=True):
            total.assign_add(_placed(of_step, places), read_value=False)

    def _places(self, specs: Sequence[TableSpec]) -> list[int]:
        """For each field of all tables, its number from 1 on among those of `specs`, or 0."""
        first, after = {}, 1
        for spec in specs:
            first[spec] = after
            after += len(spec.range_names)
        return [
            first[spec] + i if spec in first else 0
            for spec in self._tables
            for i in range(len(spec.range_names))
        ]

    def read(self) -> list[FieldStatistics]:
        """The sums since the last `reset`, one item per table and field, in the model's order.

        With sharded tables call it, `total` and `gradient_norms` on all ranks, and not within
        `whole_tables`.
        """
        counts, norms, _ = self._since_reset()
        return list(self._fields(counts, norms))

    def _since_reset(self) -> list[np.ndarray]:
        pairs = zip(self._sums, self._before, strict=True)
        with np.errstate(invalid="ignore"):  # what is infinite in both
            return [total.numpy() - before.numpy() for total, before in pairs]

    def gradient_norms(self) -> list[NormBin]:
        """How long the gradients of rows were since the last `reset` (Figure 4 of the paper).

        Of tables of width 2 and more, where there are any; the bins from the first that holds a row
        to the last.
        """
        widths = [spec.width for spec in self._tables for _ in spec.range_names]
        chosen = [width > 1 or max(widths) == 1 for width in widths]
        bins = self._of_all_ranks(self._since_reset()[2])[chosen]
        rare, frequent = bins.reshape(-1, 2, _BINS).sum(axis=0).tolist()
        found = [
            NormBin(2.0 ** (_LOWEST + i), *rows)
            for i, rows in enumerate(zip(rare, frequent, strict=True))
        ]
        held = [i for i, one in enumerate(found) if one.rare + one.frequent]
        return found[held[0] : held[-1] + 1] if held else []

    def total(self) -> list[FieldStatistics]:
        """The sums since the first step."""
        counts, norms, _ = self._sums
        return list(self._fields(counts.numpy(), norms.numpy()))

    def reset(self) -> None:
        """Let `read` start anew; `total` goes on."""
        for total, before in zip(self._sums, self._before, strict=True):
            before.assign(total)

    def _of_all_ranks(self, values: np.ndarray) -> np.ndarray:
        """Sums by field, those of tables in shards over all ranks."""
        specs = [spec for spec in self._tables for _ in spec.range_names]
        sharded = np.array([[spec.shard is not None] for spec in specs])
        if not sharded.any():
            return values
        whole = all_gather(values[np.newaxis]).sum(axis=0)
        return np.where(sharded, whole, values)

    def _fields(self, counts: np.ndarray, norms: np.ndarray) -> Iterator[FieldStatistics]:
        counts[:, 1:] = self._of_all_ranks(counts[:, 1:])
        norms = self._of_all_ranks(norms)
        names = distinct_names(self._tables)
        fields = [
            (names[spec], field, spec.width, clipped)
            for spec, by_range in self._tables.items()
            for field, clipped in zip(spec.range_names, by_range, strict=True)
        ]
        for field, counted, lengths in zip(fields, counts.tolist(), norms.tolist(), strict=True):
            steps, *numbers = counted
            rare = RowStatistics(*numbers[:_COUNTED], *lengths[:_SUMMED])
            frequent = RowStatistics(*numbers[_COUNTED:], *lengths[_SUMMED:])
            yield FieldStatistics(*field, steps, frequent, rare)


def plain_norms(rows: tf.Tensor) -> tf.Tensor:
    """Norms of rows, U×d → U, float32; infinite from 1e19 on, where Adam's squares are too."""
    norms = tf.sqrt(tf.reduce_sum(tf.square(widened(rows)), axis=-1))
    return tf.cast(norms, tf.float32)


def _bin(norms: tf.Tensor) -> tf.Tensor:
    """The number of each norm's bin, int64."""
    norms = tf.cast(norms, tf.float64)
    lowest, highest = (tf.constant(2.0**power, tf.float64) for power in (_LOWEST, _LOWEST + _BINS))
    inside = tf.minimum(tf.where(norms >= lowest, norms, lowest), 0.75 * highest)  # NaN: the lowest
    return tf.cast(tf.floor(tf.math.log(inside) / math.log(2.0)), tf.int64) - _LOWEST


def _placed(values: tf.Tensor, places: Sequence[int]) -> tf.Tensor:
    """The rows of `values`, counted from 1, at `places`; zeros where that is 0."""
    zeros = tf.zeros([1, values.shape[1]], values.dtype)
    return tf.gather(tf.concat([zeros, values], axis=0), tf.constant(places, tf.int64))
