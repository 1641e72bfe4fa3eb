"""What `bench_step.py` compares: DeepFM steps that differ in the optimizer, and stock Merlin's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from merlin_cowclip.models import deepfm
from merlin_cowclip.plugins import CowClipOptimizer, Hyperparameters
from merlin_cowclip.plugins._tensorflow import ColumnSchema, Schema, Tags, mm, tf

FIELDS, NUMBERS, WIDTH, MLP = 26, 13, 10, (400, 400, 400)
OPTIONS: dict[str, dict[str, Any]] = {
    "adagrad": {"base": "adagrad"},
    "rowwise_adagrad": {"base": "rowwise_adagrad"},
    "ema": {"ema": 0.999},
    "4": {"accumulate": 4},
}
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


def batches(rows: int, size: int, number: int | None = None) -> list[Any]:
    """Batches with power-law ids: a few frequent ones, many that occur once.

    By default about as many as are measured, so that a rare id is hardly ever met again.
    """
    rng = np.random.default_rng(0)
    made = []
    for _ in range(number or max(8, min(64, 2**17 // size))):
        features = {}
        for i, n in enumerate(field_sizes(rows)):
            ids = np.floor(n ** rng.random((size, 1))).astype(np.int64) - 1
            features[f"C{i}"] = tf.constant(np.clip(ids, 0, n - 1))
        for i in range(NUMBERS):
            features[f"I{i}"] = tf.constant(rng.random((size, 1)), tf.float32)
        made.append((features, tf.constant(rng.integers(0, 2, (size, 1)), tf.float32)))
    return made


class DenseCowClip(tf.keras.optimizers.legacy.Adam):
    """The exact mathematics the plain way: gradient, norms, clip and Adam over whole tables.

    Args:
      learning_rate: η of everything.
      tables: returns the tables, each with its `variable` and its `width`.
    """

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


class Table(NamedTuple):
    """What `DenseCowClip` knows of a table of the published network."""

    variable: tf.Variable
    width: int


class PublishedDeepFM(tf.keras.Model):
    """DeepFM as the paper's code lays it out: two tables per field, each read as a whole.

    Its gathers are of the tables' values, not of the variables: a dense update would otherwise copy
    every table first (see `TableSpec.gather`), as Keras's `Embedding` has it.
    """

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.tables, self.linear = (
            [
                self.add_weight(f"{kind}_{i}", shape=(size, width), initializer="random_normal")
                for i, size in enumerate(sizes)
            ]
            for kind, width in (("embedding", WIDTH), ("linear", 1))
        )
        dense = tf.keras.layers.Dense
        self.deep = [dense(n, "relu", kernel_initializer="he_normal") for n in MLP]
        self.deep_logit, self.numbers_logit = dense(1, use_bias=False), dense(1, use_bias=False)
        self.bias = self.add_weight("bias", shape=(1,), initializer="zeros")

    def all_tables(self) -> list[Table]:
        """Those of the embeddings and of the linear part."""
        return [Table(v, v.shape[1]) for v in (*self.tables, *self.linear)]

    def call(self, inputs: dict[str, tf.Tensor]) -> tf.Tensor:
        """The click probability, b×1."""
        ids = [tf.reshape(inputs[f"C{i}"], [-1]) for i in range(FIELDS)]
        numbers = tf.concat([inputs[f"I{i}"] for i in range(NUMBERS)], axis=1)
        embedded, weights = (
            [tf.gather(tf.convert_to_tensor(table), ids[i]) for i, table in enumerate(tables)]
            for tables in (self.tables, self.linear)
        )
        x = tf.concat([*embedded, numbers], axis=1)
        for layer in self.deep:
            x = layer(x)
        stacked = tf.stack(embedded, axis=1)
        squares = tf.square(tf.reduce_sum(stacked, axis=1)) - tf.reduce_sum(stacked**2, axis=1)
        pairs = 0.5 * tf.reduce_sum(squares, axis=1, keepdims=True)
        logit = tf.add_n([*weights, self.numbers_logit(numbers), self.deep_logit(x), pairs])
        return tf.sigmoid(logit + self.bias)


class NoUpdate(tf.keras.optimizers.legacy.Optimizer):
    """Computes gradients, or not even these, and applies none: what a step's parts cost.

    Args:
      gradients: whether to use the gradients; what only serves unused ones is not computed.
    """

    def __init__(self, gradients: bool) -> None:
        super().__init__("no_update")
        self.gradients = gradients
        self.sink = tf.Variable(0.0, trainable=False)

    def apply_gradients(self, grads_and_vars: Any, **_: Any) -> Any:
        values = [g.values if isinstance(g, tf.IndexedSlices) else g for g, _ in grads_and_vars]
        used = values if self.gradients else []
        sums = [tf.reduce_sum(value) for value in used]
        total = tf.add_n([tf.constant(0.0), *sums])
        return tf.group(self.sink.assign_add(total), self.iterations.assign_add(1))

    def get_config(self) -> dict[str, Any]:
        return {}


def build(variant: str, rows: int, size: int) -> Callable[[], Any]:
    """A function that runs one training step of a variant and waits for it.

    "forward of X" and "gradients of X" are the parts of the step of X that its optimizer's update
    comes after.
    """
    part, _, whole = variant.rpartition(" of ")
    description = schema(rows)
    hp = Hyperparameters(size, warmup_epochs=0.0, l2=L2, clip_ratio=RATIO, clip_floor=FLOOR)
    if whole == "stock":
        model = mm.DeepFMModel(description, embedding_dim=WIDTH, deep_block=mm.MLPBlock(list(MLP)))
        optimizer: Any = mm.LazyAdam(1e-4)
    elif whole == "published":
        model = PublishedDeepFM(field_sizes(rows))
        optimizer = DenseCowClip(1e-4, model.all_tables)
    else:
        model = deepfm(description, embedding_dim=WIDTH, mlp=MLP)
        if whole == "dense way":
            finder = CowClipOptimizer.for_model(model, hp)
            optimizer = DenseCowClip(1e-4, lambda: list(finder.table_specs))
        else:
            update, clip, *more = whole.split()
            used = hp if clip == "cowclip" else hp.replace(clip=None)
            options = OPTIONS[more[0]] if more else {}
            optimizer = CowClipOptimizer.for_model(model, used, update=update, **options)
    if part:
        optimizer = NoUpdate(gradients=part == "gradients")
    model.compile(optimizer=optimizer, metrics=[], loss="binary_crossentropy")
    made = batches(rows, size)
    signature = tf.nest.map_structure(
        lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype), made[0]
    )
    endless = tf.data.Dataset.from_generator(lambda: iter(made), output_signature=signature)
    data = iter(endless.cache().repeat().prefetch(2))
    function = model.make_train_function()

    def step() -> Any:
        return float(function(data)["loss"])

    if whole.startswith("deferred") and not part:
        step()  # which makes its state
        make_rows_pending(optimizer, rows, size)
    return step


def make_rows_pending(
    optimizer: CowClipOptimizer, rows: int, size: int, steps: int = 40_000
) -> None:
    """As after so many steps: each id was last in a batch when its frequency has it."""
    random = np.random.default_rng(0)
    gaps = []
    for n in field_sizes(rows):
        k = np.arange(1, n + 1)
        share = np.log((k + 1) / k) / np.log(n)
        gaps.append(random.geometric(np.clip(1 - (1 - share) ** size, 1e-9, 1)))
    last = steps - np.minimum(np.concatenate(gaps), steps)
    for part in optimizer.optimizers[:2]:
        part.iterations.assign(steps)
        for spec in optimizer.table_specs:
            last_step = part.slots_of(spec.variable).get("last_step")
            if last_step is not None:
                old = np.zeros(last_step.shape, np.float32)
                old[: len(last), 0] = last
                last_step.assign(old)
                root = 10 ** random.uniform(-5, -4, (1, spec.width)).astype(np.float32)
                m, v = (part.get_slot(spec.variable, name) for name in ("m", "v"))
                m.assign(root * random.standard_normal(m.shape, np.float32))
                v.assign(tf.broadcast_to(root**2, v.shape))
    optimizer.iterations.assign(steps)
