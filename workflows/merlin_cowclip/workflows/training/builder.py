# SPDX-License-Identifier: Apache-2.0
"""A run's network: made by its configuration, seeds and precision, or with given weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from merlin_cowclip.plugins import CowClipOptimizer
from merlin_cowclip.plugins._tensorflow import mm, precision_policy, tf
from merlin_cowclip.plugins.optimizers.state import state_of, weights_of
from merlin_cowclip.workflows.quiet import quiet_imports
from merlin_cowclip.workflows.training.checkpoint import Checkpoint
from merlin_cowclip.workflows.training.configuration import CONSTANT_SCHEDULE, TrainConfig
from merlin_cowclip.workflows.training.ranks import rank_info

with quiet_imports():
    from merlin.schema import Schema
    from merlin.schema.io.tensorflow_metadata import TensorflowMetadata

    from merlin_cowclip.models import MODELS


def set_seeds(seed: int, *, deterministic: bool) -> None:
    """Of Python, NumPy, TensorFlow and Keras; deterministic ops stay on in this process."""
    tf.keras.utils.set_random_seed(seed)
    if deterministic:
        tf.config.experimental.enable_op_determinism()


def network(config: TrainConfig, schema: Schema) -> mm.Model:
    """The network of a configuration, not built, not compiled."""
    stddev = config.hyperparameters.init_stddev
    options = {**config.network_options, "sharded": config.tables == "sharded"}
    return MODELS[config.model](schema, stddev=stddev, **options)


def schedule_of(config: TrainConfig, part: str, steps_per_epoch: int) -> Any:
    """The Keras schedule (step → learning rate) of a part, "dense" or "embedding"."""
    rate: float = getattr(config.hyperparameters, f"{part}_lr")
    schedule = getattr(config, f"{part}_schedule") or CONSTANT_SCHEDULE
    keras, name = tf.keras.optimizers.schedules, schedule["name"]
    steps = (schedule["epochs"] or config.epochs) * steps_per_epoch  # may be a fraction
    if math.isclose(steps, round(steps), rel_tol=1e-9):
        steps = round(steps)
    if name == "exponential":
        return keras.ExponentialDecay(rate, steps, schedule["rate"])
    if name == "linear":
        return keras.PolynomialDecay(rate, steps, rate * schedule["to"])
    return keras.CosineDecay(rate, steps, schedule["to"])


def compile_model(
    config: TrainConfig, model: mm.Model, *, updates: int, batches: int
) -> CowClipOptimizer:
    """Compile a configuration's network with its optimizer, which is returned.

    Args:
      config: of the run.
      model: its network.
      updates: of an epoch, for the warm-up: the paper's ⌊N/b⌋.
      batches: of an epoch, for the schedules.
    """
    schedules: dict[str, Any] = {}
    for name in ("dense", "embedding"):
        if getattr(config, f"{name}_schedule") not in (None, CONSTANT_SCHEDULE):
            schedules[f"{name}_schedule"] = schedule_of(config, name, batches)
    share = config.batch_size // rank_info().size  # of this rank
    optimizer = CowClipOptimizer.for_model(
        model,
        config.hyperparameters,
        update=config.update,
        accumulate=math.ceil(share / (config.micro_batch or share)),
        ema=config.scaled_ema,
        steps_per_epoch=updates,
        clip_tables=config.clip_tables,
        **schedules,
    )
    model.compile(optimizer=optimizer, metrics=[])
    return optimizer


def restored_model(
    checkpoint: Checkpoint, config: TrainConfig, schema: Path, record: Mapping[str, Any]
) -> mm.Model:
    """The network as it was at a checkpoint, by the run's `schema.pbtxt` and `config.json`."""
    text = schema.read_text(encoding="utf-8")
    config = dataclasses.replace(config, tables="replicated")  # whole, wherever it is called
    needs_state = config.update == "deferred" or config.ema is not None
    with precision_policy(config.precision):
        model = network(config, TensorflowMetadata.from_proto_text(text).to_merlin_schema())
        optimizer = compile_model(config, model, updates=1, batches=1) if needs_state else None
        model(dummy_batch(record))
    if optimizer is None:
        checkpoint.read(weights_of(model))
    else:  # rows wait for what they missed, or the averages are used
        optimizer.create_slots(model.trainable_variables)
        checkpoint.read(state_of(model, optimizer))
        optimizer.catch_up()
        with optimizer.averages():
            averages = model.get_weights()
        model.set_weights(averages)
    return model


def dummy_batch(record: Mapping[str, Any]) -> dict[str, tf.Tensor]:
    """Two samples of padding, in the format of `Loader`'s; `record` is a run's or a spec's."""
    batch = {name: tf.zeros([2, 1], tf.int64) for name in record["categorical"]}
    batch |= {name: tf.zeros([2, 1], tf.float32) for name in record["continuous"]}
    for name in record["lists"]:
        batch[f"{name}__values"] = tf.zeros([2], tf.int64)
        batch[f"{name}__offsets"] = tf.range(3, dtype=tf.int64)
    return batch
