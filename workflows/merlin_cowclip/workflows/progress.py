"""The progress bar, on stderr."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tqdm import tqdm

_MANY = (" rows", "B")  # units that are counted in thousands
_LONG = 3.0  # seconds, of what is shown only then
_IN_LOGS = 30.0  # seconds between two states of a bar that no terminal shows


def progress_bar(
    title: str, total: int, unit: str = " rows", *, show: bool = True, delay: float = 0.0
) -> tqdm:
    """A bar of `total` units: a context manager, with `update(n)`; silent unless `show`.

    Nothing is shown of what takes less than `delay`, in seconds.
    """
    from tqdm import tqdm

    return tqdm(
        total=total,
        desc=f"{title:<8}",
        unit=unit,
        unit_scale=unit in _MANY,
        disable=not show,
        delay=delay,
        mininterval=0.1 if sys.stderr.isatty() else _IN_LOGS,
        file=sys.stderr,
    )


@contextlib.contextmanager
def catching_up_shown(*, show: bool) -> Iterator[None]:
    """Within it, a bar shows that all rows of a table catch up, where this takes long."""
    from merlin_cowclip.plugins.optimizers.deferred import catch_up_progress

    with catch_up_progress(functools.partial(progress_bar, "catch up", show=show, delay=_LONG)):
        yield
