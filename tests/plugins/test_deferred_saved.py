"""The deferred mode: what others save and restore holds rows as they are now; what is refused."""

from __future__ import annotations

import contextlib
import functools

import numpy as np
import pytest
import tensorflow as tf

from merlin_cowclip.models import FusedEmbeddings
from merlin_cowclip.plugins import CowClipOptimizer
from merlin_cowclip.plugins.deferrable import check_deferrable
from tests.plugins.test_deferred import HP, SIZES, batches, built, far, trained

pytestmark = pytest.mark.usefixtures("graphs_as_traced")


@functools.cache
def once_trained():
    model = trained("deferred", 30)
    return model, [variable.numpy() for variable in every_variable(model)]


def every_variable(model):
    found = (*model.variables, *model.optimizer.weights)
    return list({variable.ref(): variable for variable in found}.values())


def whose_rows_wait():
    """The same model each time, as it was: to trace its step takes seconds."""
    model, values = once_trained()
    for variable, value in zip(every_variable(model), values, strict=True):
        variable.assign(value)
    return model


def layer_of(model):
    layers = model._flatten_layers()
    return next(one for one in layers if isinstance(one, FusedEmbeddings) and one.dim > 1)


def current(model):
    model.optimizer.catch_up()
    return layer_of(model).table.numpy()


def table_in(path):
    reader = tf.train.load_checkpoint(str(path))
    shapes = reader.get_variable_to_shape_map()
    (name,) = (
        name
        for name, shape in shapes.items()
        if shape == [sum(SIZES.values()), 4] and "OPTIMIZER_SLOT" not in name
    )
    return reader.get_tensor(name)


def in_a_checkpoint(model, path):
    return table_in(tf.train.Checkpoint(model=model).write(str(path)))


def in_weights_of_a_model_that_shares_the_layer(model, path):
    other = tf.keras.Sequential([layer_of(model), tf.keras.layers.Flatten()])
    other(next(batches(1))[0])
    other.save_weights(str(path))
    return table_in(path)


def in_a_saved_model(model, path):
    """Of another model with the layer, whose optimizer does not go along."""
    x = next(batches(1))[0]
    inputs = {name: tf.keras.Input((1,), dtype=tf.int64, name=name) for name in x}
    other = tf.keras.Model(inputs, tf.keras.layers.Flatten()(layer_of(model)(inputs)))
    tf.keras.models.save_model(other, str(path))
    loaded = tf.keras.models.load_model(str(path), compile=False)
    np.testing.assert_array_equal(loaded(x), other(x))
    return layer_of(loaded).table.numpy()


def in_a_saved_model_of_tensorflow(model, path):
    class Shops(tf.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer_of(model)

    tf.saved_model.save(Shops(), str(path))
    return table_in(path / "variables" / "variables")


@pytest.mark.parametrize(
    "saved",
    [
        in_a_checkpoint,
        in_weights_of_a_model_that_shares_the_layer,
        in_a_saved_model,
        in_a_saved_model_of_tensorflow,
    ],
)
def test_rows_catch_up_before_anybody_saves_them(saved, tmp_path):
    model = whose_rows_wait()
    late = layer_of(model).table.numpy()
    found = saved(model, tmp_path / "saved")
    np.testing.assert_array_equal(found, current(model))
    assert np.abs(found - late).max() > 1e-3 * np.abs(found).max()


def test_rows_catch_up_before_anybody_restores_them(tmp_path):
    """Else they would catch up with steps after those that are restored."""
    model = whose_rows_wait()
    expected = current(model)
    path = tf.train.Checkpoint(layer=layer_of(model)).write(str(tmp_path / "layer"))
    model = whose_rows_wait()
    tf.train.Checkpoint(layer=layer_of(model)).read(path).assert_consumed()
    np.testing.assert_array_equal(current(model), expected)


def test_weights_of_the_optimizer_are_read_and_set():
    """Read before the model's, and set alone."""
    model = whose_rows_wait()
    state, weights = model.optimizer.get_weights(), model.get_weights()
    expected = current(model)
    model.set_weights(weights)
    model.optimizer.set_weights(state)
    np.testing.assert_array_equal(current(model), expected)
    model = whose_rows_wait()
    model.optimizer.set_weights(state)
    np.testing.assert_array_equal(current(model), expected)


@pytest.mark.parametrize("update", ["exact", "deferred"])
def test_an_outer_model_with_layers_of_its_own(update):
    """Whose `get_weights` would know of no rows that wait."""
    inner = built()
    optimizer = CowClipOptimizer.for_model(inner, HP, update=update)
    head = tf.keras.layers.Dense(1)
    x, y = next(batches(1))
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(head(inner(x)) - y))
    weights = [*inner.trainable_variables, *head.trainable_variables]
    pairs = list(zip(tape.gradient(loss, weights), weights, strict=True))
    if update == "exact":
        optimizer.apply_gradients(pairs)
        return
    with pytest.raises(ValueError, match=f"made for, '{inner.name}'.*first of '{head.name}/kernel"):
        optimizer.apply_gradients(pairs)
    assert int(optimizer.iterations) == 0


@pytest.mark.parametrize(
    ("beta_1", "beta_2", "is_refused"),
    [
        (0.9, 0.999, False),
        (float(np.float32(0.9)), float(np.float32(0.9999)), False),
        (0.0, 0.999, True),
        (0.5, 0.999, True),
        (0.95, 0.999, True),
        (0.9, 0.99, True),
        (0.9, 0.99999, True),
    ],
)
def test_other_betas_are_refused(beta_1, beta_2, is_refused):
    message = r"beta_1 of 0\.9 and beta_2 from 0\.999 to 0\.9999"
    with pytest.raises(ValueError, match=message) if is_refused else contextlib.nullcontext():
        check_deferrable(
            1e-4, l2=1e-5, clip=None, clip_ratio=1.0, beta_1=beta_1, beta_2=beta_2, epsilon=1e-7
        )


@pytest.mark.parametrize("update", ["exact", "deferred"])
def test_a_variable_of_a_plain_module_is_the_models(update):
    class Shifted(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = built()
            self.module = tf.Module()
            self.module.shift = tf.Variable(0.1)

        def call(self, x, training=False):
            return self.inner(x) + self.module.shift

    model = Shifted()
    model(next(batches(1))[0])
    optimizer = CowClipOptimizer.for_model(model, HP, update=update)
    model.compile(optimizer, loss="mse")
    model.train_on_batch(*next(batches(1)))
    assert model.module.shift.numpy() != np.float32(0.1)


def test_a_step_is_exported(tmp_path):
    """For training on a device: with all that it reads."""
    model = built()
    optimizer = CowClipOptimizer.for_model(model, HP, update="exact")

    class Trained(tf.Module):
        def __init__(self):
            super().__init__()
            self.model, self.optimizer = model, optimizer

        @tf.function(autograph=False)
        def train(self, shop, item, day, y):
            with tf.GradientTape() as tape:
                found = self.model({"shop": shop, "item": item, "day": day})
                loss = tf.reduce_mean(tf.square(found - y))
            weights = self.model.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            return {"loss": loss}

    x, y = next(batches(1))
    trained = Trained()
    given = {**x, "y": y}
    names = ("shop", "item", "day", "y")
    spec = {name: tf.TensorSpec(given[name].shape, given[name].dtype, name) for name in names}
    call = trained.train.get_concrete_function(**spec)
    tf.saved_model.save(trained, str(tmp_path / "step"), signatures={"train": call})
    loaded = tf.saved_model.load(str(tmp_path / "step")).signatures["train"]
    losses = [float(loaded(**given)["loss"]) for _ in range(3)]
    assert losses[2] < losses[0]


@pytest.mark.slow
def test_an_optimizers_own_checkpoint_is_of_current_rows(tmp_path):
    """Written before the weights are, which let rows catch up."""
    one = trained("deferred", 25)
    tf.train.Checkpoint(optimizer=one.optimizer).write(tmp_path / "optimizer")
    one.save_weights(tmp_path / "weights")
    other = trained("deferred", 1)
    other.load_weights(tmp_path / "weights")
    tf.train.Checkpoint(optimizer=other.optimizer).read(tmp_path / "optimizer")
    for batch in batches(15, seed=8):
        for model in (one, other):
            model.train_on_batch(*batch)
    for model in (one, other):
        model.optimizer.catch_up()
    assert far(other, one) < 2e-4
