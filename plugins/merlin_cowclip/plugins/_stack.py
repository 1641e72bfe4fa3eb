"""TensorFlow and Merlin Models, imported without their chatter on a user's terminal.

Imported before anything else of the package that needs TensorFlow.
"""

from __future__ import annotations

import os
import warnings

# Read when TensorFlow loads: oneDNN, CUDA and TensorRT notes are information, not errors.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf

_level = tf.get_logger().level
tf.get_logger().setLevel("ERROR")
with warnings.catch_warnings():
    # Merlin warns where torch and tritonclient are not installed; neither is needed here.
    warnings.simplefilter("ignore")
    import merlin.models.tf as mm
    from merlin.schema import ColumnSchema, Tags
tf.get_logger().setLevel(_level)

__all__ = ["ColumnSchema", "Tags", "mm", "tf"]
