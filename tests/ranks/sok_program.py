"""What each rank runs of SOK's tables, with a substitute of SOK; the state goes to a folder."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import tensorflow as tf

from merlin_cowclip.plugins import CowClipSokOptimizer
from merlin_cowclip.plugins.distributed.horovod import Ranks
from tests.plugins import sok_stand_in
from tests.plugins.sok_cases import BOTH, HASHED, HP, table_of, trained

OF_SOK = {"others": HASHED, "three": BOTH}


def main(folder: Path, here: Ranks, launch: str) -> None:
    folder.mkdir(exist_ok=True)
    sys.modules["sparse_operation_kit"] = sok_stand_in
    np.savez(folder / f"{here.rank}.npz", **trained(sok_stand_in, OF_SOK[launch]))
    (folder / f"errors-{here.rank}.txt").write_text("\n".join(errors(here)))


def errors(here: Ranks) -> list[str]:
    """Of a step without a broadcast; and of one where the last rank forgets a row of the first."""
    table = table_of(sok_stand_in, "a", "distributed")
    before, messages = table.numpy(), []
    optimizer = CowClipSokOptimizer(HP.replace(warmup_epochs=0.0))
    is_last = here.rank == here.size - 1
    ids = tf.ragged.constant([[1], [3], [2 * here.size + (not is_last)]], dtype=tf.int64)
    lookups = [(table, ids[:2] if is_last else ids)]
    for error in (ValueError, tf.errors.InvalidArgumentError):
        with tf.GradientTape() as tape:
            (rows,) = sok_stand_in.lookup_sparse([table], [ids], combiners=["sum"])
        try:
            optimizer.apply_gradients([(tape.gradient(rows, table), table)], lookups)
        except error as raised:
            messages.append(str(raised))
        optimizer.broadcast([])
    assert (table.numpy() == before).all()
    return messages
