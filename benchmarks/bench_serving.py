"""Serving: latency and rows per second of an exported run, in this process and on a Triton server.

A DeepFM on synthetic Criteo data (26 ids, 13 numbers). Each size is called in turn, so that a
machine that changes its speed changes all alike. The server needs COWCLIP_TRITON (`make
test-triton` installs it into .venv-triton); without it, only this process is measured.

    COWCLIP_TRITON=.venv-triton python benchmarks/bench_serving.py [--rounds 200]
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from merlin_cowclip.workflows import (
    Repository,
    TrainConfig,
    export,
    prepare,
    train,
    write_synthetic,
)
from merlin_cowclip.workflows.data.spec import CRITEO
from merlin_cowclip.workflows.serving.repository import scored

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.triton.server import inputs_of, triton_server

SIZES = (1, 100, 1_000)
LOG_ROWS = 60_000
WARM_UP = 3


def exported(home: Path) -> tuple[Repository, pd.DataFrame]:
    """A repository, and raw rows of its test split."""
    write_synthetic("criteo", home / "log.txt", rows=LOG_ROWS, seed=1)
    data = prepare(CRITEO, [home / "log.txt"], home / "data", progress=False)
    config = TrainConfig(model="deepfm", batch_size=1024, epochs=1)
    run = train(data, config, home / "run", progress=False)
    repository = export(run, home / "repository", progress=False)
    ids = [f"C{i}" for i in range(1, 27)]
    names = ["label", *(f"I{i}" for i in range(1, 14)), *ids]
    kinds = dict.fromkeys(ids, str)
    rows = pd.read_csv(home / "log.txt", sep="\t", names=names, dtype=kinds, nrows=10_000)
    return repository, rows


def request(rows: pd.DataFrame, record: Mapping[str, Any]) -> dict[str, np.ndarray]:
    def column(name: str) -> np.ndarray:
        if record["inputs"][name] == "TYPE_STRING":
            return np.array([text.encode() for text in rows[name].fillna("")], object)
        return rows[name].to_numpy(np.float64)

    return {name: column(name) for name in record["inputs"]}


def measure(call: Callable[[Any], Any], requests: Mapping[int, list[Any]], rounds: int) -> None:
    """Print p50, p99 and rows per second of each size, called in turn."""
    seconds: dict[int, list[float]] = {size: [] for size in requests}
    for number in range(WARM_UP + rounds):
        for size, given in requests.items():
            one = given[number % len(given)]
            start = time.perf_counter()
            call(one)
            seconds[size].append(time.perf_counter() - start)
    print(f"{'rows':>8} {'p50 ms':>8} {'p99 ms':>8} {'rows/s':>8}")
    for size, found in seconds.items():
        half, most = np.percentile(found[WARM_UP:], (50, 99))
        print(f"{size:>8,} {half * 1e3:>8.1f} {most * 1e3:>8.1f} {size / half:>8,.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=200)
    arguments = parser.parse_args()
    print(f"{platform.processor()}, {os.cpu_count()} CPUs")
    with tempfile.TemporaryDirectory() as home:
        repository, rows = exported(Path(home))
        requests = {
            size: [request(rows[i * size : (i + 1) * size], repository.record) for i in range(10)]
            for size in SIZES
        }
        print("In this process:")
        from merlin.table import TensorTable

        ensemble = repository.ensemble()
        tables = {size: [*map(TensorTable, given)] for size, given in requests.items()}
        measure(lambda table: scored(ensemble, table), tables, arguments.rounds)
        if "COWCLIP_TRITON" not in os.environ:
            print("COWCLIP_TRITON is not set: no server")
            return
        import tritonclient.grpc as grpc

        sent = {size: [*map(inputs_of, given)] for size, given in requests.items()}
        log = Path(home) / "server.log"
        with triton_server(repository.path, log) as address:
            print("Triton server, one gRPC client:")
            with grpc.InferenceServerClient(address) as client:
                measure(lambda one: client.infer("executor_model", one), sent, arguments.rounds)


if __name__ == "__main__":
    main()
