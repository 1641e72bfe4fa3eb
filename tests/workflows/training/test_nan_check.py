"""The watch: what is not finite ends a run in time, and is told for what it is."""

import datetime
import json
import re

import numpy as np
import pytest

from merlin_cowclip.plugins import Hyperparameters
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.training.checkpoint import Checkpoints
from merlin_cowclip.workflows.training.configuration import (
    CheckpointConfig,
    TrainConfig,
    base_fields,
)
from merlin_cowclip.workflows.training.runs import Run
from merlin_cowclip.workflows.training.train import resume, train
from merlin_cowclip.workflows.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("graphs_as_traced")

BASE = Hyperparameters(batch_size=32, dense_lr=1e-3, embedding_lr=1e-3, warmup_epochs=0.0)
SMALL = {"batch_size": 32, "epochs": 4, "embedding_dim": 4, "mlp": (8,), "rule": "none"}


def trained(data, out, base=BASE, **options):
    config = TrainConfig(**{**SMALL, **base_fields(base), **options})
    checkpointing = CheckpointConfig(checkpoint_every=10, keep=50, saved_model=False)
    return train(data, config, out, checkpointing=checkpointing, progress=False)


@pytest.mark.parametrize(
    ("rates", "named"),
    [
        ({"dense_lr": 1e30}, "dense_lr=1e+30, embedding_lr=0.001"),
        pytest.param({"embedding_lr": 3e38}, "embedding_lr=3e+38", marks=pytest.mark.extended),
    ],
)
def test_a_rate_that_diverges(data, tmp_path, rates, named):
    """Before the first checkpoint: the folder stays with its logs, and says why it failed."""
    with pytest.raises(UserError) as raised:
        trained(data, tmp_path / "run", BASE.replace(clip=None, **rates))
    message = str(raised.value)
    assert re.search(r"Received: loss \w+ by update .*, epoch \d", message)
    assert "The run diverged, with " in message
    assert named in message
    run = tmp_path / "run"
    failed = json.loads((run / "failed.json").read_text())
    assert failed["error"] == message
    assert (failed["step"], failed["epoch"]) == (10, 1)  # before the first checkpoint
    when = datetime.datetime.strptime(failed["time"], "%Y-%m-%dT%H:%M:%S%z")
    assert abs(datetime.datetime.now(datetime.timezone.utc) - when).total_seconds() < 600
    assert list((run / "logs").iterdir())
    assert not Checkpoints(run / "checkpoints").steps()
    with pytest.raises(UserError) as raised:
        Run.open(run)
    assert str(raised.value).startswith(f"{run} failed: {message.rstrip('.')}. Train again, or: ")


def test_a_failed_run_is_resumed(data, tmp_path, monkeypatch):
    """Here from its beginning; the record of the failure is gone then."""
    see, run = Trainer.see, tmp_path / "run"

    def failing(self, loss):
        see(self, loss)
        if self.step == 5:
            raise RuntimeError("broken")

    monkeypatch.setattr(Trainer, "see", failing)
    options = {"model": "lr", "embedding_dim": None, "mlp": None, "epochs": 1, "batch_size": 512}
    with pytest.raises(RuntimeError, match="broken"):
        trained(data, run, **options)
    failed = json.loads((run / "failed.json").read_text())
    assert (failed["error"], failed["step"], failed["epoch"]) == ("broken", 5, 1)
    monkeypatch.undo()
    assert len(resume(run, progress=False).result["epochs"]) == 1
    assert not (run / "failed.json").exists()


@pytest.mark.parametrize("value", [np.nan, pytest.param(-np.inf, marks=pytest.mark.extended)])
def test_a_weight_that_broke_is_found_in_time(data, tmp_path, monkeypatch, value, graphs_rewritten):
    """Even where no loss is: a row of a table, a dense weight."""
    broken = []
    see = Trainer.see

    def breaking(self, loss):
        if self.step == 12:
            dense = self.optimizer.default_optimizer
            weight = next(o.variable for o in self.optimizer.owned() if o.optimizer is dense)
            weight.scatter_nd_update([[0] * len(weight.shape)], [value])
            broken.append(weight.name)
        see(self, loss)

    monkeypatch.setattr(Trainer, "see", breaking)
    with pytest.raises(UserError) as raised:
        trained(data, tmp_path / "run")
    assert "by update " in str(raised.value)
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps()[-1] == 10
