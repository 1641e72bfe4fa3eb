"""CowClipAdam on bare variables: the published trajectory, Keras's Adam, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from merlin_cowclip.plugins import CowClipAdam, LinearWarmup

from .reference import Exact, Settings


@pytest.mark.parametrize("in_graph", [False, True])
def test_published_trajectory(golden, in_graph):
    table = tf.Variable(golden["traj_W0"])
    ratio = float(golden["traj_ratio"])
    optimizer = CowClipAdam(
        float(golden["traj_lr"]),
        l2=float(golden["traj_l2"]),
        clip_ratio=ratio,
        clip_floor=ratio * float(golden["traj_floor"]),
    )
    scale = float(golden["traj_logit_scale"])

    def step(ids, a, y):
        with tf.GradientTape() as tape:
            logits = scale * tf.reduce_sum(tf.gather(table, ids) * a, axis=-1)
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(y, logits))
        gradient = tape.gradient(loss, table)
        assert isinstance(gradient, tf.IndexedSlices)
        optimizer.apply_gradients([(gradient, table)])
        return loss

    run = tf.function(step) if in_graph else step
    assert len(golden["traj_ids"]) == 25
    for t, ids in enumerate(golden["traj_ids"]):
        assert len(set(ids)) < len(ids)  # repeats, which are the counts
        y = golden["traj_y"][t].astype(np.float32)
        loss = run(tf.constant(ids), tf.constant(golden["traj_a"][t]), tf.constant(y))
        np.testing.assert_allclose(loss, golden["traj_data_loss"][t], rtol=0, atol=1e-5)
        np.testing.assert_allclose(table, golden["traj_W"][t], rtol=0, atol=1e-5)


def test_exact_without_clip_is_keras_adam_with_a_dense_l2_regularizer():
    rng = np.random.default_rng(0)
    w0 = rng.normal(scale=0.05, size=(60, 8)).astype(np.float32)
    ours, theirs = tf.Variable(w0), tf.Variable(w0)
    regularizer = tf.keras.regularizers.L2(1e-3)
    cowclip = CowClipAdam(1e-2, l2=1e-3, clip=None)
    keras = tf.keras.optimizers.legacy.Adam(1e-2)

    def loss(table, ids, a):
        return tf.reduce_mean(tf.square(tf.reduce_sum(tf.gather(table, ids) * a, -1) - 1.0))

    for _ in range(50):
        ids = tf.constant(rng.integers(0, 30, 64))
        a = tf.constant(rng.normal(size=(64, 8)), tf.float32)
        cowclip.minimize(lambda ids=ids, a=a: loss(ours, ids, a), [ours])
        keras.minimize(lambda ids=ids, a=a: loss(theirs, ids, a) + regularizer(theirs), [theirs])
    assert np.abs(ours.numpy() - w0).max() > 0.1
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("in_graph", [False, True])
def test_a_setting_that_is_set_is_used_at_the_next_step(in_graph):
    """In the third step absent rows are clipped, too; in the fourth, by ζ."""
    settings = [
        {"l2": 0.0, "clip_ratio": 1.0, "clip_floor": 1e-3},
        {"l2": 0.1, "clip_ratio": 0.5, "clip_floor": 1e-3},
        {"l2": 0.3, "clip_ratio": 0.2, "clip_floor": 1e-3},
        {"l2": 0.3, "clip_ratio": 0.2, "clip_floor": 0.3},
    ]
    rng = np.random.default_rng(0)
    w, ids, gradients = rng.normal(size=(6, 3)), np.array([0, 2, 0, 3]), rng.normal(size=(4, 3))
    table, optimizer = tf.Variable(w, dtype=tf.float64), CowClipAdam(0.1, **settings[0])
    reference = Exact(w, Settings(0.1), np.zeros(6, int))
    summed = np.array([gradients[0] + gradients[2], gradients[1], gradients[3]])

    def step():
        slices = tf.IndexedSlices(tf.constant(gradients), tf.constant(ids), tf.constant(w.shape))
        optimizer.apply_gradients([(slices, table)])

    run = tf.function(step) if in_graph else step
    for number, given in enumerate(settings, 1):
        for name, value in given.items():
            setattr(optimizer, name, value)
        run()
        reference.settings = Settings(0.1, **given)
        reference.step(np.array([0, 2, 3]), summed, np.array([2, 1, 1]))
        np.testing.assert_allclose(table, reference.w, rtol=0, atol=2e-6, err_msg=f"step {number}")
        assert {name: optimizer.get_config()[name] for name in given} == given


def test_dense_gradients_are_an_error():
    table = tf.Variable(tf.ones((3, 2)), name="ads")
    with pytest.raises(ValueError, match=r"gradient of 'ads:0' is dense.*regularizer"):
        CowClipAdam().apply_gradients([(tf.ones((3, 2)), table)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clip_ratio": 0.0}, "clip_ratio must be a positive number"),
        ({"learning_rate": -1.0}, "learning_rate must be a positive"),
        ({"beta_1": 1.0}, "beta_1 and beta_2 must be below 1"),
        ({"update": "dense"}, "update must be one of exact, lazy. Received: 'dense'"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        CowClipAdam(**arguments)


def test_config_round_trip():
    rate = LinearWarmup(2e-4, 10)
    one = CowClipAdam(
        rate, 0.8, 0.99, 1e-6, l2=3e-5, clip_ratio=2.0, clip_floor=1e-4, update="lazy"
    )
    config = tf.keras.optimizers.serialize(one)
    other = tf.keras.optimizers.deserialize(config, use_legacy_optimizer=True)
    assert type(other) is CowClipAdam
    assert other.get_config() == one.get_config()
    assert (other._get_hyper("beta_1"), other._get_hyper("beta_2")) == (0.8, 0.99)


def test_warmup_is_linear_from_1e_8():
    schedule = LinearWarmup(8e-4, 100)
    steps = np.array([0, 50, 99, 100, 1000])
    expected = [1e-8, 1e-8 + 0.5 * (8e-4 - 1e-8), 1e-8 + 0.99 * (8e-4 - 1e-8), 8e-4, 8e-4]
    np.testing.assert_allclose([schedule(tf.constant(s)) for s in steps], expected, rtol=1e-6)
    assert float(LinearWarmup(1e-3, 0)(tf.constant(0))) == pytest.approx(1e-3)
    with pytest.raises(ValueError, match="warmup_steps must be a number that is not negative"):
        LinearWarmup(1e-3, -1)


def step(table, look_up, **options):
    """A step of a new optimizer, by what a function looks up."""
    optimizer = CowClipAdam(**options)

    def traced():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(look_up())
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    tf.function(traced, autograph=False)()
    assert int(optimizer.iterations) == 1


def test_the_same_ids_twice_are_an_error_where_nobody_records_them():
    """As stock `DeepFMModel` looks them up: repeats would be twice the samples."""
    table, ids = tf.Variable(tf.ones([5, 2])), tf.constant([1, 3, 1])

    def twice(other):
        return tf.gather(table, ids) + tf.gather(table, other)

    with pytest.raises(ValueError, match=r"looked up once.*'Variable.*looked up twice.*for_model"):
        step(table, lambda: twice(tf.cast(ids, tf.int64)))
    step(table, lambda: twice(ids + 1))
    step(table, lambda: twice(ids), clip=None)


def test_ids_that_were_made_unique_are_an_error_where_nobody_records_them():
    """As a list's combiner makes them: every id would be that of one sample."""
    table = tf.Variable(tf.ones([5, 2]))
    lists = tf.ragged.constant([[1, 3], [1], [1, 1, 4], []], dtype=tf.int64)

    def combined():
        return tf.nn.safe_embedding_lookup_sparse(table, lists.to_sparse(), combiner="mean")

    with pytest.raises(ValueError, match=r"once per sample.*unique.*combiner.*for_model"):
        step(table, combined)
    step(table, combined, clip="column", clip_threshold=1.0)  # follows no counts
    step(table, lambda: tf.gather(table, lists.flat_values))
