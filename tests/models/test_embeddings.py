"""FusedEmbeddings against NumPy: rows, ids out of range, counts, saving."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from merlin_cowclip.models import FusedEmbeddings, deepfm
from merlin_cowclip.plugins import CowClipOptimizer, HasTables
from merlin_cowclip.plugins._tensorflow import ColumnSchema, Schema, Tags
from merlin_cowclip.plugins.embeddings.counting import count_samples

from ..plugins.merlin_models import COLD, WITH_LIST, batch, dataset
from .embeddings import (
    DIM,
    GENRES,
    IDS,
    ITEM,
    LISTS,
    OFFSETS,
    ONE_HOT,
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

pytestmark = pytest.mark.usefixtures("graphs_as_traced")


def padded(lists, to=4):
    return np.array([row + [0] * (to - len(row)) for row in lists])


def combined(table, first, lists, combiner, padding):
    """One list column by a loop: padding is no id; no id at all gives zeros."""
    out = []
    for ids in lists:
        rows = [table[first + i] for i in ids if i != padding]
        total = np.sum(rows, axis=0) if rows else np.zeros(DIM)
        by = {"sum": 1.0, "mean": len(rows), "sqrtn": len(rows) ** 0.5}[combiner]
        out.append(total / (by or 1.0))
    return np.array(out)


def padding_of(given):
    """Each list column's id that is none: 0 in dense lists."""
    return {name: 0 for name in given if isinstance(given[name], tf.Tensor)}


def expected(table, combiner="mean", padding=None):
    by = combiner if isinstance(combiner, dict) else dict.fromkeys(LISTS, combiner)
    fields = [[table[OFFSETS[name] + i] for (i,) in ids] for name, ids in ONE_HOT.items()]
    fields += [
        combined(table, OFFSETS[name], ids, by[name], (padding or {}).get(name))
        for name, ids in LISTS.items()
    ]
    return np.stack(fields, axis=1)


# Lookup


def test_every_domain_owns_a_range_of_rows():
    layer = layer_of()
    assert isinstance(layer, HasTables)
    assert layer.fields == ("user", "item", "friend", "genres", "tags")  # one-hot fields first
    assert layer.cardinalities == SIZES
    (spec,) = layer.table_specs()
    assert spec.row_offsets == layer.row_offsets == (0, 7, 12, 18, ROWS)
    assert (spec.variable.shape, spec.width, spec.num_rows) == (layer.table.shape, DIM, ROWS)
    assert spec.selected(["friend"]) == (True, False, False, False)
    assert spec.selected([Tags.ITEM]) == (False, True, False, False)


@pytest.mark.parametrize(
    ("combiner", "in_graph", "changes"),
    [
        ("mean", True, {}),
        ({"genres": "sqrtn", "tags": "sum"}, False, {}),
        ("sqrtn", False, {"genres": ragged([[[i] for i in r] for r in GENRES], ragged_rank=1)}),
        ("mean", True, {"genres": tf.constant(padded(GENRES)), "tags": tf.constant(padded(TAGS))}),
        ("sum", True, {"genres": tf.constant(padded(GENRES)[..., None])}),
        ("sum", False, {"user": tf.constant(np.ravel(USER))}),
        ("mean", True, {"user": tf.constant(USER, tf.int32), "item": tf.constant(ITEM, tf.int32)}),
    ],
)
def test_lookup(combiner, in_graph, changes):
    layer = layer_of(combiner)
    rows = (tf.function(layer) if in_graph else layer)(inputs(**changes))
    by_loop = expected(layer.table.numpy(), combiner, padding_of(changes))
    np.testing.assert_allclose(rows, by_loop, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("combiner", "wanted", "policy"),
    [("sum", 600.0, "mixed_float16"), ("mean", 0.1, "mixed_bfloat16"), ("sqrtn", 7.746, "float64")],
)
def test_long_lists_are_combined_in_full_precision(combiner, wanted, policy):
    """6,000 × 0.1: added up in half precision, 256; counted in it, 2,048 ids."""
    schema = SCHEMA.select_by_name(["genres"])
    layer = FusedEmbeddings(
        schema, DIM, combiner=combiner, dtype=tf.keras.mixed_precision.Policy(policy)
    )
    layer.build({})
    layer.table.assign(tf.fill(layer.table.shape, tf.constant(0.1, layer.table.dtype)))
    rows = layer({"genres": tf.ragged.constant([[3] * 6_000], dtype=tf.int64)})
    assert rows.dtype == layer.compute_dtype
    precision = {"mixed_float16": 1e-3, "mixed_bfloat16": 8e-3, "float64": 1e-4}[policy]
    np.testing.assert_allclose(tf.cast(rows, tf.float64)[0, 0], [wanted] * DIM, rtol=precision)


def test_not_stacked_and_one_field():
    layer = FusedEmbeddings(SCHEMA, DIM, stddev=0.5, stacked=False)
    lookup = tf.function(layer.lookup)("genres", ragged(GENRES))  # builds it
    rows = tf.function(layer)(inputs())
    stack = np.stack([rows[name] for name in layer.fields], axis=1)
    np.testing.assert_allclose(stack, expected(layer.table.numpy()), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(lookup, rows["genres"])
    with pytest.raises(ValueError, match="ids of field 'item' must be integers.*float32"):
        layer.lookup("item", tf.ones([4]))


# Ids out of range


def changed_in_one_place(field: str, bad: int) -> dict[str, Any]:
    """The inputs with one id of the third sample replaced, or one more in its list."""
    ids = [list(row) for row in IDS[field]]
    ids[2] = [*ids[2], bad] if field in LISTS else [bad]
    return inputs(**{field: ragged(ids) if field in LISTS else tf.constant(ids, tf.int64)})


def refusal(field: str, cardinality: int, received: int) -> str:
    """The message, as it is printed eagerly (lines) and in a graph (brackets)."""
    return (
        r"ids must be from 0 to cardinality - 1\. Field, cardinality, received:"
        rf"[^\w-]+(b')?{field}\W+{cardinality}[^\w-]+{received}\b"
    )


@pytest.fixture(scope="module", params=["eager", "graph"])
def call(request):
    return layer_of() if request.param == "eager" else tf.function(layer_of())


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        *SIZES.items(),
        ("item", -1),
        ("tags", -1),
        ("user", np.iinfo(np.int64).min),  # what NaN becomes
    ],
)
def test_an_id_out_of_range_is_refused(call, field, bad):
    call(changed_in_one_place(field, SIZES[field] - 1))  # the last one
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        call(changed_in_one_place(field, bad))
    assert re.search(refusal(field, SIZES[field], bad), str(caught.value)), caught.value


def test_an_id_out_of_range_ends_fit_and_changes_nothing():
    model = deepfm(WITH_LIST, embedding_dim=DIM, mlp=(8,))
    features, labels = batch(WITH_LIST)
    model(features)  # its step is then traced once
    model.compile(CowClipOptimizer.for_model(model, COLD), metrics=[])
    model.fit(dataset(WITH_LIST, 1), verbose=0)
    before = model.get_weights()
    ids = features["l__values"].numpy()
    ids[7] = 40
    wrong = tf.data.Dataset.from_tensors(({**features, "l__values": tf.constant(ids)}, labels))
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        model.fit(wrong, verbose=0)
    assert re.search(refusal("l", 40, 40), str(caught.value))
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


# Initial values


def test_initial_rows_are_normal_with_the_given_stddev():
    tf.keras.utils.set_random_seed(3)
    layer = FusedEmbeddings(Schema([column("user", 40_003)]), 10, stddev=1e-2)
    layer.build({})
    rows = layer.table.numpy()[3:]
    assert rows.std() == pytest.approx(1e-2, rel=0.01)
    assert abs(rows.mean()) < 1e-4
    assert (np.abs(rows) > 2e-2).mean() == pytest.approx(0.0455, rel=0.05)  # not truncated


@pytest.mark.parametrize(
    ("given", "zero"),
    [
        ({}, {0, 2}),
        ({"freq_threshold": 5}, {0, 2}),  # of a schema without counts
        ({"freq_threshold": 5, "untrained_ids": [0.0, 3.0]}, {0, 1, 2}),  # none was below it
        ({"num_buckets": 3, "untrained_ids": [0, 2, 3, 5]}, {0, 1, 3, 4}),
        ({"untrained_ids": [2, 3]}, {2}),
        ({"untrained_ids": [2, 3], "cat_path": "categories/unique.user.parquet"}, {0, 2}),
    ],
)
def test_an_unknown_row_that_training_rows_have_starts_like_any_other(given, zero):
    user = column("user", 7).with_properties(given)
    table = layer_of(schema=Schema([user])).table.numpy()
    assert set(np.flatnonzero(~table.any(axis=1)).tolist()) == zero


def test_a_row_that_one_field_trains_starts_like_any_other():
    """The unknown row of `b` has training rows."""
    for domain, zero in (("place", {0}), ("", {0, 2, 9, 9 + 4})):
        other = column("b", 9, domain=domain, untrained_ids=[0, 1, 4, 5])
        table = layer_of(schema=Schema([column("a", 9, domain="place"), other])).table.numpy()
        assert set(np.flatnonzero(~table.any(axis=1)).tolist()) == zero


# Gradient and counts


def gradient_and_counts(layer, given, compute=None):
    """What the optimizer would see: the table's gradient, and the counts of the step."""
    compute = compute or (lambda: layer(given))
    (spec,) = layer.table_specs()

    @tf.function(autograph=False)
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(compute() ** 2)
        gradient = tape.gradient(loss, layer.table)
        assert isinstance(gradient, tf.IndexedSlices)
        rows, _, counts = count_samples(spec, gradient.indices)
        return gradient.values, gradient.indices, rows, counts

    values, indices, rows, counts = (t.numpy() for t in step())
    dense = np.zeros((ROWS, DIM))
    np.add.at(dense, indices, values)
    assert len(set(rows.tolist())) == len(rows)
    return dense, dict(zip(rows.tolist(), counts.tolist(), strict=True))


@pytest.mark.parametrize(
    ("changes", "properties"),
    [
        ({}, {}),
        ({"genres": tf.constant(padded(GENRES)), "tags": tf.constant(padded(TAGS))}, {}),
        ({}, {"cat_path": "categories/unique.a.parquet"}),
    ],
    ids=["ragged", "dense", "ragged, of Categorify"],
)
def test_gradient_is_sparse_and_counts_are_samples(changes, properties):
    """Id 0 is padding in dense lists and in those of Categorify; else it trains as any other."""
    schema = Schema([column.with_properties(properties) for column in SCHEMA])
    layer = layer_of("sum", schema=schema)
    padding = dict.fromkeys(LISTS, 0) if properties else padding_of(changes)
    dense, counts = gradient_and_counts(layer, inputs(**changes))

    # By a loop: a field of a sample counts once for each id that it holds; d/dw Σ x² = 2x for
    # every id that is summed into x.
    x = expected(layer.table.numpy(), "sum", padding)
    by_loop, gradient = np.zeros(ROWS), np.zeros((ROWS, DIM))
    for f, (name, ids) in enumerate(IDS.items()):
        for sample, row in enumerate(ids):
            rows = [OFFSETS[name] + i for i in row if i != padding.get(name)]
            by_loop[list(set(rows))] += 1
            np.add.at(gradient, rows, 2 * x[sample, f])
    assert {row: count for row, count in counts.items() if count} == {
        row: count for row, count in enumerate(by_loop) if count
    }
    np.testing.assert_allclose(dense, gradient, rtol=1e-5, atol=1e-6)


def test_another_feature_of_the_same_field_adds_up():
    """The item that was seen before, even if it is the same."""
    layer, given = layer_of(), inputs()

    def compute():
        parts = [
            lambda: tf.reduce_sum(layer(given), axis=1),
            lambda: layer.lookup("item", given["item"]),
            lambda: layer.lookup("item", given["item"], feature="seen before"),
            lambda: layer.lookup("item", tf.constant([[4], [3], [1], [2]]), feature="last"),
        ]
        return tf.add_n([part() for part in parts])

    _, once = gradient_and_counts(layer, given)
    _, counts = gradient_and_counts(layer, given, compute)
    assert counts == {**once, 7 + 4: 2 + 2 + 1, 7 + 1: 3, 7 + 2: 3, 7 + 3: 1}


def test_several_ids_of_a_sample_are_no_one_hot_ones():
    """An id twice in a sample counts once, which rows b·k×1 do not tell."""
    layer, several = layer_of(), tf.constant([[3, 3], [4, 6], [6, 5], [5, 0]])
    with pytest.raises(ValueError, match=r"'user' must be b or b×1: .* Received: shape \(4, 2\)"):
        layer.lookup("user", several, feature="negative")

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.int64)])
    def unknown(ids):
        return layer.lookup("user", ids, feature="negative")

    rows = unknown(tf.constant(USER, tf.int64))
    np.testing.assert_array_equal(rows, layer.lookup("user", tf.constant(USER)))
    with pytest.raises(tf.errors.InvalidArgumentError, match="8 values, but .* shape has 4"):
        unknown(tf.cast(several, tf.int64))


# Saving, and arguments


@pytest.mark.parametrize(
    ("combiner", "stacked"), [("sqrtn", True), ({"genres": "sum", "tags": "mean"}, False)]
)
def test_config_round_trip(combiner, stacked):
    layer = layer_of(combiner, stddev=0.25, stacked=stacked, name="mine")
    config = json.loads(json.dumps(layer.get_config()))  # as Keras stores it
    again = FusedEmbeddings.from_config(config)
    assert again.get_config() == layer.get_config()
    assert (again.name, again.row_offsets) == ("mine", layer.row_offsets)
    again.build({})
    again.set_weights(layer.get_weights())
    tf.nest.map_structure(np.testing.assert_array_equal, again(inputs()), layer(inputs()))


@pytest.mark.parametrize(
    ("schema", "options", "message"),
    [
        (
            Schema([ColumnSchema("price", tags=[Tags.CONTINUOUS])]),
            {},
            r"must have a column tagged Tags.CATEGORICAL.* Received .* columns \['price'\]",
        ),
        (Schema([column("item", None)]), {}, "'item' must have an int domain with a max"),
        (
            Schema([column("a", 9, domain="place"), column("b", 8, domain="place")]),
            {},
            "one cardinality.* Received: 'a' with 9 ids and 'b' with 8, .* the domain 'place'",
        ),
        (SCHEMA, {"dim": 0}, "dim must be a positive whole number. Received: dim=0"),
        (SCHEMA, {"combiner": "max"}, "combiner must be one of mean, sum, sqrtn, .*'max'"),
        (SCHEMA, {"combiner": {"genres": "sum"}}, "must name each list column: genres, tags"),
    ],
)
def test_refused(schema, options, message):
    with pytest.raises(ValueError, match=message):
        FusedEmbeddings(schema, **{"dim": DIM, **options})
