"""Small Merlin models and batches for the tests of the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from merlin_cowclip.models import deepfm
from merlin_cowclip.plugins import CowClipOptimizer, Hyperparameters
from merlin_cowclip.plugins._tensorflow import ColumnSchema, Schema, Tags, mm

BATCH = 32


def category(
    name: str,
    cardinality: int,
    *tags: Any,
    ragged: bool = False,
    padded: bool = False,
    domain: str = "",
) -> Any:
    """A categorical column: one-hot, a ragged list, or a padded list of four."""
    properties: dict[str, Any] = {
        "domain": {"min": 0, "max": cardinality - 1, "name": domain or name}
    }
    if padded:
        properties["value_count"] = {"min": 4, "max": 4}
    lists = {"is_list": True, "is_ragged": ragged} if ragged or padded else {}
    return ColumnSchema(
        name, dtype=np.int64, tags=[Tags.CATEGORICAL, *tags], properties=properties, **lists
    )


NUMBER = ColumnSchema("x", dtype=np.float32, tags=[Tags.CONTINUOUS])
TARGET = ColumnSchema("y", dtype=np.float32, tags=[Tags.TARGET, Tags.BINARY_CLASSIFICATION])
SCHEMA = Schema([category("a", 50), category("b", 70), NUMBER, TARGET])
WITH_LIST = Schema([category("a", 50), category("l", 40, ragged=True), NUMBER, TARGET])
SHARED = Schema(
    [category("buyer", 60, domain="user"), category("seller", 60, domain="user"), NUMBER, TARGET]
)


def batch(schema: Any, size: int = BATCH, seed: int = 0) -> tuple[dict[str, Any], Any]:
    """Features as Merlin's loader yields them, and labels size×1; few ids, so that they repeat."""
    rng = np.random.default_rng(seed)
    features: dict[str, Any] = {}
    for column in schema:
        if Tags.TARGET in column.tags:
            continue
        if column.is_list:
            lengths = rng.integers(0, 5, size)
            features[f"{column.name}__values"] = rng.integers(1, 6, lengths.sum())
            features[f"{column.name}__offsets"] = np.concatenate([[0], np.cumsum(lengths)])
        elif Tags.CATEGORICAL in column.tags:
            features[column.name] = rng.integers(0, 9, (size, 1))
        else:
            features[column.name] = rng.random((size, 1), np.float32)
    features = {name: tf.constant(value) for name, value in features.items()}
    return features, tf.constant(rng.integers(0, 2, (size, 1)), tf.float32)


def dataset(schema: Any, steps: int, first: int = 0) -> tf.data.Dataset:
    return dataset_of([batch(schema, seed=first + i) for i in range(steps)])


def dataset_of(batches: Sequence[Any]) -> tf.data.Dataset:
    """Batches of sizes unknown to the graph, as a loader's are."""
    signature = tf.nest.map_structure(
        lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype), batches[0]
    )
    data = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=signature)
    return data.apply(tf.data.experimental.assert_cardinality(len(batches)))


COLD = Hyperparameters(BATCH, warmup_epochs=0.0)
HOT = COLD.replace(embedding_lr=0.05, dense_lr=0.01, l2=1e-3)


def ours(schema: Any) -> Any:
    return deepfm(schema, embedding_dim=6, mlp=(8,))


def built(builder: Callable[[Any], Any], schema: Any) -> Any:
    """A model with its variables: its step is traced once, not twice."""
    model = builder(schema)
    model(batch(schema)[0])
    return model


def fitted(
    builder: Callable[[Any], Any],
    schema: Any,
    hyperparameters: Hyperparameters = HOT,
    steps: int = 3,
    **options: Any,
) -> tuple[Any, CowClipOptimizer]:
    """A model after some steps, and its optimizer with these options."""
    tf.keras.utils.set_random_seed(0)
    model = built(builder, schema)
    optimizer = CowClipOptimizer.for_model(model, hyperparameters, **options)
    model.compile(optimizer=optimizer, metrics=[])
    model.fit(dataset(schema, steps), verbose=0)
    return model, optimizer


def stock_deepfm(schema: Any) -> Any:
    return mm.DeepFMModel(schema, embedding_dim=8, deep_block=mm.MLPBlock([16]))


def stock_dlrm(schema: Any) -> Any:
    return mm.DLRMModel(
        schema,
        embedding_dim=8,
        bottom_block=mm.MLPBlock([8]),
        top_block=mm.MLPBlock([8]),
    )


def stock_dcn(schema: Any) -> Any:
    return mm.DCNModel(schema, depth=2, deep_block=mm.MLPBlock([16]))


def stock_wide_and_deep(schema: Any) -> Any:
    return mm.WideAndDeepModel(
        schema,
        deep_block=mm.MLPBlock([16]),
        wide_schema=schema.select_by_tag(Tags.CATEGORICAL).excluding_by_name(["l"]),
        deep_schema=schema,
    )


def own_mlp(schema: Any) -> Any:
    """What a user builds: Merlin's inputs, an MLP of their own, two embedding widths."""
    ids = schema.select_by_tag(Tags.CATEGORICAL)
    features = schema.excluding_by_tag(Tags.TARGET)
    inputs = mm.InputBlockV2(features, categorical=mm.Embeddings(ids, dim={"a": 4, "b": 6}))
    return mm.Model(inputs, mm.MLPBlock([12, 6]), mm.BinaryOutput("y"))
