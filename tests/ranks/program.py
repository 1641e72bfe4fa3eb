"""What each rank runs: cases, and joins of little tensors, whose results go to a folder."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import tensorflow as tf

from merlin_cowclip.plugins import CowClipOptimizer
from merlin_cowclip.plugins.joining import RowSums, join_dense, join_rows, of_all_ranks, ranks
from merlin_cowclip.workflows.errors import AgreedError, UserError
from merlin_cowclip.workflows.training.evaluation import QualityOf
from merlin_cowclip.workflows.training.ranks import agreed
from tests.ranks.cases import CASES, batches, trained


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


def quality(rank: int, size: int) -> list[float]:
    """Of 50 rows, of which the ranks have every N-th each."""
    random = np.random.default_rng(0)
    labels, clicks = random.integers(0, 2, 50), random.random(50).round(1).astype(np.float32)
    found = QualityOf()
    found.add(labels[rank::size], clicks[rank::size])
    return list(found.of_all_ranks().quality())


def main(folder: Path, names: list[str]) -> None:
    here = ranks()
    np.savez(folder / f"joined-{here.rank}.npz", **joined(here.rank))
    for number, name in enumerate(names):
        state = trained(CASES[name], here.rank, here.size)
        np.savez(folder / f"{number}-{here.rank}.npz", **state)
    mine = {
        "said": refusals(here.rank),
        "quality": quality(here.rank, here.size),
        "rates": refused_rates(here.rank, here.size),
    }
    told = of_all_ranks(mine)
    (folder / f"told-{here.rank}.txt").write_text(repr(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
