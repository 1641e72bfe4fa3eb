"""The optimizer against the NumPy references: update modes, clip rules, kinds of tables."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from merlin_cowclip.models import FusedEmbeddings
from merlin_cowclip.plugins import CLIP_RULES, CowClipOptimizer, Hyperparameters
from merlin_cowclip.plugins._tensorflow import mm

from .merlin_models import Schema, category
from .reference import REFERENCES, Settings

pytestmark = pytest.mark.usefixtures("graphs_as_traced")
A, B, STEPS, SAMPLES = 40, 25, 12, 16
ONE_HOT = Schema([category("a", A), category("b", B)])
SCHEMAS = {
    "fused": ONE_HOT,
    "stock": ONE_HOT,
    "list": Schema([category("a", A), category("b", B, ragged=True)]),
    "shared": Schema([category(name, A, domain="x") for name in "ab"]),
}
BOUNDS = {  # which some gradients exceed
    "global": {"clip_threshold": 0.5},
    "field": {"clip_threshold": 0.3},
    "column": {"clip_threshold": 0.05},
    "adaptive_field": {"clip_ratio": 0.01},
    "adaptive_column": {"clip_ratio": 0.1, "clip_floor": 1e-3},
}
BELOW_L2 = {"clip_ratio": 1e-4, "clip_floor": 0.0}  # r < 2λ: absent rows are clipped, too


class Sum(tf.keras.Model):
    """Adds up the embeddings of a sample's features."""

    def __init__(self, kind):
        super().__init__()
        schema = SCHEMAS[kind]
        fused = kind != "stock"
        self.tables = (
            FusedEmbeddings(schema, 4, stacked=False) if fused else mm.Embeddings(schema, dim=4)
        )

    def call(self, features):
        return tf.add_n(list(self.tables(features).values()))


def some_batch(kind, random):
    """Features, targets, and the number of samples that hold each row of all tables."""
    ids = {}
    counts = np.zeros(A if kind == "shared" else A + B)
    for name, size, first in (("a", A, 0), ("b", B, A)):
        size, first = (A, 0) if kind == "shared" else (size, first)
        is_list = (kind, name) == ("list", "b")
        lengths = random.integers(0, 4, SAMPLES) if is_list else [1] * SAMPLES
        rows = [np.minimum(random.geometric(0.15, n) - 1, size - 1) for n in lengths]
        for of_sample in rows:
            counts[first + np.unique(of_sample)] += 1
        ids[name] = (tf.ragged.constant if is_list else tf.constant)(
            [list(map(int, of_sample)) for of_sample in rows], tf.int64
        )
    size = 10.0 ** random.uniform(-1, 1.5, (SAMPLES, 1))
    return ids, tf.constant(size * random.normal(size=(SAMPLES, 4)), tf.float32), counts


def check(kind, update, clip, *, eager, clip_tables=None, **bounds):
    random = np.random.default_rng(0)
    settings = Settings(0.02, l2=9e-5, clip=clip, **bounds)
    values = Hyperparameters(
        SAMPLES, dense_lr=0.02, embedding_lr=0.02, l2=9e-5, clip=clip, warmup_epochs=0.0, **bounds
    )
    model = Sum(kind)
    model(some_batch(kind, random)[0])
    optimizer = CowClipOptimizer.for_model(model, values, update=update, clip_tables=clip_tables)
    tables = [spec.variable for spec in optimizer.table_specs]
    for table in tables:
        table.assign(random.normal(0, 0.1, table.shape))
    first = np.concatenate([table.numpy() for table in tables])
    fields = np.arange(len(first)) // A
    exempt = None if clip_tables is None else fields == 1
    reference, unclipped = (
        REFERENCES[update](first, one, fields, exempt)
        for one in (settings, Settings(0.02, l2=9e-5, clip=None))
    )

    def step(features, targets):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.reduce_sum(targets * tf.tanh(model(features)), axis=-1))
        gradients = tape.gradient(loss, tables)
        optimizer.apply_gradients(zip(gradients, tables, strict=True))
        return [tf.convert_to_tensor(gradient) for gradient in gradients]

    run = step if eager else tf.function(step, autograph=False, reduce_retracing=True)
    for _ in range(STEPS):
        features, targets, counts = some_batch(kind, random)
        gradients = np.concatenate(run(features, targets))
        ids = np.flatnonzero(counts)
        for one in (reference, unclipped):
            one.step(ids, gradients[ids], counts[ids])
    predicted = model(features)
    optimizer.catch_up()
    np.testing.assert_allclose(model(features), predicted, rtol=1e-5, atol=1e-6)
    trained = np.concatenate([table.numpy() for table in tables])
    np.testing.assert_allclose(trained, reference.table(), rtol=1e-4, atol=5e-6)
    assert clip is None or np.abs(trained - unclipped.table()).max() > 1e-3


@pytest.mark.parametrize(
    ("kind", "update", "clip", "eager"),
    [
        *(("fused", update, "adaptive_column", False) for update in REFERENCES),
        *(("fused", "exact", clip, True) for clip in (*CLIP_RULES, None)),
        *(("stock", "lazy", clip, True) for clip in ("global", "field")),
        *((kind, "exact", "adaptive_column", True) for kind in ("stock", "list", "shared")),
    ],
)
def test_tables(kind, update, clip, eager):
    check(kind, update, clip, eager=eager, **BOUNDS.get(clip, {}))


@pytest.mark.extended
@pytest.mark.parametrize("clip", [*CLIP_RULES, None])
@pytest.mark.parametrize("update", REFERENCES)
@pytest.mark.parametrize("kind", SCHEMAS)
def test_all_tables(kind, update, clip):
    if (kind, update) != ("stock", "deferred"):  # which needs FusedEmbeddings
        check(kind, update, clip, eager=False, **BOUNDS.get(clip, {}))


@pytest.mark.parametrize("update", ["exact", "lazy"])
@pytest.mark.parametrize("clip_tables", [None, ["a"]])
def test_absent_rows_beyond_their_bound(update, clip_tables):
    """Where r < 2λ, "adaptive_column" clips absent rows, too, but no exempt fields."""
    check("fused", update, "adaptive_column", eager=False, clip_tables=clip_tables, **BELOW_L2)


def test_exempt_rows_do_not_count_in_the_norm_of_others():
    check("fused", "lazy", "global", eager=True, clip_tables=["a"], **BOUNDS["global"])
