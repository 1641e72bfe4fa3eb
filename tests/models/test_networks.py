"""Every network of `MODELS`: formula, size, schemas, training, saving.

The formulas are in `networks.py`: NumPy, in double precision.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

from merlin_cowclip.models import MODELS, deepfm, lr
from merlin_cowclip.plugins import CowClipOptimizer, Hyperparameters
from merlin_cowclip.plugins._tensorflow import (
    ColumnSchema,
    Schema,
    Tags,
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
    as_numpy,
    batch_of,
    block_of,
    features,
    network_weights,
    randomise,
    schema_of,
)

with quiet_stack():
    from merlin.io import Dataset

pytestmark = pytest.mark.usefixtures("graphs_as_traced")

HOT = Hyperparameters(ROWS, embedding_lr=0.05, dense_lr=0.02, warmup_epochs=0.0)
QUICK = ("deepfm", "dcn_v2, rank 2", "dlrm")
EACH = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.extended) for name in NETWORKS
]


def batches(given=None) -> tf.data.Dataset:
    """One batch of features b×1, as a plain `tf.data.Dataset`."""
    return tf.data.Dataset.from_tensors((given or features(), LABELS))


def check_formula(name, model, given, schema=SCHEMA) -> None:
    """With random weights, none of which is zero."""
    randomise(model)
    logits = NETWORKS[name].logits(as_numpy(model), batch_of(model, given, schema))
    assert np.abs(logits).max() < 6  # where a probability still tells the logit
    np.testing.assert_allclose(model(given)[:, 0], 1 / (1 + np.exp(-logits)), rtol=1e-5)


# Formula


@pytest.mark.parametrize("name", NETWORKS)
def test_the_formula(name):
    given, model = features(), NETWORKS[name].build()
    assert model(given).shape == (ROWS, 1)
    assert ("cross/0/inner" in as_numpy(model)) == ("rank" in name)
    check_formula(name, model, given)


SCHEMAS = {
    "no numbers": schema_of(SIZES, (), {"genres": 7}),
    "one field, no number": schema_of({"user": 9}),
    "a list alone": schema_of({}, ("price",), {"genres": 7}),
}


@pytest.mark.parametrize("kind", SCHEMAS)
@pytest.mark.parametrize("name", QUICK)
def test_schemas(name, kind):
    """The formula holds, and a step of training moves every part of the network."""
    network, schema = NETWORKS[name], SCHEMAS[kind]
    if (name, kind) == ("dlrm", "one field, no number"):
        with pytest.raises(ValueError, match=r"two fields at least.* Received .* \['user'\]"):
            network.build(schema)
        return
    model, given = network.build(schema), features(schema)
    model(given)
    check_formula(name, model, given, schema)
    before = as_numpy(model)
    model.compile(optimizer=CowClipOptimizer.for_model(model, HOT), metrics=[], run_eagerly=True)
    model.fit(batches(given), verbose=0)
    for key, weight in as_numpy(model).items():
        assert np.isfinite(weight).all()
        assert (weight != before[key]).any(), key


# Weights


@pytest.mark.parametrize(
    ("name", "count", "per_id"),
    [
        ("lr", 14, 1),
        ("fm", 14, 11),
        ("wide_and_deep", 430_814, 11),  # 0.431M in Table 7
        ("deepfm", 430_814, 11),  # 0.431M
        ("dcn", 432_725, 11),  # 0.433M
        ("dcn_v2", 655_493, 11),  # 0.655M
        ("dlrm", 621_595, 10),
    ],
)
def test_weights_on_criteos_fields(name, count, per_id):
    ids = {f"C{i}": 5 + i for i in range(26)}
    schema = schema_of(ids, tuple(f"I{i}" for i in range(13)))
    model = MODELS[name](schema)
    model(features(schema, [[], []]))
    assert network_weights(model) == count
    total = sum(math.prod(v.shape) for v in model.trainable_variables)
    assert total - count == per_id * sum(ids.values())


@pytest.mark.extended
@pytest.mark.parametrize("name", NETWORKS)
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
    for (stream, fan_in), arrays in kernels.items():
        weights = np.concatenate(arrays)
        sampling = 3 / math.sqrt(2 * len(weights))  # of a deviation, three times its own
        assert sampling < 0.13
        # He et al. 2015: variance 2 / fan-in
        assert weights.std() == pytest.approx(math.sqrt(2 / fan_in), rel=sampling), stream


# Probability


def test_large_logits_have_the_right_gradient():
    """Through the loss as Keras computes it, where a sigmoid alone would have saturated."""
    model = lr(schema_of({"user": 9}))
    given = {"user": tf.constant([[3], [3], [4], [4], [5], [5]])}
    model(given)
    table = block_of(model).linear.table
    table.scatter_nd_update([[3], [4], [5]], [[50.0], [-50.0], [0.0]])
    labels = tf.constant([[1.0], [0.0], [1.0], [0.0], [1.0], [0.0]])
    model.compile(optimizer="sgd", metrics=[])

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.keras.losses.BinaryCrossentropy()(labels, model(given, training=True))
        return loss, tf.convert_to_tensor(tape.gradient(loss, table))

    loss, gradient = step()
    # Mean of softplus(z) - y·z; derivative (sigmoid(z) - y) / 6.
    assert float(loss) == pytest.approx((0 + 50 + 50 + 0 + 2 * math.log(2)) / 6, rel=1e-6)
    np.testing.assert_allclose(gradient[3:6, 0] * 6, [1.0, -1.0, 0.0], atol=1e-6)


# Training and saving


def test_fit_evaluate_and_predict_on_a_merlin_dataset():
    random, rows = np.random.default_rng(2), 40
    columns: dict[str, Any] = {k: random.integers(3, size, rows) for k, size in SIZES.items()}
    columns |= {k: random.random(rows).astype("float32") for k in NUMBERS}
    columns["genres"] = lists = [list(random.integers(3, 7, i % 3)) for i in range(rows)]
    columns["click0"] = y = random.integers(0, 2, rows)
    dataset = Dataset(pd.DataFrame(columns), schema=SCHEMA)
    batch = {k: tf.constant(columns[k][:, np.newaxis]) for k in (*SIZES, *NUMBERS)}
    batch["genres__values"] = tf.constant(np.concatenate(lists).astype("int64"))
    batch["genres__offsets"] = tf.constant(np.cumsum([0, *map(len, lists)]))
    model = NETWORKS["deepfm"].build()
    model(batch)  # its step is then traced once
    model.compile(optimizer=CowClipOptimizer.for_model(model, HOT), metrics=[])
    history = model.fit(dataset, batch_size=10, epochs=3, verbose=0).history
    assert int(model.optimizer.iterations) == 12
    assert history["loss"][-1] < history["loss"][0]
    predicted = model.predict(dataset, batch_size=10, verbose=0)
    p = model(batch).numpy()
    np.testing.assert_allclose(predicted, p, rtol=0, atol=1e-6)
    evaluated = model.evaluate(dataset, batch_size=10, return_dict=True, verbose=0)
    log_loss = -np.mean(np.log(np.where(y == 1, p[:, 0], 1 - p[:, 0])))
    assert evaluated["loss"] == pytest.approx(log_loss, rel=1e-5)


@pytest.mark.parametrize("name", EACH)
def test_a_trained_model_is_saved_and_predicts_the_same(name, tmp_path):
    tf.keras.utils.set_random_seed(0)
    model = NETWORKS[name].build()
    model(features())  # its step is then traced once
    model.compile(optimizer=CowClipOptimizer.for_model(model, HOT), metrics=[])
    losses = model.fit(batches(), epochs=15, verbose=0).history["loss"]
    assert losses[-1] < 0.5 * losses[0]
    with quiet_stack(), quick_saves():
        model.save(str(tmp_path / "model"), include_optimizer=False)
        loaded = tf.keras.models.load_model(str(tmp_path / "model"), compile=False)
    assert block_of(loaded).get_config() == block_of(model).get_config()
    for lists in (LISTS, OTHER_LISTS):
        given = features(lists=lists)
        np.testing.assert_allclose(loaded(given), model(given), rtol=0, atol=1e-6)


OPTIONS = {
    "deepfm": {},
    "dcn": {"cross_layers": 2},
    "dcn_v2": {"cross_layers": 2, "low_rank_dim": 3},
    "dlrm": {"bottom_mlp": (7, 3)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_config_round_trip(name):
    """With no argument at its default."""
    given = {"embedding_dim": 4, "mlp": (6,), "stddev": 0.25, "combiner": {"genres": "sum"}}
    given |= {"name": "mine", **OPTIONS[name]}
    cls = NETWORKS[name].block
    config = cls(SCHEMA, **given).get_config()
    assert {k: tuple(v) if isinstance(v, list) else v for k, v in config.items()}.items() >= (
        given.items()
    )
    again = cls.from_config(json.loads(json.dumps(config)))
    assert again.get_config() == config
    assert again.schema.column_names == SCHEMA.excluding_by_tag(Tags.TARGET).column_names


@pytest.mark.parametrize("name", QUICK)
def test_a_block_in_half_precision_is_loaded_with_its_layers(name):
    with precision_policy("mixed_float16"):
        block = block_of(NETWORKS[name].build())
    again = type(block).from_config(json.loads(json.dumps(block.get_config())))
    for one in (block, again):
        assert {layer.compute_dtype for layer in one._flatten_layers()} == {"float16"}


# Refused

LIST_OF_NUMBERS = Schema([ColumnSchema("prices", tags=[Tags.CONTINUOUS], is_list=True)])
FEATURES = SCHEMA.excluding_by_tag(Tags.TARGET)
RATING = ColumnSchema("rating", tags=[Tags.TARGET, Tags.REGRESSION], dtype="int8")


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("deepfm", None, "the output_schema of a fitted workflow.* Received: NoneType"),
        ("deepfm", SCHEMA + LIST_OF_NUMBERS, r"\['prices'\].* schema.excluding_by_name"),
        ("deepfm", schema_of(SIZES, targets=0), r"exactly one .* Received: \[\]. Tag it"),
        ("deepfm", schema_of(SIZES, targets=2), r"exactly one .* \['click0', 'click1'\]. Tag it"),
        ("deepfm", FEATURES + Schema([RATING]), "a 0/1 label.* 'rating', tagged .*REGRESSION"),
        ("deepfm", {"mlp": ()}, r"mlp must be at least one positive whole number.*: mlp=\(\)"),
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
