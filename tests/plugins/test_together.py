"""What an optimizer asks of a model on several ranks, as far as one process can tell."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from merlin_cowclip.plugins import CowClipOptimizer, Hyperparameters
from merlin_cowclip.plugins._tensorflow import ColumnSchema, Schema, Tags, mm
from merlin_cowclip.plugins.distributed.horovod import Ranks
from merlin_cowclip.plugins.optimizers import cowclip, rank_sync
from merlin_cowclip.plugins.optimizers.state import state_of

from .merlin_models import SCHEMA, TARGET, batch, own_mlp

OTHER = ColumnSchema("z", dtype=np.float32, tags=[Tags.TARGET, Tags.REGRESSION])


def two_outputs(schema):
    features = schema.excluding_by_tag(Tags.TARGET)
    both = mm.OutputBlock(Schema([TARGET, OTHER]))
    return mm.Model(mm.InputBlockV2(features), mm.MLPBlock([4]), both)


def cross_entropy(reduction):
    return tf.keras.losses.BinaryCrossentropy(reduction=reduction)


def own(labels, clicks):
    return tf.square(labels - clicks)


@pytest.fixture
def on_two_ranks(monkeypatch):
    """As the first of two, of which the other has the same."""
    monkeypatch.setattr(cowclip, "ranks", lambda: Ranks(0, 2, 0, 2))
    monkeypatch.setattr(rank_sync, "check_same", lambda settings, rule: None)
    monkeypatch.setattr(rank_sync, "broadcast", lambda variables: None)
    monkeypatch.setattr(rank_sync, "all_gather_object", lambda own: [own, own])


def compiled(build, loss=None):
    model = build(SCHEMA)
    model(batch(SCHEMA)[0])
    hp = Hyperparameters(32, warmup_epochs=0.0, embedding_lr=1e-3, dense_lr=1e-3, l2=0.0)
    model.compile(optimizer=CowClipOptimizer.for_model(model, hp), loss=loss, metrics=[])
    return model


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_loss_that_is_no_mean_is_an_error(reduction):
    """Its gradients are B times as large, and were divided by the number of ranks."""
    loss = tf.keras.losses.BinaryCrossentropy(reduction=reduction)
    of_two = {"z/regression_output": "mse", "y/binary_output": loss}
    expected = rf"must be means.*BinaryCrossentropy\(reduction='{reduction}'\)"
    with pytest.raises(ValueError, match=expected):
        compiled(two_outputs, of_two).fit(*batch(SCHEMA))
    with pytest.raises(ValueError, match=expected):
        compiled(own_mlp, loss).train_on_batch(*batch(SCHEMA))


def test_any_other_loss_is_a_mean():
    own = {"z/regression_output": "mse", "y/binary_output": lambda y, clicks: tf.square(y - clicks)}
    compiled(two_outputs, own).train_on_batch(*batch(SCHEMA))


def test_a_fit_starts_with_the_state_and_other_epochs_with_the_learning_rate(
    on_two_ranks, monkeypatch
):
    model, sent = compiled(own_mlp), []
    monkeypatch.setattr(rank_sync, "broadcast", lambda variables: sent.append(list(variables)))

    def begin(*, epochs=1):
        model.optimizer.is_started = False
        for _ in range(epochs):
            rank_sync.synchronize(model.optimizer, model)

    begin(epochs=2)
    begin(epochs=2)
    state = state_of(model, model.optimizer).values()
    assert [len(variables) for variables in sent] == [len(state), 1] * 2
    assert all(a is b for a, b in zip(sent[0], state, strict=True))
    assert sent[1][0] is model.optimizer.learning_rate
    # The other model is not built.
    monkeypatch.setattr(rank_sync, "all_gather_object", lambda own: [own, False])
    begin()
    assert len(sent) == 4


def test_a_compiled_optimizer_stays_as_it_is_on_several_ranks(monkeypatch):
    """Merlin makes another one, with its learning rate times the ranks, of any other kind."""
    from merlin.models.tf.models import base

    monkeypatch.setattr(base, "hvd_installed", True)
    monkeypatch.setattr(base, "hvd", SimpleNamespace(size=lambda: 2, rank=lambda: 0))
    model = own_mlp(SCHEMA)
    model(batch(SCHEMA)[0])
    optimizer = CowClipOptimizer.for_model(model, Hyperparameters(32, warmup_epochs=0.0))
    rate = float(optimizer.learning_rate)
    model.compile(optimizer=optimizer, metrics=[])
    assert model.optimizer is optimizer
    assert float(optimizer.learning_rate) == rate


def test_moments_are_in_one_order_however_they_were_created(tmp_path):
    """A rank that restores a checkpoint before its first step makes them in the checkpoint's."""
    names = []
    for restores in (False, True):
        tf.keras.backend.clear_session()
        model = two_outputs(SCHEMA)
        model(batch(SCHEMA)[0])
        optimizer = CowClipOptimizer.for_model(model, Hyperparameters(32), steps_per_epoch=9)
        checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
        if restores:
            checkpoint.read(str(tmp_path / "checkpoint"))
        optimizer.create_slots(model.trainable_variables)
        checkpoint.write(str(tmp_path / "checkpoint"))
        names.append([variable.name for variable in state_of(model, optimizer).values()])
    assert names[0] == names[1]
