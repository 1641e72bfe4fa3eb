"""What the machine holds, and how that is said."""

from __future__ import annotations


def memory_limit() -> int:
    """Bytes of memory that this process may use: the machine's or its container's."""
    from distributed.system import MEMORY_LIMIT

    return int(MEMORY_LIMIT)


def gibibytes(size: float) -> str:
    """A number of bytes, for a message."""
    return f"{size / 2**30:,.1f} GiB"
