"""State is whole: checkpoints, Keras's BackupAndRestore, save_model and load_model."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from merlin_cowclip.models import deepfm
from merlin_cowclip.plugins import CowClipOptimizer, load_model, save_model
from merlin_cowclip.plugins._tensorflow import Schema, Tags, mm

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


@pytest.mark.parametrize(
    ("builder", "update"),
    [(ours, "exact"), pytest.param(stock_dlrm, "lazy", marks=pytest.mark.extended)],
)
def test_training_goes_on_as_if_never_stopped(tmp_path, builder, update):
    model, optimizer = fitted(builder, SCHEMA, WARM, update=update, steps_per_epoch=5)
    save_model(model, tmp_path / "model")
    loaded = load_model(tmp_path / "model", metrics=[])
    assert loaded.optimizer.get_config() == optimizer.get_config()
    assert_same(slots(loaded.optimizer), slots(optimizer))
    assert int(loaded.optimizer.iterations) == 3
    assert len(loaded.optimizer.variables()) == len(optimizer.variables())
    for m in (model, loaded):
        m.fit(dataset(SCHEMA, 4, first=3), verbose=0)
    assert_same(values(loaded), values(model))
    assert_same(slots(loaded.optimizer), slots(optimizer))


@pytest.mark.extended
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


@pytest.mark.extended
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


@pytest.mark.extended
def test_a_plain_load_predicts_and_is_not_compiled(tmp_path):
    """Its optimizer would have lost its state."""
    model, _ = fitted(ours, SCHEMA)
    save_model(model, tmp_path / "model")
    plain = mm.Model.load(str(tmp_path / "model"))
    assert plain.optimizer is None
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
    with pytest.raises(ValueError, match="must be of format 4. Received: 99"):
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


@pytest.mark.extended
@pytest.mark.usefixtures("quick")
def test_a_model_that_diverged_is_loaded_as_it_is(tmp_path):
    model, _ = fitted(ours, SCHEMA, WARM, steps=1)
    kernel = next(v for v in model.trainable_variables if v.shape.rank == 2)
    kernel.assign(tf.fill(kernel.shape, float("nan")))
    save_model(model, tmp_path / "model")
    assert_same(values(load_model(tmp_path / "model", metrics=[])), values(model))


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


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("when", ["before", pytest.param("after", marks=pytest.mark.extended)])
def test_what_was_set_on_the_parts_is_saved(tmp_path, when):
    tf.keras.utils.set_random_seed(0)
    model = ours(SCHEMA)
    optimizer = CowClipOptimizer.for_model(model, WARM, steps_per_epoch=5)
    clipped, unclipped, dense = optimizer.optimizers

    def set_them():
        dense.clipnorm, dense.epsilon = 1e-3, 1e-2
        clipped.beta_1, clipped.l2 = 0.5, 1e-2
        unclipped.beta_2 = 0.9

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
    assert [float(p._get_hyper("beta_1")) for p in parts] == [0.5, np.float32(0.9), np.float32(0.9)]
    assert float(parts[1].beta_2) == np.float32(0.9)
    for m in (model, loaded):
        m.fit(dataset(SCHEMA, 4, first=3), verbose=0)
    assert_same(values(loaded), values(model))


@pytest.mark.usefixtures("quick")
def test_a_schedule_that_json_cannot_hold_is_refused_before_anything_is_written(tmp_path):
    class Own(tf.keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return tf.constant(1e-3)

        def get_config(self):
            return {"made_with": object()}

    with tf.keras.utils.custom_object_scope({"Own": Own}):
        model, _ = fitted(ours, SCHEMA, steps=1, embedding_schedule=Own())
        with pytest.raises(ValueError, match=r"cannot load embedding_schedule, a Own.*of num"):
            save_model(model, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
    Own.get_config = lambda self: {}
    with pytest.raises(ValueError, match="cannot load embedding_schedule, a Own.*Register"):
        save_model(model, tmp_path / "model")


@pytest.mark.usefixtures("quick")
def test_a_clip_layer_is_saved_by_its_name(tmp_path):
    model = stock_dlrm(SCHEMA)
    table = next(x for x in model._flatten_layers() if isinstance(x, mm.EmbeddingTable))
    optimizer = CowClipOptimizer.for_model(model, HOT, clip_tables=[table])
    model.compile(optimizer=optimizer, metrics=[])
    model.fit(dataset(SCHEMA, 1), verbose=0)
    save_model(model, tmp_path / "model")
    clipped = load_model(tmp_path / "model", metrics=[]).optimizer.clipped_ranges().values()
    assert list(clipped) == list(optimizer.clipped_ranges().values()) == [(True,), (False,)]


@pytest.mark.extended
def test_a_table_in_a_layer_whose_class_keras_does_not_know_is_refused(tmp_path):
    class Own(tf.keras.layers.Layer):
        def __init__(self, **named):
            super().__init__(**named)
            self.table = tf.keras.layers.Embedding(50, 4)

        def call(self, ids):
            return tf.reduce_sum(self.table(ids), axis=1)

    ids = tf.keras.Input((1,), dtype=tf.int64)
    model = tf.keras.Model(ids, tf.keras.layers.Dense(1)(Own()(ids)))
    model.compile(optimizer=CowClipOptimizer.for_model(model, HOT), loss="mse")
    model.fit(np.arange(8)[:, None], np.ones(8), verbose=0)
    save_model(model, tmp_path / "model")
    with pytest.raises(ValueError, match="Cannot count the ids of table|no lookup"):
        load_model(tmp_path / "model").fit(np.arange(8)[:, None], np.ones(8), verbose=0)
    with tf.keras.utils.custom_object_scope({"Own": Own}):
        assert_same(values(load_model(tmp_path / "model")), values(model))


LOADS = """
from merlin_cowclip.plugins import load_model
print(load_model("model").optimizer.iterations.numpy(), "updates")
"""


@pytest.mark.extended
def test_a_fresh_process_needs_no_import_of_the_models(tmp_path, trained):
    save_model(trained, tmp_path / "model")
    done = subprocess.run(
        [sys.executable, "-c", LOADS], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{int(trained.optimizer.iterations)} updates\n"


@pytest.mark.usefixtures("quick")
@pytest.mark.extended
def test_loss_weights_are_saved(tmp_path):
    targets = [TARGET.with_name(name) for name in ("y", "z")]
    schema = Schema([category("a", 50), *targets])
    model = mm.Model(mm.InputBlockV2(schema.excluding_by_tag(Tags.TARGET)), mm.OutputBlock(schema))
    optimizer = CowClipOptimizer.for_model(model, HOT)
    model.compile(optimizer=optimizer, metrics=[])
    weights = dict(zip(sorted(model.loss), (1.0, 0.0), strict=True))
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


LOSSES = {
    "by name": "mse",
    "an object": tf.keras.losses.BinaryCrossentropy(label_smoothing=0.1),
    "by output": {"first": "mse", "second": "mae"},
}


@pytest.mark.extended
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


def test_a_loss_that_keras_does_not_know_is_asked_for(tmp_path):
    def own(labels, outputs):
        return tf.square(labels - outputs)

    model = tf.keras.Sequential([tf.keras.layers.Embedding(9, 2), tf.keras.layers.Dense(1)])
    optimizer = CowClipOptimizer.for_model(model, HOT)
    model.compile(optimizer=optimizer, loss=own)
    model.fit(np.ones((4, 1)), np.ones((4, 1, 1)), verbose=0)
    save_model(model, tmp_path / "model")
    with pytest.raises(ValueError, match="loss must be known to Keras.*own.*Give load_model loss="):
        load_model(tmp_path / "model")
    assert_same(values(load_model(tmp_path / "model", loss=own)), values(model))


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("when", ["after", pytest.param("thawed", marks=pytest.mark.extended)])
def test_a_frozen_layer_is_saved_and_stays_frozen(tmp_path, when):
    tf.keras.utils.set_random_seed(0)
    model = built(ours, SCHEMA)
    dense = next(x for x in model._flatten_layers() if isinstance(x, tf.keras.layers.Dense))
    dense.trainable = when == "after"
    optimizer = CowClipOptimizer.for_model(model, HOT, update="lazy")
    how = {"metrics": [], "run_eagerly": True}
    model.compile(optimizer=optimizer, **how)
    model.fit(dataset(SCHEMA, 2), verbose=0)
    dense.trainable = when == "thawed"  # then it has no slots yet
    model.compile(optimizer=optimizer, **how)
    save_model(model, tmp_path / "model")
    loaded = load_model(tmp_path / "model", **how)
    assert len(loaded.trainable_variables) == len(model.trainable_variables)
    for m in (model, loaded):
        m.fit(dataset(SCHEMA, 2, first=2), verbose=0)
    by_name = {v.name: v.numpy() for v in loaded.weights}
    for v in model.weights:
        np.testing.assert_array_equal(by_name[v.name], v.numpy())


@pytest.mark.usefixtures("quick")
def test_settings_that_merlin_leaves_out_are_saved(tmp_path):
    """Without `output_x0`, each `Cross` layer is the first; without logQ, another loss."""
    model = built(lambda schema: mm.DCNModel(schema, 3, deep_block=mm.MLPBlock([4])), SCHEMA)
    model.compile(CowClipOptimizer.for_model(model, HOT), metrics=[])
    for variable in model.trainable_variables:
        variable.assign(tf.random.stateless_normal(variable.shape, (1, 2)))
    save_model(model, tmp_path / "model")
    features, _ = batch(SCHEMA)
    loaded = load_model(tmp_path / "model", metrics=[])
    np.testing.assert_allclose(loaded(features), model(features), rtol=1e-5)
    output = mm.ContrastiveOutput(category("a", 50), "in-batch", logq_sampling_correction=True)
    assert output.get_config()["logq_sampling_correction"] is True


@pytest.mark.usefixtures("quick")
def test_fields_of_a_fused_table_are_clipped_by_tag_or_name_as_before(tmp_path):
    columns = [category("a", 50), category("b", 70), category("c", 9)]
    columns[0] = columns[0].with_tags([*columns[0].tags, Tags.USER])
    model = deepfm(Schema([*columns, TARGET]), embedding_dim=4, mlp=(4,))
    model.compile(CowClipOptimizer.for_model(model, HOT, clip_tables=[Tags.USER, "c"]), metrics=[])
    model.fit(dataset(Schema([*columns, TARGET]), 1), verbose=0)
    save_model(model, tmp_path / "model")
    loaded = load_model(tmp_path / "model", metrics=[])
    of = [sorted(m.optimizer.clipped_ranges().values()) for m in (model, loaded)]
    assert of[0] == of[1] == [(True, False, True)] * 2
