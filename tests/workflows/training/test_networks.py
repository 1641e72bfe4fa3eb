"""Every network of `MODELS` by the command line, on a planted effect of pairs.

The log has Criteo's format. What a linear model cannot see in it lies in five fields: ids whose
hidden vectors' products are half of the effect.
"""

from __future__ import annotations

import contextlib
import io
import json
import re

import numpy as np
import pytest

from merlin_cowclip.models import MODELS
from merlin_cowclip.plugins import CowClipOptimizer, load_model
from merlin_cowclip.workflows.commands.main import main
from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.data.spec import CRITEO
from merlin_cowclip.workflows.data.synthetic import write_synthetic
from merlin_cowclip.workflows.training.configuration import NETWORKS
from merlin_cowclip.workflows.training.loader import Loader
from merlin_cowclip.workflows.training.runs import Run

pytestmark = [pytest.mark.extended, pytest.mark.usefixtures("quick_saves", "graphs_as_traced")]

PAIRED = ("C2", "C5", "C8", "C14", "C25")
# Fewer fields than Criteo's: a model takes as long to save as it has inputs.
TOML = f"""
name = "few"
label = "label"
categorical = {json.dumps([*PAIRED, "C9"])}
continuous = ["I1", "I2"]
header = false
separator = "\\t"
columns = {json.dumps(CRITEO.columns)}
"""
ROWS, EPOCHS, WIDTH = 20_000, 4, 8
OPTIONS = (
    *("--batch-size", "256", "--base-batch-size", "256", "--epochs", str(EPOCHS)),
    *("--dense-lr", "2e-3", "--embedding-lr", "1e-2"),
)
OF_NETWORKS = {"embedding_dim": (str(WIDTH), WIDTH), "mlp": ("32,16", [32, 16])}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The log, prepared, in `home / "data"`."""
    home = tmp_path_factory.mktemp("networks")
    write_synthetic("criteo", home / "train.txt", rows=ROWS, seed=0, cardinality=100)
    (home / "few.toml").write_text(TOML)
    log, out = str(home / "train.txt"), str(home / "data")
    assert main(["prepare", str(home / "few.toml"), log, "--out", out]) == 0
    return home


def trained(home, name: str) -> tuple[Run, str]:
    """A run in `home / name`, made once, and the last line that the command printed."""
    said = home / f"{name}.txt"
    if not said.exists():
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            arguments = [str(home / "data"), "--out", str(home / name), "--model", name]
            for option, (text, _) in OF_NETWORKS.items():
                if option in NETWORKS[name]:
                    arguments += [f"--{option.replace('_', '-')}", text]
            assert main(["train", *arguments, "--saved-model", *OPTIONS]) == 0
        said.write_text(out.getvalue().splitlines()[-1])
    return Run.open(home / name), said.read_text()


def auc_in(line: str) -> str:
    return re.match(r"test AUC (0\.\d{6}), log loss ", line).group(1)


@pytest.mark.parametrize("name", MODELS)
def test_a_network(name, home, capsys):
    """It is trained, sees what a linear model cannot, and is evaluated and loaded as it was."""
    run, line = trained(home, name)
    assert line.endswith(f": {home / name}")
    assert auc_in(line) == f"{run.result['auc']:.6f}"
    wanted = {"model": name, "batch_size": 256}
    wanted |= {k: value for k, (_, value) in OF_NETWORKS.items() if k in NETWORKS[name]}
    assert {key: run.config[key] for key in wanted} == wanted
    assert len(run.result["epochs"]) == EPOCHS
    data = PreparedData.open(home / "data")
    per_id = {"lr": 1, "dlrm": WIDTH}.get(name, WIDTH + 1)
    assert run.result["parameters"]["embedding"] == sum(data.cardinalities.values()) * per_id

    linear = trained(home, "lr")[0].result["auc"]
    best = json.loads((home / "train.txt.truth.json").read_text())["best_auc"]
    assert 0.55 < linear < best
    if name != "lr":
        assert linear + 0.05 < run.result["auc"] < best

    capsys.readouterr()
    assert main(["evaluate", str(home / name)]) == 0
    assert auc_in(capsys.readouterr().out) == auc_in(line)

    features, _ = next(iter(Loader(data, "test", batch_size=1000)))
    loaded = load_model(run.path / "model")
    assert isinstance(loaded.optimizer, CowClipOptimizer)
    predicted = loaded(features).numpy()
    assert np.std(predicted) > 0.02
    np.testing.assert_allclose(run.model()(features).numpy(), predicted, rtol=0, atol=1e-6)
