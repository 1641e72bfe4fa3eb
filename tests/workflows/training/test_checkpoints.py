"""Checkpoints: what stays, what is whole, and the best epoch's model from one."""

import json
import math
import os
import shutil

import numpy as np
import pytest
import tensorflow as tf

from merlin_cowclip.plugins import Hyperparameters
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.training.checkpoint import Checkpoints, State, _write
from merlin_cowclip.workflows.training.configuration import (
    CheckpointConfig,
    TrainConfig,
    base_fields,
)
from merlin_cowclip.workflows.training.evaluation import evaluate
from merlin_cowclip.workflows.training.loader import Loader
from merlin_cowclip.workflows.training.train import resume, train
from merlin_cowclip.workflows.training.trainer import Progress
from tests.kills import differences, train_in_two

pytestmark = pytest.mark.usefixtures("graphs_as_traced")

BASE = Hyperparameters(batch_size=128, dense_lr=2e-2, embedding_lr=2e-2)


def config(**changes) -> TrainConfig:
    options = {
        "batch_size": 128,
        "rule": "cowclip",
        **base_fields(BASE),
        "epochs": 3,
        "embedding_dim": 4,
        "mlp": (8,),
        "seed": 2,
    }
    return TrainConfig(**{**options, **changes})


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    """A run that early stopping ends."""
    out = tmp_path_factory.mktemp("checkpoints") / "run"
    options = config(epochs=9, patience=2)
    return train(data, options, out, checkpointing=CheckpointConfig(keep=1), progress=False)


def test_early_stopping_keeps_the_last_and_the_best_epoch(run, data):
    per_epoch = len(Loader(data, batch_size=128))
    best = int(np.argmax([epoch["valid_auc"] for epoch in run.result["epochs"]])) + 1
    assert run.result["best_epoch"] == best
    assert len(run.result["epochs"]) == best + 2 < 9
    steps = Checkpoints(run.path / "checkpoints").steps()
    assert steps == [best * per_epoch, (best + 2) * per_epoch]


def test_the_models_of_a_run(run, data):
    """Rebuilt, they measure what was measured when they were trained."""
    valid, best = Loader(data, "valid", batch_size=256), run.result["best_epoch"]
    for which, epoch in ((None, best), ("last", best + 2), ("best", best)):
        measured = run.result["epochs"][epoch - 1]
        quality = evaluate(run.model(which), valid)
        assert quality.auc == pytest.approx(measured["valid_auc"], abs=1e-6)
        assert quality.log_loss == pytest.approx(measured["valid_log_loss"], abs=1e-6)
    auc = evaluate(run.model(), Loader(data, "test", batch_size=256)).auc
    assert run.result["auc"] == pytest.approx(auc, abs=1e-6)
    with pytest.raises(UserError, match="which must be one of last, best. Received: 'first'"):
        run.model("first")


def test_a_run_resumes_in_an_epoch_to_the_last_bit(data, tmp_path):
    """With deferred updates, rows that wait for updates go on waiting."""
    always = CheckpointConfig(checkpoint_every="0.0000001m", keep=99)
    changes = {"model": "lr", "embedding_dim": None, "mlp": None, "batch_size": 256}
    options, out = config(epochs=2, update="deferred", **changes), tmp_path / "run"
    reference = train(data, options, tmp_path / "all", checkpointing=always, progress=False)
    assert Checkpoints(reference.path / "checkpoints").steps() == list(range(1, 33))

    def look(trainer):
        values = (v.numpy() for v in trainer._state.shared.values() if v.shape[1:] == (1,))
        waiting = [x for x in values if x.max() > 10]  # the steps of the last update
        assert any(len(np.unique(x)) > 2 for x in waiting)

    train_in_two(data, options, out, 20, look)
    assert differences(out, reference.path) == []


def test_progress_of_equal_epochs_is_bests_first():
    epochs = [{"epoch": e, "valid_auc": auc} for e, auc in ((1, 0.6), (2, 0.7), (3, 0.7))]
    assert Progress(epochs).best == 2
    assert Progress(epochs).is_out_of(1)
    assert not Progress(epochs).is_out_of(2)
    assert Progress([{"epoch": 1, "valid_auc": None}]).best is None


def test_a_finished_run_without_checkpoints_stays_as_it_was(run, tmp_path):
    """Else all would be trained again, and the result be gone meanwhile."""
    path = shutil.copytree(run.path, tmp_path / "run")
    config = {**json.loads((path / "config.json").read_text()), "patience": None, "epochs": 2}
    (path / "config.json").write_text(json.dumps(config))
    shutil.rmtree(path / "checkpoints")
    with pytest.raises(UserError, match="resumes from its last checkpoint. Received: .*without"):
        resume(path, epochs=5, progress=False)
    assert (path / "result.json").exists()


# What is whole


@pytest.fixture
def written(tmp_path):
    """Three checkpoints of one variable, which holds their number."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=3)
    variable = tf.Variable(tf.zeros([1000]), name="w")
    for step in (10, 20, 30):
        variable.assign(tf.fill([1000], float(step)))
        checkpoints.save(step, State({"weight/0000": variable}), {"epochs": []})
    return checkpoints, variable


NAMES = {f"step-00000000{n}" for n in (10, 20, 30)}


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "a flipped bit": lambda path: flip(path / "state.data-00000-of-00001"),
    "half its index": lambda path: os.truncate(path / "state.index", 100),
    "a file gone": lambda path: (path / "state.index").unlink(),
    "half its progress": lambda path: (path / "progress.json").write_text('{"st'),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_stays(written, damage):
    checkpoints, variable = written
    DAMAGES[damage](checkpoints.path(30))
    (checkpoints.folder / ".step-0000000040.partial").mkdir()
    state = State({"weight/0000": variable})
    with pytest.raises(UserError, match="step-0000000030/.* is damaged, or .*remove its folder"):
        checkpoints.restore_last(state)
    assert {p.name for p in checkpoints.folder.iterdir()} == NAMES
    shutil.rmtree(checkpoints.path(30))
    assert checkpoints.restore_last(state).step == 20
    np.testing.assert_array_equal(variable, np.full(1000, 20.0))


def test_lack_of_memory_is_no_damage(written, monkeypatch):
    checkpoints, variable = written

    def no_memory(*_):
        raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating")

    monkeypatch.setattr(tf.train.Checkpoint, "read", no_memory)
    with pytest.raises(tf.errors.ResourceExhaustedError, match="OOM"):
        checkpoints.restore_last(State({"weight/0000": variable}))


def test_another_networks_checkpoint(written):
    checkpoints, _ = written
    other = tf.Variable(tf.zeros([9]), name="u")
    for name in ("weight/0000", "weight/0001"):
        with pytest.raises(UserError, match="is damaged, or "):
            checkpoints.at(30).read({name: other})


def test_a_failed_one_leaves_nothing(written, monkeypatch):
    checkpoints, variable = written
    monkeypatch.setattr(
        "merlin_cowclip.workflows.training.checkpoint.write_json",
        lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")),
    )
    with pytest.raises(OSError, match="No space left"):
        checkpoints.save(40, State({"weight/0000": variable}), {"epochs": []})
    assert {p.name for p in checkpoints.folder.iterdir()} == NAMES


@pytest.mark.parametrize("ranks", [1, 3])
def test_shards_are_read_whole_and_own_sums_shared(tmp_path, monkeypatch, ranks):
    """What ranks have saved, each for itself, as one process reads it."""
    whole = np.random.default_rng(0).random((11, 2), np.float32)
    sums = [float(rank + 1) for rank in range(ranks)]
    monkeypatch.setattr(
        "merlin_cowclip.workflows.training.checkpoint.gather_objects",
        lambda _: [{"loss/0000": total} for total in sums],
    )
    checkpoints = Checkpoints(tmp_path)
    weight, own = tf.Variable(tf.ones([3])), tf.Variable(0.0)
    checkpoints.save(5, State({"weight/0000": weight}, {"loss/0000": own}), {})
    for rank in range(ranks):
        rows = tf.Variable(whole[rank::ranks])
        _write(checkpoints.path(5) / f"rows-{rank}", {"weight/0001": rows})
    monkeypatch.undo()
    read = {"weight/0000": tf.Variable(tf.zeros([3])), "weight/0001": tf.Variable(0 * whole)}
    checkpoints.at(5).read(read)
    np.testing.assert_array_equal(read["weight/0001"], whole)
    np.testing.assert_array_equal(read["weight/0000"], weight)
    checkpoints.at(5).restore(State({"weight/0000": weight}, {"loss/0000": own}))
    assert float(own) == sum(sums)
    if ranks > 1:
        sharded = State({"weight/0000": weight}, shards={"weight/0001": read["weight/0001"]})
        with pytest.raises(UserError, match=f"Use horovodrun -np {ranks}"):
            checkpoints.at(5).restore(sharded)


# When they are taken


def test_intervals():
    for given, updates, seconds in ((None, math.inf, math.inf), ("50", 50, math.inf)):
        assert CheckpointConfig(checkpoint_every=given).interval == (updates, seconds)
    checkpointing = CheckpointConfig(checkpoint_every="0.5m")
    assert checkpointing.interval == (math.inf, 30.0)
    assert CheckpointConfig(**json.loads(json.dumps(vars(checkpointing)))) == checkpointing


@pytest.mark.parametrize("given", [0, 1.5, "", "0m", "10 m"])
def test_wrong_intervals_are_refused(given):
    with pytest.raises(UserError, match="checkpoint_every must be a positive number of updates"):
        CheckpointConfig(checkpoint_every=given)
    with pytest.raises(UserError, match="keep must be a positive whole number"):
        CheckpointConfig(keep=0)
