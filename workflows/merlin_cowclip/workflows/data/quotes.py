"""Where a csv file's quoted cells begin and end: what must be known to cut it between rows.

RFC 4180: a quote that is the first character of a cell opens it; within, two quotes are one that is
meant, and one alone closes the cell, which ends there. Anywhere else a quote is text (5" disk), as
Arrow and Python's csv read it. So whether a line end ends a row depends on all quotes before it.
"""

from __future__ import annotations

import functools
import mmap
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

# Of quotes. CLOSED: outside, unless a quote follows at once. BROKEN: text followed a closing quote.
OUTSIDE, WITHIN, CLOSED, BROKEN = range(4)
BLOCK_BYTES = 16 << 20  # looked at together
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_QUOTE = ord('"')

# What a quote does to (OUTSIDE, WITHIN, CLOSED); BROKEN stays. By the byte before it:
_AS_TEXT = (OUTSIDE, CLOSED, OUTSIDE)
_AS_FIRST = (WITHIN, CLOSED, WITHIN)  # of a cell
_AS_SECOND = (OUTSIDE, CLOSED, WITHIN)  # of two in a row


def _number(function: tuple[int, ...]) -> int:
    """One of the 64 functions of three states to four, as a number."""
    return function[0] + 4 * function[1] + 16 * function[2]


_FUNCTIONS = [(n % 4, n // 4 % 4, n // 16, BROKEN) for n in range(64)]
_IDENTITY = _number((OUTSIDE, WITHIN, CLOSED))
# 64 · first + second → the function that does both: associative, so quotes can be taken together.
_THEN = np.array(
    [_number(tuple(g[state] for state in f)) for f in _FUNCTIONS for g in _FUNCTIONS], np.uint8
)


@functools.cache
def _effects(separator: str) -> tuple[np.ndarray, np.ndarray]:
    """What a quote does, [text follows, byte before it], and whether a byte is text, [byte]."""
    ends = [ord(separator), ord("\n"), ord("\r")]
    effects = np.empty((2, 256), np.uint8)
    for follows in (False, True):
        for before in range(256):
            function = _AS_SECOND if before == _QUOTE else _AS_TEXT
            function = _AS_FIRST if before in ends else function
            if follows:  # by what is none of the cell's
                function = (function[0], BROKEN, function[2])
            effects[int(follows), before] = _number(function)
    text = np.ones(256, np.uint8)
    text[[*ends, _QUOTE]] = 0
    return effects, text


class BadCell(NamedTuple):
    """A quoted cell without an end, or with text behind it.

    Attributes:
        line: where it begins; the first is 0.
        last: where it is closed; None if nowhere.
        text: its beginning.
    """

    line: int
    last: int | None
    text: str


class QuoteScan:
    """The state after all that was fed, block by block from the start of a file.

    Args:
        separator: between two cells; one ASCII character.
    """

    def __init__(self, separator: str) -> None:
        self.state = OUTSIDE
        self._effects, self._text = _effects(separator)
        self._before: int | None = None  # the last byte; None: nothing was fed yet

    @property
    def bad(self) -> bool:
        """Whether a file that ends here has a bad cell."""
        return self.state in (WITHIN, BROKEN)

    def feed(self, block: bytes, after: bytes) -> None:
        """Go on by a block; ``after`` begins with the byte behind it, if there is one."""
        _, effects = self._quotes(block, after)
        while len(effects) > 1:  # by pairs: half as many each time
            if len(effects) % 2:
                effects = np.append(effects, np.uint8(_IDENTITY))
            effects = _THEN[(effects[::2].astype(np.uint16) << 6) | effects[1::2]]
        if len(effects):
            self.state = _FUNCTIONS[effects[0]][self.state]

    def _quotes(self, block: bytes, after: bytes) -> tuple[np.ndarray, np.ndarray]:
        """Where the block's quotes are, and the numbers of what they do."""
        before, begins = self._before, self._before is None
        self._before = block[-1] if block else before
        if b'"' not in block:
            return np.empty(0, np.int64), np.empty(0, np.uint8)
        text = np.frombuffer(block + (after[:1] or b"\n"), np.uint8)
        places = np.flatnonzero(text[:-1] == _QUOTE)
        earlier = text[places - 1]
        if places[0] == 0:
            earlier[0] = ord("\n") if before is None else before
        elif begins and places[0] == len(BYTE_ORDER_MARK) and block.startswith(BYTE_ORDER_MARK):
            earlier[0] = ord("\n")
        return places, self._effects[self._text[text[places + 1]], earlier]

    def find_bad(self, blocks: Iterable[bytes]) -> BadCell:
        """The first bad cell of blocks that have one, quote by quote."""
        lines = line = 0
        cell = b""
        for block, after in with_next(blocks):
            pairs = zip(*(part.tolist() for part in self._quotes(block, after)), strict=True)
            seen = 0
            for place, effect in pairs:
                then = _FUNCTIONS[effect][self.state]
                if then == WITHIN and effect in (_number(_AS_FIRST), self._first_then_text):
                    lines, seen = lines + block.count(b"\n", seen, place), place
                    line, cell = lines, block[place : place + 40]
                self.state = then
                if then == BROKEN:
                    last = lines + block.count(b"\n", seen, place)
                    return BadCell(line, last, _first_line(cell))
            lines += block.count(b"\n", seen)
        return BadCell(line, None, _first_line(cell))

    @functools.cached_property
    def _first_then_text(self) -> int:
        return _number((_AS_FIRST[0], BROKEN, _AS_FIRST[2]))


def _first_line(cell: bytes) -> str:
    return cell.split(b"\n")[0].decode("utf-8", "replace")


def with_next(blocks: Iterable[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Each block that is not empty, and the one behind it; empty after the last."""
    held = b""
    for block in filter(None, blocks):
        if held:
            yield held, block
        held = block
    if held:
        yield held, b""


def row_starts(
    text: bytes | mmap.mmap, size: int, separator: str, end_of_line: bytes = b"\n"
) -> tuple[list[int], bool]:
    """Where a file can be cut into parts of about ``size`` bytes, never within a quoted cell.

    Returns:
        The first byte of each part, from 0 on, and whether there is a `BadCell` in the last one.
    """
    scan, starts, at, end = QuoteScan(separator), [0], 0, len(text)
    while at < end:
        target = min(max(starts[-1] + size, at), end)
        _feed(scan, text, at, target)
        at = target
        # The rest of the row that we are in, quote by quote.
        while at < end and scan.state != BROKEN:
            line = -1 if scan.state == WITHIN else text.find(end_of_line, at)
            quote = text.find(b'"', at, line if line >= 0 else end)
            stop = (quote if quote >= 0 else line) + 1 or end
            _feed(scan, text, at, stop)
            at = stop
            if quote < 0 and line >= 0:
                break
        if scan.state == BROKEN:
            break
        if at < end:
            starts.append(at)
    return starts, scan.bad


def _feed(scan: QuoteScan, text: bytes | mmap.mmap, start: int, stop: int) -> None:
    for a in range(start, stop, BLOCK_BYTES):
        b = min(a + BLOCK_BYTES, stop)
        scan.feed(text[a:b], text[b : b + 1])


def line_starts(text: mmap.mmap, size: int) -> list[int]:
    """Where a file without quotes can be cut into parts of about ``size`` bytes."""
    starts = [0]
    while (line := text.find(b"\n", starts[-1] + size)) >= 0 and line + 1 < len(text):
        starts.append(line + 1)
    return starts
