"""Names that a model's inputs can have: those that TensorFlow can save. Pure Python."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable

_SAVED = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def argument_name(feature: str) -> str:
    """The name that TensorFlow gives an argument of a signature: `user.id` is `user_id`."""
    name = re.sub(r"[.-]", "_", feature)
    return f"arg_{name}" if name[:1].isdigit() else name


def unsavable_names(names: Iterable[str]) -> list[str]:
    """Feature names that a SavedModel's signature cannot take.

    It names the inputs after the features, and Python's arguments after those: letters, digits,
    `_`, `.` and `-` after a letter or digit, no word of Python's, and no two that differ in `.`,
    `-` and `_` alone, in `arg_` before a digit, or in small and capital letters. Keras finds out at
    `model.save`, after the training. (It takes, but renames, those that `argument_name` gives
    another name.)
    """
    refused, taken = [], set[tuple[str, str]]()
    for name in names:
        as_taken = {("argument", argument_name(name)), ("tensor", name.lower())}
        reserved = keyword.iskeyword(name) or name == "self"
        if reserved or taken & as_taken or not _SAVED.fullmatch(name):
            refused.append(name)
        taken |= as_taken
    return refused
