"""N ranks with a batch of b/N each train as one process with b: weights, moments, counts."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from merlin_cowclip.workflows.training.evaluation import MetricAccumulator

from .cases import CASES, LAUNCHES, trained
from .launch import needs_horovod
from .scripts import PART, REFUSED

pytestmark = needs_horovod


def of(launch: str, *more: Any) -> Any:
    marks = () if launch == "important" else pytest.mark.extended
    return pytest.param(launch, *more, marks=marks)


on_two_and_three = pytest.mark.parametrize("launch", [of("important"), of("three")])


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, np.ndarray]]:
    """What one process has trained, once for all launches."""
    return {}


def arrays(launched: Any, launch: str, name: str) -> list[dict[str, np.ndarray]]:
    """What each rank of a launch has written."""
    ranks = range(LAUNCHES[launch][0])
    return [dict(np.load(launched(launch) / f"{name}-{rank}.npz")) for rank in ranks]


def told(folder: Path) -> list[dict[str, Any]]:
    """What each rank has reported."""
    found: list[dict[str, Any]] = ast.literal_eval((folder / "told-0.txt").read_text())
    return found


@pytest.mark.parametrize(
    ("launch", "name"), [of(launch, name) for launch in LAUNCHES for name in LAUNCHES[launch][1]]
)
def test_ranks_train_as_one_process(launched, alone, launch, name):
    number = LAUNCHES[launch][1].index(name)
    first, *others = arrays(launched, launch, str(number))
    if name not in alone:
        alone[name] = trained(CASES[name])
    one = alone[name]
    assert first.keys() == one.keys()
    for other in others:
        assert len(other) > 10
        for key in other:
            np.testing.assert_array_equal(other[key], first[key], err_msg=key)
    np.testing.assert_array_equal(first["counts"], one["counts"])
    assert one["clipped"].sum() > 0
    weights = {k: v for k, v in one.items() if k.startswith("weight/") and v.dtype.kind == "f"}
    largest = max(np.abs(value).max() for value in weights.values())
    for key, value in weights.items():
        np.testing.assert_allclose(first[key], value, rtol=0, atol=1e-5 * largest, err_msg=key)


@on_two_and_three
def test_joins(launched, launch):
    """Means of gradients, sums of counts."""
    ranks = LAUNCHES[launch][0]
    for found in arrays(launched, launch, "joined"):
        order = np.argsort(found["rows_0"])
        assert found["rows_0"][order].tolist() == [4, 7]
        means = np.array([[1 + 2, 1 + 2], [2, 2]]) / ranks
        np.testing.assert_allclose(found["rows_1"][order], means)
        assert found["rows_2"][order].tolist() == [1.0, 1.0]
        assert found["whole_0"].tolist() == [0, 1, 2]
        np.testing.assert_allclose(found["whole_1"], np.full((3, 1), 3.0))
        assert found["whole_2"].tolist() == [ranks, 0.0, 0.0]
        np.testing.assert_allclose(found["dense_0"], [np.mean(np.arange(ranks) + 1.0)])
        assert found["slices_1"].tolist() == list(range(ranks))
        mine = np.repeat(np.arange(ranks)[:, None] + 1.0, 2, axis=1) / ranks
        np.testing.assert_allclose(found["slices_0"], mine)


@on_two_and_three
def test_metrics_are_of_the_rows_of_all_ranks(launched, launch):
    random = np.random.default_rng(0)
    labels, clicks = random.integers(0, 2, 50), random.random(50).round(1).astype(np.float32)
    whole = MetricAccumulator()
    whole.add(labels, clicks)
    for one in told(launched(launch)):
        np.testing.assert_allclose(one["quality"], whole.quality(), rtol=1e-12)
        assert one["quality"][0] == whole.quality().auc


@on_two_and_three
def test_sharded_rows_are_read_by_all_ranks(launched, launch):
    found = arrays(launched, launch, "rows")
    assert [int(one["rows"]) for one in found] == [150_000 // len(found)] * len(found)
    for one in found:
        np.testing.assert_array_equal(one["read"], one["given"][one["ids"]])


@pytest.mark.extended
def test_a_sharded_table_begins_alike_on_any_number_of_ranks(launched):
    two, three = (arrays(launched, name, "rows")[0]["whole"] for name in ("important", "three"))
    np.testing.assert_array_equal(two, three)
    assert not two[[0, 2]].any(), "padding and unknown ids"
    drawn = np.delete(two, [0, 2], axis=0)
    assert len(np.unique(drawn)) > 290_000
    assert abs(drawn.mean()) < 1e-3
    assert drawn.std() == pytest.approx(0.1, rel=1e-2)


# Scripts of users, on two ranks


@pytest.fixture(scope="module")
def of_scripts(launched) -> list[dict[str, Any]]:
    return told(launched("others"))


@pytest.mark.extended
class TestScripts:
    @pytest.mark.parametrize("name", REFUSED)
    def test_what_the_ranks_do_not_share_is_refused(self, of_scripts, name):
        """Each was silently wrong, or a deadlock."""
        for one in of_scripts:
            assert REFUSED[name] in one["refused"][name]
            assert one["refused"]["a batch"] == ""
            if REFUSED[name] == PART:
                assert "whole_tables(model)" in one["refused"][name]

    def test_a_wrong_id_on_one_rank_ends_the_step_before_the_others_make_it(self, of_scripts):
        first, second = (one["wrong"] for one in of_scripts)
        assert "ids must be from 0 to cardinality - 1" in second["said"]["wrong"]
        assert first["weights"] == second["weights"]
        assert first["steps"] == second["steps"] == 1

    def test_loss_scaling_makes_a_step_on_all_ranks_or_on_none(self, of_scripts):
        """Also if only one rank has the infinite gradient."""
        found = [one["scaled"] for one in of_scripts]
        assert found[0]["dense"] == found[1]["dense"]
        for one in found:
            begun, *scales = one["scales"]
            assert scales == [begun / 2] * 2
            for before, skipped, made in (one["dense"], one["tables"]):
                assert before == skipped
                assert skipped != made
                assert np.isfinite(made).all()

    def test_ranks_stop_save_and_read_as_one(self, of_scripts):
        first, *others = (one["together"] for one in of_scripts)
        assert len(first["losses"]) == 2
        # Two epochs of two batches of 24, each sample with one id of each of the two fields.
        assert sum(first["occurrences"]) == 2 * 2 * len(first["losses"]) * 2 * 24
        for one in (first, *others):
            assert one["losses"] == first["losses"]
            assert one["apart"] <= 1e-6
            assert one["loaded"]
            assert one["read"] == [2, 2]  # of a table that was built within a graph
            assert one["steps"] == [4, 4], "the old model was loaded, while rank 0 saved the new"
            assert one["occurrences"] == first["occurrences"]

    def test_mixed_precision_is_saved_and_loaded(self, of_scripts):
        first, other = (one["half"] for one in of_scripts)
        assert first["found"] == ["LossScaleOptimizer", 7, pytest.approx(first["rate"])]
        assert first["steps"] == 14
        assert np.isfinite(first["weights"]).all()
        assert other == first

    def test_a_callback_of_one_rank_stops_all(self, of_scripts):
        for one in of_scripts:
            assert one["stopped"] == {"batch": 2, "epoch": 4}

    def test_weights_that_rank_0_loads_as_a_fit_begins_are_on_all_ranks(self, of_scripts):
        first, other = (one["loaded"] for one in of_scripts)
        for build in ("ours", "in_shards"):
            assert first[build]["up"] == pytest.approx(1.0, abs=0.05)
        assert other == first
