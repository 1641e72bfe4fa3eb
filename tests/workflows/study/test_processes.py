"""Tuning studies that are killed, stopped, or shared by two processes, with real training."""

import re

import pytest

from merlin_cowclip.workflows.study import tune
from tests.warm import WarmInterpreter

from .processes import ROOT, START

pytestmark = pytest.mark.extended
OPTIONS = ("--model", "lr", "--batch-size", 512, "--epochs", 2, "--seeds", 1)
TRIALS = ("--trials", 7)


@pytest.fixture(scope="module")
def second():
    interpreter = WarmInterpreter()
    yield interpreter
    interpreter.close()


def start(interpreter, folder, place, *arguments):
    folder.mkdir(exist_ok=True)
    said = folder / f"said-{len(list(folder.glob('said-*')))}"
    return interpreter.start(START, ROOT, place, *arguments, folder=said)


def ended(out) -> list:
    study = tune.optuna.load_study(study_name="tune", storage=f"sqlite:///{out}/study.db")
    return study.get_trials(states=tune._ENDED)


def test_killed_stopped_and_resumed(interpreter, data, tmp_path):
    out = tmp_path / "tune"
    command = ("tune", data.path, "--out", out)
    done = start(interpreter, tmp_path, "3@SIGKILL", *command, *OPTIONS, *TRIALS).end()
    assert done.returncode == -9
    kept = ended(out)
    assert [trial.number for trial in kept] == [0, 1]
    # Options that are left out are taken from the folder.
    done = start(interpreter, tmp_path, "3@SIGTERM", *command, "--seeds", 1, *TRIALS).end()
    assert done.returncode == 143, done.stderr
    assert "trials that have ended are kept. Resume with: merlin-cowclip" in done.stderr
    done = start(interpreter, tmp_path, "", *command, "--seeds", 1, "--quiet", *TRIALS).end()
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    trials = ended(out)
    assert len(trials) == 7
    assert trials[:2] == kept
    origins = {trial.user_attrs["origin"] for trial in trials}
    assert origins == {f"portfolio {number}" for number in range(1, 8)}


def test_two_processes_share_one(interpreter, second, data, tmp_path):
    """They begin at the same time, and no trial is run twice."""
    out = tmp_path / "tune"
    command = ("tune", data.path, "--out", out, *OPTIONS, "--trials", 8)
    programs = [start(one, tmp_path, "", *command) for one in (interpreter, second)]
    for program in programs:
        done = program.end()
        assert done.returncode == 0, done.stderr
    said = [(tmp_path / f"said-{i}/out").read_text().splitlines() for i in range(2)]
    lines = [[line for line in lines if re.match(r"\[\d/8\] trial ", line)] for lines in said]
    assert all(lines)
    trials = ended(out)
    assert len(lines[0]) + len(lines[1]) == len(trials)
    assert 8 <= len(trials) <= 9
    assert len({str(trial.params) for trial in trials}) == len(trials)
