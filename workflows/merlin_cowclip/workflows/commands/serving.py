"""The command that makes a finished run ready for a server: export."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

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
    export.add_argument(
        "--out", required=True, type=Path, metavar="REPOSITORY", help="the folder to make"
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


def _export(arguments: argparse.Namespace) -> None:
    from merlin_cowclip.workflows.serving.export import export
    from merlin_cowclip.workflows.training.runs import Run

    repository = export(
        Run.open(arguments.run_folder, trust_workflow=arguments.trust_workflow),
        arguments.out,
        which="best" if arguments.best else "last",
        trust_workflow=arguments.trust_workflow,
        progress=not arguments.quiet,
    )
    record = repository.record
    print(f"{repository.path}: {len(record['columns'])} columns in, {record['output']} out")
    print(f"tritonserver --model-repository={repository.path.resolve()}")
    needed = ", ".join(f"{name} {version}" for name, version in record["packages"].items())
    print(f"needs beside its Python and TensorFlow backends: {needed}")
