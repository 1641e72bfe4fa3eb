"""Pages: their numbers are those of the results, each with the way there."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import numpy as np
import pytest

from merlin_cowclip.workflows.study.report import report
from merlin_cowclip.workflows.training.configuration import TrainConfig

CONFIGS = [
    TrainConfig(rule=rule, batch_size=size, seed=seed, epochs=2)
    for rule in ("none", "sqrt", "cowclip")
    for size in (1024, 8192)
    for seed in (1, 2, 3)
]
AUCS = {"none": 0.74, "sqrt": 0.7601, "cowclip": 0.76}  # apart, and not
RECORD = {"data": ["/data"], "data_sha256": "x" * 64}


def swept(out: Path, configs=CONFIGS, rows: int = 10**6) -> Path:
    """A sweep's folder as if its runs had been trained; their AUCs are drawn."""
    random = np.random.default_rng(0)
    out.mkdir(parents=True)
    runs = [{"run": config.identity[:16], "config": config.to_dict()} for config in configs]
    (out / "sweep.json").write_text(json.dumps({**RECORD, "command": "sweep a<b", "runs": runs}))
    for config, run in zip(configs, runs, strict=True):
        auc = AUCS[config.rule] + 1e-4 * random.normal() + 0.001 * config.seed
        epochs = [{"epoch": e, "valid_auc": auc - 0.01 * (2 - e)} for e in (1, 2)]
        parts = {"train": rows, "valid": rows // 10, "test": rows // 10}
        result = {
            **{"auc": auc, "log_loss": 0.45, "train_seconds": 60.0},
            **{"epochs": epochs, "checkpoint": "last", "best_epoch": 2, "clip": ""},
            "config": {
                **RECORD,
                **config.to_dict(),
                **{"dataset": "clicks", "rows": parts, "cardinalities": {"a": 7, "b": 5}},
                **{"table_rows": 12, "versions": {"python": "3.11"}},
                "machine": {"platform": "x", "cpus": 2, "gpus": []},
            },
        }
        folder = out / "runs" / run["run"]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "result.json").write_text(json.dumps(result))
        lines = [
            "epoch,valid_auc,train_loss,gradient_norm_frequent,gradient_norm_rare",
            f"1,{auc - 0.01},0.5,0.5,",
            f"2,{auc},0.4,0.4,0.1",
        ]
        (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    return out


def as_text(page: str) -> str:
    """A page's words: rows of tables as `| cell | cell |`."""
    page = re.sub(r"</t[dh]><t[dh][^>]*>", " | ", page)
    page = re.sub(r"</t[dh]></tr>", " |", re.sub(r"<tr><t[dh][^>]*>", "| ", page))
    return html.unescape(page)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return swept(tmp_path_factory.mktemp("report") / "out")


@pytest.fixture(scope="module")
def page(out):
    return report(out)[0].read_text()


def test_the_page_has_its_facts_and_needs_no_other_file(page):
    assert not re.findall(r'(?:src|@import|url)\s*[=(]\s*["\']?(?:https?:)?//', page)
    assert "<pre>sweep a&lt;b</pre>" in page
    assert "<dt>machine</dt><dd>x, 2 CPUs, GPUs: none</dd>" in page
    captions = re.findall("<figcaption>(.*?)</figcaption>", page)
    assert {"test AUC, %, by batch size", "validation AUC, by epoch, first seed"} <= set(captions)


def test_the_verdict_pairs_by_seed(out, page):
    """Seeds differ by more than sqrt and cowclip; none is 2 % below both."""
    assert re.search(
        r"sqrt, batch_size 8,192 has the best test AUC, 76\.\d+ ± 0\.1\d+\. Worse: none, "
        r"batch_size 8,192\. Not distinguishable: cowclip, batch_size 8,192\.",
        report(out)[1],
    )
    assert re.search(
        r"\| none, batch_size 8,192 \| sqrt, batch_size 8,192 \| -2\.0\d+ \(-2\.\d+ to -1\.\d+",
        as_text(page),
    )
    assert "| init_stddev | 0.0001 | 0.0001 | 0.0001 | 0.0001 | 0.01 | 0.01 |" in as_text(page)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"rows": 90_000}, "No verdict: at batch size 8,192 an epoch has only 11 steps"),
        ({"configs": CONFIGS[:-1]}, "No verdict: 3 seeds are needed to .*, and a group has 2."),
    ],
)
def test_no_verdict(tmp_path, options, why):
    page, text = report(swept(tmp_path / "out", **options))
    assert re.search(why, text)
    assert "has the best" not in page.read_text()


def test_runs_that_are_missing_or_diverged(tmp_path):
    out = swept(tmp_path / "out")
    run = out / "runs" / CONFIGS[-1].identity[:16]
    (run / "result.json").unlink()
    assert "No verdict yet. Runs still to come: 1." in report(out)[1]
    (run / "diverged.json").write_text("{}")
    page, text = report(out)
    assert "Diverged at least once: cowclip, batch_size 8,192." in text
    assert "| cowclip | 8,192 | 3 | diverged |" in as_text(page.read_text())


def test_sweeps_on_other_data_are_compared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one, other = swept(tmp_path / "one"), swept(tmp_path / "other")
    record = json.loads((other / "sweep.json").read_text())
    (other / "sweep.json").write_text(json.dumps({**record, "data_sha256": "y" * 64}))
    page, text = report(one, other)
    assert page.name == "report.html"
    assert re.search(r"^data +rule +batch_size +seeds +test AUC, %", text, re.M)
    assert re.search(r"^data yyyyyy +cowclip +1,024 ", text, re.M)
    assert "AUCs on different data do not compare" in page.read_text()
