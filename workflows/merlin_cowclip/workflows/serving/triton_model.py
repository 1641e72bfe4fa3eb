# SPDX-License-Identifier: Apache-2.0
"""The entry point of a repository's model; only in Triton's Python backend can it be imported."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.serving.served_model import ServedModel


class TritonPythonModel:
    """Triton looks for this name."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the model; Triton waits for it."""
        self._model = ServedModel(Path(args["model_repository"]) / args["model_version"])

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer the requests of a dynamic batch, each with probabilities or one sentence."""
        return [_response(answer) for answer in self._model.answers(requests, _tensors)]


def _tensors(request: Any) -> dict[str, np.ndarray]:  # faster than get_input_tensor_by_name
    return {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}


def _response(answer: np.ndarray | Exception) -> Any:
    if not isinstance(answer, Exception):
        return pb_utils.InferenceResponse([pb_utils.Tensor("probability", answer)])
    kind = "" if isinstance(answer, UserError) else f"{type(answer).__name__}: "
    return pb_utils.InferenceResponse([], pb_utils.TritonError(f"{kind}{answer}"))
