"""Arrow columns of ids, of any type, to text. Pure Arrow: no pandas, no NVTabular."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc


def as_text(values: pa.Array) -> pa.Array:
    """Ids as text, or lists of ids as lists of text.

    A whole float becomes the integer it was (pandas turns integers beside a missing value into
    floats); NaN and empty text become null; a null list becomes an empty one.
    """
    kind = values.type
    if pa.types.is_dictionary(kind):
        return as_text(values.dictionary).take(values.indices)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        lengths = pc.fill_null(pc.list_value_length(values), 0).cast(pa.int64())
        ends = pc.cumulative_sum(lengths)
        offsets = pa.concat_arrays([pa.array([0], pa.int64()), ends]).cast(pa.int32())
        return pa.ListArray.from_arrays(offsets, as_text(values.flatten()))
    if pa.types.is_floating(kind):
        values = values.cast(pa.float64())
        values = pc.if_else(pc.is_nan(values), None, values)
        # Beyond 2^53 a float no longer holds every integer: it stays in float notation.
        whole = pc.and_(pc.equal(values, pc.round(values)), pc.less(pc.abs(values), float(2**53)))
        integers = pc.if_else(whole, values, None).cast(pa.int64())
        return pc.if_else(whole, integers.cast(pa.string()), values.cast(pa.string()))
    texts = values.cast(pa.string())
    return pc.if_else(pc.equal(texts, ""), pa.scalar(None, pa.string()), texts)
