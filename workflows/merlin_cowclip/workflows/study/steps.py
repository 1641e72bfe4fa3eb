# SPDX-License-Identifier: Apache-2.0
"""What every study warns of. Pure Python."""

from __future__ import annotations

from merlin_cowclip.plugins.scaling import MIN_STEPS


def few_steps(rows: int, batch_size: int) -> str:
    """What to say of a batch that leaves few steps in an epoch of `rows`; else nothing."""
    steps = -(-rows // batch_size)
    if steps >= MIN_STEPS:
        return ""
    return (
        f"at batch size {batch_size:,} an epoch has only {plural(steps, 'step')}. With fewer than "
        f"{MIN_STEPS} a result reflects the number of steps, not the batch size."
    )


def plural(number: int, what: str) -> str:
    """As in "1 step" and "2 steps"."""
    return f"{number} {what}{'s' * (number != 1)}"
