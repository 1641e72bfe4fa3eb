"""Weights and moments are those of the recorded file; see `record.py`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from . import optimizer_cases as cases

pytestmark = pytest.mark.usefixtures("graphs_as_traced")
QUICK = {  # in a graph
    ("stock deepfm", "exact"),
    ("stock dlrm", "exact"),
    ("ragged list", "lazy"),
    ("shared table", "exact"),
    ("tied output", "exact"),
    ("our deepfm", "exact"),
    ("our deepfm", "lazy"),
    ("our deepfm", "deferred"),
    ("our dcn_v2 with a list", "lazy"),
}


@pytest.fixture(scope="module")
def recorded() -> dict[str, np.ndarray]:
    return cases.load(Path(__file__).parent)


@pytest.mark.parametrize(
    ("case", "update", "eager"),
    [
        pytest.param(
            case,
            update,
            eager,
            marks=() if (case.name, update) in QUICK and not eager else pytest.mark.extended,
            id=f"{case.name}-{update}-{'eager' if eager else 'graph'}",
        )
        for case in cases.CASES
        for update in case.updates
        for eager in (False, True)
    ],
)
def test_training(case, update, eager, recorded):
    trained = cases.train(case, update, eager=eager)
    cases.compare_training(case, update, trained, recorded)
