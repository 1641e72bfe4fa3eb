"""Which callbacks may end a fit after a batch, and what the ranks agree on; that needs no ranks."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from merlin_cowclip.plugins import stopping_alike as module
from merlin_cowclip.plugins.joining import Ranks
from merlin_cowclip.plugins.stopping_alike import may_stop_after_a_batch, stopping_alike

pytestmark = pytest.mark.extended
KERAS = tf.keras.callbacks


class AtBatches(KERAS.Callback):
    def on_train_batch_end(self, batch, logs=None):
        pass


class AtEpochs(KERAS.Callback):
    def on_epoch_end(self, epoch, logs=None):
        pass


@pytest.mark.parametrize(
    ("callback", "may"),
    [
        (AtBatches(), True),
        (KERAS.TerminateOnNaN(), True),
        (KERAS.LambdaCallback(on_batch_end=print), True),
        (AtEpochs(), False),
        (KERAS.ModelCheckpoint("."), False),
        (KERAS.EarlyStopping(), False),
    ],
)
def test_callbacks_that_may_stop_after_a_batch(callback, may):
    assert may_stop_after_a_batch(callback) is may


def of_two_ranks(monkeypatch, others):
    """What the other rank says, gather by gather."""
    said = iter(others)
    monkeypatch.setattr(module, "ranks", lambda: Ranks(0, 2, 0, 2))
    monkeypatch.setattr(module, "gathered", lambda mine: np.concatenate([mine, [next(said)]]))


@pytest.mark.parametrize(("mine", "others"), [([AtBatches()], 0), ([AtEpochs()], 1)])
def test_ranks_agree_after_each_batch_where_one_looks_at_batches(monkeypatch, mine, others):
    of_two_ranks(monkeypatch, [others, 0, 1])
    *given, last = stopping_alike(mine)
    assert given == mine
    assert last._implements_train_batch_hooks()
    last.set_model(SimpleNamespace(stop_training=False))
    last.on_train_batch_end(0)
    assert last.model.stop_training is False
    last.on_train_batch_end(1)
    assert last.model.stop_training is True


def test_else_they_agree_at_an_epochs_ends(monkeypatch):
    of_two_ranks(monkeypatch, [0, 0, 1, 1])
    *_, last = stopping_alike([AtEpochs()])
    assert not last._implements_train_batch_hooks()
    last.set_model(SimpleNamespace(stop_training=False))
    last.on_train_batch_end(0)
    assert last.model.stop_training is False
    last.on_epoch_end(0)
    assert last.model.stop_training is False
    last.on_epoch_end(1)
    assert last.model.stop_training is True
    last.model.stop_training = False
    last.on_epoch_begin(2)  # Keras ends an epoch after its first batch where this has stopped it
    assert last.model.stop_training is True
