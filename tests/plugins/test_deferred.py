"""The deferred mode: as the exact one, wherever a row is read."""

from __future__ import annotations

import contextlib
import copy
import functools

import numpy as np
import pytest
import tensorflow as tf
from merlin.schema import ColumnSchema, Schema, Tags

from merlin_cowclip.models import FusedEmbeddings, deepfm
from merlin_cowclip.plugins import (
    CowClipAdam,
    CowClipOptimizer,
    Hyperparameters,
    load_model,
    save_model,
)
from merlin_cowclip.plugins._tensorflow import mm
from merlin_cowclip.plugins.optimizers.deferred import check_deferrable
from merlin_cowclip.plugins.optimizers.state import training_state

pytestmark = pytest.mark.usefixtures("graphs_as_traced")
SIZES = {"shop": 400, "item": 60, "day": 5}
HP = Hyperparameters(
    batch_size=32, dense_lr=1e-3, embedding_lr=1e-3, l2=1e-4, warmup_epochs=0.0, clip_floor=1e-4
)


def schema():
    columns = [
        ColumnSchema(
            name,
            dtype=np.int64,
            tags=[Tags.CATEGORICAL],
            properties={"domain": {"min": 0, "max": size - 1, "name": name}},
        )
        for name, size in SIZES.items()
    ]
    target = ColumnSchema("y", dtype=np.float32, tags=[Tags.TARGET, Tags.BINARY_CLASSIFICATION])
    return Schema([*columns, target])


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
    model = deepfm(schema(), embedding_dim=4, mlp=(8,))
    model(next(batches(1))[0])
    return model


def model_of(update, hp=HP, **options):
    model = built()
    model.set_weights(first_weights())
    optimizer = CowClipOptimizer.for_model(model, hp, update=update, **options)
    model.compile(optimizer=optimizer, metrics=[])
    return model


def trained(update, steps=30, hp=HP, **options):
    model = model_of(update, hp, **options)
    for x, y in batches(steps):
        model.train_on_batch(x, y)
    return model


@functools.cache
def _before_training(update, hp):
    model = model_of(update, hp)
    return model, {name: variable.numpy() for name, variable in training_state(model).items()}


def trained_again(update, steps=30, hp=HP):
    """As `trained`, of one model for all tests: to trace its step takes a hundred times as long.

    For tests that neither compile it again nor make another optimizer for it.
    """
    model, state = _before_training(update, hp)
    model.reset_metrics()
    for name, variable in training_state(model).items():
        variable.assign(state[name])
    for x, y in batches(steps):
        model.train_on_batch(x, y)
    return model


def far(a, b):
    """How far weights are apart, by the largest of each."""
    pairs = zip(a.trainable_variables, b.trainable_variables, strict=True)
    return max(
        float(np.abs(x.numpy() - y.numpy()).max() / max(np.abs(y.numpy()).max(), 1e-9))
        for x, y in pairs
    )


@pytest.mark.extended
def test_as_tensorflow_rewrites_the_graph(graphs_rewritten):
    exact, deferred = (trained(update) for update in ("exact", "deferred"))
    x, _ = next(batches(1, 64, 5))
    np.testing.assert_allclose(deferred.predict_on_batch(x), exact.predict_on_batch(x), rtol=1e-5)
    deferred.optimizer.catch_up()
    assert far(deferred, exact) < 2e-4


def test_predictions_are_those_of_the_exact_mode_at_any_time():
    """Rows catch up as they are looked up, in training, evaluation and prediction."""
    exact, deferred = (trained_again(update, 20) for update in ("exact", "deferred"))
    for seed in (5, 6):
        x, y = next(batches(1, 64, seed))
        np.testing.assert_allclose(
            deferred.predict_on_batch(x), exact.predict_on_batch(x), rtol=1e-5
        )
        for model in (exact, deferred):
            model.train_on_batch(x, y)
    x, _ = next(batches(1, 64, 7))
    np.testing.assert_allclose(deferred(x), exact(x), rtol=1e-5)


def step_of(model, optimizer, output=None):
    """A step of a loop of one's own."""

    def step(x, y):
        with tf.GradientTape() as tape:
            found = model(x, training=True) if output is None else output(x)
            loss = tf.reduce_mean(tf.keras.losses.binary_crossentropy(y, found))
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

    return step


@functools.cache
def of_a_loop(update):
    """A model that knows of no optimizer, its optimizer, and all variables of both, as at first."""
    model = built()
    model.set_weights(first_weights())
    optimizer = CowClipOptimizer.for_model(model, HP, update=update)
    optimizer.create_slots(model.trainable_variables)
    state = [(variable, variable.numpy()) for variable in (*model.variables, *optimizer.weights)]
    step = tf.function(step_of(model, optimizer), autograph=False)
    return model, optimizer, step, state


@pytest.mark.parametrize("of", ["model", pytest.param("file", marks=pytest.mark.extended)])
def test_weights_of_a_loop_of_ones_own(tmp_path, of):
    found = []
    for update in ("exact", "deferred"):
        model, optimizer, step, state = of_a_loop(update)
        for variable, value in state:
            variable.assign(value)
        for x, y in batches(20):
            step(x, y)
        if of == "file":
            model.save_weights(str(tmp_path / update))
            held = tf.train.load_checkpoint(str(tmp_path / update))
            names = sorted(n for n, s in held.get_variable_to_shape_map().items() if len(s) == 2)
            found.append([held.get_tensor(name) for name in names])
        else:
            found.append(model.get_weights())
        assert optimizer.iterations.numpy() == 20
    assert len(found[0]) == len(found[1]) > 0
    for exact, deferred in zip(*found, strict=True):
        np.testing.assert_allclose(deferred, exact, atol=1e-5)


def test_a_refused_optimizer_takes_no_table():
    """The one before it was told that another one had been made since."""
    model, _, step, _ = of_a_loop("deferred")
    step(*next(batches(1)))
    for options in ({"init_tables": True}, {"clip_tables": ["nothing"]}):
        with pytest.raises(ValueError, match=r"init_tables cannot|clip_tables must name"):
            CowClipOptimizer.for_model(model, HP.replace(init_stddev=1e-3), **options)
        step(*next(batches(1)))


def test_weights_that_a_layer_is_given():
    """Rows that waited have caught up, and not the new ones."""
    found = []
    for update in ("exact", "deferred"):
        model = trained_again(update, 10)
        layer = next(one for one in model._flatten_layers() if one.name == "embeddings")
        weights = layer.get_weights()
        for x, y in batches(10, seed=1):
            model.train_on_batch(x, y)
        layer.set_weights(weights)
        found.append(layer.get_weights())
    np.testing.assert_allclose(found[1][0], found[0][0], atol=1e-5)


@pytest.mark.extended
def test_a_table_that_is_frozen_for_a_while():
    """The only table of its part, whose steps do not go on meanwhile: rows miss nothing."""
    models = []
    for update in ("exact", "deferred"):
        model = model_of(update)
        layer = None
        for step, (x, y) in enumerate(batches(24)):
            if step in (8, 16):
                layer = next(one for one in model._flatten_layers() if one.name == "embeddings")
                layer.trainable = step == 16
                model.compile(optimizer=model.optimizer, metrics=[])
            model.train_on_batch(x, y)
        assert layer is not None
        model.optimizer.catch_up()
        models.append(model)
    assert far(*models) < 2e-4


def test_a_table_without_a_gradient_in_a_step_is_refused():
    model = tf.keras.Model()
    model.tables = layers = [FusedEmbeddings(schema(), 4, name=name) for name in "ab"]
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


def test_gradients_that_are_older_than_the_last_step():
    models = []
    for update in ("exact", "deferred"):
        model = trained_again(update, 8, HP.replace(clip=None))
        optimizer = model.optimizer
        tapes = []
        for x, y in batches(2, seed=4):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.keras.losses.binary_crossentropy(y, model(x)))
            tapes.append(tape.gradient(loss, model.trainable_variables))
        for gradients in tapes:
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        optimizer.catch_up()
        models.append(model)
    assert far(*models) < 2e-4


def test_tables_that_do_not_catch_up_before_they_are_read_are_refused():
    """A gradient would be that of rows as they were."""
    with pytest.raises(ValueError, match=r"one of exact, lazy\. Received: 'deferred'"):
        CowClipAdam(update="deferred")


@pytest.mark.parametrize(("name", "value"), [("beta_2", 0.9995), ("l2", 1e-5), ("epsilon", 1e-6)])
def test_what_cannot_change_any_more(name, value):
    """Rows would apply steps that they missed by another rule than that of these steps."""
    model = trained_again("deferred", 2)
    part = model.optimizer.optimizers[0]
    before = float(getattr(part, name))
    with pytest.raises(ValueError, match="beta_2 cannot be changed after the first step"):
        setattr(part, name, value)
    assert float(getattr(part, name)) == before
    with pytest.raises(ValueError, match=r"clip_ratio of at least 2 \* l2"):
        part.clip_ratio = HP.l2


def test_a_table_that_gets_its_state_later_has_missed_no_step():
    """The table was frozen, say, or the step count comes from a checkpoint."""
    model = model_of("deferred")
    for part in model.optimizer.optimizers:
        part.iterations.assign(7)
    model.optimizer.create_slots(model.trainable_variables)
    model.optimizer.catch_up()
    for variable, first in zip(model.variables, first_weights(), strict=True):
        np.testing.assert_array_equal(variable, first)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_tables_too_narrow_for_a_step_number_are_refused(dtype):
    """After 600 steps their weights were NaN, or off by 54."""
    tf.keras.mixed_precision.set_global_policy(dtype)
    try:
        model = built()
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")
    optimizer = CowClipOptimizer.for_model(model, HP, update="deferred")
    model.compile(optimizer=optimizer, metrics=[])
    with pytest.raises(ValueError, match=rf"float32 or float64 tables.*into {dtype}. Received"):
        model.train_on_batch(*next(batches(1)))


@pytest.mark.extended
def test_half_precision():
    """Keras's loss scaling applies gradients within a branch; tables are float32 all the same."""
    tf.keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        exact, deferred = (trained(update, 20) for update in ("exact", "deferred"))
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")
    deferred.optimizer.inner_optimizer.catch_up()
    assert far(deferred, exact) < 5e-3  # dense layers round at 1e-3


def test_a_learning_rate_that_is_set():
    models = []
    for update in ("exact", "deferred"):
        model = trained_again(update, 0)
        for step, (x, y) in enumerate(batches(30)):
            if step in (10, 11, 20):
                model.optimizer.learning_rate = 1e-3 * (0.5 if step == 10 else 3.0)
            model.train_on_batch(x, y)
        model.optimizer.catch_up()
        models.append(model)
    assert far(*models) < 2e-4


def test_a_learning_rate_that_is_set_too_high_is_refused():
    """Rows would swing about zero where those that catch up are at rest."""
    model = trained_again("deferred", 2)
    model.optimizer.learning_rate = 30 * HP.dense_lr
    with pytest.raises(tf.errors.InvalidArgumentError, match="learning_rate . l2 <="):
        model.train_on_batch(*next(batches(1)))


@pytest.mark.extended
@pytest.mark.parametrize("what", ["a rate", "an id in training"])
def test_what_is_refused_changes_nothing(what):
    """Rows are not told to be current whose weights and moments are not, as other ops end first."""
    exact, deferred = (trained_again(update, 15) for update in ("exact", "deferred"))
    before = {name: variable.numpy() for name, variable in training_state(deferred).items()}
    deferred.optimizer.catch_up()
    current = {name: variable.numpy() for name, variable in training_state(deferred).items()}
    for name, variable in training_state(deferred).items():
        variable.assign(before[name])
    x, y = next(batches(1, seed=8))
    if what == "a rate":
        deferred.optimizer.learning_rate = 30 * HP.dense_lr
    else:
        x = {**x, "item": x["item"] + 10**6}
    with pytest.raises(tf.errors.InvalidArgumentError):
        deferred.train_on_batch(x, y)
    deferred.optimizer.learning_rate = HP.dense_lr
    if what != "a rate":  # which rows may have caught up for, before it was known
        for name, variable in training_state(deferred).items():
            if "loss" not in name:
                np.testing.assert_array_equal(variable, before[name], err_msg=name)
    deferred.optimizer.catch_up()
    for name, variable in training_state(deferred).items():
        if "loss" not in name:
            np.testing.assert_allclose(variable, current[name], rtol=1e-5, atol=1e-8, err_msg=name)
    for x, y in batches(10, seed=3):
        for model in (exact, deferred):
            model.train_on_batch(x, y)
    deferred.optimizer.catch_up()
    assert far(deferred, exact) < 2e-4


def test_the_tables_belong_to_the_optimizer_that_was_bound_last():
    """As where a notebook's cell that makes the optimizer is run again."""
    exact, model = (trained_again(update, 15) for update in ("exact", "deferred"))
    first = model.optimizer
    second = CowClipOptimizer.for_model(model, HP, update="exact")
    assert far(model, exact) < 2e-4  # no row was left behind
    for optimizer, other in ((first, second), (second, first)):
        other.bind(model)
        with pytest.raises(ValueError, match=r"belong to another optimizer.*bind\(model\)"):
            step_of(model, optimizer)(*next(batches(1)))
    step_of(model, first)(*next(batches(1)))
    with pytest.raises(ValueError, match="trains the tables of one model"):
        first.bind(built())


def test_saved_and_loaded_it_goes_on(tmp_path):
    exact, deferred = (trained_again(update, 15) for update in ("exact", "deferred"))
    save_model(deferred, tmp_path / "model")
    x, y = next(batches(1, 64, 5))
    plain = tf.keras.models.load_model(tmp_path / "model", compile=False)
    np.testing.assert_allclose(plain(x), exact(x), rtol=1e-5)  # all rows are current there
    loaded = load_model(tmp_path / "model")
    assert loaded.optimizer.update_mode == "deferred"
    for x, y in batches(15, seed=3):
        for model in (exact, deferred, loaded):
            model.train_on_batch(x, y)
    for model in (deferred, loaded):
        model.optimizer.catch_up()
        assert far(model, exact) < 2e-4


def test_a_state_holds_what_rows_wait_for():
    first, second = trained_again("deferred", 15), model_of("deferred")
    x, _ = next(batches(1))
    second.train_on_batch(*next(batches(1, seed=9)))
    for name, variable in training_state(second).items():
        variable.assign(training_state(first)[name])
    for x, y in batches(10, seed=3):
        for model in (first, second):
            model.train_on_batch(x, y)
    for a, b in zip(first.trainable_variables, second.trainable_variables, strict=True):
        np.testing.assert_array_equal(a, b)


def test_weights_that_keras_reads_and_sets(tmp_path):
    """As `EarlyStopping(restore_best_weights=True)` does, and then goes on."""
    found = []
    for update in ("exact", "deferred"):
        model = trained_again(update, 20)
        best, path = model.get_weights(), str(tmp_path / update / "weights")
        model.save_weights(path)
        for batch in batches(20, seed=8):
            model.train_on_batch(*batch)
        model.set_weights(best)
        predicted = model.predict_on_batch(next(batches(1, 64, 9))[0])
        model.train_on_batch(*next(batches(1, seed=10)))
        after = model.get_weights()
        model.load_weights(path)
        found.append([*best, predicted, *after, *model.get_weights()])
    for exact, deferred in zip(*found, strict=True):
        apart = np.subtract(deferred, exact, dtype=float)
        assert np.abs(apart).max() <= 2e-4 * np.abs(exact).max()


def test_what_it_cannot_do_is_refused():
    schedule = tf.keras.optimizers.schedules.CosineDecay(1e-3, 100)
    with pytest.raises(ValueError, match="requires a number as learning rate of the embeddings"):
        model_of("deferred", embedding_schedule=schedule)
    with pytest.raises(ValueError, match=r"clip_ratio of at least 2 \* l2"):
        model_of("deferred", HP.replace(l2=0.1, embedding_lr=1e-6, clip_ratio=0.1))
    with pytest.raises(ValueError, match="learning_rate \\* l2 <="):
        model_of("deferred", HP.replace(l2=0.1))
    stock = mm.DLRMModel(
        schema(),
        embedding_dim=4,
        bottom_block=None,
        top_block=mm.MLPBlock([4]),
        prediction_tasks=mm.BinaryOutput("y"),
    )
    with pytest.raises(ValueError, match="those of FusedEmbeddings. Received: .*shop"):
        CowClipOptimizer.for_model(stock, HP, update="deferred")


# What others save and restore holds rows as they are now


def whose_rows_wait():
    return trained_again("deferred")


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


def test_rows_catch_up_before_anybody_saves_them(tmp_path):
    model = whose_rows_wait()
    late = layer_of(model).table.numpy()
    path = tf.train.Checkpoint(model=model).write(str(tmp_path / "saved"))
    found = table_in(path)
    np.testing.assert_array_equal(found, current(model))
    assert np.abs(found - late).max() > 1e-3 * np.abs(found).max()


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


@pytest.mark.parametrize(
    ("beta_1", "beta_2", "is_refused"),
    [
        (0.9, 0.999, False),
        (float(np.float32(0.9)), float(np.float32(0.9999)), False),
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
def test_a_model_is_not_copied_with_pending_rows(update):
    """The copy, which has no optimizer, would never apply the steps that they missed."""
    spec = trained_again(update, 1).optimizer.table_specs[0]
    if update == "exact":
        assert copy.deepcopy(spec).reads_value
        return
    with pytest.raises(ValueError, match=r"update='deferred'.*cannot be copied.*save_model"):
        copy.deepcopy(spec)
