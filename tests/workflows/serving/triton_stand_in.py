"""A Triton server as far as a model repository meets it, in a process of its own.

    python triton_stand_in.py REPOSITORY REQUESTS ANSWERS

Each model is served as its `config.pbtxt` says, which is parsed by Triton's own schema: a request
has just its inputs, each of its type and number of dimensions. Python models get text as bytes, and
may send no array of str; the network is TensorFlow's alone, loaded before Merlin is imported.
REQUESTS is a pickle of a list of arrays by name, ANSWERS of a list of such, or texts of errors.
"""

from __future__ import annotations

import importlib.util
import json
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
import tritonclient.grpc.model_config_pb2 as schema
from google.protobuf import json_format, text_format

NUMPY = {
    "TYPE_BOOL": np.bool_,
    **{f"TYPE_INT{bits}": np.dtype(f"int{bits}").type for bits in (8, 16, 32, 64)},
    **{"TYPE_FP32": np.float32, "TYPE_FP64": np.float64, "TYPE_STRING": np.object_},
}
SERVED: dict[str, Any] = {}


class TritonModelException(Exception):  # noqa: N818
    pass


class TritonError:
    def __init__(self, message: str) -> None:
        self._message = message

    def message(self) -> str:
        return self._message


class Tensor:
    def __init__(self, name: str, array: np.ndarray) -> None:
        if array.dtype.type not in NUMPY.values():
            raise TritonModelException(f"NumPy's {array.dtype} is none of Triton's types")
        if array.dtype == object:
            texts = [a if isinstance(a, bytes) else str(a).encode() for a in array.ravel()]
            array = np.array([*texts, None], object)[:-1].reshape(array.shape)
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array

    def is_cpu(self) -> bool:
        return True


class InferenceResponse:
    def __init__(self, output_tensors: list[Tensor], error: TritonError | None = None) -> None:
        self.tensors, self._error = {one.name(): one for one in output_tensors}, error

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error


class InferenceRequest:
    def __init__(
        self, model_name: str, requested_output_names: list[str], inputs: list[Tensor]
    ) -> None:
        self.model, self.outputs = model_name, requested_output_names
        self.tensors = {one.name(): one for one in inputs}

    def exec(self) -> InferenceResponse:
        return SERVED[self.model].answer(self)


def by_name(holder: InferenceRequest | InferenceResponse, name: str) -> Tensor | None:
    return holder.tensors.get(name)


def refusal(declared: Any, tensors: dict[str, Tensor]) -> str:
    kinds = {one.name: (schema.DataType.Name(one.data_type), one.dims) for one in declared}
    if kinds.keys() != tensors.keys():
        differ = sorted(kinds.keys() ^ tensors.keys())
        return f"expected {len(kinds)} tensors but got {len(tensors)}: {differ}"
    for name, (kind, dims) in kinds.items():
        array = tensors[name].as_numpy()
        if array.dtype.type is not NUMPY[kind]:
            return f"unexpected datatype {array.dtype} for {name!r}, expecting {kind}"
        if len(dims) != array.ndim:
            return f"unexpected shape for {name!r}: expected {list(dims)}, got {array.shape}"
    return ""


class Model:
    def __init__(self, folder: Path) -> None:
        text = (folder / "config.pbtxt").read_text(encoding="utf-8")
        self.config = text_format.Parse(text, schema.ModelConfig())
        assert self.config.name == folder.name
        self.folder = folder

    def answer(self, request: InferenceRequest) -> InferenceResponse:
        said = refusal(self.config.input, request.tensors)
        if said:
            return InferenceResponse([], TritonError(said))
        response = self.run(request)
        if not response.has_error():
            assert not refusal(self.config.output, response.tensors)
        return response


class TensorFlowModel(Model):
    """Merlin and this package are nothing to it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        assert self.config.platform == "tensorflow_savedmodel"
        self.loaded = tf.saved_model.load(str(folder / "1/model.savedmodel"))
        signature = self.config.parameters["TF_SIGNATURE_DEF"].string_value
        self.signature = self.loaded.signatures[signature]
        _, inputs = self.signature.structured_input_signature
        named = {one.name: schema.DataType.Name(one.data_type) for one in self.config.input}
        assert named.keys() == inputs.keys()
        for name, spec in inputs.items():
            assert spec.dtype.as_numpy_dtype is NUMPY[named[name]]
        assert "merlin" not in sys.modules

    def run(self, request: InferenceRequest) -> InferenceResponse:
        inputs = {n: tf.constant(t.as_numpy()) for n, t in request.tensors.items()}
        outputs = self.signature(**inputs)
        return InferenceResponse([Tensor(n, outputs[n].numpy()) for n in request.outputs])


class PythonModel(Model):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        assert self.config.backend == "python"
        spec = importlib.util.spec_from_file_location("model", folder / "1/model.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self.model = module.TritonPythonModel()
        self.model.initialize(
            {
                "model_config": json.dumps(json_format.MessageToDict(self.config)),
                "model_instance_kind": "CPU",
                "model_instance_device_id": "0",
                "model_repository": str(folder),
                "model_version": "1",
                "model_name": folder.name,
            }
        )

    def run(self, request: InferenceRequest) -> InferenceResponse:
        (response,) = self.model.execute([request])
        return response


def main(repository: Path, requests: Path, answers: Path) -> None:
    module: Any = types.ModuleType("triton_python_backend_utils")
    for kind in (Tensor, InferenceRequest, InferenceResponse, TritonError, TritonModelException):
        setattr(module, kind.__name__, kind)
    module.get_input_tensor_by_name = module.get_output_tensor_by_name = by_name
    sys.modules[module.__name__] = module
    folders = {path.parent for path in repository.glob("*/config.pbtxt")}
    assert folders == {path for path in repository.iterdir() if path.is_dir()}
    networks = {folder for folder in folders if (folder / "1/model.savedmodel").is_dir()}
    for folder in networks:
        SERVED[folder.name] = TensorFlowModel(folder)
    for folder in folders - networks:
        SERVED[folder.name] = PythonModel(folder)
    given = []
    for inputs in pickle.loads(requests.read_bytes()):
        tensors = [Tensor(name, array) for name, array in inputs.items()]
        response = InferenceRequest("executor_model", ["probability"], tensors).exec()
        if response.has_error():
            given.append(response.error().message())
        else:
            given.append({n: t.as_numpy() for n, t in response.tensors.items()})
    answers.write_bytes(pickle.dumps(given))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
