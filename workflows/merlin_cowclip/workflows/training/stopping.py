"""How a run is stopped: after the step in hand, with all of it saved.

The first Ctrl-C, SIGTERM or SIGHUP, and the end of the time that was given, only ask for it; the
training loop looks after each step. A second signal does what it did before: it ends the work at
once.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
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
    """Raised by the first signal where the work may be left anywhere."""


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
        self._anywhere = False
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

    @contextlib.contextmanager
    def anywhere(self) -> Iterator[None]:
        """Within it the first signal does not wait.

        Raises:
            Interrupted: it came.
        """
        self._anywhere = self._agreed is None  # else it waits for the others
        try:
            if self._anywhere and self._heard is not None:
                raise Interrupted
            yield
        except Exception as error:
            # While TensorFlow traces, it puts an AssertionError of its own in the place of any.
            if self._anywhere and self._heard is not None:
                raise Interrupted from error
            raise
        finally:
            self._anywhere = False

    def _received(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._several and now - self._heard_at < _ONCE:
            return
        if self._heard is not None:
            before = self._before[number]
            self._give_back()
            if callable(before):
                before(number, frame)
            else:
                os.kill(os.getpid(), number)
            return
        self._heard, self._heard_at = number, now
        if self._anywhere:
            raise Interrupted

    def _give_back(self) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)
