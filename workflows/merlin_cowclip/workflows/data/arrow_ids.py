"""Columns of ids, of any type, to text, by one rule: `id_text.py`'s. No NVTabular."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from merlin_cowclip.plugins._checks import DIGITS
from merlin_cowclip.workflows.data.id_text import as_text, is_list_type
from merlin_cowclip.workflows.errors import UserError

# By `pandas.read_csv`, of version 1 and 2, also with dtype=str.
READ_AS_MISSING = {
    *("NA", "N/A", "n/a", "#NA", "#N/A", "#N/A N/A", "<NA>", "NULL", "null", "None"),
    *("NaN", "nan", "-NaN", "-nan", "1.#IND", "-1.#IND", "1.#QNAN", "-1.#QNAN"),
}
READ_AS_TRUTH = ("True", "TRUE", "true", "False", "FALSE", "false")


def exact_ids(values: pa.Array, where: str = "") -> pa.Array:
    """The same ids, or lists of them, once it is known that a float holds none but its own.

    Of 2^53 and more (float32: 2^24), where integers were (beside a missing value pandas makes them
    floats), several of them became one, whose text is another than theirs.

    Args:
        values: of any type.
        where: follows the value in the message.

    Raises:
        UserError: a finite float of 2^53 or more, a float32 of 2^24 or more.
    """
    held = values
    while pa.types.is_dictionary(held.type) or is_list_type(held.type):
        held = held.dictionary if pa.types.is_dictionary(held.type) else held.flatten()
    if pa.types.is_floating(held.type):
        digits = DIGITS[f"float{held.type.bit_width}"]
        kind = "float" if pa.types.is_float64(held.type) else f"{held.type.bit_width}-bit float"
        held = held.cast(pa.float64())
        beyond = pc.greater_equal(pc.abs(held), float(2**digits))
        large = held.filter(pc.and_(pc.is_finite(held), beyond))
        if len(large):
            raise UserError(
                f"an id must not be a {kind} of 2^{digits} or more, where several integers are one "
                f"float. Received: {large[0].as_py()!r}{where}. Write ids as integers or text"
            )
    return values


def note_on_floats(texts: pa.Array, read_by_pandas: bool = True) -> str | None:
    """What must be said of distinct ids in which integers stand as floats, if any do.

    pandas writes integers beside a missing value so. They are not taken for one id, for 2 and 2.0
    may be two versions.

    Args:
        texts: the distinct ids of a column.
        read_by_pandas: whether a frame of the same rows would hold numbers in their place.
    """
    floats = texts.filter(pc.match_substring_regex(texts, r"^-?[0-9]+\.0$"))
    integers = pc.utf8_slice_codeunits(floats, 0, -2)
    both = integers.filter(pc.is_in(integers, value_set=texts))
    if len(both):
        return (
            f"{len(both):,} ids are written as integers and as floats ({both[0]} and {both[0]}.0), "
            "and so are two each. If they are one, write them as integers; pandas does with "
            "dtype=str or Int64"
        )
    if read_by_pandas and len(floats) == len(texts) > 0:
        return (
            f"all ids are written as floats ({floats[0]}). pandas reads them as numbers, which the "
            f"saved workflow takes for {integers[0]} and so for unknown: write them as integers, "
            "or read what it is given with dtype=str"
        )
    return None


def note_on_truth(texts: pa.Array) -> str | None:
    """What must be said of distinct ids that pandas reads from a csv file as truth values.

    Args:
        texts: the distinct ids of a column.
    """
    held = texts.drop_null()
    truth = pc.is_in(held, value_set=pa.array(READ_AS_TRUTH))
    changed = held.filter(pc.invert(pc.is_in(held, value_set=pa.array(["true", "false"]))))
    if not len(changed) or pc.all(truth).as_py() is not True:
        return None
    return (
        f"pandas reads the id {changed[0]} as a truth value, which the saved workflow takes for "
        f"{changed[0].as_py().lower()} and so for unknown: read what it is given with dtype=str"
    )


def note_on_words(texts: pa.Array) -> str | None:
    """What must be said of distinct ids that pandas reads from a csv file as missing values.

    Args:
        texts: the distinct ids of a column.
    """
    words = texts.filter(pc.is_in(texts, value_set=pa.array(sorted(READ_AS_MISSING))))
    if not len(words):
        return None
    return (
        f"pandas reads the id {words[0]} as a missing value, and so the saved workflow would take "
        'it for one: read what it is given with keep_default_na=False, na_values=[""]'
    )


def same_text(a: pa.DataType, b: pa.DataType) -> bool:
    """Whether `as_text` writes one value of two types as one text, so that ids of both agree.

    Integers and texts agree with each other and with floats of one width; a unit of time does not
    matter, a time zone does. A column of nothing but nulls agrees with all.
    """
    plain, floats = {"integer", "text"}, {"halffloat", "float", "double"}
    kinds = {_kind_of_text(a), _kind_of_text(b)} - {"null"}
    return len(kinds) < 2 or (kinds <= plain | floats and len(kinds & floats) < 2)


def _kind_of_text(kind: pa.DataType) -> str:
    if pa.types.is_dictionary(kind) or is_list_type(kind):
        return _kind_of_text(kind.value_type)
    if pa.types.is_integer(kind):
        return "integer"
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    if is_text or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return "text"
    if pa.types.is_timestamp(kind):
        return f"timestamp {kind.tz}"
    if pa.types.is_decimal(kind):
        return f"decimal {kind.scale}"
    return "time" if pa.types.is_time(kind) else str(kind)


def mixed_as_text(values: Sequence[Any]) -> pa.Array:
    """Values of several types, such as texts and numbers, each as `as_text` writes it; or lists."""
    if any(map(_is_list, values)):
        lists = list(map(_list, values))
        return as_text(pa.array(lists, pa.list_(pa.string())))
    return as_text(pa.array(map(_one, values), pa.string()))


def _list(value: Any) -> list[str | None] | None:
    if _is_list(value):
        return list(map(_one, value))
    if _one(value) is not None:
        raise TypeError(f"a column of lists must hold lists alone. Received: {value!r}")
    return None


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple | np.ndarray)


def _one(value: Any) -> str | None:
    if isinstance(value, str):
        return value
    try:
        return as_text(pa.array([value], from_pandas=True))[0].as_py()
    except pa.ArrowException:
        return str(value)


def column_as_text(
    column: Any, to_arrow: Callable[[Any], pa.Array], from_arrow: Callable[[pa.Array], Any]
) -> Any:
    """A column of a data frame library as text, through its distinct values.

    So that the rule is Arrow's wherever the column is: of cuDF's, only what is distinct is taken to
    the host (its own texts of numbers have another form, and 10 digits).

    Args:
        column: has ``factorize() → (places of distinct values, -1 for a missing one; the values)``,
            as pandas and cuDF have it.
        to_arrow: the distinct values as an Arrow array.
        from_arrow: a column of the library; it has ``take(places)`` and an index of its own.
    """
    places, distinct = column.factorize()
    texts = pa.concat_arrays([as_text(to_arrow(distinct)), pa.nulls(1, pa.string())])
    out = from_arrow(texts).take(places.astype("int64") % len(texts))  # -1: the last one
    out.index = column.index
    return out
