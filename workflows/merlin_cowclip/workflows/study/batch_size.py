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
from merlin_cowclip.workflows.study.comparison import AUC, VALID_AUC, Comparison, Group
from merlin_cowclip.workflows.study.pages import Section, Table
from merlin_cowclip.workflows.study.plots import Line, line_plot
from merlin_cowclip.workflows.study.report import report, runs_of
from merlin_cowclip.workflows.study.steps import few_steps
from merlin_cowclip.workflows.study.sweep import sweep
from merlin_cowclip.workflows.training.configuration import TrainConfig

NAME = "batch-size"
_FREE = 1.05  # times the epochs of the smallest batch that count as no cost
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

    All runs have the epochs and the schedules of `tuned`. The target is the mean validation AUC of
    the smallest batch at the end minus `tolerance`. `out` is a folder as of `sweep`, with the
    result in `batch-size.json` and a page in `report.html`; the same call resumes it. `seeds` is
    how many runs each size has; the rest is as of `sweep`, and so are the errors.
    """
    sizes = sorted(set(batch_sizes))
    check_whole("seeds", seeds, 1)
    if len(sizes) < 2:
        raise UserError(
            f"name at least two batch sizes, not {', '.join(map(str, sizes)) or 'none'}"
        )
    if not tolerance > 0:
        raise UserError(f"tolerance must be a positive AUC. Received: {tolerance}")
    if not data.valid_files:
        raise UserError(f"{data.path} has no validation part. Prepare it with --valid 0.1")
    values: dict[str, Any] = {"rule": "sqrt", "patience": None}
    configs = [
        dataclasses.replace(tuned, **values, batch_size=size, seed=tuned.seed + seed)
        for size in sizes
        for seed in range(seeds)
    ]
    sweep(data, configs, out, name=NAME, command=command, progress=progress)
    groups = Comparison.of(runs_of(Path(out))[NAME][0]).groups
    by_size = {group.options["batch_size"]: group for group in groups}
    found = result(by_size, data.rows["train"], tolerance)
    write_json(Path(out) / f"{NAME}.json", found)
    report(out, first=[section(found, command)])
    return found


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
    final = {size: group.mean(VALID_AUC) for size, group in groups.items()}
    start = final[smallest]
    if start is None:
        raise UserError(f"a run at the smallest batch size, {smallest:,}, diverged. Tune again")
    target = start[0] - tolerance
    sizes, reached = [], {}
    for size, group in sorted(groups.items()):
        curves = [
            [e["valid_auc"] for e in run.result["epochs"]] for run in group.finished if run.result
        ]
        epochs = [epochs_to(target, curve) for curve in curves]
        numbers = [number for number in epochs if number is not None]
        complete = len(numbers) == len(group.runs)
        if complete:
            reached[size] = numbers
        mean = statistics.fmean(numbers) if complete else None
        deviation = statistics.stdev(numbers) if complete and numbers[1:] else 0.0
        sizes.append(
            {
                "batch_size": size,
                "steps_per_epoch": -(-rows // size),
                "valid_auc": final[size],
                "auc": group.mean(AUC),
                "epochs": epochs,
                "mean_epochs": mean,
                "deviation": deviation,
                "steps": None if mean is None else mean * rows / size,
            }
        )
    found: dict[str, Any] = {"target_auc": target, "sizes": sizes, "E0": None, "B*": None}
    if len(reached) >= _SIZES:
        e0, critical = fit((size, epoch) for size, of in reached.items() for epoch in of)
        found |= {"E0": e0, "B*": critical if math.isfinite(critical) else None}
    return {
        **found,
        "sentence": _sentence(found, tolerance),
        "warning": few_steps(rows, max(groups)),
    }


def _sentence(found: Mapping[str, Any], tolerance: float) -> str:
    """What to conclude."""
    first, *_, last = sizes = found["sizes"]
    free = small = first["batch_size"]
    if first["mean_epochs"] is None:
        return f"Not every run at {small:,} reaches the target: choose a larger tolerance."
    for one in sizes:
        is_accurate = one["valid_auc"] and one["valid_auc"][0] >= first["valid_auc"][0] - tolerance
        if not is_accurate or (one["mean_epochs"] or math.inf) > _FREE * first["mean_epochs"]:
            break
        free = one["batch_size"]
    parts = ["No larger batch is free" if free == small else f"Up to {free:,} costs nothing"]
    if free != last["batch_size"]:
        at = f"at {last['batch_size']:,}"
        if last["mean_epochs"] is None:
            parts.append(f"{at} not every run reaches the target")
        else:
            more = last["mean_epochs"] / first["mean_epochs"] - 1
            fewer = first["steps"] / last["steps"]
            parts.append(f"{at} {100 * more:.0f} % more epochs, {fewer:.1f}× fewer steps")
    if found["B*"] is not None:
        beyond = ", beyond what was measured" * (found["B*"] > last["batch_size"])
        critical = float(f"{found['B*']:.2g}")
        parts.append(f"critical batch size about {critical:,.0f}{beyond}")
    elif found["E0"] is not None:
        parts.append("the epochs do not grow with the batch size")
    return f"{'; '.join(parts)}."


def table(found: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows, a row for each batch size."""
    rows = []
    for one in found["sizes"]:
        aucs = [AUC.shown(*one[key]) if one[key] else "-" for key in ("valid_auc", "auc")]
        numbers = [number for number in one["epochs"] if number is not None]
        shown = f"reached by {len(numbers)} of {len(one['epochs'])} runs"
        if one["mean_epochs"] is not None:
            spread = f" ± {one['deviation']:.2f}" if numbers[1:] else ""
            shown = f"{one['mean_epochs']:.2f}{spread}"
        steps = "" if one["steps"] is None else f"{one['steps']:,.0f}"
        size, per_epoch = f"{one['batch_size']:,}", f"{one['steps_per_epoch']:,}"
        rows.append([size, per_epoch, *aucs, shown, steps])
    target = f"{100 * found['target_auc']:.3f}"
    header = ["batch size", "steps/epoch", "validation AUC, %", "test AUC, %"]
    return [*header, f"epochs to {target} %", "steps to it"], rows


def text(found: Mapping[str, Any]) -> str:
    """For a terminal."""
    warning = f"\n\nWarning: {found['warning']}" * bool(found["warning"])
    return f"{format_table(*table(found))}\n\n{found['sentence']}{warning}"


def section(found: Mapping[str, Any], command: str) -> Section:
    """For a page."""
    header, rows = table(found)
    reached = [one for one in found["sizes"] if one["mean_epochs"] is not None]
    measured: Line = [(one["batch_size"], one["mean_epochs"], one["deviation"]) for one in reached]
    lines, target = {"measured": measured}, f"{100 * found['target_auc']:.3f} %"
    if found["E0"] is not None:
        slope = found["E0"] / found["B*"] if found["B*"] else 0.0
        lines["E0 · (1 + B / B*)"] = [(x, found["E0"] + slope * x, 0.0) for x, _, _ in measured]
    plots = []
    if reached:
        plot = line_plot(lines, "batch size", f"epochs to {target}", powers_of_two=True)
        plots = [(f"epochs to a validation AUC of {target}, by batch size", plot)]
    return Section(
        "how-large",
        "How large a batch these data take",
        runs=str(sum(len(one["epochs"]) for one in found["sizes"])),
        verdict="" if found["warning"] else found["sentence"],
        doubt=found["warning"] and f"No verdict: {found['warning']}",
        tables=[Table(header, rows)],
        notes=[
            "Tuned values scaled by √ (both learning rates and λ), the same epochs and schedule at "
            f"each size. The target, {target}, is the smallest batch's validation AUC at the end "
            "minus the tolerance. Epochs to it are interpolated between epochs."
        ],
        plots=plots,
        command=command,
    )
