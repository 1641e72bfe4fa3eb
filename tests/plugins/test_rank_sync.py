"""What a fit's ranks agree on, by what another rank says; that needs no ranks."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from merlin_cowclip.plugins import RankSync
from merlin_cowclip.plugins.distributed.horovod import Ranks
from merlin_cowclip.plugins.optimizers import rank_sync as callbacks
from merlin_cowclip.plugins.optimizers.rank_sync import with_rank_sync

KERAS = tf.keras.callbacks


@pytest.fixture
def of_two(monkeypatch):
    """A callback of the first of two ranks; the second says `others`, gather by gather."""

    def create(others, **given):
        answers, calls = iter(others), []
        monkeypatch.setattr(callbacks, "synchronize", lambda *given: calls.append("sync"))
        monkeypatch.setattr(callbacks, "ranks", lambda: Ranks(0, 2, 0, 2))
        monkeypatch.setattr(callbacks, "all_gather", lambda own: np.append(own, next(answers)))
        monkeypatch.setattr(callbacks, "all_gather_object", lambda own: [own, next(answers)])
        monkeypatch.setattr(callbacks, "optimizer_of", lambda model: None)
        sync = RankSync(**given)
        sync.set_model(SimpleNamespace(stop_training=False))
        return sync, calls

    return create


def test_ranks_are_synchronized_before_each_epoch(of_two):
    sync, calls = of_two([0])
    sync.on_train_begin()
    for epoch in range(2):
        sync.on_epoch_begin(epoch)
        assert len(calls) == epoch + 1


@pytest.mark.parametrize(("here", "other"), [(True, 0), (False, 1), (False, 0)])
def test_ranks_stop_after_a_batch_where_one_looks_at_batches(of_two, here, other):
    sync, _ = of_two([other, 0, 1], each_batch=here)
    sync.on_train_begin()
    for expected in (False, here or bool(other)):
        sync.on_train_batch_end(0)
        assert sync.model.stop_training is expected


def test_ranks_stop_at_an_epochs_end(of_two):
    sync, _ = of_two([[{}, False], [{}, True]])
    for expected in (False, True):
        sync.on_epoch_end(0, {})
        assert sync.model.stop_training is expected


def test_a_mean_is_of_the_ranks_that_have_it(of_two):
    """All lengths and types that Keras's metrics may have; NaN stays one."""
    other = {"loss": 0.5, "by class": [1.0, 3.0], "auc": float("nan")}
    sync, _ = of_two([[other, False]])
    logs = {"loss": np.float32(0.25), "by class": np.array([2.0, 2.0]), "auc": 0.7, "val_loss": 3}
    sync.on_epoch_end(0, logs)
    assert logs.pop("loss") == pytest.approx(0.375)
    assert np.isnan(logs.pop("auc"))
    np.testing.assert_array_equal(logs.pop("by class"), [1.5, 2.5])
    assert logs == {"val_loss": 3.0}


def test_one_rank_has_no_other():
    sync, logs = RankSync(each_batch=True), {"loss": np.float32(0.25)}
    sync.set_model(SimpleNamespace(stop_training=True))  # of any optimizer
    sync.on_train_begin()
    sync.on_epoch_begin(0)
    sync.on_train_batch_end(0)
    sync.on_epoch_end(0, logs)
    assert logs == {"loss": np.float32(0.25)}


@pytest.mark.parametrize(
    ("given", "each_batch"),
    [([], False), ([KERAS.EarlyStopping()], False), ([KERAS.TerminateOnNaN()], True)],
)
def test_a_fit_has_it_first_and_last(given, each_batch):
    first, *between, last = with_rank_sync(given)
    assert between == given
    assert [type(one) for one in (first, last)] == [RankSync] * 2
    assert (first._each_batch, last._each_batch) == (False, each_batch)
