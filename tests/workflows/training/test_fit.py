"""The loader in Keras's `fit`, `evaluate` and `predict`."""

import numpy as np
import pytest

from merlin_cowclip.workflows.training.loader import Loader

from .batches import BATCH, SPEC, TEST, seeing, steps_of


def test_a_fit_trains_on_every_batch_of_its_epochs_in_order(data, small_windows):
    """A stock Merlin model, also on a part of an epoch, as a run that goes on has it."""
    loader = Loader(data, batch_size=BATCH, seed=4)
    model = seeing(data)
    options = {"class_weight": {0: 1.0, 1: 2.0}, "steps_per_epoch": len(loader), "verbose": 0}
    epochs = loader.dataset(epochs=None)
    history = model.fit(epochs, epochs=2, validation_data=loader, **options)
    assert np.isfinite(history.history["loss"]).all()
    model.fit(loader, epochs=2, verbose=0)
    model.fit(loader.dataset(epoch=3, start=5), verbose=0)
    model.fit(loader.dataset(epochs=None, epoch=4), steps_per_epoch=len(loader), verbose=0)
    assert model.steps == steps_of(loader, 0, 1, 0, 0) + steps_of(loader, 3, 4)[5:]


def test_evaluate_and_predict_take_every_row_once(data, on_disk):
    model = seeing(data)
    test = Loader(data, "test", batch_size=300)
    predicted = model.predict(test)
    assert predicted.shape == (TEST, 1)
    labels = on_disk["test"][SPEC.label].to_numpy()
    wanted = -np.mean(np.log(np.where(labels, predicted[:, 0], 1 - predicted[:, 0])))
    # Keras weights batches by their rows; a lost or doubled one would be seen.
    assert model.evaluate(test, verbose=0, return_dict=True)["loss"] == pytest.approx(wanted)
