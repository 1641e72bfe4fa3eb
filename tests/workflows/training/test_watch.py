"""The watch: what is not finite ends a run in time, and is told for what it is."""

import math
import re

import numpy as np
import pytest

from merlin_cowclip.plugins import Hyperparameters
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.training import watch
from merlin_cowclip.workflows.training.checkpoint import Checkpoints
from merlin_cowclip.workflows.training.configuration import TrainConfig
from merlin_cowclip.workflows.training.keeping import Keeping
from merlin_cowclip.workflows.training.rows import Reader
from merlin_cowclip.workflows.training.train import train

from .batches import TRAIN

pytestmark = pytest.mark.usefixtures("graphs_as_traced")

BASE = Hyperparameters(batch_size=32, dense_lr=1e-3, embedding_lr=1e-3, warmup_epochs=0.0)
SMALL = {"batch_size": 32, "epochs": 4, "embedding_dim": 4, "mlp": (8,), "rule": "none"}


def trained(data, out, base=BASE, **options):
    config = TrainConfig(**{**SMALL, "base": base, **options})
    keeping = Keeping(checkpoint_every=10, keep=50, saved_model=False)
    return train(data, config, out, keeping=keeping, progress=False)


@pytest.mark.extended
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_bad_data_is_told_apart(data, tmp_path, monkeypatch, value):
    read = Reader.read

    def poisoned(self, window):
        rows = read(self, window)
        if window.epoch == 1:  # a cell of the second epoch, wherever the order has it
            rows.numbers[len(rows) // 2] = value
        return rows

    monkeypatch.setattr(Reader, "read", poisoned)
    with pytest.raises(UserError) as raised:
        trained(data, tmp_path / "run")
    message = str(raised.value)
    assert "loss, gradients and weights must stay finite. Received: loss nan in update" in message
    assert re.search(r"The data is at fault: 'serial' is NaN or infinite in 1 of 32 rows", message)
    assert "diverged" not in message
    update_, epoch = re.search(r"in update ([\d,]+), epoch (\d)", message).groups()
    batch, of_epoch = re.search(r"of batch ([\d,]+) of epoch (\d)", message).groups()
    per_epoch = math.ceil(TRAIN / 32)
    assert (epoch, of_epoch) == ("2", "2")
    assert int(update_.replace(",", "")) == per_epoch + int(batch)
    last = Checkpoints(tmp_path / "run" / "checkpoints").steps()[-1]
    assert last < per_epoch + int(batch)
    assert message.endswith(f"after update {last:,} is kept")  # it would end so again


@pytest.mark.parametrize(
    ("rates", "named"),
    [
        ({"dense_lr": 1e30}, "dense_lr=1e+30, embedding_lr=0.001"),
        pytest.param({"embedding_lr": 3e38}, "embedding_lr=3e+38", marks=pytest.mark.extended),
    ],
)
def test_a_rate_that_diverges(data, tmp_path, rates, named):
    """Before the first checkpoint: nothing is left."""
    with pytest.raises(UserError) as raised:
        trained(data, tmp_path / "run", BASE.replace(clip=None, **rates))
    message = str(raised.value)
    assert "The run diverged, with " in message
    assert named in message
    assert "The data is finite: lower the" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("value", [np.nan, pytest.param(-np.inf, marks=pytest.mark.extended)])
def test_a_weight_that_broke_is_found_in_time(data, tmp_path, monkeypatch, value, graphs_rewritten):
    """Even where no loss is: a row of a table, a dense weight."""
    broken = []
    see = watch.Watch.see

    def breaking(self, step, loss):
        if step == 12:
            dense = self._optimizer.default_optimizer
            weight = next(o.variable for o in self._optimizer.owned() if o.optimizer is dense)
            weight.scatter_nd_update([[0] * len(weight.shape)], [value])
            broken.append(weight.name)
        see(self, step, loss)

    monkeypatch.setattr(watch.Watch, "see", breaking)
    with pytest.raises(UserError) as raised:
        trained(data, tmp_path / "run")
    assert "between updates" in str(raised.value) or "in update 13" in str(raised.value)
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps()[-1] == 10
