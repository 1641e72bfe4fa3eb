"""Finish the update in hand, save, then stop: on SIGINT, SIGTERM, SIGHUP or a time limit.

The first signal, and the end of the time, only ask for it; the training loop looks after each
update. A second signal has its previous handler.

A signal comes to one rank: what it alone followed would leave the others waiting. So ranks tell
each other after as many updates on all, about every half second, as it costs a millisecond.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from types import FrameType
from typing import Any

from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.training.ranks import said_by_all

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ONCE = 2.0  # seconds in which a rank's second signal is the launcher's, of what it was sent itself
_SECONDS = 0.5  # between two agreements of ranks, about
_MOST = 1000  # updates


def check_minutes(max_minutes: float | None) -> None:
    """Refuse a time that is none.

    Raises:
        UserError: it is not positive, or infinite.
    """
    if max_minutes is not None and not 0 < max_minutes < math.inf:
        raise UserError(f"max_minutes must be positive. Received: {max_minutes}. Correct it")


class Interrupted(KeyboardInterrupt):
    """Raised between batches of an evaluation, and in a trial, when asked to stop."""


class Stopping:
    """Whether the run is to stop, and why; a context manager that listens for signals.

    Only in the main thread: Python gives signals to no other. A signal that is ignored, as nohup's
    SIGHUP, stays so.

    Args:
        max_minutes: how long it may take from `begin` on; `None` for no end.
        several: whether this process is one of several ranks, which stop where all have agreed to.

    Attributes:
        asked: whether to stop after what is in hand.
        number: the signal's that asked for it, here or on another rank.
    """

    def __init__(self, max_minutes: float | None = None, *, several: bool = False) -> None:
        self._heard: int | None = None  # the first signal
        self._heard_at = -math.inf
        self._several = several
        self._agreed: tuple[int | None, bool] = None, False
        self._left, self._calls, self._since = 1, 0, time.monotonic()
        self._max_minutes = max_minutes
        self._end: float | None = None
        self._before: dict[int, Any] = {}

    def begin(self) -> None:
        """The time that was given runs from the first call on."""
        if self._end is None and self._max_minutes is not None:
            self._end = time.monotonic() + 60 * self._max_minutes

    @property
    def number(self) -> int | None:  # noqa: D102
        return self._agreed[0] if self._several else self._heard

    @property
    def asked(self) -> bool:  # noqa: D102
        if self._several:
            return self._agreed[0] is not None or self._agreed[1]
        return self._heard is not None or self._is_out_of_time()

    def _is_out_of_time(self) -> bool:
        return self._end is not None and time.monotonic() >= self._end

    def agree(self, is_due: bool = False, *, now: bool = False) -> bool:
        """On several ranks, if it is time: agree on whether to stop, and whether something is due.

        Args:
            is_due: what this rank says.
            now: do not wait until it is time, nor at the next call, when something else begins.

        Returns:
            What the first rank says is due.

        Raises:
            AgreedError: a rank has failed.
        """
        if not self._several:
            return is_due
        self._left, self._calls = self._left - 1, self._calls + 1
        if self._left > 0 and not now:
            return False
        seconds = (time.monotonic() - self._since) / self._calls
        said = said_by_all([self._heard, self._is_out_of_time(), is_due, seconds])
        numbers, are_out, due, took = zip(*said, strict=True)
        self._agreed = next((n for n in numbers if n is not None), None), any(are_out)
        self._left = 1 if now else max(1, min(_MOST, int(_SECONDS / max(*took, 1e-9))))
        self._calls, self._since = 0, time.monotonic()
        return bool(due[0])

    def __enter__(self) -> Stopping:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._received)
        return self

    def __exit__(self, *_: object) -> None:
        self._give_back()

    def _received(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._heard is None:
            self._heard, self._heard_at = number, now
        elif not self._several or now - self._heard_at >= _ONCE:
            self._give_back()
            signal.raise_signal(number)

    def _give_back(self) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)
