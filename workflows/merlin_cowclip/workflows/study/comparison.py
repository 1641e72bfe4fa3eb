# SPDX-License-Identifier: Apache-2.0
"""Runs in groups by the options that differ, and their differences, paired by seed."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from scipy import stats

from merlin_cowclip.plugins._text import format_table
from merlin_cowclip.workflows.training.learning_rates import option_text

LEVEL = 0.05  # of a family of comparisons
_FIRST = ("data", "model", "rule", "batch_size")  # options that name a group before all others


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
MINUTES = Quantity("train_seconds", "minutes of training", 1 / 60, 2)
QUANTITIES = (AUC, VALID_AUC, Quantity("log_loss", "test log loss", 1.0, 5), MINUTES)


@dataclass(frozen=True)
class Trained:
    """A run: its folder, its options but the seed, and its result, empty if it diverged."""

    path: Path
    options: Mapping[str, Any]  # those of `TrainConfig`, and `data`
    seed: int
    result: Mapping[str, Any] | None  # None: it has not ended

    def number(self, quantity: Quantity) -> float | None:
        """A number of its result; the validation AUC is that of the epoch that the run uses."""
        found: Any = self.result or {}
        if quantity is VALID_AUC and found:
            found = found["epochs"][
                found["best_epoch"] - 1 if found["checkpoint"] == "best" else -1
            ]
        number: float | None = found.get(quantity.key)
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
        found = {seed: number for seed, number in ended.items() if number is not None}
        return found if len(found) == len(ended) else {}

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

    `x` is the numeric option that becomes the columns of tables and the axis of plots; empty if
    none differs.
    """

    names: Sequence[str]
    implied: Sequence[str]
    x: str
    groups: Sequence[Group]

    @classmethod
    def of(cls, runs: Sequence[Trained]) -> Comparison:
        """Group runs by the options that differ; runs that differ in none, by their folders."""
        keys = [(_key(run.options, run.options), run.seed) for run in runs]
        if len({*keys}) < len({*zip(keys, (run.path for run in runs), strict=True)}):
            runs = [replace(r, options={**r.options, "run": r.path.name}) for r in runs]
        names, implied = differing([run.options for run in runs])
        numeric = [n for n in names if all(type(run.options[n]) in (int, float) for run in runs)]
        x = "batch_size" if "batch_size" in numeric else next(iter(numeric), "")
        found: dict[str, list[Trained]] = {}
        for run in runs:
            found.setdefault(_key(run.options, names), []).append(run)
        rest = [name for name in names if name != x]
        groups = []
        for options, same in ((runs[0].options, runs) for runs in found.values()):
            label = ", ".join(shown(options[name]) for name in rest)
            name = ", ".join(filter(None, (label, f"{x} {shown(options[x])}" if x else "")))
            by_seed = {run.seed: run for run in same}
            groups.append(Group(label or "all runs", options.get(x), by_seed, name or "all runs"))
        return cls(names, implied, x, groups)

    @property
    def rows(self) -> list[str]:
        """The labels."""
        return list(dict.fromkeys(group.label for group in self.groups))

    @property
    def by_x(self) -> bool:
        """Whether groups are compared at each x, and not all with each other."""
        return bool(self.x) and len(self.rows) > 1

    @property
    def columns(self) -> list[Any]:
        """The values of x, rising."""
        return sorted({group.x for group in self.groups}) if self.x else [None]

    @property
    def quantities(self) -> list[Quantity]:
        """Those that all finished runs have; the first one is compared."""
        runs = [run for group in self.groups for run in group.finished]
        return [q for q in QUANTITIES if all(run.number(q) is not None for run in runs)]

    def cells(self, quantity: Quantity | None = None) -> list[list[tuple[str, Group | None]]]:
        """The lines of a table of a quantity by label and x, or of all quantities by label."""
        found = {(group.label, group.x): group for group in self.groups}
        if quantity is None:
            return [[(g.shown(q), g) for q in self.quantities] for g in found.values()]
        places = [[found.get((row, x)) for x in self.columns] for row in self.rows]
        return [[(g.shown(quantity) if g else "", g) for g in line] for line in places]

    def header(self, quantity: Quantity | None = None) -> list[str]:
        """Of that table."""
        by = ", ".join(name for name in self.names if name != self.x)
        if quantity is None:
            return [by, *(q.name for q in self.quantities)]
        what = " and ".join(filter(None, (by, self.x)))
        return [f"{quantity.name}, by {what}", *map(shown, self.columns)]

    def table(self) -> str:
        """For a terminal."""
        quantity = self.quantities[0] if self.x else None
        lines = zip(self.rows, self.cells(quantity), strict=True)
        rows = [(row, *(text for text, _ in line)) for row, line in lines]
        return format_table(self.header(quantity), rows)

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


def differences(groups: Sequence[Group], quantity: Quantity) -> dict[tuple[int, int], Difference]:
    """Of each pair of groups, by their places, both ways: the first minus the second.

    Paired t-intervals with Holm's correction: of m pairs by rising p, the one at place i (from 0)
    has the confidence 1 - 0.05 / (m - i), and those after the first one that is not clear have its
    confidence. Groups that share their runs, or fewer than two seeds, are left out.
    """
    pairs: dict[tuple[int, int], tuple[float, float, int]] = {}  # mean, its error, freedom
    for one, other in itertools.combinations(range(len(groups)), 2):
        first, second = (groups[i].numbers(quantity) for i in (one, other))
        seeds = [s for s in first if s in second]
        same = all(groups[one].runs[s].path == groups[other].runs[s].path for s in seeds)
        if len(seeds) > 1 and not same:
            values = [first[seed] - second[seed] for seed in seeds]
            error = statistics.stdev(values) / math.sqrt(len(values))
            pairs[one, other] = statistics.fmean(values), error, len(values) - 1

    def p_value(pair: tuple[int, int]) -> float:
        mean, error, freedom = pairs[pair]
        t = abs(mean) / error if error else math.inf * bool(mean)
        return float(stats.t.sf(t, freedom)) if mean else 1.0

    found: dict[tuple[int, int], Difference] = {}
    left, rejects = len(pairs), True
    for pair in sorted(pairs, key=p_value):
        mean, error, freedom = pairs[pair]
        half = float(stats.t.isf(LEVEL / left / 2, freedom)) * error
        found[pair] = Difference(mean, mean - half, mean + half)
        found[pair[::-1]] = Difference(-mean, -mean - half, -mean + half)
        rejects = rejects and found[pair].is_clear
        left -= rejects
    return found


def differing(options: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """The options that tell runs apart, and those that differ but are determined by them."""
    names: list[str] = []
    implied: list[str] = []
    for name in dict.fromkeys([*_FIRST, *itertools.chain.from_iterable(options)]):
        if len({_key(of, [name]) for of in options}) > 1:
            kinds = [len({_key(of, by) for of in options}) for by in (names, [*names, name])]
            (names if kinds[1] > kinds[0] else implied).append(name)
    return names, implied


def shown(value: Any) -> str:
    """A value of an option, for a person to read."""
    if isinstance(value, Mapping):
        return option_text(value) if "name" in value else str(dict(value))
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    if isinstance(value, float):
        return text if float(text := f"{value:.4g}") == value else str(value)
    return f"{value:,}" if type(value) is int else str("none" if value is None else value)


def _key(options: Mapping[str, Any], names: Iterable[str]) -> str:
    return json.dumps([options.get(name) for name in names], sort_keys=True)
