"""Batches made ahead: each window and each block of batches in a thread, which ends with it."""

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
from merlin_cowclip.workflows.training.rows import Batch, Block, Reader, Rows

AHEAD = 2  # blocks of batches made before they are asked for
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
        self._made: dict[range, Future[Block]] = {}
        self._reading = threading.Lock()  # one window after the other: the first is wanted first
        self._begun: tuple[range, Block] | None = None

    def __getitem__(self, g: int) -> Batch:
        batches, block = self._begun or (range(0), None)
        if block is None or g not in batches:
            self._begun = None  # not held beside the next one
            batches, block = self.block(g)
            self._begun = (batches, block) if len(batches) > 1 else None
        return block.batch(g - batches.start, block.labels.shape[1])

    def block(self, g: int) -> tuple[range, Block]:
        """Batch g and those that are made with it: which they are, and what is in them."""
        blocks = [self._order.block(g, self._stop)]
        while len(blocks) <= AHEAD and blocks[-1].stop != self._stop:
            blocks.append(self._order.block(blocks[-1].stop, self._stop))
        epochs = {block.start // self._order.batches for block in blocks}
        self._plans = {e: self._plans.get(e) or self._order.windows(e) for e in epochs}
        pieces = {block: self._pieces(block) for block in blocks}
        windows = {(p.window.epoch, p.window.number): p.window for b in blocks for p in pieces[b]}
        first = pieces[blocks[0]][0].window
        for after in self._plans[first.epoch][first.number + 1 : first.number + 2]:
            windows[after.epoch, after.number] = after
        # What is no longer wanted goes with the old dictionary.
        self._read = {
            key: self._read.get(key) or _in_thread(self._hold, window)
            for key, window in windows.items()
        }
        self._made = {
            block: self._made.get(block)
            or _in_thread(
                _make,
                [(self._read[p.window.epoch, p.window.number], p) for p in pieces[block]],
                len(block),
            )
            for block in blocks
        }
        return blocks[0], self._made.pop(blocks[0]).result()

    def _pieces(self, block: range) -> list[Piece]:
        """What its batches are made of, in order; what lies side by side is one."""
        epoch, k = divmod(block.start, self._order.batches)
        pieces: list[Piece] = []
        for i in range(k, k + len(block)):
            for piece in self._order.pieces(self._plans[epoch], i):
                if pieces and pieces[-1].is_before(piece):
                    piece = Piece(piece.window, pieces.pop().low, piece.high)
                pieces.append(piece)
        return pieces

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


def _make(pieces: list[tuple[Future[tuple[Rows, np.ndarray]], Piece]], batches: int) -> Block:
    parts = []
    for reading, piece in pieces:
        rows, order = reading.result()
        parts.append(rows.take(order[piece.low : piece.high]))
    return Block.of(Rows.joined(parts), batches)


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
