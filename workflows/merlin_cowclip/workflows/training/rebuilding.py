"""A run's network made from its configuration; and again, with the weights of a checkpoint."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from merlin_cowclip.plugins import CowClipOptimizer, LinearWarmup
from merlin_cowclip.plugins._tensorflow import mm, tf
from merlin_cowclip.plugins.optimizers.state import state_of, weights_of
from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.quiet import quiet_imports
from merlin_cowclip.workflows.training.checkpoint import Checkpoint
from merlin_cowclip.workflows.training.configuration import TrainConfig
from merlin_cowclip.workflows.training.learning_rates import keras_schedule
from merlin_cowclip.workflows.training.loader import Loader
from merlin_cowclip.workflows.training.reproducibility import in_precision
from merlin_cowclip.workflows.training.runs import SCHEMA, Run

with quiet_imports():
    from merlin.schema import Schema
    from merlin.schema.io.tensorflow_metadata import TensorflowMetadata

    from merlin_cowclip.models import MODELS


def network(config: TrainConfig, schema: Schema) -> mm.Model:
    """The network of a configuration, not built, not compiled.

    Raises:
      ValueError: the network does not take the data's columns.
    """
    stddev = config.hyperparameters.init_stddev
    options = {**config.network_options, "sharded": config.tables == "sharded"}
    return MODELS[config.model](schema, stddev=stddev, **options)


def compiled(
    data: PreparedData, config: TrainConfig, loader: Loader
) -> tuple[mm.Model, CowClipOptimizer]:
    """A configuration's network, not built, with its optimizer, for the batches of `loader`.

    Raises:
      ValueError: the network does not take the data's columns.
    """
    model = network(config, data.schema)
    updates = loader.rows // config.batch_size  # the paper's ⌊N/b⌋
    return model, compile_by(config, model, updates=updates, batches=len(loader))


def compile_by(
    config: TrainConfig, model: mm.Model, *, updates: int, batches: int
) -> CowClipOptimizer:
    """Compile a configuration's network with its optimizer.

    Args:
      config: of the run.
      model: its network.
      updates: of an epoch, for the warm-up.
      batches: of an epoch, for the schedules.

    Returns:
      The optimizer.
    """
    hp = config.hyperparameters
    schedules: dict[str, Any] = {}
    for name, rate in (("dense", hp.dense_lr), ("embedding", hp.embedding_lr)):
        plain = getattr(config, f"{name}_schedule")
        if plain is not None:
            assert not isinstance(plain, str)
            schedules[f"{name}_schedule"] = keras_schedule(
                plain, rate, epochs=config.epochs, steps_per_epoch=batches
            )
    if "dense_schedule" in schedules:
        warmup_steps = math.floor(hp.warmup_epochs * updates)
        schedules["dense_schedule"] = LinearWarmup(schedules["dense_schedule"], warmup_steps)
    optimizer = CowClipOptimizer.for_model(
        model,
        hp,
        update=config.update,
        steps_per_epoch=updates,
        clip_tables=config.clip_tables,
        **schedules,
    )
    model.compile(optimizer=optimizer, metrics=[])
    return optimizer


def rebuilt(
    checkpoint: Checkpoint, config: TrainConfig, schema: Path, record: Mapping[str, Any]
) -> mm.Model:
    """The network as it was at a checkpoint, to predict with.

    Args:
      checkpoint: of the run.
      config: of the run.
      schema: the run's `schema.pbtxt`.
      record: the run's `config.json`.

    Raises:
      UserError: the checkpoint is another network's.
    """
    text = schema.read_text(encoding="utf-8")
    config = dataclasses.replace(config, tables="replicated")  # whole, wherever it is called
    with in_precision(record["precision"]):
        model = network(config, TensorflowMetadata.from_proto_text(text).to_merlin_schema())
        if config.update != "deferred":
            model(_any_batch(record))
            checkpoint.read(weights_of(model))
            return model
        # Rows wait there for what they missed, with the moments that say what that does to them.
        optimizer = compile_by(config, model, updates=1, batches=1)
        model(_any_batch(record))
        optimizer.create_slots(model.trainable_variables)
        checkpoint.read(state_of(model, optimizer))
        optimizer.catch_up()
    return model


def begin_from(
    run: Run, model: mm.Model, optimizer: CowClipOptimizer, *, keep_optimizer: bool
) -> None:
    """Give a network that is built the weights that a finished run ended with.

    Args:
      run: of the same network, on the same columns and vocabulary.
      model: the network.
      optimizer: its own.
      keep_optimizer: whether to restore the optimizer's state, too; its steps go on counting.

    Raises:
      UserError: the run has no checkpoint, or is of another network.
    """
    checkpoint = run.checkpoint("last")
    if keep_optimizer:
        optimizer.create_slots(model.trainable_variables)
        checkpoint.read(state_of(model, optimizer))
        return
    if run.config["update"] != "deferred":
        checkpoint.read(weights_of(model))
        return
    whole = rebuilt(checkpoint, run.train_config(), run.path / SCHEMA, run.config)
    found = weights_of(whole)  # with the updates that its rows had missed
    for name, variable in weights_of(model).items():
        variable.assign(found[name])


def _any_batch(record: Mapping[str, Any]) -> dict[str, tf.Tensor]:
    """Two samples of padding, in the format of `Loader`'s."""
    batch = {name: tf.zeros([2, 1], tf.int64) for name in record["categorical"]}
    batch |= {name: tf.zeros([2, 1], tf.float32) for name in record["continuous"]}
    for name in record["lists"]:
        batch[f"{name}__values"] = tf.zeros([2], tf.int64)
        batch[f"{name}__offsets"] = tf.range(3, dtype=tf.int64)
    return batch
