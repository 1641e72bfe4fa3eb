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

    gradients: tf.Tensor  # U, norms of the gradient rows, float32 or wider
    rows: tf.Tensor  # U, norms of the embedding rows before the update
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


def with_lengths(gradients: tf.Tensor, norms: tf.Tensor, lengths: tf.Tensor) -> tf.Tensor:
    """`gradients` (U×d, of norms U) with no row longer than `lengths` (U); the dtype stays."""
    wide = widened(gradients)
    norms, lengths = norms[:, tf.newaxis], lengths[:, tf.newaxis]
    # A unit vector times its length: length / norm alone can underflow.
    shortened = wide / tf.where(norms > 0, norms, 1.0) * lengths
    return tf.cast(tf.where(norms > lengths, shortened, wide), gradients.dtype)


def _global_lengths(norms: RowNorms, threshold: float) -> tf.Tensor:
    given = norms.gradients[tf.newaxis, :]
    largest = norms.over_all(tf.reduce_max(given, axis=-1), "max")
    scaled = tf.math.divide_no_nan(given, largest[:, tf.newaxis])
    total = norms.over_all(tf.reduce_sum(tf.square(scaled), axis=-1), "sum")
    return _share(norms.gradients, (largest * tf.sqrt(total))[0], threshold)


def _field_lengths(norms: RowNorms, threshold: float) -> tf.Tensor:
    return _share(norms.gradients, _field_norms(norms.gradients, norms), threshold)


def _column_lengths(norms: RowNorms, threshold: float) -> tf.Tensor:
    return tf.minimum(norms.gradients, threshold)


def _adaptive_field_lengths(norms: RowNorms, ratio: float, floor: float) -> tf.Tensor:
    counts = tf.cast(norms.counts, norms.gradients.dtype)
    counts = tf.math.unsorted_segment_sum(counts, norms.fields, norms.num_fields)
    counts = tf.gather(tf.maximum(norms.over_all(counts, "sum"), 1.0), norms.fields)
    bound = counts * tf.maximum(ratio * _field_norms(norms.rows, norms), floor)
    return _share(norms.gradients, _field_norms(norms.gradients, norms), bound)


def _adaptive_column_lengths(norms: RowNorms, ratio: float, floor: float) -> tf.Tensor:
    # A row that no sample holds is clipped as if one did: a bound of 0 freezes it.
    counts = tf.maximum(tf.cast(norms.counts, norms.gradients.dtype), 1.0)
    return tf.minimum(norms.gradients, counts * tf.maximum(ratio * norms.rows, floor))


def _field_norms(norms: tf.Tensor, of: RowNorms) -> tf.Tensor:
    """Norm over the rows of each row's own field, U."""
    largest = tf.math.unsorted_segment_max(norms, of.fields, of.num_fields)
    largest = of.over_all(largest, "max")
    scaled = tf.math.divide_no_nan(norms, tf.gather(largest, of.fields))
    total = tf.math.unsorted_segment_sum(tf.square(scaled), of.fields, of.num_fields)
    total = of.over_all(total, "sum")
    return tf.gather(largest * tf.sqrt(total), of.fields)


def _share(norms: tf.Tensor, whole: tf.Tensor, bound: tf.Tensor | float) -> tf.Tensor:
    """New lengths of rows whose unit, of norm `whole`, shrinks to `bound`: equal parts of it."""
    bound = tf.minimum(whole, bound)
    # By roots, for norms / whole and bound / whole alone can underflow where the length does not.
    root = tf.math.divide_no_nan(tf.sqrt(bound), tf.sqrt(whole))
    return tf.where(whole > bound, norms * root * root, norms)


@dataclass(frozen=True)
class ClipRule:
    """A rule of Table 6."""

    name: str  # as `CowClipAdam(clip=…)` takes it
    lengths: Callable[..., tf.Tensor]  # norms → those after the clip; `parameters` by keyword
    adaptive: bool = False  # whether the bound follows the rows' own norms and counts
    by_row: bool = False  # whether a row is clipped by what is its own

    @property
    def parameters(self) -> tuple[str, ...]:
        """A constant that scales by √s with the batch, or r and ζ."""
        return ("ratio", "floor") if self.adaptive else ("threshold",)


_RULES = (
    ClipRule("global", _global_lengths),
    ClipRule("field", _field_lengths),
    ClipRule("column", _column_lengths, by_row=True),
    ClipRule("adaptive_field", _adaptive_field_lengths, adaptive=True),
    ClipRule("adaptive_column", _adaptive_column_lengths, adaptive=True, by_row=True),
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
      gradients: U×d, one summed gradient per id, L2 included.
      rows: U×d, the ids' embeddings before the update.
      counts: U, samples of the batch that hold the id; 0 is clipped as 1.
      ratio: r.
      floor: ζ, in units of the gradient's norm.

    Returns:
      U×d, of the gradients' dtype. A zero gradient stays zero.
    """
    return _clip("adaptive_column", gradients, rows, counts, ratio=ratio, floor=floor)


def clip_by_adaptive_field_norm(
    gradients: tf.Tensor,
    rows: tf.Tensor,
    counts: tf.Tensor,
    *,
    ratio: float,
    floor: float,
    fields: tf.Tensor | None = None,
    num_fields: int = 1,
) -> tf.Tensor:
    """The rows of each field are bounded by `n · max(r·‖W_u‖, ζ)` (Adaptive Field-wise GC).

    `‖W_u‖` is the norm over the field's rows in the batch; n is the sum of their counts, at least
    1. `fields` are U numbers from 0 to `num_fields` - 1; `None` for one field. All else is as in
    `clip_by_adaptive_column_norm`.
    """
    known = gradients, rows, counts, fields, num_fields
    return _clip("adaptive_field", *known, ratio=ratio, floor=floor)


def clip_by_column_norm(
    gradients: tf.Tensor, rows: tf.Tensor, counts: tf.Tensor, *, threshold: float
) -> tf.Tensor:
    """Each row is bounded by a constant (Column-wise GC); arguments: `clip_by_global_norm`."""
    return _clip("column", gradients, rows, counts, threshold=threshold)


def clip_by_field_norm(
    gradients: tf.Tensor,
    rows: tf.Tensor,
    counts: tf.Tensor,
    *,
    threshold: float,
    fields: tf.Tensor | None = None,
    num_fields: int = 1,
) -> tf.Tensor:
    """The rows of each field together are bounded by a constant (Field-wise GC).

    Arguments are those of `clip_by_global_norm`, and the fields of `clip_by_adaptive_field_norm`.
    """
    return _clip("field", gradients, rows, counts, fields, num_fields, threshold=threshold)


def clip_by_global_norm(
    gradients: tf.Tensor, rows: tf.Tensor, counts: tf.Tensor, *, threshold: float
) -> tf.Tensor:
    """All rows together are bounded by c, the `threshold`: `g ← g · min(1, c / ‖g‖)` (Section 3.2).

    Other arguments and result are those of `clip_by_adaptive_column_norm`; `rows` and `counts` are
    not used.
    """
    return _clip("global", gradients, rows, counts, threshold=threshold)


def _clip(
    name: str,
    gradients: tf.Tensor,
    rows: tf.Tensor,
    counts: tf.Tensor,
    fields: tf.Tensor | None = None,
    num_fields: int = 1,
    **parameters: float,
) -> tf.Tensor:
    norms = row_norms(gradients)
    if fields is None:
        fields = tf.zeros(tf.shape(norms), tf.int64)
    known = RowNorms(norms, row_norms(rows), counts, fields, num_fields)
    return with_lengths(gradients, norms, CLIP_RULES[name].lengths(known, **parameters))


def widened(x: tf.Tensor) -> tf.Tensor:
    """Half precision as float32, anything else as it is: for sums and norms."""
    return tf.cast(x, tf.float32) if x.dtype in (tf.float16, tf.bfloat16) else x
