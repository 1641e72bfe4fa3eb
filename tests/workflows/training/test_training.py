"""Training end to end through the Python API, on a small log with one planted effect per field."""

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
from merlin_cowclip.workflows.data.prepare.pipeline import prepare
from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.data.spec import DatasetSpec
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.training import loader as loader_module
from merlin_cowclip.workflows.training import trainer
from merlin_cowclip.workflows.training.configuration import (
    CheckpointConfig,
    TrainConfig,
    base_fields,
)
from merlin_cowclip.workflows.training.evaluation import predict
from merlin_cowclip.workflows.training.loader import Loader
from merlin_cowclip.workflows.training.runs import Run
from merlin_cowclip.workflows.training.train import train

pytestmark = pytest.mark.usefixtures("quick_saves", "graphs_as_traced")
ROWS, TRAIN, TEST, VALID = 5_000, 4_000, 1_000, 400
TOML = """
name = "shop"
label = "bought"
categorical = ["user", "item"]
continuous = ["price", "age"]
lists = ["genres"]
list_separator = ";"
split = { kind = "sequential", test = 0.2, valid = ["VALID"] }
"""
WIDTH, MLP = 4, (16,)
UNSAVED = CheckpointConfig(saved_model=False)
BASE = Hyperparameters(batch_size=256, dense_lr=5e-3, embedding_lr=5e-3, clip_floor=1e-3)
CONFIG = TrainConfig(
    **base_fields(BASE),
    rule="cowclip",
    batch_size=512,
    epochs=3,
    seed=7,
    embedding_dim=WIDTH,
    mlp=MLP,
)


def changed(**changes) -> TrainConfig:
    return dataclasses.replace(CONFIG, **changes)


@pytest.fixture(scope="module")
def log() -> pd.DataFrame:
    """Clicks that depend on the user, the item and the genres."""
    random = np.random.default_rng(0)
    user, item = random.integers(0, 40, ROWS), random.integers(0, 15, ROWS)
    genres = [sorted(random.choice(6, random.integers(0, 4), replace=False)) for _ in range(ROWS)]
    effects = [random.normal(size=n) for n in (40, 15, 6)]
    logit = effects[0][user] + effects[1][item] + [effects[2][g].sum() for g in genres] - 0.5
    return pd.DataFrame(
        {
            "bought": (random.random(ROWS) < 1 / (1 + np.exp(-logit))).astype("int64"),
            "user": [f"u{u}" for u in user],
            "item": [f"i{i}" for i in item],
            "price": random.normal(5, 2, ROWS).round(2),
            "age": random.integers(18, 80, ROWS),
            "genres": [";".join(f"g{g}" for g in gs) for gs in genres],
        }
    )


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("training")


@pytest.fixture(scope="module")
def data(log, home) -> PreparedData:
    (home / "shop.toml").write_text(TOML.replace("VALID", str(home / "valid.csv")))
    log.to_csv(home / "log.csv", index=False)
    log.sample(VALID, random_state=3).to_csv(home / "valid.csv", index=False)
    spec = DatasetSpec.from_toml(home / "shop.toml")
    return prepare(spec, [home / "log.csv"], home / "data", progress=False)


@pytest.fixture(scope="module")
def run(data, home) -> Run:
    return train(
        data, CONFIG, home / "run", checkpointing=CheckpointConfig(saved_model=True), progress=False
    )


@pytest.fixture(scope="module")
def model(run):
    return run.model()


@pytest.fixture(scope="module")
def test_rows(data) -> pd.DataFrame:
    files = sorted((data.path / "test").glob("*.parquet"))
    return pd.concat([pd.read_parquet(file) for file in files], ignore_index=True)


def features(rows: pd.DataFrame) -> dict:
    """A frame of encoded rows as the tensors that the model takes, without the loader."""
    columns = {name: tf.constant(rows[name].to_numpy()[:, None]) for name in ("user", "item")}
    for name in ("price", "age"):
        columns[name] = tf.constant(rows[name].to_numpy("float32")[:, None])
    lengths = rows["genres"].map(len).to_numpy()
    columns["genres__values"] = tf.constant(
        np.concatenate(rows["genres"].to_numpy()).astype("int64")
    )
    columns["genres__offsets"] = tf.constant(np.concatenate([[0], np.cumsum(lengths)]))
    return columns


def weights(model) -> list[np.ndarray]:
    return [v.numpy() for v in model.trainable_variables]


def measured(run: Run) -> list[tuple]:
    names = ("valid_auc", "valid_log_loss", "train_loss")
    return [tuple(epoch[name] for name in names) for epoch in run.result["epochs"]]


# The result


def test_files_of_a_run(run):
    assert {p.name for p in run.path.iterdir()} == {
        *("config.json", "schema.pbtxt", "workflow", "checkpoints", "logs", "metrics.csv"),
        *("fields.csv", "norms.csv", "model", "result.json", ".lock"),
    }
    assert list((run.path / "logs").rglob("events.out.*"))


def test_result(run, data):
    result = json.loads((run.path / "result.json").read_text())
    assert result == Run.open(run.path).result
    epochs = result["epochs"]
    metrics = ("auc", "log_loss", "calibration")
    columns = ["epoch", *(f"valid_{name}" for name in metrics), "train_loss", "seconds"]
    assert [list(e) for e in epochs] == [columns] * 3
    assert [e["epoch"] for e in epochs] == [1, 2, 3]
    assert result["checkpoint"] == "last"
    assert result["train_seconds"] == pytest.approx(sum(e["seconds"] for e in epochs))
    assert min(e["seconds"] for e in epochs) > 0
    assert result["samples_per_second"] == pytest.approx(TRAIN * 3 / result["train_seconds"])
    logged = pd.read_csv(run.path / "metrics.csv")
    assert logged[columns].to_dict("records") == [pytest.approx(e) for e in epochs]


def test_lines_by_field_and_norms(run):
    """Of all fields together they are the line of the epoch; norms are of every row of it."""
    whole = pd.read_csv(run.path / "metrics.csv")
    fields = pd.read_csv(run.path / "fields.csv")
    tables = fields[fields["table"] == "embeddings"]
    assert (
        tables.groupby("epoch")["field"].apply(sorted).tolist() == [["genres", "item", "user"]] * 3
    )
    ids = tables.groupby("epoch")["ids_per_batch"].sum()
    assert ids.tolist() == pytest.approx(whole["ids_per_batch"].tolist())
    assert fields.loc[fields["table"] == "linear", "rows_clipped"].isna().all()
    assert tables["gradient_norm_frequent"].gt(0).all()  # in such small batches all are
    norms = pd.read_csv(run.path / "norms.csv")
    rows = norms.groupby("epoch")[["rare", "frequent"]].sum().sum(axis=1)
    updates = run.result["last_step"] / len(whole)
    assert rows.tolist() == pytest.approx((whole["ids_per_batch"] * updates).tolist())


def test_parameters(run, log):
    # The training part is the log's first 4,000 rows; padding, missing and unknown have rows too.
    head = log[:TRAIN]
    ids = head["user"].nunique() + head["item"].nunique() + 6 + 3 * 3
    into = 3 * WIDTH + 2
    network = into * MLP[0] + MLP[0]  # hidden layer
    network += MLP[0]  # to the logit
    network += 2 + 1  # linear part of the numbers, bias
    assert run.result["parameters"] == {"embedding": ids * (WIDTH + 1), "network": network}


def test_config(run, data):
    config = json.loads((run.path / "config.json").read_text())
    assert config == run.config == run.result["config"]
    assert config["data"] == [str(data.path)]
    assert config["dataset"] == "shop"
    assert config["rows"] == {"train": TRAIN, "valid": VALID, "test": TEST}
    wanted = {"model": "deepfm", "rule": "cowclip", "batch_size": 512, "epochs": 3, "seed": 7}
    wanted |= {"update": "exact", "embedding_dim": WIDTH, "mlp": [16], "deterministic": True}
    assert {key: config[key] for key in wanted} == wanted
    assert {key: config[key] for key in base_fields(BASE)} == base_fields(BASE)
    # CowClip's rule at twice the batch: dense η by the root, λ linearly, embedding η as it was.
    assert config["scaled"] == pytest.approx(
        {**vars(BASE), "batch_size": 512, "dense_lr": 5e-3 * math.sqrt(2), "l2": 2e-5}
    )
    assert config["versions"]["tensorflow"] == tf.__version__
    assert {"python", "merlin-cowclip", "merlin-models", "nvtabular"} <= set(config["versions"])
    assert config["machine"]["cpus"] > 0


def test_metrics_are_sklearns_and_it_learns(run, model, test_rows):
    batch = tf.data.Dataset.from_tensors(features(test_rows))
    probabilities = model.predict(batch, verbose=0).ravel()
    labels = test_rows["bought"]
    assert run.result["auc"] == pytest.approx(roc_auc_score(labels, probabilities), abs=1e-6)
    assert run.result["log_loss"] == pytest.approx(log_loss(labels, probabilities), abs=1e-6)
    assert run.result["auc"] > 0.7
    losses = [e["train_loss"] for e in run.result["epochs"]]
    assert losses[0] > losses[1] > losses[2]
    assert run.result["log_loss"] < 0.65


def test_the_loaded_workflow_turns_raw_rows_into_the_models_inputs(run, model, log, test_rows):
    raw = log[TRAIN:].reset_index(drop=True)  # the sequential split's test part
    raw["genres"] = raw["genres"].map(lambda text: text.split(";") if text else [])
    encoded = run.workflow().transform(raw)
    np.testing.assert_array_equal(encoded["user"], test_rows["user"])
    served = model(features(encoded)).numpy()
    assert served.shape == (TEST, 1)
    expected = model(features(test_rows)).numpy()
    np.testing.assert_allclose(served, expected, rtol=0, atol=1e-6)
    assert roc_auc_score(raw["bought"], served.ravel()) == pytest.approx(
        run.result["auc"], abs=1e-6
    )


def test_an_evaluation_reads_the_test_part_once(model, data, monkeypatch):
    """And gives what `predict` of Keras gives, and the labels on disk, in their order."""
    loader = Loader(data, "test", batch_size=300)  # the last batch is smaller
    reads = []
    monkeypatch.setattr(
        loader_module,
        "read",
        lambda *given, read=loader_module.read: (reads.append(given), read(*given))[1],
    )
    labels, probabilities = predict(model, loader)
    assert len(reads) == len([*loader._order.windows(0)]) == 1
    expected = model.predict(loader.dataset().map(lambda features, _: features), verbose=0)
    np.testing.assert_allclose(probabilities, expected.ravel(), rtol=0, atol=1e-7)
    on_disk = pd.concat([pd.read_parquet(file) for file in data.test_files])["bought"]
    np.testing.assert_array_equal(labels, on_disk)


# Repetition


def test_the_same_seed_gives_the_same_to_the_last_digit(run, model, data, home):
    """And lazy updates, from the same start on the same data, something near it."""
    again = train(data, CONFIG, home / "again", checkpointing=UNSAVED, progress=False)
    assert measured(again) == measured(run)
    for one, other in zip(weights(again.model()), weights(model), strict=True):
        np.testing.assert_array_equal(one, other)
    config = changed(update="lazy", epochs=1)
    lazy = train(data, config, home / "lazy", checkpointing=UNSAVED, progress=False)
    assert measured(lazy)[0] != measured(run)[0]
    assert measured(lazy)[0] == pytest.approx(measured(run)[0], abs=0.05)


@pytest.mark.extended
def test_deferred_is_exact(run, data, home):
    """As it is measured, and as it is rebuilt from a checkpoint, where rows wait."""
    config = changed(update="deferred")
    deferred = train(data, config, home / "deferred", checkpointing=UNSAVED, progress=False)
    for ours, exact in zip(measured(deferred), measured(run), strict=True):
        np.testing.assert_allclose(ours, exact, rtol=1e-4)
    rows = next(iter(Loader(data, "test", batch_size=512).dataset()))[0]
    found, expected = (one.model()(rows) for one in (deferred, run))
    np.testing.assert_allclose(found, expected, rtol=1e-4)


# What it prints


def test_without_a_terminal_an_epoch_prints_lines(data, home, monkeypatch, capsys):
    """Here after each update; without `progress`, and within the first minute, none."""
    monkeypatch.setattr(trainer, "PRINT_EVERY", 0.0)
    options = changed(model="lr", embedding_dim=None, mlp=None, epochs=1)
    run = train(data, options, home / "printed", checkpointing=UNSAVED, progress=True)
    lines = [line for line in capsys.readouterr().out.splitlines() if " step " in line]
    pattern = r"\[epoch 1/1\] step (\d+)/8 \| loss (\d\.\d{4}) \| (\d+\.\d)k samples/s"
    found = [re.fullmatch(pattern, line).groups() for line in lines]
    assert [int(step) for step, _, _ in found] == list(range(1, 9))
    epoch = run.result["epochs"][0]
    assert float(found[-1][1]) == pytest.approx(epoch["train_loss"], abs=6e-5)
    assert float(found[-1][2]) == pytest.approx(8 * 512 / epoch["seconds"] / 1000, abs=0.06)
    every = CheckpointConfig(log_every=3)
    train(data, options, home / "every", checkpointing=every, progress=True)
    found = re.findall(r"\] step (\d)/8 ", capsys.readouterr().out)
    assert found == ["3", "6"]  # not after each update, as the seconds have it
    for every, progress in ((0.0, False), (60.0, True)):
        monkeypatch.setattr(trainer, "PRINT_EVERY", every)
        out = home / f"printed-{progress}"
        train(data, options, out, checkpointing=UNSAVED, progress=progress)
        assert " step " not in capsys.readouterr().out


# Options of the network and the optimizer


@pytest.mark.extended
def test_options_reach_the_network_and_the_optimizer(data, tmp_path, graphs_rewritten):
    config = changed(
        model="dcn_v2",
        cross_layers=2,
        low_rank_dim=3,
        combiner={"genres": "sum"},
        clip_tables=("user",),
        dense_schedule={"name": "linear", "to": 0.5},
        embedding_schedule="cosine",
        epochs=2,
    )
    saved = CheckpointConfig(saved_model=True)
    run = train(data, config, tmp_path / "run", checkpointing=saved, progress=False)
    assert run.train_config() == config
    assert run.config["identity"] == config.identity
    into = 3 * WIDTH + 2
    network = into * MLP[0] + 2 * MLP[0] + 2 + 1  # as in DeepFM
    network += 2 * (2 * into * 3 + into) + into  # U, V and b of two layers; to the logit
    assert run.result["parameters"]["network"] == network
    loaded = load_model(run.path / "model")
    assert loaded.optimizer.clip_tables == ("user",)
    (block,) = [layer for layer in loaded._flatten_layers() if hasattr(layer, "combiner")][:1]
    assert dict(block.combiner) == {"genres": "sum"}
    # 8 updates per epoch, the last one smaller; the warm-up ends after ⌊4000/512⌋ = 7.
    hp, (table, _, dense) = config.hyperparameters, loaded.optimizer.optimizers
    for step in (0, 3, 7, 12):
        rising = 1e-8 * (1 - min(step / 7, 1)) + min(step / 7, 1) * hp.dense_lr * (1 - step / 32)
        assert float(dense.learning_rate(step)) == pytest.approx(rising, rel=1e-5)
        falling = hp.embedding_lr * (1 + math.cos(math.pi * step / 16)) / 2
        assert float(table.learning_rate(step)) == pytest.approx(falling, rel=1e-5)


# Refused


def test_what_is_refused_at_once_changes_nothing(data, tmp_path):
    (tmp_path / "mine").mkdir()
    with pytest.raises(UserError, match=r"must not exist. Received: .*mine. Name another"):
        train(data, CONFIG, tmp_path / "mine", progress=False)
    with pytest.raises(UserError, match="Received: batch size 8192, 4000 rows"):
        train(data, changed(batch_size=8192), tmp_path / "run", progress=False)
    assert [p.name for p in tmp_path.rglob("*")] == ["mine"]


@pytest.mark.parametrize("update", ["exact", "deferred"])
def test_a_warm_start_begins_with_a_runs_weights(data, home, update):
    """Learning rates so small leave the weights as they were."""
    before = train(data, changed(update=update), home / f"warm-{update}", progress=False)
    still = {"dense_lr": 1e-12, "embedding_lr": 1e-12, "l2": 0.0, "init_stddev": 1.0}
    config = changed(update=update, epochs=1, **still)
    out = home / f"warmed-{update}"
    after = train(data, config, out, warm_start=before.path, progress=False)
    assert after.result["auc"] == pytest.approx(before.result["auc"], abs=1e-6)
    for one, other in zip(weights(before.model()), weights(after.model()), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)

    kept = home / f"kept-{update}"
    train(data, config, kept, warm_start=before.path, keep_optimizer=True, progress=False)
    steps = {}
    for path in (before.path, kept, out):
        (checkpoint,) = sorted(path.glob("checkpoints/step-*/state.index"))[-1:]
        reader = tf.train.load_checkpoint(str(checkpoint.with_suffix("")))
        kinds = reader.get_variable_to_dtype_map()
        counters = [reader.get_tensor(n) for n, kind in kinds.items() if kind == tf.int64]
        steps[path] = max(int(counter) for counter in counters if counter.ndim == 0)
    assert steps[kept] == steps[before.path] + steps[out]


def test_a_warm_start_that_does_not_fit_is_refused(data, run, home, monkeypatch):
    options = {"warm_start": run.path, "progress": False}
    with pytest.raises(UserError, match="has another network"):
        train(data, changed(model="dcn"), home / "none", **options)
    lazy = changed(update="lazy")
    with pytest.raises(UserError, match="needs the update mode of .*, exact"):
        train(data, lazy, home / "none", keep_optimizer=True, **options)
    falling = changed(dense_schedule="linear")
    monkeypatch.setattr(Run, "train_config", lambda _: falling)  # its state has no such variable
    with pytest.raises(UserError, match="no schedules in either run"):
        train(data, CONFIG, home / "none", keep_optimizer=True, **options)
    assert not (home / "none").exists()
