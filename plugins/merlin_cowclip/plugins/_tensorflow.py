# SPDX-License-Identifier: Apache-2.0
"""TensorFlow and Merlin Models, imported without their chatter on a user's terminal.

Imported before anything else of the package that needs TensorFlow.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Iterator
from typing import Any

from merlin_cowclip.plugins import _compat
from merlin_cowclip.plugins._quiet import import_tensorflow

import_tensorflow()
_compat.give_old_names()

import absl.logging
import tensorflow as tf
from keras.mixed_precision.policy import policy_scope as precision_policy
from keras.optimizers.utils import filter_empty_gradients
from keras.saving import saving_lib

# Neither Keras's nor these have public names.
try:
    from tensorflow.python.eager import record
except ImportError:  # TensorFlow 2.12
    from tensorflow.python.eager import tape as record
from tensorflow.python.framework.config import is_op_determinism_enabled
from tensorflow.python.saved_model.save_context import in_save_context


@contextlib.contextmanager
def quiet_stack() -> Iterator[None]:
    """Silence notes below the level of an error, as of saving, about which users can do nothing."""
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
    from merlin.models.tf.blocks.cross import Cross
    from merlin.models.tf.distributed.backend import hvd_installed as has_horovod
    from merlin.models.tf.outputs.base import ModelOutput
    from merlin.schema import ColumnSchema, Schema, Tags


def _complete_config(layer: Any, setting: str) -> None:
    """Save a setting that a class of Merlin leaves out: a load would have its default."""
    config = layer.get_config
    layer.get_config = lambda self: {**config(self), setting: getattr(self, setting)}


_complete_config(Cross, "output_x0")  # of all layers of a `CrossBlock` but the last
_complete_config(mm.ContrastiveOutput, "logq_sampling_correction")
_output: Any = ModelOutput  # without types, which forbid to replace a method
_parse = _output._parse_function_from_config.__func__


def _default_metrics(cls: Any, config: dict[str, Any], name: str, module: str, kind: str) -> Any:
    """An output's default metrics, if it had them: Merlin saves bytecode of one Python version."""
    default = inspect.signature(cls.__init__).parameters[name].default
    if config.get(module) != getattr(default, "__module__", ""):
        return _parse(cls, config, name, module, kind)
    del config[module], config[kind]
    return default


_output._parse_function_from_config = classmethod(_default_metrics)


@contextlib.contextmanager
def shapes_as_saved() -> Iterator[None]:
    """Load models of Merlin without a call on two rows, whose shape retrieval tasks would keep."""
    switch = saving_lib._SAVING_V3_ENABLED  # a threading.local, of which Merlin reads the value
    before, switch.value = getattr(switch, "value", False), False
    try:
        yield
    finally:
        switch.value = before


FuncGraph = tf.__internal__.FuncGraph
is_recording, not_recorded = record.could_possibly_record, record.stop_recording


def kept_on(graph: tf.Graph, name: str, first: Any) -> Any:
    """The attribute `name` of a graph, which is `first` if it has none."""
    if not hasattr(graph, name):
        setattr(graph, name, first)
    return getattr(graph, name)
