"""A report's pictures, as SVG for a page: readable on light and on dark ground, and in print."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

# Okabe and Ito's, for all eyes; the grey of text goes on both grounds.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31", "#7F7F7F")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_INK = "#77808a"

Line = Sequence[tuple[float, float, float]]
"""Points of a line: x, y, and the deviation of y."""


def line_plot(
    lines: Mapping[str, Line],
    x: str,
    y: str,
    *,
    powers_of_two: bool = False,
    logarithmic: bool = False,
    logarithmic_x: bool = False,
    markers: bool | None = None,
    levels: Mapping[str, float] | None = None,
) -> str:
    """Lines with error bars, by name; as an SVG element.

    Args:
      lines: by what the legend calls them.
      x: what is to the right.
      y: what is up.
      powers_of_two: whether x doubles from one point to the next.
      logarithmic: whether y is.
      logarithmic_x: whether x is.
      markers: whether points are marked; by default not where x is logarithmic: they are many.
      levels: of y, drawn across by name.
    """
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "merlin-cowclip"}):
        figure = Figure(figsize=(6, 4), layout="constrained")
        axes: Any = figure.subplots()
        marked = not logarithmic_x if markers is None else markers
        for i, (name, points) in enumerate(lines.items()):
            if not points:
                continue
            xs, ys, deviations = zip(*sorted(points), strict=True)
            axes.errorbar(
                xs,
                ys,
                yerr=deviations if any(deviations) else None,
                label=name,
                color=_COLOURS[i % len(_COLOURS)],
                marker=_MARKERS[(i + i // len(_COLOURS)) % len(_MARKERS)] if marked else "",
                markersize=4,
                linewidth=1.4,
                capsize=2,
            )
        for name, level in (levels or {}).items():
            axes.axhline(level, label=name, color=_INK, linewidth=1.4, linestyle="--")
        if powers_of_two:
            axes.set_xscale("log", base=2)
            ticks = sorted({point[0] for points in lines.values() for point in points})
            axes.set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks])
            axes.minorticks_off()
        elif logarithmic_x:
            axes.set_xscale("log")
        else:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))  # epochs
        if logarithmic:
            axes.set_yscale("log")
        _in_ink(axes, x, y)
        figure.legend(
            loc="outside lower center", frameon=False, labelcolor=_INK, fontsize=8, ncols=4
        )
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def _in_ink(axes: Any, x: str, y: str) -> None:
    axes.set_xlabel(x, color=_INK)
    axes.set_ylabel(y, color=_INK)
    axes.tick_params(colors=_INK, which="both")
    axes.grid(color=_INK, alpha=0.25, linewidth=0.5)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_INK)
