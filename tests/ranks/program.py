"""What each rank runs: cases, joins of small tensors, and more; results go to a folder."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import tensorflow as tf

from merlin_cowclip.models import FusedEmbeddings
from merlin_cowclip.plugins._tensorflow import Schema
from merlin_cowclip.plugins.distributed.gradients import RowSums, all_gather_rows, all_reduce_dense
from merlin_cowclip.plugins.distributed.horovod import all_gather_object, ranks
from merlin_cowclip.plugins.saving.gather_tables import whole_rows
from merlin_cowclip.workflows.training.evaluation import MetricAccumulator
from tests.plugins.merlin_models import category
from tests.ranks import scripts, sok_program
from tests.ranks.cases import CASES, LAUNCHES, trained


def joined(rank: int) -> dict[str, np.ndarray]:
    """Of what each rank has by its number; see `test_joins`."""
    table, tied = tf.Variable(tf.zeros([9, 2])), tf.Variable(tf.zeros([3, 1]))
    rows = [4, 7][: rank + 1] if rank < 2 else []  # the third has none
    values = tf.reshape(tf.constant([1.0 + rank] * 2 * len(rows), tf.float32), [-1, 2])
    shares = [
        RowSums(tf.constant(rows, tf.int64), values, tf.fill([len(rows)], float(rank))),
        RowSums(tf.range(3, dtype=tf.int64), tf.fill([3, 1], 3.0), tf.constant([1.0, 0, 0]), True),
    ]

    @tf.function(autograph=False)  # as in an optimizer
    def step():
        sparse, whole = all_gather_rows(shares[0], table), all_gather_rows(shares[1], tied)
        slices = tf.IndexedSlices(tf.fill([1, 2], 1.0 + rank), tf.constant([rank], tf.int64), None)
        dense, gathered = all_reduce_dense([tf.constant([1.0 + rank]), slices])
        found = {"rows": sparse[:3], "whole": whole[:3], "dense": dense}
        return {**found, "slices": (gathered.values, gathered.indices)}

    flat = {}
    for name, found in step().items():
        for place, tensor in enumerate(found if isinstance(found, tuple) else [found]):
            flat[f"{name}_{place}"] = np.asarray(tensor)
    return flat


def rows_in_shards(rank: int) -> dict[str, np.ndarray]:
    """A sharded table as it is initialized, and what each rank reads of rows that were set."""
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
    found = MetricAccumulator()
    found.add(labels[rank::size], clicks[rank::size])
    return list(found.quality(size))


def main(folder: Path, data: Path, launch: str) -> None:
    here = ranks()
    for number, name in enumerate(LAUNCHES[launch][1]):
        state = trained(CASES[name], here.rank, here.size)
        np.savez(folder / f"{number}-{here.rank}.npz", **state)
    if launch == "others":
        told = all_gather_object(scripts.ended(folder, data, here.rank, here.size))
    else:
        np.savez(folder / f"joined-{here.rank}.npz", **joined(here.rank))
        np.savez(folder / f"rows-{here.rank}.npz", **rows_in_shards(here.rank))
        told = all_gather_object({"quality": quality(here.rank, here.size)})
    (folder / f"told-{here.rank}.txt").write_text(repr(told))
    if launch != "important":
        sok_program.main(folder / "sok", here, launch)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
