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
    request,
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
    record, size = repository.record, len(frame) // CLIENTS
    new = frame.head(50).assign(item="never seen")
    five = request(frame.head(5), record)
    number = next(name for name, kind in record["inputs"].items() if kind == "TYPE_FP64")
    reordered = dict(reversed(list(five.items())))
    missing = {name: values for name, values in five.items() if name != "item"}
    wrong = {**five, number: np.array([["cheap"] * 5], object)}
    short = {**five, "item": five["item"][:, :4]}
    flat = {name: values[0] for name, values in five.items()}
    parts = [frame[i * size : (i + 1) * size] for i in range(CLIENTS)]
    with triton_server(repository.path, log) as address:
        refused = ask(address, missing, wrong, flat, short)
        answers = ask(address, request(frame, record), request(new, record), reordered)
        before = executions(address)
        with ThreadPoolExecutor(CLIENTS + 1) as clients:
            bad = clients.submit(ask, address, *[short] * 20)
            asked = [clients.submit(ask, address, *[request(part, record)] * 20) for part in parts]
            by_client = [one.result() for one in asked]
        assert executions(address) - before < 20 * CLIENTS  # Triton handed over several at once
    assert "expected" in refused[0]
    assert number in refused[1]
    assert "batch size does not match" in refused[2]  # no first dimension
    assert {*refused[3:], *bad.result()} == {refused[3]}
    assert refused[3].startswith("columns differ in their number of rows: ")
    assert "4 in 'item'" in refused[3]
    for found, wanted in zip(
        answers, (expected, repository.predict(new), expected[:5]), strict=True
    ):
        np.testing.assert_allclose(found, wanted[np.newaxis], rtol=0, atol=1e-6)
    for number_of_client, found_of_client in enumerate(by_client):
        wanted = expected[number_of_client * size : (number_of_client + 1) * size]
        for found in found_of_client:
            np.testing.assert_allclose(found, wanted[np.newaxis], rtol=0, atol=1e-6)


def test_a_prepared_run(shop, tmp_path):
    """1,000 rows with lists, unseen and missing ids, missing numbers, text beyond ASCII."""
    run, path, repository = shop
    frame = shop_frame(path)
    assert len(frame) == 1_000
    assert frame["price"].isna().any()
    assert (frame["item"] == "").any()
    expected = predicted(run, path, tmp_path)
    check(Repository.open(repository), frame, expected, tmp_path / "log")


def test_an_adopted_run(stock, of_stock, tmp_path):
    run, path = stock[0], stock[2] / "raw-test/0.parquet"
    frame = pd.read_parquet(path)
    assert frame["item"].isna().any()
    expected = predicted(run, path, tmp_path, raw=True)
    check(of_stock, frame, expected, tmp_path / "log")


def test_fields_of_every_kind(every_kind, tmp_path):
    """Shared, hashed and scaled fields, lists, and fields of times."""
    run, path, repository = every_kind
    frame, record = every_kind_frame(path), Repository.open(repository).record
    expected = predicted(run, path, tmp_path)
    with triton_server(repository, tmp_path / "log") as address:
        (answer,) = ask(address, request(frame, record))
    np.testing.assert_allclose(answer, expected[np.newaxis], rtol=0, atol=1e-6)
