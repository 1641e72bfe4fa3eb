from __future__ import annotations

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


def pytest_collection_finish() -> None:
    """Collect garbage less often: it took a fifth of the time of tracing and saving models."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 10, 10)


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


@pytest.fixture(scope="module")
def interpreter() -> Iterator[WarmInterpreter]:
    """Starts programs that need TensorFlow."""
    interpreter = WarmInterpreter()
    yield interpreter
    interpreter.close()


@pytest.fixture(scope="module")
def quick_saves() -> Iterator[None]:
    """For a module whose models are saved as by a user, but without Merlin's look at its save."""
    from tests import saves

    with saves.quick_saves(traces=True):
        yield
