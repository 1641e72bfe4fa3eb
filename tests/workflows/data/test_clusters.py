"""Dask's workers: the same data as without them, deaths survived or named, nothing half-written."""

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pandas as pd
import psutil
import pytest

from merlin_cowclip.workflows import machine
from merlin_cowclip.workflows.data import clusters, etl
from merlin_cowclip.workflows.data.clusters import (
    Threads,
    check_cluster,
    gpu_options,
    open_cluster,
)
from merlin_cowclip.workflows.data.etl import prepare
from merlin_cowclip.workflows.data.prepared import PreparedData
from merlin_cowclip.workflows.data.spec import CRITEO
from merlin_cowclip.workflows.data.synthetic import write_synthetic
from merlin_cowclip.workflows.errors import UserError

ROWS = 8_000
CHUNK_BYTES = 1 << 19  # of a log that has four times as many
PATIENCE = 120  # seconds for what takes a few


@pytest.fixture(scope="module", autouse=True)
def _small_chunks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(etl, "CHUNK_BYTES", (CHUNK_BYTES, etl.CHUNK_BYTES[1]))
        yield


@pytest.fixture(scope="module")
def log(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("log") / "train.txt"
    write_synthetic("criteo", path, rows=ROWS, seed=5, cardinality=2_000)
    return path


@pytest.fixture(scope="module")
def by_threads(log) -> PreparedData:
    return prepare(CRITEO, [log], log.parent / "threads", seed=3, progress=False)


@pytest.fixture(scope="module")
def workers():
    with open_cluster(2) as cluster:
        yield cluster


def same(one: PreparedData, other: PreparedData) -> None:
    for ours, theirs in ((one.train_files, other.train_files), (one.test_files, other.test_files)):
        assert [p.name for p in ours] == [p.name for p in theirs]
        for mine, yours in zip(ours, theirs, strict=True):
            pd.testing.assert_frame_equal(pd.read_parquet(mine), pd.read_parquet(yours))
    for field in one.spec.ids:
        pd.testing.assert_frame_equal(one.counts(field), other.counts(field))
    keys = ("rows", "cardinalities", "ranges", "report")
    assert {k: one.record[k] for k in keys} == {k: other.record[k] for k in keys}


# Tasks: they live at the top of the module, so that they can be sent to a worker.


def square(x: int) -> int:
    return x * x


def slow_first(x: int) -> int:
    time.sleep(0.5 if x == 0 else 0.0)
    return x


def refuses(x: int) -> int:
    if x >= 3:
        raise UserError(f"x must be below 3. Received: {x}")
    return x


@pytest.fixture(params=["threads", pytest.param("workers", marks=pytest.mark.extended)])
def cluster(request):
    return Threads(2) if request.param == "threads" else request.getfixturevalue("workers")


def test_results_in_the_order_of_the_jobs(cluster):
    assert list(cluster.map(slow_first, range(6))) == list(range(6))
    assert list(cluster.map(square, [3, 3, 4])) == [9, 9, 16]
    assert list(cluster.map(square, [])) == []
    assert cluster.number == 2


def test_an_error_is_raised_as_it_is(cluster):
    with pytest.raises(UserError, match="x must be below 3. Received: 3"):
        list(cluster.map(refuses, range(8)))
    assert list(cluster.map(square, [2])) == [4]


@pytest.mark.extended
def test_workers_give_the_same_data(log, by_threads, tmp_path, capfd):
    data = prepare(CRITEO, [log], tmp_path / "data", seed=3, workers=2)
    shown = capfd.readouterr().err
    assert "Dask dashboard: http://" in shown
    for step in ("reading", "fitting", "train", "test"):
        assert step in shown
    same(data, by_threads)
    assert [p.name for p in tmp_path.iterdir()] == ["data"]
    assert not [p.name for p in (tmp_path / "data").iterdir() if p.name.startswith(".s")]


# Deaths from outside

SCRIPT = """
    import sys
    from merlin_cowclip.workflows.data import etl
    from merlin_cowclip.workflows.data.spec import CRITEO
    from merlin_cowclip.workflows.data.etl import prepare
    from merlin_cowclip.workflows.data.fitting import fit

    def slowly(job):  # so that there is a middle
        import time
        time.sleep(0.2)
        return fit(job)

    if __name__ == "__main__":
        etl.fit = slowly
        etl.CHUNK_BYTES = (int(sys.argv[3]), etl.CHUNK_BYTES[1])
        prepare(CRITEO, [sys.argv[1]], sys.argv[2], seed=3, workers=2)
"""


@pytest.fixture
def job(log, tmp_path):
    """A running `prepare` with two workers, in the middle of its work."""
    script = tmp_path / "job.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, str(script), str(log), str(tmp_path / "out"), str(CHUNK_BYTES)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: list(tmp_path.glob(".out.partial-*/counts/C1.parquet")))
    yield process
    process.kill()
    process.wait()


def wait_for(condition) -> None:
    limit = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


def workers_of(process) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children(recursive=True)
    return [c for c in children if "spawn_main" in " ".join(c.cmdline())]


@pytest.mark.extended
def test_a_killed_worker_costs_nothing_but_time(job, by_threads, tmp_path):
    workers_of(job)[0].kill()
    _, errors = job.communicate(timeout=PATIENCE)
    assert job.returncode == 0, errors
    same(PreparedData.open(tmp_path / "out"), by_threads)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["job.py", "out"]


@pytest.mark.extended
def test_a_killed_job_leaves_nothing_that_passes_for_whole(job, log, by_threads, tmp_path):
    children = workers_of(job)
    assert len(children) == 2
    job.kill()
    job.wait()
    assert not (tmp_path / "out").exists()
    (partial,) = tmp_path.glob(".out.partial-*")
    with pytest.raises(UserError, match="not a whole prepared folder"):
        PreparedData.open(partial)
    wait_for(lambda: not any(child.is_running() for child in children))
    same(prepare(CRITEO, [log], tmp_path / "out", seed=3, progress=False), by_threads)


# Configuration


def test_gpu_workers_are_configured_as_dask_cuda_takes_it(monkeypatch):
    """Without a GPU: every option is one of LocalCUDACluster's, and the memory fits."""
    import inspect

    from dask_cuda import LocalCUDACluster
    from distributed import LocalCluster

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,3")
    monkeypatch.setattr(machine, "memory_limit", lambda: 300 << 30)
    options = gpu_options(0)
    known = {*inspect.signature(LocalCUDACluster.__init__).parameters}
    known |= {*inspect.signature(LocalCluster.__init__).parameters}
    assert set(options) <= known
    assert options["n_workers"] == 3
    assert options["threads_per_worker"] == 1
    assert 0 < options["rmm_pool_size"] <= options["rmm_maximum_pool_size"] < 1
    assert 0 < options["device_memory_limit"] < 1
    assert 3 * options["memory_limit"] <= 240 << 30
    assert gpu_options(2)["n_workers"] == 2


def test_a_missing_extra_is_named(monkeypatch, tmp_path, log):
    monkeypatch.setattr(clusters.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs the package cudf.*merlin-cowclip\[gpu\]"):
        prepare(CRITEO, [log], tmp_path / "out", device="gpu")
    assert not list(tmp_path.iterdir())


def test_more_workers_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(clusters.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    check_cluster(2, "gpu")
    with pytest.raises(UserError, match="a GPU for each worker. Received: 3 workers, 2 GPUs"):
        check_cluster(3, "gpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UserError, match="Received: 1 workers, 0 GPUs"):
        check_cluster(0, "gpu")


def test_chunks_fit_the_memory_and_keep_the_workers_busy(monkeypatch):
    from merlin_cowclip.workflows.data.etl import CHUNK_BYTES, _chunk_bytes

    monkeypatch.setattr(machine, "memory_limit", lambda: 24 << 30)
    assert _chunk_bytes(10 << 30, 2) == CHUNK_BYTES[1]
    assert _chunk_bytes(1 << 20, 2) == CHUNK_BYTES[0]
    assert _chunk_bytes(512 << 20, 4) == 32 << 20  # four to a worker
    monkeypatch.setattr(machine, "memory_limit", lambda: 2 << 30)
    sizes = [_chunk_bytes(100 << 30, n) for n in (1, 4)]
    assert sizes == sorted(sizes, reverse=True)
    assert np.all(np.array(sizes) * [1, 4] <= (2 << 30) / 10)
