# SPDX-License-Identifier: Apache-2.0
"""The model as a plain SavedModel, without Keras, our layers and the optimizer's state.

All ids are one input, `ids` (fields, n) int64, and all numbers another, `numbers` (fields, n)
float32: TensorFlow takes microseconds per tensor. List i is `values_i` and `offsets_i` (n + 1),
int64. The output is `probability` (n,) float32.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from merlin_cowclip.workflows.data.spec import DatasetSpec
from merlin_cowclip.workflows.quiet import quiet_imports

with quiet_imports():
    import tensorflow as tf

if TYPE_CHECKING:
    from merlin_cowclip.plugins._tensorflow import mm

_KINDS: dict[str, Any] = {"ids": np.int64, "numbers": np.float32}
_LISTS = ("values", "offsets")


def _fields(spec: DatasetSpec) -> dict[str, tuple[str, ...]]:
    """The fields of each matrix."""
    matrices = {"ids": spec.categorical, "numbers": spec.continuous}
    return {name: fields for name, fields in matrices.items() if fields}


def network_inputs(spec: DatasetSpec, encoded: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The inputs for encoded rows: an array of each field, of a list two."""
    inputs = {m: np.array([encoded[f] for f in fs], _KINDS[m]) for m, fs in _fields(spec).items()}
    for i, name in enumerate(spec.lists):
        inputs |= {f"{e}_{i}": np.asarray(encoded[f"{name}__{e}"], np.int64) for e in _LISTS}
    return inputs


def save_network(model: mm.Model, spec: DatasetSpec, path: Path) -> None:
    """Write the SavedModel of a trained model."""
    from merlin_cowclip.plugins._tensorflow import quiet_stack

    shapes = {m: ([len(fields), None], _KINDS[m]) for m, fields in _fields(spec).items()}
    shapes |= {f"{e}_{i}": ([None], np.int64) for i in range(len(spec.lists)) for e in _LISTS}
    specs = {name: tf.TensorSpec(*shape, name=name) for name, shape in shapes.items()}

    @tf.function(input_signature=[specs], autograph=False)
    def serve(inputs: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        features: dict[str, tf.Tensor] = {}
        for matrix, fields in _fields(spec).items():
            columns = tf.unstack(inputs[matrix][:, :, tf.newaxis], len(fields))
            features |= dict(zip(fields, columns, strict=True))
        for i, name in enumerate(spec.lists):
            features |= {f"{name}__{e}": inputs[f"{e}_{i}"] for e in _LISTS}
        outputs = model.predict_step(features)
        return {"probability": tf.reshape(tf.cast(outputs, tf.float32), [-1])}

    module = tf.Module()
    with quiet_stack():
        graph = serve.get_concrete_function()
        # Not the model: Keras would trace each layer again and save its class.
        module.weights = list(graph.graph.variables)
        tf.saved_model.save(module, os.fspath(path), signatures={"serving_default": graph})


def load_network(path: Path) -> Callable[[Mapping[str, np.ndarray]], np.ndarray]:
    """A saved network as a function, run once: TensorFlow optimizes a graph at its first run."""
    saved = tf.saved_model.load(os.fspath(path))

    def predict(inputs: Mapping[str, np.ndarray]) -> np.ndarray:
        tensors = {name: tf.constant(array) for name, array in inputs.items()}
        return saved.signatures["serving_default"](**tensors)["probability"].numpy()

    _, specs = saved.signatures["serving_default"].structured_input_signature
    length = {"ids": 1, "numbers": 1, "values": 0, "offsets": 2}  # of a row with empty lists
    shapes = {n: [*spec.shape[:-1], length[n.partition("_")[0]]] for n, spec in specs.items()}
    predict({n: np.zeros(shapes[n], spec.dtype.as_numpy_dtype) for n, spec in specs.items()})
    return predict
