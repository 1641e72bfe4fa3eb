"""What another number of ranks makes of a checkpoint, without any: see also `tests/ranks`."""

from __future__ import annotations

import errno

import numpy as np
import pytest
import tensorflow as tf

from merlin_cowclip.plugins.distributed.horovod import Ranks
from merlin_cowclip.plugins.distributed.sharding import Shard
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
