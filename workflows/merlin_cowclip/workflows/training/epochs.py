"""What was measured after each epoch of a run, and what follows from it. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Progress:
    """How far a run is, beside its variables; fit for JSON.

    Attributes:
      epochs: what was measured after each.
      seconds: of training in the epoch under way.
      tables: the rows of its CSV files, by name.
    """

    epochs: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    @property
    def best(self) -> int | None:
        """The number, from 1, of the epoch with the highest test AUC; the first of equal ones."""
        measured = [epoch for epoch in self.epochs if epoch["auc"] is not None]
        return max(measured, key=lambda e: e["auc"])["epoch"] if measured else None

    def is_out_of(self, patience: int | None) -> bool:
        """Whether so many epochs have passed since the best; never without patience."""
        best = self.best
        return patience is not None and best is not None and len(self.epochs) - best >= patience
