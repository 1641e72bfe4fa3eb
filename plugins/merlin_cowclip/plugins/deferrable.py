"""What `update="deferred"` can take, known before anything is trained. Pure Python."""

from __future__ import annotations

from typing import Any

from merlin_cowclip.plugins.scaling import Hyperparameters

_BETA_1, _EPSILON = 0.9, 1e-7  # `CowClipAdam`'s
_BETA_2 = (0.999, 0.9999)
_ROUNDED = 1e-6  # of β, which float32 may have held
_RULE = (
    "Rows can catch up with steps that they missed where learning_rate * l2 is at most epsilon * "
    "(1 + beta_1) / (1 - beta_1)"
)
_BEYOND = "beyond, Adam throws them about zero. Received:"
_REMEDY = "Use update='exact', or a smaller l2"


def check_values(values: Hyperparameters, schedule: Any = None) -> None:
    """Refuse hyperparameters and a schedule of the embeddings that rows cannot catch up with.

    Raises:
      ValueError: as `check_deferrable`.
    """
    check_deferrable(
        values.embedding_lr if schedule is None else schedule,
        l2=values.l2,
        clip=values.clip,
        clip_ratio=values.clip_ratio,
        beta_1=_BETA_1,
        epsilon=_EPSILON,
    )


def check_deferrable(
    learning_rate: Any,
    *,
    l2: float,
    clip: str | None,
    clip_ratio: float,
    beta_1: float,
    epsilon: float,
    beta_2: float = 0.999,
) -> None:
    """Refuse what rows that wait for steps cannot catch up with.

    Args:
      learning_rate: η of the embeddings.
      l2: λ.
      clip: the rule's name.
      clip_ratio: r.
      beta_1: Adam's β₁.
      epsilon: Adam's ε.
      beta_2: Adam's β₂.

    Raises:
      ValueError: a schedule in place of η, other β than catching up was made for, absent rows that
        are clipped, or as `check_stable`.
    """
    if not isinstance(learning_rate, (int, float)):
        raise ValueError(
            "update='deferred' needs a number as learning rate of the embeddings: rows that "
            f"wait must know that of the steps they missed. Received: {learning_rate!r}. Use "
            "update='exact'"
        )
    least, most = _BETA_2
    if abs(beta_1 - _BETA_1) > _ROUNDED or not least - _ROUNDED <= beta_2 <= most + _ROUNDED:
        raise ValueError(
            f"update='deferred' needs beta_1 of {_BETA_1} and beta_2 from {least} to {most}, for "
            f"which catching up was made. Received: beta_1={beta_1:.6g} and beta_2={beta_2:.6g}. "
            "Use update='exact'"
        )
    if clip == "adaptive_column" and clip_ratio < 2 * l2:
        raise ValueError(
            "update='deferred' needs clip_ratio of at least 2 * l2: below, rows absent from a "
            f"batch are clipped as well. Received: {clip_ratio:g} and l2={l2:g}. Use "
            "update='exact'"
        )
    check_stable(learning_rate=learning_rate, l2=l2, beta_1=beta_1, epsilon=epsilon)


def check_stable(*, learning_rate: float, l2: float, beta_1: float, epsilon: float) -> None:
    """Refuse values with which Adam throws an absent row about for ever.

    Where `2λη > 2ε(1 + β₁)/(1 - β₁)`, a row near zero whose v has decayed overshoots by more at
    every step, until its own gradient has made v grow: no other way than step by step leads to
    where it will be.

    Raises:
      ValueError: such values.
    """
    most = most_stable(beta_1, epsilon)
    if learning_rate * l2 > most:
        product = f"{learning_rate:g} * {l2:g} = {learning_rate * l2:.3g}"
        # Written out: the site's list of messages reads them from the source.
        raise ValueError(f"{_RULE}, {most:.3g}: {_BEYOND} {product}. {_REMEDY}")


def most_stable(beta_1: float, epsilon: float) -> float:
    """The largest ηλ that is stable."""
    return epsilon * (1 + beta_1) / (1 - beta_1)


def what_is_stable(most: float) -> tuple[str, str]:
    """The rule in words, before what was received, and the remedy after it."""
    return f"{_RULE}, {most:.3g}: {_BEYOND}", _REMEDY
