"""What a run keeps while it trains: when it takes checkpoints, and how many stay."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from merlin_cowclip.plugins._checks import is_whole
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.training.options import check_fields, option

GROUP = "Checkpoints and stopping"
_MINUTES = re.compile(r"(\d+(?:\.\d+)?)m")


def _every(name: str, value: Any) -> int | str:
    if isinstance(value, str) and (found := _MINUTES.fullmatch(value)) and float(found[1]):
        return value
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value)
    if not is_whole(value, 1, 2**48):
        raise ValueError(
            f"{name} must be a positive number of updates, or of minutes as in 10m. Received: "
            f"{value!r}"
        )
    return value


@dataclass(frozen=True)
class Keeping:
    """When checkpoints are taken, beside the end of each epoch, and what stays of them.

    Raises:
      UserError: a value out of range.
    """

    checkpoint_every: int | str | None = option(
        None,
        "write a checkpoint every N steps, or minutes as in 10m, and after each epoch",
        group=GROUP,
        metavar="N|Nm",
        check=_every,
    )
    keep: int = option(
        2, "recent checkpoints to keep, in addition to the best epoch", group=GROUP, kind="count"
    )
    saved_model: bool = option(
        False,
        "write a SavedModel with the optimizer's state to RUN/model",
        group=GROUP,
        kind="flag",
    )

    def __post_init__(self) -> None:
        try:
            check_fields(self)
        except ValueError as error:
            raise UserError(str(error)) from None

    @property
    def steps(self) -> int | None:
        """Updates between checkpoints."""
        return self.checkpoint_every if isinstance(self.checkpoint_every, int) else None

    @property
    def minutes(self) -> float | None:
        """Minutes between checkpoints."""
        every = self.checkpoint_every
        return float(every[:-1]) if isinstance(every, str) else None
