"""Runs that are asked to stop: all is saved, one sentence says how to go on, nothing is lost."""

import shutil
import signal
import time

import pytest

from merlin_cowclip.workflows.training.checkpoint import Checkpoints

from .interrupted import UPDATES, assert_goes_on, assert_same, sentence

WRITING = "before the checkpoint has its name"


def whole(run) -> list[tuple[int, int]]:
    """Of each checkpoint the updates and the epochs that were measured; all of them whole."""
    checkpoints = Checkpoints(run / "checkpoints")
    found = map(checkpoints.at, checkpoints.steps())
    return [(checkpoint.step, len(checkpoint.progress["epochs"])) for checkpoint in found]


def test_a_signal_and_the_end_of_the_time_stop_after_the_step(runs, stopped, reference, tmp_path):
    run = shutil.copytree(stopped, tmp_path / "run")
    assert whole(run)[-1] == (UPDATES + 2, 1)
    then = f"which is saved. Resume with: merlin-cowclip train --resume {run}"
    done = runs.go_on(run, "--max-minutes", 1e-6)
    assert done.returncode == 3, done.stderr
    assert sentence(done) == f"stopped as its time was over after update 19 of 32, {then}"
    assert_same(run, reference)
    done = runs.go_on(run, "--max-minutes", 60, place="in an epoch@SIGTERM")
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert sentence(done) == f"interrupted after update 21 of 32, {then}"
    done = runs.go_on(run, place="at an epoch's last update@SIGTERM")  # there is nothing to stop
    assert done.returncode == 0, done.stderr
    assert_same(run, reference)


@pytest.mark.extended
def test_stopped_again_and_again(runs, reference):
    """Where it stops, by which signal, after which update, with how many epochs measured."""
    run = runs.home / "again"
    for place, name, step, epochs in (
        ("before the first update", "SIGTERM", 1, 0),
        ("in an epoch", "SIGINT", 5, 0),
        ("at an epoch's last update", "SIGHUP", 16, 1),
        ("before the first update", "SIGINT", 17, 1),
        (WRITING, "SIGTERM", 18, 1),
    ):
        where = f"{place}@{name}"
        done = runs.go_on(run, place=where) if run.exists() else runs.begin(run, place=where)
        assert done.returncode == 128 + signal.Signals[name], (where, done.stderr)
        last = whole(run)[-1]
        assert sentence(done) == (
            f"interrupted after update {last[0]} of 32, which is saved. Resume with: "
            f"merlin-cowclip train --resume {run}"
        )
        # What happens in the thread that writes lets the others go on.
        assert last[0] in ([step] if place != WRITING else range(step, 32)), where
        assert last[1] == epochs, where
        assert_same(run, reference, where)
    assert_goes_on(runs, run, reference)


@pytest.mark.extended
def test_before_there_is_anything_to_save(runs):
    run = runs.home / "new"
    done = runs.begin(run, place="before there is a network@SIGINT")
    assert done.returncode == 130
    assert not run.exists()


@pytest.mark.extended
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_second_signal_ends_it_at_once(runs, stopped, reference, tmp_path, name):
    run = shutil.copytree(stopped, tmp_path / "run")
    begun = time.monotonic()
    done = runs.go_on(run, place=f"twice, while the tensors are written@{name}")
    assert time.monotonic() - begun < 60  # it would take 100 s to write them
    number = signal.Signals[name]
    assert done.returncode in (128 + number, -number), done.stderr
    assert whole(run) == whole(stopped)
    assert_goes_on(runs, run, reference)
