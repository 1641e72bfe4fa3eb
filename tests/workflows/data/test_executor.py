"""Dask's workers: the same data as without them, deaths survived or named, nothing half-written."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pandas as pd
import psutil
import pytest

from merlin_cowclip.workflows.data.prepare import executor, pipeline
from merlin_cowclip.workflows.data.prepare.executor import (
    check_executor,
    cluster_options,
    make_executor,
)
from merlin_cowclip.workflows.data.prepare.pipeline import prepare
from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.data.spec import CRITEO
from merlin_cowclip.workflows.data.synthetic import write_synthetic
from merlin_cowclip.workflows.errors import UserError

ROWS = 8_000
CHUNK_BYTES = 1 << 19  # of a log that has four times as many
PATIENCE = 120  # seconds for what takes a few


@pytest.fixture(scope="module", autouse=True)
def _small_chunks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "CHUNK_BYTES", (CHUNK_BYTES, pipeline.CHUNK_BYTES[1]))
        yield


@pytest.fixture(scope="module")
def log(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("log") / "train.txt"
    write_synthetic("criteo", path, rows=ROWS, seed=5, cardinality=2_000)
    return path


@pytest.fixture(scope="module")
def by_threads(log) -> PreparedData:
    return prepare(CRITEO, [log], log.parent / "threads", seed=3, progress=False)


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


def slow_first(x: int) -> int:
    time.sleep(0.5 if x == 0 else 0.0)
    return x


def refuses(x: int) -> int:
    if x >= 3:
        raise UserError(f"x must be below 3. Received: {x}")
    return x


def dies(x: int) -> None:
    os._exit(x)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.extended)])
def test_results_are_in_order_and_errors_are_raised_as_they_are(tmp_path, workers):
    with make_executor(workers, "cpu", tmp_path) as pool:
        assert list(pool.map(slow_first, range(6))) == list(range(6))
        assert list(pool.map(slow_first, [3, 3, 4])) == [3, 3, 4]
        with pytest.raises(UserError, match="x must be below 3. Received: 3"):
            list(pool.map(refuses, range(8)))
        assert list(pool.map(slow_first, [2])) == [2]


@pytest.mark.extended
def test_a_task_that_kills_its_workers(tmp_path):
    with pytest.raises(UserError, match="4 Dask workers died on the same task.*fewer workers"):
        _run_dying(tmp_path)


def _run_dying(folder: Path) -> None:
    with make_executor(2, "cpu", folder) as pool:
        list(pool.map(dies, [1]))


@pytest.mark.extended
def test_workers_give_the_same_data(log, by_threads, tmp_path, capfd):
    data = prepare(CRITEO, [log], tmp_path / "data", seed=3, workers=2)
    shown = capfd.readouterr().err
    assert "Dask dashboard: http://" in shown
    for step in ("reading", "columns", "writing"):
        assert step in shown
    same(data, by_threads)
    assert [p.name for p in tmp_path.iterdir()] == ["data"]
    assert not [p.name for p in (tmp_path / "data").iterdir() if p.name.startswith(".s")]


# Deaths from outside

SCRIPT = """
    import sys
    from merlin_cowclip.workflows.data.prepare import pipeline
    from merlin_cowclip.workflows.data.prepare.fit import fit
    from merlin_cowclip.workflows.data.spec import CRITEO

    def slowly(*job, **options):  # so that there is a middle
        import time
        time.sleep(0.2)
        return fit(*job, **options)

    if __name__ == "__main__":
        pipeline.fit = slowly
        pipeline.CHUNK_BYTES = (int(sys.argv[3]), pipeline.CHUNK_BYTES[1])
        pipeline.prepare(CRITEO, [sys.argv[1]], sys.argv[2], seed=3, workers=2)
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


def test_gpu_workers_are_configured_as_dask_cuda_takes_it():
    """Without a GPU: every option is one of LocalCUDACluster's."""
    import inspect

    from distributed import LocalCluster

    # With Dask 2024.12, dask-cuda comes with RAPIDS alone.
    LocalCUDACluster = pytest.importorskip("dask_cuda").LocalCUDACluster

    options = cluster_options(0, "gpu")
    known = {*inspect.signature(LocalCUDACluster.__init__).parameters}
    known |= {*inspect.signature(LocalCluster.__init__).parameters}
    assert set(options) <= known
    assert options["n_workers"] is None  # all GPUs
    assert options["threads_per_worker"] == 1
    assert 0 < options["rmm_pool_size"] <= options["rmm_maximum_pool_size"] < 1
    assert cluster_options(2, "gpu")["n_workers"] == 2


@pytest.mark.parametrize("engine", ["arrow", "nvtabular"])
def test_workers_are_bounded_by_the_cores(monkeypatch, log, tmp_path, engine):
    monkeypatch.setattr(executor.os, "cpu_count", lambda: 3)
    check_executor(12, "cpu")
    message = "workers must be a whole number from 0 to 12. Received: 13"
    with pytest.raises(UserError, match=message):
        check_executor(13, "cpu")
    with pytest.raises(UserError, match=message):
        prepare(CRITEO, [log], tmp_path / "out", workers=13, engine=engine)
    assert not list(tmp_path.iterdir())


def test_a_missing_extra_is_named(monkeypatch, tmp_path, log):
    monkeypatch.setattr(executor.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs the package cudf.*docs/install.md"):
        prepare(CRITEO, [log], tmp_path / "out", device="gpu")
    with pytest.raises(ModuleNotFoundError, match="nvtabular"):  # before a row is read
        prepare(CRITEO, [tmp_path / "missing"], tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_more_workers_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(executor.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    check_executor(2, "gpu")
    with pytest.raises(UserError, match=r"a GPU per worker \(3 workers, 2 GPUs\)"):
        check_executor(3, "gpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UserError, match=r"1 workers, 0 GPUs"):
        check_executor(0, "gpu")
