"""Several ranks share every batch."""

import itertools

import pandas as pd
import pytest

from merlin_cowclip.workflows.training import loader as module
from merlin_cowclip.workflows.training.loader import WINDOW_ROWS, Loader

from .batches import BATCH, TRAIN, as_frame, assert_same_batches, of_ranks


@pytest.mark.parametrize(
    ("window_rows", "part", "ranks"),
    [(WINDOW_ROWS, "train", 2), (320, "test", 4), (1, "train", 3)],
)
def test_ranks_share_every_batch(data, monkeypatch, window_rows, part, ranks):
    monkeypatch.setattr(module, "WINDOW_ROWS", window_rows)
    whole = Loader(data, part, batch_size=BATCH, seed=8, drop_last=True)
    shares = of_ranks(data, ranks, part=part, batch_size=BATCH, seed=8)
    assert {len(loader) for loader in shares} == {len(whole)} == {whole.rows // BATCH}
    of_all_ranks = zip(*(loader.batches(3) for loader in shares), strict=True)
    for batch, parts in zip(whole.batches(3), of_all_ranks, strict=True):
        assert {len(labels) for _, labels in parts} == {BATCH // ranks}
        pd.testing.assert_frame_equal(as_frame(parts), as_frame([batch]))
    assert_same_batches(shares[1].dataset(epoch=1), shares[1].batches(1))


def test_rows_below_a_batch_are_left_out_others_each_epoch(data, small_windows, on_disk):
    loaders = of_ranks(data, 2, batch_size=BATCH, seed=1)
    every = set(on_disk["train"]["serial"])
    left_out = []
    for epoch in range(3):
        seen = pd.concat([as_frame(loader.batches(epoch)) for loader in loaders])["serial"]
        assert seen.is_unique
        left_out.append(every - set(seen))
        assert len(left_out[-1]) == TRAIN % BATCH == 100
    # Of 100 rows among 4,000, two or three are left out twice by chance.
    assert all(len(a & b) < 50 for a, b in itertools.combinations(left_out, 2))
