# SPDX-License-Identifier: Apache-2.0
"""Pages that compare runs: those of sweeps, or any."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.folders import read_json
from merlin_cowclip.workflows.study.comparison import (
    AUC,
    MINUTES,
    VALID_AUC,
    Comparison,
    Group,
    Quantity,
    Trained,
    differences,
    shown,
)
from merlin_cowclip.workflows.study.pages import Cell, Section, Table, write_page
from merlin_cowclip.workflows.study.plots import curves, line_plot
from merlin_cowclip.workflows.study.steps import few_steps, plural
from merlin_cowclip.workflows.study.sweep import DIVERGED, GRIDS, RECORD, RUNS
from merlin_cowclip.workflows.training.listeners import METRICS
from merlin_cowclip.workflows.training.runs import CONFIG, RESULT, Run, config_in

HTML = "report.html"
MIN_SEEDS = 3  # of each group: with fewer there is no verdict
_LINES = 8  # groups at most whose curves and options are shown: as many as there are colors


def report(
    *runs: str | Path, out: str | Path | None = None, first: Sequence[Section] = ()
) -> tuple[Path, str]:
    """Write a page that compares runs; returns it, and its tables and verdicts as text.

    One folder of `sweep` has a section for each of its grids. Several folders, of sweeps or of
    runs, are compared in one section.

    The page `out` is by default `report.html`, in the folder of one sweep, else in the current one;
    `first` are sections before all others. A UserError: no run has ended, or a folder is none.
    """
    found: dict[str, tuple[list[Trained], str]] = {}
    is_sweep = len(runs) == 1 and (Path(runs[0]) / RECORD).exists()
    for path in map(Path, runs):
        grids = runs_of(path) if (path / RECORD).exists() else {"": ([_of_run(path)], "")}
        for name, (trained, command) in grids.items():
            found.setdefault(name if is_sweep else "", ([], command))[0].extend(trained)
    ended = [run for trained, _ in found.values() for run in trained if run.result]
    if not ended:
        raise UserError(f"{runs[0]} has no run that ended. To resume a sweep, repeat its command")
    page = Path(out or (Path(runs[0]) / HTML if is_sweep else HTML))
    sections, texts = [*first], []
    for name, (trained, command) in found.items():
        comparison = Comparison.of(trained)
        sections.append(section(comparison, page.absolute().parent, name, command))
        said = sections[-1].verdict or sections[-1].doubt
        texts += [*filter(None, [name]), comparison.table(), said]
    configs = [run.result["config"] for run in ended if run.result]
    return write_page(page, "Runs compared", sections, configs), "\n\n".join(texts)


def compare(
    runs: Mapping[str, str | Path],
    out: str | Path = HTML,
    *,
    title: str = "Runs compared",
    headline: str = "",
    notes: Iterable[str] = (),
    levels: Mapping[str, float] | None = None,
    first: Sequence[Section] = (),
) -> Path:
    """Write a page that compares finished runs of `train`, given by name.

    A headline replaces the verdict. Notes stand below the table; levels of the AUC are drawn across
    its plot; `first` are sections before that of the runs. A UserError: one is no finished run, or
    the page cannot be written.
    """
    out, opened = Path(out), {name: _of_run(Path(path)) for name, path in runs.items()}
    groups = [Group(name, None, {run.seed: run}, name) for name, run in opened.items()]
    found = section(Comparison(["run"], [], "", groups), out.absolute().parent, levels=levels)
    found.notes[:] = list(notes)
    found.doubt *= not headline
    configs = [run.result["config"] for run in opened.values() if run.result]
    return write_page(out, title, [*first, found], configs, headline)


def runs_of(out: Path) -> dict[str, tuple[list[Trained], str]]:
    """By grid its runs, also those that have not ended, and its command."""
    record, grids = read_json(out / RECORD), {}
    for path in sorted((out / GRIDS).glob("*.json")):
        grid, trained = read_json(path), []
        for one in grid["runs"]:
            run, options = out / RUNS / one["run"], {**one["config"], "data": _data(record)}
            result: dict[str, Any] | None = {} if (run / DIVERGED).exists() else None
            if (run / RESULT).exists():
                result = read_json(run / RESULT)
            trained.append(Trained(run, options, options.pop("seed"), result))
        grids[path.stem] = trained, grid["command"]
    return grids


def _of_run(path: Path) -> Trained:
    """A run of `train`, or one of a sweep that diverged."""
    diverged = (path / DIVERGED).exists() and (path / CONFIG).exists()
    result = {} if diverged else Run.open(path).result
    record = read_json(path / CONFIG) if diverged else result["config"]
    options = {**config_in(record).to_dict(), "data": _data(record)}
    return Trained(path, options, options.pop("seed"), result)


def _data(record: Mapping[str, Any]) -> str:
    """Of a run or sweep: the folder's name, and the beginning of what identifies its rows."""
    return f"{Path(record['data']).name} {record['data_sha256'][:6]}"


def section(
    comparison: Comparison,
    home: Path,
    name: str = "",
    command: str = "",
    levels: Mapping[str, float] | None = None,
) -> Section:
    """What a page in `home` says of a comparison; levels of the AUC are drawn by epoch."""
    groups, quantities = comparison.groups, comparison.quantities
    by_x: list[Quantity | None] = [*quantities] if comparison.x else [None]
    tables = [_table(comparison, quantity, home) for quantity in by_x]
    verdict, doubt = "", _doubt(groups)
    if quantities and not doubt:
        verdict, table = _verdict(comparison, quantities[0])
        tables += [table]
    if not comparison.x and len(groups) <= _LINES:
        options = [group.options for group in groups]
        rows = [[key, *(shown(of.get(key)) for of in options)] for key in options[0]]
        differ = [row for row in rows if len(set(row[1:])) > 1]
        tables.append(Table(["options that differ", *(group.label for group in groups)], differ))
    curved = [group for group in groups if group.finished]
    if len(curved) > _LINES:  # those at the largest x
        curved = [group for group in curved if group.x == comparison.columns[-1]]
    files = {group.name: group.finished[0].path / METRICS for group in curved}
    metrics = {name: pd.read_csv(files[name]) for name in list(files)[:_LINES]}
    aucs = [[name, *(f"{a:.4f}" for a in of["valid_auc"].dropna())] for name, of in metrics.items()]
    if last := max(map(len, aucs), default=0) - 1:
        header = ["validation AUC after epoch", *map(str, range(1, last + 1))]
        tables.append(Table(header, [[*row, *[""] * (last + 1 - len(row))] for row in aucs]))
    return Section(
        name or "runs",
        name or "The runs",
        runs=f"{sum(r.result is not None for g in groups for r in g.runs.values())} of "
        f"{sum(len(g.runs) for g in groups)}",
        verdict=verdict,
        doubt=doubt,
        tables=tables,
        notes=list(_notes(comparison)),
        plots=[*_plots(comparison), *curves(metrics, levels)],
        command=command,
    )


def _table(comparison: Comparison, quantity: Quantity | None, home: Path) -> Table:
    """A table whose cells lead to their runs."""

    def cell(text: str, group: Group | None) -> str | Cell:
        runs = [run for run in group.runs.values() if run.result is not None] if group else []
        files = [run.path / (RESULT if run.result else DIVERGED) for run in runs]
        return Cell(text, links=[os.path.relpath(file, home) for file in files])

    lines = zip(comparison.rows, comparison.cells(quantity), strict=True)
    rows = [[row, *(cell(*one) for one in line)] for row, line in lines]
    return Table(comparison.header(quantity), rows)


def _doubt(groups: Sequence[Group]) -> str:
    """Why there is no verdict; empty if there is one."""
    if missing := sum(run.result is None for group in groups for run in group.runs.values()):
        return f"No verdict yet: {plural(missing, 'run')} still to come."
    configs = [run.result["config"] for g in groups for run in g.finished if run.result]
    if not configs:
        return "No verdict: every run diverged."
    config = max(configs, key=lambda config: config["batch_size"] / config["rows"]["train"])
    if few := few_steps(config["rows"]["train"], config["batch_size"]):
        return f"No verdict: {few}"
    if (seeds := min(len(group.runs) for group in groups)) < MIN_SEEDS:
        return (
            f"No verdict: some groups have {plural(seeds, 'seed')}. {MIN_SEEDS} are needed to "
            "separate a difference from random variation."
        )
    return "" if len(groups) > 1 else "No verdict: there is only one group of runs."


def _verdict(comparison: Comparison, quantity: Quantity) -> tuple[str, Table]:
    """The best group at each x (of one row: of all), and how the others differ from it."""
    sentences, rows, groups, by_x = [], [], comparison.groups, comparison.by_x
    for x in comparison.columns if by_x else [None]:
        family = [group for group in groups if not by_x or group.x == x]
        names = [group.label if by_x else group.name for group in family]
        means = {i: mean[0] for i, group in enumerate(family) if (mean := group.mean(quantity))}
        if not means:
            continue
        best = (max if quantity in (AUC, VALID_AUC) else min)(means, key=means.__getitem__)
        found = differences(family, quantity)
        others = {i: found[i, best] for i in means if (i, best) in found}
        worse, unclear = (
            "; ".join(names[i] for i, one in others.items() if one.is_clear == is_clear)
            for is_clear in (True, False)
        )
        sentences.append(
            (f"At {comparison.x} {shown(x)}, " if by_x else "")
            + f"{names[best]} has the best {quantity.name.removesuffix(', %')}, "
            + f"{family[best].shown(quantity)}."
            + f" Worse: {worse}." * bool(worse)
            + f" Not distinguishable: {unclear}." * bool(unclear)
        )
        for i, one in others.items():
            change, low, high = (f"{quantity.factor * n:+.{quantity.digits}f}" for n in one)
            row = [family[i].name, names[best], f"{change} ({low} to {high})"]
            rows.append(row)
    if diverged := [group.name for group in groups if not group.mean(quantity)]:
        sentences.append(f"Diverged at least once: {'; '.join(diverged)}.")
    header = ["differences", "from the best", f"{quantity.name}: mean and interval"]
    return " ".join(sentences), Table(header, rows)


def _notes(comparison: Comparison) -> Iterator[str]:
    if comparison.implied:
        yield f"With these options, others differ: {', '.join(comparison.implied)}."
    same = f" of the same {comparison.x}" * comparison.by_x
    yield (
        "Mean ± sample standard deviation over seeds. Differences are paired by seed; 95 % holds "
        f"for all pairs of groups{same} together (Holm)."
    )
    if "data" in comparison.names:
        yield "The data differ. AUCs on different data do not compare."


def _plots(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """Means and deviations over x."""
    x = comparison.x.replace("_", " ")
    for quantity in comparison.quantities if len(comparison.columns) > 1 else ():
        lines: dict[str, list[tuple[float, float, float]]] = {}
        for group in comparison.groups:
            if mean := group.mean(quantity):
                y, deviation = (quantity.factor * number for number in mean)
                lines.setdefault(group.label, []).append((float(group.x), y, deviation))
        options: dict[str, Any] = {"logarithmic": quantity is MINUTES}
        if comparison.x == "batch_size":
            options["powers_of_two"] = True
        elif min(comparison.columns) > 0 and comparison.x != "epochs":
            options["logarithmic_x"] = True
        yield f"{quantity.name}, by {x}", line_plot(lines, x, quantity.name, **options)
