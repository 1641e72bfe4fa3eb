"""Tuning studies that are killed, stopped, or shared by two processes, with real training."""

import json
import re

import pytest

from merlin_cowclip.workflows.study.configuration import TuneConfig
from merlin_cowclip.workflows.study.search import Search
from merlin_cowclip.workflows.study.tuned import Tuned
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
    config = TuneConfig(**json.loads((out / "tune.json").read_text())["config"])
    return Search(out, config.space, config.seed).tried()


def test_killed_stopped_and_resumed(interpreter, data, tmp_path):
    out = tmp_path / "tune"
    tune = ("tune", data.path, "--out", out)
    done = start(interpreter, tmp_path, "3@SIGKILL", *tune, *OPTIONS, *TRIALS).end()
    assert done.returncode == -9
    kept = ended(out)
    assert [trial.number for trial in kept] == [0, 1]
    # Options that are left out are taken from the folder.
    done = start(interpreter, tmp_path, "3@SIGTERM", *tune, "--seeds", 1, *TRIALS).end()
    assert done.returncode == 143, done.stderr
    assert "trials that have ended are kept. Go on with: merlin-cowclip tune" in done.stderr
    done = start(interpreter, tmp_path, "", *tune, "--seeds", 1, "--quiet", *TRIALS).end()
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.startswith("  ")  # only the tables
    trials = ended(out)
    assert len(trials) == 7
    assert trials[:2] == kept
    best = max(trials, key=lambda trial: trial.auc)
    assert max(row["search_auc"] for row in Tuned.open(out).result["table"]) == best.auc


def test_two_processes_share_one(interpreter, second, data, tmp_path):
    """They begin at the same time, and no trial is run twice."""
    out = tmp_path / "tune"
    command = ("tune", data.path, "--out", out, *OPTIONS, "--trials", 8)
    programs = [start(one, tmp_path, "", *command) for one in (interpreter, second)]
    for program in programs:
        done = program.end()
        assert done.returncode == 0, done.stderr
    said = [(tmp_path / f"said-{i}/out").read_text().splitlines() for i in range(2)]
    lines = [
        [line for line in lines if re.match(r"trial \d, \d of 8 ended: ", line)] for lines in said
    ]
    assert all(lines)
    assert len(lines[0]) + len(lines[1]) == 8
    trials = ended(out)
    assert [trial.number for trial in trials] == [*range(8)]
    assert len({trial.point for trial in trials}) == 8
