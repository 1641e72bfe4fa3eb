"""All state is saved: checkpoints, Keras's BackupAndRestore, save_model and load_model."""

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
from .merlin_models import HOT, SCHEMA, TARGET, batch, built, category, dataset, fitted, ours

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


@pytest.fixture(scope="module")
def trained():
    return fitted(ours, SCHEMA, WARM, steps=2)[0]


def test_training_continues_bit_identical(tmp_path):
    """With what was set on the parts."""
    tf.keras.utils.set_random_seed(0)
    model = ours(SCHEMA)
    optimizer = CowClipOptimizer.for_model(model, WARM, steps_per_epoch=5)
    clipped, unclipped, dense = optimizer.optimizers
    dense.clipnorm, dense.epsilon = 1e-3, 1e-2
    clipped.beta_1, clipped.l2 = 0.5, 1e-2
    unclipped.beta_2 = 0.9
    model.compile(optimizer=optimizer, metrics=[])
    model.fit(dataset(SCHEMA, 3), verbose=0)
    save_model(model, tmp_path / "model")
    loaded = load_model(tmp_path / "model", metrics=[])
    assert loaded.optimizer.get_config() == optimizer.get_config()
    assert int(loaded.optimizer.iterations) == 3
    assert len(loaded.optimizer.variables()) == len(optimizer.variables())
    for m in (model, loaded):
        m.fit(dataset(SCHEMA, 4, first=3), verbose=0)
    assert_same(values(loaded), values(model))
    assert_same(slots(loaded.optimizer), slots(optimizer))


@pytest.mark.extended
@pytest.mark.usefixtures("quick")
def test_mixed_precision_is_loaded_with_its_loss_scale(tmp_path):
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


@pytest.mark.usefixtures("quick")
def test_what_cannot_be_saved_or_loaded(tmp_path, trained):
    path, other = tmp_path / "model", tmp_path / "other"
    with pytest.raises(ValueError, match="must hold merlin_cowclip/state.json"):
        load_model(tmp_path)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "text").touch()
    with pytest.raises(ValueError, match="path must be a new or empty folder.*'text'"):
        save_model(trained, tmp_path / "notes")
    save_model(trained, path)
    trained.fit(dataset(SCHEMA, 1), verbose=0)
    save_model(trained, other)
    for name in ("state.index", "state.data-00000-of-00001"):
        (path / "merlin_cowclip" / name).write_bytes((other / "merlin_cowclip" / name).read_bytes())
    with pytest.raises(ValueError, match="must belong to the model beside it"):
        load_model(path)
    marker = other / "merlin_cowclip" / "state.json"
    text = marker.read_text()
    marker.write_text(json.dumps({**json.loads(text), "format": 99}))
    with pytest.raises(ValueError, match="must be of format 4. Received: 99"):
        load_model(other)
    stock = ours(SCHEMA)
    stock.compile(optimizer="adam")
    with pytest.raises(ValueError, match="compiled with a CowClipOptimizer. Received: Adam"):
        save_model(stock, tmp_path / "stock")


@pytest.mark.usefixtures("quick")
def test_a_save_that_fails_leaves_the_old_model(tmp_path, monkeypatch, trained):
    path = tmp_path / "model"
    save_model(trained, path)
    files = {p: p.stat().st_mtime_ns for p in path.rglob("*") if p.is_file()}
    steps = int(trained.optimizer.iterations)
    trained.fit(dataset(SCHEMA, 1), verbose=0)

    def interrupt(*arguments, **named):
        raise KeyboardInterrupt("injected")

    for owner, name in ((mm.Model, "save"), (tf.train.Checkpoint, "write")):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, interrupt)
            with pytest.raises(KeyboardInterrupt, match="injected"):
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
    loaded = load_model(path, metrics=[])
    assert int(loaded.optimizer.iterations) == steps + 1
    assert_same(values(loaded), values(trained))
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
    """Also in a checkpoint of TensorFlow's, with the moments."""
    trained.optimizer.learning_rate = 0.25 * HOT.dense_lr
    save_model(trained, tmp_path / "model")
    loaded = load_model(tmp_path / "model", metrics=[])
    checkpoint = tf.train.Checkpoint(model=trained, optimizer=trained.optimizer)
    path = checkpoint.save(str(tmp_path / "c"))
    again, fresh = fitted(ours, SCHEMA, WARM, steps=1)
    status = tf.train.Checkpoint(model=again, optimizer=fresh).restore(path)
    status.assert_existing_objects_matched()
    assert_same(values(again), values(trained))
    assert_same(slots(fresh), slots(trained.optimizer))
    for optimizer in (loaded.optimizer, fresh):
        assert float(optimizer.lr) == float(trained.optimizer.lr) == np.float32(0.0025)
        assert optimizer.warmup_steps == trained.optimizer.warmup_steps > 0


@pytest.mark.usefixtures("quick")
def test_a_schedule_that_keras_cannot_load_is_refused_before_anything_is_written(tmp_path):
    class Own(tf.keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return tf.constant(1e-3)

        def get_config(self):
            return {}

    model, _ = fitted(ours, SCHEMA, steps=1, embedding_schedule=Own())
    with pytest.raises(ValueError, match="cannot load embedding_schedule, a Own.*Register"):
        save_model(model, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


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
    plain = mm.Model.load(str(tmp_path / "model"))
    assert plain.optimizer is None  # it would have lost its state
    features, _ = batch(SCHEMA)
    np.testing.assert_allclose(plain(features), trained(features), atol=1e-6)


LOSSES = {
    "by name": "mse",
    "an object": tf.keras.losses.BinaryCrossentropy(label_smoothing=0.1),
    "by output": {"first": "mse", "second": "mae"},
}


@pytest.mark.extended
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_keras_model_continues_with_its_loss_and_loss_weights(tmp_path, loss):
    ids = tf.keras.Input((1,), dtype=tf.int64)
    embedded = tf.keras.layers.Flatten()(tf.keras.layers.Embedding(50, 4)(ids))
    l2 = tf.keras.regularizers.L2(1e-4)
    outputs = [
        tf.keras.layers.Dense(1, "sigmoid", kernel_regularizer=l2, name=name)(embedded)
        for name in ("first", "second")
    ]
    model = tf.keras.Model(ids, outputs)
    optimizer = CowClipOptimizer.for_model(model, HOT)
    model.compile(optimizer=optimizer, loss=loss, loss_weights=[1.0, 0.25])
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
    for a, b in zip(values(loaded), values(model), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


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
def test_a_frozen_layer_is_saved_and_stays_frozen(tmp_path):
    tf.keras.utils.set_random_seed(0)
    model = built(ours, SCHEMA)
    dense = next(x for x in model._flatten_layers() if isinstance(x, tf.keras.layers.Dense))
    optimizer = CowClipOptimizer.for_model(model, HOT, update="lazy")
    options = {"metrics": [], "run_eagerly": True}
    model.compile(optimizer=optimizer, **options)
    model.fit(dataset(SCHEMA, 2), verbose=0)
    dense.trainable = False
    model.compile(optimizer=optimizer, **options)
    save_model(model, tmp_path / "model")
    loaded = load_model(tmp_path / "model", **options)
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
    schema = Schema([category("a", 50, Tags.USER), category("b", 70), category("c", 9), TARGET])
    model = deepfm(schema, embedding_dim=4, mlp=(4,))
    model.compile(CowClipOptimizer.for_model(model, HOT, clip_tables=[Tags.USER, "c"]), metrics=[])
    model.fit(dataset(schema, 1), verbose=0)
    save_model(model, tmp_path / "model")
    loaded = load_model(tmp_path / "model", metrics=[])
    ranges = [sorted(m.optimizer.clipped_ranges().values()) for m in (model, loaded)]
    assert ranges == [[(True, False, True)] * 2] * 2
