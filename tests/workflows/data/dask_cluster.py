"""A Dask cluster that somebody else started: `dask scheduler` and two `dask worker` processes."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

PATIENCE = 120  # seconds for what takes a few
# Loaded by the workers: each group-by of NVTabular's fit tells its process, and takes its time.
PRELOAD = """
import os, time
from pathlib import Path
from nvtabular.ops import categorify

def _top_level_groupby(*args, once=categorify._top_level_groupby, **kwargs):
    if Path({home!r}, "slow").exists():
        Path({home!r}, f"fit-{{os.getpid()}}").touch()
        time.sleep(0.5)
    return once(*args, **kwargs)

categorify._top_level_groupby = _top_level_groupby
"""


class Cluster(NamedTuple):
    address: str
    home: Path
    workers: list[subprocess.Popen]


def wait_for(condition: Callable[[], object]) -> None:
    limit = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


@contextlib.contextmanager
def running_cluster(home: Path) -> Iterator[Cluster]:
    """Without nannies, which would start a killed worker again."""
    (home / "preload.py").write_text(PRELOAD.format(home=str(home)))
    file = home / "scheduler.json"
    common = ["--scheduler-file", str(file), "--no-dashboard"]
    worker = [*common, "--no-nanny", "--nthreads", "1", "--preload", str(home / "preload.py")]
    with contextlib.ExitStack() as stack:

        def start(*command: str) -> subprocess.Popen:
            dask = [sys.executable, "-m", "dask", *command]
            environment = {**os.environ, "DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": "10s"}
            process = subprocess.Popen(
                dask, cwd=home, env=environment, stderr=(home / "log").open("a")
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        start("scheduler", "--port", "0", *common)
        workers = [start("worker", *worker) for _ in range(2)]
        wait_for(file.exists)
        wait_for(lambda: file.read_text().strip().endswith("}"))
        yield Cluster(json.loads(file.read_text())["address"], home, workers)
