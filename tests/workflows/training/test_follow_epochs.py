"""The loader in Keras's `fit`, `evaluate` and `predict`, and the callback that sets its epochs."""

import itertools
import warnings

import numpy as np
import pandas as pd
import pytest

from merlin_cowclip.plugins._stack import tf
from merlin_cowclip.plugins.beginning_alike import may_load_before_a_step
from merlin_cowclip.workflows.training.follow_epochs import FollowEpochs
from merlin_cowclip.workflows.training.loader import Loader

from .batches import (
    BATCH,
    SPEC,
    TEST,
    seeing,
    steps_of,
)


def test_a_stock_merlin_model_takes_the_batches(data):
    tf.keras.utils.set_random_seed(0)
    model = seeing(data)
    loader = Loader(data, batch_size=1_500, seed=1)
    features, _ = next(loader.batches())
    assert model(features).shape == (1_500, 1)
    history = model.fit(loader.dataset(epochs=2), epochs=2, steps_per_epoch=len(loader), verbose=0)
    assert np.isfinite(history.history["loss"]).all()
    assert model.steps == steps_of(loader, 0, 1)
    assert model.predict(Loader(data, "test", batch_size=400).dataset(), verbose=0).shape == (
        TEST,
        1,
    )


def test_a_run_goes_on_in_the_middle_of_an_epoch(data):
    loader = Loader(data, batch_size=BATCH, seed=1)
    model = seeing(data)
    model.fit(loader.dataset(epoch=3, start=5), initial_epoch=3, epochs=4, verbose=0)
    model.fit(
        loader.dataset(epochs=None, epoch=4),
        initial_epoch=4,
        epochs=6,
        steps_per_epoch=len(loader),
        verbose=0,
    )
    assert model.steps == steps_of(loader, 3, 4, 5)[5:]


def test_a_fit_trains_on_every_batch_of_its_epochs_in_order(data, small_windows):
    """With stock Merlin's loader and a pure len, batch 0 was lost and the end raised."""
    loader = Loader(data, batch_size=BATCH, seed=4)
    tf.keras.backend.clear_session()
    model = seeing(data)
    follow = FollowEpochs(loader)
    history = model.fit(loader, epochs=2, callbacks=[follow], verbose=0)
    assert model.steps == steps_of(loader, 0, 1)
    model.fit(loader, epochs=4, initial_epoch=2, callbacks=[follow], verbose=0)
    assert model.steps == steps_of(loader, 0, 1, 2, 3)
    assert np.isfinite(history.history["loss"]).all()
    for epoch in range(4):
        assert sorted(itertools.chain(*steps_of(loader, epoch))) == sorted(range_of_train(data))


def range_of_train(data) -> list[float]:
    files = sorted((data.path / "train").glob("*.parquet"))
    return list(np.concatenate([pd.read_parquet(file)["serial"].to_numpy() for file in files]))


def test_an_epoch_is_what_it_is_told_to_be(data):
    model = seeing(data)
    loader = Loader(data, batch_size=1_500, seed=4)
    loader.epoch = 5
    model.fit(loader, initial_epoch=5, epochs=6, verbose=0)
    assert model.steps == steps_of(loader, 5)


def test_no_pass_moves_the_training(data):
    """Somebody looks at a batch, evaluates on the training part, or stops half way through it."""

    class Look(tf.keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            next(iter(loader))
            list(loader)
            loader.peek()
            self.model.evaluate(loader, verbose=0)
            model.steps.clear() if epoch == 0 else None

    model = seeing(data)
    loader = Loader(data, batch_size=1_500, seed=4)
    callbacks = [FollowEpochs(loader), Look()]
    model.fit(loader, epochs=3, callbacks=callbacks, verbose=0)
    assert model.steps == steps_of(loader, 0, 1, 2)
    assert loader.epoch == 2


def test_epochs_of_one_order_do_not_go_unnoticed(data):
    model = seeing(data)
    loader = Loader(data, batch_size=1_500, seed=4)
    model.fit(loader, verbose=0)
    with pytest.warns(UserWarning, match="order of the last one, that of epoch 0.*FollowEpochs"):
        model.fit(loader, verbose=0)
    assert model.steps == steps_of(loader, 0, 0)
    test = Loader(data, "test", batch_size=300)  # whose epochs are all alike
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.fit(loader, epochs=2, callbacks=[FollowEpochs(loader)], verbose=0)
        assert len(list(test)) == len(list(test)) == 4
        loader.epoch = 3
        next(iter(loader))
        assert len(list(loader)) == 3


def test_what_a_fit_followed_holds_for_no_later_one(data):
    model = seeing(data)
    loader = Loader(data, batch_size=1_500, seed=4)
    model.fit(loader, callbacks=[FollowEpochs(loader)], verbose=0)
    with pytest.warns(UserWarning, match="order of the last one, that of epoch 0.*FollowEpochs"):
        model.fit(loader, epochs=2, verbose=0)


def test_what_a_fit_followed_that_failed_soon_holds_no_more(data):
    """Keras tells a callback nothing of a failure."""

    class Fail(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise RuntimeError("failed")

    model = seeing(data)
    loader = Loader(data, batch_size=1_500, seed=4)
    with pytest.raises(RuntimeError, match="failed"):
        model.fit(loader, callbacks=[FollowEpochs(loader), Fail()], verbose=0)
    with pytest.warns(UserWarning, match="order of the last one, that of epoch 0.*FollowEpochs"):
        model.fit(loader, epochs=4, verbose=0)


def test_follow_epochs_gives_keras_own_epochs(data):
    """Whatever was done with the loader in between."""
    model = seeing(data)
    loader = Loader(data, batch_size=1_500, seed=4)
    follow = FollowEpochs(loader)
    model.fit(loader, epochs=4, initial_epoch=3, callbacks=[follow], verbose=0)
    model.evaluate(loader, verbose=0)
    loader.epoch = 9
    model.fit(loader, epochs=5, initial_epoch=4, callbacks=[follow], verbose=0)
    model.fit(loader, epochs=1, callbacks=[follow], verbose=0)
    assert model.steps == steps_of(loader, 3, 4, 0)


def test_follow_epochs_with_backup_and_restore(data, tmp_path):
    """Which alone knows at which epoch the second fit starts."""

    class Stop(tf.keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise RuntimeError("stopped")

    steps = []

    class Plain(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = tf.keras.layers.Dense(1)

        def call(self, x):
            tf.numpy_function(lambda s: steps.append(list(s[:, 0])), [x["serial"]], [])
            return self.dense(x["price"])

    def fit(*callbacks):
        model = Plain()
        model.compile("sgd", "mse")
        loader = Loader(data, batch_size=1_500, seed=4)
        backup = tf.keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))
        follow = FollowEpochs(loader)
        model.fit(loader, epochs=3, callbacks=[backup, follow, *callbacks], verbose=0)
        return loader

    with pytest.raises(RuntimeError, match="stopped"):
        fit(Stop())
    loader = fit()
    assert steps == steps_of(loader, 0, 1, 2)


def test_class_weights_and_the_number_of_steps_leave_the_batches_alone(data):
    model = seeing(data)
    loader = Loader(data, batch_size=1_500, seed=4)
    follow = FollowEpochs(loader)
    options = {"class_weight": {0: 1.0, 1: 2.0}, "steps_per_epoch": len(loader)}
    model.fit(loader, epochs=2, callbacks=[follow], verbose=0, **options)
    assert model.steps == steps_of(loader, 0, 1)


def test_evaluate_and_predict_take_every_row_once(data, on_disk):
    model = seeing(data)
    train, test = Loader(data, batch_size=1_500), Loader(data, "test", batch_size=300)
    follow = FollowEpochs(train)
    model.fit(train, epochs=2, callbacks=[follow], validation_data=test, verbose=0)
    assert (train.epoch, test.epoch) == (1, 0)
    predicted = model.predict(test)
    assert predicted.shape == (TEST, 1)
    labels = on_disk["test"][SPEC.label].to_numpy()
    wanted = -np.mean(np.log(np.where(labels, predicted[:, 0], 1 - predicted[:, 0])))
    for _ in range(2):
        # Keras weights batches by their rows; a lost or doubled one would be seen.
        assert model.evaluate(test, verbose=0, return_dict=True)["loss"] == pytest.approx(wanted)


def test_it_sets_no_weights():
    """So that ranks need not share them once more as a fit begins."""
    assert not may_load_before_a_step(FollowEpochs(None))
