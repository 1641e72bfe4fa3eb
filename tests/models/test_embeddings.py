"""FusedEmbeddings against NumPy: rows, ids out of range, counts, saving."""

from __future__ import annotations

import copy
import functools
import json
import re
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

from merlin_cowclip.models import MODELS as MODELS_BY_NAME
from merlin_cowclip.models import FusedEmbeddings, deepfm
from merlin_cowclip.models.embeddings import TableInitializer
from merlin_cowclip.plugins import (
    CowClipAdam,
    CowClipOptimizer,
    HasTables,
    Hyperparameters,
    Lookup,
)
from merlin_cowclip.plugins._stack import mm
from merlin_cowclip.plugins.counting import count_sparse, samples_per_row
from merlin_cowclip.workflows.quiet import quiet_imports

from ..plugins.merlin_models import BATCH, NUMBER, TARGET, batch, category, dataset
from ..plugins.merlin_models.families import TOWERS
from ..saves import quick_saves
from .embeddings import (
    DIM,
    GENRES,
    ITEM,
    OFFSETS,
    ROWS,
    SCHEMA,
    SIZES,
    TAGS,
    USER,
    column,
    inputs,
    layer_of,
    ragged,
)

with quiet_imports():
    from merlin.io import Dataset
    from merlin.schema import ColumnSchema, Schema, Tags

pytestmark = pytest.mark.usefixtures("graphs_as_traced")


def padded(lists, to=4):
    return np.array([row + [0] * (to - len(row)) for row in lists])


def combined(table, first, lists, combiner):
    """One list column by a loop: padding (id 0) is no id; no id at all gives zeros."""
    out = []
    for ids in lists:
        rows = [table[first + i] for i in ids if i != 0]
        total = np.sum(rows, axis=0) if rows else np.zeros(DIM)
        by = {"sum": 1.0, "mean": len(rows), "sqrtn": len(rows) ** 0.5}[combiner]
        out.append(total / (by or 1.0))
    return np.array(out)


def expected(table, combiner="mean"):
    per_list = combiner if isinstance(combiner, dict) else dict.fromkeys(SIZES, combiner)
    return np.stack(
        [
            [table[u] for (u,) in USER],
            [table[OFFSETS["item"] + i] for (i,) in ITEM],
            combined(table, OFFSETS["genres"], GENRES, per_list["genres"]),
            combined(table, OFFSETS["tags"], TAGS, per_list["tags"]),
        ],
        axis=1,
    )


# Lookup


def test_every_field_owns_a_range_of_rows():
    layer = layer_of()
    assert layer.fields == ("user", "item", "genres", "tags")  # one-hot fields first
    assert layer.row_offsets == (0, 7, 12, 18, ROWS)
    assert layer.cardinalities == {"user": 7, "item": 5, "genres": 6, "tags": 4}
    assert layer.table.shape == (ROWS, DIM)
    (spec,) = layer.table_specs()
    assert (spec.row_offsets, spec.width, spec.num_rows) == (layer.row_offsets, DIM, ROWS)
    assert spec.variable is layer.table
    assert isinstance(layer, HasTables)
    assert layer.table_specs()[0] is spec


@pytest.mark.parametrize("combiner", ["mean", "sum", "sqrtn"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"genres": ragged([[[i] for i in row] for row in GENRES], ragged_rank=1)},
        {"genres": tf.constant(padded(GENRES)), "tags": tf.constant(padded(TAGS))},
        {"genres": tf.constant(padded(GENRES)[..., None])},
        {"user": tf.constant(np.ravel(USER))},
        {"user": tf.constant(USER, tf.int32), "item": tf.constant(np.ravel(ITEM), tf.int32)},
    ],
    ids=["ragged", "ragged b×n×1", "dense b×n", "dense b×n×1", "one-hot b, mixed types", "int32"],
)
@pytest.mark.parametrize("in_graph", [False, True])
def test_lookup(combiner, changes, in_graph):
    layer = layer_of(combiner)
    call = tf.function(layer) if in_graph else layer
    found = call(inputs(**changes))
    assert found.shape == (4, 4, DIM)
    np.testing.assert_allclose(found, expected(layer.table.numpy(), combiner), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("names", "columns"), [(("user", "item"), [0, 1]), (("genres", "tags"), [2, 3])]
)
def test_only_one_hot_or_only_lists(names, columns):
    layer = layer_of(schema=SCHEMA.select_by_name(list(names)))
    table = np.zeros((ROWS, DIM))
    shift = OFFSETS[names[0]]
    table[shift : shift + layer.row_offsets[-1]] = layer.table.numpy()
    np.testing.assert_allclose(layer(inputs()), expected(table)[:, columns], rtol=1e-5, atol=1e-6)


def test_columns_that_are_no_categories_are_left_out():
    schema = SCHEMA + Schema(
        [
            ColumnSchema("price", tags=[Tags.CONTINUOUS], dtype="float32"),
            column("clicked", 2, tags=(Tags.CATEGORICAL, Tags.TARGET)),
        ]
    )
    assert layer_of(schema=schema).fields == ("user", "item", "genres", "tags")


def test_a_combiner_for_each_list():
    combiner = {"tags": "sum", "genres": "sqrtn"}
    layer = layer_of(combiner)
    by_hand = expected(layer.table.numpy(), combiner)
    np.testing.assert_allclose(layer(inputs()), by_hand, rtol=1e-5, atol=1e-6)
    other = expected(layer.table.numpy(), {"tags": "sqrtn", "genres": "sum"})
    assert np.abs(by_hand - other).max() > 0.05


@pytest.mark.parametrize(("combiner", "wanted"), [("sum", 600.0), ("mean", 0.1), ("sqrtn", 7.746)])
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float64"])
def test_long_lists_are_combined_in_full_precision(combiner, wanted, policy):
    """6,000 × 0.1: added up in half precision, 256; counted in it, 2,048 ids."""
    schema = SCHEMA.select_by_name(["genres"])
    layer = FusedEmbeddings(
        schema, DIM, combiner=combiner, dtype=tf.keras.mixed_precision.Policy(policy)
    )
    layer.build({})
    layer.table.assign(tf.fill(layer.table.shape, tf.constant(0.1, layer.table.dtype)))
    found = layer({"genres": tf.ragged.constant([[3] * 6_000], dtype=tf.int64)})
    assert found.dtype == layer.compute_dtype
    precision = {"mixed_float16": 1e-3, "mixed_bfloat16": 8e-3, "float64": 1e-4}[policy]
    np.testing.assert_allclose(tf.cast(found, tf.float64)[0, 0], [wanted] * DIM, rtol=precision)


def test_a_field_of_one_id():
    schema = Schema([column("user", 7), column("site", 1), column("item", 5)])
    layer = layer_of(schema=schema)
    assert layer.row_offsets == (0, 7, 8, 13)
    table = layer.table.numpy()
    assert not table[7].any()  # padding's
    found = layer(inputs(site=tf.zeros([4, 1], tf.int64))).numpy()
    np.testing.assert_array_equal(found[:, 1], table[[7] * 4])
    np.testing.assert_array_equal(found[:, 2], table[[8 + i for (i,) in ITEM]])
    assert layer.rows("site", [0]).tolist() == [7]
    with pytest.raises(ValueError, match="numbers from 0 to 0. Received: None"):
        layer.rows("site", [None])  # no id is missing: it had the next field's row


# Ids out of range


def changed_in_one_place(field: str, bad: int) -> dict[str, Any]:
    """The inputs with one id, of the third sample, replaced."""
    if field in ("user", "item"):
        ids = np.array({"user": USER, "item": ITEM}[field])
        ids[2, 0] = bad
        return inputs(**{field: tf.constant(ids)})
    lists = [list(row) for row in {"genres": GENRES, "tags": TAGS}[field]]
    lists[2] = [*lists[2], bad]
    return inputs(**{field: ragged(lists)})


def refusal(field: str, cardinality: int, received: int) -> str:
    """The message, as it is printed eagerly (lines) and in a graph (brackets)."""
    return (
        r"ids must be from 0 to cardinality - 1\. Field, cardinality, received:"
        rf"[^\w-]+(b')?{field}\W+{cardinality}[^\w-]+{received}\b"
    )


OUT_OF_RANGE = [
    *[(name, size) for name, size in SIZES.items()],
    *[(name, -1) for name in SIZES],
    ("item", 10**12),
    ("user", np.iinfo(np.int64).min),  # what NaN becomes
    ("genres", np.iinfo(np.int64).min),
]


@pytest.fixture(scope="module", params=["eager", "graph"])
def calls(request):
    """A layer's call and its `lookup`, as they are or traced, once for all ids."""
    layer = layer_of()
    lookups = {name: functools.partial(layer.lookup, name) for name in SIZES}
    if request.param == "eager":
        return layer, lookups
    return tf.function(layer), {name: tf.function(call) for name, call in lookups.items()}


@pytest.mark.parametrize(("field", "bad"), OUT_OF_RANGE)
def test_an_id_out_of_range_is_refused(calls, field, bad):
    call, lookups = calls
    given = changed_in_one_place(field, bad)
    for refusing in (lambda: call(given), lambda: lookups[field](given[field])):
        with pytest.raises(tf.errors.InvalidArgumentError) as caught:
            refusing()
        assert re.search(refusal(field, SIZES[field], bad), str(caught.value)), caught.value


@pytest.mark.parametrize("in_graph", [False, True])
def test_the_first_and_the_last_id_of_each_field(in_graph):
    layer = layer_of("sum")
    table = layer.table.numpy()
    call = tf.function(layer) if in_graph else layer
    last = {"user": [[6]], "item": [[4]], "genres": [[5]], "tags": [[3]]}
    found = call({name: tf.constant(ids, tf.int64) for name, ids in last.items()})
    np.testing.assert_array_equal(found[0], table[[6, 11, 17, 21]])
    first = call({name: tf.zeros([1, 1], tf.int64) for name in SIZES})
    np.testing.assert_array_equal(first[0], np.zeros((4, DIM)))


@pytest.mark.parametrize("in_graph", [False, True])
def test_no_id_at_all(in_graph):
    """Lists that are all empty, and a batch without a sample."""
    layer = layer_of()
    call = tf.function(layer) if in_graph else layer
    found = call(inputs(tags=ragged([[], [], [], []], ragged_rank=1))).numpy()
    np.testing.assert_allclose(found[:, :3], expected(layer.table.numpy())[:, :3], 1e-5, 1e-6)
    assert not found[:, 3].any()
    assert call({name: ids[:0] for name, ids in inputs().items()}).shape == (0, 4, DIM)


LISTED = Schema(
    [category("a", 50), category("b", 70), category("l", 40, ragged=True), NUMBER, TARGET]
)


@pytest.mark.parametrize(("field", "cardinality", "bad"), [("b", 70, -3), ("l", 40, 40)])
def test_an_id_out_of_range_ends_fit_and_changes_nothing(field, cardinality, bad):
    model = deepfm(LISTED, embedding_dim=DIM, mlp=(8,))
    features, labels = batch(LISTED)
    model(features)  # its step is then traced once
    hyperparameters = Hyperparameters(BATCH, warmup_epochs=0.0)
    model.compile(CowClipOptimizer.for_model(model, hyperparameters), metrics=[])
    model.fit(dataset(LISTED, 1), verbose=0)
    before = model.get_weights()
    key = "l__values" if field == "l" else field
    ids = features[key].numpy()
    ids[7] = bad
    wrong = tf.data.Dataset.from_tensors(({**features, key: tf.constant(ids)}, labels))
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        model.fit(wrong, verbose=0)
    assert re.search(refusal(field, cardinality, bad), str(caught.value))
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


# Field by field


@pytest.mark.parametrize("in_graph", [False, True])
def test_not_stacked(in_graph):
    layer = layer_of("sum", stacked=False)
    found = (tf.function(layer) if in_graph else layer)(inputs())
    assert set(found) == set(SIZES)
    stack = expected(layer.table.numpy(), "sum")
    for i, name in enumerate(layer.fields):
        assert found[name].shape == (4, DIM)
        np.testing.assert_allclose(found[name], stack[:, i], rtol=1e-5, atol=1e-6)


def test_output_shapes():
    shapes = {name: tf.TensorShape([4, 1]) for name in SIZES}
    assert layer_of().compute_output_shape(shapes) == [4, 4, DIM]
    apart = layer_of(stacked=False).compute_output_shape(shapes)
    assert {name: tuple(shape) for name, shape in apart.items()} == dict.fromkeys(SIZES, (4, DIM))


def in_dcn(schema):
    inputs = mm.InputBlockV2(
        schema.excluding_by_tag(Tags.TARGET), categorical=FusedEmbeddings(schema, 8, stacked=False)
    )
    return mm.DCNModel(schema, depth=2, input_block=inputs, deep_block=mm.MLPBlock([16]))


def in_dlrm(schema):
    return mm.DLRMModel(
        schema,
        embeddings=FusedEmbeddings(schema, 8, stacked=False),
        bottom_block=mm.MLPBlock([8]),
        top_block=mm.MLPBlock([8]),
    )


class Product(tf.keras.layers.Layer):
    """A part of a network of one's own: v_a ⊙ v_b ⊙ v_l, by `lookup` alone."""

    def __init__(self, schema):
        super().__init__()
        self.embeddings = FusedEmbeddings(schema, 8)

    def call(self, inputs):
        a, b, lists = (self.embeddings.lookup(name, inputs[name]) for name in ("a", "b", "l"))
        return a + b * lists


def by_lookup(schema):
    features = schema.excluding_by_name(["x"]).excluding_by_tag(Tags.TARGET)
    return mm.Model(Product(schema), mm.BinaryOutput("y"), schema=features)


MODELS = {"dcn": in_dcn, "dlrm": in_dlrm, "lookup": by_lookup}


HOT = Hyperparameters(BATCH, embedding_lr=0.05, dense_lr=0.01, warmup_epochs=0.0)


def two_towers(schema):
    def tower(tag):
        features = schema.select_by_tag(tag)
        inputs = mm.InputBlockV2(features, categorical=FusedEmbeddings(features, 8, stacked=False))
        return mm.Encoder(inputs, mm.MLPBlock([8], no_activation_last_layer=True))

    return mm.TwoTowerModelV2(tower(Tags.USER), tower(Tags.ITEM))


@pytest.mark.parametrize("update", ["exact", "deferred"])
def test_a_top_k_encoder_has_the_trained_rows(update):
    """Merlin builds the blocks of a tower again as it joins them to others."""
    tf.keras.utils.set_random_seed(0)
    model = two_towers(TOWERS)
    optimizer = CowClipOptimizer.for_model(model, HOT.replace(embedding_lr=1e-3), update=update)
    model.compile(optimizer, metrics=[])
    model.fit(dataset(TOWERS, 4).map(lambda features, _: features), epochs=2, verbose=0)
    features, _ = batch(TOWERS)
    queries = model.query_encoder(features).numpy()
    before = [variable.ref() for variable in model.trainable_variables]
    items = Dataset(
        pd.DataFrame({"item_id": np.arange(71), "brand": np.arange(71) % 37}),
        schema=TOWERS.select_by_tag(Tags.ITEM),
    )
    top = model.to_top_k_encoder(items, k=5, batch_size=16)
    top.compile(run_eagerly=False)
    scores = top.predict(tf.data.Dataset.from_tensors(features), verbose=0).scores
    candidates = model.candidate_embeddings(items, index=Tags.ITEM_ID, batch_size=16)
    products = queries @ candidates.compute().to_numpy().T
    np.testing.assert_allclose(scores, -np.sort(-products, axis=1)[:, :5], rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(model.query_encoder(features), queries)
    assert [variable.ref() for variable in model.trainable_variables] == before


@pytest.mark.parametrize("name", ["dcn", "dlrm"])
def test_rows_that_were_loaded_stay_in_a_model_that_is_built_later(name, monkeypatch):
    made = []
    init = FusedEmbeddings.__init__

    def loaded(self, *arguments, **options):
        init(self, *arguments, **options)
        self.load_rows("a", np.full((50, 8), 0.5, np.float32))
        made.append(self)

    monkeypatch.setattr(FusedEmbeddings, "__init__", loaded)
    model = MODELS[name](LISTED)
    model.compile(CowClipOptimizer.for_model(model, HOT), metrics=[])
    model.evaluate(dataset(LISTED, 1), verbose=0)
    (layer,) = made
    assert (layer.table.numpy()[:50] == 0.5).all()


def test_a_trained_block_in_a_second_model_keeps_its_rows(graphs_rewritten):
    features = LISTED.excluding_by_tag(Tags.TARGET)
    layer = FusedEmbeddings(LISTED, 8, stacked=False)
    inputs = mm.InputBlockV2(features, categorical=layer)
    for units in (8, 16):  # a second head on the first one's block
        model = mm.Model(inputs, mm.MLPBlock([units]), mm.BinaryOutput("y"))
        model.compile(CowClipOptimizer.for_model(model, HOT), metrics=[])
        if units == 8:
            model.fit(dataset(LISTED, 3), verbose=0)
            trained = layer.table.numpy()
        else:
            model.evaluate(dataset(LISTED, 1), verbose=0)
    np.testing.assert_array_equal(layer.table, trained)


@pytest.mark.parametrize("name", ["deepfm", "dcn"])
def test_layers_that_are_built_keep_their_weights(name):
    """Merlin's blocks build theirs anew; Keras does once."""
    model = MODELS_BY_NAME[name](LISTED, embedding_dim=4, mlp=(8,))
    model(batch(LISTED)[0])
    weights = {v.ref(): v.numpy() for v in model.variables}
    for layer in model.submodules:
        if type(layer).__module__.startswith("merlin_cowclip") and layer.variables:
            layer.build(getattr(layer, "_build_input_shape", None))
    assert [v.ref() for v in model.variables] == list(weights)
    for variable in model.variables:
        np.testing.assert_array_equal(variable, weights[variable.ref()])


@pytest.fixture
def counted(monkeypatch) -> list[dict[int, float]]:
    """What the clip is given in each step: row → count."""
    steps: list[dict[int, float]] = []
    original = CowClipAdam._row_gradients

    def note(rows, counts):
        steps.append(dict(zip(rows.numpy().tolist(), counts.numpy().tolist(), strict=True)))

    def spy(self, gradient, variable):
        found = original(self, gradient, variable)
        tf.py_function(note, [found.indices, found.counts], [])
        return found

    monkeypatch.setattr(CowClipAdam, "_row_gradients", spy)
    return steps


def test_floats_that_do_not_hold_all_ids_are_refused():
    """In mixed precision Keras makes 4001.0 the float16 4000."""
    schema = Schema([column("user", 5_000), column("tags", 5_000, is_list=True)])
    mixed = FusedEmbeddings(schema, DIM, dtype="mixed_float16")
    given = {"user": tf.constant([[4001.0]]), "tags": ragged([[4001]])}
    with pytest.raises(ValueError, match="'user', of which there are 5,000, .*Received: float16"):
        mixed(given)
    given = {"user": tf.constant([[4001]]), "tags": tf.constant([[4001.0]], tf.float64)}
    with pytest.raises(ValueError, match="'tags', of which .* from 2,048 on several are"):
        mixed(given)
    exact = FusedEmbeddings(schema, DIM)
    np.testing.assert_array_equal(exact(given), [[exact.table[4001], exact.table[5_000 + 4001]]])


@pytest.mark.parametrize("copied", [False, True])
def test_an_optimizer_of_its_own_clips_by_field(copied):
    """A `CowClipAdam` that is bound to no table, as a part of Merlin's `MultiOptimizer`."""
    layer = layer_of(schema=Schema([column(name, SIZES[name]) for name in ("user", "item")]))
    layer = copy.deepcopy(layer) if copied else layer
    optimizer = CowClipAdam(l2=0.0, clip="field", clip_threshold=1e-4)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(inputs()) ** 2)
    optimizer.apply_gradients([(tape.gradient(loss, layer.table), layer.table)])
    moments = optimizer.get_slot(layer.table, "m").numpy()
    for rows in (slice(7), slice(7, 12)):
        assert 10 * np.linalg.norm(moments[rows]) == pytest.approx(1e-4, rel=1e-3)


def occurrences(features) -> dict[int, int]:
    """Samples that hold each id of `LISTED`, by row, from the batch itself; padding has none."""
    counts: dict[int, int] = {}
    offsets = features["l__offsets"].numpy()
    values = features["l__values"].numpy()
    for i in range(len(offsets) - 1):
        rows = {int(features["a"][i, 0]), 50 + int(features["b"][i, 0])}
        rows |= {120 + int(k) for k in values[offsets[i] : offsets[i + 1]] if k != 0}
        for row in rows:
            counts[row] = counts.get(row, 0) + 1
    return counts


@pytest.mark.parametrize("eagerly", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_trains_inside_models_that_are_not_ours(name, eagerly, counted):
    tf.keras.utils.set_random_seed(0)
    model = MODELS[name](LISTED)
    optimizer = CowClipOptimizer.for_model(model, HOT)
    model.compile(optimizer, metrics=[], run_eagerly=eagerly)
    data = dataset(LISTED, 3).cache()  # TensorFlow overwrites what a generator yields again
    features = batch(LISTED)[0]
    if name == "lookup":
        data = data.map(lambda x, y: ({k: v for k, v in x.items() if k != "x"}, y))
        del features["x"]
    if not eagerly:
        model(features)  # its step is then traced once
    losses = model.fit(data, epochs=5, verbose=0).history["loss"]
    assert losses[-1] < losses[0] - 0.02
    (spec,) = optimizer.table_specs
    assert spec.variable.shape == (160, 8)
    expected = [occurrences(batch(LISTED, seed=step)[0]) for step in range(3)]
    assert max(expected[0].values()) > 3
    assert len(counted) == 15
    for step, wanted in zip(counted, expected * 5, strict=True):
        beyond = {row: step.pop(row) for row in list(step) if row not in wanted}
        assert step == wanted
        assert set(beyond.values()) <= {0.0}  # padding, which no sample holds


def test_dlrm_on_our_table_is_saved_whole(tmp_path):
    model = in_dlrm(LISTED)
    features, _ = batch(LISTED, seed=5)
    model(features)
    model.compile(CowClipOptimizer.for_model(model, HOT), metrics=[])
    model.fit(dataset(LISTED, 9), verbose=0)
    before = model(features).numpy()
    assert np.ptp(before) > 0.01
    with quick_saves(traces=True):
        model.save(tmp_path / "model", include_optimizer=False)
    loaded = tf.keras.models.load_model(tmp_path / "model", compile=False)
    np.testing.assert_allclose(loaded(features), before, rtol=1e-6)


# Initial values


@pytest.mark.parametrize(
    ("lists", "samples"),
    [
        ([[3], [4], [5], [6]], 4),
        ([[3, 0], [4, 0], [5, 0], [6, 0]], 4),
        ([[3, 4], [4, 5]], 4),
    ],
)
def test_a_fields_bound_is_of_the_ids_that_samples_hold(lists, samples):
    """Padding has a row in the gradient, and added 1 to them."""
    schema = Schema([column("l", 9, is_list=True)])
    embeddings, dense = FusedEmbeddings(schema, 3, stddev=0.1), tf.keras.layers.Dense(1)
    model = tf.keras.Sequential([embeddings, tf.keras.layers.Flatten(), dense])
    given = {"l": tf.constant(lists)}
    model(given)
    floor = 1e-6
    hyperparameters = HOT.replace(l2=0.0, clip="adaptive_field", clip_ratio=1e-12, clip_floor=floor)
    optimizer = CowClipOptimizer.for_model(model, hyperparameters)

    @tf.function(autograph=False)
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(given) ** 2) + tf.reduce_mean(model(given))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    step()
    (spec,) = optimizer.table_specs
    moments = optimizer.optimizers[0].get_slot(spec.variable, "m")
    assert np.linalg.norm(moments) / 0.1 == pytest.approx(samples * floor, rel=1e-4)


def test_padding_and_unknown_rows_start_at_zero_and_no_other():
    table = layer_of().table.numpy()
    zero = {first + i for first in OFFSETS.values() for i in (0, 2)}
    assert {int(row) for row in np.flatnonzero(~table.any(axis=1))} == zero


def test_initial_rows_are_normal_with_the_given_stddev():
    tf.keras.utils.set_random_seed(3)
    layer = FusedEmbeddings(Schema([column("user", 40_003)]), 10, stddev=1e-2)
    layer.build({})
    rows = layer.table.numpy()[3:]
    assert rows.std() == pytest.approx(1e-2, rel=0.01)
    assert abs(rows.mean()) < 1e-4
    assert np.abs(rows).max() > 0.035  # beyond 2σ: not truncated
    assert (np.abs(rows) > 2e-2).mean() == pytest.approx(0.0455, rel=0.05)


def test_stddev_0_is_a_table_of_zeros():
    assert not layer_of(stddev=0.0).table.numpy().any()


def test_initializer_config_round_trip():
    initializer = TableInitializer.from_config(TableInitializer(0.1, [1, 4]).get_config())
    assert np.flatnonzero(~initializer((6, 2)).numpy().any(axis=1)).tolist() == [1, 4]


# Gradient and counts


def gradient_and_lookups(layer, given, compute=None):
    """What the optimizer would see: the table's gradient and the lookups of the step."""
    compute = compute or (lambda: layer(given))
    (spec,) = layer.table_specs()
    counted = {}

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(compute() ** 2)
        gradient = tape.gradient(loss, layer.table)
        assert isinstance(gradient, tf.IndexedSlices)
        rows, _, counts = samples_per_row(spec.recorder.lookups(), gradient.indices, spec.num_rows)
        return gradient.values, gradient.indices, rows, counts

    values, indices, rows, counts = (t.numpy() for t in step())
    dense = np.zeros((ROWS, DIM))
    np.add.at(dense, indices, values)
    for row, count in zip(rows, counts, strict=True):
        assert row not in counted
        counted[int(row)] = float(count)
    return dense, counted


@pytest.mark.parametrize(
    "changes",
    [{}, {"genres": tf.constant(padded(GENRES)), "tags": tf.constant(padded(TAGS))}],
    ids=["ragged", "dense"],
)
def test_gradient_is_sparse_and_counts_are_samples(changes):
    layer = layer_of("sum")
    dense, counts = gradient_and_lookups(layer, inputs(**changes))

    # Every sample counts once for each id that it holds, by a loop.
    held: dict[int, set[int]] = {}
    for name, ids in (("user", USER), ("item", ITEM), ("genres", GENRES), ("tags", TAGS)):
        for sample, row in enumerate(ids):
            for i in row:
                if name in ("user", "item") or i != 0:
                    held.setdefault(OFFSETS[name] + i, set()).add(sample)
    assert {row: counts[row] for row in held} == {row: len(s) for row, s in held.items()}
    assert counts[OFFSETS["genres"] + 5] == 1  # twice in one list
    assert counts[OFFSETS["user"] + 3] == 2  # in two samples
    assert {counts[row] for row in set(counts) - set(held)} <= {0.0}  # rows of padding

    # d/dw Σ x² = 2x for every id that is summed into x.
    x = expected(layer.table.numpy(), "sum")
    by_hand = np.zeros((ROWS, DIM))
    for f, (name, ids) in enumerate(
        [("user", USER), ("item", ITEM), ("genres", GENRES), ("tags", TAGS)]
    ):
        for sample, row in enumerate(ids):
            for i in row:
                if name in ("user", "item") or i != 0:
                    by_hand[OFFSETS[name] + i] += 2 * x[sample, f]
    np.testing.assert_allclose(dense, by_hand, rtol=1e-5, atol=1e-6)
    assert not dense[OFFSETS["genres"]].any()  # padding is never trained


@pytest.mark.parametrize("in_graph", [False, True])
def test_the_same_batch_called_twice_counts_once_and_another_one_adds_up(in_graph):
    """A tower used twice, and micro-batches before one update."""
    layer, given = layer_of(), inputs()
    other = inputs(user=tf.constant([[3], [5], [3], [3]]))
    (spec,) = layer.table_specs()

    def step():
        with tf.GradientTape() as tape:
            loss = sum(tf.reduce_sum(layer(x) ** 2) for x in (given, other, given))
        return count_sparse(spec.recorder, tape.gradient(loss, layer.table).indices, spec.num_rows)

    rows, _, counts = (tf.function(step) if in_graph else step)()
    found = dict(zip(rows.numpy().tolist(), counts.numpy().tolist(), strict=True))
    assert found[OFFSETS["user"] + 3] == 2 + 3
    assert found[OFFSETS["user"] + 5] == 1


# One field by itself


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize(
    ("field", "ids"),
    [
        ("user", tf.constant(USER)),
        ("item", tf.constant(np.ravel(ITEM), tf.int32)),
        ("genres", ragged(GENRES)),
        ("genres", ragged([[[i] for i in row] for row in GENRES], ragged_rank=1)),
        ("tags", tf.constant(padded(TAGS))),
        ("tags", tf.constant(padded(TAGS)[..., None])),
    ],
    ids=["b×1", "b", "ragged", "ragged b×n×1", "dense b×n", "dense b×n×1"],
)
def test_lookup_of_one_field(field, ids, in_graph):
    layer = FusedEmbeddings(SCHEMA, DIM, stddev=0.5)  # not built
    found = (tf.function(layer.lookup) if in_graph else layer.lookup)(field, ids)
    assert found.shape == (4, DIM)
    stack = expected(layer.table.numpy())
    np.testing.assert_allclose(found, stack[:, layer.fields.index(field)], rtol=1e-5, atol=1e-6)


FRIENDS = [[3], [4], [6], [5]]


@pytest.mark.parametrize("first", ["call", "lookup"])
def test_a_field_in_a_call_and_looked_up_counts_once(first):
    layer, given = layer_of(), inputs()

    def compute():
        parts = [
            lambda: tf.reduce_sum(layer(given), axis=1),
            lambda: layer.lookup("user", given["user"]),
            lambda: layer.lookup("genres", given["genres"]),
        ]
        if first == "lookup":
            parts.reverse()
        return tf.add_n([part() for part in parts])

    _, alone = gradient_and_lookups(layer, given)
    _, both = gradient_and_lookups(layer, given, compute)
    assert both == alone
    assert both[OFFSETS["user"] + 3] == 2  # in two samples
    assert both[OFFSETS["genres"] + 3] == 2


def test_a_field_looked_up_twice_counts_once():
    layer = layer_of()

    def twice():
        return layer.lookup("user", tf.constant(USER)) * layer.lookup("user", tf.constant(USER))

    _, counts = gradient_and_lookups(layer, None, twice)
    assert counts == {3: 2, 6: 1, 0: 1}


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_another_feature_of_the_same_field_adds_up(order):
    """The friend of a user, in the user's own table."""
    layer, given = layer_of(), inputs()

    def compute():
        parts = [
            lambda: tf.reduce_sum(layer(given), axis=1),
            lambda: layer.lookup("user", given["user"]),
            lambda: layer.lookup("user", tf.constant(FRIENDS), feature="friend"),
        ]
        return tf.add_n([parts[i]() for i in order])

    _, alone = gradient_and_lookups(layer, given)
    _, counts = gradient_and_lookups(layer, given, compute)
    assert counts == {**alone, 3: 2 + 1, 4: 1, 6: 1 + 1, 5: 1}


def test_one_feature_of_two_fields_counts_in_the_rows_of_both():
    """Of "negative" users and items with the same numbers, those of the second counted as 1."""
    layer = layer_of()

    def both():
        ids = tf.constant(ITEM)
        return tf.add_n([layer.lookup(name, ids, feature="negative") for name in ("user", "item")])

    _, counts = gradient_and_lookups(layer, None, both)
    once = {4: 2, 1: 1, 2: 1}
    assert counts == {OFFSETS[name] + id: n for name in ("user", "item") for id, n in once.items()}


def test_one_feature_of_fields_that_share_rows_counts_once():
    """So it is the same ids in the same rows, by whatever field they are looked up."""
    person = {"domain": {"min": 0, "max": 6, "name": "person"}}
    shared = [column(name, 7).with_properties(person) for name in ("user", "friend")]
    layer = layer_of(schema=Schema(shared))

    def both():
        ids = tf.constant(USER)
        return tf.add_n([layer.lookup(name, ids, feature="author") for name in ("user", "friend")])

    _, counts = gradient_and_lookups(layer, None, both)
    assert counts == {3: 2, 6: 1, 0: 1}


def test_several_ids_of_a_sample_are_no_one_hot_ones():
    """An id twice in a sample counts once, which rows b·k×1 do not tell."""
    layer, several = layer_of(), tf.constant([[3, 3], [4, 6], [6, 5], [5, 0]])
    words = r"'user' must be b or b×1: .* Received: 4×2. Look several up one by one"
    with pytest.raises(ValueError, match=words):
        layer.lookup("user", several, feature="negative")
    with pytest.raises(ValueError, match=words):
        layer({**inputs(), "user": several})

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.int64)])
    def unknown(ids):
        return layer.lookup("user", ids, feature="negative")

    @tf.function(input_signature=[tf.TensorSpec(None, tf.int64)])
    def of_no_rank(ids):
        return layer.lookup("user", ids, feature="negative")

    found = unknown(tf.constant(USER, tf.int64))
    np.testing.assert_array_equal(found, layer.lookup("user", tf.constant(USER)))
    for given in (unknown, of_no_rank):
        with pytest.raises(tf.errors.InvalidArgumentError, match="8 values, but .* shape has 4"):
            given(tf.cast(several, tf.int64))
    np.testing.assert_array_equal(of_no_rank(tf.constant(USER, tf.int64)), found)
    np.testing.assert_array_equal(of_no_rank(tf.constant(np.ravel(USER), tf.int64)), found)
    one_each = ragged(np.asarray(USER).tolist())
    np.testing.assert_array_equal(layer.lookup("user", one_each), found)
    for bad in ([[3], [4], [6], [5, 0]], [[3], [4], [6], []]):
        with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="user"):
            layer.lookup("user", ragged(bad))


def test_flattened_ids_of_a_field_count_by_sample_in_a_graph():
    """Negatives of each sample, say, two of which are the same."""
    layer, several = layer_of(), tf.constant([[3, 3], [4, 6], [6, 5], [5, 3]])

    def compute():
        return layer.lookup("user", tf.reshape(several, [-1]), feature="negative")

    _, counts = gradient_and_lookups(layer, None, compute)
    assert counts == {3: 2, 4: 1, 5: 2, 6: 2}


def test_lookup_refuses_a_field_it_does_not_have():
    layer = FusedEmbeddings(SCHEMA, DIM)
    message = "field must be one of 'user', 'item', 'genres', 'tags'. Received: 'friend'"
    with pytest.raises(ValueError, match=message):
        layer.lookup("friend", tf.constant(USER))
    assert not layer.built


def test_a_lookup_of_several_features_does_not_count_them_again():
    """Two features in one lookup, and one of them, or a list, by itself as well."""
    pair = Lookup("pair", tf.constant([[0, 5], [1, 5], [0, 6]]), features=("a", "b"))
    a = Lookup("a", tf.constant([0, 1, 0]))
    other = Lookup("c", tf.constant([[6, 6, 4], [5, 4, 4], [4, 4, 4]]), is_list=True, padding=4)

    def counts(*lookups):
        rows, _, found = samples_per_row(lookups, tf.constant([3], tf.int64), 8)
        return dict(zip(rows.numpy().tolist(), found.numpy().tolist(), strict=True))

    absent = {3: 0.0}
    alone = {0: 2, 1: 1, 5: 2, 6: 1}
    assert counts(pair) == alone | absent
    assert counts(pair, a) == counts(a, pair) == alone | absent
    assert counts(a) == {0: 2, 1: 1} | absent
    assert counts(pair, a, other) == {0: 2, 1: 1, 5: 3, 6: 2} | absent


# Saving


@pytest.mark.parametrize("combiner", ["sqrtn", {"genres": "sum", "tags": "mean"}])
@pytest.mark.parametrize("stacked", [True, False])
def test_config_round_trip(combiner, stacked):
    layer = layer_of(combiner, stddev=0.25, stacked=stacked, name="mine")
    config = json.loads(json.dumps(layer.get_config()))  # as Keras stores it
    again = FusedEmbeddings.from_config(config)
    assert again.get_config() == layer.get_config()
    assert (again.name, again.dim, again.stddev, again.combiner) == ("mine", DIM, 0.25, combiner)
    assert again.stacked is stacked
    assert (again.fields, again.row_offsets) == (layer.fields, layer.row_offsets)
    again.build({})
    again.set_weights(layer.get_weights())
    found, wanted = again(inputs()), layer(inputs())
    if stacked:
        found, wanted = {"stack": found}, {"stack": wanted}
    assert set(found) == set(wanted)
    for name, part in wanted.items():
        np.testing.assert_array_equal(found[name], part)


def test_the_schema_in_a_config_has_one_text():
    """Merlin keeps tags in a set, which every process orders its own way."""
    given = {"num_buckets": None, "freq_threshold": 3, "domain": {"min": 0, "max": 6}}
    tags = [Tags.CATEGORICAL, Tags.USER, Tags.ID, Tags.ITEM, "mine", "yours"]
    texts = [
        FusedEmbeddings(
            Schema([ColumnSchema("user", tags=tags, dtype="int64", properties=dict(properties))]), 2
        ).get_config()["schema"]
        for properties in (given.items(), reversed(given.items()))
    ]
    assert texts[0] == texts[1]
    (feature,) = json.loads(texts[0])["feature"]
    assert feature["annotation"]["tag"] == ["categorical", "id", "item", "mine", "user", "yours"]


def test_save_and_load(tmp_path):
    given = {
        "user": tf.keras.Input([1], dtype=tf.int64, name="user"),
        "item": tf.keras.Input([1], dtype=tf.int64, name="item"),
        "genres": tf.keras.Input([None], dtype=tf.int64, name="genres", ragged=True),
        "tags": tf.keras.Input([None], dtype=tf.int64, name="tags", ragged=True),
    }
    layer = FusedEmbeddings(SCHEMA, DIM, stddev=0.5)
    model = tf.keras.Model(given, layer(given))
    batch = inputs(user=tf.constant(USER, tf.int64), item=tf.constant(ITEM, tf.int64))
    before = model(batch).numpy()
    np.testing.assert_allclose(before, expected(layer.table.numpy()), rtol=1e-5, atol=1e-6)
    model.save(tmp_path / "model")
    loaded = tf.keras.models.load_model(tmp_path / "model", compile=False)
    np.testing.assert_array_equal(loaded(batch), before)


# Refused


@pytest.mark.parametrize(
    ("schema", "options", "message"),
    [
        (Schema([]), {}, r"must have a column tagged Tags.CATEGORICAL.* Received .* columns \[\]"),
        (
            Schema([ColumnSchema("price", tags=[Tags.CONTINUOUS])]),
            {},
            r"must have a column tagged Tags.CATEGORICAL.* Received .* columns \['price'\]",
        ),
        (
            Schema([column("user", 7), column("item", None)]),
            {},
            "Column 'item' must have an int domain with a max",
        ),
        (SCHEMA, {"dim": 0}, "dim must be a positive whole number. Received: dim=0"),
        (SCHEMA, {"dim": 2.0}, "dim must be a positive whole number. Received: dim=2.0"),
        (SCHEMA, {"dim": True}, "dim must be a positive whole number. Received: dim=True"),
        (
            SCHEMA,
            {"combiner": "max"},
            "combiner must be one of mean, sum, sqrtn. Received: combiner='max'",
        ),
        (
            SCHEMA,
            {"combiner": None},
            "combiner must be one of mean, sum, sqrtn, or one by list column. Received: combiner=N",
        ),
        (
            SCHEMA,
            {"combiner": {"genres": "sum", "tags": "max"}},
            "combiner must be one of mean, sum, sqrtn. Received: combiner='max'",
        ),
        (
            SCHEMA,
            {"combiner": {"genres": "sum"}},
            "combiner must name each list column: genres, tags. Received: genres$",
        ),
        (
            SCHEMA,
            {"combiner": {"genres": "sum", "tags": "sum", "user": "sum"}},
            "combiner must name each list column: genres, tags. Received: genres, tags, user$",
        ),
        (
            Schema([column("user", 7)]),
            {"combiner": {"user": "sum"}},
            "combiner must name each list column: there is none. Received: user$",
        ),
    ],
)
def test_refused(schema, options, message):
    with pytest.raises(ValueError, match=message):
        FusedEmbeddings(schema, **{"dim": DIM, **options})


@pytest.mark.parametrize("stddev", [-0.1, float("nan"), float("inf")])
def test_a_bad_stddev_is_refused(stddev):
    with pytest.raises(ValueError, match=r"stddev must be finite and not negative. Received: std"):
        layer_of(stddev=stddev)


def test_a_list_of_lists_is_refused():
    with pytest.raises(ValueError, match="'genres' must be ragged in one dimension"):
        layer_of().call(inputs(genres=ragged([[[3, 4]], [], [[5]], []])))


@pytest.mark.parametrize(
    ("given", "zero"),
    [
        ({}, {0, 2}),
        ({"freq_threshold": 0, "max_size": 0, "num_buckets": None}, {0, 2}),
        ({"freq_threshold": 1}, {0, 2}),  # every id that occurs occurs once
        ({"freq_threshold": 5}, {0}),
        ({"freq_threshold": 5.0}, {0}),  # as a schema read from a file has it
        ({"max_size": 7}, {0}),
        ({"max_size": 8}, {0, 2}),  # not reached
        ({"max_size": 7, "num_buckets": 3}, {0}),
        ({"num_buckets": 3}, {0}),  # no vocabulary: every id is hashed
        ({"num_buckets": 3, "cat_path": "unique.user.parquet"}, {0, 2, 3, 4}),
        ({"freq_threshold": 5, "untrained_ids": [0.0, 3.0]}, {0, 1, 2}),  # none was below it
        ({"freq_threshold": 5, "untrained_ids": [0, 1]}, {0}),
        ({"untrained_ids": []}, {0}),
        ({"num_buckets": 3, "untrained_ids": [0, 2, 3, 5]}, {0, 1, 3, 4}),
    ],
)
def test_an_unknown_row_that_training_rows_have_starts_like_any_other(given, zero):
    user = column("user", 7).with_properties(given)
    table = layer_of(schema=Schema([user])).table.numpy()
    assert set(np.flatnonzero(~table.any(axis=1)).tolist()) == zero


def test_a_copy_tells_its_own_table():
    layer = layer_of()
    twin = copy.deepcopy(layer)
    (spec,) = twin.table_specs()
    assert spec.variable is twin.table
    assert spec.variable is not layer.table


def test_numpy_ids_are_looked_up_in_a_graph():
    layer, ids = layer_of(), np.array([3, 6])
    found = tf.function(lambda: layer.lookup("user", ids), autograph=False)()
    np.testing.assert_array_equal(found, layer.table.numpy()[ids])


def test_what_is_done_before_there_is_an_optimizer_costs_its_steps_nothing():
    """TensorFlow copies a table at every read once rows were gathered from its resource."""
    column = ColumnSchema(
        "a", tags=[Tags.CATEGORICAL], dtype="int64", properties={"domain": {"min": 0, "max": 9}}
    )
    layer = FusedEmbeddings(Schema([column]), 4)
    layer({"a": tf.constant([[1], [2]], tf.int64)})
    layer.load_rows("a", np.full([10, 4], 0.5, np.float32))
    np.testing.assert_array_equal(layer.table.numpy(), 0.5)
    first, second = (tf.convert_to_tensor(layer.table)._numpy() for _ in range(2))
    assert np.shares_memory(first, second)


def test_ids_that_stay_keep_their_rows():
    """And are numbered anew; one domain's fields share theirs."""
    layer = layer_of()
    given = {name: tf.constant([[0], [2], [3]]) for name in layer.one_hot_fields}
    lists = {n: tf.ragged.constant([[3], [0, 2], []], dtype=tf.int64) for n in layer.list_fields}
    before = layer({**given, **lists})
    stay = {n: np.delete(np.arange(layer.cardinalities[n]), 1) for n in layer.fields}
    rows = layer.row_offsets[-1]
    with pytest.raises(
        ValueError, match=f"must rise. Received others of field '{layer.fields[0]}'"
    ):
        layer.keep_ids({**stay, layer.fields[0]: stay[layer.fields[0]][::-1].clip(1)})
    layer.keep_ids(stay)
    assert rows - layer.row_offsets[-1] == len(layer.row_offsets) - 1 == rows - layer.table.shape[0]
    given = {name: tf.constant([[0], [1], [2]]) for name in given}
    lists = {n: tf.ragged.constant([[2], [0, 1], []], dtype=tf.int64) for n in lists}
    np.testing.assert_array_equal(layer({**given, **lists}), before)
    again = FusedEmbeddings.from_config(layer.get_config())
    assert again.row_offsets == layer.row_offsets
    assert len(layer.trainable_weights) == 1
