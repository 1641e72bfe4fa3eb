"""Import Merlin Systems without its log messages and without its side effects on this process.

Merlin Systems needs `tritonclient`, but does not declare it. Of what it declares, treelite and
requests are not used here.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.quiet import quiet_imports

_SLOW = "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"


@contextlib.contextmanager
def _environment_restored() -> Iterator[None]:
    """Merlin Systems selects the slow protobuf parser for this process and its children."""
    before = os.environ.get(_SLOW)
    try:
        yield
    finally:
        os.environ.pop(_SLOW, None)
        if before is not None:
            os.environ[_SLOW] = before


with quiet_imports():
    import tensorflow as tf

    # Merlin Systems limits TensorFlow to half of the GPU's memory unless it is initialized.
    tf.config.list_logical_devices()
    try:
        with _environment_restored():
            import tritonclient.grpc.model_config_pb2 as model_config
            from merlin.systems.dag.ensemble import Ensemble
            from merlin.systems.dag.ops.tensorflow import PredictTensorflow
            from merlin.systems.dag.ops.workflow import TransformWorkflow
            from merlin.systems.dag.runtimes.triton import TritonExecutorRuntime
            from merlin.systems.dag.runtimes.triton.ops.tensorflow import PredictTensorflowTriton
            from merlin.systems.triton.export import _convert_dtype as triton_type
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("merlin", "tritonclient", "grpc", "rapidjson"):
            raise
        raise UserError(
            f"export needs Merlin Systems and tritonclient, but {error.name} is not installed. "
            "Install the extra: pip install 'merlin-cowclip[serve]'; NVIDIA's Merlin images have "
            "both"
        ) from None

__all__ = ["Ensemble", "PredictTensorflow", "PredictTensorflowTriton", "TransformWorkflow"]
__all__ += ["TritonExecutorRuntime", "model_config", "tf", "triton_type"]
