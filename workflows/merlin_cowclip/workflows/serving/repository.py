# SPDX-License-Identifier: Apache-2.0
"""A Triton model repository that `export` wrote: open it, and run its ensemble without a server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from merlin_cowclip.workflows.errors import UserError, quoted
from merlin_cowclip.workflows.manifest import check_manifest
from merlin_cowclip.workflows.quiet import quiet_operators

RECORD = "export.json"  # written last; Triton reads folders only
ENTRY = "executor_model"  # the model that clients call
ENSEMBLE = f"{ENTRY}/1/ensemble"
FORMAT = 2
_AGAIN = "Export the run again"


@dataclass(frozen=True)
class Repository:
    """An exported run; open one with `Repository.open`.

    `executor_model/` is the ensemble: the run's workflow and, with backend "python", the network;
    with "tensorflow" the network is in `0_predicttensorflowtriton/`. `export.json` is `record`.
    """

    path: Path
    record: Mapping[str, Any] = field(repr=False)

    @classmethod
    def open(cls, path: str | Path) -> Repository:
        """Open a folder that `export` wrote.

        Raises:
          UserError: it is none, is incomplete, or is of another version.
        """
        path = Path(path)
        try:
            record = json.loads((path / RECORD).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{path} is not a model repository: {error!r}. {_AGAIN}") from None
        if record.get("format") != FORMAT:
            raise UserError(
                f"{path / RECORD} has format {record.get('format')!r}; this version reads format "
                f"{FORMAT}. {_AGAIN}"
            )
        return cls(path, record)

    def ensemble(self, *, trust: bool = False) -> Any:
        """The `merlin.systems` ensemble, to transform frames of raw rows in this process.

        Loading runs code from the folder (cloudpickle) and the network's graph.

        Args:
          trust: load it even if the manifest does not confirm every file.

        Raises:
          UserError: the manifest does not confirm a file, or the extra is not installed.
        """
        if not trust:
            remedy = f"{_AGAIN}, or, if you trust its code: ensemble(trust=True)"
            manifest = self.record["manifest"]
            check_manifest(self.path, manifest, "a model repository", remedy, [ENSEMBLE])
        from merlin_cowclip.workflows.data.adopt.graph import nodes
        from merlin_cowclip.workflows.serving import merlin_systems as systems

        folder = str(self.path / ENSEMBLE)
        ensemble = systems.Ensemble.load(folder)
        for node in nodes(ensemble.graph.output_node):
            if isinstance(node.op, systems.PredictTensorflowTriton):  # which would ask a server
                model = self.path / node.op.tf_model_name / "1/model.savedmodel"
                node.op = node.op.op
                node.op.load(model)
            else:
                node.op.load_artifacts(folder)
        return ensemble

    def predict(self, frame: pd.DataFrame, *, trust: bool = False) -> np.ndarray:
        """Probabilities of raw rows, n float32, as a server returns them.

        Each call loads the repository.

        Args:
          frame: the columns of the record's `inputs`, in any order; others are ignored.
          trust: see `ensemble`.

        Raises:
          UserError: a column is missing or occurs twice, a row is refused, or as `ensemble`.
        """
        found = list(frame.columns)
        if bad := [name for name in self.record["columns"] if found.count(name) != 1]:
            raise UserError(
                f"rows must have each of the columns {quoted(bad)} once. Add or rename columns"
            )
        return scored(self.ensemble(trust=trust), frame)


def scored(ensemble: Any, rows: Any) -> np.ndarray:
    """Probabilities of an ensemble in this process, n float32, of a frame or a `TensorTable`."""
    from merlin_cowclip.workflows.serving.merlin_systems import Runtime

    with quiet_operators():
        out = ensemble.transform(rows, runtime=Runtime())
    return np.asarray(out[out.columns[0]].values, np.float32)
