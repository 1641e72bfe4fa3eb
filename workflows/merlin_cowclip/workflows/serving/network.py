# SPDX-License-Identifier: Apache-2.0
"""The model as an operator of an ensemble: a plain SavedModel, without Keras and our layers.

The SavedModel of `train` contains Keras layers and the optimizer's state, and takes int64 offsets
of lists, where Merlin Systems declares int32 to Triton.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from merlin_cowclip.plugins._checks import argument_name
from merlin_cowclip.workflows.data.spec import DatasetSpec
from merlin_cowclip.workflows.quiet import quiet_imports
from merlin_cowclip.workflows.serving.merlin_systems import PredictTensorflow, tf

with quiet_imports():
    from merlin.schema import ColumnSchema, Schema
    from merlin.table import TensorTable

if TYPE_CHECKING:
    from merlin_cowclip.plugins._tensorflow import mm

PROBABILITY = "probability"
FOLDER = "network"  # of an ensemble, if Python runs the model
_SIGNATURE = "serving_default"


class Network(PredictTensorflow):
    """Click probabilities of encoded rows.

    Inputs for n rows, by `argument_name`: ids (n, int64), numbers (n, float32), and of a list
    `name__values` (int64) and `name__offsets` (n + 1, int32). Output: `probability` (n, float32).
    """

    def __init__(self, model: mm.Model, spec: DatasetSpec) -> None:
        super().__init__(None)
        self._trained, self._spec = model, spec
        self.path, self.model = None, self  # what Merlin saves for Triton's TensorFlow backend
        kinds = dict.fromkeys(spec.ids, "int64") | dict.fromkeys(spec.continuous, "float32")
        dims = {name: (None, None) if name in spec.lists else (None,) for name in kinds}
        self.input_schema = Schema(
            [ColumnSchema(argument_name(n), dtype=k, dims=dims[n]) for n, k in kinds.items()]
        )
        self.output_schema = Schema([ColumnSchema(PROBABILITY, dtype="float32", dims=(None,))])

    def __getstate__(self) -> dict[str, Any]:
        return {k: self.__dict__[k] for k in ("path", "input_schema", "output_schema")}

    def save_artifacts(self, artifact_path: Any = None) -> None:
        """Save the SavedModel in the ensemble's folder."""
        self.save(Path(artifact_path) / FOLDER)

    def load_artifacts(self, artifact_path: Any = None) -> None:
        """Load it again."""
        if artifact_path:  # Merlin also calls this without one
            self.load(Path(artifact_path) / FOLDER)

    def load(self, path: Path) -> None:
        """Load a SavedModel, and run it once: TensorFlow optimizes a graph at its first run."""
        self._saved = tf.saved_model.load(str(path))  # holds the variables
        self._graph = self._saved.signatures[_SIGNATURE]
        _, inputs = self._graph.structured_input_signature
        sizes = {n: 0 if n.endswith("__values") else 1 + n.endswith("__offsets") for n in inputs}
        one = {n: np.zeros(sizes[n], s.dtype.name) for n, s in inputs.items()}
        self.transform(None, TensorTable(one))

    def transform(self, col_selector: Any, transformable: TensorTable) -> TensorTable:
        """Probabilities of a table of inputs."""
        inputs = {name: tf.constant(array) for name, array in transformable.to_dict().items()}
        return TensorTable({PROBABILITY: self._graph(**inputs)[PROBABILITY].numpy()})

    def save(self, path: str | os.PathLike[str], include_optimizer: bool = False) -> None:
        """Write the SavedModel; Merlin Systems passes `include_optimizer`, as to Keras."""
        from merlin_cowclip.plugins._tensorflow import quiet_stack

        specs = {}
        for column in self.input_schema:
            parts = {"__values": column.dtype.name, "__offsets": "int32"}
            for end, kind in (parts if column.is_list else {"": column.dtype.name}).items():
                name = column.name + end
                specs[name] = tf.TensorSpec([None], kind, name=name)

        @tf.function(input_signature=[specs], autograph=False)
        def serve(inputs: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            return {PROBABILITY: self._predicted(inputs)}

        module = tf.Module()
        with quiet_stack():
            graph = serve.get_concrete_function()
            # Not the model: Keras would trace each layer again and save its class.
            module.weights = list(graph.graph.variables)
            tf.saved_model.save(module, os.fspath(path), signatures={_SIGNATURE: graph})

    def _predicted(self, inputs: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """As `Predictor` computes them."""
        features = {}
        for name in (*self._spec.categorical, *self._spec.continuous):
            features[name] = inputs[argument_name(name)][:, tf.newaxis]
        for name in self._spec.lists:
            for end in ("__values", "__offsets"):
                features[name + end] = tf.cast(inputs[argument_name(name) + end], tf.int64)
        outputs = self._trained.predict_step(features)
        return tf.reshape(tf.cast(outputs, tf.float32), [-1])
