"""The network of a run as TensorFlow alone serves it: a graph and its weights, no layer of ours.

The SavedModel that `train` leaves is Keras's as well, with the state of the optimizer; of a list it
takes offsets of int64, where Merlin Systems tells Triton int32.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from merlin_cowclip.plugins._checks import argument_name
from merlin_cowclip.plugins._tensorflow import ColumnSchema, Schema, mm, quiet_stack, tf
from merlin_cowclip.workflows.data.datasets import DatasetSpec

PROBABILITY = "probability"
SIGNATURE = "serving_default"


class ServedNetwork:
    """A model to be saved for serving.

    Of n rows it takes ids (n, int64) and numbers (n, float32) by `argument_name`, of a list
    `name__values` (int64) and `name__offsets` (n + 1, int32); it gives `probability` (n, float32).

    Args:
      model: the run's.
      spec: of its rows.
    """

    def __init__(self, model: mm.Model, spec: DatasetSpec) -> None:
        self._model, self._spec = model, spec

    @property
    def input_schema(self) -> Schema:
        """As Merlin Systems reads it off a SavedModel, which it would save once more for that."""
        kinds = dict.fromkeys(self._spec.ids, "int64") | dict.fromkeys(
            self._spec.continuous, "float32"
        )
        return Schema(
            [
                ColumnSchema(
                    argument_name(name),
                    dtype=kind,
                    dims=(None, None) if name in self._spec.lists else (None,),
                )
                for name, kind in kinds.items()
            ]
        )

    @property
    def output_schema(self) -> Schema:
        """The probability of a click."""
        return Schema([ColumnSchema(PROBABILITY, dtype="float32", dims=(None,))])

    def __call__(self, inputs: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """The outputs by name, as the SavedModel has them."""
        return {PROBABILITY: self._probabilities(inputs)}

    def save(self, path: str | os.PathLike[str], include_optimizer: bool = False) -> None:
        """Write the SavedModel.

        Args:
          path: the folder to make.
          include_optimizer: as Keras has it, and Merlin Systems calls this. There is none.
        """
        specs = self._specs()

        @tf.function(input_signature=[specs])
        def serve(inputs: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            return self(inputs)

        module = tf.Module()
        with quiet_stack():
            graph = serve.get_concrete_function()
            # Not the model: Keras would trace each layer again, and name its class in the folder.
            module.weights = list(graph.graph.variables)
            tf.saved_model.save(module, os.fspath(path), signatures={SIGNATURE: graph})

    def _specs(self) -> dict[str, tf.TensorSpec]:
        def one(name: str, dtype: tf.DType) -> tf.TensorSpec:
            return tf.TensorSpec([None], dtype, name=name)

        spec = self._spec
        types: list[tuple[str, tf.DType]] = [(argument_name(n), tf.int64) for n in spec.categorical]
        types += [(argument_name(name), tf.float32) for name in spec.continuous]
        for name in map(argument_name, spec.lists):
            types += [(f"{name}__values", tf.int64), (f"{name}__offsets", tf.int32)]
        return {name: one(name, dtype) for name, dtype in types}

    @tf.autograph.experimental.do_not_convert
    def _probabilities(self, inputs: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """As `Predictor` has them."""
        features: dict[str, Any] = {}
        for name in (*self._spec.categorical, *self._spec.continuous):
            features[name] = inputs[argument_name(name)][:, tf.newaxis]
        for name in self._spec.lists:
            for part in ("values", "offsets"):
                values = inputs[f"{argument_name(name)}__{part}"]
                features[f"{name}__{part}"] = tf.cast(values, tf.int64)
        outputs = self._model.predict_step(features)
        return tf.reshape(tf.cast(outputs, tf.float32), [-1])
