"""NaN check: by table and field, or by the name of a dense weight."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.plugins.monitoring.statistics import FieldStatistics


class NotFinite(NamedTuple):
    """A NaN or an infinite number was found.

    Attributes:
      what: "gradient" or "weight".
      table: the table's name; `None` for a dense weight.
      field: the field's; `None` for a dense weight.
      variable: a dense weight's name; `None` for a table.
    """

    what: str
    table: str | None = None
    field: str | None = None
    variable: str | None = None

    def __str__(self) -> str:
        if self.table is None:
            return f"the {self.what} {self.variable!r}"
        return f"a {self.what} of the field {self.field!r} in the table {self.table!r}"


def in_fields(statistics: Iterable[FieldStatistics]) -> list[NotFinite]:
    """The fields whose sums of norms are not finite: some row's gradient or weights were not."""
    return [
        NotFinite(what, field.table, field.field)
        for field in statistics
        for what in ("gradient", "weight")
        if not math.isfinite(getattr(field.all, f"{what}_norms"))
    ]


def not_finite(variables: Iterable[tf.Variable]) -> list[NotFinite]:
    """Those of some floating-point variables that hold NaN or infinity now."""
    variables = list(variables)
    checks = [tf.reduce_all(tf.math.is_finite(variable)) for variable in variables]
    finite = tf.stack([True, *checks]).numpy()[1:]  # one read of all
    return [NotFinite("weight", variable=variables[i].name) for i in np.flatnonzero(~finite)]
