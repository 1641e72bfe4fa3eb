"""Serving: latency and throughput of an exported run, in this process and on a Triton server.

A DeepFM on synthetic Criteo data (26 ids, 13 numbers). The server needs COWCLIP_TRITON (`make
triton` installs it into .venv-triton); without it, only this process is measured. Clients send the
next request when they have the answer. Cases take turns, so that a machine that changes its speed
changes all alike.

    COWCLIP_TRITON=.venv-triton python benchmarks/bench_serving.py [--turns 5] [--seconds 2]
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from record import save_record

from merlin_cowclip.workflows import (
    Repository,
    TrainConfig,
    export,
    prepare,
    train,
    write_synthetic,
)
from merlin_cowclip.workflows.data.spec import CRITEO

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.triton.server import MODEL, triton_server

ROWS, CLIENTS = (1, 100), (1, 8, 32)
LOG_ROWS = 60_000


def exported(home: Path) -> tuple[Repository, pd.DataFrame]:
    """A repository, and raw rows."""
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


def message(arrays: Mapping[str, np.ndarray]) -> Any:
    """A request as a client sends it, made once, so that clients take little of the CPU."""
    from tritonclient.grpc import service_pb2
    from tritonclient.utils import np_to_triton_dtype, serialize_byte_tensor

    sent = service_pb2.ModelInferRequest(model_name=MODEL)
    for name, array in arrays.items():
        sent.inputs.add(name=name, datatype=np_to_triton_dtype(array.dtype), shape=array.shape)
        is_text = array.dtype == object
        sent.raw_input_contents.append(
            serialize_byte_tensor(array).item() if is_text else array.tobytes()
        )
    return sent


def latencies(call: Callable[[Any], Any], requests: list[Any], seconds: float) -> list[float]:
    """Seconds of each call of one client."""
    found: list[float] = []
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        call(requests[len(found) % len(requests)])
        found.append(time.perf_counter() - start)
    return found


def measure(
    cases: Mapping[Any, Callable[[float], Any]], turns: int, seconds: float
) -> list[dict[str, float]]:
    """Print p50 and p99 of a request and throughput of each case: (rows, clients)."""
    measured = []
    found: dict[Any, list[float]] = {case: [] for case in cases}
    for turn in range(turns + 1):
        for case, run in cases.items():
            now = run(seconds if turn else 0.5)
            found[case] += now if turn else []
    print("  rows  clients  p50 ms  p99 ms  requests/s   rows/s")
    for (rows, clients), every in found.items():
        half, most = np.percentile(every, (50, 99)) * 1e3
        rate = len(every) / (turns * seconds)
        print(
            f"{rows:>6} {clients:>8} {half:>7.1f} {most:>7.1f} {rate:>11,.0f} {rate * rows:>8,.0f}"
        )
        case = {"rows": rows, "clients": clients, "p50_ms": half, "p99_ms": most}
        measured.append({**case, "requests_per_second": rate})
    return measured


def at_once(stubs: Iterable[Any], requests: list[Any], seconds: float) -> list[float]:
    """Latencies of clients that call at the same time."""
    with ThreadPoolExecutor() as pool:
        pools = [pool.submit(latencies, s.ModelInfer, requests, seconds) for s in stubs]
        return [second for one in pools for second in one.result()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--record", action="store_true", help="write benchmarks/records/")
    arguments = parser.parse_args()
    turns, seconds = arguments.turns, arguments.seconds
    print(f"{platform.processor()}, {os.cpu_count()} CPUs")
    with tempfile.TemporaryDirectory() as home:
        repository, rows = exported(Path(home))
        requests = {
            size: [repository.request(rows[i * size : (i + 1) * size]) for i in range(50)]
            for size in ROWS
        }
        print("In this process:")
        model = repository.load()
        alone = measure(
            {
                (n, 1): lambda s, n=n: latencies(lambda r: model.answers([r]), requests[n], s)
                for n in ROWS
            },
            turns,
            seconds,
        )
        if "COWCLIP_TRITON" not in os.environ:
            print("COWCLIP_TRITON is not set: no server")
            return
        import grpc
        from tritonclient.grpc import service_pb2_grpc

        sent = {size: [*map(message, given)] for size, given in requests.items()}
        with triton_server(repository.path, Path(home) / "server.log") as address:
            print("Triton server, by gRPC:")
            stubs = [
                service_pb2_grpc.GRPCInferenceServiceStub(
                    grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])
                )
                for _ in range(max(CLIENTS))
            ]
            served = measure(
                {
                    (n, c): lambda s, n=n, c=c: at_once(stubs[:c], sent[n], s)
                    for n in ROWS
                    for c in CLIENTS
                },
                turns,
                seconds,
            )
        if arguments.record:
            places = (("this process", alone), ("Triton", served))
            save_record([{"where": place, **row} for place, rows in places for row in rows])


if __name__ == "__main__":
    main()
