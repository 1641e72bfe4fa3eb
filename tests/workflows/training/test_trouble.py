"""What can go wrong around a run: one sentence each, what was saved is whole, and it goes on."""

import json
import shutil

import pandas as pd
import pytest

from merlin_cowclip.workflows.commands.main import main
from merlin_cowclip.workflows.data.prepare.pipeline import prepare
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.folders import locked
from merlin_cowclip.workflows.training.configuration import TrainConfig
from merlin_cowclip.workflows.training.train import with_epochs

from .batches import SPEC
from .interrupted import assert_goes_on, assert_same


@pytest.fixture
def run(stopped, tmp_path):
    """A run that was stopped in its second epoch, to do harm to."""
    return shutil.copytree(stopped, tmp_path / "run")


def refused(capsys, arguments, *words: str) -> None:
    assert main(list(map(str, arguments))) == 2
    (said,) = capsys.readouterr().err.splitlines()
    for word in words:
        assert word in said


def test_what_cannot_go_on(run, reference, data, tmp_path, capsys):
    """Another process at it, a run that is finished, data that is gone or another."""
    again = ["train", "--resume", run]
    with locked(run / ".lock"):
        refused(capsys, again, "another process uses", str(run))
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
    words = ("was begun with data_sha256", str(other.path))
    refused(capsys, ["train", other.path, "--resume", run], *words)
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, "data": str(tmp_path / "gone")}))
    refused(capsys, again, str(tmp_path / "gone"), f"merlin-cowclip train DATA --resume {run}")


@pytest.mark.extended
def test_moved_data(runs, run, data, reference):
    config = json.loads((run / "config.json").read_text())
    config["data"] = ["/gone"]
    (run / "config.json").write_text(json.dumps(config))
    done = runs.command("train", data.path, "--resume", run, "--quiet")
    assert done.returncode == 0, done.stderr
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
