"""Runs in groups, and their differences, against SciPy's paired t-test."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from merlin_cowclip.workflows.study.report import (
    AUC,
    LEVEL,
    Comparison,
    Group,
    Trained,
    difference,
    differing,
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
    found = Comparison.of(runs)
    assert (list(found.names), found.x) == (["rule", "batch_size"], "batch_size")
    assert {"clip", "dense_lr", "init_stddev", "warmup_epochs"} == set(found.implied)
    assert [[group.name for group in family] for family in found.families()] == [
        [f"{rule}, batch_size {size}" for rule in ("none", "cowclip")] for size in ("64", "8,192")
    ]
    assert [list(group.runs) for group in found.groups] == [[1, 2]] * 4
    header, (first, *_) = found.table()
    assert header[:4] == ["rule", "batch_size", "seeds", "test AUC, %"]
    assert first[:4] == ["none", "64", "2", "81.500 ± 0.707"]
    assert found.to_list()[0]["rule"] == "none"


def test_any_numeric_option_may_be_the_axis():
    runs = [trained(0.8, l2=l2, mlp=mlp) for l2 in (1e-5, 1e-6) for mlp in ((8,), (8, 8))]
    found = Comparison.of(runs)
    assert found.x == "l2"
    assert [[group.x for group in family] for family in found.families()] == [
        [1e-6, 1e-6],
        [1e-5, 1e-5],
    ]
    close = Comparison.of([trained(0.8, l2=l2, mlp=(8,)) for l2 in (1e-5, 1.2345678e-5)])
    assert [row[0] for row in close.table()[1]] == ["1e-05", "1.235e-05"]
    assert Comparison.of(runs[:1]).table()[1][0][0] == "all runs"


def test_runs_that_differ_in_no_option_are_named_by_their_folders():
    found = Comparison.of([trained(0.8, name="a"), trained(0.9, name="b")])
    assert [group.label for group in found.groups] == ["a", "b"]


def test_a_diverged_run_has_no_mean():
    (group,) = Comparison.of([trained(0.8, 1), trained(None, 2)]).groups
    assert group.shown(AUC) == "diverged"
    assert difference(*groups_of([[0.8, None], [0.7, 0.7]]), AUC, 0.05) is None


def test_options_that_others_determine_are_implied():
    options = [{"a": 1, "b": 1, "c": 1}, {"a": 2, "b": 2, "c": 1}, {"a": 2, "b": 3, "c": 1}]
    assert differing(options) == (["a", "b"], [])
    assert differing(options[:2]) == (["a"], ["b"])


@pytest.mark.parametrize("seed", range(5))
def test_an_interval_is_scipys(seed):
    table = np.random.default_rng(seed).normal(0.8, 0.001, (2, 5))
    found = difference(*groups_of(table), AUC, 0.01)
    expected = stats.ttest_rel(*table).confidence_interval(0.99)
    assert found[1:] == pytest.approx(expected, rel=1e-6, abs=1e-12)
    assert found.mean == pytest.approx((table[0] - table[1]).mean())


def test_differences_without_deviation():
    rows = np.zeros((2, 3))
    assert difference(*groups_of(rows), AUC, 0.05) == (0.0, 0.0, 0.0)
    assert not difference(*groups_of(rows), AUC, 0.05).is_clear
    rows[1] = 0.1
    assert difference(*groups_of(rows), AUC, 0.05).is_clear


def test_equal_rules_are_rarely_told_apart():
    """Six equal groups of three seeds, of which the best is compared with the others."""
    random, cases, false = np.random.default_rng(0), 300, 0
    for table in random.normal(0.8, 0.001, (cases, 6, 3)):
        best, *others = groups_of(table[np.argsort(-table.mean(axis=1))])
        false += any(difference(best, one, AUC, LEVEL / 15).is_clear for one in others)
    assert false / cases <= 0.05
