"""Warn about embedding tables that are larger than the memory."""

from __future__ import annotations

import warnings

from merlin_cowclip.workflows.errors import Notice
from merlin_cowclip.workflows.machine import gibibytes

_COPIES = 3  # the weights, and Adam's m and v
_BYTES = 4


def warn_of_tables(rows: int, width: int, limit: int) -> None:
    """Warn if tables of `rows` rows, `width` floats each, and their slots exceed `limit` bytes."""
    size = rows * width * _COPIES * _BYTES
    if size > limit:
        warnings.warn(
            f"the embedding tables with Adam's slots take {gibibytes(size)}; the memory is "
            f"{gibibytes(limit)}. Choose a smaller embedding_dim, or a higher freq_threshold in "
            "prepare",
            Notice,
            stacklevel=2,
        )
