"""The one progress bar, on stderr."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tqdm import tqdm

_MANY = (" rows", "B")  # units that are counted in thousands


def progress_bar(title: str, total: int, unit: str = " rows", *, show: bool = True) -> tqdm:
    """A bar of `total` units: a context manager, with `update(n)`; silent unless `show`."""
    from tqdm import tqdm

    return tqdm(
        total=total,
        desc=f"{title:<8}",
        unit=unit,
        unit_scale=unit in _MANY,
        disable=not show,
        file=sys.stderr,
    )
