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
    trust_workflow,
)
from merlin_cowclip.workflows.commands.prediction import checkpoint, said_of, which_of
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
    help="tell how much of the tables the ids of the rarest P % of occurrences hold, and what test "
    "AUC costs without them; drops nothing, and needs no --out",
)
@option(
    "--drop-rare",
    type=float,
    metavar="P",
    help="leave these rows out of what is exported, and say so",
)
@option(
    "--check-raw",
    many=True,
    metavar="RAW...",
    help="raw rows, as for predict: score 10,000 by what was exported and compare with predict",
)
@option("--data", type=PATH, help="what the run was trained on, where it is elsewhere now")
@checkpoint
@trust_workflow
@quiet
def export(
    run: Path,
    out: Path | None,
    rare: list[float] | None,
    drop_rare: float | None,
    check_raw: tuple[str, ...],
    data: Path | None,
    which: str | None,
    best: bool,
    trust_workflow: bool,
    quiet: bool,
) -> None:
    """Write a finished run as a Triton model repository.

    For NVIDIA's server, made by Merlin Systems: raw rows without the label in, the probability of a
    click out.
    """
    from merlin_cowclip.workflows.data.prepared_data import PreparedData
    from merlin_cowclip.workflows.folders import refuse_existing
    from merlin_cowclip.workflows.serving.export import export, rare_costs
    from merlin_cowclip.workflows.training.runs import Run

    if out is None and (drop_rare is not None or not rare):
        given = "neither" if drop_rare is None else "--drop-rare without --out"
        raise UserError(f"export needs --out, or --rare to look alone. Received: {given}")
    if out is not None:
        refuse_existing(out)
    opened = Run.open(run, trust_workflow=trust_workflow)
    options: dict[str, Any] = {
        "which": which_of(which, best=best),
        "data": None if data is None else PreparedData.open(data),
        "progress": not quiet,
    }
    dropped = [] if drop_rare is None else [drop_rare]
    percents = [*dict.fromkeys([*(rare or ()), *dropped])]
    for cost in rare_costs(opened, percents, **options) if percents else ():
        print(cost)
    if out is None:
        return
    repository = export(
        opened,
        out,
        drop_rare=drop_rare,
        check_raw=list(check_raw) or None,
        trust_workflow=trust_workflow,
        **options,
    )
    record = repository.record
    if check_raw:
        print("--check-raw: the exported model answers as predict")
    print(
        f"{repository.path}: {len(record['columns'])} columns in, {record['output']} out, "
        f"{said_of(opened, options['which'])}"
    )
    server = "tritonserver --backend-config=tensorflow,version=2"
    print(f"{server} --model-repository={repository.path.resolve()}")
    needed = ", ".join(f"{name} {version}" for name, version in record["packages"].items())
    print(f"needs beside its Python and TensorFlow backends: {needed}")
