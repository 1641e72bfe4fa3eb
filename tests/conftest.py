from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

# NumPy's sorts for newer processors put equal values in another order, and NVTabular orders ids of
# equal counts by them; read when NumPy is imported.
os.environ.setdefault(
    "NPY_DISABLE_CPU_FEATURES",
    "AVX2 FMA3 AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL",
)

from merlin_cowclip.plugins._compat import set_environment
from tests.warm import WarmInterpreter

set_environment()  # before tests import TensorFlow
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # as `import_tensorflow` does
# Ignored where pytest is started with `&` in a script, and what it starts would inherit that; what
# Python handles, programs it starts have as the system's default.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


TIERS = {  # every test has one; CONTRIBUTING.md says which command runs which
    "quick": "make test; the tier without a marker, but in tests/ranks and tests/gpu",
    "ranks": "make test-ranks: needs Horovod",
    "extended": "make test-all, and a quarter of them in each CI run",
    "gpu": "make test-gpu",
}
OF_FOLDER = {Path(__file__).parent / tier: tier for tier in ("ranks", "gpu")}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quarter",
        type=int,
        choices=range(4),
        help="run only this quarter of the extended tests",
    )


def pytest_configure(config: pytest.Config) -> None:
    for tier, command in TIERS.items():
        config.addinivalue_line("markers", f"{tier}: {command}")


# NVIDIA's containers, where test-gpu runs, have no pytest-xdist.
@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """A process more than cores: a quarter of the time they wait for programs that they started."""
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give each test its tier, and leave out the extended tests of other quarters."""
    for item in items:
        tiers = [tier for tier in TIERS if item.get_closest_marker(tier)]
        if not tiers:
            item.add_marker(OF_FOLDER.get(item.path.parent, "quick"))
        assert len(tiers) < 2, f"{item.nodeid} has the tiers {tiers}"
    quarter = config.getoption("quarter")
    if quarter is not None:
        extended = [item for item in items if item.get_closest_marker("extended")]
        sizes = Counter(item.path for item in extended)
        # Tests of small files stay together, for the fixtures that they share.
        units = [item.nodeid if sizes[item.path] > 20 else item.path for item in extended]
        place = {unit: number for number, unit in enumerate(dict.fromkeys(units))}
        pairs = zip(extended, units, strict=True)
        others = {item for item, unit in pairs if place[unit] % 4 != quarter}
        config.hook.pytest_deselected(items=list(others))
        items[:] = [item for item in items if item not in others]


def pytest_collection_finish() -> None:
    """Collect garbage less often: it took a fifth of the time."""
    gc.collect()
    gc.set_threshold(100_000, 10, 10)


@pytest.fixture(scope="module", autouse=True)
def no_garbage_of_before() -> None:
    """Keep the garbage of a module: a later test took a minute to free its graphs."""
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Do not free it at the end either."""
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
    """For a module of many small models: TensorFlow does not rewrite graphs, half of the time."""
    with _rewriting(False):
        yield


@pytest.fixture
def graphs_rewritten() -> Iterator[None]:
    """Within a module of `graphs_as_traced`: as for users."""
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
