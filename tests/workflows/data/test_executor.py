"""Dask's workers: results in order, errors as they are, deaths named, nothing half-written."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from merlin_cowclip.workflows.data.prepare import executor
from merlin_cowclip.workflows.data.prepare.executor import (
    check_cluster,
    cluster_options,
    connect,
    run_tasks,
)
from merlin_cowclip.workflows.data.prepare.pipeline import prepare
from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.data.spec import CRITEO
from merlin_cowclip.workflows.errors import UserError
from tests.logs import write_log

from .dask_cluster import wait_for

PREPARE = [sys.executable, "-m", "merlin_cowclip.workflows.commands.main", "prepare", "criteo"]

# Tasks: at the top of the module, so that they can be sent to a worker.


def slow_first(x: int) -> int:
    time.sleep(0.5 if x == 0 else 0.0)
    return x


def refuses(x: int) -> int:
    if x >= 3:
        time.sleep(0.3 if x == 3 else 0.0)  # the first job's error is raised
        raise UserError(f"x must be below 3. Received: {x}")
    return x


def dies(x: int) -> None:
    os._exit(x)


def run(scratch: Path, *numbers: int, task=slow_first, **options) -> list[int]:
    with connect(scratch, **options) as client:
        return run_tasks(client, "task", task, [(number,) for number in numbers], progress=False)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.extended)])
def test_results_are_in_order_and_errors_are_raised_as_they_are(tmp_path, workers, capfd):
    assert run(tmp_path, *range(6), workers=workers) == list(range(6))
    assert ("Dask dashboard: http://" in capfd.readouterr().err) == bool(workers)
    with connect(tmp_path, workers=workers) as client:
        assert run_tasks(client, "sized", slow_first, [(3,), (3,), (4,)], [1, 2, 3]) == [3, 3, 4]
        assert run_tasks(client, "none", slow_first, []) == []
        with pytest.raises(UserError, match="x must be below 3. Received: 3"):
            run_tasks(client, "refuses", refuses, [(number,) for number in range(8)])
    assert "sized" in capfd.readouterr().err


@pytest.mark.extended
def test_a_task_that_kills_its_workers(tmp_path):
    with pytest.raises(UserError, match="several Dask workers died on the same task.*fewer"):
        run(tmp_path, 1, task=dies, workers=2)


def test_a_cluster_that_cannot_work(tmp_path, monkeypatch):
    from distributed import LocalCluster

    monkeypatch.setattr(executor, "CONNECT", 1)
    monkeypatch.setattr(executor, "FIRST", 1)
    for address in ("tcp://127.0.0.1:9", "nonsense://"):
        with pytest.raises(UserError, match=f"no Dask workers at {address}.*dask scheduler"):
            run(tmp_path, scheduler=address)
    options = {"processes": False, "dashboard_address": ":0"}
    with (
        LocalCluster(n_workers=0, **options) as cluster,
        pytest.raises(UserError, match="no Dask workers at inproc://"),
    ):
        run(tmp_path, scheduler=cluster.scheduler_address)
    with LocalCluster(n_workers=1, **options) as cluster:
        address = cluster.scheduler_address
        assert run(tmp_path, 1, scheduler=address) == [1]
        with pytest.raises(UserError, match="x must be below 3. Received: 3$"):
            run(tmp_path, 3, task=refuses, scheduler=address)
        with pytest.raises(UserError, match="has no .*missing, or another version"):
            run(tmp_path / "missing", scheduler=address)
        monkeypatch.setattr(executor, "VERSION", "0")
        with pytest.raises(UserError, match="another version of merlin-cowclip"):
            run(tmp_path, scheduler=address)


@pytest.mark.extended
def test_an_interrupt_ends_the_wait_for_a_scheduler(tmp_path):
    write_log(tmp_path / "log", kind="criteo")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        command = [*PREPARE, "log", "--out", "out", "--scheduler", address]
        process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL)
        connection, _ = silent.accept()
        process.terminate()
        assert process.wait(60) == 143  # Dask itself waits two minutes
        connection.close()
    assert not (tmp_path / "out").exists()


@pytest.mark.extended
def test_a_killed_job_leaves_nothing_that_passes_for_prepared(tmp_path):
    write_log(tmp_path / "log", 8_000, kind="criteo")
    command = [*PREPARE, "log", "--out", "out", "--workers", "2"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL)
    wait_for(lambda: list(tmp_path.glob(".out.partial-*/.scratch/train/*.parquet")))
    children = psutil.Process(process.pid).children(recursive=True)
    workers = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
    assert len(workers) == 2
    process.kill()
    process.wait()
    assert not (tmp_path / "out").exists()
    (partial,) = tmp_path.glob(".out.partial-*")
    with pytest.raises(UserError, match="not a folder that prepare or adopt wrote"):
        PreparedData.open(partial)
    wait_for(lambda: not any(worker.is_running() for worker in workers))


# Configuration


def test_gpu_workers_are_configured_as_dask_cuda_takes_it():
    """Without a GPU: every option is one of LocalCUDACluster's."""
    import inspect

    from distributed import LocalCluster

    # With Dask 2024.12, dask-cuda comes with RAPIDS only.
    LocalCUDACluster = pytest.importorskip("dask_cuda").LocalCUDACluster
    options = cluster_options(0, "gpu")
    known = {*inspect.signature(LocalCUDACluster.__init__).parameters}
    assert set(options) <= known | {*inspect.signature(LocalCluster.__init__).parameters}
    assert options["n_workers"] is None  # all GPUs
    assert 0 < options["rmm_pool_size"] <= options["rmm_maximum_pool_size"] < 1
    assert cluster_options(2, "gpu")["n_workers"] == 2


def test_workers_are_bounded_by_cores_and_gpus(monkeypatch):
    monkeypatch.setattr(executor.os, "cpu_count", lambda: 3)
    check_cluster(12, "cpu")
    with pytest.raises(UserError, match="workers must be a whole number from 0 to 12. Received"):
        check_cluster(13, "cpu")
    monkeypatch.setattr(executor.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    check_cluster(2, "gpu")
    with pytest.raises(UserError, match=r"a GPU per worker \(3 workers, 2 GPUs\)"):
        check_cluster(3, "gpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UserError, match=r"1 workers, 0 GPUs"):
        check_cluster(0, "gpu")


def test_a_missing_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(executor.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs the package cudf.*docs/install.md"):
        prepare(CRITEO, [tmp_path / "log"], tmp_path / "out", device="gpu")
    with pytest.raises(ModuleNotFoundError, match="nvtabular"):  # before a row is read
        prepare(CRITEO, [tmp_path / "missing"], tmp_path / "out")
