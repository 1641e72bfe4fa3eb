"""The order of batches by itself: no file, no thread."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from merlin_cowclip.workflows.training import loader as module
from merlin_cowclip.workflows.training.loader import Order


def epoch_of(order: Order, epoch: int) -> list[list[int]]:
    """Each batch's rows, by their place on disk."""
    ends = np.cumsum(order.group_rows)
    on_disk = [np.arange(end - n, end) for n, end in zip(order.group_rows, ends, strict=True)]
    taken = [
        np.concatenate([on_disk[g] for g in groups])[rows] for groups, rows in order.windows(epoch)
    ]
    rows, size = np.concatenate([[], *taken]), order.batch_size // order.ranks
    return [rows[k * size : (k + 1) * size].astype(int).tolist() for k in range(order.batches)]


ORDERS = {  # (seed, epoch): rows, in batches of 5 and windows of 9 rows or a little more
    (0, 0): "19 3 0 18 6 | 5 21 1 7 2 | 4 20 10 23 16 | 11 12 17 8 13 | 9 22 15 14",
    (0, 1): "5 4 3 7 9 | 1 10 11 6 2 | 8 0 17 18 15 | 20 14 21 22 16 | 12 19 23 13",
    (7, 0): "12 8 0 23 9 | 22 1 11 10 13 | 3 2 6 4 18 | 20 15 16 21 17 | 14 19 5 7",
    (2**40, 3): "1 15 2 17 16 | 9 3 0 10 14 | 8 11 18 19 7 | 20 22 23 21 5 | 6 4 13 12",
}


@pytest.mark.parametrize(("seed", "epoch"), ORDERS)
def test_the_order_is_the_same_in_every_version(monkeypatch, seed, epoch):
    """A change of these numbers is a change of format: no run can resume after it."""
    monkeypatch.setattr(module, "WINDOW_ROWS", 9)
    batches = epoch_of(Order((4, 4, 4, 2, 4, 4, 2), 5, seed), epoch)
    assert " | ".join(" ".join(map(str, batch)) for batch in batches) == ORDERS[seed, epoch]


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    batch=st.integers(1, 30),
    ranks=st.integers(1, 4),
    seed=st.integers(0, 2**64),
    epoch=st.integers(0, 2**40),
    shuffled=st.booleans(),
    window_rows=st.integers(1, 500),
)
def test_ranks_share_an_epoch_that_holds_every_row_once(
    sizes, batch, ranks, seed, epoch, shuffled, window_rows
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "WINDOW_ROWS", window_rows)
        size = batch * ranks
        whole = epoch_of(Order(sizes, size, seed, shuffled), epoch)
        shares = [
            epoch_of(Order(sizes, size, seed, shuffled, rank, ranks, drop_last=True), epoch)
            for rank in range(ranks)
        ]
        rows = list(itertools.chain(*whole))
        assert sorted(rows) == list(range(sum(sizes)))
        assert shuffled or rows == sorted(rows)
        assert [len(b) for b in whole[:-1]] == [size] * (len(whole) - 1)
        full = [b for b in whole if len(b) == size]
        assert [list(itertools.chain(*parts)) for parts in zip(*shares, strict=True)] == full
        assert {len(part) for share in shares for part in share} <= {batch}
