"""Data, runs and predictions are what they were when the golden data were recorded."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from . import workflow_cases as cases

pytestmark = pytest.mark.filterwarnings(
    "ignore:Initializing an NVTabular Dataset in CPU mode", "ignore:Performing a hash-based"
)
ROOT = Path(__file__).parents[2]
extended = pytest.mark.extended
KILLED = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.golden.workflow_cases import killed
killed(*sys.argv[2:])
"""


def check(found, name):
    told = cases.differences(found, name)
    assert not told, "\n".join(told)


@pytest.mark.parametrize(
    "name",
    [
        *("prepare-criteo", "prepare-avazu", "prepare-csv", "prepare-parquet", "synthetic"),
        *("adopt", "train-exact"),
        *(pytest.param(name, marks=extended) for name in ("train-lazy", "train-deferred")),
        *(pytest.param(name, marks=extended) for name in ["adopt-run"]),
    ],
)
def test_as_recorded(name, tmp_path):
    check(cases.CASES[name](tmp_path), name)


def test_every_case_is_compared():
    names = {*cases.CASES, "ranks-sharded"}
    assert {p.name for p in cases.HERE.glob("workflow-*")} == {f"workflow-{n}.npz" for n in names}


@extended
def test_a_server_answers_as_predict_writes(tmp_path):
    cases.train(cases.prepare_shop(tmp_path), tmp_path / "run")
    rows = cases.shop_frame(cases.new_rows())
    found = cases.exported(tmp_path / "run", tmp_path / "repository", rows)
    with_labels = cases.golden("train-exact")
    check({**with_labels, "new/probability": found}, "train-exact")


@extended
@pytest.mark.parametrize("update", cases.UPDATES)
def test_ended_early_and_gone_on_with(update, interpreter, tmp_path):
    """Stopped after an update; killed where a checkpoint is not the last update."""
    data, stopped, run = cases.prepare_shop(tmp_path), tmp_path / "stopped", tmp_path / "killed"
    cases.stop(data, stopped, "--update", update)
    cases.resume(stopped)
    check(cases.of_run(stopped), f"train-{update}")
    options = (*cases.NETWORK, *cases.RECIPE, *cases.LEAN, "--update", update)
    options += ("--epochs", 2, "--checkpoint-every", 3)
    arguments = (ROOT, run, "train", data, "--out", run, *options)
    ended = interpreter.start(KILLED, *arguments, folder=tmp_path / "said").end()
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    cases.resume(run)
    check(cases.of_run(run), f"train-{update}")
