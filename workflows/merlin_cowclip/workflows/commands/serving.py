"""The command that makes a finished run ready for a server: export."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from merlin_cowclip.workflows.errors import UserError

if TYPE_CHECKING:
    from merlin_cowclip.workflows.commands.parser import Commands


def add(commands: Commands) -> None:
    """It, with its arguments."""
    export = commands.add_parser(
        "export",
        help="a finished run as a Triton model repository",
        description="Writes a model repository for NVIDIA's Triton server, made by Merlin Systems: "
        "raw rows without the label in, the probability of a click out.",
    )
    export.add_argument("run_folder", metavar="RUN", type=Path, help="a run folder")
    export.add_argument("--out", type=Path, metavar="REPOSITORY", help="the folder to make")
    export.add_argument(
        "--rare",
        type=_percents,
        default=(),
        metavar="P[,P…]",
        help="say what the ids of the last P %% of occurrences hold of the tables, and what test "
        "AUC costs without them; drops nothing, and needs no --out",
    )
    export.add_argument(
        "--drop-rare",
        type=float,
        metavar="P",
        help="leave these rows out of what is exported, and say so",
    )
    export.add_argument(
        "--check-raw",
        nargs="+",
        metavar="RAW",
        help="raw rows, as for predict: score 10,000 by what was exported and compare with predict",
    )
    export.add_argument(
        "--data", type=Path, help="what the run was trained on, where it is elsewhere now"
    )
    export.add_argument(
        "--best",
        action="store_true",
        help="the network of the epoch with the highest test AUC, not of the last one",
    )
    export.add_argument(
        "--trust-workflow",
        action="store_true",
        help="take the run's workflow, whose code runs as it is loaded, also where its manifest "
        "does not confirm it",
    )
    export.add_argument("--quiet", action="store_true", help="no bars")
    export.set_defaults(run=_export)


def _percents(text: str) -> list[float]:
    return [float(one) for one in text.split(",")]


def _export(arguments: argparse.Namespace) -> None:
    from merlin_cowclip.workflows.data.prepared_data import PreparedData
    from merlin_cowclip.workflows.folders import refuse_existing
    from merlin_cowclip.workflows.serving.export import export, rare_costs
    from merlin_cowclip.workflows.training.runs import Run

    if arguments.out is None and (arguments.drop_rare is not None or not arguments.rare):
        given = "neither" if arguments.drop_rare is None else "--drop-rare without --out"
        raise UserError(f"export needs --out, or --rare to look alone. Received: {given}")
    if arguments.out is not None:
        refuse_existing(arguments.out)
    run = Run.open(arguments.run_folder, trust_workflow=arguments.trust_workflow)
    options: dict[str, Any] = {
        "which": "best" if arguments.best else "last",
        "data": None if arguments.data is None else PreparedData.open(arguments.data),
        "progress": not arguments.quiet,
    }
    dropped = [] if arguments.drop_rare is None else [arguments.drop_rare]
    percents = [*dict.fromkeys([*arguments.rare, *dropped])]
    for cost in rare_costs(run, percents, **options) if percents else ():
        print(cost)
    if arguments.out is None:
        return
    repository = export(
        run,
        arguments.out,
        drop_rare=arguments.drop_rare,
        check_raw=arguments.check_raw,
        trust_workflow=arguments.trust_workflow,
        **options,
    )
    record = repository.record
    if arguments.check_raw is not None:
        print("--check-raw: the exported model answers as predict")
    print(f"{repository.path}: {len(record['columns'])} columns in, {record['output']} out")
    server = "tritonserver --backend-config=tensorflow,version=2"
    print(f"{server} --model-repository={repository.path.resolve()}")
    needed = ", ".join(f"{name} {version}" for name, version in record["packages"].items())
    print(f"needs beside its Python and TensorFlow backends: {needed}")
