"""What a run keeps while it trains: when it takes checkpoints, and how many stay."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from merlin_cowclip.plugins._checks import is_whole, make_plain, whole_number
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.training.configuration import refuse_unknown

_MINUTES = re.compile(r"(\d+(?:\.\d+)?)m")


@dataclass(frozen=True)
class Keeping:
    """When checkpoints are taken, beside the end of each epoch, and what stays of them.

    Attributes:
      checkpoint_every: updates, or minutes as in "10m"; `None` for the epochs' ends alone.
      keep: how many of the last checkpoints stay, beside that of the best epoch.
      saved_model: whether the run ends with a SavedModel in `model/`, for serving.

    Raises:
      UserError: a value out of range.
    """

    checkpoint_every: int | str | None = None
    keep: int = 2
    saved_model: bool = True

    def __post_init__(self) -> None:
        make_plain(self)
        try:
            whole_number("keep", self.keep)
        except ValueError as error:
            raise UserError(str(error)) from None
        if not isinstance(self.saved_model, bool):
            raise UserError(f"saved_model must be true or false. Received: {self.saved_model!r}")
        every = self.checkpoint_every
        if isinstance(every, str) and every.isascii() and every.isdigit():
            object.__setattr__(self, "checkpoint_every", int(every))
        right = every is None or self.minutes or is_whole(self.checkpoint_every, 1, 2**48)
        if not right:
            raise UserError(
                "checkpoint_every must be a positive number of updates, or of minutes as in 10m. "
                f"Received: {every!r}"
            )

    @property
    def steps(self) -> int | None:
        """Updates between checkpoints."""
        return self.checkpoint_every if isinstance(self.checkpoint_every, int) else None

    @property
    def minutes(self) -> float | None:
        """Minutes between checkpoints."""
        every = self.checkpoint_every
        found = _MINUTES.fullmatch(every) if isinstance(every, str) else None
        return float(found[1]) or None if found else None

    def to_dict(self) -> dict[str, Any]:
        """Fit for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Keeping:
        """What `to_dict` wrote.

        Raises:
          UserError: a key that is none, or a value out of range.
        """
        refuse_unknown("the keeping of checkpoints", values, [f.name for f in fields(cls)])
        return cls(**values)
