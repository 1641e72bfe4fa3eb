"""Checkpoints: what stays, what is whole, and the best epoch's model from one."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from merlin_cowclip.plugins import Hyperparameters, StepStatistics
from merlin_cowclip.plugins.state import weights_of
from merlin_cowclip.workflows.errors import Stopped, UserError
from merlin_cowclip.workflows.folders import remove
from merlin_cowclip.workflows.training import train as train_module
from merlin_cowclip.workflows.training.checkpoint_files import write_tensors
from merlin_cowclip.workflows.training.checkpoints import Checkpoints
from merlin_cowclip.workflows.training.configuration import TrainConfig
from merlin_cowclip.workflows.training.epochs import Progress
from merlin_cowclip.workflows.training.evaluation import evaluate
from merlin_cowclip.workflows.training.growing_files import cut_back, lengths
from merlin_cowclip.workflows.training.keeping import Keeping
from merlin_cowclip.workflows.training.loader import Loader
from merlin_cowclip.workflows.training.resuming import open_data, read_config
from merlin_cowclip.workflows.training.runs import Run, described
from merlin_cowclip.workflows.training.saved_state import State
from merlin_cowclip.workflows.training.train import resume, train
from tests.saves import quick_saves

pytestmark = pytest.mark.usefixtures("graphs_as_traced")

BASE = Hyperparameters(batch_size=128, dense_lr=2e-2, embedding_lr=2e-2)


def config(**changes) -> TrainConfig:
    options = {
        "batch_size": 128,
        "base": BASE,
        "epochs": 3,
        "embedding_dim": 4,
        "mlp": (8,),
        "seed": 2,
    }
    return TrainConfig(**{**options, **changes})


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    """The labels are drawn, so that any epoch may be its best: with this seed not the last."""
    keeping = Keeping(keep=1, saved_model=False)
    home = tmp_path_factory.mktemp("checkpoints")
    return train(data, config(epochs=4), home / "run", keeping=keeping, progress=False)


def steps_of(run) -> list[int]:
    return Checkpoints(run.path / "checkpoints").steps()


def test_the_last_and_the_best_stay(run, data):
    per_epoch = len(Loader(data, batch_size=128))
    aucs = [epoch["auc"] for epoch in run.result["epochs"]]
    best = int(np.argmax(aucs)) + 1
    assert best < 4  # or this test shows nothing
    assert run.result["best_epoch"] == best
    assert steps_of(run) == [best * per_epoch, 4 * per_epoch]


def test_the_models_of_a_run_without_a_saved_model(run, data):
    """Rebuilt, they measure what was measured when they were trained."""
    assert not (run.path / "model").exists()
    test = Loader(data, "test", batch_size=256)
    for which, epoch in (("last", 4), ("best", run.result["best_epoch"])):
        measured = run.result["epochs"][epoch - 1]
        quality = evaluate(run.model(which), test)
        assert quality.auc == pytest.approx(measured["auc"], abs=1e-6)
        assert quality.log_loss == pytest.approx(measured["log_loss"], abs=1e-6)
    with pytest.raises(UserError, match="which must be one of last, best. Received: 'first'"):
        run.model("first")


def test_a_checkpoint_is_read_by_tensorflow(run):
    path = run.path / "checkpoints" / f"step-{steps_of(run)[-1]:010}"
    record = json.loads((path / "checkpoint.json").read_text())
    values = tf.train.load_checkpoint(str(path / "state"))
    shapes = values.get_variable_to_shape_map()
    assert shapes == {name: entry["shape"] for name, entry in record["tensors"].items()}
    for name, weight in weights_of(run.model()).items():
        np.testing.assert_array_equal(values.get_tensor(name), weight.numpy())


@pytest.mark.slow
def test_rows_that_wait_go_on_waiting(data, tmp_path):
    """Two epochs, and one that goes on for a second: every tensor of the last checkpoint."""
    keeping, once, twice = (
        Keeping(saved_model=False),
        *(config(epochs=epochs, update="deferred", model="dcn") for epochs in (1, 2)),
    )
    at_once = train(data, twice, tmp_path / "at once", keeping=keeping, progress=False)
    with quick_saves():
        first = train(data, once, tmp_path / "two goes", jobs=3, progress=False)
        in_two = resume(tmp_path / "two goes", epochs=2, jobs=2, progress=False)
    jobs = [one.result["jobs"] for one in (at_once, first, in_two)]
    assert jobs == [1, 3, 3]  # the most that there were at any time
    states = []
    for run in (at_once, in_two):
        path = Checkpoints(run.path / "checkpoints").at(steps_of(run)[-1]).path / "state"
        reader = tf.train.load_checkpoint(str(path))
        states.append({n: reader.get_tensor(n) for n in reader.get_variable_to_shape_map()})
    assert states[0].keys() == states[1].keys()
    waiting = [x for x in states[0].values() if x.shape[1:] == (1,) and x.max() > 10]
    assert any(len(np.unique(x)) > 2 for x in waiting)  # or this test shows nothing
    for name, values in states[0].items():
        np.testing.assert_array_equal(values, states[1][name], err_msg=name)


def test_early_stopping(data, tmp_path):
    keeping, out = Keeping(saved_model=False), tmp_path / "run"
    stopped = train(data, config(epochs=9, patience=2), out, keeping=keeping, progress=False)
    assert len(stopped.result["epochs"]) == stopped.result["best_epoch"] + 2 < 9
    assert config(patience=2).identity != config().identity
    for epochs in (None, 20):
        with pytest.raises(UserError, match="epochs, of which the last 2 were not its best"):
            resume(stopped.path, epochs=epochs, progress=False)
    assert Run.open(stopped.path).result == stopped.result
    (out / "result.json").rename(tmp_path / "result.json")  # as if killed before it was written
    before = (out / "config.json").read_bytes()
    with pytest.raises(UserError, match=r"raised while it has patience.* the last 2 were not its"):
        resume(out, epochs=20, progress=False)
    assert (out / "config.json").read_bytes() == before
    assert resume(out, progress=False).result["auc"] == stopped.result["auc"]


def test_progress_of_equal_epochs_is_bests_first():
    epochs = [{"epoch": e, "auc": auc} for e, auc in ((1, 0.6), (2, 0.7), (3, 0.7))]
    assert Progress(epochs).best == 2
    assert Progress([{"epoch": 1, "auc": None}]).best is None


def test_a_run_in_half_precision(data, tmp_path, graphs_rewritten):
    """Keras wraps the optimizer, for its loss scaling, which the checkpoints hold as well.

    The command line, which makes no layer in half precision by itself, goes on in it all the same,
    and measures what was measured.
    """
    tf.keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        with quick_saves():
            run = train(data, config(epochs=1), tmp_path / "run", progress=False)
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")
    test = Loader(data, "test", batch_size=256)
    with quick_saves():
        further = resume(run.path, epochs=2, progress=False)
    for step in steps_of(further):
        tensors = Checkpoints(run.path / "checkpoints").at(step).record["tensors"]
        assert len([name for name in tensors if name.startswith("loss_scale/")]) == 2
    for which, epoch in (("last", 2), ("best", further.result["best_epoch"])):
        model, measured = further.model(which), further.result["epochs"][epoch - 1]
        assert model.layers[-1].dtype_policy.name == "mixed_float16"
        assert evaluate(model, test).auc == pytest.approx(measured["auc"], abs=1e-6)
    assert tf.keras.mixed_precision.global_policy().name == "float32"


# Where a finished run cannot go on


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        ("checkpoints", "a finished run goes on from its last checkpoint. Received: .*Its result"),
        ("checkpoints/*/state.index", "none that is whole: a checkpoint must be as it was written"),
        ("logs", "what a run has logged must be there"),
    ],
)
def test_a_finished_run_that_cannot_go_on_stays_as_it_was(run, tmp_path, lost, words):
    """Of one without checkpoints all would be trained again, and the result be gone meanwhile."""
    path = shutil.copytree(run.path, tmp_path / "run")
    for gone in path.glob(lost):
        remove(gone)
    before = Run.open(path).result
    with pytest.raises(UserError, match=words):
        resume(path, epochs=5, progress=False)
    assert Run.open(path).result == before


def test_a_users_own_files_among_the_events_stay(tmp_path):
    """Whether they were there at the checkpoint, came or grew since, or are gone."""
    run, event = tmp_path, "logs/events.out.tfevents.1.host.2.3.v2"
    for name, text in (("metrics.csv", "a"), (event, "b"), ("logs/notes.txt", "c")):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text(text)
    held = lengths(run)
    assert held == {"metrics.csv": 1, event: 1}
    for name in (event, "logs/notes.txt", "logs/mine/events.out.tfevents.7"):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text("b, longer")
    (run / "logs/events.out.tfevents.9.host.2.3.v2").touch()
    cut_back(
        run, {**held, "logs/notes.txt": 1, "logs/gone.txt": 1}
    )  # as before they were told apart
    left = {p.relative_to(run).as_posix(): p.read_text() for p in run.rglob("*") if p.is_file()}
    assert left == {
        **{"metrics.csv": "a", event: "b", "logs/notes.txt": "b, longer"},
        "logs/mine/events.out.tfevents.7": "b, longer",
    }


def test_raised_epochs_hold_for_what_is_told_to_go_on_with(run, tmp_path, monkeypatch):
    """Also where it is interrupted before it goes on; a finished run stays one until then."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(train_module, "compiled", interrupted)
    path = shutil.copytree(run.path, tmp_path / "run")
    with pytest.raises(Stopped, match=r"interrupted at once. The run is finished$"):
        resume(path, epochs=7, progress=False)
    assert Run.open(path).result == run.result
    (path / "result.json").unlink()
    with pytest.raises(Stopped, match="is kept; go on with: merlin-cowclip train --resume"):
        resume(path, epochs=7, progress=False)
    assert read_config(path)["epochs"] == 7


def test_the_same_rows_with_another_meaning(run):
    """Parquet that was adopted twice, with two labels, is the same rows."""
    record = read_config(run.path)
    assert open_data(record, run.path, None).path == Path(record["data"])
    with pytest.raises(UserError, match="must be what it was .*, with label 'y' instead of 'z'"):
        open_data({**record, "label": "z"}, run.path, None)


def test_a_machine_is_known_by_its_processors(run, data, monkeypatch):
    """The numbers of GPUs are the same on all machines."""
    assert run.config["machine"]["processor"]
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [gpu])
    details = {"device_name": "NVIDIA H100 80GB HBM3"}
    monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda device: details)
    assert described(data, config())["machine"]["gpus"] == ["NVIDIA H100 80GB HBM3"]


# What is whole


@pytest.fixture
def written(tmp_path):
    """Three checkpoints of one variable, which holds their number."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=3)
    variable = tf.Variable(tf.zeros([1000]), name="w")
    for step in (10, 20, 30):
        variable.assign(tf.fill([1000], float(step)))
        checkpoints.save(step, State({"weight/0000": variable}), {"epochs": []})
        variable.assign_add(tf.ones([1000]))  # at once: the checkpoint is of before
    checkpoints.wait()
    return checkpoints, variable


def test_a_checkpoint_holds_the_values_of_when_it_was_begun(written):
    checkpoints, variable = written
    for step in (10, 20, 30):
        checkpoints.at(step).restore(State({"weight/0000": variable}))
        np.testing.assert_array_equal(variable, np.full(1000, float(step)))


def test_a_table_that_is_trained_on_while_it_is_written(tmp_path):
    """A copy is made by whatever writes into it, scatters among them."""
    table = tf.Variable(tf.random.stateless_normal([200_000, 10], [1, 2]), name="table")
    before = table.numpy().copy()
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(1, State({"weight/0000": table}), {"epochs": []})
    rows = tf.range(0, 200_000, 3)
    for _ in range(20):
        table.scatter_sub(tf.IndexedSlices(tf.ones([len(rows), 10]), rows))
        tf.raw_ops.ResourceApplyGradientDescent(
            var=table.handle, alpha=1.0, delta=tf.ones_like(table)
        )
    checkpoints.wait()
    checkpoints.at(1).restore(State({"weight/0000": table}))
    np.testing.assert_array_equal(table, before)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "a flipped bit": (lambda p: flip(p / "state.data-00000-of-00001"), "whose content has changed"),
    "a file gone": (lambda p: (p / "state.index").unlink(), "which cannot be read"),
    "cut": (
        lambda p: (p / "state.data-00000-of-00001").write_bytes(b"\0" * 9),
        "of 9 bytes, which had",
    ),
    "no record": (lambda p: (p / "checkpoint.json").unlink(), "checkpoint.json, which cannot"),
    "half a record": (
        lambda p: (p / "checkpoint.json").write_text('{"format": 1, "ste'),
        "checkpoint.json, which cannot be read",
    ),
    "another record": (
        lambda p: (p / "checkpoint.json").write_text('{"format": 9}'),
        "which is not of format 1 or 2",
    ),
    "a flipped bit of the record": (
        lambda p: (p / "checkpoint.json").write_text(
            (p / "checkpoint.json").read_text().replace('"epochs": []', '"epochs": [1]')
        ),
        "checkpoint.json, whose content has changed",
    ),
    "a poor record": (
        lambda p: (p / "checkpoint.json").write_text('{"format": 1}'),
        "without 'step'",
    ),
    "empty": (lambda p: [f.unlink() for f in p.iterdir()], "checkpoint.json, which cannot be read"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_named_and_put_aside(written, damage):
    checkpoints, _ = written
    harm, words = DAMAGES[damage]
    harm(checkpoints.folder / "step-0000000030")
    last, damaged = checkpoints.last()
    assert last.step == 20
    (error,) = damaged
    assert "a checkpoint must be as it was written. Received: " in str(error)
    assert "step-0000000030" in str(error)
    assert words in str(error)
    (checkpoints.folder / ".step-0000000040.partial").mkdir()
    checkpoints.tidy(last)
    assert sorted(p.name for p in checkpoints.folder.iterdir()) == [
        "damaged-step-0000000030",
        "step-0000000010",
        "step-0000000020",
    ]


def test_another_networks_checkpoint(written):
    checkpoints, _ = written
    other = tf.Variable(tf.zeros([9]), name="u")
    with pytest.raises(UserError, match=r"must belong to the network .* float32 \[1000\] for 'u"):
        checkpoints.at(30).restore(State({"weight/0000": other}))
    with pytest.raises(UserError, match=r"with nothing for 'u:0', float32 \[9\]"):
        checkpoints.at(30).restore(State({"weight/0001": other}))


def test_a_failed_one_is_told_and_leaves_nothing(written, monkeypatch):
    checkpoints, variable = written
    monkeypatch.setattr(
        "merlin_cowclip.workflows.training.checkpoints.write_json",
        lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")),
    )
    checkpoints.save(40, State({"weight/0000": variable}), {"epochs": []})
    with pytest.raises(OSError, match="No space left"):
        checkpoints.wait()
    assert sorted(p.name for p in checkpoints.folder.iterdir()) == [
        f"step-00000000{n}" for n in (10, 20, 30)
    ]


def test_what_tensorflow_cannot_write_is_an_error_of_the_system(tmp_path):
    (tmp_path / "file").touch()
    for folder, words in ((tmp_path / "file", "Not a directory"), ("/proc/no", "No such file")):
        with pytest.raises(OSError, match=words) as raised:
            write_tensors(Path(folder) / "state", {"weight": tf.constant([1.0])})
        assert raised.value.filename == f"{folder}/state"


def test_what_a_checkpoint_tells_of_is_on_the_disk_before_it(tmp_path, monkeypatch):
    """Else a power cut could leave a checkpoint that counts on lines of a log that are gone."""
    module = "merlin_cowclip.workflows.training.checkpoints"
    done = []
    monkeypatch.setattr(f"{module}.files.sync", lambda path: done.append(path))
    rename = os.rename
    monkeypatch.setattr(f"{module}.os.rename", lambda *to: (done.append(to[1]), rename(*to)))
    log = tmp_path / "logs" / "events"
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(1, State({"weight/0000": tf.Variable(1.0)}), {"epochs": []}, beside=[log])
    checkpoints.wait()
    before = done[: done.index(checkpoints.folder / "step-0000000001")]
    assert {log, log.parent} < set(before)
    assert {path.name for path in before} > {"checkpoint.json", "state.index"}


# When they are taken


@pytest.mark.parametrize(
    ("given", "steps", "minutes"),
    [
        (None, None, None),
        (50, 50, None),
        ("50", 50, None),
        ("10m", None, 10.0),
        ("0.5m", None, 0.5),
    ],
)
def test_how_often(given, steps, minutes):
    keeping = Keeping(checkpoint_every=given)
    assert (keeping.steps, keeping.minutes) == (steps, minutes)
    assert Keeping.from_dict(json.loads(json.dumps(keeping.to_dict()))) == keeping


@pytest.mark.parametrize("given", [0, -1, 1.5, True, "", "m", "0m", "-1m", "ten", "10 m", "１０"])
def test_how_often_is_refused(given):
    with pytest.raises(UserError, match="checkpoint_every must be a positive number of updates"):
        Keeping(checkpoint_every=given)


@pytest.mark.parametrize("given", [0, -1, "2", True])
def test_how_many_is_refused(given):
    with pytest.raises(UserError, match="keep must be a positive whole number"):
        Keeping(keep=given)


@pytest.mark.parametrize("given", [{"keeep": 1}, ["keep"]])
def test_what_is_no_keeping_is_refused(given):
    with pytest.raises(UserError, match="the keeping of checkpoints (has the keys|must be values)"):
        Keeping.from_dict(given)


def test_one_every_few_steps(data, tmp_path):
    keeping = Keeping(checkpoint_every=2, keep=100, saved_model=False)
    run = train(
        data, config(epochs=2, model="lr"), tmp_path / "run", keeping=keeping, progress=False
    )
    per_epoch = len(Loader(data, batch_size=128))
    every_two = {s for s in range(2, 2 * per_epoch, 2)}
    assert set(steps_of(run)) == every_two | {per_epoch, 2 * per_epoch}
    shutil.rmtree(run.path)


def test_one_of_before_norms_were_counted(data, tmp_path, monkeypatch):
    """It has four variables of statistics, and no `norms.csv` beside it."""
    of_now = StepStatistics.variables.fget
    with monkeypatch.context() as patch:
        patch.setattr(StepStatistics, "variables", property(lambda self: of_now(self)[:4]))
        patch.setattr(StepStatistics, "gradient_norms", lambda self: [])
        keeping = Keeping(saved_model=False)
        train(data, config(epochs=1, model="lr"), tmp_path / "run", keeping=keeping, progress=False)
    run = resume(tmp_path / "run", epochs=2, progress=False)
    assert (run.path / "norms.csv").read_text().splitlines()[1].startswith("2,")
    shutil.rmtree(run.path)
