"""In which raw columns of an adopted workflow an empty text is a value, and not a missing one.

A server's client has no missing text: an empty one stands for it, unless the workflow makes
something of it. Importing this module imports NVTabular: import it where used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa

from merlin_cowclip.workflows.data.input_columns import joined_columns
from merlin_cowclip.workflows.data.prepare.statistics import UNKNOWN
from merlin_cowclip.workflows.data.raw_columns import a_row, learned_keys
from merlin_cowclip.workflows.data.raw_types import raw_types
from merlin_cowclip.workflows.data.row_for_row import transformed
from merlin_cowclip.workflows.quiet import quiet_operators

if TYPE_CHECKING:
    from collections.abc import Iterable

    import nvtabular as nvt


def columns_that_hold_empty(workflow: nvt.Workflow, fields: Iterable[str]) -> frozenset[str]:
    """Of these, and of columns of no text, an empty text is not taken for a missing one.

    Where the workflow looks a column up as it is, the vocabulary tells. What other operators make
    of it rows of our making tell: a value, if an input is another than of a missing one, and no id
    or statistic as of a text that nobody has seen. Where these are none of the workflow's, nothing
    is known, and it is missing.

    Args:
      workflow: fitted, with its vocabularies, and with the types of `name_types`.
      fields: the inputs that it makes.
    """
    keys, found = learned_keys(workflow), set()
    for name, one in raw_types(workflow).items():
        binary = one.kind is not None and pa.types.is_binary(one.kind)
        if one.kind is None or binary or pa.types.is_string(one.kind):
            empty: Any = b"" if binary else ""
            known = any(key.has(empty) for key in keys.get(name, ()))
            if not known and not _is_told(workflow, name, empty, one.is_list, fields):
                continue
        found.add(name)
    return frozenset(found)


def _is_told(
    workflow: nvt.Workflow, name: str, empty: Any, is_list: bool, fields: Iterable[str]
) -> bool:
    unseen = b"\x01 never seen" if isinstance(empty, bytes) else "\x01 never seen"
    made = [
        _made_of(workflow, name, [value] if is_list else value)
        for value in (empty, empty, unseen, None)
    ]
    given, again, other, missing = made
    if given is None or again is None:
        return False
    joined = joined_columns(workflow, tables=True)
    for field in fields:
        by_chance = not is_same(given[field], again[field])
        if by_chance or (missing and is_same(given[field], missing[field])):
            continue
        if field in joined and other and is_same(given[field], other[field]):
            continue  # what it is of any other as well
        if not _is_unknown(workflow, field, given[field]):
            return True
    return False


def _made_of(workflow: nvt.Workflow, name: str, value: Any) -> dict[str, Any] | None:
    """What the workflow makes of one row; None where it takes none such."""
    row = a_row(workflow.input_schema)
    rows = pd.concat([row, row], ignore_index=True)  # of a missing one alone Categorify takes none
    rows[name] = pd.Series([value, row[name][0]], dtype=object)
    try:
        with quiet_operators():
            made = transformed(workflow, rows, past_filters=True)
    except Exception:  # whatever the user's own operators raise
        return None
    return {str(column): made[column].tolist()[0] for column in made}


def is_same(value: Any, other: Any) -> bool:
    """Whether two cells, or what several hold, are equal; what is missing is."""
    one, two = np.ravel(value), np.ravel(other)
    return one.shape == two.shape and bool(pd.Series(one).equals(pd.Series(two)))


def _is_unknown(workflow: nvt.Workflow, field: str, value: Any) -> bool:
    """Whether it is an id that a vocabulary does not have, in a bucket of its own perhaps."""
    properties = workflow.output_schema[field].properties
    ids = np.atleast_1d(value)
    if not properties.get("cat_path") or not len(ids):
        return False
    beyond = UNKNOWN + int(properties.get("num_buckets") or 1)
    return bool(((ids >= UNKNOWN) & (ids < beyond)).all())
