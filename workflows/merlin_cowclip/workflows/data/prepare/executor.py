# SPDX-License-Identifier: Apache-2.0
"""Threads of this process, or a local Dask cluster on CPUs or GPUs.

A task reads and writes files and may run again, so that a worker may die.
"""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from merlin_cowclip.workflows.errors import UserError, check_whole

THREADS = min(4, os.cpu_count() or 1)  # of one process; each holds one column, or one part
DEATHS = 3  # of workers over one task, before the task is given up
SETTINGS = {
    "distributed.scheduler.allowed-failures": DEATHS,
    # The files are the state: there is nothing worth waiting for from a dead worker.
    "distributed.comm.timeouts.connect": "60s",
    "distributed.worker.daemon": True,  # workers end with us, however we end
}


@contextlib.contextmanager
def make_executor(workers: int, device: str, scratch: Path) -> Iterator[Executor]:
    """Threads of this process, or a local Dask cluster: CPU processes, or one worker per GPU.

    With 0 ``workers``, all GPUs, or threads. ``scratch`` is a folder for data that workers spill.
    Raises UserError if a task killed several workers.
    """
    if device == "cpu" and not workers:
        with ThreadPoolExecutor(THREADS) as pool:
            yield pool
        return
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # a worker that starts
        raise UserError(
            'call prepare(workers=…) under `if __name__ == "__main__":`. Dask imports the script '
            "again in each worker"
        )
    import dask
    from distributed import Client, LocalCluster
    from distributed.scheduler import KilledWorker

    kind: Any = LocalCluster
    if device == "gpu":
        import dask_cuda

        kind = dask_cuda.LocalCUDACluster
    options = {**cluster_options(workers, device), "local_directory": str(scratch)}
    with dask.config.set(SETTINGS), kind(**options) as cluster, Client(cluster) as client:
        client.register_worker_callbacks(ignore_interrupts)
        print(f"Dask dashboard: {client.dashboard_link}", file=sys.stderr, flush=True)
        try:
            yield client.get_executor(pure=False)  # two equal tasks are two tasks
        except KilledWorker:
            raise UserError(
                f"{DEATHS + 1} Dask workers died on the same task, probably out of memory. Use "
                "fewer workers or a larger machine"
            ) from None


def check_executor(workers: int, device: str) -> None:
    """Check the arguments of `make_executor`, that packages are there, and a GPU per worker."""
    if device not in ("cpu", "gpu"):
        raise UserError(f"device must be 'cpu' or 'gpu'. Received: {device!r}")
    check_whole("workers", workers, 0, 4 * (os.cpu_count() or 1))
    if device == "cpu":
        return
    for package in ("cudf", "dask_cudf", "dask_cuda"):
        if importlib.util.find_spec(package) is None:
            raise UserError(
                f"--device gpu needs the package {package}. Use one of NVIDIA's Merlin containers, "
                "or install RAPIDS as docs/install.md says"
            )
    from distributed.diagnostics import nvml

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = nvml.device_get_count() if visible is None else len(visible.replace(",", " ").split())
    if gpus < max(workers, 1):
        raise UserError(
            f"--device gpu needs a GPU per worker ({workers or 1} workers, {gpus} GPUs). Use fewer "
            "workers, or --device cpu"
        )


def cluster_options(workers: int, device: str) -> dict[str, Any]:
    """Arguments of Dask's `LocalCluster` or dask-cuda's `LocalCUDACluster`: one thread a worker."""
    options: dict[str, Any] = {
        "n_workers": workers or None,  # one for each GPU
        "threads_per_worker": 1,
        "dashboard_address": ":0",  # any free port: two jobs do not meet
        "silence_logs": "CRITICAL",  # what fails is raised; on the way out Dask warns of itself
    }
    if device == "gpu":
        options |= {"rmm_pool_size": 0.4, "rmm_maximum_pool_size": 0.8}  # of its memory
    return options


def ignore_interrupts() -> None:
    """In a worker: Ctrl-C, which a terminal sends to all processes, ends the first one only."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
