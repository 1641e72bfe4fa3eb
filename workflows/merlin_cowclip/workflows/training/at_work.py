"""What a rank reads or writes while the others wait for it, and whether it goes on with it.

A disk may be slow, and a checkpoint large: nobody knows how long it takes. But a rank that goes on
has read, written or computed something within any minute, and one that hangs has not.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import psutil

UNKNOWN = -1
_BYTES = 1 << 20  # read or written: a sign; a log's lines are fewer
_works: list[bool] = []  # an item for each `at_work` of the main thread
_pieces = [0]


@contextlib.contextmanager
def at_work() -> Iterator[None]:
    """Within it this rank may take longer than the others, which wait for it, before it hangs."""
    _works.append(True)
    try:
        yield
    finally:
        _works.pop()


def is_at_work() -> bool:
    """Whether the main thread is."""
    return bool(_works)


def piece_done() -> None:
    """A sign of that which the system does not count: what has come to the disk itself."""
    _pieces[0] += 1


class Signs:
    """Counts how often this process was seen to go on.

    Of CPU time it looks at Python's threads but for the one that asks: Horovod's and TensorFlow's
    own take some at any time, and what TensorFlow writes shows in bytes.

    Args:
        seconds: of CPU time that are a sign.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._process = psutil.Process()
        self._was = self._now()
        self._count = 0

    def count(self) -> int:
        """One more than before if the process has gone on since; UNKNOWN if nothing tells that."""
        now = self._now()
        if now is None or self._was is None:
            return UNKNOWN
        pieces, moved, times = now
        was_pieces, was_moved, was_times = self._was
        seconds = sum(time - was_times.get(thread, 0.0) for thread, time in times.items())
        if pieces != was_pieces or moved - was_moved >= _BYTES or seconds >= self._seconds:
            self._was = now
            self._count += 1
        return self._count

    def _now(self) -> tuple[int, int, dict[int, float]] | None:
        """Pieces, bytes, and the CPU seconds of each thread."""
        try:
            of = self._process.io_counters()
            threads = self._process.threads()
        except (AttributeError, psutil.Error, OSError):  # macOS, say, counts no bytes
            return None
        ours = {thread.native_id for thread in threading.enumerate()} - {threading.get_native_id()}
        times = {one.id: one.user_time + one.system_time for one in threads if one.id in ours}
        return _pieces[0], of.read_chars + of.read_bytes + of.write_bytes, times
