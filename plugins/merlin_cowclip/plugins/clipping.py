"""CowClip as a pure function of gradients, rows and counts (Algorithm 1, lines 6 to 9).

Nothing here knows optimizers, variables or models. Rows are unique: duplicates of an id have been
summed before, and `counts` says how many samples of the batch hold the id.
"""

from __future__ import annotations

from merlin_cowclip.plugins._stack import tf


def row_norms(rows: tf.Tensor) -> tf.Tensor:
    """Euclidean norm of each row, U×d → U×1 float32 or wider, without overflow or underflow.

    Rows are divided by their largest entry first, so that float32 rows of 1e30 or 1e-30 have a
    norm; half-precision rows are taken to float32.
    """
    rows = _widened(rows)
    largest = tf.reduce_max(tf.abs(rows), axis=-1, keepdims=True)
    scaled = tf.math.divide_no_nan(rows, largest)
    return largest * tf.sqrt(tf.reduce_sum(tf.square(scaled), axis=-1, keepdims=True))


def clip_by_adaptive_column_norm(
    gradients: tf.Tensor,
    rows: tf.Tensor,
    counts: tf.Tensor,
    *,
    ratio: float,
    floor: float,
) -> tf.Tensor:
    """CowClip: each id's gradient is bounded by its own count and the norm of its own row.

    `g_k ← g_k · min(1, clip_k / ‖g_k‖)` with `clip_k = cnt_k · max(r·‖w_k‖, ζ)` (Algorithm 1,
    lines 8 and 9; "column" is the paper's word for what is a row of a Keras table). The paper's
    published code writes `cnt · r · max(‖w‖, floor′)`: its floor is ζ / r.

    Args:
      gradients: U×d, one summed gradient per id, L2 included.
      rows: U×d, the ids' embeddings before the update.
      counts: U, samples of the batch that hold the id.
      ratio: r.
      floor: ζ, in units of the gradient's norm.

    Returns:
      U×d, of the gradients' dtype. A zero gradient stays zero.
    """
    counts = tf.expand_dims(tf.cast(counts, _widened(gradients).dtype), -1)
    threshold = counts * tf.maximum(ratio * row_norms(rows), floor)
    return _shorten(gradients, threshold)


def _shorten(gradients: tf.Tensor, threshold: tf.Tensor) -> tf.Tensor:
    """`gradients` with no row longer than its `threshold` (U×1)."""
    wide = _widened(gradients)
    norms = row_norms(gradients)
    # A unit vector times the threshold: threshold / norm alone can underflow. Where the norm is
    # zero the quotient would be 0/0; such a row needs no clip.
    shortened = wide / tf.where(norms > 0, norms, 1.0) * threshold
    return tf.cast(tf.where(norms > threshold, shortened, wide), gradients.dtype)


def _widened(x: tf.Tensor) -> tf.Tensor:
    return tf.cast(x, tf.float32) if x.dtype in (tf.float16, tf.bfloat16) else x
