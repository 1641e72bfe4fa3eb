"""Start a Triton server on a model repository, and call it by gRPC.

COWCLIP_TRITON names the folder of the unpacked PyPI package nvidia-pytriton (`make test-triton`).
The server uses the virtual environment of this process.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

START = 900  # seconds: a busy machine needs minutes to import TensorFlow and Merlin
CALL = 120  # seconds
MODEL = "executor_model"


@contextlib.contextmanager
def triton_server(repository: Path, log: Path) -> Iterator[str]:
    """The gRPC address of a server that is ready for requests."""
    home, bin_path = Path(os.environ["COWCLIP_TRITON"]), Path(sys.executable).parent
    libraries = [sysconfig.get_config_var("LIBDIR"), str(home / "nvidia_pytriton.libs")]
    server = home / "pytriton" / "tritonserver"
    ports = free_ports(3)
    command = [server / "bin" / "tritonserver", "--model-repository", repository]
    command += ["--backend-directory", server / "backends"]
    for name, port in zip(("http", "grpc", "metrics"), ports, strict=True):
        command += [f"--{name}-address", "127.0.0.1", f"--{name}-port", port]
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": ":".join(libraries),
        "PATH": f"{bin_path}:{os.environ['PATH']}",  # the Python backend takes the first python3
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    with log.open("w") as file:
        process = subprocess.Popen(
            [*map(str, command)], env=environment, stdout=file, stderr=subprocess.STDOUT
        )
    try:
        address = f"127.0.0.1:{ports[1]}"
        wait_until_ready(process, address, log)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def wait_until_ready(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    import tritonclient.grpc as grpc

    deadline = time.monotonic() + START
    with grpc.InferenceServerClient(address) as client:
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(grpc.InferenceServerException):
                if client.is_server_ready() and client.is_model_ready(MODEL):
                    return
            time.sleep(0.5)
    raise RuntimeError(f"the server did not start: {log.read_text(errors='replace')[-5_000:]}")


def inputs_of(arrays: Mapping[str, np.ndarray]) -> list[Any]:
    """A request as the client sends it."""
    import tritonclient.grpc as grpc
    from tritonclient.utils import np_to_triton_dtype

    inputs = []
    for name, array in arrays.items():
        kind = np_to_triton_dtype(array.dtype)
        inputs.append(grpc.InferInput(name, list(array.shape), kind))
        inputs[-1].set_data_from_numpy(array)
    return inputs


def ask(address: str, *requests: Mapping[str, np.ndarray]) -> list[Any]:
    """The answers of a server, by one client: probabilities, or the text of an error."""
    import tritonclient.grpc as grpc

    answers: list[Any] = []
    with grpc.InferenceServerClient(address) as client:
        for arrays in requests:
            try:
                answer = client.infer(MODEL, inputs_of(arrays), client_timeout=CALL)
                answers.append(answer.as_numpy("probability"))
            except grpc.InferenceServerException as error:
                answers.append(str(error.message()))
    return answers


def executions(address: str) -> int:
    """How often the model was called, for one request or several."""
    import tritonclient.grpc as grpc

    with grpc.InferenceServerClient(address) as client:
        (statistics,) = client.get_inference_statistics(MODEL).model_stats
        return int(statistics.execution_count)
