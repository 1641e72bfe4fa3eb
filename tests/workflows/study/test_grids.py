"""Grids as files: the options of their runs, and bad grids."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from merlin_cowclip.plugins.scaling import K
from merlin_cowclip.workflows.commands.studying import configurations, read_grid
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.training.configuration import TrainConfig

CRITEO = SimpleNamespace(spec=SimpleNamespace(name="criteo"), path=Path("data"))
PAPER = Path(__file__).parents[3] / "benchmarks" / "paper"


def of(text: str, tmp_path: Path) -> list[TrainConfig]:
    file = tmp_path / "grid.toml"
    file.write_text(text)
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
    configs = of(text, tmp_path)
    options = {"epochs": 3, "mlp": (128, 64), "rule": "none", "l2": 1e-4, "init_stddev": 1e-3}
    assert configs[0] == TrainConfig(dense_schedule={"name": "linear", "to": 0.1}, **options)
    places = [(rule, size) for rule in ("none", "cowclip") for size in (K, 8 * K)]
    assert [(config.rule, config.batch_size) for config in configs] == 2 * places
    assert {(c.model, c.epochs, c.bottom_mlp) for c in configs[4:]} == {("dlrm", 2, ())}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[grids]\n", "has the keys fixed, grid, points. Received: 'grids'"),
        ("[grid]\nseed = []\n", "needs a list of values for each option"),
        ("[fixed]\nseed = 1\n[grid]\nseed = [1]\n", "seed is in two tables"),
        ('[fixed]\nbatch_size = "8KB"\n', "or one of 1,024s as in 128K. Received: '8KB'"),
    ],
)
def test_a_grid_that_is_refused(tmp_path, text, words):
    with pytest.raises(UserError, match=words):
        of(text, tmp_path)


def test_runs_of_the_same_options_are_one(tmp_path):
    assert len(of("[grid]\nbatch_size = [1024, '1K']\n", tmp_path)) == 1


def test_the_papers_grids_are_grids():
    for file in PAPER.glob("*.toml"):
        assert configurations(read_grid(file), CRITEO, file), file
