# SPDX-License-Identifier: Apache-2.0
"""What a Triton server runs of a repository in Python: Merlin Systems' model, with our errors.

Only a server can import this: `triton_python_backend_utils` belongs to it.
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
    """Triton looks for this name."""

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request; with one sentence, not a traceback, if its rows are refused."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        try:
            rows = triton_request_to_tensor_table(request, self.ensemble.input_schema)
            outputs = self.ensemble.transform(rows, runtime=TritonExecutorRuntime())
            return tensor_table_to_triton_response(outputs, self.ensemble.output_schema)
        except Exception as error:  # the server must survive any row
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            return pb_utils.InferenceResponse([], pb_utils.TritonError(f"{kind}{error}"))
