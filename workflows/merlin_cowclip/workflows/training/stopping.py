"""Finish the update in hand, save, then stop: on SIGINT, SIGTERM, SIGHUP or a time limit.

The first signal, and the end of the time, only ask for it; the training loop looks after each
update. A second signal has its previous handler.

A signal comes to one rank: what it alone followed would leave the others waiting. So ranks tell
each other at every `EVERY`th update, as it costs a millisecond.
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

EVERY = 10  # updates between two agreements of ranks
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ONCE = 2.0  # seconds in which a rank's second signal is the launcher's, of what it was sent itself


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
        if max_minutes is not None and not 0 < max_minutes < math.inf:
            raise UserError(f"max_minutes must be positive. Received: {max_minutes}. Correct it")
        self._heard: int | None = None  # the first signal
        self._heard_at = -math.inf
        self._several, self._calls = several, 0
        self._agreed: tuple[int | None, bool] = None, False
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
        number, is_out_of_time = self._agreed if self._several else self._own()
        return number is not None or is_out_of_time

    def _own(self) -> tuple[int | None, bool]:
        return self._heard, self._end is not None and time.monotonic() >= self._end

    def agree(self, is_due: bool = False, *, now: bool = False) -> bool:
        """On several ranks, if it is time or `now`: agree on whether to stop.

        Returns whether something is due, as the first rank says.
        """
        if not self._several:
            return is_due
        self._calls += 1
        if not now and self._calls % EVERY != 1:
            return False
        numbers, are_out, due = zip(*said_by_all([*self._own(), is_due]), strict=True)
        self._agreed = next((n for n in numbers if n is not None), None), any(are_out)
        return bool(due[0])

    def __enter__(self) -> Stopping:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._received)
        return self

    def __exit__(self, *_: object) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)

    def _received(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._heard is None:
            self._heard, self._heard_at = number, now
        elif not self._several or now - self._heard_at >= _ONCE:
            self.__exit__()
            signal.raise_signal(number)
