# SPDX-License-Identifier: Apache-2.0
"""The page that `report`, `batch-size` and `demo` write: one HTML file that needs no network.

Its plots are SVG, readable on light and on dark ground, and in print.
"""

from __future__ import annotations

import datetime
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from jinja2 import Environment, FileSystemLoader
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from merlin_cowclip.workflows.data.prepared_data import PARTS, TITLES
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.folders import replacing

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Header and rows, for `format_table` and for a page."""

Line = Sequence[tuple[float, float, float]]
"""Points of a line: x, y, and the deviation of y."""

# Okabe and Ito's, for all eyes.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31", "#7F7F7F")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_CURVES = {
    "valid_auc": "validation AUC",
    "train_loss": "training loss",
    "gradient_norm_frequent": "mean norm of a frequent id's gradient",
    "gradient_norm_rare": "mean norm of a rare id's gradient",
}
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

    `powers_of_two`: x doubles from one point to the next. `logarithmic`: the y axis. `levels` of y
    are drawn across.
    """
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(6, 4), layout="constrained")
        axes: Any = figure.subplots()
        for number, (name, line) in enumerate(lines.items()):
            if not line:
                continue
            xs, ys, deviations = zip(*sorted(line), strict=True)
            if powers_of_two:  # beside each other, so that error bars can be told apart
                xs = tuple(x * 2 ** (0.04 * (number - (len(lines) - 1) / 2)) for x in xs)
            axes.errorbar(
                xs,
                ys,
                yerr=deviations if any(deviations) else None,
                label=name,
                color=_COLOURS[number % 8],
                marker=_MARKERS[(number + number // 8) % 8] if len(line) <= _MARKED else "",
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


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def curves(
    files: Mapping[str, Path], levels: Mapping[str, float] | None = None
) -> Iterator[tuple[str, str]]:
    """Title and SVG of what the `metrics.csv` of some runs has by epoch; levels of the AUC."""
    metrics = {name: pd.read_csv(file) for name, file in files.items()}
    for key, what in _CURVES.items():
        lines = {
            name: [(float(x), float(y), 0.0) for x, y in of[["epoch", key]].dropna().to_numpy()]
            for name, of in metrics.items()
            if key in of
        }
        if any(lines.values()):
            drawn, is_norm = levels if key == "valid_auc" else None, "norm" in key
            plot = line_plot(lines, "epoch", what, logarithmic=is_norm, levels=drawn)
            yield f"{what}, by epoch, first seed", plot


@dataclass
class Page:
    """What a page says."""

    title: str
    headline: str  # what to conclude, or why there is no verdict
    tables: list[Table]
    notes: list[str]
    plots: list[tuple[str, str]]  # title and SVG
    command: str = ""  # what prints the numbers again


def write_page(path: Path, page: Page, configs: Iterable[Mapping[str, Any]]) -> Path:
    """Write a page so that a reader sees either the last one or this one; returns its path.

    Data, versions and machines are listed from the `config.json` of the runs.
    """
    folder = FileSystemLoader(Path(__file__).parent / "templates")
    template = Environment(loader=folder, autoescape=True).get_template("page.html.j2")
    text = template.render(page=page, facts=_facts(configs))
    try:
        with replacing(path) as partial:  # a path's odd bytes, as `write_json` has them
            partial.write_text(text, "utf-8", errors="backslashreplace")
    except OSError as error:
        raise UserError(f"a report must be written. Received: {path}: {error}") from error
    return path


def _facts(configs: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The date, and what the runs are of; where they differ, all of it."""
    facts: dict[str, list[str]] = {"date": [f"{datetime.datetime.now():%Y-%m-%d %H:%M}"]}
    for config in configs:
        rows, machine = config["rows"], config["machine"]
        gpus = ", ".join(machine.get("gpus", ())) or "none"
        cpu = f"{machine.get('processor') or machine['platform']}, {machine['cpus']} CPUs"
        for key, value in {
            "data": f"{config['dataset']}, {' '.join(config['data'])}",
            "rows": ", ".join(f"{rows[part]:,} {TITLES[part]}" for part in PARTS),
            "embedding rows": f"{config['table_rows']:,} in {len(config['cardinalities'])} fields",
            "network": f"{config['model']}, MLP {config.get('mlp')}",
            "machine": f"{cpu}, GPUs: {gpus}",
            "versions": ", ".join(f"{name} {of}" for name, of in config["versions"].items()),
        }.items():
            facts.setdefault(key, []).append(value)
    return {key: "; ".join(dict.fromkeys(values)) for key, values in facts.items()}
