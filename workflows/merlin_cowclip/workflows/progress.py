"""The one progress bar, on stderr, and lines of what is done, on stdout."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from merlin_cowclip.workflows.errors import UnreadError, UserError

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


def tell(line: str) -> None:
    """Print a line at once; before it comes whatever it tells of, which must not be lost with it.

    Raises:
        UserError: nobody reads it, or the disk that it goes to is full.
    """
    try:
        print(line, flush=True)
    except BrokenPipeError:
        raise UnreadError("what reads the output must read all of it") from None
    except OSError as error:
        raise UserError(
            f"what is printed must find room. Received: {error.strerror}. Free some, or send it "
            "elsewhere"
        ) from None


@contextlib.contextmanager
def catching_up_shown(*, show: bool) -> Iterator[None]:
    """Within it, a bar shows that all rows of a table catch up, where this takes long."""
    from merlin_cowclip.plugins.deferring import shown_by

    with shown_by(functools.partial(progress_bar, "catch up", show=show, delay=_LONG)):
        yield
