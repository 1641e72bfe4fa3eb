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
        numbers: dict[str, int] = {}
        first: list[ColumnSchema] = []
        for column in columns:
            size = cardinality(column)
            number = numbers.setdefault(domain_name(column), len(numbers))
            if number == len(first):
                first.append(column)
            elif size != cardinality(first[number]):
                raise ValueError(
                    "Columns of one int domain must have one cardinality, for they share its rows. "
                    f"Received: {first[number].name!r} with {cardinality(first[number])} ids and "
                    f"{column.name!r} with {size}, both of the domain {domain_name(column)!r}. "
                    "Encode them jointly, or give their domains different names."
                )
        offsets = itertools.accumulate(map(cardinality, first), initial=0)
        return cls(tuple(offsets), {c.name: numbers[domain_name(c)] for c in columns})

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


def resized(column: ColumnSchema, size: int) -> ColumnSchema:
    """The same column with another cardinality."""
    domain = {**column.properties["domain"], "max": size - 1}
    return column.with_properties({"domain": domain})


def domain_name(column: ColumnSchema) -> str:
    """As Merlin's own tables are named: the domain's name, or else the column's."""
    domain = column.int_domain
    return str(domain.name or column.name) if domain else column.name
