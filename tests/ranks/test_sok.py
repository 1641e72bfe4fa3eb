"""Ranks with SOK's tables, by a substitute of SOK, train as one process."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from tests.plugins import sok_stand_in
from tests.plugins.sok_cases import check_alike, trained

from .cases import LAUNCHES
from .launch import needs_horovod
from .sok_program import OF_SOK

pytestmark = [pytest.mark.extended, needs_horovod]


@pytest.mark.parametrize("launch", OF_SOK)
def test_ranks_train_as_one_process(launched, launch, monkeypatch):
    monkeypatch.setitem(sys.modules, "sparse_operation_kit", sok_stand_in)
    folder = launched(launch) / "sok"
    states = [dict(np.load(folder / f"{rank}.npz")) for rank in range(LAUNCHES[launch][0])]
    check_alike(states, trained(sok_stand_in, OF_SOK[launch]))


def test_a_step_without_broadcast_and_incomplete_lookups_are_errors(launched):
    """On all ranks, although only the owner of a row knows that its id is missing."""
    for rank in range(2):
        messages = (launched("others") / "sok" / f"errors-{rank}.txt").read_text()
        assert "optimizer.broadcast(variables)" in messages
        assert "lookups must have all ids" in messages
