# SPDX-License-Identifier: Apache-2.0
"""The workflow as an operator of an ensemble: raw rows of a request to the network's inputs.

Merlin Systems' own operator sends text from one Python model to another, where Triton loses it.
"""

from __future__ import annotations

import re
import sys
import sysconfig
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from merlin_cowclip.plugins._checks import argument_name
from merlin_cowclip.workflows.data.adopt.graph import load_saved
from merlin_cowclip.workflows.data.adopt.inference import InferenceWorkflow
from merlin_cowclip.workflows.data.adopt.validate import BatchLocation, element_type
from merlin_cowclip.workflows.data.encoder import Encoder
from merlin_cowclip.workflows.errors import UserError, clipped
from merlin_cowclip.workflows.quiet import quiet_imports
from merlin_cowclip.workflows.serving.merlin_systems import PredictTensorflow, TransformWorkflow
from merlin_cowclip.workflows.serving.prepared_rows import PreparedRows
from merlin_cowclip.workflows.serving.rare_ids import RareIds
from merlin_cowclip.workflows.training.rows import checked_rows, features_of
from merlin_cowclip.workflows.training.runs import Run

with quiet_imports():
    import nvtabular as nvt
    from merlin.dag import DataFormats
    from merlin.schema import Schema
    from merlin.table import TensorTable

FOLDER = "workflow"  # of an ensemble
_NO_ROWS = "the request has no rows"
_REQUEST = BatchLocation(Path("the request"))


class WorkflowOperator(TransformWorkflow):
    """A run's workflow: from `raw`, the columns of a request, to the network's `inputs`."""

    def __init__(
        self, run: Run, workflow: nvt.Workflow, raw: Schema, inputs: Schema, rare: RareIds | None
    ) -> None:
        super().__init__(workflow)
        self.spec, self.cardinalities = run.spec(), run.config["cardinalities"]
        self.is_adopted, self.ranges = run.is_adopted, run.config["ranges"]
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
            self.workflow = load_saved(Path(artifact_path) / FOLDER)
            self._encoder: Any
            if self.is_adopted:
                self._encoder = InferenceWorkflow(self.workflow, self.spec)
            else:
                encoder = Encoder.open(Path(artifact_path), self.spec, self.ranges)
                self._encoder = PreparedRows(self.spec, encoder)

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
            if not self.is_adopted:
                return self._inputs(self._encoder.encode(request))
            columns = {name: self._column(name, request) for name in names}
        elif len(transformable):
            columns = {name: transformable[name] for name in names}
        else:
            raise UserError(_NO_ROWS)
        if self.is_adopted:
            frame = self._encoder.transform(columns, _REQUEST)
        else:
            frame = self.workflow.transform(pd.DataFrame(columns))
        batch = pa.RecordBatch.from_pandas(frame[[*self.spec.fields]], preserve_index=False)
        rows = checked_rows(batch, self.spec, self.cardinalities, _REQUEST, labelled=False)
        return self._inputs({n: a.ravel() for n, a in features_of(rows, self.spec).items()})

    def _column(self, name: str, request: Mapping[str, np.ndarray]) -> pa.Array:
        """A column of a request for the user's own workflow."""
        offsets = request.get(f"{name}__offsets")
        values = request[name if offsets is None else f"{name}__values"]
        if values.ndim == 2:  # lists of one length
            rows, length = values.shape
            offsets, values = np.arange(rows + 1, dtype=np.int32) * length, values.ravel()
        if values.dtype == object:  # Triton has no null: an empty text is one
            column = pa.array(values, pa.binary(), mask=values == b"")
            if element_type(self._encoder.types[name]) != pa.binary():
                try:
                    column = column.cast(pa.string())
                except pa.ArrowInvalid:
                    raise UserError(f"column {name!r} is not UTF-8. Encode it") from None
        else:
            column = pa.array(values, from_pandas=True)
        return column if offsets is None else pa.ListArray.from_arrays(pa.array(offsets), column)

    def _inputs(self, encoded: Mapping[str, np.ndarray]) -> TensorTable:
        """Encoded columns under the network's names, and ids as it numbers them."""
        found = {}
        for name in self.spec.fields:
            is_list = name in self.spec.lists
            values = encoded[f"{name}__values" if is_list else name]
            if name in self.renumbered:
                values = self.renumbered[name][values].astype(np.int64)
            found[argument_name(name) + "__values" * is_list] = values
            if is_list:
                offsets = encoded[f"{name}__offsets"].astype(np.int32)
                found[f"{argument_name(name)}__offsets"] = offsets
        return TensorTable(found)


def _check_lengths(request: Mapping[str, np.ndarray]) -> None:
    """Refuse columns of different lengths, invalid offsets, and no rows."""
    rows = {}
    for name, array in request.items():
        field, is_offsets, _ = name.partition("__offsets")
        if is_offsets:
            held, rows[field] = len(request[f"{field}__values"]), len(array) - 1
            if not len(array) or array[0] or array[-1] != held or (np.diff(array) < 0).any():
                raise UserError(
                    f"{name!r} must rise from 0 to {held:,}, the number of values. Received: "
                    f"{clipped(str(array.tolist()))}"
                )
        elif f"{name.removesuffix('__values')}__offsets" not in request:
            rows[name] = len(array)
    if len(others := Counter(rows.values())) > 1:
        rare_first = sorted(rows.items(), key=lambda item: others[item[1]])
        found = ", ".join(f"{number} in {name!r}" for name, number in rare_first)
        raise UserError(f"columns differ in their number of rows: {clipped(found)}")
    if not any(rows.values()):
        raise UserError(_NO_ROWS)


def _own_modules() -> list[ModuleType]:
    """Loaded modules that no package installs: the user's operators and functions may be there."""
    installed = re.compile(f"/(site|dist)-packages/|^{re.escape(sysconfig.get_path('stdlib'))}/")
    modules = [m for name, m in sys.modules.items() if getattr(m, "__name__", "") == name]
    files = [(m, getattr(m, "__file__", None)) for m in modules if m.__name__ != "__main__"]
    own = [module for module, file in files if file and not installed.search(file)]
    return [m for m in own if not re.match("merlin|nvtabular", m.__name__)]
