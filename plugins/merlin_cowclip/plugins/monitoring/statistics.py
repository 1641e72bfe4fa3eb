# SPDX-License-Identifier: Apache-2.0
"""Statistics of steps by field, as sums on the device; and NaN checks."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.plugins.clipping import RowNorms, widened
from merlin_cowclip.plugins.distributed.horovod import all_gather
from merlin_cowclip.plugins.embeddings.tables import TableSpec, distinct_names
from merlin_cowclip.plugins.row_ops import sum_columns

_COUNTED, _SUMMED = 4, 2  # of `RowStatistics`: integers, then norms
_LOWEST, _BINS = -40, 48  # of gradient norms, by powers of two: from 2^-40, 1e-12, to 2^8
_ENDS = np.cumsum([1, *[_COUNTED + _SUMMED] * 2, 2 * _BINS])  # steps; rare, frequent; their bins


@dataclass(frozen=True)
class RowStatistics:
    """Sums over rows of some steps; a row counts once in every step whose batch holds its id."""

    rows: int  # without the row of padding
    occurrences: int  # samples that hold them, the counts of the clip
    clipped_rows: int  # rows whose gradient the clip made shorter
    clipped_occurrences: int  # samples that hold these
    gradient_norms: float  # sum of norms with L2, before the clip; NaN or infinite once one was
    weight_norms: float  # sum of the rows' norms before the update; likewise

    def __add__(self, other: RowStatistics) -> RowStatistics:
        """The sums over the rows of both."""
        return RowStatistics(*map(operator.add, astuple(self), astuple(other)))

    @property
    def gradient_norm(self) -> float | None:
        """Mean norm of a row's gradient; `None` where there is no row."""
        return self.gradient_norms / self.rows if self.rows else None

    @property
    def weight_norm(self) -> float | None:
        """Mean norm of a row's weights; `None` where there is no row."""
        return self.weight_norms / self.rows if self.rows else None

    @property
    def share_of_rows_clipped(self) -> float | None:
        """Of 1; `None` where there is no row."""
        return self.clipped_rows / self.rows if self.rows else None

    @property
    def share_of_occurrences_clipped(self) -> float | None:
        """Of 1; `None` where there is no row."""
        return self.clipped_occurrences / self.occurrences if self.occurrences else None


@dataclass(frozen=True)
class NormBin:
    """Rows whose gradient norms, with L2 and before the clip, lie between two powers of two.

    The lowest bin also holds smaller norms and NaN, the highest one larger norms.
    """

    norm: float  # the lower end
    rare: int  # rows of rare ids, once per step
    frequent: int  # rows of frequent ids


@dataclass(frozen=True)
class FieldStatistics:
    """What some steps did to the ids of one field, or of fields that share rows ("a+b")."""

    table: str
    field: str
    width: int
    is_clipped: bool
    steps: int  # updates of the table
    frequent: RowStatistics  # ids that many samples of a batch hold: `CowClipOptimizer.observe`
    rare: RowStatistics  # all other ids

    @property
    def all(self) -> RowStatistics:
        """Of frequent and rare ids together."""
        return self.frequent + self.rare


class StepStatistics:
    """Sums of what steps do to the ids of each field; frequent: in `frequent_from` samples."""

    def __init__(self, tables: Mapping[TableSpec, Sequence[bool]], frequent_from: float) -> None:
        self.frequent_from = frequent_from
        self._tables = dict(tables)
        fields = sum(len(spec.range_names) for spec in tables)
        with tf.init_scope():  # float64 holds integers to 2^53
            self._sums, self._before = (
                tf.Variable(tf.zeros([fields, _ENDS[-1]], tf.float64), trainable=False, name=name)
                for name in ("statistics/sums", "statistics/before")  # `before`: until `reset`
            )

    @property
    def variables(self) -> list[tf.Variable]:
        """All state, in a fixed order; restored, the sums go on as if nothing had been."""
        return [self._sums, self._before]

    def add(
        self,
        norms: RowNorms,
        counts: tf.Tensor,
        clipped_norms: tf.Tensor,
        rows: Sequence[tf.Tensor],
        specs: Sequence[TableSpec],
        on_cpu: bool,
    ) -> None:
        """Add a step: the norms of U rows before the clip and their `clipped_norms` after it.

        `counts` are 0 for rows of none of the batch's ids; `rows` are by table, as `specs`.
        """
        # In float64 also within a step: float32 is exact up to 2^24.
        frequent = tf.cast(counts >= tf.constant(self.frequent_from, counts.dtype), tf.int64)
        counts = tf.cast(counts, tf.float64)
        is_held = counts > 0  # not padding
        # Not norms.weight_norms: read twice, the graph optimizer would change a last digit.
        weights = tf.concat([plain_norms(some) for some in rows], axis=0)
        held = tf.cast(is_held, tf.float64)
        clipped = tf.cast(tf.logical_and(is_held, clipped_norms < norms.grad_norms), tf.float64)
        columns = [held, counts, clipped, clipped * counts]
        for values in (norms.grad_norms, weights):
            columns.append(tf.where(is_held, tf.cast(values, tf.float64), tf.zeros_like(counts)))
        kinds, kind = tf.constant(2 * norms.num_fields, tf.int64), 2 * norms.fields + frequent
        bins = kind * _BINS + _bin(norms.grad_norms)
        parts = [
            tf.ones([norms.num_fields], tf.float64),
            sum_columns(columns, kind, kinds, on_cpu),
            sum_columns([held], bins, kinds * _BINS, on_cpu),
        ]
        parts = [tf.reshape(part, [norms.num_fields, -1]) for part in parts]
        sizes = [len(spec.range_names) for spec in specs]
        by_table = dict(zip(specs, tf.split(tf.concat(parts, axis=1), sizes), strict=True))
        for spec in self._tables.keys() - by_table.keys():
            by_table[spec] = tf.zeros([len(spec.range_names), _ENDS[-1]], tf.float64)
        of_step = tf.concat([by_table[spec] for spec in self._tables], axis=0)
        self._sums.assign_add(of_step, read_value=False)

    def read(self) -> list[FieldStatistics]:
        """The sums since the last `reset`, one item per table and field, in the model's order.

        With sharded tables call it, `total` and `gradient_norms` on all ranks, and not within
        `whole_tables`.
        """
        return self._fields(self._since_reset())

    def total(self) -> list[FieldStatistics]:
        """The sums since the first step."""
        return self._fields(self._of_all_ranks(self._sums.numpy()))

    def gradient_norms(self) -> list[NormBin]:
        """A histogram of gradient norms since the last `reset` (Figure 4 of the paper).

        Of tables of width 2 and more, where there are any; without empty bins at its ends.
        """
        widths = [spec.width for spec in self._tables for _ in spec.range_names]
        chosen = [width > 1 or max(widths) == 1 for width in widths]
        bins = self._since_reset()[chosen, _ENDS[2] :].sum(axis=0).astype(int).reshape(2, _BINS)
        found = [NormBin(2.0 ** (_LOWEST + i), *rows) for i, rows in enumerate(bins.T.tolist())]
        held = np.flatnonzero(bins.sum(axis=0))
        return found[held[0] : held[-1] + 1] if held.size else []

    def reset(self) -> None:
        """Let `read` start anew; `total` goes on."""
        self._before.assign(self._sums)

    def _since_reset(self) -> NDArray[np.float64]:
        with np.errstate(invalid="ignore"):  # what is infinite in both
            return self._of_all_ranks(self._sums.numpy() - self._before.numpy())

    def _of_all_ranks(self, sums: NDArray[np.float64]) -> NDArray[np.float64]:
        """Those of tables in shards over all ranks, but for their steps."""
        sharded = [spec.shard is not None for spec in self._tables for _ in spec.range_names]
        if any(sharded):
            whole = all_gather(sums[np.newaxis]).sum(axis=0)
            sums[sharded, 1:] = whole[sharded, 1:]
        return sums

    def _fields(self, sums: NDArray[np.float64]) -> list[FieldStatistics]:
        names, found, rows = distinct_names(self._tables), [], iter(sums)
        for spec, by_range in self._tables.items():
            for field, clipped in zip(spec.range_names, by_range, strict=True):
                (steps,), rare, frequent, _ = np.split(next(rows), _ENDS[:-1])
                kinds = frequent.tolist(), rare.tolist()
                of_ids = (RowStatistics(*map(int, k[:_COUNTED]), *k[_COUNTED:]) for k in kinds)
                is_of = names[spec], field, spec.width, clipped
                found.append(FieldStatistics(*is_of, int(steps), *of_ids))
        return found


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


class NotFinite(NamedTuple):
    """A NaN or an infinite number, in a field of a table or in a dense weight."""

    what: str  # "gradient" or "weight"
    table: str | None = None
    field: str | None = None
    variable: str | None = None  # a dense weight's name

    def __str__(self) -> str:
        if self.table is None:
            return f"the {self.what} {self.variable!r}"
        return f"a {self.what} of the field {self.field!r} in the table {self.table!r}"


def not_finite(
    fields: Iterable[FieldStatistics], variables: Sequence[tf.Variable]
) -> list[NotFinite]:
    """Fields with a sum of norms that is not finite, and such variables (floating point)."""
    found = [
        NotFinite(what, field.table, field.field)
        for field in fields
        for what in ("gradient", "weight")
        if not math.isfinite(getattr(field.all, f"{what}_norms"))
    ]
    checks = [tf.reduce_all(tf.math.is_finite(variable)) for variable in variables]
    finite = tf.stack([True, *checks]).numpy()[1:]  # one read of all
    names = (variables[i].name for i in np.flatnonzero(~finite))
    return found + [NotFinite("weight", variable=name) for name in names]
