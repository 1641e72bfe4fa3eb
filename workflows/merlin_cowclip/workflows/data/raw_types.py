"""Which types the raw columns of an adopted workflow may have: what they were at its fit.

A workflow takes others without a word, and makes other ids of them: of text where it was fitted on
booleans always that of True, of numbers where it learned text always the unknown one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as kinds

from merlin_cowclip.workflows.data.existing_parquet import ParquetFile, is_list
from merlin_cowclip.workflows.data.parquet_logs import is_number, plain_type
from merlin_cowclip.workflows.data.raw_columns import Keys, hashed_columns, learned_keys
from merlin_cowclip.workflows.errors import Notice, UserError

if TYPE_CHECKING:
    import nvtabular as nvt
    from merlin.schema import ColumnSchema

_BY_SCHEMA = {"int": "whole", "uint": "whole", "float": "number", "bool": "truth"}


@dataclass(frozen=True)
class _Kind:
    """What a column holds; as a message has it, and the types in which a file may have it."""

    fitted: str
    may_be: Callable[[pa.DataType], bool]
    remedy: str = ""  # else to write it so


def _any_of(*ones: Callable[[pa.DataType], bool]) -> Callable[[pa.DataType], bool]:
    return lambda given: any(one(given) for one in ones)


_is_plain = _any_of(kinds.is_integer, kinds.is_floating)
_is_bytes = _any_of(kinds.is_binary, kinds.is_large_binary, kinds.is_fixed_size_binary)
_KINDS = {
    "text": _Kind("text", _any_of(kinds.is_string, kinds.is_large_string, _is_bytes)),
    "whole": _Kind("whole numbers", is_number),
    "number": _Kind("numbers", is_number),
    "truth": _Kind("booleans", is_number),  # 1 and 0 among numbers
    "decimal": _Kind("decimals", lambda given: is_number(given) and not kinds.is_floating(given)),
    "bytes": _Kind("bytes", _is_bytes),
    "date": _Kind("dates", kinds.is_date),
    "time": _Kind("times of day", kinds.is_time),
    # Objects to pandas: text, dates, decimals, or booleans of which some are missing.
    "hashed": _Kind("no number", lambda given: not _is_plain(given), "Write it as at the fit"),
}


@dataclass(frozen=True)
class RawType:
    """What a raw column holds, by its workflow.

    Attributes:
      kind: "text", "whole", "number", "truth", "decimal", "bytes", "date", "time"; "hashed", where
        it is known only that it was no number; or "unknown", where pandas had objects, and
        operators of one's own read them.
      is_list: whether it holds lists of them.
    """

    kind: str
    is_list: bool


def raw_types(workflow: nvt.Workflow) -> dict[str, RawType]:
    """What the raw columns of a workflow hold, of which that is known.

    Its schema tells numbers and times; pandas has objects of all else, of which the values tell
    in which they are looked up.

    Args:
      workflow: fitted, with its vocabularies, and with the types of `name_types`.
    """
    keys, hashed, found = learned_keys(workflow), hashed_columns(workflow), {}
    for column in workflow.input_schema:
        kind = _kind_of(column, keys.get(column.name, ()))
        if kind is None and _is_object(column):
            kind = "hashed" if column.name in hashed else "unknown"
        if kind is not None:
            found[column.name] = RawType(kind, column.is_list)
    return found


def _kind_of(column: ColumnSchema, keys: Sequence[Keys]) -> str | None:
    held = [key.kind for key in keys if not kinds.is_null(key.kind)]
    if any(map(kinds.is_string, held)):
        return "text"
    if held and all(map(_is_bytes, held)):  # of lists of them the schema says that they are int64
        return "bytes"
    if not _is_object(column):
        return _BY_SCHEMA.get(column.dtype.name.rstrip("0123456789"))
    for kind, is_one in (
        *(("truth", kinds.is_boolean), ("decimal", kinds.is_decimal), ("number", is_number)),
        *(("date", kinds.is_date), ("time", kinds.is_time)),
    ):
        if held and all(map(is_one, held)):
            return kind
    return None


def _is_object(column: ColumnSchema) -> bool:
    return column.dtype.name in ("object", "string")


def check_raw_types(
    file: ParquetFile, types: Mapping[str, RawType], columns: Collection[str]
) -> None:
    """Hold a file of raw rows to the types of the workflow's fit, as a server holds requests.

    Numbers of any type may stand for others, and text may stand in columns of bytes: their values
    are looked at as they are read (`WholeNumbers`). A column of nothing but missing ones may be of
    any type.

    Args:
      file: raw rows.
      types: of the workflow's raw columns.
      columns: those that are read.

    Raises:
      UserError: a column of another type.
    """
    for name in columns:
        if (wanted := types.get(name)) is None:
            continue
        given = file.schema.field(name).type
        listed = _is_list(given)
        held = plain_type(given.value_type if listed else given)
        if wanted.kind == "unknown":
            if _is_plain(held) and _has_values(file, name, wanted.is_list):
                warnings.warn(
                    f"column {name!r} of {file.path} is {given}, and was none that pandas holds as "
                    "numbers at the fit, but text, say, dates, or booleans with a missing one: the "
                    "workflow does not tell. Where it was text, operators make other inputs of "
                    "numbers",
                    Notice,
                    stacklevel=4,
                )
            continue
        kind = _KINDS[wanted.kind]
        fits = wanted.is_list == listed and (kinds.is_null(held) or kind.may_be(held))
        if not fits and _has_values(file, name, wanted.is_list):
            fitted = f"{'lists of ' * wanted.is_list}{kind.fitted}"
            raise UserError(
                "a raw column must be of the type that the workflow was fitted on. Received: "
                f"{given} in column {name!r} of {file.path}, which was {fitted}. "
                f"{kind.remedy or f'Write it as {fitted}'}"
            )


def _has_values(file: ParquetFile, name: str, is_list: bool) -> bool:
    """Whether one is not missing; of lists that are wanted, one in them."""
    with pq.ParquetFile(file.path) as parquet:
        for batch in parquet.iter_batches(columns=[name]):
            values = batch.column(0)
            values = values.flatten() if is_list and _is_list(values.type) else values
            if not pc.all(pc.is_null(values, nan_is_null=True), min_count=0).as_py():
                return True
    return False


def _is_list(given: pa.DataType) -> bool:
    return is_list(given) or bool(kinds.is_fixed_size_list(given))
