"""Notebook 04: tables and page are of the runs, each trained once; the tune is no worse."""

from __future__ import annotations

import html
import json
import re

import numpy as np
import pytest

pytestmark = pytest.mark.slow
NOTEBOOK = "04-study"


def cells(executed, name):
    """(row, column) → the AUCs of a study's runs, in percent."""
    study = executed.folder / "study"
    record = json.loads((study / "studies" / f"{name}.json").read_text())
    return {
        (cell["row"], cell["column"]): [
            100 * json.loads((study / "runs" / run / "result.json").read_text())["auc"]
            for run in cell["runs"].values()
        ]
        for cell in record["cells"]
    }


@pytest.mark.parametrize(("name", "seeds"), [("scaling-rules", 2), ("clipping", 1)])
def test_the_tables_are_of_the_results(executed, name, seeds):
    printed = executed.streams("stdout")
    table = printed[printed.index(f"test AUC, %, by {'rule' if seeds == 2 else 'clip'}") :]
    found = cells(executed, name)
    assert {len(aucs) for aucs in found.values()} == {seeds}
    for row in {row for row, _ in found}:
        shown = re.search(rf"^{re.escape(row)}  +(.*)$", table, re.MULTILINE)[1]
        expected = [
            f"{np.mean(aucs):.3f}" + (f" ± {np.std(aucs, ddof=1):.3f}" if seeds > 1 else "")
            for (r, _), aucs in found.items()
            if r == row
        ]
        assert re.split(r"\s{2,}", shown) == expected


def test_each_run_is_trained_once(executed):
    """At the base five rules are one, and the scaled CowClip is in both studies."""
    runs = [path.parent.name for path in executed.folder.glob("study/runs/*/result.json")]
    assert len(runs) == 2 * (2 + 6) + 3
    aucs = cells(executed, "scaling-rules")
    assert len(aucs) == 2 * 6
    assert aucs["none", "256"] == aucs["linear", "256"]
    assert cells(executed, "clipping")["adaptive_column", "1,024"] == aucs["cowclip", "1,024"][:1]


def test_the_networks_learn(executed):
    best = json.loads((executed.folder / "train.txt.gz.truth.json").read_text())["best_auc"]
    aucs = [np.mean(auc) / 100 for (_, at), auc in cells(executed, "scaling-rules").items()]
    assert min(aucs) > 0.55
    assert 0.5 + 0.6 * (best - 0.5) < max(aucs) < best


def test_what_the_clip_did_is_told(executed):
    printed = executed.streams("stdout")
    assert "no clip: No id was clipped: the clip applies to no table." in printed
    results = executed.folder.glob("study/runs/*/result.json")
    clips = {json.loads(path.read_text())["clip"] for path in results}
    (said,) = re.findall(r"^adaptive_column: (.*)$", printed, re.MULTILINE)
    assert said in clips


def test_the_tunes_result_is_of_its_repeats(executed):
    tuned = executed.folder / "tuned"
    table = json.loads((tuned / "result.json").read_text())["table"]
    repeats = [json.loads(path.read_text()) for path in (tuned / "repeats").glob("*.json")]
    aucs = [repeat["epochs"][-1]["auc"] for repeat in repeats]
    assert table[0]["mean"] == max(aucs)
    assert f"best found       {max(aucs):.5f}" in executed.streams("stdout")
    assert json.loads((tuned / "tuned.json").read_text())["batch_size"] == 1024


def test_the_page_is_shown(executed):
    (frame,) = [text for text in executed.shown("text/html") if "<iframe" in text]
    page = html.unescape(re.search('srcdoc="(.*?)"', frame, re.DOTALL)[1])
    assert page == (executed.folder / "study" / "report.html").read_text()
    text = (executed.folder / "study" / "report.md").read_text()
    for (row, column), aucs in cells(executed, "scaling-rules").items():
        if (row, column) == ("cowclip", "1,024"):
            assert f"{np.mean(aucs):.3f} ± {np.std(aucs, ddof=1):.3f}" in text
    assert page.count("<svg") == 1
