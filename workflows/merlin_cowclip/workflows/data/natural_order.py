"""The order of files that a glob or a folder gives: by name, with numbers as numbers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any


def natural_order(path: Path) -> tuple[Any, ...]:
    """A key that sorts day_9/part_2 before day_9/part_10, and that before day_10."""
    pieces = [re.split(r"(\d+)", part) for part in path.parts]
    return ([[int(p) if p.isdecimal() else p for p in part] for part in pieces], str(path))
