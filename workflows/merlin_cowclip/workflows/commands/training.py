"""The command that trains networks: train."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from merlin_cowclip.plugins.scaling import (
    ADAPTIVE_CLIPS,
    CLIPS,
    CONSTANT_CLIPS,
    SCALING_RULES,
    scaling_table,
)
from merlin_cowclip.workflows.commands.values import add_schedules, by_field, schedules_of
from merlin_cowclip.workflows.errors import UserError, quoted
from merlin_cowclip.workflows.folders import refuse_existing
from merlin_cowclip.workflows.training.configuration import TrainConfig, base_hyperparameters
from merlin_cowclip.workflows.training.keeping import Keeping
from merlin_cowclip.workflows.training.networks import COMBINERS, NETWORKS
from merlin_cowclip.workflows.training.ranks import (
    agreed,
    check_offered,
    first_speaks,
    is_first,
)
from merlin_cowclip.workflows.training.stopping import check_minutes

if TYPE_CHECKING:
    from merlin_cowclip.workflows.commands.parser import Commands
    from merlin_cowclip.workflows.data.prepared_data import PreparedData
    from merlin_cowclip.workflows.study.tuned import Tuned


def add(commands: Commands) -> None:
    """The command, with its arguments."""
    train = commands.add_parser(
        "train",
        help="train a network on a prepared folder",
        description="The learning rates and λ are the ones tuned at --base-batch-size; the rule "
        "scales them to --batch-size.",
    )
    train.add_argument(
        "data",
        nargs="?",
        type=Path,
        help="a prepared folder; with --resume only where the data was moved",
    )
    train.add_argument("--out", type=Path, help="the run folder to write")
    train.add_argument(
        "--resume",
        type=Path,
        metavar="RUN",
        help="go on with a run that was stopped or killed, to the last bit as if it had not been; "
        "its configuration is its own, only --epochs may be raised",
    )
    train.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="a configuration in JSON (TrainConfig's), or a run folder to train as it was; the "
        "options here go before it",
    )
    train.add_argument(
        "--tuned",
        type=Path,
        metavar="TUNE",
        help="with what 'merlin-cowclip tune' found there; the options here go before it, and "
        "another --batch-size needs the --rule that scales the values to it",
    )
    _add_keeping(train)
    add_network(train)
    _add_recipe(train)
    train.set_defaults(run=_train)


def _add_keeping(train: argparse.ArgumentParser) -> None:
    keeping = train.add_argument_group("checkpoints, and the end")
    keeping.add_argument(
        "--checkpoint-every",
        metavar="N|Nm",
        help="updates, or minutes as in 10m, between checkpoints, beside that of each epoch's end",
    )
    keeping.add_argument(
        "--keep", type=int, help="how many of the last ones stay, beside the best epoch's (2)"
    )
    keeping.add_argument(
        "--saved-model",
        action=argparse.BooleanOptionalAction,
        help="end with a SavedModel in RUN/model, for serving (default), or without",
    )
    keeping.add_argument(
        "--max-minutes", type=float, metavar="N", help="stop after so long, saved; exit code 3"
    )
    keeping.add_argument(
        "--patience", type=int, metavar="N", help="stop after N epochs without a better test AUC"
    )
    keeping.add_argument("--quiet", action="store_true", help="no bars, and only the last line")


def add_network(train: argparse.ArgumentParser) -> None:
    """The options of `TrainConfig` that say which network is trained."""
    network = train.add_argument_group("the network")
    network.add_argument("--model", help=f"{', '.join(NETWORKS)} (default deepfm)")
    network.add_argument("--embedding-dim", type=int, help="width of the embeddings (10)")
    network.add_argument(
        "--mlp",
        type=units,
        metavar="UNITS,…",
        help="units of the deep stream's layers, in dlrm of the top MLP's (400,400,400)",
    )
    network.add_argument(
        "--cross-layers", type=int, metavar="N", help="of dcn and dcn_v2: depth of the cross (3)"
    )
    network.add_argument(
        "--low-rank-dim", type=int, metavar="N", help="of dcn_v2: rank of its matrices (full)"
    )
    network.add_argument(
        "--bottom-mlp",
        type=units_or_none,
        metavar="UNITS,…",
        help="of dlrm: units of the bottom MLP's layers but the last (512,256,64; '' is none); "
        "without numbers in the data there is none",
    )
    network.add_argument(
        "--combiner",
        metavar="NAME|FIELD=NAME,…",
        help=f"how a list's embeddings become one: {', '.join(COMBINERS)} (mean)",
    )


def _add_recipe(train: argparse.ArgumentParser) -> None:
    train.add_argument("--batch-size", type=int, help="samples per update (1024)")
    rules = ", ".join(SCALING_RULES)
    train.add_argument("--rule", help=f"{rules} (default cowclip)")
    train.add_argument("--epochs", type=int, help="passes over the data (default 10)")
    train.add_argument("--seed", type=int, help="of weights and order (1234)")
    train.add_argument(
        "--update",
        help="exact: L2 and Adam on every row, the paper (default); deferred: the same, on rows "
        "absent from a batch when they are read next; lazy: on the batch's rows alone",
    )
    train.add_argument(
        "--tables",
        help="of several ranks, each has all rows of all tables: replicated (default); or its part "
        "of them: sharded",
    )
    train.add_argument(
        "--determinism",
        action=argparse.BooleanOptionalAction,
        help="the same result to the last digit (default), or faster kernels on GPUs",
    )
    train.add_argument("--base-batch-size", type=int, help="where the values were tuned (1024)")
    train.add_argument("--dense-lr", type=float, help="η of the dense weights (cowclip: 8e-4)")
    train.add_argument("--embedding-lr", type=float, help="η of the embeddings (1e-4)")
    train.add_argument("--l2", type=float, help="λ of the embeddings, Keras's convention (1e-5)")
    train.add_argument("--clip", help=f"{', '.join(CLIPS)} (cowclip: adaptive_column)")
    train.add_argument("--clip-threshold", type=float, help="c of global, field and column")
    train.add_argument("--clip-ratio", type=float, help="r (1)")
    train.add_argument("--clip-floor", type=float, help="ζ (3.162e-5)")
    train.add_argument(
        "--clip-tables",
        type=names,
        metavar="NAME,…",
        help="fields or tables (embeddings, linear) to clip (all of width 2 and more)",
    )
    train.add_argument("--no-clip", action="store_true", help="no clip")
    train.add_argument("--no-warmup", action="store_true", help="no warm-up of the dense η")
    add_schedules(train)


def units(text: str) -> tuple[int, ...]:
    """The value of --mlp; argparse names this function where it refuses one."""
    return tuple(int(number) for number in text.split(","))


def units_or_none(text: str) -> tuple[int, ...]:
    """The value of --bottom-mlp, of which an empty text is no layer but the last."""
    return units(text) if text else ()


def names(text: str) -> list[str]:
    """The value of --clip-tables."""
    return text.split(",")


def _train(arguments: argparse.Namespace) -> None:
    with first_speaks():
        _train_here(arguments)


def _train_here(arguments: argparse.Namespace) -> None:
    with agreed():
        check_minutes(arguments.max_minutes)
    result = (_begin if arguments.resume is None else _go_on)(arguments)
    if not is_first():
        return
    if result["auc"] is None:
        quality = f"no test part, training loss {result['epochs'][-1]['train_loss']:.6f}"
    else:
        quality = f"test AUC {result['auc']:.6f}, log loss {result['log_loss']:.6f}"
    if not arguments.quiet:
        print(result["clip"])
        best = result["best_epoch"]
        if best not in (None, len(result["epochs"])):
            print(
                f"best after epoch {best}, test AUC {result['epochs'][best - 1]['auc']:.6f}: "
                "evaluate, predict and export take it by --best"
            )
    print(
        f"{quality}, {result['samples_per_second']:,.0f} samples/s, "
        f"{result['train_seconds']:.1f} s of training: {arguments.resume or arguments.out}"
    )


def _begin(arguments: argparse.Namespace) -> Mapping[str, Any]:
    """Train a new run."""
    with agreed():
        config, keeping, data, precision = _checked(arguments)
    from merlin_cowclip.workflows.training.reproducibility import in_precision
    from merlin_cowclip.workflows.training.train import train

    if is_first() and not arguments.quiet:
        in_it = "" if precision in (None, "float32") else f", {precision}"
        print(f"{config.model}, rule {config.rule}, {config.update} updates{in_it}")
        print(scaling_table(config.tuned, config.hyperparameters), flush=True)
    with in_precision(precision):
        run = train(
            data,
            config,
            arguments.out,
            keeping=keeping,
            max_minutes=arguments.max_minutes,
            values_from=arguments.tuned,
            progress=is_first() and not arguments.quiet,
        )
    return run.result


def _checked(
    arguments: argparse.Namespace,
) -> tuple[TrainConfig, Keeping, PreparedData, str | None]:
    """What a new run is to be, once nothing speaks against it, and in which of Keras's precisions.

    The precision is that of the run or tune whose values it takes; `None`: the process's.
    """
    from merlin_cowclip.workflows.data.prepared_data import PreparedData
    from merlin_cowclip.workflows.training.resuming import read_config

    for name in ("data", "out"):
        if getattr(arguments, name) is None:
            what = {"data": "the data, a prepared folder", "out": "--out, the run folder to write"}
            raise UserError(
                f"train needs {what[name]}. Received: none. Name it; or, to go on with a run, "
                "--resume RUN"
            )
    tuned = _open_tuned(arguments)
    config = train_config(arguments, None if tuned is None else tuned.train_config())
    like = None if tuned is None else tuned.record
    if arguments.config is not None and arguments.config.is_dir():
        like = read_config(arguments.config)
    given = {field.name: getattr(arguments, field.name) for field in fields(Keeping)}
    keeping = Keeping(**{name: value for name, value in given.items() if value is not None})
    check_offered(config)
    data = PreparedData.open(arguments.data)
    refuse_existing(arguments.out)
    if tuned is not None:
        tuned.check_columns(data)
    from merlin_cowclip.workflows.training.train import check

    check(data, config, arguments.out)
    return config, keeping, data, None if like is None else like["precision"]


def _open_tuned(arguments: argparse.Namespace) -> Tuned | None:
    """The tune of --tuned, if it is given.

    Raises:
        UserError: it goes with other options that say the same, or there is none that has ended.
    """
    if arguments.tuned is None:
        return None
    if arguments.config is not None:
        raise UserError(
            f"--tuned excludes --config. Received: --tuned {arguments.tuned}, --config "
            f"{arguments.config}. Leave one out"
        )
    from merlin_cowclip.workflows.study.tuned import Tuned

    return Tuned.open(arguments.tuned)


_WITH_RESUME = {"data", "epochs", "max_minutes", "quiet"}


def _go_on(arguments: argparse.Namespace) -> Mapping[str, Any]:
    """Train a run further."""
    ours = {"command", "run", "resume"} | _WITH_RESUME
    said = {name: value for name, value in vars(arguments).items() if name not in ours}
    unsaid = {name: False for name in ("no_clip", "no_warmup")}
    given = [name for name, value in said.items() if value is not unsaid.get(name)]
    with agreed():
        if given:
            options = ", ".join(f"--{name}" for name in given).replace("_", "-")
            raise UserError(
                "--resume goes with DATA, --epochs, --max-minutes and --quiet alone: the rest is "
                f"the run's own. Received: {options}. Leave it out"
            )
    from merlin_cowclip.workflows.training.train import resume

    run = resume(
        arguments.resume,
        epochs=arguments.epochs,
        data=arguments.data,
        max_minutes=arguments.max_minutes,
        progress=is_first() and not arguments.quiet,
    )
    return run.result


_BASE = {"batch_size": "base_batch_size"} | {
    name: name
    for name in (
        *("dense_lr", "embedding_lr", "l2"),
        *("clip", "clip_threshold", "clip_ratio", "clip_floor"),
    )
}

_OF_CLIPS = {
    "clip_tables": CLIPS,
    "clip_threshold": CONSTANT_CLIPS,
    "clip_ratio": ADAPTIVE_CLIPS,
    "clip_floor": ADAPTIVE_CLIPS,
}


def train_config(arguments: argparse.Namespace, tuned: TrainConfig | None = None) -> TrainConfig:
    """The configuration of --config, if there is one, with what the other options say instead.

    What they leave without a meaning in it goes with it; an option that has none is refused.

    Args:
        arguments: the command's.
        tuned: the configuration of --tuned.

    Raises:
        UserError: a bad value, a file that holds no configuration, or options that exclude others.
    """
    values = {} if arguments.config is None else _read_config(arguments.config)
    if tuned is not None:
        values = tuned.to_dict()
        _check_scaled(arguments, tuned)
    for option in ("clip", "clip_threshold"):
        value = getattr(arguments, option)
        if arguments.no_clip and value is not None:
            name = f"--{option.replace('_', '-')}"
            raise UserError(
                f"--no-clip excludes {name}. Received: --no-clip {name} {value}. Leave one out"
            )
    if arguments.rule is not None and tuned is None and values.get("base") is not None:
        raise UserError(
            f"--rule excludes a --config with a base, which belongs to its own rule. Received: "
            f"--rule {arguments.rule}, and base in {arguments.config}. Leave one out"
        )
    given = {field.name: getattr(arguments, field.name, None) for field in fields(TrainConfig)}
    given = {name: value for name, value in given.items() if value is not None}
    base = _base_of(arguments)
    values = {**_still_meant(values, given, base), **given}
    if arguments.combiner is not None and "=" in arguments.combiner:
        values["combiner"] = by_field("--combiner", arguments.combiner)
    values |= schedules_of(arguments)
    if arguments.determinism is not None:
        values["deterministic"] = arguments.determinism
    if base:
        before = values.get("base")
        values["base"] = {**(before if isinstance(before, dict) else {}), **base}
    config = TrainConfig.from_dict(values)
    check_network(config.model, given)
    for name in ("clip_ratio", "clip_floor"):
        if name in base and config.tuned.clip not in ADAPTIVE_CLIPS:
            raise UserError(
                f"--{name.replace('_', '-')} belongs to the clips {', '.join(ADAPTIVE_CLIPS)}. "
                f"Received: it with clip={config.tuned.clip!r}. Leave it out, or choose one of them"
            )
    return config


def check_network(model: str, said: Iterable[str]) -> None:
    """Refuse options of which a network makes nothing, as `lr` of the layers of others.

    Args:
        model: its name.
        said: options of the command line, by their names in Python.

    Raises:
        UserError: names the first, and the networks that have such a part.
    """
    its = NETWORKS.get(model, {})  # another name is refused elsewhere
    unused = (name for name in said if name in its and not its[name].used)
    for name in unused:
        having = [m for m, options in NETWORKS.items() if name in options and options[name].used]
        raise UserError(
            f"--{name.replace('_', '-')} belongs to {', '.join(having)}. Received: it with "
            f"model={model!r}. Leave it out, or choose another network"
        )


def _base_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the options say of the base."""
    base = {key: getattr(arguments, option) for key, option in _BASE.items()}
    base = {key: value for key, value in base.items() if value is not None}
    if arguments.no_clip:
        base["clip"] = None
    if arguments.no_warmup:
        base["warmup_epochs"] = 0.0
    return base


def _still_meant(
    values: dict[str, Any], given: Mapping[str, Any], base: Mapping[str, Any]
) -> dict[str, Any]:
    """What a configuration says that has a meaning beside the options given.

    The rest is what no option could unset: the options of a network that is no longer trained, and
    the values of a clip that is no longer meant. What the options say themselves is not looked at.

    Args:
        values: the configuration's.
        given: the options by `TrainConfig`'s names.
        base: what they say of the base.
    """
    before = values.get("base")
    before = before if isinstance(before, dict) else {}
    gone: set[str] = set()
    if given.get("model") in NETWORKS:
        gone |= {name for names in NETWORKS.values() for name in names}
        gone -= {*NETWORKS[given["model"]]}
    if "rule" in given and "clip" not in before:
        base = {"clip": base_hyperparameters(given["rule"]).clip, **base}
    if "clip" in base:
        gone |= {name for name, clips in _OF_CLIPS.items() if base["clip"] not in clips}
        if base["clip"] != before.get("clip"):
            gone.add("clip_threshold")  # of another unit in each of its clips
    kept = {name: value for name, value in values.items() if name not in gone}
    if before:
        kept["base"] = {name: value for name, value in before.items() if name not in gone}
    return kept


def _check_scaled(arguments: argparse.Namespace, tuned: TrainConfig) -> None:
    """Refuse tuned values at a batch size that they were not tuned at, without a rule.

    Raises:
        UserError: it is, or another base is named than the batch size that they were tuned at.
    """
    if arguments.base_batch_size not in (None, tuned.batch_size):
        raise UserError(
            f"the values of --tuned were tuned at batch size {tuned.batch_size}, which is their "
            f"base. Received: --base-batch-size {arguments.base_batch_size}. Leave it out"
        )
    if arguments.batch_size not in (None, tuned.batch_size) and arguments.rule is None:
        raise UserError(
            f"the values of --tuned are of batch size {tuned.batch_size}, from which a --rule "
            f"scales them to another. Received: --batch-size {arguments.batch_size} without one. "
            "Name it, or tune at that batch size"
        )


def _read_config(path: Path) -> dict[str, Any]:
    """A configuration's values from a JSON file or a run folder."""
    if os.path.isfile(path / "tuned.json"):  # which is false, too, of a name that is too long
        raise UserError(
            f"--config must be a file or a run folder. Received: {path}, what a tune found. Give "
            "it to --tuned"
        )
    if os.path.isdir(path):
        from merlin_cowclip.workflows.training.runs import Run

        return Run.open(path).train_config().to_dict()
    try:
        values = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_each_once)
    except OSError as error:
        raise UserError(
            f"--config must be a file that can be read, or a run folder. Received: {path}: "
            f"{error.strerror}. Name another"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"--config must be JSON in UTF-8. Received: {path}: {error}. Correct it"
        ) from None
    if not isinstance(values, dict):
        raise UserError(
            f"--config must hold values by name: {{...}}. Received: {path}, with something else. "
            "Correct it"
        )
    return values


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """What JSON calls an object; of a key that is there twice, Python would take the last."""
    keys = [key for key, _ in pairs]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise ValueError(f"{quoted(twice)} more than once")
    return dict(pairs)
