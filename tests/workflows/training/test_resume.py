"""Runs that are killed or stopped resume as if they had not been; and what cannot resume."""

import json
import os
import random
import shutil
import signal

import pytest

from merlin_cowclip.workflows.commands.main import main
from merlin_cowclip.workflows.data.prepare.pipeline import prepare
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.folders import locked
from merlin_cowclip.workflows.training.checkpoint import Checkpoints
from merlin_cowclip.workflows.training.configuration import TrainConfig
from merlin_cowclip.workflows.training.runs import Run
from merlin_cowclip.workflows.training.stopping import Stopping
from merlin_cowclip.workflows.training.train import with_epochs
from tests.kills import UPDATES, differences
from tests.logs import write_log

from .batches import SPEC

# In the order in which a run comes to them.
PLACES = (
    "trainer.Trainer.epochs",
    "trainer.network",
    "trainer.Trainer.see:5",
    "checkpoint._write",
    "checkpoint.write_json",
    "checkpoint.Checkpoints._remove",
    "evaluation.MetricAccumulator.add:2",
    "listeners.csv.DictWriter",
    "listeners._RunFiles.on_epoch",
    "checkpoint.Checkpoint.restore",
    "trainer.Trainer.see:16",
    "train.manifest_of",
)


@pytest.fixture
def run(stopped, tmp_path):
    """A copy of the run that was stopped in its second epoch."""
    return shutil.copytree(stopped, tmp_path / "run")


# Killed


@pytest.mark.parametrize(
    "places",
    [
        ("trainer.Trainer.see:5", "checkpoint.write_json", "train.manifest_of"),
        pytest.param(PLACES, marks=pytest.mark.extended),
    ],
    ids=len,
)
def test_killed_at_each_place(runs, reference, places):
    run = runs.home / f"killed-{len(places)}"
    for place in places:
        ended = runs.start(run, place=place)
        assert ended.returncode == -signal.SIGKILL, (place, ended.stderr)
        assert not differences(run, reference), place
        assert not (run / "result.json").exists()
    assert not differences(runs.finish(run.name), reference)
    Run.open(run)


@pytest.mark.extended
def test_killed_at_random(runs, reference):
    """A run may be killed before it has got further than when it was killed before."""
    random.seed(20260)
    run, kills = runs.home / "random", 0
    while kills < int(os.environ.get("COWCLIP_KILLS", 8)):
        ended = runs.start(run, place=f"trainer.Trainer.see@{random.random() * 0.4 + 1e-3:.4f}")
        assert ended.returncode in (0, -signal.SIGALRM), ended.stderr
        kills += ended.returncode != 0
        assert not run.exists() or not differences(run, reference), kills
        if (run / "result.json").exists():  # it may have been killed after that
            shutil.rmtree(run)
    if run.exists():
        assert not differences(runs.finish("random"), reference)


# Stopped


def assert_stopped(ended, run, why: str, update: int, epochs: int) -> None:
    """One sentence, after this update, with so many epochs measured."""
    (line,) = (line for line in ended.stderr.splitlines() if line.strip())
    assert line == (
        f"merlin-cowclip train: {why} after update {update} of 32, which is saved. Resume with: "
        f"merlin-cowclip train --resume {run}"
    )
    checkpoints = Checkpoints(run / "checkpoints")
    assert checkpoints.steps()[-1] == update
    assert len(checkpoints.at(update).progress["epochs"]) == epochs


def test_a_signal_and_the_end_of_the_time_stop_after_the_step(runs, run, reference):
    ended = runs.start(run, "--max-minutes", 1e-6)
    assert ended.returncode == 3
    assert_stopped(ended, run, "stopped as its time was over", UPDATES + 3, 1)
    ended = runs.start(run, "--max-minutes", 60, place="trainer.Trainer.see:2@SIGTERM")
    assert ended.returncode == 128 + signal.SIGTERM
    assert_stopped(ended, run, "interrupted", UPDATES + 5, 1)
    ended = runs.start(run, place="trainer.Trainer.see:11@SIGTERM")  # there is nothing to stop
    assert ended.returncode == 0, ended.stderr
    assert not differences(run, reference)


@pytest.mark.extended
def test_stopped_at_the_end_of_an_epoch(runs, reference):
    run = runs.home / "hung-up"
    ended = runs.start(run, place=f"trainer.Trainer.see:{UPDATES}@SIGHUP")
    assert ended.returncode == 128 + signal.SIGHUP
    assert_stopped(ended, run, "interrupted", UPDATES, 1)
    assert not differences(runs.finish(run.name), reference)


@pytest.mark.extended
def test_stopped_before_there_is_anything_to_save(runs):
    ended = runs.start(runs.home / "new", place="trainer.network@SIGINT")
    assert ended.returncode == 130
    assert not (runs.home / "new").exists()


@pytest.mark.extended
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_it_at_once(runs, run, stopped, reference, number):
    name = number.name
    ended = runs.start(run, place=f"trainer.Trainer.see@{name} checkpoint._write@{name}")
    assert ended.returncode in (128 + number, -number), ended.stderr
    steps = [Checkpoints(one / "checkpoints").steps() for one in (run, stopped)]
    assert steps[0] == steps[1]
    assert runs.start(run).returncode == 0
    assert not differences(run, reference)


def test_minutes(monkeypatch):
    times = iter([100.0, 219.0, 221.0])
    monkeypatch.setattr("merlin_cowclip.workflows.training.stopping.time.monotonic", times.__next__)
    stopping = Stopping(max_minutes=2)
    for asked in (False, True):
        stopping.agree()
        assert stopping.asked == asked


# What cannot resume


def refused(capsys, arguments, *words: str) -> None:
    assert main(list(map(str, arguments))) == 2
    (line,) = capsys.readouterr().err.splitlines()
    for word in words:
        assert word in line


def change(run, **values) -> None:
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, **values}))


def test_what_cannot_resume(run, reference, tmp_path, capsys):
    """Another process at it, a run that is finished, data that is gone or another."""
    again = ["train", "--resume", run]
    with locked(run / ".lock"):
        refused(capsys, again, "another process uses", str(run))
    refused(capsys, ["train", "--resume", reference], "is finished after 2 of 2", "--epochs N")
    patient = shutil.copytree(reference, tmp_path / "patient")
    change(patient, epochs=6, patience=1)
    words = ("is finished after 2 of 6 epochs", "Early stopping ended it")
    refused(capsys, ["train", "--resume", patient], *words)
    log = write_log(tmp_path / "log.csv", 4_500)
    other = prepare(SPEC, [log], tmp_path / "data", progress=False)
    words = ("was begun with data_sha256", str(other.path))
    refused(capsys, ["train", other.path, "--resume", run], *words)
    change(run, data=str(tmp_path / "gone"))
    refused(capsys, again, str(tmp_path / "gone"), f"merlin-cowclip train DATA --resume {run}")


@pytest.mark.extended
def test_a_finished_run_on_moved_data_resumes_with_more_epochs(runs, reference, tmp_path):
    run = shutil.copytree(reference, tmp_path / "run")
    change(run, data=["/gone"])
    command = ("train", runs.data, "--resume", run, "--epochs", 3, "--quiet")
    assert runs.command(*command).returncode == 0
    assert not differences(run, runs.finish("longer", "--epochs", 3, "--keep", 99))


def test_epochs(tmp_path):
    config = TrainConfig(epochs=4, dense_schedule="cosine")
    for epochs in (3, 5):
        with pytest.raises(UserError, match=f"can only be raised, .* Received: {epochs}, for 4 in"):
            with_epochs(config, epochs, tmp_path)
    assert with_epochs(config, 4, tmp_path) == config
    exponential = {"name": "exponential", "rate": 0.5}
    constant = TrainConfig(epochs=4, dense_schedule="constant", embedding_schedule=exponential)
    assert with_epochs(constant, 5, tmp_path).epochs == 5
