"""The update on CUDA against the CPU's."""

import numpy as np
import pytest
import tensorflow as tf

from merlin_cowclip.models import MODELS
from merlin_cowclip.plugins import CLIP_RULES, CowClipAdam, CowClipOptimizer, Hyperparameters

from ..models.networks import SCHEMA, features

V, WIDTH, BATCH = 2_000, 10, 512


def table_after(device: str, update: str, clip: str | None, steps: int = 12) -> np.ndarray:
    random = np.random.default_rng(1)
    with tf.device(device):
        table = tf.Variable(random.normal(scale=0.05, size=(V, WIDTH)).astype("float32"))
        threshold = {} if clip is None or clip.startswith("adaptive") else {"clip_threshold": 1e-3}
        optimizer = CowClipAdam(1e-2, l2=1e-3, clip=clip, update=update, **threshold)

        @tf.function
        def step(ids, values):
            slices = tf.IndexedSlices(values, ids, tf.constant([V, WIDTH], tf.int64))
            optimizer.apply_gradients([(slices, table)])

        for _ in range(steps):
            ids = random.zipf(1.2, BATCH) % V
            values = random.normal(size=(BATCH, WIDTH)).astype("float32")
            step(tf.constant(ids), tf.constant(values))
        assert table.device.endswith(device.strip("/").replace("/", ""))
        return table.numpy()


@pytest.mark.parametrize("update", ["exact", "lazy"])
@pytest.mark.parametrize("clip", [*CLIP_RULES, None])
def test_a_table_after_some_steps(gpu, update, clip):
    np.testing.assert_allclose(
        table_after(gpu, update, clip), table_after("/CPU:0", update, clip), rtol=1e-4, atol=1e-6
    )


def weights_after(device: str, name: str, steps: int = 10) -> list[np.ndarray]:
    tf.keras.utils.set_random_seed(3)
    with tf.device("/CPU:0"):  # the same first weights on every device
        model = MODELS[name](SCHEMA, embedding_dim=4, mlp=(16, 8))
        model(features())
        first = [v.numpy() for v in model.weights]
    with tf.device(device):
        model = MODELS[name](SCHEMA, embedding_dim=4, mlp=(16, 8))
        model(features())
        for variable, value in zip(model.weights, first, strict=True):
            variable.assign(value)
        hp = Hyperparameters(6, dense_lr=1e-3, embedding_lr=1e-3, warmup_epochs=0)
        model.compile(optimizer=CowClipOptimizer.for_model(model, hp), metrics=[])
        labels = tf.constant([[1.0], [0.0], [1.0], [1.0], [0.0], [0.0]])
        data = tf.data.Dataset.from_tensors((features(), labels)).repeat(steps)
        model.fit(data, verbose=0)
    return [v.numpy() for v in model.trainable_variables]


@pytest.mark.parametrize("name", list(MODELS))
def test_a_network_after_some_steps(gpu, name):
    for ours, theirs in zip(weights_after(gpu, name), weights_after("/CPU:0", name), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)


def test_an_id_out_of_range_is_refused(gpu):
    """TensorFlow itself reads zeros there on a GPU, in silence."""
    with tf.device(gpu):
        model = MODELS["deepfm"](SCHEMA, embedding_dim=4, mlp=(8,))
        given = features()
        model(given)
        wrong = {**given, "user": tf.fill(given["user"].shape, tf.constant(10_000, tf.int64))}
        with pytest.raises(tf.errors.InvalidArgumentError, match="user"):
            tf.function(model)(wrong)
