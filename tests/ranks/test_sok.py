"""SOK's tables, by the stand-in: N ranks end where Keras's tables and one process do."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from tests.plugins.sok_cases import CASES, check_alike, trained_by_keras

from .launch import needs_horovod, on_ranks

pytestmark = [pytest.mark.slow, needs_horovod]
NAMES = {2: ("dense lookups", "eager"), 3: ("both",)}


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[int, Path]:
    folders = {}
    for ranks, names in NAMES.items():
        folders[ranks] = tmp_path_factory.mktemp(f"of_{ranks}")
        command = [sys.executable, "-m", "tests.ranks.sok_program", folders[ranks], *names]
        ended = on_ranks(ranks, command)
        assert ended.code == 0, ended
    return folders


@pytest.mark.parametrize(("ranks", "name"), [(n, name) for n in NAMES for name in NAMES[n]])
def test_ranks_train_as_keras_tables_on_one_process(results, ranks, name):
    number = NAMES[ranks].index(name)
    found = [dict(np.load(results[ranks] / f"{number}-{rank}.npz")) for rank in range(ranks)]
    check_alike(found, trained_by_keras(CASES[name].hyperparameters))


@pytest.mark.parametrize("ranks", NAMES)
def test_a_first_step_that_is_made_eagerly_is_refused(results, ranks):
    for rank in range(ranks):
        told = (results[ranks] / f"told-{rank}.txt").read_text()
        assert "optimizer.broadcast(variables)" in told
