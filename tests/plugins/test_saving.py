"""State is whole: checkpoints, Keras's BackupAndRestore, save_model and load_model."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tensorflow as tf

from merlin_cowclip.plugins import CowClipOptimizer, load_model, save_model
from merlin_cowclip.plugins._stack import mm

from .merlin_models import SCHEMA, batch, dataset, stock_dlrm
from .test_optimizer import HOT, fitted, ours

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


@pytest.mark.parametrize("update", ["exact", "lazy"])
@pytest.mark.parametrize("builder", [ours, stock_dlrm])
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
    # Once more, after compiling again with the same optimizer.
    loaded.compile(optimizer=loaded.optimizer, metrics=[])
    save_model(loaded, tmp_path / "again")
    third = load_model(tmp_path / "again", metrics=[])
    assert_same(slots(third.optimizer), slots(optimizer))
    assert [int(p.iterations) for p in third.optimizer.optimizers] == [
        int(p.iterations) for p in optimizer.optimizers
    ]


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


def test_backup_and_restore(tmp_path):
    """Keras's own callback: a run that dies in its third epoch ends like one that does not."""

    class Die(tf.keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    def run(callbacks):
        tf.keras.utils.set_random_seed(0)
        model = ours(SCHEMA)
        optimizer = CowClipOptimizer.for_model(model, WARM, steps_per_epoch=3)
        model.compile(optimizer=optimizer, metrics=[])
        model.fit(dataset(SCHEMA, 3), epochs=4, verbose=0, callbacks=callbacks)
        return model

    whole = run([])
    backup = str(tmp_path / "backup")
    with pytest.raises(KeyboardInterrupt):
        run([tf.keras.callbacks.BackupAndRestore(backup), Die()])
    resumed = run([tf.keras.callbacks.BackupAndRestore(backup)])
    assert_same(values(resumed), values(whole))
    assert int(resumed.optimizer.iterations) == 12


def test_a_plain_load_works_and_warns(tmp_path):
    model, _ = fitted(ours, SCHEMA)
    save_model(model, tmp_path / "model")
    with pytest.warns(UserWarning, match=r"start anew.*load_model"):
        plain = mm.Model.load(str(tmp_path / "model"))
    features, _ = batch(SCHEMA)
    np.testing.assert_allclose(plain(features), model(features), atol=1e-6)


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
    with pytest.raises(ValueError, match="must be of format 1. Received: 99"):
        load_model(other)
    stock = ours(SCHEMA)
    stock.compile(optimizer="adam")
    with pytest.raises(ValueError, match="compiled with a CowClipOptimizer. Received: Adam"):
        save_model(stock, tmp_path / "stock")
