from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.warm import WarmInterpreter

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# Ignored where pytest is started with `&` in a script, and what it starts would inherit that; what
# Python handles, programs it starts have as the system's default.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


LONGEST = (  # files that take half a minute and more, the longest first
    "workflows/training/test_kills.py",
    "plugins/merlin_models/test_families.py",
    "docs/test_commands.py",
    "docs/test_python.py",
    "plugins/test_deferred.py",
    "notebooks/test_study.py",
    "models/test_networks.py",
    "plugins/test_saving.py",
    "plugins/test_optimizer.py",
    "workflows/training/test_stopping.py",
    "workflows/training/test_prediction.py",
    "docs/test_site.py",
    "workflows/training/test_checkpoints.py",
    "workflows/training/test_trouble.py",
    "workflows/training/test_networks.py",
    "workflows/commands/test_cli.py",
    "workflows/serving/test_export.py",
    "plugins/test_statistics.py",
    "workflows/study/test_processes.py",
    "workflows/study/test_sweep.py",
    "notebooks/test_plugging_in.py",
    "workflows/training/test_training.py",
    "workflows/training/test_watch.py",
    "models/test_embeddings.py",
    "notebooks/test_train.py",
    "bad_input/test_command_line.py",
    "workflows/data/test_clusters.py",
    "workflows/data/test_adopt.py",
    "workflows/training/test_interpreter_end.py",
)


ARITHMETIC = (  # files about TensorFlow's arithmetic and graphs; all sets have this version
    "models/test_gpu_residency_forward.py",
    "models/test_networks.py",
    "plugins/test_absent.py",
    "plugins/test_catching_up.py",
    "plugins/test_clipping.py",
    "plugins/test_counting.py",
    "plugins/test_deferred.py",
    "plugins/test_deferred_saved.py",
    "plugins/test_deferred_tables.py",
    "plugins/test_gpu_residency.py",
    "plugins/test_merlin_tables.py",
    "plugins/test_optimizer.py",
    "plugins/test_row_sums.py",
    "plugins/test_saving.py",
    "plugins/test_sok.py",
    "plugins/test_statistics.py",
    "workflows/training/test_checkpoints.py",
    "workflows/training/test_follow_epochs.py",
)


# NVIDIA's containers, where test-gpu runs, have no pytest-xdist.
@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """A process more than cores: a quarter of the time they wait for programs that they started."""
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first: processes share whole ones, and none should end long after all."""
    home = Path(__file__).parent
    place = {home / name: number for number, name in enumerate(LONGEST)}
    arithmetic = {home / name for name in ARITHMETIC}
    gone = [path for path in (*place, *arithmetic) if not path.exists()]
    assert not gone, f"LONGEST or ARITHMETIC names files that are gone: {gone}"
    items.sort(key=lambda item: place.get(item.path, len(place)))
    for item in items:
        if item.path in arithmetic:
            item.add_marker(pytest.mark.arithmetic)


def pytest_collection_finish() -> None:
    """Collect garbage less often: it took a fifth of the time of tracing and saving models."""
    gc.collect()
    gc.set_threshold(100_000, 10, 10)


@pytest.fixture(scope="module", autouse=True)
def no_garbage_of_before() -> None:
    """What a module leaves stays: a later test took a minute to free the graphs of hundreds."""
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Nor does the interpreter's end free them, which the others would wait for."""
    gc.freeze()


@pytest.fixture(scope="session")
def golden() -> dict:
    import numpy as np

    with np.load(Path(__file__).parent / "data" / "cowclip_reference.npz") as file:
        return dict(file)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder with the raw Criteo and Avazu rows, which may not be redistributed."""
    folder = os.environ.get("COWCLIP_REAL_DATA")
    if not folder:
        pytest.skip(
            "COWCLIP_REAL_DATA names no folder with criteo_train.txt.gz, avazu_train.csv.gz"
        )
    return Path(folder)


@pytest.fixture(scope="session")
def interpreter() -> Iterator[WarmInterpreter]:
    """Starts programs that need TensorFlow."""
    interpreter = WarmInterpreter()
    yield interpreter
    interpreter.close()


@pytest.fixture(scope="module")
def quick_saves() -> Iterator[None]:
    """For a module whose models are saved by their configuration, without the layers' traces."""
    from tests import saves

    with saves.quick_saves():
        yield


@pytest.fixture(scope="module")
def graphs_as_traced() -> Iterator[None]:
    """For a module of many small models: TensorFlow runs graphs as they were traced.

    What it makes of one before its first run takes a fifth of the time to the end of that run, and
    half of it where rows catch up, in loops and branches. As users have it run the notebooks, the
    demo, the ranks, and a test of most of these modules, by `graphs_rewritten`.
    """
    with _rewriting(False):
        yield


@pytest.fixture
def graphs_rewritten() -> Iterator[None]:
    """Within a module of `graphs_as_traced`, as for users."""
    with _rewriting(True):
        yield


@contextlib.contextmanager
def _rewriting(wanted: bool) -> Iterator[None]:
    import tensorflow as tf

    was = tf.config.optimizer.get_experimental_options().get("disable_meta_optimizer", False)
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": not wanted})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": was})
