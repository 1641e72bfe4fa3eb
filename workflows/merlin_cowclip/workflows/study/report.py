"""The pages of `report`: a sweep's studies beside the paper's numbers, or single runs."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.study.pages import Cell, Section, Table, write_page
from merlin_cowclip.workflows.study.paper import EPOCHS, is_of_the_paper, printed
from merlin_cowclip.workflows.study.plots import line_plot, plots, points
from merlin_cowclip.workflows.study.studies import (
    AUC,
    LOG_LOSS,
    MINUTES,
    STUDIES,
    VALUES,
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
from merlin_cowclip.workflows.training.configuration import TrainConfig
from merlin_cowclip.workflows.training.logbook import METRICS
from merlin_cowclip.workflows.training.runs import RESULT, Run

HTML = "report.html"
MIN_SEEDS = 3
"""Of each cell: with fewer there is no verdict."""
CRITEO_ROWS = 41_256_555
"""Of the training part: nine tenths of the 45,840,617 rows of Criteo Kaggle's `train.txt`."""
_ESTIMATE = (
    "The estimate multiplies the times above by the number of rows. It leaves out preparation and "
    "evaluation. An exact update passes over the whole table, so more ids take longer."
)
_TOLD = ("cowclip", "adaptive_column", "full, linear", "top-3, linear")  # rows, of base and largest


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
    data = json.loads((out / RECORD).read_text(encoding="utf-8"))
    sections: list[Section] = []
    configs: list[Mapping[str, Any]] = []
    for name in STUDIES:
        if not (out / STUDIES_ / f"{name}.json").exists():
            continue
        record = read_record(out, name)
        found = outcomes(out, name, record)
        configs += [result["config"] for o in found for result in o.finished.values()]
        if any(outcome.results for outcome in found):
            section = _section(out, name, record, found, data)
            if name == "time":
                section.tables.append(_costs(found, data["rows"]["train"], rows, price_per_hour))
                section.notes.append(_ESTIMATE)
            sections.append(section)
    if not sections:
        raise UserError(
            f"a report needs runs that ended. Received: {out}, without one. Sweep again to go on"
        )
    return write_page(out / HTML, "What a large batch does to these data", sections, configs)


def _section(
    out: Path,
    name: str,
    record: Mapping[str, Any],
    found: Sequence[Outcome],
    data: Mapping[str, Any],
) -> Section:
    study, rows = STUDIES[name], data["rows"]["train"]
    doubt = _doubt(found, rows, study.quantity)
    quantities = (AUC, LOG_LOSS) if study.quantity is AUC else (study.quantity,)
    tables = [
        _table(name, record["batch_sizes"][0], found, quantity, data) for quantity in quantities
    ]
    if name in ("scaling-rules", "clipping", "curves"):
        tables += _clips(found, study.rows)
    return Section(
        name,
        study.title,
        study.paper,
        runs=f"{sum(len(o.results) for o in found)} of {sum(len(o.runs) for o in found)}",
        verdict="" if doubt else " ".join(_verdict(name, found, record["batch_sizes"])),
        doubt=doubt,
        tables=tables,
        notes=[_base(record), *_notes(found, data)],
        plots=list(plots(out, name, found)),
        command=record["command"],
    )


def _table(
    name: str, base: int, found: Sequence[Outcome], quantity: Quantity, data: Mapping[str, Any]
) -> Table:
    """Ours by row and column; the paper's in columns of their own, for its own data."""
    theirs: dict[tuple[str, str], float | None] = {}
    if is_of_the_paper(data):
        key = "minutes" if quantity is MINUTES else quantity.key
        theirs = printed(name, data["dataset"], key, base)
    cells, rows, columns = grid(found)
    of_paper = [c for c in columns if any((row, c) in theirs for row in rows)]
    form = {AUC: "{:.2f}", LOG_LOSS: "{:.4f}", MINUTES: "{:g}"}[quantity]

    def paper(place: tuple[str, str]) -> str | Cell:
        if place not in theirs:
            return ""
        value = theirs[place]
        return Cell("diverged" if value is None else form.format(value), kind="paper")

    lines = [
        [
            row,
            *(_cell(cells.get((row, column)), quantity) for column in columns),
            *(paper((row, column)) for column in of_paper),
        ]
        for row in rows
    ]
    steps = {
        o.cell.column: f"{-(-data['rows']['train'] // o.cell.config.batch_size):,} steps/epoch"
        for o in found
    }
    header = [
        Cell(quantity.name, small=f"by {STUDIES[name].rows} and batch size"),
        *(Cell(column, small=steps[column]) for column in columns),
        *(Cell(column, small="the paper", kind="paper") for column in of_paper),
    ]
    return Table(header, lines)


def _cell(outcome: Outcome | None, quantity: Quantity) -> str | Cell:
    """Mean ± deviation over seeds, with a link to each run."""
    if outcome is None or not outcome.results:
        return ""
    shown = outcome.shown(quantity)
    if missing := len(outcome.runs) - len(outcome.results):
        shown += f" ({missing} to come)"
    links = [
        f"{RUNS}/{outcome.runs[seed]}/{DIVERGED if result is None else RESULT}"
        for seed, result in outcome.results.items()
    ]
    return Cell(shown, links=links)


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
    """How the rows compare at the largest batch, and how that compares with the base."""
    cells, rows, _ = grid(found)
    least, most = f"{sizes[0]:,}", f"{sizes[-1]:,}"
    quantity = STUDIES[name].quantity
    means = {place: mean for place, o in cells.items() if (mean := o.mean(quantity.key))}
    at_most = {row: means[row, most] for row in rows if (row, most) in means}
    if quantity is AUC and name != "control" and len(at_most) > 1:  # whose rows differ in data
        best, worst = (f(at_most, key=lambda row: at_most[row]) for f in (max, min))
        yield (
            f"At {most}, {best} has the highest test AUC ({AUC.shown(*at_most[best])} %) and "
            f"{worst} the lowest ({AUC.shown(*at_most[worst])} %)"
            f"{_beyond_chance(at_most[best], at_most[worst])}."
        )
    for row, large in at_most.items():
        small = means.get((row, least))
        if small is None or least == most:
            continue
        if quantity is MINUTES and row == rows[0]:
            yield (
                f"{row} trains an epoch {small[0] / large[0]:.1f} times as fast at {most} as "
                f"at {least}."
            )
        elif quantity is AUC and row in _TOLD:
            yield (
                f"From {least} to {most}, the AUC of {row} changes by "
                f"{100 * (large[0] - small[0]):+.3f} points{_beyond_chance(large, small)}."
            )
    if diverged := sorted({row for (row, _), o in cells.items() if o.mean(quantity.key) is None}):
        yield f"Diverged at least once: {', '.join(diverged)}."


def _beyond_chance(one: tuple[float, float], other: tuple[float, float]) -> str:
    """Of a difference of two means, with their deviations."""
    is_beyond = abs(one[0] - other[0]) > 2 * math.hypot(one[1], other[1])
    return f", {'more' if is_beyond else 'less'} than twice the deviation over seeds"


def _base(record: Mapping[str, Any]) -> str:
    """The values at the base, and which of them are each rule's own."""
    values = record["values"]
    known = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
    defaults = "; ".join(
        f"{of.name} {of.metadata['shown']}"
        for of in dataclasses.fields(TrainConfig)
        if of.name in VALUES and of.name not in values
    )
    return (
        f"The base, at batch size {record['batch_sizes'][0]:,}: {known or 'no value of its own'}."
        + f" Not tuned, but each rule's default: {defaults}." * bool(defaults)
        + f" From: {record['base']}." * bool(record["base"])
    )


def _notes(found: Sequence[Outcome], data: Mapping[str, Any]) -> Iterator[str]:
    seeds = max(len(outcome.results) for outcome in found)
    if seeds > 1:
        yield f"{seeds} seeds: mean ± sample standard deviation."
    else:
        yield "One seed: a small difference may be chance."
    if is_of_the_paper(data):
        epochs = found[0].cell.config.epochs
        yield f"The paper: {EPOCHS} epochs on one V100. Here: {plural(epochs, 'epoch')}."
    elif data["dataset"] in ("criteo", "avazu"):
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


def _costs(found: Sequence[Outcome], trained: int, rows: int, price: float | None) -> Table:
    """What an epoch of so many rows takes, by that of the rows that were trained on."""
    times = rows / trained
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
    if untested := [name for name, run in opened.items() if run.result["auc"] is None]:
        raise UserError(
            f"runs are compared by their test part. Received: {untested[0]}, trained on data "
            "without one. Leave it out"
        )
    configs = [run.config for run in opened.values()]
    doubt = "These are single runs: a small difference may be chance. A sweep has several seeds."
    if len({config["data_sha256"] for config in configs}) > 1:
        doubt = "These runs are of different data, so their AUCs do not compare."
    if not headline:
        last = {name: run.result["auc"] for name, run in opened.items()}
        any_epoch = {n: max(e["auc"] for e in r.result["epochs"]) for n, r in opened.items()}
        said = []
        for what, aucs in (("after the last epoch", last), ("after any epoch", any_epoch)):
            best = max(aucs, key=aucs.__getitem__)
            said.append(f"{what} {best}, {AUC.shown(aucs[best])} %")
        headline = f"Highest test AUC: {'; '.join(said)}."
    table = _runs(opened, out.absolute().parent)
    sections = [Section("runs", "The runs", doubt=doubt, tables=[table], notes=list(notes))]
    if values := _differences(configs):
        differ = Table(["setting", *opened], values)
        sections.append(Section("values", "What differs", tables=[differ]))
    sections.append(_by_epoch(opened, levels))
    return write_page(out, title, sections, configs, headline)


def _runs(opened: Mapping[str, Run], home: Path) -> Table:
    """A row for each run, with a link from a page in `home`."""
    quantities = (AUC, LOG_LOSS, MINUTES)
    rows = []
    for name, run in opened.items():
        size, epochs = run.config["batch_size"], run.result["epochs"]
        best = max(epochs, key=lambda epoch: epoch["auc"])
        rows.append(
            [
                Cell(name, links=[os.path.relpath(run.path / RESULT, home)]),
                run.config["rule"],
                f"{size:,}",
                *(q.shown(run.result[q.key]) for q in quantities),
                f"{AUC.shown(best['auc'])} ({best['epoch']} of {len(epochs)})",
                f"{-(-run.config['rows']['train'] // size):,}",
            ]
        )
    header = ["run", "rule", "batch size", *(q.name for q in quantities), "best epoch"]
    return Table([*header, "steps/epoch"], rows)


def _differences(configs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Options and values that are not the same in all runs, each with that of every run."""
    schedules = ("dense_schedule", "embedding_schedule")
    options = ("model", "mlp", "embedding_dim", "update", "seed", *schedules)
    found = []
    for name in (*options, *configs[0]["scaled"]):
        values = [{**config, **config["scaled"]}.get(name) for config in configs]
        shown = [_setting(value) for value in values]
        if len(set(shown)) > 1:
            found.append([name, *shown])
    return found


def _setting(value: Any) -> str:
    """A value as the command line takes it."""
    if isinstance(value, Mapping):
        of = [f"{k}={v:g}" for k, v in value.items() if isinstance(v, float | int)]
        return ":".join(filter(None, [value["name"], ",".join(of)]))
    return f"{value:.4g}" if isinstance(value, float) else str(value or "-")


def _by_epoch(opened: Mapping[str, Run], levels: Mapping[str, float] | None) -> Section:
    metrics = {name: pd.read_csv(run.path / METRICS) for name, run in opened.items()}
    last = max(len(of) for of in metrics.values())
    aucs = [[name, *(f"{auc:.4f}" for auc in of["auc"])] for name, of in metrics.items()]
    table = Table(["test AUC after epoch", *map(str, range(1, last + 1))], aucs)
    section = Section("epochs", "Epoch by epoch", tables=[table])
    for key, what in (("auc", "test AUC"), ("train_loss", "training loss")):
        lines = {name: points(of, "epoch", key) for name, of in metrics.items()}
        plot = line_plot(lines, "epoch", what, levels=levels if key == "auc" else None)
        section.plots.append((f"{what}, by epoch", plot))
    return section
