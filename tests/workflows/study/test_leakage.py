"""The test part chooses nothing: other test labels change what is measured on it, and no more."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from merlin_cowclip.workflows import TrainConfig, train
from merlin_cowclip.workflows.data.prepare.pipeline import prepare
from merlin_cowclip.workflows.data.spec import Split
from merlin_cowclip.workflows.study.configuration import TuneConfig
from merlin_cowclip.workflows.study.tune import tune
from merlin_cowclip.workflows.training.configuration import CheckpointConfig
from tests.logs import CLICKS, click_log, write_csv

ROWS = 600
NETWORK = {"model": "fm", "embedding_dim": 4}
TRAIN = {"dense_lr": 3e-2, "embedding_lr": 3e-2, "clip": "none", **NETWORK}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Two folders that differ in the labels of the test part only; those are drawn, as valid's."""
    home, random = tmp_path_factory.mktemp("leakage"), np.random.default_rng(3)
    for seed, part in enumerate(("train", "valid", "test", "other")):
        log = click_log(ROWS, seed=min(seed, 2))
        if part != "train":
            log["y"] = random.permutation(log["y"])
        write_csv(log, home / f"{part}.csv")
    folders = []
    for test in ("test", "other"):
        split = Split(valid=(str(home / "valid.csv"),), test=(str(home / f"{test}.csv"),))
        spec, log = replace(CLICKS, split=split), [home / "train.csv"]
        folders.append(prepare(spec, log, home / f"data-{test}", progress=False))
    return folders


@pytest.mark.usefixtures("eager")
@pytest.mark.filterwarnings("ignore:Even though the `tf.config.exp")
def test_training_with_patience(both, tmp_path):
    config = TrainConfig(
        rule="cowclip", batch_size=150, base_batch_size=150, epochs=9, patience=1, **TRAIN
    )
    options = {"checkpointing": CheckpointConfig(saved_model=False), "progress": False}
    runs = [train(data, config, tmp_path / data.path.name, **options) for data in both]
    one, other = (run.result for run in runs)
    assert one["auc"] != other["auc"]
    names = ("valid_auc", "valid_log_loss", "train_loss")
    epochs = [[[e[n] for n in names] for e in result["epochs"]] for result in (one, other)]
    assert epochs[0] == epochs[1]
    assert (one["best_epoch"], one["checkpoint"]) == (other["best_epoch"], other["checkpoint"])
    assert one["best_epoch"] < len(one["epochs"]) < 9  # or this test shows nothing
    assert one["checkpoint"] == "best"
    for a, b in zip(*(run.model().get_weights() for run in runs), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.usefixtures("eager")
@pytest.mark.filterwarnings("ignore:Even though the `tf.config.exp")
def test_tuning(both, tmp_path):
    config = TuneConfig(batch_size=256, network=NETWORK, epochs=2)
    one, other = (
        tune(data, config, tmp_path / data.path.name, trials=2, seeds=1, progress=False)
        for data in both
    )
    assert one.train_config() == other.train_config()
    aucs = [[t["auc"] for t in tuned.result["trials"]] for tuned in (one, other)]
    assert aucs[0] == aucs[1]
