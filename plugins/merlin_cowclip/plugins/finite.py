"""Where numbers stopped being finite: by table and field, or by the name of a dense weight."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from merlin_cowclip.plugins._stack import quiet_stack, tf
from merlin_cowclip.plugins.statistics import FieldStatistics


class NotFinite(NamedTuple):
    """A NaN or an infinite number was found.

    Attributes:
      what: "gradient" or "weight".
      table: the table's name; `None` for a dense weight.
      field: the field's; `None` for a dense weight.
      variable: a dense weight's name, which names its layer; `None` for a table.
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
        for what, norms in (
            ("gradient", field.all.gradient_norms),
            ("weight", field.all.weight_norms),
        )
        if not math.isfinite(norms)
    ]


class FiniteCheck:
    """Whether variables are finite as they are now: one call for all.

    Args:
      variables: of floating-point numbers.
    """

    def __init__(self, variables: Sequence[tf.Variable]) -> None:
        self.variables = tuple(variables)

        @tf.function
        def finite() -> tf.Tensor:
            return tf.stack([tf.reduce_all(tf.math.is_finite(v)) for v in self.variables])

        self._finite = finite

    def is_of(self, variables: Sequence[tf.Variable]) -> bool:
        """Whether it looks at these variables, in this order."""
        return [v.ref() for v in self.variables] == [v.ref() for v in variables]

    def __call__(self) -> list[NotFinite]:
        """Those that are not."""
        if not self.variables:
            return []
        with quiet_stack():  # of many models in one process it warns that it traces many
            finite = self._finite().numpy()
        return [
            NotFinite("weight", variable=variable.name)
            for variable, good in zip(self.variables, finite, strict=True)
            if not good
        ]
