"""The test part chooses nothing: other test labels change what is measured on it, and no more."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from merlin_cowclip.workflows import TrainConfig, train
from merlin_cowclip.workflows.data.prepare.pipeline import prepare
from merlin_cowclip.workflows.data.spec import DatasetSpec, Split
from merlin_cowclip.workflows.study.configuration import TuneConfig
from merlin_cowclip.workflows.study.tune import tune
from merlin_cowclip.workflows.training.checkpoint import Checkpoints
from merlin_cowclip.workflows.training.configuration import CheckpointConfig

from .conftest import NETWORK, SPEC, write_log

TRAIN = {"dense_lr": 3e-2, "embedding_lr": 3e-2, "clip": "none", **NETWORK}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Two folders that differ in the labels of the test part only; those are drawn, as valid's."""
    home = tmp_path_factory.mktemp("leakage")
    random, found = np.random.default_rng(3), []
    for part, seed in (("train", 0), ("valid", 1), ("test", 2)):
        frame = pd.read_csv(write_log(home / f"{part}.csv", 900, seed))
        if part != "train":
            frame["y"] = random.permutation(frame["y"])
        frame.to_csv(home / f"{part}.csv", index=False)
    frame["y"] = random.permutation(frame["y"])
    frame.to_csv(home / "other.csv", index=False)
    for test in ("test", "other"):
        files = {
            name: (str(home / f"{of}.csv"),) for name, of in (("valid", "valid"), ("test", test))
        }
        spec = DatasetSpec.from_dict({**SPEC.to_dict(), "split": vars(Split(**files))})
        log = [home / "train.csv"]
        found.append(prepare(spec, log, home / f"data-{test}", progress=False))
    return found


@pytest.mark.usefixtures("eager")
@pytest.mark.filterwarnings("ignore:Even though the `tf.config.exp")
def test_training_with_patience(both, tmp_path):
    config = TrainConfig(
        rule="cowclip", batch_size=64, base_batch_size=64, epochs=9, patience=1, **TRAIN
    )
    runs = [
        train(data, config, tmp_path / data.path.name, progress=False, checkpointing=UNSAVED)
        for data in both
    ]
    one, other = (run.result for run in runs)
    assert one["auc"] != other["auc"]
    names = ("valid_auc", "valid_log_loss", "train_loss")
    epochs = [[[e[n] for n in names] for e in result["epochs"]] for result in (one, other)]
    assert epochs[0] == epochs[1]
    assert (one["best_epoch"], one["checkpoint"]) == (other["best_epoch"], other["checkpoint"])
    assert one["best_epoch"] < len(one["epochs"]) < 9  # or this test shows nothing
    assert one["checkpoint"] == "best"
    steps = [Checkpoints(run.path / "checkpoints").steps() for run in runs]
    assert steps[0] == steps[1]
    for a, b in zip(*(run.model().get_weights() for run in runs), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.usefixtures("eager")
@pytest.mark.filterwarnings("ignore:Even though the `tf.config.exp")
def test_tuning(both, tmp_path):
    config = TuneConfig(batch_size=256, network=NETWORK, epochs=2)
    one, other = (
        tune(data, config, tmp_path / data.path.name, trials=3, seeds=1, progress=False)
        for data in both
    )
    assert one.train_config() == other.train_config()
    aucs = [[t["auc"] for t in tuned.result["trials"]] for tuned in (one, other)]
    assert aucs[0] == aucs[1]


UNSAVED = CheckpointConfig(saved_model=False)
