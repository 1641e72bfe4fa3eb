"""A run's network made again from its configuration, with the weights of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from merlin_cowclip.plugins._stack import mm, tf
from merlin_cowclip.plugins.state import weights_of
from merlin_cowclip.workflows.quiet import quiet_imports
from merlin_cowclip.workflows.training.checkpoints import Checkpoint
from merlin_cowclip.workflows.training.configuration import TrainConfig
from merlin_cowclip.workflows.training.reproducibility import in_precision

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
    return MODELS[config.model](schema, stddev=stddev, **config.network_options)


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
    with in_precision(record.get("precision")):
        model = network(config, TensorflowMetadata.from_proto_text(text).to_merlin_schema())
        model(_any_batch(record))
    checkpoint.restore(weights_of(model))
    return model


def _any_batch(record: Mapping[str, Any]) -> dict[str, tf.Tensor]:
    """Two samples of padding, in the format of `Loader`'s."""
    batch = {name: tf.zeros([2, 1], tf.int64) for name in record["categorical"]}
    batch |= {name: tf.zeros([2, 1], tf.float32) for name in record["continuous"]}
    for name in record["lists"]:
        batch[f"{name}__values"] = tf.zeros([2], tf.int64)
        batch[f"{name}__offsets"] = tf.range(3, dtype=tf.int64)
    return batch
