"""The command `merlin-cowclip`: arguments in, exit codes out; the work is done elsewhere.

Exit codes: 0 done, 2 bad input (one sentence on stderr), 130 interrupted.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from merlin_cowclip.plugins.scaling import CLIPS, SCALING_RULES, K, scaling_table
from merlin_cowclip.workflows.errors import UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        arguments.run(arguments)
    except UserError as error:
        print(f"merlin-cowclip {arguments.command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"merlin-cowclip {arguments.command}: interrupted", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="merlin-cowclip",
        description="Train click-through-rate models with large batches and CowClip on NVIDIA "
        "Merlin.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    prepare = commands.add_parser("prepare", help="raw logs → ids, counts and parquet")
    prepare.add_argument("dataset", help="criteo, avazu, or the path of a TOML specification")
    prepare.add_argument("input", nargs="+", help="raw logs: files or globs, .gz as they are")
    prepare.add_argument("--out", required=True, type=Path, help="the prepared folder to write")
    prepare.add_argument("--seed", type=int, default=0, help="of split and shuffle (default 0)")
    prepare.set_defaults(run=_prepare)

    train = commands.add_parser(
        "train",
        help="train a network on a prepared folder",
        description="The learning rates and λ are the ones tuned at --base-batch-size; the rule "
        "scales them to --batch-size.",
    )
    train.add_argument("data", type=Path, help="a prepared folder")
    train.add_argument("--out", required=True, type=Path, help="the run folder to write")
    train.add_argument("--model", default="deepfm", help="the network (default deepfm)")
    train.add_argument("--batch-size", type=int, default=1 * K, help="samples per update (1024)")
    rules = ", ".join(SCALING_RULES)
    train.add_argument("--rule", default="cowclip", help=f"{rules} (default cowclip)")
    train.add_argument("--epochs", type=int, default=10, help="passes over the data (default 10)")
    train.add_argument("--seed", type=int, default=1234, help="of weights and order (1234)")
    train.add_argument(
        "--update",
        default="exact",
        help="exact: L2 and Adam on every row, the paper (default); lazy: on the batch's rows",
    )
    train.add_argument("--base-batch-size", type=int, help="where the values were tuned (1024)")
    train.add_argument("--dense-lr", type=float, help="η of the dense weights (cowclip: 8e-4)")
    train.add_argument("--embedding-lr", type=float, help="η of the embeddings (1e-4)")
    train.add_argument("--l2", type=float, help="λ of the embeddings, Keras's convention (1e-5)")
    train.add_argument("--clip", help=f"{', '.join(CLIPS)} (cowclip: adaptive_column)")
    train.add_argument("--clip-threshold", type=float, help="c of global, field and column")
    train.add_argument("--clip-ratio", type=float, help="r (1)")
    train.add_argument("--clip-floor", type=float, help="ζ (3.162e-5)")
    train.add_argument("--no-clip", action="store_true", help="no clip")
    train.add_argument("--no-warmup", action="store_true", help="no warm-up of the dense η")
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


# TensorFlow takes seconds to import: each command imports what it needs, after the arguments parse.


def _prepare(arguments: argparse.Namespace) -> None:
    from merlin_cowclip.workflows.datasets import find_spec
    from merlin_cowclip.workflows.etl import prepare

    data = prepare(
        find_spec(arguments.dataset), arguments.input, arguments.out, seed=arguments.seed
    )
    ids = sum(data.cardinalities.values())
    print(
        f"{data.rows['train']:,} training and {data.rows['test']:,} test rows, {ids:,} ids in "
        f"{len(data.cardinalities)} fields: {data.path}"
    )


def _train(arguments: argparse.Namespace) -> None:
    from merlin_cowclip.workflows.prepared import PreparedData

    data = PreparedData.open(arguments.data)
    from merlin_cowclip.workflows.training import TrainConfig, base_hyperparameters, check, train

    if arguments.no_clip and arguments.clip is not None:
        raise UserError(f"--no-clip excludes --clip. Received: --no-clip --clip {arguments.clip}")
    off: dict[str, Any] = {"warmup_epochs": 0.0} if arguments.no_warmup else {}
    base = base_hyperparameters(
        arguments.rule,
        batch_size=arguments.base_batch_size,
        dense_lr=arguments.dense_lr,
        embedding_lr=arguments.embedding_lr,
        l2=arguments.l2,
        clip=arguments.clip,
        clip_threshold=arguments.clip_threshold,
        clip_ratio=arguments.clip_ratio,
        clip_floor=arguments.clip_floor,
        **off,
    )
    if arguments.no_clip:
        base = base.replace(clip=None)
    config = TrainConfig(
        model=arguments.model,
        batch_size=arguments.batch_size,
        rule=arguments.rule,
        base=base,
        epochs=arguments.epochs,
        seed=arguments.seed,
        update=arguments.update,
    )
    check(data, config, arguments.out)
    print(f"rule {config.rule}, {config.update} updates")
    print(scaling_table(base, config.hyperparameters), flush=True)
    run = train(data, config, arguments.out)
    result = run.result
    print(
        f"test AUC {result['auc']:.6f}, log loss {result['log_loss']:.6f}, "
        f"{result['samples_per_second']:,.0f} samples/s, {result['train_seconds']:.1f} s of "
        f"training: {run.path}"
    )


def _evaluate(arguments: argparse.Namespace) -> None:
    from merlin_cowclip.workflows.prepared import PreparedData
    from merlin_cowclip.workflows.runs import Run

    run = Run.open(arguments.run_folder)
    data = PreparedData.open(arguments.data or run.config["data"])
    run.check_vocabulary(data)
    from merlin_cowclip.workflows.evaluation import EVALUATION_BATCH, evaluate
    from merlin_cowclip.workflows.loading import Loader

    quality = evaluate(run.model(), Loader(data, "test", batch_size=EVALUATION_BATCH))
    print(
        f"test AUC {quality.auc:.6f}, log loss {quality.log_loss:.6f} on "
        f"{data.rows['test']:,} rows of {data.path}"
    )


def _demo(arguments: argparse.Namespace) -> None:
    from merlin_cowclip.workflows import demo

    out = arguments.out
    if out is None:
        out = Path("runs") / f"demo-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    rows = demo.ROWS if arguments.rows is None else arguments.rows
    demo.demo(out, rows=rows)


if __name__ == "__main__":
    sys.exit(main())
