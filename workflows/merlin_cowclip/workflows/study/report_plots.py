"""The plots of a study: its quantity by batch size, and those of the paper's figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from merlin_cowclip.workflows.study.pages import read_metrics, read_norms
from merlin_cowclip.workflows.study.plots import Line, line_plot
from merlin_cowclip.workflows.study.studies import AUC, MINUTES, Quantity
from merlin_cowclip.workflows.study.sweep import RUNS, Outcome

Plot = tuple[str, str]
"""Title and SVG."""

_NEAR = 1.0
"""% AUC."""

_KINDS = ("frequent", "rare")

_CURVES = {
    "auc": "test AUC, %",
    "log_loss": "test log loss",
    "train_loss": "training loss, mean of the epoch",
}
"""Figures 5 and 6, but for the training AUC, which nothing here measures."""


def plots(
    out: Path, name: str, found: Sequence[Outcome], record: Mapping[str, Any], quantity: Quantity
) -> Iterator[Plot]:
    """A study's plots.

    Args:
      out: the sweep's folder.
      name: of the study.
      found: what its runs came to.
      record: of the study.
      quantity: of the plot by batch size.
    """
    yield from by_size_or_rate(name, found, quantity)
    if name == "curves":
        yield from _curves(out, found, record)
    if name == "gradients":
        yield from _gradients(out, found, record)
        yield from _distributions(out, found, record)


def by_size_or_rate(name: str, found: Sequence[Outcome], quantity: Quantity) -> Iterator[Plot]:
    """A quantity by batch size; in the study of learning rates by those: else two points a line."""
    if name == "learning-rate":
        yield from _by_learning_rate(found, quantity)
    else:
        yield from _by_batch_size(found, quantity)


def _by_batch_size(found: Sequence[Outcome], quantity: Quantity) -> Iterator[Plot]:
    lines = _lines(
        (o for o in found if o.cell.column != "baseline"),
        quantity,
        lambda outcome: (outcome.cell.row, float(outcome.cell.config.batch_size)),
    )
    if len({x for points in lines.values() for x, _, _ in points}) > 1:
        logarithmic = quantity is MINUTES
        plot = line_plot(
            lines, "batch size", quantity.name, powers_of_two=True, logarithmic=logarithmic
        )
        yield f"{quantity.name}, by batch size", plot
        near = _near_the_best(lines) if quantity is AUC else {}
        if near:
            plot = line_plot(near, "batch size", quantity.name, powers_of_two=True)
            yield f"{quantity.name}, of those that are nowhere {_NEAR:g} % below the best", plot


def _near_the_best(lines: Mapping[str, Line]) -> Mapping[str, Line]:
    """The lines that a far one presses together; none where all are near, or only one is."""
    best = max(y for points in lines.values() for _, y, _ in points)
    near = {k: line for k, line in lines.items() if min(y for _, y, _ in line) > best - _NEAR}
    return near if 1 < len(near) < len(lines) else {}


def _by_learning_rate(found: Sequence[Outcome], quantity: Quantity) -> Iterator[Plot]:
    """Figure 2, right: one line for each rule and batch size."""

    def place(outcome: Outcome) -> tuple[str, float]:
        rule = outcome.cell.row.split(",")[0]
        rate = outcome.cell.config.hyperparameters.embedding_lr
        return f"{rule}, {outcome.cell.column}", rate

    lines = _lines(found, quantity, place)
    if any(len(points) > 1 for points in lines.values()):
        x = "learning rate of the embeddings (that of the rest beside it)"
        plot = line_plot(lines, x, quantity.name, logarithmic_x=True, markers=True)
        yield f"{quantity.name}, by learning rate", plot


def _lines(
    found: Iterator[Outcome] | Sequence[Outcome],
    quantity: Quantity,
    place: Callable[[Outcome], tuple[str, float]],
) -> dict[str, list[tuple[float, float, float]]]:
    """Mean and deviation of every cell, by its line and x."""
    lines: dict[str, list[tuple[float, float, float]]] = {}
    for outcome in found:
        mean = outcome.mean(quantity.key)
        if mean is not None:
            line, x = place(outcome)
            point = (x, quantity.factor * mean[0], quantity.factor * mean[1])
            lines.setdefault(line, []).append(point)
    return lines


def _curves(out: Path, found: Sequence[Outcome], record: Mapping[str, Any]) -> Iterator[Plot]:
    """Figures 5 and 6: a run of each batch size, epoch by epoch."""
    for key, name in _CURVES.items():
        factor = AUC.factor if key == "auc" else 1.0
        lines: dict[str, Line] = {
            outcome.cell.column: [(float(e["epoch"]), factor * float(e[key]), 0.0) for e in epochs]
            for outcome, epochs in _first_metrics(out, found, record)
        }
        if lines:
            title = f"{name.split(',')[0]}, by epoch, of the first seed that ended"
            yield title, line_plot(lines, "epoch", name)


def _gradients(out: Path, found: Sequence[Outcome], record: Mapping[str, Any]) -> Iterator[Plot]:
    """Mean gradient norms of frequent and rare ids over the epochs, of each run of one seed."""
    lines = {}
    for outcome, epochs in _first_metrics(out, found, record):
        for kind in _KINDS:
            lines[f"{outcome.cell.row}, {outcome.cell.column}, {kind}"] = [
                (float(row["epoch"]), float(row[f"gradient_norm_{kind}"]), 0.0)
                for row in epochs
                if row[f"gradient_norm_{kind}"]
            ]
    if any(lines.values()):
        yield (
            "mean gradient norm of an id's row, before the clip, of the first seed that ended",
            line_plot(lines, "epoch", "gradient norm", logarithmic=True),
        )


def _distributions(
    out: Path, found: Sequence[Outcome], record: Mapping[str, Any]
) -> Iterator[Plot]:
    """Figure 4: how the rows' gradient norms lie in the last epoch, of each run of one seed."""
    lines: dict[str, Line] = {}
    for outcome, run in _first_runs(out, found, record):
        bins = read_norms(run)
        bins = [one for one in bins if one["epoch"] == bins[-1]["epoch"]]
        rows = sum(int(one[kind]) for one in bins for kind in _KINDS)
        for kind in _KINDS:
            lines[f"{outcome.cell.row}, {outcome.cell.column}, {kind}"] = [
                (float(one["norm"]), 100 * int(one[kind]) / rows, 0.0) for one in bins
            ]
    if any(lines.values()):
        yield (
            "gradient norms of rows in the last epoch, of the first seed that ended",
            line_plot(
                lines,
                "gradient norm, from one power of two on",
                "% of the rows",
                logarithmic_x=True,
            ),
        )


def _first_metrics(
    out: Path, found: Sequence[Outcome], record: Mapping[str, Any]
) -> Iterator[tuple[Outcome, list[dict[str, str]]]]:
    for outcome, run in _first_runs(out, found, record):
        yield outcome, read_metrics(run)


def _first_runs(
    out: Path, found: Sequence[Outcome], record: Mapping[str, Any]
) -> Iterator[tuple[Outcome, Path]]:
    """The run of the first seed of each cell that ended, and did not diverge."""
    for outcome, cell in zip(found, record["cells"], strict=True):
        seed = next((s for s, r in outcome.results.items() if r is not None), None)
        if seed is not None:
            yield outcome, out / RUNS / cell["runs"][str(seed)]
