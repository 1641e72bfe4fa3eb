"""The workflow as an operator of an ensemble: raw rows of a request to the network's inputs.

Merlin Systems' own operator sends text from one Python model to another, where Triton loses it.
"""

from __future__ import annotations

import re
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from merlin_cowclip.plugins._checks import argument_name
from merlin_cowclip.workflows.data.adopt import validate
from merlin_cowclip.workflows.data.adopt.graph import load_saved
from merlin_cowclip.workflows.data.adopt.inference import InferenceWorkflow
from merlin_cowclip.workflows.errors import UserError, clipped
from merlin_cowclip.workflows.quiet import quiet_imports
from merlin_cowclip.workflows.serving.merlin_systems import PredictTensorflow, TransformWorkflow
from merlin_cowclip.workflows.serving.prepared_rows import Column, PreparedRows
from merlin_cowclip.workflows.serving.rare_ids import RareIds
from merlin_cowclip.workflows.training.runs import Run

with quiet_imports():
    import nvtabular as nvt
    from merlin.dag import DataFormats
    from merlin.schema import Schema
    from merlin.table import TensorTable

FOLDER = "workflow"  # of an ensemble
_NO_ROWS = "the request has no rows"
_REQUEST = validate.BatchLocation(Path("the request"))


class WorkflowOperator(TransformWorkflow):
    """A run's workflow: from `raw`, the columns of a request, to the network's `inputs`."""

    def __init__(
        self, run: Run, workflow: nvt.Workflow, raw: Schema, inputs: Schema, rare: RareIds | None
    ) -> None:
        super().__init__(workflow)
        self.spec, self.cardinalities = run.spec(), run.config["cardinalities"]
        self.is_adopted = run.is_adopted
        self.input_schema, self.output_schema = raw, inputs
        self.renumbered = {} if rare is None else rare.renumbered

    def __getstate__(self) -> dict[str, Any]:
        # NVTabular saves the workflow: a pickle here would have its vocabularies' old paths.
        return {**self.__dict__, "workflow": None}

    def save_artifacts(self, artifact_path: Any = None) -> None:
        """Save the workflow in the ensemble's folder, with the modules that no package installs."""
        path = str(Path(artifact_path) / FOLDER)
        self.workflow.save(path, modules_byvalue=_own_modules())

    def load_artifacts(self, artifact_path: Any = None) -> None:
        """Load it again, and index its vocabularies."""
        if artifact_path:  # Merlin also calls this without one
            workflow, spec = load_saved(Path(artifact_path) / FOLDER), self.spec
            self._prepared = None if self.is_adopted else PreparedRows(workflow, spec)
            if self.is_adopted:
                self._adopted = InferenceWorkflow(workflow, spec)
            self.workflow = workflow

    compute_output_schema = PredictTensorflow.compute_output_schema  # that of this operator

    @property
    def supported_formats(self) -> DataFormats:
        """Rows in the host's memory: a GPU holds no text."""
        return DataFormats.PANDAS_DATAFRAME | DataFormats.NUMPY_TENSOR_TABLE

    def transform(self, col_selector: Any, transformable: Any) -> TensorTable:
        """Encode the rows of a request (arrays by name) or of a frame; refuse the first bad one."""
        names = self.input_schema.column_names
        if isinstance(transformable, TensorTable):
            request = transformable.to_dict()
            _check_lengths(request)
            if self._prepared is not None:
                return self._inputs(self._prepared.encode(request))
            columns = {name: self._column(name, request) for name in names}
        elif len(transformable):
            columns = {name: transformable[name] for name in names}
        else:
            raise UserError(_NO_ROWS)
        if self.is_adopted:
            rows = self._adopted.transform(columns, _REQUEST)
        else:
            rows = self.workflow.transform(pd.DataFrame(columns))
        return self._inputs(self._checked(rows))

    def _column(self, name: str, request: Mapping[str, np.ndarray]) -> pa.Array:
        """A column of a request for the user's own workflow."""
        if f"{name}__offsets" in request:
            offsets, values = request[f"{name}__offsets"], request[f"{name}__values"]
        elif request[name].ndim == 2:  # lists of one length
            rows, length = request[name].shape
            offsets, values = np.arange(rows + 1, dtype=np.int32) * length, request[name].ravel()
        else:
            return self._values(name, request[name])
        return pa.ListArray.from_arrays(pa.array(offsets), self._values(name, values))

    def _values(self, name: str, values: np.ndarray) -> pa.Array:
        if values.dtype != object:
            return pa.array(values, from_pandas=True)
        texts = pa.array(values, pa.binary(), mask=values == b"")  # Triton has no null: empty
        try:
            is_binary = validate.element_type(self._adopted.types[name]) == pa.binary()
            return texts if is_binary else texts.cast(pa.string())
        except pa.ArrowInvalid:
            raise UserError(f"column {name!r} is not UTF-8. Encode it") from None

    def _checked(self, rows: pd.DataFrame) -> dict[str, Column]:
        """The columns of encoded rows: ids in range, and finite numbers."""
        lists, found = dict.fromkeys(self.spec.lists, pa.list_(pa.int64())), dict[str, Column]()
        batch = pa.RecordBatch.from_pydict(
            {name: pa.array(rows[name], lists.get(name)) for name in self.spec.fields}
        )
        for name in self.spec.ids:
            ids = validate.checked_ids(batch, name, self.cardinalities[name], _REQUEST)
            offsets = batch.column(name).offsets.to_numpy() if name in lists else None
            found[name] = ids.astype(np.int64), offsets
        for name in self.spec.continuous:
            numbers = validate.checked_numbers(batch, name, _REQUEST)
            found[name] = numbers.astype(np.float32), None
        return found

    def _inputs(self, encoded: Mapping[str, Column]) -> TensorTable:
        """Encoded columns as the network takes them."""
        found: dict[str, np.ndarray] = {}
        for field, (values, offsets) in encoded.items():
            name = argument_name(field)
            if field in self.renumbered:
                values = self.renumbered[field][values].astype(np.int64)
            found[name if offsets is None else f"{name}__values"] = values
            if offsets is not None:
                found[f"{name}__offsets"] = offsets
        return TensorTable(found)


def _check_lengths(request: Mapping[str, np.ndarray]) -> None:
    """Refuse columns of different lengths, invalid offsets, and no rows."""
    rows = {}
    for name, values in request.items():
        field, is_offsets, _ = name.partition("__offsets")
        if is_offsets:
            held, rows[name] = len(request[f"{field}__values"]), len(values) - 1
            if not len(values) or values[0] or values[-1] != held or (np.diff(values) < 0).any():
                raise UserError(
                    f"{name!r} must rise from 0 to {held:,}, the number of values. Received: "
                    f"{clipped(str(values.tolist()))}"
                )
        elif f"{name.removesuffix('__values')}__offsets" not in request:
            rows[name] = len(values)
    few, many = min(rows, key=rows.__getitem__), max(rows, key=rows.__getitem__)
    if rows[few] != rows[many]:
        raise UserError(
            f"columns differ in their number of rows: {rows[few]:,} in {few!r}, {rows[many]:,} in "
            f"{many!r}"
        )
    if not rows[few]:
        raise UserError(_NO_ROWS)


def _own_modules() -> list[ModuleType]:
    """Loaded modules that no package installs: the user's operators and functions may be there."""
    installed = re.compile(f"/(site|dist)-packages/|^{re.escape(sysconfig.get_path('stdlib'))}/")
    modules = [m for name, m in sys.modules.items() if getattr(m, "__name__", "") == name]
    files = [(m, getattr(m, "__file__", None)) for m in modules if m.__name__ != "__main__"]
    own = [module for module, file in files if file and not installed.search(file)]
    return [m for m in own if not re.match("merlin|nvtabular", m.__name__)]
