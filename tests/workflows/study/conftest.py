"""One prepared folder for all tests of studies, and trials that cost nothing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.engine import Engine

from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.workflows.data.prepare.pipeline import prepare
from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.data.spec import Split
from merlin_cowclip.workflows.errors import NotFiniteError
from merlin_cowclip.workflows.study import tune
from merlin_cowclip.workflows.study.configuration import TuneConfig
from tests.logs import CLICKS, write_log

SPEC = dataclasses.replace(CLICKS, split=Split("random", 0.25))
NETWORK = {"model": "deepfm", "embedding_dim": 4, "mlp": (8,)}


@pytest.fixture(scope="session", autouse=True)
def quick_database() -> Iterator[None]:
    """A database that does not wait for the disk: processes are killed here, no machines."""

    def quickly(connection: Any, _: Any) -> None:
        connection.execute("PRAGMA synchronous = OFF")

    event.listen(Engine, "connect", quickly)
    yield
    event.remove(Engine, "connect", quickly)


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> PreparedData:
    home = tmp_path_factory.mktemp("tuning")
    return prepare(SPEC, [write_log(home / "log.csv", 1_800)], home / "data", progress=False)


@pytest.fixture
def config() -> TuneConfig:
    return TuneConfig(batch_size=256, network=NETWORK, base={}, epochs=4)


def auc_of(config, epoch: int) -> float:
    """A landscape whose best values are known: dense η 3e-3, embedding η 1e-2, epoch 3."""
    hp = config.hyperparameters
    far = math.log10(hp.dense_lr / 3e-3) ** 2 + math.log10(hp.embedding_lr / 1e-2) ** 2
    return 0.9 - 0.02 * far - 0.01 * abs(epoch - 3) + 1e-5 * (config.seed % 10)


RATES = ("dense_lr", "embedding_lr", "l2", "ema")  # two trials differ in one of them


class Fake:
    """Trials without a network, with the AUC after each epoch that `curve` gives.

    None in its place diverges. The default is `auc_of`.
    """

    def __init__(self) -> None:
        self.configs: list = []  # that were begun
        self.searched: list = []  # those of trials, by number - 1
        self.repeats: dict[int, list[float | None]] = {}

    def curve(self, config) -> list[float | None]:
        return [auc_of(config, epoch) for epoch in range(1, config.epochs + 1)]

    def advance(self) -> None:
        """Called after each epoch."""

    def script(self, search, repeats) -> None:
        """One epoch a trial: AUC by its number (else 0.7), and those of its repeats by seed."""
        self.repeats = repeats

        def curve(config):
            (number,) = (
                number
                for number, one in enumerate(self.searched, 1)
                if all(getattr(one, name) == getattr(config, name) for name in RATES)
            )
            if config.seed == self.searched[0].seed:
                return [search.get(number, 0.7), 0.1]
            return [repeats.get(number, [0.7] * 3)[config.seed - self.searched[0].seed - 1]]

        self.curve = curve

    def epochs(self, config, stopping, advance=lambda: None):
        self.configs.append(config)
        self.stopping = stopping
        if config.seed == self.configs[0].seed and config not in self.searched:
            self.searched.append(config)
        for epoch, auc in enumerate(self.curve(config), 1):
            if stopping.asked:
                raise KeyboardInterrupt
            advance()
            self.advance()
            if auc is None:
                raise NotFiniteError("loss must stay finite. Received: loss nan")
            if epoch <= config.epochs:
                yield {"auc": auc, "epoch": epoch}


@pytest.fixture
def fake(monkeypatch) -> Fake:
    fake = Fake()
    monkeypatch.setattr(tune, "trial_epochs", lambda _, *a: fake.epochs(*a))
    return fake


@pytest.fixture
def eager() -> Iterator[None]:
    """Without graphs, whose tracing takes most of the time of a small run."""
    tf.config.run_functions_eagerly(True)
    yield
    tf.config.run_functions_eagerly(False)
