"""The pages of `report`: a sweep's studies beside the paper's numbers, or single runs."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.study import occurrences
from merlin_cowclip.workflows.study.pages import (
    Cell,
    Page,
    Section,
    Table,
    facts,
    read_metrics,
)
from merlin_cowclip.workflows.study.paper import EPOCHS, cited, is_of_the_paper, printed
from merlin_cowclip.workflows.study.plots import line_plot, plots
from merlin_cowclip.workflows.study.studies import (
    AUC,
    LOG_LOSS,
    MINUTES,
    STUDIES,
    Quantity,
    few_steps,
)
from merlin_cowclip.workflows.study.sweep import (
    DIVERGED,
    RECORD,
    RUNS,
    STUDIES_,
    Outcome,
    outcomes,
    read_record,
)
from merlin_cowclip.workflows.training.runs import RESULT, Run

HTML = "report.html"
MIN_SEEDS = 3
"""Of each cell: with fewer there is no verdict."""
CRITEO_ROWS = 41_256_555
"""Of the training part: nine tenths of the 45,840,617 rows of Criteo Kaggle's `train.txt`."""
_PAPER_KEYS = {AUC.key: "auc", LOG_LOSS.key: "log_loss", MINUTES.key: "minutes"}


@dataclass(frozen=True)
class Cost:
    """What the cost model beneath the study of time assumes.

    Attributes:
      rows: of the training part of the larger data.
      price_per_hour: of the machine that the runs were on; `None`: not known.

    Raises:
      UserError: no number of rows, or no price.
    """

    rows: int = CRITEO_ROWS
    price_per_hour: float | None = None

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise UserError(f"rows must be a whole number of at least 1. Received: {self.rows}")
        price = self.price_per_hour
        if price is not None and not (math.isfinite(price) and price > 0):
            raise UserError(f"price_per_hour must be a positive number. Received: {price}")


def report(out: str | Path, cost: Cost | None = None) -> Path:
    """Write `OUT/report.html` on all that a sweep's folder holds.

    Args:
      out: the folder.
      cost: of the cost model beneath the study of time; by default an epoch of Criteo.

    Raises:
      UserError: no sweep's folder, not writable, without a finished run; or a cost without the
        study of time.
    """
    out = Path(out)
    if not (out / RECORD).exists():
        raise UserError(
            f"a report is of a sweep's folder, or of runs. Received: {out}, which is neither. Make "
            "one with 'merlin-cowclip sweep'"
        )
    known = [name for name in STUDIES if (out / STUDIES_ / f"{name}.json").exists()]
    if cost is not None and "time" not in known:
        raise UserError(
            f"a cost is computed from the study 'time'. Received: {out}, without it. Sweep it, or "
            "leave the price and the rows out"
        )
    sections: list[Section] = []
    runs: list[str] = []
    configs: dict[str, Any] = {}
    for name in known:
        record = read_record(out, name)
        if name == occurrences.NAME:
            found = occurrences.section(out, record)
            sections += [found] if found else []
            runs += ["counted"] if found else []
            continue
        cells = outcomes(out, name)
        results = [r for o in cells for r in o.results.values() if r is not None]
        done = sum(len(outcome.results) for outcome in cells)
        if done:
            sections.append(_section(out, name, cells, record, cost or Cost()))
            runs.append(f"{done} of {sum(len(cell['runs']) for cell in record['cells'])}")
        configs |= {r["config"]["identity"]: r["config"] for r in results}
    if not sections:
        raise UserError(
            f"a report needs runs that ended. Received: {out}, without one. Sweep again to go on"
        )
    summary = Table(
        ["study", "in the paper", "runs", "result"],
        [
            [Cell(s.title, f"#{s.name}"), s.paper, done, s.verdict or s.doubt]
            for s, done in zip(sections, runs, strict=True)
        ],
        words=True,
    )
    page = Page("What a large batch does to these data", "", facts(configs.values()), sections)
    page.summary = summary
    return _written(page, out / HTML)


def compare(runs: Sequence[str | Path], out: str | Path = HTML) -> Path:
    """Write a page that compares finished runs of `train`.

    Raises:
      UserError: one is no finished run, or the page cannot be written.
    """
    out, opened = Path(out), [Run.open(Path(run)) for run in runs]
    results = [dict(run.result) for run in opened]
    configs = [result["config"] for result in results]
    names = [str(run.path) for run in opened]
    for name, result in zip(names, results, strict=True):
        if result["auc"] is None:
            raise UserError(
                f"runs are compared by their test part. Received: {name}, trained on data without "
                "one. Leave it out"
            )
    rows = []
    for name, run, result, config in zip(names, opened, results, configs, strict=True):
        steps = f"{config['rows']['train'] // config['batch_size']:,}"
        place = os.path.relpath(run.path / RESULT, out.absolute().parent)
        rows.append(
            [
                Cell(name, place),
                *(config["rule"], f"{config['batch_size']:,}", steps, str(len(result["epochs"]))),
                *(q.shown(result[q.key], 0.0) for q in (AUC, LOG_LOSS, MINUTES)),
            ]
        )
    header = ["run", "rule", "batch size", "steps/epoch", "epochs"]
    table = Table([*header, *(q.name for q in (AUC, LOG_LOSS, MINUTES))], rows)
    flat = [{k: str(v) for k, v in {**c, **c["scaled"], "base": ""}.items()} for c in configs]
    options = ("model", "mlp", "embedding_dim", "update", "seed", "dense_schedule")
    values = [
        [key, *(one.get(key, "") for one in flat)]
        for key in (*options, *configs[0]["scaled"])
        if len({one.get(key) for one in flat}) > 1
    ]
    differ = Section("values", "What differs", tables=[Table(["", *names], values)])
    doubt = "These are single runs: a small difference may be chance. A sweep has several seeds."
    if len({config["data_sha256"] for config in configs}) > 1:
        doubt = "These runs are of different data, so their AUCs do not compare."
    curves = epoch_by_epoch({n: run.path for n, run in zip(names, opened, strict=True)})
    best = max(range(len(results)), key=lambda i: results[i]["auc"])
    headline = f"Highest test AUC: {names[best]}, {AUC.shown(results[best]['auc'], 0.0)} %."
    first = Section("runs", "The runs", doubt=doubt, tables=[table])
    sections = [first, *([differ] if values else []), curves]
    return _written(Page("Runs compared", headline, facts(configs), sections), out)


def epoch_by_epoch(runs: Mapping[str, Path], levels: Mapping[str, float] | None = None) -> Section:
    """A section on the test AUC and the training loss of runs; `levels` are of the AUC."""
    metrics = {name: read_metrics(run) for name, run in runs.items()}
    last = max(len(rows) for rows in metrics.values())
    aucs = [[name, *(f"{float(e['auc']):.4f}" for e in rows)] for name, rows in metrics.items()]
    table = Table(["test AUC after epoch", *map(str, range(1, last + 1))], aucs)
    section = Section("epochs", "Epoch by epoch", tables=[table])
    for key, title in (("auc", "test AUC"), ("train_loss", "training loss")):
        lines = {
            name: [(float(e["epoch"]), float(e[key]), 0.0) for e in rows]
            for name, rows in metrics.items()
        }
        plot = line_plot(lines, "epoch", title, levels=levels if key == "auc" else None)
        section.plots.append((f"{title}, by epoch", plot))
    return section


def _written(page: Page, path: Path) -> Path:
    try:
        page.write(path)
    except OSError as error:
        raise UserError(
            f"a report must be written. Received: {path}: {error}. Let the folder be written, or "
            "copy it and report on the copy"
        ) from error
    return path


def _section(
    out: Path, name: str, found: Sequence[Outcome], record: Mapping[str, Any], cost: Cost
) -> Section:
    study = STUDIES[name]
    config: Mapping[str, Any] = next(
        (r["config"] for o in found for r in o.results.values() if r is not None),
        {"rows": {"train": 0}, "dataset": "", "model": ""},
    )
    quantities = (AUC, LOG_LOSS) if study.quantity is AUC else (study.quantity,)
    section = Section(name, study.title, study.paper, command=record["command"])
    section.tables = [_table(name, found, record, quantity, config) for quantity in quantities]
    section.doubt = _doubt(found, record, config, study.quantity)
    if not section.doubt:
        section.verdict = " ".join(_verdict(name, found, record))
    section.notes = list(_notes(name, found, config))
    if name in ("scaling-rules", "clipping", "curves"):
        section.tables += _clips(found, study.rows)
    if name == "time" and config["rows"]["train"]:
        section.tables.append(_costs(found, record, cost, config["rows"]["train"]))
        section.notes += _cost_notes(cost, config["rows"]["train"])
    section.plots = list(plots(out, name, found, record))
    return section


def _table(
    name: str,
    found: Sequence[Outcome],
    record: Mapping[str, Any],
    quantity: Quantity,
    config: Mapping[str, Any],
) -> Table:
    """Ours by row and column; the paper's in columns of their own, for its own data."""
    theirs: dict[tuple[str, str], float | None] = {}
    systems: dict[str, dict[str, Any]] = {}
    if is_of_the_paper(config):
        key, dataset = _PAPER_KEYS[quantity.key], config["dataset"]
        theirs = printed(name, dataset, key, record["batch_sizes"][0])
        systems = cited(dataset) if name == "time" else {}
    rows = list(dict.fromkeys(o.cell.row for o in found))
    columns = list(dict.fromkeys(o.cell.column for o in found))
    of_paper = [c for c in columns if any((r, c) in theirs for r in rows)]
    by_place = {(o.cell.row, o.cell.column): o for o in found}
    head = [_column(by_place, column, rows, config) for column in columns]
    digits = 4 if quantity is LOG_LOSS else 2

    def paper(value: float | None) -> Cell:
        shown = f"{value:g}" if quantity is MINUTES else f"{value or 0:.{digits}f}"
        return Cell("diverged" if value is None else shown, kind="paper")

    lines = [
        [
            row,
            *(_cell(by_place.get((row, column)), record, quantity) for column in columns),
            *(paper(theirs[row, c]) if (row, c) in theirs else "" for c in of_paper),
        ]
        for row in rows
    ]
    for system, of in systems.items():
        blank = [""] * len(columns)
        cells = [paper(of[c]) if c in of else "" for c in of_paper]
        lines.append([Cell(system, small="cited by the paper", kind="paper"), *blank, *cells])
    groups = (
        [("", 1), ("these data", len(columns)), ("the paper", len(of_paper))] if of_paper else []
    )
    first = Cell(quantity.name, small=f"by {STUDIES[name].rows} and batch size")
    return Table([first, *head, *(Cell(c, kind="paper") for c in of_paper)], lines, groups)


def _column(
    by_place: Mapping[tuple[str, str], Outcome],
    column: str,
    rows: Sequence[str],
    config: Mapping[str, Any],
) -> Cell:
    size = next(by_place[r, column].cell.config.batch_size for r in rows if (r, column) in by_place)
    return Cell(column, small=f"{config['rows']['train'] // size:,} steps/epoch")


def _cell(outcome: Outcome | None, record: Mapping[str, Any], quantity: Quantity) -> str | Cell:
    """Mean ± deviation over seeds, with a link to each run."""
    if outcome is None or not outcome.results:
        return ""
    place = outcome.cell.row, outcome.cell.column
    runs = next(c["runs"] for c in record["cells"] if (c["row"], c["column"]) == place)
    mean = outcome.mean(quantity.key)
    shown = "diverged" if mean is None else quantity.shown(*mean)
    links = [
        (str(seed), f"{RUNS}/{runs[str(seed)]}/{DIVERGED if result is None else RESULT}")
        for seed, result in outcome.results.items()
    ]
    if len(links) < len(runs):
        shown += f" ({len(runs) - len(links)} to come)"
    if len(links) == 1:
        return Cell(shown, links[0][1])
    return Cell(shown, links=[(str(i), to) for i, (_, to) in enumerate(links, 1)])


def _doubt(
    found: Sequence[Outcome],
    record: Mapping[str, Any],
    config: Mapping[str, Any],
    quantity: Quantity,
) -> str:
    """Why there is no verdict; empty if there is one."""
    largest = max(o.cell.config.batch_size for o in found)
    seeds = len(record["seeds"])
    missing = sum(len(record["seeds"]) - len(o.results) for o in found)
    jobs = max((r["jobs"] for o in found for r in o.results.values() if r is not None), default=1)
    if missing:
        return f"No verdict yet: {missing} runs are still to come."
    if few := few_steps(config["rows"]["train"], largest):
        return f"No verdict: {few}"
    if seeds < MIN_SEEDS and quantity is AUC:
        return (
            f"No verdict: each cell has {seeds} seed{'s' * (seeds > 1)}, and {MIN_SEEDS} are "
            "needed to tell a difference from chance."
        )
    if jobs > 1 and quantity is MINUTES:
        return (
            f"No verdict: up to {jobs} runs were trained at a time, so each took longer than it "
            "would alone. Measure times with --jobs 1."
        )
    return ""


def _verdict(name: str, found: Sequence[Outcome], record: Mapping[str, Any]) -> Iterator[str]:
    least, most = (f"{size:,}" for size in (record["batch_sizes"][0], record["batch_sizes"][-1]))
    means = {(o.cell.row, o.cell.column): o.mean(AUC.key) for o in found}
    rows = list(dict.fromkeys(row for row, _ in means))
    if name == "time":
        seconds = {(o.cell.row, o.cell.column): o.mean(MINUTES.key) for o in found}
        small, large = seconds[rows[0], least], seconds[rows[0], most]
        if small and large and least != most:
            yield (
                f"{rows[0]} trains an epoch {small[0] / large[0]:.1f} times as fast at {most} as "
                f"at {least}."
            )
        return
    if name != "control":  # whose rows are of different data
        at_most = {r: m for r in rows if (m := means.get((r, most))) is not None}
        if len(at_most) > 1:
            best, worst = (f(at_most, key=lambda r: at_most[r]) for f in (max, min))
            yield (
                f"At {most}, {best} has the highest test AUC ({AUC.shown(*at_most[best])} %) and "
                f"{worst} the lowest ({AUC.shown(*at_most[worst])} %)."
            )
    for row in [
        r for r in ("cowclip", "adaptive_column", "full, linear", "top-3, linear") if r in rows
    ]:
        small, large = means.get((row, least)), means.get((row, most))
        if small and large and least != most:
            difference, chance = large[0] - small[0], math.hypot(large[1], small[1])
            beyond = "more" if abs(difference) > 2 * chance else "less"
            yield (
                f"From {least} to {most}, {row} changes by {100 * difference:+.3f} % AUC, {beyond} "
                "than twice the deviation over seeds."
            )
    diverged = sorted({o.cell.row for o in found if o.results and o.mean(AUC.key) is None})
    if diverged:
        yield f"Diverged at least once: {', '.join(diverged)}."


def _notes(name: str, found: Sequence[Outcome], config: Mapping[str, Any]) -> Iterator[str]:
    seeds = max(len(outcome.results) for outcome in found)
    epochs = found[0].cell.config.epochs
    yield (
        f"{seeds} seeds: mean ± sample standard deviation."
        if seeds > 1
        else "One seed: a small difference may be chance."
    )
    if is_of_the_paper(config):
        yield f"The paper: {EPOCHS} epochs on one V100. Here: {epochs} epochs."
    elif config["dataset"] in ("criteo", "avazu"):
        yield "The paper's numbers are of the full data set, so they are not shown beside these."


def _clips(found: Sequence[Outcome], what: str) -> list[Table]:
    """What the clip did in each cell, by its first run that did not diverge."""
    rows = []
    for outcome in found:
        first = next(((s, r) for s, r in outcome.results.items() if r is not None), None)
        if first and outcome.cell.config.hyperparameters.clip is not None:
            rows.append([outcome.cell.row, outcome.cell.column, str(first[0]), first[1]["clip"]])
    header = [what, "batch size", "seed", "what it did over all epochs"]
    return [Table(header, rows, words=True)] if rows else []


def _costs(found: Sequence[Outcome], record: Mapping[str, Any], cost: Cost, rows: int) -> Table:
    """What an epoch of larger data takes at the rates of the study of time."""
    times = cost.rows / rows
    quantities = [Quantity("train_seconds", "minutes", times / 60, 1)]
    if cost.price_per_hour is not None:
        price = times / 3600 * cost.price_per_hour
        quantities.append(Quantity("train_seconds", "price", price, 2))
    columns = list(dict.fromkeys(o.cell.column for o in found))
    cells = {(o.cell.row, o.cell.column): o for o in found}
    lines = [
        [f"{row}, {q.name}", *(_cell(cells.get((row, c)), record, q) for c in columns)]
        for row in dict.fromkeys(o.cell.row for o in found)
        for q in quantities
    ]
    data = "Criteo" if cost.rows == CRITEO_ROWS else f"{cost.rows:,} rows"
    return Table([Cell(f"an epoch of {data}", small="estimated"), *columns], lines)


def _cost_notes(cost: Cost, rows: int) -> list[str]:
    price = cost.price_per_hour
    return [
        f"The estimate multiplies the times above by {cost.rows:,} / {rows:,} training rows. It "
        "leaves out preparation and evaluation. An exact update passes over the whole table, so "
        "more ids take longer.",
        "For its price, give --price-per-hour."
        if price is None
        else f"The machine costs {price:g} an hour.",
    ]
