"""One little network, trained by SOK's tables on some ranks or by Keras's on one process."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from merlin_cowclip.plugins import CowClipOptimizer, CowClipSokOptimizer, Hyperparameters
from merlin_cowclip.plugins.distributed.horovod import ranks as here

MOMENTS = ("/m", "/v")
BATCH, STEPS, V, D = 24, 30, 40, 4
HP = Hyperparameters(
    BATCH,
    embedding_lr=5e-3,
    dense_lr=1e-3,
    l2=1e-3,
    clip_ratio=1e-3,
    clip_floor=1e-5,
    warmup_epochs=2.0,
)
STEPS_PER_EPOCH = 10
THRESHOLD = {"column": 2e-3}
TABLES = {"a": D, "l": D, "shared": D, "wide": 1}
FEATURES = {"a": "a", "l": "l", "buyer": "shared", "seller": "shared", "w": "wide"}
"""Feature → its table: of one id a sample, but `l`, which is a list."""


class Case(NamedTuple):
    kinds: Mapping[str, str]  # table → "hbm", "hybrid", "distributed" or "localized:0"
    clip: str | None = "adaptive_column"
    dense_lookup: bool = False  # all2all_dense_embedding for the features of one id
    eager: bool = False

    @property
    def hyperparameters(self) -> Hyperparameters:
        return HP.replace(clip=self.clip, clip_threshold=THRESHOLD.get(self.clip or ""))


def of_kind(kind: str) -> dict[str, str]:
    return dict.fromkeys(TABLES, kind)


CASES = {
    "hash tables": Case({**of_kind("hbm"), "a": "hybrid"}),
    "both": Case({"a": "localized:0", "l": "hybrid", "shared": "distributed", "wide": "hbm"}),
    "dense lookups": Case({**of_kind("hbm"), "a": "distributed"}, dense_lookup=True),
    "by a constant": Case(of_kind("hbm"), clip="column"),
    "eager": Case(of_kind("hbm"), eager=True),
}


def first_rows() -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    return {name: random.normal(0, 1e-2, (V, d)).astype(np.float32) for name, d in TABLES.items()}


def batches(rank: int = 0, ranks: int = 1) -> Iterator[tuple[dict[str, Any], tf.Tensor]]:
    """A rank's share of each batch: ids by feature, and labels. Lists repeat ids, and are empty."""
    random = np.random.default_rng(2)
    mine = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
    for _ in range(STEPS):
        ids: dict[str, Any] = {}
        for name in FEATURES:
            if name == "l":
                lists = [random.integers(0, 6, random.integers(0, 5)) for _ in range(BATCH)][mine]
                lengths = [len(one) for one in lists]
                ids[name] = tf.RaggedTensor.from_row_lengths(np.concatenate(lists), lengths)
            else:
                ids[name] = tf.constant(random.zipf(1.5, BATCH)[mine] % V)
        yield ids, tf.constant(random.integers(0, 2, (BATCH, 1))[mine], tf.float32)


def network(rank: int = 0) -> tf.keras.Sequential:
    """As rank 0 begins it, or with other weights."""
    tf.keras.utils.set_random_seed(3 + rank)
    layers = [tf.keras.layers.Dense(5, activation="relu"), tf.keras.layers.Dense(1)]
    dense = tf.keras.Sequential(layers)
    dense.build([None, sum(TABLES[table] for table in FEATURES.values())])
    return dense


def loss_of(rows: list[tf.Tensor], dense: Any, labels: tf.Tensor) -> tf.Tensor:
    logits = 30.0 * dense(tf.concat(rows, axis=1))
    return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, logits))


def signature() -> Any:
    specs = {name: tf.TensorSpec([None], tf.int64) for name in FEATURES}
    specs["l"] = tf.RaggedTensorSpec([None, None], tf.int64)
    return [specs, tf.TensorSpec([None, 1], tf.float32)]


def as_list(ids: Any) -> tf.RaggedTensor:
    ragged = isinstance(ids, tf.RaggedTensor)
    return ids if ragged else tf.RaggedTensor.from_tensor(ids[:, tf.newaxis])


def table_of(sok: Any, kind: str, rows: np.ndarray) -> tf.Variable:
    if kind not in ("hbm", "hybrid"):
        return sok.Variable(rows, dtype=tf.float32, mode=kind)
    capacity = {"init_capacity": 1024, "max_capacity": 1024} if kind == "hybrid" else {}
    width = rows.shape[1]
    table = sok.DynamicVariable(dimension=width, initializer="0", var_type=kind, **capacity)
    mine = np.arange(here().rank, V, here().size)
    sok.assign(table, tf.constant(mine), tf.constant(rows[mine]))
    return table


def rows_of(sok: Any, table: tf.Variable) -> np.ndarray:
    """V×d of a table, or of one of its moments; NaN where another rank has the rows."""
    whole = np.full((V, table.shape[1]), np.nan, np.float32)
    if isinstance(table, sok.DynamicVariable):
        keys, rows = sok.export(table)
        whole[keys.numpy()] = rows.numpy()
    else:
        stop = V if table.shape[0] else 0
        step = table.num_gpus if table.target_gpu < 0 else 1
        first = table.global_gpu_id if table.target_gpu < 0 else 0
        whole[first:stop:step] = table.numpy()
    return whole


def trained_by_sok(case: Case, sok: Any) -> dict[str, np.ndarray]:
    """All weights and moments after the steps; each rank begins with dense weights of its own."""
    tables = {name: table_of(sok, case.kinds[name], rows) for name, rows in first_rows().items()}
    dense = network(here().rank)
    optimizer = CowClipSokOptimizer(case.hyperparameters, steps_per_epoch=STEPS_PER_EPOCH)
    variables = [*tables.values(), *dense.trainable_variables]

    def step(ids: Any, labels: tf.Tensor) -> None:
        dense_ones = [name for name in ids if case.dense_lookup and name != "l"]
        lists = {name: as_list(of) for name, of in ids.items() if name not in dense_ones}
        with tf.GradientTape() as tape:
            rows = dict.fromkeys(ids)
            params, of = [tables[FEATURES[name]] for name in lists], list(lists.values())
            found = sok.lookup_sparse(params, of, combiners=["sum"] * len(of))
            rows.update(zip(lists, found, strict=True))
            for name in dense_ones:
                rows[name] = sok.all2all_dense_embedding(tables[FEATURES[name]], ids[name])
            loss = loss_of(list(rows.values()), dense, labels)
        lookups = [(tables[FEATURES[name]], of) for name, of in ids.items()]
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True), lookups=lookups)

    optimizer.broadcast(dense.variables)
    if not case.eager:
        step = tf.function(step, input_signature=signature(), autograph=False)
    for ids, labels in batches(here().rank, here().size):
        step(ids, labels)
    found = {name: rows_of(sok, table) for name, table in tables.items()}
    for name, table in tables.items():
        for moment, variable in zip("mv", optimizer.moments([table]), strict=True):
            found[f"{name}/{moment}"] = rows_of(sok, variable)
    return found | {f"dense/{i}": v.numpy() for i, v in enumerate(dense.trainable_variables)}


@functools.cache
def trained_by_keras(hyperparameters: Hyperparameters) -> dict[str, np.ndarray]:
    """The same by Keras's embeddings and `CowClipOptimizer(update="lazy")`, on one process."""
    first = first_rows()
    embeddings = {
        name: tf.keras.layers.Embedding(
            V, d, embeddings_initializer=tf.keras.initializers.Constant(first[name]), name=name
        )
        for name, d in TABLES.items()
    }
    dense = network()

    class Model(tf.keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.tables, self.dense = list(embeddings.values()), dense

        def call(self, ids: Any) -> list[tf.Tensor]:
            rows = {name: embeddings[FEATURES[name]](of) for name, of in ids.items()}
            return [tf.reduce_sum(r, axis=1) if n == "l" else r for n, r in rows.items()]

    model = Model()
    model(next(batches())[0])
    optimizer = CowClipOptimizer.for_model(
        model, hyperparameters, update="lazy", steps_per_epoch=STEPS_PER_EPOCH
    )

    @tf.function(input_signature=signature(), autograph=False)
    def step(ids: Any, labels: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(model(ids), dense, labels)
        variables = model.trainable_variables
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    for ids, labels in batches():
        step(ids, labels)
    found = {name: layer.embeddings.numpy() for name, layer in embeddings.items()}
    for name, layer in embeddings.items():
        part = optimizer.optimizers[0 if TABLES[name] > 1 else 1]
        for moment, variable in part.slots_of(layer.embeddings).items():
            found[f"{name}/{moment}"] = variable.numpy()
    return found | {f"dense/{i}": v.numpy() for i, v in enumerate(dense.trainable_variables)}


def check_alike(ranks: list[Any], expected: dict[str, np.ndarray], tolerance: float = 1e-5) -> None:
    """Whether what the ranks have is what one process has; each row is on one of them.

    Args:
      ranks: what each has trained.
      expected: what one process has.
      tolerance: in parts of the largest weight, and of a table's largest moment.
    """
    largest = max(np.abs(value).max() for key, value in expected.items() if key[-2:] not in MOMENTS)
    for key, value in expected.items():
        mine = np.stack([one[key] for one in ranks])
        if key.startswith("dense/"):
            assert (mine == mine[0]).all(), key
            mine = mine[0]
        else:
            held = ~np.isnan(mine)
            assert held.sum(axis=0).max() == 1, key
            # Rows that nobody looked up have no moments.
            assert key[-2:] in MOMENTS or held.any(axis=0).all(), key
            mine = np.where(held, mine, 0).sum(axis=0)
        scale = np.abs(value).max() if key[-2:] in MOMENTS else largest
        np.testing.assert_allclose(mine, value, rtol=0, atol=tolerance * scale, err_msg=key)


def refused_of_ranks() -> str:
    """What a first step says, of ranks that may have other dense weights."""
    optimizer = CowClipSokOptimizer(HP.replace(warmup_epochs=0.0))
    weight = tf.Variable([1.0])
    try:
        optimizer.apply_gradients([(tf.constant([1.0]), weight)])
    except ValueError as error:
        return str(error)
    return ""


def refused_lookups(sok: Any) -> tuple[str, float]:
    """What a step says of which the last rank forgets an id, a row of the first; how far its own
    rows have changed.
    """
    table = table_of(sok, "distributed", first_rows()["a"])
    optimizer = CowClipSokOptimizer(HP.replace(warmup_epochs=0.0))
    optimizer.broadcast([])
    before = table.numpy()
    forgets = here().rank == here().size - 1
    looked_up = tf.constant([1, 3, 4 if forgets else 5], tf.int64)
    told = looked_up[: 2 if forgets else 3]

    @tf.function(autograph=False)
    def step() -> None:
        with tf.GradientTape() as tape:
            rows = sok.lookup_sparse([table], [as_list(looked_up)], combiners=["sum"])[0]
            loss = tf.reduce_mean(tf.square(rows + 1.0))
        gradients = tape.gradient(loss, [table])
        lookups = [(table, as_list(told))]
        optimizer.apply_gradients(zip(gradients, [table], strict=True), lookups=lookups)

    said = ""
    try:
        step()
    except tf.errors.InvalidArgumentError as error:
        said = str(error)
    return said, float(np.abs(table.numpy() - before).max(initial=0.0))
