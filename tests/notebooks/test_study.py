"""Notebook 04: tables and page show the runs, each trained once."""

from __future__ import annotations

import html
import json
import re

import numpy as np
import pytest

pytestmark = pytest.mark.extended
NOTEBOOK = "04-study"
SMALLER = {"ROWS = 20_000": "ROWS = 9_000"}


def cells(executed):
    """(rule, batch size) → the AUCs of the study's runs, in percent."""
    study, found = executed.folder / "study", {}
    for one in json.loads((study / "sweep.json").read_text())["runs"]:
        result = json.loads((study / "runs" / one["run"] / "result.json").read_text())
        place = one["config"]["rule"], one["config"]["batch_size"]
        found.setdefault(place, []).append(100 * result["auc"])
    return found


def test_the_table_is_of_the_results(executed):
    printed = executed.streams("stdout")
    found = cells(executed)
    assert {len(aucs) for aucs in found.values()} == {2}
    for (rule, size), aucs in found.items():
        number = f"{np.mean(aucs):.3f} ± {np.std(aucs, ddof=1):.3f}"
        assert re.search(rf"^{rule} +{size} +2 +{number} ", printed, re.MULTILINE)


def test_each_run_is_trained_once_and_learns(executed):
    """At the base five rules are one."""
    runs = [path.parent.name for path in executed.folder.glob("study/runs/*/result.json")]
    assert len(runs) == 2 * (2 + 6)
    found = cells(executed)
    assert len(found) == 2 * 6
    assert found["none", 128] == found["linear", 128]
    best = json.loads((executed.folder / "train.csv.gz.truth.json").read_text())["best_auc"]
    aucs = [np.mean(auc) / 100 for auc in found.values()]
    assert min(aucs) > 0.55
    assert 0.5 + 0.6 * (best - 0.5) < max(aucs) < best


def test_the_tunes_result_is_of_its_repeats(executed):
    tuned = executed.folder / "tuned"
    table = json.loads((tuned / "result.json").read_text())["table"]
    best = max(auc for row in table for auc in row["repeats"].values())
    assert table[0]["mean"] == best
    assert re.search(
        rf"^{table[0]['number']} +{best:.5f}", executed.streams("stdout"), re.MULTILINE
    )
    assert json.loads((tuned / "tuned.json").read_text())["batch_size"] == 512


def test_the_page_is_shown(executed):
    (frame,) = [text for text in executed.shown("text/html") if "<iframe" in text]
    page = html.unescape(re.search('srcdoc="(.*?)"', frame, re.DOTALL)[1])
    assert page == (executed.folder / "study" / "report.html").read_text()
    plots = re.findall("<figcaption>(.*?)</figcaption>", page)
    assert page.count("<svg") == len(plots)
    assert {"test AUC, %, by batch size", "test log loss, by batch size"} <= set(plots)
