"""Notebook 02: its numbers are those of the runs, and of scikit-learn."""

from __future__ import annotations

import json
import re

import pandas as pd
import pytest
from sklearn.metrics import roc_auc_score

pytestmark = pytest.mark.extended
NOTEBOOK = "02-train"


@pytest.fixture(scope="module")
def best(executed):
    return json.loads((executed.folder / "log.txt.truth.json").read_text())["best_auc"]


@pytest.fixture(scope="module")
def results(executed):
    names = ("small", "large", "stopped")
    return {n: json.loads((executed.folder / n / "result.json").read_text()) for n in names}


def test_the_values_are_scaled(executed, results):
    small, large = (results[name]["config"]["scaled"] for name in ("small", "large"))
    s = large["batch_size"] / small["batch_size"]
    assert s == 8
    assert large["dense_lr"] == pytest.approx(small["dense_lr"] * s**0.5)
    assert large["l2"] == pytest.approx(small["l2"] * s**0.5)
    assert large["embedding_lr"] == pytest.approx(small["embedding_lr"] * s**0.5)
    assert re.search(r"dense_lr +0.002 +0.00565685 +x 2.82843", executed.streams("stdout"))


def test_both_runs_learn_and_the_large_batch_keeps_the_auc(executed, results, best):
    small, large = (results[name]["auc"] for name in ("small", "large"))
    assert small > 0.5 + 0.75 * (best - 0.5)
    assert large > small - 0.01
    assert len(executed.shown("image/png")) == 1
    lines = executed.table("updates")
    assert [line[2] for line in lines] == [f"{auc:.4f}" for auc in (small, large)]
    assert {line[3] for line in lines} == {f"{best:.4f}"}


def test_the_resumed_run_has_the_same_auc(executed, results):
    printed = executed.streams("stdout")
    assert re.search(r"stopped as its time was over after update \d+ of 72, which is", printed)
    assert "the same AUC: True" in printed
    auc = {n: [epoch["valid_auc"] for epoch in results[n]["epochs"]] for n in ("large", "stopped")}
    assert auc["stopped"] == auc["large"]


def test_auc_is_scikit_learns(executed, results):
    printed = executed.streams("stdout")
    (ours,) = re.findall(r"evaluate +AUC ([\d.]+)", printed)
    (theirs,) = re.findall(r"scikit-learn AUC ([\d.]+)", printed)
    assert ours == theirs == f"{results['large']['auc']:.6f}"


def test_new_rows_have_probabilities_in_order(executed, best):
    scores = pd.read_parquet(executed.folder / "scores.parquet")
    rows = (executed.folder / "today.txt").read_text().splitlines()
    assert scores.label.tolist() == [int(row[0]) for row in rows]
    auc = roc_auc_score(scores.label, scores.probability)
    assert f"{len(rows):,} new rows, AUC {auc:.4f}" in executed.streams("stdout")
    assert auc > 0.5 + 0.75 * (best - 0.5)
