"""What an optimizer asks of a model on several ranks, as far as one process can tell."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from merlin_cowclip.plugins import CowClipOptimizer, Hyperparameters
from merlin_cowclip.plugins._tensorflow import ColumnSchema, Schema, Tags, mm
from merlin_cowclip.plugins.distributed.horovod import Ranks
from merlin_cowclip.plugins.optimizers import cowclip as optimizer
from merlin_cowclip.plugins.optimizers import rank_sync as together
from merlin_cowclip.plugins.optimizers.state import state_of

from .merlin_models import SCHEMA, TARGET, batch, dataset, own_mlp

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
    monkeypatch.setattr(optimizer, "ranks", lambda: Ranks(0, 2, 0, 2))
    monkeypatch.setattr(together, "check_same", lambda mine, rule: None)
    monkeypatch.setattr(together, "broadcast", lambda variables: None)
    monkeypatch.setattr(together, "all_gather_object", lambda mine: [mine, mine])


def compiled(build, loss=None):
    model = build(SCHEMA)
    model(batch(SCHEMA)[0])
    hp = Hyperparameters(32, warmup_epochs=0.0, embedding_lr=1e-3, dense_lr=1e-3, l2=0.0)
    model.compile(optimizer=CowClipOptimizer.for_model(model, hp), loss=loss, metrics=[])
    return model


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_loss_that_is_no_mean_is_refused(reduction):
    """Its gradients are B times as large, and were divided by the number of ranks."""
    loss = cross_entropy(reduction)
    wanted = rf"must be means.*BinaryCrossentropy\(reduction='{reduction}'\).*sum_over_batch_size"
    mean = tf.keras.losses.MeanSquaredError()
    of_two = {"z/regression_output": mean, "y/binary_output": loss}
    for model in (compiled(own_mlp, loss), compiled(two_outputs, of_two)):
        for train in (model.fit, model.train_on_batch):
            with pytest.raises(ValueError, match=wanted):
                train(*batch(SCHEMA))


@pytest.mark.parametrize("loss", [cross_entropy("sum_over_batch_size"), own])
def test_any_other_loss_is_a_mean(loss):
    of_two = {"z/regression_output": "mse", "y/binary_output": loss}
    compiled(two_outputs, of_two).make_train_function()


def test_a_fit_without_rank_sync_is_refused_on_several_ranks(on_two_ranks):
    """Merlin's adds it; Keras's own has no place for that."""
    model = compiled(own_mlp)
    with pytest.raises(ValueError, match=r"fit needs the callback RankSync.*callbacks=\[sync"):
        model.fit(dataset(SCHEMA, 2), verbose=0)


def test_a_fit_starts_with_the_state_and_other_epochs_with_the_learning_rate(
    on_two_ranks, monkeypatch
):
    model, sent = compiled(own_mlp), []
    monkeypatch.setattr(together, "broadcast", lambda variables: sent.append(list(variables)))

    def begin(*, epochs=1):
        model.optimizer.fit_begins()
        model.optimizer.training_begins(None)
        for _ in range(epochs):
            together.synchronize(model.optimizer, model)

    begin(epochs=2)
    begin(epochs=2)
    state = state_of(model, model.optimizer).values()
    assert [len(variables) for variables in sent] == [len(state), 1] * 2
    assert all(a is b for a, b in zip(sent[0], state, strict=True))
    assert sent[1][0] is model.optimizer.learning_rate
    monkeypatch.setattr(
        together, "all_gather_object", lambda mine: [mine, False]
    )  # not built there
    begin()
    assert len(sent) == 4


class _OfItself(tf.keras.layers.Layer):
    """A network that takes its loss itself, as one for embeddings alone does."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = tf.keras.layers.Embedding(9, 2, name="rows")

    def call(self, inputs):
        rows = self.rows(tf.reshape(inputs["user"], [-1]))
        self.add_loss(tf.reduce_mean((rows - 1.0) ** 2))
        return rows

    def compute_output_shape(self, _):
        return tf.TensorShape([None, 2])


def test_a_model_without_outputs_takes_its_loss_by_itself():
    """Merlin names no output of it."""
    schema = Schema([ColumnSchema("user", tags=[Tags.CATEGORICAL], dtype="int64")])
    model = mm.Model(_OfItself(), schema=schema)
    features = {"user": tf.constant([[1], [2], [1], [3]], tf.int64)}
    model(features)
    before = model.get_weights()[0]
    hp = Hyperparameters(4, embedding_lr=0.1, l2=0.0, clip=None)
    model.compile(optimizer=CowClipOptimizer.for_model(model, hp, steps_per_epoch=1))
    model.fit(tf.data.Dataset.from_tensors((features,)), epochs=2, verbose=0)
    moved = np.abs(model.get_weights()[0] - before).max(axis=1)
    assert (moved[1:4] > 0.15).all()
    assert not moved[[0, 4, 5, 6, 7, 8]].any()


def test_one_rank_takes_any_loss():
    compiled(own_mlp, cross_entropy("sum")).optimizer.broadcast()


@pytest.fixture
def merlin_on_two_ranks(monkeypatch):
    """As Merlin knows of them, of which this is the first."""
    from merlin.models.tf.models import base

    monkeypatch.setattr(base, "hvd_installed", True)
    monkeypatch.setattr(base, "hvd", SimpleNamespace(size=lambda: 2, rank=lambda: 0))


def test_loss_scaling_stays_as_it_is_on_several_ranks(merlin_on_two_ranks, tmp_path):
    """Merlin made another one, by an argument that it has not."""
    model = own_mlp(SCHEMA)
    model(batch(SCHEMA)[0])
    hp = Hyperparameters(32, warmup_epochs=0.0)
    optimizer = CowClipOptimizer.for_model(model, hp)
    rate = float(optimizer.learning_rate)
    scaling = tf.keras.mixed_precision.LossScaleOptimizer(optimizer)
    model.compile(optimizer=scaling, metrics=[])
    assert model.optimizer is scaling
    assert scaling.inner_optimizer is optimizer
    model.save(str(tmp_path / "model"))
    assert (tmp_path / "model" / ".merlin" / "output_schema.json").exists()
    assert float(optimizer.learning_rate) == rate


def test_moments_are_in_one_order_however_they_were_made(tmp_path):
    """A rank that restores a checkpoint before its first step makes them in the checkpoint's."""
    found = []
    for restored in (False, True):
        tf.keras.backend.clear_session()
        model = two_outputs(SCHEMA)
        model(batch(SCHEMA)[0])
        optimizer = CowClipOptimizer.for_model(model, Hyperparameters(32), steps_per_epoch=9)
        checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
        if restored:
            checkpoint.read(str(tmp_path / "checkpoint"))
        optimizer.create_slots(model.trainable_variables)
        if not restored:
            checkpoint.write(str(tmp_path / "checkpoint"))
        kept = [variable.name for variable in optimizer.weights]
        listed = state_of(model, optimizer).values()
        found.append((kept, [variable.name for variable in listed]))
    (made, alike), (made_restored, alike_restored) = found
    assert made != made_restored
    assert alike == alike_restored
