"""Which layers of a model are tables, what of them is recorded and saved, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from merlin_cowclip.plugins import CowClipAdam, CowClipOptimizer, Hyperparameters
from merlin_cowclip.plugins._tensorflow import Schema, Tags, mm
from merlin_cowclip.plugins.embeddings.counting import count_samples
from merlin_cowclip.plugins.embeddings.discovery import find_tables

from .merlin_models import category
from .test_clipping import oracle as clip_oracle

COLD = Hyperparameters(4, warmup_epochs=0.0)
IDS = {"a": [[3], [1], [3], [3]], "l": [[2, 2], [], [5, 2], [0]], "b": [[3], [7], [7], [1]]}


def fed():
    """One-hot columns b×1 and a list column b×(n)×1."""
    lists = tf.ragged.constant(IDS["l"], tf.int64, ragged_rank=1)
    return {
        "a": tf.constant(IDS["a"], tf.int64),
        "b": tf.constant(IDS["b"], tf.int64),
        "l": tf.expand_dims(lists, -1),
    }


def added_up(*names):
    counts = {}
    for sample in [set(sample) for name in names for sample in IDS[name]]:
        for i in sample:
            counts[i] = counts.get(i, 0) + 1
    return counts


class Keras(tf.keras.Model):
    """A Keras model of one layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def call(self, inputs):
        return self.layer(inputs)


def counts_of(model, feed, in_graph):
    """For each table of the model, its counts in a step over the sum of all outputs."""
    specs = find_tables(model)
    assert find_tables(model) == specs  # found again, a model records as before

    def step():
        with tf.GradientTape() as tape:
            out = model(feed)
            loss = sum(tf.reduce_sum(x) for x in (out.values() if isinstance(out, dict) else [out]))
        variables = [spec.variable for spec in specs]
        gradients = tape.gradient(loss, variables)
        return {
            spec.name: count_samples(spec, g.indices)
            for spec, g in zip(specs, gradients, strict=True)
        }

    model(feed)  # builds it
    found = (tf.function(step, autograph=False) if in_graph else step)()
    return {
        name: dict(zip(c.rows.numpy().tolist(), c.counts.numpy().tolist(), strict=True))
        for name, c in found.items()
    }


@pytest.mark.parametrize("in_graph", [True, False])
def test_merlins_older_tables_are_found_and_recorded(in_graph):
    """`EmbeddingFeatures`, of `InputBlock` and the models on it: one-hot, shared, and a list."""
    shared = [category("a", 9, domain="ab"), category("b", 9, domain="ab")]
    schema = Schema([*shared, category("l", 8, ragged=True)])
    layer = mm.EmbeddingFeatures.from_schema(
        schema, embedding_options=mm.EmbeddingOptions(embedding_dim_default=4)
    )
    found = counts_of(Keras(layer), fed(), in_graph)
    assert set(found) == {"ab", "l"}
    assert found["ab"] == added_up("a", "b")
    assert found["l"] == added_up("l")  # the empty list reads row 0, which one sample holds
    specs = {spec.name: spec for spec in find_tables(Keras(layer))}
    assert [column.name for column in specs["ab"].columns] == ["a", "b"]
    assert (specs["l"].num_rows, specs["l"].width) == (8, 4)


@pytest.mark.parametrize("in_graph", [True, False])
@pytest.mark.parametrize("mask_zero", [True, False])
def test_keras_embeddings_are_found_and_recorded(mask_zero, in_graph):
    """A sample that holds an id twice counts once; padding, if 0 is padding, never."""
    padded = fed()["l"].to_tensor()[..., 0]  # [[2, 2], [0, 0], [5, 2], [0, 0]]
    layer = tf.keras.layers.Embedding(8, 4, mask_zero=mask_zero, name="words")
    found = counts_of(Keras(layer), padded, in_graph)
    assert found == {"words": {2: 2.0, 5: 1.0, 0: 0.0 if mask_zero else 2.0}}


@pytest.mark.parametrize("in_graph", [True, False])
def test_lists_of_lists_count_by_sample(in_graph):
    """Of words in sentences, say, by document."""
    ids = tf.ragged.constant([[[3, 4], [3]], [[5], [5, 3], []], []], dtype=tf.int64)
    model = Words(lambda t, ids: t(ids).flat_values)
    assert counts_of(model, ids, in_graph) == {"words": {3: 2, 4: 1, 5: 1}}


class Words(tf.keras.Model):
    """A model that hands its table ids in another shape than it was given them."""

    def __init__(self, forward, table=None):
        super().__init__()
        self.table = table or tf.keras.layers.Embedding(6, 2, name="words")
        self.forward = forward

    def call(self, inputs):
        return self.forward(self.table, inputs)


def test_ids_that_were_made_unique_are_refused():
    model = Words(lambda table, ids: table(tf.unique(tf.reshape(ids, [-1]))[0]))
    model(tf.constant([[3, 3]]))
    find_tables(model)
    with pytest.raises(ValueError, match="made unique"):
        tf.function(model)(tf.constant([[3, 3]]))


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
    model = Words(lambda table, ids: table(ids if kind == "Embedding" else {"a": ids}), layer)
    ids = tf.constant([[0] * width, [0] * width, [3] * width])
    model(ids)
    (spec,) = find_tables(model)

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.int32)], autograph=False)
    def step(ids):
        with tf.GradientTape() as tape:
            out = model(ids)
            loss = tf.reduce_sum(out["a"] if isinstance(out, dict) else out)
        gradient = tape.gradient(loss, spec.variable)
        return count_samples(spec, gradient.indices)

    found = step(ids)
    zeros = 0.0 if width == 2 and kind != "Embedding" else 2.0
    counts = dict(zip(found.rows.numpy().tolist(), found.counts.numpy().tolist(), strict=True))
    assert counts == {0: zeros, 3: 1.0}


@pytest.mark.parametrize(("width", "in_graph"), [(1, False), (2, True)])
def test_padding_alone_in_a_sample_is_not_counted(width, in_graph):
    layer = tf.keras.layers.Embedding(8, 4, mask_zero=True, name="words")
    ids = tf.constant([[0] * width] * 3 + [[4] + [0] * (width - 1)])
    assert counts_of(Keras(layer), ids, in_graph) == {"words": {0: 0.0, 4: 1.0}}


@pytest.mark.parametrize(
    "builder",
    [
        lambda schema: mm.MatrixFactorizationModel(schema, dim=4),
        lambda schema: mm.TwoTowerModel(schema, query_tower=mm.MLPBlock([4])),
        lambda schema: mm.Model(mm.InputBlock(schema), mm.MLPBlock([4]), mm.BinaryOutput("y")),
    ],
    ids=["MatrixFactorizationModel", "TwoTowerModel", "InputBlock"],
)
def test_models_on_merlins_older_inputs_have_tables(builder):
    tags = {"user": [Tags.USER, Tags.USER_ID], "item": [Tags.ITEM, Tags.ITEM_ID]}
    schema = Schema(
        [category(name, 9).with_tags([Tags.CATEGORICAL, *more]) for name, more in tags.items()]
    )
    optimizer = CowClipOptimizer.for_model(builder(schema), COLD, clip_tables=["item"])
    assert {spec.name: spec.num_rows for spec in optimizer.table_specs} == {"user": 9, "item": 9}


def test_a_recorded_keras_embedding_is_saved_and_loaded(tmp_path):
    model = Keras(tf.keras.layers.Embedding(8, 4))
    find_tables(model)
    ids = tf.constant([[1], [2]])
    expected = model(ids)
    model.save(tmp_path / "model")
    loaded = tf.keras.models.load_model(tmp_path / "model")
    np.testing.assert_array_equal(loaded(ids), expected)


class OwnGather(tf.keras.layers.Layer):
    """A table that nobody can know of."""

    def build(self, shape):
        self.own = self.add_weight("own", (8, 4))

    def call(self, ids):
        return tf.gather(self.own, ids)


def train(model, optimizer):
    ids = tf.constant([1, 2])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(ids))
    optimizer.minimize(loss, model.trainable_variables, tape=tape)


def test_a_sparse_gradient_of_no_table_is_refused_with_what_to_do():
    model = Keras(tf.keras.Sequential([OwnGather()]))
    model.other = tf.keras.layers.Embedding(3, 2)
    optimizer = CowClipOptimizer.for_model(model, COLD)
    with pytest.raises(
        ValueError, match=r"own:0' has a sparse.*no embedding table.*table_specs\(\) method"
    ):
        train(model, optimizer)


def test_an_optimizer_of_another_model_is_refused():
    """It would train with plain Adam."""
    one, other = (Keras(tf.keras.layers.Embedding(8, 4)) for _ in range(2))
    optimizer = CowClipOptimizer.for_model(one, COLD)
    with pytest.raises(ValueError, match=r"the model that it is compiled into.*bind\(model\)"):
        train(other, optimizer)
    optimizer.bind(other)
    train(other, optimizer)
    assert int(optimizer.iterations) == 1


def test_a_model_without_tables_is_refused():
    model = Keras(tf.keras.layers.Dense(3))
    with pytest.raises(ValueError, match="No embedding table was found.*call it on a batch first"):
        CowClipOptimizer.for_model(model, COLD)


def test_a_regularizer_of_a_keras_embedding_is_refused_also_one_added_later():
    model = Keras(tf.keras.layers.Embedding(8, 4, embeddings_regularizer="l2", name="words"))
    with pytest.raises(ValueError, match="table 'words' must have no embeddings_regularizer"):
        CowClipOptimizer.for_model(model, COLD)
    model = Keras(tf.keras.layers.Embedding(8, 4, name="words"))
    optimizer = CowClipOptimizer.for_model(model, COLD)
    model.layer.embeddings_regularizer = tf.keras.regularizers.L2(1e-3)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(tf.constant([1, 2]))) + sum(model.losses)
    with pytest.raises(ValueError, match="table 'words' must have no embeddings_regularizer"):
        optimizer.minimize(loss, model.trainable_variables, tape=tape)


@pytest.mark.parametrize(
    ("update", "clip", "in_graph"),
    [
        ("exact", "adaptive_column", True),
        ("lazy", "adaptive_column", False),
        ("exact", "adaptive_field", True),
    ],
)
def test_a_tied_output_against_algorithm_1(update, clip, in_graph):
    """Every row has a gradient: ids looked up are clipped by their count, all others as of 1.

    Of a field's samples the others are none: its bound grew with the table.
    """
    V, d, lr, l2, ratio, zeta = 12, 3, 0.05, 1e-2, 0.05, 1e-3
    rng = np.random.default_rng(5)
    w0 = rng.normal(scale=0.3, size=(V, d)).astype(np.float32)
    model = Keras(mm.EmbeddingTable(d, category("item", V)))
    model(tf.constant([[1]]))
    hp = COLD.replace(embedding_lr=lr, l2=l2, clip=clip, clip_ratio=ratio, clip_floor=zeta)
    optimizer = CowClipOptimizer.for_model(model, hp, update=update)
    (spec,) = optimizer.table_specs
    spec.is_tied = True  # the step below reads the whole table
    spec.variable.assign(w0)
    optimizer.create_slots([spec.variable])
    pull = tf.constant(rng.normal(size=(4, V)), tf.float32)
    ids = np.array([[3], [1], [3], [3]])

    def step():
        with tf.GradientTape() as tape:
            rows = model(tf.constant(ids))
            logits = tf.matmul(rows, spec.variable, transpose_b=True)
            loss = tf.reduce_sum(logits * pull)
        gradient = tape.gradient(loss, spec.variable)
        assert isinstance(gradient, tf.Tensor)
        optimizer.apply_gradients([(gradient, spec.variable)])

    (tf.function(step) if in_graph else step)()
    g = pull.numpy().T @ w0[ids[:, 0]]
    np.add.at(g, ids[:, 0], pull.numpy() @ w0)
    g = g.astype(np.float64) + 2 * l2 * w0
    counts = np.bincount(ids[:, 0], minlength=V)
    counts = np.maximum(counts, 1) if clip == "adaptive_column" else counts
    fields = np.zeros(V, int)
    g = clip_oracle(clip, g, w0.astype(np.float64), counts, fields, r=ratio, zeta=zeta)
    part = next(o for o in optimizer.optimizers if isinstance(o, CowClipAdam) and o.clip)
    np.testing.assert_allclose(part.get_slot(spec.variable, "m"), 0.1 * g, rtol=1e-4, atol=1e-8)
    rate = lr * np.sqrt(1 - 0.999) / (1 - 0.9)
    moved = rate * 0.1 * g / (np.sqrt(0.001 * g**2) + 1e-7)
    np.testing.assert_allclose(spec.variable, w0 - moved, rtol=1e-4, atol=1e-6)
