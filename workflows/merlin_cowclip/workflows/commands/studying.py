"""The commands that compare runs: sweep, report."""

from __future__ import annotations

import os
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
    quiet,
)
from merlin_cowclip.workflows.commands.tuning import found_by
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.study.configuration import NETWORK
from merlin_cowclip.workflows.study.studies import (
    SEEDS,
    STUDIES,
    VALUES,
    Setting,
    batch_sizes,
    find_study,
)
from merlin_cowclip.workflows.training.configuration import TrainConfig

if TYPE_CHECKING:
    from merlin_cowclip.workflows.data.prepared_data import PreparedData

_BASE = "Hyperparameters at the first batch size, the base"
_OPTIONS = ("epochs", "update", *NETWORK, "dense_schedule", "embedding_schedule")
_WHAT = "\n".join(f"  {study.name}: {study.title} ({study.paper})" for study in STUDIES.values())


@click.command(
    cls=Command,
    example="sweep scaling-rules data --out sweep --batch-sizes 1K,4K,16K",
    help="Train all runs of a study, and print its table.\n\nEach run is kept by its "
    "configuration. Started again, it goes on; studies in one folder share their runs. The "
    f"studies:\n\n\b\n{_WHAT}",
)
@argument("study")
@argument("data", type=PATH)
@option("--out", type=PATH, required=True, metavar="SWEEP", help="folder of the runs")
@option(
    "--batch-sizes",
    type=SIZES,
    help="samples per update, the base first",
    shown="1024, doubled as long as the data allows",
)
@option("--seeds", type=NUMBERS, help="a run from each", shown="1234,1235,1236")
@option(
    "--tuned",
    type=PATH,
    multiple=True,
    metavar="TUNE",
    help="of scaling-rules: what a tune found at one of the batch sizes, as a row beside the "
    "rules; may be given again",
)
@option("--jobs", type=int, default=1, metavar="N", help="runs trained at a time")
@quiet
@fields(TrainConfig, "epochs", "update")
@option(
    "--base",
    type=PATH,
    metavar="TUNE0",
    group=_BASE,
    help="what a tune found at the first batch size, for its network",
)
@fields(TrainConfig, *VALUES, group=_BASE, dense_lr="each rule's own")
@fields(TrainConfig, "dense_schedule", "embedding_schedule", group=_BASE)
@fields(TrainConfig, *NETWORK)
def sweep(study: str, data: Path, out: Path, **values: Any) -> None:
    """Train all runs of a study, and print its table."""
    found = find_study(study)
    if values["tuned"] and study != "scaling-rules":
        raise UserError(f"--tuned is for the study scaling-rules. Received: {study}. Leave it out")
    from merlin_cowclip.workflows.data.prepared_data import PreparedData

    opened = PreparedData.open(data)
    setting = _setting(study, values, opened)
    from merlin_cowclip.workflows.study.sweep import sweep

    table = sweep(
        found,
        opened,
        out,
        setting,
        jobs=values["jobs"],
        command=shlex.join(["merlin-cowclip", *sys.argv[1:]]),
        progress=not values["quiet"],
    )
    print(table)
    own = given({name: values[name] for name in ("base", *VALUES)})
    if not own and not values["quiet"]:
        print(
            f"Base: each rule's default hyperparameters at batch size {setting.batch_sizes[0]:,}, "
            "not tuned for this data. Give --dense-lr, --embedding-lr and --l2, or --base TUNE0",
        )


def _setting(study: str, values: Mapping[str, Any], data: PreparedData) -> Setting:
    options = given({name: values[name] for name in _OPTIONS})
    numbers = given({name: values[name] for name in VALUES})
    tuned = None if values["base"] is None else found_by(values["base"], data)
    found = [found_by(path, data) for path in values["tuned"]]
    sizes, seeds = values["batch_sizes"], values["seeds"] or SEEDS
    if sizes is None:
        sizes = batch_sizes(K if tuned is None else tuned.batch_size, data.rows["train"])
    if tuned is None:
        return Setting(sizes, numbers, options, seeds, found=found)
    networks = find_study(study).networks
    return Setting.of_tune(
        tuned, sizes, numbers, options, networks=networks, seeds=seeds, found=found
    )


@click.command(cls=Command, example="report sweep")
@argument("out", type=PATH, nargs=-1, required=True, metavar="SWEEP|RUN...")
@option(
    "--price-per-hour",
    type=float,
    metavar="PRICE",
    help="of the machine, to tell what an epoch of Criteo would cost",
)
@option("--rows", type=int, metavar="N", help="of a training part other than Criteo's")
def report(out: Sequence[Path], price_per_hour: float | None, rows: int | None) -> None:
    """Write a page on a sweep's studies, or one that compares runs.

    Of a sweep's folder it writes SWEEP/report.html: each study's table beside the paper's numbers,
    plots, and a verdict. Of runs it writes report.html here.
    """
    for path in out:
        if not os.path.exists(path):
            raise UserError(f"{path} does not exist. Name a sweep's folder, or runs")
    from merlin_cowclip.workflows.study.report import CRITEO_ROWS, Cost, compare, report
    from merlin_cowclip.workflows.training.runs import CONFIG

    cost = Cost(CRITEO_ROWS if rows is None else rows, price_per_hour)
    first, *others = out
    if others or (first / CONFIG).exists():
        print(compare(out))
    else:
        print(report(first, None if rows is price_per_hour is None else cost))
