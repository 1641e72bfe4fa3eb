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
from merlin_cowclip.workflows.study.pages import facts
from merlin_cowclip.workflows.study.paper import PRINTED
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
                    "epochs": epochs,
                    "clip": f"The clip shortened no gradient of {run}.",
                    "config": {
                        "dataset": dataset,
                        "rows": {"train": 90, "test": 10},
                        "cardinalities": {"a": 7, "b": 5},
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


def test_what_the_clip_did_is_said_of_every_cell(tmp_path):
    """By batch size: what it does to the largest one is what is asked."""
    names = ["scaling-rules", "clipping", "curves"]
    out = swept(tmp_path / "study", names)
    text = html.unescape(report(out).read_text())
    told = 0
    for name in names:
        for cell in json.loads((out / "studies" / f"{name}.json").read_text())["cells"]:
            first, second = (f"The clip shortened no gradient of {cell['runs'][n]}." for n in "12")
            if cell["config"]["base"]["clip"] is not None:
                assert f"{cell['column']} (seed 1): {first}" in text
                told += 1
            else:
                assert first not in text
            assert second not in text
    assert told > 8


def test_the_page_stands_alone(page):
    found = Page(page)
    assert found.open == []
    assert not re.findall(r'(?:src|@import|url)\s*[=(]\s*["\']?(?:https?:)?//', page)
    assert not [link for link in found.links if "//" in link]
    assert all(STUDIES[name].title in html.unescape(page) for name in TRAINED)
    assert page.count("<svg") >= len(TRAINED)


def test_every_number_leads_to_its_result(out, page):
    links = {link for link in Page(page).links if link.startswith("runs/")}
    assert links == {str(p.relative_to(out)) for p in out.glob("runs/*/result.json")}
    text = (out / "report.md").read_text()
    cell = re.search(r"\| ([\d.]+) ± ([\d.]+) ((?:\[\d\]\([^)]+\) ?)+)", text)
    aucs = [
        json.loads((out / link).read_text())["auc"] for link in re.findall(r"\((.+?)\)", cell[3])
    ]
    assert len(aucs) == 3
    assert float(cell[1]) == pytest.approx(100 * np.mean(aucs), abs=5e-4)
    assert float(cell[2]) == pytest.approx(100 * np.std(aucs, ddof=1), abs=5e-4)


def test_the_papers_numbers_stand_beside(out, page):
    text = (out / "report.md").read_text()
    assert "| *cowclip, paper* | 80.86 | 80.97 |" in text  # Table 2
    assert "| *dcn_v2, paper* | 80.78 | 80.87 | 80.98 |" in text  # Table 3
    assert "| *linear scale on dense, paper* | diverged |" in text  # Table 12
    assert "| *Hotline, cited* | 53 |  |" in text  # Table 5


def test_the_log_loss_stands_there_too(out, page):
    text = (out / "report.md").read_text()
    section = text[text.index(": the log loss (Tables 2 and 10)") :]
    assert "| *cowclip, paper* | 0.4430 | 0.4425 |" in section  # Table 2
    found = {(o.cell.row, o.cell.column): o for o in sweep.outcomes(out, "scaling-rules")}
    mean, deviation = found["sqrt", "8,192"].mean("log_loss")
    assert re.search(rf"\| sqrt \| .* \| {mean:.5f} ± {deviation:.5f} \[1\]", section)
    (row, column), least = min(
        ((place, o.mean("log_loss")[0]) for place, o in found.items()), key=lambda pair: pair[1]
    )
    assert f"Least: `{row}` at {column}, {least:.5f}." in section
    assert "the log loss (Tables 5" not in text  # a study of minutes


def test_all_whose_log_loss_is_least_are_named(tmp_path):
    """As rules that are one at the smallest batch, whose rows share their runs."""
    folder = swept(tmp_path / "out", ["scaling-rules"])
    cells = sweep.read_record(folder, "scaling-rules")["cells"]
    alike = [c for c in cells if c["column"] == "1,024"][:2]
    alike.append(next(c for c in cells if c["column"] == "8,192" and c["row"] == "cowclip"))
    for run in {run for cell in alike for run in cell["runs"].values()}:
        path = folder / "runs" / run / "result.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "log_loss": 0.1}))
    rows = [
        f"`{cell['row']}`"
        for cell in cells
        if cell["column"] == "1,024" and any(cell["runs"] == other["runs"] for other in alike)
    ]
    assert len(rows) > 1
    text = report(folder).with_suffix(".md").read_text()
    assert f"Least: {', '.join(rows)} at 1,024; `cowclip` at 8,192, 0.10000." in text


def test_plots_beside_the_markdown_are_those_of_the_page(out, page):
    shown = re.findall(r"!\[[^\]]+\]\((plots/[^)]+)\)", (out / "report.md").read_text())
    assert len(shown) == page.count("<svg")
    assert all((out / path).read_text() in page for path in shown)
    assert {"plots/scaling-rules-1.svg", "plots/scaling-rules-log-loss-1.svg"} <= set(shown)


def test_curves_are_those_of_figures_5_and_6_and_of_figure_2(page):
    for title in ("test AUC", "test log loss", "training loss"):
        assert f"{title}, by epoch, of the first seed" in page
    assert "test AUC, %, by learning rate" in page
    assert "test log loss, by learning rate" in page


def test_norms_are_those_of_figure_4(out, monkeypatch):
    drawn = []
    monkeypatch.setattr(report_plots, "line_plot", lambda lines, *_, **__: drawn.append(lines))
    found, record = sweep.outcomes(out, "gradients"), sweep.read_record(out, "gradients")
    list(report_plots._distributions(out, found, record))
    assert len(drawn[0]) == 2 * len(found)
    # Of the last epoch alone, in % of rare and frequent rows together.
    assert drawn[0]["cowclip, 8,192, rare"] == [(0.25, 30.0, 0.0), (0.5, 10.0, 0.0)]
    assert drawn[0]["cowclip, 8,192, frequent"] == [(0.25, 0.0, 0.0), (0.5, 60.0, 0.0)]


def test_the_papers_rows_are_ours():
    setting = Setting(tuple(1024 * 2**i for i in range(8)))
    for (name, _), table in PRINTED.items():
        ours = {cell.row for cell in STUDIES[name].cells(setting)}
        assert {row for row, _ in table} <= ours


def test_other_data_have_no_printed_numbers(tmp_path):
    text = (
        report(swept(tmp_path / "out", ["curves"], dataset="mine")).with_suffix(".md").read_text()
    )
    assert "paper*" not in text


def test_only_the_same_batch_size_has_the_papers_numbers(tmp_path):
    """The column "baseline" is of the first."""
    for sizes, line in (
        ((64, 1024, 1536), "|  |  | 80.86 |  |"),
        ((1024, 1536, 2048), "| 80.76 | 80.86 |  | 80.93 |"),
    ):
        setting = dataclasses.replace(SETTING, batch_sizes=sizes, seeds=(1,))
        folder = swept(tmp_path / str(sizes[0]), ["networks"], setting)
        assert f"| *deepfm, paper* {line}" in report(folder).with_suffix(".md").read_text()


def test_nothing_is_said_of_numbers_of_the_papers_that_are_not_there(tmp_path):
    """At none of the batch sizes has the paper a number, nor those that it cites."""
    setting = dataclasses.replace(SETTING, batch_sizes=(64, 1536), seeds=(1,))
    folder = swept(tmp_path / "out", ["scaling-rules", "time"], setting)
    text = report(folder).with_suffix(".md").read_text()
    assert "What an epoch of Criteo would take" in text
    for said in ("paper*", "cited*", "the paper's numbers", "the paper cites", "The paper's: "):
        assert said not in text


def test_what_stands_beside_the_papers_numbers_is_told(tmp_path):
    for name, network, ours in (
        ("scaling-rules", {"model": "dcn"}, "DeepFM, ten epochs {}. Ours: dcn, 1 epoch, 90 "),
        ("time", {}, "size: ten epochs {}. Ours: 1 epoch, 90 rows"),
    ):
        setting = dataclasses.replace(SETTING, config={"epochs": 1, **network})
        text = report(swept(tmp_path / name, [name], setting)).with_suffix(".md").read_text()
        assert ours.format("on the whole data set, one V100") in text


def test_the_control_compares_no_aucs_of_different_data(tmp_path):
    out = swept(tmp_path / "out", ["control"])
    text = report(out).with_suffix(".md").read_text()
    assert "Best at" not in text
    small, large = (o.mean("auc")[0] for o in sweep.outcomes(out, "control")[:2])
    assert "From 1,024 to 8,192 the AUC changes by" in text
    assert f"`full, none` {100 * (large - small):+.3f}, " in text


def test_the_facts_are_of_the_data_itself_and_of_all_runs(tmp_path):
    out = swept(tmp_path / "out", ["control"])
    for path in out.glob("runs/*-top-3/result.json"):
        path.write_text(path.read_text().replace('"a": 7', '"a": 1'))
    one = min(out.glob("runs/*-full/result.json"))
    one.write_text(one.read_text().replace("3.11", "3.10"))
    text = report(out).with_suffix(".md").read_text()
    assert "- table rows: 12 in 2 fields, padding, missing and unknown among them\n" in text
    assert "- versions: python 3.10; other runs: python 3.11\n" in text


def test_a_path_of_odd_bytes(tmp_path):
    out = swept(tmp_path / "out", ["curves"])
    record = {**json.loads((out / "sweep.json").read_text()), "data": "/da\udcffta/<b>"}
    (out / "sweep.json").write_text(json.dumps(record))
    assert "/da\\udcffta/&lt;b&gt;" in report(out).read_text()


def test_rows_that_fields_share_are_counted_once():
    """As those of the tables are; of an older run nothing tells."""
    config = {"cardinalities": {"home": 9, "away": 9, "city": 5}, "rows": {"train": 1, "test": 1}}
    config |= {"versions": {}, "machine": {}}
    assert facts([config])["table rows"].startswith("23 in 3 fields")
    assert facts([{**config, "table_rows": 14}])["table rows"].startswith("14 in 3 fields")


def test_what_no_command_made_shows_none(tmp_path):
    """As a sweep from Python."""
    out = swept(tmp_path / "out")
    for record in (out / "studies").glob("*.json"):
        record.write_text(json.dumps({**json.loads(record.read_text()), "command": ""}))
    page = report(out)
    assert "```" not in page.with_suffix(".md").read_text()
    assert "<pre>" not in page.read_text()


def test_a_place_where_nothing_can_be_written(tmp_path):
    out = swept(tmp_path / "out")
    (out / "plots").write_text("in the way")
    with pytest.raises(UserError, match="written into its sweep's folder.*plots.*on the copy"):
        report(out)


def test_all_runs_diverged(tmp_path):
    out = swept(tmp_path / "out", ["curves", "gradients"])
    for path in out.glob("runs/*/result.json"):
        path.rename(path.with_name("diverged.json"))
    assert "<svg" not in report(out).read_text()


def test_the_verdict(tmp_path):
    out = swept(tmp_path / "out", ["scaling-rules"])
    found = {(o.cell.row, o.cell.column): o for o in sweep.outcomes(out, "scaling-rules")}
    small, large = (found["cowclip", column] for column in ("1,024", "8,192"))
    times = [np.mean(o.values("train_seconds")) for o in (small, large)]
    report(out)
    text = (out / "report.md").read_text()
    (mean, deviation), (base, _) = large.mean("auc"), small.mean("auc")
    assert f"At 8,192 with `cowclip`, AUC {100 * mean:.3f} ± {100 * deviation:.3f} %" in text
    assert f"against {100 * base:.3f}" in text
    ratio = times[0] / times[1]
    how = f"{ratio:.1f} times faster" if ratio > 1 else f"{1 / ratio:.1f} times slower"
    assert f"{how}." in text
    was = {path: path.read_text() for path in out.glob("runs/*/result.json")}
    for path, result in was.items():
        if json.loads(result)["train_seconds"] in large.values("train_seconds"):
            path.write_text(json.dumps({**json.loads(result), "train_seconds": 1.02 * times[0]}))
    assert ", as fast." in report(out).with_suffix(".md").read_text()
    for path, result in was.items():
        path.write_text(result)
    for path in out.glob("runs/*/result.json"):
        result = json.loads(path.read_text())
        if result["train_seconds"] in small.values("train_seconds"):
            path.write_text(json.dumps({**result, "jobs": 3}))
    text = report(out).with_suffix(".md").read_text()
    assert f"{how} (trained up to 3 at a time, which makes each take longer)." in text


def test_lines_that_a_far_one_presses_together_have_a_plot_of_their_own(tmp_path):
    out = swept(tmp_path / "out", ["scaling-rules"], dataclasses.replace(SETTING, seeds=(1,)))
    assert "nowhere 1 % below the best" not in report(out).read_text()  # all are
    record = json.loads((out / "studies" / "scaling-rules.json").read_text())
    runs = {(c["row"], c["column"]): c["runs"]["1"] for c in record["cells"]}
    path = out / "runs" / runs["linear", "8,192"] / "result.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "auc": 0.7}))
    page = report(out).read_text()
    figure = page[page.rindex("<figure>", 0, page.index("nowhere 1 % below the best")) :]
    figure = figure[: figure.index("</figure>")]
    assert "sqrt" in figure
    assert "linear" not in figure


def test_what_is_equal_is_best_together(tmp_path):
    out = swept(tmp_path / "out", ["clipping"], dataclasses.replace(SETTING, seeds=(1,)))
    for clip, auc in (("no clip", 0.9), ("adaptive_field", 0.9), ("adaptive_column", 0.9)):
        for outcome, cell in zip(
            sweep.outcomes(out, "clipping"),
            json.loads((out / "studies" / "clipping.json").read_text())["cells"],
            strict=True,
        ):
            if outcome.cell.row == clip:
                path = out / "runs" / cell["runs"]["1"] / "result.json"
                path.write_text(json.dumps({**json.loads(path.read_text()), "auc": auc}))
    text = report(out).with_suffix(".md").read_text()
    assert (
        "Best at 8,192: `no clip`, `adaptive_field`, `adaptive_column`, 90.000 %; worst: " in text
    )


def test_runs_that_are_missing_or_diverged(tmp_path):
    out = swept(tmp_path / "out", ["curves"])
    runs = json.loads((out / "studies" / "curves.json").read_text())["cells"][1]["runs"]
    (out / "runs" / runs["1"] / "result.json").unlink()
    report(out)
    text = (out / "report.md").read_text()
    assert "(1 to come)" in text
    assert "Runs still to come: 1; until then means may be of fewer seeds." in text
    assert "Mean ± deviation of 2 to 3 seeds" in text
    (out / "runs" / runs["1"] / "diverged.json").write_text("{}")
    report(out)
    text = (out / "report.md").read_text()
    assert f"| diverged [1](runs/{runs['1']}/diverged.json) [2](runs/{runs['2']}/result" in text
    assert "Diverged somewhere: `cowclip`" in text


@pytest.fixture
def trained_here(monkeypatch):
    """Sweeps of data that need not be there; a test sets what `work_off` does."""
    monkeypatch.setattr(sweep, "_check", lambda data, cells: None)
    monkeypatch.setattr(sweep, "identity_of", lambda data: "x")
    monkeypatch.setattr(sweep, "columns_of", lambda data: data.inputs)
    inputs = {"label": "y", "categorical": ["a"], "lists": [], "continuous": []}
    data = SimpleNamespace(path=Path("/data"), inputs=inputs, cardinalities={"a": 5})

    def run(out: Path, work_off, data=data, study: str = "curves") -> str:
        monkeypatch.setattr(sweep, "work_off", work_off)
        return sweep.sweep(STUDIES[study], data, out, SETTING, progress=False)

    return run, data


def test_an_interrupt_says_what_is_kept(tmp_path, trained_here):
    def interrupted(tasks, jobs):
        (tasks[0].run).mkdir()
        (tasks[0].run / "diverged.json").write_text("{}")
        yield tasks[0]
        raise KeyboardInterrupt

    with pytest.raises(Stopped, match="after 1 of 6 runs, which are kept in .* same command again"):
        trained_here[0](tmp_path / "out", interrupted)


def test_a_table_is_of_the_sweep_that_made_it(tmp_path, trained_here):
    """Not of another one of the same study, which was begun meanwhile."""

    def and_another(tasks, jobs):
        for task in tasks:
            task.run.mkdir()
            (task.run / "diverged.json").write_text("{}")
            yield task
        path = tmp_path / "out" / "studies" / "curves.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "cells": []}))

    assert trained_here[0](tmp_path / "out", and_another).count("diverged") == 2


def test_the_same_rows_of_another_meaning_are_refused(tmp_path, trained_here):
    run, data = trained_here
    with pytest.raises(Stopped):
        run(tmp_path / "out", raising)
    with pytest.raises(Stopped):
        run(tmp_path / "out", raising)
    for changes in ({"inputs": {**data.inputs, "label": "z"}}, {"cardinalities": {"a": 6}}):
        other = SimpleNamespace(**{**vars(data), **changes})
        with pytest.raises(UserError, match="the runs of a folder must be of one data set"):
            run(tmp_path / "out", raising, other)


def raising(tasks, jobs):
    raise KeyboardInterrupt


def test_one_seed_has_no_deviation(tmp_path):
    out = swept(tmp_path / "out", ["curves"], dataclasses.replace(SETTING, seeds=(1,)))
    assert "±" not in sweep.table(STUDIES["curves"], sweep.outcomes(out, "curves"))


def test_a_damaged_result_says_what_to_remove(tmp_path):
    """Sweeping again would leave it alone."""
    out = swept(tmp_path / "out", ["curves"])
    path = next(out.glob("runs/*/result.json"))
    path.write_text("{")
    with pytest.raises(UserError, match=f"Remove {path.parent}, and sweep again"):
        report(out)


def test_a_run_that_was_resumed_for_more_epochs_is_no_longer_the_sweeps(tmp_path):
    out = swept(tmp_path / "out", ["curves"])
    path = next(out.glob("runs/*/result.json"))
    result = json.loads(path.read_text())
    for identity in (path.parent.name.split("-")[0] + "0123", "f" * 64):
        result["config"]["identity"] = identity
        path.write_text(json.dumps(result))
        if identity.startswith("f"):
            with pytest.raises(UserError, match="must be as the sweep would train it. Received: "):
                report(out)
        else:
            report(out)


def test_what_is_no_sweep(tmp_path):
    with pytest.raises(UserError, match="a report is of a sweep's folder. Received: "):
        report(tmp_path)
    setting = dataclasses.replace(SETTING, seeds=(1,))
    out = swept(tmp_path / "out", ["curves"], setting)
    for path in out.glob("runs/*/result.json"):
        path.unlink()
    with pytest.raises(UserError, match="a report needs runs that ended"):
        report(out)
    assert not (out / "report.html").exists()


def test_a_study_of_time_shows_minutes(tmp_path):
    out = swept(tmp_path / "out", ["time"], dataclasses.replace(SETTING, seeds=(1,)))
    found = sweep.outcomes(out, "time")
    minutes = found[0].values("train_seconds")[0] / 60
    assert f"{minutes:.2f}" in sweep.table(STUDIES["time"], found)
    assert "minutes of training, by network" in sweep.table(STUDIES["time"], found)


def test_what_an_epoch_of_criteo_takes(tmp_path):
    """At 1,024 the paper's ten epochs with DeepFM took 768 minutes."""
    out = swept(tmp_path / "out", ["time"], dataclasses.replace(SETTING, seeds=(1,)))
    found = {(o.cell.row, o.cell.column): o for o in sweep.outcomes(out, "time")}
    seconds = found["dcn", "8,192"].mean("train_seconds")[0]
    hours = seconds / 3600 * 41_256_555 / 90
    text = report(out).with_suffix(".md").read_text()
    assert "| *deepfm, minutes, paper* | 76.8 | 10.2 |" in text
    assert re.search(rf"\| dcn, minutes \|.*\| {60 * hours:.1f} \[1\]", text)
    assert "price |" not in text
    text = report(out, Cost(price_per_hour=2.5)).with_suffix(".md").read_text()
    assert re.search(rf"\| dcn, price \|.*\| {2.5 * hours:.2f} \[1\]", text)
    text = report(out, Cost(rows=180)).with_suffix(".md").read_text()
    assert re.search(rf"\| dcn, minutes \|.*\| {seconds / 30:.1f} \[1\]", text)
    assert "minutes, paper*" not in text
    with pytest.raises(UserError, match="a cost is reckoned from the study 'time'. Received: "):
        report(swept(tmp_path / "none", ["curves"]), Cost(price_per_hour=2.5))


@pytest.mark.parametrize("price", [0.0, -1.0, float("nan"), float("inf")])
def test_what_is_no_price(price):
    with pytest.raises(UserError, match="price_per_hour must be a positive number. Received: "):
        Cost(price_per_hour=price)


def test_how_often_ids_occur(data, tmp_path, monkeypatch):
    """Counted without a test part, and anew at other batch sizes."""
    out, study = tmp_path / "out", STUDIES["frequencies"]
    sweep.sweep(study, data, out, Setting((64,)), progress=False)
    monkeypatch.setattr(type(data), "test_files", [])
    table = sweep.sweep(study, data, out, Setting((64, 512)), progress=False)
    assert "all fields" in table
    page = Page(report(out).read_text())
    links = {link for link in page.links if "//" not in link}
    assert links == {"frequencies/summary.parquet", "frequencies/frequencies.parquet"}
    assert all((out / link).exists() for link in links)
    text = (out / "report.md").read_text()
    rows = pd.concat([pd.read_parquet(path) for path in data.train_files])
    counts = rows["user"].value_counts()
    rare = 100 * (counts < len(rows) / 512).mean()
    assert re.search(rf"\| user \| {len(counts)} \|.* {rare:.1f} \|\n", text)
    assert "% of 512." in text
    shutil.rmtree(out / "frequencies")  # as one that was killed leaves it
    with pytest.raises(UserError, match="a report needs runs that ended"):
        report(out)


def test_a_study_whose_runs_all_diverged_says_so(tmp_path):
    for name, rows in (("control", "`full, none`, "), ("curves", "`cowclip`")):
        out = swept(tmp_path / name, [name])
        for path in out.glob("runs/*/result.json"):
            path.rename(path.with_name("diverged.json"))
        text = report(out).with_suffix(".md").read_text()
        assert re.search(f"Diverged somewhere: .*{rows}", text)
        assert "the AUC changes by" not in text
