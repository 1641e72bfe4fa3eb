# SPDX-License-Identifier: Apache-2.0
"""The five clip rules of Table 6 as pure functions of gradients, rows, counts and fields.

All act on gradients summed per id, with L2, on the rows of the batch. (The published code has only
the last rule, and adds L2 to all rows before it.) A rule bounds the norm of a unit: a row, the rows
of a field, or all rows. Tables of different widths are clipped as one by joining their `RowNorms`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from merlin_cowclip.plugins._tensorflow import tf


class RowNorms(NamedTuple):
    """What the rules know of U rows: all of the batch's, or those that this rank has."""

    grad_norms: tf.Tensor  # U, of the gradient rows, float32 or wider
    weight_norms: tf.Tensor  # U, of the embedding rows before the update
    counts: tf.Tensor  # U, samples of the batch that hold the id; 0 for padding and unread rows
    fields: tf.Tensor  # U, int64 number of the field that the row belongs to
    num_fields: int
    over_all: Callable[[tf.Tensor, str], tf.Tensor] = lambda values, how: values  # of all ranks


def row_norms(rows: tf.Tensor) -> tf.Tensor:
    """Euclidean norm of each row, U×d → U, float32 or wider, without overflow or underflow."""
    rows = widened(rows)
    largest = tf.reduce_max(tf.abs(rows), axis=-1)
    scaled = tf.math.divide_no_nan(rows, largest[..., tf.newaxis])
    return largest * tf.sqrt(tf.reduce_sum(tf.square(scaled), axis=-1))


def with_norms(gradients: tf.Tensor, norms: tf.Tensor, clipped_norms: tf.Tensor) -> tf.Tensor:
    """`gradients` (U×d, of norms U) with no norm above `clipped_norms` (U); the dtype stays."""
    wide = widened(gradients)
    norms, clipped_norms = norms[:, tf.newaxis], clipped_norms[:, tf.newaxis]
    # A unit vector times its new norm: the quotient of both norms alone can underflow.
    clipped = wide / tf.where(norms > 0, norms, 1.0) * clipped_norms
    return tf.cast(tf.where(norms > clipped_norms, clipped, wide), gradients.dtype)


def _global(norms: RowNorms, threshold: float) -> tf.Tensor:
    given = norms.grad_norms[tf.newaxis, :]
    largest = norms.over_all(tf.reduce_max(given, axis=-1), "max")
    scaled = tf.math.divide_no_nan(given, largest[:, tf.newaxis])
    total = norms.over_all(tf.reduce_sum(tf.square(scaled), axis=-1), "sum")
    return _share(norms.grad_norms, (largest * tf.sqrt(total))[0], threshold)


def _field(norms: RowNorms, threshold: float) -> tf.Tensor:
    return _share(norms.grad_norms, _field_norms(norms.grad_norms, norms), threshold)


def _column(norms: RowNorms, threshold: float) -> tf.Tensor:
    return tf.minimum(norms.grad_norms, threshold)


def _adaptive_field(norms: RowNorms, ratio: float, floor: float) -> tf.Tensor:
    counts = tf.cast(norms.counts, norms.grad_norms.dtype)
    counts = tf.math.unsorted_segment_sum(counts, norms.fields, norms.num_fields)
    counts = tf.gather(tf.maximum(norms.over_all(counts, "sum"), 1.0), norms.fields)
    bound = counts * tf.maximum(ratio * _field_norms(norms.weight_norms, norms), floor)
    return _share(norms.grad_norms, _field_norms(norms.grad_norms, norms), bound)


def _adaptive_column(norms: RowNorms, ratio: float, floor: float) -> tf.Tensor:
    # A row that no sample holds is clipped as if one did: a bound of 0 freezes it.
    counts = tf.maximum(tf.cast(norms.counts, norms.grad_norms.dtype), 1.0)
    return tf.minimum(norms.grad_norms, counts * tf.maximum(ratio * norms.weight_norms, floor))


def _field_norms(norms: tf.Tensor, of: RowNorms) -> tf.Tensor:
    """Norm over the rows of each row's own field, U."""
    largest = tf.math.unsorted_segment_max(norms, of.fields, of.num_fields)
    largest = of.over_all(largest, "max")
    scaled = tf.math.divide_no_nan(norms, tf.gather(largest, of.fields))
    total = tf.math.unsorted_segment_sum(tf.square(scaled), of.fields, of.num_fields)
    total = of.over_all(total, "sum")
    return tf.gather(largest * tf.sqrt(total), of.fields)


def _share(norms: tf.Tensor, unit: tf.Tensor, bound: tf.Tensor | float) -> tf.Tensor:
    """Clipped norms of rows whose unit, of norm `unit`, shrinks to `bound`: equal parts of it."""
    bound = tf.minimum(unit, bound)
    # By roots, for norms / unit and bound / unit alone can underflow where the result does not.
    root = tf.math.divide_no_nan(tf.sqrt(bound), tf.sqrt(unit))
    return tf.where(unit > bound, norms * root * root, norms)


@dataclass(frozen=True)
class ClipRule:
    """A rule of Table 6; called, it clips the gradients of a batch's rows."""

    name: str  # as `CowClipAdam(clip=…)` takes it
    clipped_norms: Callable[..., tf.Tensor]  # `RowNorms` → U; `parameters` by keyword
    adaptive: bool = False  # whether the bound follows the rows' own norms and counts
    by_row: bool = False  # whether a row is clipped by what is its own

    @property
    def parameters(self) -> tuple[str, ...]:
        """A constant that scales by √s with the batch, or r and ζ."""
        return ("ratio", "floor") if self.adaptive else ("threshold",)

    def __call__(
        self,
        gradients: tf.Tensor,
        rows: tf.Tensor,
        counts: tf.Tensor,
        fields: tf.Tensor | None = None,
        num_fields: int = 1,
        **parameters: float,
    ) -> tf.Tensor:
        """`gradients` with clipped norms: U×d, of their dtype. A zero gradient stays zero.

        Args:
          gradients: U×d, one summed gradient per id, L2 included.
          rows: U×d, the ids' embeddings before the update.
          counts: U, samples of the batch that hold the id; 0 is clipped as 1.
          fields: U, int64 number of each row's field, from 0 to `num_fields` - 1; `None` for one.
          num_fields: how many fields there are.
          parameters: of the rule, by name.
        """
        norms = row_norms(gradients)
        if fields is None:
            fields = tf.zeros(tf.shape(norms), tf.int64)
        known = RowNorms(norms, row_norms(rows), counts, fields, num_fields)
        return with_norms(gradients, norms, self.clipped_norms(known, **parameters))


_RULES = (
    ClipRule("global", _global),
    ClipRule("field", _field),
    ClipRule("column", _column, by_row=True),
    ClipRule("adaptive_field", _adaptive_field, adaptive=True),
    ClipRule("adaptive_column", _adaptive_column, adaptive=True, by_row=True),
)
CLIP_RULES: Mapping[str, ClipRule] = MappingProxyType({rule.name: rule for rule in _RULES})
"""The five rules by name (Table 6, Section 4.3); "adaptive_column" is CowClip."""


def clip_by_adaptive_column_norm(
    gradients: tf.Tensor, rows: tf.Tensor, counts: tf.Tensor, *, ratio: float, floor: float
) -> tf.Tensor:
    """CowClip: each id's gradient is bounded by its own count and the norm of its own row.

    `g_k ← g_k · min(1, clip_k / ‖g_k‖)` with `clip_k = cnt_k · max(r·‖w_k‖, ζ)` (Algorithm 1,
    lines 8 and 9; the paper's columns are rows of a Keras table). The floor in the paper's
    published code is ζ / r.

    Args:
      gradients: U×d; these, `rows`, `counts` and the result are as in `ClipRule`.
      rows: U×d.
      counts: U.
      ratio: r.
      floor: ζ, in units of the gradient's norm.
    """
    return CLIP_RULES["adaptive_column"](gradients, rows, counts, ratio=ratio, floor=floor)


def widened(x: tf.Tensor) -> tf.Tensor:
    """Half precision as float32, anything else as it is: for sums and norms."""
    return tf.cast(x, tf.float32) if x.dtype in (tf.float16, tf.bfloat16) else x
