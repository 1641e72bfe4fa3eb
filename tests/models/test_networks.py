"""Every network of `MODELS` through one contract: formula, gradient, size, data, saving.

The formulas are in `networks.py`: NumPy, one sample at a time, in double precision.
"""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

from merlin_cowclip.models import MODELS, deepfm
from merlin_cowclip.models.blocks import DLRMBlock
from merlin_cowclip.plugins import CowClipOptimizer, Hyperparameters
from merlin_cowclip.plugins._tensorflow import (
    ColumnSchema,
    Schema,
    Tags,
    mm,
    precision_policy,
    quiet_stack,
)

from ..saves import quick_saves
from .networks import (
    LABELS,
    LISTS,
    NETWORKS,
    NUMBERS,
    OTHER_LISTS,
    ROWS,
    SCHEMA,
    SIZES,
    WIDTH,
    as_numpy,
    block_of,
    features,
    network_weights,
    probability_of,
    randomise,
    samples_of,
    schema_of,
    weights_of,
)

with quiet_stack():
    from merlin.io import Dataset

pytestmark = pytest.mark.usefixtures("graphs_as_traced")

HOT = Hyperparameters(ROWS, embedding_lr=0.05, dense_lr=0.02, warmup_epochs=0.0)
EPOCHS = 15


def batches(given=None, labels=LABELS) -> tf.data.Dataset:
    """One batch of features b×1, as a plain `tf.data.Dataset`."""
    return tf.data.Dataset.from_tensors((given or features(), labels))


def sigmoid(logits):
    return 1 / (1 + np.exp(-np.asarray(logits)))


def logits_by_loop(network, model, given, schema=SCHEMA, combiner="mean") -> np.ndarray:
    weights, samples = as_numpy(model), samples_of(given, schema, combiner)
    return np.array([network.logit(weights, sample) for sample in samples])


QUICK = ("deepfm", "dcn_v2, rank 2", "dlrm")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name in QUICK else pytest.mark.extended) for name in NETWORKS
    ],
)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(name):
    """Built, with weights none of which is zero."""
    model = NETWORKS[name].build()
    model(features())
    randomise(model)
    return model


class Trained(NamedTuple):
    model: Any
    losses: list[float]


@pytest.fixture(scope="module")
def trained(name) -> Trained:
    """Trained with a CowClipOptimizer from a plain `tf.data.Dataset`."""
    tf.keras.utils.set_random_seed(0)
    model = NETWORKS[name].build()
    model(features())  # its step is then traced once
    model.compile(optimizer=CowClipOptimizer.for_model(model, HOT), metrics=[])
    return Trained(model, model.fit(batches(), epochs=EPOCHS, verbose=0).history["loss"])


@pytest.fixture(scope="module")
def saved(trained, tmp_path_factory) -> str:
    """The folder of the trained model, without the traces of all layers."""
    folder = str(tmp_path_factory.mktemp("saved") / "model")
    with quiet_stack(), quick_saves():
        trained.model.save(folder, include_optimizer=False)
    return folder


def test_every_network_is_in_the_table():
    assert {network.builder for network in NETWORKS.values()} == set(MODELS)
    assert MODELS["deepfm"] is deepfm


# Formula and gradient


@pytest.mark.parametrize("name", NETWORKS)
def test_the_formula(name):
    given, model = features(), NETWORKS[name].build()
    model(given)
    randomise(model)
    logits = logits_by_loop(NETWORKS[name], model, given)
    assert np.ptp(logits) > 0.5
    assert np.abs(logits).max() < 6  # where a probability still tells the logit
    found = model(given).numpy()
    assert found.shape == (ROWS, 1)
    np.testing.assert_allclose(found[:, 0], sigmoid(logits), rtol=1e-5)


def test_gradients_are_those_of_the_formula(name, model):
    """In double precision, through the loss as Keras computes it, along random directions."""
    network, given = NETWORKS[name], features()
    tf.keras.mixed_precision.set_global_policy("float64")
    try:
        double = network.build()
        double(given)
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")
    variables = weights_of(double)
    for key, weight in weights_of(model).items():
        variables[key].assign(tf.cast(weight, tf.float64))
    with tf.GradientTape() as tape:
        loss = tf.keras.losses.BinaryCrossentropy()(LABELS, double(given))
    gradients = tape.gradient(loss, variables)
    weights, samples = as_numpy(double), samples_of(given)

    def loss_at(key, moved) -> float:
        z = np.array([network.logit({**weights, key: moved}, sample) for sample in samples])
        return float(np.mean(np.logaddexp(0, z) - LABELS[:, 0] * z))

    random, step = np.random.default_rng(1), 1e-5
    for key, gradient in gradients.items():
        assert float(loss) == pytest.approx(loss_at(key, weights[key]), rel=1e-6)
        found = tf.convert_to_tensor(gradient).numpy()
        assert np.abs(found).max() > 1e-4
        for along in random.normal(size=(3, *found.shape)):
            along /= np.linalg.norm(along)
            ends = [loss_at(key, weights[key] + sign * step * along) for sign in (1, -1)]
            expected = (ends[0] - ends[1]) / (2 * step)
            np.testing.assert_allclose((found * along).sum(), expected, 1e-5, 1e-8, err_msg=key)


# Weights

DEEP = (273 + 1) * 400 + 2 * (400 + 1) * 400 + 400
"""26 fields of width 10 and 13 numbers are 273 inputs; the logit has no bias."""
BOTTOM_OF_DLRM = (13 + 1) * 512 + (512 + 1) * 256 + (256 + 1) * 64 + (64 + 1) * 10
TOP_OF_DLRM = (10 + 27 * 26 // 2 + 1) * 400 + 2 * (400 + 1) * 400 + 400


@pytest.mark.parametrize(
    ("name", "formula", "count", "per_id"),
    [
        ("lr", 13 + 1, 14, 1),
        ("fm", 13 + 1, 14, 11),
        ("wide_and_deep", DEEP + 13 + 1, 430_814, 11),  # 0.431M in Table 7
        ("deepfm", DEEP + 13 + 1, 430_814, 11),  # 0.431M
        ("dcn", DEEP + 3 * 2 * 273 + 273 + 13 + 1, 432_725, 11),  # 0.433M
        ("dcn_v2", DEEP + 3 * (273 * 273 + 273) + 273 + 13 + 1, 655_493, 11),  # 0.655M
        ("dlrm", BOTTOM_OF_DLRM + TOP_OF_DLRM + 1, 621_595, 10),
    ],
)
def test_weights_on_criteos_fields(name, formula, count, per_id):
    ids = {f"C{i}": 5 + i for i in range(26)}
    schema = schema_of(ids, tuple(f"I{i}" for i in range(13)))
    model = MODELS[name](schema)
    model(features(schema, [[], []]))
    assert network_weights(model) == formula == count
    total = sum(math.prod(v.shape) for v in model.trainable_variables)
    assert total - formula == per_id * sum(ids.values())


@pytest.mark.extended
def test_initial_weights(name):
    """Tables N(0, σ), the linear part and all biases zero, kernels Kaiming initialised."""
    tf.keras.utils.set_random_seed(0)
    network = NETWORKS[name]
    schema = schema_of({"user": 103, "item": 6}, ("price",))
    wide = {"bottom_mlp": (300, 200)} if network.builder == "dlrm" else {}
    model = network.build(schema, embedding_dim=320, mlp=(400, 300), stddev=2e-2, **wide)
    model(features(schema))
    kernels: dict[tuple[str, int], list] = {}
    for key, weight in as_numpy(model).items():
        if key == "linear" or key.endswith("bias"):
            assert not weight.any()
        elif key == "embeddings":
            assert weight[3:103].std() == pytest.approx(2e-2, rel=0.03)
        elif key != "continuous_logit":  # one weight; the others by stream and fan-in, to be many
            kernels.setdefault((key.split("/")[0], weight.shape[0]), []).append(weight.ravel())
    for (stream, fan_in), found in kernels.items():
        weights = np.concatenate(found)
        sampling = 3 / math.sqrt(2 * len(weights))  # of a deviation, three times its own
        assert sampling < 0.13
        # He et al. 2015: variance 2 / fan-in
        assert weights.std() == pytest.approx(math.sqrt(2 / fan_in), rel=sampling), stream


# Schemas

SCHEMAS = {
    "no numbers": schema_of(SIZES, (), {"genres": 7}),
    "one field, no number": schema_of({"user": 9}),
    "a list alone": schema_of({}, ("price",), {"genres": 7}),
}


@pytest.mark.parametrize("kind", SCHEMAS)
def test_schemas(name, kind):
    """The formula holds, and a step of training moves every part of the network."""
    network, schema = NETWORKS[name], SCHEMAS[kind]
    if (network.block, kind) == (DLRMBlock, "one field, no number"):
        with pytest.raises(ValueError, match=r"two fields at least.* Received .* \['user'\]"):
            network.build(schema)
        return
    model = network.build(schema)
    given = features(schema)
    model.compile(optimizer=CowClipOptimizer.for_model(model, HOT), metrics=[], run_eagerly=True)
    model.fit(batches(given), verbose=0)
    randomise(model)
    logits = logits_by_loop(network, model, given, schema)
    np.testing.assert_allclose(model(given).numpy()[:, 0], sigmoid(logits), rtol=1e-5)
    before = as_numpy(model)
    model.fit(batches(given), verbose=0)
    after = as_numpy(model)
    for key, weight in after.items():
        assert np.isfinite(weight).all()
        assert (weight != before[key]).any(), key
    assert np.isfinite(model(given).numpy()).all()


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
    probability = probability_of(model)

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


# Data


def frame(rows=40) -> pd.DataFrame:
    """Of SCHEMA; one list in three is empty."""
    random = np.random.default_rng(2)
    columns: dict[str, Any] = {k: random.integers(3, size, rows) for k, size in SIZES.items()}
    columns |= {k: random.random(rows).astype("float32") for k in NUMBERS}
    columns["genres"] = [list(random.integers(3, 7, i % 3)) for i in range(rows)]
    columns["click0"] = random.integers(0, 2, rows)
    return pd.DataFrame(columns)


def batch_of(data: pd.DataFrame) -> dict[str, tf.Tensor]:
    """All rows as one batch, as the loader gives it."""
    given = {k: tf.constant(data[k].to_numpy()[:, np.newaxis]) for k in (*SIZES, *NUMBERS)}
    lists = list(data["genres"])
    given["genres__values"] = tf.constant(np.concatenate(lists).astype("int64"))
    given["genres__offsets"] = tf.constant(np.cumsum([0, *map(len, lists)]))
    return given


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("deepfm", "data set"),
        pytest.param("dlrm", "loader", marks=pytest.mark.extended),
        pytest.param("dcn_v2", "data set", marks=pytest.mark.extended),
    ],
)
def test_fit_evaluate_and_predict(name, source):
    data = frame()
    dataset = Dataset(data, schema=SCHEMA)
    model = NETWORKS[name].build()
    if source == "data set":
        model(batch_of(data))  # its step is then traced once
    model.compile(optimizer=CowClipOptimizer.for_model(model, HOT), metrics=[])
    if source == "loader":
        history = model.fit(mm.Loader(dataset, batch_size=10), epochs=3, verbose=0).history
    else:
        history = model.fit(dataset, batch_size=10, epochs=3, verbose=0).history
    assert int(model.optimizer.iterations) == 12
    assert history["loss"][-1] < history["loss"][0]
    predicted = model.predict(dataset, batch_size=10, verbose=0)
    expected = model(batch_of(data)).numpy()
    np.testing.assert_allclose(predicted, expected, rtol=0, atol=1e-6)
    found = model.evaluate(dataset, batch_size=10, return_dict=True, verbose=0)
    p, y = expected[:, 0].astype("float64"), data["click0"].to_numpy()
    assert found["loss"] == pytest.approx(-np.mean(np.log(np.where(y == 1, p, 1 - p))), rel=1e-5)


# Optimizers


def test_cowclip_learns_a_batch_by_heart(trained):
    assert trained.losses[-1] < 0.5 * trained.losses[0]


# Serving and saving


def test_saved_model_predicts_the_same(trained, saved):
    with quiet_stack():
        loaded = tf.keras.models.load_model(saved, compile=False)
    assert block_of(loaded).get_config() == block_of(trained.model).get_config()
    for lists in (LISTS, OTHER_LISTS):
        given = features(lists=lists)
        expected = trained.model(given).numpy()
        np.testing.assert_allclose(loaded(given).numpy(), expected, rtol=0, atol=1e-6)


OPTIONS = {
    "dcn": {"cross_layers": 2},
    "dcn_v2": {"cross_layers": 2, "low_rank_dim": 3},
    "dlrm": {"bottom_mlp": (7, 3)},
}


@pytest.mark.parametrize("name", ["deepfm", *OPTIONS])
def test_config_round_trip(name):
    """With no argument at its default."""
    given = {"embedding_dim": 4, "mlp": (6,), "stddev": 0.25, "combiner": {"genres": "sum"}}
    given |= {"name": "mine", **OPTIONS.get(name, {})}
    cls = NETWORKS[name].block
    config = cls(SCHEMA, **given).get_config()
    assert {k: tuple(v) if isinstance(v, list) else v for k, v in config.items()}.items() >= (
        given.items()
    )
    again = cls.from_config(json.loads(json.dumps(config)))
    assert type(again) is cls
    assert again.get_config() == config
    assert again.schema.column_names == SCHEMA.excluding_by_tag(Tags.TARGET).column_names


@pytest.mark.parametrize("name", NETWORKS)
def test_a_block_in_half_precision_is_loaded_with_its_layers(name):
    """The layers within were float32 where Keras's global policy is."""
    with precision_policy("mixed_float16"):
        block = block_of(NETWORKS[name].build())
    again = type(block).from_config(json.loads(json.dumps(block.get_config())))
    for one in (block, again):
        assert {layer.compute_dtype for layer in one._flatten_layers()} == {"float16"}


# Refused

LIST_OF_NUMBERS = Schema([ColumnSchema("prices", tags=[Tags.CONTINUOUS], is_list=True)])
FEATURES = SCHEMA.excluding_by_tag(Tags.TARGET)
PRICE = ColumnSchema("price", tags=[Tags.CONTINUOUS])
RATING = ColumnSchema("rating", tags=[Tags.TARGET, Tags.REGRESSION], dtype="int8")
CLASS = RATING.with_tags([Tags.MULTI_CLASS_CLASSIFICATION])


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("deepfm", None, "the output_schema of a fitted workflow.* Received: NoneType"),
        ("deepfm", Schema([PRICE]), "must have a column tagged Tags.CATEGORICAL.*Categorify"),
        ("deepfm", SCHEMA + LIST_OF_NUMBERS, r"\['prices'\].* schema.excluding_by_name"),
        ("deepfm", schema_of(SIZES, targets=0), r"exactly one .* Received: \[\]. Tag it"),
        ("deepfm", schema_of(SIZES, targets=2), r"exactly one .* \['click0', 'click1'\]. Tag it"),
        # Ratings of 1 to 5 were trained as clicks, with a loss of -2,312.
        ("deepfm", FEATURES + Schema([RATING]), "a 0/1 label.* 'rating', tagged .*REGRESSION"),
        ("deepfm", FEATURES + Schema([CLASS]), "a 0/1 label.* 'rating', tagged .*MULTI_CLASS"),
        ("deepfm", {"mlp": ()}, r"mlp must be at least one positive whole number.*: mlp=\(\)"),
        ("deepfm", {"mlp": (4, 2.0)}, r"mlp must be .* Received: mlp=\(4, 2.0\)"),
        ("deepfm", {"embedding_dim": -1}, "embedding_dim must be a positive whole number"),
        ("deepfm", {"stddev": -1.0}, "stddev must be a number that is not negative"),
        ("dcn", {"cross_layers": 0}, "cross_layers must be a positive .* cross_layers=0"),
        ("dcn_v2", {"low_rank_dim": 0}, "low_rank_dim must be a positive .* low_rank_dim=0"),
        ("dlrm", {"bottom_mlp": (0,)}, r"bottom_mlp must be .* bottom_mlp=\(0,\)"),
    ],
)
def test_refused(name, given, message):
    """A schema, or an option."""
    schema, options = (SCHEMA, given) if isinstance(given, dict) else (given, {})
    with pytest.raises(ValueError, match=message):
        NETWORKS[name].build(schema, **options)


def test_a_rating_of_0_and_1_is_a_target():
    deepfm(FEATURES + Schema([RATING.with_tags([Tags.BINARY_CLASSIFICATION])]))
