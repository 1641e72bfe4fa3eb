"""What can go wrong around a run: one sentence each, what was saved is whole, and it goes on."""

import json
import shutil

import pandas as pd
import pytest

from merlin_cowclip.workflows.commands.main import main
from merlin_cowclip.workflows.data.prepare.pipeline import prepare
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.training.checkpoint import Checkpoints
from merlin_cowclip.workflows.training.configuration import TrainConfig
from merlin_cowclip.workflows.training.locks import run_lock
from merlin_cowclip.workflows.training.train import with_epochs

from .batches import SPEC
from .interrupted import assert_goes_on, assert_same

FLIPPED = "state.data-00000-of-00001"


@pytest.fixture
def run(stopped, tmp_path):
    """A run that was stopped in its second epoch, to do harm to."""
    return shutil.copytree(stopped, tmp_path / "run")


def steps(run) -> list[int]:
    """After which updates there are checkpoints; all of them are whole."""
    checkpoints = Checkpoints(run / "checkpoints")
    return [checkpoints.at(step).step for step in checkpoints.steps()]


def damage(run, step: int) -> None:
    path = run / "checkpoints" / f"step-{step:010}" / FLIPPED
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def test_a_damaged_checkpoint(runs, run, reference):
    """The one before it is used, and the warning names both."""
    first, last = steps(run)
    damage(run, last)
    done = runs.go_on(run)
    assert done.returncode == 0, done.stderr
    (warning,) = done.stderr.splitlines()
    assert warning.startswith("merlin-cowclip train: warning: the checkpoint ")
    assert f"step-{last:010}/state is damaged" in warning
    assert f"The run resumes from update {first}" in warning
    assert_same(run, reference)


def refused(capsys, arguments, *words: str) -> None:
    assert main(list(map(str, arguments))) == 2
    (said,) = capsys.readouterr().err.splitlines()
    for word in words:
        assert word in said


def test_what_cannot_go_on(run, reference, data, tmp_path, capsys):
    """Another process at it, a run that is finished, data that is gone or another."""
    again = ["train", "--resume", run]
    with run_lock(run):
        refused(capsys, again, "one process at a time", str(run))
    refused(
        capsys, ["train", "--resume", reference], "is finished after 2 of 2 epochs", "--epochs N"
    )
    patient = shutil.copytree(reference, tmp_path / "patient")
    config = json.loads((patient / "config.json").read_text())
    (patient / "config.json").write_text(json.dumps({**config, "epochs": 6, "patience": 1}))
    words = ("is finished after 2 of 6 epochs", "Early stopping ended it")
    refused(capsys, ["train", "--resume", patient], *words)
    rows = pd.read_csv(data.path.parent / "log.csv", keep_default_na=False)
    rows.tail(3_000).to_csv(tmp_path / "log.csv", index=False)
    other = prepare(SPEC, [tmp_path / "log.csv"], tmp_path / "data", progress=False)
    words = ("must be what it was when it began", str(other.path))
    refused(capsys, ["train", other.path, "--resume", run], *words)
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, "data": str(tmp_path / "gone")}))
    refused(capsys, again, str(tmp_path / "gone"), f"merlin-cowclip train DATA --resume {run}")


@pytest.mark.extended
def test_moved_data_and_other_versions(runs, run, data, reference):
    """Its new place is named; that NumPy is another one is a warning."""
    config = json.loads((run / "config.json").read_text())
    config["data"] = "/gone"
    config["versions"]["numpy"] = "1.0"
    (run / "config.json").write_text(json.dumps(config))
    done = runs.command("train", data.path, "--resume", run, "--quiet")
    assert done.returncode == 0, done.stderr
    (warning,) = done.stderr.splitlines()
    assert warning.startswith("merlin-cowclip train: warning: the run resumes, but ")
    assert " instead of 1.0" in warning
    assert_same(run, reference)


@pytest.mark.extended
def test_a_finished_run_goes_on_with_more_epochs(runs, reference, tmp_path):
    run = shutil.copytree(reference, tmp_path / "run")
    assert_goes_on(runs, run, runs.reference("longer", "--epochs", 3), "--epochs", 3)


def test_epochs(tmp_path):
    config = TrainConfig(epochs=4, dense_schedule="cosine")
    with pytest.raises(UserError, match="can only be raised, .* Received: 3, for 4 in"):
        with_epochs(config, 3, tmp_path)
    with pytest.raises(UserError, match="falls over all of them. Received: 5, for 4 in"):
        with_epochs(config, 5, tmp_path)
    assert with_epochs(config, 4, tmp_path) == config
    falling = TrainConfig(
        rule="none", epochs=4, embedding_schedule={"name": "exponential", "rate": 0.5}
    )
    assert with_epochs(falling, 5, tmp_path).epochs == 5
    constant = TrainConfig(epochs=4, dense_schedule="constant", embedding_schedule="constant")
    assert with_epochs(constant, 5, tmp_path).epochs == 5
