"""What each rank runs: cases, scripts, and the first rows of a sharded table; to a folder."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import tensorflow as tf

from merlin_cowclip.models import FusedEmbeddings
from merlin_cowclip.plugins._tensorflow import Schema
from merlin_cowclip.plugins.distributed.horovod import all_gather_object, ranks
from merlin_cowclip.plugins.saving.gather_tables import whole_rows
from tests.plugins.merlin_models import category
from tests.ranks import scripts, sok_program
from tests.ranks.cases import CASES, LAUNCHES, trained


def first_rows(rank: int) -> np.ndarray | None:
    """A sharded table as it is initialized; only rank 0 has all of it."""
    tf.keras.utils.set_random_seed(5 + rank)
    table = FusedEmbeddings(Schema([category("a", 150_000)]), 2, stddev=0.1, sharded=True)
    table.build({})
    (spec,) = table.table_specs()
    return whole_rows(spec.variable, spec.shard)


def main(folder: Path, launch: str) -> None:
    here = ranks()
    for number, name in enumerate(LAUNCHES[launch][1]):
        state = trained(CASES[name], here.rank, here.size)
        np.savez(folder / f"{number}-{here.rank}.npz", **state)
    if launch == "others":
        results = all_gather_object(scripts.ended(folder, here.rank, here.size))
        (folder / f"scripts-{here.rank}.txt").write_text(repr(results))
    elif (rows := first_rows(here.rank)) is not None:
        np.save(folder / "first-rows.npy", rows)
    if launch != "important":
        sok_program.main(folder / "sok", here, launch)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
