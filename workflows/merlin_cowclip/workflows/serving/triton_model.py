"""What a Triton server runs of a repository in Python: Merlin Systems' model, with our errors.

A server alone can import this: `triton_python_backend_utils` is its own.
"""

from __future__ import annotations

from typing import Any

import triton_python_backend_utils as pb_utils
from merlin.systems.dag.runtimes.triton import TritonExecutorRuntime
from merlin.systems.triton.conversions import (
    tensor_table_to_triton_response,
    triton_request_to_tensor_table,
)
from merlin.systems.triton.models.executor_model import TritonPythonModel as ExecutorModel

from merlin_cowclip.workflows.errors import UserError


class TritonPythonModel(ExecutorModel):
    """By this name Triton knows it."""

    def execute(self, requests: list[Any]) -> list[Any]:
        """A response for each request; of rows that are refused one sentence, not a traceback."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        schemas = self.ensemble.input_schema, self.ensemble.output_schema
        try:
            rows = triton_request_to_tensor_table(request, schemas[0])
            outputs = self.ensemble.transform(rows, runtime=TritonExecutorRuntime())
            return tensor_table_to_triton_response(outputs, schemas[1])
        except UserError as error:
            said = str(error)
        except Exception as error:  # the server must live, whatever a row brings
            said = f"{type(error).__name__}: {error}"
        return pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(said))
