"""The demo: its table and its page show the results of the runs."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import re

import pandas as pd
import pytest

from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.workflows import Run
from merlin_cowclip.workflows.commands import demo as module
from merlin_cowclip.workflows.commands.demo import RUNS, demo
from merlin_cowclip.workflows.data.prepare import pipeline as etl
from merlin_cowclip.workflows.data.spec import CRITEO
from merlin_cowclip.workflows.study.report import compare
from merlin_cowclip.workflows.training import train as training
from tests.workflows.study.test_report import Page, as_text

pytestmark = pytest.mark.filterwarnings("ignore:Even though the `tf.config.exp")
SMALL = tuple(run._replace(batch_size=run.batch_size // 16) for run in RUNS)
FEW = dataclasses.replace(CRITEO, categorical=("C1", "C2", "C3"), continuous=("I1",))


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """The folder of a small demo, and what it printed."""
    train, prepare = training.train, etl.prepare

    def eagerly(*given, **options):
        tf.config.run_functions_eagerly(True)  # which a run resets
        return train(*given, **options)

    out, printed = tmp_path_factory.mktemp("demo") / "out", io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        changes = {"RUNS": SMALL, "EPOCHS": 2, "CARDINALITY": 50, "NETWORK": {"model": "fm"}}
        for name, value in changes.items():
            patch.setattr(module, name, value)
        patch.setattr(
            etl, "prepare", lambda spec, *given, **options: prepare(FEW, *given, **options)
        )
        patch.setattr(training, "train", eagerly)
        demo(out, rows=1100)
    tf.config.run_functions_eagerly(False)
    return out, printed.getvalue()


@pytest.fixture(scope="module")
def results(shown):
    return {r.name: json.loads((shown[0] / r.name / "result.json").read_text()) for r in SMALL}


def test_the_table_shows_the_results(shown, results):
    out, printed = shown
    lines = {line.split()[0]: line.split() for line in printed.splitlines() if "  " in line}
    for run in SMALL:
        steps = math.ceil(results[run.name]["config"]["rows"]["train"] / run.batch_size)
        auc = results[run.name]["auc"]
        assert lines[run.name][1:4] == [f"{run.batch_size:,}", str(steps), f"{auc:.4f}"]
    assert printed.splitlines()[-2] == f"The page of all this: {out / 'demo.html'}"


def test_the_page_shows_the_results(shown, results):
    page = (shown[0] / "demo.html").read_text()
    assert not re.findall(r'(?:src|@import|url)\s*[=(]\s*["\']?(?:https?:)?//', page)
    assert all((shown[0] / link).is_file() for link in Page(page).links)
    assert page.count("<svg") == 2
    text = as_text(page)
    for name, result in results.items():
        assert (result["clip"] in text) == (result["config"]["rule"] in ("cowclip", "sqrt_decay"))
        metrics = pd.read_csv(shown[0] / name / "metrics.csv")
        aucs = " | ".join(f"{auc:.4f}" for auc in metrics.valid_auc)
        assert f"| {name} | {aucs} |" in text


def test_no_conclusion_from_few_steps(shown, results):
    rows, size = results["base"]["config"]["rows"]["train"], SMALL[-1].batch_size
    steps = math.ceil(rows / size)
    assert steps < 30
    few = f"No conclusion: at batch size {size} an epoch has only {steps} steps. With fewer than 30"
    page = (shown[0] / "demo.html").read_text()
    for said in (shown[1], page[page.index('class="headline"') :].splitlines()[0]):
        assert few in said
        assert "keeps its accuracy" not in said


def test_the_conclusion():
    """A rule keeps the base's AUC if it loses at most 0.002."""
    assert module._conclusion([0.77, 0.761, 0.75, 0.7681, 0.772]) == (
        "A batch 8 times as large keeps its accuracy with √-scaling with decay and "
        "CowClip, and loses some with no scaling and linear scaling. Test AUC against the base's "
        "0.7700: none -0.0090, linear -0.0200, sqrt_decay -0.0019, cowclip +0.0020."
    )


def test_single_runs_are_compared(shown, results, tmp_path):
    runs = [Run.open(shown[0] / name) for name in ("none", "cowclip")]
    named = {str(run.path): run.path for run in runs}
    text = as_text(compare(named, tmp_path / "report.html").read_text())
    for run in runs:
        assert f"{100 * run.result['auc']:.3f}" in text
    assert all((tmp_path / link).is_file() for link in Page(text).links)
    assert re.search(r"\| clip \| none \| adaptive_column \|", text)
    assert "No verdict: at batch size" in text


def test_an_error_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(etl, "prepare", fail)
    with pytest.raises(KeyboardInterrupt):
        demo(tmp_path / "demo", rows=8192)
    assert not list(tmp_path.iterdir())
