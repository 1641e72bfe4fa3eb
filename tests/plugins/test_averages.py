"""Moving averages of weights: those of every step, added up in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from merlin_cowclip.plugins import CowClipOptimizer, Hyperparameters, load_model, save_model

from ..saves import quick_saves
from .merlin_models import BATCH, WITH_LIST, dataset, stock_dlrm

HP = Hyperparameters(BATCH, embedding_lr=0.05, dense_lr=1e-2, l2=1e-4, warmup_epochs=0.0)
DECAY, STEPS = 0.8, 7


def weights(model):
    return [variable.numpy() for variable in model.trainable_variables]


def in_order(model):
    """Keras loads them in another."""
    return sorted(model.trainable_variables, key=lambda one: (one.name, tuple(one.shape)))


@pytest.mark.parametrize("update", ["exact", "lazy"])
@pytest.mark.parametrize("in_graph", [False, True])
def test_they_are_of_all_steps(update, in_graph, tmp_path):
    tf.keras.utils.set_random_seed(1)
    model = stock_dlrm(WITH_LIST)
    optimizer = CowClipOptimizer.for_model(model, HP, update=update, ema=DECAY)
    model.compile(optimizer=optimizer, metrics=[], run_eagerly=not in_graph)
    each = []
    for seed in range(STEPS):  # of other ids: in lazy steps most rows rest
        model.fit(dataset(WITH_LIST, 1, first=seed), verbose=0)
        each.append(weights(model))
        if seed == 3:
            with optimizer.averages():  # which changes nothing of the training
                pass
    shares = DECAY ** np.arange(STEPS)[::-1]
    expected = [np.average(of_one, axis=0, weights=shares) for of_one in zip(*each, strict=True)]
    with optimizer.averages():
        for found, wanted in zip(weights(model), expected, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-6)
    for found, wanted in zip(weights(model), each[-1], strict=True):
        np.testing.assert_array_equal(found, wanted)
    with quick_saves():
        save_model(model, tmp_path / "model")
    loaded = load_model(tmp_path / "model")
    for one in (model, loaded):
        one.fit(dataset(WITH_LIST, 2), verbose=0)
    with optimizer.averages(), loaded.optimizer.averages():
        for found, wanted in zip(in_order(loaded), in_order(model), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-6)


def test_what_is_not_offered():
    for options in ({"ema": 1.0}, {"ema": 0.9, "update": "deferred"}):
        with pytest.raises(ValueError, match="ema must be below 1, and update exact or lazy"):
            CowClipOptimizer(Hyperparameters(BATCH), **options)
