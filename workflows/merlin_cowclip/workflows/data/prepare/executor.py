# SPDX-License-Identifier: Apache-2.0
"""A Dask cluster: one that runs already, or a local one on CPUs or GPUs.

A task reads and writes files and may run again, so that a worker may die.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.metadata
import importlib.util
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from merlin_cowclip.workflows.errors import UserError, check_whole
from merlin_cowclip.workflows.progress import progress_bar

THREADS = min(4, os.cpu_count() or 1)  # of one process, without workers
CONNECT = 10  # seconds for a scheduler to answer
FIRST = 60  # seconds for its first worker
VERSION = importlib.metadata.version("merlin-cowclip")
SETTINGS = {
    "distributed.scheduler.allowed-failures": 3,
    # The files are the state: there is nothing worth waiting for from a dead worker.
    "distributed.comm.timeouts.connect": "60s",
    "distributed.worker.daemon": True,  # workers end with us, however we end
}


@contextlib.contextmanager
def connect(
    scratch: Path, scheduler: str | None = None, workers: int = 0, device: str = "cpu"
) -> Iterator[Any]:
    """Connect to the cluster of a scheduler's address, or to a local one, which then ends.

    A local one has ``workers`` processes, or with 0 all GPUs, or threads of this process. All
    workers must see ``scratch``, where local ones spill data. Yields a `distributed.Client`; raises
    UserError if there is no cluster that can work, or a task killed several workers.
    """
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

    class Interruptible(Client):  # its own waits here, once an interrupt has ended its connection
        def __del__(self) -> None: ...

    options = {**cluster_options(workers, device), "local_directory": str(scratch)}
    has_processes = options.get("processes", True) and not scheduler
    with (
        dask.config.set(SETTINGS),
        contextlib.nullcontext(scheduler) if scheduler else kind(**options) as cluster,
        contextlib.ExitStack() as stack,
    ):
        try:
            # Not the default, with which Dask and Merlin would go on when it is closed.
            client: Any = Interruptible(cluster, timeout=CONNECT, set_as_default=False)
            stack.enter_context(client)
            if has_processes or scheduler:
                print(f"Dask dashboard: {client.dashboard_link}", file=sys.stderr, flush=True)
            client.wait_for_workers(1, timeout=FIRST)
        except (OSError, asyncio.TimeoutError, ValueError) as error:
            raise UserError(
                f"no Dask workers at {cluster}: {error}. Start `dask scheduler` and `dask worker`, "
                "and give the scheduler's address, as in tcp://10.0.0.1:8786"
            ) from None
        try:
            if has_processes:  # to which a terminal sends Ctrl-C, too
                ignoring = functools.partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
                client.register_worker_callbacks(ignoring)
            for worker, found in client.run(_describe, str(scratch)).items():
                if found != (True, VERSION):
                    raise UserError(
                        f"Dask worker {worker} has no {scratch}, or another version of "
                        "merlin-cowclip. All workers must share the folder and the version"
                    )
            yield client
        except KilledWorker:
            raise UserError(
                "several Dask workers died on the same task, probably out of memory. Use fewer "
                "workers, or machines with more memory"
            ) from None
        except Exception:
            if scheduler and client.status != "running":
                raise UserError(f"the Dask scheduler {scheduler} ended. Start it again") from None
            raise


def _describe(folder: str) -> tuple[bool, str]:
    return os.path.isdir(folder), importlib.metadata.version("merlin-cowclip")


def run_tasks(
    client: Any,
    title: str,
    task: Callable[..., Any],
    jobs: Sequence[Sequence[Any]],
    sizes: Sequence[int] = (),
    *,
    progress: bool = True,
) -> list[Any]:
    """Run a task on the workers with the arguments of each job, of ``sizes`` in bytes, if given.

    Returns the results in order.
    """
    futures = client.map(task, *zip(*jobs, strict=True), key=title, pure=False) if jobs else []
    sizes, unit = (sizes, "B") if sizes else ([1] * len(jobs), " tasks")
    results = []
    with progress_bar(title, sum(sizes), unit, show=progress) as bar:
        for future, size in zip(futures, sizes, strict=True):
            results.append(future.result())
            bar.update(size)
    return results


def check_cluster(workers: int, device: str, scheduler: str | None = None) -> None:
    """Check the arguments of `connect`, that packages are there, and a GPU per worker."""
    if device not in ("cpu", "gpu"):
        raise UserError(f"device must be 'cpu' or 'gpu'. Received: {device!r}")
    check_whole("workers", workers, 0, 4 * (os.cpu_count() or 1))
    if scheduler is not None and workers:
        raise UserError("a scheduler has workers of its own. Leave workers out")
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
    """Arguments of Dask's `LocalCluster` or dask-cuda's `LocalCUDACluster`."""
    options: dict[str, Any] = {
        "n_workers": workers or None,  # one for each GPU
        "threads_per_worker": 1,
        "dashboard_address": ":0",  # any free port: two jobs do not meet
        "silence_logs": "CRITICAL",  # what fails is raised; on the way out Dask warns of itself
    }
    if device == "gpu":
        options |= {"rmm_pool_size": 0.4, "rmm_maximum_pool_size": 0.8}  # of its memory
    elif not workers:
        options |= {"n_workers": 1, "threads_per_worker": THREADS, "processes": False}
    return options
