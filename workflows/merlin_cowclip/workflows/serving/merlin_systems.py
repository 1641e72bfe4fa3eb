"""Merlin Systems, imported without its chatter, and without what it changes in this process.

It does not require `tritonclient`, whose protobuf its every module needs; treelite and requests,
which it does, are for forests and MLflow.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.quiet import quiet_imports

_SLOW = "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"


@contextlib.contextmanager
def _protobuf_as_it_was() -> Iterator[None]:
    """Merlin Systems sets the parser in Python, for this process and those that it starts."""
    before = os.environ.get(_SLOW)
    try:
        yield
    finally:
        os.environ.pop(_SLOW, None)
        if before is not None:
            os.environ[_SLOW] = before


# Where TensorFlow has not started yet, Merlin Systems leaves it half of the GPU's memory alone, and
# a table may need more.
with quiet_imports():
    import tensorflow as tf

    tf.config.list_logical_devices()
    try:
        with _protobuf_as_it_was():
            import tritonclient.grpc.model_config_pb2 as model_config
            from google.protobuf import text_format
            from merlin.systems.dag.ensemble import Ensemble
            from merlin.systems.dag.ops.tensorflow import PredictTensorflow
            from merlin.systems.dag.ops.workflow import TransformWorkflow
            from merlin.systems.dag.runtimes.triton import TritonExecutorRuntime
            from merlin.systems.triton.export import _convert_dtype as triton_type
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("merlin", "tritonclient", "grpc", "rapidjson"):
            raise
        raise UserError(
            "a Triton model repository needs Merlin Systems and tritonclient. Received: an "
            f"environment without {error.name}. Install the extra: pip install "
            "'merlin-cowclip[serve]'; NVIDIA's Merlin images have both"
        ) from None

__all__ = [
    "Ensemble",
    "PredictTensorflow",
    "TransformWorkflow",
    "TritonExecutorRuntime",
    "model_config",
    "text_format",
    "triton_type",
]
