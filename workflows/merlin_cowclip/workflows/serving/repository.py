"""A Triton model repository that `export` wrote: open it, and run its ensemble without a server."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from merlin_cowclip.workflows.errors import UserError, quoted, shown
from merlin_cowclip.workflows.manifest import check_manifest, check_nothing_else, is_manifest
from merlin_cowclip.workflows.quiet import quiet_imports, quiet_operators

RECORD = "export.json"  # written last; Triton reads folders only
FORMAT_VERSION = 2
ENTRY = "executor_model"  # the model that clients call
VERSION = "1"
ENSEMBLE = f"{ENTRY}/{VERSION}/ensemble"
_PICKLE = f"{ENSEMBLE}/ensemble.pkl"
_AGAIN = "Export the run again"


@dataclass(frozen=True)
class Repository:
    """An exported run; open one with `Repository.open`.

    `executor_model/` is the ensemble: the run's workflow and, with backend "python", the network.
    With backend "tensorflow" the network is a model of its own, `0_predicttensorflowtriton/`.
    `export.json` has inputs, outputs, the packages that a server needs, and a manifest.
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
        if not os.path.isdir(path):
            raise UserError(
                f"{shown(path)} is not a folder. Make a model repository: merlin-cowclip export"
            )
        try:
            record = json.loads((path / RECORD).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{path} is not a model repository: {error}. {_AGAIN}") from None
        version = record.get("format") if isinstance(record, dict) else None
        if version != FORMAT_VERSION or not is_manifest(record.get("manifest")):
            raise UserError(
                f"{path / RECORD} has format {version!r}; this version reads format "
                f"{FORMAT_VERSION}. {_AGAIN}"
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
            manifest = self.record["manifest"]
            remedy = f"{_AGAIN}, or, if you trust its code: ensemble(trust=True)"
            check_manifest(self.path, manifest, "a model repository", remedy, (_PICKLE,))
            loaded = self.path / ENSEMBLE  # next to it a server leaves a __pycache__
            check_nothing_else(loaded, self.path, manifest, "a model repository", remedy)
        with quiet_imports():
            from merlin.dag import postorder_iter_nodes

            from merlin_cowclip.workflows.serving.merlin_systems import (
                Ensemble,
                PredictTensorflowTriton,
            )

        ensemble = Ensemble.load(str(self.path / ENSEMBLE))
        for node in postorder_iter_nodes(ensemble.graph.output_node):
            if isinstance(node.op, PredictTensorflowTriton):  # which would ask a server
                model = self.path / node.op.tf_model_name / VERSION / "model.savedmodel"
                node.op = node.op.op
                node.op.load(model)
            else:
                node.op.load_artifacts(str(self.path / ENSEMBLE))
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
        names = self.record["columns"]
        if missing := [name for name in names if name not in frame.columns]:
            raise UserError(f"columns are missing: {quoted(missing, brief=True)}. Add them")
        if double := [name for name in names if list(frame.columns).count(name) > 1]:
            raise UserError(f"columns occur twice: {quoted(double, brief=True)}. Rename one")
        out = transformed(self.ensemble(trust=trust), frame)
        return np.asarray(out[self.record["output"]].values, np.float32)


def transformed(ensemble: Any, rows: Any) -> Any:
    """Run an ensemble in this process, on a frame or a `TensorTable`."""
    with quiet_imports():
        from merlin.dag.runtime import Runtime

    with quiet_operators():
        return ensemble.transform(rows, runtime=Runtime())
