"""Data, runs and predictions are what they were when the golden data were recorded."""

from __future__ import annotations

import pytest

from . import workflow_cases as cases

pytestmark = pytest.mark.filterwarnings(
    "ignore:Initializing an NVTabular Dataset in CPU mode", "ignore:Performing a hash-based"
)
EXTENDED = ("train-lazy", "train-deferred", "adopt-run")


def check(arrays, name):
    differences = cases.differences(arrays, name)
    assert not differences, "\n".join(differences)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.extended if name in EXTENDED else ())
        for name in cases.CASES
    ],
)
def test_as_recorded(name, tmp_path):
    check(cases.CASES[name](tmp_path), name)


@pytest.mark.extended
@pytest.mark.parametrize("update", cases.UPDATES)
def test_stopped_and_resumed(update, tmp_path):
    data, run = cases.prepare_shop(tmp_path), tmp_path / "run"
    cases.stop(data, run, "--update", update)
    cases.resume(run)
    check(cases.of_run(run), f"train-{update}")
