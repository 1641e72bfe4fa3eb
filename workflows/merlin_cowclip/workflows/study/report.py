# SPDX-License-Identifier: Apache-2.0
"""Runs compared: in groups by the options that differ, paired by seed; as text and as a page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from scipy import stats

from merlin_cowclip.plugins._text import format_table
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.folders import read_json
from merlin_cowclip.workflows.study.pages import Page, Table, curves, line_plot, write_page
from merlin_cowclip.workflows.study.sweep import DIVERGED, RECORD, RUNS, differing, key_of, shown
from merlin_cowclip.workflows.training.configuration import few_steps
from merlin_cowclip.workflows.training.listeners import METRICS
from merlin_cowclip.workflows.training.runs import RESULT, Run, config_in

HTML = "report.html"
MIN_SEEDS = 3  # of each group: with fewer there is no verdict
_LINES = 8  # groups at most whose curves and options are shown: as many as there are colors
LEVEL = 0.05  # of a family of comparisons


class Quantity(NamedTuple):
    """A number of a run's result: its key, its name with the unit, and how it is shown."""

    key: str
    name: str
    factor: float  # from the result's unit to the name's
    digits: int

    def shown(self, mean: float, deviation: float = 0.0) -> str:
        """Mean ± deviation; of one run the deviation is 0, and not shown."""
        text = f"{self.factor * mean:.{self.digits}f}"
        return text + (f" ± {self.factor * deviation:.{self.digits}f}" if deviation else "")


AUC = Quantity("auc", "test AUC, %", 100.0, 3)
VALID_AUC = Quantity("valid_auc", "validation AUC, %", 100.0, 3)
LOG_LOSS = Quantity("log_loss", "test log loss", 1.0, 5)
QUANTITIES = (AUC, VALID_AUC, LOG_LOSS, Quantity("train_seconds", "minutes", 1 / 60, 2))


@dataclass(frozen=True)
class Trained:
    """A run: its folder, its options but the seed, and its result, empty if it diverged."""

    path: Path
    options: Mapping[str, Any]  # those of `TrainConfig`, and `data`
    seed: int
    result: Mapping[str, Any] | None  # None: it has not ended

    def number(self, quantity: Quantity) -> float | None:
        """A number of its result; the validation AUC is that of the epoch that the run uses."""
        values: Any = self.result or {}
        if quantity is VALID_AUC and values:
            is_best = values["checkpoint"] == "best"
            values = values["epochs"][values["best_epoch"] - 1 if is_best else -1]
        number: float | None = values.get(quantity.key)
        return number


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed only, and in which options from others."""

    label: str  # values of those options without the x axis
    x: Any  # the value of that one; None without
    runs: Mapping[int, Trained]  # by seed
    name: str  # the label and x

    @property
    def options(self) -> Mapping[str, Any]:
        """The same for all of its runs."""
        return next(iter(self.runs.values())).options

    @property
    def finished(self) -> list[Trained]:
        """Those of its runs that have a result."""
        return [run for run in self.runs.values() if run.result]

    def numbers(self, quantity: Quantity) -> dict[int, float]:
        """By seed, of the runs that have ended; none if one diverged."""
        ended = {s: run.number(quantity) for s, run in self.runs.items() if run.result is not None}
        finite = {seed: number for seed, number in ended.items() if number is not None}
        return finite if len(finite) == len(ended) else {}

    def mean(self, quantity: Quantity) -> tuple[float, float] | None:
        """Mean and sample deviation (0 of one run); None without numbers."""
        values = list(self.numbers(quantity).values())
        if not values:
            return None
        return statistics.fmean(values), statistics.stdev(values) if values[1:] else 0.0

    def shown(self, quantity: Quantity) -> str:
        """Mean ± deviation, "diverged", or nothing if no run has ended."""
        if mean := self.mean(quantity):
            return quantity.shown(*mean)
        return "diverged" * any(run.result is not None for run in self.runs.values())


@dataclass(frozen=True)
class Comparison:
    """Groups of runs, the options that name them, and those that differ with these.

    `x` is the numeric option that is the axis of plots; empty if none differs. If others differ,
    too, groups are compared at each x.
    """

    names: Sequence[str]
    implied: Sequence[str]
    x: str
    groups: Sequence[Group]

    @classmethod
    def of(cls, runs: Sequence[Trained]) -> Comparison:
        """Group runs by the options that differ; runs that differ in none, by their folders."""
        keys = [(key_of(run.options, run.options), run.seed) for run in runs]
        if len({*keys}) < len({*zip(keys, (run.path for run in runs), strict=True)}):
            runs = [replace(r, options={**r.options, "run": r.path.name}) for r in runs]
        names, implied = differing([run.options for run in runs])
        numeric = [n for n in names if all(type(run.options[n]) in (int, float) for run in runs)]
        x = "batch_size" if "batch_size" in numeric else next(iter(numeric), "")
        by_options: dict[str, list[Trained]] = {}
        for run in runs:
            by_options.setdefault(key_of(run.options, names), []).append(run)
        rest = [name for name in names if name != x]
        groups = []
        for options, same in ((runs[0].options, runs) for runs in by_options.values()):
            label = ", ".join(shown(options[name]) for name in rest)
            name = ", ".join(filter(None, (label, f"{x} {shown(options[x])}" if x else "")))
            by_seed = {run.seed: run for run in same}
            groups.append(Group(label or "all runs", options.get(x), by_seed, name or "all runs"))
        return cls(names, implied, x, groups)

    @property
    def quantities(self) -> list[Quantity]:
        """Those that all finished runs have; the first one is compared."""
        runs = [run for group in self.groups for run in group.finished]
        return [q for q in QUANTITIES if all(run.number(q) is not None for run in runs)]

    def families(self) -> list[list[Group]]:
        """Groups that are compared with each other."""
        if not self.x or len({group.label for group in self.groups}) == 1:
            return [list(self.groups)]
        xs = sorted({group.x for group in self.groups})
        return [[group for group in self.groups if group.x == x] for x in xs]

    def table(self) -> Table:
        """A row for each group: its options, the number of its seeds, and its quantities."""
        names, quantities = self.names or ["runs"], self.quantities
        rows = [
            [
                *(shown(group.options.get(name, group.label)) for name in names),
                *(str(len(group.runs)), *map(group.shown, quantities)),
            ]
            for group in self.groups
        ]
        return [*names, "seeds", *(quantity.name for quantity in quantities)], rows

    def to_list(self) -> list[dict[str, Any]]:
        """Every run, fit for JSON: its options that differ, folder and numbers."""
        return [
            {name: run.options.get(name) for name in self.names}
            | {"seed": seed, "run": str(run.path), "diverged": run.result == {}}
            | {quantity.key: run.number(quantity) for quantity in QUANTITIES}
            for group in self.groups
            for seed, run in group.runs.items()
        ]


class Difference(NamedTuple):
    """A mean difference of two groups by the same seeds, and its interval."""

    mean: float
    low: float
    high: float

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low > 0 or self.high < 0


def difference(first: Group, second: Group, quantity: Quantity, level: float) -> Difference | None:
    """The first group minus the second by the same seeds, with its paired t-interval.

    The interval has the confidence 1 - ``level``. None for fewer than two common seeds.
    """
    one, other = first.numbers(quantity), second.numbers(quantity)
    values = [one[seed] - other[seed] for seed in one if seed in other]
    if len(values) < 2:
        return None
    mean, error = statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))
    half = float(stats.t.isf(level / 2, len(values) - 1)) * error
    return Difference(mean, mean - half, mean + half)


def report(*runs: str | Path, out: str | Path | None = None) -> tuple[Path, str]:
    """Write a page that compares runs; returns it, and its table and verdict as text.

    Folders are those of `sweep` or of runs. The page `out` is by default `report.html`, in the
    folder of one sweep, else in the current one. A UserError: no run has ended, or a folder is none
    of these.
    """
    trained, command = [], ""
    for path in map(Path, runs):
        is_sweep = (path / RECORD).exists()
        of_path, command = runs_of(path) if is_sweep else ([_of_run(path)], "")
        trained += of_path
    ended = [run for run in trained if run.result]
    if not ended:
        raise UserError(f"{runs[0]} has no run that ended. To resume a sweep, repeat its command")
    file = Path(out or (Path(runs[0]) / HTML if is_sweep and len(runs) == 1 else HTML))
    page = page_of(Comparison.of(trained), command * (len(runs) == 1))
    text = f"{format_table(*page.tables[0])}\n\n{page.headline}"
    return write_page(file, page, [run.result["config"] for run in ended if run.result]), text


def runs_of(out: Path) -> tuple[list[Trained], str]:
    """The runs of a sweep, also those that have not ended, and its command."""
    record, trained = read_json(out / RECORD), []
    for one in record["runs"]:
        run, options = out / RUNS / one["run"], {**one["config"], "data": _data(record)}
        result: dict[str, Any] | None = {} if (run / DIVERGED).exists() else None
        if (run / RESULT).exists():
            result = read_json(run / RESULT)
        trained.append(Trained(run, options, options.pop("seed"), result))
    return trained, record["command"]


def _of_run(path: Path) -> Trained:
    """A run of `train`."""
    result = Run.open(path).result
    record = result["config"]
    options = {**config_in(record).to_dict(), "data": _data(record)}
    return Trained(path, options, options.pop("seed"), result)


def _data(record: Mapping[str, Any]) -> str:
    """Of a run or sweep: the folders' names, and the beginning of what identifies the rows."""
    return f"{' + '.join(Path(of).name for of in record['data'])} {record['data_sha256'][:6]}"


def page_of(comparison: Comparison, command: str) -> Page:
    """What a page says of a comparison."""
    groups, quantities = comparison.groups, comparison.quantities
    tables, headline = [comparison.table()], _doubt(groups)
    if quantities and not headline:
        headline, table = _verdict(comparison, quantities[0])
        tables.append(table)
    if len(groups) <= _LINES and comparison.implied:
        rows = [[o, *(shown(group.options.get(o)) for group in groups)] for o in comparison.implied]
        tables.append((["differs, too", *(group.name for group in groups)], rows))
    curved = [group for group in groups if group.finished]
    if len(curved) > _LINES:  # those at the largest x
        curved = [group for group in curved if group in comparison.families()[-1]]
    files = {group.name: group.finished[0].path / METRICS for group in curved[:_LINES]}
    plots = [*_plots(comparison), *curves(files)]
    return Page("Runs compared", headline, tables, list(_notes(comparison)), plots, command)


def _doubt(groups: Sequence[Group]) -> str:
    """Why there is no verdict; empty if there is one."""
    if missing := sum(run.result is None for group in groups for run in group.runs.values()):
        return f"No verdict yet. Runs still to come: {missing}."
    configs = [run.result["config"] for g in groups for run in g.finished if run.result]
    if not configs:
        return "No verdict: every run diverged."
    config = max(configs, key=lambda config: config["batch_size"] / config["rows"]["train"])
    if few := few_steps(config["rows"]["train"], config["batch_size"]):
        return f"No verdict: {few}"
    if (seeds := min(len(group.runs) for group in groups)) < MIN_SEEDS:
        return (
            f"No verdict: {MIN_SEEDS} seeds are needed to separate a difference from random "
            f"variation, and a group has {seeds}."
        )
    return "" if len(groups) > 1 else "No verdict: there is only one group of runs."


def _verdict(comparison: Comparison, quantity: Quantity) -> tuple[str, Table]:
    """The best group of each family, and how the others differ from it."""
    sentences, rows, families = [], [], comparison.families()
    for family in families:
        means = {i: mean[0] for i, group in enumerate(family) if (mean := group.mean(quantity))}
        if not means:
            continue
        best = (max if quantity in (AUC, VALID_AUC) else min)(means, key=means.__getitem__)
        level = LEVEL / max(math.comb(len(family), 2), 1)  # Bonferroni's
        compared = {i: difference(family[i], family[best], quantity, level) for i in means}
        others = {i: one for i, one in compared.items() if one and i != best}
        worse, unclear = (
            "; ".join(family[i].name for i, one in others.items() if one.is_clear == is_clear)
            for is_clear in (True, False)
        )
        sentences.append(
            f"{family[best].name} has the best {quantity.name.removesuffix(', %')}, "
            f"{family[best].shown(quantity)}."
            + f" Worse: {worse}." * bool(worse)
            + f" Not distinguishable: {unclear}." * bool(unclear)
        )
        for i, one in others.items():
            change, low, high = (f"{quantity.factor * n:+.{quantity.digits}f}" for n in one)
            rows.append([family[i].name, family[best].name, f"{change} ({low} to {high})"])
    if diverged := [group.name for group in comparison.groups if not group.mean(quantity)]:
        sentences.append(f"Diverged at least once: {'; '.join(diverged)}.")
    header = ["differences", "from the best", f"{quantity.name}: mean and interval"]
    return " ".join(sentences), (header, rows)


def _notes(comparison: Comparison) -> Iterator[str]:
    if comparison.implied:
        yield f"With these options, others differ: {', '.join(comparison.implied)}."
    same = f" of the same {comparison.x}" * (len(comparison.families()) > 1)
    yield (
        "Mean ± sample standard deviation over seeds. Differences are paired by seed; 95 % holds "
        f"for all pairs of groups{same} together (Bonferroni)."
    )
    if "data" in comparison.names:
        yield "The data differ. AUCs on different data do not compare."


def _plots(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """Means and deviations over x."""
    x, xs = comparison.x, {group.x for group in comparison.groups}
    for quantity in comparison.quantities if len(xs) > 1 else ():
        lines: dict[str, list[tuple[float, float, float]]] = {}
        for group in comparison.groups:
            if mean := group.mean(quantity):
                y, deviation = (quantity.factor * number for number in mean)
                lines.setdefault(group.label, []).append((float(group.x), y, deviation))
        title, is_log = x.replace("_", " "), min(xs) > 0 and x not in ("batch_size", "epochs")
        plot = line_plot(
            lines, title, quantity.name, powers_of_two=x == "batch_size", logarithmic_x=is_log
        )
        yield f"{quantity.name}, by {title}", plot
