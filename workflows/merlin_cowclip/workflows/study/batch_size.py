# SPDX-License-Identifier: Apache-2.0
"""How large a batch the data can take: AUC and epochs to a target by batch size, and a fit.

E(B) = E0 · (1 + B / B*), the epochs that a batch size B needs, has one parameter that matters: the
critical batch size B*, where they are twice those of a small batch (McCandlish et al. 2018).
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from merlin_cowclip.plugins._text import format_table
from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.errors import UserError, check_whole
from merlin_cowclip.workflows.folders import write_json
from merlin_cowclip.workflows.study.pages import Line, Page, Table, line_plot, write_page
from merlin_cowclip.workflows.study.report import (
    AUC,
    HTML,
    VALID_AUC,
    Comparison,
    Group,
    runs_of,
)
from merlin_cowclip.workflows.study.sweep import sweep
from merlin_cowclip.workflows.training.configuration import TrainConfig, few_steps

_SIZES = 3  # with fewer there is no fit


def batch_size(
    data: PreparedData,
    tuned: TrainConfig,
    batch_sizes: Sequence[int],
    out: str | Path,
    *,
    seeds: int = 3,
    tolerance: float = 1e-3,
    command: str = "",
    progress: bool = True,
) -> dict[str, Any]:
    """Train tuned values, scaled by the square root, at several batch sizes; returns the result.

    All runs have the epochs and the schedules of `tuned`. An AUC on the validation part counts as
    kept if its mean is at most `tolerance` below that of the smallest batch. Epochs are counted to
    the highest AUC that all runs reach. `out` is a folder as of `sweep`, with the result in
    `batch-size.json` and a page in `report.html`; the same call resumes it. `seeds` is how many
    runs each size has; the rest is as of `sweep`, and so are the errors.
    """
    sizes = sorted(set(batch_sizes))
    check_whole("seeds", seeds, 1)
    if len(sizes) < 2:
        raise UserError(
            f"name at least two batch sizes, not {', '.join(map(str, sizes)) or 'none'}"
        )
    if not tolerance > 0:
        raise UserError(f"tolerance must be a positive AUC. Received: {tolerance}")
    data.require("valid")
    values: dict[str, Any] = {"rule": "sqrt", "patience": None}
    configs = [
        dataclasses.replace(tuned, **values, batch_size=size, seed=tuned.seed + seed)
        for size in sizes
        for seed in range(seeds)
    ]
    sweep(data, configs, out, command=command, progress=progress)
    groups = Comparison.of(runs_of(Path(out))[0]).groups
    by_size = {group.options["batch_size"]: group for group in groups}
    outcome = result(by_size, data.rows["train"], tolerance)
    write_json(Path(out) / "batch-size.json", outcome)
    used = [run.result["config"] for group in groups for run in group.finished if run.result]
    write_page(Path(out) / HTML, page_of(outcome, command), used)
    return outcome


def epochs_to(target: float, aucs: Iterable[float]) -> float | None:
    """The epochs after which an AUC is first reached, by a line between epochs; None: never."""
    before = 0.5  # of a network that was not trained
    for epoch, auc in enumerate(aucs):
        if auc >= target:
            return epoch + max(target - before, 0.0) / (auc - before)
        before = auc
    return None


def fit(epochs: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """E0 and B* of E(B), by least squares, from the batch size and the epochs of each run.

    B* is infinite if the epochs do not grow.
    """
    line = statistics.linear_regression(*zip(*epochs, strict=True))
    return line.intercept, line.intercept / line.slope if line.slope > 0 else math.inf


def result(groups: Mapping[int, Group], rows: int, tolerance: float) -> dict[str, Any]:
    """What the runs of each batch size came to, fit for JSON; `rows`: of the training part."""
    smallest = min(groups)
    if not groups[smallest].mean(VALID_AUC):
        raise UserError(f"a run at the smallest batch size, {smallest:,}, diverged. Tune again")
    curves = {
        size: [
            [e["valid_auc"] for e in run.result["epochs"]] for run in group.finished if run.result
        ]
        for size, group in groups.items()
        if group.mean(VALID_AUC) and (size == smallest or not few_steps(rows, size))
    }
    target = min(max(curve) for of in curves.values() for curve in of)
    sizes = []
    for size, group in sorted(groups.items()):
        one: dict[str, Any] = {"batch_size": size, "steps_per_epoch": -(-rows // size)}
        one |= {"valid_auc": group.mean(VALID_AUC), "auc": group.mean(AUC)}
        one |= {"epochs": [epochs_to(target, curve) for curve in curves.get(size, ())]}
        if numbers := one["epochs"]:
            one["mean_epochs"] = statistics.fmean(numbers)
            one["deviation"] = statistics.stdev(numbers) if numbers[1:] else 0.0
            one["steps"] = one["mean_epochs"] * rows / size
        sizes.append(one)
    outcome: dict[str, Any] = {"target_auc": target, "sizes": sizes, "E0": None, "B*": None}
    if len(curves) >= _SIZES:
        points = ((one["batch_size"], number) for one in sizes for number in one["epochs"])
        e0, critical = fit(points)
        if e0 > 0:  # else the epochs grow faster than a line
            outcome |= {"E0": e0, "B*": critical if math.isfinite(critical) else None}
    return {
        **outcome,
        "sentence": _sentence(outcome, tolerance),
        "warning": few_steps(rows, max(groups)),
    }


def _sentence(outcome: Mapping[str, Any], tolerance: float) -> str:
    """What to conclude."""
    first, *_ = sizes = outcome["sizes"]
    kept = first
    for one in sizes:
        if not one["valid_auc"] or one["valid_auc"][0] < first["valid_auc"][0] - tolerance:
            break
        kept = one
    small, free = first["batch_size"], kept["batch_size"]
    sentence = f"No larger batch keeps the AUC of {small:,}"
    if free != small:
        fewer = f"{free / small:.3g}× fewer steps"
        sentence = f"Up to {free:,} the AUC of {small:,} is kept, in {fewer}"
    if outcome["B*"] is not None:
        means = {one["batch_size"]: one["mean_epochs"] for one in sizes if one["epochs"]}
        fitted = {size: outcome["E0"] * (1 + size / outcome["B*"]) for size in means}
        miss = max(abs(fitted[size] / mean - 1) for size, mean in means.items())
        critical = float(f"{outcome['B*']:.2g}")
        sentence += f"; critical batch size {critical:,.0f} (its fit is off by {100 * miss:.0f} %)"
    return f"{sentence}."


def table(outcome: Mapping[str, Any]) -> Table:
    """A row for each batch size."""
    rows = []
    for one in outcome["sizes"]:
        row = [f"{one['batch_size']:,}", f"{one['steps_per_epoch']:,}"]
        row += [AUC.shown(*one[key]) if one[key] else "diverged" for key in ("valid_auc", "auc")]
        if one["epochs"]:
            spread = f" ± {one['deviation']:.2f}" * bool(one["epochs"][1:])
            row += [f"{one['mean_epochs']:.2f}{spread}", f"{one['steps']:,.0f}"]
        rows.append([*row, "", ""][:6])
    target = f"{100 * outcome['target_auc']:.2f}"
    header = ["batch size", "steps/epoch", "validation AUC, %", "test AUC, %"]
    return [*header, f"epochs to {target} %", "steps to it"], rows


def text(outcome: Mapping[str, Any]) -> str:
    """For a terminal."""
    warning = f"\n\nWarning: {outcome['warning']}" * bool(outcome["warning"])
    return f"{format_table(*table(outcome))}\n\n{outcome['sentence']}{warning}"


def page_of(outcome: Mapping[str, Any], command: str) -> Page:
    """For a page."""
    target = f"{100 * outcome['target_auc']:.2f} %"
    aucs: dict[str, Line] = {
        name: [
            (one["batch_size"], *(100 * of for of in one[key]))
            for one in outcome["sizes"]
            if one[key]
        ]
        for name, key in (("validation", "valid_auc"), ("test", "auc"))
    }
    measured = [one for one in outcome["sizes"] if one["epochs"]]
    epochs: dict[str, Line] = {
        "measured": [(one["batch_size"], one["mean_epochs"], one["deviation"]) for one in measured]
    }
    if outcome["E0"] is not None:
        slope = outcome["E0"] / outcome["B*"] if outcome["B*"] else 0.0
        fitted = [(x, outcome["E0"] + slope * x, 0.0) for x, _, _ in epochs["measured"]]
        epochs["E0 · (1 + B / B*)"] = fitted
    plots = {
        "AUC at the end": line_plot(aucs, "batch size", "AUC, %", powers_of_two=True),
        f"epochs to a validation AUC of {target}": line_plot(
            epochs, "batch size", "epochs", powers_of_two=True
        ),
    }
    note = (
        "Tuned learning rates and λ scaled by √, with the same epochs and schedule. "
        f"{target} is the highest AUC that all runs reach, interpolated between epochs."
    )
    headline = f"No verdict: {outcome['warning']}" if outcome["warning"] else outcome["sentence"]
    title = "How large a batch these data take"
    return Page(title, headline, [table(outcome)], [note], [*plots.items()], command)
