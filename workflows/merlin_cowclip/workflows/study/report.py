# SPDX-License-Identifier: Apache-2.0
"""The pages of `report`: a sweep's studies beside the paper's numbers, or single runs."""

from __future__ import annotations

import dataclasses
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
    Study,
    few_steps,
    plural,
)
from merlin_cowclip.workflows.study.sweep import (
    RECORD,
    RUNS,
    STUDIES_,
    Outcome,
    grid,
    outcomes,
    read_json,
    read_record,
)
from merlin_cowclip.workflows.study.workers import DIVERGED
from merlin_cowclip.workflows.training.configuration import TrainConfig
from merlin_cowclip.workflows.training.learning_rates import option_text
from merlin_cowclip.workflows.training.logbook import METRICS
from merlin_cowclip.workflows.training.runs import RESULT, Run

HTML = "report.html"
MIN_SEEDS = 3  # of each cell: with fewer there is no verdict
_OPTIONS = (  # in which runs may differ, beside their scaled values
    *("rule", "batch_size", "model", "mlp", "embedding_dim", "update", "seed", "epochs"),
    *("dense_schedule", "embedding_schedule"),
)
_TOLD = ("cowclip", "adaptive_column", "full, linear", "top-3, linear")  # rows, of base and largest


def report(out: str | Path) -> Path:
    """Write `OUT/report.html` on all that a sweep's folder holds.

    Args:
      out: the folder.

    Raises:
      UserError: no sweep's folder, not writable, or without a finished run.
    """
    out = Path(out)
    if not (out / RECORD).exists():
        raise UserError(
            f"a report is of a sweep's folder, or of runs. Received: {out}, which is neither. Make "
            "one with 'merlin-cowclip sweep'"
        )
    data = read_json(out / RECORD)
    sections: list[Section] = []
    configs: list[Mapping[str, Any]] = []
    for study in STUDIES.values():
        if not (out / STUDIES_ / f"{study.name}.json").exists():
            continue
        record = {**data, **read_record(out, study.name)}
        found = outcomes(out, study.name, record)
        configs += [result["config"] for o in found for result in o.finished.values()]
        if any(outcome.results for outcome in found):
            section = _section(study, record, found)
            section.plots = list(plots(study, found))
            sections.append(section)
    if not sections:
        raise UserError(
            f"a report needs runs that ended. Received: {out}, without one. Sweep again to go on"
        )
    return write_page(out / HTML, "What a large batch does to these data", sections, configs)


def _section(study: Study, record: Mapping[str, Any], found: Sequence[Outcome]) -> Section:
    """What a study came to; `record` describes it and its data."""
    doubt = _doubt(study, found, record["rows"]["train"])
    tables = [_table(study, record, found, quantity) for quantity in study.quantities]
    if study.name in ("scaling-rules", "clipping", "curves"):
        tables += _clips(found, study.rows)
    return Section(
        study.name,
        study.title,
        study.paper,
        runs=f"{sum(len(o.results) for o in found)} of {sum(len(o.runs) for o in found)}",
        verdict="" if doubt else " ".join(_verdict(study, found, record["batch_sizes"])),
        doubt=doubt,
        tables=tables,
        notes=[_base(record), *_notes(record, found)],
        command=record["command"],
    )


def _table(
    study: Study, record: Mapping[str, Any], found: Sequence[Outcome], quantity: Quantity
) -> Table:
    """Ours by row and column; the paper's in columns of their own, for its own data."""
    cells, rows, columns = grid(found)
    theirs = printed(study.name, record, quantity)
    of_paper = [c for c in columns if any((row, c) in theirs for row in rows)]
    lines = [
        [
            row,
            *(_cell(cells.get((row, column)), quantity) for column in columns),
            *(Cell(theirs.get((row, column), ""), kind="paper") for column in of_paper),
        ]
        for row in rows
    ]
    sizes = {o.cell.column: o.cell.config.batch_size for o in found}
    steps = {column: math.ceil(record["rows"]["train"] / size) for column, size in sizes.items()}
    header = [
        Cell(quantity.name, small=f"by {study.rows} and batch size"),
        *(Cell(column, small=f"{steps[column]:,} steps/epoch") for column in columns),
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
    names = {seed: RESULT if result else DIVERGED for seed, result in outcome.results.items()}
    links = [f"{RUNS}/{outcome.runs[seed].name}/{name}" for seed, name in names.items()]
    return Cell(shown, links=links)


def _doubt(study: Study, found: Sequence[Outcome], rows: int) -> str:
    """Why there is no verdict; empty if there is one."""
    if missing := sum(len(o.runs) - len(o.results) for o in found):
        return f"No verdict yet: {plural(missing, 'run')} still to come."
    if few := few_steps(rows, max(o.cell.config.batch_size for o in found)):
        return f"No verdict: {few}"
    if study.quantity is AUC and (seeds := len(found[0].runs)) < MIN_SEEDS:
        return (
            f"No verdict: each cell has {plural(seeds, 'seed')}, and {MIN_SEEDS} are needed to "
            "tell a difference from chance."
        )
    jobs = max((r["jobs"] for o in found for r in o.finished.values()), default=1)
    if study.quantity is MINUTES and jobs > 1:
        return (
            f"No verdict: up to {jobs} runs were trained at a time, so each took longer than it "
            "would alone. Measure times with --jobs 1."
        )
    return ""


def _verdict(study: Study, found: Sequence[Outcome], sizes: Sequence[int]) -> Iterator[str]:
    """How the rows compare at the largest batch, and how that compares with the base."""
    cells, rows, _ = grid(found)
    means = {place: mean for place, o in cells.items() if (mean := o.mean(study.quantity.key))}
    least, most = f"{sizes[0]:,}", f"{sizes[-1]:,}"
    at_most = {row: means[row, most] for row in rows if (row, most) in means}
    # The rows of the control differ in data.
    if study.quantity is AUC and study.name != "control" and len(at_most) > 1:
        best, worst = (f(at_most, key=at_most.__getitem__) for f in (max, min))
        yield (
            f"At {most}, {best} has the highest test AUC ({AUC.shown(*at_most[best])} %) and "
            f"{worst} the lowest ({AUC.shown(*at_most[worst])} %)"
            f"{_beyond_chance(at_most[best], at_most[worst])}."
        )
    both = [row for row in at_most if (row, least) in means and least != most]
    if study.quantity is MINUTES and both:
        times = means[both[0], least][0] / at_most[both[0]][0]
        yield f"{both[0]} trains an epoch {times:.1f} times as fast at {most} as at {least}."
    for row in both if study.quantity is AUC else ():
        if row in _TOLD:
            small, large = means[row, least], at_most[row]
            yield (
                f"From {least} to {most}, the AUC of {row} changes by "
                f"{100 * (large[0] - small[0]):+.3f} points{_beyond_chance(large, small)}."
            )
    if diverged := sorted({row for row, column in cells.keys() - means.keys()}):
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


def _notes(record: Mapping[str, Any], found: Sequence[Outcome]) -> Iterator[str]:
    seeds = max(len(outcome.results) for outcome in found)
    if seeds > 1:
        yield f"{seeds} seeds: mean ± sample standard deviation."
    else:
        yield "One seed: a small difference may be chance."
    if is_of_the_paper(record):
        epochs = found[0].cell.config.epochs
        yield f"The paper: {EPOCHS} epochs on one V100. Here: {plural(epochs, 'epoch')}."
    elif record["dataset"] in ("criteo", "avazu"):
        yield "The paper's numbers are for the full data set, so they are not shown here."


def _clips(found: Sequence[Outcome], what: str) -> list[Table]:
    """What the clip did in each cell, by its first run that did not diverge."""
    rows = [
        [o.cell.row, o.cell.column, str(seed), result["clip"]]
        for o in found
        for seed, result in list(o.finished.items())[:1]
        if o.cell.config.hyperparameters.clip is not None
    ]
    header = [what, "batch size", "seed", "what it did over all epochs"]
    return [Table(header, rows, words=True)] if rows else []


def compare(
    runs: Mapping[str, str | Path],
    out: str | Path = HTML,
    *,
    title: str = "Runs compared",
    headline: str = "",
    notes: Iterable[str] = (),
    levels: Mapping[str, float] | None = None,
) -> Path:
    """Write a page that compares finished runs of `train`, given by name.

    The headline is by default the test AUC of the run with the highest validation AUC. Notes stand
    below the table; levels of the AUC are drawn across its plot.

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
        headline = headline or "These runs are of different data, so their AUCs do not compare."
    table = _side_by_side(opened, out.absolute().parent)
    sections = [
        Section("runs", "The runs", doubt=doubt, tables=[table], notes=list(notes)),
        _by_epoch(opened, levels),
    ]
    return write_page(out, title, sections, configs, headline or _best(opened))


def _best(opened: Mapping[str, Run]) -> str:
    """The run that the validation part chooses, and its test AUC; nothing without that part."""
    valid = {name: _validation_auc(run) or 0.0 for name, run in opened.items()}
    first = max(valid, key=valid.__getitem__)
    if not all(valid.values()):
        return ""
    return (
        f"Highest validation AUC: {first}, {AUC.shown(valid[first])} %. Its test AUC: "
        f"{AUC.shown(opened[first].result['auc'])} %."
    )


def _validation_auc(run: Run) -> float | None:
    """Of the epoch that the run is used with."""
    epochs, is_best = run.result["epochs"], run.result["checkpoint"] == "best"
    auc: float | None = epochs[run.result["best_epoch"] - 1 if is_best else -1]["valid_auc"]
    return auc


def _side_by_side(opened: Mapping[str, Run], home: Path) -> Table:
    """A column for each run, linked from a page in `home`: results, and settings that differ."""
    links = [os.path.relpath(run.path / RESULT, home) for run in opened.values()]
    names = [Cell(name, links=[link]) for name, link in zip(opened, links, strict=True)]
    both = [(_results(run), _settings(run)) for run in opened.values()]
    rows = [[key, *(results[key] for results, _ in both)] for key in both[0][0]]
    differ = [[key, *(settings[key] for _, settings in both)] for key in both[0][1]]
    return Table(["run", *names], rows + [row for row in differ if len(set(row[1:])) > 1])


def _results(run: Run) -> dict[str, str]:
    auc, result = _validation_auc(run), run.result
    epochs = len(result["epochs"])
    epoch = result["best_epoch"] if result["checkpoint"] == "best" else epochs
    return {
        **{q.name: q.shown(result[q.key]) for q in (AUC, LOG_LOSS, MINUTES)},
        "validation AUC, %": "-" if auc is None else AUC.shown(auc),
        "epoch": f"{epoch} of {epochs}",
        "steps/epoch": f"{math.ceil(run.config['rows']['train'] / run.config['batch_size']):,}",
    }


def _settings(run: Run) -> dict[str, str]:
    """What may differ between runs: options, and values as they were scaled."""
    values = {**run.config, **run.config["scaled"]}
    found = {key: values.get(key) for key in dict.fromkeys([*_OPTIONS, *run.config["scaled"]])}
    for key in ("dense_schedule", "embedding_schedule"):
        if schedule := found[key]:
            found[key] = option_text(schedule)
    return {k: f"{v:.4g}" if isinstance(v, float) else str(v or "-") for k, v in found.items()}


def _by_epoch(opened: Mapping[str, Run], levels: Mapping[str, float] | None) -> Section:
    metrics = {name: pd.read_csv(run.path / METRICS) for name, run in opened.items()}
    last = max(len(of) for of in metrics.values())
    aucs = {name: of["valid_auc"].dropna() for name, of in metrics.items()}
    rows = [[name, *(f"{auc:.4f}" for auc in of)] for name, of in aucs.items() if len(of)]
    table = Table(["validation AUC after epoch", *map(str, range(1, last + 1))], rows)
    section = Section("epochs", "Epoch by epoch", tables=[table] * bool(rows))
    curves = (("valid_auc", "validation AUC"), ("train_loss", "training loss"))
    for key, what in curves[not rows :]:
        lines = {name: points(of, "epoch", key) for name, of in metrics.items()}
        plot = line_plot(lines, "epoch", what, levels=levels if key == "valid_auc" else None)
        section.plots.append((f"{what}, by epoch", plot))
    return section
