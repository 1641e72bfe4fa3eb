"""Every network of `MODELS` on a planted effect of pairs.

The log has Criteo's format. What a linear model cannot see in it lies in five fields: ids whose
hidden vectors' products are half of the effect.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from merlin_cowclip.models import MODELS
from merlin_cowclip.plugins import CowClipOptimizer, load_model
from merlin_cowclip.workflows import CheckpointConfig, TrainConfig, evaluate, prepare, train
from merlin_cowclip.workflows.data.spec import CRITEO, DatasetSpec
from merlin_cowclip.workflows.data.synthetic import write_synthetic
from merlin_cowclip.workflows.training.configuration import NETWORKS
from merlin_cowclip.workflows.training.loader import Loader

pytestmark = [pytest.mark.extended, pytest.mark.usefixtures("quick_saves", "graphs_as_traced")]
# Fewer fields than Criteo's: a model takes as long to save as it has inputs.
SPEC = DatasetSpec(
    "few",
    CRITEO.label,
    categorical=("C2", "C5", "C8", "C14", "C25", "C9"),
    continuous=("I1", "I2"),
    header=False,
    separator="\t",
    columns=CRITEO.columns,
)
RATES = {"base_batch_size": 256, "dense_lr": 2e-3, "embedding_lr": 1e-2}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The run of a network, trained once, and the best AUC that there is."""
    home = tmp_path_factory.mktemp("networks")
    write_synthetic("criteo", home / "log", rows=20_000, seed=0, cardinality=100)
    best = json.loads((home / "log.truth.json").read_text())["best_auc"]
    data = prepare(SPEC, [home / "log"], home / "data", progress=False)
    runs = {}

    def run(name: str):
        if name not in runs:
            sizes = {"embedding_dim": 8, "mlp": (32, 16)}
            sizes = {key: size for key, size in sizes.items() if key in NETWORKS[name]}
            config = TrainConfig(model=name, batch_size=256, epochs=4, **RATES, **sizes)
            saved = CheckpointConfig(saved_model=True)
            out = home / name
            runs[name] = train(data, config, out, checkpointing=saved, progress=False)
        return runs[name], best

    return run


@pytest.mark.parametrize("name", MODELS)
def test_a_network(name, trained):
    """It sees what a linear model cannot, and is evaluated and loaded as it was trained."""
    (linear, _), (run, best) = trained("lr"), trained(name)
    assert 0.55 < linear.result["auc"] < best
    if name != "lr":
        assert linear.result["auc"] + 0.05 < run.result["auc"] < best
    test = Loader(run.data(), "test", batch_size=1000)
    assert evaluate(run.model(), test).auc == pytest.approx(run.result["auc"], abs=1e-6)
    features, _ = test.peek()
    loaded = load_model(run.path / "model")
    assert isinstance(loaded.optimizer, CowClipOptimizer)
    np.testing.assert_allclose(run.model()(features), loaded(features), rtol=0, atol=1e-6)
