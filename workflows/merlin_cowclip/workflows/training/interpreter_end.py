"""The end of the interpreter: it waits for threads that are in our Python, and lets none in."""

from __future__ import annotations

import atexit
import os
import threading
import time


class InterpreterEnds(Exception):  # noqa: N818 - no error
    """There are no more batches."""


class _AtWork:
    """Where threads are in our Python: they come out before the interpreter ends, and stay out.

    A thread that needs the interpreter when that has begun to end never comes back, and TensorFlow,
    which ends an iterator by waiting for its threads, would wait for ever, or abort.
    """

    _QUIET = 0.05  # seconds in which a thread of TensorFlow's would have asked again
    _PATIENCE = 10.0  # seconds for a file system that does not answer

    def __init__(self) -> None:
        self._begin()
        self._ended = False
        os.register_at_fork(after_in_child=self._begin)  # which has none of the threads
        atexit.register(self._end)

    def _begin(self) -> None:
        self._changed = threading.Condition()
        self._threads = 0
        self._last = -self._QUIET

    def __enter__(self) -> None:
        with self._changed:
            self._last = time.monotonic()
            if self._ended:
                raise InterpreterEnds
            self._threads += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._last = time.monotonic()
            self._threads -= 1
            self._changed.notify_all()

    def _end(self) -> None:
        with self._changed:
            self._ended = True
            deadline = time.monotonic() + self._PATIENCE
            while self._threads or time.monotonic() < self._last + self._QUIET:
                if time.monotonic() > deadline:
                    return
                self._changed.wait(self._QUIET)


AT_WORK = _AtWork()
"""`with AT_WORK:` around what a thread does in Python; `InterpreterEnds` where it may not begin."""
