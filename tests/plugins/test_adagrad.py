"""Adagrad on tables, by element and by row: NumPy and Keras; and in a stock model of Merlin."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from merlin_cowclip.plugins import CowClipOptimizer, Hyperparameters, load_model, save_model
from merlin_cowclip.plugins.optimizers.adagrad import CowClipAdagrad, CowClipRowWiseAdagrad

from ..saves import quick_saves
from .merlin_models import BATCH, WITH_LIST, dataset, stock_dlrm

pytestmark = pytest.mark.usefixtures("graphs_as_traced")
DATA = Path(__file__).parents[1] / "data"
ROWS, WIDTH, RATE, L2, RATIO, FLOOR = 40, 6, 0.05, 1e-3, 0.3, 1e-4


def adagrad(w, batches, *, row_wise, exact):
    """The table and its accumulator after steps in NumPy, float64.

    By row as FBGEMM has it: the mean of a gradient's squares is added to the row's one number.
    """
    w, total = w.astype(np.float64), np.full((ROWS, 1 if row_wise else WIDTH), 1e-9)
    for ids, gradients in batches:
        g, counts = 2 * L2 * w, np.bincount(ids, minlength=ROWS)
        np.add.at(g, ids, gradients)
        bounds = np.maximum(counts, 1) * np.maximum(RATIO * np.linalg.norm(w, axis=1), FLOOR)
        g *= np.minimum(1, bounds / np.linalg.norm(g, axis=1))[:, np.newaxis]
        updated = np.ones(ROWS, bool) if exact else counts > 0
        squares = (g**2).mean(axis=1, keepdims=True) if row_wise else g**2
        total[updated] += squares[updated]
        w[updated] -= (RATE * g / (np.sqrt(total) + 1e-7))[updated]
    return w, total


@pytest.mark.parametrize("update", ["exact", "lazy"])
@pytest.mark.parametrize("kind", [CowClipAdagrad, CowClipRowWiseAdagrad])
def test_steps_are_those_of_numpy(kind, update):
    random = np.random.default_rng(1)
    w = random.normal(0, 0.1, (ROWS, WIDTH))
    # Down to sizes of which ε is a part.
    batches = [
        (random.integers(0, 30, 64), size * random.normal(size=(64, WIDTH)))
        for size in np.geomspace(1e-8, 1, 10)
    ]
    table = tf.Variable(w, dtype=tf.float64)
    optimizer = kind(RATE, 1e-9, l2=L2, clip_ratio=RATIO, clip_floor=FLOOR, update=update)

    @tf.function
    def step(ids, gradients):
        shape = tf.constant([ROWS, WIDTH], tf.int64)
        optimizer.apply_gradients([(tf.IndexedSlices(gradients, ids, shape), table)])

    for ids, gradients in batches:
        step(tf.constant(ids), tf.constant(gradients))
    row_wise = kind is CowClipRowWiseAdagrad
    expected, total = adagrad(w, batches, row_wise=row_wise, exact=update == "exact")
    np.testing.assert_allclose(table, expected, rtol=0, atol=1e-6)
    np.testing.assert_allclose(optimizer.get_slot(table, "accumulator"), total, rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "name"), [(CowClipAdagrad, "element"), (CowClipRowWiseAdagrad, "rowwise")]
)
def test_steps_are_those_of_fbgemm(kind, name):
    """Golden values of fbgemm-gpu-cpu; tests/data/README.md has how they were made."""
    recorded = np.load(DATA / "fbgemm_adagrad.npz")
    table = tf.Variable(recorded["w"])
    optimizer = kind(0.05, epsilon=1e-6, l2=0.0, clip=None, update="lazy")
    for ids, upstream in zip(recorded["ids"], recorded["upstream"], strict=True):
        shape = tf.constant(table.shape, tf.int64)
        optimizer.apply_gradients([(tf.IndexedSlices(upstream, tf.constant(ids), shape), table)])
    np.testing.assert_allclose(table, recorded[f"w_{name}"], rtol=0, atol=1e-6)
    state = recorded[f"state_{name}"].reshape([len(recorded["w"]), -1])
    np.testing.assert_allclose(optimizer.get_slot(table, "accumulator"), state, rtol=1e-5)


def test_a_stock_model_is_trained_saved_and_trained_further(tmp_path):
    hp = Hyperparameters(BATCH, embedding_lr=0.05, dense_lr=5e-3, l2=1e-5, warmup_epochs=0.0)
    model = stock_dlrm(WITH_LIST)
    optimizer = CowClipOptimizer.for_model(model, hp, update="lazy", base="rowwise_adagrad")
    model.compile(optimizer=optimizer, metrics=[])
    model.fit(dataset(WITH_LIST, 8), verbose=0)
    with quick_saves():
        save_model(model, tmp_path / "model")
    loaded = load_model(tmp_path / "model")
    losses = [one.fit(dataset(WITH_LIST, 4), verbose=0).history["loss"] for one in (model, loaded)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_other_bases_and_deferred_updates_are_not_supported():
    hp = Hyperparameters(BATCH)
    with pytest.raises(ValueError, match="base must be one of adam, adagrad, rowwise_adagrad"):
        CowClipOptimizer(hp, base="sgd")
    with pytest.raises(ValueError, match="update must be one of exact, lazy"):
        CowClipOptimizer(hp, base="adagrad", update="deferred")
