# SPDX-License-Identifier: Apache-2.0
"""Which rows of a fused table each field reads: one range of rows per int domain."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from merlin.schema import ColumnSchema


@dataclass(frozen=True)
class RowRanges:
    """The rows of a table, divided by domain.

    Fields whose int domains have one name share its rows, as they share a table in Merlin's
    `mm.Embeddings`. A domain without a name is its field's own.

    Attributes:
      offsets: first row of each domain, in the order in which fields first name them; then V.
      range_of: field → number of its domain.
    """

    offsets: tuple[int, ...]
    range_of: dict[str, int]

    @classmethod
    def of(cls, columns: Sequence[ColumnSchema]) -> RowRanges:
        """The ranges of some fields.

        Raises:
          ValueError: a column without an int domain, or two of one domain that differ in size.
        """
        sizes = {c.name: cardinality(c) for c in columns}
        domains = {c.name: str(c.int_domain.name or c.name) for c in columns}
        first: dict[str, str] = {}  # field of each domain
        for field, domain in domains.items():
            other = first.setdefault(domain, field)
            if sizes[field] != sizes[other]:
                raise ValueError(
                    "Columns of one int domain must have one cardinality, for they share its rows. "
                    f"Received: {other!r} with {sizes[other]} ids and {field!r} with "
                    f"{sizes[field]}, both of the domain {domain!r}. Encode them jointly, "
                    "Categorify(encode_type='joint'), or give their domains different names."
                )
        offsets = itertools.accumulate((sizes[field] for field in first.values()), initial=0)
        numbers = {domain: number for number, domain in enumerate(first)}
        return cls(tuple(offsets), {field: numbers[domain] for field, domain in domains.items()})

    def first_row(self, field: str) -> int:
        """The row of a field's id 0."""
        return self.offsets[self.range_of[field]]


def cardinality(column: ColumnSchema) -> int:
    """Ids of a categorical column, special ones included; a ValueError without an int domain."""
    domain = column.int_domain
    if domain is None or domain.max is None:
        raise ValueError(
            f"Column {column.name!r} must have an int domain with a max (its cardinality - 1), as "
            "Categorify writes it. Behind another operator, such as Bucketize, set it: "
            "column.with_properties({'domain': {'min': 0, 'max': 9}})."
        )
    return int(domain.max) + 1
