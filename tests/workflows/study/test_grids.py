"""Grids as files: the options of their runs, what they refuse, and the paper's."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from merlin_cowclip.plugins.scaling import SCALING_RULES, K
from merlin_cowclip.workflows.commands.studying import configurations, read_grid
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.training.configuration import TrainConfig

CRITEO = SimpleNamespace(spec=SimpleNamespace(name="criteo"), path=Path("data"))
PAPER = Path(__file__).parents[3] / "benchmarks" / "paper"
RECORDED = Path(__file__).with_name("paper-runs.npz")
"""Every run of each study, as the version had them that wrote the studies in Python."""
STUDIES = {
    "scaling-rules": "table2",
    "networks": "table4",
    "control": "table1",
    "clipping": "table6",
    "ablation": "table12",
    "time": "table5",
    "curves": "figure5",
    "gradients": "figure4",
    "learning-rate": "figure2",
}


def of(text: str, tmp_path: Path) -> list[TrainConfig]:
    file = tmp_path / "grid.toml"
    file.write_text(text)
    return configurations(read_grid(file), CRITEO, file)


def paper(name: str) -> list[TrainConfig]:
    file = PAPER / f"{name}.toml"
    return configurations(read_grid(file), CRITEO, file)


def test_a_grid(tmp_path):
    text = """
    [fixed]
    epochs = 3
    mlp = [128, 64]
    dense_schedule = "linear:to=0.1"
    [grid]
    rule = ["none", "cowclip"]
    batch_size = ["1K", 8192]
    [[points]]
    l2 = 1e-4
    init_stddev = 1e-3
    [[points]]
    epochs = 2
    bottom_mlp = ""
    model = "dlrm"
    """
    found = of(text, tmp_path)
    options = {"epochs": 3, "mlp": (128, 64), "rule": "none", "l2": 1e-4, "init_stddev": 1e-3}
    assert found[0] == TrainConfig(dense_schedule={"name": "linear", "to": 0.1}, **options)
    places = [(rule, size) for rule in ("none", "cowclip") for size in (K, 8 * K)]
    assert [(config.rule, config.batch_size) for config in found] == 2 * places
    assert {(c.model, c.epochs, c.bottom_mlp) for c in found[4:]} == {("dlrm", 2, ())}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[grids]\n", "has the keys fixed, grid, points. Received: 'grids'"),
        ("[fixed]\nlr = 1\n", "the grid .* Received: 'lr'"),
        ("[grid]\nseed = 1\n", "needs a list of values for each option"),
        ("[grid]\nseed = []\n", "needs a list of values for each option"),
        ("[fixed]\nseed = 1\n[grid]\nseed = [1]\n", "seed is in two tables"),
        ('[fixed]\nbatch_size = "8KB"\n', "or one of 1,024s as in 128K. Received: '8KB'"),
        ("[fixed]\nbatch_size = 0\n", "batch_size must be a positive whole number"),
        ("[fixed]\ndense_lr = true\n", "dense_lr must be a positive number"),
        ('[fixed]\nrule = "best"\n', "rule must be one of"),
        ("[fixed\n", "cannot read the grid"),
        ("points = 1\n", "must be values by name. Received: 1"),
    ],
)
def test_a_grid_that_is_refused(tmp_path, text, words):
    with pytest.raises(UserError, match=words):
        of(text, tmp_path)


def test_runs_of_the_same_options_are_one(tmp_path):
    assert len(of("[grid]\nbatch_size = [1024, '1K']\n", tmp_path)) == 1


@pytest.mark.parametrize("study", STUDIES)
def test_the_papers_grids_have_the_runs_of_its_studies(study):
    configs = paper(STUDIES[study])
    with np.load(RECORDED) as file:
        runs = [json.loads(str(one)) for one in file[f"{study}/of the paper"]]
    keys = runs[0].keys() - {"row", "column", "data", "seeds"}

    def key(run) -> str:
        shown = {k: f"{run[k]:.6e}" if isinstance(run[k], float) else run[k] for k in keys}
        return json.dumps(shown, sort_keys=True)

    sizes = {config.batch_size for config in configs}
    assert {key({**c.to_dict(), **c.hyperparameters.to_dict()}) for c in configs} == {
        key(run) for run in runs if run["batch_size"] in sizes
    }
    assert {config.seed for config in configs} == set(runs[0]["seeds"])


def test_the_equal_protocol_scales_and_changes_nothing_else():
    found = paper("table2-equal")
    assert {config.rule for config in found} == set(SCALING_RULES)
    names = ("base_batch_size", "dense_lr", "embedding_lr", "l2", "init_stddev", "warmup_epochs")
    names += ("clip", "clip_ratio", "clip_floor")
    assert len({tuple(getattr(config, name) for name in names) for config in found}) == 1
