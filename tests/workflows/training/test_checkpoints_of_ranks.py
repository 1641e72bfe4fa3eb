"""What another number of ranks makes of a checkpoint, without any: see also `tests/ranks`."""

from __future__ import annotations

import errno

import numpy as np
import pytest
import tensorflow as tf

from merlin_cowclip.plugins._stack import Schema
from merlin_cowclip.plugins.joining import Ranks
from merlin_cowclip.plugins.sharding import Shard
from merlin_cowclip.plugins.statistics import StepStatistics
from merlin_cowclip.plugins.tables import TableSpec
from merlin_cowclip.workflows.errors import AgreedError
from merlin_cowclip.workflows.training import checkpoint_files
from merlin_cowclip.workflows.training.checkpoint_files import (
    STATE,
    read_rows,
    rows_of,
    write_tensors,
)
from merlin_cowclip.workflows.training.checkpoints import Checkpoints
from merlin_cowclip.workflows.training.saved_state import State
from tests.plugins.merlin_models import category

V = 11


@pytest.mark.parametrize(("saved", "now"), [(1, 2), (2, 1), (2, 2), (2, 3), (5, 3)])
def test_rows_find_their_ranks(tmp_path, saved, now):
    whole = np.random.default_rng(0).random((V, 2), np.float32)
    for rank in range(saved):
        prefix = STATE if saved == 1 else rows_of(rank, saved)
        write_tensors(tmp_path / prefix, {"weight/0001": tf.constant(whole[rank::saved])})
    for rank in range(now):
        found = read_rows(tmp_path, "weight/0001", tf.float32, saved, Shard(rank, now, V))
        np.testing.assert_array_equal(found, whole[rank::now])
        assert found.dtype == np.float32


def of_two_tables(shard: Shard | None) -> tuple[StepStatistics, list[TableSpec]]:
    """Statistics of a table of two fields, maybe in shards, and of one on all ranks."""
    specs = []
    for fields in (["a", "b"], ["c"]):
        columns = tuple(Schema([category(name, 4) for name in fields]))
        offsets = tuple(range(0, 4 * len(fields) + 1, 4))
        layer = tf.keras.layers.Layer()
        specs.append(TableSpec(fields[0], layer, lambda: tf.Variable(0.0), offsets, columns, 2))
    specs[0].access.shard = shard
    return StepStatistics(
        {spec: [True] * (len(spec.row_offsets) - 1) for spec in specs}, 2.0
    ), specs


@pytest.mark.parametrize(("saved", "now"), [(1, 2), (2, 1), (3, 2)])
def test_sums_of_steps_stay_what_they_were(saved, now):
    """Added up over the ranks for the table in shards, and the same on all for the other."""
    random = np.random.default_rng(1)
    of_each, _ = of_two_tables(None)
    held = [random.integers(0, 9, (saved, *v.shape)) for v in of_each.variables]
    for values in held:
        values[:, 2] = values[:1, 2]  # what all ranks have alike
        values[:, :, 0] = values[:1, :, 0]
    for rank in range(now):
        shard = None if now == 1 else Shard(rank, now, 8)
        statistics, specs = of_two_tables(shard)
        in_shards = [] if saved == 1 else specs[:1]
        for values, variable in zip(held, statistics.variables, strict=True):
            mine = statistics.share_of(variable, values, in_shards, rank)
            steps = "counts" in variable.name
            expected = values[0].copy()
            expected[:2] = values[:, :2].sum(axis=0) if rank == 0 else 0
            if steps:
                expected[:, 0] = values[0][:, 0]
            np.testing.assert_array_equal(mine, expected)
            assert mine.dtype == values.dtype


def test_one_rank_that_cannot_write_leaves_the_others_their_files(monkeypatch, tmp_path):
    """Its failure is the one that is said, and the first rank removes what there is."""
    kept = tmp_path / "step-0000000002"
    kept.mkdir()
    state = {"weight/0000": tf.Variable([[1.0], [2.0]])}
    first, second = (Checkpoints(tmp_path, ranks=Ranks(rank, 2, rank, 2)) for rank in range(2))
    first.save(4, State(state), {})
    first.settle()
    (partial,) = tmp_path.glob(".step-*.partial")
    held = sorted(partial.iterdir())
    with monkeypatch.context() as patched:
        full = OSError(errno.ENOSPC, "No space left on device")
        patched.setattr(checkpoint_files, "write_tensors", lambda *_: (_ for _ in ()).throw(full))
        second.save(4, State(state, shards={"weight/0000": Shard(1, 2, 4)}), {})
        second.settle()
    assert sorted(partial.iterdir()) == held != []
    said = [first.told(), second.told()]
    assert said[0]["failure"] is None
    with pytest.raises(OSError, match="No space left"):
        second.hear(said)
    with pytest.raises(AgreedError, match="on rank 1: .*No space left"):
        first.hear(said)
    assert list(tmp_path.iterdir()) == [kept]
