"""Models trained for 30 steps of one global batch, by one process or by several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from merlin_cowclip.models import deepfm
from merlin_cowclip.models.ctr_block import embeddings_of
from merlin_cowclip.plugins import CowClipOptimizer, Hyperparameters, whole_tables
from merlin_cowclip.plugins._tensorflow import Schema, Tags
from merlin_cowclip.plugins.optimizers.state import training_state
from tests.plugins.merlin_models import (
    NUMBER,
    SCHEMA,
    SHARED,
    TARGET,
    WITH_LIST,
    category,
    own_mlp,
    stock_dcn,
    stock_deepfm,
    stock_dlrm,
)

BATCH, STEPS = 24, 30  # 2 and 3 ranks share the batch
HP = Hyperparameters(BATCH, embedding_lr=5e-3, dense_lr=1e-3, l2=1e-4, warmup_epochs=0.0)

SHARED_IN_LISTS = Schema(
    [
        category("a", 60, domain="thing"),
        category("b", 60),
        category("l", 60, ragged=True, domain="thing"),
        NUMBER,
        TARGET,
    ]
)


def ours(schema: Any) -> Any:
    return deepfm(schema, embedding_dim=4, mlp=(8,))


def in_shards(schema: Any) -> Any:
    """As `ours`, sharded; its rows are set, as one process would draw others."""
    model = deepfm(schema, embedding_dim=4, mlp=(8,), sharded=True)
    model(next(batches(Case(in_shards, schema), 0, 1))[0])
    for layer in embeddings_of(model).values():
        (spec,) = layer.table_specs()
        rows = np.random.default_rng(7).normal(0, 1e-2, (spec.num_rows, spec.width))
        local = slice(None) if spec.shard is None else slice(spec.shard.rank, None, spec.shard.size)
        spec.variable.assign(rows[local])
    return model


@dataclass(frozen=True)
class Case:
    build: Callable[[Any], Any]
    schema: Any
    clip: str | None = "adaptive_column"
    update: str = "exact"
    ids: str = "any"  # of samples: any few, "disjoint" or "equal"
    precision: str = "float32"
    way: str = "step"
    micro_batches: int = 1  # on several ranks
    clip_tables: list[str] | None = None
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def hyperparameters(self) -> Hyperparameters:
        threshold = {"global": 2e-2, "field": 5e-3, "column": 2e-3}.get(self.clip or "")
        return HP.replace(clip=self.clip, clip_threshold=threshold, **self.changes)


# In half precision each difference becomes one of its last digit; the paper's rates keep it small.
PAPERS = {"embedding_lr": 1e-4, "warmup_epochs": 1.0}
TIGHT = {"clip_ratio": 1e-3, "clip_floor": 1e-5}  # so that the adaptive clips shorten something

CASES = {
    "fused, a list, exact": Case(ours, WITH_LIST, micro_batches=5, changes=TIGHT),
    "fused, shared rows, lazy": Case(
        ours, SHARED_IN_LISTS, "adaptive_field", "lazy", changes=TIGHT
    ),
    "one rank has rows of a list": Case(stock_dcn, WITH_LIST, ids="first", changes=TIGHT),
    "disjoint ids": Case(ours, SCHEMA, "field", "lazy", "disjoint"),
    "equal ids": Case(ours, SCHEMA, "column", ids="equal"),
    "stock, shared table": Case(stock_dlrm, SHARED, "global"),
    "stock, looked up twice": Case(stock_deepfm, SCHEMA, update="lazy", changes=TIGHT),
    "half precision": Case(ours, WITH_LIST, precision="mixed_float16", changes={**TIGHT, **PAPERS}),
    "fit, not built": Case(own_mlp, SCHEMA, way="fit", changes=TIGHT),
    "eager loop": Case(ours, WITH_LIST, way="loop", update="lazy", changes=TIGHT),
    "shards, shared rows, lazy": Case(
        in_shards, SHARED_IN_LISTS, "adaptive_field", "lazy", changes=TIGHT
    ),
    "shards, one rank has rows of a list": Case(in_shards, WITH_LIST, "field", ids="first"),
    "shards, disjoint ids": Case(in_shards, SCHEMA, "global", "lazy", "disjoint"),
    "shards, equal ids": Case(in_shards, SCHEMA, "column", ids="equal"),
    # r is less than 2λ, so absent rows are clipped, but those of one field.
    "shards, a list, a field exempt": Case(
        in_shards,
        WITH_LIST,
        micro_batches=2,
        clip_tables=["a"],
        changes={**TIGHT, "l2": 1e-2},
    ),
    "shards, eager loop": Case(in_shards, WITH_LIST, way="loop", update="lazy", changes=TIGHT),
}
IMPORTANT = (
    "fused, a list, exact",
    "fused, shared rows, lazy",
    "fit, not built",
    "shards, shared rows, lazy",
    "shards, a list, a field exempt",
)
LAUNCHES = {
    "important": (2, IMPORTANT),
    "others": (2, tuple(name for name in CASES if name not in IMPORTANT)),
    "three": (3, (*IMPORTANT[1:2], "one rank has rows of a list", *IMPORTANT[3:])),
}
"""By name: the number of ranks, and the cases that they train."""


def batches(case: Case, rank: int, ranks: int) -> Iterator[tuple[dict[str, Any], Any]]:
    """A rank's share of each global batch, as Merlin's loader yields it."""
    low, high = rank * BATCH // ranks, (rank + 1) * BATCH // ranks
    random = np.random.default_rng(5)
    for _ in range(STEPS):
        features: dict[str, Any] = {}
        for column in case.schema:
            if Tags.CATEGORICAL in column.tags and column.is_list:
                lists = [random.integers(1, 9, random.integers(0, 4)) for _ in range(BATCH)]
                if case.ids == "first":
                    lists = [ids if i < BATCH // 3 else ids[:0] for i, ids in enumerate(lists)]
                local = lists[low:high]
                features[f"{column.name}__values"] = np.concatenate([*local, lists[0][:0]])
                features[f"{column.name}__offsets"] = np.cumsum([0, *map(len, local)])
            elif Tags.CATEGORICAL in column.tags:
                ids = random.integers(0, 9, (BATCH, 1))
                if case.ids == "disjoint":
                    ids = 2 * np.arange(BATCH)[:, None] + ids % 2
                elif case.ids == "equal":
                    ids = np.full_like(ids, ids[0, 0])
                features[column.name] = ids[low:high]
            elif Tags.CONTINUOUS in column.tags:
                features[column.name] = random.random((BATCH, 1), np.float32)[low:high]
        labels = random.integers(0, 2, (BATCH, 1))[low:high].astype(np.float32)
        yield {name: tf.constant(value) for name, value in features.items()}, tf.constant(labels)


def trained(case: Case, rank: int = 0, ranks: int = 1) -> dict[str, np.ndarray]:
    """All variables that training changed, and the rows and samples of each field.

    Each rank begins with its own dense weights. Only rank 0 returns sharded tables.
    """
    tf.keras.backend.clear_session()
    tf.keras.mixed_precision.set_global_policy(case.precision)
    tf.keras.utils.set_random_seed(3 + rank)
    local = list(batches(case, rank, ranks))
    model = case.build(case.schema)
    if case.way != "fit":
        model(local[0][0])
    optimizer = CowClipOptimizer.for_model(
        model,
        case.hyperparameters,
        update=case.update,
        accumulate=case.micro_batches if ranks > 1 else 1,
        steps_per_epoch=1000,
        clip_tables=case.clip_tables,
    )
    statistics = optimizer.observe()
    model.compile(optimizer=optimizer, metrics=[])
    WAYS[case.way](model, optimizer, local)
    tf.keras.mixed_precision.set_global_policy("float32")
    totals = statistics.total()
    with whole_tables(model):
        left_out = optimizer.in_shards()
        changed = training_state(model).items()
        state = {
            name: variable.numpy()
            for name, variable in changed
            if not name.startswith("loss/") and variable.ref() not in left_out
        }
    counts = [[field.steps, field.all.rows, field.all.occurrences] for field in totals]
    clipped = [field.all.clipped_rows for field in totals if field.is_clipped]
    return {**state, "counts": np.array(counts), "clipped": np.array(clipped)}


def _signature(local: list[Any]) -> Any:
    return tf.nest.map_structure(lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype), local[0])


def _step(model: Any, optimizer: Any, local: list[Any]) -> None:
    step = tf.function(model.train_step, input_signature=[_signature(local)])
    for batch in local:
        step(batch)


def _fit(model: Any, optimizer: Any, local: list[Any]) -> None:
    signature = _signature(local)
    data = tf.data.Dataset.from_generator(lambda: iter(local), output_signature=signature)
    data = data.apply(tf.data.experimental.assert_cardinality(len(local)))
    model.fit(data, verbose=0)


def _loop(model: Any, optimizer: Any, local: list[Any]) -> None:
    optimizer.create_slots(model.trainable_variables)
    optimizer.broadcast()
    for features, labels in local:
        with tf.GradientTape() as tape:
            clicks = tf.reshape(model(features, training=True), [-1, 1])
            loss = tf.reduce_mean(tf.keras.losses.binary_crossentropy(labels, clicks))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


WAYS = {"step": _step, "fit": _fit, "loop": _loop}
