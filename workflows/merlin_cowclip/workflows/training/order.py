# SPDX-License-Identifier: Apache-2.0
"""The order of rows: a function of (seed, epoch, batch number), without files and state.

So a run can resume at any batch, and all ranks agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

WINDOW_ROWS = 1 << 19
"""Rows that are permuted together: about 0.15 GiB for 26 + 13 fields. Three windows are in memory;
more only if a batch is larger than a window. A larger row group is a window by itself."""


@dataclass(frozen=True)
class Order:
    """Rows of each batch of each epoch, for one rank.

    Args:
      group_rows: rows of each row group, in the order on disk.
      batch_size: rows per batch on all ranks together; a multiple of `ranks`.
      seed: of the permutations.
      shuffled: whether epochs differ; if not, all have the order on disk.
      rank: which share of each batch is wanted, from 0.
      ranks: how many share a batch.
      drop_last: whether to drop rows that fill no batch; required on several ranks.
    """

    group_rows: Sequence[int]
    batch_size: int
    seed: int = 0
    shuffled: bool = True
    rank: int = 0
    ranks: int = 1
    drop_last: bool = False

    @property
    def rows(self) -> int:
        """Rows of all row groups."""
        return sum(self.group_rows)

    @property
    def batches(self) -> int:
        """Batches per epoch, the same number on every rank."""
        whole, left = divmod(self.rows, self.batch_size)
        return whole + (left > 0 and not self.drop_last)

    def windows(self, epoch: int, start: int = 0) -> Iterator[tuple[list[int], np.ndarray]]:
        """Row groups to read together, and which of their rows to take, in order.

        Rows are numbered across the groups of a window. Rows of other ranks, of batches before
        `start`, and rows that fill no batch are not taken. A window without rows is left out.
        """
        groups = np.arange(len(self.group_rows))
        if self.shuffled:
            groups = permutation(len(groups), self.seed, _OF_GROUPS, epoch)
        window: list[int] = []
        number = before = rows = 0  # windows and rows before this window, rows in it
        for group in groups.tolist():
            window.append(group)
            rows += self.group_rows[group]
            if rows < WINDOW_ROWS and before + rows < self.rows:
                continue
            batch, place = np.divmod(np.arange(before, before + rows), self.batch_size)
            is_mine = place // (self.batch_size // self.ranks) == self.rank
            is_mine &= (start <= batch) & (batch < self.batches)
            if is_mine.any():
                order = np.arange(rows)
                if self.shuffled:
                    order = permutation(rows, self.seed, _OF_ROWS, epoch, number)
                yield window, order[is_mine]
            window, number, before, rows = [], number + 1, before + rows, 0


def permutation(n: int, seed: int, *key: int) -> np.ndarray:
    """A permutation of 0 … n - 1 by (seed, key), the same in every version of NumPy.

    Resuming depends on it. `RandomState` is frozen by NumPy, `Generator` is not. `SeedSequence`
    keeps the streams of different keys apart, also where one key is the beginning of another.
    """
    bits = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key))
    return np.random.RandomState(bits).permutation(n)


_OF_GROUPS, _OF_ROWS = 0, 1  # the first number of a key
