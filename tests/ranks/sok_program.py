"""What each rank runs of SOK's tables, by the stand-in; weights and moments go to a folder."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from merlin_cowclip.plugins.joining import Ranks
from tests.plugins import sok_stand_in
from tests.plugins.sok_cases import CASES, refused_lookups, refused_of_ranks, trained_by_sok

OF_SOK = {2: ("dense lookups", "eager"), 3: ("both",)}


def main(folder: Path, here: Ranks) -> None:
    folder.mkdir(exist_ok=True)
    sys.modules["sparse_operation_kit"] = sok_stand_in
    for number, name in enumerate(OF_SOK[here.size]):
        state = trained_by_sok(CASES[name], sok_stand_in)
        np.savez(folder / f"{number}-{here.rank}.npz", **state)
    (folder / f"told-{here.rank}.txt").write_text(refused_of_ranks())
    said, changed = refused_lookups(sok_stand_in)
    (folder / f"lookups-{here.rank}.txt").write_text(f"{changed} {said}")
