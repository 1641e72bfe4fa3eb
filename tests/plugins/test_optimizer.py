"""CowClipOptimizer in Merlin's models: ownership, counts, warm-up, configurations, environments."""

from __future__ import annotations

import itertools
import re
import warnings
from types import SimpleNamespace as Replicas

import merlin.io
import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

from merlin_cowclip.models import deepfm
from merlin_cowclip.plugins import CowClipAdam, CowClipOptimizer, Hyperparameters
from merlin_cowclip.plugins._tensorflow import Tags, mm

from .merlin_models import (
    BATCH,
    SCHEMA,
    SHARED,
    WITH_LIST,
    Schema,
    batch,
    category,
    dataset,
    stock_dcn,
    stock_deepfm,
    stock_dlrm,
    stock_wide_and_deep,
)

pytestmark = pytest.mark.usefixtures("graphs_as_traced")

COLD = Hyperparameters(BATCH, warmup_epochs=0.0)
HOT = COLD.replace(embedding_lr=0.05, dense_lr=0.01, l2=1e-3)


def ours(schema):
    return deepfm(schema, embedding_dim=6, mlp=(8,))


MODELS = {
    "stock deepfm": (stock_deepfm, SCHEMA),
    "stock wide and deep": (stock_wide_and_deep, SCHEMA),
    "stock dcn with a list": (stock_dcn, WITH_LIST),
    "stock dlrm, shared table": (stock_dlrm, SHARED),
    "our deepfm with a list": (ours, WITH_LIST),
}


def occurrences(spec, features, num_rows):
    """`cnt` of every row, from the batch itself: a sample that holds an id counts once."""
    counts = np.zeros(num_rows)
    for i, column in enumerate(spec.columns):
        first = spec.row_offsets[i] if len(spec.row_offsets) > 2 else 0
        if column.is_list:
            values = features[f"{column.name}__values"].numpy()
            offsets = features[f"{column.name}__offsets"].numpy()
            for start, stop in itertools.pairwise(offsets):
                counts[[first + k for k in set(values[start:stop])]] += 1
        else:
            np.add.at(counts, first + features[column.name].numpy().ravel(), 1)
    return counts


def built(builder, schema):
    """A model with its variables: its step is traced once, not twice."""
    model = builder(schema)
    model(batch(schema)[0])
    return model


def table_of(model, feature):
    tables = (x for x in model._flatten_layers() if isinstance(x, mm.EmbeddingTable))
    return next(x for x in tables if feature in x.features)


def fitted(builder, schema, hyperparameters=HOT, steps=3, eagerly=False, **options):
    tf.keras.utils.set_random_seed(0)
    model = built(builder, schema)
    optimizer = CowClipOptimizer.for_model(model, hyperparameters, **options)
    model.compile(optimizer=optimizer, metrics=[], run_eagerly=eagerly)
    model.fit(dataset(schema, steps), verbose=0)
    return model, optimizer


@pytest.mark.parametrize(
    ("name", "eagerly"),
    [
        *((name, False) for name in MODELS),
        ("stock dcn with a list", True),
        ("our deepfm with a list", True),
    ],
)
def test_counts_are_samples(monkeypatch, name, eagerly):
    """What the clip is given, in a real training step, against a count over the batch."""
    builder, schema = MODELS[name]
    seen = {}
    original = CowClipAdam._with_l2

    def spy(self, gradient, variable):
        found, rows = original(self, gradient, variable)
        if self.clip is not None:
            spec = self._specs[variable.ref()]
            store = seen.setdefault(
                id(spec), (spec, tf.Variable(tf.zeros(spec.num_rows)) if eagerly else [])
            )[1]
            if eagerly:
                store.assign(
                    tf.tensor_scatter_nd_update(
                        tf.zeros(spec.num_rows), found.indices[:, None], found.counts
                    )
                )
            else:
                store.append((found.indices, found.counts))
        return found, rows

    monkeypatch.setattr(CowClipAdam, "_with_l2", spy)
    model = builder(schema)
    optimizer = CowClipOptimizer.for_model(model, COLD)
    model.compile(optimizer=optimizer, metrics=[], run_eagerly=eagerly)
    if eagerly:
        features, labels = batch(schema)
        model.train_step((features, labels))
        results = {key: (spec, store.numpy()) for key, (spec, store) in seen.items()}
    else:
        model(batch(schema)[0])
        optimizer.create_slots(model.trainable_variables)

        @tf.function
        def step(features, labels):
            seen.clear()
            model.train_step((features, labels))
            return [store[-1] for _, store in seen.values()]

        for features, labels in dataset(schema, 1):
            # The batch's size is unknown to the graph, as a loader's is.
            signature = tf.nest.map_structure(
                lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype), (features, labels)
            )
            found = step.get_concrete_function(*signature)(features, labels)
        results = {}
        for (spec, _), (indices, counts) in zip(list(seen.values()), found, strict=True):
            whole = np.zeros(spec.num_rows)
            whole[indices.numpy()] = counts.numpy()
            results[id(spec)] = (spec, whole)
        features = batch(schema)[0]
    wide = [spec for spec in optimizer.table_specs if spec.width > 1]
    assert set(results) == {id(spec) for spec in wide}
    for spec, counted in results.values():
        expected = occurrences(spec, features, spec.num_rows)
        # Stock list columns look row 0 up for an empty list: absent rows count as 1.
        np.testing.assert_array_equal(counted[expected > 0], expected[expected > 0])
        assert (counted[expected == 0] <= 1).all()


@pytest.mark.parametrize(
    ("name", "update"), [("stock wide and deep", "exact"), ("our deepfm with a list", "lazy")]
)
def test_every_variable_is_owned_once_and_moves(name, update):
    builder, schema = MODELS[name]
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
    summary = optimizer.summary()
    assert len(summary.splitlines()) == 2 + len(owned)
    assert max(map(len, summary.splitlines())) <= 100
    assert "clip adaptive_column" in summary
    assert int(optimizer.iterations) == 3


def test_training_is_traced_once(graphs_rewritten):
    model, _ = fitted(*MODELS["our deepfm with a list"], steps=2)
    assert model.train_function.experimental_get_tracing_count() == 1
    model.fit(dataset(WITH_LIST, 3, first=2), verbose=0)
    assert model.train_function.experimental_get_tracing_count() == 1


def test_the_clip_holds_in_a_model():
    """A huge loss gradient moves a row by no more than its bound allows (SGD-like first step)."""
    tight = COLD.replace(clip_ratio=1e-6, clip_floor=0.0, l2=0.0)
    _model, optimizer = fitted(stock_dlrm, SCHEMA, tight, steps=1)
    free = COLD.replace(clip=None, l2=0.0)
    _, loose = fitted(stock_dlrm, SCHEMA, free, steps=1, eagerly=True)
    features, _ = batch(SCHEMA)
    for spec, other in zip(optimizer.table_specs, loose.table_specs, strict=True):
        # After one step m = 0.1 g.
        g = optimizer.optimizers[0].get_slot(spec.variable, "m").numpy() * 10
        unclipped = loose.optimizers[1].get_slot(other.variable, "m").numpy() * 10
        counts = occurrences(spec, features, spec.num_rows)
        held = counts > 0
        bound = counts * 1e-6 * np.linalg.norm(spec.variable.numpy(), axis=1)
        norms = np.linalg.norm(g, axis=1)
        assert (norms[held] <= bound[held] * 1.05 + 1e-12).all()  # w moved since, a little
        assert (np.linalg.norm(unclipped, axis=1)[held] > 10 * norms[held]).all()


@pytest.mark.parametrize(
    ("clip", "builder"), [("global", stock_dlrm), ("field", ours), ("column", ours)]
)
def test_thresholds_of_one_norm_are_those_of_a_model(clip, builder):
    """The global norm spans all tables."""
    hp = COLD.replace(clip=clip, l2=0.0, clip_threshold=1e-4)
    _, optimizer = fitted(builder, SCHEMA, hp, steps=1, eagerly=True)
    tables = [spec for spec in optimizer.table_specs if spec.width > 1]
    part = optimizer.optimizers[0]
    gradients = [part.get_slot(spec.variable, "m").numpy() * 10 for spec in tables]
    if clip == "global":
        whole = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in gradients))
        assert whole == pytest.approx(1e-4, rel=1e-3)
    if clip == "field":
        for spec, g in zip(tables, gradients, strict=True):
            for start, stop in itertools.pairwise(spec.row_offsets):
                assert np.linalg.norm(g[start:stop]) == pytest.approx(1e-4, rel=1e-3)
    if clip == "column":
        assert max(np.linalg.norm(g, axis=1).max() for g in gradients) <= 1.001e-4


@pytest.mark.parametrize(
    ("wanted", "builder"), [(["a"], ours), ([Tags.USER_ID], stock_dlrm), ("layer", stock_dlrm)]
)
def test_clip_tables_by_name_tag_and_layer(wanted, builder):
    user = category("a", 50).with_tags([Tags.CATEGORICAL, Tags.USER_ID])
    schema = Schema([user, *(c for c in SCHEMA if c.name != "a")])
    tf.keras.utils.set_random_seed(0)
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


def test_clip_tables_must_name_something_trainable():
    model = ours(SCHEMA)
    with pytest.raises(ValueError, match=r"with a clip rule. Received: clip_tables=\['a'\] with"):
        CowClipOptimizer.for_model(model, COLD.replace(clip=None), clip_tables=["a"])
    with pytest.raises(ValueError, match=r"names something.*Received: clip_tables=\[\].*clip=None"):
        CowClipOptimizer.for_model(model, COLD, clip_tables=[])  # which trained without a clip
    for one in ("ab", Tags.USER, model.layers[0]):
        with pytest.raises(ValueError, match="(?s)clip_tables must be a list that.* Received: "):
            CowClipOptimizer.for_model(model, COLD, clip_tables=one)
    with pytest.raises(ValueError, match=r"clip_tables must name.*Received: 'c'.*embeddings"):
        CowClipOptimizer.for_model(model, COLD, clip_tables=["c"])


def test_frozen_tables_stay_and_are_not_owned():
    model = stock_dlrm(SCHEMA)
    frozen = table_of(model, "a")
    frozen.trainable = False
    optimizer = CowClipOptimizer.for_model(model, HOT)
    model.compile(optimizer=optimizer, metrics=[])
    model.fit(dataset(SCHEMA, 1), verbose=0)
    before = frozen.table.embeddings.numpy()
    model.fit(dataset(SCHEMA, 2), verbose=0)
    np.testing.assert_array_equal(frozen.table.embeddings, before)
    assert all(o.variable is not frozen.table.embeddings for o in optimizer.owned())


def test_eager_lookups_of_a_frozen_table_are_dropped():
    """The last 1,024 of them were kept: 1 GB at batch size 128K."""
    tables = [tf.keras.layers.Embedding(9, 2, "glorot_normal") for _ in range(2)]
    given = tf.keras.Input([1], dtype=tf.int64)
    joined = tf.keras.layers.Concatenate()([table(given) for table in tables])
    model = tf.keras.Model(given, tf.keras.layers.Flatten()(joined))
    tables[0].trainable = False
    optimizer = CowClipOptimizer.for_model(model, COLD)
    model.compile(optimizer, "mse", run_eagerly=True)
    model.fit(np.ones([BATCH, 1], np.int64), np.ones([BATCH, 4]), verbose=0)
    assert [len(spec.recorder.lookups()) for spec in optimizer.table_specs] == [0, 0]


def test_the_keys_of_a_checkpoint(tmp_path):
    """By which Keras finds the parts of an optimizer, their settings and their moments."""
    model, optimizer = fitted(ours, SCHEMA, Hyperparameters(BATCH), steps_per_epoch=9, steps=1)
    path = tf.train.Checkpoint(optimizer=optimizer, model=model).write(str(tmp_path / "c"))
    keys = [name.split("/.ATTRIBUTES")[0] for name, _ in tf.train.list_variables(path)]
    parts = {"Optimizer0", "Optimizer1", "dense"}
    hypers = {"beta_1", "beta_2", "decay", "iter"}
    known = {f"{part}/{name}" for part in parts for name in hypers}
    found = {key.partition("/")[2] for key in keys if key.startswith("optimizer/")}
    assert found == known | {"learning_rate", "iter", "warmup_steps"}
    slots = {key.split(".OPTIMIZER_SLOT/")[1] for key in keys if ".OPTIMIZER_SLOT/" in key}
    assert slots == {f"optimizer/{part}/{name}" for part in parts for name in ("m", "v")}


def test_warmup_takes_the_steps_of_fit():
    hp = Hyperparameters(BATCH, warmup_epochs=2)
    _, optimizer = fitted(ours, SCHEMA, hp, steps=4, eagerly=True)
    assert optimizer.warmup_steps == 8
    assert optimizer.default_optimizer.learning_rate.rate.learning_rate == hp.dense_lr
    _, told = fitted(ours, SCHEMA, hp, steps=4, eagerly=True, steps_per_epoch=100)
    assert told.warmup_steps == 200
    model = ours(SCHEMA)
    model.compile(optimizer=CowClipOptimizer.for_model(model, hp), run_eagerly=True)
    with pytest.raises(ValueError, match=r"steps_per_epoch=… to CowClipOptimizer.for_model"):
        model.train_step(batch(SCHEMA))
    for steps in (10, 20):  # set later, also between steps of a loop of one's own
        model.optimizer.steps_per_epoch = steps
        model.train_step(batch(SCHEMA))
        assert model.optimizer.warmup_steps == 2 * steps
    for steps in (-5, 2.5):  # half a step would end the warm-up
        with pytest.raises(ValueError, match=f"must be a positive whole number, .*epoch={steps}"):
            model.optimizer.steps_per_epoch = steps
    model.optimizer.steps_per_epoch = np.float64(30.0)  # as a division gives it
    assert repr(model.optimizer.steps_per_epoch) == "30"


DECAYING = Hyperparameters(BATCH, dense_lr=0.3, embedding_lr=0.2, warmup_epochs=0, decay=True)


def rates_of_fits(*fits, **options):
    """Both learning rates after each update of some fits, of four steps per epoch."""
    model = ours(SCHEMA)
    model.compile(optimizer=CowClipOptimizer.for_model(model, DECAYING, **options))
    found = []
    note = tf.keras.callbacks.LambdaCallback(
        on_batch_end=lambda *_, **__: found.append(model.optimizer.learning_rates())
    )
    for epochs in fits:
        model.fit(dataset(SCHEMA, 4), verbose=0, callbacks=[note], **epochs)
    return np.array(found)


def test_rates_decay_to_0_over_the_steps_of_a_fit():
    line = 1 - np.arange(12) / 12  # of three epochs
    expected = line[:, None] * [0.3, 0.2]
    np.testing.assert_allclose(rates_of_fits({"epochs": 3}), expected, rtol=1e-5)
    in_parts = rates_of_fits({"epochs": 1}, {"epochs": 3}, total_steps=12)
    np.testing.assert_allclose(in_parts[:12], expected, rtol=1e-5)
    assert (in_parts[12:] == 0).all()
    again = rates_of_fits({"epochs": 1}, {"epochs": 3, "initial_epoch": 1})
    np.testing.assert_allclose(again[4:], expected[4:], rtol=1e-5)  # as if not interrupted


def test_a_decay_needs_the_number_of_steps():
    model = ours(SCHEMA)
    model.compile(optimizer=CowClipOptimizer.for_model(model, DECAYING), run_eagerly=True)
    with pytest.raises(ValueError, match=r"total_steps=… to CowClipOptimizer.for_model"):
        model.train_step(batch(SCHEMA))
    with pytest.raises(ValueError, match="update='deferred' requires a number"):
        CowClipOptimizer(DECAYING, update="deferred")
    optimizer = CowClipOptimizer(DECAYING, total_steps=8)
    assert CowClipOptimizer.from_config(optimizer.get_config()).total_steps == 8
    with pytest.raises(ValueError, match="total_steps cannot change"):
        optimizer.total_steps = 9


def dense_steps(model, data, **fit):
    """How far each step moves the bias of the output, in units of Adam's own step."""
    bias, moves = model.trainable_variables[-1], []
    assert bias.shape == (1,)
    part = model.optimizer.default_optimizer

    class Watch(tf.keras.callbacks.Callback):
        def on_train_batch_begin(self, step, logs=None):
            self.before = bias.numpy()

        def on_train_batch_end(self, step, logs=None):
            t = int(part.iterations)
            m, v = (part.get_slot(bias, name).numpy() for name in ("m", "v"))
            unit = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-7)
            moves.append(float((self.before - bias.numpy())[0] / unit[0]))

    callbacks = [*fit.pop("callbacks", []), Watch()]
    model.fit(data, verbose=0, callbacks=callbacks, **fit)
    return np.array(moves)


def test_a_fit_tells_the_length_of_the_warm_up_until_it_is_over():
    """After a trial of two steps, that of the real fit had two steps."""
    model = built(ours, SCHEMA)
    optimizer = CowClipOptimizer.for_model(model, HOT.replace(warmup_epochs=0.5))
    for made, steps, length in [(0, 2, 1), (1, 7, 3), (2, 9, 4), (5, 90, 4)]:
        optimizer.default_optimizer.iterations.assign(made)
        optimizer.fit_begins()
        optimizer.training_begins(steps)
        assert optimizer.warmup_steps == length


def test_a_schedule_of_the_dense_part_is_multiplied_by_the_warm_up():
    decay = tf.keras.optimizers.schedules.PolynomialDecay(0.1, 8, 0.0)
    hp = HOT.replace(warmup_epochs=0.5)
    optimizer = CowClipOptimizer(hp, steps_per_epoch=9, dense_schedule=decay)
    assert optimizer.warmup_steps == 4  # ⌊9 / 2⌋
    found = [float(optimizer.default_optimizer.learning_rate(tf.constant(t))) for t in range(9)]
    expected = 0.1 * (1 - np.arange(9) / 8) * np.minimum(np.arange(9) / 4, 1)
    np.testing.assert_allclose(found, expected, atol=2e-8)


def test_the_first_fit_tells_the_length_of_the_warm_up():
    tf.keras.utils.set_random_seed(0)
    model = built(ours, SCHEMA)
    hp = HOT.replace(warmup_epochs=1.0)
    optimizer = CowClipOptimizer.for_model(model, hp)
    model.compile(optimizer=optimizer, metrics=[])
    rise = [dense_steps(model, dataset(SCHEMA, 4))]
    traces = model.train_function.experimental_get_tracing_count()
    rise.append(dense_steps(model, dataset(SCHEMA, 2)))
    expected = hp.dense_lr * np.minimum(np.arange(6) / 4, 1)
    np.testing.assert_allclose(np.concatenate(rise), expected, rtol=2e-3, atol=2e-7)
    optimizer.steps_per_epoch = 100
    longer = dense_steps(model, dataset(SCHEMA, 2))
    np.testing.assert_allclose(longer, hp.dense_lr * np.array([0.06, 0.07]), rtol=2e-3)
    assert model.train_function.experimental_get_tracing_count() == traces


def table_step(optimizer, model):
    """η of the tables at the next step, from the step itself: an unclipped Adam step is η·m̂/√v̂."""
    clipped, unclipped, _ = optimizer.optimizers
    return [float(part._decayed_lr(tf.float32)) for part in (clipped, unclipped)]


def test_keras_callbacks_scale_all_three_parts():
    tf.keras.utils.set_random_seed(0)
    model = ours(SCHEMA)
    hp = HOT.replace(warmup_epochs=1.0, l2=0.0)
    model(batch(SCHEMA)[0])
    optimizer = CowClipOptimizer.for_model(model, hp, steps_per_epoch=4)
    model.compile(optimizer=optimizer, metrics=[])
    halve = tf.keras.callbacks.LearningRateScheduler(lambda epoch, lr: lr if epoch == 0 else lr / 2)
    whole = dense_steps(model, dataset(SCHEMA, 3), epochs=2, callbacks=[halve])
    # Steps 0 to 2 as they are, 3 to 5 of half the height: the warm-up goes on underneath.
    height = np.minimum(np.arange(6) / 4, 1) * np.repeat([1, 1 / 2], 3)
    np.testing.assert_allclose(whole, hp.dense_lr * height, rtol=2e-3, atol=2e-7)
    np.testing.assert_allclose(table_step(optimizer, model), hp.embedding_lr / 2, rtol=1e-6)
    assert model.history.history["lr"] == [np.float32(0.01), np.float32(0.005)]
    traces = model.train_function.experimental_get_tracing_count()
    plateau = tf.keras.callbacks.ReduceLROnPlateau("loss", 0.1, patience=1, min_delta=1e3)
    model.fit(dataset(SCHEMA, 2), epochs=2, verbose=0, callbacks=[plateau])
    assert float(optimizer.lr) == pytest.approx(0.0005)
    settled = dense_steps(model, dataset(SCHEMA, 2))
    np.testing.assert_allclose(settled, hp.dense_lr / 20, rtol=2e-3)
    np.testing.assert_allclose(table_step(optimizer, model), hp.embedding_lr / 20, rtol=1e-6)
    assert model.train_function.experimental_get_tracing_count() == traces
    assert "0.0025" in optimizer.summary()
    assert "0.0005, warm-up" in optimizer.summary()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("clipnorm", 1.0, r"has no clipnorm. Received: clipnorm=1.0. Use hyperparameters.clip"),
        ("weight_decay", 0.1, "has no weight_decay.*hyperparameters.l2"),
        ("decay", 0.1, "has no decay.*dense_schedule"),
        ("use_ema", True, "has no use_ema. Received: use_ema=True. Give CowClipOptimizer.for_mod"),
        ("beta_1", 0.5, "has no beta_1.*three parts"),
        ("l2", 0.5, "has no l2.*three parts"),
        ("clip_ratio", 0.5, "has no clip_ratio.*three parts"),
        ("learning_rate", -1.0, "learning_rate must be a number that is not negative"),
    ],
)
def test_what_cannot_be_had_is_refused(name, value, message):
    optimizer = CowClipOptimizer(COLD)
    with pytest.raises(ValueError, match=message):
        setattr(optimizer, name, value)
    if name.endswith("clipnorm"):
        with pytest.raises(TypeError, match=name):
            CowClipOptimizer(COLD, **{name: value})
        with pytest.raises(ValueError, match=f"A CowClipAdam has no {name}"):
            setattr(CowClipAdam(), name, value)


def test_the_summary_tells_what_was_set_on_a_part():
    """A linear part without L2, for instance: a step takes it from the part."""
    model = built(ours, SCHEMA)
    optimizer = CowClipOptimizer.for_model(model, HOT)
    clipped, unclipped, _ = optimizer.optimizers
    unclipped.l2 = 0.0
    told = {o.optimizer.get_config()["name"]: o[2:] for o in optimizer.owned()}
    assert told == {
        "clipped": ("clip adaptive_column, exact", HOT.l2),
        "unclipped": ("no clip, exact", 0.0),
        "dense": ("Adam", 0.0),
    }
    for part, name, value in ((clipped, "clip", None), (unclipped, "update", "lazy")):
        with pytest.raises(ValueError, match=f"{name} cannot change after construction"):
            setattr(part, name, value)
    for part in optimizer.optimizers:
        with pytest.raises(ValueError, match=r"no learning_rate.*Set optimizer.learning_rate"):
            part.learning_rate = 0.1


def test_a_step_without_any_gradient_is_an_error():
    model = ours(SCHEMA)
    model(batch(SCHEMA)[0])
    optimizer = CowClipOptimizer.for_model(model, COLD)

    def step(with_one):
        gradients = [None] * len(model.trainable_variables)
        gradients[-1] = tf.ones(model.trainable_variables[-1].shape) if with_one else None
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    with pytest.raises(ValueError, match="No gradients provided for any variable"):
        step(False)
    step(True)
    assert int(optimizer.iterations) == 1
    optimizer.apply_gradients([])  # as with Keras, where all of a model may be frozen
    assert int(optimizer.iterations) == 1


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("l2", -1.0, "l2 must be a number that is not negative. Received: l2=-1.0"),
        ("clip_ratio", float("nan"), "clip_ratio must be a positive number"),
        ("clip_threshold", 5, "clip_threshold belongs to .* with clip='adaptive_column'"),
    ],
)
def test_a_setting_of_a_part_is_checked_when_it_is_set(name, value, message):
    part = CowClipOptimizer(COLD).optimizers[0]
    before = getattr(part, name)
    with pytest.raises(ValueError, match=message):
        setattr(part, name, value)
    assert getattr(part, name) == before


def test_jit_compile_is_refused():
    """It failed in every call, by what XLA said of the ops of a lookup or of an update."""
    model = built(ours, SCHEMA)
    optimizer = CowClipOptimizer.for_model(model, COLD)
    model.compile(optimizer=optimizer, jit_compile=True)
    refused = pytest.raises(ValueError, match=r"without jit_compile.*Leave it out, or compile")
    with refused:
        model.fit(dataset(SCHEMA, 1), verbose=0)
    with refused:
        model.train_on_batch(*batch(SCHEMA))


def test_a_fit_of_few_steps_is_said():
    model = built(ours, SCHEMA)
    model.compile(optimizer=CowClipOptimizer.for_model(model, COLD), metrics=[])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.train_on_batch(*batch(SCHEMA))
        for steps in (30, 2):
            model.fit(dataset(SCHEMA, steps), verbose=0)
    (said,) = (w for w in caught if "steps per epoch" in str(w.message))
    assert "This fit has 2 steps per epoch. With fewer than 30" in str(said.message)
    assert said.filename == __file__


def deviations(model):
    tables = [v.numpy() for v in model.trainable_variables if v.shape[0] in (4000, 5000)]
    assert len(tables) == 2
    return [t.std() for t in tables], tables


@pytest.mark.parametrize("builder", [stock_dlrm, ours])
def test_tables_are_initialized_if_asked_and_the_summary_has_their_deviation(builder):
    schema = Schema([category("a", 4000), category("b", 5000), *SCHEMA.excluding_by_name("ab")])
    features, _ = batch(schema)
    if builder is ours:
        with pytest.raises(ValueError, match=r"init_tables cannot.*'embed.*stddev=0.0001"):
            CowClipOptimizer.for_model(
                ours(schema), COLD.replace(init_stddev=1e-4), init_tables=True
            )
        return
    model, built = builder(schema), builder(schema)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizers = [
            CowClipOptimizer.for_model(model, COLD, init_tables=True),
            CowClipOptimizer.for_model(built, COLD),
        ]
    model(features)
    built(features)
    for optimizer, sigma in zip(optimizers, ("0.01", "0.0289"), strict=True):
        lines = [line.split() for line in optimizer.summary().splitlines()]
        assert [line[3] for line in lines if line[1] in ("4,000", "5,000")] == [sigma, sigma]
    (a, b), tables = deviations(model)
    assert (a, b) == (pytest.approx(0.01, rel=0.02), pytest.approx(0.01, rel=0.02))
    assert not np.array_equal(tables[0][:10], tables[1][:10])
    with pytest.raises(ValueError, match=r"init_tables cannot set.*, which is built"):
        CowClipOptimizer.for_model(built, COLD, init_tables=True)


@pytest.mark.parametrize("eagerly", [False, True])
@pytest.mark.parametrize("told", [BATCH, 2 * BATCH])
def test_a_batch_of_another_size_is_said_for_arrays_and_datasets(told, eagerly):
    """Hyperparameters for 8 trained at 800 without a word."""
    table = tf.keras.layers.Embedding(10, 4, "glorot_normal")
    pooling = tf.keras.layers.GlobalAveragePooling1D()
    model = tf.keras.Sequential([table, pooling, tf.keras.layers.Dense(1)])
    model(tf.ones([4, 1], tf.int64))
    hp = COLD.replace(batch_size=told)
    model.compile(CowClipOptimizer.for_model(model, hp), "mse", run_eagerly=eagerly)
    x, y = np.ones([80, 1], np.int64), np.ones([80, 1])  # the last of three batches has 16
    data = tf.data.Dataset.from_tensor_slices((x, y))
    sequence = [(x[:BATCH], y[:BATCH]), (x[:16], y[:16])]
    for given in (
        {"x": x, "y": y, "batch_size": BATCH},
        {"x": data.batch(BATCH)},
        {"x": data.batch(BATCH, drop_remainder=True)},
        {"x": iter(sequence)},
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.fit(**given, verbose=0)
        said = [w for w in caught if "batches of" in str(w.message)]
        assert len(said) == (told != BATCH), given
        assert all(w.filename == __file__ for w in said)


@pytest.mark.parametrize("told", [BATCH, 2 * BATCH])
def test_a_batch_of_another_size_is_said(told):
    frame = pd.DataFrame({"a": [1, 2, 3, 4] * 20, "x": 0.5, "y": 1}).astype(
        {"x": "float32", "y": "float32"}
    )
    schema = SCHEMA.select_by_name(["a", "x", "y"])
    data = merlin.io.Dataset(frame, schema=schema)
    model = mm.Model(mm.InputBlockV2(schema.excluding_by_tag(Tags.TARGET)), mm.BinaryOutput("y"))
    hp = COLD.replace(batch_size=told)
    model.compile(optimizer=CowClipOptimizer.for_model(model, hp), metrics=[])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(data, batch_size=BATCH, verbose=0)  # 80 rows: the last batch is a smaller one
    said = [w for w in caught if "batches of" in str(w.message)]
    assert len(said) == (told != BATCH)
    if said:
        assert re.search(r"of 64 samples, but this fit has batches of 32", str(said[0].message))
        assert said[0].filename == __file__


@pytest.mark.extended
def test_mixed_precision_clips_unscaled_gradients():
    results = {}
    for policy in ("float32", "mixed_float16"):
        tf.keras.mixed_precision.set_global_policy(policy)
        try:
            model, optimizer = fitted(ours, SCHEMA, HOT.replace(clip_ratio=0.01), steps=4)
        finally:
            tf.keras.mixed_precision.set_global_policy("float32")
        scaled = isinstance(model.optimizer, tf.keras.mixed_precision.LossScaleOptimizer)
        assert scaled == (policy == "mixed_float16")
        assert model.trainable_variables[0].dtype == tf.float32
        results[policy] = [v.numpy() for v in model.trainable_variables]
        steps = int(optimizer.iterations)
    assert 1 <= steps <= 4  # the first steps find the loss scale
    if steps == 4:
        table32, table16 = (r[0] for r in results.values())
        np.testing.assert_allclose(table16, table32, atol=0.02)


def test_a_second_reader_of_the_variable_is_noticed():
    """A layer that gathers from a table's variable past the table would falsify the counts."""

    class Reader(tf.keras.layers.Layer):
        def __init__(self, variable):
            super().__init__()
            self.read = variable

        def call(self, inputs):
            return inputs + tf.reduce_sum(tf.gather(self.read(), [1, 1, 2]))

        def compute_output_shape(self, shape):
            return shape

    model = ours(SCHEMA)
    model(batch(SCHEMA)[0])
    optimizer = CowClipOptimizer.for_model(model, COLD)
    spec = optimizer.table_specs[0]
    model.blocks[-1].pre = Reader(lambda: spec.variable)
    model.compile(optimizer=optimizer, metrics=[])
    with pytest.raises(Exception, match=rf"Cannot count the ids of table .*{spec.name}.*67. .64"):
        model.fit(dataset(SCHEMA, 1), verbose=0)


def test_a_strategy_of_several_replicas_is_refused(monkeypatch):
    """Each replica applied the clipped gradients of its own share: tables drifted apart."""
    model = built(ours, SCHEMA)
    optimizer = CowClipOptimizer.for_model(model, COLD)
    one = tf.Variable([1.0])
    monkeypatch.setattr(tf.distribute, "get_strategy", lambda: Replicas(num_replicas_in_sync=2))
    for call in (
        lambda: optimizer.bind(model),
        lambda: optimizer.training_begins(None),  # a fit in the scope, of a model made outside
        lambda: optimizer.apply_gradients([(tf.ones(1), one)]),
        lambda: CowClipAdam(),
    ):
        with pytest.raises(ValueError, match=r"several replicas are not supported.*Use Horovod"):
            call()


def test_unbound_and_bad_arguments():
    no_model = pytest.raises(ValueError, match=r"CowClipOptimizer.for_model\(model, …\)")
    with no_model:
        CowClipOptimizer(COLD).apply_gradients([(tf.ones(2), tf.Variable([1.0, 2.0]))])
    for model in (ours(SCHEMA), tf.keras.Sequential([tf.keras.layers.Embedding(3, 2)])):
        with no_model:
            model.compile(optimizer=CowClipOptimizer(COLD))
    with pytest.raises(ValueError, match=r"hvd.DistributedOptimizer does not add up.*to compile"):
        type("CowClipOptimizer", (CowClipOptimizer,), {"__module__": "horovod._keras"})
    with pytest.raises(ValueError, match="steps_per_epoch must be a positive whole number"):
        CowClipOptimizer(COLD, steps_per_epoch=0)
    for name in ("add", "update"):
        with pytest.raises(NotImplementedError, match="takes no further optimizers"):
            getattr(CowClipOptimizer(COLD), name)(mm.OptimizerBlocks("adam", []))
    with pytest.raises(ValueError, match="update must be one of exact, lazy, deferred"):
        CowClipOptimizer(COLD, update="Exact")
    with pytest.raises(ValueError, match="must be built before"):
        CowClipOptimizer.for_model(ours(SCHEMA), COLD).summary()


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


@pytest.mark.extended
def test_dense_layers_of_ones_own_may_be_jit_compiled():
    class Compiled(tf.keras.layers.Dense):
        @tf.function(jit_compile=True)
        def call(self, inputs):
            return super().call(inputs)

    table = tf.keras.layers.Embedding(10, 4, "glorot_normal")
    model = tf.keras.Sequential([table, tf.keras.layers.GlobalAveragePooling1D(), Compiled(1)])
    model(tf.ones([4, 1], tf.int64))
    kernel = model.layers[2].kernel.numpy()
    optimizer = CowClipOptimizer.for_model(model, HOT)
    model.compile(optimizer=optimizer, loss="mse")
    model.fit(tf.ones([4, 1], tf.int64), tf.ones([4, 1]), verbose=0)
    assert np.abs(model.layers[2].kernel.numpy() - kernel).max() > HOT.dense_lr / 2


@pytest.mark.extended
def test_keras_schedules():
    decay = tf.keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    model, optimizer = fitted(
        ours, SCHEMA, HOT, steps=1, dense_schedule=decay, embedding_schedule=decay
    )
    tables = optimizer.optimizers[0]
    start = [v.numpy() for v in model.trainable_variables]
    assert optimizer.default_optimizer.learning_rate.rate is decay
    assert tables.learning_rate.rate is decay
    model.fit(dataset(SCHEMA, 30), verbose=0)
    settled = [v.numpy() for v in model.trainable_variables]
    model.fit(dataset(SCHEMA, 3), verbose=0)  # η is 0.1 · 2^-31 by now
    for a, b, v in zip(start, settled, model.trainable_variables, strict=True):
        assert np.abs(a - b).max() > 1e-4
        np.testing.assert_allclose(v, b, atol=1e-7)
