"""A step in micro-batches is that of the whole batch."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from merlin_cowclip.models import FusedEmbeddings, deepfm
from merlin_cowclip.plugins import CowClipOptimizer, Hyperparameters
from merlin_cowclip.plugins._tensorflow import mm
from merlin_cowclip.plugins.optimizers.state import training_state

from .merlin_models import BATCH, SHARED, WITH_LIST, batch, dataset, stock_dlrm

pytestmark = pytest.mark.usefixtures("graphs_as_traced")
HP = Hyperparameters(BATCH, embedding_lr=5e-3, dense_lr=1e-3, l2=1e-4, warmup_epochs=0.0)


def ours(schema):
    return deepfm(schema, embedding_dim=4, mlp=(8,))


def mixed(schema):
    """A stock model with our embeddings, in half precision, with loss scaling."""
    tables = FusedEmbeddings(schema.excluding_by_name(["x", "y"]), 8, stacked=False)
    return mm.DLRMModel(
        schema, embeddings=tables, bottom_block=mm.MLPBlock([8]), top_block=mm.MLPBlock([8])
    )


def trained(build, schema, update, accumulate, *, eager=False, policy="float32"):
    """The state after three steps, and the ids that they counted and clipped."""
    tf.keras.utils.set_random_seed(3)
    tf.keras.mixed_precision.set_global_policy(policy)
    try:
        model = build(schema)
        optimizer = CowClipOptimizer.for_model(model, HP, update=update, accumulate=accumulate)
        statistics = optimizer.observe()
        model.compile(
            optimizer=optimizer, metrics=[tf.keras.metrics.AUC(name="auc")], run_eagerly=eager
        )
        logs = model.fit(dataset(schema, steps=3), verbose=0).history
        optimizer.catch_up()
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")
    assert int(optimizer.iterations) == 3
    state = {name: value.numpy() for name, value in training_state(model).items()}
    fields = [(f.field, f.steps, f.all.rows, f.all.occurrences) for f in statistics.read()]
    return state, fields, {name: values[-1] for name, values in logs.items()}


@pytest.mark.parametrize(
    ("build", "schema", "update", "eager"),
    [
        (ours, WITH_LIST, "exact", False),
        (ours, SHARED, "lazy", True),
        (stock_dlrm, WITH_LIST, "lazy", False),
        pytest.param(ours, WITH_LIST, "deferred", False, marks=pytest.mark.extended),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_step_is_that_of_the_whole_batch(build, schema, update, eager):
    expected, counts, logs = trained(build, schema, update, 1, eager=eager)
    # 3 do not divide 32 evenly.
    state, *others = trained(build, schema, update, 3, eager=eager)
    assert others == [counts, pytest.approx(logs, rel=1e-5)]
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        # Float32 sums in another order: of moments, as of the largest.
        atol = 1e-6 if name.startswith("weight/") else 1e-5 * np.abs(value).max(initial=0)
        np.testing.assert_allclose(state[name], value, rtol=0, atol=atol, err_msg=name)


@pytest.mark.extended
def test_loss_scaling_skips_a_whole_step_or_none():
    counts = [trained(mixed, SHARED, "lazy", n, policy="mixed_float16")[1] for n in (4, 1)]
    assert counts[0] == counts[1]


def test_a_batch_with_fewer_samples_than_micro_batches_is_an_error():
    model = ours(SHARED)
    model.compile(CowClipOptimizer.for_model(model, HP, accumulate=3), run_eagerly=True)
    with pytest.raises(tf.errors.InvalidArgumentError, match="a sample for each micro-batch"):
        model.train_on_batch(*batch(SHARED, size=2))


def test_accumulate_is_a_positive_whole_number():
    with pytest.raises(ValueError, match="accumulate must be a positive whole number"):
        CowClipOptimizer(HP, accumulate=1.5)
