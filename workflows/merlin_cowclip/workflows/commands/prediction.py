"""The commands that use a finished run: evaluate, predict."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from merlin_cowclip.workflows.commands.options import (
    PATH,
    SIZE,
    Command,
    argument,
    option,
    quiet,
    trust_workflow,
)
from merlin_cowclip.workflows.errors import Notice, UserError

if TYPE_CHECKING:
    from merlin_cowclip.workflows.training.evaluation import Quality
    from merlin_cowclip.workflows.training.runs import Run


def checkpoint(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say which of a run's networks is used."""
    one = option(
        "--checkpoint",
        "which",
        type=click.Choice(["last", "best"]),
        help="the network at the end, or after the epoch with the highest test AUC",
        shown="last",
    )
    other = option("--best", is_flag=True, help="the same as --checkpoint best")
    return one(other(function))


def which_of(which: str | None, *, best: bool) -> str:
    """Which network is used: "last" or "best".

    Raises:
        UserError: options that exclude each other.
    """
    if best and which == "last":
        raise UserError("--best excludes --checkpoint last. Received: both. Leave one out")
    return "best" if best else which or "last"


def said_of(run: Run, which: str) -> str:
    """A network in words."""
    epochs = len(run.result["epochs"])
    epoch = epochs if which == "last" else run.result["best_epoch"]
    return f"by the {which} checkpoint, epoch {epoch} of {epochs}"


def _reading(function: Callable[..., Any]) -> Callable[..., Any]:
    options = (
        option(
            "--raw",
            is_flag=True,
            help="of a run on an adopted pipeline: the parquet is what its workflow reads",
        ),
        option("--batch-size", type=SIZE, help="rows predicted at a time", shown="8192"),
        *(checkpoint, trust_workflow, quiet),
    )
    for one in reversed(options):
        function = one(function)
    return function


@click.command(cls=Command, example="evaluate run --checkpoint best")
@argument("run", type=PATH)
@argument("data", nargs=-1, metavar="[DATA|LOG...]")
@_reading
def evaluate(run: Path, data: tuple[str, ...], raw: bool, **values: Any) -> None:
    """Measure a finished run: exact AUC, log loss and calibration.

    On the test part of the run's own data or of another prepared folder DATA, or on raw logs, as
    predict reads them.
    """
    from merlin_cowclip.workflows.training.runs import Run

    opened = Run.open(run, trust_workflow=values["trust_workflow"])
    name = "prepare.json" if opened.is_adopted else "."
    prepared = not data or (len(data) == 1 and os.path.exists(os.path.join(data[0], name)))
    if prepared and raw:
        raise UserError(
            "--raw is for raw logs. Received: it with prepared data, "
            f"{data[0] if data else 'the own of the run'}. Leave it out, or name raw logs"
        )
    reading = _read_by(values)
    if prepared:
        part, (quality, rows, where) = "test ", _on_prepared(opened, data, reading)
    else:
        from merlin_cowclip.workflows.training.prediction import evaluate_logs

        part, where = "", f"{data[0]}{f' and {len(data) - 1} more' if data[1:] else ''}"
        quality, rows = evaluate_logs(opened, data, raw=raw, **reading)
    print(
        f"{part}AUC {quality.auc:.6f}, log loss {quality.log_loss:.6f}, calibration "
        f"{quality.calibration:.4f} on {rows:,} rows of {where}, "
        f"{said_of(opened, reading['which'])}"
    )


@click.command(cls=Command, example="predict run new.txt.gz --out scores.parquet")
@argument("run", type=PATH)
@argument("input", nargs=-1, required=True, metavar="LOG...")
@option("--out", required=True, type=PATH, metavar="PARQUET", help="file to write")
@_reading
def predict(run: Path, input: tuple[str, ...], out: Path, raw: bool, **values: Any) -> None:
    """Write a finished run's probabilities for raw logs.

    A LOG, with or without the label, is a file or glob as prepare took the run's own, or parquet;
    for a run on an adopted pipeline, parquet that its workflow wrote. It is encoded by the run's
    own workflow. PARQUET has a row for each row read, in order: probability (float32) and, where
    there was a label, label (int8).
    """
    from merlin_cowclip.workflows.training.runs import Run

    opened = Run.open(run, trust_workflow=values["trust_workflow"])
    reading = _read_by(values)
    from merlin_cowclip.workflows.training.prediction import predict_logs

    rows = predict_logs(opened, input, out, raw=raw, **reading)
    print(f"{rows:,} rows, {said_of(opened, reading['which'])}: {out}")


def _read_by(values: dict[str, Any]) -> dict[str, Any]:
    options = {
        "which": which_of(values["which"], best=values["best"]),
        "trust_workflow": values["trust_workflow"],
        "progress": not values["quiet"],
    }
    return options | ({} if values["batch_size"] is None else {"batch_size": values["batch_size"]})


def _on_prepared(
    run: Run, given: tuple[str, ...], reading: dict[str, Any]
) -> tuple[Quality, int, str]:
    """Quality on the test part of prepared data, its rows, and where it lies."""
    from merlin_cowclip.workflows.data.prepared_data import PreparedData
    from merlin_cowclip.workflows.training.runs import how_to_evaluate

    data = PreparedData.open(given[0]) if given else run.data()
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

    loader = Loader(data, "test", batch_size=reading.get("batch_size", EVALUATION_BATCH))
    quality = evaluate(run.model(reading["which"]), loader)
    return quality, data.rows["test"], str(data.path)
