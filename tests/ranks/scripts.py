"""What users' own scripts do with models on two ranks, and how they are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from merlin_cowclip.plugins import (
    CowClipOptimizer,
    load_model,
    save_model,
    whole_tables,
)
from merlin_cowclip.plugins._tensorflow import Schema
from merlin_cowclip.plugins.optimizers.state import state_of
from tests.plugins.merlin_models import NUMBER, SCHEMA, TARGET, category
from tests.ranks.cases import HP, Case, batches, in_shards, ours

KERAS = tf.keras.callbacks


def said_by(scripts: dict[str, Callable[[], Any]]) -> dict[str, str]:
    """What ended each of them; empty where nothing did."""
    said = {}
    for name, script in scripts.items():
        try:
            script()
            said[name] = ""
        except Exception as error:
            said[name] = str(error)
    return said


def _built(build: Callable[[Any], Any], rank: int, ranks: int, **given: Any) -> tuple[Any, Any]:
    """A model with its optimizer, and some batches."""
    case = Case(build, SCHEMA)
    local = list(batches(case, rank, ranks))[:3]
    model = build(SCHEMA)
    model(local[0][0])
    hyperparameters = given.pop("hyperparameters", case.hyperparameters)
    loss = given.pop("loss", None)
    optimizer = CowClipOptimizer.for_model(model, hyperparameters, steps_per_epoch=9, **given)
    model.compile(optimizer=optimizer, metrics=[], loss=loss)
    return model, local


def of_keras() -> Any:
    """A model that is none of Merlin's; with its own weights on each rank."""
    table = tf.keras.layers.Embedding(9, 2)
    average = tf.keras.layers.GlobalAveragePooling1D()
    model = tf.keras.Sequential([table, average, tf.keras.layers.Dense(1)])
    model(tf.ones([4, 1]))
    optimizer = CowClipOptimizer.for_model(model, HP)
    model.compile(optimizer=optimizer, loss="mse")
    return model


def _data(local: list[Any], batches: int) -> tf.data.Dataset:
    data = tf.data.Dataset.from_tensor_slices(local[0])
    return data.batch(len(local[0][1])).repeat(batches)


PART = "save_model(model, path)"
REFUSED = {  # by script, what both ranks are told
    "get_weights": PART,
    "l2": "hyperparameters l2 0.0001 on rank 0, 0.0002 on rank 1",
    "wrapped": "hvd.DistributedOptimizer does not add up id counts",
}


def refused(rank: int, ranks: int) -> dict[str, str]:
    """Calls that would use one rank's rows for all, or that the ranks do not make alike."""
    from horovod.tensorflow.keras import DistributedOptimizer

    model, _ = _built(in_shards, rank, ranks)

    def fit_by(l2: float) -> None:
        model, local = _built(ours, rank, ranks, hyperparameters=hp.replace(l2=l2))
        model.fit(_data(local, 1), verbose=0)

    hp = Case(ours, SCHEMA).hyperparameters
    return said_by(
        {
            "get_weights": model.get_weights,
            "l2": lambda: fit_by(hp.l2 * (1 + rank)),
            "wrapped": lambda: DistributedOptimizer(model.optimizer),
        }
    )


def with_a_wrong_id(rank: int, ranks: int) -> dict[str, Any]:
    """What each has after a step that one rank has to begin again."""
    model, local = _built(ours, rank, ranks)
    features, labels = local[0]
    wrong = {**features, "a": features["a"] + 10**6}
    said = said_by({"wrong": lambda: model.train_on_batch(wrong, labels)} if rank else {})
    model.train_on_batch(features, labels)
    changed = [float(np.abs(weight).sum()) for weight in model.get_weights()]
    return {"said": said, "weights": changed, "steps": int(model.optimizer.iterations)}


def scaled(rank: int, ranks: int) -> dict[str, Any]:
    """The state around two steps, of which the first has an infinite gradient on rank 0."""
    schema = Schema([category("a", 60), NUMBER, TARGET])
    case = Case(in_shards, schema, "field")
    model = in_shards(schema)
    optimizer = CowClipOptimizer.for_model(model, case.hyperparameters, steps_per_epoch=9)
    scaling = tf.keras.mixed_precision.LossScaleOptimizer(optimizer)
    features, labels = next(batches(case, rank, ranks))
    features = {**features, "a": 2 + 2 * features["a"]}
    weights = model.trainable_variables

    @tf.function(autograph=False)
    def step(row: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(features, training=True) - labels))
            loss = scaling.get_scaled_loss(loss)
        gradients = scaling.get_unscaled_gradients(tape.gradient(loss, weights))
        for place, one in enumerate(gradients):
            if isinstance(one, tf.IndexedSlices):
                infinite = tf.where(one.indices == row, float("inf"), 0.0)[:, tf.newaxis]
                values = one.values + infinite
                gradients[place] = tf.IndexedSlices(values, one.indices, one.dense_shape)
        scaling.apply_gradients(zip(gradients, weights, strict=True))

    optimizer.create_slots(weights)
    optimizer.broadcast()
    scales, dense, tables = [], [], []
    for number in range(3):
        if number:
            step(features["a"][0, 0] if number == 1 else tf.constant(-1, tf.int64))
        sums = {v.ref(): float(np.abs(v).sum()) for v in weights}
        own = optimizer.in_shards()
        scales.append(float(scaling.loss_scale))
        dense.append([value for key, value in sums.items() if key not in own])
        tables.append([value for key, value in sums.items() if key in own])
    return {"scales": scales, "dense": dense, "tables": tables}


def together(folder: Path, rank: int, ranks: int) -> dict[str, Any]:
    """What all ranks do together: stop, predict, save and load."""
    model, local = _built(in_shards, rank, ranks)
    statistics = model.optimizer.observe()
    data, epochs = _data(local, 2), []

    class Losses(KERAS.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            epochs.append(float(logs["loss"]))

    stop = KERAS.EarlyStopping("loss", patience=0, min_delta=1.0)  # in the second epoch
    model.fit(data, epochs=5, verbose=0, callbacks=[Losses(), stop])
    predicted = [model.predict(data, verbose=0)]
    with whole_tables(model):
        if not rank:
            predicted.append(model.predict(data, verbose=0))
    predicted.append(model.predict(data, verbose=0))
    save_model(model, folder / "everywhere")
    after = load_model(folder / "everywhere")  # at once: not the model that was there before
    steps = [int(one.optimizer.iterations) for one in (model, after)]
    apart = max(float(np.abs(one - predicted[0]).max()) for one in predicted)
    results = {"losses": epochs, "apart": apart}
    occurrences = [field.all.occurrences for field in statistics.total()]
    return {**results, "steps": steps, "occurrences": occurrences}


class _Load(KERAS.Callback):
    """Loads dense weights as a fit begins, as Horovod's users do on rank 0."""

    def on_train_begin(self, logs: Any = None) -> None:
        shards = self.model.optimizer.in_shards()
        for weight in self.model.trainable_variables:
            if weight.ref() not in shards:
                weight.assign_add(tf.ones_like(weight))


def loaded(rank: int, ranks: int) -> dict[str, Any]:
    """The weights and how far the last bias is up, after a fit that loads weights on rank 0."""
    import horovod.tensorflow as hvd

    broadcast = hvd.keras.callbacks.BroadcastGlobalVariablesCallback(0)
    model, local = _built(in_shards, rank, ranks)
    load = [] if rank else [_Load()]
    model.fit(_data(local, 2), verbose=0, callbacks=[*load, broadcast])
    own = model.optimizer.in_shards()
    state = [v for v in state_of(model, model.optimizer).values() if v.ref() not in own]
    up = float(model.trainable_variables[-1].numpy()[0])
    keras = of_keras()
    keras.fit(tf.fill([4, 1], 1 + rank), tf.ones([4, 1]), verbose=0)
    state += keras.weights
    return {"weights": [float(np.abs(value).sum()) for value in state], "up": up}


def ended(folder: Path, rank: int, ranks: int) -> dict[str, Any]:
    """What has come of each."""
    return {
        "refused": refused(rank, ranks),
        "wrong": with_a_wrong_id(rank, ranks),
        "scaled": scaled(rank, ranks),
        "together": together(folder, rank, ranks),
        "loaded": loaded(rank, ranks),
    }
