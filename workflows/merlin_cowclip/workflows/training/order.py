"""The order of batches: from (seed, epoch, number) to the rows of a part, and nothing else.

Pure: no file is read here, and nothing drawn is kept. So a run can start again at any batch, two
loaders always agree, and so do the ranks of one.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

WINDOW_ROWS = 1 << 19
"""Rows that are permuted together: about 0.15 GiB for 26 + 13 fields. Three windows are in memory,
the one in use and the next two; more only for batches larger than a window. A row group is never
parted, so one that is larger is a window of its own."""


@dataclass(frozen=True)
class RowGroup:
    """A row group of a parquet file."""

    file: Path
    number: int
    rows: int


@dataclass(frozen=True)
class Window:
    """Row groups that are in memory together, at their place in the order of an epoch."""

    epoch: int
    number: int
    start: int  # rows of the epoch before it
    groups: tuple[RowGroup, ...]

    @cached_property
    def rows(self) -> int:
        """Rows of all groups."""
        return sum(group.rows for group in self.groups)


@dataclass(frozen=True)
class Order:
    """Which rows each batch of each epoch has, and which of them are one rank's.

    Args:
      groups: those of the part, in the order on disk.
      batch_size: rows per batch on all ranks together; the ranks divide it.
      seed: of the permutations.
      shuffled: whether epochs differ; else all are in the order on disk.
      rank: whose share of each batch is wanted, from 0.
      ranks: how many share a batch.
      drop_last: whether rows that fill no batch are left out; on several ranks they must be.
    """

    groups: tuple[RowGroup, ...]
    batch_size: int
    seed: int = 0
    shuffled: bool = True
    rank: int = 0
    ranks: int = 1
    drop_last: bool = False

    @cached_property
    def rows(self) -> int:
        """Rows of the part, those left out included."""
        return sum(group.rows for group in self.groups)

    @cached_property
    def batches(self) -> int:
        """Batches per epoch, the same number on every rank."""
        whole, left = divmod(self.rows, self.batch_size)
        return whole + (left > 0 and not self.drop_last)

    def windows(self, epoch: int) -> list[Window]:
        """The epoch's row groups in order, `WINDOW_ROWS` or a little more at a time."""
        groups = list(self.groups)
        if self.shuffled:
            order = permutation(len(groups), self.seed, _OF_GROUPS, epoch)
            groups = [groups[i] for i in order]
        windows: list[Window] = []
        while groups:
            start = windows[-1].start + windows[-1].rows if windows else 0
            enough = itertools.accumulate(group.rows for group in groups)
            taken = sum(1 for _ in itertools.takewhile(lambda rows: rows < WINDOW_ROWS, enough)) + 1
            windows.append(Window(epoch, len(windows), start, tuple(groups[:taken])))
            groups = groups[taken:]
        return windows

    def of_rows(self, window: Window, start: int = 0) -> np.ndarray:
        """This rank's rows of a window in order, by their place on disk, group after group.

        Those of batches before `start` are left out, and so are those that fill no batch.
        """
        order = np.arange(window.rows)
        if self.shuffled:
            order = permutation(window.rows, self.seed, _OF_ROWS, window.epoch, window.number)
        places = np.arange(window.start, window.start + window.rows)
        batch, place = np.divmod(places, self.batch_size)
        is_mine = place // (self.batch_size // self.ranks) == self.rank
        return order[is_mine & (start <= batch) & (batch < self.batches)]


def permutation(n: int, seed: int, *key: int) -> np.ndarray:
    """0 … n - 1 in an order that belongs to (seed, key), and will in every version of NumPy.

    `SeedSequence` keeps the streams of different keys apart, which begin with what they are for,
    also where one key is the beginning of another. The order must never change, or a run that goes
    on would train on some rows of its epoch twice; hence `RandomState`, whose numbers NumPy has
    frozen, those of `Generator` it may change.
    """
    bits = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key))
    return np.random.RandomState(bits).permutation(n)


_OF_GROUPS, _OF_ROWS = 0, 1  # what a stream of random numbers is for
