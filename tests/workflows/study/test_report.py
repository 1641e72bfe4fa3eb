"""A sweep's page: its numbers are those of the results, each with the way there."""

from __future__ import annotations

import dataclasses
import html
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from merlin_cowclip.workflows.errors import Stopped, UserError
from merlin_cowclip.workflows.study import report_plots, sweep
from merlin_cowclip.workflows.study.cost import Cost
from merlin_cowclip.workflows.study.report import report
from merlin_cowclip.workflows.study.studies import STUDIES, Setting

SIZES = (1024, 8192)
SETTING = Setting(SIZES, config={"epochs": 2}, seeds=(1, 2, 3))
TRAINED = [name for name, study in STUDIES.items() if list(study.cells(Setting(SIZES)))]


def swept(out: Path, names=TRAINED, setting: Setting = SETTING, dataset: str = "criteo") -> Path:
    """A sweep's folder as if its runs had been trained; their AUCs are drawn."""
    random = np.random.default_rng(0)
    for folder in ("studies", "runs"):
        (out / folder).mkdir(parents=True)
    (out / "sweep.json").write_text(json.dumps({"format": 1, "data": "/data", "data_sha256": "x"}))
    for name in names:
        study, epochs = STUDIES[name], 1 if name == "time" else setting.config.get("epochs", 10)
        own = dataclasses.replace(setting, config={**setting.config, "epochs": epochs})
        record = {**sweep._record(study, own, list(study.cells(own))), "command": "again"}
        (out / "studies" / f"{name}.json").write_text(json.dumps(record))
        for cell in record["cells"]:
            for run in cell["runs"].values():
                folder = out / "runs" / run
                if folder.exists():
                    continue
                folder.mkdir()
                auc, seconds = 0.75 + 0.01 * random.random(), 60 * random.random()
                loss = 0.45 + 0.01 * random.random()
                epochs = [{"epoch": e, "auc": auc - 0.01 * (2 - e)} for e in (1, 2)]
                result = {
                    "auc": auc,
                    "log_loss": loss,
                    "train_seconds": seconds,
                    "jobs": 1,
                    "epochs": epochs,
                    "clip": f"The clip shortened no gradient of {run}.",
                    "config": {
                        "dataset": dataset,
                        "identity": run,
                        "rows": {"train": 90, "test": 10},
                        "cardinalities": {"a": 7, "b": 5},
                        "table_rows": 12,
                        "versions": {"python": "3.11"},
                        "machine": {"platform": "x", "cpus": 2, "gpus": []},
                    },
                }
                (folder / "result.json").write_text(json.dumps(result))
                lines = [
                    "epoch,auc,log_loss,train_loss,gradient_norm_frequent,gradient_norm_rare",
                    f"1,{auc - 0.01},{loss + 0.01},0.5,0.5,",
                    f"2,{auc},{loss},0.4,0.4,0.1",
                ]
                (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
                lines = ["epoch,norm,rare,frequent", "1,0.5,9,9", "2,0.25,3,0", "2,0.5,1,6"]
                (folder / "norms.csv").write_text("\n".join(lines) + "\n")
    return out


class Page(HTMLParser):
    """What a page refers to, and whether its elements are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in ("href", "src") and tag == "a"]
        if tag in ("table", "tr", "td", "th", "p", "figure", "svg", "pre", "h2", "dl", "code"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if self.open and self.open[-1] == tag:
            self.open.pop()


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return swept(tmp_path_factory.mktemp("report") / "out")


@pytest.fixture(scope="module")
def page(out):
    return report(out).read_text()


def read(out: Path, *options: Cost) -> str:
    return as_text(report(out, *options).read_text())


def as_text(page: str) -> str:
    """A page's words: rows of tables as `| cell | cell |`, links as `[words](address)`."""
    page = re.sub(r'<a href="([^"]+)">(.*?)</a>', r"[\2](\1)", page)
    page = re.sub(r"</?code>", "`", re.sub(r"</?em>", "*", page))
    page = re.sub(r"</t[dh]><t[dh]>", " | ", page)
    page = re.sub(r"</t[dh]></tr>", " |", re.sub(r"<tr><t[dh]>", "| ", page))
    return html.unescape(page)


def test_the_page_needs_no_other_file(page):
    found = Page(page)
    assert found.open == []
    assert not re.findall(r'(?:src|@import|url)\s*[=(]\s*["\']?(?:https?:)?//', page)
    assert not [link for link in found.links if "//" in link]
    assert all(STUDIES[name].title in html.unescape(page) for name in TRAINED)
    assert page.count("<svg") >= len(TRAINED)


def test_every_number_leads_to_its_result(out, page):
    links = {link for link in Page(page).links if link.startswith("runs/")}
    assert links == {str(p.relative_to(out)) for p in out.glob("runs/*/result.json")}
    text = as_text(page)
    cell = re.search(r"\| ([\d.]+) ± ([\d.]+) ((?:\[\d\]\([^)]+\) ?)+)", text)
    aucs = [
        json.loads((out / link).read_text())["auc"] for link in re.findall(r"\((.+?)\)", cell[3])
    ]
    assert len(aucs) == 3
    assert float(cell[1]) == pytest.approx(100 * np.mean(aucs), abs=5e-4)
    assert float(cell[2]) == pytest.approx(100 * np.std(aucs, ddof=1), abs=5e-4)


def test_norms_are_those_of_figure_4(out, monkeypatch):
    drawn = []
    monkeypatch.setattr(report_plots, "line_plot", lambda lines, *_, **__: drawn.append(lines))
    found, record = sweep.outcomes(out, "gradients"), sweep.read_record(out, "gradients")
    list(report_plots._distributions(out, found, record))
    assert len(drawn[0]) == 2 * len(found)
    # Of the last epoch alone, in % of rare and frequent rows together.
    assert drawn[0]["cowclip, 8,192, rare"] == [(0.25, 30.0, 0.0), (0.5, 10.0, 0.0)]
    assert drawn[0]["cowclip, 8,192, frequent"] == [(0.25, 0.0, 0.0), (0.5, 60.0, 0.0)]


def test_numbers_of_the_paper(page):
    """Transcribed from its tables 2, 3, 12 and 5; only at the batch sizes that it has."""
    text = as_text(page)
    assert "| *cowclip, paper* | 80.86 | 80.97 |" in text
    assert "| *dcn_v2, paper* | 80.78 | 80.87 | 80.98 |" in text
    assert "| *linear scale on dense, paper* | diverged |" in text
    assert "| *Hotline, cited* | 53 |  |" in text
    section = text[text.index(": the log loss *Tables 2 and 10*") :]
    assert "| *cowclip, paper* | 0.4430 | 0.4425 |" in section


def test_numbers_of_the_paper_are_for_its_data_and_batch_sizes(tmp_path):
    setting = dataclasses.replace(SETTING, batch_sizes=(1024, 1536, 2048), seeds=(1,))
    text = read(swept(tmp_path / "sizes", ["networks"], setting))
    assert "| *deepfm, paper* | 80.76 | 80.86 |  | 80.93 |" in text
    assert "paper*" not in read(swept(tmp_path / "out", ["curves"], dataset="mine"))


def test_the_clip_is_summarized_for_every_clipped_cell(out, page):
    text = html.unescape(page)
    for cell in json.loads((out / "studies" / "scaling-rules.json").read_text())["cells"]:
        first, second = (f"The clip shortened no gradient of {cell['runs'][n]}." for n in "12")
        clipped = cell["config"]["base"]["clip"] is not None
        assert (f"{cell['column']} (seed 1): {first}" in text) == clipped
        assert second not in text


def test_the_control_compares_each_row_with_itself(out, page):
    """Its rows are of different data."""
    text = as_text(page)
    section = text[text.index("From 1,024 to 8,192 the AUC changes by") :]
    small, large = (o.mean("auc")[0] for o in sweep.outcomes(out, "control")[:2])
    assert f"`full, none` {100 * (large - small):+.3f}, " in section


def test_the_verdict(out, page):
    found = {(o.cell.row, o.cell.column): o for o in sweep.outcomes(out, "scaling-rules")}
    small, large = (found["cowclip", column] for column in ("1,024", "8,192"))
    text = as_text(page)
    (mean, deviation), (base, _) = large.mean("auc"), small.mean("auc")
    assert f"At 8,192 with `cowclip`, AUC {100 * mean:.3f} ± {100 * deviation:.3f} %" in text
    assert f"against {100 * base:.3f}" in text
    ratio = np.divide(*(np.mean(o.values("train_seconds")) for o in (small, large)))
    how = f"{ratio:.1f} times faster" if ratio > 1 else f"{1 / ratio:.1f} times slower"
    assert f"{how}." in text


def test_runs_that_are_missing_or_diverged(tmp_path):
    out = swept(tmp_path / "out", ["curves"])
    runs = json.loads((out / "studies" / "curves.json").read_text())["cells"][1]["runs"]
    (out / "runs" / runs["1"] / "result.json").unlink()
    text = read(out)
    assert "(1 to come)" in text
    assert "Runs still to come: 1; until then means may be of fewer seeds." in text
    assert "Mean ± deviation of 2 to 3 seeds" in text
    (out / "runs" / runs["1"] / "diverged.json").write_text("{}")
    text = read(out)
    assert f"| diverged [1](runs/{runs['1']}/diverged.json) [2](runs/{runs['2']}/result" in text
    assert "Diverged somewhere: `cowclip`" in text
    for path in out.glob("runs/*/result.json"):
        path.rename(path.with_name("diverged.json"))
    assert "<svg" not in report(out).read_text()


def test_a_folder_that_cannot_be_reported_is_refused(tmp_path):
    with pytest.raises(UserError, match="a report is of a sweep's folder. Received: "):
        report(tmp_path)
    out = swept(tmp_path / "out", ["curves"], dataclasses.replace(SETTING, seeds=(1,)))
    path, *others = out.glob("runs/*/result.json")
    result = json.loads(path.read_text())
    path.write_text("{")
    with pytest.raises(UserError, match=f"Remove {path.parent}, and sweep again"):
        report(out)
    result["config"]["identity"] = "f" * 64  # as after `train --resume --epochs`
    path.write_text(json.dumps(result))
    with pytest.raises(UserError, match="must be as the sweep would train it. Received: "):
        report(out)
    for one in (path, *others):
        one.unlink()
    with pytest.raises(UserError, match="a report needs runs that ended"):
        report(out)
    assert not (out / "report.html").exists()


def test_an_interrupted_sweep_keeps_its_runs_and_is_for_one_data_set(tmp_path, monkeypatch):
    def interrupted(tasks, jobs):
        tasks[0].run.mkdir()
        (tasks[0].run / "diverged.json").write_text("{}")
        yield tasks[0]
        raise KeyboardInterrupt

    def begin(data):
        return sweep.sweep(STUDIES["curves"], data, tmp_path / "out", SETTING, progress=False)

    monkeypatch.setattr(sweep, "_check", lambda data, cells: None)
    monkeypatch.setattr(sweep, "identity_of", lambda data: "x")
    monkeypatch.setattr(sweep, "columns_of", lambda data: data.inputs)
    monkeypatch.setattr(sweep, "work_off", interrupted)
    inputs = {"label": "y", "categorical": ["a"], "lists": [], "continuous": []}
    data = SimpleNamespace(path=Path("/data"), inputs=inputs, cardinalities={"a": 5})
    with pytest.raises(Stopped, match="after 1 of 6 runs, which are kept in .* same command again"):
        begin(data)
    for changes in ({"inputs": {**inputs, "label": "z"}}, {"cardinalities": {"a": 6}}):
        with pytest.raises(UserError, match="the runs of a folder must be of one data set"):
            begin(SimpleNamespace(**{**vars(data), **changes}))


def test_the_cost_of_an_epoch_of_criteo(tmp_path):
    """In the paper ten epochs with DeepFM at 1,024 took 768 minutes."""
    out = swept(tmp_path / "out", ["time"], dataclasses.replace(SETTING, seeds=(1,)))
    found = {(o.cell.row, o.cell.column): o for o in sweep.outcomes(out, "time")}
    seconds = found["dcn", "8,192"].mean("train_seconds")[0]
    hours = seconds / 3600 * 41_256_555 / 90
    text = read(out)
    assert "| *deepfm, minutes, paper* | 76.8 | 10.2 |" in text
    assert re.search(rf"\| dcn, minutes \|.*\| {60 * hours:.1f} \[1\]", text)
    assert "price |" not in text
    text = read(out, Cost(price_per_hour=2.5))
    assert re.search(rf"\| dcn, price \|.*\| {2.5 * hours:.2f} \[1\]", text)
    text = read(out, Cost(rows=180))
    assert re.search(rf"\| dcn, minutes \|.*\| {seconds / 30:.1f} \[1\]", text)
    assert "minutes, paper*" not in text
    with pytest.raises(UserError, match="a cost is reckoned from the study 'time'. Received: "):
        report(swept(tmp_path / "none", ["curves"]), Cost(price_per_hour=2.5))
    for price in (0.0, float("nan")):
        with pytest.raises(UserError, match="price_per_hour must be a positive number. Received: "):
            Cost(price_per_hour=price)


def test_how_often_ids_occur(data, tmp_path, monkeypatch):
    """Counted without a test part, and again at other batch sizes."""
    out, study = tmp_path / "out", STUDIES["frequencies"]
    sweep.sweep(study, data, out, Setting((64,)), progress=False)
    monkeypatch.setattr(type(data), "test_files", [])
    table = sweep.sweep(study, data, out, Setting((64, 512)), progress=False)
    assert "all fields" in table
    page = Page(report(out).read_text())
    links = {link for link in page.links if "//" not in link}
    assert links == {"frequencies/summary.parquet", "frequencies/frequencies.parquet"}
    assert all((out / link).exists() for link in links)
    text = as_text((out / "report.html").read_text())
    rows = pd.concat([pd.read_parquet(path) for path in data.train_files])
    counts = rows["user"].value_counts()
    rare = 100 * (counts < len(rows) / 512).mean()
    assert re.search(rf"\| user \| {len(counts)} \|.* {rare:.1f} \|\n", text)
    assert "% of 512." in text
    shutil.rmtree(out / "frequencies")
    with pytest.raises(UserError, match="a report needs runs that ended"):
        report(out)
