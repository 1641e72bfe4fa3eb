# SPDX-License-Identifier: Apache-2.0
"""The command that searches hyperparameters at a batch size: tune."""

from __future__ import annotations

import functools
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from merlin_cowclip.plugins.scaling import K
from merlin_cowclip.workflows.commands import options as of
from merlin_cowclip.workflows.commands.training import paper_values
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.study.configuration import NETWORK, TuneConfig
from merlin_cowclip.workflows.training.configuration import TrainConfig

if TYPE_CHECKING:
    from merlin_cowclip.workflows.data.prepared_data import PreparedData

_OWN = ("batch_size", "epochs", "seed", "deterministic")
_VALUES = ("dense_lr", "embedding_lr", "l2", "clip_ratio", "clip_floor")
_BASE_OPTIONS = ("base_batch_size", *_VALUES[:3])
_SEARCH, _BASE = "The search", "A base, from which every rule predicts"
_search = functools.partial(of.option, group=_SEARCH)


@click.command(cls=of.Command, example="tune data --out tune --batch-size 8K --trials 20")
@of.argument("data", type=of.PATH)
@of.path("--out", "TUNE", "folder to write, or to resume", required=True)
@of.fields(TrainConfig, "batch_size", group="Options", batch_size="that of an existing TUNE")
@of.as_json
@of.quiet
@_search("--trials", type=int, default=40, metavar="N", help="trials in all")
@_search("--budget", type=float, metavar="MINUTES", help="stop after about this many minutes")
@of.fields(TrainConfig, "epochs", "seed", group=_SEARCH)
@_search("--seeds", type=int, default=3, metavar="K", help="seeds to repeat the best trials with")
@of.path("--base", "TUNE0", "result of another study, its batch size and network", group=_BASE)
@of.fields(TrainConfig, *_BASE_OPTIONS, group=_BASE, dense_lr="each rule's own; Avazu: the paper's")
@of.fields(TrainConfig, *NETWORK, "deterministic")
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
        print("Loading TensorFlow. The first trial takes longer.", flush=True)
    from merlin_cowclip.workflows.study.tune import tune

    command = shlex.join(["merlin-cowclip", *sys.argv[1:]])
    numbers = {name: values[name] for name in ("trials", "seeds", "budget")}
    tuned = tune(opened, config, out, command=command, progress=progress, **numbers)
    if values["json"]:
        return of.print_json({"folder": str(out), **tuned.result})
    print(tuned.tables())
    command = shlex.join(["merlin-cowclip", "train", str(data), "--tuned", str(out)])
    print(f"\nAt batch size {config.batch_size:,}: {command} --out RUN")


def tune_config(
    out: Path, options: Mapping[str, Any], data: PreparedData
) -> tuple[TuneConfig, str]:
    """What is to be searched, and the source of its base; "" for that of a study in `out`.

    Options that are left out are those of the study in `out`. A UserError for bad options.
    """
    values: dict[str, Any] = {}
    source = "none, so the search starts from settings that were best on other data"
    base = of.given({name.removeprefix("base_"): options[name] for name in _BASE_OPTIONS})
    if base and options["base"] is not None:
        raise UserError("--base excludes the other options of the base. Leave one out")
    if os.path.isdir(out) and os.listdir(out):
        from merlin_cowclip.workflows.study.tuned import read_record

        values, source = dict(read_record(out)["config"]), ""
    elif options["batch_size"] is None:
        raise UserError("tune needs --batch-size, at which hyperparameters are searched. Name it")
    elif base:
        size, name = base.get("batch_size", K), data.spec.name
        paper = paper_values(name, "cowclip", size) if name != "criteo" else None  # each rule's own
        values["base"] = {name: getattr(paper, name) for name in _VALUES} if paper else {}
        source = f"the paper's values for {name}" if paper else "each rule's hyperparameters"
        source += f" at batch size {size:,}; {', '.join(base)} as given"
    values |= of.given({name: options[name] for name in _OWN})
    values["network"] = {**values.get("network", {}), **of.given(options, NETWORK)}
    if base:
        values["base"] = {**(values["base"] or {}), **base}
    if options["base"] is not None:
        values["base"], source = found_by(options["base"], data), f"values of {options['base']}"
    return TuneConfig(**values), source


def found_by(tune: Path, data: PreparedData) -> TrainConfig:
    """The result of a finished study on data with the same columns."""
    from merlin_cowclip.workflows.study.tuned import Tuned

    tuned = Tuned.open(tune)
    tuned.check_columns(data)
    return tuned.train_config()
