"""Batches made ahead: each window and each batch in a thread of its own, which ends with it."""

from __future__ import annotations

import concurrent.futures
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from merlin_cowclip.workflows.training.interpreter_end import AT_WORK
from merlin_cowclip.workflows.training.order import Order, Piece, Window
from merlin_cowclip.workflows.training.rows import Batch, Reader, Rows

AHEAD = 2  # batches made before they are asked for
ITERATORS = 2  # served side by side; one more, and the one not used for longest reads again

T = TypeVar("T")
Future = concurrent.futures.Future


class Stream:
    """Batches by number g = epoch · order.batches + k, up to `stop`, some made ahead.

    Any may be asked for at any time. Asked for in order, the next ones are being made, and the next
    window is being read, while one is used; across the end of an epoch, too.
    """

    def __init__(self, order: Order, reader: Reader, stop: int | None) -> None:
        self._order = order
        self._reader = reader
        self._stop = stop
        self._plans: dict[int, list[Window]] = {}
        self._read: dict[tuple[int, int], Future[tuple[Rows, np.ndarray]]] = {}
        self._made: dict[int, Future[Batch]] = {}
        self._reading = threading.Lock()  # one window after the other: the first is wanted first

    def __getitem__(self, g: int) -> Batch:
        wanted = range(g, g + 1 + AHEAD if self._stop is None else min(g + 1 + AHEAD, self._stop))
        epochs = {i // self._order.batches for i in wanted}
        self._plans = {e: self._plans.get(e) or self._order.windows(e) for e in epochs}
        pieces = {i: self._pieces(i) for i in wanted}
        windows = {(p.window.epoch, p.window.number): p.window for i in wanted for p in pieces[i]}
        first = pieces[g][0].window
        for after in self._plans[first.epoch][first.number + 1 : first.number + 2]:
            windows[after.epoch, after.number] = after
        # What is no longer wanted goes with the old dictionary.
        self._read = {
            key: self._read.get(key) or _in_thread(self._hold, window)
            for key, window in windows.items()
        }
        self._made = {
            i: self._made.get(i)
            or _in_thread(
                _make, [(self._read[p.window.epoch, p.window.number], p) for p in pieces[i]]
            )
            for i in wanted
        }
        return self._made.pop(g).result()

    def _pieces(self, g: int) -> list[Piece]:
        epoch, k = divmod(g, self._order.batches)
        return self._order.pieces(self._plans[epoch], k)

    def _hold(self, window: Window) -> tuple[Rows, np.ndarray]:
        with self._reading:
            return self._reader.read(window), self._order.of_rows(window)


class Streams:
    """A stream for each iterator that is in use; an iterator is a number."""

    def __init__(self, make: Callable[[int | None], Stream]) -> None:
        self._make = make
        self._lock = threading.RLock()  # a dropped iterator may be forgotten anywhere, even in it
        self._streams: OrderedDict[int, Stream] = OrderedDict()  # by iterator, last used last
        self._iterators = itertools.count()

    def __len__(self) -> int:
        return len(self._streams)

    def new_iterator(self) -> int:
        """One that nobody else has."""
        with self._lock:
            return next(self._iterators)

    def of(self, iterator: int, stop: int | None) -> Stream:
        """The iterator's stream, up to batch `stop`; a new one if the old was let go."""
        with self._lock:
            stream = self._streams.pop(iterator, None) or self._make(stop)
            self._streams[iterator] = stream
            while len(self._streams) > ITERATORS:
                self._streams.popitem(last=False)
            return stream

    def forget(self, iterator: int) -> None:
        """Let go what is ready for it."""
        with self._lock:
            self._streams.pop(iterator, None)


def _make(pieces: list[tuple[Future[tuple[Rows, np.ndarray]], Piece]]) -> Batch:
    parts = []
    for reading, piece in pieces:
        rows, order = reading.result()
        parts.append(rows.take(order[piece.low : piece.high]))
    return Batch.of(Rows.joined(parts))


def _in_thread(work: Callable[..., T], *arguments: Any) -> Future[T]:
    """Start `work` in a thread of its own, which ends with it."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            with AT_WORK:
                future.set_result(work(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="merlin-cowclip-loader", daemon=True).start()
    return future
