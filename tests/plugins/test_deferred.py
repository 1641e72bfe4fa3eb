"""The deferred mode: as the exact one, wherever a row is read."""

from __future__ import annotations

import copy
import functools

import numpy as np
import pytest
import tensorflow as tf
from merlin.schema import ColumnSchema, Schema, Tags

from merlin_cowclip.models import FusedEmbeddings, deepfm
from merlin_cowclip.plugins import CowClipAdam, CowClipOptimizer, Hyperparameters
from merlin_cowclip.plugins.optimizers import deferred as module
from merlin_cowclip.plugins.optimizers.deferred import check_deferrable
from merlin_cowclip.plugins.optimizers.state import training_state

from .merlin_models import category, stock_dlrm

pytestmark = pytest.mark.usefixtures("graphs_as_traced")
SIZES = {"shop": 4_000, "item": 60, "day": 5}
TARGET = ColumnSchema("y", dtype=np.float32, tags=[Tags.TARGET, Tags.BINARY_CLASSIFICATION])
SCHEMA = Schema([*(category(name, size) for name, size in SIZES.items()), TARGET])
HP = Hyperparameters(
    batch_size=32, dense_lr=1e-3, embedding_lr=1e-3, l2=1e-4, warmup_epochs=0.0, clip_floor=1e-4
)


def batches(number, size=32, seed=0):
    random = np.random.default_rng(seed)
    for _ in range(number):
        ids = {
            name: np.minimum(random.geometric(4 / n, (size, 1)) + 2, n - 1)
            for name, n in SIZES.items()
        }
        yield (
            {k: tf.constant(v, tf.int64) for k, v in ids.items()},
            tf.constant(random.integers(0, 2, (size, 1)), tf.float32),
        )


@functools.cache
def first_weights():
    """What all models start from: a seed for each would make TensorFlow optimize graphs again."""
    tf.keras.utils.set_random_seed(1)
    return built().get_weights()


def built():
    """A model with its variables: its step is traced once, not twice."""
    model = deepfm(SCHEMA, embedding_dim=4, mlp=(8,))
    model(next(batches(1))[0])
    return model


def model_of(update, hp=HP, **options):
    model = built()
    model.set_weights(first_weights())
    optimizer = CowClipOptimizer.for_model(model, hp, update=update, **options)
    model.compile(optimizer=optimizer, metrics=[])
    return model


@functools.cache
def _before_training(update, hp):
    model = model_of(update, hp)
    return model, {name: variable.numpy() for name, variable in training_state(model).items()}


def trained(update, steps=30, hp=HP):
    """One model for all tests: to trace its step takes a hundred times as long as a step.

    For tests that neither compile it again nor make another optimizer for it.
    """
    model, state = _before_training(update, hp)
    model.reset_metrics()
    for name, variable in training_state(model).items():
        variable.assign(state[name])
    train(model, steps)
    return model


def train(model, steps, seed=0):
    for x, y in batches(steps, seed=seed):
        model.train_on_batch(x, y)


def far(a, b):
    """How far weights are apart, by the largest of each."""
    pairs = zip(a.trainable_variables, b.trainable_variables, strict=True)
    return max(
        float(np.abs(x.numpy() - y.numpy()).max() / max(np.abs(y.numpy()).max(), 1e-9))
        for x, y in pairs
    )


def layer_of(model):
    layers = model._flatten_layers()
    return next(one for one in layers if isinstance(one, FusedEmbeddings) and one.dim > 1)


def test_predictions_are_those_of_the_exact_mode_at_any_time(monkeypatch):
    """Rows catch up as they are looked up, in training, evaluation and prediction."""
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 12_000)  # 3,000 rows, in tiles of 2,048
    exact, deferred = (trained(update, 20) for update in ("exact", "deferred"))
    for seed in (5, 6):
        x, _ = next(batches(1, 64, seed))
        np.testing.assert_allclose(
            deferred.predict_on_batch(x), exact.predict_on_batch(x), rtol=1e-5
        )
        for model in (exact, deferred):
            train(model, 1, seed)
    x, _ = next(batches(1, 64, 7))
    np.testing.assert_allclose(deferred(x), exact(x), rtol=1e-5)
    deferred.optimizer.catch_up()
    assert far(deferred, exact) < 2e-4


def step_of(model, optimizer):
    """A step of a custom loop."""

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.keras.losses.binary_crossentropy(y, model(x, training=True)))
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

    return step


def test_weights_of_a_custom_loop():
    weights = []
    for update in ("exact", "deferred"):
        model = built()
        model.set_weights(first_weights())
        optimizer = CowClipOptimizer.for_model(model, HP, update=update)
        step = tf.function(step_of(model, optimizer), autograph=False)
        for x, y in batches(20):
            step(x, y)
        weights.append(model.get_weights())
        assert optimizer.iterations.numpy() == 20
    for exact, deferred in zip(*weights, strict=True):
        np.testing.assert_allclose(deferred, exact, atol=1e-5)


def test_weights_that_a_layer_is_given():
    """Rows that waited have caught up, and not the new ones."""
    tables = []
    for update in ("exact", "deferred"):
        model = trained(update, 10)
        layer = layer_of(model)
        weights = layer.get_weights()
        train(model, 10, seed=1)
        layer.set_weights(weights)
        tables.append(layer.get_weights()[0])
    np.testing.assert_allclose(tables[1], tables[0], atol=1e-5)


def test_weights_that_keras_reads_and_sets(tmp_path):
    """As `EarlyStopping(restore_best_weights=True)` does, and then continues."""
    values = []
    for update in ("exact", "deferred"):
        model = trained(update, 20)
        best, path = model.get_weights(), str(tmp_path / update / "weights")
        model.save_weights(path)
        train(model, 20, seed=8)
        model.set_weights(best)
        predicted = model.predict_on_batch(next(batches(1, 64, 9))[0])
        train(model, 1, seed=10)
        after = model.get_weights()
        model.load_weights(path)
        values.append([*best, predicted, *after, *model.get_weights()])
    for exact, deferred in zip(*values, strict=True):
        apart = np.subtract(deferred, exact, dtype=float)
        assert np.abs(apart).max() <= 2e-4 * np.abs(exact).max()


def test_rows_catch_up_before_a_checkpoint(tmp_path):
    model = trained("deferred")
    layer = layer_of(model)
    pending = layer.table.numpy()
    path = tf.train.Checkpoint(model=model).write(str(tmp_path / "saved"))
    reader = tf.train.load_checkpoint(path)
    (name,) = (
        name
        for name, shape in reader.get_variable_to_shape_map().items()
        if shape == [sum(SIZES.values()), 4] and "OPTIMIZER_SLOT" not in name
    )
    saved = reader.get_tensor(name)
    assert np.abs(saved - pending).max() > 1e-3 * np.abs(saved).max()
    model.optimizer.catch_up()
    np.testing.assert_array_equal(saved, layer.table)


def test_a_state_has_what_rows_wait_for():
    first, second = trained("deferred", 15), model_of("deferred")
    first.optimizer.learning_rate, second.optimizer.learning_rate = 5e-4, 2e-3
    train(second, 1, seed=9)
    for name, variable in training_state(second).items():
        variable.assign(training_state(first)[name])
    for model in (first, second):
        train(model, 10, seed=3)
    for a, b in zip(first.trainable_variables, second.trainable_variables, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_table_that_gets_its_state_later_has_missed_no_step():
    """The table was frozen, say, or the step count comes from a checkpoint."""
    model = model_of("deferred")
    for part in model.optimizer.optimizers:
        part.iterations.assign(7)
    model.optimizer.create_slots(model.trainable_variables)
    model.optimizer.catch_up()
    for variable, first in zip(model.variables, first_weights(), strict=True):
        np.testing.assert_array_equal(variable, first)


def test_gradients_that_are_older_than_the_last_step():
    models = []
    for update in ("exact", "deferred"):
        model = trained(update, 8, HP.replace(clip=None))
        optimizer, weights = model.optimizer, model.trainable_variables
        gradients = []
        for x, y in batches(2, seed=4):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.keras.losses.binary_crossentropy(y, model(x)))
            gradients.append(tape.gradient(loss, weights))
        for of_one in gradients:
            optimizer.apply_gradients(zip(of_one, weights, strict=True))
        optimizer.catch_up()
        models.append(model)
    assert far(*models) < 2e-4


def test_a_learning_rate_that_is_set():
    models = []
    for update in ("exact", "deferred"):
        model = trained(update, 0)
        for step, (x, y) in enumerate(batches(30)):
            if step in (10, 11, 20):
                model.optimizer.learning_rate = 1e-3 * (0.5 if step == 10 else 3.0)
            model.train_on_batch(x, y)
        model.optimizer.catch_up()
        models.append(model)
    assert far(*models) < 2e-4


def test_the_tables_belong_to_the_optimizer_that_was_bound_last():
    """As where a notebook's cell that makes the optimizer is run again."""
    exact, model = (trained(update, 15) for update in ("exact", "deferred"))
    first = model.optimizer
    with pytest.raises(ValueError, match="clip_tables must name"):  # which takes no table
        CowClipOptimizer.for_model(model, HP, clip_tables=["nothing"])
    assert model.optimizer.table_specs[0].catch_up == first._catch_up_rows
    second = CowClipOptimizer.for_model(model, HP, update="exact")
    assert far(model, exact) < 2e-4  # no row was left behind
    for optimizer, other in ((first, second), (second, first)):
        other.bind(model)
        with pytest.raises(ValueError, match=r"belong to another optimizer.*bind\(model\)"):
            step_of(model, optimizer)(*next(batches(1)))
    step_of(model, first)(*next(batches(1)))
    with pytest.raises(ValueError, match="trains the tables of one model"):
        first.bind(built())


# What it does not support


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        (
            {},
            {"embedding_schedule": tf.keras.optimizers.schedules.CosineDecay(1e-3, 100)},
            "requires a number as learning rate of the embeddings",
        ),
        ({"decay": True}, {}, "requires a number as learning rate of the embeddings"),
        ({"l2": 0.1, "embedding_lr": 1e-6, "clip_ratio": 0.1}, {}, r"of at least 2 \* l2"),
        ({"l2": 0.1}, {}, r"learning_rate \* l2 <= "),
    ],
)
def test_settings_of_rows_that_cannot_catch_up(changes, options, message):
    with pytest.raises(ValueError, match=message):
        CowClipOptimizer(HP.replace(**changes), update="deferred", **options)


@pytest.mark.parametrize(("beta_1", "beta_2"), [(0.5, 0.999), (0.9, 0.99), (0.9, 0.99999)])
def test_betas_of_rows_that_cannot_catch_up(beta_1, beta_2):
    check_deferrable(1e-4, l2=1e-5, clip=None, clip_ratio=1.0, beta_2=float(np.float32(0.9999)))
    with pytest.raises(ValueError, match="beta_1 of 0.9 and beta_2 from"):
        check_deferrable(1e-4, l2=1e-5, clip=None, clip_ratio=1.0, beta_1=beta_1, beta_2=beta_2)


@pytest.mark.parametrize(("name", "value"), [("beta_2", 0.9995), ("l2", 1e-5), ("epsilon", 1e-6)])
def test_settings_that_cannot_change_after_the_first_step(name, value):
    """Rows would apply steps that they missed by another rule than that of these steps."""
    part = trained("deferred", 2).optimizer.optimizers[0]
    before = float(getattr(part, name))
    with pytest.raises(ValueError, match="beta_2 cannot be changed after the first step"):
        setattr(part, name, value)
    assert float(getattr(part, name)) == before


def test_a_learning_rate_that_is_set_too_high():
    """Rows would swing about zero where those that catch up are at rest."""
    model = trained("deferred", 2)
    model.optimizer.learning_rate = 30 * HP.dense_lr
    with pytest.raises(tf.errors.InvalidArgumentError, match="learning_rate . l2 <="):
        train(model, 1)


def test_a_table_without_a_gradient_in_a_step():
    model = tf.keras.Model()
    model.tables = layers = [FusedEmbeddings(SCHEMA, 4, name=name) for name in "ab"]
    features, _ = next(batches(1))

    def step(used):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(layer(features)) for layer in used])
        weights = [layer.table for layer in used]
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

    for layer in layers:
        layer(features)
    optimizer = CowClipOptimizer.for_model(model, HP, update="deferred")
    step(layers)
    with pytest.raises(ValueError, match="a gradient for every table in every step.*none for a"):
        step(layers[1:])


def test_tables_that_cannot_catch_up():
    with pytest.raises(ValueError, match="those of FusedEmbeddings. Received: .*shop"):
        CowClipOptimizer.for_model(stock_dlrm(SCHEMA), HP, update="deferred")
    with pytest.raises(ValueError, match=r"one of exact, lazy\. Received: 'deferred'"):
        CowClipAdam(update="deferred")


def test_tables_too_narrow_for_a_step_number():
    """After 600 steps their weights were NaN, or off by 54."""
    tf.keras.mixed_precision.set_global_policy("bfloat16")
    try:
        model = built()
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")
    model.compile(optimizer=CowClipOptimizer.for_model(model, HP, update="deferred"))
    with pytest.raises(ValueError, match="float32 or float64 tables.*into bfloat16. Received"):
        train(model, 1)


def test_a_model_is_not_copied_with_pending_rows():
    """The copy, which has no optimizer, would never apply the steps that they missed."""
    spec = trained("deferred", 1).optimizer.table_specs[0]
    with pytest.raises(ValueError, match=r"update='deferred'.*cannot be copied.*save_model"):
        copy.deepcopy(spec)
