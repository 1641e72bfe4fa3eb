"""Runs that are asked to stop: all is saved, one sentence says how to go on, nothing is lost."""

import shutil
import signal
import time

import pytest

from merlin_cowclip.workflows.training.checkpoints import Checkpoints

from .interrupted import SEVERAL, UNSAVED, UPDATES, Runs, assert_same, sentence

pytestmark = pytest.mark.slow
OPTIONS = (*SEVERAL, *UNSAVED)


@pytest.fixture(scope="module")
def runs(interpreter, data, tmp_path_factory):
    return Runs(interpreter, data.path, tmp_path_factory.mktemp("stopping"))


@pytest.fixture(scope="module")
def reference(runs):
    return runs.reference("reference", *OPTIONS)


@pytest.fixture(scope="module")
def stopped(runs):
    return runs.stopped(*OPTIONS)


def whole(run) -> list[tuple[int, int]]:
    """Of each checkpoint the updates and the epochs that were measured; all of them whole."""
    checkpoints = Checkpoints(run / "checkpoints")
    found = map(checkpoints.at, checkpoints.steps())
    return [(checkpoint.step, len(checkpoint.progress["epochs"])) for checkpoint in found]


WRITING = "before the checkpoint has its name"
# Where it stops, by which signal, after which update, with how many epochs measured
STOPS = [
    ("before the first update", "SIGTERM", 1, 0),
    ("in an epoch", "SIGINT", 5, 0),
    ("at an epoch's last update", "SIGHUP", 16, 0),
    ("while evaluating", "SIGTERM", 16, 0),
    ("between the evaluation and its checkpoint", "SIGINT", 16, 1),
    ("before the first update", "SIGINT", 17, 1),
    (WRITING, "SIGTERM", 18, 1),
    ("while evaluating", "SIGINT", 32, 1),
]


def test_stopped_again_and_again(runs, reference):
    run = runs.home / "again"
    for place, name, step, epochs in STOPS:
        where = f"{place}@{name}"
        if run.exists():
            done = runs.go_on(run, place=where)
        else:
            done = runs.begin(run, *OPTIONS, place=where)
        assert done.returncode == 128 + signal.Signals[name], (where, done.stderr)
        last = whole(run)[-1]
        assert sentence(done) == (
            f"interrupted after update {last[0]} of 32, which is saved. Go on with: "
            f"merlin-cowclip train --resume {run}"
        )
        # What happens in the thread that writes lets the others go on.
        assert last[0] in ([step] if place != WRITING else range(step, 32)), where
        assert last[1] == epochs, where
        assert_same(run, reference, where)
    done = runs.go_on(run)
    assert done.returncode == 0, done.stderr
    assert_same(run, reference)


def test_a_signal_at_the_very_end_changes_nothing(runs, stopped, reference):
    run = shutil.copytree(stopped, runs.home / "end")
    done = runs.go_on(run, place="between the evaluation and its checkpoint@SIGINT")
    assert done.returncode == 0, done.stderr
    assert_same(run, reference)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_before_there_is_anything_to_save(runs, name):
    run = runs.home / f"new-{name}"
    done = runs.begin(run, *OPTIONS, place=f"before there is a network@{name}")
    assert done.returncode == 128 + signal.Signals[name]
    assert "before it was done: nothing is left of it" in sentence(done)
    assert not run.exists()


def test_before_a_run_goes_on(runs, stopped, reference):
    run = shutil.copytree(stopped, runs.home / "early")
    for place in ("before there is a network", "while a checkpoint is restored"):
        for name in ("SIGINT", "SIGTERM"):
            done = runs.go_on(run, place=f"{place}@{name}")
            assert done.returncode == 128 + signal.Signals[name], done.stderr
            assert f"merlin-cowclip train --resume {run}" in sentence(done)
            assert whole(run) == whole(stopped)
    assert runs.go_on(run).returncode == 0
    assert_same(run, reference)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_second_signal_leaves_at_once(runs, stopped, reference, name):
    run = shutil.copytree(stopped, runs.home / f"second-{name}")
    begun = time.monotonic()
    done = runs.go_on(run, place=f"twice, while the tensors are written@{name}")
    assert time.monotonic() - begun < 60  # it would take 100 s to write them
    assert done.returncode == 128 + signal.Signals[name], done.stderr
    assert sentence(done) == (
        "interrupted at once. The checkpoint after update 18 is kept; go on with: "
        f"merlin-cowclip train --resume {run}"
    )
    assert whole(run) == whole(stopped)
    assert runs.go_on(run).returncode == 0
    assert_same(run, reference)


def test_a_second_signal_before_there_is_a_checkpoint(runs):
    run = runs.home / "second"
    done = runs.begin(run, *OPTIONS, place="twice, while the tensors are written@SIGINT")
    assert done.returncode == 130, done.stderr
    assert "nothing is left of it" in sentence(done)
    assert not run.exists()


def test_the_time_is_over(runs, stopped, reference):
    run = shutil.copytree(stopped, runs.home / "time")
    for step in (19, 20):
        done = runs.go_on(run, "--max-minutes", 1e-6)
        assert done.returncode == 3, done.stderr
        assert sentence(done) == (
            f"stopped as its time was over after update {step} of 32, which is saved. Go on with: "
            f"merlin-cowclip train --resume {run}"
        )
    assert runs.go_on(run, "--max-minutes", 60).returncode == 0
    assert_same(run, reference)


def test_time_for_an_evaluation_is_enough_to_get_on(runs, stopped, reference):
    """Else a run whose test part takes long would measure it again at each start, for ever."""
    run = shutil.copytree(stopped, runs.home / "slow")
    done = runs.go_on(run, place="at an epoch's last update@SIGINT")
    assert done.returncode == 130, done.stderr
    assert whole(run)[-1] == (2 * UPDATES, 1)
    done = runs.go_on(run, "--max-minutes", 0.02, "--epochs", 3, place="slowly evaluating")
    assert done.returncode == 3, done.stderr
    assert whole(run)[-1] == (2 * UPDATES, 2)


def test_killed_while_one_checkpoint_takes_the_place_of_another(runs, reference):
    """Of an epoch's end there is one of before and one of after its evaluation."""
    run = runs.home / "replaced"
    runs.begin(run, *OPTIONS, "--keep", 1, place="at an epoch's last update@SIGINT")
    assert whole(run) == [(UPDATES, 0)]
    killed = runs.go_on(run, place="while a checkpoint is replaced")
    assert killed.returncode == -signal.SIGKILL
    assert whole(run) == []
    done = runs.go_on(run, place="in an epoch@SIGINT")
    assert f"after update {UPDATES + 5} of" in sentence(done)
    assert runs.go_on(run).returncode == 0
    assert_same(run, reference)
