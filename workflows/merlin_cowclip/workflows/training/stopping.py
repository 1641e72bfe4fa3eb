# SPDX-License-Identifier: Apache-2.0
"""Stop after the update in hand: on SIGINT, SIGTERM, SIGHUP or a time limit.

The first signal, and the end of the time, only ask for it; the training loop looks after each
update. A second signal has its previous handler. A signal comes to one rank, so ranks tell each
other of it, at every `EVERY`th update, as that costs a millisecond.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from types import FrameType
from typing import Any

from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.training.ranks import gather_objects, rank_info

EVERY = 10  # updates between two agreements of ranks
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ONCE = 2.0  # seconds in which a rank's second signal is the launcher's, of what it was sent itself


class Stopping:
    """Whether the run is to stop, and why; a context manager that listens for signals.

    Only in the main thread: Python gives signals to no other. A signal that is ignored, as nohup's
    SIGHUP, stays so.

    Args:
        max_minutes: how long it may take from now on; `None` for no end.

    Attributes:
        asked: whether to stop after what is in hand; on several ranks, what they agreed on last.
        number: the signal's that asked for it.
    """

    def __init__(self, max_minutes: float | None = None) -> None:
        if max_minutes is not None and not 0 < max_minutes < math.inf:
            raise UserError(f"--max-minutes must be positive. Received: {max_minutes}")
        self.asked = False
        self.number: int | None = None
        self._end = math.inf if max_minutes is None else time.monotonic() + 60 * max_minutes
        self._several, self._calls = rank_info().size > 1, 0
        self._heard: int | None = None  # the first signal of this rank
        self._heard_at = -math.inf
        self._before: dict[int, Any] = {}

    def agree(self, is_due: bool = False, *, now: bool = False) -> bool:
        """Look at the time; on several ranks, at every `EVERY`th call or `now`, agree on it all.

        Returns whether something else is due, as the first rank says.
        """
        is_over = time.monotonic() >= self._end
        if not self._several:
            self.asked = self.asked or is_over
            return is_due
        self._calls += 1
        if not now and self._calls % EVERY != 1:
            return False
        numbers, are_over, due = zip(*gather_objects([self._heard, is_over, is_due]), strict=True)
        self.number = next((number for number in numbers if number is not None), None)
        self.asked = self.number is not None or any(are_over)
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
            if os.isatty(2):  # not by `print`, which a handler may find half-way
                os.write(2, b"\nStopping after this step. A second signal ends it at once.\n")
            if not self._several:
                self.asked, self.number = True, number
        elif not self._several or now - self._heard_at >= _ONCE:
            self.__exit__()
            signal.raise_signal(number)
