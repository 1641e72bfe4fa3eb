"""What only a GPU can show. `make test-gpu` runs it where there is one, and fails where not."""

from __future__ import annotations

import os

import pytest

DEMANDED = "COWCLIP_TEST_GPU"  # set by `make test-gpu`: then a missing GPU or package is an error


def without(what: str) -> None:
    """Skip, or fail where a GPU was asked for."""
    if os.environ.get(DEMANDED):
        pytest.fail(f"make test-gpu needs {what}: run it in one of NVIDIA's Merlin containers")
    pytest.skip(f"needs {what}: make test-gpu")


@pytest.fixture(scope="session")
def gpu() -> str:
    """The TensorFlow device to compare with the CPU."""
    import tensorflow as tf

    if not tf.config.list_physical_devices("GPU"):
        without("a GPU that TensorFlow sees")
    return "/GPU:0"


@pytest.fixture(scope="session")
def rapids() -> None:
    """cudf and dask-cuda, and a GPU for them."""
    from merlin_cowclip.workflows.data.prepare.executor import check_cluster
    from merlin_cowclip.workflows.errors import UserError

    try:
        check_cluster(0, "gpu")
    except UserError as error:
        without(f"cudf, dask-cuda and a GPU ({error})")
