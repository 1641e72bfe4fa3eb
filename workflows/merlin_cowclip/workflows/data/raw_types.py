"""Which types the raw columns of an adopted workflow may have: what they were at its fit.

A workflow takes others without a word, and makes other ids of them: of text where it was fitted on
booleans always that of True, of numbers where it learned text always the unknown one.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import pyarrow as pa

from merlin_cowclip.workflows.data.existing_parquet import ParquetFile, is_list
from merlin_cowclip.workflows.data.parquet_logs import is_number, plain_type
from merlin_cowclip.workflows.errors import UserError

if TYPE_CHECKING:
    from merlin.schema import ColumnSchema, Schema

_KINDS = {"int": "whole", "uint": "whole", "float": "number", "bool": "truth"}
_FITTED = {"text": "text", "whole": "whole numbers", "number": "numbers", "truth": "booleans"}


def kind_of(column: ColumnSchema, texts: Collection[str]) -> str | None:
    """What a raw column holds: text, whole, number, truth, or None where that is not known.

    Args:
      column: as the workflow's schema of its input has it.
      texts: those that hold text for certain: pandas has objects of other types as well.
    """
    if column.name in texts:
        return "text"
    return _KINDS.get(column.dtype.name.rstrip("0123456789"))


def check_raw_types(
    file: ParquetFile, schema: Schema, texts: Collection[str], columns: Collection[str]
) -> None:
    """Hold a file of raw rows to the types of the workflow's fit, as a server holds requests.

    Numbers of any type may stand for others, and text may stand in columns of bytes: their values
    are looked at as they are read (`WholeNumbers`).

    Args:
      file: raw rows.
      schema: of the workflow's raw columns.
      texts: see `kind_of`.
      columns: those that are read.

    Raises:
      UserError: a column of another type.
    """
    for column in schema:
        kind = kind_of(column, texts)
        if kind is None or column.name not in columns:
            continue
        given = file.schema.field(column.name).type
        listed = _is_list(given)
        as_listed = listed == column.is_list or (listed and kind == "text")  # the first was missing
        if not (pa.types.is_null(given) or (as_listed and _may_be(kind, given))):
            fitted = f"{'lists of ' * column.is_list}{_FITTED[kind]}"
            raise UserError(
                "a raw column must be of the type that the workflow was fitted on. Received: "
                f"{given} in column {column.name!r} of {file.path}, which was {fitted}. "
                f"Write it as {fitted}"
            )


def _may_be(kind: str, given: pa.DataType) -> bool:
    held = plain_type(given.value_type if _is_list(given) else given)
    if kind != "text":
        return is_number(held) or pa.types.is_null(held)
    texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_null)
    raw = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary)
    return any(of_kind(held) for of_kind in (*texts, *raw))


def _is_list(given: pa.DataType) -> bool:
    return is_list(given) or bool(pa.types.is_fixed_size_list(given))
