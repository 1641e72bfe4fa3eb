"""Runs of ranks that are killed or stopped, and resume on as many ranks, or on others."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from merlin_cowclip.workflows import Run
from merlin_cowclip.workflows.commands.main import main
from merlin_cowclip.workflows.training.checkpoint import Checkpoints
from tests.kills import differences

from .conftest import COMMAND, EPOCHS, OPTIONS, assert_alike
from .launch import needs_horovod, on_ranks

KILLED = [sys.executable, "-m", "tests.kills", "1/trainer.Trainer.see:11"]
pytestmark = needs_horovod
EVERY = ["--checkpoint-every", 2, "--no-saved-model"]


def steps_of(run: Path) -> list[int]:
    return Checkpoints(run / "checkpoints").steps()


@pytest.fixture(scope="module")
def killed(data, tmp_path_factory) -> Path:
    """Sharded tables on two ranks, of which the second is killed in the second epoch."""
    run = tmp_path_factory.mktemp("killed") / "run"
    train = ["train", data, "--out", run, *OPTIONS, *EVERY, "--tables", "sharded"]
    ended = on_ranks(2, [*KILLED, *train])
    assert ended.code != 0
    (sentence,) = ended.said()
    assert "another rank has ended" in sentence, ended
    assert f"merlin-cowclip train --resume {run}" in sentence
    assert steps_of(run)[-1] in (8, 10)
    return run


def test_killed_and_resumed_to_the_last_bit(killed, in_shards, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(killed, run)
    ended = on_ranks(2, [*COMMAND, "train", "--resume", run])
    assert ended.code == 0, ended
    rows = Checkpoints(run / "checkpoints").at(EPOCHS * 7).path.glob("rows-*.index")
    assert len(list(rows)) == 2
    changed = [one for one in differences(run, in_shards) if not one.startswith("result.json")]
    assert not changed, "but for the SavedModel's files"


@pytest.mark.extended
def test_one_process_refuses_to_resume_a_run_with_sharded_tables(killed, tmp_path, capfd):
    run = tmp_path / "run"
    shutil.copytree(killed, run)
    assert main(["train", "--resume", str(run)]) == 2
    assert "Received: 1, for a checkpoint of 2. Use horovodrun -np 2" in capfd.readouterr().err


@pytest.mark.extended
def test_two_ranks_resume_a_run_of_one_process_and_run_out_of_time(
    data, one, tmp_path, monkeypatch
):
    run = tmp_path / "run"
    from merlin_cowclip.workflows.training.trainer import Trainer

    see = Trainer.see

    def until(trainer, loss):
        see(trainer, loss)
        if trainer.step == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "see", until)
        options = [str(option) for option in (*OPTIONS, *EVERY)]
        assert main(["train", str(data), "--out", str(run), *options]) == 130
    assert steps_of(run) == [2]
    ended = on_ranks(2, [*COMMAND, "train", data, "--resume", run, "--max-minutes", 0.0001])
    (sentence,) = ended.said()
    assert "stopped as its time was over after update 3 of 21, which is saved" in sentence
    assert "exit with status code 3" in ended.out + ended.err, ended
    assert steps_of(run)[-1] == 3
    ended = on_ranks(2, [*COMMAND, "train", "--resume", run])
    assert ended.code == 0, ended
    assert_alike(Run.open(run), one)
