"""Hyperparameters that `update="deferred"` supports. Pure Python, checked before training."""

from __future__ import annotations

from typing import Any

_BETA_1, _BETA_2 = 0.9, (0.999, 0.9999)
_ROUNDED = 1e-6  # of β, which float32 may have held


def check_deferrable(
    learning_rate: Any,
    *,
    l2: float,
    clip: str | None,
    clip_ratio: float,
    beta_1: float = _BETA_1,
    beta_2: float = _BETA_2[0],
    epsilon: float = 1e-7,
) -> None:
    """Refuse hyperparameters with which missed steps cannot be applied later.

    Args: those of `CowClipAdam`.

    Raises:
      ValueError: a schedule as learning rate, other β than `catch_up.py` is tested for, a clip that
        reaches absent rows, or a learning rate above `stable_limit`.
    """
    if not isinstance(learning_rate, (int, float)):
        raise ValueError(
            "update='deferred' requires a number as learning rate of the embeddings, because rows "
            f"apply missed steps at one rate. Received: {learning_rate!r}. Use update='exact'"
        )
    least, most = _BETA_2
    if abs(beta_1 - _BETA_1) > _ROUNDED or not least - _ROUNDED <= beta_2 <= most + _ROUNDED:
        raise ValueError(
            f"update='deferred' requires beta_1 of {_BETA_1} and beta_2 from {least} to {most}. "
            f"Received: beta_1={beta_1:.6g} and beta_2={beta_2:.6g}. Use update='exact'"
        )
    if clip == "adaptive_column" and clip_ratio < 2 * l2:
        raise ValueError(
            "update='deferred' requires clip_ratio of at least 2 * l2; below, rows absent from a "
            f"batch are clipped too. Received: {clip_ratio:g} and l2={l2:g}. Use update='exact'"
        )
    limit = stable_limit(beta_1, epsilon)
    if learning_rate * l2 > limit:
        raise ValueError(
            f"{stability_rule(limit)} Received: {learning_rate:g} * {l2:g} = "
            f"{learning_rate * l2:.3g}. Use update='exact' or a smaller l2"
        )


def stable_limit(beta_1: float, epsilon: float) -> float:
    """The largest ηλ with which an absent row converges to zero.

    Above it a row near zero, whose v has decayed, overshoots by more at each step, until its own
    gradient has increased v. Only step by step can tell where it will be.
    """
    return epsilon * (1 + beta_1) / (1 - beta_1)


def stability_rule(limit: float) -> str:
    """The rule of `stable_limit`, for messages."""
    return (
        "update='deferred' requires learning_rate * l2 <= epsilon * (1 + beta_1) / (1 - beta_1) = "
        f"{limit:.3g}; above it, Adam oscillates around zero."
    )
