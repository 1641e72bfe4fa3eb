# SPDX-License-Identifier: Apache-2.0
"""The commands that train many runs, and compare them: tune, sweep, batch-size, report."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from merlin_cowclip.plugins._text import format_table
from merlin_cowclip.plugins.scaling import K
from merlin_cowclip.workflows.commands.options import (
    PATH,
    SIZES,
    TYPES,
    Command,
    argument,
    as_json,
    fields,
    given,
    option,
    path,
    print_json,
    quiet,
)
from merlin_cowclip.workflows.commands.training import train_config
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.folders import refuse_existing
from merlin_cowclip.workflows.study.configuration import NETWORK, TuneConfig
from merlin_cowclip.workflows.training.configuration import TrainConfig, refuse_unknown

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from merlin_cowclip.workflows.data.prepared_data import PreparedData

_OWN = ("batch_size", "epochs", "seed", "deterministic", "precision", "micro_batch")
_BASE_OPTIONS = ("base_batch_size", "dense_lr", "embedding_lr", "l2")
_SEARCH, _BASE = "The search", "A base, from which every rule predicts"
_search = functools.partial(option, group=_SEARCH)


_KINDS: dict[str, Any] = {
    **{field.name: TYPES.get(field.metadata["kind"]) for field in dataclasses.fields(TrainConfig)},
    **{"tuned": PATH, "config": PATH, "preset": click.STRING},
}
"""Options that a grid may have, and how they are read."""


@click.command(cls=Command, example="sweep data grid.toml --out sweep")
@argument("data", type=PATH)
@argument("grid", type=PATH, metavar="GRID.toml")
@path("--out", "SWEEP", "folder of the runs", required=True)
@as_json
@quiet
def sweep(data: Path, grid: Path, out: Path, **values: Any) -> None:
    """Train all runs of a grid, and print their table.

    GRID.toml has the tables [fixed], options of every run, [grid], a list of values for each
    option, and [[points]], options that change together. Their names are the options of train.
    Run it again to resume it, or with another grid, which shares runs of the same configuration.
    """
    from merlin_cowclip.workflows.data.prepared_data import PreparedData

    opened = PreparedData.open(data)
    configs = configurations(read_grid(grid), opened, grid)
    from merlin_cowclip.workflows.study.report import Comparison, runs_of
    from merlin_cowclip.workflows.study.sweep import sweep

    progress = not values["quiet"]
    command = shlex.join(["merlin-cowclip", *sys.argv[1:]])
    sweep(opened, configs, out, command=command, progress=progress)
    comparison = Comparison.of(runs_of(out)[0])
    print_json(comparison.to_list()) if values["json"] else print(format_table(*comparison.table()))


def read_grid(file: Path) -> list[dict[str, Any]]:
    """The options of the runs of a grid, by name as `train` takes them."""
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the grid {file}: {error}") from None
    refuse_unknown(f"the grid {file}", tables, ("fixed", "grid", "points"))
    fixed, lists, points = (tables.get(name, {}) for name in ("fixed", "grid", "points"))
    points = points or [{}]
    for table in (fixed, lists, *(points if isinstance(points, list) else [points])):
        refuse_unknown(f"the grid {file}", table, list(_KINDS))
    if not all(isinstance(values, list) and values for values in lists.values()):
        raise UserError(f"[grid] of {file} needs a list of values for each option")
    values = [dict(zip(lists, one, strict=True)) for one in itertools.product(*lists.values())]
    runs = []
    for point, one in itertools.product(points, values):
        if twice := [name for name in one if name in fixed or name in point]:
            raise UserError(f"{twice[0]} is in two tables of {file}. Take one out")
        runs.append({**fixed, **point, **one})
    return runs


def configurations(
    runs: Sequence[Mapping[str, Any]], data: PreparedData, grid: Path
) -> list[TrainConfig]:
    """What `train` makes of the options of each run, text as on the command line; each once."""
    none = {**dict.fromkeys([*_KINDS, "warm_start"]), "keep_optimizer": False}
    configs: list[TrainConfig] = []
    for run in runs:
        try:
            options = {
                name: _KINDS[name].convert(value, None, None) if isinstance(value, str) else value
                for name, value in run.items()
            }
        except click.UsageError as error:
            raise UserError(f"{grid}: {error.message}") from None
        config, _ = train_config({**none, **options}, data)
        if config not in configs:
            configs.append(config)
    return configs


@click.command(
    "batch-size",
    cls=Command,
    example="batch-size data --tuned tune --batch-sizes 1K,4K,16K --out sizes",
)
@argument("data", type=PATH)
@path("--tuned", "TUNE", "tuning study with the hyperparameters to scale by √", required=True)
@option("--batch-sizes", type=SIZES, metavar="N,N…", help="samples per update", required=True)
@path("--out", "SWEEP", "folder of the runs", required=True)
@option("--seeds", type=int, default=3, metavar="K", help="runs at each batch size")
@option(
    "--tolerance",
    type=float,
    default=0.001,
    metavar="X",
    help="loss of AUC against the smallest batch that counts as none",
)
@as_json
@quiet
def batch_size(data: Path, tuned: Path, batch_sizes: list[int], out: Path, **values: Any) -> None:
    """Measure how large a batch the data can take.

    Scales tuned hyperparameters to each batch size, trains to the end, and prints the AUC, the
    epochs to an AUC that all reach, and the critical batch size. Run it again to resume it.
    """
    from merlin_cowclip.workflows.data.prepared_data import PreparedData

    opened = PreparedData.open(data)
    from merlin_cowclip.workflows.study.tuned import Tuned

    config = Tuned.open(tuned).train_config(opened)
    from merlin_cowclip.workflows.study.batch_size import batch_size, text

    more = {name: values[name] for name in ("seeds", "tolerance")}
    more["progress"] = not values["quiet"]
    more["command"] = shlex.join(["merlin-cowclip", *sys.argv[1:]])
    outcome = batch_size(opened, config, batch_sizes, out, **more)
    print_json(outcome) if values["json"] else print(text(outcome))


@click.command(cls=Command, example="report sweep")
@argument("runs", type=PATH, nargs=-1, required=True, metavar="SWEEP|RUN...")
@path("--out", "HTML", "page to write", shown="SWEEP/report.html, or report.html")
def report(runs: Sequence[Path], out: Path | None) -> None:
    """Compare runs: print a table, and write a page.

    Runs are grouped by the options that differ, and paired by seed.
    """
    if missing := [path for path in runs if not path.is_dir()]:
        raise UserError(f"no folder '{missing[0]}'. Name a sweep's folder, or runs")
    from merlin_cowclip.workflows.study.report import report

    if out is not None:
        refuse_existing(out, "file")
    page, text = report(*runs, out=out)
    print(f"{text}\n\n{page}")


@click.command(cls=Command, example="tune data --out tune --batch-size 8K --trials 20")
@argument("data", type=PATH)
@path("--out", "TUNE", "folder to write, or to resume", required=True)
@fields(TrainConfig, "batch_size", group="Options", batch_size="that of an existing TUNE")
@as_json
@quiet
@_search("--trials", type=int, default=40, metavar="N", help="trials in all")
@_search("--budget", type=float, metavar="MINUTES", help="stop after about this many minutes")
@fields(TrainConfig, "epochs", "seed", group=_SEARCH)
@_search("--seeds", type=int, default=3, metavar="K", help="seeds to repeat the best trials with")
@path("--base", "TUNE", "another tuning study as base: its result, batch size, model", group=_BASE)
@fields(TrainConfig, *_BASE_OPTIONS, group=_BASE, dense_lr="each rule's own")
@fields(TrainConfig, *NETWORK, "deterministic", "precision", "micro_batch")
def tune(data: Path, out: Path, **values: Any) -> None:
    """Search hyperparameters directly at a given batch size.

    Learning rates, λ, clip and epochs, by the AUC on the validation part; the test part is never
    read. Starts from settings that won on other datasets and, with a base, from what every
    scaling rule predicts. Run it again with the same TUNE to resume it; several processes may
    share one TUNE.
    """
    from merlin_cowclip.workflows.data.prepared_data import PreparedData

    opened, progress = PreparedData.open(data), not values["quiet"]
    config, source = tune_config(out, values, opened)
    if progress:
        print(f"Base: {source}" if source else f"Resuming {out}")
        print("Loading TensorFlow. The first trial takes longer.", flush=True)
    from merlin_cowclip.workflows.study.tune import tune

    command = shlex.join(["merlin-cowclip", *sys.argv[1:]])
    numbers = {name: values[name] for name in ("trials", "seeds", "budget")}
    tuned = tune(opened, config, out, command=command, progress=progress, **numbers)
    if values["json"]:
        return print_json({"folder": str(out), **tuned.result})
    print(tuned.tables())
    command = shlex.join(["merlin-cowclip", "train", str(data), "--tuned", str(out)])
    print(f"\nAt batch size {config.batch_size:,}: {command} --out RUN")


def tune_config(
    out: Path, options: Mapping[str, Any], data: PreparedData
) -> tuple[TuneConfig, str]:
    """What is to be searched, and the source of its base; "" for that of a study in `out`.

    Options that are left out are those of the study in `out`. A UserError for bad options.
    """
    from merlin_cowclip.workflows.study.tuned import Tuned, read_record

    values: dict[str, Any] = {}
    source = "none, so the search starts from settings that won on other datasets"
    base = given({name.removeprefix("base_"): options[name] for name in _BASE_OPTIONS})
    if base and options["base"] is not None:
        raise UserError("--base excludes the other options of the base. Leave one out")
    if os.path.isdir(out) and os.listdir(out):
        values, source = dict(read_record(out)["config"]), ""
    elif options["batch_size"] is None:
        raise UserError("tune needs --batch-size, at which hyperparameters are searched. Name it")
    elif base:
        values["base"], size = {}, base.get("batch_size", K)
        source = f"each rule's hyperparameters at batch size {size:,}; {', '.join(base)} as given"
    values |= given({name: options[name] for name in _OWN})
    values["network"] = {**values.get("network", {}), **given(options, NETWORK)}
    if base:
        values["base"] = {**(values["base"] or {}), **base}
    if options["base"] is not None:
        tuned = Tuned.open(options["base"]).train_config(data)
        source = f"hyperparameters of {options['base']}"
        values["base"] = tuned.hyperparameters.replace(decay=tuned.dense_schedule is not None)
        values["network"] = {"model": tuned.model, **tuned.network_options, **values["network"]}
    return TuneConfig(**values), source
