# SPDX-License-Identifier: Apache-2.0
"""The commands that compare runs: sweep, batch-size, report."""

from __future__ import annotations

import dataclasses
import itertools
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from merlin_cowclip.workflows.commands.options import (
    PATH,
    SIZES,
    TYPES,
    Command,
    argument,
    as_json,
    option,
    path,
    print_json,
    quiet,
)
from merlin_cowclip.workflows.commands.training import train_config
from merlin_cowclip.workflows.commands.tuning import found_by
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.folders import refuse_existing
from merlin_cowclip.workflows.training.configuration import TrainConfig, refuse_unknown

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from merlin_cowclip.workflows.data.prepared_data import PreparedData

_PAPER = Path(__file__).parents[4] / "benchmarks" / "paper"  # in a checkout
_KINDS: dict[str, Any] = {
    **{field.name: TYPES.get(field.metadata["kind"]) for field in dataclasses.fields(TrainConfig)},
    **{"tuned": PATH, "config": PATH, "preset": click.STRING},
}
"""Options that a grid may have, and how they are read."""


@click.command(cls=Command, example="sweep data grid.toml --out sweep")
@argument("data", type=PATH)
@argument("grid", metavar="GRID.toml|paper:NAME")
@path("--out", "SWEEP", "folder of the runs", required=True)
@as_json
@quiet
def sweep(data: Path, grid: str, out: Path, **values: Any) -> None:
    """Train all runs of a grid, and print their table.

    GRID.toml has the tables [fixed], options of every run, [grid], a list of values for each
    option, and [[points]], options that change together. Their names are the options of train.
    paper:NAME is a grid of benchmarks/paper. Run it again to resume it; grids in one folder share
    runs of the same configuration.
    """
    from merlin_cowclip.workflows.data.prepared_data import PreparedData

    opened, (name, runs) = PreparedData.open(data), read_grid(grid)
    configs = configurations(runs, opened, grid)
    from merlin_cowclip.workflows.study.comparison import Comparison
    from merlin_cowclip.workflows.study.report import runs_of
    from merlin_cowclip.workflows.study.sweep import sweep

    progress = not values["quiet"]
    command = shlex.join(["merlin-cowclip", *sys.argv[1:]])
    sweep(opened, configs, out, name=name, command=command, progress=progress)
    found = Comparison.of(runs_of(out)[name][0])
    print_json(found.to_list()) if values["json"] else print(found.table())


def read_grid(grid: str) -> tuple[str, list[dict[str, Any]]]:
    """The name of a grid, and the options of its runs, by name as `train` takes them."""
    file = Path(grid)
    if grid.startswith("paper:"):
        file = _PAPER / f"{grid.removeprefix('paper:')}.toml"
        if not file.exists():
            known = ", ".join(sorted(one.stem for one in _PAPER.glob("*.toml")))
            raise UserError(
                f"no grid '{grid}'. In a checkout, benchmarks/paper has "
                f"{known or 'them; this installation has none. Clone the repository, or copy one'}"
            )
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the grid {file}: {error}") from None
    refuse_unknown(f"the grid {file}", tables, ("fixed", "grid", "points"))
    fixed, lists, points = (tables.get(name, {}) for name in ("fixed", "grid", "points"))
    refuse_unknown(f"[grid] of {file}", lists, list(_KINDS))
    if bad := [
        name for name, values in lists.items() if not isinstance(values, list) or not values
    ]:
        raise UserError(f"[grid] of {file} needs a list of values. Received: {bad[0]}")
    if not isinstance(points, list) and points:
        raise UserError(f"[[points]] of {file} must be tables. Received: {points!r}")
    values = [dict(zip(lists, one, strict=True)) for one in itertools.product(*lists.values())]
    runs = []
    for point, one in itertools.product(points or [{}], values):
        for what, table in (("[fixed]", fixed), ("[[points]]", point)):
            refuse_unknown(f"{what} of {file}", table, list(_KINDS))
        if twice := [name for name in one if name in fixed or name in point]:
            raise UserError(f"{twice[0]} is in two tables of {file}. Take one out")
        runs.append({**fixed, **point, **one})
    return file.stem, runs


def configurations(
    runs: Sequence[Mapping[str, Any]], data: PreparedData, grid: str
) -> list[TrainConfig]:
    """What `train` makes of the options of each run, text as on the command line; each once."""
    none = {**dict.fromkeys([*_KINDS, "warm_start"]), "keep_optimizer": False}
    found: list[TrainConfig] = []
    for run in runs:
        try:
            options = {
                name: _KINDS[name].convert(value, None, None) if isinstance(value, str) else value
                for name, value in run.items()
            }
        except click.UsageError as error:
            raise UserError(f"{grid}: {error.message}") from None
        config, _ = train_config({**none, **options}, data)
        if config not in found:
            found.append(config)
    return found


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
    config = found_by(tuned, opened)
    from merlin_cowclip.workflows.study.batch_size import batch_size, text

    more = {name: values[name] for name in ("seeds", "tolerance")}
    more["progress"] = not values["quiet"]
    more["command"] = shlex.join(["merlin-cowclip", *sys.argv[1:]])
    found = batch_size(opened, config, batch_sizes, out, **more)
    print_json(found) if values["json"] else print(text(found))


@click.command(cls=Command, example="report sweep")
@argument("runs", type=PATH, nargs=-1, required=True, metavar="SWEEP|RUN...")
@path("--out", "HTML", "page to write", shown="SWEEP/report.html, or report.html")
def report(runs: Sequence[Path], out: Path | None) -> None:
    """Compare runs: print a table, and write a page.

    Runs are grouped by the options that differ, and paired by seed. One SWEEP has a section for
    each of its grids; several folders are compared in one.
    """
    if missing := [path for path in runs if not path.is_dir()]:
        raise UserError(f"no folder '{missing[0]}'. Name a sweep's folder, or runs")
    from merlin_cowclip.workflows.study.report import report

    if out is not None:
        refuse_existing(out, "file")
    page, text = report(*runs, out=out)
    print(f"{text}\n\n{page}")
