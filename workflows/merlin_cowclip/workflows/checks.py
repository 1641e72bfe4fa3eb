"""The refusal of what is no whole number, as the user reads it."""

from __future__ import annotations

from typing import Any

from merlin_cowclip.plugins._checks import is_whole, whole_range
from merlin_cowclip.workflows.errors import UserError


def check_whole(name: str, value: Any, least: int, most: int | None = None) -> None:
    """Refuse what is no whole number, Python's or NumPy's, or out of range.

    Raises:
        UserError: it is something else.
    """
    if not is_whole(value, least, most, numpys=True):
        raise UserError(f"{name} must be {whole_range(least, most)}. Received: {value!r}")
