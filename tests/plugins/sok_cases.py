"""A small network, trained by SOK's tables of all kinds on any number of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from merlin_cowclip.plugins import CowClipSokOptimizer, Hyperparameters
from merlin_cowclip.plugins.distributed.horovod import ranks

BATCH, STEPS, V, D, FIRST = 24, 20, 40, 4, 0.01
HP = Hyperparameters(
    BATCH, embedding_lr=5e-3, l2=1e-3, clip_ratio=1e-3, clip_floor=1e-5, warmup_epochs=2.0
)
HASHED = {"a": "hbm", "l": "hybrid", "shared": "hbm", "wide": "hbm"}
BOTH = {"a": "localized:0", "l": "hybrid", "shared": "distributed", "wide": "hbm"}
FEATURES = {"a": "a", "l": "l", "buyer": "shared", "seller": "shared", "w": "wide"}
"""Feature → its table. "l" has lists, which repeat ids, and are empty; other features one id."""


def table_of(sok: Any, name: str, kind: str) -> tf.Variable:
    width = 1 if name == "wide" else D
    if kind not in ("hbm", "hybrid"):
        return sok.Variable(np.full([V, width], FIRST), dtype=tf.float32, mode=kind)
    capacity = {"init_capacity": 1024, "max_capacity": 1024} if kind == "hybrid" else {}
    return sok.DynamicVariable(
        dimension=width, initializer=str(FIRST), name=name, var_type=kind, **capacity
    )


def rows_of(sok: Any, table: tf.Variable) -> np.ndarray:
    """V×d of a table; NaN where another rank has the row, or nobody has looked it up."""
    rows = np.full((V, table.shape[1]), np.nan, np.float32)
    if isinstance(table, sok.DynamicVariable):
        keys, values = sok.export(table)
        rows[keys.numpy()] = values.numpy()
    elif table.target_gpu < 0:
        rows[ranks().rank :: ranks().size] = table.numpy()
    elif table.target_gpu == ranks().rank:
        rows[:] = table.numpy()
    return rows


def trained(sok: Any, kinds: dict[str, str]) -> dict[str, np.ndarray]:
    """All weights after the steps; each rank begins with dense weights of its own."""
    tables = {name: table_of(sok, name, kind) for name, kind in kinds.items()}
    tf.keras.utils.set_random_seed(3 + ranks().rank)
    dense = tf.keras.Sequential([tf.keras.layers.Dense(5, "relu"), tf.keras.layers.Dense(1)])
    dense.build([None, 4 * D + 1])
    optimizer = CowClipSokOptimizer(HP, steps_per_epoch=10)
    optimizer.broadcast(dense.variables)
    variables = [*tables.values(), *dense.trainable_variables]
    looked_up = [tables[name] for name in FEATURES.values()]

    @tf.function(autograph=False, reduce_retracing=True)
    def step(ids: list[Any], labels: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            rows = sok.lookup_sparse(looked_up, ids, combiners=["sum"] * len(ids))
            logits = 30.0 * dense(tf.concat(rows, axis=1))
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, logits))
        gradients = tape.gradient(loss, variables)
        lookups = zip(looked_up, ids, strict=True)
        optimizer.apply_gradients(zip(gradients, variables, strict=True), lookups=lookups)

    random = np.random.default_rng(2)
    share = slice(ranks().rank * BATCH // ranks().size, (ranks().rank + 1) * BATCH // ranks().size)
    for _ in range(STEPS):
        lengths = {n: random.integers(0, 5, BATCH) if n == "l" else [1] * BATCH for n in FEATURES}
        ids = [[random.zipf(1.5, n) % V for n in lengths[name]][share] for name in FEATURES]
        labels = random.integers(0, 2, (BATCH, 1))[share]
        ragged = [tf.ragged.constant(of, dtype=tf.int64, ragged_rank=1) for of in ids]
        step(ragged, tf.constant(labels, tf.float32))
    weights = {name: rows_of(sok, table) for name, table in tables.items()}
    return weights | {f"dense/{i}": v.numpy() for i, v in enumerate(dense.trainable_variables)}


def check_alike(of_ranks: list[Any], expected: dict[str, np.ndarray], tolerance=1e-5) -> None:
    """Each row is on one rank, with the weights that one process has; dense ones are on all."""
    largest = max(np.nanmax(np.abs(value)) for value in expected.values())
    for key, value in expected.items():
        weights = np.stack([one[key] for one in of_ranks])
        if key.startswith("dense/"):
            assert (weights == weights[0]).all(), key
        else:
            assert (~np.isnan(weights)).sum(axis=0).max() == 1, key
        is_known = ~np.isnan(value)
        weights = np.nanmax(weights[:, is_known], axis=0)
        atol = tolerance * largest
        np.testing.assert_allclose(weights, value[is_known], rtol=0, atol=atol, err_msg=key)
