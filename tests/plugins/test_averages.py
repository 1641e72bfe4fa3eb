"""Moving averages of weights: those of every step, added up in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from merlin_cowclip.plugins import CowClipOptimizer, Hyperparameters, load_model, save_model

from ..saves import quick_saves
from .merlin_models import BATCH, WITH_LIST, dataset, stock_dlrm

pytestmark = pytest.mark.usefixtures("graphs_as_traced")
HP = Hyperparameters(BATCH, embedding_lr=0.05, dense_lr=1e-2, l2=1e-4, warmup_epochs=0.0)
DECAY, STEPS = 0.8, 6


def weights(model):
    """In an order that loading does not change."""
    variables = sorted(model.trainable_variables, key=lambda v: (v.name, tuple(v.shape)))
    return [variable.numpy() for variable in variables]


def check_weights(model, expected, atol=2e-6):
    for value, of_one in zip(weights(model), expected, strict=True):
        np.testing.assert_allclose(value, of_one, rtol=0, atol=atol)


@pytest.mark.parametrize(("update", "eagerly"), [("exact", True), ("lazy", False)])
def test_averages_are_of_all_steps(update, eagerly, tmp_path):
    tf.keras.utils.set_random_seed(1)
    model = stock_dlrm(WITH_LIST)
    optimizer = CowClipOptimizer.for_model(model, HP, update=update, ema=DECAY)
    model.compile(optimizer=optimizer, metrics=[], run_eagerly=eagerly)
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
        check_weights(model, expected)
    check_weights(model, each[-1], atol=0)
    with quick_saves():
        save_model(model, tmp_path / "model")
    loaded = load_model(tmp_path / "model")
    for one in (model, loaded):
        one.fit(dataset(WITH_LIST, 2), verbose=0)
    with optimizer.averages(), loaded.optimizer.averages():
        check_weights(loaded, weights(model))


@pytest.mark.parametrize("options", [{"ema": 1.0}, {"ema": 0.9, "update": "deferred"}])
def test_what_is_not_supported(options):
    with pytest.raises(ValueError, match="ema must be below 1, and update exact or lazy"):
        CowClipOptimizer(Hyperparameters(BATCH), **options)
