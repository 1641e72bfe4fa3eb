"""The workflow as an operator of an ensemble: raw rows of a request to the network's inputs.

Merlin Systems' own operator sends text from one Python model to another, where Triton loses it.
"""

from __future__ import annotations

import functools
import re
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa

from merlin_cowclip.plugins._checks import argument_name
from merlin_cowclip.workflows.data.adopt.graph import load_saved
from merlin_cowclip.workflows.data.adopt.inference import InferenceWorkflow, element_type
from merlin_cowclip.workflows.data.adopt.validate import (
    BatchLocation,
    checked_ids,
    checked_numbers,
)
from merlin_cowclip.workflows.data.spec import DatasetSpec
from merlin_cowclip.workflows.errors import UserError, clipped
from merlin_cowclip.workflows.quiet import quiet_imports
from merlin_cowclip.workflows.serving.merlin_systems import PredictTensorflow, TransformWorkflow
from merlin_cowclip.workflows.serving.prepared_rows import PreparedRows

with quiet_imports():
    import nvtabular as nvt
    from merlin.core.protocols import Transformable
    from merlin.dag import ColumnSelector, DataFormats, postorder_iter_nodes
    from merlin.schema import Schema
    from merlin.table import TensorTable

FOLDER = "workflow"  # of an ensemble
_OF_LISTS = ("__values", "__offsets")
_NO_ROWS = "the request has no rows"


class WorkflowOperator(TransformWorkflow):
    """A run's workflow from raw rows without the label to the network's inputs.

    Args:
      workflow: the run's; of prepared data without the label.
      spec: of the run's rows.
      cardinalities: by field of ids.
      input_schema: the raw columns of a request.
      output_schema: the network's inputs.
      is_adopted: whether the workflow is the user's own.
      renumbered: by field whose rare ids were dropped, the network's id of each id.
    """

    def __init__(
        self,
        workflow: nvt.Workflow,
        spec: DatasetSpec,
        cardinalities: Mapping[str, int],
        input_schema: Schema,
        output_schema: Schema,
        *,
        is_adopted: bool,
        renumbered: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        super().__init__(workflow)
        self.spec, self.cardinalities = spec, dict(cardinalities)
        self.input_schema, self.output_schema = input_schema, output_schema
        self.is_adopted = is_adopted
        self.renumbered = dict(renumbered or {})
        self._rows: Any = None

    def __getstate__(self) -> dict[str, Any]:
        # NVTabular saves the workflow: a pickle here would have its vocabularies' old paths.
        return {**self.__dict__, "workflow": None, "_rows": None}

    def save_artifacts(self, artifact_path: Any = None) -> None:
        """Save the workflow in the ensemble's folder, with the modules that no package installs."""
        path = str(Path(artifact_path) / FOLDER)
        self.workflow.save(path, modules_byvalue=_own_modules(self.workflow))

    def load_artifacts(self, artifact_path: Any = None) -> None:
        """Load it again, and index its vocabularies."""
        if not artifact_path:  # Merlin also calls this without one
            return
        self.workflow = load_saved(Path(artifact_path) / FOLDER)
        if self.is_adopted:
            self._rows = _AdoptedRows(self)
        else:
            self._rows = PreparedRows(self.workflow, self.spec)

    compute_output_schema = PredictTensorflow.compute_output_schema  # that of this operator

    @property
    def supported_formats(self) -> DataFormats:
        """Rows in the host's memory: a GPU holds no text."""
        return DataFormats.PANDAS_DATAFRAME | DataFormats.NUMPY_TENSOR_TABLE

    def transform(self, col_selector: ColumnSelector, transformable: Transformable) -> TensorTable:
        """Encode the rows of a request, or of a frame.

        Raises:
          UserError: `predict` would refuse them, or columns differ in their number of rows.
        """
        if isinstance(transformable, TensorTable):
            return TensorTable(self.encode(transformable.to_dict()))
        if not self.is_adopted:
            return TensorTable(self.encode(self._rows.request_of(transformable)))
        if not len(transformable):
            raise UserError(_NO_ROWS)
        columns = {n: transformable[n] for n in self.input_schema.column_names}
        return TensorTable(self._inputs(self._rows.encode_columns(columns)))

    def encode(self, request: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Encode a request: arrays by name, as Triton has them.

        Raises:
          UserError: as `transform`.
        """
        _check_lengths(request)
        return self._inputs(self._rows.encode(request))

    def _inputs(self, encoded: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Encoded columns as the network takes them."""
        found = {}
        for name, values in encoded.items():
            field = name.removesuffix("__values")
            if field in self.renumbered:
                values = self.renumbered[field][values].astype(np.int64)
            found[self._arguments[name]] = values
        return found

    @functools.cached_property
    def _arguments(self) -> dict[str, str]:
        names = {name: argument_name(name) for name in self.spec.fields}
        for name in self.spec.lists:
            names |= {f"{name}{end}": names[name] + end for end in _OF_LISTS}
        return names


def _check_lengths(request: Mapping[str, np.ndarray]) -> None:
    """Refuse columns of different lengths, invalid offsets, and no rows."""
    rows = {name: len(v) for name, v in request.items() if not name.endswith(_OF_LISTS)}
    for name, ends in request.items():
        if name.endswith("__offsets"):
            held = len(request[f"{name.removesuffix('__offsets')}__values"])
            rows[name] = len(ends) - 1
            if not len(ends) or ends[0] or ends[-1] != held or (ends[1:] < ends[:-1]).any():
                raise UserError(
                    f"{name!r} must rise from 0 to {held:,}, the number of values. Received: "
                    f"{clipped(str(ends.tolist()))}"
                )
    few, many = min(rows, key=rows.__getitem__), max(rows, key=rows.__getitem__)
    if rows[few] != rows[many]:
        raise UserError(
            f"columns differ in their number of rows: {rows[few]:,} in {few!r}, {rows[many]:,} in "
            f"{many!r}"
        )
    if not rows[few]:
        raise UserError(_NO_ROWS)


class _AdoptedRows:
    """Raw rows of the user's own workflow."""

    def __init__(self, operator: WorkflowOperator) -> None:
        self._spec, self._cardinalities = operator.spec, operator.cardinalities
        self._columns = operator.input_schema.column_names
        spec = operator.spec
        self._inference = InferenceWorkflow(operator.workflow, spec.fields, spec.label, spec.lists)

    def encode(self, request: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Encode a request."""
        return self.encode_columns({name: self._column(name, request) for name in self._columns})

    def encode_columns(self, columns: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Encode Arrow arrays, or columns of a frame."""
        made, lists = self._inference.transform(columns, _REQUEST), self._spec.lists
        encoded = pa.RecordBatch.from_pydict(
            {
                name: pa.array(made[name], pa.list_(pa.int64()) if name in lists else None)
                for name in self._spec.fields
            }
        )
        found: dict[str, np.ndarray] = {}
        for name in self._spec.ids:
            ids = checked_ids(encoded, name, self._cardinalities[name], _REQUEST)
            if name in lists:
                offsets = encoded.column(name).offsets.to_numpy()
                found[f"{name}__offsets"] = (offsets - offsets[0]).astype(np.int32)
                name += "__values"
            found[name] = ids.astype(np.int64)
        for name in self._spec.continuous:
            found[name] = checked_numbers(encoded, name, _REQUEST).astype(np.float32)
        return found

    def _column(self, name: str, request: Mapping[str, np.ndarray]) -> pa.Array:
        if f"{name}__offsets" in request:
            values = self._values(name, request[f"{name}__values"])
            return pa.ListArray.from_arrays(pa.array(request[f"{name}__offsets"]), values)
        found = request[name]
        if found.ndim == 1:
            return self._values(name, found)
        ends = np.arange(len(found) + 1, dtype=np.int32) * found.shape[1]
        return pa.ListArray.from_arrays(pa.array(ends), self._values(name, found.ravel()))

    def _values(self, name: str, values: np.ndarray) -> pa.Array:
        if values.dtype != object:
            return pa.array(values, from_pandas=True)
        texts = pa.array(values, pa.binary(), mask=values == b"")  # Triton has no null: empty
        try:
            is_binary = element_type(self._inference.types[name]) == pa.binary()
            return texts if is_binary else texts.cast(pa.string())
        except pa.ArrowInvalid as error:
            raise UserError(f"column {name!r} is not UTF-8: {clipped(str(error))}") from None


@dataclass(frozen=True)
class _Request(BatchLocation):
    """Rows of a request."""

    def row(self, row: int) -> str:
        """A row of the request."""
        return f"row {row + 1}"

    def __str__(self) -> str:
        return "the request"


_REQUEST = _Request(Path(), 0, 0)


def _own_modules(workflow: nvt.Workflow) -> list[ModuleType]:
    """Top modules of the user's own operators and functions, which no package installs."""
    names = set()
    for node in postorder_iter_nodes(workflow.output_node, flatten_subgraphs=True):
        function: Any = getattr(node.op, "f", None)
        used = getattr(getattr(function, "__code__", None), "co_names", ())
        for one in (type(node.op), function, *(function.__globals__.get(name) for name in used)):
            names.add(getattr(one, "__name__" if isinstance(one, ModuleType) else "__module__", ""))
    roots = {sys.modules.get(str(name).split(".")[0]) for name in names} - {None, nvt}
    files = {root: getattr(root, "__file__", None) for root in roots}  # none of a namespace
    installed = re.compile(f"/(site|dist)-packages/|^{re.escape(sysconfig.get_path('stdlib'))}/")
    return [root for root, file in files.items() if root and file and not installed.search(file)]
