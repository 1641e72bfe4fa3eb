"""Listeners: CSV files, TensorBoard's events, users' own, MLflow and Weights & Biases."""

import csv
import json
import math
import resource
import sys

import pytest

from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.training.configuration import CheckpointConfig, TrainConfig
from merlin_cowclip.workflows.training.listeners import Listener, listening, log_to, notify
from merlin_cowclip.workflows.training.train import as_user_errors, resume, train
from tests.kills import differences

pytestmark = pytest.mark.usefixtures("graphs_as_traced")

VALUES = {
    "all/loss": 0.1,
    "all/samples_per_second": 1234567.89,
    "field_ids_per_batch/embeddings/größe": 3,
    "all/valid_auc": math.nan,
    "all/dense_lr": math.inf,
}
# 16 steps per epoch
CONFIG = TrainConfig(
    model="fm", embedding_dim=2, batch_size=256, rule="none", epochs=1, base_batch_size=256
)
EVERY = CheckpointConfig(log_every=5, checkpoint_every=6)


def shown(folder):
    """Step, tag, page and value of all that TensorBoard shows of a folder."""
    events = []
    for path in folder.glob("events.*"):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                number = tf.make_ndarray(value.tensor)
                page = value.metadata.plugin_data.plugin_name
                events.append((event.step, value.tag, page, number.dtype, str(number)))
    return events


# TensorBoard


def test_scalars_are_those_of_tensorflow(tmp_path):
    with listening([], tmp_path, {}) as listeners:
        notify(listeners, "on_step", 50, VALUES)
        notify(listeners, "on_step", 2**40, VALUES)
        ours = shown(tmp_path / "logs")  # none waits for a flush
    with tf.summary.create_file_writer(str(tmp_path / "theirs")).as_default():
        for step in (50, 2**40):
            for tag, value in VALUES.items():
                tf.summary.scalar(tag, value, step)
    assert len(ours) == 10
    assert ours == shown(tmp_path / "theirs")


def test_a_full_disk(tmp_path):
    """As one of 20 kB: no file may have more."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    refused = pytest.raises(UserError, match="no disk space left for")
    with refused, as_user_errors(None, tmp_path), listening([], tmp_path, {}) as listeners:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
        try:
            for step in range(20_000 // 60):
                notify(listeners, "on_step", step, VALUES)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


# Users' own


class Recorder(Listener):
    def __init__(self, fails_at=None):
        self.calls, self._fails_at = [], fails_at

    def on_begin(self, run, config):
        self.calls.append(("begin", run, config["batch_size"]))

    def on_step(self, step, values):
        self.calls.append(("step", step, values))
        if step == self._fails_at:
            raise ValueError("no more")

    def on_epoch(self, step, row, tables):
        self.calls.append(("epoch", step, row, {name: len(rows) for name, rows in tables.items()}))

    def on_end(self, result):
        self.calls.append(("end", result))


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    out, recorder = tmp_path_factory.mktemp("listeners") / "run", Recorder()
    run = train(data, CONFIG, out, checkpointing=EVERY, listeners=[recorder], progress=False)
    return run, recorder.calls


def test_a_listener_gets_what_the_files_have(run):
    run, calls = run
    begin, *steps, epoch, end = calls
    assert begin == ("begin", run.path, 256)
    assert [step for _, step, _ in steps] == [5, 10, 15]
    logged = {(step, tag): float(value) for step, tag, *_, value in shown(run.path / "logs")}
    given = {(step, tag): value for _, step, values in steps for tag, value in values.items()}
    assert {"all/loss", "all/dense_lr", "all/ids_per_batch"} <= set(steps[0][2])
    assert {key: logged[key] for key in given} == pytest.approx(given, rel=1e-6)
    with (run.path / "metrics.csv").open(newline="") as file:
        (line,) = csv.DictReader(file)
    assert {name: "" if value is None else str(value) for name, value in epoch[2].items()} == line
    assert epoch[1] == 16
    assert epoch[3]["metrics.csv"] == 1
    assert end == ("end", run.result)


def test_an_error_of_a_listener_ends_training_which_resumes(run, data, tmp_path):
    """Every listener is ended, and the run is the same in the end."""
    before, last = Recorder(fails_at=10), Recorder()
    how = {"checkpointing": EVERY, "progress": False}
    with pytest.raises(ValueError, match="no more"):
        train(data, CONFIG, tmp_path / "run", listeners=[before, last], **how)
    failed = json.loads((tmp_path / "run" / "failed.json").read_text())
    assert (failed["error"], failed["step"], failed["epoch"]) == ("no more", 10, 1)
    for one in (before, last):
        assert [call[:2] for call in one.calls[-2:]] == [("step", 10), ("end", None)]
    resume(tmp_path / "run", listeners=[last], progress=False)
    assert [call[:2] for call in last.calls[4:]] == [
        ("begin", tmp_path / "run"),
        *(("step", 10), ("step", 15), ("epoch", 16)),
        ("end", last.calls[-1][1]),
    ]
    assert not (tmp_path / "run" / "failed.json").exists()
    assert not differences(tmp_path / "run", run[0].path)


# Services


def test_a_missing_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="wandb needs its package: pip install wandb "):
        log_to("wandb")


def interrupted(data, out, service):
    """A run that fails after step 10 and is resumed from step 6, with a service."""
    how = {"checkpointing": EVERY, "progress": False}
    with pytest.raises(ValueError, match="no more"):
        train(data, CONFIG, out, listeners=[log_to(service), Recorder(fails_at=10)], **how)
    return resume(out, listeners=[log_to(service)], progress=False)


@pytest.mark.extended
def test_mlflow(run, data, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    resumed = interrupted(data, tmp_path / "run", "mlflow")
    assert not differences(resumed.path, run[0].path)
    client = mlflow.MlflowClient()
    (logged,) = client.search_runs(["0"])
    assert (logged.info.run_name, logged.info.status) == ("run", "FINISHED")
    assert logged.data.params["batch_size"] == "256"
    assert float(logged.data.params["scaled.dense_lr"]) == CONFIG.hyperparameters.dense_lr
    steps = [one.step for one in client.get_metric_history(logged.info.run_id, "all/loss")]
    assert sorted(steps) == [5, 10, 10, 15]
    assert logged.data.metrics["result/auc"] == resumed.result["auc"]
    assert logged.data.metrics["epoch/valid_auc"] == resumed.result["epochs"][0]["valid_auc"]


@pytest.mark.extended
def test_wandb(run, data, tmp_path, monkeypatch):
    """Offline, where W&B keeps records that only it can read: what it gets is compared."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    ids, history, init = [], [], wandb.init

    def noted(**options):
        service = init(**options)
        log = service.log
        ids.append((service.id, service.config["batch_size"]))
        monkeypatch.setattr(service, "log", lambda values: (history.append(values), log(values)))
        return service

    monkeypatch.setattr(wandb, "init", noted)
    resumed = interrupted(data, tmp_path / "run", "wandb")
    assert not differences(resumed.path, run[0].path)
    assert ids[0] == ids[1] == (ids[0][0], 256)
    assert [values["step"] for values in history] == [5, 10, 10, 15, 16, 16]
    assert history[-2]["epoch/valid_auc"] == resumed.result["epochs"][0]["valid_auc"]
    assert history[-1]["result/auc"] == resumed.result["auc"]
