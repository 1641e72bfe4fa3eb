"""The commands that use a finished run: evaluate, predict."""

from __future__ import annotations

import argparse
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from merlin_cowclip.workflows.errors import Notice, UserError

if TYPE_CHECKING:
    from merlin_cowclip.workflows.commands.parser import Commands
    from merlin_cowclip.workflows.training.evaluation import Quality
    from merlin_cowclip.workflows.training.runs import Run


def add(commands: Commands) -> None:
    """The two, with their arguments."""
    evaluate = commands.add_parser(
        "evaluate", help="exact AUC, log loss and calibration of a finished run"
    )
    evaluate.add_argument("run_folder", metavar="RUN", type=Path, help="a run folder")
    evaluate.add_argument(
        "data",
        nargs="*",
        help="a prepared folder (default: the run's own), or raw logs: files or globs, as for "
        "predict",
    )
    _add_reading(evaluate)
    evaluate.set_defaults(run=_evaluate, more_in="data")
    predict = commands.add_parser(
        "predict",
        help="a finished run's probabilities for raw logs",
        description="Encodes raw logs by the run's own workflow, and writes a row for each row "
        "read, in order: probability (float32) and, where there was a label, label (int8).",
    )
    predict.add_argument("run_folder", metavar="RUN", type=Path, help="a run folder")
    predict.add_argument(
        "input",
        nargs="+",
        help="raw logs, with or without the label: files or globs, as prepare took the run's own, "
        "or parquet; for a run on an adopted pipeline, parquet that its workflow wrote",
    )
    predict.add_argument("--out", required=True, type=Path, help="the parquet file to write")
    _add_reading(predict)
    predict.set_defaults(run=_predict)


def _add_reading(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--raw",
        action="store_true",
        help="for a run on an adopted pipeline: the parquet is what its workflow reads",
    )
    command.add_argument("--batch-size", type=int, help="rows predicted at a time (8192)")
    command.add_argument(
        "--best",
        action="store_true",
        help="the network of the epoch with the highest test AUC, not of the last one",
    )
    command.add_argument(
        "--trust-workflow",
        action="store_true",
        help="run the code of the run's workflow also where its manifest does not confirm it",
    )
    command.add_argument("--quiet", action="store_true", help="no bars")


def _evaluate(arguments: argparse.Namespace) -> None:
    from merlin_cowclip.workflows.training.runs import Run

    run = Run.open(arguments.run_folder, trust_workflow=arguments.trust_workflow)
    given = arguments.data
    if run.is_adopted:
        prepared = not given or (len(given) == 1 and os.path.exists(f"{given[0]}/prepare.json"))
    else:
        prepared = not given or (len(given) == 1 and os.path.isdir(given[0]))
    if prepared and arguments.raw:
        raise UserError(
            "--raw is for raw logs. Received: it with prepared data, "
            f"{given[0] if given else 'the own of the run'}. Leave it out, or name raw logs"
        )
    if prepared:
        part, (quality, rows, where) = "test ", _on_prepared(run, arguments)
    else:
        from merlin_cowclip.workflows.training.prediction import evaluate_logs

        part, where = "", f"{given[0]}{f' and {len(given) - 1} more' if given[1:] else ''}"
        quality, rows = evaluate_logs(run, given, **_reading(arguments))
    print(
        f"{part}AUC {quality.auc:.6f}, log loss {quality.log_loss:.6f}, calibration "
        f"{quality.calibration:.4f} on {rows:,} rows of {where}"
    )


def _on_prepared(run: Run, arguments: argparse.Namespace) -> tuple[Quality, int, str]:
    """Quality on the test part of prepared data, its rows, and where it lies."""
    from merlin_cowclip.workflows.data.prepared_data import PreparedData
    from merlin_cowclip.workflows.training.runs import how_to_evaluate

    data = PreparedData.open(arguments.data[0]) if arguments.data else run.data()
    if not data.test_files:
        raise UserError(
            f"the data must have a test part. Received: {data.path}, adopted without one. Name a "
            f"prepared folder that has one: {how_to_evaluate(run.path)}"
        )
    run.check_vocabulary(data)
    source = data.record.get("derived_from", {})
    if "held_out" in source and source["train_sha256"] == run.config["train_sha256"]:
        warnings.warn(
            f"the test part of {data.path} was held out of the training part of {source['path']}, "
            f"on all of which {run.path} was trained: this is no AUC of rows that it has not seen",
            Notice,
            stacklevel=2,
        )
    from merlin_cowclip.workflows.training.evaluation import EVALUATION_BATCH, evaluate
    from merlin_cowclip.workflows.training.loader import Loader

    size = EVALUATION_BATCH if arguments.batch_size is None else arguments.batch_size
    quality = evaluate(run.model(_which(arguments)), Loader(data, "test", batch_size=size))
    return quality, data.rows["test"], str(data.path)


def _predict(arguments: argparse.Namespace) -> None:
    from merlin_cowclip.workflows.training.prediction import predict_logs
    from merlin_cowclip.workflows.training.runs import Run

    run = Run.open(arguments.run_folder, trust_workflow=arguments.trust_workflow)
    rows = predict_logs(run, arguments.input, arguments.out, **_reading(arguments))
    print(f"{rows:,} rows: {arguments.out}")


def _reading(arguments: argparse.Namespace) -> dict[str, Any]:
    options = {
        "raw": arguments.raw,
        "which": _which(arguments),
        "trust_workflow": arguments.trust_workflow,
        "progress": not arguments.quiet,
    }
    return options | ({} if arguments.batch_size is None else {"batch_size": arguments.batch_size})


def _which(arguments: argparse.Namespace) -> str:
    return "best" if arguments.best else "last"
