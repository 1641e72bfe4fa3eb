# SPDX-License-Identifier: Apache-2.0
"""The progress bar, on stderr."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tqdm import tqdm

_MANY = (" rows", "B")  # units that are counted in thousands
_IN_LOGS = 30.0  # seconds between two states of a bar that no terminal shows


def progress_bar(title: str, total: int, unit: str = " rows", *, show: bool = True) -> tqdm:
    """A bar of `total` units: a context manager, with `update(n)`; silent unless `show`."""
    from tqdm import tqdm

    return tqdm(
        total=total,
        desc=f"{title:<8}",
        unit=unit,
        unit_scale=unit in _MANY,
        disable=not show,
        mininterval=0.1 if sys.stderr.isatty() else _IN_LOGS,
        file=sys.stderr,
    )
