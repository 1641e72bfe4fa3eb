# SPDX-License-Identifier: Apache-2.0
"""The commands that use a finished run: evaluate, predict."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from merlin_cowclip.workflows.commands.options import (
    PATH,
    SIZE,
    Command,
    argument,
    as_json,
    option,
    print_json,
    quiet,
)
from merlin_cowclip.workflows.errors import UserError

if TYPE_CHECKING:
    from merlin_cowclip.workflows.training.runs import Run


checkpoint = option(
    "--checkpoint",
    "which",
    type=click.Choice(["last", "best"]),
    help="the last epoch, or the epoch with the highest AUC on the validation part",
    shown="best with --patience, else last",
)


def said_of(run: Run, which: str | None) -> str:
    """A network in words."""
    which = which or run.result["checkpoint"]
    epochs = len(run.result["epochs"])
    epoch = epochs if which == "last" else run.result["best_epoch"]
    return f"by the {which} checkpoint, epoch {epoch} of {epochs}"


def _scoring(function: Callable[..., Any]) -> Callable[..., Any]:
    for one in (
        *(quiet, checkpoint),
        option("--batch-size", type=SIZE, default=8192, help="rows predicted at a time"),
        option(
            "--raw",
            is_flag=True,
            help="adopted pipelines: the parquet holds raw rows, which the workflow encodes",
        ),
    ):
        function = one(function)
    return function


@click.command(cls=Command, example="evaluate run --checkpoint best")
@argument("run", type=PATH)
@argument("data", nargs=-1, metavar="[DATA|LOG...]")
@as_json
@_scoring
def evaluate(run: Path, data: tuple[str, ...], raw: bool, quiet: bool, **options: Any) -> None:
    """Evaluate a finished run: exact AUC, log loss and calibration.

    On the test part of the run's own data or of another prepared folder DATA, or on raw logs, as
    predict reads them.
    """
    from merlin_cowclip.workflows.data.prepared_data import RECORD, PreparedData
    from merlin_cowclip.workflows.training.runs import Run

    as_json, opened = options.pop("json"), Run.open(run)
    name = RECORD if opened.is_adopted else "."
    if not data or (len(data) == 1 and os.path.exists(os.path.join(data[0], name))):
        if raw:
            raise UserError("--raw needs raw logs, and this is prepared data. Remove --raw")
        prepared = PreparedData.open(data[0]) if data else opened.data()
        opened.check_vocabulary(prepared)
        from merlin_cowclip.workflows.training import evaluation
        from merlin_cowclip.workflows.training.loader import Loader

        loader = Loader(prepared, "test", batch_size=options["batch_size"])
        quality = evaluation.evaluate(opened.model(options["which"]), loader)
        part, rows, where = "test ", loader.rows, str(prepared.path)
    else:
        from merlin_cowclip.workflows.training.prediction import evaluate_logs

        quality, rows = evaluate_logs(opened, data, raw=raw, progress=not quiet, **options)
        part, where = "", f"{data[0]}{f' and {len(data) - 1} more' if data[1:] else ''}"
    if as_json:
        which = options["which"] or opened.result["checkpoint"]
        step = opened.result[f"{which}_step"]
        result = {"run": str(run), "data": where, "rows": rows, "checkpoint": which, "step": step}
        return print_json(result | quality._asdict())
    print(
        f"{part}AUC {quality.auc:.6f}, log loss {quality.log_loss:.6f}, calibration "
        f"{quality.calibration:.4f} on {rows:,} rows of {where}, "
        f"{said_of(opened, options['which'])}"
    )


@click.command(cls=Command, example="predict run new.txt.gz --out scores.parquet")
@argument("run", type=PATH)
@argument("input", nargs=-1, required=True, metavar="LOG...")
@option("--out", required=True, type=PATH, metavar="PARQUET", help="file to write")
@_scoring
def predict(run: Path, input: tuple[str, ...], out: Path, quiet: bool, **options: Any) -> None:
    """Write a finished run's probabilities for raw logs.

    A LOG, with or without the label, is a file or glob as prepare took the run's own, or parquet;
    for a run on an adopted pipeline, parquet that its workflow wrote. It is encoded by the run's
    own workflow. PARQUET has a row for each row read, in order: probability (float32) and, where
    there was a label, label (int8).
    """
    from merlin_cowclip.workflows.training.runs import Run

    opened = Run.open(run)
    from merlin_cowclip.workflows.training.prediction import predict_logs

    rows = predict_logs(opened, input, out, progress=not quiet, **options)
    print(f"{rows:,} rows, {said_of(opened, options['which'])}: {out}")
