"""What one step of the exact mode does to rows that no sample of its batch holds.

A pure function of rows, moments and the step's number. The exact mode does the same to a whole
table at once (`adam.py`); rows that were left alone for some steps can be brought to where it would
have them, a step at a time.
"""

from __future__ import annotations

from typing import NamedTuple

from merlin_cowclip.plugins._stack import tf
from merlin_cowclip.plugins.clipping import absent_rows


class Moved(NamedTuple):
    """Rows after a step, and their moments; n×d each, of the dtype that they had."""

    rows: tf.Tensor
    m: tf.Tensor
    v: tf.Tensor


def absent_step(
    rows: tf.Tensor,
    m: tf.Tensor,
    v: tf.Tensor,
    step: tf.Tensor | int,
    *,
    learning_rate: tf.Tensor | float,
    beta_1: tf.Tensor | float = 0.9,
    beta_2: tf.Tensor | float = 0.999,
    epsilon: float = 1e-7,
    l2: float,
    clip: tuple[float, float] | None = None,
    exempt: tf.Tensor | None = None,
) -> Moved:
    """One step of Algorithm 1 on rows that are absent from the batch, as of count 1.

    `g = 2λ·w`, clipped if the rule clips single rows by their own norm; then Adam:
    `m ← β₁m + (1 - β₁)g`, `v ← β₂v + (1 - β₂)g²`,
    `w ← w - η·√(1 - β₂ᵗ) / (1 - β₁ᵗ) · m / (√v + ε)`, with ε where Keras has it (Kingma and Ba's
    "ε hat", Section 2).

    Args:
      rows: n×d, before the step.
      m: n×d, first moments.
      v: n×d, second moments.
      step: t, the number of the step, the first 1 (Keras's `iterations` before it, plus 1); one for
        all, or n, one per row: rows may lag behind each other.
      learning_rate: η of that step; one for all, or n.
      beta_1: decay of the first moment.
      beta_2: decay of the second moment.
      epsilon: ε.
      l2: λ, as in Keras: the loss grows by `λ·Σw²`.
      clip: r and ζ of the rule "adaptive_column"; `None` for no clip, or another rule: these leave
        absent rows out.
      exempt: n, rows that are not clipped; `None` for none.

    Returns:
      Rows and moments after the step.
    """
    dtype = rows.dtype
    number, rate = _per_row(step, dtype), _per_row(learning_rate, dtype)
    beta_1, beta_2 = tf.cast(beta_1, dtype), tf.cast(beta_2, dtype)
    g = absent_rows(rows, l2, clip=clip, exempt=exempt) if l2 else tf.zeros_like(rows)
    # As Keras's kernel adds: m + (g - m)(1 - β), not βm + (1 - β)g, which rounds otherwise.
    m += (g - m) * (1.0 - beta_1)
    v += (tf.square(g) - v) * (1.0 - beta_2)
    rate *= tf.sqrt(1.0 - tf.pow(beta_2, number)) / (1.0 - tf.pow(beta_1, number))
    return Moved(rows - m * rate / (tf.sqrt(v) + tf.cast(epsilon, dtype)), m, v)


def _per_row(value: tf.Tensor | float, dtype: tf.DType) -> tf.Tensor:
    """A scalar as it is, n values as n×1."""
    value = tf.cast(value, dtype)
    return value[:, tf.newaxis] if value.shape.rank else value
