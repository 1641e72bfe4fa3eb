"""Ids of any type as text, by one rule: `prepare` encodes the text, and raw ids are found by it."""

from __future__ import annotations

import re

import pyarrow as pa
import pyarrow.compute as pc

from merlin_cowclip.plugins._checks import DIGITS

EXACT = float(2 ** DIGITS["float64"])


def as_text(values: pa.Array) -> pa.Array:
    """Ids as text, or lists of ids as lists of text.

    A whole float becomes the integer it was (pandas turns integers beside a missing value into
    floats); a time has no zeros behind its last fraction of a second (pandas makes every unit
    nanoseconds); NaN and empty text become null; a null list becomes an empty one.

    Raises:
        pyarrow.ArrowNotImplementedError: a type without a text that pandas would give again.
    """
    kind = values.type
    if pa.types.is_duration(kind):  # its text would be a number of whatever unit it is stored in
        raise pa.ArrowNotImplementedError("durations have no text of their own")
    if pa.types.is_dictionary(kind):
        return as_text(values.dictionary).take(values.indices)
    if is_list_type(kind):
        lengths = pc.fill_null(pc.list_value_length(values), 0).cast(pa.int64())
        ends = pc.cumulative_sum(lengths)
        offsets = pa.concat_arrays([pa.array([0], pa.int64()), ends]).cast(pa.int32())
        return pa.ListArray.from_arrays(offsets, as_text(values.flatten()))
    if pa.types.is_floating(kind):
        values = values.cast(pa.float64())
        values = pc.if_else(pc.is_nan(values), None, values)
        # What is no id of ours (`exact_ids`) stays in float notation.
        whole = pc.and_(pc.equal(values, pc.round(values)), pc.less(pc.abs(values), EXACT))
        integers = pc.if_else(whole, values, None).cast(pa.int64())
        return pc.if_else(whole, integers.cast(pa.string()), values.cast(pa.string()))
    texts = _text_of_offset(values) if _offset_of(kind) else values.cast(pa.string())
    if pa.types.is_timestamp(kind) or pa.types.is_time(kind):
        texts = pc.replace_substring_regex(texts, r"(\.[0-9]*[1-9])0+([^0-9]|$)", r"\1\2")
        texts = pc.replace_substring_regex(texts, r"\.0+([^0-9]|$)", r"\1")
    if texts.offset:  # of a slice Arrow's if_else copies its texts, but keeps where they began
        texts = pa.concat_arrays([texts])
    return pc.if_else(pc.equal(texts, ""), pa.scalar(None, pa.string()), texts)


def _offset_of(kind: pa.DataType) -> re.Match[str] | None:
    """The time zone of a timestamp that has no name, but hours and minutes: "+05:30"."""
    zone = kind.tz if pa.types.is_timestamp(kind) else None
    return re.fullmatch("([+-])([0-9]{2}):?([0-9]{2})", zone or "")


def _text_of_offset(values: pa.Array) -> pa.Array:
    """Timestamps with an offset, as Arrow writes those of a zone by name: "…+0530"."""
    unit, match = values.type.unit, _offset_of(values.type)
    assert match is not None
    sign, hours, minutes = match.groups()
    seconds = int(f"{sign}1") * (3600 * int(hours) + 60 * int(minutes))
    ahead = pa.scalar(seconds, pa.duration("s")).cast(pa.duration(unit))
    local = pc.add(values.cast(pa.timestamp(unit)), ahead)  # cast: in UTC
    return pc.binary_join_element_wise(local.cast(pa.string()), f"{sign}{hours}{minutes}", "")


def is_list_type(kind: pa.DataType) -> bool:
    """Whether a column of that type holds lists."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Of a dictionary, the type of what it holds."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def is_number(kind: pa.DataType) -> bool:
    """Whether a column of that type holds numbers."""
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_decimal(kind)
    )
