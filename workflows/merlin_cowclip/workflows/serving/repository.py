"""A Triton model repository that `export` wrote: opened, and its ensemble run without a server."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from merlin_cowclip.workflows.errors import UserError, quoted, shown
from merlin_cowclip.workflows.manifest import check_manifest, check_nothing_else, is_manifest
from merlin_cowclip.workflows.quiet import quiet_imports, quiet_operators

RECORD = "export.json"  # written last; Triton looks at folders alone
FORMAT_VERSION = 1
ENTRY = "executor_model"  # the model that a client asks
VERSION = "1"
ENSEMBLE = f"{ENTRY}/{VERSION}/ensemble"
_AGAIN = "Export the run again"


@dataclass(frozen=True)
class Repository:
    """An exported run; open one with `Repository.open`.

    `executor_model/` takes raw rows: the ensemble, and the run's workflow beside it.
    `0_predicttensorflowtriton/` is the network, which TensorFlow runs without Python.
    `export.json` says what it was made of, its inputs and outputs, and which packages a server
    needs, and holds the manifest of all.
    """

    path: Path
    record: Mapping[str, Any] = field(repr=False)

    @classmethod
    def open(cls, path: str | Path) -> Repository:
        """The folder that `export` wrote.

        Raises:
          UserError: not there, not whole, of another version, or a file is gone or has changed.
        """
        path = Path(path)
        if not os.path.isdir(path):
            raise UserError(
                f"a model repository must be a folder. Received: {shown(path)}. Make one with "
                "'merlin-cowclip export'"
            )
        try:
            record = json.loads((path / RECORD).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(
                f"a model repository must hold {RECORD}, as 'merlin-cowclip export' writes it last."
                f" Received: {path}: {error}. {_AGAIN}"
            ) from None
        version = record.get("format") if isinstance(record, dict) else None
        if version != FORMAT_VERSION or not is_manifest(record.get("manifest")):
            raise UserError(
                f"a model repository must be of format {FORMAT_VERSION}, with a manifest. Received:"
                f" format {version!r} in {path / RECORD}. {_AGAIN}"
            )
        return cls(path, record)

    def ensemble(self, *, trust: bool = False) -> Any:
        """The `merlin.systems` ensemble, to transform frames of raw rows in this process.

        Loading runs code from the folder (cloudpickle), and the network's graph.

        Args:
          trust: load it also where the manifest does not confirm every file.

        Raises:
          UserError: the manifest does not, or the extra is not installed.
        """
        if not trust:
            manifest = self.record["manifest"]
            remedy = f"{_AGAIN}. Or, if you trust it all the same, whose code loading it runs: "
            remedy += "ensemble(trust=True)"
            check_manifest(self.path, manifest, "a model repository", remedy, (_PICKLE,))
            inner = self.path / ENTRY
            check_nothing_else(inner, self.path, manifest, "a model repository", remedy)
        with quiet_imports():
            from merlin_cowclip.plugins._tensorflow import quiet_stack, tf
            from merlin_cowclip.workflows.serving.network import SIGNATURE

        def network(name: str) -> _Called:
            with quiet_stack():
                model = tf.saved_model.load(str(self.path / name / VERSION / "model.savedmodel"))
            return _Called(model.signatures[SIGNATURE], model)

        return load_ensemble(self.path, network)

    def predict(self, frame: pd.DataFrame, *, trust: bool = False) -> np.ndarray:
        """Probabilities of raw rows, n float32, as a server answers.

        Args:
          frame: the columns of the record's `inputs`, in any order, and any others; of each call
            the repository is loaded anew.
          trust: see `ensemble`.

        Raises:
          UserError: a column is missing or there twice, or a row is refused; and as `ensemble`.
        """
        missing = [name for name in self.record["columns"] if name not in frame.columns]
        if missing:
            raise UserError(
                f"a request must have every column. Missing: {quoted(missing, brief=True)} in "
                f"{quoted(frame.columns, brief=True)}"
            )
        double = [name for name in self.record["columns"] if list(frame.columns).count(name) > 1]
        if double:
            raise UserError(
                "a request must have every column once. Received: "
                f"{quoted(double, brief=True)} more than once"
            )
        out = transformed(self.ensemble(trust=trust), frame)
        return np.asarray(out[self.record["output"]], np.float32)


_PICKLE = f"{ENSEMBLE}/ensemble.pkl"


@dataclass(frozen=True)
class _Called:
    """A signature, called with inputs by name; it lives as long as what it was loaded from."""

    signature: Any
    loaded: Any

    def __call__(self, inputs: Mapping[str, Any]) -> Any:
        return self.signature(**inputs)


def load_ensemble(repository: Path, network: Callable[[str], Any]) -> Any:
    """The ensemble of a repository, to run in this process.

    Args:
      repository: the folder.
      network: by its name there, what is called with the network's inputs.
    """
    with quiet_imports():
        from merlin_cowclip.workflows.serving.merlin_systems import Ensemble, PredictTensorflow

    ensemble = Ensemble.load(str(repository / ENSEMBLE))
    for node in _nodes(ensemble):
        # As exported it asks a server for the network; within it is the operator that runs it
        # here, whose model is left out of the pickle and in no artifact.
        inner_op = getattr(node.op, "op", None)
        if isinstance(inner_op, PredictTensorflow):
            name = node.op.tf_model_name
            node.op = inner_op
            node.op.model = network(name)
        else:
            node.op.load_artifacts(str(repository / ENSEMBLE))
    return ensemble


def transformed(ensemble: Any, frame: pd.DataFrame) -> Any:
    """What an ensemble answers to a frame, in this process."""
    with quiet_imports():
        from merlin.dag.runtime import Runtime

    with quiet_operators():
        return ensemble.transform(frame, runtime=Runtime())


def _nodes(ensemble: Any) -> list[Any]:
    from merlin.dag import postorder_iter_nodes

    return list(postorder_iter_nodes(ensemble.graph.output_node, flatten_subgraphs=True))
