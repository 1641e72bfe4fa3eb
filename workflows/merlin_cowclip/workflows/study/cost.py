"""The cost model: what an epoch of larger data takes, and costs, at measured rates."""

from __future__ import annotations

import math
from dataclasses import dataclass

from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.study.studies import Quantity

CRITEO_ROWS = 41_256_555
"""Of the training part: nine tenths of the 45,840,617 rows of Criteo Kaggle's `train.txt`."""

PAPERS_EPOCHS = 10
"""Those of the times in Tables 5 and 11."""


@dataclass(frozen=True)
class Cost:
    """What is reckoned with.

    Attributes:
      rows: of the training part of the larger data.
      price_per_hour: of the machine that the runs were on, in any currency; `None`: not known.

    Raises:
      UserError: no number of rows, or no price.
    """

    rows: int = CRITEO_ROWS
    price_per_hour: float | None = None

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise UserError(f"rows must be a whole number of at least 1. Received: {self.rows}")
        price = self.price_per_hour
        if price is not None and not (math.isfinite(price) and price > 0):
            raise UserError(f"price_per_hour must be a positive number. Received: {price}")

    @property
    def data(self) -> str:
        """What an epoch is of."""
        return "Criteo" if self.rows == CRITEO_ROWS else f"{self.rows:,} rows"

    def quantities(self, rows: int) -> list[Quantity]:
        """Of runs of one epoch of `rows` rows: minutes of an epoch, and its price if known."""
        times = self.rows / rows
        found = [Quantity("train_seconds", "minutes", times / 60, 1)]
        if self.price_per_hour is not None:
            found.append(Quantity("train_seconds", "price", times / 3600 * self.price_per_hour, 2))
        return found
