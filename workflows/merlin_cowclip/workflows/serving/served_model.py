# SPDX-License-Identifier: Apache-2.0
"""An exported model as a server runs it: the tensors of requests in, probabilities out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from merlin_cowclip.workflows import folders
from merlin_cowclip.workflows.data.adopt.graph import load_saved
from merlin_cowclip.workflows.data.adopt.inference import InferenceWorkflow, as_fitted
from merlin_cowclip.workflows.data.adopt.validate import BatchLocation, element_type
from merlin_cowclip.workflows.data.encoder import Encoder
from merlin_cowclip.workflows.data.spec import DatasetSpec
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.serving.network import load_network, network_inputs
from merlin_cowclip.workflows.serving.prepared_rows import PreparedRows
from merlin_cowclip.workflows.training.rows import checked_rows, features_of

WORKFLOW, NETWORK = "workflow", "network"
TEXT = pa.binary()
TYPES = {  # Triton's
    **{f"TYPE_INT{bits}": pa.type_for_alias(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"TYPE_UINT{bits}": pa.type_for_alias(f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{"TYPE_FP32": pa.float32(), "TYPE_FP64": pa.float64(), "TYPE_BOOL": pa.bool_()},
    "TYPE_STRING": TEXT,
}
Request = Mapping[str, np.ndarray]

_REQUEST = BatchLocation(Path("the request"))


class ServedModel:
    """A model of a Triton repository, loaded from the folder of its version.

    Attributes:
        inputs: Triton's type of each tensor of a request, by name.
    """

    def __init__(self, folder: Path) -> None:
        record = folders.read_json(folder.parent / "export.json")
        self.inputs: dict[str, str] = record["inputs"]
        self._columns: list[str] = record["columns"]
        self._spec = DatasetSpec.from_dict(record["spec"])
        self._cardinalities, self._is_adopted = record["cardinalities"], record["is_adopted"]
        self._encoder: Any
        if self._is_adopted:
            self._encoder = InferenceWorkflow(load_saved(folder / WORKFLOW), self._spec)
        else:
            encoder = Encoder.open(folder / WORKFLOW, self._spec, record["ranges"])
            self._encoder = PreparedRows(self._spec, encoder)
        self._network = load_network(folder / NETWORK)

    def answers(
        self, requests: Sequence[Any], tensors: Callable[[Any], Request] = dict
    ) -> list[np.ndarray | Exception]:
        """The probabilities of each request, (1, n) float32, or the error that it causes.

        ``tensors`` reads a request as `Repository.request` gives it. All are joined, encoded once
        and scored once. If that fails, each half of them is, so that a bad request fails alone.
        """
        try:
            return self._joined(list(map(tensors, requests)))
        except Exception as error:  # a server must survive any row
            if len(requests) < 2:
                return [error] * len(requests)
        half = len(requests) // 2
        return self.answers(requests[:half], tensors) + self.answers(requests[half:], tensors)

    def _joined(self, requests: Sequence[Request]) -> list[Any]:
        given, sizes = zip(*map(_checked, requests), strict=True)
        encoded = self._encoded({name: _join(name, given) for name in self.inputs})
        scores = self._network(network_inputs(self._spec, encoded))
        return [part[np.newaxis] for part in np.split(scores, np.cumsum(sizes)[:-1])]

    def _encoded(self, columns: Request) -> dict[str, np.ndarray]:
        if not self._is_adopted:
            return self._encoder.encode(columns)
        rows = {name: self._column(name, columns) for name in self._columns}
        frame = self._encoder.transform(rows, _REQUEST)
        batch = pa.RecordBatch.from_pandas(frame[[*self._spec.fields]], preserve_index=False)
        table = checked_rows(batch, self._spec, self._cardinalities, _REQUEST, labelled=False)
        return {name: array.ravel() for name, array in features_of(table, self._spec).items()}

    def _column(self, name: str, columns: Request) -> pa.Array:
        """A column of a request for the user's own workflow."""
        offsets = columns.get(f"{name}__offsets")
        values = columns[name if offsets is None else f"{name}__values"]
        if values.dtype == object:  # Triton has no null: an empty text is one
            kind = element_type(self._encoder.types[name]) or pa.string()
            texts = pa.array(values, TEXT, mask=values == b"")
            column = as_fitted(texts, kind, f"column {name!r} of the request")
        else:
            column = pa.array(values, from_pandas=True)
        return column if offsets is None else pa.ListArray.from_arrays(pa.array(offsets), column)


def probabilities(answers: Sequence[np.ndarray | Exception]) -> np.ndarray:
    """The probabilities of all requests, n float32; raises the first error."""
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return np.concatenate([np.empty((1, 0), np.float32), *answers], axis=1)[0]


def _checked(request: Request) -> tuple[dict[str, np.ndarray], int]:
    """A request's tensors without their first dimension, and its number of rows."""
    columns, rows = {name: array.ravel() for name, array in request.items()}, {}
    for name, array in columns.items():
        if (shape := request[name].shape) != (1, len(array)):
            raise UserError(f"{name!r} must have the shape (1, n), not {shape}. Reshape it")
        field, is_offsets, _ = name.partition("__offsets")
        if is_offsets:
            count, rows[field] = len(columns[f"{field}__values"]), len(array) - 1
            if not len(array) or array[0] or array[-1] != count or (np.diff(array) < 0).any():
                raise UserError(f"{name!r} must rise from 0 to the number of values, {count:,}")
        elif f"{name.removesuffix('__values')}__offsets" not in columns:
            rows[name] = len(array)
    examples = {number: name for name, number in rows.items()}
    if len(examples) > 1:
        numbers = ", ".join(f"{number} in {name!r}" for number, name in examples.items())
        raise UserError(f"columns differ in their number of rows: {numbers}")
    if not any(rows.values()):
        raise UserError("the request has no rows")
    return columns, next(iter(rows.values()))


def _join(name: str, requests: Sequence[Request]) -> np.ndarray:
    """A tensor of all rows of some requests."""
    arrays = [request[name] for request in requests]
    if len(arrays) == 1 or not name.endswith("__offsets"):
        return np.concatenate(arrays)
    lengths = np.concatenate([np.diff(array) for array in arrays])
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
