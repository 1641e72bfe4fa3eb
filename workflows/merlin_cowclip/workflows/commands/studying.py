"""The commands that compare runs: sweep, report."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from merlin_cowclip.plugins.scaling import K
from merlin_cowclip.workflows.commands.training import add_network, check_network
from merlin_cowclip.workflows.commands.tuning import found_by
from merlin_cowclip.workflows.commands.values import add_schedules, by_field, numbers, schedules_of
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

if TYPE_CHECKING:
    from merlin_cowclip.workflows.commands.parser import Commands
    from merlin_cowclip.workflows.data.prepared_data import PreparedData


def add(commands: Commands) -> None:
    """The two, with their arguments."""
    sweep = commands.add_parser(
        "sweep",
        help="train all runs of a study: which rule, which clip, how much time",
        description="Trains every run that a study takes, keeps each by its configuration, and "
        "ends with a table. Started again, it goes on; studies in one folder share their runs. "
        + "; ".join(f"{study.name}: {study.title} ({study.paper})" for study in STUDIES.values()),
    )
    sweep.add_argument("study", help=", ".join(STUDIES))
    sweep.add_argument("data", type=Path, help="a prepared folder")
    sweep.add_argument("--out", required=True, type=Path, help="the folder of the runs")
    sweep.add_argument(
        "--batch-sizes",
        type=numbers,
        metavar="N,…",
        help="samples per update, the base first (1024, doubled as long as the data allows)",
    )
    sweep.add_argument(
        "--seeds", type=numbers, default=list(SEEDS), metavar="N,…", help="(1234,1235,1236)"
    )
    sweep.add_argument("--epochs", type=int, help="passes over the data (default 10)")
    sweep.add_argument("--update", help="exact (default), deferred or lazy")
    base = sweep.add_argument_group("tuned at the first batch size (each rule's recipe)")
    base.add_argument(
        "--base",
        type=Path,
        metavar="TUNE0",
        help="what a tune found at the first batch size, for its network",
    )
    for name in VALUES:
        base.add_argument(f"--{name.replace('_', '-')}", type=float)
    sweep.add_argument(
        "--tuned",
        type=Path,
        action="append",
        metavar="TUNE",
        help="scaling-rules: what a tune found at one of the batch sizes, beside the rules; may "
        "be given again",
    )
    add_network(sweep)
    add_schedules(sweep)
    sweep.add_argument("--jobs", type=int, default=1, help="runs trained at a time (1)")
    sweep.add_argument("--quiet", action="store_true", help="no bar, and only the table")
    sweep.set_defaults(run=_sweep)
    report = commands.add_parser(
        "report",
        help="a page on a sweep's studies, or one that compares runs",
        description="Of a sweep's folder it writes OUT/report.html: each study's table beside the "
        "paper's numbers, plots, and a verdict. Of runs it writes report.html here.",
    )
    report.add_argument("out", type=Path, nargs="+", help="a sweep's folder, or run folders")
    report.add_argument(
        "--price-per-hour", type=float, help="of the machine: what an epoch of Criteo would cost"
    )
    report.add_argument("--rows", type=int, help="of a training part other than Criteo's")
    report.set_defaults(run=_report)


def _sweep(arguments: argparse.Namespace) -> None:
    study = find_study(arguments.study)
    if arguments.tuned and study.name != "scaling-rules":
        raise UserError(
            f"--tuned is for the study scaling-rules. Received: {study.name}. Leave it out"
        )
    from merlin_cowclip.workflows.data.prepared_data import PreparedData

    data = PreparedData.open(arguments.data)
    setting = _setting(arguments, data)
    from merlin_cowclip.workflows.study.sweep import sweep

    table = sweep(
        study,
        data,
        arguments.out,
        setting,
        jobs=arguments.jobs,
        command=shlex.join(["merlin-cowclip", *sys.argv[1:]]),
        progress=not arguments.quiet,
    )
    print(table)


def _setting(arguments: argparse.Namespace, data: PreparedData) -> Setting:
    given: dict[str, Any] = {n: getattr(arguments, n) for n in (*NETWORK, "epochs", "update")}
    if "=" in (arguments.combiner or ""):
        given["combiner"] = by_field("--combiner", arguments.combiner)
    values = {name: getattr(arguments, name) for name in VALUES}
    values = {name: value for name, value in values.items() if value is not None}
    given = {k: v for k, v in given.items() if v is not None} | schedules_of(arguments)
    networks = find_study(arguments.study).networks
    if "model" in given and not networks:
        check_network(given["model"], given)
    tuned = None if arguments.base is None else found_by(arguments.base, data)
    found = [found_by(path, data) for path in arguments.tuned or ()]
    sizes, seeds = arguments.batch_sizes, arguments.seeds
    if sizes is None:
        base = 1 * K if tuned is None else tuned.batch_size
        sizes = batch_sizes(base, data.rows["train"])
    if tuned is None:
        return Setting(sizes, values, given, seeds, found=found)
    return Setting.of_tune(tuned, sizes, values, given, networks=networks, seeds=seeds, found=found)


def _report(arguments: argparse.Namespace) -> None:
    from merlin_cowclip.workflows.study.report import CRITEO_ROWS, Cost, compare, report
    from merlin_cowclip.workflows.training.runs import CONFIG

    rows, price = arguments.rows, arguments.price_per_hour
    cost = Cost(CRITEO_ROWS if rows is None else rows, price)
    first, *others = arguments.out
    if others or (first / CONFIG).exists():
        print(compare(arguments.out))
    else:
        print(report(first, None if rows is price is None else cost))
