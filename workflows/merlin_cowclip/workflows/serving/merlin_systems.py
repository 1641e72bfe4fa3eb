# SPDX-License-Identifier: Apache-2.0
"""Import Merlin Systems without its log messages and with all of the GPU's memory.

Merlin Systems needs `tritonclient`, but does not declare it.
"""

from __future__ import annotations

from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.quiet import quiet_imports

with quiet_imports():
    import tensorflow as tf

    # Merlin Systems limits TensorFlow to half of the GPU's memory unless it is initialized.
    tf.config.list_logical_devices()
    try:
        import tritonclient.grpc.model_config_pb2 as model_config
        from merlin.dag.runtime import Runtime
        from merlin.systems.dag.ensemble import Ensemble
        from merlin.systems.dag.ops.tensorflow import PredictTensorflow
        from merlin.systems.dag.ops.workflow import TransformWorkflow
        from merlin.systems.dag.runtimes.triton import TritonExecutorRuntime
        from merlin.systems.dag.runtimes.triton.ops.tensorflow import PredictTensorflowTriton
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("merlin", "tritonclient", "grpc", "rapidjson"):
            raise
        raise UserError(
            f"export needs Merlin Systems and tritonclient, but {error.name} is not installed. "
            "Install the extra: pip install 'merlin-cowclip[serve]'"
        ) from None

__all__ = ["Ensemble", "PredictTensorflow", "PredictTensorflowTriton", "TransformWorkflow"]
__all__ += ["Runtime", "TritonExecutorRuntime", "model_config", "tf"]
