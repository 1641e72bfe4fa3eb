"""The check of a whole number: what is one, and how one that is none is refused."""

from __future__ import annotations

import numbers
from typing import Any

from merlin_cowclip.workflows.errors import UserError


def is_whole(value: Any, least: int, most: int | None = None, *, numpys: bool = False) -> bool:
    """Whether `value` is a whole number from `least` to `most`, and no bool.

    Args:
        value: anything.
        least: the least that is allowed.
        most: the most, None without an upper limit.
        numpys: whether it may be one of NumPy's, which JSON does not take.
    """
    whole = isinstance(value, numbers.Integral if numpys else int) and not isinstance(value, bool)
    return whole and least <= value and (most is None or value <= most)


def whole_range(least: int, most: int | None = None) -> str:
    """Those numbers in words: "a whole number of at least 1"."""
    return "a whole number " + (
        f"of at least {least}" if most is None else f"from {least} to {most}"
    )


def check_whole(
    name: str, value: Any, least: int, most: int | None = None, *, numpys: bool = False
) -> None:
    """Refuse what `is_whole` does not know.

    Raises:
        UserError: it is no such number.
    """
    if not is_whole(value, least, most, numpys=numpys):
        raise UserError(f"{name} must be {whole_range(least, most)}. Received: {value!r}")
