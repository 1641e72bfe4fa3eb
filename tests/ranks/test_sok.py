"""Ranks with SOK's tables, by a substitute of SOK, train as one process with Keras's tables."""

from __future__ import annotations

import numpy as np
import pytest

from tests.plugins.sok_cases import CASES, check_alike, trained_by_keras

from .cases import LAUNCHES
from .launch import needs_horovod
from .sok_program import OF_SOK

pytestmark = [pytest.mark.extended, needs_horovod]


@pytest.mark.parametrize(("launch", "name"), [(n, name) for n in OF_SOK for name in OF_SOK[n]])
def test_ranks_train_as_keras_tables_on_one_process(launched, launch, name):
    folder, number = launched(launch) / "sok", OF_SOK[launch].index(name)
    ranks = range(LAUNCHES[launch][0])
    found = [dict(np.load(folder / f"{number}-{rank}.npz")) for rank in ranks]
    check_alike(found, trained_by_keras(CASES[name].hyperparameters))


def test_a_step_without_broadcast_and_incomplete_lookups_are_refused(launched):
    """On all ranks, although only the owner of a row knows that its id is missing."""
    folder = launched("others") / "sok"
    for rank in range(2):
        assert "optimizer.broadcast(variables)" in (folder / f"told-{rank}.txt").read_text()
        told = (folder / f"lookups-{rank}.txt").read_text()
        assert "lookups must have all ids" in told
        assert told.startswith("0.0 ")
