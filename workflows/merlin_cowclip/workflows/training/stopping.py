"""How a run is stopped: after the step in hand, with all of it saved.

The first Ctrl-C, SIGTERM or SIGHUP, and the end of the time that was given, only ask for it; the
training loop looks after each step. A second signal has its previous handler.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from types import FrameType
from typing import Any

from merlin_cowclip.workflows.errors import UserError

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ONCE = 2.0  # seconds in which a rank's second signal is the launcher's, of what it was sent itself


def check_minutes(max_minutes: float | None) -> None:
    """Refuse a time that is none.

    Raises:
        UserError: it is not positive, or infinite.
    """
    if max_minutes is not None and not 0 < max_minutes < math.inf:
        raise UserError(f"max_minutes must be positive. Received: {max_minutes}. Correct it")


class Interrupted(BaseException):
    """Raised between batches of an evaluation, and in a trial, when asked to stop."""


class Stopping:
    """Whether the run is to stop, and why; a context manager that listens for signals.

    Only in the main thread: Python gives signals to no other. A signal that is ignored, as nohup's
    SIGHUP, stays so.

    Args:
        max_minutes: how long it may take from `begin` on; `None` for no end.
        several: whether this process is one of several ranks, which stop where all have agreed to.
    """

    def __init__(self, max_minutes: float | None = None, *, several: bool = False) -> None:
        self._heard: int | None = None  # the first signal
        self._heard_at = -math.inf
        self._several = several
        self._agreed: bool | None = False if several else None
        self._agreed_number: int | None = None
        self._max_minutes = max_minutes
        self._end: float | None = None
        self._before: dict[int, Any] = {}

    def begin(self) -> None:
        """The time that was given runs from the first call on."""
        if self._end is None and self._max_minutes is not None:
            self._end = time.monotonic() + 60 * self._max_minutes

    @property
    def asked(self) -> bool:
        """Whether to stop after what is in hand."""
        if self._agreed is not None:
            return self._agreed
        return self.number is not None or self.out_of_time

    @property
    def number(self) -> int | None:
        """The signal's that asked for it, here or, once that was agreed, on another rank."""
        return self._heard if self._agreed_number is None else self._agreed_number

    def agree(self, number: int | None, out_of_time: bool) -> None:
        """All ranks have said what they were asked: a signal on one, and the end of the time."""
        self._agreed = number is not None or out_of_time
        self._agreed_number = number

    @property
    def out_of_time(self) -> bool:
        """Whether the time that was given is over."""
        return self._end is not None and time.monotonic() >= self._end

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
