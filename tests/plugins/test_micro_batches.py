"""A step in micro-batches is that of the whole batch."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from merlin_cowclip.models import FusedEmbeddings, deepfm
from merlin_cowclip.plugins import CowClipOptimizer, Hyperparameters
from merlin_cowclip.plugins._tensorflow import mm
from merlin_cowclip.plugins.optimizers.state import training_state

from .merlin_models import BATCH, SHARED, WITH_LIST, dataset, stock_deepfm, stock_dlrm

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
    state = {name: value.numpy() for name, value in training_state(model).items()}
    fields = [(f.field, f.steps, f.all.rows, f.all.occurrences) for f in statistics.read()]
    return state, fields, {name: values[-1] for name, values in logs.items()}, optimizer


@pytest.mark.parametrize(
    ("build", "schema", "update", "eager"),
    [
        (ours, WITH_LIST, "exact", False),
        (ours, WITH_LIST, "deferred", False),
        (ours, SHARED, "lazy", True),
        (stock_deepfm, SHARED, "exact", False),
        (stock_dlrm, WITH_LIST, "lazy", False),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_step_is_that_of_the_whole_batch(build, schema, update, eager):
    whole, counted, logs, _ = trained(build, schema, update, 1, eager=eager)
    # 5 do not divide 32 evenly.
    parts, again, logs_again, _ = trained(build, schema, update, 5, eager=eager)
    assert again == counted
    assert logs_again == pytest.approx(logs, rel=1e-5)
    assert parts.keys() == whole.keys()
    for name, value in whole.items():
        # Float32 sums in another order: of moments, as of the largest.
        atol = 1e-6 if name.startswith("weight/") else 1e-5 * np.abs(value).max(initial=0)
        np.testing.assert_allclose(parts[name], value, rtol=0, atol=atol, err_msg=name)


def test_loss_scaling_skips_a_whole_step_or_none():
    _, counted, _, optimizer = trained(mixed, SHARED, "lazy", 4, policy="mixed_float16")
    whole = trained(mixed, SHARED, "lazy", 1, policy="mixed_float16")
    assert counted == whole[1]
    assert int(optimizer.iterations) == 3


def test_a_batch_with_fewer_samples_than_micro_batches_is_refused():
    with pytest.raises(tf.errors.InvalidArgumentError, match="a sample for each micro-batch"):
        trained(ours, SHARED, "lazy", BATCH + 1)


@pytest.mark.parametrize("number", [0, 1.5, "2"])
def test_accumulate_is_a_positive_whole_number(number):
    with pytest.raises(ValueError, match="accumulate must be a positive whole number"):
        CowClipOptimizer(HP, accumulate=number)
