"""N ranks with a batch of b/N each train as one process with b: weights, moments, counts."""

from __future__ import annotations

import ast
from typing import Any

import numpy as np
import pytest

from .cases import CASES, LAUNCHES, trained
from .launch import needs_horovod
from .scripts import PART, REFUSED

pytestmark = needs_horovod


def of(launch: str, *more: Any) -> Any:
    marks = () if launch == "important" else pytest.mark.extended
    return pytest.param(launch, *more, marks=marks)


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, np.ndarray]]:
    """What one process has trained, once for all launches."""
    return {}


@pytest.mark.parametrize(
    ("launch", "name"), [of(launch, name) for launch in LAUNCHES for name in LAUNCHES[launch][1]]
)
def test_ranks_train_as_one_process(launched, alone, launch, name):
    number = LAUNCHES[launch][1].index(name)
    ranks = range(LAUNCHES[launch][0])
    first, *others = (dict(np.load(launched(launch) / f"{number}-{rank}.npz")) for rank in ranks)
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


@pytest.mark.extended
def test_a_sharded_table_begins_alike_on_any_number_of_ranks(launched):
    two, three = (np.load(launched(of) / "first-rows.npy") for of in ("important", "three"))
    np.testing.assert_array_equal(two, three)
    assert not two[[0, 2]].any(), "padding and unknown ids"
    drawn = np.delete(two, [0, 2], axis=0)
    assert len(np.unique(drawn)) > 290_000
    assert abs(drawn.mean()) < 1e-3
    assert drawn.std() == pytest.approx(0.1, rel=1e-2)


# Scripts of users, on two ranks


@pytest.fixture(scope="module")
def of_scripts(launched) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = ast.literal_eval(
        (launched("others") / "scripts-0.txt").read_text()
    )
    return results


@pytest.mark.extended
class TestScripts:
    @pytest.mark.parametrize("name", REFUSED)
    def test_what_the_ranks_do_not_share_is_refused(self, of_scripts, name):
        """Each was silently wrong, or a deadlock."""
        for one in of_scripts:
            assert REFUSED[name] in one["refused"][name]
            if REFUSED[name] == PART:
                assert "whole_tables(model)" in one["refused"][name]

    def test_a_wrong_id_on_one_rank_ends_the_step_before_the_others_make_it(self, of_scripts):
        first, second = (one["wrong"] for one in of_scripts)
        assert "ids must be from 0 to cardinality - 1" in second["said"]["wrong"]
        assert first["weights"] == second["weights"]
        assert first["steps"] == second["steps"] == 1

    def test_loss_scaling_makes_a_step_on_all_ranks_or_on_none(self, of_scripts):
        """Also if only one rank has the infinite gradient."""
        states = [one["scaled"] for one in of_scripts]
        assert states[0]["dense"] == states[1]["dense"]
        for one in states:
            begun, *scales = one["scales"]
            assert scales == [begun / 2] * 2
            for before, skipped, updated in (one["dense"], one["tables"]):
                assert before == skipped
                assert skipped != updated
                assert np.isfinite(updated).all()

    def test_ranks_stop_save_and_read_as_one(self, of_scripts):
        first, *others = (one["together"] for one in of_scripts)
        assert len(first["losses"]) == 2
        # Two epochs of two batches of 24, each sample with one id of each of the two fields.
        assert sum(first["occurrences"]) == 2 * 2 * len(first["losses"]) * 2 * 24
        for one in (first, *others):
            assert one["losses"] == first["losses"]
            assert one["apart"] <= 1e-6
            assert one["steps"] == [4, 4], "the old model was loaded, while rank 0 saved the new"
            assert one["occurrences"] == first["occurrences"]

    def test_weights_that_rank_0_loads_as_a_fit_begins_are_on_all_ranks(self, of_scripts):
        first, other = (one["loaded"] for one in of_scripts)
        assert first["up"] == pytest.approx(1.0, abs=0.05)
        assert other == first
