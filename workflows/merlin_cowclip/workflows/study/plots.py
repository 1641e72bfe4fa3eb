# SPDX-License-Identifier: Apache-2.0
"""Plots as SVG for a page: readable on light and on dark ground, and in print."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from merlin_cowclip.workflows.study.studies import AUC, MINUTES, TUNED, Cell, Quantity, Study
from merlin_cowclip.workflows.study.sweep import Outcome
from merlin_cowclip.workflows.training.logbook import METRICS, NORMS

Line = Sequence[tuple[float, float, float]]
"""Points of a line: x, y, and the deviation of y."""

# Okabe and Ito's, for all eyes.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31", "#7F7F7F")
_RULES = ("cowclip", "linear", "sqrt", "none", "sqrt_star", "n2_lambda", TUNED, "base")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_MARKED = 20  # points of a line at most
_INK = "#77808a"  # on both grounds
_STYLE: dict[Any, Any] = {
    **{"svg.fonttype": "none", "svg.hashsalt": "merlin-cowclip"},
    **{f"{part}.color": _INK for part in ("xtick", "ytick", "grid")},
    **{"axes.labelcolor": _INK, "axes.edgecolor": _INK, "axes.labelsize": 11},
    **{"axes.grid": True, "grid.alpha": 0.25, "grid.linewidth": 0.5},
    **{"axes.spines.top": False, "axes.spines.right": False},
    **{"lines.markersize": 5, "lines.linewidth": 1.6, "errorbar.capsize": 4},
    **{"legend.frameon": False, "legend.labelcolor": _INK, "legend.fontsize": 10},
}
_NEAR = 1.0  # % AUC
_KINDS = ("frequent", "rare")
_CURVES = {
    "valid_auc": "validation AUC, %",
    "valid_log_loss": "validation log loss",
    "train_loss": "training loss",
}


def line_plot(
    lines: Mapping[str, Line],
    x: str,
    y: str,
    *,
    powers_of_two: bool = False,
    logarithmic: bool = False,
    logarithmic_x: bool = False,
    levels: Mapping[str, float] | None = None,
) -> str:
    """Lines with error bars, by their names in the legend, as an SVG element.

    A rule has the same color everywhere. `powers_of_two`: x doubles from one point to the next.
    `logarithmic`: the y axis. `levels` of y are drawn across.
    """
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(6, 4), layout="constrained")
        axes: Any = figure.subplots()
        for number, (name, line) in enumerate(lines.items()):
            if not line:
                continue
            place = _place(name, lines)
            xs, ys, deviations = zip(*sorted(line), strict=True)
            if powers_of_two:  # beside each other, so that error bars can be told apart
                xs = tuple(x * 2 ** (0.04 * (number - (len(lines) - 1) / 2)) for x in xs)
            axes.errorbar(
                xs,
                ys,
                yerr=deviations if any(deviations) else None,
                label=name,
                color=_COLOURS[place % 8],
                marker=_MARKERS[(place + place // 8) % 8] if len(line) <= _MARKED else "",
            )
        for name, level in (levels or {}).items():
            axes.axhline(level, label=name, color=_INK, linewidth=1.4, linestyle="--")
        if powers_of_two:
            axes.set_xscale("log", base=2)
            ticks = sorted({point[0] for line in lines.values() for point in line})
            axes.set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks])
            axes.minorticks_off()
        elif logarithmic_x:
            axes.set_xscale("log")
        else:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))  # epochs
        axes.set(xlabel=x, ylabel=y, yscale="log" if logarithmic else "linear")
        figure.legend(loc="outside lower center", ncols=1 if max(map(len, lines)) > 20 else 3)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def _place(name: str, lines: Iterable[str]) -> int:
    """Of a line among colors and markers: a rule's own where lines are rules, else its turn."""
    names = list(lines)
    return (_RULES if set(names) <= set(_RULES) else names).index(name)


def points(rows: pd.DataFrame, x: str, y: str, factor: float = 1.0) -> Line:
    """Two columns as a line, where both have values."""
    rows = rows[[x, y]].dropna()
    return [(float(a), factor * float(b), 0.0) for a, b in zip(rows[x], rows[y], strict=True)]


def plots(study: Study, found: Sequence[Outcome]) -> Iterator[tuple[str, str]]:
    """Title and SVG of each plot of a study."""
    for quantity in study.quantities:
        yield from _of_cells(study, found, quantity)
    first = [(o.cell, o.runs[seed]) for o in found for seed in [*o.finished][:1]]
    metrics = [(cell, pd.read_csv(run / METRICS)) for cell, run in first]
    if metrics and study.name == "curves":
        for key, title in _CURVES.items():
            factor = AUC.factor if key == "valid_auc" else 1.0
            lines = {cell.column: points(of, "epoch", key, factor) for cell, of in metrics}
            yield f"{title}, by epoch, of the first seed", line_plot(lines, "epoch", title)
    if metrics and study.name == "gradients":
        lines = {
            f"{cell.row}, {cell.column}, {kind}": points(of, "epoch", f"gradient_norm_{kind}")
            for cell, of in metrics
            for kind in _KINDS
        }
        plot = line_plot(lines, "epoch", "gradient norm", logarithmic=True)
        yield "mean norm of an id's gradient before the clip, of the first seed", plot
        x, y = "gradient norm, from one power of two on", "% of the rows"
        plot = line_plot(dict(_norms(first)), x, y, logarithmic_x=True)
        yield "norms of the ids' gradients in the last epoch, of the first seed", plot


def _of_cells(
    study: Study, found: Sequence[Outcome], quantity: Quantity
) -> Iterator[tuple[str, str]]:
    """Means and deviations by batch size or, as in Figure 2, by learning rate."""
    by_rate = study.name == "learning-rate"
    lines: dict[str, list[tuple[float, float, float]]] = {}
    for outcome in found:
        cell, mean = outcome.cell, outcome.mean(quantity.key)
        if mean is None or cell.column == "baseline":
            continue
        name, x = cell.row, float(cell.config.batch_size)
        if by_rate:  # a line for each rule and batch size
            name = f"{cell.row.split(',')[0]}, {cell.column}"
            x = cell.config.hyperparameters.embedding_lr
        point = (x, quantity.factor * mean[0], quantity.factor * mean[1])
        lines.setdefault(name, []).append(point)
    if len({x for line in lines.values() for x, _, _ in line}) < 2:
        return
    if by_rate:
        axis = "learning rate of the embeddings (that of the dense weights moves with it)"
        plot = line_plot(lines, axis, quantity.name, logarithmic_x=True)
        yield f"{quantity.name}, by learning rate", plot
        return
    options: dict[str, Any] = {"powers_of_two": True, "logarithmic": quantity is MINUTES}
    plot = line_plot(lines, "batch size", quantity.name, **options)
    yield f"{quantity.name}, by batch size", plot
    best = max(y for line in lines.values() for _, y, _ in line)
    near = {k: line for k, line in lines.items() if min(y for _, y, _ in line) > best - _NEAR}
    if quantity is AUC and 1 < len(near) < len(lines):  # a far one presses the others together
        plot = line_plot(near, "batch size", quantity.name, **options)
        yield f"{quantity.name}, of the rows within {_NEAR:g} % of the best", plot


def _norms(runs: Iterable[tuple[Cell, Path]]) -> Iterator[tuple[str, Line]]:
    """Figure 4: how the rows' gradient norms lie in the last epoch, of each run."""
    for cell, run in runs:
        bins = pd.read_csv(run / NORMS)
        bins = bins[bins["epoch"] == bins["epoch"].max()]
        share = 100 / bins[list(_KINDS)].to_numpy().sum()
        for kind in _KINDS:
            yield f"{cell.row}, {cell.column}, {kind}", points(bins, "norm", kind, share)
