"""Weights, moments and counts are those of the recorded file; see `record.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from . import optimizer_cases as cases

pytestmark = pytest.mark.usefixtures("graphs_as_traced")
QUICK_TRAININGS = {  # in a graph
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
QUICK_COUNTS = {"stock deepfm", "ragged list", "tied output", "our dcn_v2 with a list"}
MODES = (("graph", False), ("eager", True))


def trainings() -> Iterator[Any]:
    for case in cases.CASES:
        for update in case.updates:
            for mode, eager in MODES:
                is_quick = (case.name, update) in QUICK_TRAININGS and not eager
                name = f"{case.name}-{update}-{mode}"
                yield pytest.param(case, update, eager, marks=_marks(is_quick), id=name)


def counts() -> Iterator[Any]:
    for case in cases.CASES:
        for mode, eager in MODES:
            marks = _marks(case.name in QUICK_COUNTS)
            yield pytest.param(case, eager, marks=marks, id=f"{case.name}-{mode}")


def _marks(is_quick: bool) -> list[Any]:
    return [] if is_quick else [pytest.mark.extended]


@pytest.fixture(scope="module")
def recorded() -> dict[str, np.ndarray]:
    return cases.load(Path(__file__).parent)


@pytest.mark.parametrize(("case", "update", "eager"), trainings())
def test_training(case, update, eager, recorded):
    found = cases.train(case, update, eager=eager)
    cases.compare_training(case, update, found, recorded)


@pytest.mark.parametrize(("case", "eager"), counts())
def test_counts(case, eager, recorded):
    np.testing.assert_array_equal(cases.count(case, eager=eager), recorded[f"{case.name}/counts"])
