"""The fit of the critical batch size, on MLPerf's points; curves to epochs; the whole command."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from merlin_cowclip.workflows.study.batch_size import epochs_to, fit, page_of, result, text
from merlin_cowclip.workflows.study.report import Group, Trained

MLPERF = {  # rcps_dlrm_dcnv2.json of mlcommons/logging: batch size → mean epochs, runs
    32_768: (0.707, 30),
    55_296: (0.763, 50),
    65_536: (0.793, 30),
    102_400: (0.890, 50),
    135_168: (0.928, 88),
    160_000: (0.958, 20),
}


def test_the_fit_of_mlperfs_points():
    e0, critical = fit((size, mean) for size, (mean, runs) in MLPERF.items() for _ in range(runs))
    assert e0 == pytest.approx(0.655, abs=0.001)
    assert critical == pytest.approx(320_000, rel=0.01)
    assert max(abs(e0 * (1 + b / critical) - e) for b, (e, _) in MLPERF.items()) <= 0.026


def test_epochs_that_do_not_grow_have_no_critical_batch():
    assert fit([(64, 1.0), (128, 1.0), (256, 0.9)])[1] == math.inf


@pytest.mark.parametrize(
    ("aucs", "epochs"),
    [
        ([0.6, 0.7, 0.8], 1.5),
        ([0.7], 0.75),
        ([0.65, 0.6], 1.0),
        ([0.6, 0.64], None),
        ([0.66, 0.6, 0.7], 15 / 16),
    ],
)
def test_epochs_to_a_target(aucs, epochs):
    assert epochs_to(0.65, aucs) == (None if epochs is None else pytest.approx(epochs))


def groups_of(curves) -> dict[int, Group]:
    """By batch size the validation AUC of each run after each epoch."""
    groups = {}
    for size, runs in curves.items():
        epochs = [[{"valid_auc": auc} for auc in of] for of in runs]
        results = [{"epochs": of, "auc": of[-1]["valid_auc"] - 0.01} for of in epochs]
        more = {"checkpoint": "last", "best_epoch": None}
        trained = [Trained(Path(f"{size}"), {}, s, of | more) for s, of in enumerate(results)]
        groups[size] = Group("", size, dict(enumerate(trained)), "")
    return groups


def test_what_is_concluded():
    """Linear curves, so that the epochs to what all reach, 0.7, are known: 2, 2 and 3 of 4."""
    curves = {
        1000: [[0.6, 0.7, 0.7, 0.703]] * 2,
        2000: [[0.6, 0.7, 0.7, 0.7025]] * 2,
        4000: [[0.5, 0.6, 0.7, 0.7]] * 2,
    }
    verdict = result(groups_of(curves), 400_000, tolerance=0.001)
    assert [one["mean_epochs"] for one in verdict["sizes"]] == [2.0, 2.0, 3.0]
    assert [one["steps"] for one in verdict["sizes"]] == [800, 400, 300]
    assert (verdict["E0"], verdict["B*"]) == pytest.approx((1.5, 4200))
    assert verdict["sentence"] == (
        "Up to 2,000 the AUC of 1,000 is kept, in 2× fewer steps; critical batch size 4,200 (its "
        "fit is off by 11 %)."
    )
    assert verdict["target_auc"] == pytest.approx(0.7)
    rows = [line.split() for line in text(verdict).splitlines()[2:5]]
    assert rows[0] == ["1,000", "400", "70.300", "69.300", "2.00", "±", "0.00", "800"]
    one_seed = result(groups_of({1000: [[0.7]], 2000: [[0.7]]}), 100_000, tolerance=0.1)
    assert text(one_seed).splitlines()[2].split()[-2:] == ["1.00", "100"]
    assert one_seed["E0"] is None, "two batch sizes are a line anyway"


def test_a_size_with_few_steps_has_no_part_in_the_target():
    curves = {1000: [[0.69, 0.7]], 2000: [[0.5, 0.7]], 3000: [[0.5, 0.7]], 8000: [[0.5, 0.6]]}
    verdict = result(groups_of(curves), 100_000, tolerance=0.001)
    assert verdict["target_auc"] == 0.7
    assert [len(one["epochs"]) for one in verdict["sizes"]] == [1, 1, 1, 0]


def test_a_batch_size_that_diverges():
    groups = groups_of({1000: [[0.6, 0.7]] * 2, 2000: [[0.6, 0.69]] * 2, 4000: [[0.5]] * 2})
    diverged = dataclasses.replace(groups[4000].runs[0], result={})
    groups[4000] = dataclasses.replace(groups[4000], runs={**groups[4000].runs, 0: diverged})
    verdict = result(groups, 100_000, tolerance=0.001)
    assert verdict["target_auc"] == 0.69
    assert verdict["sentence"] == "No larger batch keeps the AUC of 1,000."
    assert "diverged" in text(verdict)
    assert "only 25 steps" in text(verdict)
    assert page_of(verdict, "").plots
