"""DeepFM against a NumPy double loop of its formula, the paper's weight counts, and saving."""

import math

import numpy as np
import pytest
import tensorflow as tf

from merlin_cowclip.models import MODELS, DeepFMBlock, deepfm
from merlin_cowclip.models.ctr_block import Probability
from merlin_cowclip.workflows.quiet import quiet_imports

with quiet_imports():
    from merlin.schema import ColumnSchema, Schema, Tags

WIDTH, MLP = 3, (8, 5)


def schema_of(ids: dict[str, int], numbers=(), lists: dict[str, int] | None = None, targets=1):
    columns = [
        ColumnSchema(
            name,
            tags=[Tags.CATEGORICAL],
            dtype="int64",
            is_list=name in (lists or {}),
            is_ragged=name in (lists or {}),
            properties={"domain": {"min": 0, "max": size - 1, "name": name}},
        )
        for name, size in {**ids, **(lists or {})}.items()
    ]
    columns += [ColumnSchema(n, tags=[Tags.CONTINUOUS], dtype="float32") for n in numbers]
    for i in range(targets):
        tags = [Tags.TARGET, Tags.BINARY_CLASSIFICATION]
        columns.append(ColumnSchema(f"click{i}", tags=tags, dtype="int64"))
    return Schema(columns)


SIZES = {"user": 9, "item": 6, "hour": 5}
SCHEMA = schema_of(SIZES, ("price", "age"), {"genres": 7})
FIELDS = ("user", "item", "hour", "genres")
OFFSETS = {"user": 0, "item": 9, "hour": 15, "genres": 20}
GENRES = [[3, 5, 5], [], [6], [4, 3], [0, 3], [4]]
ROWS = len(GENRES)


def features(genres=GENRES) -> dict:
    """As the loader gives them."""
    random = np.random.default_rng(4)
    given = {name: random.integers(3, size, (ROWS, 1)) for name, size in SIZES.items()}
    given |= {name: random.random((ROWS, 1)).astype("float32") for name in ("price", "age")}
    given["genres__values"] = np.array([i for row in genres for i in row], "int64")
    given["genres__offsets"] = np.cumsum([0, *(len(row) for row in genres)])
    return {name: tf.constant(values) for name, values in given.items()}


def block_of(model) -> DeepFMBlock:
    (block,) = (layer for layer in model._flatten_layers() if isinstance(layer, DeepFMBlock))
    return block


@pytest.fixture(scope="module")
def model():
    """Built, with weights none of which is zero."""
    model = deepfm(SCHEMA, embedding_dim=WIDTH, mlp=MLP)
    model(features())
    random = np.random.default_rng(11)
    for variable in model.trainable_variables:
        variable.assign(random.normal(scale=0.5, size=variable.shape))
    return model


def logit_by_loop(model, given) -> np.ndarray:
    """Guo et al. 2017, equations 1 to 3, sample by sample."""
    block = block_of(model)
    table, linear = block.embeddings.table.numpy(), block.linear.table.numpy()
    hidden = [
        (layer.kernel.numpy(), layer.bias.numpy())
        for layer in block.deep._flatten_layers()
        if isinstance(layer, tf.keras.layers.Dense)
    ]
    assert [kernel.shape for kernel, _ in hidden] == [(4 * WIDTH + 2, MLP[0]), MLP]
    (probability,) = (x for x in model._flatten_layers() if isinstance(x, Probability))
    logits = []
    for sample in range(ROWS):
        vectors, y = [], float(probability.bias[0])
        for name in FIELDS:
            ids = GENRES[sample] if name == "genres" else [int(given[name][sample, 0])]
            rows = [OFFSETS[name] + i for i in ids if name != "genres" or i != 0]
            vectors.append(sum((table[r] for r in rows), np.zeros(WIDTH)) / max(len(rows), 1))
            y += sum(linear[r, 0] for r in rows) / max(len(rows), 1)
        for i in range(len(FIELDS)):
            for j in range(i + 1, len(FIELDS)):
                y += float(np.dot(vectors[i], vectors[j]))
        numbers = [float(given[name][sample, 0]) for name in ("price", "age")]
        y += float(np.dot(numbers, block.continuous_logit.kernel.numpy()[:, 0]))
        x = np.concatenate([*vectors, numbers])
        for kernel, bias in hidden:
            x = np.maximum(x @ kernel + bias, 0.0)
        y += float(x @ block.deep_logit.kernel.numpy()[:, 0])
        logits.append(y)
    return np.array(logits)


def test_the_formula(model):
    given = features()
    logits = logit_by_loop(model, given)
    assert np.ptp(logits) > 0.5
    found = model(given).numpy()
    assert found.shape == (ROWS, 1)
    np.testing.assert_allclose(found[:, 0], 1 / (1 + np.exp(-logits)), rtol=1e-5)


@pytest.mark.parametrize("numbers", [(), ("price",)])
def test_one_field_and_no_list(numbers):
    """Without a pair of fields the product term is empty; without numbers there is no weight."""
    model = deepfm(schema_of({"user": 9}, numbers), embedding_dim=WIDTH, mlp=(4,))
    given = {"user": tf.constant([[3], [8]])} | {n: tf.constant([[0.1], [0.7]]) for n in numbers}
    assert model(given).shape == (2, 1)
    assert (block_of(model).continuous_logit.built) == bool(numbers)


# Weights


def network_weights(model) -> int:
    block = block_of(model)
    tables = {block.embeddings.table.ref(), block.linear.table.ref()}
    return sum(math.prod(v.shape) for v in model.trainable_variables if v.ref() not in tables)


def test_weights_on_criteos_fields():
    ids = {f"C{i}": 5 + i for i in range(26)}
    numbers = tuple(f"I{i}" for i in range(13))
    model = deepfm(schema_of(ids, numbers))
    given = {name: tf.constant([[3], [4]]) for name in ids}
    model(given | {name: tf.constant([[0.5], [0.1]]) for name in numbers})
    into = 26 * 10 + 13
    formula = (into + 1) * 400 + 2 * 401 * 400 + 400 + 13 + 1
    assert network_weights(model) == formula == 430_814  # the paper's 0.431M (Table 7)
    total = sum(math.prod(v.shape) for v in model.trainable_variables)
    assert total - formula == 11 * sum(ids.values())  # 10 embedded, 1 linear


def test_initial_weights():
    tf.keras.utils.set_random_seed(0)
    model = deepfm(schema_of({"user": 5_003}, ("price",)), mlp=(400, 300), stddev=2e-2)
    model({"user": tf.constant([[3]]), "price": tf.constant([[0.5]])})
    block = block_of(model)
    assert not block.linear.table.numpy().any()
    assert block.embeddings.table.numpy()[3:].std() == pytest.approx(2e-2, rel=0.03)
    dense = [x for x in model._flatten_layers() if isinstance(x, tf.keras.layers.Dense)]
    assert sorted(x.kernel.shape[0] for x in dense) == [1, 11, 300, 400]
    for layer in dense:
        fan_in, units = layer.kernel.shape
        if fan_in * units > 4_000:  # He et al. 2015: variance 2 / fan-in
            assert layer.kernel.numpy().std() == pytest.approx(math.sqrt(2 / fan_in), rel=0.05)
        if layer.use_bias:
            assert not layer.bias.numpy().any()


def test_two_models_share_nothing():
    """Merlin's DCNModel makes its default MLP at import, once for all models."""
    one, other = (deepfm(SCHEMA, embedding_dim=WIDTH, mlp=MLP) for _ in range(2))
    one(features())
    other(features())
    mine = {v.ref() for v in one.trainable_variables}
    assert mine.isdisjoint(v.ref() for v in other.trainable_variables)


# Probability


def test_large_logits_have_the_right_gradient():
    """Through the loss as Keras computes it, where a sigmoid alone would have saturated."""
    model = deepfm(schema_of({"user": 9}), embedding_dim=WIDTH, mlp=(4,))
    given = {"user": tf.constant([[3], [3], [4], [4], [5], [5]])}
    model(given)
    block = block_of(model)
    for variable in model.trainable_variables:
        variable.assign(tf.zeros_like(variable))
    block.linear.table.scatter_nd_update([[3], [4], [5]], [[50.0], [-50.0], [0.0]])
    labels = tf.constant([[1.0], [0.0], [1.0], [0.0], [1.0], [0.0]])
    model.compile(optimizer="sgd", metrics=[])
    (probability,) = (x for x in model._flatten_layers() if isinstance(x, Probability))

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            found = model(given, training=True)
            loss = tf.keras.losses.BinaryCrossentropy()(labels, found)
        return loss, tape.gradient(loss, [block.linear.table, probability.bias])

    loss, (table, bias) = step()
    # Mean of softplus(z) - y·z; derivative (sigmoid(z) - y) / 6.
    assert float(loss) == pytest.approx((0 + 50 + 50 + 0 + 2 * math.log(2)) / 6, rel=1e-6)
    gradient = np.zeros(9)
    np.add.at(gradient, table.indices.numpy(), table.values.numpy()[:, 0])
    np.testing.assert_allclose(gradient[[3, 4, 5]] * 6, [1.0, -1.0, 0.0], atol=1e-6)
    assert float(bias[0]) == pytest.approx(0.0, abs=1e-6)


def test_fit_on_a_logit_of_50_recovers(monkeypatch):
    """One confident mistake: the step of model.fit itself is finite and goes the right way."""
    model = deepfm(schema_of({"user": 9}), embedding_dim=WIDTH, mlp=(4,))
    given = {"user": tf.constant([[3], [4]])}
    model(given)
    block = block_of(model)
    block.linear.table.scatter_nd_update([[3], [4]], [[50.0], [-50.0]])
    model.compile(optimizer=tf.keras.optimizers.legacy.SGD(1.0), metrics=[])
    batch = tf.data.Dataset.from_tensors((given, tf.constant([[0.0], [1.0]])))
    history = model.fit(batch, epochs=1, verbose=0).history
    assert history["loss"][0] == pytest.approx(50.0, rel=1e-2)
    after = block.linear.table.numpy()[:, 0]
    np.testing.assert_allclose(after[[3, 4]], [50 - 0.5, -50 + 0.5], atol=1e-5)


def test_probability_is_float32_in_half_precision():
    """bfloat16 has no number between 0.996 and 1."""
    layer = Probability(dtype=tf.keras.mixed_precision.Policy("mixed_bfloat16"))
    found = layer(tf.constant([[7.0]], tf.bfloat16))
    assert found.dtype == tf.float32
    assert float(found) == pytest.approx(1 / (1 + math.exp(-7)), abs=1e-6)


# Saving


def test_block_config_round_trip(model):
    block = block_of(model)
    again = DeepFMBlock.from_config(block.get_config())
    assert again.get_config() == block.get_config()
    assert again.embeddings.row_offsets == (0, 9, 15, 20, 27)
    assert (again.embedding_dim, again.mlp_units) == (WIDTH, MLP)


def test_saved_model_predicts_the_same(model, tmp_path):
    given = features()
    expected = model(given).numpy()
    model.save(str(tmp_path / "model"))
    loaded = tf.keras.models.load_model(tmp_path / "model", compile=False)
    np.testing.assert_allclose(loaded(given).numpy(), expected, rtol=0, atol=1e-6)
    other = features([[4], [4, 5], [], [], [3, 3, 3], [6, 5, 4]])  # lists of other lengths
    np.testing.assert_allclose(loaded(other).numpy(), model(other).numpy(), rtol=0, atol=1e-6)
    assert block_of(loaded).embeddings.fields == FIELDS


# Refused


def test_models_by_name():
    assert MODELS["deepfm"] is deepfm


@pytest.mark.parametrize(
    ("schema", "options", "message"),
    [
        (schema_of({}, ("price",)), {}, "must have a column tagged Tags.CATEGORICAL"),
        (schema_of({"user": 9}, targets=0), {}, r"exactly one column tagged .* Received: \[\]"),
        (
            schema_of({"user": 9}, targets=2),
            {},
            r"exactly one column tagged .* Received: \['click0', 'click1'\]",
        ),
        (SCHEMA, {"combiner": "max"}, "combiner must be one of mean, sum, sqrtn"),
        (SCHEMA, {"embedding_dim": -1}, "dim must be a positive whole number"),
        (SCHEMA, {"stddev": -1.0}, "stddev must not be negative"),
    ],
)
def test_refused(schema, options, message):
    with pytest.raises(ValueError, match=message):
        deepfm(schema, **options)
