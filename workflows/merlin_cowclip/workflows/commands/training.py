# SPDX-License-Identifier: Apache-2.0
"""The command that trains networks: train."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields as fields_of
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from merlin_cowclip.plugins.presets import PRESETS
from merlin_cowclip.plugins.scaling import Hyperparameters, K, scaling_table
from merlin_cowclip.workflows.commands.options import (
    PATH,
    Command,
    argument,
    as_json,
    fields,
    given,
    option,
    path,
    print_json,
    quiet,
)
from merlin_cowclip.workflows.errors import UserError, check_whole, clipped
from merlin_cowclip.workflows.folders import refuse_existing
from merlin_cowclip.workflows.training.configuration import (
    BASE_FIELDS,
    GROUP,
    NETWORKS,
    OPTIONS,
    CheckpointConfig,
    TrainConfig,
    base_fields,
    few_steps,
    option_text,
)
from merlin_cowclip.workflows.training.listeners import SERVICES, log_to
from merlin_cowclip.workflows.training.ranks import is_rank_zero, raise_on_any_rank

if TYPE_CHECKING:
    from merlin_cowclip.workflows.data.prepared_data import PreparedData
    from merlin_cowclip.workflows.training.runs import Run

_LOG_TO = "log to this service in addition to TensorBoard; may be repeated"
_MINUTES = "stop after N minutes with a checkpoint, and exit code 3"
_WITH_RESUME = {"resume", "data", "epochs", "max_minutes", "log_to", "json", "quiet"}


@click.command(
    cls=Command,
    usage=("DATA... --out RUN", "--resume RUN [DATA...]"),
    example="train data --out run --batch-size 8K --epochs 5",
    on_ranks=True,
)
@argument("data", type=PATH, nargs=-1)
@path("--out", "RUN", "run folder to write")
@path(
    "--resume",
    "RUN",
    "resume a stopped or killed run from its last checkpoint; the result is bit-identical to that "
    "of an uninterrupted run. Only --epochs may be raised; give DATA if it was moved",
)
@path("--config", "FILE", "JSON file or run folder with options; those given here override it")
@path("--tuned", "TUNE", "the result of a tuning study, scaled by --rule to another --batch-size")
@option(
    "--preset",
    type=click.Choice(["criteo", "avazu"]),
    help="the paper's hyperparameters for this data set",
    shown="hyperparameters of the rule",
)
@path("--warm-start", "RUN", "train a run's weights on new data, for one epoch at low rates")
@option("--keep-optimizer", is_flag=True, help="with --warm-start: its moments and steps, too")
@as_json
@quiet
@fields(TrainConfig)
@fields(CheckpointConfig)
@option("--log-to", type=click.Choice([*SERVICES]), multiple=True, group=GROUP, help=_LOG_TO)
@option("--max-minutes", type=float, metavar="N", group=GROUP, help=_MINUTES)
def train(**values: Any) -> None:
    """Train a network on a prepared folder, or resume a run.

    Learning rates and λ are those tuned at --base-batch-size; --rule scales them to --batch-size.
    """
    run = (_begin if values["resume"] is None else _resume)(values)
    if is_rank_zero() and values["json"]:
        result = {n: of for n, of in run.result.items() if n not in ("config", "manifest")}
        used = {n: run.config[n] for n in ("model", "rule", "batch_size", "scaled")}
        print_json({"run": str(run.path), **used, **result})
    elif is_rank_zero():
        _tell(run, brief=values["quiet"])


def _tell(run: Run, *, brief: bool) -> None:
    result, best = run.result, run.result["best_epoch"]
    quality = f"no test part, training loss {result['epochs'][-1]['train_loss']:.6f}"
    if result["auc"] is not None:
        quality = f"test AUC {result['auc']:.6f}, log loss {result['log_loss']:.6f}"
    if not brief:
        print(result["clip"])
        if best is not None and len(result["epochs"]) > 1:
            how = "" if result["checkpoint"] == "best" else " with --checkpoint best"
            print(
                f"epoch {best} of {len(result['epochs'])} has the highest validation AUC, "
                f"{result['epochs'][best - 1]['valid_auc']:.6f}: evaluate, predict and export use "
                f"it{how}"
            )
    print(
        f"{quality}, {result['samples_per_second']:,.0f} samples/s, "
        f"{result['train_seconds']:.1f} s of training: {run.path}"
    )


def _begin(values: Mapping[str, Any]) -> Run:
    """Train a new run."""
    from merlin_cowclip.workflows.data.prepared_data import PreparedData

    with raise_on_any_rank():
        for name, what in (("data", "DATA, a prepared folder"), ("out", "--out RUN")):
            if not values[name]:
                raise UserError(f"train needs {what}; or, to resume a run, --resume RUN")
        refuse_existing(values["out"])
        listeners = list(map(log_to, dict.fromkeys(values["log_to"])))
        if values["keep_optimizer"] and values["warm_start"] is None:
            raise UserError("--keep-optimizer needs --warm-start RUN")
        data = PreparedData.open_all(values["data"])
        config, source = train_config(values, data)
        checkpointing = CheckpointConfig(
            **given(values, (field.name for field in fields_of(CheckpointConfig)))
        )
    shows = is_rank_zero() and not values["quiet"]
    if shows:
        if values["warm_start"] is not None:
            source += f"; weights of {values['warm_start']}"
        rule = "hyperparameters not scaled" if config.rule == "none" else f"rule {config.rule}"
        print(f"{config.model}, {rule}, {config.update} updates; {source}")
        print(scaling_table(config.base, config.hyperparameters), flush=True)
        for name in ("dense_schedule", "embedding_schedule"):
            if schedule := getattr(config, name):
                print(f"{name}: {option_text(schedule)}", flush=True)
        if few := few_steps(data.rows["train"], config.batch_size):
            print(f"Warning: {few}", flush=True)
    from merlin_cowclip.workflows.training.train import train

    options = {name: values[name] for name in ("max_minutes", "warm_start", "keep_optimizer")}
    options |= {"checkpointing": checkpointing, "listeners": listeners, "progress": shows}
    return train(data, config, values["out"], **options)


def _resume(values: Mapping[str, Any]) -> Run:
    """Train a run further."""
    from merlin_cowclip.workflows.training.runs import read_config

    others = [n for n, v in values.items() if n not in _WITH_RESUME and v not in (None, False, ())]
    with raise_on_any_rank():
        if others:
            options = ", ".join(f"--{name}" for name in others).replace("_", "-")
            raise UserError(
                "--resume goes with DATA, --epochs, --max-minutes, --log-to, --json and --quiet "
                f"only: the rest is the run's own. Received: {options}. Leave it out"
            )
        if is_rank_zero():
            read_config(values["resume"])  # before TensorFlow's seconds of importing
        listeners = list(map(log_to, dict.fromkeys(values["log_to"])))
    from merlin_cowclip.workflows.training.train import resume

    kept = {name: values[name] for name in ("data", "epochs", "max_minutes")}
    kept |= {"listeners": listeners, "progress": is_rank_zero() and not values["quiet"]}
    return resume(values["resume"], **kept)


def train_config(values: Mapping[str, Any], data: PreparedData) -> tuple[TrainConfig, str]:
    """The configuration that options say, and where its hyperparameters come from.

    Later ones override earlier ones: the paper's values, a file or run, options.
    """
    options = given(values, (field.name for field in fields_of(TrainConfig)))
    others = [name for name in ("config", "preset") if values[name] is not None]
    where, why = values["tuned"] or values["config"], ""
    layer: dict[str, Any] = {}
    if values["tuned"] is not None:
        if others:
            raise UserError(f"--tuned excludes --{others[0]}. Leave one out")
        from merlin_cowclip.workflows.study.tuned import Tuned

        layer = _at_batch_size("--tuned", Tuned.open(where).train_config(data), options)
    elif values["config"] is not None:
        layer = _read_config(where)
    elif values["warm_start"] is not None and not others:
        where = values["warm_start"]
        layer, why = _warm_start(where, values["keep_optimizer"], options)
    base, source = layer, "hyperparameters of the rule"
    if values["preset"]:
        paper = _preset(values["preset"], {**layer, **options})
        source = f"the paper's values for {values['preset']} at batch size {paper.batch_size:,}"
        base = {**base_fields(paper), **layer}
    if set(BASE_FIELDS) <= set(layer):
        source = f"hyperparameters of {where}{why}"
    elif names := [name for name in layer if name not in options]:
        source += f"; {', '.join(names)} of {where}"
    if own := [name for name in BASE_FIELDS if name in options]:
        source += f"; {', '.join(own)} as given"
    if "model" in options:
        foreign = set(OPTIONS) - set(NETWORKS.get(options["model"], OPTIONS))
        base = {name: value for name, value in base.items() if name not in foreign}
    config = TrainConfig.from_dict({**base, **options})
    return config, source


def _warm_start(folder: Path, keep: bool, options: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Hyperparameters to train a run's weights further, and the reason for its learning rates."""
    from merlin_cowclip.workflows.training.runs import Run

    config = Run.open(folder).warm_start_config(keep_optimizer=keep)
    why = f", with learning rates {config.dense_lr:g} and {config.embedding_lr:g}, constant and low"
    return _at_batch_size("--warm-start", config, options), f"{why} to keep what it learned"


def _at_batch_size(name: str, config: TrainConfig, options: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters of the option `name`; another batch size needs a rule to scale them."""
    if options.get("batch_size", config.batch_size) != config.batch_size and "rule" not in options:
        raise UserError(
            f"hyperparameters of {name} are for batch size {config.batch_size}. Received: "
            f"--batch-size {options['batch_size']} without --rule. "
            "Add one to scale them, such as --rule sqrt"
        )
    return config.to_dict()


def _preset(dataset: str, options: Mapping[str, Any]) -> Hyperparameters:
    """The paper's for a rule at the nearest batch size; for other rules CowClip's at 1K.

    Where `options` have some of the hyperparameters, the batch size is that of their base.
    """
    size = "base_batch_size" if any(name in options for name in BASE_FIELDS) else "batch_size"
    wanted, rule = options.get(size, K), options.get("rule", TrainConfig.rule)
    check_whole(size, wanted, 1)
    table = {b: values for (d, r, b), values in PRESETS.items() if (d, r) == (dataset, rule)}
    table = table or {K: PRESETS[dataset, "cowclip", K]}
    return table[min(table, key=lambda b: abs(math.log(wanted / b)))]


def _read_config(path: Path) -> dict[str, Any]:
    """A configuration's values from a JSON file or a run folder."""
    if path.is_dir():
        from merlin_cowclip.workflows.training.runs import config_in, read_config

        return config_in(read_config(path)).to_dict()
    try:
        return {**json.loads(path.read_text(encoding="utf-8"))}
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UserError(
            f"--config must be a JSON file or a run folder. Received: {path}: {clipped(str(error))}"
        ) from None
