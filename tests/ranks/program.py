"""What each rank runs: cases, joins of little tensors, and more; results go to a folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from merlin_cowclip.models import FusedEmbeddings
from merlin_cowclip.plugins import CowClipOptimizer
from merlin_cowclip.plugins._stack import Schema, mm
from merlin_cowclip.plugins.joining import RowSums, join_dense, join_rows, of_all_ranks, ranks
from merlin_cowclip.plugins.whole import whole_rows
from merlin_cowclip.workflows.errors import AgreedError, UserError
from merlin_cowclip.workflows.training.evaluation import QualityOf
from merlin_cowclip.workflows.training.ranks import agreed
from tests.plugins.merlin_models import SCHEMA, category
from tests.ranks import scripts, sok_program
from tests.ranks.cases import CASES, HP, Case, batches, ours, trained


def joined(rank: int) -> dict[str, np.ndarray]:
    """Of what each rank has by its number; see `test_joins`."""
    table, tied = tf.Variable(tf.zeros([9, 2])), tf.Variable(tf.zeros([3, 1]))
    rows = [4, 7][: rank + 1] if rank < 2 else []  # the third has none
    values = tf.reshape(tf.constant([1.0 + rank] * 2 * len(rows), tf.float32), [-1, 2])
    shares = [
        RowSums(tf.constant(rows, tf.int64), values, tf.fill([len(rows)], float(rank))),
        RowSums(tf.range(3, dtype=tf.int64), tf.fill([3, 1], 3.0), tf.constant([1.0, 0, 0]), True),
    ]

    @tf.function
    def step():
        sparse, whole = join_rows(shares, [table, tied])
        slices = tf.IndexedSlices(tf.fill([1, 2], 1.0 + rank), tf.constant([rank], tf.int64), None)
        dense, gathered = join_dense([tf.constant([1.0 + rank]), slices])
        found = {"rows": sparse.sums[:3], "whole": whole.sums[:3], "dense": dense}
        return {**found, "slices": (gathered.values, gathered.indices)}

    flat = {}
    for name, found in step().items():
        for place, tensor in enumerate(found if isinstance(found, tuple) else [found]):
            flat[f"{name}_{place}"] = np.asarray(tensor)
    return flat


def refusals(rank: int) -> list[str]:
    """What ends each rank where one, all or none of them have a reason."""
    said = []
    for reasons in ([None, "it is full"], ["so", "so"], [None, None], [None, 7]):
        try:
            with agreed():
                reason = reasons[min(rank, 1)]
                if reason == 7:
                    raise ZeroDivisionError("seven")
                if reason is not None:
                    raise UserError(reason)
            said.append("")
        except (AgreedError, ZeroDivisionError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def refused_rates(rank: int, size: int) -> str:
    """What ends a step with learning rates that the ranks have set differently."""
    case = CASES["eager loop"]
    features, _ = next(batches(case, rank, size))
    model = case.build(case.schema)
    model(features)
    optimizer = CowClipOptimizer.for_model(model, case.hyperparameters, steps_per_epoch=1000)
    optimizer.broadcast()
    optimizer.learning_rate = case.hyperparameters.dense_lr * (1.0 if rank else 0.5)
    weights = model.trainable_variables
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(features, training=True))
    try:
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
    except tf.errors.InvalidArgumentError as error:
        return str(error)
    return ""


def refused_use(rank: int, size: int) -> list[str]:
    """What ends a step that Horovod's own tape has joined, and fits of different lengths."""
    import horovod.tensorflow as hvd

    case, said = CASES["fused, a list, exact"], []
    for wrong in ("tape", "steps"):
        mine = list(batches(case, rank, size))
        model = case.build(case.schema)
        model(mine[0][0])
        optimizer = CowClipOptimizer.for_model(model, case.hyperparameters, steps_per_epoch=1000)
        model.compile(optimizer=optimizer, metrics=[])

        @tf.function(autograph=False)
        def step(features: Any, model: Any = model, optimizer: Any = optimizer) -> None:
            with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
                loss = tf.reduce_sum(model(features, training=True))
            weights = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

        data = tf.data.Dataset.from_tensor_slices(np.arange(3 + rank))
        data = data.map(lambda _, mine=mine: mine[0])
        try:
            step(mine[0][0]) if wrong == "tape" else model.fit(data, verbose=0)
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


class Both(tf.keras.layers.Layer):
    """A table in shards and one on all ranks; or the first one, read as a whole."""

    def __init__(self, reads_all: bool = False) -> None:
        super().__init__()
        self.reads_all = reads_all
        self.shared = FusedEmbeddings(SCHEMA, 4, sharded=True)
        self.everywhere = FusedEmbeddings(SCHEMA, 3)
        self.dense = tf.keras.layers.Dense(1)

    def call(self, inputs: dict[str, Any]) -> tf.Tensor:
        both = [self.shared(inputs), self.everywhere(inputs)]
        if self.reads_all:
            whole = tf.reduce_mean(self.shared.table) + 0.0 * both[1][:, 0, :1]
            return self.dense(whole)
        return self.dense(tf.concat([tf.reduce_sum(some, axis=1) for some in both], axis=1))


def refused_of_shards(rank: int, ranks: int) -> list[str]:
    """What a step says of tables in shards that it cannot train."""
    said = []
    for clip, reads_all in (("field", False), ("adaptive_column", True), (None, False)):
        features, labels = next(batches(Case(ours, SCHEMA), rank, ranks))
        model = mm.Model(Both(reads_all), mm.BinaryOutput("click"), schema=SCHEMA)
        model(features)
        threshold = 1e-2 if clip == "field" else None
        hp = HP.replace(clip=clip or HP.clip, clip_threshold=threshold)
        optimizer = CowClipOptimizer.for_model(model, hp, steps_per_epoch=10) if clip else "adam"
        model.compile(optimizer=optimizer, run_eagerly=False)
        try:
            model.fit(features, labels, batch_size=len(labels), verbose=0)
        except Exception as error:
            said.append(str(error))
    return said


def rows_in_shards(rank: int) -> dict[str, np.ndarray]:
    """A table of three blocks as it begins; what all ranks read of rows that were set."""
    tf.keras.utils.set_random_seed(5 + rank)
    table = FusedEmbeddings(Schema([category("a", 150_000)]), 2, stddev=0.1, sharded=True)
    table.build({})
    (spec,) = table.table_specs()
    whole = whole_rows(spec.variable, spec.shard)
    given = np.random.default_rng(2).random((150_000, 2), np.float32)
    table.load_rows("a", given)
    ids = tf.constant(np.random.default_rng(rank).integers(0, 150_000, 1000 + rank))
    read = {"rows": np.array(spec.variable.shape[0]), "ids": ids, "read": table.lookup("a", ids)}
    return {"given": given, **read} | ({} if whole is None else {"whole": whole})


def quality(rank: int, size: int) -> list[float]:
    """Of 50 rows, of which the ranks have every N-th each."""
    random = np.random.default_rng(0)
    labels, clicks = random.integers(0, 2, 50), random.random(50).round(1).astype(np.float32)
    found = QualityOf()
    found.add(labels[rank::size], clicks[rank::size])
    return list(found.of_all_ranks().quality())


def main(folder: Path, data: Path, names: list[str]) -> None:
    here = ranks()
    np.savez(folder / f"joined-{here.rank}.npz", **joined(here.rank))
    for number, name in enumerate(names):
        state = trained(CASES[name], here.rank, here.size)
        np.savez(folder / f"{number}-{here.rank}.npz", **state)
    np.savez(folder / f"rows-{here.rank}.npz", **rows_in_shards(here.rank))
    mine = {
        "said": refusals(here.rank),
        "quality": quality(here.rank, here.size),
        "rates": refused_rates(here.rank, here.size),
        "shards": refused_of_shards(here.rank, here.size) if here.size == 2 else None,
        "use": refused_use(here.rank, here.size),
        "scripts": scripts.ended(folder, data, here.rank, here.size) if here.size == 2 else None,
    }
    told = of_all_ranks(mine)
    (folder / f"told-{here.rank}.txt").write_text(repr(told))
    sok_program.main(folder / "sok", here)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
