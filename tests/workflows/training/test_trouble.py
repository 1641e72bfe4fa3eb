"""What can go wrong around a run: one sentence each, what was saved is whole, and it goes on."""

import json
import os
import shutil
import subprocess

import pandas as pd
import pytest

from merlin_cowclip.workflows.data.etl import prepare
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.training.checkpoints import Checkpoints
from merlin_cowclip.workflows.training.configuration import TrainConfig
from merlin_cowclip.workflows.training.one_at_a_time import locked
from merlin_cowclip.workflows.training.resuming import with_epochs

from .batches import SPEC
from .interrupted import SEVERAL, UNSAVED, Runs, assert_same, sentence

pytestmark = pytest.mark.slow
OPTIONS = (*SEVERAL, *UNSAVED)
FLIPPED = "state.data-00000-of-00001"


@pytest.fixture(scope="module")
def runs(interpreter, data, tmp_path_factory):
    home = tmp_path_factory.mktemp("trouble")
    return Runs(interpreter, shutil.copytree(data.path, home / "data"), home)


@pytest.fixture(scope="module")
def reference(runs):
    return runs.reference("reference", *OPTIONS)


@pytest.fixture(scope="module")
def stopped(runs):
    return runs.stopped(*OPTIONS)


@pytest.fixture
def run(stopped, tmp_path):
    """A run that was stopped in its second epoch, to do harm to."""
    return shutil.copytree(stopped, tmp_path / "run")


def steps(run) -> list[int]:
    """After which updates there are checkpoints; all of them are whole."""
    checkpoints = Checkpoints(run / "checkpoints")
    return [checkpoints.at(step).step for step in checkpoints.steps()]


def refused(done, *words: str) -> None:
    assert done.returncode == 2, done.stderr
    said = sentence(done)
    assert said.startswith("error: ")
    for word in words:
        assert word in said


def goes_on(runs, run, reference, *options) -> None:
    done = runs.go_on(run, *options)
    assert done.returncode == 0, done.stderr
    assert_same(run, reference)


# The disk


@pytest.fixture
def small_disk(stopped, tmp_path):
    """One on which the run fits."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", disk]).returncode:
        pytest.skip("a small disk needs the right to mount one")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.mark.parametrize("free", [0, 30_000])
def test_a_full_disk(runs, small_disk, stopped, reference, free):
    """Full already, or with room for a part of a checkpoint."""
    run = shutil.copytree(stopped, small_disk / "run")
    filler = small_disk / "filler"
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, _free(small_disk) - free)
    refused(runs.go_on(run), "needs disk space", "none left", f"--resume {run}")
    assert steps(run) == steps(stopped)
    filler.unlink()
    goes_on(runs, run, reference)


def _free(disk) -> int:
    status = os.statvfs(disk)
    return status.f_bavail * status.f_bsize


def test_a_file_that_may_not_grow(runs, run, stopped, reference):
    refused(runs.go_on(run, place="files may not grow"), "needs disk space", f"--resume {run}")
    assert steps(run) == steps(stopped)
    goes_on(runs, run, reference)


@pytest.fixture
def forbid():
    """Forbid to write into folders, also to root, who needs no permission."""
    immutable = []

    def forbid(folder) -> None:
        folder.chmod(0o555)
        if os.access(folder, os.W_OK):
            if subprocess.run(["chattr", "+i", folder], capture_output=True).returncode:
                pytest.skip("nothing here keeps root from writing")
            immutable.append(folder)

    def allow() -> None:
        while immutable:
            subprocess.run(["chattr", "-i", immutable.pop()], check=True)

    forbid.allow = allow
    yield forbid
    allow()


@pytest.mark.parametrize("part", [".", "checkpoints"])
def test_a_folder_that_cannot_be_written(runs, run, stopped, reference, forbid, part):
    forbid(run / part)
    refused(runs.go_on(run), "must be a folder that can be written", f"--resume {run}")
    assert steps(run) == steps(stopped)
    forbid.allow()
    (run / part).chmod(0o755)
    goes_on(runs, run, reference)


# The data


def test_data_that_vanishes(runs, run, stopped, reference):
    gone = runs.data.with_name("gone")
    done = runs.go_on(run, place="the data vanishes")
    gone.rename(runs.data)
    # Which part is missed first depends on what was read ahead.
    refused(done, "must keep every file as it was written", f"{runs.data}/", f"--resume {run}")
    assert steps(run)[-1] >= steps(stopped)[-1]
    goes_on(runs, run, reference)


def test_data_that_was_moved(runs, run, reference):
    moved = runs.data.rename(runs.home / "moved")
    try:
        refused(runs.go_on(run), str(runs.data), f"merlin-cowclip train DATA --resume {run}")
        done = runs.start("", "train", moved, "--resume", run, "--quiet").end()
        assert done.returncode == 0, done.stderr
        assert_same(run, reference)
    finally:
        moved.rename(runs.data)


def test_other_data(runs, run, data, tmp_path):
    rows = pd.read_csv(data.path.parent / "log.csv", keep_default_na=False)
    rows.tail(3_000).to_csv(tmp_path / "log.csv", index=False)
    other = prepare(SPEC, [tmp_path / "log.csv"], tmp_path / "data", progress=False)
    done = runs.start("", "train", other.path, "--resume", run, "--quiet").end()
    refused(done, "must be what it was when it began", str(other.path))


# The run's own files


def damage(run, step: int) -> None:
    path = run / "checkpoints" / f"step-{step:010}" / FLIPPED
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def test_a_damaged_checkpoint(runs, run, reference):
    """The one before it is used, and the sentence names both."""
    first, last = steps(run)
    damage(run, last)
    done = runs.go_on(run, place="before the first update@SIGINT")
    assert done.returncode == 130
    warning, ended = done.stderr.splitlines()
    assert warning.startswith("merlin-cowclip train: warning: a checkpoint must be as it was")
    assert f"step-{last:010}/{FLIPPED}, whose content has changed" in warning
    assert f"The run goes on from update {first}" in warning
    assert f"after update {first + 1} of" in ended
    goes_on(runs, run, reference)


def test_all_checkpoints_damaged(runs, run, reference):
    for step in steps(run):
        damage(run, step)
    done = runs.go_on(run)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("whose content has changed") == 2
    assert done.stderr.count("The run begins again") == 2
    assert_same(run, reference)


def test_logs_that_were_removed(runs, run):
    shutil.rmtree(run / "logs")
    refused(runs.go_on(run), "what a run has logged must be there", "logs/events", "which is gone")


def test_two_at_once(runs, run):
    with locked(run):
        refused(runs.go_on(run), "one process at a time", str(run))


def test_other_versions(runs, run):
    record = json.loads((run / "config.json").read_text())
    record["versions"]["numpy"] = "1.0"
    record["machine"]["cpus"] = 999
    (run / "config.json").write_text(json.dumps(record))
    done = runs.go_on(run, place="before the first update@SIGINT")
    warning, _ = done.stderr.splitlines()
    assert warning.startswith("merlin-cowclip train: warning: the run goes on, but ")
    assert " instead of 1.0" in warning
    assert f"cpus {os.cpu_count()} instead of 999" in warning


# The end


def test_a_finished_run(runs, reference, tmp_path):
    refused(runs.go_on(reference), "must not be finished", "--epochs N")
    run = shutil.copytree(reference, tmp_path / "run")
    longer = runs.reference("longer", *OPTIONS, "--epochs", 3)
    goes_on(runs, run, longer, "--epochs", 3)


def test_epochs(tmp_path):
    config = TrainConfig(epochs=4, dense_schedule="cosine")
    with pytest.raises(UserError, match="can only be raised. Received: 3, and 4 in"):
        with_epochs(config, 3, tmp_path)
    with pytest.raises(UserError, match="dense_schedule 'cosine', which reaches its end"):
        with_epochs(config, 5, tmp_path)
    assert with_epochs(config, 4, tmp_path) == config
    falling = TrainConfig(epochs=4, embedding_schedule={"name": "exponential", "rate": 0.5})
    assert with_epochs(falling, 5, tmp_path).epochs == 5
