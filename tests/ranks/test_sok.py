"""SOK's tables, by the stand-in: N ranks end where Keras's tables and one process do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.plugins.sok_cases import CASES, check_alike, trained_by_keras

from .launch import needs_horovod
from .sok_program import OF_SOK as NAMES

pytestmark = [pytest.mark.slow, needs_horovod]


@pytest.fixture(scope="module")
def of_sok(results) -> dict[int, Path]:
    """What the ranks have written, by their number."""
    return {ranks: folder / "sok" for ranks, folder in results.items()}


@pytest.mark.parametrize(("ranks", "name"), [(n, name) for n in NAMES for name in NAMES[n]])
def test_ranks_train_as_keras_tables_on_one_process(of_sok, ranks, name):
    number = NAMES[ranks].index(name)
    found = [dict(np.load(of_sok[ranks] / f"{number}-{rank}.npz")) for rank in range(ranks)]
    check_alike(found, trained_by_keras(CASES[name].hyperparameters))


@pytest.mark.parametrize("ranks", NAMES)
def test_a_first_step_that_is_made_eagerly_is_refused(of_sok, ranks):
    for rank in range(ranks):
        told = (of_sok[ranks] / f"told-{rank}.txt").read_text()
        assert "optimizer.broadcast(variables)" in told


def test_lookups_that_lack_an_id_end_the_step_on_all_ranks(of_sok):
    """The owner of the row alone knew of it; the other ranks' tables changed."""
    for rank in range(2):
        told = (of_sok[2] / f"lookups-{rank}.txt").read_text()
        assert "lookups must have all ids" in told
        assert told.startswith("0.0 ")
