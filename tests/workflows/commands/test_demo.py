"""The demo: its table, and a page whose numbers are those of the runs."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re

import pandas as pd
import pytest

from merlin_cowclip.workflows.commands import demo_page, demonstration
from merlin_cowclip.workflows.commands.demonstration import DemoRun, demo
from merlin_cowclip.workflows.training.configuration import TrainConfig
from merlin_cowclip.workflows.training.keeping import Keeping
from merlin_cowclip.workflows.training.runs import Run
from merlin_cowclip.workflows.training.train import train
from tests.workflows.study.test_report import Page

pytestmark = pytest.mark.slow
RUNS = tuple(
    DemoRun(size, rule)
    for size, rule in ((256, "none"), (256, "cowclip"), (1024, "linear"), (1024, "cowclip"))
)


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """A small demo: its folder, and what it printed."""
    out, printed = tmp_path_factory.mktemp("demo") / "out", io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(demonstration, "RUNS", RUNS)
        patch.setattr(demonstration, "EPOCHS", 2)
        patch.setattr(demonstration, "CARDINALITY", 200)
        patch.setattr(demonstration, "TrainConfig", functools.partial(TrainConfig, model="fm"))
        keeping = Keeping(saved_model=False)
        patch.setattr(demonstration, "train", functools.partial(train, keeping=keeping))
        demo(out, rows=8_000)
    return out, printed.getvalue()


@pytest.fixture(scope="module")
def results(shown):
    folders = (shown[0] / f"deepfm-{run.batch_size}-{run.rule}" for run in RUNS)
    return [json.loads((folder / "result.json").read_text()) for folder in folders]


@pytest.fixture(scope="module")
def page(shown):
    return (shown[0] / "demo.html").read_text()


def test_the_table_is_of_the_results(shown, results):
    out, printed = shown
    best = json.loads((out / "train.txt.gz.truth.json").read_text())["best_auc"]
    lines = re.findall(r"^[\d,]+ +\dx +.*", printed, re.MULTILINE)
    assert [line.split()[1:5] for line in lines] == [
        [f"{run.batch_size // 1024}x", run.rule, f"{result['auc']:.4f}", f"{best:.4f}"]
        for run, result in zip(RUNS, results, strict=True)
    ]
    assert printed.splitlines()[-1] == f"The page of all this: {out / 'demo.html'}"


def test_the_page_has_the_printed_table(shown, page):
    table = page[page.index("<table>") : page.index("</table>")]
    cells = [re.sub("<.*?>", "", cell) for cell in re.findall("<t[hd]>(.*?)</t[hd]>", table)]
    printed = shown[1].split("\n\n")[-2]
    header, _, *lines = printed.splitlines()
    shown_cells = re.split(r"\s{2,}", "  ".join([header, *lines]))
    assert [cell.removesuffix(" run") for cell in cells if cell] == shown_cells


def test_the_verdict_is_of_the_results(page, results):
    none, small, linear, large = (result["auc"] for result in results)
    verdict = re.sub("<[^>]+>", "", page[page.index('class="verdict"') :].splitlines()[0])
    assert f"by {linear - none:+.4f} with linear ({none:.4f} → {linear:.4f}) and by" in verdict
    assert f"by {large - small:+.4f} with cowclip ({small:.4f} → {large:.4f})" in verdict


def test_curves_and_clip_are_those_of_metrics_csv(shown, page, results):
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


def test_all_rows_clipped_are_100_percent(shown, monkeypatch):
    run, done = RUNS[1], Run.open(shown[0] / "deepfm-256-cowclip")
    metrics = [{**row, "rows_clipped": "1.0"} for row in demo_page.read_metrics(done.path)]
    monkeypatch.setattr(demo_page, "read_metrics", lambda _: metrics)
    assert demo_page._clip({run: done}).rows[0][1] == "100 %"


def test_the_page_stands_alone(shown, page):
    found = Page(page)
    assert found.open == []
    assert not re.findall(r'(?:src|@import|url)\s*[=(]\s*["\']?(?:https?:)?//', page)
    assert len(found.links) == len(RUNS)
    assert all((shown[0] / link).is_file() for link in found.links)
    assert page.count("<svg") == 3
    assert "merlin-cowclip demo --rows 8000" in page
