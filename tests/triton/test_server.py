"""A real Triton server answers as `predict` writes; `make test-triton` installs it."""

from __future__ import annotations

import os
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from merlin_cowclip.workflows import Repository
from tests.workflows.serving import test_export
from tests.workflows.serving.test_export import (
    every_kind_frame,
    predicted,
    shop_frame,
)

from .server import ask, executions, triton_server

pytestmark = [
    pytest.mark.extended,
    pytest.mark.filterwarnings("ignore:Initializing an NVTabular Dataset in CPU mode"),
    pytest.mark.skipif(
        not (Path(os.environ.get("COWCLIP_TRITON", "none")) / "pytriton").is_dir(),
        reason="no Triton server: `make test-triton` downloads nvidia-pytriton from PyPI",
    ),
    pytest.mark.skipif(
        not sysconfig.get_config_var("Py_ENABLE_SHARED"),
        reason="Triton's Python backend needs a Python with a shared library (--enable-shared)",
    ),
]
shop, stock, of_stock = test_export.shop, test_export.stock, test_export.of_stock  # fixtures
every_kind = test_export.every_kind
CLIENTS = 8


def check(repository: Repository, frame: pd.DataFrame, expected: np.ndarray, log: Path) -> None:
    """A server gives raw rows the expected probabilities, joined or not, and survives errors."""
    size = len(frame) // CLIENTS
    five = repository.request(frame.head(5))
    missing = {name: values for name, values in five.items() if name != "item"}
    short = {**five, "item": five["item"][:, :4]}
    parts = [frame[i * size : (i + 1) * size] for i in range(CLIENTS)]
    with triton_server(repository.path, log) as address:
        without, bad, answer = ask(address, missing, short, repository.request(frame))
        before = executions(address)
        with ThreadPoolExecutor(CLIENTS + 1) as clients:
            errors = clients.submit(ask, address, *[short] * 20)
            asked = [
                clients.submit(ask, address, *[repository.request(part)] * 20) for part in parts
            ]
            by_client = [one.result() for one in asked]
        assert executions(address) - before < 20 * CLIENTS  # Triton handed over several at once
    assert "expected" in without
    assert bad.startswith("columns differ in their number of rows: ")
    assert {*errors.result()} == {bad}
    np.testing.assert_allclose(answer, expected[np.newaxis], rtol=0, atol=1e-6)
    for client, answers in enumerate(by_client):
        wanted = expected[client * size : (client + 1) * size]
        for answer in answers:
            np.testing.assert_allclose(answer, wanted[np.newaxis], rtol=0, atol=1e-6)


def test_a_prepared_run(shop, tmp_path):
    """1,000 rows with lists, unseen and missing ids, missing numbers, text beyond ASCII."""
    run, path, repository = shop
    expected = predicted(run, path, tmp_path)
    check(Repository.open(repository), shop_frame(path), expected, tmp_path / "log")


def test_an_adopted_run(stock, of_stock, tmp_path):
    run, path = stock
    expected = predicted(run, path, tmp_path, raw=True)
    check(of_stock, pd.read_parquet(path), expected, tmp_path / "log")


def test_fields_of_every_kind(every_kind, tmp_path):
    """Shared, hashed and scaled fields, lists, and fields of times."""
    run, path, repository = every_kind
    sent = Repository.open(repository).request(every_kind_frame(path))
    expected = predicted(run, path, tmp_path)
    with triton_server(repository, tmp_path / "log") as address:
        (answer,) = ask(address, sent)
    np.testing.assert_allclose(answer, expected[np.newaxis], rtol=0, atol=1e-6)
