# SPDX-License-Identifier: Apache-2.0
"""A Triton model repository that `export` wrote: open it, and run its model without a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from merlin_cowclip.workflows import folders
from merlin_cowclip.workflows.data.adopt.inference import as_fitted
from merlin_cowclip.workflows.data.sources.base import ids_as_text
from merlin_cowclip.workflows.errors import UserError, clipped, quoted
from merlin_cowclip.workflows.manifest import check_manifest
from merlin_cowclip.workflows.serving import served_model
from merlin_cowclip.workflows.serving.served_model import TEXT, ServedModel

ENTRY = "executor_model"  # the model that clients call
RECORD, VERSION = f"{ENTRY}/export.json", f"{ENTRY}/1"
FORMAT = 4


@dataclass(frozen=True)
class Repository:
    """An exported run; open one with `Repository.open`.

    `executor_model/1/` has the workflow and the network, `executor_model/export.json` is `record`.
    """

    path: Path
    record: Mapping[str, Any] = field(repr=False)

    @classmethod
    def open(cls, path: str | Path) -> Repository:
        """Open a folder that `export` wrote.

        Raises UserError for another folder, an older version, or a file that changed.
        """
        path = Path(path)
        record = folders.read_record(path, RECORD, FORMAT, "a folder that export wrote")
        check_manifest(path, record["manifest"], "a model repository", "Export the run again")
        return cls(path, record)

    def load(self) -> ServedModel:
        """The model as a server runs it. Loading runs code from the folder (cloudpickle)."""
        return ServedModel(self.path / VERSION)

    def request(self, rows: pd.DataFrame | pa.Table) -> dict[str, np.ndarray]:
        """The tensors that a client sends for n raw rows, by name, (1, n) each.

        A list is `name__values` (1, m) and `name__offsets` (1, n + 1). Text is bytes. Raises
        UserError if a column of the record is missing, occurs twice, or is of another type.
        """
        names = rows.column_names if isinstance(rows, pa.Table) else list(rows.columns)
        if bad := [name for name in self.record["columns"] if names.count(name) != 1]:
            raise UserError(
                f"rows must have each of the columns {quoted(bad)} once. Add or rename columns"
            )
        parts = [self._tensors(name, rows[name]) for name in self.record["columns"]]
        return {name: array[np.newaxis] for part in parts for name, array in part.items()}

    def _tensors(self, name: str, given: pd.Series | pa.ChunkedArray) -> dict[str, np.ndarray]:
        inputs, where = self.record["inputs"], f"column {name!r}"
        is_list = name not in inputs
        key = f"{name}__values" if is_list else name
        kind: Any = served_model.TYPES[inputs[key]]
        if isinstance(given, pd.Series) and kind == TEXT and not self.record["is_adopted"]:
            try:
                given = ids_as_text(pa.array(given, from_pandas=True), is_list)
            except (pa.ArrowException, ValueError) as error:
                raise UserError(
                    f"{where}: {clipped(str(error))}. Give ids as text or whole numbers, a list of "
                    "them in each row of a list column, and times as text"
                ) from None
        column = as_fitted(given, pa.list_(kind) if is_list else kind, where)
        tensors = {}
        if is_list:
            lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
            tensors[f"{name}__offsets"] = np.cumsum([0, *lengths], dtype=np.int32)
            column = column.flatten()
        if kind == TEXT:
            column = column.fill_null(b"")
        elif column.null_count and not pa.types.is_floating(kind):
            raise UserError(f"{where} has a missing value, which {kind} cannot be. Fill it")
        return {key: column.to_numpy(zero_copy_only=False), **tensors}

    def predict(self, frame: pd.DataFrame) -> np.ndarray:
        """Probabilities of raw rows, n float32, as a server answers their `request`.

        Each call loads the repository. Raises UserError as `request`, or for a bad row.
        """
        return served_model.probabilities(self.load().answers([self.request(frame)]))
