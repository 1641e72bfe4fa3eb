"""Which callbacks may load weights before a fit's first step, and when ranks share them then."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from merlin_cowclip.plugins import CowClipOptimizer, joining, together
from merlin_cowclip.plugins import beginning_alike as module
from merlin_cowclip.plugins.beginning_alike import beginning_alike, may_load_before_a_step
from merlin_cowclip.plugins.joining import Ranks

from .test_optimizer import HOT

pytestmark = pytest.mark.extended
KERAS = tf.keras.callbacks


class AtBegin(KERAS.Callback):
    def on_train_begin(self, logs=None):
        pass


class AtBatches(KERAS.Callback):
    def on_batch_begin(self, batch, logs=None):
        pass


class AtEnds(KERAS.Callback):
    def on_epoch_end(self, epoch, logs=None):
        pass


@pytest.mark.parametrize(
    ("callback", "may"),
    [
        (AtBegin(), True),
        (AtBatches(), True),
        (KERAS.LambdaCallback(on_train_begin=print), True),
        (KERAS.BackupAndRestore("."), True),
        (AtEnds(), False),
        (KERAS.ModelCheckpoint("."), False),
        (KERAS.EarlyStopping(), False),
    ],
)
def test_callbacks_that_may_load_weights(callback, may):
    assert may_load_before_a_step(callback) is may


def of_two_ranks(monkeypatch, other):
    """Of which the other one says so."""
    monkeypatch.setattr(module, "ranks", lambda: Ranks(0, 2, 0, 2))
    monkeypatch.setattr(module, "gathered", lambda mine: np.concatenate([mine, [other]]))


@pytest.mark.parametrize(
    ("mine", "other", "at"), [([AtBegin()], [0, 0], "epoch"), ([AtBatches()], [0, 0], "batch")]
)
def test_ranks_share_once_before_the_first_step(monkeypatch, mine, other, at):
    of_two_ranks(monkeypatch, other)
    shared = []
    *given, last = beginning_alike(mine, lambda: shared.append(1))
    assert given == mine
    assert last._implements_train_batch_hooks() is (at == "batch")
    last.on_epoch_begin(3)
    assert len(shared) == (at == "epoch")
    last.on_train_batch_begin(0)
    last.on_epoch_begin(4)
    last.on_train_batch_begin(0)
    assert len(shared) == 1


def test_ranks_with_other_epochs_are_refused(monkeypatch):
    optimizer = CowClipOptimizer(HOT)
    optimizer.epochs_begin(1, (0, 0))  # one rank has no other to differ from
    monkeypatch.setattr(together, "ranks", lambda: Ranks(0, 2, 0, 2))
    other = {"epochs": 4, "first epoch": 2, "first step": 5}
    monkeypatch.setattr(joining, "of_all_ranks", lambda mine: [mine, other])
    optimizer.epochs_begin(4, (np.int64(2), 5))
    with pytest.raises(ValueError, match="same epochs on all.* first step 0 on rank 0, 5 on rank"):
        optimizer.epochs_begin(4, (2, 0))
