"""What `bench_step.py` compares: DeepFM steps that differ in the optimizer, and stock Merlin's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from merlin_cowclip.models import deepfm
from merlin_cowclip.plugins import CowClipOptimizer, Hyperparameters
from merlin_cowclip.plugins._stack import ColumnSchema, Schema, Tags, mm, tf

FIELDS, NUMBERS, WIDTH, MLP = 26, 13, 10, (400, 400, 400)
L2, RATIO, FLOOR = 1e-5, 1.0, 3.162e-5

# Distinct ids of Criteo's 26 fields in the Kaggle data, rounded: their proportions are used.
CRITEO = [
    *(1460, 583, 10_100_000, 2_200_000, 305, 24, 12_500, 633, 3, 93_000, 5_700, 8_400_000, 3_200),
    *(27, 15_000, 5_500_000, 10, 5_700, 2_200, 4, 7_000_000, 18, 15, 286_000, 105, 143_000),
]


def field_sizes(rows: int) -> list[int]:
    """Criteo's proportions, about `rows` in all."""
    return [max(4, round(size * rows / sum(CRITEO))) for size in CRITEO]


def schema(rows: int) -> Schema:
    columns = [
        ColumnSchema(
            f"C{i}",
            dtype=np.int64,
            tags=[Tags.CATEGORICAL],
            properties={"domain": {"min": 0, "max": size - 1, "name": f"C{i}"}},
        )
        for i, size in enumerate(field_sizes(rows))
    ]
    columns += [
        ColumnSchema(f"I{i}", dtype=np.float32, tags=[Tags.CONTINUOUS]) for i in range(NUMBERS)
    ]
    target = ColumnSchema("y", dtype=np.float32, tags=[Tags.TARGET, Tags.BINARY_CLASSIFICATION])
    return Schema([*columns, target])


def batches(rows: int, size: int, number: int = 3) -> list[Any]:
    """Batches with power-law ids: a few frequent ones, many that occur once."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(number):
        features = {}
        for i, n in enumerate(field_sizes(rows)):
            ids = np.floor(n ** rng.random((size, 1))).astype(np.int64) - 1
            features[f"C{i}"] = tf.constant(np.clip(ids, 0, n - 1))
        for i in range(NUMBERS):
            features[f"I{i}"] = tf.constant(rng.random((size, 1)), tf.float32)
        made.append((features, tf.constant(rng.integers(0, 2, (size, 1)), tf.float32)))
    return made


class DenseCowClip(tf.keras.optimizers.legacy.Adam):
    """The exact mathematics the plain way: gradient, norms, clip and Adam over whole tables."""

    def __init__(self, learning_rate: float, tables: Callable[[], list[Any]]) -> None:
        super().__init__(learning_rate)
        self.tables = tables

    def _transform_gradients(self, grads_and_vars: Any) -> list[Any]:
        specs = {spec.variable.ref(): spec for spec in self.tables()}
        transformed = []
        for gradient, variable in grads_and_vars:
            spec = specs.get(variable.ref())
            if spec is not None:
                ids = gradient.indices
                gradient = tf.convert_to_tensor(gradient) + 2 * L2 * variable
                if spec.width > 1:
                    occurring, _, n = tf.unique_with_counts(ids)
                    counts = tf.tensor_scatter_nd_update(
                        tf.ones(variable.shape[0]), occurring[:, None], tf.cast(n, tf.float32)
                    )
                    norm = tf.norm(variable, axis=-1, keepdims=True)
                    bound = counts[:, None] * tf.maximum(RATIO * norm, FLOOR)
                    length = tf.norm(gradient, axis=-1, keepdims=True)
                    gradient *= tf.minimum(1.0, bound / tf.maximum(length, 1e-30))
            transformed.append((gradient, variable))
        return transformed


class NoUpdate(tf.keras.optimizers.legacy.Optimizer):
    """Computes every gradient and applies none: what an update's cost is measured from."""

    def __init__(self) -> None:
        super().__init__("no_update")
        self.sink = tf.Variable(0.0, trainable=False)

    def apply_gradients(self, grads_and_vars: Any, **_: Any) -> Any:
        values = [g.values if isinstance(g, tf.IndexedSlices) else g for g, _ in grads_and_vars]
        # Used, or the graph's optimizer would drop what computes them.
        total = tf.add_n([tf.reduce_sum(value) for value in values])
        return tf.group(self.sink.assign_add(total), self.iterations.assign_add(1))

    def get_config(self) -> dict[str, Any]:
        return {}


def build(variant: str, rows: int, size: int) -> Callable[[], Any]:
    """A function that runs one training step of a variant and waits for it."""
    description = schema(rows)
    hp = Hyperparameters(size, warmup_epochs=0.0, l2=L2, clip_ratio=RATIO, clip_floor=FLOOR)
    if variant == "stock":
        model = mm.DeepFMModel(description, embedding_dim=WIDTH, deep_block=mm.MLPBlock(list(MLP)))
        optimizer: Any = mm.LazyAdam(1e-4)
    else:
        model = deepfm(description, embedding_dim=WIDTH, mlp=MLP)
        if variant == "dense way":
            finder = CowClipOptimizer.for_model(model, hp)
            optimizer = DenseCowClip(1e-4, lambda: list(finder.table_specs))
        elif variant == "no update":
            optimizer = NoUpdate()
        else:
            update, clip = variant.split()
            used = hp if clip == "cowclip" else hp.replace(clip=None)
            optimizer = CowClipOptimizer.for_model(model, used, update=update)
    model.compile(optimizer=optimizer, metrics=[])
    made = batches(rows, size)
    signature = tf.nest.map_structure(
        lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype), made[0]
    )
    endless = tf.data.Dataset.from_generator(lambda: iter(made), output_signature=signature)
    data = iter(endless.cache().repeat().prefetch(2))
    function = model.make_train_function()

    def step() -> Any:
        return float(function(data)["loss"])

    return step
