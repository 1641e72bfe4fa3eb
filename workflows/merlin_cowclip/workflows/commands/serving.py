# SPDX-License-Identifier: Apache-2.0
"""The command that makes a finished run ready for a server: export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from merlin_cowclip.workflows.commands.options import (
    PATH,
    PERCENTS,
    Command,
    argument,
    option,
    quiet,
)
from merlin_cowclip.workflows.commands.prediction import checkpoint, said_of
from merlin_cowclip.workflows.errors import UserError


@click.command(
    cls=Command,
    usage=("RUN --out REPOSITORY", "RUN --rare P,…"),
    example="export run --out repository --check-raw new.txt.gz",
)
@argument("run", type=PATH)
@option("--out", type=PATH, metavar="REPOSITORY", help="folder to make")
@option(
    "--rare",
    type=PERCENTS,
    help="report table size and AUC without the rarest ids (P % of occurrences); needs no --out",
)
@option(
    "--drop-rare",
    type=float,
    metavar="P",
    help="drop the rarest ids (P % of occurrences), and report as --rare",
)
@option(
    "--check-raw",
    multiple=True,
    metavar="RAW",
    help="raw rows, as for predict: send 10,000 to the exported model and compare with predict",
)
@option("--data", type=PATH, help="the run's data, for --rare and --drop-rare, if it has moved")
@checkpoint
@quiet
def export(
    run: Path,
    out: Path | None,
    rare: list[float] | None,
    drop_rare: float | None,
    check_raw: tuple[str, ...],
    data: Path | None,
    quiet: bool,
    **options: Any,
) -> None:
    """Write a finished run as a Triton model repository.

    Raw rows without the label in, click probabilities out.
    """
    from merlin_cowclip.workflows.data.prepared_data import PreparedData
    from merlin_cowclip.workflows.folders import refuse_existing
    from merlin_cowclip.workflows.training.runs import Run

    if out is None and (drop_rare is not None or not rare):
        raise UserError("export needs --out REPOSITORY, or only --rare P for a report")
    if out is not None:
        refuse_existing(out)
    opened = Run.open(run)
    both: dict[str, Any] = {"which": options.pop("which"), "progress": not quiet}
    both["data"] = None if data is None else PreparedData.open(data)
    from merlin_cowclip.workflows.serving.export import export
    from merlin_cowclip.workflows.serving.rare_ids import rare_costs

    percents = [*dict.fromkeys([*(rare or ()), *([] if drop_rare is None else [drop_rare])])]
    for cost in rare_costs(opened, percents, **both) if percents else ():
        print(cost)
    if out is None:
        return
    options |= {"drop_rare": drop_rare, "check_raw": check_raw or None}
    repository = export(opened, out, **options, **both)
    record = repository.record
    if check_raw:
        print("--check-raw: the exported model answers as predict")
    print(
        f"{repository.path}: {len(record['columns'])} columns in, {record['output']} out, "
        f"{said_of(opened, both['which'])}"
    )
    print(f"tritonserver --model-repository={repository.path.resolve()}")
    needed = ", ".join(f"{name} {version}" for name, version in record["packages"].items())
    print(f"The server's Python needs: {needed}")
