"""The loader in Keras's `fit`, `evaluate` and `predict`, and the callback that sets its epochs."""

import numpy as np
import pytest

from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.workflows.training.loader import FollowEpochs, Loader

from .batches import BATCH, SPEC, TEST, seeing, steps_of


def test_a_fit_trains_on_every_batch_of_its_epochs_in_order(data, small_windows):
    """A stock Merlin model, also on a part of an epoch, as a run that goes on has it."""
    loader = Loader(data, batch_size=BATCH, seed=4)
    model = seeing(data)
    follow = FollowEpochs(loader)
    options = {"class_weight": {0: 1.0, 1: 2.0}, "steps_per_epoch": len(loader)}
    history = model.fit(loader, epochs=2, callbacks=[follow], verbose=0, **options)
    assert np.isfinite(history.history["loss"]).all()
    model.fit(loader, epochs=3, initial_epoch=2, callbacks=[follow], verbose=0)
    model.fit(loader.dataset(epoch=3, start=5), verbose=0)
    model.fit(loader.dataset(epochs=None, epoch=4), steps_per_epoch=len(loader), verbose=0)
    assert model.steps == steps_of(loader, 0, 1, 2) + steps_of(loader, 3, 4)[5:]


def test_no_pass_moves_the_training(data):
    """Somebody looks at a batch, or evaluates on the training part; an epoch may be set by hand."""

    class Look(tf.keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            next(iter(loader))
            list(loader)
            loader.peek()
            self.model.evaluate(loader, verbose=0)
            model.steps.clear() if epoch == 0 else None

    model = seeing(data)
    loader = Loader(data, batch_size=1_500, seed=4)
    follow = FollowEpochs(loader)
    model.fit(loader, epochs=2, callbacks=[follow, Look()], verbose=0)
    assert model.steps == steps_of(loader, 0, 1)
    loader.epoch = 9
    model.fit(loader, epochs=5, initial_epoch=4, callbacks=[follow], verbose=0)
    assert model.steps[6:] == steps_of(loader, 4)
    loader.epoch = 5
    model.fit(loader, verbose=0)
    assert model.steps[9:] == steps_of(loader, 5)


def test_evaluate_and_predict_take_every_row_once(data, on_disk):
    model = seeing(data)
    test = Loader(data, "test", batch_size=300)
    predicted = model.predict(test)
    assert predicted.shape == (TEST, 1)
    labels = on_disk["test"][SPEC.label].to_numpy()
    wanted = -np.mean(np.log(np.where(labels, predicted[:, 0], 1 - predicted[:, 0])))
    # Keras weights batches by their rows; a lost or doubled one would be seen.
    assert model.evaluate(test, verbose=0, return_dict=True)["loss"] == pytest.approx(wanted)
