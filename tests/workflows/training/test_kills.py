"""Runs that are killed, anywhere and again and again, and go on as if they had not been."""

import random
import re
import shutil
import signal

import pytest

from merlin_cowclip.workflows.training.runs import Run

from .interrupted import SEVERAL, UNSAVED, UPDATES, Runs, assert_same
from .killing import PLACES

pytestmark = pytest.mark.slow
KILLS = 8  # at random, of each kind of update
SEED = 20260
SAVING_THE_MODEL = "while the model is saved"
IN_ORDER = [place for place in PLACES if place != SAVING_THE_MODEL]


@pytest.fixture(scope="module")
def runs(interpreter, data, tmp_path_factory):
    return Runs(interpreter, data.path, tmp_path_factory.mktemp("kills"))


@pytest.fixture(scope="module", params=["exact", "lazy"])
def update(request):
    return request.param


@pytest.fixture(scope="module")
def options(update):
    return (*SEVERAL, *UNSAVED, "--update", update)


@pytest.fixture(scope="module")
def lines():
    """By kind of update, how many lines of ours a run executes."""
    return {}


@pytest.fixture(scope="module")
def reference(runs, update, options, lines):
    run = runs.reference(f"{update}-reference", *options, place="line:0")
    said = max(runs.home.glob("said-*/out"), key=lambda path: path.stat().st_mtime_ns)
    lines[update] = int(re.search(r"lines: (\d+)", said.read_text())[1])
    return run


def test_killed_at_random(runs, update, options, reference, lines):
    """A run may be killed before it has got further than when it was killed before."""
    drawn = random.Random(f"{SEED} {update}")
    kills = []
    run = runs.home / f"{update}-random"
    while len(kills) < KILLS:
        far = drawn.random() * 6 / (2 * UPDATES)  # up to six updates on
        place = drawn.choice([f"line:{1 + int(far * lines[update])}", f"time:{far * 2:.4f}"])
        if run.exists():
            done = runs.go_on(run, place=place)
        else:
            done = runs.begin(run, *options, place=place)
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        if done.returncode:
            kills.append(place)
        if run.exists():
            assert_same(run, reference, kills)
        if (run / "result.json").exists():  # it may have been killed after that
            shutil.rmtree(run)
    if run.exists():
        done = runs.go_on(run)
        assert done.returncode == 0, done.stderr
        assert_same(run, reference, kills)


@pytest.mark.parametrize("update", ["exact"], indirect=True)
def test_killed_at_each_place(runs, update, options, reference):
    """One run, that is killed at one place after the other."""
    run = runs.home / f"{update}-places"
    for place in IN_ORDER:
        begun = (
            runs.go_on(run, place=place) if run.exists() else runs.begin(run, *options, place=place)
        )
        if begun.returncode == 0:  # it had ended before it came there: checkpoints take their time
            assert_same(run, reference, place)
            shutil.rmtree(run)
            runs.begin(run, *options, place="in an epoch")
            begun = runs.go_on(run, place=place)
        assert begun.returncode == -signal.SIGKILL, (place, begun.stderr)
        assert_same(run, reference, place)
    done = runs.go_on(run)
    assert done.returncode == 2
    assert "which has all of its 2 epochs" in done.stderr
    assert (run / "result.json").exists()
    assert_same(run, reference)
    Run.open(run)


def test_killed_while_the_model_is_saved(runs, data, tmp_path):
    """As users train, whose steps are traced; logistic regression, which is saved fastest."""
    runs = Runs(runs.interpreter, data.path, tmp_path, mode="graph")
    options = ("--model", "lr", "--epochs", 1, "--checkpoint-every", 5)
    reference = runs.reference("reference", *options)
    run = tmp_path / "run"
    killed = runs.begin(run, *options, place="while the tensors are written")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    killed = runs.go_on(run, place=SAVING_THE_MODEL)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    done = runs.go_on(run)
    assert done.returncode == 0, done.stderr
    assert_same(run, reference)

    Run.open(run)
