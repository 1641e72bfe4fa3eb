"""Dask's workers: the same data as without them, deaths survived or named, nothing half-written."""

import gzip
import os
import signal
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
    cpu_options,
    gpu_options,
    open_cluster,
)
from merlin_cowclip.workflows.data.datasets import CRITEO
from merlin_cowclip.workflows.data.etl import prepare
from merlin_cowclip.workflows.data.prepared import PreparedData
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


def dies_once(path: Path) -> str:
    if not path.exists():
        path.touch()
        os._exit(9)
    return "done by another worker"


def dies(_: int) -> None:
    os._exit(9)


def refuses(x: int) -> int:
    if x >= 3:
        raise UserError(f"x must be below 3. Received: {x}")
    return x


@pytest.fixture(params=["threads", "workers"])
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


def test_a_task_whose_worker_died_is_done_again(workers, tmp_path):
    flags = [tmp_path / str(i) for i in range(3)]
    assert list(workers.map(dies_once, flags)) == ["done by another worker"] * 3


def test_a_task_that_kills_every_worker_is_given_up():
    message = "4 workers that died over one task.*fewer workers"
    with open_cluster(1) as cluster, pytest.raises(UserError, match=message):
        list(cluster.map(dies, [0]))


def test_workers_give_the_same_data(log, by_threads, tmp_path, capfd):
    data = prepare(CRITEO, [log], tmp_path / "data", seed=3, workers=2)
    shown = capfd.readouterr().err
    assert "Dask dashboard: http://" in shown
    for step in ("reading", "fitting", "train", "test"):
        assert step in shown
    same(data, by_threads)
    assert [p.name for p in tmp_path.iterdir()] == ["data"]
    assert not [p.name for p in (tmp_path / "data").iterdir() if p.name.startswith(".s")]


def how_it_takes_interrupts(_: int) -> bool:
    return signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_workers_leave_interrupts_to_us(workers):
    """A terminal sends Ctrl-C to all of them: each would show its own traceback."""
    assert list(workers.map(how_it_takes_interrupts, range(8))) == [True] * 8


def test_a_bad_row_is_named_by_workers_too(log, tmp_path):
    lines = log.read_text().splitlines()
    lines[6_000] = "2" + lines[6_000][1:]
    (tmp_path / "bad.txt").write_text("\n".join(lines))
    with pytest.raises(UserError, match="label must be 0 or 1. Received: '2' in .*, line 6001"):
        prepare(CRITEO, [tmp_path / "bad.txt"], tmp_path / "out", workers=2, progress=False)
    assert [p.name for p in tmp_path.iterdir()] == ["bad.txt"]


# Deaths from outside

SCRIPT = """
    import sys
    from merlin_cowclip.workflows.data import etl
    from merlin_cowclip.workflows.data.datasets import CRITEO
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


@pytest.mark.slow
def test_a_killed_worker_costs_nothing_but_time(job, by_threads, tmp_path):
    workers_of(job)[0].kill()
    _, errors = job.communicate(timeout=PATIENCE)
    assert job.returncode == 0, errors
    same(PreparedData.open(tmp_path / "out"), by_threads)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["job.py", "out"]


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


def test_an_interrupted_job_leaves_nothing(job, tmp_path):
    job.send_signal(signal.SIGINT)
    job.communicate(timeout=PATIENCE)
    assert job.returncode != 0
    assert [p.name for p in tmp_path.iterdir()] == ["job.py"]


# Within this process


@pytest.fixture
def interrupted():
    """What Ctrl-C and SIGTERM come to: an exception in the main thread, after a moment."""

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", ["log.txt", "log.txt.gz"])
def test_an_interruption_does_not_wait_for_a_log_to_end(log, tmp_path, monkeypatch, name, request):
    """One gzipped log is one task, and may take hours; this one would take for ever."""
    from merlin_cowclip.workflows.data.csv_logs import CsvLog

    first = CsvLog.batches

    def endless(self, chunk, advance, replaced):
        while True:
            yield from first(self, chunk, advance, replaced)

    monkeypatch.setattr(CsvLog, "batches", endless)
    text = log.read_bytes()
    (tmp_path / name).write_bytes(gzip.compress(text, 1) if name.endswith("gz") else text)
    request.getfixturevalue("interrupted")
    with pytest.raises(KeyboardInterrupt):
        prepare(CRITEO, [tmp_path / name], tmp_path / "out", progress=False)
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_no_task_goes_on_when_its_result_is_not_wanted_any_more():
    """An interruption may come while results are taken, not only while they are waited for."""
    begun, ended = [], []

    def work(x: int) -> int:
        begun.append(x)
        time.sleep(0.05 * x)
        ended.append(x)
        return x

    kept = []  # as a traceback keeps what it leads through
    with pytest.raises(KeyboardInterrupt), open_cluster() as cluster:  # noqa: PT012
        kept.append(cluster.map(work, range(1, 40)))
        next(kept[0])
        raise KeyboardInterrupt
    assert 0 < len(ended) == len(begun) < 39


# Configuration


UNGUARDED = """
from merlin_cowclip.workflows.data import clusters

clusters.START_SECONDS = 15  # in which a worker comes to these lines on a busy machine, too
with clusters.open_cluster(2) as workers:
    print(list(workers.map(abs, [1])))
"""


def test_a_script_that_its_workers_run_again_ends(tmp_path):
    """Dask waits for ever for workers that cannot start, or were killed as they did."""
    (tmp_path / "script.py").write_text(UNGUARDED)
    ran = subprocess.run(
        [sys.executable, tmp_path / "script.py"], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 1
    assert "UserError: workers must not open workers" in ran.stderr
    assert "UserError: workers must have started after 15 seconds" in ran.stderr
    assert ran.stderr.count('put work with workers under if __name__ == "__main__"') >= 2


def test_more_workers_than_memory_are_refused(monkeypatch):
    monkeypatch.setattr(machine, "memory_limit", lambda: 20 << 30)
    check_cluster(32, "cpu")
    message = "0.5 GiB each.*33 workers, which take 16.5 GiB, .* with 20.0 GiB. Use 32 at most"
    with pytest.raises(UserError, match=message):
        check_cluster(33, "cpu")
    monkeypatch.setattr(machine, "memory_limit", lambda: 1 << 20)
    check_cluster(1, "cpu")
    check_cluster(0, "cpu")


def test_cupy_takes_its_memory_from_rmms_pool(monkeypatch):
    """With stand-ins: neither is to be had without a GPU. Dask takes it for a worker's plugin."""
    import types

    from distributed.protocol.pickle import dumps, loads

    taken = []
    cupy = types.SimpleNamespace(cuda=types.SimpleNamespace(set_allocator=taken.append))
    rmm = types.SimpleNamespace(rmm_cupy_allocator="the pool's")
    for name, module in (("cupy", cupy), ("rmm", rmm), ("rmm.allocators", rmm)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "rmm.allocators.cupy", rmm)
    loads(dumps(clusters.CupyFromRmm())).setup(worker=None)
    assert taken == ["the pool's"]


def test_memory_of_cpu_workers(monkeypatch):
    monkeypatch.setattr(machine, "memory_limit", lambda: 100 << 30)
    options = cpu_options(4)
    assert options["n_workers"] == 4
    assert options["threads_per_worker"] == 1
    assert 4 * options["memory_limit"] <= 80 << 30
    assert options["dashboard_address"] == ":0"


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


def test_gpus_that_are_visible(monkeypatch):
    for given, number in (("", 0), ("-1", 0), ("2", 1), ("0,1", 2), ("GPU-a, GPU-b", 2)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
        assert clusters.number_of_gpus() == number
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert clusters.number_of_gpus() >= 0


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


@pytest.mark.parametrize(("workers", "device"), [(-1, "cpu"), (True, "cpu"), (0.5, "cpu")])
def test_bad_numbers_of_workers(workers, device):
    with pytest.raises(UserError, match="workers must be an integer of at least 0"):
        check_cluster(workers, device)


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


# What a worker that dies leaves, and what is done again


def counted(path: Path) -> int:
    with path.open("a") as file:
        file.write("x")
    return os.getpid()


def test_what_was_taken_is_not_done_again(tmp_path):
    """A worker that dies later takes its finished results along; nobody wants them any more."""
    paths = [tmp_path / str(i) for i in range(6)]
    with open_cluster(2) as cluster:
        results = cluster.map(counted, [*paths, *(tmp_path / f"later{i}" for i in range(40))])
        pids = [next(results) for _ in paths]
        time.sleep(0.5)
        psutil.Process(pids[0]).kill()
        assert len(list(results)) == 40
    assert [path.read_text() for path in paths] == ["x"] * 6


def test_a_chunk_staged_twice_is_the_same_chunk(log, tmp_path):
    from merlin_cowclip.workflows.data.csv_logs import CsvLog
    from merlin_cowclip.workflows.data.staging import Staging

    raw, staging = CsvLog(CRITEO, log), Staging(tmp_path, CRITEO)
    (chunk,) = raw.chunks(1 << 30)
    once = staging.stage(0, raw, chunk)
    before = staging.numbers("I1", np.float64)
    assert staging.stage(0, raw, chunk) == once
    np.testing.assert_array_equal(staging.numbers("I1", np.float64), before)
    assert [p.name for p in tmp_path.iterdir()] == ["000000"]
