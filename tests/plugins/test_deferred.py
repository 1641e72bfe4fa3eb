"""The deferred mode: as the exact one, wherever a row is read."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import sys

import numpy as np
import pytest
import tensorflow as tf
from merlin.schema import ColumnSchema, Schema, Tags

from merlin_cowclip.models import FusedEmbeddings, deepfm
from merlin_cowclip.plugins import (
    CowClipAdam,
    CowClipOptimizer,
    Hyperparameters,
    deferring,
    load_model,
    save_model,
)
from merlin_cowclip.plugins._stack import mm
from merlin_cowclip.plugins.state import training_state

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


@pytest.mark.parametrize(
    "hp",
    [HP, HP.replace(l2=0.0), HP.replace(clip=None), HP.replace(clip="global", clip_threshold=1e-3)],
    ids=["cowclip", "without L2", "without a clip", "global"],
)
def test_it_trains_what_the_exact_mode_trains(hp):
    exact, deferred = (trained_again(update, 40, hp) for update in ("exact", "deferred"))
    deferred.optimizer.catch_up()
    assert far(deferred, exact) < 2e-4
    lazy = trained("lazy", 40, hp)
    assert far(lazy, exact) > 1e-3  # what would be without catching up


def test_as_tensorflow_rewrites_the_graph(graphs_rewritten):
    exact, deferred = (trained(update) for update in ("exact", "deferred"))
    x, _ = next(batches(1, 64, 5))
    np.testing.assert_allclose(deferred.predict_on_batch(x), exact.predict_on_batch(x), rtol=1e-5)
    deferred.optimizer.catch_up()
    assert far(deferred, exact) < 2e-4


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_prediction_that_was_traced_before_training():
    x, _ = next(batches(1, 64, 5))
    found = []
    for update in ("exact", "deferred"):
        model = model_of(update)
        model.predict_on_batch(x)
        for batch in batches(20):
            model.train_on_batch(*batch)
        found.append(model.predict_on_batch(x))
    np.testing.assert_allclose(*found, rtol=1e-5)


def test_eager_steps():
    models = []
    for update in ("exact", "deferred"):
        model = model_of(update)
        model.compile(optimizer=model.optimizer, metrics=[], run_eagerly=True)
        for x, y in batches(6):
            model.train_on_batch(x, y)
        model.optimizer.catch_up()
        models.append(model)
    assert far(*models) < 2e-4


def step_by(model, optimizer):
    """A step of a loop of one's own."""

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.keras.losses.binary_crossentropy(y, model(x, training=True)))
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
    step = tf.function(step_by(model, optimizer), autograph=False)
    return model, optimizer, step, state


@pytest.mark.parametrize("of", ["model", "layer", "file"])
def test_weights_of_a_loop_of_ones_own(tmp_path, of):
    found = []
    for update in ("exact", "deferred"):
        model, optimizer, step, state = of_a_loop(update)
        for variable, value in state:
            variable.assign(value)
        for x, y in batches(20):
            step(x, y)
        layer = next(one for one in model._flatten_layers() if one.name == "embeddings")
        if of == "file":
            model.save_weights(str(tmp_path / update))
            held = tf.train.load_checkpoint(str(tmp_path / update))
            names = sorted(n for n, s in held.get_variable_to_shape_map().items() if len(s) == 2)
            found.append([held.get_tensor(name) for name in names])
        else:
            found.append((layer if of == "layer" else model).get_weights())
        assert optimizer.iterations.numpy() == 20
    assert len(found[0]) == len(found[1]) > 0
    for exact, deferred in zip(*found, strict=True):
        np.testing.assert_allclose(deferred, exact, atol=1e-5)


def test_a_refused_optimizer_takes_no_table():
    """The one before it was told that another one had been made since."""
    model, _, step, _ = of_a_loop("deferred")
    step(*next(batches(1)))
    for options in ({"init_tables": True}, {"clip_tables": ["nothing"]}):
        with pytest.raises(ValueError, match=r"init_tables needs|clip_tables must name"):
            CowClipOptimizer.for_model(model, HP, **options)
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


def test_a_table_that_is_frozen_for_a_while():
    """What has no gradient has no part in a step: its rows do not shrink meanwhile."""
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


@pytest.mark.slow
def test_a_table_that_is_frozen_from_the_start():
    models = []
    for update in ("exact", "deferred"):
        model = built()
        model.set_weights(first_weights())
        layer = next(one for one in model._flatten_layers() if one.name == "embeddings")
        layer.trainable = False
        optimizer = CowClipOptimizer.for_model(model, HP, update=update)
        before = layer.table.numpy()
        model.compile(optimizer=optimizer, metrics=[])
        for step, (x, y) in enumerate(batches(20)):
            if step == 10:
                model.predict_on_batch(x)
                np.testing.assert_array_equal(layer.table.numpy(), before)
                layer.trainable = True
                model.compile(optimizer=optimizer, metrics=[])
            model.train_on_batch(x, y)
        optimizer.catch_up()
        models.append(model)
    assert far(*models) < 2e-4


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


def test_a_table_that_is_read_without_catching_up_is_refused():
    """Its gradient would be that of rows as they were."""
    variable = tf.Variable(tf.ones((5, 2)))
    gradient = tf.IndexedSlices(tf.ones((1, 2)), tf.constant([1], tf.int64))
    with pytest.raises(ValueError, match="catch up before they are read. Received: a gradient for"):
        CowClipAdam(update="deferred").apply_gradients([(gradient, variable)])


def test_what_cannot_change_any_more():
    model = trained_again("deferred", 2)
    for name in ("beta_2", "l2", "epsilon"):
        with pytest.raises(ValueError, match=f"{name} cannot be changed once rows wait"):
            setattr(model.optimizer.optimizers[0], name, 0.01)


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


@pytest.mark.parametrize("steps", [0, 2])
def test_a_learning_rate_that_is_set_too_high_is_refused(steps):
    """Rows would swing about zero where those that catch up are at rest."""
    model = (trained_again if steps else trained)("deferred", steps)
    model.optimizer.learning_rate = 30 * HP.dense_lr
    with pytest.raises(tf.errors.InvalidArgumentError, match="learning_rate . l2 is at most"):
        model.train_on_batch(*next(batches(1)))


@pytest.mark.slow
@pytest.mark.parametrize("what", ["a rate", "an id in training", "an id in a prediction"])
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
    predicts = what == "an id in a prediction"
    with pytest.raises(tf.errors.InvalidArgumentError):
        deferred.predict_on_batch(x) if predicts else deferred.train_on_batch(x, y)
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


def test_ctrl_c_while_all_rows_catch_up():
    """Wherever it comes, no row is half of what it should be."""
    model = trained_again("deferred", 15)
    late = {name: variable.numpy() for name, variable in training_state(model).items()}
    model.optimizer.catch_up()
    current = model.get_weights()
    lines = 0

    def count(frame, event, _):
        """Of what writes rows, line by line; one of them is the last."""
        nonlocal lines
        if frame.f_code.co_filename != deferring.__file__:
            return None
        if event == "line":
            lines += 1
            if lines == at:
                raise KeyboardInterrupt
        return count

    for at in (0, *range(1, 10**6)):
        lines = 0
        for name, variable in training_state(model).items():
            variable.assign(late[name])
        sys.settrace(count)
        try:
            model.optimizer.catch_up()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        if at > lines:
            break
        for a, b in zip(model.get_weights(), current, strict=True):  # which brings the rest up
            np.testing.assert_array_equal(a, b)
    assert at > 50


OTHER = HP.replace(embedding_lr=5e-4)


def _only_made(model, update, data):
    CowClipOptimizer.for_model(model, OTHER, update="exact").summary()
    for x, y in data:
        model.train_on_batch(x, y)
    return model, next(batches(1, 64, 9))[0]


def _back_to_the_first(model, update, data):
    first = model.optimizer
    second = CowClipOptimizer.for_model(model, OTHER, update=update)
    for optimizer in (first, second, first):
        model.compile(optimizer=optimizer, metrics=[])
        for x, y in data[:8]:
            model.train_on_batch(x, y)
    return model, x


def _in_two_models(model, update, data):
    """By turns, with one layer of tables."""
    layer = next(one for one in model._flatten_layers() if one.name == "embeddings")
    flat = tf.keras.layers.Flatten()
    other = mm.Model(layer, flat, mm.BinaryOutput("y"), schema=schema())
    tf.keras.utils.set_random_seed(4)
    other(data[0][0])  # which builds the layer anew
    second = CowClipOptimizer.for_model(other, OTHER, update=update)
    other.compile(optimizer=second, metrics=[])
    for turn in (data[:10], data[10:12]):
        for one in (model, other):
            for x, y in turn:
                one.train_on_batch(x, y)
            one.predict_on_batch(x)
    return model, x


def _predicted_before(model, update, data):
    """By a graph that Keras keeps; and a loop of one's own afterwards."""
    model = built()
    model.set_weights(first_weights())
    model.predict_on_batch(data[0][0])
    optimizer = CowClipOptimizer.for_model(model, HP, update=update)
    step = tf.function(step_by(model, optimizer), autograph=False)
    for x, y in data:
        step(x, y)
    return model, next(batches(1, 64, 9))[0]


@pytest.mark.slow
@pytest.mark.parametrize("use", [_only_made, _back_to_the_first, _in_two_models, _predicted_before])
def test_several_optimizers_of_a_table(use):
    found = []
    for update in ("exact", "deferred"):
        model, x = use(model_of(update), update, list(batches(30)))
        gc.collect()  # an optimizer that a loop has dropped
        found.append((model.predict_on_batch(x), model.get_weights()))
    (exact, weights), (deferred, others) = found
    np.testing.assert_allclose(deferred, exact, rtol=0, atol=1e-5)
    for mine, other in zip(weights, others, strict=True):
        np.testing.assert_allclose(other, mine, rtol=0, atol=2e-4 * np.abs(mine).max())


def test_a_loop_by_an_optimizer_that_lookups_do_not_know_is_refused():
    model = model_of("deferred")
    first = model.optimizer
    CowClipOptimizer.for_model(model, OTHER, update="deferred")
    step = functools.partial(step_by(model, first), *next(batches(1)))
    with pytest.raises(ValueError, match=r"another optimizer was made for since.*bind\(model\)"):
        step()
    first.bind(model)
    traced = tf.function(step, autograph=False)
    traced()
    second = CowClipOptimizer.for_model(model, OTHER, update="exact")
    with pytest.raises(tf.errors.InvalidArgumentError, match="another optimizer was made for"):
        traced()
    first.bind(model)
    traced()
    del second


def test_a_fit_within_a_fit_of_another_model_is_refused():
    """Keras asks for its step once a fit: it is too late to take the tables back."""
    model = model_of("deferred")
    data = tf.data.Dataset.from_generator(
        lambda: batches(3),
        output_signature=tf.nest.map_structure(
            lambda one: tf.TensorSpec.from_tensor(one), next(batches(1))
        ),
    )
    other = mm.Model(
        next(one for one in model._flatten_layers() if one.name == "embeddings"),
        tf.keras.layers.Flatten(),
        mm.BinaryOutput("y"),
        schema=schema(),
    )
    x, y = next(batches(1))
    other(x)
    other.compile(optimizer=CowClipOptimizer.for_model(other, OTHER, update="exact"), metrics=[])
    between = tf.keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: other.train_on_batch(x, y))
    with pytest.raises(tf.errors.InvalidArgumentError, match="or has begun to train"):
        model.fit(data, epochs=2, verbose=0, callbacks=[between])


def test_a_cell_that_is_run_twice():
    """Of a model that is not built yet."""
    model = deepfm(schema(), embedding_dim=4, mlp=(8,))
    for _ in range(2):
        optimizer = CowClipOptimizer.for_model(model, HP, update="deferred")
        model.compile(optimizer=optimizer, metrics=[])
    model.train_on_batch(*next(batches(1)))


@pytest.mark.slow
def test_another_optimizer_while_a_model_predicts():
    model = trained("deferred", 3)
    x = tf.data.Dataset.from_tensors(next(batches(1))[0]).repeat(3)
    expected = model.predict(x, verbose=0)
    made = []

    def make(*_):
        made.append(CowClipOptimizer.for_model(model, OTHER, update="deferred"))

    callback = tf.keras.callbacks.LambdaCallback(on_predict_batch_end=make)
    np.testing.assert_allclose(
        model.predict(x, verbose=0, callbacks=[callback]), expected, rtol=1e-5
    )
    assert len(made) == 3


@pytest.mark.parametrize("update", ["exact", "deferred"])
def test_a_layer_is_pickled(update):
    layer = model_of(update).get_layer(index=0)
    layer = next(one for one in layer._flatten_layers() if one.name == "embeddings")
    (spec,) = pickle.loads(pickle.dumps(layer)).table_specs()
    assert spec.access.owner() is None
    assert spec.access.bring_up is None


def test_what_rows_wait_for_is_named_by_its_table():
    """Whichever table a first step comes to first: `tf.train.Checkpoint` goes by names."""
    layers = [FusedEmbeddings(schema(), 4) for _ in range(2)]
    for layer in layers:
        layer.build({})
    specs = [layer.table_specs()[0] for layer in layers]
    part = CowClipAdam(update="deferred")
    part.bind_tables({spec: (True,) * len(SIZES) for spec in specs})
    part._create_all_weights([spec.variable for spec in reversed(specs)])
    names = [part.waiting_of(spec.variable).last.name for spec in specs]
    assert [name.rpartition("last_")[2][0] for name in names] == ["0", "1"]


def test_fields_by_name():
    exact, deferred = (trained(update, clip_tables=["item"]) for update in ("exact", "deferred"))
    x = next(batches(1, 64, 9))[0]
    gap = deferred.predict_on_batch(x) - exact.predict_on_batch(x)
    assert np.abs(gap).max() < 1e-5


@pytest.mark.slow
def test_tables_of_float64():
    tf.keras.mixed_precision.set_global_policy("float64")
    try:
        found = []
        for update in ("exact", "deferred"):
            model = built()
            model.set_weights(first_weights())
            assert model.trainable_variables[0].dtype == tf.float64
            optimizer = CowClipOptimizer.for_model(model, HP, update=update)
            model.compile(optimizer=optimizer, metrics=[])
            for x, y in batches(40):
                model.train_on_batch(x, y)
            found.append(model.get_weights())
        for mine, other in zip(*found, strict=True):
            np.testing.assert_allclose(other, mine, rtol=0, atol=2e-4 * np.abs(mine).max())
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")


def test_steps_that_float32_cannot_number_are_refused():
    """Rows would be taken for current that are a step late."""
    model = trained_again("deferred", 1)
    model.optimizer.catch_up()
    for part in model.optimizer.optimizers[:2]:
        part.iterations.assign(2**24 - 1)
    x, y = next(batches(1))
    model.train_on_batch(x, y)
    with pytest.raises(tf.errors.InvalidArgumentError, match="at most 16777216 steps"):
        model.train_on_batch(x, y)


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


def test_rows_are_read_and_set_as_they_are_now():
    exact, deferred = (trained_again(update, 15) for update in ("exact", "deferred"))
    tables = [
        next(layer for layer in model._flatten_layers() if layer.name == "embeddings")
        for model in (exact, deferred)
    ]
    values = [table._whole_table().numpy() for table in tables]
    np.testing.assert_allclose(*values, rtol=1e-4, atol=1e-7)


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


@pytest.mark.parametrize("of", ["model", "file", "layer"])
def test_copies_have_rows_as_they_are_now(of):
    """Of a copy no optimizer knows what its rows wait for."""
    found = []
    for update in ("exact", "deferred"):
        model = trained_again(update, 20)
        if of == "layer":
            layers = model._flatten_layers()
            table = next(layer for layer in layers if layer.name == "embeddings")
            found.append(copy.deepcopy(table).table.numpy())
            continue
        twin = copy.deepcopy(model) if of == "model" else pickle.loads(pickle.dumps(model))
        found.append(twin.predict_on_batch(next(batches(1, 64, 9))[0]))
    np.testing.assert_allclose(*found, rtol=2e-4, atol=2e-4 * np.abs(found[0]).max())


@pytest.mark.slow
@pytest.mark.parametrize("another", ["deferred", None])
def test_rows_catch_up_before_another_optimizer_takes_over(another):
    """None: one of Keras's."""
    models = []
    for update in ("exact", "deferred"):
        model = trained(update, 20)
        hp = HP.replace(embedding_lr=2e-3)
        optimizer = another and CowClipOptimizer.for_model(model, hp, update=another)
        model.compile(optimizer=optimizer or tf.keras.optimizers.legacy.SGD(0.1), metrics=[])
        models.append(model)
    assert far(*models) < 2e-4


def test_what_it_cannot_do_is_refused():
    schedule = tf.keras.optimizers.schedules.CosineDecay(1e-3, 100)
    with pytest.raises(ValueError, match="needs a number as learning rate of the embeddings"):
        model_of("deferred", embedding_schedule=schedule)
    with pytest.raises(ValueError, match=r"clip_ratio of at least 2 \* l2"):
        model_of("deferred", HP.replace(l2=0.1, embedding_lr=1e-6, clip_ratio=0.1))
    with pytest.raises(ValueError, match="learning_rate \\* l2 is at most"):
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
