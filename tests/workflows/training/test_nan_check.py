"""NaN detection ends a run before a checkpoint has a value that is not finite."""

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
from merlin_cowclip.workflows.training.train import train
from merlin_cowclip.workflows.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("graphs_as_traced")

BASE = Hyperparameters(batch_size=32, dense_lr=1e-3, embedding_lr=1e-3, warmup_epochs=0.0)
SMALL = {"batch_size": 32, "epochs": 4, "embedding_dim": 4, "mlp": (8,), "rule": "none"}


def trained(data, out, base=BASE):
    config = TrainConfig(**SMALL, **base_fields(base))
    checkpointing = CheckpointConfig(checkpoint_every=10, keep=50, saved_model=False)
    return train(data, config, out, checkpointing=checkpointing, progress=False)


def test_a_rate_that_diverges(data, tmp_path):
    """Before the first checkpoint: the folder stays with its logs, and says why it failed."""
    with pytest.raises(UserError) as raised:
        trained(data, tmp_path / "run", BASE.replace(clip=None, dense_lr=1e30))
    message = str(raised.value)
    assert re.search(r"Received: loss \w+ by update .*, epoch 1.*dense_lr=1e\+30", message)
    run = tmp_path / "run"
    failed = json.loads((run / "failed.json").read_text())
    assert (failed["error"], failed["step"], failed["epoch"]) == (message, 10, 1)
    assert list((run / "logs").iterdir())
    assert not Checkpoints(run / "checkpoints").steps()
    with pytest.raises(UserError, match="did not finish: loss.*Resume it: "):
        Run.open(run)


def test_a_broken_weight_is_in_no_checkpoint(data, tmp_path, monkeypatch, graphs_rewritten):
    see = Trainer.see

    def breaking(self, loss):
        if self.step == 12:
            dense = self.optimizer.default_optimizer
            weight = next(o.variable for o in self.optimizer.owned() if o.optimizer is dense)
            weight.scatter_nd_update([[0] * len(weight.shape)], [np.nan])
        see(self, loss)

    monkeypatch.setattr(Trainer, "see", breaking)
    with pytest.raises(UserError, match="by update "):
        trained(data, tmp_path / "run")
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps()[-1] == 10
