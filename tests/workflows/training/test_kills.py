"""Runs that are killed, anywhere and again and again, and go on as if they had not been."""

import random
import shutil
import signal

import pytest

from merlin_cowclip.workflows.training.runs import Run

from .interrupted import UPDATES, assert_goes_on, assert_same
from .killing import PLACES

KILLS = 8  # at random
SEED = 20260


@pytest.fixture
def expected(request, runs, update):
    """The run of this kind of update that is never killed."""
    if update == "exact":
        return request.getfixturevalue("reference")
    return runs.reference(f"{update}-reference", "--update", update)


@pytest.mark.parametrize(
    "update",
    [
        "exact",
        pytest.param("lazy", marks=pytest.mark.extended),
        pytest.param("deferred", marks=pytest.mark.extended),
    ],
)
def test_killed_in_a_step_in_a_save_and_before_the_result(runs, expected, update):
    """One run, three kills."""
    run = runs.home / f"{update}-three"
    options = ("--update", update)
    for place in ("in an epoch", "while the tensors are written", "before the result"):
        done = (
            runs.go_on(run, place=place) if run.exists() else runs.begin(run, *options, place=place)
        )
        assert done.returncode == -signal.SIGKILL, (place, done.stderr)
        assert_same(run, expected, place)
        assert not (run / "result.json").exists()
    assert_goes_on(runs, run, expected)
    Run.open(run)


@pytest.mark.extended
def test_killed_at_each_place(runs, reference):
    """One run, that is killed at one place after the other."""
    run = runs.home / "places"
    for place in PLACES:
        done = runs.go_on(run, place=place) if run.exists() else runs.begin(run, place=place)
        if done.returncode == 0:  # it had ended before it came there: checkpoints take their time
            assert_same(run, reference, place)
            shutil.rmtree(run)
            runs.begin(run, place="in an epoch")
            done = runs.go_on(run, place=place)
        assert done.returncode == -signal.SIGKILL, (place, done.stderr)
        assert_same(run, reference, place)
    done = runs.go_on(run)
    assert done.returncode == 2
    assert "is finished after 2 of 2 epochs" in done.stderr
    assert_same(run, reference)
    Run.open(run)


@pytest.mark.extended
def test_killed_at_random(runs, reference):
    """A run may be killed before it has got further than when it was killed before."""
    drawn = random.Random(SEED)
    kills = []
    run = runs.home / "random"
    while len(kills) < KILLS:
        place = f"time:{drawn.random() * 6 / UPDATES:.4f}"  # up to six updates on, about
        done = runs.go_on(run, place=place) if run.exists() else runs.begin(run, place=place)
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        if done.returncode:
            kills.append(place)
        if run.exists():
            assert_same(run, reference, kills)
        if (run / "result.json").exists():  # it may have been killed after that
            shutil.rmtree(run)
    if run.exists():
        assert_goes_on(runs, run, reference)
