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
FOLDER = "network"  # of an ensemble, where Python runs the model
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
        self.input_schema = Schema([self._column(name) for name in (*spec.ids, *spec.continuous)])
        self.output_schema = Schema([ColumnSchema(PROBABILITY, dtype="float32", dims=(None,))])

    def _column(self, name: str) -> ColumnSchema:
        kind = "float32" if name in self._spec.continuous else "int64"
        dims = (None, None) if name in self._spec.lists else (None,)
        return ColumnSchema(argument_name(name), dtype=kind, dims=dims)

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
        zeros = {n: np.zeros(1 + n.endswith("__offsets"), s.dtype.name) for n, s in inputs.items()}
        self.probabilities({n: z[:0] if n.endswith("__values") else z for n, z in zeros.items()})

    def transform(self, col_selector: Any, transformable: TensorTable) -> TensorTable:
        """Probabilities of a table of inputs."""
        return TensorTable({PROBABILITY: self.probabilities(transformable.to_dict())})

    def probabilities(self, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
        """Probabilities of n encoded rows, n float32."""
        outputs = self._graph(**{name: tf.constant(values) for name, values in inputs.items()})
        found: np.ndarray = outputs[PROBABILITY].numpy()
        return found

    def save(self, path: str | os.PathLike[str], include_optimizer: bool = False) -> None:
        """Write the SavedModel; Merlin Systems passes `include_optimizer`, as to Keras."""
        from merlin_cowclip.plugins._tensorflow import quiet_stack

        @tf.function(input_signature=[self._specs()])
        def serve(inputs: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            return {PROBABILITY: self._predicted(inputs)}

        module = tf.Module()
        with quiet_stack():
            graph = serve.get_concrete_function()
            # Not the model: Keras would trace each layer again and save its class.
            module.weights = list(graph.graph.variables)
            tf.saved_model.save(module, os.fspath(path), signatures={_SIGNATURE: graph})

    def _specs(self) -> dict[str, tf.TensorSpec]:
        types = {name: tf.int64 for name in map(argument_name, self._spec.categorical)}
        types |= {name: tf.float32 for name in map(argument_name, self._spec.continuous)}
        for name in map(argument_name, self._spec.lists):
            types |= {f"{name}__values": tf.int64, f"{name}__offsets": tf.int32}
        return {name: tf.TensorSpec([None], dtype, name=name) for name, dtype in types.items()}

    @tf.autograph.experimental.do_not_convert
    def _predicted(self, inputs: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """As `Predictor` computes them."""
        features: dict[str, Any] = {}
        for name in (*self._spec.categorical, *self._spec.continuous):
            features[name] = inputs[argument_name(name)][:, tf.newaxis]
        for name in self._spec.lists:
            for part in ("values", "offsets"):
                values = inputs[f"{argument_name(name)}__{part}"]
                features[f"{name}__{part}"] = tf.cast(values, tf.int64)
        outputs = self._trained.predict_step(features)
        return tf.reshape(tf.cast(outputs, tf.float32), [-1])
