"""Raw rows of the very types that the columns of an adopted workflow had at its fit.

A workflow takes other types without a word, and makes other ids of them: of text where it was
fitted on booleans always that of True, of numbers where it learned text always the unknown one, of
0.1 as a float32 another bucket than as a float64. So a raw column is of the fit's type, or it is
refused. What a writer of parquet, or pandas, may have changed without a value becoming another one
is undone: the width of integers, integers that are floats beside a missing one, text as bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as kinds

from merlin_cowclip.workflows.data.encoded_rows import Place
from merlin_cowclip.workflows.data.existing_parquet import ParquetFile
from merlin_cowclip.workflows.data.id_text import plain_type
from merlin_cowclip.workflows.data.raw_columns import Keys, learned_keys
from merlin_cowclip.workflows.errors import UserError, clipped

if TYPE_CHECKING:
    import nvtabular as nvt
    from merlin.schema import ColumnSchema

RULE = "a raw column must be of the type that it had at the first rows of the workflow's fit"


@dataclass(frozen=True)
class RawType:
    """What a raw column holds, by its workflow.

    Attributes:
      kind: Arrow's type of its values; None where pandas had objects (text, dates, booleans with a
        missing one), and nothing tells which.
      is_list: whether it holds lists of them.
    """

    kind: pa.DataType | None
    is_list: bool

    def __str__(self) -> str:
        """As a message has it."""
        held = "no number" if self.kind is None else _shown(self.kind)
        return f"lists of {held}" if self.is_list else held

    def takes(self, given: pa.DataType) -> bool:
        """Whether a column of a type may hold the same values; of numbers each is looked at."""
        held = _element(given)
        if self.kind is None:
            return not (kinds.is_integer(held) or kinds.is_floating(held))
        if self.is_list != _is_list(given):
            return False
        if kinds.is_integer(self.kind):
            return bool(kinds.is_integer(held) or kinds.is_floating(held))
        if kinds.is_floating(self.kind):  # integers: those of a column that had a missing one
            return bool(kinds.is_integer(held) or held == self.kind)
        if kinds.is_string(self.kind):
            return bool(kinds.is_string(held) or kinds.is_large_string(held) or _is_bytes(held))
        if kinds.is_timestamp(self.kind):  # in lists pandas knows no zone
            any_zone = self.is_list and self.kind.tz is None
            return bool(kinds.is_timestamp(held) and (any_zone or held.tz == self.kind.tz))
        return any(
            is_one(self.kind) and is_one(held)
            for is_one in (
                *(kinds.is_boolean, _is_bytes, kinds.is_decimal),
                *(kinds.is_date, kinds.is_time, kinds.is_duration),
            )
        )

    def of(self, column: pa.Array, name: str, place: Place) -> pa.Array:
        """A column's values, of the fit's type.

        Args:
          column: any array; a dictionary's values stand for its indices.
          name: the column's.
          place: where its rows lie.

        Raises:
          UserError: it is of another type, and not every value is missing; or a value has no equal
            of the fit's type.
        """
        if self.kind is None and self.takes(column.type):
            return _decoded(column)
        if _is_nothing(column, self.is_list):
            return self._of_nothing(column)
        if not self.takes(column.type):
            raise UserError(
                f"{RULE}. Received: {column.type} in {place.column(name)}, which was {self}. "
                f"{self.remedy}"
            )
        if not self.is_list:
            rows = np.arange(len(column))
            return _cast(_decoded(column), self.kind, _Values(name, place, rows))
        lengths = list_lengths(column)
        rows = np.repeat(np.arange(len(column)), lengths)
        flat = flat_values(column)
        return _lists(_cast(_decoded(flat), self.kind, _Values(name, place, rows)), column, lengths)

    @property
    def remedy(self) -> str:
        """What to do with a column of another type."""
        if self.kind is not None:
            return f"Give it as {self}"
        # Of an empty list in the fit's first row NVTabular knows no type, and its fit goes on.
        again = ", or fit the workflow again on rows whose first list is not empty"
        return f"Give it as at the fit{again if self.is_list else ''}"

    def unknown(self, given: pa.DataType) -> str | None:
        """What is to be said of a column of a type, where nothing tells what it was at the fit.

        Of text nothing: nearly all such columns are.
        """
        held = _element(given)
        is_text = kinds.is_string(held) or kinds.is_large_string(held) or kinds.is_null(held)
        is_alike = kinds.is_null(given) or (is_text and _is_list(given) == self.is_list)
        if self.kind is not None or is_alike:
            return None
        return (
            f"is {given}, and the workflow does not tell what it was at the fit, but that pandas "
            "held it as objects: text, dates, or booleans with a missing one, say. Of others than "
            "at the fit its operators make other inputs"
        )

    def _of_nothing(self, column: pa.Array) -> pa.Array:
        kind = pa.null() if self.kind is None else self.kind
        if not self.is_list:
            return pa.nulls(len(column), kind)
        if not _is_list(column.type):
            return pa.nulls(len(column), pa.list_(kind))
        lengths = list_lengths(column)
        return _lists(pa.nulls(int(lengths.sum()), kind), column, lengths)


def raw_types(workflow: nvt.Workflow) -> dict[str, RawType]:
    """What the raw columns of a workflow hold.

    Its schema tells numbers and times; pandas has objects of all else, of which the values tell
    in which they are looked up.

    Args:
      workflow: fitted, with its vocabularies, and with the types of `name_types`.
    """
    keys = learned_keys(workflow)
    return {
        column.name: RawType(_kind_of(column, keys.get(column.name, ())), column.is_list)
        for column in workflow.input_schema
    }


def _kind_of(column: ColumnSchema, keys: Sequence[Keys]) -> pa.DataType | None:
    held = {key.kind for key in keys if not kinds.is_null(key.kind)}
    if any(kinds.is_string(kind) or kinds.is_large_string(kind) for kind in held):
        return None if any(map(_is_bytes, held)) else pa.string()
    if held and all(map(_is_bytes, held)):  # of lists of them the schema says that they are int64
        return pa.binary()
    known = None if column.dtype.name == "unknown" else np.dtype(column.dtype.to_numpy or object)
    if known is not None and known.kind in "iufb":
        return pa.from_numpy_dtype(known)
    if len(held) == 1:
        (kind,) = held
        if kinds.is_timestamp(kind):  # which parquet has in other units than pandas
            return pa.timestamp("ns", kind.tz)
        return pa.duration("ns") if kinds.is_duration(kind) else kind
    return pa.timestamp("ns") if known is not None and known.kind == "M" else None


def check_raw_types(
    file: ParquetFile, types: Mapping[str, RawType], columns: Collection[str]
) -> None:
    """Hold a file of raw rows to the types of the workflow's fit, as a server holds requests.

    A column of nothing but missing ones may be of any type.

    Args:
      file: raw rows.
      types: of the workflow's raw columns.
      columns: those that are read.

    Raises:
      UserError: a column of another type.
    """
    for name in columns:
        wanted, given = types[name], file.schema.field(name).type
        is_null = kinds.is_null(plain_type(given))
        if not (wanted.takes(given) or is_null) and _has_values(file, name, wanted.is_list):
            raise UserError(
                f"{RULE}. Received: {given} in column {name!r} of {file.path}, which was {wanted}. "
                f"{wanted.remedy}"
            )


def _has_values(file: ParquetFile, name: str, is_list: bool) -> bool:
    with pq.ParquetFile(file.path) as parquet:
        batches = parquet.iter_batches(columns=[name])
        return not all(_is_nothing(batch.column(0), is_list) for batch in batches)


# Values ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Values:
    """Of which column some values are, where it lies, and in which of its rows each is."""

    name: str
    place: Place
    rows: np.ndarray

    def check(self, is_bad: np.ndarray, values: pa.Array, rule: str, remedy: str) -> None:
        """Refuse the first bad one.

        Raises:
          UserError: there is one.
        """
        if is_bad.any():
            at = int(is_bad.argmax())
            try:
                shown = clipped(repr(values[at].as_py()))
            except (OverflowError, ValueError):  # a time that Python has not
                shown = f"one of {values.type} that is far off"
            self.place.refuse(rule, shown, int(self.rows[at]), self.name, remedy)


def _cast(values: pa.Array, kind: pa.DataType, of: _Values) -> pa.Array:
    """The same values, of a type that takes theirs."""
    if kinds.is_fixed_size_binary(values.type):  # Arrow 12 dies of the cast of a part of one
        values = pa.array(values.to_pylist(), pa.binary())
    if kinds.is_null(values.type) or values.type == kind:
        return values.cast(kind)
    if kinds.is_integer(kind):
        return _whole(values, kind, of)
    if kinds.is_float64(kind):
        return values.cast(kind, safe=False)  # rounded from 2^53 on, as pandas does beside null
    if kinds.is_floating(kind):
        return _float32(values, of)
    if kinds.is_decimal(kind):  # whose precision is that of the largest value at the fit
        kind = pa.decimal128(38, kind.scale)
    try:
        return values.cast(kind)
    except pa.ArrowInvalid:
        rule, remedy = f"a value must be {_shown(kind)}, as at the fit", "Leave it out"
        if kinds.is_string(kind):
            rule, remedy = "text must be UTF-8", "Write it as text"
        bad = [not _has_equal(values.slice(i, 1), kind) for i in range(len(values))]
        of.check(np.array(bad), values, rule, remedy)
        raise


def _has_equal(value: pa.Array, kind: pa.DataType) -> bool:
    try:
        value.cast(kind)
    except pa.ArrowInvalid:
        return False
    return True


def _float32(values: pa.Array, of: _Values) -> pa.Array:
    """Integers, of which pandas makes float64: in a file of another writer."""
    found = values.cast(pa.float32(), safe=False)
    known = pc.fill_null(values, 0).to_numpy(zero_copy_only=False)
    bad = known != pc.fill_null(found, 0).to_numpy(zero_copy_only=False).astype(np.float64)
    of.check(bad, values, "a number must be a float32, as at the fit", "Give float32")
    return found


def _whole(values: pa.Array, kind: pa.DataType, of: _Values) -> pa.Array:
    limits = np.iinfo(kind.to_pandas_dtype())
    if kinds.is_floating(values.type):
        given = values.to_numpy(zero_copy_only=False)
        largest = 2.0 ** (np.finfo(given.dtype).nmant + 1)
        held = given.astype(np.float64)
        with np.errstate(invalid="ignore"):
            bad = ~np.isnan(held) & ((held != np.trunc(held)) | (np.abs(held) >= largest))
        rule = (
            f"a number must be a whole one, as those at the first rows of the workflow's fit, and "
            f"as a float below 2^{np.finfo(given.dtype).nmant + 1}: larger ones are rounded"
        )
        of.check(bad, values, rule, "Give whole numbers")
        values = pa.array(np.where(np.isnan(held), 0, held).astype(np.int64), mask=np.isnan(held))
    known = pc.fill_null(values, 0).to_numpy(zero_copy_only=False)
    rule = (
        f"a number must be within {kind}, {limits.min} to {limits.max}, as at the first rows of "
        "the workflow's fit"
    )
    bad = (known < limits.min) | (known > limits.max)
    of.check(bad, values, rule, "Leave it out, or fit on the wider type")
    return values.cast(kind)


def _is_nothing(column: pa.Array, is_list: bool) -> bool:
    """Whether every value is missing; of lists that are wanted, every one in them."""
    values = flat_values(column) if is_list and _is_list(column.type) else column
    has_nan = kinds.is_floating(values.type) and not kinds.is_float16(values.type)  # for Arrow
    return pc.all(pc.is_null(values, nan_is_null=has_nan), min_count=0).as_py() is True


def _decoded(column: pa.Array) -> pa.Array:
    return column.dictionary_decode() if kinds.is_dictionary(column.type) else column


def _element(given: pa.DataType) -> pa.DataType:
    return plain_type(given.value_type if _is_list(given) else given)


def list_lengths(column: pa.Array) -> np.ndarray:
    """Of each list how many values it holds; a missing one holds none."""
    lengths = pc.fill_null(pc.list_value_length(column), 0)
    lengths = pc.if_else(column.is_valid(), lengths, 0)
    return lengths.to_numpy(zero_copy_only=False).astype(np.int64)


def flat_values(column: pa.Array) -> pa.Array:
    """The values of lists, one list after the other."""
    if not kinds.is_fixed_size_list(column.type):
        return column.flatten()
    size = column.type.list_size  # missing ones take room, too
    values = column.values.slice(column.offset * size, len(column) * size)
    is_list = column.is_valid().to_numpy(zero_copy_only=False)
    return values.filter(pa.array(np.repeat(is_list, size)))


def _lists(values: pa.Array, like: pa.Array, lengths: np.ndarray) -> pa.Array:
    """Lists of values, missing where others are."""
    missing = np.append(like.is_null().to_numpy(zero_copy_only=False), False)
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(ends, mask=missing), values)


def _is_list(given: pa.DataType) -> bool:
    return bool(
        kinds.is_list(given) or kinds.is_large_list(given) or kinds.is_fixed_size_list(given)
    )


def _is_bytes(given: pa.DataType) -> bool:
    return bool(
        kinds.is_binary(given) or kinds.is_large_binary(given) or kinds.is_fixed_size_binary(given)
    )


def _shown(kind: pa.DataType) -> str:
    """A type, as pandas' users know it."""
    if kinds.is_string(kind):
        return "text"
    if kinds.is_binary(kind):
        return "bytes"
    is_float = kinds.is_floating(kind)
    return str(np.dtype(kind.to_pandas_dtype())) if is_float else str(kind)
