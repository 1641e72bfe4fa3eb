"""Notebook 03: both models come near the planted optimum at both batch sizes."""

from __future__ import annotations

import pandas as pd
import pytest

pytestmark = pytest.mark.extended
NOTEBOOK = "03-plug-into-an-existing-pipeline"
SMALLER = {
    '"ad": 2000, "site": 500, "user": 20000': '"ad": 200, "site": 50, "user": 2000',
    "make_logs(120_000, rng)": "make_logs(61_440, rng)",
}


def test_plugging_in_learns_and_keeps_accuracy_at_eight_times_the_batch(executed):
    columns = ["model", "batch size", "test AUC", "best possible"]
    results = pd.DataFrame(executed.table("best possible"), columns=columns)
    results = results.astype({"batch size": int, "test AUC": float, "best possible": float})
    assert sorted(set(results["batch size"])) == [512, 4096]
    assert sorted(set(results["model"])) == ["DCN", "DLRM"]
    assert (results["test AUC"] > 0.5 + 0.75 * (results["best possible"] - 0.5)).all(), results
    auc = results.pivot(index="model", columns="batch size", values="test AUC")
    assert (auc[4096] > auc[512] - 0.005).all(), results
    summary = executed.streams("stdout")
    assert "clip adaptive_column, exact" in summary
    assert "steps: 120 before, 135 after" in summary
