"""What scripts of one's own do with models on two ranks, and what they are told."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from merlin_cowclip.models import FusedEmbeddings
from merlin_cowclip.plugins import CowClipOptimizer, load_model, save_model, whole_tables
from merlin_cowclip.plugins._stack import Schema
from merlin_cowclip.plugins.joining import of_all_ranks
from merlin_cowclip.workflows import Loader, TrainConfig, train
from merlin_cowclip.workflows.data.prepared import PreparedData
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


def _made(build: Callable[[Any], Any], rank: int, ranks: int, **given: Any) -> tuple[Any, Any]:
    """A model with its optimizer, and some batches."""
    case = Case(build, SCHEMA)
    mine = list(batches(case, rank, ranks))[:3]
    model = build(SCHEMA)
    model(mine[0][0])
    hyperparameters = given.pop("hyperparameters", case.hyperparameters)
    loss = given.pop("loss", None)
    optimizer = CowClipOptimizer.for_model(model, hyperparameters, steps_per_epoch=9, **given)
    model.compile(optimizer=optimizer, metrics=[], loss=loss)
    return model, mine


def _data(mine: list[Any], batches: int) -> tf.data.Dataset:
    data = tf.data.Dataset.from_tensor_slices(mine[0])
    return data.batch(len(mine[0][1])).repeat(batches)


def _of_unknown_length(data: tf.data.Dataset) -> tf.data.Dataset:
    return data.filter(lambda *_: True)


def of_parts(folder: Path, rank: int, ranks: int) -> dict[str, str]:
    """Calls that would read or set one rank's rows for all, and ones that not all make."""
    import horovod.tensorflow as hvd

    model, mine = _made(in_shards, rank, ranks)
    a_file = folder / "file"
    a_file.touch()
    path, data, fewer = str(folder / "part"), _data(mine, 2), _data(mine, 1 + rank)

    def fit(*callbacks: Any, **given: Any) -> None:
        model.fit(data, verbose=0, callbacks=list(callbacks), **given)

    def fit_after_horovods_broadcast() -> None:
        hvd.broadcast_variables(model.variables, root_rank=0)
        fit()

    def fit_after_its_broadcast_of_moments() -> None:
        hvd.broadcast_variables(model.optimizer.variables(), root_rank=0)
        fit()

    def fit_by_another() -> None:
        model.compile(optimizer="adam")
        fit()

    return said_by(
        {
            "a batch": lambda: model.predict_on_batch(mine[0][0]),
            "get_weights": model.get_weights,
            "set_weights": lambda: model.set_weights([]),
            "its get_weights": model.optimizer.get_weights,
            "its set_weights": lambda: model.optimizer.set_weights([]),
            "save_weights": lambda: model.save_weights(path),
            "load_weights": lambda: model.load_weights(path),
            "save": lambda: model.save(path),
            "a SavedModel": lambda: tf.saved_model.save(model, path),
            "a copy": lambda: copy.deepcopy(model),
            "restored": lambda: fit(KERAS.EarlyStopping("loss", restore_best_weights=True)),
            "checkpoint": lambda: fit(KERAS.ModelCheckpoint(path, save_weights_only=True)),
            "validation": lambda: fit(validation_data=fewer),
            "predict": lambda: model.predict(fewer, verbose=0),
            "evaluate": lambda: model.evaluate(fewer, verbose=0),
            "unknown validation": lambda: fit(validation_data=_of_unknown_length(data)),
            "unknown predict": lambda: model.predict(_of_unknown_length(fewer), verbose=0),
            "unknown evaluate": lambda: model.evaluate(_of_unknown_length(data), verbose=0),
            "saved in a file": lambda: save_model(model, a_file),
            "moments": fit_after_its_broadcast_of_moments,
            "broadcast": fit_after_horovods_broadcast,
            "saved after it": lambda: save_model(model, folder / "part"),
            "another": fit_by_another,
        }
    )


def of_others(rank: int, ranks: int) -> dict[str, str]:
    """Models, optimizers and rows that the ranks do not have alike."""

    def fit(**given: Any) -> None:
        model, mine = _made(ours, rank, ranks, **given)
        model.fit(_data(mine, 1), verbose=0)

    def fit_of_unknown_length() -> None:
        model, mine = _made(ours, rank, ranks)
        model.fit(_of_unknown_length(_data(mine, 1 + rank)), verbose=0)

    def fit_eagerly() -> None:
        case = Case(ours, SCHEMA)
        model = ours(SCHEMA)
        optimizer = CowClipOptimizer.for_model(model, case.hyperparameters, steps_per_epoch=9)
        model.compile(optimizer=optimizer, metrics=[], run_eagerly=True)
        model.fit(_data(list(batches(case, rank, ranks)), 1), verbose=0)

    def in_shards_of(rows: int) -> FusedEmbeddings:
        layer = FusedEmbeddings(Schema([category("a", rows)]), 2, sharded=True)
        layer.build({})
        return layer

    hp = Case(ours, SCHEMA).hyperparameters
    return said_by(
        {
            "unknown": fit_of_unknown_length,
            "eager": fit_eagerly,
            "sum": lambda: fit(loss=tf.keras.losses.BinaryCrossentropy(reduction="sum")),
            "l2": lambda: fit(hyperparameters=hp.replace(l2=hp.l2 * (1 + rank))),
            "update": lambda: fit(update=("exact", "lazy")[rank]),
            "clipped": lambda: fit(clip_tables=[("a", "b")[rank]]),
            "rows": lambda: in_shards_of(60 + rank),
            "loaded": lambda: in_shards_of(6).load_rows("a", np.full((6, 2), 1.0 + rank)),
        }
    )


def with_a_wrong_id(rank: int, ranks: int) -> dict[str, Any]:
    """What each has after a step that one rank has to begin again."""
    model, mine = _made(ours, rank, ranks)
    features, labels = mine[0]
    wrong = {**features, "a": features["a"] + 10**6}
    said = said_by({"wrong": lambda: model.train_on_batch(wrong, labels)} if rank else {})
    model.train_on_batch(features, labels)
    changed = [float(np.abs(weight).sum()) for weight in model.get_weights()]
    return {"said": said, "weights": changed, "steps": int(model.optimizer.iterations)}


def scaled(rank: int, ranks: int) -> dict[str, Any]:
    """What each has before, between and after two steps, the first with a row's infinite gradient.

    All rows are rank 0's: the other one has none to see it by. The layers compute in float32; the
    clip asks all ranks for sums, within the step that each makes or not.
    """
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
    """What all ranks do alike: stop, predict before and within and after, save and load."""
    model, mine = _made(in_shards, rank, ranks)
    statistics = model.optimizer.observe()
    data, epochs = _data(mine, 2), []

    class Losses(KERAS.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            epochs.append(float(logs["loss"]))

    stop = KERAS.EarlyStopping("loss", patience=0, min_delta=2e-2)
    model.fit(data, epochs=5, verbose=0, callbacks=[Losses(), stop])
    found = [model.predict(data, verbose=0)]
    looks = [statistics.total, statistics.read, statistics.gradient_norms]
    with whole_tables(model):
        if not rank:
            found.append(model.predict(data, verbose=0))
        refused = said_by({look.__name__: look for look in looks})
    found.append(model.predict(data, verbose=0))
    everywhere, _ = _made(ours, rank, ranks)
    save_model(everywhere, folder / "everywhere")
    of_all_ranks("it is saved")
    loaded = load_model(folder / "everywhere")
    same = len(loaded.get_weights()) == len(everywhere.get_weights())
    of_all_ranks("it is loaded")
    save_model(model, folder / "everywhere")
    after = load_model(folder / "everywhere")  # at once: not the model that was there before
    steps = [int(one.optimizer.iterations) for one in (model, after)]
    table = FusedEmbeddings(Schema([category("a", 6)]), 2, sharded=True)
    read = tf.function(lambda: table.lookup("a", tf.constant([1, 4])), autograph=False)()
    apart = max(float(np.abs(one - found[0]).max()) for one in found)
    told = {"losses": epochs, "apart": apart, "loaded": same, "read": list(read.shape)}
    occurrences = [field.all.occurrences for field in statistics.total()]
    return {**told, "steps": steps, "refused": refused, "occurrences": occurrences}


def in_half_precision(folder: Path, data: Path, rank: int, ranks: int) -> dict[str, Any]:
    """A run whose loss is scaled, and its model, which is loaded and goes on.

    Args:
      folder: for the run.
      data: a prepared folder.
      rank: this one's number.
      ranks: how many there are.
    """
    tf.keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        prepared = PreparedData.open(data)
        config = TrainConfig(batch_size=18, epochs=1, embedding_dim=3, mlp=(6,))
        run = train(prepared, config, folder / "half", progress=False)
        model = load_model(run.path / "model")
        scaling, inner = model.optimizer, model.optimizer.inner_optimizer
        found = [type(scaling).__name__, int(inner.iterations), float(inner.learning_rate)]
        loader = Loader(prepared, batch_size=18, rank=rank, ranks=ranks)
        model.fit(loader.dataset(), epochs=1, verbose=0)
        weights = [float(np.abs(weight.astype(float)).sum()) for weight in model.get_weights()]
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")
    steps, rate = int(inner.iterations), config.hyperparameters.dense_lr
    return {"found": found, "rate": rate, "steps": steps, "weights": weights}


def stopped(rank: int, ranks: int) -> dict[str, int]:
    """After how many steps fits end that a callback of one rank stops, by what that alone met."""

    class Stop(KERAS.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = True

    steps = {}
    for name, callback in {"batch": KERAS.TerminateOnNaN(), "epoch": Stop()}.items():
        model, mine = _made(ours, rank, ranks)
        features, labels = mine[0]
        wrong = tf.constant([0.0, np.nan if rank and name == "batch" else 0.0, 0.0, 0.0])
        data = tf.data.Dataset.from_tensor_slices(wrong)
        data = data.map(lambda more, x=features, y=labels: (x, y + more))
        model.fit(data, epochs=2, verbose=0, callbacks=[callback] if rank else [])
        steps[name] = int(model.optimizer.iterations)
    return steps


def of_keras(rank: int, ranks: int) -> dict[str, Any]:
    """What callbacks see of fits of a model of Keras's, which rank 1 ends after two epochs."""
    features, labels = next(batches(Case(ours, SCHEMA), rank, ranks))
    ids = tf.keras.Input((1,), dtype=tf.int64)
    rows = tf.keras.layers.Flatten()(tf.keras.layers.Embedding(60, 4)(ids))
    model = tf.keras.Model(ids, tf.keras.layers.Dense(1, "sigmoid")(rows))
    model.compile(CowClipOptimizer.for_model(model, HP), loss="binary_crossentropy")
    losses = []

    class Losses(KERAS.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            losses.append(float(logs["loss"]))
            self.model.stop_training = rank == 1 and epoch % 2 == 1

    data = tf.data.Dataset.from_tensors((features["a"], labels)).repeat(2)
    model.fit(data, epochs=5, verbose=0, callbacks=[Losses()])
    model.fit(data, None, None, 5, 0, Losses())  # by place, and a single one
    history = model.fit(data, epochs=1, verbose=0, validation_data=None if rank else data).history
    return {"losses": losses, "steps": int(model.optimizer.iterations), **history}


class _Load(KERAS.Callback):
    """Loads dense weights on a rank, at each of two moments of a fit as it begins."""

    def __init__(self, *moments: str) -> None:
        super().__init__()
        for moment in moments:
            setattr(self, moment, lambda place=0, logs=None: None if place else self._load())

    def _load(self) -> None:
        shards = self.model.optimizer.in_shards()
        for weight in self.model.trainable_variables:
            if weight.ref() not in shards:
                weight.assign_add(tf.ones_like(weight) / 2)


def _has_now(model: Any) -> dict[str, Any]:
    """What a rank has of all that ranks have alike, and how far its last bias is up."""
    weights = [float(np.abs(weight).sum()) for weight in model.optimizer._state()]
    return {"weights": weights, "up": float(model.trainable_variables[-1].numpy()[0])}


def loaded(rank: int, ranks: int) -> dict[str, Any]:
    """What each has after fits for which rank 0 alone has loaded weights, as Horovod's users do."""
    import horovod.tensorflow as hvd

    broadcast, found = hvd.keras.callbacks.BroadcastGlobalVariablesCallback(0), {}
    for name, build, moments in (
        ("epoch", ours, ["on_train_begin", "on_epoch_begin"]),
        ("batch", in_shards, ["on_epoch_begin", "on_train_batch_begin"]),
    ):
        model, mine = _made(build, rank, ranks)
        callbacks = [broadcast] if rank else [_Load(*moments), broadcast]
        model.fit(_data(mine, 2), verbose=0, callbacks=callbacks)
        found[name] = _has_now(model)
    case = Case(ours, SCHEMA)
    features, labels = next(batches(case, rank, ranks))
    model = ours(SCHEMA)
    model.compile(CowClipOptimizer.for_model(model, case.hyperparameters), metrics=[])
    if not rank:  # the other one builds it in its first step
        model(features)
        for weight in model.trainable_variables:
            weight.assign_add(tf.ones_like(weight) / 2)
    model.fit(_data([(features, labels)], 2), verbose=0)
    return {**found, "built": _has_now(model)}


def warmed_up(folder: Path, rank: int, ranks: int) -> dict[str, Any]:
    """What each has where rank 0 alone sets what the dense weights' learning rate rises to."""
    warm = HP.replace(warmup_epochs=1.0)
    model, mine = _made(ours, rank, ranks, hyperparameters=warm)
    optimizer = model.optimizer
    optimizer.create_slots(model.trainable_variables)
    if not rank:
        optimizer.default_optimizer.learning_rate = warm.dense_lr / 4
    model.fit(_data(mine, 2), verbose=0)
    found = {"set": {**_has_now(model), "rate": optimizer.learning_rates().dense}}
    if not rank:
        tf.train.Checkpoint(model=model, optimizer=optimizer).write(str(folder / "warm"))
    of_all_ranks("it is written")
    features, labels = mine[0]
    for name in ("restored", "restored at once"):
        again = ours(SCHEMA)
        again(features)
        optimizer = CowClipOptimizer.for_model(again, warm)
        again.compile(optimizer, metrics=[])
        if name == "restored":  # else rank 0's moments are made in the checkpoint's order
            optimizer.create_slots(again.trainable_variables)
        if not rank:
            tf.train.Checkpoint(model=again, optimizer=optimizer).read(str(folder / "warm"))
        tf.function(again.train_step)((features, labels))
        rates = {"rate": optimizer.learning_rates().dense, "steps": optimizer.warmup_steps}
        found[name] = {**_has_now(again), **rates}
    return found


def of_other_epochs(folder: Path, rank: int, ranks: int) -> dict[str, str]:
    """Fits of which one rank makes other epochs, or begins at another one."""
    backup = str(folder / f"backup-{rank}")

    def fit(*callbacks: Any, **given: Any) -> None:
        model, mine = _made(ours, rank, ranks)
        model.fit(_data(mine, 2), verbose=0, callbacks=list(callbacks), **given)

    def backed_up(**given: Any) -> Any:
        return KERAS.BackupAndRestore(backup, delete_checkpoint=False, **given)

    def fit_restored(**given: Any) -> None:
        fit(backed_up(**given))
        fit(*([] if rank else [backed_up(**given)]), epochs=2)

    return said_by(
        {
            "epochs": lambda: fit(epochs=1 + rank),
            "first": lambda: fit(epochs=2, initial_epoch=2 * rank),
            "restored": fit_restored,
            "on all": lambda: fit(backed_up(), epochs=2),
        }
    )


def ended(folder: Path, data: Path, rank: int, ranks: int) -> dict[str, Any]:
    """What has come of each."""
    return {
        "parts": of_parts(folder, rank, ranks),
        "others": of_others(rank, ranks),
        "wrong": with_a_wrong_id(rank, ranks),
        "scaled": scaled(rank, ranks),
        "together": together(folder, rank, ranks),
        "half": in_half_precision(folder, data, rank, ranks),
        "stopped": stopped(rank, ranks),
        "keras": of_keras(rank, ranks),
        "loaded": loaded(rank, ranks),
        "warmed up": warmed_up(folder, rank, ranks),
        "epochs": of_other_epochs(folder, rank, ranks),
    }
