"""The pages of `report`: a sweep's studies beside the paper's numbers, or single runs."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.study.pages import Cell, Section, Table, write_page
from merlin_cowclip.workflows.study.paper import EPOCHS, cited, is_of_the_paper, printed
from merlin_cowclip.workflows.study.plots import line_plot, plots, points
from merlin_cowclip.workflows.study.studies import (
    AUC,
    LOG_LOSS,
    MINUTES,
    STUDIES,
    Quantity,
    few_steps,
    plural,
)
from merlin_cowclip.workflows.study.sweep import (
    DIVERGED,
    RECORD,
    RUNS,
    STUDIES_,
    Outcome,
    grid,
    outcomes,
    read_record,
)
from merlin_cowclip.workflows.training.logbook import METRICS
from merlin_cowclip.workflows.training.runs import RESULT, Run

HTML = "report.html"
MIN_SEEDS = 3
"""Of each cell: with fewer there is no verdict."""
CRITEO_ROWS = 41_256_555
"""Of the training part: nine tenths of the 45,840,617 rows of Criteo Kaggle's `train.txt`."""
_PAPER_KEYS = {AUC.key: "auc", LOG_LOSS.key: "log_loss", MINUTES.key: "minutes"}


def report(
    out: str | Path, *, rows: int = CRITEO_ROWS, price_per_hour: float | None = None
) -> Path:
    """Write `OUT/report.html` on all that a sweep's folder holds.

    Args:
      out: the folder.
      rows: of the training part of the data, an epoch of which is estimated below the study of
        time.
      price_per_hour: of the machine that the runs were on, for its price.

    Raises:
      UserError: no sweep's folder, not writable, or without a finished run.
    """
    out = Path(out)
    if not (out / RECORD).exists():
        raise UserError(
            f"a report is of a sweep's folder, or of runs. Received: {out}, which is neither. Make "
            "one with 'merlin-cowclip sweep'"
        )
    sections: list[Section] = []
    configs: list[Mapping[str, Any]] = []
    for name in STUDIES:
        if not (out / STUDIES_ / f"{name}.json").exists():
            continue
        record = read_record(out, name)
        found = outcomes(out, name, record)
        configs += [result["config"] for o in found for result in o.finished.values()]
        if any(outcome.results for outcome in found):
            sections.append(_section(out, name, found, record, rows, price_per_hour))
    if not sections:
        raise UserError(
            f"a report needs runs that ended. Received: {out}, without one. Sweep again to go on"
        )
    return write_page(out / HTML, "What a large batch does to these data", sections, configs)


def compare(
    runs: Mapping[str, str | Path],
    out: str | Path = HTML,
    *,
    title: str = "Runs compared",
    headline: str = "",
    notes: Iterable[str] = (),
    levels: Mapping[str, float] | None = None,
) -> Path:
    """Write a page that compares finished runs of `train`.

    Args:
      runs: by name.
      out: the page.
      title: of the page.
      headline: by default which run has the highest test AUC.
      notes: below the table.
      levels: of the AUC, to draw across its plot.

    Raises:
      UserError: one is no finished run or has no test part, or the page cannot be written.
    """
    out, opened = Path(out), {name: Run.open(run) for name, run in runs.items()}
    configs = {name: run.config for name, run in opened.items()}
    if untested := [name for name, run in opened.items() if run.result["auc"] is None]:
        raise UserError(
            f"runs are compared by their test part. Received: {untested[0]}, trained on data "
            "without one. Leave it out"
        )
    quantities = (AUC, LOG_LOSS, MINUTES)
    rows = [
        [
            Cell(name, os.path.relpath(run.path / RESULT, out.absolute().parent)),
            run.config["rule"],
            f"{run.config['batch_size']:,}",
            *(q.shown(run.result[q.key], 0.0) for q in quantities),
            _best_epoch(run.result["epochs"]),
            f"{-(-run.config['rows']['train'] // run.config['batch_size']):,}",
            str(len(run.result["epochs"])),
        ]
        for name, run in opened.items()
    ]
    header = ["run", "rule", "batch size", *(q.name for q in quantities), "best epoch"]
    header += ["steps/epoch", "epochs"]
    flat = [
        {k: f"{v:.4g}" if isinstance(v, float) else str(v or "-") for k, v in all_.items()}
        for all_ in ({**of, **of["scaled"]} for of in configs.values())
    ]
    options = ("model", "mlp", "embedding_dim", "update", "seed", "dense_schedule")
    values = [
        [key, *(one.get(key, "") for one in flat)]
        for key in (*options, *next(iter(configs.values()))["scaled"])
        if len({one.get(key) for one in flat}) > 1
    ]
    doubt = "These are single runs: a small difference may be chance. A sweep has several seeds."
    if len({of["data_sha256"] for of in configs.values()}) > 1:
        doubt = "These runs are of different data, so their AUCs do not compare."
    best = max(opened, key=lambda name: opened[name].result["auc"])
    highest = AUC.shown(opened[best].result["auc"], 0.0)
    found = f"Highest test AUC after the last epoch: {best}, {highest} %."
    sections = [Section("runs", "The runs", doubt=doubt, tables=[Table(header, rows)])]
    sections[0].notes = list(notes)
    if values:
        differ = Table(["setting", *opened], values)
        sections.append(Section("values", "What differs", tables=[differ]))
    epochs = Section("epochs", "Epoch by epoch")
    metrics = {name: pd.read_csv(run.path / METRICS) for name, run in opened.items()}
    last = max(len(of) for of in metrics.values())
    aucs = [[name, *(f"{auc:.4f}" for auc in of["auc"])] for name, of in metrics.items()]
    epochs.tables = [Table(["test AUC after epoch", *map(str, range(1, last + 1))], aucs)]
    for key, what in (("auc", "test AUC"), ("train_loss", "training loss")):
        lines = {name: points(of, "epoch", key) for name, of in metrics.items()}
        plot = line_plot(lines, "epoch", what, levels=levels if key == "auc" else None)
        epochs.plots.append((f"{what}, by epoch", plot))
    return write_page(out, title, [*sections, epochs], configs.values(), headline or found)


def _best_epoch(epochs: Sequence[Mapping[str, Any]]) -> str:
    best = max(epochs, key=lambda epoch: epoch["auc"])
    return f"{AUC.shown(best['auc'], 0.0)} ({best['epoch']})"


def _section(
    out: Path,
    name: str,
    found: Sequence[Outcome],
    record: Mapping[str, Any],
    cost_rows: int,
    price: float | None,
) -> Section:
    study = STUDIES[name]
    config: Mapping[str, Any] = next(
        (result["config"] for o in found for result in o.finished.values()),
        {"rows": {"train": 0}, "dataset": ""},
    )
    rows, base = config["rows"]["train"], record["batch_sizes"][0]
    runs = f"{sum(len(o.results) for o in found)} of {sum(len(o.runs) for o in found)}"
    section = Section(name, study.title, study.paper, runs, command=record["command"])
    quantities = (AUC, LOG_LOSS) if study.quantity is AUC else (study.quantity,)
    section.tables = [_table(name, found, base, quantity, config) for quantity in quantities]
    section.doubt = _doubt(found, rows, study.quantity)
    if not section.doubt:
        section.verdict = " ".join(_verdict(name, found, record["batch_sizes"]))
    section.notes = list(_notes(found, config))
    if name in ("scaling-rules", "clipping", "curves"):
        section.tables += _clips(found, study.rows)
    if name == "time" and rows:
        section.tables.append(_costs(found, cost_rows, cost_rows / rows, price))
        section.notes.append(
            f"The estimate multiplies the times above by {cost_rows:,} / {rows:,} training rows. "
            "It leaves out preparation and evaluation. An exact update passes over the whole "
            "table, so more ids take longer."
            + " For its price, give --price-per-hour."
            * (price is None)
        )
    section.plots = list(plots(out, name, found))
    return section


def _table(
    name: str,
    found: Sequence[Outcome],
    base: int,
    quantity: Quantity,
    config: Mapping[str, Any],
) -> Table:
    """Ours by row and column; the paper's in columns of their own, for its own data."""
    theirs: dict[tuple[str, str], float | None] = {}
    systems: dict[str, dict[str, Any]] = {}
    if is_of_the_paper(config):
        theirs = printed(name, config["dataset"], _PAPER_KEYS[quantity.key], base)
        systems = cited(config["dataset"]) if name == "time" else {}
    cells, rows, columns = grid(found)
    of_paper = [c for c in columns if any((r, c) in theirs for r in rows)]
    digits = 4 if quantity is LOG_LOSS else 2

    def paper(value: float | None) -> Cell:
        shown = f"{value:g}" if quantity is MINUTES else f"{value or 0:.{digits}f}"
        return Cell("diverged" if value is None else shown, kind="paper")

    lines: list[list[str | Cell]] = [
        [
            row,
            *(_cell(cells.get((row, column)), quantity) for column in columns),
            *(paper(theirs[row, c]) if (row, c) in theirs else "" for c in of_paper),
        ]
        for row in rows
    ]
    for system, of in systems.items():
        numbers = [paper(of[c]) if c in of else "" for c in of_paper]
        own = Cell(system, small="cited by the paper", kind="paper")
        lines.append([own, *[""] * len(columns), *numbers])
    sizes = {o.cell.column: o.cell.config.batch_size for o in found}
    steps = {c: f"{-(-config['rows']['train'] // size):,} steps/epoch" for c, size in sizes.items()}
    header = [
        Cell(quantity.name, small=f"by {STUDIES[name].rows} and batch size"),
        *(Cell(column, small=steps[column]) for column in columns),
        *(Cell(column, kind="paper") for column in of_paper),
    ]
    groups = [("", 1), ("these data", len(columns)), ("the paper", len(of_paper))]
    return Table(header, lines, groups if of_paper else ())


def _cell(outcome: Outcome | None, quantity: Quantity) -> str | Cell:
    """Mean ± deviation over seeds, with a link to each run."""
    if outcome is None or not outcome.results:
        return ""
    shown = outcome.shown(quantity)
    links = [
        f"{RUNS}/{outcome.runs[seed]}/{DIVERGED if result is None else RESULT}"
        for seed, result in outcome.results.items()
    ]
    if len(links) < len(outcome.runs):
        shown += f" ({len(outcome.runs) - len(links)} to come)"
    if len(links) == 1:
        return Cell(shown, links[0])
    return Cell(shown, links=[(str(i), to) for i, to in enumerate(links, 1)])


def _doubt(found: Sequence[Outcome], rows: int, quantity: Quantity) -> str:
    """Why there is no verdict; empty if there is one."""
    seeds = len(found[0].runs)
    jobs = max((r["jobs"] for o in found for r in o.finished.values()), default=1)
    if missing := sum(len(o.runs) - len(o.results) for o in found):
        return f"No verdict yet: {plural(missing, 'run')} still to come."
    if few := few_steps(rows, max(o.cell.config.batch_size for o in found)):
        return f"No verdict: {few}"
    if seeds < MIN_SEEDS and quantity is AUC:
        return (
            f"No verdict: each cell has {plural(seeds, 'seed')}, and {MIN_SEEDS} are needed to "
            "tell a difference from chance."
        )
    if jobs > 1 and quantity is MINUTES:
        return (
            f"No verdict: up to {jobs} runs were trained at a time, so each took longer than it "
            "would alone. Measure times with --jobs 1."
        )
    return ""


def _verdict(name: str, found: Sequence[Outcome], sizes: Sequence[int]) -> Iterator[str]:
    cells, rows, _ = grid(found)
    least, most = f"{sizes[0]:,}", f"{sizes[-1]:,}"
    key = STUDIES[name].quantity.key
    means = {place: mean for place, o in cells.items() if (mean := o.mean(key))}
    ends = {
        row: (means[row, least], means[row, most])
        for row in rows
        if least != most and {(row, least), (row, most)} <= means.keys()
    }
    if name == "time":
        if rows[0] in ends:
            small, large = ends[rows[0]]
            yield (
                f"{rows[0]} trains an epoch {small[0] / large[0]:.1f} times as fast at {most} as "
                f"at {least}."
            )
        return
    at_most = {row: means[row, most] for row in rows if (row, most) in means}
    if name != "control" and len(at_most) > 1:  # whose rows are of different data
        best, worst = (f(at_most, key=lambda row: at_most[row]) for f in (max, min))
        yield (
            f"At {most}, {best} has the highest test AUC ({AUC.shown(*at_most[best])} %) and "
            f"{worst} the lowest ({AUC.shown(*at_most[worst])} %)"
            f"{_beyond_chance(at_most[best], at_most[worst])}."
        )
    for row in ("cowclip", "adaptive_column", "full, linear", "top-3, linear"):
        if row in ends:
            small, large = ends[row]
            yield (
                f"From {least} to {most}, the AUC of {row} changes by "
                f"{100 * (large[0] - small[0]):+.3f} points{_beyond_chance(large, small)}."
            )
    if diverged := sorted({row for (row, _), o in cells.items() if o.mean(key) is None}):
        yield f"Diverged at least once: {', '.join(diverged)}."


def _beyond_chance(one: tuple[float, float], other: tuple[float, float]) -> str:
    """Of a difference of two means, with their deviations."""
    is_beyond = abs(one[0] - other[0]) > 2 * math.hypot(one[1], other[1])
    return f", {'more' if is_beyond else 'less'} than twice the deviation over seeds"


def _notes(found: Sequence[Outcome], config: Mapping[str, Any]) -> Iterator[str]:
    seeds = max(len(outcome.results) for outcome in found)
    if seeds > 1:
        yield f"{seeds} seeds: mean ± sample standard deviation."
    else:
        yield "One seed: a small difference may be chance."
    if is_of_the_paper(config):
        epochs = found[0].cell.config.epochs
        yield f"The paper: {EPOCHS} epochs on one V100. Here: {plural(epochs, 'epoch')}."
    elif config["dataset"] in ("criteo", "avazu"):
        yield "The paper's numbers are for the full data set, so they are not shown here."


def _clips(found: Sequence[Outcome], what: str) -> list[Table]:
    """What the clip did in each cell, by its first run that did not diverge."""
    rows = [
        [o.cell.row, o.cell.column, str(o.first), o.finished[o.first]["clip"]]
        for o in found
        if o.first is not None and o.cell.config.hyperparameters.clip is not None
    ]
    header = [what, "batch size", "seed", "what it did over all epochs"]
    return [Table(header, rows, words=True)] if rows else []


def _costs(found: Sequence[Outcome], rows: int, times: float, price: float | None) -> Table:
    """What an epoch of data that are so many times as large takes."""
    quantities = [Quantity(MINUTES.key, "minutes", times / 60, 1)]
    if price is not None:
        quantities.append(Quantity(MINUTES.key, "price", times / 3600 * price, 2))
    cells, names, columns = grid(found)
    lines = [
        [f"{name}, {q.name}", *(_cell(cells.get((name, c)), q) for c in columns)]
        for name in names
        for q in quantities
    ]
    data = "Criteo" if rows == CRITEO_ROWS else f"{rows:,} rows"
    return Table([Cell(f"an epoch of {data}", small="estimated"), *columns], lines)
