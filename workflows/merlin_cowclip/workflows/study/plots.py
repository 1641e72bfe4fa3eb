# SPDX-License-Identifier: Apache-2.0
"""Plots as SVG for a page: readable on light and on dark ground, and in print."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

Line = Sequence[tuple[float, float, float]]
"""Points of a line: x, y, and the deviation of y."""

# Okabe and Ito's, for all eyes.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31", "#7F7F7F")
_RULES = ("cowclip", "linear", "sqrt", "none", "sqrt_star", "n2_lambda", "sqrt_decay", "base")
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
        return _svg(figure)


def dot_plot(numbers: Mapping[str, float], x: str, levels: Mapping[str, float]) -> str:
    """A dot per number, labeled, the first on top, as an SVG element; levels of x are drawn."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(6, 1.4 + 0.35 * len(numbers)), layout="constrained")
        axes: Any = figure.subplots()
        for number, (name, value) in enumerate(numbers.items()):
            place = _place(name, numbers) % 8
            axes.plot(value, number, color=_COLOURS[place], marker=_MARKERS[place], markersize=8)
        for (name, level), style in zip(levels.items(), ("--", ":", "-."), strict=False):
            axes.axvline(level, label=name, color=_INK, linewidth=1.4, linestyle=style)
        labels = [f"{name}  {value:.4f}" for name, value in numbers.items()]
        axes.set_yticks(range(len(numbers)), labels)
        axes.set(xlabel=x, ylim=(len(numbers) - 0.5, -0.5))
        axes.margins(x=0.1)
        figure.legend(loc="outside lower center", ncols=3)
        return _svg(figure)


def _svg(figure: Figure) -> str:
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


def curves(
    metrics: Mapping[str, pd.DataFrame], levels: Mapping[str, float] | None = None
) -> Iterator[tuple[str, str]]:
    """Title and SVG of what `metrics.csv` of some runs has by epoch; levels of the AUC."""
    for key, what in (("valid_auc", "validation AUC"), ("train_loss", "training loss")):
        lines = {name: points(of, "epoch", key) for name, of in metrics.items()}
        if any(lines.values()):
            plot = line_plot(lines, "epoch", what, levels=levels if key == "valid_auc" else None)
            yield f"{what}, by epoch, first seed", plot
    norms = {
        f"{name}, {kind}": points(of, "epoch", f"gradient_norm_{kind}")
        for name, of in metrics.items()
        for kind in ("frequent", "rare")
        if f"gradient_norm_{kind}" in of
    }
    if len(norms) <= len(_COLOURS) and any(norms.values()):
        plot = line_plot(norms, "epoch", "gradient norm", logarithmic=True)
        yield "mean norm of an id's gradient before the clip, by epoch, first seed", plot
