"""The deferred mode where tables have no part in some steps, or another optimizer comes to them."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tensorflow as tf

from merlin_cowclip.models import FusedEmbeddings
from merlin_cowclip.plugins import CowClipAdam, CowClipOptimizer

from .test_deferred import HP, SIZES, batches, built, far, first_weights, schema, trained

pytestmark = pytest.mark.usefixtures("graphs_as_traced")
WIDE = HP.replace(init_stddev=0.05)
OTHERS = (tf.errors.InvalidArgumentError, ValueError)
TAKEN = "a step on tables that another optimizer was made for since"


class TwoTasks(tf.keras.Model):
    """A table and a head for each of two tasks; the second table is looked up first."""

    def __init__(self):
        super().__init__()
        tf.keras.utils.set_random_seed(3)
        self.tables = [FusedEmbeddings(schema(), 4, name=name, stddev=0.05) for name in "ab"]
        self.heads = [tf.keras.layers.Dense(1) for _ in range(2)]

    def task(self, x, number):
        rows = tf.reshape(self.tables[number](x), [-1, 4 * len(SIZES)])
        return tf.sigmoid(self.heads[number](rows))

    def call(self, x, training=False):
        return self.task(x, 0) if training else self.task(x, 1) + self.task(x, 0)


def step_of(model, optimizer, output=None):
    def step(x, y):
        with tf.GradientTape() as tape:
            found = model(x, training=True) if output is None else output(x)
            loss = tf.reduce_mean(tf.keras.losses.binary_crossentropy(y, found))
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

    return step


@pytest.mark.slow
@pytest.mark.parametrize("turns", [(0, 1), (0, 0, 0, 1)])
def test_two_tasks_in_steps_of_their_own(turns):
    """Each is traced when the other's table may have no moments yet."""
    models = []
    for update in ("deferred", "exact"):
        model = TwoTasks()
        model(next(batches(1))[0])
        optimizer = CowClipOptimizer.for_model(model, WIDE, update=update)
        tasks = [functools.partial(model.task, number=number) for number in range(2)]
        steps = [tf.function(step_of(model, optimizer, task), autograph=False) for task in tasks]
        for number, batch in enumerate(batches(60)):
            steps[turns[number % len(turns)]](*batch)
        optimizer.catch_up()
        models.append(model)
    assert far(*models) < 2e-4


@pytest.mark.slow
def test_a_table_without_a_gradient_that_is_read_in_between():
    """It is made by a prediction, once the step is traced."""
    found, models = [], []
    for update in ("deferred", "exact"):
        model = TwoTasks()
        optimizer = CowClipOptimizer.for_model(model, WIDE, update=update)
        model.compile(optimizer=optimizer, loss="binary_crossentropy")
        x = next(batches(1, seed=5))[0]
        for number, batch in enumerate(batches(30)):
            model.train_on_batch(*batch)
            if number == 3:
                model.predict_on_batch(x)
        found.append(model.predict_on_batch(x))
        optimizer.catch_up()
        models.append(model)
    assert far(*models) < 2e-4
    np.testing.assert_allclose(*found, rtol=1e-5)


@pytest.mark.slow
def test_each_table_has_a_name_of_its_own_whichever_is_looked_up_first():
    """`tf.train.Checkpoint` goes by them; Keras's `set_weights` by the order."""

    class Both(TwoTasks):
        def call(self, x, training=False):
            return self.task(x, 1) + self.task(x, 0)

    model = Both()
    optimizer = CowClipOptimizer.for_model(model, WIDE, update="deferred")
    model.compile(optimizer=optimizer, loss="binary_crossentropy")
    model.train_on_batch(*next(batches(1)))
    part = optimizer.optimizers[0]
    specs = optimizer.table_specs
    names = [part.waiting_of(spec.variable).last.name for spec in specs]
    assert [name.rpartition("last_")[2][0] for name in names] == ["0", "1"]
    in_order = [w.ref() for w in part.weights if w.shape.rank == 2]
    expected = [
        variable.ref()
        for spec in specs
        for variable in (
            *(part.get_slot(spec.variable, name) for name in ("m", "v")),
            part.waiting_of(spec.variable).last,
        )
    ]
    assert in_order == expected


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("update", ["exact", "lazy"])
def test_no_optimizer_steps_on_rows_that_wait_for_another(update, graph):
    model = built()
    model.set_weights(first_weights())
    first = CowClipOptimizer.for_model(model, HP, update=update)
    step = step_of(model, first)
    step = tf.function(step, autograph=False) if graph else step
    data = list(batches(12))
    for batch in data[:4]:
        step(*batch)
    second = CowClipOptimizer.for_model(model, HP, update="deferred")
    for batch in data[4:8]:
        step_of(model, second)(*batch)
    with pytest.raises(OTHERS, match=TAKEN):
        step(*data[8])
    first.bind(model)
    step(*data[8])
    third = CowClipOptimizer.for_model(model, HP, update="exact")
    step_of(model, third)(*data[9])
    step(*data[10])  # nothing waits: each may go on
    with pytest.raises(OTHERS, match=TAKEN):
        step_of(model, second)(*data[11])


def test_a_fit_within_which_rows_begin_to_wait_for_another():
    model = built()
    inner = CowClipOptimizer.for_model(model, HP, update="deferred")
    outer = CowClipOptimizer.for_model(model, HP, update="exact")
    model.compile(optimizer=outer, metrics=[])

    class Another(tf.keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            inner.bind(self.model)
            step_of(self.model, inner)(*next(batches(1, seed=7)))

    data = tf.data.Dataset.from_generator(
        lambda: batches(3),
        output_signature=(
            {name: tf.TensorSpec([32, 1], tf.int64) for name in SIZES},
            tf.TensorSpec([32, 1], tf.float32),
        ),
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match=TAKEN):
        model.fit(data, epochs=2, verbose=0, callbacks=[Another()])


@pytest.mark.parametrize("to", [0, 1000])
def test_a_parts_count_that_is_set(to):
    """What rows have missed stays what it was."""
    models = []
    for update in ("deferred", "exact"):
        model = built()
        model.set_weights(first_weights())
        model.compile(CowClipOptimizer.for_model(model, HP, update=update), metrics=[])
        for number, batch in enumerate(batches(30)):
            if number == 20:
                for part in model.optimizer.optimizers[:2]:
                    part.iterations.assign(to)
            model.train_on_batch(*batch)
        model.optimizer.catch_up()
        models.append(model)
    assert far(*models) < 2e-4


def test_a_part_alone_has_no_lookups_that_wait():
    layer = FusedEmbeddings(schema(), 4)
    layer.build({})
    (spec,) = layer.table_specs()
    part = CowClipAdam(update="deferred")
    part.bind_tables({spec: (True,) * len(SIZES)})
    x, _ = next(batches(1))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(x) ** 2)
    with pytest.raises(ValueError, match="tables whose rows catch up before they are read"):
        part.apply_gradients([(tape.gradient(loss, spec.variable), spec.variable)])


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 25])
def test_weights_of_the_exact_mode_are_current(tmp_path, steps):
    """Their file knows of no rows that wait, and sets the count of steps."""
    exact, deferred = trained("exact", 15), trained("deferred", steps)
    x = next(batches(1, 64, 5))[0]
    deferred.predict_on_batch(x)
    exact.save_weights(tmp_path / "weights")
    deferred.load_weights(tmp_path / "weights")
    for batch in batches(20, seed=8):
        for model in (exact, deferred):
            model.train_on_batch(*batch)
    deferred.optimizer.catch_up()
    assert far(deferred, exact) < 2e-4
