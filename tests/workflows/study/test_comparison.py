"""Runs in groups, and their differences, against SciPy's paired t-test."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from merlin_cowclip.workflows.study.report import (
    AUC,
    LEVEL,
    VALID_AUC,
    Comparison,
    Group,
    Trained,
    difference,
)
from merlin_cowclip.workflows.training.configuration import TrainConfig


def trained(auc: float | None, seed: int = 1, name: str = "", **options) -> Trained:
    """A run with this AUC; None: it diverged."""
    epochs = [{"valid_auc": None}]
    numbers = {"log_loss": 0.5, "train_seconds": 60, "epochs": epochs, "checkpoint": "last"}
    result = {} if auc is None else {"auc": auc, **numbers}
    config = {**TrainConfig(**options).to_dict(), "data": "d", "seed": None}
    return Trained(Path(name or f"{options}{seed}"), config, seed, result)


def groups_of(table) -> list[Group]:
    """A group for each row of AUCs by seed."""
    return [
        Group("", None, {s: trained(auc, s, f"{i} {s}") for s, auc in enumerate(row)}, "")
        for i, row in enumerate(table)
    ]


def test_groups_are_named_by_the_options_that_differ():
    runs = [
        trained(0.8 + 0.01 * seed, seed, rule=rule, batch_size=size)
        for rule in ("none", "cowclip")
        for size in (64, 8192)
        for seed in (1, 2)
    ]
    comparison = Comparison.of(runs)
    assert (list(comparison.names), comparison.x) == (["rule", "batch_size"], "batch_size")
    assert {"clip", "dense_lr", "init_stddev", "warmup_epochs"} == set(comparison.implied)
    assert [[group.name for group in family] for family in comparison.families()] == [
        [f"{rule}, batch_size {size}" for rule in ("none", "cowclip")] for size in ("64", "8,192")
    ]
    assert [list(group.runs) for group in comparison.groups] == [[1, 2]] * 4
    header, (first, *_) = comparison.table()
    assert header[:4] == ["rule", "batch_size", "seeds", "test AUC, %"]
    assert first[:4] == ["none", "64", "2", "81.500 ± 0.707"]


def test_a_diverged_run_has_no_mean():
    (group,) = Comparison.of([trained(0.8, 1), trained(None, 2)]).groups
    assert group.shown(AUC) == "diverged"
    assert difference(*groups_of([[0.8, None], [0.7, 0.7]]), AUC, 0.05) is None


def test_the_validation_auc_is_that_of_the_checkpoint():
    run, epochs = trained(0.8), [{"valid_auc": auc} for auc in (0.7, 0.75, 0.72)]
    for checkpoint, auc in (("best", 0.75), ("last", 0.72)):
        result = {**run.result, "epochs": epochs, "best_epoch": 2, "checkpoint": checkpoint}
        assert replace(run, result=result).number(VALID_AUC) == auc


@pytest.mark.parametrize("seed", range(3))
def test_an_interval_is_scipys(seed):
    table = np.random.default_rng(seed).normal(0.8, 0.001, (2, 5))
    interval = difference(*groups_of(table), AUC, 0.01)
    expected = stats.ttest_rel(*table).confidence_interval(0.99)
    assert interval[1:] == pytest.approx(expected, rel=1e-6, abs=1e-12)
    assert interval.mean == pytest.approx((table[0] - table[1]).mean())


def test_differences_without_deviation():
    rows = np.zeros((2, 3))
    assert difference(*groups_of(rows), AUC, 0.05) == (0.0, 0.0, 0.0)
    rows[1] = 0.1
    assert difference(*groups_of(rows), AUC, 0.05).is_clear


def test_equal_rules_are_rarely_told_apart():
    """Six equal groups of three seeds, of which the best is compared with the others."""
    random, cases, false = np.random.default_rng(0), 300, 0
    for table in random.normal(0.8, 0.001, (cases, 6, 3)):
        best, *others = groups_of(table[np.argsort(-table.mean(axis=1))])
        false += any(difference(best, one, AUC, LEVEL / 15).is_clear for one in others)
    assert false / cases <= 0.05
