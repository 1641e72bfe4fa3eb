# SPDX-License-Identifier: Apache-2.0
"""The commands that compare runs: sweep, report."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from merlin_cowclip.plugins.scaling import K
from merlin_cowclip.workflows.commands.options import (
    NUMBERS,
    PATH,
    SIZES,
    Command,
    argument,
    fields,
    given,
    option,
    path,
    quiet,
)
from merlin_cowclip.workflows.commands.tuning import default_base, found_by
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.folders import refuse_existing
from merlin_cowclip.workflows.study.configuration import NETWORK
from merlin_cowclip.workflows.study.studies import (
    NETWORKS,
    SEEDS,
    STUDIES,
    VALUES,
    Setting,
    batch_sizes,
    of_tune,
)
from merlin_cowclip.workflows.training.configuration import TrainConfig
from merlin_cowclip.workflows.training.networks import NETWORKS as OPTIONS_OF

if TYPE_CHECKING:
    from merlin_cowclip.workflows.data.prepared_data import PreparedData

_BASE = "Hyperparameters at the first batch size, the base"
_DOUBLED = "1024, doubled as long as the data allows"
_OPTIONS = ("epochs", "update", *NETWORK, "dense_schedule", "embedding_schedule")
_WHAT = "\n".join(f"  {study.name}: {study.title} ({study.paper})" for study in STUDIES.values())


@click.command(
    cls=Command,
    example="sweep scaling-rules data --out sweep --batch-sizes 1K,4K,16K",
    help="Train all runs of a study, and print its table.\n\nRun it again to "
    "resume it. Studies in one folder share runs of the same configuration. The "
    f"studies:\n\n\b\n{_WHAT}",
)
@argument("study", type=click.Choice([*STUDIES]))
@argument("data", type=PATH)
@path("--out", "SWEEP", "folder of the runs", required=True)
@option("--batch-sizes", type=SIZES, help="samples per update, the base first", shown=_DOUBLED)
@option("--seeds", type=NUMBERS, help="one run per seed", shown="1234,1235,1236")
@path("--tuned", "TUNE", "scaling-rules: a tune as one more row; may be repeated", multiple=True)
@option("--jobs", type=int, default=1, metavar="N", help="runs trained at a time")
@quiet
@fields(TrainConfig, "epochs", "update")
@path("--base", "TUNE0", "a tune at the first batch size, and its network", group=_BASE)
@fields(TrainConfig, *VALUES, group=_BASE, dense_lr="each rule's own; Avazu: the paper's")
@fields(TrainConfig, "dense_schedule", "embedding_schedule", group=_BASE)
@fields(TrainConfig, *NETWORK)
def sweep(study: str, data: Path, out: Path, **values: Any) -> None:
    """Train all runs of a study, and print its table."""
    if values["tuned"] and study != "scaling-rules":
        raise UserError(f"--tuned is for the study scaling-rules. Received: {study}. Leave it out")
    taken = {option for network in NETWORKS for option in OPTIONS_OF[network]}
    others = [name for name in given(values, NETWORK) if name not in taken]
    if others and study in ("networks", "time"):
        raise UserError(
            f"{study} trains {', '.join(NETWORKS)}. Received: --{others[0].replace('_', '-')}. "
            "Leave it out"
        )
    from merlin_cowclip.workflows.data.prepared_data import PreparedData

    opened = PreparedData.open(data)
    setting, source = _setting(values, opened)
    from merlin_cowclip.workflows.study.sweep import sweep

    command, progress = shlex.join(["merlin-cowclip", *sys.argv[1:]]), not values["quiet"]
    options: dict[str, Any] = {"command": command, "base": source, "progress": progress}
    print(sweep(STUDIES[study], opened, out, setting, jobs=values["jobs"], **options))


def _setting(values: Mapping[str, Any], data: PreparedData) -> tuple[Setting, str]:
    """What the options say, and where its base comes from."""
    options, numbers = given(values, _OPTIONS), given(values, VALUES)
    tuned = None if values["base"] is None else found_by(values["base"], data)
    base = K if tuned is None else tuned.batch_size
    sizes = values["batch_sizes"] or batch_sizes(base, data.rows["train"])
    if tuned is None:
        found, source = default_base(data, sizes[0], numbers)
        if not numbers:
            source += ", not tuned for this data. Give --dense-lr, --embedding-lr, --l2, or --base"
    else:
        found, options = of_tune(tuned, sizes[0], options)
        source = "; ".join([f"values of {values['base']}", *(f"{n} as given" for n in numbers)])
    tunes = [found_by(path, data) for path in values["tuned"]]
    seeds = values["seeds"] or SEEDS
    return Setting(sizes, {**found, **numbers}, options, seeds, tunes), source


@click.command(cls=Command, example="report sweep")
@argument("runs", type=PATH, nargs=-1, required=True, metavar="SWEEP|RUN...")
@path("--out", "HTML", "page to write, of runs", shown="report.html")
def report(runs: Sequence[Path], out: Path | None) -> None:
    """Write a page on a sweep's studies, or one that compares runs.

    For a sweep, writes SWEEP/report.html: each study's table next to the paper's numbers,
    plots, and a verdict. For runs, writes a page that compares them, which must not exist.
    """
    if missing := [path for path in runs if not path.is_dir()]:
        raise UserError(f"no folder '{missing[0]}'. Name a sweep's folder, or runs")
    from merlin_cowclip.workflows.study.report import HTML, compare, report
    from merlin_cowclip.workflows.training.runs import CONFIG

    if len(runs) == 1 and not (runs[0] / CONFIG).exists():
        if out is not None:
            raise UserError("--out is for a page of runs; a sweep's is SWEEP/report.html")
        print(report(runs[0]))
        return
    out = out or Path(HTML)
    refuse_existing(out, "file")
    names = {run.name: run for run in runs}
    print(compare(names if len(names) == len(runs) else {str(run): run for run in runs}, out))
