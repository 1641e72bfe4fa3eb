"""CowClipAdam on bare variables: the published trajectory, Keras's Adam, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from merlin_cowclip.plugins import CowClipAdam, LinearWarmup


def slices(values, indices, shape):
    return tf.IndexedSlices(
        tf.constant(values, tf.float32), tf.constant(indices), tf.constant(shape, tf.int64)
    )


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
    mine = CowClipAdam(1e-2, l2=1e-3, clip=None)
    keras = tf.keras.optimizers.legacy.Adam(1e-2)

    def loss(table, ids, a):
        return tf.reduce_mean(tf.square(tf.reduce_sum(tf.gather(table, ids) * a, -1) - 1.0))

    for _ in range(50):
        ids = tf.constant(rng.integers(0, 30, 64))
        a = tf.constant(rng.normal(size=(64, 8)), tf.float32)
        mine.minimize(lambda ids=ids, a=a: loss(ours, ids, a), [ours])
        keras.minimize(lambda ids=ids, a=a: loss(theirs, ids, a) + regularizer(theirs), [theirs])
    assert np.abs(ours.numpy() - w0).max() > 0.1
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


def test_the_graph_is_traced_once():
    table = tf.Variable(tf.random.normal((30, 4)))
    optimizer = CowClipAdam()
    traces = []

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def step(ids):
        traces.append(1)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, ids))
        optimizer.minimize(loss, [table], tape=tape)

    for n in (3, 5, 5, 8):
        step(tf.range(n, dtype=tf.int64))
    assert len(traces) <= 2  # Keras traces once to create slots and once without
    assert optimizer.iterations.numpy() == 4


def clipped_adam(w, ids, gradients, settings, rate=0.1, beta_1=0.9, beta_2=0.999):
    """The table after exact steps in NumPy, float64: by Algorithm 1 with the settings of each."""
    w, m, v = w.astype(np.float64), np.zeros(w.shape), np.zeros(w.shape)
    for t, one in enumerate(settings, 1):
        g, counts = 2 * one["l2"] * w, np.maximum(np.bincount(ids, minlength=len(w)), 1)
        np.add.at(g, ids, gradients)
        bounds = counts * np.maximum(
            one["clip_ratio"] * np.linalg.norm(w, axis=1), one["clip_floor"]
        )
        g *= np.minimum(1, bounds / np.maximum(np.linalg.norm(g, axis=1), 1e-30))[:, np.newaxis]
        m, v = beta_1 * m + (1 - beta_1) * g, beta_2 * v + (1 - beta_2) * g**2
        w = w - rate * (1 - beta_2**t) ** 0.5 / (1 - beta_1**t) * m / (np.sqrt(v) + 1e-7)
    return w


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

    def step():
        slices = tf.IndexedSlices(tf.constant(gradients), tf.constant(ids), tf.constant(w.shape))
        optimizer.apply_gradients([(slices, table)])

    run = tf.function(step) if in_graph else step
    for number, given in enumerate(settings, 1):
        for name, value in given.items():
            setattr(optimizer, name, value)
        run()
        expected = clipped_adam(w, ids, gradients, settings[:number])
        np.testing.assert_allclose(table, expected, rtol=0, atol=2e-6, err_msg=f"step {number}")
        assert {name: optimizer.get_config()[name] for name in given} == given


def test_dense_gradients_are_refused_with_the_remedy():
    table = tf.Variable(tf.ones((3, 2)), name="ads")
    with pytest.raises(ValueError, match=r"gradient of 'ads:0' is dense.*regularizer"):
        CowClipAdam().apply_gradients([(tf.ones((3, 2)), table)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clip_ratio": 0.0}, "clip_ratio must be a positive number. Received: clip_ratio=0.0"),
        ({"clip_floor": -1e-5}, "clip_floor must be a number that is not negative"),
        ({"l2": float("nan")}, "l2 must be"),
        ({"learning_rate": -1.0}, "learning_rate must be a positive"),
        ({"beta_1": 1.0}, "beta_1 and beta_2 must be below 1"),
        ({"clip": "norm"}, "clip must be None or one of global, .*adaptive_column"),
        ({"update": "dense"}, "update must be one of exact, lazy. Received: 'dense'"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        CowClipAdam(**arguments)


@pytest.mark.parametrize("rate", [2e-4, LinearWarmup(2e-4, 10)])
def test_config_round_trip(rate):
    one = CowClipAdam(
        rate, 0.8, 0.99, 1e-6, l2=3e-5, clip_ratio=2.0, clip_floor=1e-4, update="lazy"
    )
    config = tf.keras.optimizers.serialize(one)
    other = tf.keras.optimizers.deserialize(config, use_legacy_optimizer=True)
    assert type(other) is CowClipAdam
    assert other.get_config() == one.get_config()


def test_checkpoint_brings_back_slots_and_steps(tmp_path):
    def fresh():
        return tf.Variable(tf.ones((5, 2))), CowClipAdam(1e-2)

    def step(table, optimizer, i):
        optimizer.apply_gradients([(slices([[0.1 * i, 0.2]], [i % 5], (5, 2)), table)])

    table, optimizer = fresh()
    for i in range(3):
        step(table, optimizer, i)
    path = tf.train.Checkpoint(table=table, optimizer=optimizer).save(str(tmp_path / "c"))
    step(table, optimizer, 3)
    again, restored = fresh()
    tf.train.Checkpoint(table=again, optimizer=restored).restore(path)
    step(again, restored, 3)
    np.testing.assert_array_equal(again, table)
    assert restored.iterations.numpy() == 4
    np.testing.assert_array_equal(restored.get_slot(again, "v"), optimizer.get_slot(table, "v"))


def test_warmup_is_linear_from_1e_8():
    schedule = LinearWarmup(8e-4, 100)
    steps = np.array([0, 50, 99, 100, 1000])
    expected = [1e-8, 1e-8 + 0.5 * (8e-4 - 1e-8), 1e-8 + 0.99 * (8e-4 - 1e-8), 8e-4, 8e-4]
    np.testing.assert_allclose([schedule(tf.constant(s)) for s in steps], expected, rtol=1e-6)
    assert float(LinearWarmup(1e-3, 0)(tf.constant(0))) == pytest.approx(1e-3)
    with pytest.raises(ValueError, match="warmup_steps must be a number that is not negative"):
        LinearWarmup(1e-3, -1)


def test_the_same_ids_twice_are_refused_where_nobody_records_them():
    """As stock `DeepFMModel` looks them up: repeats would be twice the samples."""
    table = tf.Variable(tf.ones([5, 2]))

    def step(optimizer, other):
        ids = tf.constant([1, 3, 1])
        with tf.GradientTape() as tape:
            seen = tf.gather(table, tf.reshape(ids, [-1, 1])), tf.gather(table, other(ids))
            loss = sum(tf.reduce_sum(rows) for rows in seen)
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    def run(optimizer, other):
        tf.function(lambda: step(optimizer, other), autograph=False)()
        return int(optimizer.iterations)

    with pytest.raises(ValueError, match=r"looked up once.*'Variable.*looked up twice.*for_model"):
        run(CowClipAdam(), lambda ids: tf.cast(ids, tf.int64))
    assert run(CowClipAdam(), lambda ids: ids + 1) == 1
    assert run(CowClipAdam(clip=None), lambda ids: ids) == 1


def test_ids_that_were_made_unique_are_refused_where_nobody_records_them():
    """As a list's combiner makes them: every id would be that of one sample."""
    table = tf.Variable(tf.ones([5, 2]))
    lists = tf.ragged.constant([[1, 3], [1], [1, 1, 4], []], dtype=tf.int64)

    def combined():
        return tf.nn.safe_embedding_lookup_sparse(table, lists.to_sparse(), combiner="mean")

    def run(optimizer, look_up):
        def step():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(look_up())
            optimizer.apply_gradients([(tape.gradient(loss, table), table)])

        tf.function(step, autograph=False)()
        return int(optimizer.iterations)

    with pytest.raises(ValueError, match=r"once per sample.*unique.*combiner.*for_model"):
        run(CowClipAdam(), combined)
    for bounds in ({"clip": None}, {"clip": "column", "clip_threshold": 1.0}):  # follow no counts
        assert run(CowClipAdam(**bounds), combined) == 1
    assert run(CowClipAdam(), lambda: tf.gather(table, lists.flat_values)) == 1
