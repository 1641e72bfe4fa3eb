"""Who does the work: threads of this process, or Dask's processes on CPUs or GPUs.

A task is a plain function and its arguments, reads and writes files, and may be run again: so a
worker that dies costs its tasks' time and nothing else.
"""

from __future__ import annotations

import collections
import contextlib
import importlib.util
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypeVar

from merlin_cowclip.plugins._checks import is_whole
from merlin_cowclip.workflows import machine
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.machine import gibibytes

DEVICES = ("cpu", "gpu")
THREADS = min(4, os.cpu_count() or 1)  # of one process; each holds one column, or one part
MEMORY_SHARE = 0.8  # of the machine's memory, for all workers together
DEVICE_MEMORY_SHARE = 0.8  # of a GPU's memory, for its worker
WORKER_BYTES = 512 << 20  # of memory that a worker takes at least: its libraries and a chunk
_GUARD = (
    'In a script of your own, put work with workers under if __name__ == "__main__":, for each of '
    "them runs the script's other lines"
)
START_SECONDS = 180  # that workers may take to start
DEATHS = 3  # of workers over one task, before the task is given up

T = TypeVar("T")
J = TypeVar("J")


class StoppedError(Exception):
    """Raised in a task whose result nobody waits for any more."""


_thread = threading.local()


def stop_if_unwanted() -> None:
    """For a task, between its steps: a failure elsewhere need not wait for all of them.

    Raises:
        StoppedError: in one of `Threads`, after a failure. (Dask's processes are ended instead.)
    """
    stopping: threading.Event | None = getattr(_thread, "stopping", None)
    if stopping is not None and stopping.is_set():
        raise StoppedError


class Threads:
    """Threads of this process."""

    in_process = True

    def __init__(self, number: int = THREADS) -> None:
        self.number = number
        self._stopping = threading.Event()
        self._pools: list[ThreadPoolExecutor] = []

    def map(self, function: Callable[[J], T], jobs: Iterable[J]) -> Iterator[T]:
        """Results as they come in the order of the jobs; at the first failure nothing new begins.

        Raises:
            Exception: what the first job that failed, in order, has raised.
        """
        pool = ThreadPoolExecutor(
            self.number, initializer=setattr, initargs=(_thread, "stopping", self._stopping)
        )
        self._pools.append(pool)
        try:
            yield from pool.map(function, jobs)
        except BaseException:
            self.close()
            raise
        pool.shutdown()

    def stoppable(self, advance: Callable[[int], Any]) -> Callable[[int], Any]:
        """For a task to tell how far it is: raises `StoppedError` there after a failure."""

        def tell(step: int) -> None:
            if self._stopping.is_set():
                raise StoppedError
            advance(step)

        return tell

    def close(self) -> None:
        """Begin nothing new, and wait for what has begun: then no task writes any more."""
        self._stopping.set()
        for pool in self._pools:
            pool.shutdown(wait=True, cancel_futures=True)


class Workers:
    """Processes of a Dask cluster."""

    in_process = False

    def __init__(self, client: Any) -> None:
        self._client = client

    @property
    def number(self) -> int:
        """Processes that work at once."""
        return len(self._client.ncores()) or 1

    def map(self, function: Callable[[J], T], jobs: Iterable[J]) -> Iterator[T]:
        """As `Threads.map`; a task whose worker dies is run again by another one.

        Raises:
            UserError: a task took its worker down `DEATHS` times more.
        """
        from distributed.scheduler import KilledWorker

        # pure=False: jobs of one name and arguments are not the same job to us.
        jobs = list(jobs)
        futures = collections.deque(self._client.map(function, jobs, pure=False, batch_size=1000))
        try:
            while futures:
                future = futures.popleft()
                try:
                    result = future.result()
                except KilledWorker:
                    raise UserError(
                        f"a worker must survive its work. Received: {DEATHS + 1} workers that died "
                        "over one task, most likely for want of memory. Use fewer workers, so that "
                        "each has more memory, or a machine with more"
                    ) from None
                # Done with: else Dask would do it again, should its worker die later.
                future.release()
                del future
                yield result
        finally:
            with contextlib.suppress(Exception):  # the cluster may be gone
                self._client.cancel(list(futures), force=True)


@contextlib.contextmanager
def open_cluster(
    workers: int = 0, device: Literal["cpu", "gpu"] = "cpu", *, scratch: Path | None = None
) -> Iterator[Threads | Workers]:
    """Threads of this process, or a Dask cluster of this machine for as long as it is used.

    Args:
        workers: processes; 0 for threads of this process on CPUs, and for one per GPU on GPUs.
        device: "cpu", or "gpu" for dask-cuda's workers, each with a GPU of its own.
        scratch: a folder for what workers spill.

    The address of Dask's dashboard is printed to stderr.

    Raises:
        UserError: bad arguments, a missing extra, no GPU, or fewer GPUs than workers.
    """
    check_cluster(workers, device)
    if device == "cpu" and workers == 0:
        with contextlib.closing(Threads()) as threads:
            yield threads
        return
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # a worker that starts
        raise UserError(f"workers must not open workers. Received: some that do. {_GUARD}")
    import dask
    import distributed

    options = cpu_options(workers) if device == "cpu" else gpu_options(workers)
    options["local_directory"] = None if scratch is None else str(scratch)
    settings = {
        "distributed.scheduler.allowed-failures": DEATHS,
        # The staged files are the state: there is nothing worth waiting for from a dead worker.
        "distributed.comm.timeouts.connect": "60s",
        "distributed.worker.daemon": True,  # workers end with us, however we end
    }
    with dask.config.set(settings), contextlib.ExitStack() as stack:
        kind: Any = distributed.LocalCluster
        if device == "gpu":
            import dask_cuda

            kind = dask_cuda.LocalCUDACluster
        cluster = stack.enter_context(_started(lambda: kind(**options)))
        client = stack.enter_context(distributed.Client(cluster))
        client.register_worker_plugin(DeafToInterrupts())
        if device == "gpu":
            client.register_worker_plugin(CupyFromRmm())
        print(f"Dask dashboard: {client.dashboard_link}", file=sys.stderr, flush=True)
        yield Workers(client)


def _started(make: Callable[[], T]) -> T:
    """A cluster whose workers have all started.

    Dask waits for ever for one that was killed as it started, or that cannot start.

    Raises:
        UserError: they have not, after `START_SECONDS`.
    """
    before = set(multiprocessing.active_children())
    made: list[Any] = []
    failed: list[BaseException] = []
    unwanted = threading.Event()

    def start() -> None:
        try:
            made.append(make())
        except BaseException as error:
            failed.append(error)
        if unwanted.is_set():
            for cluster in made:
                cluster.close()

    thread = threading.Thread(target=start, daemon=True)
    try:
        thread.start()
        thread.join(START_SECONDS)
    except BaseException:
        unwanted.set()
        raise
    if failed:
        raise failed[0]
    if not made:
        unwanted.set()
        for child in set(multiprocessing.active_children()) - before:
            child.kill()
        raise UserError(
            f"workers must have started after {START_SECONDS} seconds. Received: some that have "
            f"not. Use fewer, for want of memory may have ended one. {_GUARD}"
        )
    cluster: T = made[0]
    return cluster


def check_cluster(workers: int, device: str) -> None:
    """Refuse what `open_cluster` cannot open, before any work.

    Raises:
        UserError: as `open_cluster`.
    """
    if device not in DEVICES:
        raise UserError(f"device must be one of {', '.join(DEVICES)}. Received: {device!r}")
    if not is_whole(workers, 0):
        raise UserError(f"workers must be an integer of at least 0. Received: {workers!r}")
    if device == "cpu":
        _check_memory(workers)
        return
    for package in ("cudf", "dask_cuda"):
        if importlib.util.find_spec(package) is None:
            raise UserError(
                f"device 'gpu' needs the package {package}. Received: an environment without it. "
                "Use one of NVIDIA's Merlin containers, or install RAPIDS and the extra: pip "
                "install 'merlin-cowclip[gpu]'"
            )
    gpus = number_of_gpus()
    if gpus < max(workers, 1):
        raise UserError(
            f"device 'gpu' needs a GPU for each worker. Received: {workers or 1} workers, {gpus} "
            "GPUs. Use fewer workers, or device 'cpu'"
        )


def _check_memory(workers: int) -> None:
    most = max(1, int(machine.memory_limit() * MEMORY_SHARE) // WORKER_BYTES) if workers else 0
    if workers > most:
        raise UserError(
            f"workers must fit the memory, {gibibytes(WORKER_BYTES)} each at least. Received: "
            f"{workers:,} workers, which take {gibibytes(workers * WORKER_BYTES)}, on a machine "
            f"with {gibibytes(machine.memory_limit())}. Use {most} at most, one per core at best"
        )


def processes(workers: int, device: str) -> int:
    """How many columns are worked on at once."""
    return workers or (THREADS if device == "cpu" else max(1, number_of_gpus()))


class DeafToInterrupts:
    """A plugin of a worker: Ctrl-C, which a terminal sends to all processes, is ours to answer."""

    name = "deaf-to-interrupts"

    def setup(self, worker: Any) -> None:
        """Called by Dask in every worker's main thread."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)


class CupyFromRmm:
    """A plugin of a GPU's worker: CuPy's arrays come from the pool that cuDF's are in.

    Else each of the two would keep what the other one lacks.
    """

    name = "cupy-from-rmm"

    def setup(self, worker: Any) -> None:
        """Called by Dask in every worker, in those that replace dead ones as well."""
        import cupy  # type: ignore[import-not-found]
        from rmm.allocators.cupy import rmm_cupy_allocator  # type: ignore[import-not-found]

        cupy.cuda.set_allocator(rmm_cupy_allocator)


def number_of_gpus() -> int:
    """GPUs that this process may use; 0 without a driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    import pynvml

    try:
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return 0


def cpu_options(workers: int) -> dict[str, Any]:
    """Arguments of `distributed.LocalCluster`: one thread and an equal share of memory each."""
    return {
        "n_workers": workers,
        "threads_per_worker": 1,
        "processes": True,
        "memory_limit": int(machine.memory_limit() * MEMORY_SHARE / workers),
        "dashboard_address": ":0",  # any free port: two jobs do not meet
        "silence_logs": "CRITICAL",  # what fails is raised; on the way out Dask warns of itself
    }


def gpu_options(workers: int) -> dict[str, Any]:
    """Arguments of `dask_cuda.LocalCUDACluster`: one worker per GPU, with a pool of its memory.

    A worker's tasks leave nothing in Dask that it could spill. What bounds them is that they hold
    one column in the host's memory, and on the GPU a slice of its rows (`encoding.DEVICE_ROWS`)
    beside a few numbers per distinct id: so a log larger than all GPUs goes through.
    """
    workers = workers or number_of_gpus()
    return {
        "n_workers": workers,
        "threads_per_worker": 1,
        "device_memory_limit": DEVICE_MEMORY_SHARE,
        "memory_limit": int(machine.memory_limit() * MEMORY_SHARE / workers),
        "rmm_pool_size": DEVICE_MEMORY_SHARE / 2,
        "rmm_maximum_pool_size": DEVICE_MEMORY_SHARE,
        "dashboard_address": ":0",
        "silence_logs": "CRITICAL",  # what fails is raised; on the way out Dask warns of itself
    }
