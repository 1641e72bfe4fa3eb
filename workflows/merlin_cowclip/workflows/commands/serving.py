# SPDX-License-Identifier: Apache-2.0
"""The command that makes a finished run ready for a server: export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from merlin_cowclip.workflows.commands.options import (
    PATH,
    Command,
    argument,
    option,
    quiet,
)
from merlin_cowclip.workflows.commands.prediction import checkpoint, said_of


@click.command(
    cls=Command,
    example="export run --out repository --check-raw new.txt.gz",
)
@argument("run", type=PATH)
@option("--out", required=True, type=PATH, metavar="REPOSITORY", help="folder to make")
@option(
    "--check-raw",
    multiple=True,
    metavar="RAW",
    help="raw rows, as for predict: send 10,000 to the exported model and compare with predict",
)
@checkpoint
@quiet
def export(
    run: Path, out: Path, check_raw: tuple[str, ...], quiet: bool, which: str | None
) -> None:
    """Write a finished run as a Triton model repository.

    Raw rows without the label in, click probabilities out.
    """
    from merlin_cowclip.workflows.folders import refuse_existing
    from merlin_cowclip.workflows.training.runs import Run

    refuse_existing(out)
    opened = Run.open(run)
    from merlin_cowclip.workflows.serving.export import export

    options: dict[str, Any] = {"which": which, "check_raw": check_raw or None}
    repository = export(opened, out, progress=not quiet, **options)
    record = repository.record
    if check_raw:
        print("--check-raw: the exported model answers as predict")
    print(
        f"{repository.path}: {len(record['columns'])} columns in, {record['output']} out, "
        f"{said_of(opened, which)}"
    )
    print(f"tritonserver --model-repository={repository.path.resolve()}")
    needed = ", ".join(f"{name} {version}" for name, version in record["packages"].items())
    print(f"The server's Python needs: {needed}")
