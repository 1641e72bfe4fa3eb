"""Several ranks: they share every batch, and a run goes on with another number of them."""

import itertools

import pandas as pd
import pytest

from merlin_cowclip.models import deepfm
from merlin_cowclip.plugins import CowClipOptimizer, Hyperparameters
from merlin_cowclip.plugins.distributed.horovod import Ranks
from merlin_cowclip.plugins.optimizers import cowclip
from merlin_cowclip.workflows.training import loader as module
from merlin_cowclip.workflows.training.loader import WINDOW_ROWS, Loader

from .batches import BATCH, TRAIN, as_frame, as_numpy, assert_same_batches, of_ranks


@pytest.mark.parametrize(
    ("window_rows", "part", "ranks"),
    [(WINDOW_ROWS, "train", 2), (320, "train", 3), (320, "test", 4), (1, "train", 4)],
)
def test_ranks_share_every_batch(data, monkeypatch, window_rows, part, ranks):
    monkeypatch.setattr(module, "WINDOW_ROWS", window_rows)
    whole = Loader(data, part, batch_size=BATCH, seed=8, drop_last=True)
    shares = of_ranks(data, ranks, part=part, batch_size=BATCH, seed=8, drop_last=True)
    assert {len(loader) for loader in shares} == {len(whole)} == {whole.rows // BATCH}
    for epoch in (0, 3):
        together = zip(*(loader.batches(epoch) for loader in shares), strict=True)
        for batch, parts in zip(whole.batches(epoch), together, strict=True):
            assert {len(labels) for _, labels in parts} == {BATCH // ranks}
            pd.testing.assert_frame_equal(as_frame(parts), as_frame([batch]))


def test_rows_below_a_batch_are_left_out_others_each_epoch(data, small_windows, on_disk):
    loaders = of_ranks(data, 2, batch_size=BATCH, seed=1)
    every = set(on_disk["train"]["serial"])
    left_out = []
    for epoch in range(4):
        seen = pd.concat([as_frame(loader.batches(epoch)) for loader in loaders])["serial"]
        assert seen.is_unique
        left_out.append(every - set(seen))
        assert len(left_out[-1]) == TRAIN % BATCH == 100
    # Of 100 rows among 4,000, two or three are left out twice by chance.
    assert all(len(a & b) < 50 for a, b in itertools.combinations(left_out, 2))


def test_ranks_in_a_dataset(data):
    for loader in of_ranks(data, 3, batch_size=BATCH, seed=2):
        assert_same_batches(as_numpy(loader.dataset(epoch=1)), loader.batches(1))


@pytest.mark.extended
def test_a_fit_knows_the_global_batch_of_a_loaders_dataset(data, monkeypatch, recwarn):
    """It took what Merlin knew of the fit before, times the ranks."""
    loader = Loader(data, batch_size=BATCH, ranks=2)
    dataset = loader.dataset(epochs=None)
    model = deepfm(data.schema, embedding_dim=2, mlp=(2,))
    model(loader.peek()[0])
    optimizer = CowClipOptimizer.for_model(model, Hyperparameters(BATCH, warmup_epochs=0.0))
    check = optimizer._record_batch_size

    def check_on_two_ranks():
        with monkeypatch.context() as two:
            two.setattr(cowclip, "ranks", lambda: Ranks(0, 2, 0, 2))
            check()

    for one, said in ((check_on_two_ranks, False), (check, True)):
        monkeypatch.setattr(optimizer, "_record_batch_size", one)
        model.compile(optimizer=optimizer, metrics=[])
        for given in (loader, dataset, loader.map(lambda *batch: batch)):
            recwarn.clear()
            model.fit(given, steps_per_epoch=2, verbose=0)
            assert any("batches of" in str(w.message) for w in recwarn) == said
