"""Weights, moments and counts are those of the recorded file; see `record.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from . import optimizer_cases as cases

pytestmark = pytest.mark.usefixtures("graphs_as_traced")
QUICK = {  # of trainings in a graph, besides all that our own models have
    ("stock deepfm", "exact"),
    ("stock dlrm", "exact"),
    ("ragged list", "lazy"),
    ("shared table", "exact"),
    ("tied output", "exact"),
}


def trainings() -> Iterator[Any]:
    for case in cases.CASES:
        for update in case.updates:
            for eager in (False, True):
                is_quick = (case.name, update) in QUICK or case.name.startswith("our ")
                marks = [] if is_quick and not eager else [pytest.mark.extended]
                how = "eager" if eager else "graph"
                yield pytest.param(
                    case, update, eager, marks=marks, id=f"{case.name}-{update}-{how}"
                )


@pytest.fixture(scope="module")
def recorded() -> dict[str, np.ndarray]:
    return cases.load(Path(__file__).parent)


@pytest.mark.parametrize(("case", "update", "eager"), trainings())
def test_training(case, update, eager, recorded):
    found = cases.train(case, update, eager=eager)
    cases.compare_training(case, update, found, recorded)


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_counts(case, eager, recorded):
    np.testing.assert_array_equal(cases.count(case, eager=eager), recorded[f"{case.name}/counts"])
