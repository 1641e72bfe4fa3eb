"""TensorFlow and Merlin Models, imported without their chatter on a user's terminal.

Imported before anything else of the package that needs TensorFlow.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager

# Read when TensorFlow loads: oneDNN, CUDA and TensorRT notes are information, not errors.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import absl.logging
import tensorflow as tf

# Keras's own; they have no public names.
from keras.optimizers.utils import filter_empty_gradients
from keras.saving.legacy.saved_model.load import RevivedLayer

# No public name tells whether a tape records, whether ops are deterministic, or whether a
# SavedModel is being made.
from tensorflow.python.eager import tape as _tape
from tensorflow.python.framework.config import is_op_determinism_enabled
from tensorflow.python.saved_model.save_context import in_save_context


@contextlib.contextmanager
def quiet_stack() -> Iterator[None]:
    """Silence notes of TensorFlow and absl below the level of an error.

    Importing Merlin, saving and loading a SavedModel produce some that a user can do nothing about:
    renamed inputs, untraced layer functions, a missing training configuration.
    """
    level, verbosity = tf.get_logger().level, absl.logging.get_verbosity()
    tf.get_logger().setLevel("ERROR")
    absl.logging.set_verbosity(absl.logging.ERROR)
    try:
        yield
    finally:
        tf.get_logger().setLevel(level)
        absl.logging.set_verbosity(verbosity)


with warnings.catch_warnings(), quiet_stack():
    # Merlin warns where torch and tritonclient are not installed; neither is needed here.
    warnings.simplefilter("ignore")
    import merlin.models.tf as mm
    from merlin.models.tf.distributed.backend import hvd_installed as has_horovod
    from merlin.schema import ColumnSchema, Schema, Tags

FuncGraph = tf.__internal__.FuncGraph


def not_recorded() -> AbstractContextManager[None]:
    """Within it, no `tf.GradientTape` records what is done."""
    context: AbstractContextManager[None] = _tape.stop_recording()
    return context


def is_recording() -> bool:
    """Whether a `tf.GradientTape` is open."""
    return bool(_tape.could_possibly_record())


__all__ = [
    "ColumnSchema",
    "FuncGraph",
    "RevivedLayer",
    "Schema",
    "Tags",
    "filter_empty_gradients",
    "has_horovod",
    "in_save_context",
    "is_op_determinism_enabled",
    "is_recording",
    "mm",
    "not_recorded",
    "quiet_stack",
    "tf",
]
