"""What each rank runs of SOK's tables, with a substitute of SOK; the state goes to a folder."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from merlin_cowclip.plugins.distributed.horovod import Ranks
from tests.plugins import sok_stand_in
from tests.plugins.sok_cases import CASES, refused_lookups, refused_of_ranks, trained_by_sok

OF_SOK = {"others": ("dense lookups", "eager"), "three": ("both",)}


def main(folder: Path, here: Ranks, launch: str) -> None:
    folder.mkdir(exist_ok=True)
    sys.modules["sparse_operation_kit"] = sok_stand_in
    for number, name in enumerate(OF_SOK[launch]):
        state = trained_by_sok(CASES[name], sok_stand_in)
        np.savez(folder / f"{number}-{here.rank}.npz", **state)
    (folder / f"told-{here.rank}.txt").write_text(refused_of_ranks())
    said, changed = refused_lookups(sok_stand_in)
    (folder / f"lookups-{here.rank}.txt").write_text(f"{changed} {said}")
