"""State is whole: checkpoints, Keras's BackupAndRestore, save_model and load_model."""

from __future__ import annotations

import json
import os
import warnings

import numpy as np
import pytest
import tensorflow as tf

from merlin_cowclip.models import FusedEmbeddings, deepfm
from merlin_cowclip.plugins import CowClipOptimizer, load_model, save_model
from merlin_cowclip.plugins._stack import Schema, Tags, mm

from ..saves import quick_saves
from .merlin_models import SCHEMA, TARGET, batch, category, dataset, stock_dlrm
from .test_optimizer import HOT, built, fitted, ours

pytestmark = pytest.mark.usefixtures("graphs_as_traced")

WARM = HOT.replace(warmup_epochs=1.0)


def values(model):
    return [v.numpy() for v in model.trainable_variables]


def slots(optimizer):
    return [
        part.get_slot(variable, name).numpy()
        for variable, part, *_ in optimizer.owned()
        for name in ("m", "v")
    ]


def assert_same(a, b):
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.fixture
def quick():
    with quick_saves():
        yield


@pytest.mark.parametrize("update", ["exact", "lazy"])
@pytest.mark.parametrize("builder", [ours, stock_dlrm])
def test_training_goes_on_as_if_never_stopped(tmp_path, builder, update):
    eagerly = (builder is ours) == (update == "lazy")
    model, optimizer = fitted(
        builder, SCHEMA, WARM, eagerly=eagerly, update=update, steps_per_epoch=5
    )
    # Of a stock model the traces are the same in both modes.
    with quick_saves(traces=builder is ours or update == "lazy"):
        save_model(model, tmp_path / "model")
    loaded = load_model(tmp_path / "model", metrics=[], run_eagerly=eagerly)
    assert loaded.optimizer.get_config() == optimizer.get_config()
    assert_same(slots(loaded.optimizer), slots(optimizer))
    assert int(loaded.optimizer.iterations) == 3
    assert len(loaded.optimizer.variables()) == len(optimizer.variables())
    for m in (model, loaded):
        m.fit(dataset(SCHEMA, 4, first=3), verbose=0)
    assert_same(values(loaded), values(model))
    # Once more, after compiling again with the same optimizer.
    loaded.compile(optimizer=loaded.optimizer, metrics=[])
    with quick_saves(traces=builder is ours and update == "exact"):
        save_model(loaded, tmp_path / "again")
    third = load_model(tmp_path / "again", metrics=[])
    assert_same(slots(third.optimizer), slots(optimizer))
    assert [int(p.iterations) for p in third.optimizer.optimizers] == [
        int(p.iterations) for p in optimizer.optimizers
    ]


@pytest.mark.usefixtures("quick")
def test_mixed_precision_comes_back_with_its_loss_scale(tmp_path):
    tf.keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model, optimizer = fitted(ours, SCHEMA, steps=4)
        save_model(model, tmp_path / "model")
        loaded = load_model(tmp_path / "model", metrics=[])
        assert float(loaded.optimizer.loss_scale) == float(model.optimizer.loss_scale)
        assert int(loaded.optimizer.dynamic_counter) == int(model.optimizer.dynamic_counter)
        assert_same(slots(loaded.optimizer.inner_optimizer), slots(optimizer))
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")


@pytest.mark.parametrize("name", ["model[1]", "model\\1"])
def test_a_path_that_tensorflow_takes_for_a_pattern(tmp_path, name):
    for call in (lambda path: save_model(None, path), load_model):
        with pytest.raises(ValueError, match=r"path must be without \[ and .* Received: .*model"):
            call(tmp_path / name)


def test_all_variables_are_listed_and_checkpointed(tmp_path):
    model, optimizer = fitted(ours, SCHEMA)
    listed = {id(v) for v in optimizer.variables()}
    for variable, part, *_ in optimizer.owned():
        assert {id(part.get_slot(variable, name)) for name in ("m", "v")} <= listed
    assert {id(p.iterations) for p in (optimizer, *optimizer.optimizers)} <= listed
    path = tf.train.Checkpoint(model=model, optimizer=optimizer).save(str(tmp_path / "c"))
    before_values, before_slots = values(model), slots(optimizer)
    model.fit(dataset(SCHEMA, 2), verbose=0)
    again, fresh = fitted(ours, SCHEMA, steps=1)
    status = tf.train.Checkpoint(model=again, optimizer=fresh).restore(path)
    status.assert_existing_objects_matched()
    assert_same(values(again), before_values)
    assert_same(slots(fresh), before_slots)
    assert int(fresh.iterations) == 3


@pytest.mark.arithmetic
def test_backup_and_restore(tmp_path, graphs_rewritten):
    """Keras's own callback: a run that dies in its third epoch ends like one that does not."""

    class Die(tf.keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    def run(callbacks, build=built):
        tf.keras.utils.set_random_seed(0)
        model = build(ours, SCHEMA)
        optimizer = CowClipOptimizer.for_model(model, WARM, steps_per_epoch=3)
        model.compile(optimizer=optimizer, metrics=[])
        model.fit(dataset(SCHEMA, 3), epochs=4, verbose=0, callbacks=callbacks)
        return model

    whole = run([])
    backup = str(tmp_path / "backup")
    with pytest.raises(KeyboardInterrupt):
        run([tf.keras.callbacks.BackupAndRestore(backup), Die()])
    resumed = run([tf.keras.callbacks.BackupAndRestore(backup)], lambda builder, s: builder(s))
    assert_same(values(resumed), values(whole))
    assert int(resumed.optimizer.iterations) == 12


@pytest.mark.arithmetic
@pytest.mark.parametrize("given", [None, 2])
def test_a_restore_leaves_the_epochs_length_that_is_given_or_of_the_fit(tmp_path, given):
    """BackupAndRestore restores after the fit has told its own: 4 steps an epoch, now 2."""

    class Die(tf.keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                raise KeyboardInterrupt

    two_epochs, callback = HOT.replace(warmup_epochs=2.0), tf.keras.callbacks.BackupAndRestore
    model = built(ours, SCHEMA)
    model.compile(CowClipOptimizer.for_model(model, two_epochs), metrics=[])
    backup = callback(str(tmp_path / "backup"))
    with pytest.raises(KeyboardInterrupt):
        model.fit(dataset(SCHEMA, 4), epochs=2, verbose=0, callbacks=[backup, Die()])
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    saved = checkpoint.save(str(tmp_path / "c"))
    again = built(ours, SCHEMA)
    optimizer = CowClipOptimizer.for_model(again, two_epochs, steps_per_epoch=given)
    again.compile(optimizer=optimizer, metrics=[])
    backup = callback(str(tmp_path / "backup"))
    again.fit(dataset(SCHEMA, 2), epochs=2, verbose=0, callbacks=[backup])
    assert int(optimizer.iterations) == 4 + 2
    assert optimizer.warmup_steps == 2 * 2
    # In a loop of one's own nothing but steps_per_epoch tells it anew.
    status = tf.train.Checkpoint(model=again, optimizer=optimizer).restore(saved)
    status.assert_existing_objects_matched().assert_consumed()
    assert int(optimizer.iterations) == 4
    assert optimizer.warmup_steps == 2 * (given or 4)


def test_a_plain_load_works_and_warns(tmp_path):
    model, _ = fitted(ours, SCHEMA)
    save_model(model, tmp_path / "model")
    with pytest.warns(UserWarning, match=r"start anew.*load_model"):
        plain = mm.Model.load(str(tmp_path / "model"))
    features, _ = batch(SCHEMA)
    np.testing.assert_allclose(plain(features), model(features), atol=1e-6)


@pytest.mark.usefixtures("quick")
def test_what_cannot_be_saved_or_loaded_says_so(tmp_path):
    model, _ = fitted(ours, SCHEMA, steps=1)
    path = tmp_path / "model"
    with pytest.raises(ValueError, match="must hold merlin_cowclip/state.json"):
        load_model(tmp_path)
    save_model(model, path)
    model.fit(dataset(SCHEMA, 1), verbose=0)
    other = tmp_path / "other"
    save_model(model, other)
    for name in ("state.index", "state.data-00000-of-00001"):
        (path / "merlin_cowclip" / name).write_bytes((other / "merlin_cowclip" / name).read_bytes())
    with pytest.raises(ValueError, match="must belong to the model beside it"):
        load_model(path)
    description = json.loads((other / "merlin_cowclip/state.json").read_text())
    description["format"] = 99
    (other / "merlin_cowclip/state.json").write_text(json.dumps(description))
    with pytest.raises(ValueError, match="must be of format 1 or 2. Received: 99"):
        load_model(other)
    stock = ours(SCHEMA)
    stock.compile(optimizer="adam")
    with pytest.raises(ValueError, match="compiled with a CowClipOptimizer. Received: Adam"):
        save_model(stock, tmp_path / "stock")


@pytest.fixture(scope="module")
def trained():
    return fitted(ours, SCHEMA, WARM, steps=2)[0]


@pytest.mark.usefixtures("quick")
def test_a_save_that_fails_leaves_the_old_model(tmp_path, monkeypatch, trained):
    path = tmp_path / "model"
    save_model(trained, path)
    (path / "notes.txt").write_text("somebody else's")
    files = {p: p.stat().st_mtime_ns for p in path.rglob("*") if p.is_file()}
    steps = int(trained.optimizer.iterations)
    trained.fit(dataset(SCHEMA, 1), verbose=0)

    def cut(model, folder, **options):
        with open(f"{folder}/saved_model.pb", "wb") as file:
            file.write(b"half of it")
        raise OSError("injected")

    def interrupt(*arguments, **named):
        raise KeyboardInterrupt("injected")

    for owner, name, failure in (
        (mm.Model, "save", cut),
        (tf.train.Checkpoint, "write", interrupt),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, failure)
            with pytest.raises((OSError, KeyboardInterrupt), match="injected"):
                save_model(trained, path)
        assert [p.name for p in tmp_path.iterdir()] == ["model"]
        assert {p: p.stat().st_mtime_ns for p in path.rglob("*") if p.is_file()} == files
    rename = os.rename
    with monkeypatch.context() as patched:  # between the two renames nothing is in its place
        patched.setattr(
            os, "rename", lambda a, b: interrupt() if str(b) == str(path) else rename(a, b)
        )
        with pytest.raises(KeyboardInterrupt):
            save_model(trained, path)
    assert not path.exists()
    found = load_model(path, metrics=[])
    assert int(found.optimizer.iterations) == steps + 1
    assert_same(values(found), values(trained))
    save_model(trained, path)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    assert (path / "notes.txt").read_text() == "somebody else's"


@pytest.mark.usefixtures("quick")
def test_a_model_that_diverged_is_loaded_and_said_to_have(tmp_path):
    model, _ = fitted(ours, SCHEMA, WARM, steps=1)
    kernel = next(v for v in model.trainable_variables if v.shape.rank == 2)
    kernel.assign(tf.fill(kernel.shape, float("nan")))
    save_model(model, tmp_path / "model")
    with pytest.warns(UserWarning, match=r"1 of the \d+ weights in .*NaN or infinity.*diverged"):
        loaded = load_model(tmp_path / "model", metrics=[])
    assert_same(values(loaded), values(model))


@pytest.mark.usefixtures("quick")
def test_a_learning_rate_that_was_set_is_saved(tmp_path, trained):
    trained.optimizer.learning_rate = 0.25 * HOT.dense_lr
    save_model(trained, tmp_path / "model")
    loaded = load_model(tmp_path / "model", metrics=[])
    assert float(loaded.optimizer.lr) == float(trained.optimizer.lr) == np.float32(0.0025)
    # Without a fit, which would tell the length of its epochs, the warm-up is the saved one.
    assert loaded.optimizer.warmup_steps == trained.optimizer.warmup_steps > 0
    loaded.train_on_batch(*batch(SCHEMA))
    assert loaded.optimizer.warmup_steps == trained.optimizer.warmup_steps
    assert (
        float(loaded.optimizer.default_optimizer._decayed_lr(tf.float32))
        == float(trained.optimizer.default_optimizer._decayed_lr(tf.float32))
        == np.float32(0.0025)
    )
    checkpoint = tf.train.Checkpoint(optimizer=trained.optimizer).save(str(tmp_path / "c"))
    _, fresh = fitted(ours, SCHEMA, WARM, steps=1)
    tf.train.Checkpoint(optimizer=fresh).restore(checkpoint)
    assert float(fresh.lr) == np.float32(0.0025)
    assert fresh.warmup_steps == trained.optimizer.warmup_steps


@pytest.mark.arithmetic
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("when", ["before", "after"])
def test_what_was_set_on_the_parts_is_saved(tmp_path, when):
    tf.keras.utils.set_random_seed(0)
    model = ours(SCHEMA)
    optimizer = CowClipOptimizer.for_model(model, WARM, steps_per_epoch=5)
    clipped, unclipped, dense = optimizer.optimizers
    decay = tf.keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5)

    def set_them():
        dense.clipnorm, dense.epsilon, dense.learning_rate = 1e-3, 1e-2, 0.125
        clipped.beta_1, clipped.learning_rate, clipped.l2 = 0.5, 5e-2, 1e-2
        unclipped.learning_rate, unclipped.beta_2 = decay, 0.9

    if when == "before":
        set_them()
    model.compile(optimizer=optimizer, metrics=[])
    model.fit(dataset(SCHEMA, 3), verbose=0)
    if when == "after":
        set_them()
        model.compile(optimizer=optimizer, metrics=[])
    save_model(model, tmp_path / "model")
    loaded = load_model(tmp_path / "model", metrics=[])
    parts = loaded.optimizer.optimizers
    assert (parts[2].clipnorm, parts[2].epsilon, parts[0].l2) == (1e-3, 1e-2, 1e-2)
    assert float(parts[1].learning_rate(1)) == float(decay(1))
    assert parts[2].learning_rate.learning_rate == 0.125
    assert [float(p._get_hyper("beta_1")) for p in parts] == [0.5, np.float32(0.9), np.float32(0.9)]
    assert float(parts[1].beta_2) == np.float32(0.9)
    for m in (model, loaded):
        m.fit(dataset(SCHEMA, 4, first=3), verbose=0)
    assert_same(values(loaded), values(model))


@pytest.mark.usefixtures("quick")
def test_a_learning_rate_set_on_the_dense_part_after_a_step_is_saved(tmp_path):
    model, optimizer = fitted(ours, SCHEMA, WARM, steps_per_epoch=5)
    optimizer.default_optimizer.learning_rate = 0.125
    model.fit(dataset(SCHEMA, 1, first=3), verbose=0)
    save_model(model, tmp_path / "model")
    loaded = load_model(tmp_path / "model", metrics=[])
    for m in (model, loaded):
        m.fit(dataset(SCHEMA, 4, first=4), verbose=0)
    assert_same(values(loaded), values(model))
    assert loaded.optimizer.learning_rates().dense == 0.125


@pytest.mark.arithmetic
@pytest.mark.parametrize("has_stepped", [False, True])
def test_a_learning_rate_set_on_the_dense_part_is_in_a_checkpoint(tmp_path, has_stepped):
    """One that nobody set is not: older checkpoints hold nothing of it, and are still whole."""
    model, optimizer = fitted(ours, SCHEMA, WARM, steps_per_epoch=5)
    older = tf.train.Checkpoint(model=model, optimizer=optimizer).save(str(tmp_path / "older"))
    names = [name for name, _ in tf.train.list_variables(older) if "SLOT" not in name]
    assert not [name for name in names if "warmup" in name and "warmup_steps" not in name]
    optimizer.default_optimizer.learning_rate = 0.125
    newer = tf.train.Checkpoint(model=model, optimizer=optimizer).save(str(tmp_path / "newer"))
    before = values(model)
    model.fit(dataset(SCHEMA, 4, first=3), verbose=0)
    if has_stepped:
        again, fresh = fitted(ours, SCHEMA, WARM, steps_per_epoch=5)
        checkpoint = tf.train.Checkpoint(model=again, optimizer=fresh)
        checkpoint.restore(older).assert_existing_objects_matched()
        assert float(fresh.default_optimizer.learning_rate(100)) == np.float32(WARM.dense_lr)
    else:
        again = built(ours, SCHEMA)
        fresh = CowClipOptimizer.for_model(again, WARM, steps_per_epoch=5)
        again.compile(optimizer=fresh, metrics=[])
        checkpoint = tf.train.Checkpoint(model=again, optimizer=fresh)
    status = checkpoint.restore(newer)
    assert_same(values(again), before)
    again.fit(dataset(SCHEMA, 4, first=3), verbose=0)
    status.assert_consumed()
    assert_same(values(again), values(model))


@pytest.mark.arithmetic
@pytest.mark.parametrize("way", ["checkpoint", "weights", "loss scale"])
def test_a_restore_takes_back_a_learning_rate_set_on_the_dense_part(tmp_path, way):
    """As Keras restores one that does not warm up: what was set later stood, 50 times too high."""
    model, optimizer = fitted(ours, SCHEMA, WARM, steps_per_epoch=5)
    if way == "loss scale":
        scaled = tf.keras.mixed_precision.LossScaleOptimizer(optimizer)
        model.compile(optimizer=scaled, metrics=[])
        model.fit(dataset(SCHEMA, 1, first=2), verbose=0)
    path = str(tmp_path / "c")
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    if way == "weights":
        model.save_weights(path)
    else:
        path = checkpoint.save(path)
    model.fit(dataset(SCHEMA, 3, first=3), verbose=0)
    expected, told = values(model), optimizer.learning_rates()
    for rates in ((0.5, 0.125), (0.25, 0.5)):
        dense, clipped = optimizer.default_optimizer, optimizer.optimizers[0]
        dense.learning_rate, clipped.learning_rate = rates
        model.fit(dataset(SCHEMA, 1), verbose=0)
        status = model.load_weights(path) if way == "weights" else checkpoint.restore(path)
        status.assert_existing_objects_matched()
        assert float(dense.warmup_height) == np.float32(WARM.dense_lr)
        model.fit(dataset(SCHEMA, 3, first=3), verbose=0)
        assert_same(values(model), expected)
        assert optimizer.learning_rates() == told
    # Into one that has not stepped yet, where something else was set.
    fresh = CowClipOptimizer.for_model(built(ours, SCHEMA), WARM, steps_per_epoch=5)
    fresh.default_optimizer.learning_rate = 0.5
    if way == "checkpoint":
        tf.train.Checkpoint(optimizer=fresh).restore(path).assert_existing_objects_matched()
        assert float(fresh.default_optimizer.warmup_height) == np.float32(WARM.dense_lr)
        fresh.default_optimizer.learning_rate = 0.25  # since: it counts
        fresh.create_slots(fresh._model().trainable_variables)
        assert float(fresh.default_optimizer.warmup_height) == 0.25


@pytest.mark.arithmetic
@pytest.mark.parametrize("saved", ["as made", "as set"])
@pytest.mark.parametrize("warmup", [0.0, 1.0])
def test_a_learning_rate_set_after_a_restore_counts(tmp_path, warmup, saved):
    """In one that has not stepped yet, its first step took the checkpoint's: ten times too high."""
    hp = WARM.replace(warmup_epochs=warmup)
    model, optimizer = fitted(ours, SCHEMA, hp, steps_per_epoch=2)
    if saved == "as set":
        for one in (optimizer, *optimizer.optimizers):
            one.learning_rate = 0.75
    model.save_weights(tmp_path / "w")
    again = built(ours, SCHEMA)
    fresh = CowClipOptimizer.for_model(again, hp, steps_per_epoch=2)
    again.compile(fresh, metrics=[])
    again.load_weights(tmp_path / "w")
    if warmup:  # known before the first step, and what is refused changes nothing
        height = 0.75 if saved == "as set" else hp.dense_lr
        dense = fresh.default_optimizer
        assert float(dense.warmup_height) == np.float32(height)
        with pytest.raises(ValueError, match="learning_rate must be"):
            dense.learning_rate = -1.0
        assert float(dense.warmup_height) == np.float32(height)
    fresh.learning_rate = hp.dense_lr / 2
    fresh.default_optimizer.learning_rate = 0.25
    fresh.optimizers[0].learning_rate = 0.125
    again.fit(dataset(SCHEMA, 3), verbose=0)
    assert fresh.learning_rates() == (0.125, 0.0625)
    assert int(fresh.iterations) == int(optimizer.iterations) + 3  # all else was restored


@pytest.mark.parametrize("rate", [-0.01, float("nan"), np.float32("inf")])
def test_a_part_refuses_a_rate_that_is_none(rate):
    """As the whole does; it trained uphill, or to NaN."""
    model = built(ours, SCHEMA)
    optimizer = CowClipOptimizer.for_model(model, WARM.replace(warmup_epochs=0.0))
    for part in optimizer.optimizers:
        before = part.learning_rate
        with pytest.raises(ValueError, match="learning_rate must be a number that is not neg"):
            part.learning_rate = rate
        assert part.learning_rate == before


@pytest.mark.usefixtures("quick")
def test_numbers_of_numpy_are_saved_as_pythons(tmp_path):
    """JSON takes none of them: the call ended after the training, with TypeError."""
    schedules = tf.keras.optimizers.schedules
    borders = list(np.array([3, 6]))
    model, optimizer = fitted(
        ours,
        SCHEMA,
        WARM,
        steps=1,
        steps_per_epoch=np.int64(8),
        dense_schedule=schedules.CosineDecay(np.float32(0.5), np.int32(100)),
        embedding_schedule=schedules.PiecewiseConstantDecay(borders, [1e-3, 1e-4, 1e-5]),
    )
    save_model(model, tmp_path / "model")
    loaded = load_model(tmp_path / "model", metrics=[]).optimizer
    assert repr(loaded.steps_per_epoch) == "8"
    assert loaded.dense_schedule.get_config()["decay_steps"] == 100
    assert loaded.embedding_schedule.get_config()["boundaries"] == [3, 6]
    assert loaded.learning_rates() == optimizer.learning_rates()


@pytest.mark.usefixtures("quick")
def test_a_schedule_that_json_cannot_hold_is_refused_before_anything_is_written(tmp_path):
    class Own(tf.keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return tf.constant(1e-3)

        def get_config(self):
            return {"made_with": object()}

    with tf.keras.utils.custom_object_scope({"Own": Own}):
        model, _ = fitted(ours, SCHEMA, steps=1, embedding_schedule=Own())
        with pytest.raises(ValueError, match="configuration .* must be .* Received: an? object"):
            save_model(model, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("quick")
def test_functions_on_a_part_are_said_not_to_be_saved(tmp_path, trained):
    dense = trained.optimizer.default_optimizer
    dense.gradient_transformers.append(lambda pairs: pairs)
    try:
        with pytest.warns(UserWarning, match="gradient_transformers of 'dense'.*not saved") as said:
            save_model(trained, tmp_path / "model")
    finally:
        dense.gradient_transformers.clear()
    assert said[0].filename == __file__


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("listed", [False, True])
def test_loss_weights_are_saved(tmp_path, listed):
    targets = [TARGET.with_name(name) for name in ("y", "z")]
    schema = Schema([category("a", 50), *targets])
    model = mm.Model(mm.InputBlockV2(schema.excluding_by_tag(Tags.TARGET)), mm.OutputBlock(schema))
    optimizer = CowClipOptimizer.for_model(model, HOT)
    model.compile(optimizer=optimizer, metrics=[])
    names = sorted(model.loss)
    weights = [1.0, 0.0] if listed else dict(zip(names, (1.0, 0.0), strict=True))
    model.compile(optimizer=optimizer, metrics=[], loss_weights=weights)
    features, y = batch(SCHEMA.select_by_name(["a", "y"]))
    y = next(iter(y.values())) if isinstance(y, dict) else y
    data = tf.data.Dataset.from_tensors((features, {"y": y, "z": 1.0 - y}))
    model.fit(data, verbose=0)
    save_model(model, tmp_path / "model")
    loaded = load_model(tmp_path / "model", metrics=[])
    losses = [m.evaluate(data, verbose=0, return_dict=True)["loss"] for m in (model, loaded)]
    assert losses[0] == losses[1]
    model.compile(optimizer=optimizer, metrics=[])
    whole = model.evaluate(data, verbose=0, return_dict=True)["loss"]
    given = load_model(tmp_path / "model", metrics=[], loss_weights=None)
    assert given.evaluate(data, verbose=0, return_dict=True)["loss"] == whole != losses[0]


@pytest.mark.usefixtures("quick")
def test_a_model_saved_before_the_learning_rate_was_part_of_it(tmp_path, trained):
    save_model(trained, tmp_path / "model")
    file = tmp_path / "model/merlin_cowclip/state.json"
    description = json.loads(file.read_text())
    assert description.pop("learning_rate")
    assert description.pop("parts")
    description["optimizer"]["steps_per_epoch"] = description.pop("warmup_steps")
    file.write_text(json.dumps({**description, "format": 1}))
    loaded = load_model(tmp_path / "model", metrics=[])
    assert_same(slots(loaded.optimizer), slots(trained.optimizer))
    loaded.fit(dataset(SCHEMA, 1), verbose=0)


def test_a_plain_save_has_nothing_to_warn_of(tmp_path, trained, recwarn):
    trained.save(str(tmp_path / "model"))
    assert [w.message for w in recwarn if "CowClip" in str(w.message)] == []
    with pytest.warns(UserWarning, match=r"start anew.*load_model"):
        mm.Model.load(str(tmp_path / "model"))


@pytest.mark.usefixtures("quick")
def test_a_loss_of_ones_own_is_asked_for(tmp_path, trained):
    class Squared(tf.keras.losses.Loss):
        def call(self, targets, outputs):
            return tf.reduce_mean(tf.square(targets - outputs), axis=-1)

    trained.compile(optimizer=trained.optimizer, loss=Squared(), metrics=[])
    trained.fit(dataset(SCHEMA, 1), verbose=0)
    with tf.keras.utils.custom_object_scope({"Squared": Squared}):
        save_model(trained, tmp_path / "model")
    with pytest.raises(ValueError, match=r"must be known to Keras. Received: 'Squared'.*loss=…"):
        load_model(tmp_path / "model", metrics=[])
    loaded = load_model(tmp_path / "model", metrics=[], loss=Squared())
    for m in (trained, loaded):
        m.fit(dataset(SCHEMA, 1, first=7), verbose=0)
    assert_same(values(loaded), values(trained))


LOSSES = {
    "by name": "mse",
    "an object": tf.keras.losses.BinaryCrossentropy(label_smoothing=0.1),
    "a function": tf.keras.losses.mean_absolute_error,
    "by output": {"first": "mse", "second": "mae"},
    "a list": ["mae", "mse"],
    "of one output alone": ["mae", None],
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_keras_model_goes_on_with_the_loss_that_it_was_compiled_with(tmp_path, loss):
    """With a regularizer it went on with that alone, and no word."""
    ids = tf.keras.Input((1,), dtype=tf.int64)
    found = tf.keras.layers.Flatten()(tf.keras.layers.Embedding(50, 4)(ids))
    l2 = tf.keras.regularizers.L2(1e-4)
    names = ("first", "second")
    outputs = [
        tf.keras.layers.Dense(1, "sigmoid", kernel_regularizer=l2, name=name)(found)
        for name in names
    ]
    model = tf.keras.Model(ids, outputs)
    model.compile(optimizer=CowClipOptimizer.for_model(model, HOT), loss=loss)
    x = np.arange(32).reshape(-1, 1)
    y = [(x % 2).astype("f4"), (x % 3 > 1).astype("f4")]
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    save_model(model, tmp_path / "model")
    loaded = load_model(tmp_path / "model")
    losses = [
        m.fit(x, y, batch_size=8, shuffle=False, verbose=0).history["loss"] for m in (model, loaded)
    ]
    # Threads add the gradients of two outputs up in any order.
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)
    for mine, theirs in zip(values(loaded), values(model), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-7)


class Clicks(tf.keras.Model):
    """A team's own, whose class is not registered with Keras."""

    def __init__(self):
        super().__init__()
        schema = Schema([category("user", 20)])
        self.table, self.out = FusedEmbeddings(schema, 4), tf.keras.layers.Dense(1)

    def call(self, ids):
        return self.out(tf.reshape(self.table(ids), [-1, 4]))

    def get_config(self):
        return {}


@pytest.mark.parametrize("clip", [None, "adaptive_column"])
@pytest.mark.parametrize("update", ["exact", "deferred"])
def test_a_model_whose_class_keras_does_not_know_is_none_to_train_on(tmp_path, update, clip):
    """Its graph alone is loaded, in which rows neither catch up nor are counted."""
    model, x, y = Clicks(), {"user": np.arange(32).reshape(-1, 1) % 20}, np.arange(32) % 2
    model(x)
    hp = HOT.replace(clip=clip, embedding_lr=1e-3, l2=1e-5)
    optimizer = CowClipOptimizer.for_model(model, hp, update=update, steps_per_epoch=4)
    model.compile(optimizer, "mse")
    model.fit(x, y, batch_size=8, verbose=0)
    save_model(model, tmp_path / "model")
    words = r"without its class 'Clicks', as the graph .*custom_object_scope\({'Clicks': Clicks}\)"
    if update == "deferred":
        with pytest.raises(ValueError, match=words):
            load_model(tmp_path / "model")
    elif clip is None:
        load_model(tmp_path / "model")  # nothing is counted
    else:
        with pytest.warns(UserWarning, match=words):
            loaded = load_model(tmp_path / "model")
        np.testing.assert_allclose(loaded(x), model(x), rtol=0, atol=1e-6)
    with tf.keras.utils.custom_object_scope({"Clicks": Clicks}):
        loaded = load_model(tmp_path / "model")
    for one in (model, loaded):
        one.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    assert_same(loaded.get_weights(), model.get_weights())


@pytest.mark.parametrize("update", ["exact", "deferred"])
def test_a_frozen_part_whose_class_keras_does_not_know_may_be_trained_on(tmp_path, update):
    """A tower that was trained before: its rows neither wait nor are counted."""
    before, ids = Clicks(), {"user": np.arange(32).reshape(-1, 1) % 20}
    before(ids)
    before.save(tmp_path / "tower")
    tower = tf.keras.models.load_model(tmp_path / "tower", compile=False)
    tower.trainable = False
    inputs = {"user": tf.keras.Input([1], name="user", dtype=tf.int64)}
    own = Clicks()
    model = tf.keras.Model(inputs, tower(inputs) + own(inputs))
    hp = HOT.replace(embedding_lr=1e-3, l2=1e-5, clip=None if update == "deferred" else HOT.clip)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        optimizer = CowClipOptimizer.for_model(model, hp, update=update)
    model.compile(optimizer, "mse")
    start, trained = model.predict(ids, verbose=0), own(ids)
    model.fit(ids, np.arange(32) % 2, batch_size=8, verbose=0)
    moved = own(ids) - trained
    np.testing.assert_allclose(model.predict(ids, verbose=0), start + moved, rtol=0, atol=1e-6)
    assert np.abs(moved).max() > 1e-3
    tower.trainable = True
    model.compile(optimizer, "mse")
    words = "without its class 'Clicks'" if update == "deferred" else "were not recorded"
    with pytest.raises(ValueError, match=words):
        model.fit(ids, np.arange(32) % 2, batch_size=8, verbose=0)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("frozen", [0, 1])
def test_of_tables_that_are_alike_the_frozen_one_stays_frozen(tmp_path, frozen):
    """One name, shape and content, as with given values: the place among the layers tells."""
    schema = Schema([category("a", 50), category("b", 50), TARGET])
    features = schema.excluding_by_tag(Tags.TARGET)
    tables = mm.Embeddings(features, dim=4, embeddings_initializer="zeros")
    model = mm.Model(mm.InputBlockV2(features, categorical=tables), mm.BinaryOutput("y"))
    model({name: tf.constant([[1], [2]]) for name in ("a", "b")})
    optimizer = CowClipOptimizer.for_model(model, HOT.replace(init_stddev=0.0))
    optimizer.table_specs[frozen].layer.trainable = False
    model.compile(optimizer=optimizer, metrics=[])
    save_model(model, tmp_path / "model")
    loaded = load_model(tmp_path / "model", metrics=[])
    trained = {spec.name: spec.layer.trainable for spec in loaded.optimizer.table_specs}
    assert trained == {"a": frozen != 0, "b": frozen != 1}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("kind", ["function", "class"])
def test_a_loss_of_ones_own_by_a_name_of_keras_is_asked_for(tmp_path, trained, kind):
    """Else training would go on with Keras's."""

    def mse(targets, outputs):
        return 9.0 * tf.reduce_mean(tf.square(targets - outputs), axis=-1)

    class MeanSquaredError(tf.keras.losses.Loss):
        def call(self, targets, outputs):
            return mse(targets, outputs)

    (name,) = trained.loss
    given = {"function": mse, "class": MeanSquaredError()}[kind]
    trained.compile(optimizer=trained.optimizer, loss={name: given}, metrics=[])
    trained.fit(dataset(SCHEMA, 1), verbose=0)
    save_model(trained, tmp_path / "model")
    with pytest.raises(ValueError, match=r"must be known to Keras. Received: 'test.*(mse|Mean).*'"):
        load_model(tmp_path / "model", metrics=[])
    load_model(tmp_path / "model", metrics=[], loss=MeanSquaredError())
    trained.compile(optimizer=trained.optimizer, loss={name: tf.keras.losses.mse}, metrics=[])
    save_model(trained, tmp_path / "model")
    assert load_model(tmp_path / "model", metrics=[]).loss == {name: tf.keras.losses.mse}


@pytest.mark.usefixtures("quick")
def test_a_schedule_of_ones_own_by_a_name_of_keras_is_refused(tmp_path):
    class CosineDecay(tf.keras.optimizers.schedules.CosineDecay):
        def __call__(self, step):
            return 0.5 * super().__call__(step)

    schedule = CosineDecay(0.1, 10)
    model, _ = fitted(ours, SCHEMA, HOT, steps=1, embedding_schedule=schedule)
    with pytest.raises(ValueError, match="'clipped' is a 'CosineDecay', a name of another class"):
        save_model(model, tmp_path / "model")
    assert not any(tmp_path.iterdir())


@pytest.mark.arithmetic
@pytest.mark.parametrize("update", ["exact", "lazy"])
@pytest.mark.parametrize("when", ["before", "after", "thawed"])
def test_a_frozen_layer_is_saved_and_stays_frozen(tmp_path, when, update):
    tf.keras.utils.set_random_seed(0)
    model = built(ours, SCHEMA)
    dense = next(x for x in model._flatten_layers() if isinstance(x, tf.keras.layers.Dense))
    dense.trainable = when == "after"
    optimizer = CowClipOptimizer.for_model(model, HOT, update=update)
    how = {"metrics": [], "run_eagerly": update == "lazy"}
    model.compile(optimizer=optimizer, **how)
    model.fit(dataset(SCHEMA, 2), verbose=0)
    dense.trainable = when == "thawed"  # then it has no slots yet
    model.compile(optimizer=optimizer, **how)
    with quick_saves(traces=update == "exact"):
        save_model(model, tmp_path / "model")
    loaded = load_model(tmp_path / "model", **how)
    assert len(loaded.trainable_variables) == len(model.trainable_variables)
    for m in (model, loaded):
        m.fit(dataset(SCHEMA, 2, first=2), verbose=0)
    by_name = {v.name: v.numpy() for v in loaded.weights}
    for v in model.weights:
        np.testing.assert_array_equal(by_name[v.name], v.numpy())


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("chosen", [[Tags.USER], ["a"], [Tags.USER, "c"]])
def test_fields_of_a_fused_table_are_clipped_by_tag_or_name_as_before(tmp_path, chosen, is_old):
    """And from a folder of before, in which a tag was written as a layer, which has all fields."""
    columns = [category("a", 50), category("b", 70), category("c", 9)]
    columns[0] = columns[0].with_tags([*columns[0].tags, Tags.USER])
    model = deepfm(Schema([*columns, TARGET]), embedding_dim=4, mlp=(4,))
    model.compile(CowClipOptimizer.for_model(model, HOT, clip_tables=chosen), metrics=[])
    model.fit(dataset(Schema([*columns, TARGET]), 1), verbose=0)
    save_model(model, tmp_path / "model")
    if is_old:
        (path,) = (tmp_path / "model").rglob("*.json")
        saved = json.loads(path.read_text())
        of_tags = [[0] if isinstance(one, Tags) else None for one in chosen]
        path.write_text(json.dumps({**saved, "clip_layers": of_tags}))
    loaded = load_model(tmp_path / "model", metrics=[])
    of = [sorted(m.optimizer._clipped_ranges().values()) for m in (model, loaded)]
    assert of[0] == of[1] == [(True, False, "c" in chosen)] * 2


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("frozen", [False, True])
def test_layers_of_clip_tables_are_the_same_ones_again(tmp_path, frozen):
    """Of two tables of one name; also where what was to be clipped has been frozen since."""
    schema = Schema([category("a", 50), category("b", 70)])
    towers = {
        f"w{dim}": mm.SequentialBlock([mm.Embeddings(schema, dim=dim), mm.MLPBlock([2])])
        for dim in (1, 4)
    }
    model = mm.Model(mm.ParallelBlock(towers, aggregation="concat"), mm.BinaryOutput("y"))
    features, _ = batch(schema)
    model(features)

    def table(model, dim):
        tables = (x for x in model._flatten_layers() if isinstance(x, mm.EmbeddingTable))
        return next(x for x in tables if x.dim == dim and "a" in x.features)

    def rules(model):
        return sorted((tuple(o.variable.shape), o.rule) for o in model.optimizer.owned())

    optimizer = CowClipOptimizer.for_model(model, HOT, clip_tables=[table(model, 4), "b"])
    model.compile(optimizer=optimizer, metrics=[])
    table(model, 4).trainable = not frozen
    before = rules(model)
    assert ((50, 1), "no clip, exact Adam") in before
    save_model(model, tmp_path / "model")
    loaded = load_model(tmp_path / "model", metrics=[])
    assert rules(loaded) == before
    assert loaded.optimizer.get_config() == optimizer.get_config()
    for m in (model, loaded):
        table(m, 4).trainable = True
    assert rules(loaded) == rules(model)
    assert ((50, 4), "clip adaptive_column, exact Adam") in rules(loaded)


def test_a_loaded_model_tells_whose_warm_up_it_goes_on_with(tmp_path):
    model = built(ours, SCHEMA)
    optimizer = CowClipOptimizer.for_model(model, HOT.replace(warmup_epochs=1.0))
    model.compile(optimizer=optimizer, metrics=[])
    model.fit(dataset(SCHEMA, 2), verbose=0)
    save_model(model, tmp_path / "m")
    again = load_model(tmp_path / "m")
    with pytest.warns(UserWarning, match="not known.*over 2 updates.*steps_per_epoch"):
        again.fit(dataset(SCHEMA, 4).filter(lambda *_: True), verbose=0)


@pytest.mark.arithmetic
def test_of_two_restores_before_the_first_step_the_last_one_counts(tmp_path):
    """The first one's learning rate stood where the second has none, as nothing was set by then."""
    model, optimizer = fitted(ours, SCHEMA, WARM, steps_per_epoch=5)
    checkpoint = tf.train.Checkpoint(model=model)
    without = checkpoint.save(str(tmp_path / "without"))
    optimizer.default_optimizer.learning_rate = 0.5
    having = checkpoint.save(str(tmp_path / "having"))
    for paths, rate in (((having, without), WARM.dense_lr), ((without, having), 0.5)):
        again = built(ours, SCHEMA)
        again.compile(CowClipOptimizer.for_model(again, WARM, steps_per_epoch=5), metrics=[])
        for path in paths:
            tf.train.Checkpoint(model=again).restore(path)
        again.fit(dataset(SCHEMA, 1), verbose=0)
        assert float(again.optimizer.default_optimizer.warmup_height) == np.float32(rate)


def test_a_checkpoint_of_before_the_length_was_known_leaves_it(tmp_path):
    """It took the length away, and the next step of a graph made NaN of all dense weights."""
    model = built(ours, SCHEMA)
    model.compile(CowClipOptimizer.for_model(model, WARM), metrics=[])
    model.optimizer.create_slots(model.trainable_variables)
    checkpoint = tf.train.Checkpoint(model=model)
    path = checkpoint.save(str(tmp_path / "beginning"))
    model.fit(dataset(SCHEMA, 3), verbose=0)
    length = model.optimizer.warmup_steps
    checkpoint.restore(path)
    assert length is not None
    assert model.optimizer.warmup_steps == length
    model.train_on_batch(*batch(SCHEMA))
    assert all(np.isfinite(value).all() for value in values(model))
