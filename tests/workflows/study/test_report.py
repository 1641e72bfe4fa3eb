"""A sweep's page: its numbers are those of the results, each with the way there."""

from __future__ import annotations

import dataclasses
import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.study import plots, sweep
from merlin_cowclip.workflows.study.report import report
from merlin_cowclip.workflows.study.studies import STUDIES, Setting

SIZES = (1024, 8192)
SETTING = Setting(SIZES, config={"epochs": 2}, seeds=(1, 2, 3))
FULL = {"train": 41_256_555, "valid": 0, "test": 4_584_062}


def swept(
    out: Path, names=STUDIES, setting=SETTING, dataset="criteo", rows=FULL, jobs: int = 1
) -> Path:
    """A sweep's folder as if its runs had been trained; their AUCs are drawn."""
    random = np.random.default_rng(0)
    for folder in ("studies", "runs"):
        (out / folder).mkdir(parents=True)
    data = {"format": 1, "data": "/data", "data_sha256": "x", "dataset": dataset, "rows": rows}
    (out / "sweep.json").write_text(json.dumps(data))
    for name in names:
        study, epochs = STUDIES[name], 1 if name == "time" else setting.config.get("epochs", 10)
        own = dataclasses.replace(setting, config={**setting.config, "epochs": epochs})
        record = sweep._record(own, list(study.cells(own))) | {"base": "me", "command": "again"}
        (out / "studies" / f"{name}.json").write_text(json.dumps(record))
        for cell in record["cells"]:
            for run in cell["runs"].values():
                folder = out / "runs" / run
                if folder.exists():
                    continue
                folder.mkdir()
                auc, seconds = 0.75 + 0.01 * random.random(), 60 * random.random()
                loss = 0.45 + 0.01 * random.random()
                result = {
                    "auc": auc,
                    "log_loss": loss,
                    "train_seconds": seconds,
                    "jobs": jobs,
                    "epochs": [{"epoch": e, "valid_auc": auc - 0.01 * (2 - e)} for e in (1, 2)],
                    "clip": f"The clip shortened no gradient of {run}.",
                    "config": {
                        "data": "/data",
                        "dataset": dataset,
                        "model": "deepfm",
                        "identity": run,
                        "rows": rows,
                        "cardinalities": {"a": 7, "b": 5},
                        "table_rows": 12,
                        "versions": {"python": "3.11"},
                        "machine": {"platform": "x", "cpus": 2, "gpus": []},
                    },
                }
                (folder / "result.json").write_text(json.dumps(result))
                lines = [
                    "epoch,valid_auc,valid_log_loss,train_loss,gradient_norm_frequent,"
                    "gradient_norm_rare",
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
        if tag in ("table", "tr", "td", "th", "p", "figure", "svg", "pre", "h2", "dl", "small"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if self.open and self.open[-1] == tag:
            self.open.pop()


def as_text(page: str) -> str:
    """A page's words: rows of tables as `| cell | cell |`, links as `[words](address)`."""
    page = re.sub(r'<a href="([^"]+)">(.*?)</a>', r"[\2](\1)", page)
    page = re.sub(r"</t[dh]><t[dh][^>]*>", " | ", page)
    page = re.sub(r"</t[dh]></tr>", " |", re.sub(r"<tr><t[dh][^>]*>", "| ", page))
    return html.unescape(re.sub(r"<small>(.*?)</small>", r" \1", page))


def read(out: Path) -> str:
    return as_text(report(out).read_text())


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return swept(tmp_path_factory.mktemp("report") / "out")


@pytest.fixture(scope="module")
def page(out):
    return report(out).read_text()


def section_of(page: str, name: str) -> str:
    text = as_text(page)
    return text[text.index(f'<h2 id="{name}"') :].split("<h2", 2)[1]


def test_the_page_needs_no_other_file(page):
    found = Page(page)
    assert found.open == []
    assert not re.findall(r'(?:src|@import|url)\s*[=(]\s*["\']?(?:https?:)?//', page)
    assert not [link for link in found.links if "//" in link]
    assert page.count("<svg") >= len(STUDIES)


def test_the_page_begins_with_a_summary_of_all_studies(page):
    text = as_text(page[: page.index("<h2")])
    for name in STUDIES:
        assert f"| [{STUDIES[name].title}](#{name}) | {STUDIES[name].paper} | " in text
        assert f'<h2 id="{name}"' in page
    assert "<dt>date</dt>" in page
    assert "<dt>machine</dt><dd>x, 2 CPUs, GPUs: none</dd>" in page


def test_every_number_leads_to_its_result(out, page):
    links = {link for link in Page(page).links if link.startswith("runs/")}
    assert links == {str(p.relative_to(out)) for p in out.glob("runs/*/result.json")}
    cell = re.search(r"\| ([\d.]+) ± ([\d.]+) runs((?: \[\d\]\([^)]+\))+)", as_text(page))
    aucs = [
        json.loads((out / link).read_text())["auc"] for link in re.findall(r"\((.+?)\)", cell[3])
    ]
    assert len(aucs) == 3
    assert float(cell[1]) == pytest.approx(100 * np.mean(aucs), abs=5e-4)
    assert float(cell[2]) == pytest.approx(100 * np.std(aucs, ddof=1), abs=5e-4)


def test_norms_are_those_of_figure_4(out):
    found = sweep.outcomes(out, "gradients")
    drawn = dict(plots._norms([(o.cell, o.runs[1]) for o in found]))
    assert len(drawn) == 2 * len(found)
    # Of the last epoch alone, in % of rare and frequent rows together.
    assert drawn["cowclip, 8,192, rare"] == [(0.25, 30.0, 0.0), (0.5, 10.0, 0.0)]
    assert drawn["cowclip, 8,192, frequent"] == [(0.25, 0.0, 0.0), (0.5, 60.0, 0.0)]


@pytest.mark.parametrize(
    ("study", "numbers"),
    [  # of its tables 2, 3, 12 and 5, at the batch sizes that it has
        ("scaling-rules", r"\| cowclip \|.* \| 80.86 \| 80.97 \|"),
        ("scaling-rules", r"\| cowclip \|.* \| 0.4430 \| 0.4425 \|"),
        ("networks", r"\| dcn_v2 \|.* \| 80.78 \| 80.87 \| 80.98 \|"),
        ("ablation", r"\| linear scale on dense \|.* \| diverged \|"),
        ("time", r"\| deepfm \|.* \| 768 \| 102 \|"),
    ],
)
def test_numbers_of_the_paper(page, study, numbers):
    assert re.search(numbers, section_of(page, study))


def test_numbers_of_the_paper_are_for_its_data_and_batch_sizes(tmp_path):
    setting = dataclasses.replace(SETTING, batch_sizes=(1024, 1536, 2048), seeds=(1,))
    text = read(swept(tmp_path / "sizes", ["networks"], setting))
    assert re.search(r"\| deepfm \|.* \| 80.76 \| 80.86 \| 80.93 \|", text)
    few = {"train": 900_000, "valid": 0, "test": 100_000}
    text = read(swept(tmp_path / "few", ["networks"], setting, rows=few))
    assert "80.76" not in text
    assert "The paper's numbers are for the full data set" in text
    assert 'class="paper"' not in read(swept(tmp_path / "out", ["networks"], dataset="mine"))


def test_the_clip_is_summarized_for_every_clipped_cell(out, page):
    text = html.unescape(page)
    for cell in json.loads((out / "studies" / "scaling-rules.json").read_text())["cells"]:
        first, second = (f"The clip shortened no gradient of {cell['runs'][n]}." for n in "12")
        assert (first in text) == (cell["config"]["clip"] != "none")
        assert second not in text


def test_the_verdict(out, page):
    found = {(o.cell.row, o.cell.column): o for o in sweep.outcomes(out, "scaling-rules")}
    at_most = {row: o.mean("auc") for (row, column), o in found.items() if column == "8,192"}
    best = max(at_most, key=lambda row: at_most[row])
    mean, deviation = (100 * value for value in at_most[best])
    section = section_of(page, "scaling-rules")
    assert f"At 8,192, {best} has the highest test AUC ({mean:.3f} ± {deviation:.3f} %)" in section
    change = 100 * (at_most["cowclip"][0] - found["cowclip", "1,024"].mean("auc")[0])
    assert f"From 1,024 to 8,192, the AUC of cowclip changes by {change:+.3f} points, " in section
    times = [found.mean("train_seconds")[0] for found in sweep.outcomes(out, "time")[:2]]
    words = f"deepfm trains an epoch {times[0] / times[1]:.1f} times as fast at 8,192 as at 1,024."
    assert words in section_of(page, "time")
    small, large = (o.mean("auc")[0] for o in sweep.outcomes(out, "control")[4:6])
    assert f"full, linear changes by {100 * (large - small):+.3f} points" in section_of(
        page, "control"
    )


@pytest.mark.parametrize(
    ("study", "options", "why"),
    [
        ("curves", {"rows": {"train": 90_000, "valid": 0, "test": 10_000}}, "only 11 steps"),
        ("curves", {"setting": dataclasses.replace(SETTING, seeds=(1,))}, "each cell has 1 seed,"),
        ("time", {"jobs": 2}, "up to 2 runs were trained at a time"),
    ],
)
def test_no_verdict_without_steps_and_seeds(tmp_path, study, options, why):
    text = read(swept(tmp_path / "out", [study], **options))
    assert re.search(f'class="doubt">No verdict: .*{why}', text)
    assert 'class="verdict"' not in text


def test_the_base_and_what_of_it_was_not_tuned(tmp_path):
    setting = dataclasses.replace(SETTING, values={"embedding_lr": 3e-3, "l2": 0.0}, seeds=(1,))
    text = read(swept(tmp_path / "out", ["curves"], setting))
    assert (
        "The base, at batch size 1,024: embedding_lr 0.003, l2 0. Not tuned, but each rule's "
        "default: dense_lr 8e-4 with rule sqrt_decay or cowclip, else 1e-4; clip_ratio 1; "
        "clip_floor 3.162e-5. From: me."
    ) in text


def test_runs_that_are_missing_or_diverged(tmp_path):
    out = swept(tmp_path / "out", ["curves"])
    runs = json.loads((out / "studies" / "curves.json").read_text())["cells"][1]["runs"]
    (out / "runs" / runs["1"] / "result.json").unlink()
    text = read(out)
    assert "(1 to come)" in text
    assert "No verdict yet: 1 run still to come." in text
    (out / "runs" / runs["1"] / "diverged.json").write_text("{}")
    text = read(out)
    assert f"| diverged runs [1](runs/{runs['1']}/diverged.json) [2](runs/{runs['2']}/res" in text
    assert "Diverged at least once: cowclip" in text
    for path in out.glob("runs/*/result.json"):
        path.rename(path.with_name("diverged.json"))
    assert "<svg" not in report(out).read_text()


def test_a_folder_that_cannot_be_reported_is_refused(tmp_path):
    with pytest.raises(UserError, match="a report is of a sweep's folder, or of runs. Received: "):
        report(tmp_path)
    out = swept(tmp_path / "out", ["curves"], dataclasses.replace(SETTING, seeds=(1,)))
    for path in out.glob("runs/*/result.json"):
        path.unlink()
    with pytest.raises(UserError, match="a report needs runs that ended"):
        report(out)
    assert not (out / "report.html").exists()


def test_rules_have_the_same_color_everywhere():
    lines = {"none": [(1.0, 1.0, 0.0)], "cowclip": [(1.0, 2.0, 0.1)]}
    assert [plots._place(name, lines) for name in lines] == [3, 0]
    assert [plots._place(name, ["cowclip"]) for name in ["cowclip"]] == [0]
    assert [plots._place(name, ["dcn", "deepfm"]) for name in ("dcn", "deepfm")] == [0, 1]
