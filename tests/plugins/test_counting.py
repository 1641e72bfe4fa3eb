"""Which layers are tables, and counts of their ids in a batch, against a loop over the samples."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from merlin_cowclip.plugins import CowClipOptimizer
from merlin_cowclip.plugins._tensorflow import Schema, mm
from merlin_cowclip.plugins.embeddings.counting import Lookup, count_all_rows, count_samples
from merlin_cowclip.plugins.embeddings.discovery import find_tables

from .merlin_models import COLD, category

V, D = 30, 3
A, B, C = [1, 1, 1, 1], [1, 2], [5, 2, 9]
LISTS, MORE = [[1, 1, 2], [], [2]], [[2, 3], [3, 3, 3, 3]]


class Model(tf.keras.Model):
    """A layer that has tables, and what is done with it."""

    def __init__(self, layer, forward=lambda layer, x: layer(x)):
        super().__init__()
        self.layer, self.forward = layer, forward

    def call(self, inputs):
        return self.forward(self.layer, inputs)


def merlin_table(*features, combiner=None, ragged=False):
    domain = "shared" if len(features) > 1 else ""
    columns = [category(name, V, domain=domain, ragged=ragged) for name in features]
    return mm.EmbeddingTable(D, *Schema(columns), sequence_combiner=combiner)


def column(ids):
    return tf.constant(ids, tf.int64)[:, tf.newaxis]


def ragged(rows):
    """A list column as Merlin prepares it, b×(n)×1."""
    return tf.expand_dims(tf.ragged.constant(rows, tf.int64, ragged_rank=1), -1)


def added_up(*batches):
    """`cnt` by a loop: a sample is an id or a list of ids, and counts once for each."""
    counts = {}
    for batch in batches:
        for sample in batch:
            for i in {sample} if isinstance(sample, int) else set(sample):
                counts[i] = counts.get(i, 0) + 1
    return counts


def recorded(model, inputs):
    """The specs of a built model, which record from now on."""
    model(inputs)
    specs = find_tables(model)
    assert find_tables(model) == specs  # found again, a model records as before
    return specs


def gradients_of(model, inputs):
    variables = [spec.variable for spec in find_tables(model)]
    with tf.GradientTape() as tape:
        outputs = tf.nest.flatten(model(inputs), expand_composites=True)
        loss = sum(tf.reduce_sum(tf.square(x)) for x in outputs if x.dtype.is_floating)
    return tape.gradient(loss, variables)


def run(step, in_graph, *inputs):
    """A step's result, on ids that are a traced function's arguments or eager."""
    return (tf.function(step, autograph=False) if in_graph else step)(*inputs)


def as_dict(rows):
    counts = rows.counts.numpy().astype(int).tolist()
    return dict(zip(rows.rows.numpy().tolist(), counts, strict=True))


def counts_of(model, inputs, in_graph):
    """For each table of the model, its counts in a step."""
    specs = recorded(model, inputs)

    def step(inputs):
        gradients = gradients_of(model, inputs)
        return [count_samples(spec, g.indices) for spec, g in zip(specs, gradients, strict=True)]

    names = [spec.name for spec in specs]
    return dict(zip(names, map(as_dict, run(step, in_graph, inputs)), strict=True))


both = pytest.mark.parametrize("in_graph", [True, False])

ONE_HOT = {
    "the same tensor twice": (lambda t, x: [t(x), t(x)], added_up(A)),
    "past Merlin's table, as a tied output does": (
        lambda t, x: [t(x), t.table(column(C))],
        added_up(A, C),
    ),
    "one tensor, cast and reshaped for each lookup": (
        lambda t, x: [t(tf.cast(x, tf.int32)), t(tf.cast(x, tf.int32)), t(tf.reshape(x, [-1, 1]))],
        added_up(A, A, A),
    ),
    "ids and negatives": (lambda t, x: [t(x), t(column(C)), t(x)], added_up(A, C)),
}


@both
@pytest.mark.parametrize("case", ONE_HOT)
def test_one_hot_ids_of_one_feature(case, in_graph):
    forward, expected = ONE_HOT[case]
    assert counts_of(Model(merlin_table("item"), forward), column(A), in_graph) == {
        "item": expected
    }


@both
@pytest.mark.parametrize("kind", ["ragged", "not combined", "padded", "sparse", "of parts"])
def test_lists_looked_up_again_and_other_lists(kind, in_graph):
    """A combiner by name makes ids unique before the lookup and reads row 0 for an empty list.

    "of parts": each lookup makes its own ragged tensor of the list's values.
    """

    def parts(lists):
        return tf.RaggedTensor.from_row_splits(lists.values, lists.row_splits)

    def forward(table, lists):
        other = ragged(MORE)
        if kind == "of parts":
            return [table(parts(lists)), table(other), table(parts(lists))]
        if kind in ("padded", "sparse"):
            lists, other = (getattr(x, f"to_{as_kind}")() for x in (lists, other))
        return [table(lists), table(other), table(lists)]

    as_kind = {"padded": "tensor"}.get(kind, kind)
    combiner = None if kind in ("not combined", "padded") else "mean"
    table = merlin_table("item", combiner=combiner, ragged=True)
    counts = counts_of(Model(table, forward), ragged(LISTS), in_graph)["item"]
    assert not counts.pop(0, 0)  # padding, or an empty list's
    assert counts == added_up(LISTS, MORE)


@pytest.mark.parametrize("rows", [tf.constant, tf.ragged.constant])
def test_ids_beyond_the_table_count_for_no_other_row(rows):
    """On a GPU such ids are read as zeros."""
    lookup = Lookup("l", rows([[7, 2], [3, 3], [2, -1]], tf.int64))
    assert lookup.rows_per_sample(5).numpy().tolist() == [2, 3, 2]


@both
def test_features_of_one_table_add_up_even_where_their_ids_are_equal(in_graph):
    inputs = {"buyer": column(A), "seller": column(A)}
    assert counts_of(Model(merlin_table("buyer", "seller")), inputs, in_graph) == {
        "shared": added_up(A, A)
    }


@both
@pytest.mark.parametrize("micro", [(A, A), (A, B, C)], ids=str)
def test_gradients_of_several_tapes_applied_once(micro, in_graph):
    """Gradient accumulation; also over equal batches, which are other samples all the same."""
    model = Model(merlin_table("item"))
    (spec,) = recorded(model, column(A))

    def step(*batches):
        indices = tf.concat([gradients_of(model, x)[0].indices for x in batches], axis=0)
        return count_samples(spec, indices), indices

    counts, indices = run(step, in_graph, *map(column, micro))
    assert as_dict(counts) == added_up(*micro)
    np.testing.assert_array_equal(tf.gather(counts.rows, counts.position), indices)


def test_eagerly_what_is_not_of_the_step_is_not_counted():
    """An evaluation between two steps, an absent feature, a pass that loss scaling leaves out."""
    model = Model(merlin_table("buyer", "seller"))
    others = {"buyer": column(C), "seller": column(C)}
    (spec,) = recorded(model, others)
    (gradient,) = gradients_of(model, {"buyer": column(A), "seller": column(C)})
    model(others)
    assert as_dict(count_samples(spec, gradient.indices)) == added_up(A, C)
    (gradient,) = gradients_of(model, {"buyer": column(B)})
    assert as_dict(count_samples(spec, gradient.indices)) == added_up(B)
    lists = Model(merlin_table("item", combiner="mean", ragged=True))
    (spec,) = recorded(lists, ragged(LISTS))
    gradients_of(lists, ragged(MORE))
    (gradient,) = gradients_of(lists, ragged([[3, 3], [4]]))
    assert as_dict(count_samples(spec, gradient.indices)) == {3: 1, 4: 1}


def test_a_branch_counts_what_its_outer_graph_looked_up():
    """Loss scaling applies gradients inside a tf.cond."""
    model = Model(merlin_table("item", combiner="mean", ragged=True))
    (spec,) = recorded(model, ragged(LISTS))

    @tf.function(autograph=False)
    def step(go):
        (gradient,) = gradients_of(model, ragged(LISTS))
        none = spec.variable[:0, 0]
        return tf.cond(
            go,
            lambda: count_samples(spec, gradient.indices)[::2],
            lambda: (tf.zeros([0], tf.int64), none),
        )

    rows, counts = (x.numpy().tolist() for x in step(tf.constant(True)))
    assert {i: n for i, n in zip(rows, counts, strict=True) if i} == added_up(LISTS)


def joined(gradient):
    """A gradient that another rank's rows were joined to."""
    return tf.concat([tf.cast(gradient.indices, tf.int64), [3, 3]], axis=0)


@both
@pytest.mark.parametrize("case", ["joined", "never looked up", "a reader of the variable"])
def test_gradients_that_came_from_elsewhere_are_refused(case, in_graph):
    model = Model(merlin_table("item"))
    (spec,) = recorded(model, column(A))
    if case == "a reader of the variable":
        model.forward = lambda t, x: [t(x), tf.gather(spec.variable, [1, 1, 2])]

    def step(x):
        if case == "never looked up":
            return count_samples(spec, tf.constant([1, 2]))
        (gradient,) = gradients_of(model, x)
        return count_samples(spec, joined(gradient) if case == "joined" else gradient.indices)

    refused = (ValueError, tf.errors.InvalidArgumentError)
    with pytest.raises(refused, match="no lookup of the table|rows"):
        run(step, in_graph, column(A))


@both
def test_a_dense_gradient_counts_the_ids_looked_up_and_no_other_rows(in_graph):
    """A tied output reads the whole table; the same ids again count once here too."""

    def forward(table, x):
        logits = tf.matmul(tf.ones([4, D]), table.table.embeddings, transpose_b=True)
        return [table(x), table(column(C)), table(x), logits]

    model = Model(merlin_table("item"))
    (spec,) = recorded(model, column(A))
    model.forward = forward

    def step(x):
        (gradient,) = gradients_of(model, x)
        assert isinstance(0.5 * gradient, tf.Tensor)
        return count_all_rows(spec)

    counts = run(step, in_graph, column(A)).numpy()
    assert {i: n for i, n in enumerate(counts) if n} == added_up(A, C)


@both
def test_merlins_older_tables(in_graph):
    """`EmbeddingFeatures`, of `InputBlock` and the models on it: one-hot, shared, and a list."""
    a, b, lists = [3, 1, 3, 3], [3, 7, 7, 1], [[2, 2], [], [5, 2], [0]]
    shared = [category("a", 9, domain="ab"), category("b", 9, domain="ab")]
    schema = Schema([*shared, category("l", 8, ragged=True)])
    options = mm.EmbeddingOptions(embedding_dim_default=4)
    model = Model(mm.EmbeddingFeatures.from_schema(schema, embedding_options=options))
    inputs = {"a": column(a), "b": column(b), "l": ragged(lists)}
    # The empty list reads row 0, which one sample holds.
    assert counts_of(model, inputs, in_graph) == {"ab": added_up(a, b), "l": added_up(lists)}
    specs = {spec.name: spec for spec in find_tables(model)}
    assert [column.name for column in specs["ab"].columns] == ["a", "b"]
    assert (specs["l"].num_rows, specs["l"].width) == (8, 4)


@both
@pytest.mark.parametrize("mask_zero", [True, False])
def test_keras_embeddings(mask_zero, in_graph):
    """A sample that holds an id twice counts once; padding, if 0 is padding, never."""
    model = Model(tf.keras.layers.Embedding(8, 4, mask_zero=mask_zero, name="words"))
    padded = tf.constant([[2, 2], [0, 0], [5, 2], [0, 0]])
    counts = {2: 2, 5: 1, 0: 0 if mask_zero else 2}
    assert counts_of(model, padded, in_graph) == {"words": counts}
    one_hot = {0: 0 if mask_zero else 2, 4: 1}
    assert counts_of(model, column([0, 4, 0]), in_graph) == {"words": one_hot}


@both
def test_lists_of_lists_count_by_sample(in_graph):
    """Of words in sentences, say, by document."""
    ids = tf.ragged.constant([[[3, 4], [3]], [[5], [5, 3], []], []], dtype=tf.int64)
    model = Model(tf.keras.layers.Embedding(6, 2, name="words"))
    assert counts_of(model, ids, in_graph) == {"words": {3: 2, 4: 1, 5: 1}}


@pytest.mark.parametrize("kind", ["EmbeddingTable", "EmbeddingFeatures", "Embedding"])
@pytest.mark.parametrize("width", [1, 2])
def test_only_the_batch_tells_that_ids_are_one_hot(kind, width):
    """There 0 is an id as any other; in lists, but of a plain Embedding, it is padding."""
    schema = Schema([category("a", 6)])
    layer = {
        "EmbeddingTable": lambda: mm.Embeddings(schema, dim=4, sequence_combiner="mean"),
        "EmbeddingFeatures": lambda: mm.EmbeddingFeatures.from_schema(schema),
        "Embedding": lambda: tf.keras.layers.Embedding(6, 4, name="a"),
    }[kind]()
    model = Model(layer, lambda layer, x: layer(x if kind == "Embedding" else {"a": x}))
    ids = tf.constant([[0] * width, [0] * width, [3] * width])
    (spec,) = recorded(model, ids)

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.int32)], autograph=False)
    def step(ids):
        return count_samples(spec, gradients_of(model, ids)[0].indices)

    zeros = 0 if width == 2 and kind != "Embedding" else 2
    assert as_dict(step(ids)) == {0: zeros, 3: 1}


# Refused


def test_ids_that_were_made_unique_are_refused():
    model = Model(
        tf.keras.layers.Embedding(6, 2),
        lambda table, ids: table(tf.unique(tf.reshape(ids, [-1]))[0]),
    )
    recorded(model, tf.constant([[3, 3]]))
    with pytest.raises(ValueError, match="made unique"):
        tf.function(model)(tf.constant([[3, 3]]))


def test_an_optimizer_of_another_model_is_refused():
    one, other = (Model(tf.keras.layers.Embedding(8, 4)) for _ in range(2))
    optimizer = CowClipOptimizer.for_model(one, COLD)

    def train():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(other(tf.constant([1, 2])))
        optimizer.minimize(loss, other.trainable_variables, tape=tape)

    with pytest.raises(ValueError, match=r"has a sparse gradient.*bind\(model\)"):
        train()
    optimizer.bind(other)
    train()
    assert int(optimizer.iterations) == 1


def test_a_model_without_tables_or_with_a_regularizer_is_refused():
    with pytest.raises(ValueError, match="No embedding table was found.*call it on a batch first"):
        CowClipOptimizer.for_model(Model(tf.keras.layers.Dense(3)), COLD)
    layer = tf.keras.layers.Embedding(8, 4, embeddings_regularizer="l2", name="words")
    with pytest.raises(ValueError, match="table 'words' must have no embeddings_regularizer"):
        CowClipOptimizer.for_model(Model(layer), COLD)
