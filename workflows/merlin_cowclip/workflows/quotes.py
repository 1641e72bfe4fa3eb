"""Where a csv file's quoted cells begin and end: what must be known to cut it between rows.

RFC 4180, read as Arrow and Python's csv do: a quote that is the first character of a cell opens it;
within, two quotes are one that is meant, and one alone closes; anywhere else a quote is text (5"
disk). Whether a line end ends a row therefore depends on all quotes before it, and on nothing less.
"""

from __future__ import annotations

import functools
import mmap
from collections.abc import Iterable

import numpy as np

OUTSIDE, WITHIN, CLOSED = range(3)  # of quotes; CLOSED: outside, unless a quote follows at once
BLOCK_BYTES = 16 << 20  # looked at together
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_QUOTE = ord('"')

# What a quote does, by the byte before it, to (OUTSIDE, WITHIN, CLOSED).
_AS_TEXT = (OUTSIDE, CLOSED, OUTSIDE)
_AS_FIRST = (WITHIN, CLOSED, WITHIN)  # of a cell
_AS_SECOND = (OUTSIDE, CLOSED, WITHIN)  # of two in a row


def _number(function: tuple[int, ...]) -> int:
    """One of the 27 functions of three states to themselves, as a number."""
    return function[0] + 3 * function[1] + 9 * function[2]


_FUNCTIONS = [(n % 3, n // 3 % 3, n // 9) for n in range(27)]
_IDENTITY = _number((0, 1, 2))
# first, second → the function that does both: associative, so many quotes can be taken at once.
_THEN = np.array(
    [[_number(tuple(g[state] for state in f)) for g in _FUNCTIONS] for f in _FUNCTIONS], np.uint8
)


@functools.cache
def _effects(separator: str) -> np.ndarray:
    """256, the number of a quote's function by the byte before it."""
    effects = np.full(256, _number(_AS_TEXT), np.uint8)
    effects[[ord(separator), ord("\n"), ord("\r")]] = _number(_AS_FIRST)
    effects[_QUOTE] = _number(_AS_SECOND)
    return effects


class QuoteScan:
    """The state after all that was fed, block by block from the start of a file.

    Args:
        separator: between two cells; one ASCII character.
    """

    def __init__(self, separator: str) -> None:
        self.state = OUTSIDE
        self._effects = _effects(separator)
        self._before: int | None = None  # the last byte; None: nothing was fed yet

    def feed(self, block: bytes) -> None:
        """Go on by a block."""
        if not block:
            return
        _, effects = self._quotes(block)
        while len(effects) > 1:  # by pairs: half as many each time
            if len(effects) % 2:
                effects = np.append(effects, np.uint8(_IDENTITY))
            effects = _THEN[effects[::2], effects[1::2]]
        if len(effects):
            self.state = _FUNCTIONS[effects[0]][self.state]

    def _quotes(self, block: bytes) -> tuple[np.ndarray, np.ndarray]:
        """Where the block's quotes are, and the numbers of what they do."""
        first = ord("\n") if self._before is None else self._before
        begins = self._before is None and block.startswith(BYTE_ORDER_MARK)
        self._before = block[-1]
        if b'"' not in block:
            return np.empty(0, np.int64), np.empty(0, np.uint8)
        text = np.frombuffer(block, np.uint8)
        places = np.flatnonzero(text == _QUOTE)
        before = text[places - 1]
        if places[0] == 0:
            before[0] = first
        elif begins and places[0] == len(BYTE_ORDER_MARK):
            before[0] = ord("\n")
        return places, self._effects[before]

    def find_open(self, blocks: Iterable[bytes]) -> tuple[int, str]:
        """The quote that is open at the end of the blocks, quote by quote.

        Returns:
            How many line ends lie before it, and the beginning of its cell.
        """
        lines = held = 0
        cell = b""
        for block in blocks:
            opened = -1
            for place, effect in zip(*(part.tolist() for part in self._quotes(block)), strict=True):
                if self.state != WITHIN and _FUNCTIONS[effect] == _AS_FIRST:
                    opened = place
                self.state = _FUNCTIONS[effect][self.state]
            if opened >= 0:
                held, cell = lines + block.count(b"\n", 0, opened), block[opened : opened + 40]
            lines += block.count(b"\n")
        return held, cell.split(b"\n")[0].decode("utf-8", "replace")


def row_starts(text: mmap.mmap, size: int, separator: str) -> tuple[list[int], bool]:
    """Where a file can be cut into parts of about ``size`` bytes, never within a quoted cell.

    Returns:
        The first byte of each part, from 0 on, and whether every quote is closed at the end.
    """
    scan, starts, at, end = QuoteScan(separator), [0], 0, len(text)
    while at < end:
        target = min(max(starts[-1] + size, at), end)
        for start in range(at, target, BLOCK_BYTES):
            scan.feed(text[start : min(start + BLOCK_BYTES, target)])
        at = target
        # The rest of the row that we are in, quote by quote.
        while at < end:
            line = -1 if scan.state == WITHIN else text.find(b"\n", at)
            quote = text.find(b'"', at, line if line >= 0 else end)
            stop = (quote if quote >= 0 else line) + 1 or end
            for start in range(at, stop, BLOCK_BYTES):
                scan.feed(text[start : min(start + BLOCK_BYTES, stop)])
            at = stop
            if quote < 0 and line >= 0:
                break
        if at < end:
            starts.append(at)
    return starts, scan.state != WITHIN


def line_starts(text: mmap.mmap, size: int) -> list[int]:
    """Where a file without quotes can be cut into parts of about ``size`` bytes."""
    starts = [0]
    while (line := text.find(b"\n", starts[-1] + size)) >= 0 and line + 1 < len(text):
        starts.append(line + 1)
    return starts
