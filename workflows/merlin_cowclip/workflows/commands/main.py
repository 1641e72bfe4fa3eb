"""The command `merlin-cowclip`: arguments in, exit codes out; the work is done elsewhere.

What the exit codes mean, and how every command ends in one sentence: `endings.py`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from merlin_cowclip.plugins.scaling import ADAPTIVE_CLIPS, CLIPS, SCALING_RULES, scaling_table
from merlin_cowclip.workflows.commands import endings
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.folders import refuse_existing
from merlin_cowclip.workflows.training.configuration import TrainConfig
from merlin_cowclip.workflows.training.learning_rates import SCHEDULES
from merlin_cowclip.workflows.training.networks import COMBINERS, NETWORKS

if TYPE_CHECKING:
    from merlin_cowclip.workflows.data.datasets import DatasetSpec

PROGRAM = "merlin-cowclip"


class Parser(argparse.ArgumentParser):
    """One that refuses in one sentence, without the usage, as the commands themselves do."""

    def error(self, message: str) -> NoReturn:
        """Exit with 2."""
        sentence = endings.one_line(f"{self.prog}: error: {message}")
        self.exit(2, f"{sentence}. See '{self.prog} --help'\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = _parser().parse_args(argv)
    return endings.run(f"{PROGRAM} {arguments.command}", lambda: arguments.run(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=PROGRAM,
        description="Train click-through-rate models with large batches and CowClip on NVIDIA "
        "Merlin.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    prepare = commands.add_parser("prepare", help="raw logs → ids, counts and parquet")
    prepare.add_argument("dataset", help="criteo, avazu, or the path of a TOML specification")
    prepare.add_argument("input", nargs="+", help="raw logs: files or globs, .gz as they are")
    prepare.add_argument("--out", required=True, type=Path, help="the prepared folder to write")
    prepare.add_argument("--seed", type=int, default=0, help="of split and shuffle (default 0)")
    prepare.add_argument(
        "--workers",
        type=int,
        default=0,
        help="Dask processes on this machine, on GPUs one per GPU (default: threads of this one)",
    )
    prepare.add_argument("--device", default="cpu", help="cpu (default) or gpu: cudf, dask-cuda")
    own = prepare.add_argument_group("instead of what the data set's description says").add_argument
    own("--split", help="random, sequential (the last rows) or time (the latest ones)")
    own("--test", type=float, help="share of the rows in the test part")
    own("--time-column", help="numbers, or text that sorts by time, for --split time")
    own(
        "--freq-threshold",
        metavar="N|FIELD=N,…",
        help="an id that occurs less often in the training part is unknown",
    )
    own(
        "--hash-buckets",
        metavar="N|FIELD=N,…",
        help="rows that unknown ids share by hash (1)",
    )
    own("--non-finite", help="inf and NaN: refuse (default), or take for missing")
    prepare.set_defaults(run=_prepare)

    frequencies = commands.add_parser(
        "frequencies",
        help="how often ids occur: coverage, rare ids by batch size, Figure 3; the top-k data",
        description="Writes frequencies.parquet (an id per row), summary.parquet (a field per row) "
        "and frequencies.png. With --top-k: a prepared folder with the k most frequent ids of each "
        "field and one for all others, as in Table 1 of the paper.",
    )
    frequencies.add_argument("data", type=Path, help="a prepared folder")
    frequencies.add_argument("--out", type=Path, help="the folder to write (DATA/frequencies)")
    frequencies.add_argument(
        "--batch-sizes", nargs="+", type=int, metavar="B", help="in samples (1024 to 131072)"
    )
    frequencies.add_argument(
        "--fields", nargs="+", metavar="FIELD", help="of the figure (default: three)"
    )
    frequencies.add_argument("--top-k", type=int, metavar="K", help="write the top-k data to --out")
    frequencies.set_defaults(run=_frequencies)

    adopt = commands.add_parser(
        "adopt",
        help="a saved NVTabular workflow and its parquet → a prepared folder",
        description="Checks parquet that an NVTabular workflow wrote, counts its ids and writes a "
        "prepared folder that refers to it: nothing is converted. Loading a workflow runs code "
        "from its folder (cloudpickle): adopt only your own.",
    )
    adopt.add_argument(
        "parquet", nargs="+", help="the training part: files, globs or folders of *.parquet"
    )
    adopt.add_argument(
        "--workflow", required=True, type=Path, help="a folder that nvtabular.Workflow.save wrote"
    )
    adopt.add_argument("--label", required=True, metavar="COLUMN", help="the column of 0 and 1")
    adopt.add_argument(
        "--test", nargs="+", metavar="PARQUET", help="the test part (default: none, no metrics)"
    )
    adopt.add_argument("--out", required=True, type=Path, help="the prepared folder to write")
    adopt.set_defaults(run=_adopt)

    train = commands.add_parser(
        "train",
        help="train a network on a prepared folder",
        description="The learning rates and λ are the ones tuned at --base-batch-size; the rule "
        "scales them to --batch-size.",
    )
    train.add_argument("data", type=Path, help="a prepared folder")
    train.add_argument("--out", required=True, type=Path, help="the run folder to write")
    train.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="a configuration in JSON (TrainConfig's), or a run folder to train as it was; the "
        "options here go before it",
    )
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
        type=units,
        metavar="UNITS,…",
        help="of dlrm: units of the bottom MLP's layers but the last (512,256,64)",
    )
    network.add_argument(
        "--combiner",
        metavar="NAME|FIELD=NAME,…",
        help=f"how a list's embeddings become one: {', '.join(COMBINERS)} (mean)",
    )
    train.add_argument("--batch-size", type=int, help="samples per update (1024)")
    rules = ", ".join(SCALING_RULES)
    train.add_argument("--rule", help=f"{rules} (default cowclip)")
    train.add_argument("--epochs", type=int, help="passes over the data (default 10)")
    train.add_argument("--seed", type=int, help="of weights and order (1234)")
    train.add_argument(
        "--update",
        help="exact: L2 and Adam on every row, the paper (default); lazy: on the batch's rows",
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
    for part in ("dense", "embedding"):
        train.add_argument(
            f"--{part}-schedule",
            metavar="NAME[:KEY=VALUE,…]",
            help=f"how that η falls: {', '.join(SCHEDULES)} (it stays), as in cosine:to=0.1, "
            "exponential:rate=0.5,epochs=1 or steps:5=0.1,8=0.01",
        )
    train.set_defaults(run=_train)

    evaluate = commands.add_parser("evaluate", help="exact AUC and log loss of a finished run")
    evaluate.add_argument("run_folder", metavar="RUN", type=Path, help="a run folder")
    evaluate.add_argument(
        "data", nargs="?", type=Path, help="a prepared folder (default: the run's own)"
    )
    evaluate.set_defaults(run=_evaluate)

    demo = commands.add_parser(
        "demo", help="synthetic logs → prepare → train with a small and a large batch → compare"
    )
    demo.add_argument("--out", type=Path, help="the folder to write (default runs/demo-TIME)")
    demo.add_argument("--rows", type=int, help="synthetic rows (default: minutes on 2 cores)")
    demo.set_defaults(run=_demo)
    return parser


def units(text: str) -> tuple[int, ...]:
    """The value of --mlp; argparse names this function where it refuses one."""
    return tuple(int(number) for number in text.split(","))


def names(text: str) -> list[str]:
    """The value of --clip-tables."""
    return text.split(",")


# TensorFlow takes seconds to import: each command imports what it needs, after the arguments parse.


def _prepare(arguments: argparse.Namespace) -> None:
    from merlin_cowclip.workflows.data.datasets import find_spec
    from merlin_cowclip.workflows.data.etl import prepare

    data = prepare(
        _changed_spec(find_spec(arguments.dataset), arguments),
        arguments.input,
        arguments.out,
        seed=arguments.seed,
        workers=arguments.workers,
        device=arguments.device,
    )
    ids = sum(data.cardinalities.values())
    print(
        f"{data.rows['train']:,} training and {data.rows['test']:,} test rows, {ids:,} ids in "
        f"{len(data.cardinalities)} fields: {data.path}"
    )
    for name, field in data.report["fields"].items():
        if field.get("not_finite"):
            print(f"{name}: {field['not_finite']:,} numbers that were not finite are missing")
        if "note" in field:
            print(f"{name}: {field['note']}")


def _changed_spec(spec: DatasetSpec, arguments: argparse.Namespace) -> DatasetSpec:
    """The spec with what the command line says instead."""
    import dataclasses

    changes: dict[str, Any] = {}
    kind = spec.split.kind if arguments.split is None else arguments.split
    column = spec.split.column if kind == "time" else None
    changes["split"] = dataclasses.replace(
        spec.split,
        kind=kind,
        test=spec.split.test if arguments.test is None else arguments.test,
        column=column if arguments.time_column is None else arguments.time_column,
    )
    for key in ("freq_threshold", "hash_buckets"):
        text = getattr(arguments, key)
        if text is not None:
            changes[key] = _number_or_by_field(f"--{key.replace('_', '-')}", text)
    if arguments.non_finite is not None:
        changes["non_finite"] = arguments.non_finite
    return dataclasses.replace(spec, **changes)


def _number_or_by_field(option: str, text: str) -> int | dict[str, int]:
    """The value of "10", or of "C3=10,C4=5"."""
    try:
        if "=" not in text:
            return int(text)
        pairs = [part.rsplit("=", 1) for part in text.split(",")]
        numbers = {field: int(number) for field, number in pairs}
    except ValueError:
        given = repr(text) if len(text) <= 60 else f"{text[:60]!r}…"
        raise UserError(
            f"{option} must be a number, or numbers by field: C3=10,C4=5. Received: {given}"
        ) from None
    fields = [field for field, _ in pairs]
    twice = sorted({field for field in fields if fields.count(field) > 1})
    if twice:
        raise UserError(
            f"{option} must name a field once. Received: {', '.join(map(repr, twice))} more than "
            "once. Leave all but one out"
        )
    return numbers


def _frequencies(arguments: argparse.Namespace) -> None:
    from merlin_cowclip.workflows.data.frequencies import BATCH_SIZES, frequencies
    from merlin_cowclip.workflows.data.prepared import PreparedData
    from merlin_cowclip.workflows.data.top_ids import keep_top_ids

    data = PreparedData.open(arguments.data)
    if arguments.top_k is None:
        found = frequencies(
            data,
            arguments.out,
            batch_sizes=arguments.batch_sizes or BATCH_SIZES,
            fields=arguments.fields,
        )
        print(found.table())
        print(
            "top 3 %: of occurrences, held by the three most frequent ids; ids for 90 %: how many "
            "hold 90 %;\nby batch size B: % of ids with P(id) < 1/B, whose learning rate must not "
            f"be scaled (Section 3.1).\n{found.rows:,} training rows: {found.path}"
        )
        return
    for option in ("batch_sizes", "fields"):
        if getattr(arguments, option) is not None:
            name = f"--{option.replace('_', '-')}"
            raise UserError(f"--top-k excludes {name}. Received: both. Leave one out")
    if arguments.out is None:
        raise UserError("--top-k needs --out, the folder to write. Received: none. Name one")
    top = keep_top_ids(data, arguments.top_k, arguments.out)
    print(
        f"{top.rows['train']:,} training and {top.rows['test']:,} test rows, "
        f"{sum(top.cardinalities.values()):,} ids in {len(top.cardinalities)} fields: {top.path}"
    )


def _adopt(arguments: argparse.Namespace) -> None:
    from merlin_cowclip.workflows.data.adopt import adopt

    data = adopt(
        arguments.parquet, arguments.workflow, arguments.label, arguments.out, arguments.test
    )
    for note in data.record["notes"]:
        print(note)
    test = f"{data.rows['test']:,}" if data.test_files else "no"
    print(
        f"{data.rows['train']:,} training and {test} test rows, "
        f"{sum(data.cardinalities.values()):,} ids in {len(data.cardinalities)} fields: {data.path}"
    )


def _train(arguments: argparse.Namespace) -> None:
    from merlin_cowclip.workflows.data.prepared import PreparedData

    config = _train_config(arguments)
    data = PreparedData.open(arguments.data)
    refuse_existing(arguments.out)
    from merlin_cowclip.workflows.training.train import check, train

    check(data, config, arguments.out)
    print(f"rule {config.rule}, {config.update} updates")
    print(scaling_table(config.tuned, config.hyperparameters), flush=True)
    run = train(data, config, arguments.out)
    result = run.result
    quality = f"no test part, training loss {result['epochs'][-1]['train_loss']:.6f}"
    if result["auc"] is not None:
        quality = f"test AUC {result['auc']:.6f}, log loss {result['log_loss']:.6f}"
    print(
        f"{quality}, {result['samples_per_second']:,.0f} samples/s, "
        f"{result['train_seconds']:.1f} s of training: {run.path}"
    )


_BASE = {"batch_size": "base_batch_size"} | {
    name: name
    for name in (
        *("dense_lr", "embedding_lr", "l2"),
        *("clip", "clip_threshold", "clip_ratio", "clip_floor"),
    )
}


def _train_config(arguments: argparse.Namespace) -> TrainConfig:
    """The configuration of --config, if there is one, with what the other options say instead."""
    values = {} if arguments.config is None else _read_config(arguments.config)
    for option in ("clip", "clip_threshold"):
        value = getattr(arguments, option)
        if arguments.no_clip and value is not None:
            name = f"--{option.replace('_', '-')}"
            raise UserError(
                f"--no-clip excludes {name}. Received: --no-clip {name} {value}. Leave one out"
            )
    if arguments.rule is not None and values.get("base") is not None:
        raise UserError(
            f"--rule excludes a --config with a base, which belongs to its own rule. Received: "
            f"--rule {arguments.rule}, and base in {arguments.config}. Leave one out"
        )
    given = {field.name: getattr(arguments, field.name, None) for field in fields(TrainConfig)}
    values |= {name: value for name, value in given.items() if value is not None}
    if arguments.combiner is not None and "=" in arguments.combiner:
        values["combiner"] = _by_field("--combiner", arguments.combiner)
    for option in ("dense_schedule", "embedding_schedule"):
        if getattr(arguments, option) is not None:
            values[option] = _schedule(f"--{option.replace('_', '-')}", getattr(arguments, option))
    if arguments.determinism is not None:
        values["deterministic"] = arguments.determinism
    base = {key: getattr(arguments, option) for key, option in _BASE.items()}
    base = {key: value for key, value in base.items() if value is not None}
    if arguments.no_clip:
        base |= {"clip": None, "clip_threshold": None}
    if arguments.no_warmup:
        base["warmup_epochs"] = 0.0
    if base:
        before = values.get("base")
        values["base"] = {**(before if isinstance(before, dict) else {}), **base}
    config = TrainConfig.from_dict(values)
    for name in ("clip_ratio", "clip_floor"):
        if name in base and config.tuned.clip not in ADAPTIVE_CLIPS:
            raise UserError(
                f"--{name.replace('_', '-')} belongs to the clips {', '.join(ADAPTIVE_CLIPS)}. "
                f"Received: it with clip={config.tuned.clip!r}. Leave it out, or choose one of them"
            )
    return config


def _read_config(path: Path) -> dict[str, Any]:
    """A configuration's values from a JSON file or a run folder."""
    if path.is_dir():
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
        raise ValueError(f"{', '.join(map(repr, twice))} more than once")
    return dict(pairs)


def _by_field(option: str, text: str) -> dict[str, str]:
    """The value of "genres=sum,tags=mean"."""
    found: dict[str, str] = {}
    for part in text.split(","):
        field, equals, value = part.rpartition("=")
        if not equals or not field or field in found:
            raise UserError(
                f"{option} must be FIELD=VALUE,… with each field once. Received: {text!r}, at "
                f"{part!r}"
            )
        found[field] = value
    return found


def _schedule(option: str, text: str) -> dict[str, Any]:
    """The value of "cosine:to=0.1", or of "steps:5=0.1,8=0.01"."""
    name, colon, rest = text.partition(":")
    pairs = _by_field(option, rest) if colon else {}
    try:
        if name == "steps":
            at = {"at": [float(epoch) for epoch in pairs]} if pairs else {}
            return {"name": name, **at, "factors": [float(value) for value in pairs.values()]}
        return {"name": name, **{key: float(value) for key, value in pairs.items()}}
    except ValueError:
        raise UserError(f"{option} must have numbers as its values. Received: {text!r}") from None


def _evaluate(arguments: argparse.Namespace) -> None:
    from merlin_cowclip.workflows.data.prepared import PreparedData
    from merlin_cowclip.workflows.training.runs import Run

    run = Run.open(arguments.run_folder)
    data = PreparedData.open(arguments.data) if arguments.data else run.data()
    if not data.test_files:
        raise UserError(
            f"the data must have a test part. Received: {data.path}, adopted without one. Name a "
            f"prepared folder that has one: 'merlin-cowclip evaluate {run.path} DATA'"
        )
    run.check_vocabulary(data)
    from merlin_cowclip.workflows.training.evaluation import EVALUATION_BATCH, evaluate
    from merlin_cowclip.workflows.training.loader import Loader

    quality = evaluate(run.model(), Loader(data, "test", batch_size=EVALUATION_BATCH))
    print(
        f"test AUC {quality.auc:.6f}, log loss {quality.log_loss:.6f} on "
        f"{data.rows['test']:,} rows of {data.path}"
    )


def _demo(arguments: argparse.Namespace) -> None:
    from merlin_cowclip.workflows.commands import demo

    out = arguments.out
    if out is None:
        out = Path("runs") / f"demo-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    rows = demo.ROWS if arguments.rows is None else arguments.rows
    demo.demo(out, rows=rows)


if __name__ == "__main__":
    sys.exit(main())
