"""`--ema` and `--micro-batch` of runs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from merlin_cowclip.plugins.optimizers.state import optimizer_of
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.training.configuration import TrainConfig
from merlin_cowclip.workflows.training.evaluation import evaluate
from merlin_cowclip.workflows.training.loader import Loader
from merlin_cowclip.workflows.training.train import train
from merlin_cowclip.workflows.training.trainer import Trainer
from tests.kills import differences, train_in_two

pytestmark = pytest.mark.usefixtures("graphs_as_traced")
SMALL = {
    "model": "lr",
    "batch_size": 256,
    "base_batch_size": 256,
    "epochs": 2,
    "rule": "none",
    "update": "lazy",
}


def test_a_run_is_measured_and_used_with_its_averages(data, tmp_path, monkeypatch):
    end, at_end = Trainer.finish, []

    def finish(trainer):
        raw = [v.numpy() for v in trainer.model.trainable_variables]
        with trainer.optimizer.averages():
            averages = [v.numpy() for v in trainer.model.trainable_variables]
        at_end.extend(zip(raw, averages, strict=True))
        return end(trainer)

    monkeypatch.setattr(Trainer, "finish", finish)
    config = TrainConfig(**SMALL, embedding_lr=0.1, dense_lr=0.1, ema=0.9)
    run = train(data, config, tmp_path / "run", progress=False)
    for weight, (raw, average) in zip(run.model().trainable_variables, at_end, strict=True):
        np.testing.assert_array_equal(weight, average)
        assert np.abs(raw - average).max() > 1e-3
    quality = evaluate(run.model(), Loader(data, "test", batch_size=1000))
    assert quality.auc == pytest.approx(run.result["auc"], abs=1e-7)


def test_a_run_with_averages_resumes_to_the_bit(data, tmp_path):
    config = TrainConfig(**SMALL, ema=0.9, micro_batch=100)
    reference = train(data, config, tmp_path / "reference", progress=False)

    def look(trainer):
        assert optimizer_of(trainer.model).accumulate == 3

    train_in_two(data, config, tmp_path / "run", 5, look)
    assert differences(tmp_path / "run", reference.path) == []


def test_the_average_is_over_the_same_samples_at_another_batch_size():
    base = TrainConfig(**SMALL, ema=0.9)
    config = dataclasses.replace(base, batch_size=1024, rule="sqrt")
    assert config.scaled_ema == pytest.approx(0.9**4)


@pytest.mark.parametrize("wrong", [{"ema": 1.0}, {"ema": 0.9, "update": "deferred"}])
def test_averages_are_refused(wrong):
    with pytest.raises(UserError, match="ema must be below 1, and not with deferred updates"):
        TrainConfig(**{**SMALL, **wrong})
