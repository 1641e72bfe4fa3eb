"""The command that searches values at a batch size: tune."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from merlin_cowclip.workflows.commands.training import add_network, check_network
from merlin_cowclip.workflows.commands.values import by_field
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.study.configuration import BASE_OPTIONS, NETWORK, TuneConfig

if TYPE_CHECKING:
    from merlin_cowclip.workflows.commands.parser import Commands
    from merlin_cowclip.workflows.data.prepared_data import PreparedData
    from merlin_cowclip.workflows.training.configuration import TrainConfig


def add(commands: Commands) -> None:
    """The command, with its arguments."""
    tune = commands.add_parser(
        "tune",
        help="search learning rates, λ, clip and epochs at a batch size itself",
        description="By rows held out of the training part; the test part is never read. Starts "
        "from what every scaling rule predicts. Killed or stopped, it goes on where TUNE is named "
        "again; several processes may share one TUNE.",
    )
    tune.add_argument("data", type=Path, help="a prepared folder")
    tune.add_argument(
        "--out", type=Path, required=True, metavar="TUNE", help="the folder to write, or go on with"
    )
    tune.add_argument("--batch-size", type=int, help="samples per update, B, to tune at")
    search = tune.add_argument_group("the search")
    search.add_argument("--trials", type=int, default=40, metavar="N", help="in all (40)")
    search.add_argument(
        "--budget", type=float, metavar="MINUTES", help="about how long it may take (no end)"
    )
    search.add_argument("--epochs", type=int, help="the most that a trial trains (10)")
    search.add_argument(
        "--held-out", type=float, metavar="SHARE", help="of the training rows, to measure by (0.1)"
    )
    search.add_argument(
        "--seeds",
        type=int,
        default=3,
        metavar="K",
        help="from how many seeds the best are trained again (3)",
    )
    search.add_argument("--seed", type=int, help="of the search, weights and order (1234)")
    search.add_argument("--quiet", action="store_true", help="no bars, and only the last tables")
    base = tune.add_argument_group("the base, from which every rule predicts")
    base.add_argument(
        "--base",
        type=Path,
        metavar="TUNE0",
        help="what another tune found, at its batch size, for its network",
    )
    base.add_argument("--base-batch-size", type=int, help="where the values were tuned (1024)")
    base.add_argument("--dense-lr", type=float, help="η of the dense weights (each rule's own)")
    base.add_argument("--embedding-lr", type=float, help="η of the embeddings (1e-4)")
    base.add_argument("--l2", type=float, help="λ of the embeddings, Keras's convention (1e-5)")
    add_network(tune)
    tune.add_argument(
        "--determinism",
        action=argparse.BooleanOptionalAction,
        help="the same result to the last digit (default), or faster kernels on GPUs",
    )
    tune.set_defaults(run=_tune)


def _tune(arguments: argparse.Namespace) -> None:
    from merlin_cowclip.workflows.data.prepared_data import PreparedData

    config = tune_config(arguments)
    data = PreparedData.open(arguments.data)
    if arguments.base is not None:
        found_by(arguments.base, data)
    from merlin_cowclip.workflows.study.tune import tune

    tuned = tune(
        data,
        config,
        arguments.out,
        trials=arguments.trials,
        seeds=arguments.seeds,
        budget=arguments.budget,
        command=shlex.join(["merlin-cowclip", *sys.argv[1:]]),
        progress=not arguments.quiet,
    )
    print(tuned.tables())
    places = shlex.quote(str(arguments.data)), shlex.quote(str(arguments.out))
    print(f"\nmerlin-cowclip train {places[0]} --tuned {places[1]} --out RUN")


def found_by(tune: Path, data: PreparedData) -> TrainConfig:
    """What a tune found, on data of these columns.

    Raises:
        UserError: no tune that has ended, one on data of other columns, or one in another of
            Keras's precisions than commands train in.
    """
    from merlin_cowclip.workflows.study.tuned import Tuned

    tuned = Tuned.open(tune)
    precision = tuned.record["precision"]
    if precision != "float32":
        raise UserError(
            "values must be found in the precision that they are compared in, which is float32. "
            f"Received: {tune}, tuned in {precision}. Name a tune in float32"
        )
    tuned.check_columns(data)
    return tuned.train_config()


def tune_config(arguments: argparse.Namespace) -> TuneConfig:
    """What is to be searched; of a tune that is there, what the options do not say is its own.

    Raises:
        UserError: a bad value, options that exclude others, or no batch size.
    """
    values: dict[str, Any] = {}
    if os.path.isdir(arguments.out) and os.listdir(arguments.out):
        from merlin_cowclip.workflows.study.tuned import read_record

        values = dict(read_record(arguments.out)["config"])
    elif arguments.batch_size is None:
        raise UserError(
            "tune needs --batch-size, at which the values are searched. Received: none. Name it"
        )
    for name in ("batch_size", "epochs", "held_out", "seed"):
        if getattr(arguments, name) is not None:
            values[name] = getattr(arguments, name)
    if arguments.determinism is not None:
        values["deterministic"] = arguments.determinism
    network = {name: getattr(arguments, name) for name in NETWORK}
    network = {name: value for name, value in network.items() if value is not None}
    if "=" in network.get("combiner", ""):
        network["combiner"] = by_field("--combiner", network["combiner"])
    before = values.get("network", {})
    if network.get("model", before.get("model")) != before.get("model"):
        before = {}  # another network's options
    base = {key: getattr(arguments, option) for key, option in BASE_OPTIONS.items()}
    base = {key: value for key, value in base.items() if value is not None}
    if arguments.base is not None:
        if base:
            name = BASE_OPTIONS[min(base)].replace("_", "-")
            raise UserError(
                f"--base excludes --{name}. Received: --base {arguments.base} --{name} "
                f"{base[min(base)]}. Leave one out"
            )
        from merlin_cowclip.workflows.study.tuned import Tuned

        values["base"], before = Tuned.open(arguments.base).train_config(), {}
    elif base:
        values["base"] = {**(values.get("base") or {}), **base}
    config = TuneConfig.from_dict({**values, "network": {**before, **network}})
    check_network(config.network["model"], network)
    return config
