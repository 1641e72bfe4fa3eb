"""What the machine holds, and how that is said."""

from __future__ import annotations

import contextlib
import platform
import re
from pathlib import Path


def memory_limit() -> int:
    """Bytes of memory that this process may use: the machine's or its container's."""
    from distributed.system import MEMORY_LIMIT

    return int(MEMORY_LIMIT)


def processor() -> str:
    """The CPU's name; of machines of one kind, as a cloud's, it tells those of two apart."""
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        if found := re.search(r"^model name\s*: (.+)$", text, re.MULTILINE):
            return found[1]
    return platform.processor()


def gibibytes(size: float) -> str:
    """A number of bytes, for a message."""
    return f"{size / 2**30:,.1f} GiB"
