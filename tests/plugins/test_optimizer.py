"""CowClipOptimizer in Merlin's models: ownership, learning rates, settings, warnings, errors."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from merlin_cowclip.plugins import CowClipAdam, CowClipOptimizer, Hyperparameters
from merlin_cowclip.plugins._tensorflow import Tags, mm

from .merlin_models import (
    BATCH,
    COLD,
    HOT,
    SCHEMA,
    WITH_LIST,
    Schema,
    batch,
    built,
    category,
    dataset,
    fitted,
    ours,
    stock_dlrm,
    stock_wide_and_deep,
)

pytestmark = pytest.mark.usefixtures("graphs_as_traced")

DECAYING = Hyperparameters(BATCH, dense_lr=0.3, embedding_lr=0.2, warmup_epochs=0, decay=True)


def table_of(model, feature):
    tables = (x for x in model._flatten_layers() if isinstance(x, mm.EmbeddingTable))
    return next(x for x in tables if feature in x.features)


@pytest.mark.parametrize(
    ("builder", "schema", "update"),
    [(stock_wide_and_deep, SCHEMA, "exact"), (ours, WITH_LIST, "lazy")],
)
def test_every_variable_is_owned_once_and_moves(builder, schema, update):
    model, optimizer = fitted(builder, schema, update=update)
    owned = optimizer.owned()
    assert [id(o.variable) for o in owned] == [id(v) for v in model.trainable_variables]
    tables = {id(spec.variable) for spec in optimizer.table_specs}
    for variable, part, rule, l2 in owned:
        is_table = id(variable) in tables
        assert isinstance(part, CowClipAdam) is is_table
        assert rule.endswith(update if is_table else "Adam")
        assert l2 == (HOT.l2 if is_table else 0)
        assert np.abs(part.get_slot(variable, "v")).max() > 0
    assert len(optimizer.summary().splitlines()) == 2 + len(owned)
    assert int(optimizer.iterations) == 3


def test_training_is_traced_once(graphs_rewritten):
    model = built(ours, WITH_LIST)
    model.compile(optimizer=CowClipOptimizer.for_model(model, HOT), metrics=[])
    for first in (0, 2):
        model.fit(dataset(WITH_LIST, 2, first=first), verbose=0)
        assert model.train_function.experimental_get_tracing_count() == 1


@pytest.mark.parametrize(
    ("wanted", "builder"), [(["a"], ours), ([Tags.USER_ID], stock_dlrm), ("layer", stock_dlrm)]
)
def test_clip_tables_by_name_tag_and_layer(wanted, builder):
    user = category("a", 50).with_tags([Tags.CATEGORICAL, Tags.USER_ID])
    schema = Schema([user, *(c for c in SCHEMA if c.name != "a")])
    model = built(builder, schema)
    if wanted == "layer":
        wanted = [table_of(model, "a")]
    tight = COLD.replace(clip_ratio=1e-9, clip_floor=0.0, l2=0.0)
    optimizer = CowClipOptimizer.for_model(model, tight, clip_tables=wanted)
    model.compile(optimizer=optimizer, metrics=[], run_eagerly=True)
    model.fit(dataset(schema, 1), verbose=0)
    for spec in optimizer.table_specs:
        part = next(o.optimizer for o in optimizer.owned() if o.variable is spec.variable)
        m = part.get_slot(spec.variable, "m").numpy()
        for i, column in enumerate(spec.columns):
            rows = slice(*spec.row_offsets[i : i + 2])
            named = column.name == "a"
            assert (np.abs(m[rows]).max() < 1e-8) == named, (spec.name, column.name)


@pytest.mark.parametrize(
    ("wanted", "clip", "message"),
    [
        (["a"], None, "with a clip rule"),
        ([], "adaptive_column", "names something"),  # which trained without a clip
        ("ab", "adaptive_column", "must be a list that"),
        (["c"], "adaptive_column", "clip_tables must name"),
    ],
)
def test_clip_tables_must_name_something_trainable(wanted, clip, message):
    with pytest.raises(ValueError, match=f"(?s){message}.*Received: "):
        CowClipOptimizer.for_model(ours(SCHEMA), COLD.replace(clip=clip), clip_tables=wanted)


def test_a_frozen_table_stays_and_its_lookups_are_dropped():
    """The last 1,024 of them were kept: 1 GB at batch size 128K."""
    model = built(stock_dlrm, SCHEMA)
    frozen = table_of(model, "a")
    frozen.trainable = False
    optimizer = CowClipOptimizer.for_model(model, HOT)
    model.compile(optimizer=optimizer, metrics=[], run_eagerly=True)
    before = frozen.table.embeddings.numpy()
    model.fit(dataset(SCHEMA, 2), verbose=0)
    np.testing.assert_array_equal(frozen.table.embeddings, before)
    assert all(o.variable is not frozen.table.embeddings for o in optimizer.owned())
    assert [len(spec.recorder.lookups()) for spec in optimizer.table_specs] == [0, 0]


# Learning rates


def rates_of(model, steps, callbacks=(), **epochs):
    """Both learning rates after each update of a fit."""
    rates = []
    note = tf.keras.callbacks.LambdaCallback(
        on_batch_end=lambda *_, **__: rates.append(model.optimizer.learning_rates())
    )
    model.fit(dataset(SCHEMA, steps), verbose=0, callbacks=[*callbacks, note], **epochs)
    return np.array(rates)


@pytest.mark.parametrize(
    ("options", "second"), [({"total_steps": 12}, {}), ({}, {"initial_epoch": 1})]
)
def test_rates_decay_to_0_over_the_steps_of_fits(options, second):
    """Of three epochs, in two fits, as if not interrupted."""
    model = built(ours, SCHEMA)
    model.compile(optimizer=CowClipOptimizer.for_model(model, DECAYING, **options))
    model.fit(dataset(SCHEMA, 4), verbose=0)
    rates = rates_of(model, 4, epochs=3, **second)
    line = np.maximum(1 - np.arange(4, 4 + len(rates)) / 12, 0)
    np.testing.assert_allclose(rates, line[:, None] * [0.3, 0.2], rtol=1e-5)


def test_a_decay_needs_the_number_of_steps():
    model = ours(SCHEMA)
    model.compile(optimizer=CowClipOptimizer.for_model(model, DECAYING), run_eagerly=True)
    with pytest.raises(ValueError, match=r"total_steps=… to CowClipOptimizer.for_model"):
        model.train_step(batch(SCHEMA))
    optimizer = CowClipOptimizer(DECAYING, total_steps=8)
    assert CowClipOptimizer.from_config(optimizer.get_config()).total_steps == 8
    with pytest.raises(ValueError, match="total_steps cannot change"):
        optimizer.total_steps = 9


def test_a_warm_up_needs_the_steps_per_epoch():
    model = ours(SCHEMA)
    hp = Hyperparameters(BATCH, warmup_epochs=2)
    model.compile(optimizer=CowClipOptimizer.for_model(model, hp), run_eagerly=True)
    with pytest.raises(ValueError, match=r"steps_per_epoch=… to CowClipOptimizer.for_model"):
        model.train_step(batch(SCHEMA))
    for steps in (10, 20):  # set later, also between steps of a custom loop
        model.optimizer.steps_per_epoch = steps
        model.train_step(batch(SCHEMA))
        assert model.optimizer.warmup_steps == 2 * steps
    with pytest.raises(ValueError, match="must be a positive whole number"):
        model.optimizer.steps_per_epoch = 2.5  # half a step would end the warm-up


def test_a_fit_sets_the_length_of_the_warm_up_until_it_is_over():
    """After a trial of two steps, that of the real fit had two steps."""
    model = built(ours, SCHEMA)
    optimizer = CowClipOptimizer.for_model(model, HOT.replace(warmup_epochs=0.5))
    for updates, steps, length in [(0, 2, 1), (1, 7, 3), (2, 9, 4), (5, 90, 4)]:
        optimizer.default_optimizer.iterations.assign(updates)
        optimizer.fit_begins(1, steps)
        assert optimizer.warmup_steps == length


def test_schedules_and_the_warm_up_that_multiplies_that_of_dense_weights():
    linear = tf.keras.optimizers.schedules.PolynomialDecay(0.1, 8, 0.0)
    optimizer = CowClipOptimizer(
        HOT.replace(warmup_epochs=0.5),
        steps_per_epoch=9,
        dense_schedule=linear,
        embedding_schedule=linear,
    )
    assert optimizer.warmup_steps == 4  # ⌊9 / 2⌋
    steps = np.arange(9)
    expected = 0.1 * (1 - steps / 8)
    clipped, _, dense = (
        [float(part.learning_rate(tf.constant(step))) for step in steps]
        for part in optimizer.optimizers
    )
    np.testing.assert_allclose(clipped, expected, atol=2e-8)
    np.testing.assert_allclose(dense, expected * np.minimum(steps / 4, 1), atol=2e-8)


def test_keras_callbacks_scale_all_three_parts():
    model = built(ours, SCHEMA)
    optimizer = CowClipOptimizer.for_model(model, HOT.replace(warmup_epochs=1.0), steps_per_epoch=4)
    model.compile(optimizer=optimizer, metrics=[])

    def check(rates, warm_up, factor):
        expected = np.stack([warm_up * HOT.dense_lr, np.full(len(rates), HOT.embedding_lr)], axis=1)
        np.testing.assert_allclose(rates, factor * expected, rtol=1e-5, atol=2e-8)

    halve = tf.keras.callbacks.LearningRateScheduler(lambda epoch, lr: lr if epoch == 0 else lr / 2)
    rates = rates_of(model, 3, [halve], epochs=2)
    # The warm-up continues underneath.
    check(rates, np.minimum(np.arange(6) / 4, 1), np.repeat([1, 1 / 2], 3)[:, None])
    traces = model.train_function.experimental_get_tracing_count()
    plateau = tf.keras.callbacks.ReduceLROnPlateau("loss", 0.1, patience=1, min_delta=1e3)
    model.fit(dataset(SCHEMA, 2), epochs=2, verbose=0, callbacks=[plateau])
    assert float(optimizer.lr) == pytest.approx(HOT.dense_lr / 20)
    optimizer.steps_per_epoch = 100
    check(rates_of(model, 2), np.array([0.1, 0.11]), 1 / 20)
    assert float(optimizer.optimizers[1]._decayed_lr(tf.float32)) == pytest.approx(0.0025)
    assert model.train_function.experimental_get_tracing_count() == traces
    assert "0.0025" in optimizer.summary()
    assert "0.0005, warm-up" in optimizer.summary()


# Settings


@pytest.mark.parametrize(
    ("is_part", "name", "value", "message"),
    [
        (False, "clipnorm", 1.0, "has no clipnorm.*hyperparameters.clip"),
        (False, "weight_decay", 0.1, "has no weight_decay.*hyperparameters.l2"),
        (False, "beta_1", 0.5, "has no beta_1.*three parts"),
        (False, "learning_rate", -1.0, "learning_rate must be a number that is not negative"),
        (True, "l2", -1.0, "l2 must be a number that is not negative. Received: l2=-1.0"),
        (True, "clip_threshold", 5, "clip_threshold belongs to .* with clip='adaptive_column'"),
        (True, "update", "lazy", "update cannot change after construction"),
        (True, "learning_rate", 0.1, "no learning_rate.*Set optimizer.learning_rate"),
    ],
)
def test_what_cannot_be_set(is_part, name, value, message):
    optimizer = CowClipOptimizer(COLD)
    target = optimizer.optimizers[0] if is_part else optimizer
    before = getattr(target, name, None)
    with pytest.raises(ValueError, match=message):
        setattr(target, name, value)
    assert getattr(target, name, None) == before


def test_what_was_set_on_a_part_is_listed():
    """A linear part without L2, for instance: a step takes it from the part."""
    optimizer = CowClipOptimizer.for_model(built(ours, SCHEMA), HOT)
    optimizer.optimizers[1].l2 = 0.0
    assert {o.optimizer.get_config()["name"]: o[2:] for o in optimizer.owned()} == {
        "clipped": ("clip adaptive_column, exact", HOT.l2),
        "unclipped": ("no clip, exact", 0.0),
        "dense": ("Adam", 0.0),
    }


def test_config_round_trip():
    decay = tf.keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.5)
    one = CowClipOptimizer(
        HOT, update="lazy", clip_tables=["a", Tags.USER_ID], embedding_schedule=decay
    )
    other = tf.keras.optimizers.deserialize(
        tf.keras.optimizers.serialize(one), use_legacy_optimizer=True
    )
    assert type(other) is CowClipOptimizer
    assert other.get_config() == one.get_config()
    assert other.clip_tables == ("a", Tags.USER_ID)
    assert other.hyperparameters == HOT
    assert other.embedding_schedule.get_config() == decay.get_config()


def test_tables_are_initialized_if_asked_and_the_summary_has_their_deviation():
    schema = Schema([category("a", 4000), category("b", 5000), *SCHEMA.excluding_by_name("ab")])
    for options, sigma in (({"init_tables": True}, 0.01), ({}, 0.0289)):
        model = stock_dlrm(schema)
        optimizer = CowClipOptimizer.for_model(model, COLD, **options)
        model(batch(schema)[0])
        lines = [line.split() for line in optimizer.summary().splitlines()]
        assert [line[3] for line in lines if line[1] in ("4,000", "5,000")] == [f"{sigma:g}"] * 2
        a, b = (spec.variable.numpy() for spec in optimizer.table_specs)
        assert (a.std(), b.std()) == (pytest.approx(sigma, rel=0.02),) * 2
        assert not np.array_equal(a[:10], b[:10])
    with pytest.raises(ValueError, match=r"init_tables cannot set.*, which is built"):
        CowClipOptimizer.for_model(model, COLD, init_tables=True)
    with pytest.raises(ValueError, match=r"init_tables cannot.*'embed.*stddev=0.0001"):
        CowClipOptimizer.for_model(ours(schema), COLD.replace(init_stddev=1e-4), init_tables=True)


# Warnings and errors


def fit_warnings(words, fit, *arguments, **options):
    """How many warnings with these words a fit gives; they name this file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(*arguments, verbose=0, **options)
    selected = [one for one in caught if words in str(one.message)]
    assert all(one.filename == __file__ for one in selected)
    return len(selected)


def test_a_fit_of_few_steps_triggers_a_warning():
    model = built(ours, SCHEMA)
    model.compile(optimizer=CowClipOptimizer.for_model(model, COLD), metrics=[])
    for steps, expected in ((30, 0), (2, 1)):
        data = dataset(SCHEMA, steps)
        assert fit_warnings("2 steps per epoch. With fewer than 30", model.fit, data) == expected


@pytest.mark.parametrize("eagerly", [False, True])
@pytest.mark.parametrize("size", [BATCH, 2 * BATCH])
def test_a_batch_of_another_size_triggers_a_warning(size, eagerly):
    table = tf.keras.layers.Embedding(10, 4, "glorot_normal")
    pooling = tf.keras.layers.GlobalAveragePooling1D()
    model = tf.keras.Sequential([table, pooling, tf.keras.layers.Dense(1)])
    model(tf.ones([4, 1], tf.int64))
    hp = COLD.replace(batch_size=size)
    model.compile(CowClipOptimizer.for_model(model, hp), "mse", run_eagerly=eagerly)
    x, y = np.ones([80, 1], np.int64), np.ones([80, 1])  # the last of three batches has 16
    data = tf.data.Dataset.from_tensor_slices((x, y))
    # The first fit has batches of the larger size, whatever the hyperparameters are for.
    for given, of_batches in (
        ({"x": x[:64], "y": y[:64], "batch_size": 64}, 64),
        ({"x": x, "y": y, "batch_size": BATCH}, BATCH),
        ({"x": data.batch(BATCH, drop_remainder=True)}, BATCH),
        ({"x": iter([(x[:BATCH], y[:BATCH]), (x[:16], y[:16])])}, BATCH),
    ):
        expected = int(size != of_batches)
        assert fit_warnings(f"fit has batches of {of_batches}", model.fit, **given) == expected


@pytest.mark.parametrize("train", ["fit", "train_on_batch"])
def test_jit_compile_is_not_supported(train):
    model = built(ours, SCHEMA)
    model.compile(optimizer=CowClipOptimizer.for_model(model, COLD), jit_compile=True)
    with pytest.raises(ValueError, match="without jit_compile"):
        getattr(model, train)(*batch(SCHEMA))


def test_a_step_without_any_gradient_is_an_error():
    optimizer = CowClipOptimizer.for_model(built(ours, SCHEMA), COLD)
    with pytest.raises(ValueError, match="No gradients provided for any variable"):
        optimizer.apply_gradients([(None, tf.Variable([1.0]))])
    optimizer.apply_gradients([])  # as with Keras, where all of a model may be frozen
    assert int(optimizer.iterations) == 0


def test_a_strategy_of_several_replicas_is_not_supported(monkeypatch):
    """Each replica applied the clipped gradients of its own share: tables drifted apart."""
    model = built(ours, SCHEMA)
    optimizer = CowClipOptimizer.for_model(model, COLD)
    two = SimpleNamespace(num_replicas_in_sync=2)
    monkeypatch.setattr(tf.distribute, "get_strategy", lambda: two)
    for call in (
        lambda: optimizer.apply_gradients([(tf.ones(1), tf.Variable([1.0]))]),
        CowClipAdam,
    ):
        with pytest.raises(ValueError, match="several replicas are not supported"):
            call()


def test_unbound_and_bad_arguments():
    with pytest.raises(ValueError, match=r"CowClipOptimizer.for_model\(model, …\)"):
        CowClipOptimizer(COLD).apply_gradients([(tf.ones(2), tf.Variable([1.0, 2.0]))])
    with pytest.raises(ValueError, match=r"hvd.DistributedOptimizer does not add up.*to compile"):
        type("CowClipOptimizer", (CowClipOptimizer,), {"__module__": "horovod._keras"})
    with pytest.raises(ValueError, match="update must be one of exact, lazy, deferred"):
        CowClipOptimizer(COLD, update="Exact")
    with pytest.raises(ValueError, match="must be built before"):
        CowClipOptimizer.for_model(ours(SCHEMA), COLD).summary()
