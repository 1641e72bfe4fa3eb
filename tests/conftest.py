from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


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
