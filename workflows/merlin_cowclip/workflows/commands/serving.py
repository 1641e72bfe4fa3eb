"""The command `export`: a finished run as a Triton model repository."""

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
        help="export a finished run as a Triton model repository",
        description="Write a model repository for NVIDIA's Triton server, with Merlin Systems: raw "
        "rows without the label in, click probabilities out.",
    )
    export.add_argument("run_folder", metavar="RUN", type=Path, help="run folder")
    export.add_argument("--out", type=Path, metavar="REPOSITORY", help="folder to make")
    export.add_argument(
        "--backend",
        default="python",
        metavar="{python,tensorflow}",
        help="what runs the network: python, beside the workflow (default); tensorflow, Triton's "
        "TensorFlow backend, which servers up to 25.02 have",
    )
    export.add_argument(
        "--rare",
        type=_percents,
        default=(),
        metavar="P[,P…]",
        help="report the table size and test AUC if the rarest ids (P %% of occurrences) were "
        "dropped; needs no --out",
    )
    export.add_argument(
        "--drop-rare",
        type=float,
        metavar="P",
        help="drop the rarest ids (P %% of occurrences), and report as --rare",
    )
    export.add_argument(
        "--check-raw",
        nargs="+",
        metavar="RAW",
        help="raw rows, as for predict: score 10,000 with the exported model and compare with "
        "predict",
    )
    export.add_argument(
        "--data", type=Path, help="the run's data, for --rare and --drop-rare, if it has moved"
    )
    export.add_argument(
        "--best",
        action="store_true",
        help="export the model of the epoch with the highest test AUC, not the last one",
    )
    export.add_argument(
        "--trust-workflow",
        action="store_true",
        help="load the run's workflow, which runs its code, even if its manifest does not confirm "
        "it",
    )
    export.add_argument("--quiet", action="store_true", help="no progress bars")
    export.set_defaults(run=_export)


def _percents(text: str) -> list[float]:
    return [float(one) for one in text.split(",")]


def _export(arguments: argparse.Namespace) -> None:
    from merlin_cowclip.workflows.data.prepared_data import PreparedData
    from merlin_cowclip.workflows.folders import refuse_existing
    from merlin_cowclip.workflows.serving.export import export
    from merlin_cowclip.workflows.serving.rare_ids import rare_costs
    from merlin_cowclip.workflows.training.runs import Run

    if arguments.out is None and (arguments.drop_rare is not None or not arguments.rare):
        raise UserError("export needs --out REPOSITORY, or only --rare P for a report")
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
        backend=arguments.backend,
        drop_rare=arguments.drop_rare,
        check_raw=arguments.check_raw,
        trust_workflow=arguments.trust_workflow,
        **options,
    )
    record = repository.record
    if arguments.check_raw is not None:
        print("--check-raw: the exported model answers as predict")
    print(f"{repository.path}: {len(record['columns'])} columns in, {record['output']} out")
    version = " --backend-config=tensorflow,version=2" * (arguments.backend == "tensorflow")
    print(f"tritonserver{version} --model-repository={repository.path.resolve()}")
    needed = ", ".join(f"{name} {version}" for name, version in record["packages"].items())
    print(f"The server's Python needs: {needed}")
