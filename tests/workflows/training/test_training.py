"""Training end to end through the Python API."""

import dataclasses
import json
import math
import re

import numpy as np
import pandas as pd
import pytest
import tensorflow as tf
from sklearn.metrics import log_loss, roc_auc_score

from merlin_cowclip.plugins import Hyperparameters, load_model
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.training import trainer
from merlin_cowclip.workflows.training.configuration import (
    CheckpointConfig,
    TrainConfig,
    base_fields,
)
from merlin_cowclip.workflows.training.runs import Run
from merlin_cowclip.workflows.training.train import train

from .batches import SPEC, TEST, TRAIN, VALID

pytestmark = pytest.mark.usefixtures("quick_saves", "graphs_as_traced")
WIDTH, UNITS = 4, 16
BASE = Hyperparameters(batch_size=256, dense_lr=2e-2, embedding_lr=2e-2, clip_floor=1e-3)
CONFIG = TrainConfig(
    **base_fields(BASE),
    rule="cowclip",
    batch_size=512,
    epochs=3,
    seed=7,
    model="dcn_v2",
    embedding_dim=WIDTH,
    mlp=(UNITS,),
    cross_layers=2,
    low_rank_dim=3,
    combiner={"genres": "sum"},
    clip_tables=("user",),
    dense_schedule={"name": "linear", "to": 0.5},
    embedding_schedule="cosine",
)
LINEAR = TrainConfig(model="lr", batch_size=512, base_batch_size=512, rule="none", epochs=1)


@pytest.fixture(scope="module")
def run(data, tmp_path_factory) -> Run:
    """A run that uses most options."""
    out, saved = tmp_path_factory.mktemp("training") / "run", CheckpointConfig(saved_model=True)
    return train(data, CONFIG, out, checkpointing=saved, progress=False)


@pytest.fixture(scope="module")
def loaded(run):
    return load_model(run.path / "model")


def features(rows: pd.DataFrame) -> dict:
    """A frame of encoded rows as the tensors that the model takes, without the loader."""
    columns = {name: tf.constant(rows[name].to_numpy()[:, None]) for name in SPEC.categorical}
    for name in SPEC.continuous:
        columns[name] = tf.constant(rows[name].to_numpy("float32")[:, None])
    values = np.concatenate(rows["genres"].to_numpy()).astype("int64")
    offsets = np.cumsum([0, *rows["genres"].map(len)])
    return {**columns, "genres__values": values, "genres__offsets": tf.constant(offsets)}


# The result


def test_files_of_a_run(run):
    assert {path.name for path in run.path.iterdir()} == {
        *("config.json", "schema.pbtxt", "workflow", "checkpoints", "logs", "metrics.csv"),
        *("fields.csv", "norms.csv", "model", "result.json", ".lock"),
    }
    result = json.loads((run.path / "result.json").read_text())
    assert result == Run.open(run.path).result
    assert result["checkpoint"] == "last"
    epochs = result["epochs"]
    assert [epoch["epoch"] for epoch in epochs] == [1, 2, 3]
    assert result["train_seconds"] == pytest.approx(sum(epoch["seconds"] for epoch in epochs))
    assert result["samples_per_second"] == pytest.approx(TRAIN * 3 / result["train_seconds"])
    logged = pd.read_csv(run.path / "metrics.csv")
    assert logged[list(epochs[0])].to_dict("records") == [pytest.approx(e) for e in epochs]


def test_lines_by_field_and_norms(run):
    """Of all fields together they are the line of the epoch; norms are of every row of it."""
    whole = pd.read_csv(run.path / "metrics.csv")
    fields = pd.read_csv(run.path / "fields.csv")
    tables = fields[fields["table"] == "embeddings"]
    assert set(tables["field"]) == set(SPEC.ids)
    ids = tables.groupby("epoch")["ids_per_batch"].sum()
    assert ids.tolist() == pytest.approx(whole["ids_per_batch"].tolist())
    assert (fields["rows_clipped"].notna() == (fields["field"] == "user")).all()
    norms = pd.read_csv(run.path / "norms.csv")
    rows = norms.groupby("epoch")[["rare", "frequent"]].sum().sum(axis=1)
    updates = run.result["last_step"] / len(whole)
    assert rows.tolist() == pytest.approx((whole["ids_per_batch"] * updates).tolist())


def test_config_and_parameters(run, data):
    assert run.train_config() == CONFIG
    config = json.loads((run.path / "config.json").read_text())
    assert config == run.config == run.result["config"]
    assert config["data"] == [str(data.path)]
    assert config["rows"] == {"train": TRAIN, "valid": VALID, "test": TEST}
    # CowClip's rule at twice the batch: dense η by the root, λ linearly, embedding η as it was.
    assert config["scaled"] == pytest.approx(
        {**vars(BASE), "batch_size": 512, "dense_lr": 2e-2 * math.sqrt(2), "l2": 2e-5}
    )
    assert config["versions"]["tensorflow"] == tf.__version__
    into = 3 * WIDTH + 2
    network = into * UNITS + 2 * UNITS + 2 + 1  # a layer, to the logit; numbers' linear part, bias
    network += 2 * (2 * into * 3 + into) + into  # U, V and b of two layers; to the logit
    embedding = sum(data.cardinalities.values()) * (WIDTH + 1)
    assert run.result["parameters"] == {"embedding": embedding, "network": network}


def test_metrics_are_sklearns_and_it_learns(run, on_disk):
    rows = on_disk["test"]
    batch = tf.data.Dataset.from_tensors(features(rows))
    probabilities = run.model().predict(batch, verbose=0).ravel()
    assert run.result["auc"] == pytest.approx(roc_auc_score(rows["y"], probabilities), abs=1e-6)
    assert run.result["log_loss"] == pytest.approx(log_loss(rows["y"], probabilities), abs=1e-6)
    assert run.result["auc"] > 0.7
    losses = [epoch["train_loss"] for epoch in run.result["epochs"]]
    assert losses[0] > losses[1] > losses[2]


def test_the_workflow_makes_the_models_inputs_of_raw_rows(run, log, on_disk):
    raw = log.assign(item=log["item"].astype(str)).drop(columns=["hour"])
    parts = run.workflow().transform(raw), pd.concat([on_disk["train"], on_disk["test"]])
    served, expected = (np.sort(run.model()(features(part)).numpy(), axis=0) for part in parts)
    np.testing.assert_allclose(served, expected, rtol=0, atol=1e-6)


def test_options_reach_the_network_and_the_optimizer(loaded):
    optimizer = loaded.optimizer
    assert optimizer.clip_tables == ("user",)
    (block,) = [layer for layer in loaded._flatten_layers() if hasattr(layer, "combiner")][:1]
    assert dict(block.combiner) == {"genres": "sum"}
    # 8 updates per epoch, the last one smaller; the warm-up ends after ⌊4000/512⌋ = 7.
    hp, (table, _, dense) = CONFIG.hyperparameters, optimizer.optimizers
    for step in (0, 3, 7, 12):
        rising = 1e-8 * (1 - min(step / 7, 1)) + min(step / 7, 1) * hp.dense_lr * (1 - step / 48)
        assert float(dense.learning_rate(step)) == pytest.approx(rising, rel=1e-5)
        falling = hp.embedding_lr * (1 + math.cos(math.pi * step / 24)) / 2
        assert float(table.learning_rate(step)) == pytest.approx(falling, rel=1e-5)


def test_without_a_terminal_an_epoch_prints_lines(data, tmp_path, monkeypatch, capsys):
    """After each update here; every `log_every` updates, if it is given."""
    monkeypatch.setattr(trainer, "PRINT_EVERY", 0.0)
    run = train(data, LINEAR, tmp_path / "a", progress=True)
    pattern = r"\[epoch 1/1\] step (\d+)/8 \| loss (\d\.\d{4}) \| (\d+\.\d)k samples/s"
    lines = re.findall(pattern, capsys.readouterr().out)
    assert [int(step) for step, _, _ in lines] == list(range(1, 9))
    epoch = run.result["epochs"][0]
    assert float(lines[-1][1]) == pytest.approx(epoch["train_loss"], abs=6e-5)
    assert float(lines[-1][2]) == pytest.approx(8 * 512 / epoch["seconds"] / 1000, abs=0.06)
    every = CheckpointConfig(log_every=3)
    train(data, LINEAR, tmp_path / "b", checkpointing=every, progress=True)
    assert re.findall(r"\] step (\d)/8 ", capsys.readouterr().out) == ["3", "6"]


def test_what_is_refused_changes_nothing(data, tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(UserError, match=r"must not exist. Received: .*there. Name another"):
        train(data, LINEAR, tmp_path / "there", progress=False)
    large = dataclasses.replace(LINEAR, batch_size=8192)
    with pytest.raises(UserError, match="Received: batch size 8192, 4000 rows"):
        train(data, large, tmp_path / "run", progress=False)
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]


# A warm start


def test_a_warm_start_begins_with_a_runs_weights(data, tmp_path):
    """Learning rates so small leave the weights as they were."""
    config = dataclasses.replace(LINEAR, update="deferred", epochs=2, embedding_lr=1e-2)
    before = train(data, config, tmp_path / "before", progress=False)
    small = {"dense_lr": 1e-12, "embedding_lr": 1e-12, "l2": 0.0, "init_stddev": 1.0}
    options = {"warm_start": before.path, "progress": False}
    config = dataclasses.replace(config, epochs=1, **small)
    after = train(data, config, tmp_path / "after", **options)
    assert after.result["auc"] == pytest.approx(before.result["auc"], abs=1e-6)
    weights = [run.model().get_weights() for run in (before, after)]
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    kept = train(data, config, tmp_path / "kept", keep_optimizer=True, **options)
    assert [steps_in(run) for run in (before, after, kept)] == [16, 8, 24]


def steps_in(run: Run) -> int:
    """The optimizer's number of steps in the last checkpoint."""
    reader = tf.train.load_checkpoint(str(run.checkpoint("last").path / "state"))
    kinds = reader.get_variable_to_dtype_map()
    return max(
        int(reader.get_tensor(name))
        for name, kind in kinds.items()
        if kind == tf.int64 and not reader.get_variable_to_shape_map()[name]
    )


def test_a_warm_start_that_does_not_fit_is_refused(data, run, tmp_path, monkeypatch):
    options = {"warm_start": run.path, "progress": False}
    with pytest.raises(UserError, match="has another network"):
        train(data, LINEAR, tmp_path / "run", **options)
    constant = {"dense_schedule": "constant", "embedding_schedule": "constant"}
    was = dataclasses.replace(CONFIG, **constant)
    monkeypatch.setattr(Run, "train_config", lambda _: was)
    for change in (
        {"update": "lazy"},
        {"dense_schedule": "linear"},
        {"precision": "mixed_bfloat16"},
        {"warmup_epochs": 0.0},
    ):
        config = dataclasses.replace(was, **change)
        with pytest.raises(UserError, match="needs the update mode of .*, exact, its warm-up"):
            train(data, config, tmp_path / "run", keep_optimizer=True, **options)
    assert not (tmp_path / "run").exists()
