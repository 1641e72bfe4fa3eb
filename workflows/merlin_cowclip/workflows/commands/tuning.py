# SPDX-License-Identifier: Apache-2.0
"""The command that searches values at a batch size: tune."""

from __future__ import annotations

import functools
import os
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from merlin_cowclip.plugins.scaling import K
from merlin_cowclip.workflows.commands.options import (
    PATH,
    Command,
    argument,
    fields,
    given,
    option,
    quiet,
)
from merlin_cowclip.workflows.commands.training import paper_values
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.study.configuration import NETWORK, TuneConfig
from merlin_cowclip.workflows.study.studies import VALUES
from merlin_cowclip.workflows.training.configuration import TrainConfig

if TYPE_CHECKING:
    from merlin_cowclip.workflows.data.prepared_data import PreparedData

_OWN = ("batch_size", "epochs", "seed", "deterministic")
_BASE_OPTIONS = ("base_batch_size", "dense_lr", "embedding_lr", "l2")
_SEARCH, _BASE = "The search", "A base, from which every rule predicts"
_search = functools.partial(option, group=_SEARCH)


@click.command(cls=Command, example="tune data --out tune --batch-size 8K --trials 20")
@argument("data", type=PATH)
@option("--out", type=PATH, required=True, metavar="TUNE", help="folder to write, or to resume")
@fields(TrainConfig, "batch_size", group="Options", batch_size="that of an existing TUNE")
@quiet
@_search(
    "--trials", type=int, default=40, metavar="N", help="trials in all; the first 3 to 10 are fixed"
)
@_search("--budget", type=float, metavar="MINUTES", help="stop after about this many minutes")
@fields(TrainConfig, "epochs", "seed", group=_SEARCH)
@_search("--seeds", type=int, default=3, metavar="K", help="seeds to retrain the best with")
@option(
    "--base",
    type=PATH,
    metavar="TUNE0",
    group=_BASE,
    help="result of another tune, its batch size and network",
)
@fields(TrainConfig, *_BASE_OPTIONS, group=_BASE, dense_lr="each rule's own; Avazu: the paper's")
@fields(TrainConfig, *NETWORK)
@fields(TrainConfig, "deterministic")
def tune(data: Path, out: Path, **values: Any) -> None:
    """Search hyperparameters directly at a given batch size.

    Learning rates, λ, clip and epochs, by the AUC on the validation part; the test part is never
    read. Starts from settings that were best on other data and, with a base, from what every
    scaling rule predicts. Run it again with the same TUNE to resume it; several processes may
    share one TUNE.
    """
    from merlin_cowclip.workflows.data.prepared_data import PreparedData

    opened, progress = PreparedData.open(data), not values["quiet"]
    config, source = tune_config(out, values, opened)
    if progress:
        print(f"Base: {source}" if source else f"Resuming {out}")
        print("Loading TensorFlow and the rows ...", flush=True)
    from merlin_cowclip.workflows.study.tune import tune

    tuned = tune(
        opened,
        config,
        out,
        trials=values["trials"],
        seeds=values["seeds"],
        budget=values["budget"],
        command=shlex.join(["merlin-cowclip", *sys.argv[1:]]),
        progress=progress,
    )
    print(tuned.tables())
    places = shlex.quote(str(data)), shlex.quote(str(out))
    train = f"merlin-cowclip train {places[0]} --tuned {places[1]} --out RUN"
    print(f"\nAt batch size {config.batch_size:,}: {train}")


def tune_config(
    out: Path, options: Mapping[str, Any], data: PreparedData
) -> tuple[TuneConfig, str]:
    """What is to be searched, and where its base comes from; "": it is that of a tune in `out`.

    Of a tune that is there, what the options do not say is its own.

    Raises:
        UserError: a bad value, options that exclude others, or no batch size.
    """
    values: dict[str, Any] = {}
    source = "none, so the search starts from settings that were best on other data"
    base = given({name.removeprefix("base_"): options[name] for name in _BASE_OPTIONS})
    network = given({name: options[name] for name in NETWORK})
    if base and options["base"] is not None:
        raise UserError("--base excludes the other options of the base. Leave one out")
    if os.path.isdir(out) and os.listdir(out):
        from merlin_cowclip.workflows.study.tuned import read_record

        values, source = dict(read_record(out)["config"]), ""
    elif options["batch_size"] is None:
        raise UserError(
            "tune needs --batch-size, at which the values are searched. Received: none. Name it"
        )
    elif base:
        values["base"], source = default_base(data, base.get("batch_size", K), base)
    values |= given({name: options[name] for name in _OWN})
    if options["base"] is not None:
        values |= {"base": found_by(options["base"], data), "network": network}
        source = f"values of {options['base']}"
    else:
        values["network"] = {**values.get("network", {}), **network}
        if base:
            values["base"] = {**(values["base"] or {}), **base}
    return TuneConfig(**values), source


def default_base(
    data: PreparedData, batch_size: int, own: Iterable[str]
) -> tuple[dict[str, float], str]:
    """Values of a base at a batch size, by `VALUES`, and what to say of them.

    Those of the paper for Avazu; Criteo's are each rule's, whose place none takes.
    """
    name = data.spec.name
    values = None if name == "criteo" else paper_values(name, "cowclip", batch_size)
    source = "each rule's default hyperparameters"
    if values is not None:
        source = f"the paper's values for {name}, tuned at {values.batch_size:,},"
    source += f" at batch size {batch_size:,}"
    if names := ", ".join(own):
        source += f"; {names} as given"
    return {} if values is None else {key: getattr(values, key) for key in VALUES}, source


def found_by(tune: Path, data: PreparedData) -> TrainConfig:
    """What a tune found; refuses no tune that has ended, and one on data of other columns."""
    from merlin_cowclip.workflows.study.tuned import Tuned

    tuned = Tuned.open(tune)
    tuned.check_columns(data)
    return tuned.train_config()
