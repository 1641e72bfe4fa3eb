"""The demo: its table and its page show the results of the runs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import re

import pandas as pd
import pytest

from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.workflows.commands import demonstration
from merlin_cowclip.workflows.commands.demonstration import DemoRun, demo
from merlin_cowclip.workflows.data.spec import CRITEO
from merlin_cowclip.workflows.training.configuration import TrainConfig
from merlin_cowclip.workflows.training.keeping import Keeping
from merlin_cowclip.workflows.training.train import train
from tests.workflows.study.test_report import Page

pytestmark = pytest.mark.filterwarnings("ignore:Even though the `tf.config.exp")
RUNS = tuple(
    DemoRun(size, rule)
    for size, rule in ((64, "none"), (64, "cowclip"), (256, "linear"), (256, "cowclip"))
)
FEW = dataclasses.replace(CRITEO, categorical=("C1", "C2", "C3"), continuous=("I1",))


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """The folder of a small demo, and what it printed."""

    def eagerly(*given):
        tf.config.run_functions_eagerly(True)  # which a run resets
        return train(*given, keeping=Keeping(saved_model=False))

    out, printed = tmp_path_factory.mktemp("demo") / "out", io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(demonstration, "RUNS", RUNS)
        patch.setattr(demonstration, "EPOCHS", 2)
        patch.setattr(demonstration, "CARDINALITY", 50)
        patch.setattr(demonstration, "CRITEO", FEW)
        patch.setattr(demonstration, "TrainConfig", functools.partial(TrainConfig, model="fm"))
        patch.setattr(demonstration, "train", eagerly)
        demo(out, rows=800)
    tf.config.run_functions_eagerly(False)
    return out, printed.getvalue()


@pytest.fixture(scope="module")
def results(shown):
    folders = (shown[0] / f"deepfm-{run.batch_size}-{run.rule}" for run in RUNS)
    return [json.loads((folder / "result.json").read_text()) for folder in folders]


def test_the_table_shows_the_results(shown, results):
    out, printed = shown
    best = json.loads((out / "train.txt.gz.truth.json").read_text())["best_auc"]
    lines = re.findall(r"^[\d,]+ +\dx +.*", printed, re.MULTILINE)
    assert [line.split()[1:5] for line in lines] == [
        [f"{run.batch_size // 1024}x", run.rule, f"{result['auc']:.4f}", f"{best:.4f}"]
        for run, result in zip(RUNS, results, strict=True)
    ]
    assert printed.splitlines()[-1] == f"The page of all this: {out / 'demo.html'}"


def test_the_page_shows_the_results(shown, results):
    page = (shown[0] / "demo.html").read_text()
    none, small, linear, large = (result["auc"] for result in results)
    verdict = re.sub("<[^>]+>", "", page[page.index('class="verdict"') :].splitlines()[0])
    assert f"by {linear - none:+.4f} with linear ({none:.4f} → {linear:.4f}) and by" in verdict
    assert f"by {large - small:+.4f} with cowclip ({small:.4f} → {large:.4f})" in verdict
    assert not re.findall(r'(?:src|@import|url)\s*[=(]\s*["\']?(?:https?:)?//', page)
    assert all((shown[0] / link).is_file() for link in Page(page).links)
    assert page.count("<svg") == 3
    for run, result in zip(RUNS, results, strict=True):
        name = f"{run.rule}, {run.batch_size:,}"
        metrics = pd.read_csv(shown[0] / f"deepfm-{run.batch_size}-{run.rule}" / "metrics.csv")
        epochs, last = re.findall(rf"<tr><td>{name}</td>(.*?)</tr>", page)
        assert re.findall(r"<td>(.*?)</td>", epochs) == [f"{auc:.4f}" for auc in metrics.auc]
        assert (result["clip"] in page) == (run.rule == "cowclip")
        cells = re.findall(r"<td>(.*?)</td>", last)
        if run.rule == "cowclip":
            assert float(cells[0].rstrip(" %")) == pytest.approx(
                100 * metrics.rows_clipped.iloc[-1], rel=0.06
            )
        else:
            assert cells[:2] == ["no clip"] * 2
        assert float(cells[2]) == pytest.approx(metrics.gradient_norm_frequent.iloc[-1], rel=0.006)
