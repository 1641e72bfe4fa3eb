"""What a run keeps while it trains: when it takes checkpoints, and how many stay."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from merlin_cowclip.workflows.training.options import check_fields, option

GROUP = "Checkpoints and stopping"


def _every(name: str, value: Any) -> int | str:
    text = str(value)
    if re.fullmatch(r"[1-9][0-9]*", text):
        return int(text)
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?m", text) and float(text[:-1]):
        return text
    raise ValueError(
        f"{name} must be a positive number of updates, or of minutes as in 10m. Received: {value!r}"
    )


@dataclass(frozen=True)
class Keeping:
    """When checkpoints are taken, beside the end of each epoch, and what stays of them.

    Raises:
      UserError: a value out of range.
    """

    checkpoint_every: int | str | None = option(
        "write a checkpoint every N steps, or minutes as in 10m, and after each epoch",
        group=GROUP,
        metavar="N|Nm",
        check=_every,
    )
    keep: int = option(
        "recent checkpoints to keep, in addition to the best epoch", 2, group=GROUP, kind="count"
    )
    saved_model: bool = option(
        "write a SavedModel with the optimizer's state to RUN/model",
        False,
        group=GROUP,
        kind="flag",
    )

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def steps(self) -> int | None:
        """Updates between checkpoints."""
        return self.checkpoint_every if isinstance(self.checkpoint_every, int) else None

    @property
    def minutes(self) -> float | None:
        """Minutes between checkpoints."""
        every = self.checkpoint_every
        return float(every[:-1]) if isinstance(every, str) else None
