"""Checkpoints: what stays, what is whole, and the best epoch's model from one."""

import dataclasses
import json
import math
import os
import shutil

import numpy as np
import pytest
import tensorflow as tf

from merlin_cowclip.plugins import Hyperparameters
from merlin_cowclip.plugins.optimizers.state import weights_of
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.training.checkpoint import Checkpoints, State, _write
from merlin_cowclip.workflows.training.configuration import (
    CheckpointConfig,
    TrainConfig,
    base_fields,
)
from merlin_cowclip.workflows.training.evaluation import evaluate
from merlin_cowclip.workflows.training.loader import Loader
from merlin_cowclip.workflows.training.runs import Run
from merlin_cowclip.workflows.training.train import resume, train
from merlin_cowclip.workflows.training.trainer import Progress, Trainer
from tests.runs_alike import differences

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
    """The labels are drawn, so that any epoch may be its best: with this seed not the last."""
    checkpointing = CheckpointConfig(keep=1, saved_model=False)
    home = tmp_path_factory.mktemp("checkpoints")
    return train(data, config(epochs=4), home / "run", checkpointing=checkpointing, progress=False)


def steps_of(run) -> list[int]:
    return Checkpoints(run.path / "checkpoints").steps()


def test_the_last_and_the_best_stay(run, data):
    per_epoch = len(Loader(data, batch_size=128))
    aucs = [epoch["valid_auc"] for epoch in run.result["epochs"]]
    best = int(np.argmax(aucs)) + 1
    assert best < 4  # or this test shows nothing
    assert run.result["best_epoch"] == best
    assert steps_of(run) == [best * per_epoch, 4 * per_epoch]


def test_the_models_of_a_run_without_a_saved_model(run, data):
    """Rebuilt, they measure what was measured when they were trained."""
    assert not (run.path / "model").exists()
    valid = Loader(data, "valid", batch_size=256)
    for which, epoch in ((None, 4), ("last", 4), ("best", run.result["best_epoch"])):
        measured = run.result["epochs"][epoch - 1]
        quality = evaluate(run.model(which), valid)
        assert quality.auc == pytest.approx(measured["valid_auc"], abs=1e-6)
        assert quality.log_loss == pytest.approx(measured["valid_log_loss"], abs=1e-6)
    with pytest.raises(UserError, match="which must be one of last, best. Received: 'first'"):
        run.model("first")


def test_a_checkpoint_is_read_by_tensorflow(run):
    path = run.path / "checkpoints" / f"step-{steps_of(run)[-1]:010}"
    values = tf.train.load_checkpoint(str(path / "state"))
    for name, weight in weights_of(run.model()).items():
        key = f"state/{name.replace('/', '_')}/.ATTRIBUTES/VARIABLE_VALUE"
        np.testing.assert_array_equal(values.get_tensor(key), weight.numpy())


@pytest.mark.parametrize("update", ["deferred", pytest.param("lazy", marks=pytest.mark.extended)])
def test_a_run_goes_on_in_an_epoch_to_the_last_bit(data, tmp_path, monkeypatch, update):
    """As if it had not been stopped; with deferred updates, rows that wait go on waiting."""
    checkpointing = CheckpointConfig(checkpoint_every=5, keep=99, saved_model=False)
    changes = {"model": "lr", "embedding_dim": None, "mlp": None, "batch_size": 256}
    options, out = config(epochs=2, update=update, **changes), tmp_path / "run"
    reference = train(
        data, options, tmp_path / "reference", checkpointing=checkpointing, progress=False
    )
    see = Trainer.see

    def interrupted(trainer, loss):
        see(trainer, loss)
        if trainer.step == 23:
            raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "see", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(data, options, out, checkpointing=checkpointing, progress=False)
    monkeypatch.undo()
    assert Checkpoints(out / "checkpoints").steps()[-1] == 20  # an epoch has 16
    resume(out, progress=False)
    assert differences(out, reference.path) == []
    if update == "deferred":
        reader = tf.train.load_checkpoint(str(out / "checkpoints" / "step-0000000032" / "state"))
        names = set(reader.get_variable_to_shape_map()) - {"_CHECKPOINTABLE_OBJECT_GRAPH"}
        values = map(reader.get_tensor, names)
        waiting = [x for x in values if x.shape[1:] == (1,) and x.max() > 10]
        assert any(len(np.unique(x)) > 2 for x in waiting)  # or this test shows nothing


@pytest.mark.extended
def test_early_stopping(data, tmp_path):
    checkpointing, out = CheckpointConfig(saved_model=False), tmp_path / "run"
    options = config(epochs=9, patience=2, model="lr", embedding_dim=None, mlp=None)
    stopped = train(data, options, out, checkpointing=checkpointing, progress=False)
    assert len(stopped.result["epochs"]) == stopped.result["best_epoch"] + 2 < 9
    assert config(patience=2).identity != config().identity
    best = stopped.model()  # by default that of the best epoch
    for part, measured in (("valid", stopped.result["epochs"][-3]), ("test", stopped.result)):
        auc = evaluate(best, Loader(data, part, batch_size=256)).auc
        assert auc == pytest.approx(measured[{"valid": "valid_auc", "test": "auc"}[part]], abs=1e-6)
    words = f"run is finished after {len(stopped.result['epochs'])} of 9 epochs. Early stopping"
    for epochs in (None, 20):
        with pytest.raises(UserError, match=words):
            resume(out, epochs=epochs, progress=False)


def test_progress_of_equal_epochs_is_bests_first():
    epochs = [{"epoch": e, "valid_auc": auc} for e, auc in ((1, 0.6), (2, 0.7), (3, 0.7))]
    assert Progress(epochs).best == 2
    assert Progress(epochs).is_out_of(1)
    assert not Progress(epochs).is_out_of(2)
    assert Progress([{"epoch": 1, "valid_auc": None}]).best is None


# Where a finished run cannot go on


def test_a_finished_run_without_checkpoints_stays_as_it_was(run, tmp_path):
    """Else all would be trained again, and the result be gone meanwhile."""
    path = shutil.copytree(run.path, tmp_path / "run")
    shutil.rmtree(path / "checkpoints")
    words = "a finished run resumes from its last checkpoint. Received: .*without one"
    with pytest.raises(UserError, match=words):
        resume(path, epochs=5, progress=False)
    assert Run.open(path).result == run.result


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


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def halve(path):
    os.truncate(path, path.stat().st_size // 2)


DAMAGES = {
    "half its weights": (lambda p: halve(p / "state.data-00000-of-00001"), "Read less bytes than"),
    "half its index": (lambda p: halve(p / "state.index"), "is damaged, or "),
    "a flipped bit": (
        lambda p: flip(p / "state.data-00000-of-00001"),
        "is damaged, or of another network",
    ),
    "a file gone": (lambda p: (p / "state.index").unlink(), "is damaged, or "),
    "half its progress": (lambda p: (p / "progress.json").write_text('{"st'), "is damaged, or "),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_named_and_stays(written, damage):
    checkpoints, variable = written
    harm, words = DAMAGES[damage]
    harm(checkpoints.folder / "step-0000000030")
    (checkpoints.folder / ".step-0000000040.partial").mkdir()
    state = State({"weight/0000": variable})
    with pytest.raises(UserError, match=f"step-0000000030/.*{words}.*remove its folder"):
        checkpoints.restore_last(state)
    assert sorted(p.name for p in checkpoints.folder.iterdir()) == [
        f"step-00000000{n}" for n in (10, 20, 30)
    ]
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
    assert sorted(p.name for p in checkpoints.folder.iterdir()) == [
        f"step-00000000{n}" for n in (10, 20, 30)
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_shards_are_read_whole_and_own_sums_shared(tmp_path, monkeypatch, ranks):
    """What ranks have saved, each for itself, as one process reads it."""
    whole = np.random.default_rng(0).random((11, 2), np.float32)
    sums = [float(rank + 1) for rank in range(ranks)]
    monkeypatch.setattr(
        "merlin_cowclip.workflows.training.checkpoint.gather_objects",
        lambda mine: [{"loss/0000": total} for total in sums],
    )
    checkpoints = Checkpoints(tmp_path)
    weight, own = tf.Variable(tf.ones([3])), tf.Variable(0.0)
    checkpoints.save(5, State({"weight/0000": weight}, {"loss/0000": own}), {})
    for rank in range(ranks):
        rows = tf.Variable(whole[rank::ranks])
        _write(checkpoints.path(5) / f"rows-{rank}", {"weight/0001": rows})
    monkeypatch.undo()
    found = {"weight/0000": tf.Variable(tf.zeros([3])), "weight/0001": tf.Variable(0 * whole)}
    checkpoints.at(5).read(found)
    np.testing.assert_array_equal(found["weight/0001"], whole)
    np.testing.assert_array_equal(found["weight/0000"], weight)
    checkpoints.at(5).restore(State({"weight/0000": weight}, {"loss/0000": own}))
    assert float(own) == sum(sums)
    if ranks > 1:
        sharded = State({"weight/0000": weight}, shards={"weight/0001": found["weight/0001"]})
        with pytest.raises(UserError, match=f"Use horovodrun -np {ranks}"):
            checkpoints.at(5).restore(sharded)


# When they are taken


def test_how_often():
    for given, steps, seconds in (
        (None, math.inf, math.inf),
        ("50", 50, math.inf),
        (50, 50, math.inf),
        ("0.5m", math.inf, 30.0),
    ):
        checkpointing = CheckpointConfig(checkpoint_every=given)
        assert checkpointing.interval == (steps, seconds)
        assert (
            CheckpointConfig(**json.loads(json.dumps(dataclasses.asdict(checkpointing))))
            == checkpointing
        )


@pytest.mark.parametrize("given", [0, 1.5, True, "", "0m", "10 m"])
def test_how_often_is_refused(given):
    with pytest.raises(UserError, match="checkpoint_every must be a positive number of updates"):
        CheckpointConfig(checkpoint_every=given)
    with pytest.raises(UserError, match="keep must be a positive whole number"):
        CheckpointConfig(keep=0)
